"""How much JSON of profiler traces does `fullwire import` read in a second of processor time?

    .venv/bin/python benchmarks/importing.py TRACE.json.gz [TIMES] [RUNS]

The whole command is measured, its start included. It reads the trace, and a longer trace in which
the events occur TIMES over, each time later. Both are read compressed and uncompressed. The table
also has the time of gunzip alone and the largest resident memory. Figures are the least of RUNS;
processor time is user and system.
"""

from __future__ import annotations

import gzip
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

_TIME = re.compile(rb'("ts": )(\d+)')
_LATER_US = 10_000_000
_CHUNK_BYTES = 2**20


def times_over(text: bytes, times: int) -> bytes:
    """Repeat the events of a trace, each time 10 s later, under other numbers of launches."""
    begin, end = text.index(b'"traceEvents": [') + 16, text.rindex(b"]")
    return text[:begin] + b",".join(later(text[begin:end], n) for n in range(times)) + text[end:]


def later(events: bytes, number: int) -> bytes:
    """Move events to a later time, in whole microseconds, and give their numbers new values."""

    def moved(found: re.Match[bytes]) -> bytes:
        return found[1] + b"%d" % (int(found[2]) + number * _LATER_US)

    events = _TIME.sub(moved, events)
    events = events.replace(b'"correlation": ', b'"correlation": %d' % (number + 1))
    return events.replace(b"ProfilerStep#", b"ProfilerStep#%d" % (number + 1))


def used(command: list[str | Path]) -> tuple[float, int]:
    """Run a command; return its processor time in seconds and its largest resident bytes."""
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    _, status, took = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}")
    return took.ru_utime + took.ru_stime, took.ru_maxrss * 1024


def gunzip_s(path: Path) -> float:
    """Return the processor time of unpacking alone, a chunk at a time."""
    before = os.times()
    unpacker = zlib.decompressobj(wbits=47)
    with path.open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            while data:
                unpacker.decompress(data, _CHUNK_BYTES)
                data = unpacker.unconsumed_tail
    after = os.times()
    return after.user - before.user + after.system - before.system


def make(trace: Path, times: int, path: Path) -> None:
    """Write a trace in which the events occur `times` times over."""
    text = times_over(gzip.decompress(trace.read_bytes()), times)
    path.write_bytes(text if path.suffix == ".json" else gzip.compress(text, 6))


def main(trace: Path, times: int, runs: int) -> None:
    """Print the table."""
    command: list[str | Path] = [sys.executable, "-m", "fullwire", "import", "--force", "-o"]
    print("| trace | JSON | processor | a second reads | largest memory | gunzip alone |")
    print("|---|---|---|---|---|---|")
    size = 0
    with tempfile.TemporaryDirectory() as folder:
        for number in (1, times):
            for suffix in (".json", ".json.gz"):
                path = Path(folder) / f"trace{suffix}"
                # A new process counts its parent's resident memory as its own.
                maker = multiprocessing.get_context("spawn").Process(
                    target=make, args=(trace, number, path)
                )
                maker.start()
                maker.join()
                found = [used([*command, Path(folder) / "x.run", path]) for _ in range(runs)]
                least_s, largest = min(s for s, _ in found), max(size for _, size in found)
                if suffix == ".json":
                    size = path.stat().st_size
                unpacking = "" if suffix == ".json" else f"{gunzip_s(path):.2f} s"
                print(
                    f"| {number} x, {suffix} | {size / 1e6:.0f} MB | {least_s:.2f} s "
                    f"| {size / 1e6 / least_s:.0f} MB | {largest / 1e6:.0f} MB "
                    f"| {unpacking} |",
                    flush=True,
                )


if __name__ == "__main__":
    given = [*sys.argv[2:], *["5", "5"][len(sys.argv) - 2 :]]
    main(Path(sys.argv[1]), int(given[0]), int(given[1]))
