"""Codecs on this machine: bytes, speeds, errors, and the bandwidth below which each one pays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, inf, log
from pathlib import Path
from typing import Any

import numpy as np

from fullwire.answers.conditions import OneOrMany, several
from fullwire.answers.opening import RunLike
from fullwire.answers.whatif import whatif
from fullwire.compression.codec import CODECS, Choice, Cost, parse_choice
from fullwire.compression.compressor import Compressor
from fullwire.display import Result, html_table
from fullwire.errors import UsageError
from fullwire.units import count, show_count, show_rate

SLOWEST_BPS, FASTEST_BPS = 1e7, 4e11
_RATES = 120  # Between both.
_REPEATS, _QUICK_REPEATS = 9, 3
USUAL_MODEL = "vgg16@v100"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecRow:
    """One codec: as measured here, and where it pays."""

    codec: str
    label: str
    ratio: float
    packed_bytes: int
    speeds: tuple[dict[str, float], ...]  # On one thread, and on all.
    gaussian_error: float
    gradient_error: float
    pays_below_bps: float | None  # None: it never pays.


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Codecs(Result):
    """A table of codecs on this machine, with the steps of one model by bandwidth."""

    machine: str
    model: str
    workers: int
    gradients: str  # A model: errors of its gradients stand beside those of gaussian values.
    bucket_bytes: int
    codecs: tuple[CodecRow, ...]
    bandwidth_bps: tuple[float, ...]
    step_s: Mapping[str, tuple[float, ...]]  # By codec, and "float32", for each bandwidth.

    def _in_short(self) -> Iterator[str]:
        yield f"{show_count(len(self.codecs), 'codec')} on {self.machine}"
        for row in self.codecs:
            yield f"{row.codec}: {row.ratio:.4g} times fewer bytes, pays {pays(row)}"

    def _tables(self) -> Mapping[str, Mapping[str, Any]]:
        names = ("codec", "ratio", "gaussian_error", "gradient_error", "pays_below_bps")
        return {"codecs": {name: [getattr(row, name) for row in self.codecs] for name in names}}

    def _picture(self) -> str:
        return html_table(
            {name: np.array(values) for name, values in self._tables()["codecs"].items()}
        )


def codecs(
    only: OneOrMany = None,
    *,
    model: RunLike = USUAL_MODEL,
    workers: int = 4,
    gradients: str | Path | None = None,
    quick: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Codecs:
    """Measure codecs on this machine, and tell the bandwidth below which each one pays.

    - `only`: some codecs, with settings such as `"powersgd:rank=2"`. All if left out.
    - `model`, `workers`: a run or a built-in workload, and on how many workers it trains.
    - `gradients`: a file with real gradients (.pt, .npy, .npz). A run does not hold any. Without a
      file, a small network is trained for some steps.
    - `quick`: fewer repeats.
    - `progress`: is called with the number of codecs that are measured, and of all.

        fw.codecs("bf16,int8", model="job.run").to_pandas()
    """
    try:
        from fullwire.compression import measured
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UsageError("codecs: packing needs PyTorch: pip install fullwire[torch]") from None
    choices = [parse_choice(key) for key in CODECS if CODECS[key].method is not None]
    if only is not None:
        choices = list(several(only, lambda text: parse_choice(str(text))))
    if not choices:
        raise UsageError("codecs: expected at least one codec")
    ranks = count(workers, "workers", least=2)  # One worker sends nothing, so no codec pays.
    real = (
        measured.gradients_of_small_network()
        if gradients is None
        else measured.gradients_in(Path(gradients))
    )
    found = []
    for number, choice in enumerate(choices):
        repeats = _QUICK_REPEATS if quick else _REPEATS
        found.append(measured.measure(choice, real, repeats=repeats))
        if progress:
            progress(number + 1, len(choices))
    costs = [
        Cost(
            encode_bps=entry.speeds[0].pack_bps,
            decode_bps=entry.speeds[0].unpack_bps,
            source="measured here",
        )
        for entry in found
    ]
    steps, name = _steps(choices, costs, model, ranks)
    rates, plain_s = np.geomspace(SLOWEST_BPS, FASTEST_BPS, _RATES), steps["float32"]
    return Codecs(
        machine=measured.machine(),
        model=name,
        workers=ranks,
        gradients="a small network" if gradients is None else str(gradients),
        bucket_bytes=measured.BUCKET_BYTES,
        codecs=tuple(
            CodecRow(
                codec=each.codec,
                label=choice.codec.label,
                ratio=each.ratio,
                packed_bytes=each.packed_bytes,
                speeds=tuple(asdict(speed) for speed in each.speeds),
                gaussian_error=each.gaussian_error,
                gradient_error=each.gradient_error,
                pays_below_bps=_crossing(rates.tolist(), plain_s, steps[each.codec]),
            )
            for choice, each in zip(choices, found, strict=True)
        ),
        bandwidth_bps=tuple(rates.tolist()),
        step_s=steps,
    )


def pays(row: CodecRow) -> str:
    """Say where a codec pays."""
    if row.pays_below_bps is None:
        return "nowhere"
    if row.pays_below_bps == inf:
        return f"up to {show_rate(FASTEST_BPS)} and more"
    return f"below {show_rate(row.pays_below_bps)}"


def _steps(
    choices: Sequence[Choice], costs: Sequence[Cost], model: RunLike, workers: int
) -> tuple[dict[str, tuple[float, ...]], str]:
    """Predict the model's step for each bandwidth, without a codec and with each one."""
    only = whatif(model, workers=workers, bandwidth="1Gbps")
    sizes = [int(size) // 4 for size in only.subjects[0].step.bytes.tolist()]
    asked = [
        choice.compressor(on_gpu=False, sizes=sizes, cost=cost)
        for choice, cost in zip(choices, costs, strict=True)
    ]
    rates = np.geomspace(SLOWEST_BPS, FASTEST_BPS, _RATES).tolist()
    table = whatif(model, workers=workers, bandwidth=rates, codec=[Compressor(ratio=1), *asked])
    by_codec = table["step_s"].reshape(_RATES, 1 + len(asked)).T.tolist()
    names = ["float32", *map(str, choices)]
    return {name: tuple(values) for name, values in zip(names, by_codec, strict=True)}, str(
        table["run"][0]
    )


def _crossing(
    rates: Sequence[float], plain_s: Sequence[float], packed_s: Sequence[float]
) -> float | None:
    """Return the largest bandwidth at which the packed step is shorter; inf if it always is."""
    gains = [log(plain) - log(packed) for plain, packed in zip(plain_s, packed_s, strict=True)]
    shorter = [number for number, gain in enumerate(gains) if gain > 0]
    if not shorter:
        return None
    last = shorter[-1]
    if last == len(rates) - 1:
        return inf
    share = gains[last] / (gains[last] - gains[last + 1])
    return exp(log(rates[last]) + share * (log(rates[last + 1]) - log(rates[last])))
