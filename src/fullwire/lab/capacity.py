"""What does this machine move between hosts at all? Measured once over bare links, and kept.

The figure lies in XDG_CACHE_HOME, apart for each kernel, count of processors and number of pairs.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from fullwire.lab import namespaces
from fullwire.lab.description import LabDescription
from fullwire.lab.links import Host, Network
from fullwire.units import show_rate

_MEASURED_S = 0.3
_PIECE = bytes(1 << 20)


def capacity_warning(network: Network, description: LabDescription) -> str | None:
    """Say so if all links at full rate need more than this machine moves.

    Asked before the network is shaped, for it is the bare links that are measured.
    """
    needed_bps = sum(description.rates_bps) * description.nics_per_host * description.payload_share
    pairs = min(len(network.hosts) // 2, max(1, (os.cpu_count() or 1) // 2))
    if pairs == 0:
        return None
    capacity_bps = _cached_capacity_bps(network, pairs)
    if needed_bps <= capacity_bps:
        return None
    return (
        f"all links at full rate need {show_rate(needed_bps)} of payload, and this machine moves "
        f"{show_rate(capacity_bps)} between such hosts: processors, not links, may be the limit"
    )


def in_host_bps(network: Network, description: LabDescription) -> float | None:
    """Return what a rank can send another on its host; None where hosts have one each."""
    first = network.hosts[0]
    return _moved_bps([first, first]) if description.ranks_per_host > 1 else None


def _cached_capacity_bps(network: Network, pairs: int) -> float:
    cached = _cache_directory() / "fullwire" / "lab-capacity.json"
    machine = f"{platform.release()}, {os.cpu_count()} processors, {pairs} pairs"
    known: dict[str, float] = {}
    with contextlib.suppress(OSError, ValueError):
        known = dict(json.loads(cached.read_text()))
    with contextlib.suppress(KeyError, ValueError, TypeError):
        return float(known[machine])
    capacity_bps = _moved_bps(network.hosts[: 2 * pairs])
    with contextlib.suppress(OSError):  # a home that cannot be written: it is measured every time
        cached.parent.mkdir(parents=True, exist_ok=True)
        building = cached.with_name(f"{cached.name}.{os.getpid()}")
        building.write_text(json.dumps(known | {machine: capacity_bps}))
        building.replace(cached)
    return capacity_bps


def _cache_directory() -> Path:
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named)
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # of a user whom the machine does not know, as in a container
        return Path("/nonexistent")


def _moved_bps(hosts: Sequence[Host]) -> float:
    """Let each host of the first half send to one of the second, all at once, over bare links."""
    half = len(hosts) // 2
    with contextlib.ExitStack() as stack:
        receivers = []
        for sender, receiver in zip(hosts[:half], hosts[half:], strict=True):
            at_sender, at_receiver = stack.enter_context(_bare_connection(sender, receiver))
            stack.enter_context(_sending_process(at_sender))
            receivers.append(at_receiver)
        return _drained_bps(receivers)


def _drained_bps(receivers: Sequence[socket.socket]) -> float:
    """Read from all in turn, copying as a job would, and return what arrives in a while."""
    buffer = bytearray(1 << 20)
    arrived_bytes = 0
    began_s = time.perf_counter()
    while (elapsed_s := time.perf_counter() - began_s) < _MEASURED_S:
        ready, _, _ = select.select(receivers, [], [], _MEASURED_S)
        arrived_bytes += sum(each.recv_into(buffer) for each in ready)
    return 8 * arrived_bytes / elapsed_s


@contextlib.contextmanager
def _bare_connection(one: Host, other: Host) -> Iterator[tuple[socket.socket, socket.socket]]:
    with namespaces.inside(other.network), socket.create_server((other.address, 0)) as listener:
        with namespaces.inside(one.network):
            at_one = socket.create_connection(listener.getsockname())
        at_other, _ = listener.accept()
    with at_one, at_other:
        yield at_one, at_other


@contextlib.contextmanager
def _sending_process(sender: socket.socket) -> Iterator[None]:
    """Send from a process of its own, so that its work takes no time from the receivers'."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError):
            while True:
                sender.sendall(_PIECE)
        os._exit(0)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
