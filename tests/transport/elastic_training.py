"""A small elastic training that notes each committed step, and may end itself in a phase of one."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import fullwire

SAMPLES, BATCH, WIDTH = 480, 48, int(os.environ.get("WIDTH", "300"))
FOLDER, EPOCHS, PHASE = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
WORKER = os.environ.get("FULLWIRE_ELASTIC_WORKER", os.environ.get("RANK", ""))
ENDS_ITSELF = os.environ.get("ENDS", "1") in (WORKER, "all")
PAUSE_S = float(os.environ.get("PAUSE_S", "0"))
ALL_ENDED = FOLDER / "all ended"  # once
HAS_BEGUN_AGAIN = ALL_ENDED.exists()
AWAITED_S = float(os.environ.get("AWAITED_S", "0.1"))
AT_STEP = 7
KEPT = os.environ.get("KEPT", "")  # the folder of checkpoints, if the end waits for one
for ending in os.environ.get("ENDINGS", "").split():  # WORKER:PHASE:STEP
    worker, phase, step = ending.split(":")
    if worker == WORKER:
        ENDS_ITSELF, PHASE, AT_STEP = True, phase, int(step)
SLOW = os.environ.get("SLOW", "")  # the worker that needs three times as long for a sample
SAMPLE_S = float(os.environ.get("SAMPLE_S", "0"))
DROPPED = float(os.environ.get("DROPPED", "0.1"))
SYNC = int(os.environ.get("SYNC", "1"))  # the steps of a round
FRAGMENTS = int(os.environ.get("FRAGMENTS", "1"))
NEW = os.environ.get("NEW", "")  # the number of a new worker, which step 9 waits for
tries_left = int(os.environ.get("TRIES", "1"))  # so often it comes to its end


def end_in(phase: str, job: fullwire.Job) -> None:
    """End this process as a lost host would."""
    global tries_left
    if ENDS_ITSELF and phase == PHASE and job.step_number >= AT_STEP and not HAS_BEGUN_AGAIN:
        tries_left -= 1
        if tries_left > 0:
            return
        if os.environ.get("ENDS") == "all":
            ALL_ENDED.touch()
        while KEPT and not any(Path(KEPT).glob("step-*")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


class Ballast:
    """A state that takes a while to send."""

    def __init__(self) -> None:
        self.numbers = torch.full((int(os.environ.get("BALLAST", "0")),), float(WORKER))

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": self.numbers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.numbers = state["numbers"]


def prepare() -> None:
    """Take as long as the others need for 20 steps, between `fullwire.elastic` and the loop."""
    others = FOLDER / "steps of 0"
    wanted = len(others.read_text().splitlines()) + 20
    until = time.monotonic() + 20
    while len(others.read_text().splitlines()) < wanted:
        if time.monotonic() > until:
            sys.exit("the others stopped while this worker prepared")
        time.sleep(0.01)


def main() -> None:
    """Train; the line of a step holds its parameters and this rank's samples."""
    torch.set_num_threads(1)
    torch.manual_seed(int(WORKER))  # each worker begins with other parameters
    model = torch.nn.Sequential(
        torch.nn.Linear(8, WIDTH),
        torch.nn.ReLU(),
        torch.nn.Dropout(DROPPED),
        torch.nn.Linear(WIDTH, 1),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(3))
    dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    job = fullwire.elastic(model, optimizer, scheduler, sync_every=SYNC, fragments=FRAGMENTS)
    if os.environ.get("PREPARES") and WORKER == NEW:
        prepare()
    ballast = Ballast()
    job.state({"ballast": ballast})
    job.on_change(lambda rank, size: end_in("change", job))

    def middle(_: Any) -> None:
        end_in("backward", job)

    model[0].weight.register_hook(middle)
    lines = (FOLDER / f"steps of {WORKER}").open("w", buffering=1)
    for given, wanted in job.batches(dataset, batch_size=BATCH, epochs=EPOCHS):
        before = job.step_number
        with job.step():
            end_in("forward", job)
            is_awaited = NEW and job.step_number >= AT_STEP + 2 and job.world_size < 3
            time.sleep(AWAITED_S if is_awaited else PAUSE_S)  # a loaded machine needs a while
            time.sleep(len(given) * SAMPLE_S * (3 if WORKER == SLOW else 1))
            loss = torch.nn.functional.mse_loss(job.model(given), wanted)
            optimizer.zero_grad()
            loss.backward()
            end_in("optimizer", job)
            optimizer.step()
            scheduler.step()
        if job.step_number == before and SYNC > 1:
            continue  # a round is under way
        if job.step_number == before:
            print(f"worker {WORKER} interrupted after {before}", flush=True)
            continue
        whole = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
        digest = hashlib.sha256(whole).hexdigest()
        print(job.step_number, digest, job.rank, job.world_size, *job.samples, file=lines)
        end_in("between", job)
        if NEW and not ENDS_ITSELF and job.step_number == AT_STEP + 2:
            address = Path(os.environ["FULLWIRE_ELASTIC_FOLDER"]) / f"rank {NEW}"
            while not address.exists():
                time.sleep(0.01)
    halves = [
        bool((each.grad.view(torch.int32) & 0xFFFF == 0).all())
        for each in model.parameters()
        if each.grad is not None
    ]
    print(f"worker {WORKER} rounded to bf16: {halves}", flush=True)
    if os.environ.get("KEEPS"):
        torch.save(model.state_dict(), FOLDER / f"model of {WORKER}")
    print(f"worker {WORKER} done {job.step_number} {scheduler.get_last_lr()}", flush=True)
    print(f"ballast {ballast.numbers.unique().tolist()}", flush=True)


main()
