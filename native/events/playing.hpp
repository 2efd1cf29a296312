// A collective played transfer by transfer over the links of a cluster: when does the last byte arrive?
//
// A transfer uses every link of its connection's route at once. Connections that meet on a link share
// it max-min fairly; transfers of one connection go one after another, first ready first sent, and
// those that become ready at the same instant in the order of chunks, parts and stages. A transfer is
// delivered `latency_s` of its connection after its last byte left, and counts as received once it was
// added up. Within a part and a chunk, a seat sends in a round only after it has received everything
// that earlier rounds sent to it, and what it sent in earlier rounds has left.
//
// Connections that do the same at the same times may be played as one: it then stands for `stands_for`
// of them, and crosses each of its links `weight` times, which is how many of them meet there.

#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace fullwire {

// One part of a plan (collectives/stages.py): stages in order, and the connections that transfer in
// each.
struct StagedPart {
    std::span<const std::int64_t> rounds;       // by stage
    std::span<const std::int64_t> edges_begin;  // where a stage's connections begin; one more
    std::span<const std::int32_t> connection;
    std::span<const double> bytes;  // of each transfer, as connections are listed
    std::span<const double> add_s;
};

struct Routing {
    std::uint32_t seats;
    std::span<const double> bytes_per_s;  // by link
    std::span<const std::int32_t> source, target;  // seats, by connection
    std::span<const double> latency_s;
    std::span<const std::int64_t> stands_for;
    std::span<const std::int64_t> crossings_begin;  // where a connection's links begin; one more
    std::span<const std::int32_t> link;
    std::span<const std::int32_t> weight;
};

struct Played {
    double time_s;
    std::uint64_t transfers;
};

// Plays `chunks` copies of the plan, each with the sizes given: all at once, or, if `serial`, each
// beginning when the one before it has ended everywhere. `pause` is told now and then how many
// transfers were received, and may throw.
Played play(const Routing& routing, const std::vector<StagedPart>& parts, std::uint32_t chunks,
            bool serial, const std::function<void(std::uint64_t)>& pause);

}  // namespace fullwire
