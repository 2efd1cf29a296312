"""Turns of OpenMPI: a program beside each rank, started by mpirun through the ranks themselves."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from fullwire.studies.contest import mpi_program
from fullwire.studies.contest.description import Turn

_START_S = 30.0
_ANSWER_S = 120.0
_CAUGHT = 2000  # characters of what mpirun says


class MpiFailed(Exception):
    """OpenMPI did not start, or went away; the message says what it said."""


def mpi_is_missing() -> str | None:
    """Say what is missing on this host, if anything is."""
    if shutil.which("mpirun") is None:
        return "OpenMPI is not installed: sudo apt install openmpi-bin"
    return None


class MpiTurns:
    """All-reduces by OpenMPI over TCP, as it chooses to do them."""

    def __init__(self, largest_bytes: int, hosts: Sequence[str]) -> None:
        """Start the programs; every rank calls this, and `hosts` names each rank's."""
        self._place = tempfile.TemporaryDirectory(prefix="fullwire-")
        self._output = Path(self._place.name, "said").open("w+b")  # noqa: SIM115  # closed by close
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._connection = self._connected(hosts)
        except (OSError, RuntimeError):  # nobody came in time, here or at the store
            problem = self._said("it did not start")
            self._clean_up(0)
            raise MpiFailed(problem) from None
        self._connection.settimeout(_ANSWER_S)
        self._lines = self._connection.makefile("r")
        self._connection.sendall(f"{largest_bytes}\n".encode())

    def check(self, size_bytes: int) -> None:
        """Let one sum be right, which also opens every connection."""
        if wrong := self._asked(size_bytes, 0)["wrong"]:
            raise RuntimeError(f"mpi: {wrong} sums of {size_bytes} bytes are wrong")

    def turn(self, size_bytes: int, repeats: int) -> Turn:
        """Reduce so many times in a row, which all ranks begin together."""
        answer = self._asked(size_bytes, repeats)
        return Turn(answer["time_s"], answer["cpu_s"])

    def close(self) -> None:
        """Let the program end, and what started it."""
        self._connection.close()
        self._lines.close()
        self._clean_up(_START_S)

    def _clean_up(self, patience_s: float) -> None:
        if self._process is not None:
            try:
                self._process.wait(patience_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._output.close()
        self._place.cleanup()

    def _connected(self, hosts: Sequence[str]) -> socket.socket:
        """Start the program beside this rank, and wait until it calls."""
        path = str(Path(self._place.name, "mpi"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            listener.settimeout(_START_S)
            self._process = self._start(hosts, {**os.environ, mpi_program.SOCKET_VARIABLE: path})
            connection, _ = listener.accept()
        return connection

    def _start(self, hosts: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start mpirun, or what it wants to have started on this host."""
        self._store = dist.TCPStore(  # kept: mpirun's agent has to find it open
            os.environ["MASTER_ADDR"],
            _agreed_port(),
            is_master=dist.get_rank() == 0,
            wait_for_workers=False,
            timeout=timedelta(seconds=_START_S),
        )
        environment[mpi_program.PORT_VARIABLE] = str(self._store.port)
        if dist.get_rank() == 0:
            return self._popen(_mpirun(hosts), environment)
        command = self._store.get(mpi_program.key(hosts[dist.get_rank()])).decode()
        return self._popen(["sh", "-c", command], environment)

    def _popen(
        self, command: Sequence[str], environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def _asked(self, size_bytes: int, repeats: int) -> dict[str, float]:
        try:
            self._connection.sendall(f"{size_bytes} {repeats}\n".encode())
            answer: dict[str, float] = json.loads(self._lines.readline())
        except (OSError, ValueError):
            raise MpiFailed(self._said("it went away")) from None
        return answer

    def _said(self, what: str) -> str:
        self._output.seek(0)
        output = " ".join(self._output.read(_CAUGHT).decode(errors="replace").split())
        return f"OpenMPI: {what}; it said: {output or 'nothing'}"


def _agreed_port() -> int:
    """Let rank 0 choose a free port, and tell it to the others."""
    chosen = [0]
    if dist.get_rank() == 0:
        with socket.create_server(("", 0)) as free:
            chosen = [free.getsockname()[1]]
    dist.broadcast_object_list(chosen, 0)
    return chosen[0]


def _mpirun(hosts: Sequence[str]) -> list[str]:
    agent = f"{sys.executable} {mpi_program.__file__}"
    return [
        "mpirun",
        "--allow-run-as-root",
        "--bind-to",
        "none",
        "-np",
        str(len(hosts)),
        "--host",
        ",".join(hosts),
        "--mca",
        "plm_rsh_agent",
        agent,
        "--mca",
        "plm_rsh_no_tree_spawn",
        "1",
        "--mca",
        "btl",
        "tcp,self",
        "--mca",
        "pml",
        "ob1",
        sys.executable,
        str(mpi_program.__file__),
    ]
