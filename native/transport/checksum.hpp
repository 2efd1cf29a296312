// CRC32C (Castagnoli), as iSCSI and ext4 use it: RFC 3720, appendix B.4.

#pragma once

#include <cstddef>
#include <cstdint>

namespace fullwire {

// `so_far` is what was returned for the bytes before these, 0 if there are none.
std::uint32_t crc32c(const void* bytes, std::size_t count, std::uint32_t so_far = 0);

// The same, without the processor's own instruction.
std::uint32_t crc32c_by_table(const void* bytes, std::size_t count, std::uint32_t so_far = 0);

}  // namespace fullwire
