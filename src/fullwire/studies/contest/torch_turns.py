"""Turns of those that torch.distributed runs: a group for each backend, in one process."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from fullwire.studies.contest.description import BYTES_A_VALUE, Turn


class TorchTurns:
    """All-reduces by one backend."""

    def __init__(self, backend: str, buffer: torch.Tensor) -> None:
        self._backend = backend
        self._buffer = buffer
        self._group = dist.new_group(backend=backend)

    @property
    def streams(self) -> int:
        """Return how many connections there are between two ranks, as far as anybody knows."""
        return getattr(self._group, "streams", 1)

    def check(self, size_bytes: int) -> None:
        """Let one sum be right, which also opens every connection."""
        values = self._buffer[: size_bytes // BYTES_A_VALUE]
        values.fill_(dist.get_rank() + 1)
        dist.all_reduce(values, group=self._group)
        ranks = dist.get_world_size()
        wrong = int((values != ranks * (ranks + 1) / 2).sum())
        values.zero_()
        if wrong:
            raise RuntimeError(
                f"{self._backend}: {wrong} of {len(values)} sums of {size_bytes} bytes are wrong"
            )

    def turn(self, size_bytes: int, repeats: int) -> Turn:
        """Reduce so many times in a row, which all ranks begin together."""
        values = self._buffer[: size_bytes // BYTES_A_VALUE]
        dist.all_reduce(self._buffer[:1], group=self._group)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        for _ in range(repeats):
            dist.all_reduce(values, group=self._group)
        return Turn(
            (time.perf_counter() - began_s) / repeats,
            (time.process_time() - began_cpu_s) / repeats,
        )

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group(self._group)
