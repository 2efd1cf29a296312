"""The job of `overhead.py`: a model of equal layers under DDP, one thread a rank, on request.

python job.py RANKS LAYERS WIDTH BATCH STEPS PAIRS LONGER_S: starts the ranks. For each line on
standard input they train the model, with so many layers of that width, in two ways by turns of so
many steps. Rank 0 prints the time of the turns, pair by pair. One more pair comes first and is not
counted. The line names the difference between the two ways (`DIFFERENCES`).

The recorder is in these processes. For each turn that is not recorded, it is taken out of torch.
Every function that it replaced is put back, DDP gets its true process group, parameters have no
hooks, and the sampler beside the job stands still. Only in this way do both ways share a process,
and two processes differ by more than a recorder costs. Both ways train the same module, each
through a DDP of its own. They share all memory except DDP's buckets. The buckets are made anew for
each request, alternately for the one way first and for the other.

The learning rate is 0, so that all steps do equal work. A turn has several steps, so that most
turns hold some of the recorder's occasional work. A turn may be shorter than the second between two
writes, so some turns hold no write. One more step comes first and is not counted: the change itself
makes it slow. Python has to look up each function anew, and the sampler wakes up with all its work
due.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

# The parts of the recorder that the other way has and the plain way has not.
DIFFERENCES = {
    "control": frozenset[str](),
    "record": frozenset({"hooks", "sampler"}),
    "hooks": frozenset({"hooks"}),
    "sampler": frozenset({"sampler"}),
    "longer": frozenset({"longer"}),
}
_INSIDE = "fullwire_inside"
_DIRECTORY_VARIABLE = "FULLWIRE_RECORD_INTO"


def start(ranks: int) -> int:
    """Start the ranks and return the worst of their statuses."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:]],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            },
        )
        for rank in range(ranks)
    ]
    return max(abs(process.wait()) for process in processes)


@dataclass(frozen=True, slots=True)
class _Shape:
    """The model and the turns, in the order of the arguments."""

    layers: int
    width: int
    batch: int
    steps: int  # of a turn
    pairs: int  # of turns for each line; one more comes first
    longer_s: float


def train(shape: _Shape) -> None:
    """Train in turns for each line on rank 0's standard input."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    recorder = _Recorder()
    recorder.take_out()
    work = _Work(shape)
    asked: Counter[str] = Counter()
    try:
        for difference in _asked():
            pairs = _pairs(work, recorder, difference, is_swapped=bool(asked[difference] % 2))
            asked[difference] += 1
            if dist.get_rank() == 0:
                sys.stdout.write(json.dumps(pairs) + "\n")
                sys.stdout.flush()
    finally:
        recorder.put_in(DIFFERENCES["record"])  # a sampler that stands still would never end
    dist.barrier()
    dist.destroy_process_group()


def _pairs(
    work: _Work, recorder: _Recorder, difference: str, *, is_swapped: bool
) -> list[dict[str, dict[str, float]]]:
    """Train in pairs of turns; the way that is made first determines where its buckets lie."""
    parts = {"plain": DIFFERENCES["control"], "other": DIFFERENCES[difference]}
    order = sorted(parts, reverse=not is_swapped)
    ways = {name: _Way(work, recorder, parts[name]) for name in order}
    pairs = [
        {name: ways[name].turn() for name in (reversed(order) if number % 2 else order)}
        for number in range(1 + work.shape.pairs)
    ]
    return pairs[1:]


def _asked() -> Iterator[str]:
    """Yield the requests to rank 0, on every rank."""
    import torch
    import torch.distributed as dist

    words = ["", *DIFFERENCES]
    word = torch.zeros(1)
    while True:
        if dist.get_rank() == 0:
            word[0] = words.index(sys.stdin.readline().strip())
        dist.broadcast(word, 0)
        if not word[0]:
            return
        yield words[int(word[0])]


class _Recorder:
    """The recorder's parts in torch; they can be taken out and put back."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        from torch.optim import optimizer as optimizers

        owners: list[Any] = [
            torch.autograd,
            dist,
            dist.ProcessGroup,
            dist.Work,
            torch._C.Future,
            DistributedDataParallel,
            optimizers.Optimizer,
            inspect.unwrap(dist.Reducer),
        ]
        self._replaced = [
            (
                owner,
                name,
                value,
                inspect.unwrap(value, stop=lambda function: not _is_ours(function)),
            )
            for owner in owners
            for name, value in list(vars(owner).items())
            if _is_ours(value)
        ]
        self._registers = [
            (register, dict(register))
            for register in (
                optimizers._global_optimizer_pre_hooks,
                optimizers._global_optimizer_post_hooks,
            )
        ]

        samples = Path(os.environ[_DIRECTORY_VARIABLE]).glob("*.samples")
        self._samplers = [int(path.name.split("-")[-2]) for path in samples]  # HOST-PROCESS-TIME

    def put_in(self, parts: Collection[str]) -> None:
        """Let some parts of the recorder see what happens from now on."""
        if "hooks" in parts:
            for owner, name, ours, _ in self._replaced:
                setattr(owner, name, ours)
            for register, hooks in self._registers:
                register.update(hooks)
        if "sampler" in parts:
            self._tell_samplers(signal.SIGCONT)

    def take_out(self) -> None:
        """Leave torch as it is without the recorder."""
        for owner, name, _, true in self._replaced:
            setattr(owner, name, true)
        for register, _ in self._registers:
            register.clear()
        self._tell_samplers(signal.SIGSTOP)

    def _tell_samplers(self, number: signal.Signals) -> None:
        """Send the sampler beside this job a signal, once for all ranks."""
        if os.environ["RANK"] == "0":
            for process in self._samplers:
                with suppress(ProcessLookupError):
                    os.kill(process, number)


