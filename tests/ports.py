"""A port of this machine's for ranks that are still to be started."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """Give a port that rank 0 may listen at, and that nobody else is given meanwhile."""
    with socket.socket() as held:  # bound and not listening: who says so too may share it
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
