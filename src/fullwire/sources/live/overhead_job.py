"""The job of `overhead.py`: a model of 40 layers under DDP, one thread a rank, on request.

python overhead_job.py RANKS: starts the ranks; for each line on standard input they train a step,
and rank 0 prints how long it took. Steps take some 85 ms on two cores.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time


def start(ranks: int) -> int:
    """Start the ranks and return the worst of their statuses."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(ranks)],
            env={
                **os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            },
        )
        for rank in range(ranks)
    ]  # fmt: skip
    return max(abs(process.wait()) for process in processes)


def train() -> None:
    """Train a step for each line on rank 0's standard input."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    layers, width, batch = 40, 512, 128
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(
        nn.Sequential(
            *[part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
        )
    )
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    data = torch.randn(batch, width)
    go_on = torch.zeros(1)
    while True:
        go_on[0] = float(dist.get_rank() == 0 and bool(sys.stdin.readline()))
        dist.broadcast(go_on, 0)
        if not go_on[0]:
            break
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        if dist.get_rank() == 0:
            sys.stdout.write(json.dumps({"wall_s": wall_s, "cpu_s": cpu_s}) + "\n")
            sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        sys.exit(start(int(sys.argv[1])))
