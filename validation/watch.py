"""Watch jobs of the lab from outside while they are recorded from inside, and compare both.

    python -m validation.watch FOLDER [--only WORDS]

Each job runs some 40 s. The folder keeps what was found, so that a script that was ended goes on
where it was. Then come stuck jobs, of which the rank that the others wait for is known.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import fullwire as fw
from fullwire.answers.watched import Watched
from fullwire.collectives.closed_form import sent_as
from fullwire.recorder.jobs_here import jobs_here
from fullwire.run.usual import usual_steps
from validation import arguments, results

SECONDS = 30.0
START_S, END_S = 60.0, 90.0  # within which a job has begun, and has ended
STOP_AFTER = 4  # steps after the one that is under way
TRANSFER = ("line_rate", "latency", "transport")
FAR = 0.8  # of a doubling: an error that is a wrong multiple of the step
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job: its ranks, their links, and the options of validation.jobs.watched."""

    workers: int = 2
    rate: str = "1Gbps"
    backend: str = "gloo"
    given: Mapping[str, str | float] = field(default_factory=dict)
    lab: tuple[str, ...] = ()  # more options of the lab
    seconds: float = SECONDS  # of watching
    rank: int | None = None  # that is waited for, of a stuck job

    def __str__(self) -> str:
        words = (f"{name} {value}" for name, value in self.given.items())
        return ", ".join([f"{self.workers} x {self.rate}", self.backend, *words, *self.lab])

    @property
    def name(self) -> str:
        """Return the name of its folder."""
        return str(self).replace(", ", "_").replace(" ", "-").replace("/", "-")


# The finder of steps was developed on the first 14 jobs; FRESH came after it.
CASES = (
    Case(given={"bytes": 25_000_000}),
    Case(rate="100Mbps", given={"bytes": 2_000_000, "work-s": 0.05}),
    Case(rate="10Gbps", given={"work-s": 0.2}),
    Case(backend="fullwire"),
    Case(workers=4, given={"bytes": 8_000_000, "work-s": 0.05}),
    Case(given={"kind": "sharded", "bytes": 16_000_000}),
    Case(given={"kind": "adding"}),
    Case(rate="10Gbps", given={"bytes": 262_144, "work-s": 0.012}),
    Case(rate="100Mbps", given={"bytes": 25_000_000, "work-s": 2.5}, seconds=75),
    Case(given={"evaluate-every": 15}),
    Case(given={"bytes": 8_000_000, "late-s": 0.2}),
    Case(given={"bytes": 8_000_000, "load-s": 0.2}),
    Case(given={"kind": "by-hand", "bytes": 50_000_000}),
    Case(workers=3, rate="500Mbps", backend="fullwire", given={"bytes": 8_000_000}),
)
FRESH = (
    Case(rate="5Gbps", workers=4, given={"bytes": 25_000_000}),
    Case(rate="2Gbps", workers=4, backend="fullwire", given={"bytes": 16_000_000}),
    Case(rate="200Mbps", given={"kind": "by-hand", "bytes": 4_000_000, "work-s": 0.06}),
    Case(rate="100Mbps", backend="fullwire", given={"bytes": 8_000_000, "work-s": 0.2}),
    Case(workers=3, given={"kind": "sharded", "bytes": 12_000_000, "work-s": 0.15}),
    Case(rate="500Mbps", backend="fullwire", given={"kind": "adding", "bytes": 12_000_000}),
    Case(given={"kind": "local", "local-steps": 4, "bytes": 12_000_000, "work-s": 0.04}),
    Case(
        rate="200Mbps",
        backend="fullwire",
        given={"kind": "local", "local-steps": 4, "work-s": 0.06},
    ),
    Case(rate="10Gbps", backend="fullwire", given={"bytes": 131_072, "work-s": 0.018}),
    Case(given={"bytes": 50_000_000, "work-s": 4.5}, seconds=75),
    Case(backend="fullwire", given={"bytes": 50_000_000, "work-s": 1.0}),
    Case(rate="500Mbps", given={"bytes": 4_000_000, "work-s": 0.05, "evaluate-every": 60}),
    Case(workers=3, backend="fullwire", given={"bytes": 8_000_000, "late-s": 0.1}),
    Case(backend="fullwire", given={"bytes": 8_000_000, "load-s": 0.12}),
    Case(given={"bytes": 16_000_000, "beside": "computing"}),
    Case(given={"bytes": 16_000_000, "beside": "sending"}),
    Case(given={"bytes": 8_000_000, "loader-s": 0.3}),
    Case(backend="fullwire", given={"bytes": 8_000_000, "late-load-s": 0.15}),
)
STUCK = (
    Case(given={"hang": "input", "bytes": 2_000_000}, rank=1),
    Case(given={"hang": "groups", "bytes": 2_000_000}),
    Case(given={"hang": "missing", "bytes": 2_000_000}, rank=1),
    Case(given={"hang": "stopped", "bytes": 2_000_000}, rank=1),
    Case(given={"hang": "full-disk", "bytes": 2_000_000}, rank=1),
    Case(given={"hang": "computing", "bytes": 2_000_000}, rank=1),
    Case(workers=3, given={"hang": "input", "bytes": 2_000_000}, rank=1),
    Case(workers=3, given={"hang": "missing", "bytes": 2_000_000}, rank=1),
    Case(workers=3, given={"hang": "stopped", "bytes": 2_000_000}, rank=1),
    Case(workers=3, given={"hang": "full-disk", "bytes": 2_000_000}, rank=1),
    Case(backend="fullwire", given={"hang": "input", "bytes": 2_000_000}, rank=1),
    Case(backend="fullwire", given={"hang": "groups", "bytes": 2_000_000}),
    Case(backend="fullwire", given={"hang": "missing", "bytes": 2_000_000}, rank=1),
    Case(backend="fullwire", given={"hang": "stopped", "bytes": 2_000_000}, rank=1),
    Case(workers=3, backend="fullwire", given={"hang": "computing", "bytes": 2_000_000}, rank=1),
    Case(workers=4, given={"hang": "computing", "bytes": 2_000_000}, rank=1),
    Case(workers=4, backend="fullwire", given={"hang": "full-disk", "bytes": 2_000_000}, rank=1),
    Case(workers=3, given={"hang": "link", "bytes": 2_000_000}, rank=1),
    Case(given={"hang": "sleeping", "kind": "by-hand", "bytes": 2_000_000}, rank=1),
    Case(workers=3, given={"hang": "sleeping", "kind": "sharded", "bytes": 2_000_000}, rank=1),
)


