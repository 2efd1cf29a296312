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
    """One bit a value, then the mean sizes of a row's blocks."""

    block = BLOCK
    keeps_error = True

    def row_bytes(self, count: int) -> int:
        """Return the packed bytes of so many values."""
        return (BLOCK // 8 + 4) * -(-count // BLOCK)

    def pack_row(self, values: Tensor, out: Tensor) -> None:
        """Store the sign bit of each value; NaN or inf makes its whole block NaN or inf."""
        import torch

        whole = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
        signs, sizes = out.split([len(whole) * BLOCK // 8, 4 * len(whole)])
        signs.numpy()[:] = np.packbits(torch.signbit(whole).numpy().reshape(-1))
        # The sum alone may be inf.
        sizes.view(torch.float32).copy_((whole.abs() * (1 / BLOCK)).sum(1))

    def unpack_row(self, packed: Tensor, values: Tensor, *, adds: bool = False) -> None:
        """Give each value the mean size of its block, with its sign."""
        import torch

        count = -(-len(values) // BLOCK)
        signs, sizes = packed.split([count * BLOCK // 8, 4 * count])
        bits = torch.from_numpy(np.unpackbits(signs.numpy())).view(count, BLOCK)
        blocks = bits.to(torch.float32).mul_(-2).add_(1).mul_(sizes.view(torch.float32)[:, None])
        read = blocks.view(-1)[: len(values)]
        values.copy_(values + read if adds else read)


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
