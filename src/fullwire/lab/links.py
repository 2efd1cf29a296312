"""Hosts on one switch: a bridge, a veth pair for each host, a token bucket at both its ends.

The bucket at the host's end holds what the host sends to the line rate, the one at the switch's end
what it receives: full duplex. tbf counts whole Ethernet frames without preamble and checksum, also
when the kernel hands it many segments as one, so a 1500 byte MTU leaves 1448/1514 for payload.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from fullwire.errors import UsageError
from fullwire.lab import namespaces
from fullwire.lab.description import INTERFACE, MOST_MTU, LabDescription

_SWITCH = "switch"
_NETWORK = ipaddress.ip_network("10.77.0.0/16")  # nothing else is in the lab to collide with
SWITCH_ADDRESS = str(_NETWORK[-2])

_USUAL_CONGESTION = "cubic"
_TBF, _NETEM = 0x10000, 0x20000  # handles 1: and 2:
_ROOT = 0xFFFFFFFF
_NETEM_FRAMES = 1_000_000  # its default of 1,000 would drop what a fast line has under way
_NO_PREFIX_ROUTE = 0x200  # we add the route ourselves, with the congestion control in it
_LARGEST_FRAME_BYTES = MOST_MTU + 14
_MOST_SEGMENTS_BYTES = 65_536  # that the kernel hands down in one piece
_LARGEST_HAND_DOWN_BYTES = 72_000  # the same, with the headers of each segment
# A host drops nothing on its own way out: its NIC makes TCP wait. The kernel's usual queue is as
# long as this, a thousand hand-downs.
_HOST_QUEUE_BYTES = 1000 * _LARGEST_HAND_DOWN_BYTES


@dataclass(frozen=True, slots=True)
class Host:
    """One host: its number, its network namespace as an open file, and its port on the switch."""

    number: int
    network: int
    port: str

    @property
    def name(self) -> str:
        """What the host calls itself."""
        return f"host{self.number}"

    @property
    def address(self) -> str:
        """Its address on the lab's network."""
        return str(_NETWORK[self.number + 1])


class Network:
    """The lab's network, made where this process is; it goes when its namespaces go."""

    def __init__(self, description: LabDescription) -> None:
        self._description = description
        self._switch = IPRoute()
        self.congestion = _congestion(description.congestion)
        _no_ipv6()
        with _kernel_refusals_explained():
            self._make_switch()
            self.hosts = [self._make_host(number) for number in range(description.cluster.workers)]

    def _make_switch(self) -> None:
        up = self._switch
        up.link("set", index=_index(up, "lo"), state="up")
        up.link("add", ifname=_SWITCH, kind="bridge", br_stp_state=0, br_forward_delay=0)
        index = _index(up, _SWITCH)
        up.link("set", index=index, state="up", mtu=self._description.mtu)
        up.addr("add", index=index, address=SWITCH_ADDRESS, prefixlen=_NETWORK.prefixlen)

    def _make_host(self, number: int) -> Host:
        host = Host(number, namespaces.new_network(), port=f"port{number}")
        with namespaces.inside(host.network):
            _no_ipv6()
            _allow_ping()
        mtu = self._description.mtu
        self._switch.link(
            "add", ifname=host.port, kind="veth", mtu=mtu,
            peer={"ifname": INTERFACE, "mtu": mtu, "net_ns_fd": host.network},
        )  # fmt: skip
        port = _index(self._switch, host.port)
        self._switch.link("set", index=port, master=_index(self._switch, _SWITCH), state="up")
        with _netlink_of(host) as own:
            self._make_interface(own, host)
        return host

    def _make_interface(self, own: IPRoute, host: Host) -> None:
        index = _index(own, INTERFACE)
        own.link("set", index=_index(own, "lo"), state="up")
        own.addr(
            "add", index=index, address=host.address, prefixlen=_NETWORK.prefixlen,
            flags=_NO_PREFIX_ROUTE,
        )  # fmt: skip
        own.link("set", index=index, state="up")
        # By the route, and not by sysctl: that refuses algorithms that the machine itself offers.
        metrics = {"cc_algo": self.congestion}
        own.route("add", dst=str(_NETWORK), oif=index, scope="link", metrics=metrics)

    def shape(self) -> None:
        """Hold every link to its line rate."""
        with _kernel_refusals_explained():
            for host, rate_bps in zip(self.hosts, self._description.rates_bps, strict=True):
                self.set_rate(host, rate_bps)

    def set_rate(self, host: Host, rate_bps: float) -> None:
        """Hold what a host sends and what it receives to a rate each."""
        port = _index(self._switch, host.port)
        _hold_to(self._switch, port, rate_bps, _switch_queue_bytes(rate_bps))
        with _netlink_of(host) as own:
            index = _index(own, INTERFACE)
            _hold_to(own, index, rate_bps, _HOST_QUEUE_BYTES)
            # What is larger than the bucket would be cut into single frames, each of which wakes
            # the receiver: a NIC hands up what came in together.
            own.link("set", index=index, gso_max_size=_hand_down_bytes(rate_bps))

    def add_netem(self) -> None:
        """Add the delay and the loss on the way out of every host, if any are asked for."""
        if self._description.latency_s or self._description.loss:
            for host in self.hosts:
                self._add_netem_to(host)

    def _add_netem_to(self, host: Host) -> None:
        delay_us = round(self._description.latency_s * 1e6)
        with _netlink_of(host) as own:
            try:
                own.tc(
                    "add", "netem", _index(own, INTERFACE), handle=_NETEM, parent=_TBF + 1,
                    delay=delay_us, loss=self._description.loss * 100, limit=_NETEM_FRAMES,
                )  # fmt: skip
            except NetlinkError:
                raise UsageError(
                    "latency and loss need the kernel's netem, which this machine has not: "
                    "load sch_netem, or leave --latency and --loss out"
                ) from None

    def cut(self, host: Host) -> None:
        """Pull the cable: the host's interface loses its carrier."""
        self._set_port(host, "down")

    def plug_in(self, host: Host) -> None:
        """Put the cable back."""
        self._set_port(host, "up")

    def _set_port(self, host: Host, state: str) -> None:
        self._switch.link("set", index=_index(self._switch, host.port), state=state)


