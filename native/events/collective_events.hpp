// A collective played transfer by transfer: when does the last byte arrive?
//
// Ranks sit around one switch. A rank's link carries what it sends and what it receives at the same
// time, each up to the link's rate. Transfers between the same two ranks share one connection and
// go one after another, first ready first sent. Connections that meet on a link share it max-min
// fairly. A transfer is delivered `latency_s` after its last byte left, and counts as received once
// the receiver has added it up (`add_s`, by size class; zero where nothing is added).

#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace fullwire {

// One part of a plan, as columns in order of rounds (collectives/plan.py).
struct Part {
    std::span<const std::int32_t> round;
    std::span<const std::int32_t> source;
    std::span<const std::int32_t> target;
    std::span<const std::uint8_t> size_class;
};

struct SizeClass {
    double bytes;
    double add_s;
};

struct Wires {
    std::uint32_t workers;
    double bytes_per_s;
    double latency_s;
};

struct Outcome {
    double time_s;
    std::uint64_t transfers;
};

// Plays `chunks` copies of the plan, each with the sizes given: all at once, or, if `serial`, each
// beginning when the one before it has ended everywhere. `pause` is called now and then, and may
// throw. The columns must hold together (bindings.cpp sees to it); a rate, latency, size or number
// of chunks that cannot be throws std::invalid_argument.
Outcome play(const Wires& wires, const std::vector<Part>& parts,
             const std::vector<SizeClass>& sizes, std::uint32_t chunks, bool serial,
             const std::function<void()>& pause);

}  // namespace fullwire
