"""A training with FSDP2 in `fullwire.elastic`, for validation: FOLDER STEPS notes|copies.

notes    2 MB of parameters, steps of 10 ms. A line holds the time, the step, the world size, the
         norm of all gradients as bits, and the samples: as in `elastic.py`.
copies   Steps with copies of the shards take turns with steps without. A line of rank 0 holds the
         seconds of two neighbours. WIDTH sets the model's size, STEP_S its time to compute.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

import fullwire
from fullwire.resilience.shards import Shards
from validation.jobs.elastic import Samples, network, rest

WIDTH, STEP_S = int(os.environ.get("WIDTH", "1024")), float(os.environ.get("STEP_S", "0"))
BATCH, LAYERS = 48, 4
OF_A_TURN = 3  # steps: the first one of a turn is left out


def build(mesh: Any) -> Any:
    """Shard the model of `elastic.py`."""
    model = network()
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def build_wide(mesh: Any) -> Any:
    """Shard some layers of WIDTH, with Adam."""
    torch.manual_seed(1)
    middle = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = torch.nn.Sequential(torch.nn.Linear(64, WIDTH), *middle, torch.nn.Linear(WIDTH, 10))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.Adam(model.parameters(), lr=1e-4)


def noted(folder: Path, steps: int) -> None:
    """Train, and note each committed step."""
    job: Any = fullwire.elastic(build)
    lines = (folder / f"steps of {os.environ['FULLWIRE_ELASTIC_WORKER']}").open("w", buffering=1)
    for given, wanted in job.batches(Samples(BATCH * steps), batch_size=BATCH, shuffle=False):
        began, before = time.perf_counter(), job.step_number
        with job.step():
            loss = torch.nn.functional.cross_entropy(job.model(given), wanted)
            rest(began)
            job.optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(job.model.parameters(), 10.0)
            digest = int.from_bytes(struct.pack("f", float(norm.full_tensor())), "little")
            job.optimizer.step()
        if job.step_number > before:
            part = f"{job.samples[0]} {job.samples[-1]}"
            print(time.monotonic(), job.step_number, job.world_size, digest, part, file=lines)


def in_turns(folder: Path, steps: int) -> None:
    """Train in turns with copies and without; both times of two neighbours make a line."""
    job: Any = fullwire.elastic(build_wide)
    exchange, step_copy = Shards.exchange, Shards.step_copy
    times: dict[bool, list[float]] = {True: [], False: []}
    began, has_copies = 0.0, True
    for given, wanted in job.batches(Samples(BATCH * steps), batch_size=BATCH, shuffle=False):
        turn, place = divmod(job.step_number, OF_A_TURN)
        if place == 0:
            # Of four turns, the middle ones are without: a drift of the machine cancels out.
            has_copies = turn % 4 in (0, 3)
            Shards.exchange = exchange if has_copies else lambda *_: None  # type: ignore[method-assign]
            Shards.step_copy = step_copy if has_copies else lambda *_: None  # type: ignore[method-assign]
        with job.step():
            loss = torch.nn.functional.cross_entropy(job.model(given), wanted)
            time.sleep(STEP_S)
            job.optimizer.zero_grad()
            loss.backward()
            job.optimizer.step()
        ended = time.perf_counter()
        if place:
            times[has_copies].append(ended - began)
        began = ended
    if job.rank == 0:
        with (folder / "times").open("w") as file:
            for pair in zip(times[True], times[False], strict=False):
                print(*pair, file=file)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"notes": noted, "copies": in_turns}[sys.argv[3]](Path(sys.argv[1]), int(sys.argv[2]))
