// Where quotes, brackets and the like are among the bytes of JSON: 16 or 64 are looked at together.
//
// Bit n of an answer stands for byte n. On x86-64 that is SSE2, which every such processor has;
// elsewhere eight bytes are compared at once in a word.

#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace fullwire {

class Sixteen {
  public:
    static constexpr std::size_t kBytes = 16;

    explicit Sixteen(const char* at) { std::memcpy(&bytes_, at, kBytes); }

#ifdef __SSE2__
    std::uint64_t are(char wanted) const {
        const __m128i same = _mm_cmpeq_epi8(bytes_, _mm_set1_epi8(wanted));
        return static_cast<std::uint32_t>(_mm_movemask_epi8(same));
    }

  private:
    __m128i bytes_;
#else
    std::uint64_t are(char wanted) const { return in(bytes_[0], wanted) | in(bytes_[1], wanted) << 8; }

  private:
    static std::uint64_t in(std::uint64_t word, char wanted) {
        constexpr std::uint64_t kLow = 0x7f7f7f7f7f7f7f7f;
        if constexpr (std::endian::native == std::endian::big) word = __builtin_bswap64(word);
        const std::uint64_t differs = word ^ 0x0101010101010101 * static_cast<unsigned char>(wanted);
        const std::uint64_t same = ~(((differs & kLow) + kLow) | differs | kLow);  // a byte's high bit
        return (same >> 7) * 0x0102040810204080 >> 56;                             // all in one byte
    }

    std::uint64_t bytes_[2];
#endif
};

class SixtyFour {
  public:
    static constexpr std::size_t kBytes = 64;

    explicit SixtyFour(const char* at)
        : parts_{Sixteen(at), Sixteen(at + 16), Sixteen(at + 32), Sixteen(at + 48)} {}

    std::uint64_t are(char wanted) const {
        return parts_[0].are(wanted) | parts_[1].are(wanted) << 16 | parts_[2].are(wanted) << 32 |
               parts_[3].are(wanted) << 48;
    }

  private:
    Sixteen parts_[4];
};

}  // namespace fullwire
