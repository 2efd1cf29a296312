"""An elastic job whose workers a launcher started: torchrun, Slurm, Kubernetes, or a lab.

The launcher's variables say how many places the job has, and which of them this process has. Each
place has a folder of its own (`place.Folder`). A store copies small files between these folders:
torchrun's, or one of rank 0. It is needed until the first workers have met. Later the workers tell
each other where new ones are (`mesh`), so the store's end ends nothing.

    torchrun         RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, and a store of its agent
    Kubernetes       the same ones, as Kubeflow's PyTorchJob sets them
    Slurm            SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_STEP_NODELIST, SLURM_JOB_ID
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from fullwire.errors import UsageError
from fullwire.resilience import place
from fullwire.resilience.place import Folder, Keeping, Place

_MEETS_S = 120.0  # the longest wait for the store
_LOOKS_S = 0.1
_CLOSES_S = 5.0  # the longest wait for a thread in a store that is silent
_TORN_S = 5.0  # an entry that its writer began so long ago never comes
_COPIED = ("rank", "gone", "holds", "finished")
_FIRST_PORT, _PORTS = 20_000, 10_000  # for a store of Slurm's tasks


class Launcher(NamedTuple):
    """What a launcher's variables say of a place."""

    rank: int
    size: int
    host: str
    port: int
    attempt: str  # restarts of the launcher meet apart
    has_store: bool  # else rank 0 serves one

    @classmethod
    def told(cls, variables: Mapping[str, str]) -> Launcher | None:
        """Read variables; None where no launcher started several processes."""
        said = dict(variables)
        if "RANK" not in said and "SLURM_PROCID" in said and "SLURM_STEP_NUM_TASKS" in said:
            job = int(said.get("SLURM_JOB_ID", "0")) + int(said.get("SLURM_STEP_ID", "0"))
            said = {
                "MASTER_ADDR": first_host(said.get("SLURM_STEP_NODELIST", "localhost")),
                "MASTER_PORT": str(_FIRST_PORT + job % _PORTS),
                **said,
                "RANK": said["SLURM_PROCID"],
                "WORLD_SIZE": said["SLURM_STEP_NUM_TASKS"],
            }
        if "RANK" not in said or int(said.get("WORLD_SIZE", "1")) < 2:
            return None
        if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in said]:
            raise UsageError(
                f"elastic: expected {' and '.join(missing)} beside RANK and WORLD_SIZE, got none"
            )
        parts = (said.get("TORCHELASTIC_RUN_ID", ""), said.get("TORCHELASTIC_RESTART_COUNT", "0"))
        return cls(
            int(said["RANK"]),
            int(said["WORLD_SIZE"]),
            said["MASTER_ADDR"],
            int(said["MASTER_PORT"]),
            " ".join(parts),
            said.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's list: gpu[03-05,9],cpu1 begins with gpu03."""
    found = re.match(r"([^,\[]+)(?:\[(\w+))?", nodes)
    return "localhost" if found is None else found[1] + (found[2] or "")


class Seat:
    """A place in a job that somebody else started, whose folder is there already, as in a lab."""

    serves = False  # a store
    is_connected = True  # to the places on other hosts

    def __init__(self, folder: Folder, rank: int, size: int, keeping: Keeping) -> None:
        self.folder, self.rank, self.size, self.keeping = folder, rank, size, keeping

    def next_place(self) -> Place:
        """Return the part of the next worker at this place."""
        number = place.next_number(self.folder, self.rank, self.size)
        return Place(self.folder, number, self.size, keeping=self.keeping)

    def copy(self) -> None:
        """Bring the folder up to date: all hosts have this one."""


class LaunchedSeat(Seat):
    """A place in a job that a launcher started. A thread keeps its folder up to date."""

    def __init__(self, launcher: Launcher, keeping: Keeping) -> None:
        import torch.distributed as dist

        folder = Folder(Path(tempfile.mkdtemp(prefix="fullwire-job-")), launcher.host)
        atexit.register(shutil.rmtree, folder.path, ignore_errors=True)
        super().__init__(folder, launcher.rank, launcher.size, keeping)
        self.serves = launcher.rank == 0 and not launcher.has_store
        try:
            store = dist.TCPStore(
                launcher.host,
                launcher.port,
                is_master=self.serves,
                wait_for_workers=False,
                timeout=timedelta(seconds=_MEETS_S),
            )
            self._store: Any = dist.PrefixStore(f"fullwire {launcher.attempt}", store)
            number = self._store.compare_set("number", "", secrets.token_hex(32))
        except RuntimeError as error:
            what = "a free port for the store" if self.serves else "the store of rank 0"
            first_line = str(error).partition("\n")[0]
            raise UsageError(
                f"elastic: expected {what} at {launcher.host}:{launcher.port}: {first_line}"
            ) from None
        self.folder.set("number", bytes(number).decode())
        self._known: set[str] = set()
        self._next, self._torn_since_s = 1, 0.0
        self._lock = threading.Lock()
        self.copy()
        if place.next_number(self.folder, self.rank, self.size) == self.rank:
            own = f"{keeping.first_step}"
            said = bytes(self._store.compare_set("first step", "", own)).decode()
            if said != own:
                raise UsageError(
                    f"run: --checkpoint {keeping.folder}: expected step {said}, as on the other "
                    f"hosts, got step {own}: the hosts need one shared folder"
                )
        self._ends = threading.Event()
        self._copier = threading.Thread(
            target=self._keep_copying, name="fullwire-seat", daemon=True
        )
        self._copier.start()
        atexit.register(self._close)

    def copy(self) -> None:
        """Copy new files to the store, and from it."""
        with self._lock:
            for path in list(self.folder.path.iterdir()):
                name = path.name
                if name in self._known or name.split()[0] not in _COPIED:
                    continue
                with contextlib.suppress(FileNotFoundError):
                    value = path.read_text()
                    self._known.add(name)
                    entry = self._store.add("entries", 1)
                    self._store.set(f"entry {entry}", f"{name}\n{value}")
            while self._next <= self._store.add("entries", 0):
                if not self._store.check([f"entry {self._next}"]):
                    self._torn_since_s = self._torn_since_s or time.monotonic()
                    if time.monotonic() - self._torn_since_s < _TORN_S:
                        return
                else:
                    said = bytes(self._store.get(f"entry {self._next}")).decode()
                    self._take(*said.split("\n", 1))
                self._torn_since_s = 0.0
                self._next += 1

    def _take(self, name: str, value: str) -> None:
        if name in self._known:
            return
        self._known.add(name)
        word, _, number = name.partition(" ")
        if word == "gone":
            (self.folder.path / f"rank {number}").unlink(missing_ok=True)
        if word != "rank" or not self.folder.check([f"gone {number}"]):
            self.folder.set(name, value)

    def _keep_copying(self) -> None:
        with contextlib.suppress(RuntimeError, OSError):  # the store, or the folder, has ended
            while not self._ends.wait(_LOOKS_S):
                self.copy()
        self.is_connected = False

    def _close(self) -> None:
        """End the thread: one in torch's store when Python ends would abort the process."""
        self._ends.set()
        self._copier.join(_CLOSES_S)


def seat_here(keeping: Keeping) -> Seat:
    """Take this process's place: a given one, or that of a launcher's variables."""
    said = os.environ
    if place.FOLDER_VARIABLE in said:
        folder = Folder(Path(said[place.FOLDER_VARIABLE]), said.get(place.HOST_VARIABLE, ""))
        size = int(said[place.STARTERS_VARIABLE])
        return Seat(folder, int(said[place.WORKER_VARIABLE]) % size, size, keeping)
    launcher = Launcher.told(said)
    if launcher is None:
        raise UsageError(
            "run: expected --workers N, --recipe FILE.toml, or a launcher that sets RANK and "
            "WORLD_SIZE, got none of them"
        )
    return LaunchedSeat(launcher, keeping)


def take_seat() -> None:
    """Make this process, which a launcher started, a worker of an elastic job."""
    if place.FOLDER_VARIABLE in os.environ:
        return
    if Launcher.told(os.environ) is not None:
        told = os.environ.get(place.KEEPING_VARIABLE, "{}")
        seat = seat_here(msgspec.json.decode(told, type=Keeping))
        part = replace(
            seat.next_place(),
            least=int(os.environ.get(place.LEAST_VARIABLE, "1")),
            detect_s=float(os.environ.get(place.DETECT_VARIABLE, "2")),
            is_replaced=False,
        )
        os.environ.update(part.variables())
