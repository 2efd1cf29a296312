#include "transport/wire_formats.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "transport/small_floats.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fullwire {
namespace {

constexpr std::uint32_t kMagnitude = 0x7fffffffU;
constexpr std::uint32_t kInfinity = 0x7f800000U;
constexpr std::uint32_t kHalfEnds = 0x477ff000U;  // 65520, which float16 rounds to infinity
// Added to a number below 2^22 it rounds it to the nearest whole number, ties to even, in the lowest
// bits.
constexpr float kRounds = 12582912.0F;
constexpr std::uint32_t kRoundsBits = 0x4b400000U;
constexpr float kMost = 127, kMostBesideInfinity = 126;
constexpr std::int8_t kNoNumber = -128, kIsInfinite = 127;

using LooseHalf = Loose<std::uint16_t>;
using LooseFloat = Loose<float>;

FULLWIRE_INLINE std::uint32_t magnitude_of(float value) {
    return std::bit_cast<std::uint32_t>(value) & kMagnitude;
}

// ---- bf16 and fp16 ----------------------------------------------------------------------------

template <typename Kind>
FULLWIRE_INLINE void pack_halves(void* packed, const float* values, std::size_t count) {
    auto* to = static_cast<LooseHalf*>(packed);
    const auto* from = reinterpret_cast<const LooseFloat*>(values);
    for (std::size_t i = 0; i < count; ++i) to[i].value = Kind::store(from[i].value);
}

FULLWIRE_INLINE bool fit_into_float16(const float* values, std::size_t count) {
    const auto* from = reinterpret_cast<const LooseFloat*>(values);
    std::uint32_t beyond = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t magnitude = magnitude_of(from[i].value);
        beyond |= magnitude >= kHalfEnds && magnitude < kInfinity ? 1U : 0U;
    }
    return !beyond;
}

struct Replacing {
    FULLWIRE_INLINE static float of(float, float packed) { return packed; }
};
struct Adding {
    FULLWIRE_INLINE static float of(float own, float packed) { return own + packed; }
};

template <typename Kind, typename Operation>
FULLWIRE_INLINE void unpack_halves(float* values, const float* own, const void* packed,
                                   std::size_t count) {
    const auto* from = static_cast<const LooseHalf*>(packed);
    const auto* present = reinterpret_cast<const LooseFloat*>(own);
    auto* to = reinterpret_cast<LooseFloat*>(values);
#pragma GCC ivdep
    for (std::size_t i = 0; i < count; ++i) {
        to[i].value = Operation::of(present[i].value, Kind::load(from[i].value));
    }
}

// ---- int8 -------------------------------------------------------------------------------------

// 127 times the scale is not beyond the largest float, and no number is beyond 127 times the scale.
FULLWIRE_INLINE float scale_of(float largest, float most) {
    const float scale = largest / most;
    if (scale < std::numeric_limits<float>::min()) {  // few bits are left of it: rounded up
        return largest > 0 ? scale + std::numeric_limits<float>::denorm_min() : 0.0F;
    }
    const bool is_too_much = scale * most > std::numeric_limits<float>::max();
    return is_too_much ? std::bit_cast<float>(std::bit_cast<std::uint32_t>(scale) - 1) : scale;
}

FULLWIRE_INLINE std::int8_t whole(float value, float divisor) {
    const float rounded = value / divisor + kRounds;
    return static_cast<std::int8_t>(std::bit_cast<std::uint32_t>(rounded) - kRoundsBits);
}

FULLWIRE_INLINE std::int8_t whole_or_special(float value, float divisor) {
    const std::uint32_t magnitude = magnitude_of(value);
    if (magnitude > kInfinity) return kNoNumber;
    if (magnitude == kInfinity) return value < 0 ? -kIsInfinite : kIsInfinite;
    return whole(value, divisor);
}

FULLWIRE_INLINE void pack_block_with_specials(std::int8_t* to, const LooseFloat* from,
                                              std::size_t count, float& scale) {
    std::uint32_t largest = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t magnitude = magnitude_of(from[i].value);
        if (magnitude < kInfinity) largest = std::max(largest, magnitude);
    }
    const float positive = scale_of(std::bit_cast<float>(largest), kMostBesideInfinity);
    for (std::size_t i = 0; i < count; ++i) {
        to[i] = whole_or_special(from[i].value, positive > 0 ? positive : 1.0F);
    }
    scale = -positive;
}

