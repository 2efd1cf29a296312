"""The jobs of a study: which are played on the lab, quickly and in full, and what each is called.

Emulated trials train as a V100 would, under real DDP over real shaped links; their computation is
waiting. Dilated ten times they stand for processors ten times as fast as this machine's, so that
the network is the point and not the processors. Real trials compute on this machine's processors.
A trial's name holds all that makes it what it is, so a run of that name need not be recorded again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fullwire.units import bits_per_second

Kind: TypeAlias = Literal["emulated", "real"]

V100S = ("resnet50@v100", "resnet101@v100", "vgg16@v100")
BUCKETS = "ddp:25MiB"  # where compression is the point: one size, so that it divides
_BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One job on a lab of this machine."""

    kind: Kind
    model: str  # a built-in workload, or for a real one mlp-WIDTH
    workers: int
    rate: str
    steps: int = 6
    dilation: int = 1
    buckets: str = "ddp"  # of what is sent
    compression: int = 1  # emulated: so many times fewer bytes, by a codec that costs nothing
    half: bool = False  # real: PyTorch's float16 hook
    batch: int = 32

    @property
    def name(self) -> str:
        """What its run is called."""
        words = [self.model.replace("@", "-"), f"{self.workers}x{self.rate}"]
        words += [f"dilated-{self.dilation}"] * (self.dilation > 1)
        words += [self.buckets.replace(":", "-")] * (self.buckets != "ddp")
        words += [f"compressed-{self.compression}"] * (self.compression > 1)
        words += ["half"] * self.half
        words += [f"batch-{self.batch}"] * (self.batch != 32)
        return "_".join(words)

    @property
    def rate_bps(self) -> float:
        """The line rate of each link."""
        return bits_per_second(self.rate)

    @property
    def sent_buckets(self) -> str:
        """The buckets that a job with compressed gradients fills as the others do."""
        if self.compression == 1:
            return self.buckets
        return f"ddp:{_BUCKET_BYTES // self.compression}B"

    @property
    def width(self) -> int:
        """The width of a real trial's layers."""
        return int(self.model.removeprefix("mlp-"))


def _emulated(model: str, workers: int, rate: str, steps: int, dilation: int = 1) -> Trial:
    return Trial(
        kind="emulated", model=model, workers=workers, rate=rate, steps=steps, dilation=dilation
    )


def _compressed(compression: int, rate: str) -> Trial:
    return Trial(
        kind="emulated",
        model="resnet50@v100",
        workers=4,
        rate=rate,
        dilation=10,
        buckets=BUCKETS,
        compression=compression,
        steps=3,
    )


def _real(
    width: int, workers: int, rate: str, *, half: bool = False, batch: int = 32, steps: int = 20
) -> Trial:
    return Trial(
        kind="real",
        model=f"mlp-{width}",
        workers=workers,
        rate=rate,
        half=half,
        batch=batch,
        steps=steps,
    )


QUICK = (
    _emulated("resnet50@v100", 1, "10Gbps", 10),
    _emulated("resnet50@v100", 2, "1Gbps", 4),
    _emulated("resnet50@v100", 4, "1Gbps", 3),
    _emulated("resnet50@v100", 2, "10Gbps", 12),
    _emulated("resnet50@v100", 4, "10Gbps", 8),
    _emulated("resnet50@v100", 2, "10Gbps", 4, 10),
    _emulated("resnet50@v100", 4, "10Gbps", 3, 10),
    _emulated("resnet50@v100", 4, "100Gbps", 4, 10),
    _emulated("vgg16@v100", 2, "10Gbps", 4),
    _compressed(2, "10Gbps"),
    _compressed(5, "10Gbps"),
    _real(1536, 1, "10Gbps"),
    _real(1536, 2, "10Gbps"),
    _real(1536, 4, "10Gbps"),
    _real(1536, 2, "10Gbps", half=True),
    _real(1536, 2, "1Gbps", steps=8),
    _real(512, 2, "1Gbps"),
    _real(512, 2, "10Gbps"),
    _real(512, 2, "10Gbps", batch=128, steps=12),
    _real(1536, 2, "1Gbps", batch=128, steps=8),
)


def _more() -> Iterator[Trial]:
    """Go through what the full study plays besides."""
    yield _emulated("resnet50@v100", 1, "10Gbps", 10, 10)
    yield _emulated("resnet50@v100", 2, "100Gbps", 8, 10)
    for workers in (2, 3, 4):
        for model in V100S:
            for rate, dilation in (
                ("1Gbps", 1),
                ("5Gbps", 1),
                ("10Gbps", 1),
                ("10Gbps", 10),
                ("25Gbps", 10),
                ("100Gbps", 10),
            ):
                steps = 4 if "vgg" in model or rate == "1Gbps" else 6
                yield _emulated(model, workers, rate, steps, dilation)
    for model in V100S:
        yield _emulated(model, 1, "10Gbps", 10)
    for rate in ("10Gbps", "100Gbps"):
        for compression in (1, 2, 3, 5, 10):
            yield _compressed(compression, rate)
    for width in (512, 1024, 1536, 2048):
        for batch in (32, 128):
            for rate in ("1Gbps", "10Gbps"):
                yield _real(width, 2, rate, batch=batch, steps=12)
    for workers in (1, 2, 3, 4):
        yield _real(1536, workers, "10Gbps")
    yield _real(1536, 2, "1Gbps", half=True)
    yield _real(1024, 4, "1Gbps")


def planned(quick: bool) -> tuple[Trial, ...]:
    """Return the trials of a study; the quick ones are part of the full study."""
    wanted = {trial.name: trial for trial in QUICK}
    if not quick:
        for trial in _more():
            wanted.setdefault(trial.name, trial)
    return tuple(wanted.values())
