// Reads captures that it damages itself, and holds what comes out against what must always be so.
//
//     damaged_captures SEEDS COUNT FIRST    SEEDS is a file of captures, each after its length
//
// Built with sanitizers by damaged_captures.py. Case `n` is the same wherever and whenever it runs.

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "packets/packets.hpp"

namespace {

using Content = std::vector<std::uint8_t>;

constexpr unsigned kLongest_s = 5;  // of one case, under sanitizers; then SIGALRM ends it all
constexpr std::array<std::uint32_t, 12> kOdd{0,          1,          0x7f,       0x80,
                                             0xffff,     0x10000,    0x7fffffff, 0x80000000,
                                             0xfffffff0, 0xffffffff, 0x40000,    0x0a0d0d0a};

[[noreturn]] void fail(std::uint64_t number, const std::string& what) {
    std::fprintf(stderr, "case %llu: %s\n", static_cast<unsigned long long>(number), what.c_str());
    std::exit(1);
}

std::vector<Content> seeds_in(const char* path) {
    std::ifstream file(path, std::ios::binary);
    std::vector<Content> seeds;
    std::uint32_t length = 0;
    while (file.read(reinterpret_cast<char*>(&length), sizeof length)) {
        Content& seed = seeds.emplace_back(length);
        file.read(reinterpret_cast<char*>(seed.data()), length);
    }
    return seeds;
}

class Damage {
  public:
    Damage(const std::vector<Content>& seeds, std::uint64_t number)
        : seeds_(seeds), random_(number) {}

    Content capture() {
        Content content = seeds_[below(seeds_.size())];
        for (std::size_t times = below(8); times > 0 && !content.empty(); --times) hurt(content);
        return content;
    }
    std::size_t below(std::size_t limit) { return limit ? random_() % limit : 0; }

  private:
    void hurt(Content& content) {
        const std::size_t at = below(content.size());
        const std::size_t length = std::min(content.size() - at, 1 + below(below(4) ? 16 : 4096));
        const auto place = content.begin() + static_cast<std::ptrdiff_t>(at);
        const auto end = place + static_cast<std::ptrdiff_t>(length);
        switch (below(7)) {
            case 0: content[at] ^= static_cast<std::uint8_t>(1u << below(8)); break;
            case 1: content[at] = static_cast<std::uint8_t>(random_()); break;
            case 2: odd_number(content, at); break;
            case 3: content.resize(at); break;
            case 4: content.erase(place, end); break;
            case 5: {
                const Content again(place, end);
                const auto where = static_cast<std::ptrdiff_t>(below(content.size()));
                content.insert(content.begin() + where, again.begin(), again.end());
                break;
            }
            default: {
                const Content& other = seeds_[below(seeds_.size())];
                const auto from = static_cast<std::ptrdiff_t>(below(other.size()));
                content.erase(place, content.end());
                content.insert(content.end(), other.begin() + from, other.end());
            }
        }
    }

    // Where lengths stand, they are whole words.
    void odd_number(Content& content, std::size_t at) {
        at &= ~std::size_t{3};
        if (at + 4 > content.size()) return;
        std::uint32_t value = kOdd[below(kOdd.size())] + static_cast<std::uint32_t>(below(3)) - 1;
        if (below(2)) value = __builtin_bswap32(value);
        std::memcpy(content.data() + at, &value, 4);
    }

    const std::vector<Content>& seeds_;
    std::mt19937_64 random_;
};

void feed(fullwire::PacketScan& scan, const Content& content, std::size_t piece) {
    for (std::size_t at = 0; at < content.size(); at += piece) {
        // A copy of its own, so that reading beyond it is seen.
        const Content part(content.begin() + static_cast<std::ptrdiff_t>(at),
                           content.begin() +
                               static_cast<std::ptrdiff_t>(std::min(at + piece, content.size())));
        scan.feed(part);
    }
    scan.finish();
}

void read(fullwire::PacketScan& scan, const Content& content) {
    const int file = ::memfd_create("capture", 0);
    if (::write(file, content.data(), content.size()) < 0) std::abort();
    ::lseek(file, 0, SEEK_SET);
    while (scan.read(file, 2, 1 << 20)) {
    }
    scan.finish();
    ::close(file);
}

void check(std::uint64_t number, const fullwire::PacketScan& scan) {
    std::uint64_t packets = 0;
    for (const fullwire::Bin& bin : scan.bins()) {
        if (bin.flow >= scan.flows().size()) fail(number, "a bin of no flow");
        if (bin.packets == 0 || bin.number < 0) fail(number, "an empty or impossible bin");
        packets += bin.packets;
    }
    std::uint64_t of_flows = 0;
    for (const fullwire::Flow& flow : scan.flows()) {
        of_flows += flow.packets;
        if (flow.first_ns > flow.last_ns) fail(number, "a flow that ends before it begins");
    }
    if (packets != of_flows) fail(number, "bins and flows differ");
    if (scan.keys().size() != scan.flows().size()) fail(number, "flows without a name");
    if (scan.damage().find('\n') != std::string::npos) fail(number, "a sentence of two lines");
}

bool are_alike(const fullwire::PacketScan& a, const fullwire::PacketScan& b) {
    if (a.damage() != b.damage() || a.keys() != b.keys()) return false;
    return std::equal(a.bins().begin(), a.bins().end(), b.bins().begin(), b.bins().end(),
                      [](const fullwire::Bin& x, const fullwire::Bin& y) {
                          return x.flow == y.flow && x.number == y.number &&
                                 x.wire_bytes == y.wire_bytes && x.payload_bytes == y.payload_bytes;
                      });
}

}  // namespace

int main(int count, char** words) {
    if (count != 4) return 2;
    const std::vector<Content> seeds = seeds_in(words[1]);
    const std::uint64_t first = std::strtoull(words[3], nullptr, 10);
    const std::uint64_t end = first + std::strtoull(words[2], nullptr, 10);
    std::uint64_t whole = 0;
    std::uint64_t partial = 0;
    for (std::uint64_t number = first; number < end; ++number) {
        ::alarm(kLongest_s);
        Damage damage(seeds, number);
        const Content content = damage.capture();
        fullwire::PacketScan scan;
        feed(scan, content, 1 + damage.below(damage.below(8) ? 100'000 : 50));
        check(number, scan);
        whole += scan.damage().empty();
        partial += !scan.damage().empty() && scan.counts().packets > 0;
        if (number % 16 == 0) {  // threads and pieces must make no difference
            fullwire::PacketScan other;
            read(other, content);
            if (!are_alike(scan, other)) fail(number, "a file and its pieces differ");
        }
    }
    rusage used{};
    ::getrusage(RUSAGE_SELF, &used);
    std::printf("%llu %llu %llu %ld\n", static_cast<unsigned long long>(end - first),
                static_cast<unsigned long long>(whole), static_cast<unsigned long long>(partial),
                used.ru_maxrss);
}