def _is_ours(value: Any) -> bool:
    return isinstance(value, FunctionType) and value.__globals__["__name__"].startswith(_INSIDE)


class _Work:
    """The model, its data and the steps of a turn: the same for all ways to train it."""

    def __init__(self, shape: _Shape) -> None:
        import torch
        from torch import nn

        self.shape = shape
        parts = [
            part
            for _ in range(shape.layers)
            for part in (nn.Linear(shape.width, shape.width), nn.ReLU())
        ]
        self.model = nn.Sequential(*parts)
        self.data = torch.randn(shape.batch, shape.width)


class _Way:
    """A way to train the model, with some parts of the recorder in place, or with none."""

    def __init__(self, work: _Work, recorder: _Recorder, parts: Collection[str]) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        self._work, self._recorder, self._parts = work, recorder, parts
        with self._seen():
            self._model = DistributedDataParallel(work.model)
            self._optimizer = torch.optim.SGD(self._model.parameters(), 0.0)

    def turn(self) -> dict[str, float]:
        """Train some steps, which all ranks begin together, and return the time they took."""
        import torch.distributed as dist

        with self._seen():
            dist.barrier()  # after the recorder is in place, which takes rank 0 longest
            self._step()  # not counted: it pays for the change
            dist.barrier()
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            for _ in range(self._work.shape.steps):
                self._step()
            wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        return {"wall_s": wall_s, "cpu_s": cpu_s}

    def _step(self) -> None:
        self._optimizer.zero_grad()
        self._model(self._work.data).square().mean().backward()
        self._optimizer.step()
        if "longer" in self._parts:
            until_s = time.perf_counter() + self._work.shape.longer_s
            while time.perf_counter() < until_s:
                pass

    @contextmanager
    def _seen(self) -> Iterator[None]:
        self._recorder.put_in(self._parts)
        try:
            yield
        finally:
            self._recorder.take_out()


if __name__ == "__main__":
    if "RANK" in os.environ:
        layers, width, batch, steps, pairs = map(int, sys.argv[2:-1])
        train(_Shape(layers, width, batch, steps, pairs, float(sys.argv[-1])))
    else:
        sys.exit(start(int(sys.argv[1])))
