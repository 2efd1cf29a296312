"""What iperf3 moves between two hosts, both ways at once: the usual yardstick, and not a limit."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

STREAMS = (1, 2)
_MEASURED_S = 1
_PATIENCE_S = 10.0
_PORTS_TRIED = 3  # another process may take one between our looking and iperf3's listening


class IperfFailed(Exception):
    """iperf3 measured nothing; the message says why."""


def iperf_is_missing() -> str | None:
    """Say so if this host has no iperf3."""
    if shutil.which("iperf3") is None:
        return "iperf3 is not installed, so what it moves is not shown: sudo apt install iperf3"
    return None


def moved_between(server: int, client: int, address: str, streams: int) -> float | str | None:
    """Measure between two ranks: the client returns the rate, or why there is none. Others wait."""
    rate_bps: float | str | None = None
    with contextlib.ExitStack() as until_measured:
        chosen: list[int | None] = [None]
        if dist.get_rank() == server:
            chosen = [until_measured.enter_context(_server())]
        dist.broadcast_object_list(chosen, server)
        if dist.get_rank() == client:
            try:
                rate_bps = _both_ways_bps(address, chosen[0], streams)
            except IperfFailed as error:
                rate_bps = str(error)
        dist.barrier()
    return rate_bps


def both_ways_bps(told: dict[str, Any]) -> float:
    """Return the mean of what arrived each way, of what iperf3 tells."""
    if "error" in told:
        raise IperfFailed(f"iperf3 measured nothing: {told['error']}")
    ends = told["end"]["sum_received"], told["end"]["sum_received_bidir_reverse"]
    return sum(float(end["bits_per_second"]) for end in ends) / len(ends)


@contextmanager
def _server() -> Iterator[int | None]:
    """Give the port at which iperf3 listens; None if it will not."""
    for _ in range(_PORTS_TRIED):
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        command = ["iperf3", "-s", "-p", str(port), "--forceflush"]
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdout is not None
            try:
                if any(b"Server listening" in line for line in process.stdout):
                    yield port
                    return
            finally:
                process.kill()
    yield None


def _both_ways_bps(address: str, port: int | None, streams: int) -> float:
    if port is None:
        raise IperfFailed("iperf3 measured nothing: its server ended before it listened")
    command = ["iperf3", "-c", address, "-p", str(port), "--bidir", "-J"]
    command += ["--connect-timeout", str(int(1000 * _PATIENCE_S))]
    command += ["-t", str(_MEASURED_S), "-P", str(streams)]
    done = subprocess.run(command, capture_output=True, check=False)
    try:
        return both_ways_bps(json.loads(done.stdout))
    except (ValueError, KeyError):
        raise IperfFailed("iperf3 measured nothing: 3.7 or newer is needed for --bidir") from None
