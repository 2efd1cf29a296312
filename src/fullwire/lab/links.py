"""Hosts on a switch: a bridge, a veth pair for each host, a token bucket at both its ends.

With a spine, each leaf is a bridge, and the spine is a bridge in a namespace of its own. A veth
pair with two buckets joins a leaf to the spine. Its rate is that of the leaf's uplinks together.

A host with several NICs has a veth pair for each, and each NIC has a network of its own. Frames to
the address of NIC 2 leave by NIC 2, so no traffic goes from rail to rail. Ranks of one host reach
each other through its loopback, at any of its addresses, and the loopback has no bucket.

The bucket at the host's end limits sending to the line rate. The bucket at the switch's end limits
receiving. So the link is full duplex.

The bucket (tbf) counts whole Ethernet frames without preamble and checksum, even when the kernel
hands it many segments as one. So an MTU of 1500 bytes leaves 1448/1514 for payload.
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
from fullwire.lab.description import MOST_MTU, LabDescription, interface_of

_SWITCH, _SPINE = "switch", "spine"
_FIRST_NETWORK = 77  # 10.77.0.0/16; nothing else is in the lab to collide with

_TBF, _NETEM = 0x10000, 0x20000  # handles 1: and 2:
_ROOT = 0xFFFFFFFF
_NOBODY, _PERMANENT = "02:00:00:00:00:01", 0x80  # a card that no host has; NUD_PERMANENT
_NETEM_FRAMES = 1_000_000  # the default of 1,000 is fewer than a fast line has under way
_NO_PREFIX_ROUTE = 0x200  # we add the route ourselves, with the congestion control in it
_LARGEST_FRAME_BYTES = MOST_MTU + 14
_MOST_SEGMENTS_BYTES = 65_536  # the most that the kernel hands down in one piece.
_LARGEST_HAND_DOWN_BYTES = 74_000  # the same, with the headers of many small segments.
# A host drops no frames on its own way out: its NIC makes TCP wait. This is the length of the
# kernel's usual queue, a thousand hand-downs.
_HOST_QUEUE_BYTES = 1000 * _LARGEST_HAND_DOWN_BYTES


def _network_of(nic: int) -> ipaddress.IPv4Network:
    """Return the addresses of the NICs of this number, on all hosts."""
    return ipaddress.IPv4Network(f"10.{_FIRST_NETWORK + nic}.0.0/16")


def _switch_address(nic: int) -> str:
    """Return the address of the one switch on a NIC's network."""
    return str(_network_of(nic)[-2])


@dataclass(frozen=True, slots=True)
class Nic:
    """One NIC of a host: its number there, and its port on a switch."""

    host: int
    number: int

    @property
    def interface(self) -> str:
        """Its name inside its host."""
        return interface_of(self.number)

    @property
    def port(self) -> str:
        """The name of its port on the switch."""
        return f"port{self.host}.{self.number}"

    @property
    def address(self) -> str:
        """Its address on the network of its number."""
        return str(_network_of(self.number)[self.host + 1])


@dataclass(frozen=True, slots=True)
class Host:
    """One host: its number, its network namespace as an open file, and its NICs."""

    number: int
    network: int
    nics: tuple[Nic, ...]

    @property
    def name(self) -> str:
        """The host name that the host's own processes see."""
        return f"host{self.number}"

    @property
    def address(self) -> str:
        """The address for the host's name: that of its first NIC."""
        return self.nics[0].address


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf below the spine: its bridge, its end of the uplink, and the spine's."""

    number: int
    bridge: str
    up: str
    down: str

    def address(self, nic: int = 0) -> str:
        """The leaf's own address on a NIC's network, for measurements."""
        return str(_network_of(nic)[-2 - 2 * self.number])

    @property
    def spine_address(self) -> str:
        """The spine's address on its link to this leaf."""
        return str(_network_of(0)[-3 - 2 * self.number])


