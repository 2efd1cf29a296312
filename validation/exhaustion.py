"""The effect on groups when a call of the transport fails: memory, threads, descriptors.

    python -m validation.exhaustion [--rounds 1000]

The script builds the native transport with calls that fail by number
(tests/native/transport_faults.cpp). It runs rounds of start, collectives, a second connection and
end. In the n-th round the n-th call fails, once or for good, in clear or encrypted, with sums in
float32 or in a wire format. It prints hangs, aborts, wrong results, and the number of ranks that
were told of a lost rank but not of the resource that it lacked.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from tests import native_programs
from tests.native_programs import NATIVE
from validation import results
from validation.arguments import parser

KINDS = ("memory", "thread", "descriptor", "send", "receive", "poll", "write", "option")
WRAPPED = ("pthread_create", "eventfd", "sendmsg", "recvmsg", "recv", "poll", "write", "setsockopt")
_LONGEST_S = 600
_MANNERS: tuple[tuple[str, ...], ...] = (
    (),
    ("for-good",),
    ("encrypted",),
    ("encrypted", "for-good"),
    ("bf16",),
    ("fp16", "for-good"),
    ("int8", "encrypted"),
)


@dataclass(frozen=True)
class Counts:
    """The results of some rounds."""

    rounds: int = 0
    told: int = 0  # rounds in which a rank was told the rank and the resource
    unnamed: int = 0  # ranks that were told the rank, and not the resource
    hangs: int = 0
    aborts: int = 0
    wrong: int = 0
    said: str = ""

    def __add__(self, other: Counts) -> Counts:
        """Add the counts of both."""
        return Counts(
            self.rounds + other.rounds,
            self.told + other.told,
            self.unnamed + other.unnamed,
            self.hangs + other.hangs,
            self.aborts + other.aborts,
            self.wrong + other.wrong,
            self.said + other.said,
        )


def build(directory: Path, *flags: str, engine: Path | None = None) -> Path:
    """Build the program whose calls fail, with an engine that has been compiled already or not."""
    program = directory / "faults"
    sources = [Path(native_programs.__file__).parent / "native" / "transport_faults.cpp"]
    if engine is None:
        sources += NATIVE.glob("transport/*.cpp")
    wraps = [f"-Wl,--wrap={each}" for each in WRAPPED]
    linked = [engine] if engine else []
    native_programs.build(program, sources, "-static-libstdc++", *wraps, *flags, linked=linked)
    return program


def rounds(program: Path, kind: str, first: int, count: int, manner: Sequence[str]) -> Counts:
    """Make one call fail in each round, from the first number on, until there are no more calls."""
    command = [str(program), kind, str(first), str(count), *manner]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_LONGEST_S
        )
    except subprocess.TimeoutExpired:
        return Counts(hangs=1, said=f"{kind}: it did not end\n")
    said = f"{' '.join(command[1:])}: {done.stdout[-400:]}{done.stderr[-2000:]}\n"
    if done.returncode == -signal.SIGALRM:
        return Counts(hangs=1, said=said)
    if done.returncode == 1:
        return Counts(wrong=1, said=said)
    found = re.search(r"^(\d+) rounds, (\d+) told of the cause, (\d+) ranks", done.stdout, re.M)
    if done.returncode or not found:
        return Counts(aborts=1, said=said)
    return Counts(int(found[1]), told=int(found[2]), unnamed=int(found[3]))


def all_kinds(wanted: int) -> dict[str, Counts]:
    """Divide the rounds among all kinds of calls and manners of failing; count by kind."""
    by_kind, began = dict.fromkeys(KINDS, Counts()), time.monotonic()
    with TemporaryDirectory() as place:
        program = build(Path(place), "-O2")
        each = -(-wanted // (3 * len(_MANNERS)))
        # Memory is requested most often; the kernel's sends, receives and polls are next.
        for kind, manner in product(KINDS, _MANNERS):
            found = rounds(program, kind, 1, each, manner)
            print(f"{kind:<10} {' '.join(manner) or 'once':<20} {found}", flush=True)
            by_kind[kind] += found
    total = sum(by_kind.values(), Counts())
    print(
        f"{total.rounds} rounds in {time.monotonic() - began:.0f} s: {total.hangs} hangs, "
        f"{total.aborts} aborts, {total.wrong} wrong; the cause was told in {total.told}, "
        f"{total.unnamed} ranks were told the rank alone"
    )
    print(total.said, end="")
    return by_kind


def main() -> None:
    """Play the rounds; exit with an error if a rank hung, aborted or had a wrong result."""
    taken = parser(__doc__)
    taken.add_argument("--rounds", type=int, default=1000)
    by_kind = all_kinds(taken.parse_args().rounds)
    result = sum(by_kind.values(), Counts())
    columns = ["what fails", "rounds", "hangs", "aborts", "wrong"]
    columns += ["rounds told of rank and resource", "ranks told of the rank alone"]
    rows: list[list[results.Cell]] = [
        [kind, each.rounds, each.hangs, each.aborts, each.wrong, each.told, each.unnamed]
        for kind, each in by_kind.items()
    ]
    results.write(
        "exhaustion",
        claim="A transport whose calls fail ends with the cause or with the right sums.",
        anchor="three ranks in one process; the n-th call of a kind fails, once or for good",
        summary=f"{result.rounds:,} rounds: {result.hangs} hangs, {result.aborts} aborts, "
        f"{result.wrong} wrong",
        cases=result.rounds,
        tables=[results.Table(columns=columns, rows=rows)],
    )
    sys.exit(bool(result.hangs or result.aborts or result.wrong))


if __name__ == "__main__":
    main()
