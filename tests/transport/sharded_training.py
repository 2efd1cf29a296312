"""A small elastic training with FSDP2 that notes each committed step, and may end itself in one."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

import fullwire
from fullwire.resilience.mesh import Mesh
from fullwire.resilience.sharded import ShardedJob
from fullwire.resilience.shards import checksum
from tests.transport.sharded_model import BATCH, CLIP, a_model, an_optimizer, the_data

FOLDER, EPOCHS = Path(sys.argv[1]), int(sys.argv[2])
WORKER = os.environ.get("FULLWIRE_ELASTIC_WORKER", "0")
ENDED = [  # WORKER:PHASE:STEP
    each.split(":") for each in os.environ.get("ENDINGS", "").split(",") if each
]
ENDINGS = {(phase, int(step)) for worker, phase, step in ENDED if worker == WORKER}
NEW = os.environ.get("NEW", "")  # the number of a new worker, which is waited for after a loss
KEPT = os.environ.get("KEPT", "")  # the folder of checkpoints, if the end waits for one
STARTERS = int(os.environ.get("FULLWIRE_ELASTIC_STARTERS", "1"))
# A worker that has come takes part some steps later. There are few, so each lasts longer meanwhile.
AWAITS = bool(NEW) or any(phase.startswith("hangs") for _, phase, _ in ENDED)
AWAITED_S, PAUSE_S = 0.3, float(os.environ.get("PAUSE_S", "0"))
HAS_BEGUN = FOLDER / f"has begun {WORKER}"  # a worker of this number, before the job began again


def end_in(phase: str, step: int) -> None:
    """End this process as a lost host would."""
    if (f"hangs in {phase}", step) in ENDINGS and not HAS_BEGUN.exists():
        HAS_BEGUN.touch()
        other = FOLDER / "steps of 0"
        while len(other.read_text().splitlines()) < step + 3:  # until the others go on without it
            time.sleep(0.02)
    if (phase, step) in ENDINGS and not HAS_BEGUN.exists():
        HAS_BEGUN.touch()
        while KEPT and not any(Path(KEPT).glob("step-*")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


class Numbers:
    """A state of the script's own."""

    def __init__(self) -> None:
        self.worker = WORKER

    def state_dict(self) -> dict[str, Any]:
        return {"worker": self.worker}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.worker = state["worker"]


def main() -> None:
    """Train; the line of a step holds this rank's samples, and checksums of its shard and copy."""
    torch.set_num_threads(1)
    torch.manual_seed(int(WORKER))  # each worker begins with other parameters
    step = -1

    def build(mesh: Any) -> Any:
        end_in("build", step)
        if os.environ.get("SAME"):
            torch.manual_seed(5)
        model = a_model()
        for layer in model:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = an_optimizer(model)
        optimizer.register_step_pre_hook(lambda *_: end_in("optimizer", step))
        model[2].register_full_backward_hook(lambda *_: end_in("backward", step))
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.8)

    committed = Mesh.commit

    def commit(*given: Any) -> bool:
        end_in("commit", step)
        return committed(*given)

    Mesh.commit = commit  # type: ignore[method-assign, assignment]
    job = fullwire.elastic(build)
    assert isinstance(job, ShardedJob)
    numbers = Numbers()
    job.state({"numbers": numbers})
    job.on_change(lambda rank, size: end_in("change", step))
    lines = (FOLDER / f"steps of {WORKER}").open("w", buffering=1)
    for given, wanted in job.batches(the_data(), batch_size=BATCH, epochs=EPOCHS):
        step = job.step_number
        with job.step():
            end_in("forward", step)
            time.sleep(AWAITED_S if AWAITS and job.world_size < STARTERS else PAUSE_S)
            loss = torch.nn.functional.mse_loss(job.model(given), wanted)
            job.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(job.model.parameters(), CLIP)
            job.optimizer.step()
            job.scheduler.step()
        if job.step_number == step:
            print(f"worker {WORKER} interrupted after {step}", flush=True)
            continue
        shards = job._held[-1]
        held = ",".join(f"{index}={checksum(piece)}" for index, piece in shards.pieces().items())
        print(job.step_number, job.rank, job.world_size, held, *job.samples, file=lines)
        end_in("between", step)
        if NEW and job.world_size < STARTERS:
            address = Path(os.environ["FULLWIRE_ELASTIC_FOLDER"]) / f"rank {NEW}"
            while not address.exists():
                time.sleep(0.01)
    shards = job._held[-1]
    own = dict(zip(shards.names, shards.own(), strict=True))
    torch.save((shards.index, own), FOLDER / f"shard of {WORKER}")
    print(f"worker {WORKER} done {job.step_number} {job.scheduler.get_last_lr()}", flush=True)
    print(f"numbers of {numbers.worker}", flush=True)


main()
