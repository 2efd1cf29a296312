"""A gradient compressor as a prediction needs it: the bytes that it leaves, and its cost.

Three kinds are in use. The output of the first kind can be *summed* on the way (a low-rank factor),
so it travels by all-reduce like the gradient itself. The second kind has fewer bits per element and
travels by direct *exchange*: each worker owns a part, adds what the others send for it, and packs
the mean once. It sends as many bytes as a ring, in fewer messages. The output of the third kind
cannot be added in parts (the largest 1 % of the elements, at other places in each worker). Every
worker has to *gather* the output of all others and unpack it, so wire time and unpacking grow with
the cluster.

The paper's compressor is free: it can be summed, and packing takes no time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias, cast, get_args

from fullwire.errors import UsageError
from fullwire.units import bits_per_second, ratio, seconds

if TYPE_CHECKING:  # Jobs read compressors too, and compute no steps.
    import numpy as np
    from numpy.typing import NDArray

Combining: TypeAlias = Literal["sum", "exchange", "gather"]
_EXPECTED = (
    "RATIO,ENCODE_RATE,DECODE_RATE,sum|exchange|gather and the time for a bucket if you know it, "
    "like 4,20GB/s,20GB/s,sum or 2,14GB/s,12GB/s,exchange,1.4ms"
)


@dataclass(frozen=True, slots=True)
class MoreSteps:
    """The steps to the loss of float32 gradients: so many times as many, and then some more.

    A codec that sends a part of each gradient, and the rest later, makes a training late. It is
    late by a number of steps that grows with the codec's ratio, and not with the training.
    """

    times: float = 1
    low: float = 1
    high: float = 1
    late: tuple[float, float, float] = (0, 0, 0)  # usual, low and high: steps over the ratio

    def of(self, steps: NDArray[np.float64], ratio: float) -> tuple[NDArray[np.float64], ...]:
        """Return the usual, fewest and most steps for so many steps of float32 gradients."""
        usual, low, high = (each * ratio for each in self.late)
        return steps * self.times + usual, steps * self.low + low, steps * self.high + high


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressor:
    """A compressor by its figures; the speeds are of the uncompressed side, in bits per second."""

    ratio: float
    encode_bps: float = math.inf
    decode_bps: float = math.inf
    combining: Combining = "sum"
    work_per_byte: float = 1.0  # of sending and adding a compressed byte, relative to a float32's
    bucket_s: float = 0.0  # of a hook's own work for a bucket, whatever its size
    name: str = ""  # of a codec with a name
    # Where its cost is not measured: "a processor" or "a GPU". The speeds then come from
    # `cost_source`, or count as nothing if that is empty.
    unmeasured_on: str = ""
    cost_source: str = ""
    steps: MoreSteps | None = None  # to the same loss; None if nobody measured them

    def __post_init__(self) -> None:
        if not (self.ratio >= 1 and math.isfinite(self.ratio)):
            raise UsageError(f"compression: expected a ratio of 1 or more, got {self.ratio:g}")
        if not (self.encode_bps > 0 and self.decode_bps > 0):
            raise UsageError("compression: expected encode and decode rates above 0")
        if self.combining not in get_args(Combining):
            known = ", ".join(get_args(Combining))
            raise UsageError(f"compression: expected one of {known}, got {self.combining!r}")

    @property
    def is_free(self) -> bool:
        """Whether this is the paper's compressor: a ratio and nothing to pay for it."""
        return not self.name and self._costs_nothing

    @property
    def is_none(self) -> bool:
        """Whether gradients go as they are."""
        return self.is_free and self.ratio == 1

    @property
    def label(self) -> str:
        """Return its name, or else its figures."""
        return self.name or str(self)

    @property
    def _costs_nothing(self) -> bool:
        rates_bps = self.encode_bps, self.decode_bps
        return self.combining == "sum" and not self.bucket_s and min(rates_bps) == math.inf

    def codec_s_per_byte(self, workers: int) -> float:
        """Return the time to pack one byte of gradient, and to unpack what comes back for it."""
        unpacked = {"sum": 1.0, "gather": workers, "exchange": 2 - 1 / workers}[self.combining]
        return 8 / self.encode_bps + unpacked * 8 / self.decode_bps

    def slower(self, times: float) -> Compressor:
        """Return the same compressor with all its work so many times as long."""
        return replace(
            self,
            encode_bps=self.encode_bps / times,
            decode_bps=self.decode_bps / times,
            bucket_s=self.bucket_s * times,
        )

    def __str__(self) -> str:
        """Return its figures in the form that `parse_codec` reads."""
        if self._costs_nothing:
            return f"{self.ratio:.12g}"
        rates = f"{_bytes_per_s(self.encode_bps)},{_bytes_per_s(self.decode_bps)}"
        for_a_bucket = f",{self.bucket_s:.12g}s" if self.bucket_s else ""
        return f"{self.ratio:.12g},{rates},{self.combining}{for_a_bucket}"


def _bytes_per_s(rate_bps: float) -> str:
    rate = rate_bps / 8
    for factor, unit in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if rate >= factor:
            return f"{rate / factor:.12g}{unit}"
    return f"{rate:.12g}B/s"


def parse_codec(text: str) -> Compressor:
    """Read RATIO,ENCODE_RATE,DECODE_RATE,sum|exchange|gather[,TIME for a bucket]."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) not in (4, 5) or parts[3] not in get_args(Combining):
        raise UsageError(f"codec: expected {_EXPECTED}, got {text!r}")
    return Compressor(
        ratio=ratio(parts[0], "codec ratio"),
        encode_bps=bits_per_second(parts[1], "codec encode rate"),
        decode_bps=bits_per_second(parts[2], "codec decode rate"),
        combining=cast(Combining, parts[3]),
        bucket_s=seconds(parts[4], "codec time for a bucket") if len(parts) == 5 else 0.0,
    )
