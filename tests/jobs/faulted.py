"""A host of ranks that come and go: each round has a new process, which a fault may hit.

This process has loaded torch once, so a rank begins within milliseconds. The rank plays its round
and says which moment it has reached. This process passes that on, and signals the rank. The process
of the last host holds the store, which faults leave alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fullwire.transport import group
from fullwire.transport.keys import ENCRYPT_VARIABLE, KEY_VARIABLE
from fullwire.transport.wire import WIRE_VARIABLE
from tests.jobs.asked import serve

BACKEND = sys.argv[2]
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1


class Host:
    """The rank of this round, and the lines that it has said so far."""

    def __init__(self) -> None:
        self._process = 0
        self._hear = -1
        self._said = b""
        self._store: Any = None

    def hold(self, port: int) -> None:
        """Hold the store of all rounds."""
        self._store = dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)

    def begin(self, **given: Any) -> None:
        """Start the rank of a round."""
        hear, tell = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(hear)
            try:
                over = play(tell, **given)
                os.write(tell, json.dumps({"over": over}).encode() + b"\n")
            finally:
                os._exit(0)
        os.close(tell)
        self._process, self._hear, self._said = process, hear, b""

    def reached(self, moment: str, within_s: float) -> bool:
        """Wait until the rank has reached a moment; the answer is False if it does not."""
        return self._heard(json.dumps({"reached": moment}).encode(), within_s)

    def signal(self, number: int) -> None:
        """Signal the rank."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process, number)

    def result(self, within_s: float) -> dict[str, Any] | None:
        """Return the last words of the rank, or None if it says nothing in this time."""
        if not self._heard(b'"over"', within_s):
            return None
        last: dict[str, Any] = json.loads(self._said.splitlines()[-1])["over"]
        return last

    def end(self) -> None:
        """End the rank, whatever became of it."""
        self.signal(signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._hear)

    def _heard(self, words: bytes, within_s: float) -> bool:
        until_s = time.monotonic() + within_s
        while words not in self._said:
            left_s = max(0.0, until_s - time.monotonic())
            if not select.select([self._hear], [], [], left_s)[0]:
                return False
            piece = os.read(self._hear, 65536)
            if not piece:
                return False
            self._said += piece
        return True


def play(
    tell: int,
    address: str,
    port: int,
    name: str,
    timeout_s: float,
    count: int,
    lasting_s: float,
    is_again: bool,
    wire: str = "float32",
    hit: list[Any] | None = None,
) -> dict[str, Any]:
    """Join a group, reduce and leave; if it is to connect again, do so after an earlier group.

    `wire` is the wire format of large sums, and "encrypted" behind it asks for that.

    `hit` is a moment, the seconds after it, and the number of a signal that then hits this rank.
    """
    over: dict[str, Any] = {"times": 0, "wrong": 0, "error": None, "during": ""}

    def reaches(moment: str) -> None:
        over["during"] = moment
        os.write(tell, json.dumps({"reached": moment}).encode() + b"\n")
        if hit and hit[0] == moment:
            own = partial(os.kill, os.getpid(), hit[2])
            threading.Timer(hit[1], own).start() if hit[1] else own()

    try:
        torch.set_num_threads(1)
        wire_format, _, encrypted = wire.partition(" ")
        os.environ[WIRE_VARIABLE] = wire_format
        if encrypted:
            os.environ |= {KEY_VARIABLE: "of these rounds " * 3, ENCRYPT_VARIABLE: "1"}
        group.SHORTEST_RENDEZVOUS_S = timeout_s  # a user's ranks may come half a minute apart
        patience = timedelta(seconds=timeout_s)
        reaches("start")
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=30))
        for number in range(1 + is_again):
            if number:
                reaches("reconnect")
            own = dist.PrefixStore(f"{name}.{number}", store)
            dist.init_process_group(
                BACKEND, store=own, rank=RANK, world_size=RANKS, timeout=patience
            )
            dist.barrier()
            if number == is_again:
                reaches("collective")
                reduce(over, count, lasting_s, exact=wire_format != "int8")
                reaches("end")
            dist.destroy_process_group()
    except Exception as error:  # every error is an answer
        over["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
    return over


def reduce(over: dict[str, Any], count: int, lasting_s: float, *, exact: bool) -> None:
    """Reduce until rank 0 finds that the time is over; count wrong elements of sums."""
    until_s = time.monotonic() + lasting_s
    values = torch.empty(count + 1)
    is_over = False
    while not is_over:
        values.fill_(RANK + 1 + over["times"] % 7)
        values[0] = float(RANK == 0 and time.monotonic() > until_s)
        dist.all_reduce(values)
        expected = RANKS * (RANKS + 1) / 2 + RANKS * (over["times"] % 7)
        most_off = 0 if exact else expected / 100  # 127 steps, and each is half off at most
        over["wrong"] += int(((values[1:] - expected).abs() > most_off).sum())
        over["times"] += 1
        is_over = bool(values[0])


if __name__ == "__main__":
    host = Host()
    serve(lambda request: getattr(host, request.pop("do"))(**request))
