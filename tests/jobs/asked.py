"""The loop in which a job of `tests/rank_processes.py` reads requests and answers them."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from typing import Any


def serve(answer: Callable[[Any], Any]) -> None:
    """Answer requests until the other side closes the connection."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(sys.argv[1])
        for line in connection.makefile("r"):
            number, request = json.loads(line)
            connection.sendall(json.dumps([number, answer(request)]).encode() + b"\n")
