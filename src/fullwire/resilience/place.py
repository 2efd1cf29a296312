"""The part of a process in an elastic job: what `fullwire run` told it, and the job's folder."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

FOLDER_VARIABLE = "FULLWIRE_ELASTIC_FOLDER"
WORKER_VARIABLE = "FULLWIRE_ELASTIC_WORKER"
STARTERS_VARIABLE = "FULLWIRE_ELASTIC_STARTERS"  # the workers at the start
LEAST_VARIABLE = "FULLWIRE_ELASTIC_MIN"
DETECT_VARIABLE = "FULLWIRE_ELASTIC_DETECT_S"
STUCK_VARIABLE = "FULLWIRE_ELASTIC_STUCK_S"
RESPAWN_VARIABLE = "FULLWIRE_ELASTIC_RESPAWN"  # 1: lost workers are replaced
KEEPING_VARIABLE = "FULLWIRE_ELASTIC_CHECKPOINTS"
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

    host = "127.0.0.1"  # where ranks listen, unless FULLWIRE_INTERFACE says otherwise

    def __init__(self, path: Path) -> None:
        self.path = path

    def numbers(self, word: str) -> set[int]:
        """Return the workers of which there is a file with this word."""
        return {int(path.name.split()[1]) for path in self.path.glob(f"{word} *")}

    def set(self, key: str, value: str) -> None:
        """Write a file, so that a reader sees all of it or none."""
        part = self.path / f".{key}.{os.getpid()}.{threading.get_ident()}"
        part.write_text(value)
        part.replace(self.path / key)

    def check(self, keys: Sequence[str]) -> bool:
        """Say whether these files exist."""
        return all((self.path / key).exists() for key in keys)

    def get(self, key: str) -> bytes:
        """Read a file."""
        return (self.path / key).read_bytes()


def tell(kind: str, ranks: Sequence[int], began_ns: int, ended_ns: int) -> None:
    """Tell the recorder an event of this job, if there is a recorder in this process."""
    take = getattr(sys.modules.get("fullwire_inside"), "take_event", None)
    if take is not None:
        take(kind, list(ranks), began_ns, max(ended_ns - began_ns, 0))


def began_ns() -> int:
    """Return when this process began, on the monotonic clock."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Place:
    """This process's part in an elastic job, as `fullwire run` told it."""

    folder: Folder
    worker: int
    starters: int
    least: int
    detect_s: float
    stuck_s: float  # the shortest time after which a rank counts as stuck
    is_replaced: bool  # a lost worker
    keeping: Keeping

    @classmethod
    def told(cls) -> Place | None:
        """Read this process's environment; None outside of an elastic job."""
        if FOLDER_VARIABLE not in os.environ:
            return None
        return cls(
            Folder(Path(os.environ[FOLDER_VARIABLE])),
            int(os.environ[WORKER_VARIABLE]),
            int(os.environ[STARTERS_VARIABLE]),
            int(os.environ[LEAST_VARIABLE]),
            float(os.environ[DETECT_VARIABLE]),
            float(os.environ.get(STUCK_VARIABLE, "30")),
            os.environ.get(RESPAWN_VARIABLE) == "1",
            msgspec.json.decode(os.environ.get(KEEPING_VARIABLE, "{}"), type=Keeping),
        )
