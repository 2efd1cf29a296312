"""The part of a process in an elastic job: settings from `fullwire run`, and the job's folder."""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from fullwire.transport.keys import KEY_FILE_VARIABLE, KEY_VARIABLE

FOLDER_VARIABLE = "FULLWIRE_ELASTIC_FOLDER"
HOST_VARIABLE = "FULLWIRE_ELASTIC_HOST"  # towards the others, where they have folders of their own
WORKER_VARIABLE = "FULLWIRE_ELASTIC_WORKER"
STARTERS_VARIABLE = "FULLWIRE_ELASTIC_STARTERS"  # the workers at the start
LEAST_VARIABLE = "FULLWIRE_ELASTIC_MIN"
DETECT_VARIABLE = "FULLWIRE_ELASTIC_DETECT_S"
STUCK_VARIABLE = "FULLWIRE_ELASTIC_STUCK_S"
RESPAWN_VARIABLE = "FULLWIRE_ELASTIC_RESPAWN"  # 1: lost workers are replaced
KEEPING_VARIABLE = "FULLWIRE_ELASTIC_CHECKPOINTS"
BALANCE_VARIABLE = "FULLWIRE_ELASTIC_BALANCE"  # 1: shares of a batch by speed
EVICT_VARIABLE = "FULLWIRE_ELASTIC_EVICT_SLOW"  # 1: a slow worker leaves
TOO_FEW_STATUS = 4  # of a job with fewer workers than --min


class Keeping(msgspec.Struct):
    """Which checkpoints a job writes, and where it begins."""

    folder: str = "fullwire-checkpoint"  # for the last one, of a job that ends below --min
    is_on: bool = False  # also while it runs
    every_s: float | None = None
    keep: int = 3
    is_whole: bool = False  # one file, in place of one for each rank
    first_step: int = 0
    source: str = ""  # the checkpoint of the first step


class Folder:
    """The folder of a job: small files that are written whole, in place of a store."""

    def __init__(self, path: Path, host: str = "") -> None:
        self.path = path
        self.is_of_one_host = bool(host)  # others have folders of their own
        # Ranks listen where they reach this host, unless FULLWIRE_INTERFACE says otherwise.
        self.host = host or "127.0.0.1"

    def numbers(self, word: str) -> set[int]:
        """Return the workers of which there is a file with this word."""
        return {int(path.name.split()[1]) for path in self.path.glob(f"{word} *")}

    def set(self, key: str, value: str) -> None:
        """Write a file, so that a reader sees all of it or none."""
        part = self.path / f".{key}.{os.getpid()}.{threading.get_ident()}"
        part.write_text(value)
        part.replace(self.path / key)

    def bury(self, number: int) -> None:
        """Tell all that a worker has ended, and take its address away."""
        self.set(f"gone {number}", "")
        (self.path / f"rank {number}").unlink(missing_ok=True)

    def check(self, keys: Sequence[str]) -> bool:
        """Say whether these files exist."""
        return all((self.path / key).exists() for key in keys)

    def get(self, key: str) -> bytes:
        """Read a file."""
        return (self.path / key).read_bytes()


def new_key() -> dict[str, str]:
    """Return the variable with a key that the workers of a job share; empty if they have one."""
    if KEY_VARIABLE in os.environ or KEY_FILE_VARIABLE in os.environ:
        return {}
    return {KEY_VARIABLE: secrets.token_hex(32)}


def next_number(folder: Folder, rank: int, size: int) -> int:
    """Return the number of the next worker at a rank's place: a new one, higher than all others.

    No other place takes it, because its rest by the number of places is the rank.
    """
    used = folder.numbers("rank") | folder.numbers("gone")
    if not any(each % size == rank for each in used):
        return rank
    return next(each for each in range(rank + size, max(used) + size + 1, size) if each > max(used))


def tell_fact(name: str, value: int) -> None:
    """Tell the recorder a fact of this job, if there is a recorder in this process."""
    take = getattr(sys.modules.get("fullwire_inside"), "take_fact", None)
    if take is not None:
        take(name, value)


def tell_samples(samples: int) -> None:
    """Tell the recorder how many samples this rank takes in a step, if there is a recorder."""
    take = getattr(sys.modules.get("fullwire_inside"), "take_samples", None)
    if take is not None and samples:
        take(samples)


def tell_gradients(parameters: Sequence[Any]) -> None:
    """Tell the recorder whose gradients are averaged in each step, if it notes gradient noise."""
    take = getattr(sys.modules.get("fullwire_inside"), "take_gradients", None)
    if take is not None:
        take(parameters)


def tell(kind: str, ranks: Sequence[int], began_ns: int, ended_ns: int) -> None:
    """Tell the recorder an event of this job, if there is a recorder in this process."""
    take = getattr(sys.modules.get("fullwire_inside"), "take_event", None)
    if take is not None:
        take(kind, list(ranks), began_ns, max(ended_ns - began_ns, 0))


