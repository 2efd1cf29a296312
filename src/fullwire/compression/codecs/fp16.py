"""Gradients rounded to float16: half the bytes, 11 bits of precision, values up to 65,504.

Larger values would become inf. A message that holds one is sent as bfloat16 and counted. The last
byte of a message names its format, so ranks need not agree.
"""

from __future__ import annotations

from fullwire.compression.codec import Codec, Cost
from fullwire.compression.compressor import MoreSteps
from fullwire.compression.method import Format, Tensor

_BFLOAT16, _FLOAT16 = 1, 2  # The formats' numbers in native code.
_TAIL = 2  # Bytes after a row: its format. Two, so that rows stay aligned.


class Float16(Format):
    """Two bytes a value, and the format at the end of a row."""

    def row_bytes(self, count: int) -> int:
        """Return the packed bytes of so many values."""
        return 2 * count + _TAIL

    def pack_row(self, values: Tensor, out: Tensor) -> None:
        """Round each value to float16, or to bfloat16 where a finite one is too large for it."""
        from fullwire import _native

        row, halves = values.numpy(), out[:-_TAIL].numpy()
        fits = _native.pack_numbers(_FLOAT16, row, halves)
        if not fits:
            _native.pack_numbers(_BFLOAT16, row, halves)
            self.widened += 1
        out[-_TAIL:] = _FLOAT16 if fits else _BFLOAT16

    def unpack_row(self, packed: Tensor, values: Tensor, *, adds: bool = False) -> None:
        """Widen each value, by the format of the row."""
        from fullwire import _native

        is_wide = int(packed[-1]) == _BFLOAT16
        _native.unpack_numbers(
            _BFLOAT16 if is_wide else _FLOAT16, packed[:-_TAIL].numpy(), values.numpy(), adds
        )


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
