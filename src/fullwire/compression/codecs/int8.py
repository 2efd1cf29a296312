"""Gradients as whole numbers of 8 bits, with one float32 scale for each block of 256 values.

The scale makes the largest value of a block 127, so no value is clipped. inf and NaN arrive as
such. Native code packs, as it does for the transport's wire format: PyTorch's own operations, one
after the other, took ten times as long.
"""

from __future__ import annotations

from fullwire.compression.codec import Codec, Cost
from fullwire.compression.compressor import MoreSteps
from fullwire.compression.method import Format, Tensor

BLOCK = 256
_NATIVE = 3  # The format's number there.


class Int8(Format):
    """One byte a value, and the scales of its blocks."""

    block = BLOCK

    def row_bytes(self, count: int) -> int:
        """Return the packed bytes of so many values."""
        return count + 4 * -(-count // BLOCK)

    def pack_row(self, values: Tensor, out: Tensor) -> None:
        """Round each block to whole numbers of its scale."""
        from fullwire import _native

        _native.pack_numbers(_NATIVE, values.numpy(), out.numpy())

    def unpack_row(self, packed: Tensor, values: Tensor, *, adds: bool = False) -> None:
        """Multiply each block by its scale."""
        from fullwire import _native

        _native.unpack_numbers(_NATIVE, packed.numpy(), values.numpy(), adds)


CODEC = Codec(
    key="int8",
    label="gradients as 8-bit numbers in blocks",
    ratio=4 * BLOCK / (BLOCK + 4),
    combining="exchange",
    on_processor=Cost(
        encode_bps=8 * 14e9,
        decode_bps=8 * 13e9,
        source="measured: native code, 25 MiB on one core with AVX-512",
    ),
    words="Each value has one byte, and each block of 256 values has a scale. One rounding at the "
    "sender and one at the owner of a part.",
    method=Int8,
    most_error=0.01,
    steps={"": MoreSteps(1, 1, 1)},
)
