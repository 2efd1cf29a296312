// Numbers of 16 bits, and numbers at any address, for code that the compiler makes vectors of.

#pragma once

#include <bit>
#include <cstdint>

#define FULLWIRE_INLINE [[gnu::always_inline]] inline

namespace fullwire {

// Bytes off the wire begin where a frame's head ended: nothing promises alignment.
template <typename T>
struct [[gnu::packed, gnu::may_alias]] Loose {
    T value;
};

struct Half {
    using Stored = std::uint16_t;
    using Computed = float;

    // Exponents are moved by a multiplication, which also makes normal numbers of subnormal ones.
    FULLWIRE_INLINE static float load(std::uint16_t bits) {
        const std::uint32_t magnitude = static_cast<std::uint32_t>(bits & 0x7fffU) << 13;
        const float scaled = std::bit_cast<float>(magnitude) * std::bit_cast<float>(0x77800000U);
        const std::uint32_t special = magnitude | 0x7f800000U;  // infinity, or what is no number
        const std::uint32_t found =
            magnitude >= 0x0f800000U ? special : std::bit_cast<std::uint32_t>(scaled);
        return std::bit_cast<float>(found | (static_cast<std::uint32_t>(bits & 0x8000U) << 16));
    }

    // Rounds to the nearest, ties to even, by letting the processor add a number so large that
    // what lies beyond the last digit falls off.
    FULLWIRE_INLINE static std::uint16_t store(float value) {
        const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
        const std::uint32_t magnitude = bits & 0x7fffffffU;
        const float small = std::bit_cast<float>(magnitude) + 0.5F;
        const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(small) - 0x3f000000U;
        const std::uint32_t odd = (magnitude >> 13) & 1U;
        const std::uint32_t normal = (magnitude - 0x38000000U + 0x0fffU + odd) >> 13;
        const std::uint32_t special = magnitude > 0x7f800000U ? 0x7e00U : 0x7c00U;
        const std::uint32_t finite = magnitude < 0x38800000U ? subnormal : normal;
        const std::uint32_t found = magnitude >= 0x477ff000U ? special : finite;
        const std::uint32_t sign = magnitude > 0x7f800000U ? 0 : (bits >> 16) & 0x8000U;
        return static_cast<std::uint16_t>(found | sign);
    }
};

struct Brain {
    using Stored = std::uint16_t;
    using Computed = float;

    FULLWIRE_INLINE static float load(std::uint16_t bits) {
        return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
    }

    FULLWIRE_INLINE static std::uint16_t store(float value) {
        const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
        const std::uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
        const bool is_number = (bits & 0x7fffffffU) <= 0x7f800000U;
        return static_cast<std::uint16_t>(is_number ? rounded : 0x7fc0U);
    }
};

}  // namespace fullwire
