#include "transport/checksum.hpp"

#include <array>
#include <cstring>

namespace fullwire {
namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78;  // its bits in reverse
constexpr std::size_t kSlices = 8;                  // bytes that are looked up at once

using Tables = std::array<std::array<std::uint32_t, 256>, kSlices>;

constexpr Tables made() {
    Tables tables{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? kPolynomial : 0);
        tables[0][byte] = crc;
    }
    for (std::size_t slice = 1; slice < kSlices; ++slice) {
        for (std::size_t byte = 0; byte < 256; ++byte) {
            const std::uint32_t before = tables[slice - 1][byte];
            tables[slice][byte] = (before >> 8) ^ tables[0][before & 0xff];
        }
    }
    return tables;
}

constexpr Tables kTables = made();

std::uint32_t by_table(const unsigned char* bytes, std::size_t count, std::uint32_t crc) {
    for (; count >= kSlices; bytes += kSlices, count -= kSlices) {
        std::uint32_t next = 0;
        for (std::size_t byte = 0; byte < kSlices; ++byte) {
            const std::uint32_t mixed = byte < 4 ? (crc >> (8 * byte)) & 0xff : 0;
            next ^= kTables[kSlices - 1 - byte][bytes[byte] ^ mixed];
        }
        crc = next;
    }
    for (; count; ++bytes, --count) crc = (crc >> 8) ^ kTables[0][(crc ^ *bytes) & 0xff];
    return crc;
}

#if defined(__x86_64__)
[[gnu::target("sse4.2")]] std::uint32_t by_instruction(const unsigned char* bytes,
                                                       std::size_t count, std::uint32_t crc) {
    std::uint64_t wide = crc;
    for (; count >= sizeof wide; bytes += sizeof wide, count -= sizeof wide) {
        std::uint64_t word;
        std::memcpy(&word, bytes, sizeof word);
        wide = __builtin_ia32_crc32di(wide, word);
    }
    crc = static_cast<std::uint32_t>(wide);
    for (; count; ++bytes, --count) crc = __builtin_ia32_crc32qi(crc, *bytes);
    return crc;
}

const auto best = __builtin_cpu_supports("sse4.2") ? by_instruction : by_table;
#else
const auto best = by_table;
#endif

}  // namespace

std::uint32_t crc32c(const void* bytes, std::size_t count, std::uint32_t so_far) {
    return ~best(static_cast<const unsigned char*>(bytes), count, ~so_far);
}

std::uint32_t crc32c_by_table(const void* bytes, std::size_t count, std::uint32_t so_far) {
    return ~by_table(static_cast<const unsigned char*>(bytes), count, ~so_far);
}

}  // namespace fullwire
