"""A job of many ranks, made of one real trace: is reading linear, memory flat, the answer right?

    .venv/bin/python -m validation.fleet TRACE.json.gz DIRECTORY [RANKS...]

Each rank is a copy with another number, a clock that is up to 40 ms ahead, and kernels that take up
to 3 % less. One rank in the middle is late at every collective, in which it then spends a tenth of
the time. Each job is imported, explained and asked the other questions by the command line. The
script prints the time and the memory of the largest process of each command, and the finding of
`explain`. Exit status 1 if the others wait for another rank than the late one.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from validation import arguments, results

RANKS = (16, 64, 256)
LATE_SHARE = 0.1  # of a collective's time, which the late rank spends in it
CLOCK_NS = 40_000_000
SHORTER = 0.03
_KERNEL = re.compile(
    r'("cat": "kernel", "name": "([^"]*)"[^{}]*?"ts": )([\d.]+)(, "dur": )([\d.]+)'
)
_WORLD = re.compile(r'"world_size": \d+')
_RANK = re.compile(r'("distributedInfo": {[^}]*?"rank": )\d+')


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a command, with all processes that it started."""

    wall_s: float
    processor_s: float
    largest_bytes: int  # resident, of the process that had most


class Original:
    """A real trace, divided where copies differ."""

    def __init__(self, path: Path) -> None:
        text = gzip.decompress(path.read_bytes()).decode()
        self.bytes = len(text)
        self.events = text.count('"ph":')
        self._pieces = _KERNEL.split(text)

    def copy(self, rank: int, world: int, late: int) -> Iterator[str]:
        """Yield the text of one rank."""
        source = random.Random(rank)
        head = _RANK.sub(rf"\g<1>{rank}", self._pieces[0])
        head = _WORLD.sub(f'"world_size": {world}', head)
        yield head.replace("{", f'{{"baseTimeNanoseconds": {source.randrange(CLOCK_NS)},', 1)
        for place in range(1, len(self._pieces), 6):
            opening, name, start, between, length, rest = self._pieces[place : place + 6]
            start_us, length_us = float(start), float(length)
            if "nccl" in name:
                share = LATE_SHARE if rank == late else 1.0
                start_us, length_us = start_us + length_us * (1 - share), length_us * share
            else:
                length_us *= 1 - source.uniform(0, SHORTER)
            yield f"{opening}{start_us:.3f}{between}{length_us:.3f}{rest}"

    def write_job(self, folder: Path, world: int) -> None:
        """Write the traces of a job; the rank in the middle is late."""
        folder.mkdir(parents=True)
        for rank in range(world):
            with gzip.open(folder / f"rank-{rank}.json.gz", "wt", compresslevel=1) as file:
                file.writelines(self.copy(rank, world, world // 2))


def measured(*arguments: str | Path) -> tuple[Cost, str]:
    """Run the command line; return its cost and its output."""
    command = [sys.executable, "-m", "fullwire", *map(str, arguments)]
    begin_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    wall_s = time.perf_counter() - begin_s
    return Cost(wall_s, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024), printed


def least_waiting(told: Any) -> int:
    """Return the rank that waited least: the one for which the others wait."""
    return int(min(told["ranks"], key=lambda each: each["waiting_s"])["rank"])


def asked(run: Path) -> Iterator[Cost]:
    """Ask a run all questions besides `explain`, and yield the cost of each."""
    for command in (
        ("whatif", run, "--bandwidth", "100Gbps"),
        ("compare", run, run),
        ("report", run, "-o", run.with_suffix(".html")),
    ):
        yield measured(*command)[0]


def row(world: int, original: Original, late: int, costs: Sequence[Cost]) -> str:
    """Return a line of the table."""
    cells = [
        f"{world}",
        f"{world * original.events / 1e6:.2f} million",
        f"{world * original.bytes / 1e9:.2f} GB",
        *(
            f"{each.wall_s:.1f} s, {each.processor_s:.1f} s, {each.largest_bytes / 1e6:.0f} MB"
            for each in costs
        ),
        f"{late}, of {world // 2}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Print the table: the wall time, the processor time and the memory of each command."""
    taken = arguments.parser(__doc__)
    taken.add_argument("trace", type=Path)
    taken.add_argument("directory", type=Path)
    taken.add_argument("ranks", type=int, nargs="*", default=RANKS)
    given = taken.parse_args()
    trace, directory = given.trace, given.directory
    original = Original(trace)
    print(f"{trace.name}: {original.events:,} events, {original.bytes / 1e6:.1f} MB a rank")
    columns = [
        "ranks",
        "events",
        "JSON",
        "import",
        "explain",
        "whatif",
        "compare",
        "report",
        "late rank",
    ]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    is_right, lines = True, []
    for world in given.ranks:
        folder, run = directory / f"traces-{world}", directory / f"{world}.run"
        original.write_job(folder, world)
        imported, _ = measured("import", folder, "-o", run)
        explained, printed = measured("explain", run, "--json")
        found = least_waiting(json.loads(printed))
        is_right &= found == world // 2
        shutil.rmtree(folder)
        lines.append(row(world, original, found, [imported, explained, *asked(run)]))
        print(lines[-1], flush=True)
    results.renew(
        "fleet",
        summary=f"the late rank is {'found' if is_right else 'NOT found'} in {len(lines)} jobs",
        cases=len(lines),
        tables=[results.Table(columns=columns, rows=results.rows(lines))],
    )
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
