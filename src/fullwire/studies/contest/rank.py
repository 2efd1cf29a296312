"""One rank of a contest: python -m fullwire.studies.contest.rank CONTEST.json OUTCOME.json

runs on every host of a lab; under torchrun the command line calls `take_part` itself.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from typing import Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist

from fullwire.errors import FullwireError, UsageError
from fullwire.studies.contest.cipher import cipher_speed
from fullwire.studies.contest.description import (
    BYTES_A_VALUE,
    OURS,
    PLAIN,
    Contest,
    Measured,
    Moved,
    Outcome,
    Turn,
    check_workers,
)
from fullwire.studies.contest.iperf import STREAMS, iperf_is_missing, moved_between
from fullwire.studies.contest.mpi_turns import MpiFailed, MpiTurns, mpi_is_missing
from fullwire.transport.keys import ENCRYPT_VARIABLE, KEY_VARIABLE
from fullwire.units import show_bytes

Each = TypeVar("Each")
_ERASE = "\r\x1b[K"


class Turns(Protocol):
    """One of those who take part, on this rank."""

    def check(self, size_bytes: int) -> None:
        """Let one sum be right, which also opens every connection."""

    def turn(self, size_bytes: int, repeats: int) -> Turn:
        """Reduce so many times in a row, which all ranks begin together."""

    def close(self) -> None:
        """Leave."""


def take_part(contest: Contest) -> Outcome | None:
    """Be one rank of a contest, as the environment says; rank 0 returns what came of it."""
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo")  # for agreeing; those who take part have their own groups
        check_workers(dist.get_world_size())
        outcome = _Held(contest).outcome()
        dist.barrier()
        dist.destroy_process_group()
    except (RuntimeError, ValueError, MpiFailed) as error:  # ValueError: half an environment
        raise FullwireError(f"bench transport: {' '.join(str(error).split())}") from None
    return outcome


class _Held:
    """A contest while it is held, on this rank."""

    def __init__(self, contest: Contest) -> None:
        self._contest = contest
        self._workers = dist.get_world_size()
        self._notes: list[str] = []
        self._hosts = _from_all(socket.gethostname())

    def outcome(self) -> Outcome | None:
        """Measure the line with iperf3, then everyone with every size."""
        moved = self._moved()
        if self._contest.encrypts:
            self._notes.extend(cipher_speed())
        takers = self._takers()
        measured = [
            result
            for size_bytes in self._contest.sizes_bytes
            for result in self._measured(takers, size_bytes)
        ]
        for taker in takers.values():
            taker.close()
        _show("")
        if dist.get_rank() != 0:
            return None
        return Outcome(
            contest=self._contest,
            workers=self._workers,
            measured=tuple(measured),
            moved=tuple(moved),
            notes=tuple(self._notes),
        )

    def _moved(self) -> list[Moved]:
        """Let iperf3 run between rank 0 and the first rank on another host."""
        if self._lacks(iperf_is_missing()):
            return []
        elsewhere = [rank for rank, host in enumerate(self._hosts) if host != self._hosts[0]]
        if not elsewhere:
            self._notes.append("all ranks are on one host: iperf3 has no line to measure")
            return []
        moved = []
        for streams in STREAMS:
            _show(f"iperf3 measures the line, streams: {streams}")
            result = moved_between(0, elsewhere[0], os.environ["MASTER_ADDR"], streams)
            rate_bps = _from_all(result)[elsewhere[0]]
            if isinstance(rate_bps, float):
                moved.append(Moved(streams, rate_bps))
            else:
                self._notes.append(str(rate_bps))
        return moved

    def _takers(self) -> dict[int, Turns]:
        """Let everyone get ready who can; the others are noted with the reason."""
        values = torch.zeros(max(self._contest.sizes_bytes) // BYTES_A_VALUE)
        takers: dict[int, Turns] = {}
        for who, name in enumerate((OURS, *self._contest.against)):
            if name != "mpi":
                encrypts = self._contest.encrypts and name == OURS
                with _protected(encrypts):
                    turns = TorchTurns(OURS if name == PLAIN else name, values)
                takers[who] = turns
                if turns.streams > 1:
                    self._notes.append(f"{name}: {turns.streams} connections between two ranks")
            elif len(set(self._hosts)) < self._workers:
                self._notes.append("mpi: expected one rank on each host, so it is left out")
            elif not self._lacks(mpi_is_missing()) and (mpi := self._started_mpi()):
                takers[who] = mpi
        if len(takers) < 2:
            raise UsageError(f"nobody to compare with: {'; '.join(self._notes)}")
        return takers

    def _started_mpi(self) -> MpiTurns | None:
        """Start OpenMPI beside every rank, or beside none."""
        mpi, problem = None, None
        try:
            mpi = MpiTurns(max(self._contest.sizes_bytes), self._hosts)
        except MpiFailed as error:
            problem = str(error)
        if not self._lacks(problem):
            return mpi
        if mpi is not None:
            mpi.close()
        return None

    def _measured(self, takers: dict[int, Turns], size_bytes: int) -> list[Measured]:
        """Let everyone reduce in turns; who begins changes from round to round."""
        repeats = self._contest.repeats(size_bytes, self._workers)
        for taker in takers.values():
            taker.check(size_bytes)
        order = list(takers)
        turns: dict[int, list[Turn]] = {who: [] for who in order}
        for number in range(self._contest.rounds):
            _show(f"{show_bytes(size_bytes)}: round {number + 1} of {self._contest.rounds}")
            begins = number % len(order)
            for who in order[begins:] + order[:begins]:
                turns[who].append(takers[who].turn(size_bytes, repeats))
        return [
            Measured(
                who=who,
                size_bytes=size_bytes,
                turns=tuple(
                    Turn(
                        max(turn.time_s for turn in by_rank),
                        statistics.fmean(turn.cpu_s for turn in by_rank),
                    )
                    for by_rank in zip(*_from_all(list(mine)), strict=True)
                ),
            )
            for who, mine in turns.items()
        ]

    def _lacks(self, missing: str | None) -> bool:
        """Hear from every rank what is missing there, if anything is, and note the first."""
        reason = next(filter(None, _from_all(missing)), None)
        if reason:
            self._notes.append(reason)
        return reason is not None


@contextlib.contextmanager
def _protected(encrypts: bool) -> Iterator[None]:
    """Have the group that is made meanwhile encrypt, with a key of this contest, or not."""
    ours = {ENCRYPT_VARIABLE: "1" if encrypts else "0", KEY_VARIABLE: _from_all(token_hex(32))[0]}
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _from_all(mine: Each) -> list[Each]:
    """Return what every rank gives, on every rank."""
    given: list[Each] = [mine] * dist.get_world_size()
    dist.all_gather_object(given, mine)
    return given


def _show(line: str) -> None:
    """Say on a terminal how far it is; rank 0 says it for all."""
    if dist.get_rank() == 0 and sys.stderr.isatty():
        sys.stderr.write(f"{_ERASE}fullwire: {line}\r" if line else _ERASE)
        sys.stderr.flush()


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


def main() -> None:
    """Take part, and leave the outcome where the lab expects it."""
    asked, written = map(Path, sys.argv[1:])
    try:
        outcome = take_part(msgspec.json.decode(asked.read_bytes(), type=Contest))
    except FullwireError as error:
        sys.exit(f"fullwire: {error}")
    if outcome is not None:
        written.write_bytes(msgspec.json.encode(outcome))


if __name__ == "__main__":
    main()
