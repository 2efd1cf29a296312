"""The part of a process in an elastic job: what `fullwire run` told it, and the job's folder."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER_VARIABLE = "FULLWIRE_ELASTIC_FOLDER"
WORKER_VARIABLE = "FULLWIRE_ELASTIC_WORKER"
STARTERS_VARIABLE = "FULLWIRE_ELASTIC_STARTERS"  # the workers at the start
LEAST_VARIABLE = "FULLWIRE_ELASTIC_MIN"
DETECT_VARIABLE = "FULLWIRE_ELASTIC_DETECT_S"
STUCK_VARIABLE = "FULLWIRE_ELASTIC_STUCK_S"
RESPAWN_VARIABLE = "FULLWIRE_ELASTIC_RESPAWN"  # 1: lost workers are replaced
TOO_FEW_STATUS = 4  # of a job with fewer workers than --min


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
        )
