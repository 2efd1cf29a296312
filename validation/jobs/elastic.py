"""A training of 2 MB of parameters and steps of 10 ms that notes each committed step.

    FOLDER STEPS elastic|ddp|large|uneven|uneven-slow

A line holds the time, the step, the world size, the checksum of the parameters, and the samples.
`large` has 500 MB of state that a new worker needs. In `uneven` and `uneven-slow` worker 1 takes
twice as long for a sample as worker 0.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist

STEP_S = 0.010
WARM_UP = 20
LARGE_BYTES = 498_000_000
SAMPLE_S = {"uneven": (0.0005, 0.001), "uneven-slow": (0.002, 0.004)}  # of both workers


def network() -> torch.nn.Sequential:
    """Return a model of 2 MB."""
    torch.manual_seed(1)
    layers = [torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 896)]
    return torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(896, 10))


class Samples:
    """As many samples as a long job needs, from few in memory."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._inputs = torch.randn(4096, 64, generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._inputs[index % len(self._inputs)], index % 10


class Table:
    """More state, as a large optimizer has it."""

    def __init__(self) -> None:
        self._rows = torch.arange(LARGE_BYTES // 4, dtype=torch.float32)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return it for a new worker."""
        return {"rows": self._rows}

    def load_state_dict(self, told: dict[str, torch.Tensor]) -> None:
        """Take it, as a new worker."""
        if not torch.equal(told["rows"], self._rows):
            sys.exit("the state did not arrive whole")


def rest(began: float, pass_s: float = STEP_S) -> None:
    """Fill the pass up to its time without a processor, as an accelerator's would."""
    time.sleep(max(began + pass_s - time.perf_counter(), 0))


def elastic(folder: Path, steps: int, kind: str) -> None:
    """Train with `fullwire.elastic`."""
    import fullwire

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dataset = Samples(48 * steps)
    job = fullwire.elastic(model, optimizer)
    worker = int(os.environ["FULLWIRE_ELASTIC_WORKER"])
    if kind == "large":
        job.state({"table": Table()})
    noted = (folder / f"steps of {worker}").open("w", buffering=1)
    times = []
    for given, wanted in job.batches(dataset, batch_size=48, shuffle=False):
        began, before = time.perf_counter(), job.step_number
        with job.step():
            loss = torch.nn.functional.cross_entropy(job.model(given), wanted)
            is_uneven = kind in SAMPLE_S
            rest(began, SAMPLE_S[kind][worker % 2] * len(given) if is_uneven else STEP_S)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if job.step_number > before and job.samples:  # a new worker may have none yet
            times.append(time.perf_counter() - began)
            if not is_uneven and (job.step_number % 10 == 0 or job.world_size < 3):
                whole = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
                digest = zlib.crc32(whole)
            else:
                digest = 0
            part = f"{job.samples[0]} {job.samples[-1]}"
            print(time.monotonic(), job.step_number, job.world_size, digest, part, file=noted)
    if job.rank == 0:
        print(f"median {statistics.median(times[WARM_UP:]):.6f}", flush=True)


def ddp(steps: int) -> None:
    """Train the same under torch's DistributedDataParallel, on the same backend."""
    dist.init_process_group("fullwire")
    model = torch.nn.parallel.DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    times = []
    for _ in range(steps):
        given, wanted = torch.randn(16, 64), torch.arange(16) % 10
        began = time.perf_counter()
        loss = torch.nn.functional.cross_entropy(model(given), wanted)
        rest(began)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        print(f"median {statistics.median(times[WARM_UP:]):.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[3] == "ddp":
        ddp(int(sys.argv[2]))
    else:
        elastic(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