FULLWIRE_INLINE void pack_block(char* packed, const LooseFloat* from, std::size_t count) {
    auto* to = reinterpret_cast<std::int8_t*>(packed + sizeof(float));
    std::uint32_t largest = 0;
    for (std::size_t i = 0; i < count; ++i) {
        largest = std::max(largest, magnitude_of(from[i].value));
    }
    float scale = 0;
    if (largest >= kInfinity) {
        pack_block_with_specials(to, from, count, scale);
    } else {
        scale = scale_of(std::bit_cast<float>(largest), kMost);
        const float divisor = scale > 0 ? scale : 1.0F;
        for (std::size_t i = 0; i < count; ++i) to[i] = whole(from[i].value, divisor);
    }
    std::memcpy(packed, &scale, sizeof scale);
}

template <typename Operation>
FULLWIRE_INLINE void unpack_block(LooseFloat* to, const LooseFloat* own, const char* packed,
                                  std::size_t count) {
    const auto* from = reinterpret_cast<const std::int8_t*>(packed + sizeof(float));
    float scale = 0;
    std::memcpy(&scale, packed, sizeof scale);
    if (!std::signbit(scale)) {
#pragma GCC ivdep
        for (std::size_t i = 0; i < count; ++i) {
            to[i].value = Operation::of(own[i].value, static_cast<float>(from[i]) * scale);
        }
        return;
    }
    for (std::size_t i = 0; i < count; ++i) {
        const float infinity = std::numeric_limits<float>::infinity();
        const float value = from[i] == kNoNumber      ? std::numeric_limits<float>::quiet_NaN()
                            : from[i] == kIsInfinite  ? infinity
                            : from[i] == -kIsInfinite ? -infinity
                                                      : static_cast<float>(from[i]) * -scale;
        to[i].value = Operation::of(own[i].value, value);
    }
}

FULLWIRE_INLINE void pack_blocks(void* packed, const float* values, std::size_t count) {
    auto* to = static_cast<char*>(packed);
    const auto* from = reinterpret_cast<const LooseFloat*>(values);
    for (; count >= kWireBlock; count -= kWireBlock) {
        pack_block(to, from, kWireBlock);
        to += packed_bytes(WireFormat::int8, kWireBlock);
        from += kWireBlock;
    }
    if (count) pack_block(to, from, count);
}

template <typename Operation>
FULLWIRE_INLINE void unpack_blocks(float* values, const float* own, const void* packed,
                                   std::size_t count) {
    auto* to = reinterpret_cast<LooseFloat*>(values);
    const auto* present = reinterpret_cast<const LooseFloat*>(own);
    const auto* from = static_cast<const char*>(packed);
    for (; count >= kWireBlock; count -= kWireBlock) {
        unpack_block<Operation>(to, present, from, kWireBlock);
        to += kWireBlock;
        present += kWireBlock;
        from += packed_bytes(WireFormat::int8, kWireBlock);
    }
    if (count) unpack_block<Operation>(to, present, from, count);
}

// ---- For each kind of processor ---------------------------------------------------------------

FULLWIRE_INLINE bool pack_here(WireFormat format, void* packed, const float* values,
                               std::size_t count) {
    switch (format) {
        case WireFormat::bf16: pack_halves<Brain>(packed, values, count); return true;
        case WireFormat::fp16:
            pack_halves<Half>(packed, values, count);
            return fit_into_float16(values, count);
        case WireFormat::int8: pack_blocks(packed, values, count); return true;
        default: std::memcpy(packed, values, count * sizeof(float)); return true;
    }
}

template <typename Operation>
FULLWIRE_INLINE void unpack_here(WireFormat format, float* values, const float* own,
                                 const void* packed, std::size_t count) {
    switch (format) {
        case WireFormat::bf16: return unpack_halves<Brain, Operation>(values, own, packed, count);
        case WireFormat::fp16: return unpack_halves<Half, Operation>(values, own, packed, count);
        case WireFormat::int8: return unpack_blocks<Operation>(values, own, packed, count);
        default: break;
    }
    const auto* from = static_cast<const LooseFloat*>(packed);
    const auto* present = reinterpret_cast<const LooseFloat*>(own);
    auto* to = reinterpret_cast<LooseFloat*>(values);
#pragma GCC ivdep
    for (std::size_t i = 0; i < count; ++i) {
        to[i].value = Operation::of(present[i].value, from[i].value);
    }
}

