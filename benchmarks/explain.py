"""How long does `fullwire explain` take on 8 ranks and 1,000 steps? Whole processes; the median.

    .venv/bin/python benchmarks/explain.py [RUNS]

Each rank has 160 gradients and 20 collectives in a step, half of them beside computation.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import fullwire as fw
from fullwire.run.facts import Facts
from fullwire.run.run import Collectives, Gradients, Provenance, Run, Spans

RANKS, STEPS, GRADIENTS, COLLECTIVES = 8, 1000, 160, 20
MS = 1_000_000
LENGTH_MS = 200
SPANS = (
    ("host", "step", 0, 200),
    ("input", "wait", 0, 1),
    ("compute", "forward", 2, 40),
    ("compute", "backward", 40, 120),
    ("compute", "optimizer", 190, 200),
)


def long_run() -> Run:
    """Make the run."""
    return Run(
        provenance=Provenance(origin="measured", source="a benchmark"),
        facts=Facts(workers=RANKS, line_rate_bps=10e9),
        spans=_spans(),
        gradients=_gradients(),
        collectives=_collectives(),
    )


def _places(each: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the rank, the step and the number in the step of each row."""
    grid = np.indices((RANKS, STEPS, each)).reshape(3, -1)
    return grid[0], grid[1], grid[2]


def _spans() -> Spans:
    rank, step, number = _places(len(SPANS))
    lane, name, start, end = (np.array(each, object)[number] for each in zip(*SPANS, strict=True))
    begin = step * LENGTH_MS
    return Spans(
        rank=rank,
        step=step,
        lane=lane,
        name=name,
        start_ns=(begin + start.astype(np.int64)) * MS,
        end_ns=(begin + end.astype(np.int64)) * MS,
    )


def _gradients() -> Gradients:
    rank, step, number = _places(GRADIENTS)
    ready_ns = (step * LENGTH_MS + 40) * MS + number * MS // 2
    size = np.full(len(rank), 100_000)
    return Gradients(rank=rank, step=step, order=number, bytes=size, ready_ns=ready_ns)


def _collectives() -> Collectives:
    rank, step, number = _places(COLLECTIVES)
    count = len(rank)
    late_ns = np.random.default_rng(0).integers(0, MS, count)
    issue_ns = (step * LENGTH_MS + 50 + 4 * number) * MS + late_ns
    return Collectives(
        rank=rank,
        step=step,
        sequence=step * COLLECTIVES + number,
        group=np.full(count, "0", object),
        op=np.full(count, "allreduce", object),
        dtype=np.full(count, "float32", object),
        bytes=np.full(count, 1_000_000),
        issue_ns=issue_ns,
        start_ns=issue_ns,
        end_ns=(step * LENGTH_MS + 60 + 6 * number) * MS,
    )


def main() -> None:
    """Print the median and every sample."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    with tempfile.TemporaryDirectory() as place:
        path = fw.write(long_run(), Path(place, "long.run"))
        command = [sys.executable, "-m", "fullwire", "explain", str(path), "--json"]
        samples = []
        for _ in range(runs):
            began_s = time.perf_counter()
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            samples.append(time.perf_counter() - began_s)
    shown = " ".join(f"{sample:.2f}" for sample in sorted(samples))
    print(f"explain, {RANKS} ranks, {STEPS} steps: {statistics.median(samples):.2f} s ({shown})")


if __name__ == "__main__":
    main()
