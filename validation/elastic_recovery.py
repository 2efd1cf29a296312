"""The time from SIGKILL of a worker to the next step that the others commit.

    python -m validation.elastic_recovery --rounds 100
    python -m validation.elastic_recovery --rounds 100 --sharded     # with FSDP2

Three workers train 2 MB of parameters in steps of 10 ms on this machine. In each round a worker
taken by chance is killed at a moment taken by chance. `fullwire run --respawn` replaces it, and the
next round begins once three workers train again. The time ends when the last survivor has committed
a step of the new epoch. Then all noted steps are held against each other: parameters, and samples.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from validation import arguments, results

WORKERS = 3
JOB = Path(__file__).parent / "jobs/elastic.py"
STEPS = "200000"  # more than a job takes
MEDIAN_GOAL_S, WORST_GOAL_S = 0.3, 1.0
LONGEST_S = 60.0  # of a round; the job may go on after it


class Step(NamedTuple):
    """A committed step, as one worker noted it."""

    at_s: float
    number: int
    size: int
    digest: int
    first: int
    last: int


class Notes:
    """The steps of all workers, read as they come."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[int, int] = {}
        self.steps: dict[int, list[Step]] = defaultdict(list)

    def look(self) -> None:
        """Read what came since the last look."""
        for path in self._folder.glob("steps of *"):
            worker = int(path.name.split()[-1])
            with path.open() as lines:
                lines.seek(self._read.get(worker, 0))
                new = lines.read().rpartition("\n")[0]
            if new:
                self._read[worker] = self._read.get(worker, 0) + len(new) + 1
                for line in new.splitlines():
                    at, *rest = line.split()
                    self.steps[worker].append(Step(float(at), *map(int, rest)))

    def training(self) -> list[int]:
        """Return the workers that committed the last step together, or some of them."""
        last = max((steps[-1].number for steps in self.steps.values()), default=0)
        return [w for w, steps in self.steps.items() if steps[-1].number >= last - 1]


def process_of(launcher: int, worker: int) -> int:
    """Return the process of a worker."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        said = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        if f"FULLWIRE_ELASTIC_WORKER={worker}".encode() in said:
            return int(child)
    raise ProcessLookupError(f"worker {worker}")


def wait_for_all(notes: Notes) -> list[int]:
    """Return the workers once three of them train."""
    until = time.monotonic() + LONGEST_S
    while time.monotonic() < until:
        notes.look()
        training = notes.training()
        if len(training) == WORKERS and all(
            len(notes.steps[w]) > 20 and notes.steps[w][-1].size == WORKERS for w in training
        ):
            return training
        time.sleep(0.05)
    raise TimeoutError(f"no {WORKERS} workers train within {LONGEST_S:g} s")


def recovery_s(notes: Notes, launcher: int, chosen: random.Random) -> tuple[int, float]:
    """Kill a worker; return its place and the time to the next step of all others."""
    training = sorted(wait_for_all(notes))
    time.sleep(chosen.uniform(0, 0.05))
    victim = chosen.choice(training)
    process = process_of(launcher, victim)
    killed = time.monotonic()
    os.kill(process, signal.SIGKILL)
    ended: dict[int, float] = {}
    while len(ended) < WORKERS - 1:
        if time.monotonic() > killed + LONGEST_S:
            return training.index(victim), LONGEST_S  # it counts as that long
        time.sleep(0.01)
        notes.look()
        for worker in set(training) - {victim}:
            after = (s.at_s for s in notes.steps[worker] if s.at_s > killed and s.size < WORKERS)
            if (first := next(after, None)) is not None:
                ended[worker] = first
    return training.index(victim), max(ended.values()) - killed


def check(notes: Notes) -> tuple[int, int]:
    """Return the steps, and those that two workers noted unlike; samples must fit their steps."""
    together: dict[int, list[Step]] = defaultdict(list)
    for steps in notes.steps.values():
        for step in steps:
            together[step.number].append(step)
    unlike = 0
    for number, steps in together.items():
        parts = sorted((step.first, step.last) for step in steps)
        apart = all(before[1] < after[0] for before, after in itertools.pairwise(parts))
        inside = 48 * (number - 1) <= parts[0][0] <= parts[-1][1] < 48 * number
        same = len({(step.digest, step.size) for step in steps}) == 1
        unlike += not (apart and inside and same)
    missing = max(together) - len(together)
    return len(together), unlike + missing


def play(
    script: list[str], kind: str, rounds: int, seed: int, most_s: float
) -> tuple[list[list[results.Cell]], int, int]:
    """Kill workers in rounds; return each round, the steps, and how many steps are wrong."""
    chosen, began = random.Random(seed), time.monotonic()
    played: list[list[results.Cell]] = []
    with tempfile.TemporaryDirectory() as name:
        notes = Notes(Path(name))
        run = [sys.executable, "-m", "fullwire", "run", "--workers", str(WORKERS), "--respawn"]
        job = [sys.executable, *script, name, STEPS, kind]
        launcher = subprocess.Popen([*run, "--", *job], stderr=subprocess.DEVNULL)
        try:
            while len(played) < rounds and time.monotonic() - began < most_s:
                place, took_s = recovery_s(notes, launcher.pid, chosen)
                played.append([len(played) + 1, place, round(took_s, 4)])
                print(*played[-1], flush=True)
        finally:
            launcher.terminate()
            launcher.wait()
        notes.look()
        return played, *check(notes)


def main() -> None:
    """Play the rounds and write the findings."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=30, help="begin no round after this")
    parser.add_argument("--sharded", action="store_true", help="with FSDP2")
    options = parser.parse_args()
    name, script, kind, model = "elastic-recovery", [str(JOB)], "elastic", ""
    if options.sharded:
        name, script, kind = "sharded-recovery", ["-m", "validation.jobs.sharded"], "notes"
        model = " of a model sharded with FSDP2"
    limits = options.rounds, options.seed, options.minutes * 60
    played, steps, wrong = play(script, kind, *limits)
    times_s = [float(row[2] or 0) for row in played]
    spread = results.spread(times_s)
    results.write(
        name,
        claim=f"After SIGKILL of any worker the others soon commit the next step{model}.",
        anchor=f"goals: a median of {MEDIAN_GOAL_S} s and {WORST_GOAL_S} s in the worst round",
        summary=f"{spread['median']:.2f} s in the median of {len(played)} kills, "
        f"{spread['worst']:.2f} s in the worst; {wrong} of {steps:,} steps unlike on two workers",
        measure="seconds to the next committed step",
        cases=len(played),
        **spread,
        tables=[
            results.Table(
                title="Seconds from SIGKILL to the next step of all others, by rank",
                columns=["rank killed", "rounds", "median", "worst"],
                rows=[
                    [place, len(ones), round(float(np.median(ones)), 3), max(ones)]
                    for place in range(WORKERS)
                    if (
                        ones := [
                            t for row, t in zip(played, times_s, strict=True) if row[1] == place
                        ]
                    )
                ],
            )
        ],
    )
    if wrong or spread["median"] > MEDIAN_GOAL_S or spread["worst"] > WORST_GOAL_S:
        sys.exit(
            f"median {spread['median']:.2f} s, worst {spread['worst']:.2f} s, {wrong} wrong steps"
        )


if __name__ == "__main__":
    main()