class Network:
    """The lab's network, made in this process's namespaces; it ends with them."""

    def __init__(self, description: LabDescription) -> None:
        self._description = description
        self._switch = IPRoute()
        self.congestion = _congestion(description.congestion)
        _no_ipv6()
        self.leaves: list[Leaf] = []
        self.spine: int | None = None  # the spine's namespace, if there is a spine
        self._apart: set[tuple[int, int]] = set()  # pairs of hosts that do not reach each other
        self._waiting_bytes: dict[int, int] = {}  # by host: the largest waiting piece at its link
        with _kernel_refusals_explained():
            self._switch.link("set", index=_index(self._switch, "lo"), state="up")
            if description.leaves:
                self._make_spine()
            else:
                index = self._make_bridge(self._switch, _SWITCH)
                for nic in range(self._description.nics_per_host):
                    self._switch.addr(
                        "add",
                        index=index,
                        address=_switch_address(nic),
                        prefixlen=_network_of(nic).prefixlen,
                    )
            self.hosts = [self._make_host(number) for number in range(description.cluster.nodes)]

    def _make_bridge(self, netlink: IPRoute, name: str) -> int:
        netlink.link("add", ifname=name, kind="bridge", br_stp_state=0, br_forward_delay=0)
        index = _index(netlink, name)
        netlink.link("set", index=index, state="up", mtu=self._description.mtu)
        return index

    def _make_spine(self) -> None:
        _answer_for_own_addresses_only()
        self.spine = namespaces.new_network()
        with namespaces.inside(self.spine), IPRoute() as at_spine:
            _no_ipv6()
            _answer_for_own_addresses_only()
            at_spine.link("set", index=_index(at_spine, "lo"), state="up")
            self._make_bridge(at_spine, _SPINE)
        for number in range(self._description.leaves):
            self.leaves.append(Leaf(number, f"leaf{number}", f"up{number}", f"down{number}"))
            self._make_leaf(self.leaves[-1], self.spine)

    def _make_leaf(self, leaf: Leaf, spine: int) -> None:
        """Make a leaf and join it to the spine; each reaches the other over this link only."""
        mtu = self._description.mtu
        bridge = self._make_bridge(self._switch, leaf.bridge)
        self._switch.link(
            "add",
            ifname=leaf.up,
            kind="veth",
            mtu=mtu,
            peer={"ifname": leaf.down, "mtu": mtu, "net_ns_fd": spine},
        )
        up = _index(self._switch, leaf.up)
        self._switch.link("set", index=up, master=bridge, state="up")
        _add_way(self._switch, bridge, leaf.address(), leaf.spine_address)
        for nic in range(1, self._description.nics_per_host):
            self._switch.addr("add", index=bridge, address=leaf.address(nic), prefixlen=32)
        with namespaces.inside(spine), IPRoute() as at_spine:
            down, at = _index(at_spine, leaf.down), _index(at_spine, _SPINE)
            at_spine.link("set", index=down, master=at, state="up")
            _add_way(at_spine, at, leaf.spine_address, leaf.address())

    def beside(self, nic: Nic) -> str:
        """Return the address of the switch that a NIC is on."""
        if self.leaves:
            return self._leaf_of(nic).address(nic.number)
        return _switch_address(nic.number)

    def _leaf_of(self, nic: Nic) -> Leaf:
        return self.leaves[self._description.leaf_of(nic.host, nic.number)]

    def _make_host(self, number: int) -> Host:
        nics = tuple(Nic(number, nic) for nic in range(self._description.nics_per_host))
        host = Host(number, namespaces.new_network(), nics)
        with namespaces.inside(host.network):
            _no_ipv6()
            # Let our own group ping: the capability of the ping program has no effect in a lab.
            group = os.getegid()
            with contextlib.suppress(OSError):
                Path("/proc/sys/net/ipv4/ping_group_range").write_text(f"{group} {group}")
            _answer_for_own_addresses_only()
        for nic in nics:
            # Make the cable from a NIC to its switch.
            mtu = self._description.mtu
            self._switch.link(
                "add",
                ifname=nic.port,
                kind="veth",
                mtu=mtu,
                peer={"ifname": nic.interface, "mtu": mtu, "net_ns_fd": host.network},
            )
            port = _index(self._switch, nic.port)
            bridge = _index(self._switch, self._leaf_of(nic).bridge if self.leaves else _SWITCH)
            self._switch.link("set", index=port, master=bridge, state="up")
            if self.leaves:
                _add_way(self._switch, bridge, None, nic.address)
        with _netlink_of(host) as own:
            own.link("set", index=_index(own, "lo"), state="up")
            for nic in nics:
                self._make_interface(own, nic)
        return host

    def _make_interface(self, own: IPRoute, nic: Nic) -> None:
        index, network = _index(own, nic.interface), _network_of(nic.number)
        own.addr(
            "add",
            index=index,
            address=nic.address,
            prefixlen=network.prefixlen,
            flags=_NO_PREFIX_ROUTE,
        )
        own.link("set", index=index, state="up")
        # Set in the route: the sysctl refuses some algorithms that the machine itself offers.
        asked = self._description.congestion
        metrics = {"cc_algo": asked} if asked else {}
        own.route("add", dst=str(network), oif=index, scope="link", metrics=metrics)

    def shape(self) -> None:
        """Hold every link to its line rate."""
        with _kernel_refusals_explained():
            for host, rate_bps in zip(self.hosts, self._description.rates_bps, strict=True):
                self.set_rate(host, rate_bps)
            for leaf in self.leaves:
                rate_bps = self._description.uplink_rate_bps
                sizes = _burst_bytes(rate_bps), _switch_queue_bytes(rate_bps)
                _hold_to(self._switch, _index(self._switch, leaf.up), rate_bps, *sizes)
                assert self.spine is not None
                with namespaces.inside(self.spine), IPRoute() as at_spine:
                    _hold_to(at_spine, _index(at_spine, leaf.down), rate_bps, *sizes)

    def set_rate(self, host: Host, rate_bps: float) -> None:
        """Limit the sending and the receiving of each NIC of a host to a rate."""
        # Leave room for waiting pieces: a piece larger than the bucket would wait for ever.
        whole_bytes = _burst_bytes(rate_bps)
        waiting_bytes = max(
            self._waiting_bytes.get(host.number, 0), min(_LARGEST_HAND_DOWN_BYTES, whole_bytes)
        )
        self._waiting_bytes[host.number] = waiting_bytes
        burst_bytes = max(whole_bytes, waiting_bytes)
        with _netlink_of(host) as own:
            for nic in host.nics:
                port = _index(self._switch, nic.port)
                queue_bytes = _switch_queue_bytes(rate_bps)
                _hold_to(self._switch, port, rate_bps, burst_bytes, queue_bytes)
                index = _index(own, nic.interface)
                _hold_to(own, index, rate_bps, burst_bytes, _HOST_QUEUE_BYTES)
                # The kernel cuts a piece larger than the bucket into single frames, and each frame
                # wakes the receiver. A real NIC hands up frames that came together as one. TCP's
                # headers must fit into the bucket too.
                piece_bytes = min(_MOST_SEGMENTS_BYTES, round(0.9 * whole_bytes))
                own.link("set", index=index, gso_max_size=piece_bytes)

    def add_netem(self) -> None:
        """Add the delay and the loss on the way out of every host, if any are asked for."""
        latency_s, loss = self._description.latency_s, self._description.loss
        if latency_s or loss:
            for host in self.hosts:
                with _netlink_of(host) as own:
                    for nic in host.nics:
                        _delay(own, nic.interface, latency_s, loss)
        if self.leaves and self._description.spine_latency_s:
            for leaf in self.leaves:
                _delay(self._switch, leaf.up, self._description.spine_latency_s, loss=0.0)

    def sent_bytes(self, host: Host) -> int:
        """Return the bytes that a host has sent so far, as counted by its ports on the switches."""
        ports = [_index(self._switch, nic.port) for nic in host.nics]
        links = [self._switch.link("get", index=port)[0] for port in ports]
        return sum(int(link.get_attr("IFLA_STATS64")["rx_bytes"]) for link in links)

    def cut(self, host: Host) -> None:
        """Pull the cable: the host's interface loses its carrier."""
        self._set_port(host, "down")

    def plug_in(self, host: Host) -> None:
        """Put the cable back."""
        self._set_port(host, "up")

    def set_apart(self, pairs: set[tuple[int, int]]) -> None:
        """Keep exactly these pairs of hosts from reaching each other: frames go nowhere, silently.

        A host's neighbour entry for the other one names a card that does not exist.
        """
        for one, other in self._apart ^ pairs:
            for host, far in ((one, other), (other, one)):
                with _netlink_of(self.hosts[host]) as own:
                    for nic in self.hosts[far].nics:
                        index = _index(own, nic.interface)
                        if (one, other) in pairs:
                            own.neigh(
                                "replace",
                                dst=nic.address,
                                lladdr=_NOBODY,
                                ifindex=index,
                                state=_PERMANENT,
                            )
                        else:
                            own.neigh("del", dst=nic.address, ifindex=index)
        self._apart = set(pairs)

    def _set_port(self, host: Host, state: str) -> None:
        for nic in host.nics:
            self._switch.link("set", index=_index(self._switch, nic.port), state=state)


