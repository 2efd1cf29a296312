"""Real jobs under parallel plans, traced, and each predicted from the trace of another plan.

    .venv/bin/python -m validation.plan_pairs DIRECTORY

Two transformers train under plans of TP, PP and DP over Gloo: `jobs/planned.py`, with PyTorch's own
parts, on 2 and 4 ranks. From each trace `plan --from` predicts the other plans of the same model.
The truth is the time of a step without the profiler. All ranks share this machine, each with one
thread. Finished jobs stay in DIRECTORY, and the script goes on where it was.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from statistics import median
from typing import NamedTuple

import fullwire as fw
from fullwire.findings.plans import NotInRecording
from fullwire.run.kinds import usual_step_s
from fullwire.run.run import Run
from validation import arguments, results

MODELS = ("wide", "deep")  # of `jobs/planned.py`
# TP, PP, DP and ZeRO
PLANS = (
    *((1, 1, 2, 0), (1, 1, 2, 3), (1, 2, 1, 0), (2, 1, 1, 0)),
    *((1, 1, 4, 0), (1, 2, 2, 0), (2, 2, 1, 0), (2, 1, 2, 3), (4, 1, 1, 0)),
)
MICROBATCH = 2
MOST_S = 300


class Job(NamedTuple):
    """A recorded job: the model, TP, PP, DP and ZeRO."""

    model: str
    tp: int
    pp: int
    dp: int
    zero: int

    @property
    def ranks(self) -> int:
        """Return how many ranks take part."""
        return self.tp * self.pp * self.dp

    @property
    def name(self) -> str:
        """Return the name of its folder."""
        return f"{self.model} tp{self.tp} pp{self.pp} dp{self.dp} zero{self.zero}"


def recorded(job: Job, place: Path) -> None:
    """Run a job, unless its folder has the times already."""
    if (place / "times").exists():
        return
    place.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(job.ranks), "-m", "validation.jobs.planned"]
    command += [
        str(part) for part in (job.tp, job.pp, job.dp, job.zero, MICROBATCH, job.model, place)
    ]
    subprocess.run(command, check=True, timeout=MOST_S)


class Pair(NamedTuple):
    """A step that was predicted from the trace of another plan."""

    known: Job
    asked: Job
    predicted_s: float
    low_s: float
    high_s: float
    measured_s: float
    unseen: tuple[str, ...]  # messages that the trace has none of

    @property
    def error(self) -> float:
        """Return the share that the prediction is off."""
        return self.predicted_s / self.measured_s - 1

    @property
    def is_inside(self) -> bool:
        """Return whether the measured step is in the interval."""
        return self.low_s <= self.measured_s <= self.high_s


def predicted(known: Job, asked: Job, run: Run, measured_s: float) -> Pair:
    """Predict a plan from the trace of another one."""
    degrees = {"tp": asked.tp, "pp": asked.pp, "dp": asked.dp, "zero": asked.zero}
    answer = fw.plan(recorded=run, to=degrees)
    step_s, between = answer.best.step_s, answer.best.interval
    unseen = tuple(note.messages for note in answer.assumed if isinstance(note, NotInRecording))
    return Pair(known, asked, step_s, between.low_s, between.high_s, measured_s, unseen)


def main(given: Sequence[str] | None = None) -> None:
    """Record the jobs, and predict each from the others."""
    parser = arguments.parser(__doc__)
    parser.add_argument("directory", type=Path)
    asked = parser.parse_args(given)
    jobs = [Job(model, *plan) for model in MODELS for plan in PLANS]
    steps_s = {}
    print("| job | step | fastest | slowest | under the profiler |\n|---|---|---|---|---|")
    pairs: list[Pair] = []
    for job in jobs:
        recorded(job, asked.directory / job.name)
    runs = {job: fw.read(asked.directory / job.name) for job in jobs}
    for job, run in runs.items():
        lines = (asked.directory / job.name / "times").read_text().split()
        times_ms = sorted(1e3 * float(line) for line in lines)
        steps_s[job] = 1e-3 * median(times_ms)
        shown = [f"{time:.0f} ms" for time in (1e3 * steps_s[job], times_ms[0], times_ms[-1])]
        traced = f"{1e3 * (usual_step_s(run) or 0.0):.0f} ms"
        print(f"| {' | '.join([job.name, *shown, traced])} |")
    print("\n| traced | asked | measured | predicted | 90 % | error | not in the trace |")
    print("|---" * 7 + "|")
    for known, other in permutations(jobs, 2):
        if known.model == other.model:
            pair = predicted(known, other, runs[known], steps_s[other])
            pairs.append(pair)
            cells = [known.name, other.name, f"{1e3 * pair.measured_s:.0f} ms"]
            cells += [f"{1e3 * pair.predicted_s:.0f} ms"]
            cells += [f"{1e3 * pair.low_s:.0f} - {1e3 * pair.high_s:.0f}", f"{pair.error:+.0%}"]
            print(f"| {' | '.join([*cells, ', '.join(pair.unseen) or '-'])} |")
    kinds = {
        "of a model whose pairs set the intervals": [p for p in pairs if p.asked.model == "wide"],
        "of the other model": [p for p in pairs if p.asked.model == "deep"],
        "all parts in the trace": [p for p in pairs if not p.unseen],
        "one part not in it": [p for p in pairs if len(p.unseen) == 1],
        "two or more": [p for p in pairs if len(p.unseen) > 1],
        "as many ranks": [p for p in pairs if p.known.ranks == p.asked.ranks],
        "other numbers of ranks": [p for p in pairs if p.known.ranks != p.asked.ranks],
    }
    table = results.split(
        "pairs",
        [
            (name, [pair.error for pair in these], [pair.is_inside for pair in these])
            for name, these in kinds.items()
        ],
    )
    results.write(
        "plan-pairs",
        claim="The trace of one parallel plan tells the step of another plan of the same job.",
        anchor="PyTorch's own TP, PP, DDP and FSDP2 over Gloo, ranks of one machine",
        measure="relative error of the step",
        **results.said_of([pair.error for pair in pairs], [pair.is_inside for pair in pairs]),
        tables=[table],
    )


if __name__ == "__main__":
    main()
