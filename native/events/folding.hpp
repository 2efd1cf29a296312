// What is alike in a network of connections: the coarsest classes of seats, connections and links such
// that all of a class meet as many of every other class. Members of a class then do the same at the
// same times, because the fair shares of links are unique, so one of them can be played for all.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace fullwire {

struct Meeting {
    std::span<const std::int32_t> source, target;  // seats, by connection
    std::span<const std::int64_t> crossings_begin; // where a connection's links begin; one more
    std::span<const std::int32_t> link;
};

// The class of every seat, connection and link, numbered from 0 for each kind in the order of their
// first members.
struct Classes {
    std::vector<std::int32_t> seats, connections, links;
};

// `connections` and `links` are begun with: only those of one number can be alike.
Classes folded(std::uint32_t seats, const Meeting& meeting,
               std::span<const std::int32_t> connections, std::span<const std::int32_t> links);

}  // namespace fullwire
