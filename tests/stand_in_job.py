"""A job that looks like a training from outside: it holds a file of torch's name, computes, sends.

    python stand_in_job.py LIBRARY ADDRESS PORT [forks]

Two ranks, RANK 0 and 1, compute 40 ms and then exchange bytes for some 50 ms, for ever. Each
prints when a step ends. It starts within milliseconds, because it loads no torch.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import time

PIECE, PIECES, PAUSE_S = 64_000, 10, 0.004


def connected(address: str, port: int) -> socket.socket:
    """Return a connection to the other rank."""
    if os.environ["RANK"] == "0":
        with socket.create_server((address, port)) as server:
            return server.accept()[0]
    while True:
        try:
            return socket.create_connection((address, port))
        except OSError:
            time.sleep(0.05)


def main() -> None:
    """Compute and exchange until the other rank is gone."""
    library, address, port, *more = sys.argv[1:]
    with open(library, "rb") as file:
        held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    other = connected(address, int(port))
    for _ in iter(int, 1):
        if "forks" in more:
            child = os.fork()
            if not child:
                time.sleep(0.05)
                os._exit(0)
            os.waitpid(-1, os.WNOHANG)
        until_s = time.monotonic() + 0.04
        while time.monotonic() < until_s:
            pass
        for _ in range(PIECES):
            other.sendall(bytes(PIECE))
            left = PIECE
            while left:
                received = len(other.recv(left))
                if not received:
                    return
                left -= received
            time.sleep(PAUSE_S)
        print(time.monotonic(), flush=True)
    held.close()


if __name__ == "__main__":
    main()