def _hold_to(
    netlink: IPRoute, index: int, rate_bps: float, burst_bytes: int, queue_bytes: int
) -> None:
    netlink.tc(
        "replace",
        "tbf",
        index,
        handle=_TBF,
        parent=_ROOT,
        rate=round(rate_bps / 8),
        burst=burst_bytes,
        limit=burst_bytes + queue_bytes,
    )


def _delay(netlink: IPRoute, name: str, latency_s: float, loss: float) -> None:
    try:
        netlink.tc(
            "add",
            "netem",
            _index(netlink, name),
            handle=_NETEM,
            parent=_TBF + 1,
            delay=round(latency_s * 1e6),
            loss=loss * 100,
            limit=_NETEM_FRAMES,
        )
    except NetlinkError:
        raise UsageError(
            "latency and loss need the kernel's netem, which this machine has not: "
            "load sch_netem, or leave them out, also of a described cluster"
        ) from None


def _add_way(netlink: IPRoute, bridge: int, own: str | None, other: str) -> None:
    """Add a route to an address over this bridge, with our own address to send from."""
    source = {}
    if own is not None:
        netlink.addr("add", index=bridge, address=own, prefixlen=32)
        source = {"prefsrc": own}
    netlink.route("add", dst=f"{other}/32", oif=bridge, scope="link", **source)


