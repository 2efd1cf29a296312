"""The signs of gradients, with the mean size of each block of 512 values (1-bit SGD).

Signs alone lose most of a gradient. The unsent rest is kept and added to the next gradient.
"""

from __future__ import annotations

import numpy as np

from fullwire.compression.codec import Codec, Cost
from fullwire.compression.compressor import MoreSteps
from fullwire.compression.method import Format, Tensor

BLOCK = 512


class OneBit(Format):
    """One bit a value, then the mean sizes of a row."""

    block = BLOCK
    keeps_error = True

    def row_bytes(self, count: int) -> int:
        """Return the packed bytes of one row."""
        return count // 8 + 4 * (count // BLOCK)

    def pack_rows(self, rows: Tensor, out: Tensor) -> None:
        """Store the sign bit of each value; NaN or inf makes its whole block NaN or inf."""
        import torch

        signs, count = torch.signbit(rows), rows.shape[1]
        packed = torch.from_numpy(np.packbits(signs.cpu().numpy(), axis=1))
        out[:, : count // 8] = packed.to(out.device)
        sizes = (rows.reshape(-1, BLOCK).abs() * (1 / BLOCK)).sum(1)  # The sum alone may be inf.
        out[:, count // 8 :].view(torch.float32).copy_(sizes.view(len(rows), -1))

    def unpack_rows(self, packed: Tensor, out: Tensor) -> Tensor:
        """Return the mean size of its block for each value, with its sign."""
        import torch

        count = out.shape[1]
        bits = np.unpackbits(packed[:, : count // 8].cpu().numpy(), axis=1)
        signs = torch.from_numpy(bits).to(packed.device)
        sizes = packed[:, count // 8 :].view(torch.float32).reshape(-1, 1)
        blocks = out.view(-1, BLOCK).copy_(signs.view(-1, BLOCK))
        blocks.mul_(-2).add_(1).mul_(sizes)
        return out


CODEC = Codec(
    key="onebit",
    label="signs of gradients",
    ratio=4 * BLOCK / (BLOCK / 8 + 4),
    combining="exchange",
    on_processor=Cost(
        encode_bps=8 * 2.1e9,
        decode_bps=8 * 3.3e9,
        source="measured: torch 2.13, 25 MiB on one core with AVX-512",
    ),
    words="Each value has one bit, its sign, and each block of 512 values has its mean size. The "
    "unsent rest is added to the next gradient.",
    method=OneBit,
    steps={"": MoreSteps(1.19, 1.05, 1.37)},
)
