"""The job of `overhead.py`: a model of 40 layers under DDP, one thread a rank, on request.

python overhead_job.py RANKS: starts the ranks; for each line on standard input they train a pair of
two such models in turns of one step, and rank 0 prints what each step took. The line says whether
the second model is recorded. Steps take some 85 ms on two quiet cores.

The recorder is in these processes and is taken out of torch for each step of a model that is not
recorded: every function that it replaced is put back, DDP gets its true process group, parameters
have no hooks, and the sampler beside the job stands still. Only so do both share a process, and
processes differ by more than a recorder costs.
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FunctionType
from typing import Any

LAYERS, WIDTH, BATCH = 40, 512, 128
WARM_UP_TURNS = 3
TURNS = 16
_INSIDE = "fullwire_inside"
_DIRECTORY_VARIABLE = "FULLWIRE_RECORD_INTO"


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
    """Train a pair for each line on rank 0's standard input."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    recorder = _Recorder()
    recorder.take_out()
    try:
        for number, record in enumerate(_asked()):
            # By twos: pairs that are recorded and pairs that are not take turns.
            steps = _pair(recorder if record else None, is_swapped=bool(number // 2 % 2))
            if dist.get_rank() == 0:
                sys.stdout.write(json.dumps(steps) + "\n")
                sys.stdout.flush()
    finally:
        recorder.put_in()  # a sampler that stands still would never end
    dist.barrier()
    dist.destroy_process_group()


def _pair(recorder: _Recorder | None, *, is_swapped: bool) -> list[dict[str, dict[str, float]]]:
    """Train two models made anew; which is made first matters to where they lie in memory."""
    if is_swapped:
        other, plain = _Model(recorder), _Model(None)
    else:
        plain, other = _Model(None), _Model(recorder)
    steps = [_turn(plain, other, number) for number in range(WARM_UP_TURNS + TURNS)]
    return steps[WARM_UP_TURNS:]


def _asked() -> Iterator[bool]:
    """Go through what rank 0 is asked for, on every rank."""
    import torch
    import torch.distributed as dist

    word = torch.zeros(1)
    while True:
        if dist.get_rank() == 0:
            line = sys.stdin.readline().strip()
            word[0] = {"": 0, "control": 1, "record": 2}[line]
        dist.broadcast(word, 0)
        if not word[0]:
            return
        yield bool(word[0] == 2)


def _turn(plain: _Model, other: _Model, number: int) -> dict[str, dict[str, float]]:
    """Train a step of each; now one is first, now the other."""
    if number % 2:
        return {"other": other.step(), "plain": plain.step()}
    return {"plain": plain.step(), "other": other.step()}


class _Recorder:
    """What the recorder has put into torch; it can be taken out and put back."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        from torch.optim import optimizer as optimizers

        owners: list[Any] = [
            torch.autograd, dist, dist.ProcessGroup, dist.Work, torch._C.Future,
            DistributedDataParallel, optimizers.Optimizer, inspect.unwrap(dist.Reducer),
        ]  # fmt: skip
        self._replaced = [
            (owner, name, value, inspect.unwrap(value, stop=lambda each: not _is_ours(each)))
            for owner in owners
            for name, value in list(vars(owner).items())
            if _is_ours(value)
        ]
        self._registers = [
            (register, dict(register))
            for register in (
                optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks
            )
        ]  # fmt: skip

    def put_in(self) -> None:
        """Let the recorder see what happens from now on."""
        for owner, name, ours, _ in self._replaced:
            setattr(owner, name, ours)
        for register, hooks in self._registers:
            register.update(hooks)
        _tell_samplers(signal.SIGCONT)

    def take_out(self) -> None:
        """Leave torch as it is without the recorder."""
        for owner, name, _, true in self._replaced:
            setattr(owner, name, true)
        for register, _ in self._registers:
            register.clear()
        _tell_samplers(signal.SIGSTOP)


def _tell_samplers(number: signal.Signals) -> None:
    """Send the sampler beside this job a signal, once for all ranks."""
    if os.environ["RANK"] == "0":
        for samples in Path(os.environ[_DIRECTORY_VARIABLE]).glob("*.samples"):
            process = int(samples.name.split("-")[-2])  # HOST-PROCESS-TIME.samples
            with suppress(ProcessLookupError):
                os.kill(process, number)


def _is_ours(value: Any) -> bool:
    return isinstance(value, FunctionType) and value.__globals__["__name__"].startswith(_INSIDE)


class _Model:
    """A model in training, each of its steps seen by a recorder or by none."""

    def __init__(self, seen_by: _Recorder | None) -> None:
        import torch
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        self._seen_by = seen_by
        layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        self._data = torch.randn(BATCH, WIDTH)
        with self._seen():
            self._model = DistributedDataParallel(nn.Sequential(*layers))
            self._optimizer = torch.optim.SGD(self._model.parameters(), 1e-3)

    def step(self) -> dict[str, float]:
        """Train a step, which all ranks begin together, and say what it took."""
        import torch.distributed as dist

        dist.barrier()
        with self._seen():
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            self._optimizer.zero_grad()
            self._model(self._data).square().mean().backward()
            self._optimizer.step()
            wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        return {"wall_s": wall_s, "cpu_s": cpu_s}

    @contextmanager
    def _seen(self) -> Iterator[None]:
        if self._seen_by is None:
            yield
            return
        self._seen_by.put_in()
        try:
            yield
        finally:
            self._seen_by.take_out()


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        sys.exit(start(int(sys.argv[1])))