def _answer_for_own_addresses_only() -> None:
    """Let each interface answer for its own address only, although all hear each request."""
    Path("/proc/sys/net/ipv4/conf/all/arp_ignore").write_text("1")


def _burst_bytes(rate_bps: float) -> int:
    """Return the bytes that may pass at once after a pause: on slow lines, 1 ms of the line rate.

    On faster lines the bucket has room for one whole hand-down of TCP and for the bytes that the
    line carries between two wake-ups of the bucket. A smaller bucket would waste bandwidth.
    """
    enough_bytes = _LARGEST_HAND_DOWN_BYTES + _carried_bytes(rate_bps, 200e-6)
    return max(4 * _LARGEST_FRAME_BYTES, min(enough_bytes, _carried_bytes(rate_bps, 1e-3)))


def _switch_queue_bytes(rate_bps: float) -> int:
    """Return the bytes that may wait at a port before it drops frames, as in a shallow switch."""
    return max(256 * 1024, _carried_bytes(rate_bps, 5e-3))


def _carried_bytes(rate_bps: float, time_s: float) -> int:
    return round(rate_bps / 8 * time_s)


def _congestion(asked: str | None) -> str:
    """Return the congestion control asked for, or the machine's own."""
    settings = Path("/proc/sys/net/ipv4")
    offered = (settings / "tcp_available_congestion_control").read_text().split()
    if asked is not None and asked not in offered:
        raise UsageError(f"congestion: expected one of {', '.join(offered)}, got {asked!r}")
    return asked or (settings / "tcp_congestion_control").read_text().strip()


def _no_ipv6() -> None:
    """Switch IPv6 off for new interfaces: its neighbour discovery would add traffic of our own."""
    with contextlib.suppress(FileNotFoundError):
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")


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
    indices: list[Any] = list(netlink.link_lookup(ifname=name))
    [index] = indices
    return int(index)
