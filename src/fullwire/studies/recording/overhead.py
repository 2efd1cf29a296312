"""What does recording cost? Step time with the recorder over without, on this machine.

One model trains in the same processes in two ways, in turns of some steps. One way is recorded. For
the other, the recorder is taken out of torch, not merely silent (`job.py`). So a slow moment of a
shared machine falls on both ways. Two separate processes that do the same may differ by a percent
for as long as they live. A pair is two turns that follow each other, and its ratio is the time of
the one over the time of the other. Beside them stands a control, of which neither way is recorded:
its ratio would be 1 if the method were perfect.

Three jobs are measured (`JOBS`), as the cost depends on the job. A recorder does some work in every
step, which weighs most in short steps. It needs a processor, which is scarce where many ranks share
few.
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
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from fullwire.errors import FullwireError, UsageError
from fullwire.run.centre import Centre, centre_of
from fullwire.units import show_time

LONGER_S = 0.001  # work in each step of the way "longer"
FEWEST_PAIRS = 5
ROUND_PAIRS = 4  # are measured at a time, of the same buckets
SCRIPT = Path(__file__).with_name("job.py")
ALL = "all"  # the name that stands for each job

Difference: TypeAlias = Literal["record", "control", "hooks", "sampler", "longer"]
_Pair: TypeAlias = dict[Literal["plain", "other"], dict[Literal["wall_s", "cpu_s"], float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job that trains in turns; each turn takes about half a second on a quiet machine."""

    name: str
    ranks: int
    layers: int
    width: int
    batch: int
    steps: int  # of a turn
    processors: int | None = None  # that all of it may use, with its recorder; None: all

    def script_arguments(self) -> list[str]:
        """Return the arguments of `job.py`."""
        shape = (self.ranks, self.layers, self.width, self.batch)
        return [*map(str, shape), str(self.steps), str(ROUND_PAIRS), str(LONGER_S)]

    def allowed(self) -> set[int]:
        """Return the processors of this process that the job may use."""
        here = sorted(os.sched_getaffinity(0))
        return set(here[: self.processors])


USUAL = Job(name="usual", ranks=2, layers=40, width=512, batch=128, steps=4)
JOBS = (
    USUAL,
    Job(name="short-steps", ranks=2, layers=4, width=64, batch=32, steps=500),
    Job(name="many-ranks", ranks=8, layers=40, width=128, batch=32, steps=8, processors=2),
)


def jobs_named(names: Sequence[str]) -> tuple[Job, ...]:
    """Return the jobs of these names in the order of `JOBS`, each once."""
    known = {job.name: job for job in JOBS}
    for name in names:
        if name not in (*known, ALL):
            raise UsageError(f"job: expected {', '.join(known)} or {ALL}, got {name!r}")
    return tuple(job for job in JOBS if job.name in names or ALL in names)


