"""How fast are the core's four figures? Each is a whole process, repeated; medians are printed.

    .venv/bin/python benchmarks/core.py [RUNS]

The commands take turns, so that a slow minute of a shared machine falls on all of them.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from typing import NamedTuple

GRID = """
import time
import numpy as np
import fullwire as fw
began_s = time.perf_counter()
table = fw.whatif(
    "vgg16@v100", workers=np.arange(1, 101) * 8, bandwidth=np.linspace(1e9, 100e9, 100),
    compression=np.linspace(1, 100, 100), buckets="paper",
)
assert len(table) == 1_000_000
print(time.perf_counter() - began_s)
"""
COLLECTIVE = (
    "collective allreduce --bytes 64MiB --workers 1024 --bandwidth 50GiB/s --latency 500ns "
    "--chunks 4 --level event --chunk-order serial"
)
CLI = [sys.executable, "-m", "fullwire"]
CASES = {
    "fullwire --help": [*CLI, "--help"],
    "fullwire whatif vgg16@v100": [*CLI, "whatif", "vgg16@v100"],
    "8,380,416 transfers of a ring": [*CLI, *COLLECTIVE.split()],
    "1,000,000 configurations": [sys.executable, "-c", GRID],
}


class Sample(NamedTuple):
    """One process: wall time, processor time, memory, and its last line of output."""

    wall_s: float
    cpu_s: float
    peak_mb: float
    printed: str


def measured(command: list[str]) -> Sample:
    """Run a process to its end and read its times and memory from the kernel."""
    began_s = os.times().elapsed
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    printed = process.stdout.read().strip()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return Sample(
        wall_s=os.times().elapsed - began_s,
        cpu_s=usage.ru_utime + usage.ru_stime,
        peak_mb=usage.ru_maxrss / 1024,
        printed=printed.splitlines()[-1],
    )


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    samples: dict[str, list[Sample]] = {name: [] for name in CASES}
    for _ in range(runs + 1):
        for name, command in CASES.items():
            samples[name].append(measured(command))
    print(f"{runs} runs after one to warm up; median (least to most)")
    for name, found in samples.items():
        counted = found[1:]
        wall, cpu = [each.wall_s for each in counted], [each.cpu_s for each in counted]
        peak = max(each.peak_mb for each in counted)
        print(f"{name:<31} wall {spread(wall)}  cpu {spread(cpu)}  {peak:.0f} MB")
    inside = [float(each.printed) for each in samples["1,000,000 configurations"][1:]]
    print(f"{'  of it the grid itself':<31} wall {spread(inside)}")


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