// An infinity less another is no number, and processors give it a sign or none.
struct Kernels {
    bool (*pack)(WireFormat, void*, const float*, std::size_t);
    void (*unpack)(WireFormat, float*, const float*, const void*, std::size_t);
    void (*add)(WireFormat, float*, const float*, const void*, std::size_t);
};

bool pack_plainly(WireFormat format, void* packed, const float* values, std::size_t count) {
    return pack_here(format, packed, values, count);
}
void unpack_plainly(WireFormat format, float* values, const float* own, const void* packed,
                    std::size_t count) {
    unpack_here<Replacing>(format, values, own, packed, count);
}
void add_plainly(WireFormat format, float* values, const float* own, const void* packed,
                 std::size_t count) {
    unpack_here<Adding>(format, values, own, packed, count);
}

constexpr Kernels kPlain{pack_plainly, unpack_plainly, add_plainly};

#if defined(__x86_64__)
#define FULLWIRE_AVX2 [[gnu::target("avx2,f16c")]]
#define FULLWIRE_AVX512 [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c")]]
#define FULLWIRE_AVX512_BF16 \
    [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,f16c")]]

// The processor rounds as `Half` does, but keeps the sign and digits of what is no number.
FULLWIRE_AVX2 bool pack_fp16_by_8(void* packed, const float* values, std::size_t count) {
    const __m256i magnitude = _mm256_set1_epi32(static_cast<int>(kMagnitude));
    const __m256i largest_inside = _mm256_set1_epi32(static_cast<int>(kHalfEnds - 1));
    bool fits = true;
    std::size_t done = 0;
    for (; done + 8 <= count; done += 8) {
        char* const to = static_cast<char*>(packed) + 2 * done;
        const __m256 eight = _mm256_loadu_ps(values + done);
        const __m256i bits = _mm256_and_si256(_mm256_castps_si256(eight), magnitude);
        if (_mm256_movemask_epi8(_mm256_cmpgt_epi32(bits, largest_inside))) {
            fits &= pack_here(WireFormat::fp16, to, values + done, 8);
        } else {
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                             _mm256_cvtps_ph(eight, _MM_FROUND_TO_NEAREST_INT));
        }
    }
    return pack_here(WireFormat::fp16, static_cast<char*>(packed) + 2 * done, values + done,
                     count - done) && fits;
}

FULLWIRE_AVX2 bool pack_avx2(WireFormat format, void* packed, const float* values,
                             std::size_t count) {
    if (format == WireFormat::fp16) return pack_fp16_by_8(packed, values, count);
    return pack_here(format, packed, values, count);
}

template <typename Operation>
FULLWIRE_AVX2 void unpack_fp16_by_8(float* values, const float* own, const void* packed,
                                    std::size_t count) {
    const auto* from = static_cast<const char*>(packed);
    std::size_t done = 0;
    for (; done + 8 <= count; done += 8) {
        const __m256 eight = _mm256_cvtph_ps(
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * done)));
        const bool adds = std::is_same_v<Operation, Adding>;
        _mm256_storeu_ps(values + done,
                         adds ? _mm256_add_ps(_mm256_loadu_ps(own + done), eight) : eight);
    }
    unpack_here<Operation>(WireFormat::fp16, values + done, own + done, from + 2 * done,
                           count - done);
}

FULLWIRE_AVX2 void unpack_avx2(WireFormat format, float* values, const float* own,
                               const void* packed, std::size_t count) {
    if (format == WireFormat::fp16) return unpack_fp16_by_8<Replacing>(values, own, packed, count);
    unpack_here<Replacing>(format, values, own, packed, count);
}

FULLWIRE_AVX2 void add_avx2(WireFormat format, float* values, const float* own, const void* packed,
                            std::size_t count) {
    if (format == WireFormat::fp16) return unpack_fp16_by_8<Adding>(values, own, packed, count);
    unpack_here<Adding>(format, values, own, packed, count);
}

