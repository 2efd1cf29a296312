"""What does recording cost? Step time with the recorder over without, on this machine.

Two models train in the same processes, in turns of one step. One is recorded; for the other
the recorder is taken out of torch, not merely silent (`overhead_job.py`). A slow moment of a shared
machine so falls on both, and two processes that do the same may differ by a percent for as long as
they live. A pair is the ratio of what both took over some turns, with models made anew. Each pair
is followed by a control, of which neither model is recorded: its ratios would be 1 if the method
were perfect.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from fullwire.errors import FullwireError, UsageError

RANKS = 2
FEWEST_PAIRS = 5
_JOB = Path(__file__).with_name("overhead_job.py")

_Turn: TypeAlias = dict[Literal["plain", "other"], dict[Literal["wall_s", "cpu_s"], float]]


@dataclass(frozen=True, slots=True)
class Pair:
    """What a step takes on rank 0 with the other model over without, of wall and of CPU time."""

    step_s: float  # median, not recorded
    step_ratio: float
    cpu_s: float  # of the other model's step, beyond the plain one's


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Pairs of a recorded model and one that is not, and of two that are not, in order."""

    recorded: tuple[Pair, ...]
    control: tuple[Pair, ...]
    load: float  # processes that wanted to run, of which the job's own are RANKS; at the end


@dataclass(frozen=True, slots=True)
class Median:
    """A median, and the order statistics that enclose the true one in 95 of 100 cases."""

    value: float
    low: float
    high: float


def median_of(values: Sequence[float]) -> Median:
    """Return the median with its interval, which supposes nothing about how values scatter."""
    ordered = sorted(values)
    off = max(0, math.floor((len(ordered) - 1.96 * math.sqrt(len(ordered))) / 2))
    return Median(statistics.median(ordered), ordered[off], ordered[-1 - off])


def measure_overhead(pairs: int, tell: Callable[[int], None] = lambda done: None) -> Overhead:
    """Train the same model recorded and not recorded, in so many pairs of turns."""
    if pairs < FEWEST_PAIRS:
        raise UsageError(f"pairs: expected at least {FEWEST_PAIRS}, got {pairs}")
    if importlib.util.find_spec("torch") is None:
        raise UsageError(
            "bench recorder: expected PyTorch in the environment of fullwire, there is none: "
            "pip install torch"
        )
    recorded, control = [], []
    with _recorded_job() as job:
        for done in range(pairs):
            recorded.append(_pair(_turns(job, "record")))
            control.append(_pair(_turns(job, "control")))
            tell(done + 1)
        load = os.getloadavg()[0]
    return Overhead(recorded=tuple(recorded), control=tuple(control), load=load)


def _pair(turns: Sequence[_Turn]) -> Pair:
    return Pair(
        step_s=statistics.median(turn["plain"]["wall_s"] for turn in turns),
        step_ratio=statistics.median(
            turn["other"]["wall_s"] / turn["plain"]["wall_s"] for turn in turns
        ),
        cpu_s=statistics.median(turn["other"]["cpu_s"] - turn["plain"]["cpu_s"] for turn in turns),
    )


@contextmanager
def _recorded_job() -> Iterator[subprocess.Popen[str]]:
    with tempfile.TemporaryDirectory() as directory:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "fullwire.cli", "record", "-o", f"{directory}/x.run", "--",
                sys.executable, str(_JOB), str(RANKS),
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            process.communicate()  # closing its input ends it


def _turns(job: subprocess.Popen[str], kind: Literal["record", "control"]) -> list[_Turn]:
    assert job.stdin is not None
    assert job.stdout is not None
    try:
        job.stdin.write(f"{kind}\n")
        job.stdin.flush()
        turns: list[_Turn] = json.loads(job.stdout.readline())
    except (BrokenPipeError, json.JSONDecodeError):
        _, said = job.communicate()
        last = (said.strip().splitlines() or ["it said nothing"])[-1]
        raise FullwireError(f"bench recorder: the job ended before its time: {last}") from None
    return turns
