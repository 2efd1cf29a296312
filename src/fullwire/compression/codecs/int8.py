"""Gradients as whole numbers of 8 bits, with one float32 scale for each block of 256 values.

The scale makes the largest value of a block 127, so no value is clipped. A block with inf or NaN
has a negative scale. Three of its codes stand for inf, -inf and NaN.
"""

from __future__ import annotations

from fullwire.compression.codec import Codec, Cost
from fullwire.compression.compressor import MoreSteps
from fullwire.compression.method import Format, Tensor

BLOCK = 256
_MOST = 127
_NAN = -128


class Int8(Format):
    """One byte a value, then the scales of a row."""

    block = BLOCK

    def row_bytes(self, count: int) -> int:
        """Return the packed bytes of one row."""
        return count + 4 * (count // BLOCK)

    def pack_rows(self, rows: Tensor, out: Tensor) -> None:
        """Round each block to whole numbers of its scale."""
        import torch

        count = rows.shape[1]
        blocks = rows.reshape(-1, BLOCK)
        largest = torch.linalg.vector_norm(blocks, ord=torch.inf, dim=1, keepdim=True)
        is_finite = largest.isfinite()
        # The smallest normal number keeps 1 / scale finite for zeros and subnormals.
        scale = (largest / _MOST).clamp_min(torch.finfo(torch.float32).tiny)
        codes = (blocks * (1 / scale)).round_().to(torch.int8)
        if not bool(is_finite.all()):
            scale, codes = scale.clone(), codes.clone()
            which = (~is_finite).view(-1)
            scale[which], codes[which] = _with_specials(blocks[which])
        out[:, :count].view(torch.int8).copy_(codes.view(rows.shape))
        out[:, count:].view(torch.float32).copy_(scale.view(len(rows), -1))

    def unpack_rows(self, packed: Tensor, count: int) -> Tensor:
        """Return the values of each row."""
        import torch

        codes = packed[:, :count].view(torch.int8).reshape(-1, BLOCK)
        scale = packed[:, count:].view(torch.float32).reshape(-1, 1)
        values = codes * scale
        is_special = (scale < 0).view(-1)
        if bool(is_special.any()):
            raw, finite = codes[is_special], -values[is_special]
            finite[raw == _MOST] = torch.inf
            finite[raw == -_MOST] = -torch.inf
            finite[raw == _NAN] = torch.nan
            values[is_special] = finite
        return values.view(len(packed), count)


def _with_specials(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the negative scales and the codes of blocks with inf or NaN."""
    import torch

    finite = torch.where(blocks.isfinite(), blocks, 0.0)
    scale = finite.abs().amax(1, keepdim=True) / (_MOST - 1)
    scale = scale.clamp_min(torch.finfo(torch.float32).tiny)
    codes = (finite / scale).round_()
    codes[blocks == torch.inf] = _MOST
    codes[blocks == -torch.inf] = -_MOST
    codes[blocks.isnan()] = _NAN
    return -scale, codes.to(torch.int8)


CODEC = Codec(
    key="int8",
    label="gradients as 8-bit numbers in blocks",
    ratio=4 * BLOCK / (BLOCK + 4),
    combining="exchange",
    on_processor=Cost(
        encode_bps=8 * 1.0e9,
        decode_bps=8 * 4.8e9,
        source="measured: torch 2.13, 25 MiB on one core with AVX-512",
    ),
    words="Each value has one byte, and each block of 256 values has a scale. One rounding at the "
    "sender and one at the owner of a part.",
    method=Int8,
    most_error=0.01,
    steps={"": MoreSteps(1, 1, 1)},
)
