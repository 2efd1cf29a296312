"""How much shorter is a training step with our transport than with Gloo?

    nice -n -10 .venv/bin/python benchmarks/training.py WORKLOAD RATE [PAIRS] [BUCKETS] [WORKERS]

Emulated accelerators (WORKLOAD is vgg16@v100 or a similar name) train under real DDP over a lab's
links, in turns with Gloo and with our transport. The one that begins changes from pair to pair. A
turn is a job of its own, and its figure is the median of its steps.
"""

from __future__ import annotations

import re
import subprocess
import sys

from fullwire.run.centre import median_of
from fullwire.units import seconds, show_time

_BACKENDS = ("gloo", "fullwire")
_STEPS = "8"
_TRIES = 3  # a lab is refused if its links are too slow, as on a busy machine


def main() -> None:
    workload, rate, *more = sys.argv[1:]
    pairs, buckets, workers = (*more, *("5", "ddp", "2")[len(more) :])
    turns: dict[str, list[float]] = {backend: [] for backend in _BACKENDS}
    for number in range(int(pairs)):
        for backend in _BACKENDS[:: -1 if number % 2 else 1]:
            turns[backend].append(step_s(workload, rate, buckets, workers, backend))
    gloo, ours = (median_of(turns[backend]) for backend in _BACKENDS)
    faster = median_of([one / other for one, other in zip(*turns.values(), strict=True)])
    print(
        f"| {workload}, {workers} x {rate}, {buckets} | {pairs} | {show_time(gloo.value)} | "
        f"{show_time(ours.value)} | {faster.value:.2f}x ({faster.low:.2f} to {faster.high:.2f}) |"
    )


def step_s(workload: str, rate: str, buckets: str, workers: str, backend: str) -> float:
    """Train in the lab and return the median step."""
    command = [
        sys.executable,
        "-m",
        "fullwire",
        "lab",
        "run",
        "--workload",
        workload,
        "--rate",
        rate,
        "--workers",
        workers,
        "--buckets",
        buckets,
        "--backend",
        backend,
        "--steps",
        _STEPS,
    ]
    for _ in range(_TRIES):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if "the link delivers" not in done.stderr:
            break
    told = re.search(r"steps of ([\d.,]+ \w+) \(mean", done.stdout)
    if done.returncode or told is None:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}{done.stdout}")
    return seconds(told[1].replace(" ", "").replace(",", ""))


if __name__ == "__main__":
    main()
