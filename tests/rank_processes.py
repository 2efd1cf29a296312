"""Ranks of a job as processes, each of which carries out request after request.

Start-up takes seconds and a request milliseconds, so one set of ranks serves thousands of requests.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.ports import held_port

JOBS = Path(__file__).parent / "jobs"
_START_S = 60.0
# Starts the command of a rank with an environment. The code that provides it ends the process.
Launch = Callable[[int, Sequence[str], Mapping[str, str]], None]


class Silent(Exception):
    """A rank that did not answer in time, or has ended."""


class RankProcesses:
    """Ranks of one of the jobs in `tests/jobs`, launched in any way."""

    def __init__(self, launch: Launch, job: str, ranks: int, *words: str) -> None:
        self._launch = launch
        self._command = [sys.executable, str(JOBS / f"{job}.py")]
        self._words = words
        # In /tmp, because names of sockets must be short, and those of other folders may be long.
        self._place = tempfile.TemporaryDirectory(prefix="fullwire-", dir="/tmp")
        self._links: list[_Link | None] = [None] * ranks
        self.start(range(ranks))

    def start(self, ranks: Sequence[int]) -> None:
        """Start these ranks, or start them again."""
        listeners = [self._launched(rank) for rank in ranks]
        for rank, listener in zip(ranks, listeners, strict=True):
            if before := self._links[rank]:
                before.close()
            self._links[rank] = _Link(rank, listener)

    def ask(
        self, request: Any, of: Sequence[int] | None = None, within_s: float = 30.0
    ) -> list[Any]:
        """Ask ranks, all if none are named, and return their answers."""
        asked = range(len(self._links)) if of is None else of
        self.tell(request, asked)
        return [self.hear(rank, within_s) for rank in asked]

    def tell(self, request: Any, of: Sequence[int]) -> None:
        """Send ranks a request without waiting for the answer."""
        for rank in of:
            self._link(rank).tell(request)

    def hear(self, of: int, within_s: float = 30.0) -> Any:
        """Wait for the answer of a rank that has a request."""
        return self._link(of).hear(within_s)

    def close(self) -> None:
        """Close the connections; the ranks that still can then end."""
        for link in filter(None, self._links):
            link.close()
        self._place.cleanup()

    def _launched(self, rank: int) -> socket.socket:
        path = Path(self._place.name, str(rank))
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(_START_S)
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self._links)),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "PYTHONPATH": str(JOBS.parents[1]),
        }
        self._launch(rank, [*self._command, str(path), *self._words], environment)
        return listener

    def _link(self, rank: int) -> _Link:
        link = self._links[rank]
        assert link is not None
        return link


class _Link:
    """The messages between this process and one rank."""

    def __init__(self, rank: int, listener: socket.socket) -> None:
        self._rank = rank
        with listener:
            self._socket, _ = listener.accept()
        self._lines = self._socket.makefile("r")
        self._asked = 0

    def tell(self, request: Any) -> None:
        self._asked += 1
        try:
            self._socket.sendall(json.dumps([self._asked, request]).encode() + b"\n")
        except OSError:
            raise Silent(f"rank {self._rank} has ended") from None

    def hear(self, within_s: float) -> Any:
        """Return the answer to the last request, and skip answers to earlier ones."""
        self._socket.settimeout(within_s)
        number = 0
        while number < self._asked:
            try:
                number, answer = json.loads(self._lines.readline())
            except TimeoutError:
                raise Silent(f"rank {self._rank} is silent, waited {within_s:g} s") from None
            except (OSError, ValueError):
                raise Silent(f"rank {self._rank} has ended") from None
        return answer

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


class OnLoopback:
    """Launches ranks on this machine, and ends them."""

    def __init__(self) -> None:
        self._held = contextlib.ExitStack()
        self._port = self._held.enter_context(held_port())
        self._processes: list[subprocess.Popen[bytes]] = []

    def __call__(self, rank: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Launch a rank."""
        there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port)}
        self._processes.append(
            subprocess.Popen(command, env={**environment, **there}, stdin=subprocess.DEVNULL)
        )

    def __enter__(self) -> OnLoopback:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._held.close()
