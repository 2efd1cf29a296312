"""One rank that trains to a held-out loss, with a sum at each step or at the end of rounds.

    python -m validation.jobs.rounds FILE MODEL/STEPS/SEED...

STEPS is `sync_every`; 0 is DDP. Rank 0 adds a line to FILE: the steps and the seconds of training
to the target. Looks at the held-out loss are left out, and so is the first step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import fullwire
from validation.settings_to_target import wide
from validation.time_to_target import HELD_OUT, Training

SAMPLES, BATCH, EPOCHS = 64_000, 64, 10
LOOK_STEPS = 30


def steps_of(training: Training, every: int, seed: int) -> Iterator[tuple[int, torch.nn.Module]]:
    """Train; yield the number of committed steps and the model after each of these."""
    torch.manual_seed(seed)
    model = training.build()
    optimizer = torch.optim.Adam(model.parameters(), training.rate * (BATCH / 256) ** 0.5)
    inputs, wanted = training.draw(torch.Generator().manual_seed(1000 * (seed + 1)), SAMPLES)
    if every == 0:
        data = DistributedDataParallel(model)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for step in range(EPOCHS * SAMPLES // BATCH):
            share = slice(step * BATCH % SAMPLES, step * BATCH % SAMPLES + BATCH)
            given, target = inputs[share][rank::ranks], wanted[share][rank::ranks]
            optimizer.zero_grad()
            training.loss(data(given), target).backward()
            optimizer.step()
            yield step + 1, model
        return
    job = fullwire.elastic(model, optimizer, sync_every=every)
    dataset = TensorDataset(inputs, wanted)
    for given, target in job.batches(dataset, batch_size=BATCH, epochs=EPOCHS, seed=seed):
        before = job.step_number
        with job.step():
            optimizer.zero_grad()
            training.loss(model(given), target).backward()
            optimizer.step()
        if job.step_number > before:
            yield job.step_number, model


def trained(training: Training, every: int, seed: int) -> dict[str, Any]:
    """Train a model until its held-out loss is at the target."""
    held_out = training.draw(torch.Generator().manual_seed(1), HELD_OUT)
    took_s, looked, first = 0.0, 0, 0
    began_s = time.perf_counter()
    for step, model in steps_of(training, every, seed):
        if not first:  # connecting and the first allocations
            first, began_s = step, time.perf_counter()
            continue
        if step // LOOK_STEPS == looked:
            continue
        took_s += time.perf_counter() - began_s
        looked = step // LOOK_STEPS
        with torch.no_grad():  # ranks hold the same weights, so they agree
            now = float(training.loss(model(held_out[0]), held_out[1]))
        if now <= training.target:
            return {"steps": step, "time_s": took_s, "step_s": took_s / (step - first)}
        began_s = time.perf_counter()
    return {"steps": None, "time_s": None, "step_s": None}


def main() -> None:
    """Train all cells, one after the other; those of one command have the same STEPS."""
    torch.set_num_threads(1)
    kinds = {training.name: training for training in wide()}
    model, every, seed = sys.argv[2].split("/")
    if every == "0":
        dist.init_process_group("fullwire")
    found = trained(kinds[model], int(every), int(seed))
    if os.environ["RANK"] == "0":
        with Path(sys.argv[1]).open("a") as file:
            file.write(json.dumps({"cell": sys.argv[2], **found}) + "\n")


if __name__ == "__main__":
    main()