def began_ns() -> int:
    """Return when this process began, on the monotonic clock."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


class Changes:
    """Tells the recorder how long the training stood still when its workers changed."""

    def __init__(self) -> None:
        self._earlier_ns = self._committed_ns = 0  # the last two commits
        self._since_ns = 0  # no step counts since then
        self._before: list[int] | None = None  # the ranks before

    def committed(self) -> None:
        """A step counts."""
        self._earlier_ns, self._committed_ns = self._committed_ns, time.monotonic_ns()

    def begun(self) -> None:
        """The ranks form a new membership."""
        self._since_ns = time.monotonic_ns()

    def ended(self, ranks: list[int], *, is_told_here: bool, is_start: bool) -> None:
        """Training goes on with these ranks. One rank tells it: the lowest."""
        before, self._before = self._before, ranks
        if ranks == before or not is_told_here:
            return
        now_ns, since_ns = time.monotonic_ns(), self._since_ns
        if before is None:
            if is_start:
                tell("start", ranks, began_ns(), now_ns)
            return
        lost = sorted(set(before).difference(ranks))
        if self._committed_ns and self._earlier_ns:
            # As long as a step takes, its work was done for nothing; then the loss was waited for.
            worked_ns = min(since_ns - self._committed_ns, self._committed_ns - self._earlier_ns)
            tell("repeated work", ranks, since_ns - worked_ns, since_ns)
        came = sorted(set(ranks).difference(before))
        if lost:
            tell("recovery", lost, since_ns or now_ns, now_ns)
        if came:  # the time of a change is told once
            tell("join", came, now_ns if lost else since_ns or now_ns, now_ns)


@dataclass(frozen=True)
class Place:
    """A worker's part in an elastic job, as the worker reads it from its environment."""

    folder: Folder
    worker: int
    starters: int
    least: int = 1
    detect_s: float = 2.0
    is_replaced: bool = True  # a lost worker
    keeping: Keeping = field(default_factory=Keeping)
    balances: bool = False  # shares of a batch follow the workers' speed
    evicts: bool = False  # a slow worker leaves

    @classmethod
    def told(cls) -> Place | None:
        """Read this process's environment; None outside of an elastic job."""
        if FOLDER_VARIABLE not in os.environ:
            return None
        return cls(
            Folder(Path(os.environ[FOLDER_VARIABLE]), os.environ.get(HOST_VARIABLE, "")),
            int(os.environ[WORKER_VARIABLE]),
            int(os.environ[STARTERS_VARIABLE]),
            int(os.environ[LEAST_VARIABLE]),
            float(os.environ[DETECT_VARIABLE]),
            os.environ.get(RESPAWN_VARIABLE) == "1",
            msgspec.json.decode(os.environ.get(KEEPING_VARIABLE, "{}"), type=Keeping),
            os.environ.get(BALANCE_VARIABLE) == "1",
            os.environ.get(EVICT_VARIABLE) == "1",
        )

    def variables(self) -> dict[str, str]:
        """Return the variables in which the worker reads this."""
        told = {
            FOLDER_VARIABLE: str(self.folder.path),
            WORKER_VARIABLE: str(self.worker),
            STARTERS_VARIABLE: str(self.starters),
            LEAST_VARIABLE: str(self.least),
            DETECT_VARIABLE: str(self.detect_s),
            RESPAWN_VARIABLE: str(int(self.is_replaced)),
            KEEPING_VARIABLE: msgspec.json.encode(self.keeping).decode(),
            "RANK": str(self.worker),
        }
        if self.folder.is_of_one_host:
            told[HOST_VARIABLE] = self.folder.host
        if self.balances:
            told[BALANCE_VARIABLE] = "1"
        if self.evicts:
            told[EVICT_VARIABLE] = "1"
        return told

    @property
    def stuck_s(self) -> float:
        """Return the shortest time after which a rank counts as stuck; the user may set it."""
        return float(os.environ.get(STUCK_VARIABLE, "30"))


class Gathering:
    """The folder of an elastic job whose workers somebody else starts, one at each rank's place."""

    def __init__(self, path: Path, ranks: int, *, least: int = 1, detect_s: float = 2.0) -> None:
        self._folder, self._ranks = Folder(path), ranks
        self._numbers: dict[int, int] = {}  # of the present worker, by its place
        self._folder.set("number", secrets.token_hex(32))
        self._any = Place(self._folder, 0, ranks, least, detect_s)
        self._key = new_key()

    def variables(self, rank: int) -> dict[str, str]:
        """Return the variables for the next worker at a rank's place."""
        self._numbers[rank] = number = next_number(self._folder, rank, self._ranks)
        return replace(self._any, worker=number).variables() | self._key

    def lost(self, rank: int) -> None:
        """Tell the others that a rank's worker has ended, and those that it may have started."""
        for number in {self._numbers[rank], *self._folder.numbers("rank")}:
            if number % self._ranks == rank:
                self._folder.bury(number)

    def complete(self) -> None:
        """Tell those who would join that the job is complete."""
        self._folder.set("finished", "")

    @property
    def has_met(self) -> bool:
        """Say whether a worker uses `fullwire.elastic`."""
        return bool(self._folder.numbers("rank") or self._folder.numbers("holds"))