@contextmanager
def job(case: Case, folder: Path, *, records: bool) -> Iterator[int]:
    """Start a job; yield a rank's process once it trains; end the job."""
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "fullwire", "lab", "run", "--workers", str(case.workers)]
    command += ["--rate", case.rate, *case.lab]
    command += ["--no-probe", "-o", str(folder / "inside.run")] if records else []
    command += ["--", sys.executable, "-m", "validation.jobs.watched", str(folder)]
    for name, value in case.given.items():
        command += [f"--{name}", str(value)]
    environment = os.environ | {"BACKEND": case.backend, "PYTHONPATH": str(ROOT)}
    with (folder / "said").open("wb") as said:
        lab = subprocess.Popen(command, stdout=said, stderr=said, env=environment)
        try:
            yield first_rank(folder)
            stop = len((folder / "steps-0").read_text().splitlines()) + STOP_AFTER
            (folder / "STOP").write_text(str(stop))
            if records:
                lab.wait(END_S)
        finally:
            if lab.poll() is None:
                lab.send_signal(signal.SIGINT)
                try:
                    lab.wait(10)
                except subprocess.TimeoutExpired:
                    lab.kill()
                    lab.wait()


def first_rank(folder: Path) -> int:
    """Wait until a job has made two steps; return a process of it."""
    until_s = time.monotonic() + START_S
    steps = folder / "steps-0"
    while time.monotonic() < until_s:
        if steps.exists() and len(steps.read_text().splitlines()) >= 2:
            for each in jobs_here():
                if str(folder) in each.ranks[0].command:
                    return each.ranks[0].pid
        time.sleep(0.2)
    sys.exit(f"{folder}: the job has not begun: {(folder / 'said').read_text()[-500:]}")


