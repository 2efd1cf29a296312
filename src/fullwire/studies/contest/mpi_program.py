"""The program under mpirun: all-reduces on request, by the MPI library that is installed.

python mpi_program.py: connects to the socket that the environment names. Each line that arrives
there is "BYTES REPEATS". The program does that many all-reduces in a row and answers with a line of
JSON. A line without REPEATS makes it check one sum. Between requests it waits in the kernel, where
MPI itself would spin. It calls OpenMPI through its shared library, so it needs only the installed
library.

python mpi_program.py HOST COMMAND...: mpirun calls this in place of ssh. The program leaves the
command in the store. The rank on that host waits for the command there and starts it (`rank.py`).
So MPI reaches the hosts of the job without logins between them.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

LIBRARY = "libmpi.so.40"  # OpenMPI 4 and 5
PORT_VARIABLE = "FULLWIRE_MPI_STORE_PORT"
BYTES_A_VALUE = 4
SOCKET_VARIABLE = "FULLWIRE_MPI_SOCKET"
_Values: TypeAlias = NDArray[np.float32]
_IN_PLACE = ctypes.c_void_p(1)


class _Mpi:
    """The parts of OpenMPI that we call; its handles are the addresses of its own variables."""

    def __init__(self) -> None:
        # OpenMPI's plug-ins look for its symbols there
        self._library = ctypes.CDLL(LIBRARY, mode=ctypes.RTLD_GLOBAL)
        self._world = self._handle("ompi_mpi_comm_world")
        self._float, self._sum = self._handle("ompi_mpi_float"), self._handle("ompi_mpi_op_sum")
        self._call("MPI_Init", None, None)

    def rank(self) -> int:
        rank = ctypes.c_int()
        self._call("MPI_Comm_rank", self._world, ctypes.byref(rank))
        return rank.value

    def ranks(self) -> int:
        ranks = ctypes.c_int()
        self._call("MPI_Comm_size", self._world, ctypes.byref(ranks))
        return ranks.value

    def all_reduce(self, values: _Values) -> None:
        self._call(
            "MPI_Allreduce",
            _IN_PLACE,
            ctypes.c_void_p(values.ctypes.data),
            ctypes.c_int(len(values)),
            self._float,
            self._sum,
            self._world,
        )

    def finish(self) -> None:
        self._call("MPI_Finalize")

    def _handle(self, name: str) -> ctypes.c_void_p:
        return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(self._library, name)))

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, name)(*arguments):
            sys.exit(f"{name} failed with {status}")


def main() -> None:
    """Serve the rank beside this process until the rank closes the connection."""
    mpi = _Mpi()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[SOCKET_VARIABLE])
        lines = connection.makefile("r")
        buffer: _Values = np.zeros(int(lines.readline()) // BYTES_A_VALUE, np.float32)
        for line in lines:
            size_bytes, repeats = map(int, line.split())
            values = buffer[: size_bytes // BYTES_A_VALUE]
            answer: dict[str, float]
            if repeats:
                mpi.all_reduce(values[:1])
                began_s, began_cpu_s = time.perf_counter(), time.process_time()
                for _ in range(repeats):
                    mpi.all_reduce(values)
                answer = {
                    "time_s": (time.perf_counter() - began_s) / repeats,
                    "cpu_s": (time.process_time() - began_cpu_s) / repeats,
                }
            else:  # count the wrong sums
                values.fill(mpi.rank() + 1)
                mpi.all_reduce(values)
                ranks = mpi.ranks()
                answer = {"wrong": int(np.count_nonzero(values != ranks * (ranks + 1) / 2))}
                values.fill(0)
            connection.sendall(json.dumps(answer).encode() + b"\n")
    mpi.finish()


def hand_over(host: str, command: Sequence[str]) -> None:
    """Leave a command in the store, for the rank on that host."""
    from torch.distributed import TCPStore  # loaded here: the program itself needs no torch

    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ[PORT_VARIABLE]))
    store.set(key(host), " ".join(command))


def key(host: str) -> str:
    """Return the key under which a host finds its command."""
    return f"fullwire/mpi/{host}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        hand_over(sys.argv[1], sys.argv[2:])
    else:
        main()
