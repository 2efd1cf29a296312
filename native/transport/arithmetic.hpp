// Element-wise reduction of two vectors, for every type of number that a collective may carry.

#pragma once

#include <cstddef>
#include <cstdint>

namespace fullwire {

enum class Number : std::uint8_t {
    float32, float64, float16, bfloat16, int8, int16, int32, int64, uint8, boolean
};

enum class Reduction : std::uint8_t {
    sum, product, minimum, maximum, bit_and, bit_or, bit_xor
};

std::size_t bytes_of(Number number);

// result[i] = a[i] op b[i]; `result` may be `a`, and none of them need be aligned. Both orders of a
// and b give the same bits, so two ranks that exchange their vectors end with the same sum.
void combine(Reduction reduction, Number number, void* result, const void* a, const void* b,
             std::size_t count);

// values[i] = values[i] / by
void divide(Number number, void* values, std::size_t count, std::uint32_t by);

}  // namespace fullwire
