"""A fix predicted and then made: python -m validation.closed_loop DIRECTORY [ROUNDS]

Each job is recorded in the lab with Gloo. From that recording alone, two steps are predicted: with
our backend, and on a line that is full (`whatif --transport full:0.956`). Then the job is recorded
again with our backend as the only change. A round is one recording of both. Steps are medians over
rounds. Accelerators are emulated, and the transport is real. An existing run in DIRECTORY is not
recorded again.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

from fullwire.answers.verification import verify
from fullwire.simulation.typical import typical_step
from fullwire.units import show_time
from validation import arguments, results
from validation.emulated_jobs import Job, recorded

JOBS = (
    Job(model="vgg16@v100", rate="10Gbps", steps=8),
    Job(model="vgg16@v100", rate="5Gbps", steps=6),
    Job(rate="10Gbps", steps=20),
    Job(rate="10Gbps", buckets="ddp:1MiB", steps=20),
    Job(rate="5Gbps", steps=20),
    Job(rate="5Gbps", buckets="ddp:1MiB", steps=20),
    Job(steps=8),
    Job(workers=4, rate="2Gbps", steps=12),
)


def main() -> None:
    """Record the missing runs and print the table."""
    taken = arguments.parser(__doc__)
    taken.add_argument("directory", type=Path)
    taken.add_argument("rounds", type=int, nargs="?", default=1)
    given = taken.parse_args()
    place, rounds = given.directory, given.rounds
    place.mkdir(parents=True, exist_ok=True)
    columns = [
        "job",
        "Gloo",
        "full line",
        "predicted",
        "fullwire",
        "off",
        "in its interval",
        "faster",
    ]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    lines, errors, holds = [], [], []
    for job in JOBS:
        line, error, held = row(job, place, rounds)
        print(line, flush=True)
        lines.append(line)
        errors.append(error)
        holds += held
    table = results.Table(columns=columns, rows=results.rows(lines))
    results.renew("closed-loop", tables=[table], **results.said_of(errors, holds))


def row(job: Job, place: Path, rounds: int) -> tuple[str, float, list[bool]]:
    """Record a job on both backends; return the line, the error, and which rounds are held."""
    found = []
    for number in range(rounds):
        room = place / str(number)
        room.mkdir(exist_ok=True)
        before, after = recorded(job, room), recorded(replace(job, backend="fullwire"), room)
        verification = verify(before, after)
        assert verification is not None
        assert verification.full_s is not None
        gloo_ns = typical_step(before).measured_ns
        assert gloo_ns is not None
        found.append((gloo_ns * 1e-9, verification.full_s, verification))
    gloo_s, full_s, predicted_s, measured_s = map(
        statistics.median,
        zip(*((s, f, v.predicted_s, v.measured_s) for s, f, v in found), strict=True),
    )
    times = " | ".join(map(show_time, (gloo_s, full_s, predicted_s, measured_s)))
    held, error = [each.holds for *_, each in found], predicted_s / measured_s - 1
    line = (
        f"| {job} | {times} | {error:+.1%} | {sum(held)} of {rounds} | {gloo_s / measured_s:.2f}x |"
    )
    return line, error, held


if __name__ == "__main__":
    main()
