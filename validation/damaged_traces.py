"""Scan damaged profiler traces under AddressSanitizer and UndefinedBehaviorSanitizer.

python -m validation.damaged_traces [COUNT] [SEED]

The traces are those of `fuzz.py`. A small program of C++ (damaged_traces.cpp) links the scanner
itself. It reads each trace as a whole and in pieces of random size, and compares the two. It needs
g++.
"""

from __future__ import annotations

import random
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests import native_programs
from tests.native_programs import NATIVE
from validation import arguments, fuzz, results
from validation.damaged_captures import SANITIZED

_HERE = Path(__file__).parent


def build(folder: Path, flags: Sequence[str] = SANITIZED) -> Path:
    """Build the program, with sanitizers unless told otherwise."""
    program = folder / "damaged_traces"
    sources = [_HERE / "damaged_traces.cpp", NATIVE / "scans" / "kineto_scan.cpp"]
    native_programs.build(program, sources, *flags)
    return program


def scan_damaged(program: Path, count: int, seed: int = 0) -> tuple[int, int]:
    """Scan `count` damaged traces; return how many were read, and how many of them whole."""
    source, seeds = random.Random(seed), fuzz.kineto_seeds()
    with tempfile.NamedTemporaryFile() as file:
        for _ in range(count):
            trace = fuzz.damaged(source.choice(seeds), source, is_ever_compressed=False)
            file.write(struct.pack("<I", len(trace)) + trace)
        file.flush()
        done = subprocess.run(
            [str(program), file.name], check=False, capture_output=True, text=True
        )
    if done.returncode:
        raise SystemExit(f"status {done.returncode}: {done.stderr}")
    read, whole = map(int, done.stdout.split())
    return read, whole


def main() -> None:
    """Scan damaged traces, and print the results."""
    taken = arguments.parser(__doc__)
    taken.add_argument("count", type=int, nargs="?", default=100_000)
    taken.add_argument("seed", type=int, nargs="?", default=0)
    given = taken.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        read, whole = scan_damaged(build(Path(folder)), given.count, given.seed)
    results.renew("damaged-traces", summary="no failure; the same whole and in pieces", cases=read)
    print(f"{read:,} damaged traces, the same whole and in pieces; {whole:,} had their end")


if __name__ == "__main__":
    main()
