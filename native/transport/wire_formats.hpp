// How float32 numbers are packed for the wire: in half or a quarter of their bytes.
//
// Every kind of processor packs and unpacks to the same bits. Rounding is to nearest, ties to even.
// What is no number has one pattern in each format, and infinity stays infinity.

#pragma once

#include <cstddef>
#include <cstdint>

namespace fullwire {

// int8: of 256 numbers each is a whole number from -127 to 127, times the block's scale (float32,
// before them). A block in which a number is infinite or none has a negative scale: -128 stands for
// what is no number, -127 and 127 for the infinities, and the others are at most 126.
enum class WireFormat : std::uint8_t { float32, bf16, fp16, int8 };

constexpr std::size_t kWireBlock = 256;

// The instructions to use. Those that this processor lacks are replaced by the next best.
enum class Instructions : std::uint8_t { plain, avx2, avx512, best };

constexpr std::size_t packed_bytes(WireFormat format, std::size_t count) {
    switch (format) {
        case WireFormat::bf16:
        case WireFormat::fp16: return 2 * count;
        case WireFormat::int8: return count + (count + kWireBlock - 1) / kWireBlock * sizeof(float);
        default: return sizeof(float) * count;
    }
}

// False if a finite number is beyond the range of the format (fp16 only).
bool pack(WireFormat format, void* packed, const float* values, std::size_t count,
          Instructions with = Instructions::best);
void unpack(WireFormat format, float* values, const void* packed, std::size_t count,
            Instructions with = Instructions::best);
// sums[i] = own[i] + the number packed there; `sums` may be `own`.
void add_packed(WireFormat format, float* sums, const float* own, const void* packed,
                std::size_t count, Instructions with = Instructions::best);

// The squared error of packing over the squared numbers, of one block in `every`. Blocks in which a
// number is infinite or none do not count.
double relative_squared_error(WireFormat format, const float* values, const void* packed,
                              std::size_t count, std::size_t every);

}  // namespace fullwire
