"""What mpirun takes for ssh: python mpi_agent.py HOST COMMAND... leaves the command in the store.

The rank on that host, which waits there for it, starts it (`mpi_turns.py`). So MPI reaches the
hosts that the job runs on, and needs no logins between them.
"""

from __future__ import annotations

import os
import sys

from torch.distributed import TCPStore


def main() -> None:
    """Hand the command over."""
    host, *words = sys.argv[1:]
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ[PORT_VARIABLE]))
    store.set(key(host), " ".join(words))


PORT_VARIABLE = "FULLWIRE_MPI_STORE_PORT"


def key(host: str) -> str:
    """Return where a host finds its command."""
    return f"fullwire/mpi/{host}"


if __name__ == "__main__":
    main()
