// Scans damaged profiler traces whole and in pieces, and holds the one against the other.
//
//     damaged_traces TRACES    a file of traces, each after its length
//
// Built with sanitizers by damaged_traces.py. Each piece lies in memory of its own, so that a look
// beyond it is seen.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <random>
#include <string>

#include "scans/kineto_scan.hpp"

namespace {

constexpr std::size_t kMostValueBytes = 1 << 20;

template <typename Size>
fullwire::KinetoScanner scanned(const std::string& trace, Size next) {
    fullwire::KinetoScanner scanner(kMostValueBytes);
    for (std::size_t at = 0; at < trace.size();) {
        const std::size_t size = std::min(trace.size() - at, next());
        const std::unique_ptr<char[]> piece(new char[size]);
        std::copy_n(trace.data() + at, size, piece.get());
        scanner.feed({piece.get(), size});
        at += size;
    }
    return scanner;
}

bool are_alike(const fullwire::KinetoScanner& one, const fullwire::KinetoScanner& other) {
    return one.is_whole() == other.is_whole() && one.damage() == other.damage() &&
           one.events() == other.events() && one.unusable() == other.unusable() &&
           one.header() == other.header() && one.names.all() == other.names.all() &&
           one.work.start_ns == other.work.start_ns && one.work.name == other.work.name &&
           one.work.correlation == other.work.correlation && one.work.note == other.work.note &&
           one.work.device == other.work.device && one.work.stream == other.work.stream &&
           one.launches.time_ns == other.launches.time_ns &&
           one.operators.end_ns == other.operators.end_ns &&
           one.marks.start_ns == other.marks.start_ns && one.marks.note == other.marks.note &&
           one.notes.ranks == other.notes.ranks && one.notes.in_elements == other.notes.in_elements;
}

bool is_sound(const fullwire::KinetoScanner& scanner) {
    const auto names = static_cast<std::int32_t>(scanner.names.all().size());
    const auto notes = static_cast<std::int32_t>(scanner.notes.op.size());
    const auto is_name = [&](std::int32_t each) { return each >= 0 && each < names; };
    const auto is_note = [&](std::int32_t each) { return each >= -1 && each < notes; };
    return std::ranges::all_of(scanner.work.name, is_name) &&
           std::ranges::all_of(scanner.marks.name, is_name) &&
           std::ranges::all_of(scanner.notes.op, is_name) &&
           std::ranges::all_of(scanner.work.note, is_note) &&
           std::ranges::all_of(scanner.marks.note, is_note);
}

}  // namespace

int main(int, char** given) {
    std::ifstream file(given[1], std::ios::binary);
    std::mt19937 chance(1);
    std::uint32_t length = 0;
    int count = 0, whole = 0;
    for (std::string trace; file.read(reinterpret_cast<char*>(&length), sizeof length); ++count) {
        trace.resize(length);
        file.read(trace.data(), length);
        const std::size_t longest = 1 + chance() % 300;
        const auto at_once = scanned(trace, [&] { return trace.size(); });
        const auto in_pieces = scanned(trace, [&] { return 1 + chance() % longest; });
        whole += at_once.is_whole();
        if (!is_sound(at_once) || !are_alike(at_once, in_pieces)) {
            std::fprintf(stderr, "trace %d: not the same whole and in pieces\n", count);
            return 1;
        }
    }
    std::printf("%d %d\n", count, whole);
    return 0;
}