// The instruction takes subnormal numbers for 0 and keeps digits of what is no number: where there is
// one among sixteen, they are packed plainly.
FULLWIRE_AVX512_BF16 bool pack_bf16_by_16(void* packed, const float* values, std::size_t count) {
    constexpr int kSubnormal = 0x20, kQuiet = 0x01, kSignalling = 0x80;
    auto* const to = static_cast<char*>(packed);
    std::size_t done = 0;
    for (; done + 16 <= count; done += 16) {
        const __m512 sixteen = _mm512_loadu_ps(values + done);
        if (_mm512_fpclass_ps_mask(sixteen, kSubnormal | kQuiet | kSignalling)) {
            pack_here(WireFormat::bf16, to + 2 * done, values + done, 16);
        } else {
            const __m256bh halves = _mm512_cvtneps_pbh(sixteen);
            std::memcpy(to + 2 * done, &halves, sizeof halves);
        }
    }
    return pack_here(WireFormat::bf16, to + 2 * done, values + done, count - done);
}

FULLWIRE_AVX512 bool pack_avx512(WireFormat format, void* packed, const float* values,
                                 std::size_t count) {
    if (format == WireFormat::fp16) return pack_fp16_by_8(packed, values, count);
    return pack_here(format, packed, values, count);
}

FULLWIRE_AVX512_BF16 bool pack_avx512_bf16(WireFormat format, void* packed, const float* values,
                                           std::size_t count) {
    if (format == WireFormat::bf16) return pack_bf16_by_16(packed, values, count);
    return pack_avx512(format, packed, values, count);
}

FULLWIRE_AVX512 void unpack_avx512(WireFormat format, float* values, const float* own,
                                   const void* packed, std::size_t count) {
    if (format == WireFormat::fp16) return unpack_fp16_by_8<Replacing>(values, own, packed, count);
    unpack_here<Replacing>(format, values, own, packed, count);
}

FULLWIRE_AVX512 void add_avx512(WireFormat format, float* values, const float* own,
                                const void* packed, std::size_t count) {
    if (format == WireFormat::fp16) return unpack_fp16_by_8<Adding>(values, own, packed, count);
    unpack_here<Adding>(format, values, own, packed, count);
}

Kernels kernels_with(Instructions wanted) {
    __builtin_cpu_init();
    const bool has_512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const bool has_256 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    if (wanted >= Instructions::avx512 && has_512) {
        const bool has_bf16 = __builtin_cpu_supports("avx512bf16");
        return {has_bf16 ? pack_avx512_bf16 : pack_avx512, unpack_avx512, add_avx512};
    }
    if (wanted >= Instructions::avx2 && has_256) return {pack_avx2, unpack_avx2, add_avx2};
    return kPlain;
}
#else
Kernels kernels_with(Instructions) { return kPlain; }
#endif

const Kernels& kernels(Instructions with) {
    static const std::array<Kernels, 4> all{
        kernels_with(Instructions::plain), kernels_with(Instructions::avx2),
        kernels_with(Instructions::avx512), kernels_with(Instructions::best)};
    return all[static_cast<std::size_t>(with)];
}

}  // namespace

bool pack(WireFormat format, void* packed, const float* values, std::size_t count,
          Instructions with) {
    return kernels(with).pack(format, packed, values, count);
}

void unpack(WireFormat format, float* values, const void* packed, std::size_t count,
            Instructions with) {
    kernels(with).unpack(format, values, values, packed, count);
}

void add_packed(WireFormat format, float* sums, const float* own, const void* packed,
                std::size_t count, Instructions with) {
    kernels(with).add(format, sums, own, packed, count);
}

double relative_squared_error(WireFormat format, const float* values, const void* packed,
                              std::size_t count, std::size_t every) {
    constexpr std::size_t kLanes = 16;  // sums side by side, so that the compiler makes vectors
    std::array<float, kWireBlock> there;
    double errors = 0, squares = 0;
    for (std::size_t first = 0; first < count; first += every * kWireBlock) {
        const std::size_t some = std::min(kWireBlock, count - first);
        const auto* bytes = static_cast<const char*>(packed) + packed_bytes(format, first);
        unpack(format, there.data(), bytes, some);
        std::array<double, kLanes> error{}, square{};
        for (std::size_t i = 0; i < some; ++i) {
            const double value = values[first + i], off = value - there[i];
            error[i % kLanes] += off * off;
            square[i % kLanes] += value * value;
        }
        double block_error = 0, block_square = 0;
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
            block_error += error[lane];
            block_square += square[lane];
        }
        if (!std::isfinite(block_error + block_square)) continue;
        errors += block_error;
        squares += block_square;
    }
    return squares > 0 ? errors / squares : 0;
}

}  // namespace fullwire