@dataclass(frozen=True, slots=True)
class Pair:
    """The step on rank 0: the other way over the plain one, in wall time and CPU time."""

    step_s: float  # of the plain one
    step_ratio: float
    cpu_s: float  # of the other one's step, beyond the plain one's


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Pairs in the order of measurement, by the difference between their two ways."""

    job: Job
    pairs: Mapping[Difference, Sequence[Pair]]
    asked: int  # pairs; as many are measured, up to whole rounds of ROUND_PAIRS
    load: float  # processes ready to run, at the end; the job itself has one a rank


def measure_overhead(
    pairs: int,
    differences: Sequence[Difference] = ("record", "control"),
    job: Job = USUAL,
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
    with _recorded(job) as process:
        while len(taken[differences[-1]]) < pairs:
            for difference in differences:
                taken[difference] += [
                    Pair(
                        step_s=turns["plain"]["wall_s"] / job.steps,
                        step_ratio=turns["other"]["wall_s"] / turns["plain"]["wall_s"],
                        cpu_s=(turns["other"]["cpu_s"] - turns["plain"]["cpu_s"]) / job.steps,
                    )
                    for turns in _asked(process, difference)
                ]
            tell(min(pairs, len(taken[differences[-1]])))
        load = os.getloadavg()[0]
    return Overhead(job=job, pairs=taken, asked=pairs, load=load)


@contextmanager
def _recorded(job: Job) -> Iterator[subprocess.Popen[str]]:
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
                str(SCRIPT),
                *job.script_arguments(),
            ],
            # The recorder's sampler is to share the processors of the ranks: elsewhere it is free.
            preexec_fn=partial(os.sched_setaffinity, 0, job.allowed()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            process.communicate()  # closing its input ends it


def _asked(process: subprocess.Popen[str], difference: Difference) -> list[_Pair]:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(f"{difference}\n")
        process.stdin.flush()
        pairs: list[_Pair] = json.loads(process.stdout.readline())
    except (BrokenPipeError, json.JSONDecodeError):
        _, errors = process.communicate()
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
    """Yield the lines about the cost of recording one job."""
    job, recorded, control = result.job, result.pairs["record"], result.pairs["control"]
    step_s = _step_s(recorded)
    count = len(job.allowed())
    where = "" if job.processors is None else f" on {count} processor{'s' * (count > 1)}"
    yield (
        f"{job.name}: {job.ranks} ranks{where}, {job.layers} layers of width {job.width}, "
        f"{show_time(step_s)} a step without the recorder"
    )
    yield f"{len(recorded)} pairs of turns of {job.steps} steps{_why_more(result)}"
    for difference, pairs in result.pairs.items():
        ratio = _ratio(pairs)
        added = _added(ratio, step_s)
        yield (
            f"{_WORDS[difference]}: {ratio.value:.4f} "
            f"(95 % sure between {ratio.low:.4f} and {ratio.high:.4f}), "
            f"{_difference(added)} a step"
        )
    cpu, of_control = _cpu_s(recorded), _cpu_s(control)
    yield (
        f"processor time of recording a step, per rank: {cpu.value * 1e6:.0f} us "
        f"({cpu.low * 1e6:.0f} to {cpu.high * 1e6:.0f}; control {of_control.value * 1e6:.0f})"
    )
    yield (
        f"load of the machine at the end: {result.load:.1f}, of which some {job.ranks} are the "
        "job's"
    )
    wall = _ratio(recorded)
    if wall.high - wall.low > 0.01:
        yield "not sure to half a percent: ask for more --pairs, or a quiet moment"


def unmeasured_line(results: Sequence[Overhead]) -> str | None:
    """Return how to measure the other jobs; None if all are measured."""
    measured = {result.job.name for result in results}
    others = [job.name for job in JOBS if job.name not in measured]
    return f"other jobs: fullwire bench recorder --job {','.join(others)}" if others else None


def overheads_object(results: Sequence[Overhead]) -> dict[str, Any]:
    """Return the cost of recording as a JSON object: the first job's, and each one's in `jobs`."""
    jobs = [_object(result) for result in results]
    return {**jobs[0], "jobs": jobs}


def _object(result: Overhead) -> dict[str, Any]:
    job, recorded, control = result.job, result.pairs["record"], result.pairs["control"]
    step_s = _step_s(recorded)
    return {
        "job": job.name,
        "ranks": job.ranks,
        "processors": len(job.allowed()),
        "layers": job.layers,
        "width": job.width,
        "turn_steps": job.steps,
        "step_s": step_s,
        **_named("step_ratio", _ratio(recorded)),
        **_named("control_step_ratio", _ratio(control)),
        **_named("added_s", _added(_ratio(recorded), step_s)),
        **_named("control_added_s", _added(_ratio(control), step_s)),
        **_named("cpu_s", _cpu_s(recorded)),
        **_named("control_cpu_s", _cpu_s(control)),
        "step_ratios": [pair.step_ratio for pair in recorded],
        "control_step_ratios": [pair.step_ratio for pair in control],
        "load": result.load,
    }


def _why_more(result: Overhead) -> str:
    if len(result.pairs["record"]) == result.asked:
        return ""
    return f" ({result.asked} were asked for; pairs are measured {ROUND_PAIRS} at a time)"


def _added(ratio: Centre, step_s: float) -> Centre:
    """Return the time that a ratio adds to a step of this length."""
    return Centre(*((part - 1) * step_s for part in (ratio.value, ratio.low, ratio.high)))


def _difference(added: Centre) -> str:
    value, low, high = (
        f"{'-' if part < 0 else '+'}{show_time(abs(part))}"
        for part in (added.value, added.low, added.high)
    )
    return f"{value} ({low} to {high})"


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
