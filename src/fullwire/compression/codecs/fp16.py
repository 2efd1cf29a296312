"""Gradients rounded to float16: half the bytes, 11 bits of precision, values up to 65,504.

Larger values would become inf. A message that holds one is sent as bfloat16 and counted. The last
byte of a message names its format, so ranks need not agree.
"""

from __future__ import annotations

from fullwire.compression.codec import Codec, Cost
from fullwire.compression.compressor import MoreSteps
from fullwire.compression.method import Format, Tensor

_LARGEST = 65504.0
_TAIL = 2  # Bytes after a row: is it bfloat16? Two, so that rows stay aligned.


class Float16(Format):
    """Two bytes a value, and the format at the end of a row."""

    def row_bytes(self, count: int) -> int:
        """Return the packed bytes of one row."""
        return 2 * count + _TAIL

    def pack_rows(self, rows: Tensor, out: Tensor) -> None:
        """Round each row to float16, or to bfloat16 where a finite value is too large for it."""
        import torch

        for row, place in zip(rows, out, strict=True):
            low, high = row.aminmax() if row.numel() else (row.new_zeros(()),) * 2
            largest = max(abs(float(low)), abs(float(high)))
            if not largest <= _LARGEST:  # Also inf or NaN, among which finite values may be large.
                finite = row[row.isfinite()].abs()
                largest = float(finite.max()) if finite.numel() else 0.0
            is_wide = largest > _LARGEST
            self.widened += is_wide
            place[:-_TAIL].view(torch.bfloat16 if is_wide else torch.float16).copy_(row)
            place[-_TAIL:] = int(is_wide)

    def unpack_rows(self, packed: Tensor, out: Tensor) -> Tensor:
        """Return the rows as float16, or as float32 if one of them is bfloat16."""
        import torch

        is_wide = packed[:, -1].bool()
        halves = packed[:, :-_TAIL]
        if not is_wide.any():
            return halves.view(torch.float16)
        out.copy_(halves.view(torch.float16))
        out[is_wide] = halves.view(torch.bfloat16)[is_wide].float()
        return out


CODEC = Codec(
    key="fp16",
    label="gradients as float16",
    ratio=2,
    combining="exchange",
    on_processor=Cost(
        encode_bps=8 * 8e9,
        decode_bps=8 * 12e9,
        source="measured: torch 2.13, 25 MiB on one core with AVX-512",
    ),
    on_gpu=Cost(
        encode_bps=8 * 400e9,
        decode_bps=8 * 400e9,
        source="assumed, not measured: a GPU casts at the speed of its memory",
        is_measured=False,
    ),
    words="Each value has two bytes and three more bits of precision than bfloat16. A message with "
    "a value beyond 65,504 is sent as bfloat16 and counted.",
    method=Float16,
    most_error=1e-4,
    steps={"": MoreSteps(1, 1, 1)},
)

# Torch's `fp16_compress_hook` lets the transport add float16 by all-reduce.
TORCH_HOOK = Codec(
    key="fp16",
    label="gradients as float16, added by the transport",
    ratio=2,
    on_processor=Cost(
        encode_bps=8 * 10e9,
        decode_bps=8 * 10e9,
        # Gloo's threads took as long for float16 as for float32: twice the work a byte.
        work_per_byte=2.0,
        source="measured on one 2.5 GHz core: 13 and 19 GB/s, and a hook does a little more",
    ),
    on_gpu=CODEC.on_gpu,
)
