"""One rank that trains small models to a held-out loss: reaching.py FILE CELL...

A cell is MODEL/BATCH/CODEC/SEED, where BATCH counts the samples of a step over all ranks. Rank 0
adds a line to FILE for each cell: the steps and the seconds of training to the target, looks at the
held-out loss left out. With FILE `-` the losses go to the recorder instead, as any job logs them.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fullwire
from validation.settings_to_target import wide
from validation.time_to_target import HELD_OUT, Training

LONGEST = 4000  # steps
LOOK_EVERY = 2048  # samples


def trained(training: Training, batch: int, codec: str, seed: int, *, logs: bool) -> dict[str, Any]:
    """Train a model until its held-out loss is at the target."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    apart = torch.Generator().manual_seed(1)
    held_out = training.draw(apart, HELD_OUT)
    torch.manual_seed(seed)
    data = DistributedDataParallel(training.build())
    if codec != "none":
        fullwire.compress(data, codec)
    rate = training.rate * (batch / 256) ** 0.5
    optimizer = torch.optim.Adam(data.parameters(), rate)
    random = torch.Generator().manual_seed(1000 * (seed + 1) + rank)  # not the held-out one
    every = max(1, LOOK_EVERY // batch)
    took_s, before_s, before, last = 0.0, 0.0, 0, float("inf")
    for step in count(1):
        began_s = time.perf_counter()
        inputs, wanted = training.draw(random, batch // ranks)
        optimizer.zero_grad()
        training.loss(data(inputs), wanted).backward()
        optimizer.step()
        took_s += time.perf_counter() - began_s
        if step % every:
            continue
        with torch.no_grad():  # ranks hold the same weights, so they agree
            now = float(training.loss(data.module(held_out[0]), held_out[1]))
        if logs:
            fullwire.log(loss=now, step=step)
        if now <= training.target:
            share = (last - training.target) / (last - now) if last < float("inf") else 1.0
            reached = before + share * (step - before)
            reached_s = before_s + share * (took_s - before_s)
            return {"steps": reached, "time_s": reached_s, "step_s": took_s / step}
        if step >= LONGEST:
            return {"steps": None, "time_s": None, "step_s": took_s / step}
        before_s, before, last = took_s, step, now
    raise AssertionError("count() ends")


def main() -> None:
    """Train all cells, one after the other."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    kinds = {training.name: training for training in wide()}
    for cell in sys.argv[2:]:
        model, batch, codec, seed = cell.split("/")
        logs = sys.argv[1] == "-"
        found = trained(kinds[model], int(batch), codec, int(seed), logs=logs)
        if dist.get_rank() == 0 and not logs:
            with Path(sys.argv[1]).open("a") as file:
                file.write(
                    json.dumps({"cell": cell, "ranks": dist.get_world_size(), **found}) + "\n"
                )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
