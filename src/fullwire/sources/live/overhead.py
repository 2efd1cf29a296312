"""What does recording cost? Step time with the recorder over without, on this machine.

Two jobs are up at once, of which one is recorded; they take turns of one step while the other
sleeps, so that a slow moment of a shared machine falls on both. Some steps of each make a pair: the
ratio of their medians. After some pairs both jobs are started anew, because two processes that do
the same differ by up to a percent for as long as they live.
"""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fullwire.errors import FullwireError, UsageError

RANKS = 2
STEPS_A_PAIR = 16
PAIRS_A_LIFE = 4
_WARM_UP_STEPS = 5
FEWEST_PAIRS = 5
_JOB = Path(__file__).with_name("overhead_job.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Ratios of a pair each, of wall time and of CPU time of rank 0, in order."""

    step_s: float  # median, not recorded
    wall_ratios: tuple[float, ...]
    cpu_ratios: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Median:
    """A median, and the order statistics that enclose the true one in 95 of 100 cases."""

    value: float
    low: float
    high: float


def median_of(ratios: Sequence[float]) -> Median:
    """Return the median with its interval, which supposes nothing about how values scatter."""
    ordered = sorted(ratios)
    off = max(0, math.floor((len(ordered) - 1.96 * math.sqrt(len(ordered))) / 2))
    return Median(statistics.median(ordered), ordered[off], ordered[-1 - off])


def measure_overhead(
    pairs: int, tell: Callable[[int], None] = lambda done: None, *, record: bool = True
) -> Overhead:
    """Train the same model recorded and not recorded, in so many pairs of turns.

    With `record` false both jobs are the same, and the ratios show how much the method scatters.
    """
    if pairs < FEWEST_PAIRS:
        raise UsageError(f"pairs: expected at least {FEWEST_PAIRS}, got {pairs}")
    if importlib.util.find_spec("torch") is None:
        raise UsageError(
            "bench recorder: expected PyTorch in the environment of fullwire, there is none: "
            "pip install torch"
        )
    measured = []
    for done, pair in zip(range(pairs), _all_pairs(record), strict=False):
        measured.append(pair)
        tell(done + 1)
    return Overhead(
        step_s=statistics.median(plain["wall_s"] for plain, _ in measured),
        wall_ratios=tuple(other["wall_s"] / plain["wall_s"] for plain, other in measured),
        cpu_ratios=tuple(other["cpu_s"] / plain["cpu_s"] for plain, other in measured),
    )


def _all_pairs(record: bool) -> Iterator[tuple[dict[str, float], dict[str, float]]]:
    plain = [sys.executable, str(_JOB), str(RANKS)]
    recorder = [sys.executable, "-m", "fullwire.cli", "record", "-o"]
    while True:
        with tempfile.TemporaryDirectory() as directory:
            other = [*recorder, f"{directory}/x.run", "--", *plain] if record else plain
            with _started(plain) as first, _started(other) as second:
                for _ in range(_WARM_UP_STEPS):
                    _step(first), _step(second)
                for _ in range(PAIRS_A_LIFE):
                    yield _pair(first, second)


def _pair(
    first: subprocess.Popen[str], second: subprocess.Popen[str]
) -> tuple[dict[str, float], dict[str, float]]:
    steps = [(_step(first), _step(second)) for _ in range(STEPS_A_PAIR)]
    plain, other = zip(*steps, strict=True)
    return _medians(plain), _medians(other)


def _medians(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(step[name] for step in steps) for name in steps[0]}


@contextmanager
def _started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.communicate()  # closing its input ends it


def _step(job: subprocess.Popen[str]) -> dict[str, float]:
    assert job.stdin is not None
    assert job.stdout is not None
    try:
        job.stdin.write("go\n")
        job.stdin.flush()
        measured: dict[str, float] = json.loads(job.stdout.readline())
    except (BrokenPipeError, json.JSONDecodeError):
        _, said = job.communicate()
        last = (said.strip().splitlines() or ["it said nothing"])[-1]
        raise FullwireError(f"bench recorder: the job ended before its time: {last}") from None
    return measured
