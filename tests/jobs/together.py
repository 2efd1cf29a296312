"""Start N processes of a script as torch.distributed expects them, without a launcher of torch's.

python together.py N SCRIPT ARGUMENTS...   ends with the worst status of them
"""

import os
import socket
import subprocess
import sys


def main() -> int:
    workers, command = int(sys.argv[1]), sys.argv[2:]
    with socket.socket() as held:  # while they run, no other process gets this port
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # but rank 0 may listen there
        held.bind(("127.0.0.1", 0))
        return worst_status(workers, command, held.getsockname()[1])


def worst_status(workers: int, command: list[str], port: int) -> int:
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            env=os.environ
            | {
                "RANK": str(rank),
                "WORLD_SIZE": str(workers),
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
        )
        for rank in range(workers)
    ]
    return max(abs(process.wait()) for process in processes)


if __name__ == "__main__":
    sys.exit(main())