def _hold_to(netlink: IPRoute, index: int, rate_bps: float, queue_bytes: int) -> None:
    burst_bytes = _burst_bytes(rate_bps)
    netlink.tc(
        "replace", "tbf", index, handle=_TBF, parent=_ROOT, rate=round(rate_bps / 8),
        burst=burst_bytes, limit=burst_bytes + queue_bytes,
    )  # fmt: skip


def _burst_bytes(rate_bps: float) -> int:
    """Return how much may pass at once after a pause: 1 ms of the line where that is little.

    On faster lines, one whole hand-down of TCP and beside it what the line carries between two
    wake-ups of the bucket: what it has no room for then is bandwidth that nobody can use.
    """
    enough_bytes = _LARGEST_HAND_DOWN_BYTES + _carried_bytes(rate_bps, 200e-6)
    return max(4 * _LARGEST_FRAME_BYTES, min(enough_bytes, _carried_bytes(rate_bps, 1e-3)))


def _hand_down_bytes(rate_bps: float) -> int:
    """Return how much TCP may hand down in one piece: its headers must fit the bucket too."""
    return min(_MOST_SEGMENTS_BYTES, round(0.9 * _burst_bytes(rate_bps)))


def _switch_queue_bytes(rate_bps: float) -> int:
    """Return what waits at a port before frames are dropped, as much as a shallow switch has."""
    return max(256 * 1024, _carried_bytes(rate_bps, 5e-3))


def _carried_bytes(rate_bps: float, time_s: float) -> int:
    return round(rate_bps / 8 * time_s)


def _congestion(asked: str | None) -> str:
    """Return the congestion control asked for, or the one that nearly all clusters have."""
    settings = Path("/proc/sys/net/ipv4")
    offered = (settings / "tcp_available_congestion_control").read_text().split()
    if asked is not None and asked not in offered:
        raise UsageError(f"congestion: expected one of {', '.join(offered)}, got {asked!r}")
    if asked is None and _USUAL_CONGESTION not in offered:
        return (settings / "tcp_congestion_control").read_text().strip()
    return asked or _USUAL_CONGESTION


def _no_ipv6() -> None:
    """Give coming interfaces no IPv6: its neighbour discovery would be traffic of our making."""
    with contextlib.suppress(FileNotFoundError):
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")


def _allow_ping() -> None:
    """Let our own group ping: the capability that ping carries means nothing in a lab."""
    group = os.getegid()
    with contextlib.suppress(OSError):
        Path("/proc/sys/net/ipv4/ping_group_range").write_text(f"{group} {group}")


@contextlib.contextmanager
def _kernel_refusals_explained() -> Iterator[None]:
    try:
        yield
    except NetlinkError as error:
        raise UsageError(
            f"the kernel does not make this network ({error}): a lab needs veth, bridge and sch_tbf"
        ) from None


@contextlib.contextmanager
def _netlink_of(host: Host) -> Iterator[IPRoute]:
    with namespaces.inside(host.network), IPRoute() as netlink:
        yield netlink


def _index(netlink: IPRoute, name: str) -> int:
    found: list[Any] = list(netlink.link_lookup(ifname=name))
    [index] = found
    return int(index)