def own_step_s(case: Case, folder: Path, first_ns: int, last_ns: int) -> float:
    """Return the step that the job itself saw in some time, by the rule of `explain`.

    Of local steps nothing is seen from outside, so a round of them is compared.
    """
    steps = int(case.given.get("local-steps", 1))
    lines = (folder / "steps-0").read_text().splitlines()
    begun_ns = np.array([int(line.split()[0]) for line in lines])[1::steps]
    first, last = (int(np.argmin(abs(begun_ns - each))) for each in (first_ns, last_ns))
    lengths_ns = np.diff(begun_ns[first : last + 1])
    return float(lengths_ns[usual_steps(lengths_ns)].mean()) / 1e9


def transfer_s(account: Mapping[str, float]) -> float:
    """Return the exposed communication of a step."""
    return sum(account[part] for part in TRANSFER)


def bytes_a_step(run: fw.Run) -> float:
    """Return what rank 0 sent for its collectives in a usual step, as multiples of (N-1)/N tell."""
    own = run.collectives.rows((run.collectives.rank == 0) & (run.collectives.step >= 0))
    sent = [2 if sent_as(op, run.facts.backend) == "allreduce" else 1 for op in own.op]
    sums = np.bincount(own.step, weights=own.bytes * np.array(sent))
    return float(np.median(sums[sums > 0])) if sums.any() else np.nan


def compared(case: Case, folder: Path) -> dict[str, Any]:
    """Watch a job that is recorded; return what both sides say."""
    begun_s = time.monotonic()
    with job(case, folder, records=True) as pid:
        found: Watched = fw.watch(
            pid, seconds=case.seconds, bandwidth=case.rate, out=folder / "outside.run"
        )
    inside = fw.explain(folder / "inside.run", bandwidth=case.rate)
    row: dict[str, Any] = {
        "job": str(case),
        "confidence": found.confidence,
        "inside_kind": inside.verdict.kind,
        "inside_ranks": sorted(inside.verdict.ranks),
        "inside_transfer_s": transfer_s(inside.account),
        "inside_step_s": inside.step_s,
        "inside_bytes": bytes_a_step(fw.read(folder / "inside.run")),
        "kind": found.kind,
        "possible": list(found.possible),
        "sentence": found.sentence,
        "looked_share": found.looked_share,
        "took_s": time.monotonic() - begun_s,
    }
    if found.explanation is not None and found.run is not None:
        times = found.run.spans
        row |= {
            "step_s": found.explanation.step_s,
            "own_step_s": own_step_s(
                case, folder, int(times.start_ns.min()), int(times.end_ns.max())
            ),
            "bytes": bytes_a_step(found.run),
            "transfer_s": transfer_s(found.explanation.account),
            "ranges_s": found.transfer_s,
            "ranks": sorted(found.explanation.verdict.ranks),
        }
    return row


def stuck(case: Case, folder: Path) -> dict[str, Any]:
    """Watch a job that hangs; return whom it names."""
    with job(case, folder, records=False) as pid:
        time.sleep(12)
        found: Watched = fw.watch(pid, seconds=SECONDS, bandwidth=case.rate)
    named = None if found.stuck is None else found.stuck.rank
    return {
        "job": str(case),
        "is_stuck": found.stuck is not None,
        "rank": named,
        "true_rank": case.rank,
        "is_right": found.stuck is not None and named == case.rank,
        "sentence": found.sentence,
    }


