"""What does recording cost? Step time with the recorder over without, in alternating turns.

    .venv/bin/python benchmarks/recorder.py [PAIRS] [STEPS]      needs torch

Two jobs of two ranks are up at once, one recorded; they take turns of some steps while the other
sleeps, so that a slow minute of a shared machine falls on both. Each pair of turns gives one ratio;
which goes first alternates. The model has 40 layers, trained with DistributedDataParallel on one
thread a rank, with steps of some 85 ms on two cores. CPU time is rank 0's own, all its threads.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RANKS, LAYERS, WIDTH, BATCH = 2, 40, 512, 128
TOGETHER = Path(__file__).resolve().parents[1] / "tests" / "jobs" / "together.py"


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 12
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "x.run"
        job = [sys.executable, str(TOGETHER), str(RANKS), __file__, "job", str(steps)]
        record = [sys.executable, "-m", "fullwire.cli", "record", "-o", str(run), "--"]
        plain, recorded = started(job), started([*record, *job])
        for each in (plain, recorded):
            turn(each)  # warm up
        turns = [in_turn(plain, recorded, pair) for pair in range(pairs)]
        for each in (plain, recorded):
            each.communicate("")
    report(turns, steps)


def started(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def in_turn(
    plain: subprocess.Popen[str], recorded: subprocess.Popen[str], pair: int
) -> tuple[dict[str, float], dict[str, float]]:
    if pair % 2:
        first = turn(plain)
        return first, turn(recorded)
    second = turn(recorded)
    return turn(plain), second


def turn(job: subprocess.Popen[str]) -> dict[str, float]:
    assert job.stdin is not None
    assert job.stdout is not None
    job.stdin.write("go\n")
    job.stdin.flush()
    measured: dict[str, float] = json.loads(job.stdout.readline())
    return measured


def report(turns: list[tuple[dict[str, float], dict[str, float]]], steps: int) -> None:
    print(f"{len(turns)} pairs of turns of {steps} steps, {RANKS} ranks, {LAYERS} layers")
    for name, what in (("wall_s", "wall time"), ("cpu_s", "CPU time")):
        without = [plain[name] for plain, _ in turns]
        ratios = sorted(recorded[name] / plain[name] for plain, recorded in turns)
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        print(
            f"{what} of a step {statistics.median(without) * 1e3:.2f} ms without; "
            f"with over without: median {statistics.median(ratios):.4f} "
            f"(half of the pairs from {low:.4f} to {high:.4f}, all from {ratios[0]:.4f} "
            f"to {ratios[-1]:.4f})"
        )


def job(steps: int) -> None:
    """Train one turn of steps for each line on rank 0's standard input."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    data = torch.randn(BATCH, WIDTH)
    go_on = torch.zeros(1)
    while True:
        go_on[0] = float(dist.get_rank() == 0 and bool(sys.stdin.readline()))
        dist.broadcast(go_on, 0)
        if not go_on[0]:
            break
        walls = []
        cpu_s = time.process_time()
        for _ in range(steps):
            began_s = time.perf_counter()
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
            walls.append(time.perf_counter() - began_s)
        cpu_s = (time.process_time() - cpu_s) / steps
        if dist.get_rank() == 0:
            print(json.dumps({"wall_s": statistics.median(walls), "cpu_s": cpu_s}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["job"]:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        job(int(sys.argv[2]))
    else:
        main()
