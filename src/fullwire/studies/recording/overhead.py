"""What does recording cost? Step time with the recorder over without, on this machine.

One model trains in the same processes in two ways, in turns of some steps. One way is recorded. For
the other, the recorder is taken out of torch, not merely silent (`job.py`). So a slow moment of a
shared machine falls on both ways. Two separate processes that do the same may differ by a percent
for as long as they live. A pair is two turns that follow each other, and its ratio is the time of
the one over the time of the other. Beside them stands a control, of which neither way is recorded:
its ratio would be 1 if the method were perfect.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from fullwire.errors import FullwireError, UsageError
from fullwire.run.centre import Centre, centre_of
from fullwire.units import show_time

RANKS = 2
WIDTH = 512  # of the job's layers
STEPS = 4  # of a turn
LONGER_S = 0.001  # work in each step of the way "longer"
FEWEST_PAIRS = 5
JOB = Path(__file__).with_name("job.py")

Difference: TypeAlias = Literal["record", "control", "hooks", "sampler", "longer"]
_Pair: TypeAlias = dict[Literal["plain", "other"], dict[Literal["wall_s", "cpu_s"], float]]


@dataclass(frozen=True, slots=True)
class Pair:
    """The step on rank 0: the other way over the plain one, in wall time and CPU time."""

    step_s: float  # of the plain one
    step_ratio: float
    cpu_s: float  # of the other one's step, beyond the plain one's


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Pairs in the order of measurement, by the difference between their two ways."""

    pairs: Mapping[Difference, Sequence[Pair]]
    load: float  # processes ready to run, at the end; the job itself has RANKS of them


def measure_overhead(
    pairs: int,
    differences: Sequence[Difference] = ("record", "control"),
    tell: Callable[[int], None] = lambda done: None,
) -> Overhead:
    """Train the same model recorded and not recorded, in at least `pairs` pairs of turns."""
    if pairs < FEWEST_PAIRS:
        raise UsageError(f"pairs: expected at least {FEWEST_PAIRS}, got {pairs}")
    if importlib.util.find_spec("torch") is None:
        raise UsageError(
            "bench recorder: expected PyTorch in the environment of fullwire, there is none: "
            "pip install torch"
        )
    taken: dict[Difference, list[Pair]] = {difference: [] for difference in differences}
    with _recorded_job() as job:
        while len(taken[differences[-1]]) < pairs:
            for difference in differences:
                taken[difference] += [
                    Pair(
                        step_s=turns["plain"]["wall_s"] / STEPS,
                        step_ratio=turns["other"]["wall_s"] / turns["plain"]["wall_s"],
                        cpu_s=(turns["other"]["cpu_s"] - turns["plain"]["cpu_s"]) / STEPS,
                    )
                    for turns in _asked(job, difference)
                ]
            tell(min(pairs, len(taken[differences[-1]])))
        load = os.getloadavg()[0]
    return Overhead(pairs=taken, load=load)


@contextmanager
def _recorded_job() -> Iterator[subprocess.Popen[str]]:
    with tempfile.TemporaryDirectory() as directory:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "fullwire",
                "record",
                "-o",
                f"{directory}/x.run",
                "--",
                sys.executable,
                str(JOB),
                str(RANKS),
                str(WIDTH),
                str(STEPS),
                str(LONGER_S),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            process.communicate()  # closing its input ends it


def _asked(job: subprocess.Popen[str], difference: Difference) -> list[_Pair]:
    assert job.stdin is not None
    assert job.stdout is not None
    try:
        job.stdin.write(f"{difference}\n")
        job.stdin.flush()
        pairs: list[_Pair] = json.loads(job.stdout.readline())
    except (BrokenPipeError, json.JSONDecodeError):
        _, errors = job.communicate()
        last = (errors.strip().splitlines() or ["it said nothing"])[-1]
        raise FullwireError(f"bench recorder: the job ended before its time: {last}") from None
    return pairs


_WORDS: dict[Difference, str] = {
    "record": "step time with the recorder over without",
    "control": "the same with no recorder in either (control)",
    "hooks": "the same with its hooks in torch alone",
    "sampler": "the same with the sampler beside the job alone",
    "longer": f"the same with nothing but {show_time(LONGER_S)} of work more in each step",
}


def overhead_lines(result: Overhead) -> Iterator[str]:
    """Yield the lines about the cost of recording."""
    recorded, control = result.pairs["record"], result.pairs["control"]
    yield (
        f"{len(recorded)} pairs of turns of {STEPS} steps, {RANKS} ranks, 40 layers, "
        f"{show_time(_step_s(recorded))} a step without the recorder"
    )
    for difference, pairs in result.pairs.items():
        ratio = _ratio(pairs)
        yield (
            f"{_WORDS[difference]}: {ratio.value:.4f} "
            f"(95 % sure between {ratio.low:.4f} and {ratio.high:.4f})"
        )
    cpu, of_control = _cpu_s(recorded), _cpu_s(control)
    yield (
        f"processor time of recording a step, per rank: {cpu.value * 1e6:.0f} us "
        f"({cpu.low * 1e6:.0f} to {cpu.high * 1e6:.0f}; control {of_control.value * 1e6:.0f})"
    )
    yield f"load of the machine at the end: {result.load:.1f}, of which some {RANKS} are the job's"
    wall = _ratio(recorded)
    if wall.high - wall.low > 0.01:
        yield "not sure to half a percent: ask for more --pairs, or a quiet moment"


def overhead_object(result: Overhead) -> dict[str, Any]:
    """Return the cost of recording as a JSON object."""
    recorded, control = result.pairs["record"], result.pairs["control"]
    return {
        "step_s": _step_s(recorded),
        **_named("step_ratio", _ratio(recorded)),
        **_named("control_step_ratio", _ratio(control)),
        **_named("cpu_s", _cpu_s(recorded)),
        **_named("control_cpu_s", _cpu_s(control)),
        "step_ratios": [pair.step_ratio for pair in recorded],
        "control_step_ratios": [pair.step_ratio for pair in control],
        "load": result.load,
    }


def _step_s(pairs: Sequence[Pair]) -> float:
    return centre_of([pair.step_s for pair in pairs]).value


def _ratio(pairs: Sequence[Pair]) -> Centre:
    # Of logarithms: a ratio and its inverse are equally far from 1.
    centre = centre_of([math.log(pair.step_ratio) for pair in pairs])
    return Centre(math.exp(centre.value), math.exp(centre.low), math.exp(centre.high))


def _cpu_s(pairs: Sequence[Pair]) -> Centre:
    return centre_of([pair.cpu_s for pair in pairs])


def _named(name: str, centre: Centre) -> dict[str, Any]:
    return {name: centre.value, f"{name}_interval": {"low": centre.low, "high": centre.high}}
