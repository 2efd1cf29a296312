"""A training that is watched from outside while it is recorded from inside.

It computes for real: a thread's own processor time is what a layer takes. Rank 0 notes when each
step began and ended. The job ends after the step whose number stands in the file STOP. With --hang,
something stops it for ever.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

LATE_RANK = 1
KINDS = ("ddp", "sharded", "adding", "by-hand", "local")
HANGS = ("input", "groups", "missing", "stopped", "full-disk", "computing", "sleeping", "link")
BESIDE = {  # other programs, of nobody's job; they end with the rank that started them
    "computing": """
import os
while os.getppid() == {parent}:
    sum(range(10_000))
""",
    "sending": """
import os, socket, time
place = ("{address}", 47_123)
if not {rank}:
    with socket.create_server(("", place[1])) as server:
        peer = server.accept()[0]
        while os.getppid() == {parent} and peer.recv(1 << 20):
            pass
else:
    time.sleep(2)
    with socket.create_connection(place) as peer:
        while os.getppid() == {parent}:
            peer.sendall(bytes(4 << 20))
            time.sleep(0.11)
""",
}


class Slow(IterableDataset):  # type: ignore[misc]
    """Data of which each batch takes a given time to read."""

    def __init__(self, batch_s: float) -> None:
        self.batch_s = batch_s

    def __iter__(self) -> Iterator[Any]:
        """Yield batches for ever."""
        while True:
            time.sleep(self.batch_s)
            yield torch.zeros(4, 64)


class Working(torch.autograd.Function):  # type: ignore[misc]  # torch is not checked
    """A layer that computes for a given processor time in each direction."""

    @staticmethod
    def forward(context: Any, x: Any, weight: Any, work_s: float) -> Any:
        """Compute for a third of the time."""
        context.save_for_backward(weight)
        context.work_s = work_s
        work(work_s / 3)
        return x + weight[0, 0]

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        """Compute for the rest, and give the weight a gradient of its size."""
        (weight,) = context.saved_tensors
        work(context.work_s * 2 / 3)
        return gradient, torch.full_like(weight, 1e-3), None


class Layer(nn.Module):  # type: ignore[misc]
    """A layer of a given size and processor time."""

    def __init__(self, size_bytes: int, work_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(max(size_bytes // 256, 2), 64))
        self.work_s = work_s

    def forward(self, x: Any) -> Any:
        """Apply the layer."""
        return Working.apply(x, self.weight, self.work_s)


def work(seconds: float) -> None:
    """Compute for so much processor time."""
    square = torch.ones(64, 64)
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        square @ square


def options() -> argparse.Namespace:
    """Read the arguments."""
    given = argparse.ArgumentParser()
    given.add_argument("--kind", choices=KINDS, default="ddp")
    given.add_argument("--bytes", type=int, default=25_000_000, help="of all gradients")
    given.add_argument("--work-s", type=float, default=0.1, help="of a step's computing")
    given.add_argument("--late-s", type=float, default=0.0, help="that rank 1 computes longer")
    given.add_argument("--load-s", type=float, default=0.0, help="that all wait for data")
    given.add_argument(
        "--loader-s", type=float, default=0.0, help="that a loader takes for a batch"
    )
    given.add_argument(
        "--late-load-s", type=float, default=0.0, help="that one rank waits for data"
    )
    given.add_argument("--evaluate-every", type=int, default=0, help="steps; 2 s each time")
    given.add_argument("--local-steps", type=int, default=4, help="after which local SGD averages")
    given.add_argument("--beside", choices=BESIDE, help="what another program of the host does")
    given.add_argument("--hang", choices=HANGS)
    given.add_argument("--hang-at", type=int, default=20, help="the step that never ends")
    given.add_argument("folder", type=Path)
    return given.parse_args()


def main() -> None:
    """Train as one of the ranks."""
    given = options()
    torch.set_num_threads(1)
    dist.init_process_group(os.environ.get("BACKEND", "gloo"))
    if given.beside and dist.get_rank() < 2:
        beside(given.beside)
    train(given)
    dist.barrier()
    dist.destroy_process_group()


def beside(kind: str) -> None:
    """Start another program, without the variables that would make it a rank."""
    address, rank = os.environ["MASTER_ADDR"], dist.get_rank()
    text = BESIDE[kind].format(address=address, rank=rank, parent=os.getpid())
    known = {"PATH": os.environ["PATH"]}
    subprocess.Popen([sys.executable, "-I", "-c", text], env=known)


def train(given: argparse.Namespace) -> None:
    """Train until the file STOP names a step that was done."""
    rank, stop = dist.get_rank(), given.folder / "STOP"
    passes = 4 if given.kind == "adding" else 1
    layers = [Layer(given.bytes // 8, given.work_s / 8 / passes) for _ in range(8)]
    inner: Any = nn.Sequential(*layers)
    model = inner
    if given.kind == "sharded":
        for layer in inner:
            fully_shard(layer)
        fully_shard(inner)
    elif given.kind not in ("by-hand", "local"):
        model = DistributedDataParallel(inner, bucket_cap_mb=8)
    optimizer = torch.optim.SGD(inner.parameters(), 0.1)
    groups = [dist.new_group() for _ in range(2)] if given.hang == "groups" else []
    step = 0
    batches = iter(DataLoader(Slow(given.loader_s), num_workers=1, prefetch_factor=1)
                   if given.loader_s else repeat(None))  # fmt: skip
    with (given.folder / f"steps-{rank}").open("w", buffering=1) as steps:
        while not (stop.exists() and (text := stop.read_text()) and step > int(text)):
            begun_ns = time.time_ns()
            time.sleep(given.load_s)
            next(batches)
            if rank == LATE_RANK:
                time.sleep(given.late_load_s)
                work(given.late_s)
            if given.hang and step == given.hang_at:
                hang(given, rank, groups)
            optimizer.zero_grad()
            for number in range(passes):
                is_last = number == passes - 1
                with nullcontext() if is_last else model.no_sync():
                    model(torch.zeros(4, 64)).sum().backward()
            if given.kind == "by-hand":
                for each in inner.parameters():
                    dist.all_reduce(each.grad)
            optimizer.step()
            if given.kind == "local" and step % given.local_steps == 0:
                for each in inner.parameters():
                    dist.all_reduce(each.data)
                    each.data /= dist.get_world_size()
            steps.write(f"{begun_ns} {time.time_ns()}\n")
            step += 1
            if given.evaluate_every and step % given.evaluate_every == 0:
                work(2.0)


def hang(given: argparse.Namespace, rank: int, groups: list[Any]) -> None:
    """Stop the job in the way that was asked for; it is rank 1's doing where it is anybody's."""
    if given.hang == "groups":  # each waits in a group in which the other is not yet
        dist.all_reduce(torch.ones(1), group=groups[rank % 2])
    elif rank == LATE_RANK:
        if given.hang == "input":
            os.mkfifo(given.folder / "data")
            read_batch(given.folder / "data")
        elif given.hang == "missing":
            dist.recv(torch.zeros(1), src=0)
        elif given.hang == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif given.hang == "full-disk":
            write_checkpoint(Path("/dev/full"))
        elif given.hang == "computing":
            work(1e6)
        elif given.hang == "sleeping":
            time.sleep(1e6)
        elif given.hang == "link":
            for name in os.listdir("/sys/class/net"):
                if name != "lo":
                    subprocess.run(["ip", "link", "set", name, "down"], check=True)


def read_batch(path: Path) -> None:
    """Wait for data that nobody sends."""
    path.read_bytes()


def write_checkpoint(path: Path) -> None:
    """Write again and again to a device that is full, as a patient writer does."""
    while True:
        try:
            path.write_bytes(bytes(1 << 20))
        except OSError:
            time.sleep(1)


if __name__ == "__main__":
    main()
