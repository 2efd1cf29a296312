"""One process without a process group; each mode trains in its own way.

python solo.py plain|accumulation|evaluation|evaluation-by-train|evaluation-of-frozen|checkpoint|
               optimizers|full-disk|broken|long|no-step|endless|hard

- optimizers ends with status 7.
- long takes 3000 steps, and no-step takes 0.
- endless prints a line after thirty steps.
- hard skips Python's work at exit.
"""

import io
import itertools
import os
import resource
import sys
import time

import torch
from torch import nn

STEPS = 6
LENGTHS = {"long": 3000, "endless": 10_000}


def main(mode: str) -> None:
    torch.set_num_threads(1)
    model, other = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    second = torch.optim.SGD(other.parameters(), 0.1)
    data = torch.utils.data.DataLoader(torch.randn(STEPS * 2, 8), batch_size=2)
    if mode == "full-disk":  # the largest size of a file, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))
        sys.dont_write_bytecode = True  # else Python leaves the beginnings of compiled modules
    if mode == "broken":
        sys.modules["fullwire_inside.journal"].Journal._append = None
    batches = itertools.islice(itertools.cycle(data), LENGTHS.get(mode, STEPS))
    for step, batch in enumerate(batches):
        if mode == "endless":
            sys.stdout.write("thirty steps\n" * (step == 30))
            sys.stdout.flush()
            time.sleep(0.02)
        optimizer.zero_grad()
        if mode == "evaluation-of-frozen":  # a part of the model that stays as it is
            other.train()
            other.eval()
        for _ in range(3 if mode == "accumulation" else 1):
            model(batch).square().mean().backward()
        if mode != "no-step":
            optimizer.step()
        if mode == "optimizers":
            second.zero_grad()
            other(batch).square().mean().backward()
            second.step()
        if mode.startswith("evaluation") and step == 2:
            model.train(False) if mode == "evaluation-by-train" else model.eval()
            with torch.no_grad():
                sum(float(model(batch).sum()) for _ in range(10_000))
            model.train()
        if mode == "checkpoint" and step == 2:
            for _ in range(2):  # files of one checkpoint
                torch.save(torch.zeros(8 * 2**20), io.BytesIO())
    sys.stdout.buffer.write(b"done\x00\xff\r\n")
    if mode == "hard":
        sys.stdout.flush()
        os._exit(0)
    sys.exit(7 if mode == "optimizers" else 0)


if __name__ == "__main__":
    main(sys.argv[1])