def write_watched(rows: Sequence[Mapping[str, Any]]) -> None:
    """Write what was found of jobs whose steps repeat."""
    sure = [row for row in rows if "step_s" in row]
    errors = [row["step_s"] / row["own_step_s"] - 1 for row in sure]
    fresh = [row["step_s"] / row["own_step_s"] - 1 for row in rows[len(CASES) :] if "step_s" in row]
    bytes_ = [row["bytes"] / row["inside_bytes"] - 1 for row in sure]
    far = sum(abs(np.log2(1 + error)) > FAR for error in errors)
    # Of local steps the recording has no transfer in a round.
    held = [
        row["ranges_s"][0] <= row["inside_transfer_s"] <= row["ranges_s"][1]
        for row in sure
        if "local" not in row["job"]
    ]
    verdicts = [verdict_of(row) for row in rows]
    counted = [f"{verdicts.count(each)} {each}" for each in ("same", "cannot tell", "other")]
    results.write(
        "watch",
        claim="A job that is watched from outside has the step that the job itself prints.",
        anchor="the job's own clock and a recording from inside, at the same time",
        measure="the error of the step",
        summary=(
            f"{len(sure)} of {len(rows)} jobs have a step: median error "
            f"{results.spread(errors)['median']:.1%}, worst {results.spread(errors)['worst']:.1%}, "
            f"{far} off by a factor of 2; bytes a step within {np.abs(bytes_).max():.1%}; "
            f"the transfer lies in its range in {sum(held)} of {len(held)}; "
            f"verdicts: {', '.join(counted)}. The finder was developed on the first {len(CASES)} "
            f"jobs; of the other {len(rows) - len(CASES)}, {len(fresh)} have a step: median "
            f"{results.spread(fresh)['median']:.1%}, worst {results.spread(fresh)['worst']:.1%}"
        ),
        cases=len(rows),
        **results.spread(errors),
        tables=[
            results.Table(
                columns=[
                    "job",
                    "own step",
                    "from outside",
                    "bytes",
                    "transfer inside",
                    "transfer outside",
                    "verdict inside",
                    "verdict outside",
                ],
                rows=[
                    [
                        row["job"],
                        f"{row.get('own_step_s', row['inside_step_s']) * 1e3:.1f} ms",
                        *(
                            [
                                f"{row['step_s'] / row['own_step_s'] - 1:+.1%}",
                                f"{row['bytes'] / row['inside_bytes'] - 1:+.1%}",
                                f"{row['inside_transfer_s'] * 1e3:.0f} ms",
                                " to ".join(f"{one * 1e3:.0f}" for one in row["ranges_s"]) + " ms",
                            ]
                            if "step_s" in row
                            else ["none", "-", f"{row['inside_transfer_s'] * 1e3:.0f} ms", "-"]
                        ),
                        row["inside_kind"].replace("_", " "),
                        row["kind"].replace("_", " "),
                    ]
                    for row in rows
                ],
            )
        ],
    )


def verdict_of(row: Mapping[str, Any]) -> str:
    """Say whether the verdict from outside is that from inside."""
    if row["kind"] == "unknown":
        return "cannot tell"
    alike = row["kind"] == row["inside_kind"] and row["ranks"] == row["inside_ranks"]
    return "same" if alike else "other"


def write_stuck(rows: Sequence[Mapping[str, Any]]) -> None:
    """Write whom the watcher named of jobs that hang."""
    right = sum(row["is_right"] for row in rows)
    results.write(
        "watch-stuck",
        claim="A job that hangs is called stuck, and the rank that the others wait for is named.",
        anchor="jobs whose cause is known",
        summary=f"{right} of {len(rows)} jobs right",
        cases=len(rows),
        tables=[
            results.Table(
                columns=["job", "waited for", "named"],
                rows=[
                    [
                        row["job"],
                        "nobody alone" if row["true_rank"] is None else f"rank {row['true_rank']}",
                        "not stuck"
                        if not row["is_stuck"]
                        else "nobody alone"
                        if row["rank"] is None
                        else f"rank {row['rank']}",
                    ]
                    for row in rows
                ],
            )
        ],
    )


def main() -> None:
    """Run what is missing, print all, and write the results."""
    given = arguments.parser(__doc__)
    given.add_argument("folder", type=Path)
    given.add_argument("--only", default="", help="words of the jobs to run; nothing is written")
    asked = given.parse_args()
    found: dict[str, list[dict[str, Any]]] = {"watched": [], "stuck": []}
    for kind, cases, play in (("watched", CASES + FRESH, compared), ("stuck", STUCK, stuck)):
        for case in cases:
            if asked.only not in f"{kind} {case}":
                continue
            done = asked.folder.absolute() / f"{kind}_{case.name}.json"
            if not done.exists():
                row = play(case, done.with_suffix(""))
                done.write_text(json.dumps(row))
            found[kind].append(json.loads(done.read_text()))
            print(json.dumps(found[kind][-1], indent=1), flush=True)
    if not asked.only:
        write_watched(found["watched"])
        write_stuck(found["stuck"])


if __name__ == "__main__":
    main()
