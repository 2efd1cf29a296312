"""What iperf3 moves between two hosts, both ways at once: the usual yardstick, and not a limit."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

STREAMS = (1, 2)
_MEASURED_S = 1
_PATIENCE_S = 10.0


class IperfFailed(Exception):
    """iperf3 measured nothing; the message says why."""


def iperf_is_missing() -> str | None:
    """Say so if this host has no iperf3."""
    if shutil.which("iperf3") is None:
        return "iperf3 is not installed, so what it moves is not shown: sudo apt install iperf3"
    return None


def moved_between(server: int, client: int, address: str, streams: int) -> float | str | None:
    """Measure between two ranks: the client returns the rate, or why there is none. Others wait."""
    port = _port_of(server)
    rate_bps: float | str | None = None
    with _server(port, is_here=dist.get_rank() == server):
        if dist.get_rank() == client:
            try:
                rate_bps = _both_ways_bps(address, port, streams)
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


def _port_of(server: int) -> int:
    chosen = [0]
    if dist.get_rank() == server:
        with socket.create_server(("", 0)) as free:
            chosen = [free.getsockname()[1]]
    dist.broadcast_object_list(chosen, server)
    return chosen[0]


@contextmanager
def _server(port: int, *, is_here: bool) -> Iterator[None]:
    if not is_here:
        yield
        return
    command = ["iperf3", "-s", "-p", str(port)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()


def _both_ways_bps(address: str, port: int, streams: int) -> float:
    command = ["iperf3", "-c", address, "-p", str(port), "--bidir", "-J"]
    command += ["--connect-timeout", str(int(1000 * _PATIENCE_S))]
    command += ["-t", str(_MEASURED_S), "-P", str(streams)]
    until_s = time.monotonic() + _PATIENCE_S
    while True:  # until the server listens
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode == 0 or time.monotonic() > until_s:
            break
        time.sleep(0.1)
    try:
        return both_ways_bps(json.loads(done.stdout))
    except (ValueError, KeyError):
        raise IperfFailed("iperf3 measured nothing: 3.7 or newer is needed for --bidir") from None
