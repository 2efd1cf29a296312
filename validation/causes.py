"""Does `explain` name the cause of a slow job? Jobs with a known cause, recorded in the lab.

    .venv/bin/python -m validation.causes [REPEATS] [CAUSE...]

Each row is a small real training (jobs/cause.py: PyTorch DDP over Gloo) on some hosts of a lab.
Layers sleep as long as they would compute, because ranks share the machine's processors.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import fullwire as fw
from validation import arguments, results

JOB = Path(__file__).parent / "jobs" / "cause.py"
LONGEST_JOB_S = 120.0
TRIES = 12  # until the links reach their rates, on a machine that has other work


class Cause(NamedTuple):
    """A job, the verdict that it must have, and the rank that must be blamed, if there is one."""

    verdict: str
    workers: int
    rate: str
    options: str
    late_rank: int | None = None


CAUSES = {
    "slow link": Cause("line_rate", 2, "200Mbps", "--layer-bytes 524288 --compute-s 0.06"),
    "late in forward": Cause("straggler", 3, "1Gbps", "--late forward", 1),
    "late in backward": Cause("straggler", 3, "1Gbps", "--late backward", 1),
    "late in input": Cause("straggler", 3, "1Gbps", "--late input", 1),
    "late between steps": Cause("straggler", 3, "1Gbps", "--late between", 1),
    "slow input": Cause("input", 2, "1Gbps", "--load-s 0.06"),
    "slow reading": Cause("host", 2, "1Gbps", "--load-s 0.06 --no-loader"),
    "plenty of network": Cause("scales", 2, "10Gbps", "--layer-bytes 65536 --compute-s 0.12"),
    "tiny collectives": Cause(
        "latency", 2, "1Gbps", "--layers 100 --layer-bytes 2048 --compute-s 0.06 --one-by-one"
    ),
    "one late bucket": Cause(
        "overlap", 2, "200Mbps", "--layer-bytes 262144 --bucket-mb 100 --compute-s 0.15"
    ),
    "1 MiB buckets": Cause(
        "transport",
        2,
        "10Gbps",
        "--layers 32 --layer-bytes 1048576 --bucket-mb 1 --compute-s 0.02",
    ),
    "1 MiB one by one": Cause(
        "transport",
        2,
        "10Gbps",
        "--layers 32 --layer-bytes 1048576 --one-by-one --compute-s 0.02 --loss",
    ),
}


def explained(
    cause: Cause, options: Sequence[str] = (), python: Sequence[str] = (sys.executable,)
) -> fw.Explanation:
    """Run a job in a lab, record it and explain it."""
    with tempfile.TemporaryDirectory() as place:
        run = str(Path(place, "job.run"))
        for _ in range(TRIES):
            done = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "fullwire",
                    "lab",
                    "run",
                    "--workers",
                    str(cause.workers),
                    "--rate",
                    cause.rate,
                    "-o",
                    run,
                    "--",
                    *python,
                    str(JOB),
                    *cause.options.split(),
                    *options,
                ],
                capture_output=True,
                text=True,
                timeout=LONGEST_JOB_S,
                check=False,
            )
            if "the link delivers" not in done.stderr:  # otherwise the lab was refused: no job ran
                break
        if done.returncode:  # a job that fails when it is over has been recorded all the same
            sys.stderr.write(f"the job ended with {done.returncode}: {done.stderr}\n")
        return fw.explain(run)


def is_right(cause: Cause, found: fw.Explanation) -> bool:
    """Say whether an explanation has the verdict and blames the right rank."""
    from fullwire.timeline.late import late_ranks

    late = late_ranks(found.detail)
    is_rank_right = cause.late_rank is None or (
        late is not None and late.ranks == (cause.late_rank,)
    )
    return found.verdict.kind == cause.verdict and is_rank_right


def main() -> None:
    """Print the table."""
    taken = arguments.parser(__doc__)
    taken.add_argument("repeats", type=int, nargs="?", default=5)
    taken.add_argument("causes", nargs="*", default=[*CAUSES], metavar="cause")
    given = taken.parse_args()
    repeats, names = given.repeats, given.causes
    if unknown := [name for name in names if name not in CAUSES]:
        taken.error(f"expected some of {', '.join(CAUSES)}; got {unknown[0]!r}")
    print(f"{'cause':<20} {'expected':<10} right  {'found':<22} its share of the step")
    wrong, rows = 0, []
    for name in names:
        cause = CAUSES[name]
        found = [explained(cause) for _ in range(repeats)]
        right = sum(is_right(cause, each) for each in found)
        wrong += repeats - right
        kinds = Counter(each.verdict.kind for each in found)
        shown = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        shares = " ".join(f"{share:.0%}" for share in _shares(cause, found))
        rows.append([name, cause.verdict, f"{right} of {repeats}", shown, shares])
        print(
            f"{name:<20} {cause.verdict:<10} {right} of {repeats}  {shown:<20} {shares}", flush=True
        )
    if set(names) == set(CAUSES):
        cases = repeats * len(names)
        columns = ["cause", "expected", "right", "found", "its share of the step"]
        results.renew(
            "causes",
            summary=f"{cases - wrong} of {cases} verdicts right, {len(names)} causes",
            cases=cases,
            tables=[results.Table(columns=columns, rows=rows)],
        )
    sys.exit(1 if wrong else 0)


def _shares(cause: Cause, found: Sequence[fw.Explanation]) -> Iterator[float]:
    part = {"overlap": "line_rate", "scales": "compute"}.get(cause.verdict, cause.verdict)
    for each in found:
        yield each.account[part] / each.step_s


if __name__ == "__main__":
    main()
