"""The measured rate of each link: a short TCP transfer over it, one link at a time and one way.

This module also measures the bytes per second that this machine can move between hosts. It does so
once, over bare links. The figure is kept in XDG_CACHE_HOME, with one entry for each kernel, count
of processors and number of pairs.

The count of a link's payload begins at the end of the first arrivals, when the bucket's burst is
spent. It ends with the last arrivals. So the start and the size of the pieces do not enter the
rate.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fullwire.errors import UsageError
from fullwire.lab import namespaces
from fullwire.lab.description import LabDescription
from fullwire.lab.links import Host, Network
from fullwire.lab.messages import LinkRate
from fullwire.units import show_rate

LEAST_SHARE = 0.9  # of the payload that the line rate allows; below, the lab is refused.
_CONVINCING_SHARE = 0.97
_IMPOSSIBLE_SHARE = 1.01  # more: the bytes piled up while the receiver waited for a processor
_ATTEMPTS, _MOST_ATTEMPTS = 4, 20  # a busy machine may spoil some; the larger one before a refusal
_BREATHER_S = 0.2  # pause before the further attempts, for a busy machine

_WARM_UP_S, _LEAST_S, _MOST_S = 0.02, 0.08, 0.5
_ENOUGH_ARRIVALS = 40
_PIECE = bytes(1 << 20)
_UNTOUCHED = bytearray(1 << 26)  # larger than TCP's buffers, so that one read empties them.
_DISCARD = socket.MSG_TRUNC  # TCP counts the bytes as read without a copy.
_FORGET_UNSENT = b"\x01\x00\x00\x00\x00\x00\x00\x00"  # SO_LINGER, for 0 s.
_MEASURED_S = 0.3  # for the capacity of the whole machine


def measured_links(network: Network, description: LabDescription) -> tuple[LinkRate, ...]:
    """Measure every link each way, or refuse the lab at the first that delivers too little."""
    links = []
    for host, rate_bps in zip(network.hosts, description.rates_bps, strict=True):
        for nic in host.nics:
            way = _Way(host.network, network.beside(nic))
            measured = _measured_link(way, host.number, rate_bps, description.payload_share)
            links.append(replace(measured, nic=nic.number))
            check_delivery(links[-1], f"host {host.number}")
    return tuple(links)


def measured_uplinks(network: Network, description: LabDescription) -> tuple[LinkRate, ...]:
    """Measure the uplinks of every leaf, from the spine's side, or refuse the lab."""
    links = []
    for leaf in network.leaves:
        assert network.spine is not None
        way = _Way(network.spine, leaf.address())
        rate_bps = description.uplink_rate_bps
        links.append(_measured_link(way, leaf.number, rate_bps, description.payload_share))
        check_delivery(links[-1], f"leaf {leaf.number}")
    return tuple(links)


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to measure: from a network namespace to an address of a switch."""

    network: int
    address: str


def _measured_link(way: _Way, number: int, line_rate_bps: float, payload_share: float) -> LinkRate:
    limit_bps = line_rate_bps * payload_share
    with _connection(way, line_rate_bps) as (at_host, at_switch):
        sent_bps = _best(at_host, at_switch, limit_bps)
    with _connection(way, line_rate_bps) as (at_host, at_switch):
        received_bps = _best(at_switch, at_host, limit_bps)
    return LinkRate(
        host=number,
        line_rate_bps=line_rate_bps,
        payload_limit_bps=limit_bps,
        sent_bps=sent_bps,
        received_bps=received_bps,
    )


def check_delivery(link: LinkRate, whose: str) -> None:
    """Refuse a link that delivers much less than its line rate."""
    if link.delivered_share < LEAST_SHARE:
        raise UsageError(
            f"{whose}: the link delivers {show_rate(link.delivered_bps)} of payload "
            f"where its line rate of {show_rate(link.line_rate_bps)} allows "
            f"{show_rate(link.payload_limit_bps)}: ask for a lower --rate, or free this machine"
        )


def _best(sender: socket.socket, receiver: socket.socket, limit_bps: float) -> float:
    """Return the best rate of several attempts, which end once it is near the limit."""
    most_bps = _IMPOSSIBLE_SHARE * limit_bps
    rates_bps: list[float] = []
    with _sending(sender):
        for attempt in range(1, _MOST_ATTEMPTS + 1):
            rates_bps.append(_arriving_bps(receiver))
            enough_share = _CONVINCING_SHARE if attempt <= _ATTEMPTS else LEAST_SHARE
            if any(enough_share * limit_bps <= rate_bps <= most_bps for rate_bps in rates_bps):
                break
            if attempt >= _ATTEMPTS:
                time.sleep(_BREATHER_S)
    return max((rate_bps for rate_bps in rates_bps if rate_bps <= most_bps), default=min(rates_bps))


def _arriving_bps(receiver: socket.socket) -> float:
    began_s = _after_next_arrival(receiver)
    while (counted_from_s := _after_next_arrival(receiver)) < began_s + _WARM_UP_S:
        pass
    arrived_bytes = arrivals = 0
    elapsed_s = 0.0
    while elapsed_s < _LEAST_S or (arrivals < _ENOUGH_ARRIVALS and elapsed_s < _MOST_S):
        arrived_bytes += _discard(receiver)
        arrivals += 1
        elapsed_s = time.perf_counter() - counted_from_s
    return 8 * arrived_bytes / elapsed_s


def _after_next_arrival(receiver: socket.socket) -> float:
    _discard(receiver)
    return time.perf_counter()


def _discard(receiver: socket.socket) -> int:
    return receiver.recv_into(_UNTOUCHED, len(_UNTOUCHED), _DISCARD)


@contextlib.contextmanager
def _connection(way: _Way, line_rate_bps: float) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Connect a host to the switch; the switch's own end has no limit, so only this link counts."""
    # A port's queue holds all bytes under way: after a loss, arrivals would pile up behind it.
    under_way_bytes = max(65536, round(line_rate_bps / 8 * 5e-3))
    with socket.create_server((way.address, 0)) as listener:
        with namespaces.inside(way.network):
            at_host = socket.create_connection(listener.getsockname())
        at_switch, _ = listener.accept()
    with at_host, at_switch:
        for end in (at_host, at_switch):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _FORGET_UNSENT)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, under_way_bytes)
        yield at_host, at_switch


@contextlib.contextmanager
def _sending(sender: socket.socket) -> Iterator[None]:
    """Send as fast as the link allows, while the block runs."""

    def send() -> None:
        with contextlib.suppress(OSError):  # the other thread has shut the socket down: the end
            while True:
                sender.sendall(_PIECE)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        yield
    finally:
        sender.shutdown(socket.SHUT_RDWR)
        thread.join()


def capacity_warning(network: Network, description: LabDescription) -> str | None:
    """Return a warning if all links at full rate need more than this machine can move.

    Call it before the network is shaped, because it measures the bare links.
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
    """Return the rate between two ranks of a host; None where each host has one rank."""
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
    with contextlib.suppress(OSError):  # the cache cannot be written: measure every time
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
    except RuntimeError:  # no home folder: the user is unknown, as in a container
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
        # Read from all in turn, with a copy as in a job, and return the rate of arrivals.
        buffer = bytearray(1 << 20)
        arrived_bytes = 0
        began_s = time.perf_counter()
        while (elapsed_s := time.perf_counter() - began_s) < _MEASURED_S:
            ready, _, _ = select.select(receivers, [], [], _MEASURED_S)
            arrived_bytes += sum(receiver.recv_into(buffer) for receiver in ready)
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
