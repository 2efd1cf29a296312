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
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from fullwire.errors import FullwireError, UsageError
from fullwire.studies.recording.job import STEPS

RANKS = 2
WIDTH = 512  # of the job's layers
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
