"""A cluster as people buy it: devices in nodes, NICs, switches, and the links that a transfer uses.

    device -- in-node links -- NIC -- leaf -- spine -- leaf -- NIC -- in-node links -- device

Every link is one direction of a cable, with a number, a name and a capacity. What is inside a
switch is no bottleneck; the uplinks of a leaf are taken together as one link, as if packets were
spread over them evenly. A device reaches every NIC of its node, and uses the one that is nearest:

    switch    all NICs are on one switch
    fat-tree  the NICs of some nodes are on one leaf; leaves reach each other through the spine,
              and where some leaves are a pod with a spine of its own, pods through the core
    rails     NIC 0 of some nodes is on one leaf, NIC 1 on another, and so on. A transfer leaves
              through the NIC of the rail that its target is on, over in-node links if the source
              is on another (NCCL calls this PXN), so that no traffic goes from rail to rail
    torus     four NICs a node, cabled to the neighbours east, west, south and north; a transfer
              goes along the row first, then along the column, the shorter way round

Where devices are joined by a switch of their own (NVSwitch), what leaves the node does not use
that; where they are joined by PCIe, it goes over the device's lane as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fullwire.clusters.cluster import Cluster
from fullwire.errors import UsageError

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]
InsideKind: TypeAlias = Literal["switch", "pcie"]

MOST_DEVICES = 1_000_000
LINK_KINDS = ("in-node links", "NICs", "spine uplinks", "torus links", "core uplinks")
IN_NODE, NIC, SPINE, TORUS, CORE = range(len(LINK_KINDS))
_SIDES = ("east", "west", "south", "north")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """What joins the devices of a node: each has a link of this rate, up and down."""

    kind: InsideKind
    rate_bps: float
    latency_s: float = 0.0
    payload_share: float = 1.0

    def __post_init__(self) -> None:
        _check_link("inside", self.rate_bps, self.latency_s, self.payload_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nics:
    """The NICs of a node; `of_device` names the one that each device uses, even shares if empty.

    `latency_s` is one way, from a node to another without the spine; in a torus from a node to the
    next.
    """

    rate_bps: float
    per_node: int = 1
    latency_s: float = 0.0
    payload_share: float = 1.0
    of_device: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_link("nics", self.rate_bps, self.latency_s, self.payload_share)
        _check_count("nics.per_node", self.per_node)


@dataclass(frozen=True, slots=True)
class OneSwitch:
    """All NICs on one switch."""

    kind = "switch"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafSpine:
    """Leaves below a spine; `latency_s` is what the way through the spine adds.

    The uplinks of a leaf carry what its ports do, divided by the oversubscription. Where so many
    leaves are a pod, each pod has a spine, whose uplinks to the core carry what its leaves send up,
    divided by the core's; the way through the core adds the latency once more.
    """

    nodes_per_leaf: int
    oversubscription: float = 1.0
    by_rail: bool = False
    latency_s: float = 0.0
    leaves_per_pod: int | None = None
    core_oversubscription: float = 1.0

    def __post_init__(self) -> None:
        _check_count("network.nodes_per_leaf", self.nodes_per_leaf)
        _check_above_zero("network.oversubscription", self.oversubscription, "a ratio")
        if self.leaves_per_pod is not None:
            _check_count("network.leaves_per_pod", self.leaves_per_pod)
        elif self.core_oversubscription != 1:
            raise UsageError("network.leaves_per_pod: expected how many leaves are below one core")
        _check_above_zero("network.core_oversubscription", self.core_oversubscription, "a ratio")
        _check_latency("network", self.latency_s)

    @property
    def kind(self) -> str:
        """What people call it."""
        return "rails" if self.by_rail else "fat-tree"


@dataclass(frozen=True, slots=True, kw_only=True)
class Torus:
    """Nodes in rows and columns whose ends are joined."""

    rows: int
    columns: int

    kind = "torus"

    def __post_init__(self) -> None:
        _check_count("network.rows", self.rows)
        _check_count("network.columns", self.columns)


Network: TypeAlias = OneSwitch | LeafSpine | Torus


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherHost:
    """A node whose NICs have another line rate."""

    node: int
    nic_rate_bps: float

    def __post_init__(self) -> None:
        _check_above_zero("hosts.nic_rate", self.nic_rate_bps, "a rate in bit/s")


@dataclass(frozen=True, eq=False, slots=True)
class Routes:
    """The links of many transfers, in order: transfer i uses link[begin[i] : begin[i + 1]]."""

    begin: Ints
    link: NDArray[np.int32]
    latency_s: Floats

    def __len__(self) -> int:
        return len(self.latency_s)


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """A described cluster. Devices count from node to node, links as `link_names` names them.

    `startup_s` is what any collective takes before its bytes move: launching it on all devices, and
    getting their links going.
    """

    name: str
    nodes: int
    nics: Nics
    devices_per_node: int = 1
    inside: Inside | None = None
    network: Network = OneSwitch()
    other_hosts: tuple[OtherHost, ...] = ()
    startup_s: float = 0.0
    rests_on: str = ""  # where the figures come from

    def __post_init__(self) -> None:
        _check_count("nodes", self.nodes)
        _check_not_negative("startup", self.startup_s)
        _check_count("devices_per_node", self.devices_per_node)
        if self.devices > MOST_DEVICES:
            raise UsageError(f"devices: expected at most {MOST_DEVICES:,}, got {self.devices:,}")
        if self.devices_per_node > 1 and self.inside is None:
            raise UsageError(
                f"inside: expected what joins the {self.devices_per_node} devices of a node"
            )
        self._check_nics()
        self._check_network()
        self._check_other_hosts()

    def _check_nics(self) -> None:
        devices, nics = self.devices_per_node, self.nics_per_node
        if isinstance(self.network, Torus):
            if nics != len(_SIDES) or self.nics.of_device:
                raise UsageError(
                    f"nics.per_node: expected 4 in a torus, one for each side, got {nics}"
                    if nics != len(_SIDES)
                    else "nics.of_device: in a torus every device uses every NIC"
                )
            return
        if nics > devices:
            raise UsageError(
                f"nics.per_node: expected at most one for each of {devices} devices, got {nics}: "
                "describe the NICs of one device as one NIC of their common rate"
            )
        if not self.nics.of_device and devices % nics:
            raise UsageError(
                f"nics.per_node: {devices} devices cannot be shared out evenly among {nics} NICs: "
                "name each device's in nics.of_device"
            )
        given = self.nics.of_device
        if given and (len(given) != devices or not all(0 <= each < nics for each in given)):
            raise UsageError(
                f"nics.of_device: expected a NIC from 0 to {nics - 1} for each of {devices} "
                f"devices, got {_shortened(given)}"
            )

    def _check_network(self) -> None:
        network = self.network
        if isinstance(network, Torus) and network.rows * network.columns != self.nodes:
            raise UsageError(
                f"network: {network.rows} rows x {network.columns} columns are "
                f"{network.rows * network.columns} nodes, expected {self.nodes}"
            )

    def _check_other_hosts(self) -> None:
        seen: set[int] = set()
        for other in self.other_hosts:
            if not 0 <= other.node < self.nodes or other.node in seen:
                raise UsageError(
                    f"hosts.node: expected a node from 0 to {self.nodes - 1}, each once, "
                    f"got {other.node}"
                )
            seen.add(other.node)

    @property
    def devices(self) -> int:
        """How many devices there are in all."""
        return self.nodes * self.devices_per_node

    @property
    def nics_per_node(self) -> int:
        """How many NICs a node has."""
        return self.nics.per_node

    @property
    def is_flat(self) -> bool:
        """Whether it is no more than workers with equal links around one switch."""
        return (
            self.devices_per_node == 1
            and self.inside is None
            and isinstance(self.network, OneSwitch)
            and not self.other_hosts
            and not self.startup_s
            and self.nics.payload_share == 1
        )

    @property
    def leaves(self) -> int:
        """How many leaf switches there are; none without a spine."""
        if not isinstance(self.network, LeafSpine):
            return 0
        groups = -(-self.nodes // self.network.nodes_per_leaf)
        if groups == 1:
            return 0
        return groups * (self.nics_per_node if self.network.by_rail else 1)

    @property
    def pods(self) -> int:
        """How many pods of leaves reach each other through the core; none without one."""
        if not isinstance(self.network, LeafSpine) or self.network.leaves_per_pod is None:
            return 0
        rails = self.nics_per_node if self.network.by_rail else 1
        of_rail = -(-self.leaves // rails // self.network.leaves_per_pod)
        return of_rail * rails if of_rail > 1 else 0

    @property
    def core_rate_bps(self) -> float:
        """The line rate of all uplinks of one pod together."""
        assert isinstance(self.network, LeafSpine)
        assert self.network.leaves_per_pod is not None
        leaves_bps = self.network.leaves_per_pod * self.uplink_rate_bps
        return leaves_bps / self.network.core_oversubscription

    @property
    def uplink_rate_bps(self) -> float:
        """The line rate of all uplinks of one leaf together."""
        assert isinstance(self.network, LeafSpine)
        ports = self.network.nodes_per_leaf * (1 if self.network.by_rail else self.nics_per_node)
        return ports * self.nics.rate_bps / self.network.oversubscription

    @cached_property
    def nic_of_device(self) -> Ints:
        """The NIC that each device of a node uses."""
        if self.nics.of_device:
            return np.array(self.nics.of_device, np.int64)
        device = np.arange(self.devices_per_node)
        return device * self.nics_per_node // self.devices_per_node

    @property
    def link_count(self) -> int:
        """How many links there are."""
        return self._blocks[-1]

    @cached_property
    def link_rate_bps(self) -> Floats:
        """What each link carries of payload, in bit/s."""
        rate_bps = np.empty(self.link_count)
        if self.inside is not None:
            rate_bps[: self._blocks[2]] = self.inside.rate_bps * self.inside.payload_share
        rate_bps[self._blocks[2] : self._blocks[4]] = np.tile(self._nic_rates_bps(), self._nic_ends)
        if self.leaves:
            rate_bps[self._blocks[4] :] = self.uplink_rate_bps * self.nics.payload_share
        if self.pods:
            rate_bps[self._blocks[6] :] = self.core_rate_bps * self.nics.payload_share
        return rate_bps

    def _nic_rates_bps(self) -> Floats:
        of_node = np.full(self.nodes, self.nics.rate_bps)
        for other in self.other_hosts:
            of_node[other.node] = other.nic_rate_bps
        rate_bps = np.repeat(of_node, self.nics_per_node)
        if isinstance(self.network, Torus):
            rate_bps = _cable_rates_bps(of_node, self.network)
        return rate_bps * self.nics.payload_share

    @cached_property
    def link_kind(self) -> NDArray[np.int8]:
        """What each link is, as a place in LINK_KINDS."""
        kinds = np.empty(self.link_count, np.int8)
        kinds[: self._blocks[2]] = IN_NODE
        kinds[self._blocks[2] : self._blocks[4]] = TORUS if self._is_torus else NIC
        kinds[self._blocks[4] :] = SPINE
        kinds[self._blocks[6] :] = CORE
        return kinds

    @property
    def link_names(self) -> LinkNames:
        """The name of each link, such as node3.nic2.up, made when it is asked for."""
        return LinkNames(self)

    def routes(self, source_devices: ArrayLike, target_devices: ArrayLike) -> Routes:
        """Return the links that transfers between these pairs of devices use."""
        source, target = self._checked(source_devices), self._checked(target_devices)
        if source.shape != target.shape:
            raise UsageError(
                f"routes: expected as many targets as sources, got {source.size} and {target.size}"
            )
        return (
            _torus_routes(self, source, target) if self._is_torus else _routes(self, source, target)
        )

    def _checked(self, devices: ArrayLike) -> Ints:
        found = np.atleast_1d(np.asarray(devices, np.int64))
        if found.ndim != 1 or (found.size and not 0 <= found.min() <= found.max() < self.devices):
            raise UsageError(f"routes: expected devices from 0 to {self.devices - 1}")
        return found

    @property
    def _is_torus(self) -> bool:
        return isinstance(self.network, Torus)

    @property
    def _nic_ends(self) -> int:
        """Up and down; of a NIC of a torus one way, for the other is its neighbour's."""
        return 1 if self._is_torus else 2

    @cached_property
    def _blocks(self) -> tuple[int, ...]:
        """Where links begin: up and down of devices, NICs, leaves and pods in turn, and the end."""
        devices = self.devices if self.inside is not None else 0
        nics = self.nodes * self.nics_per_node
        sizes = (
            devices,
            devices,
            nics,
            nics * (self._nic_ends - 1),
            self.leaves,
            self.leaves,
            self.pods,
            self.pods,
        )
        return (0, *np.cumsum(sizes).tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkClass:
    """All links of one kind together."""

    kind: str
    count: int
    slowest_bps: float  # line rates
    fastest_bps: float
    payload_share: float
    latency_s: float  # of the way over them; of uplinks, what that adds


def link_classes(fabric: Fabric) -> Iterator[LinkClass]:
    """Go through the kinds of links that there are."""
    network, inside, nics = fabric.network, fabric.inside, fabric.nics
    for kind, name in enumerate(LINK_KINDS):
        rates_bps = fabric.link_rate_bps[fabric.link_kind == kind]
        if not len(rates_bps):
            continue
        share, latency_s = nics.payload_share, nics.latency_s
        if kind == IN_NODE and inside is not None:
            share, latency_s = inside.payload_share, inside.latency_s
        elif kind in (SPINE, CORE) and isinstance(network, LeafSpine):
            latency_s = network.latency_s
        yield LinkClass(
            kind=name,
            count=len(rates_bps),
            slowest_bps=float(rates_bps.min()) / share,
            fastest_bps=float(rates_bps.max()) / share,
            payload_share=share,
            latency_s=latency_s,
        )


class LinkNames(Sequence[str]):
    """The names of a fabric's links."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric

    def __len__(self) -> int:
        return self._fabric.link_count

    @overload
    def __getitem__(self, link: int) -> str: ...
    @overload
    def __getitem__(self, link: slice) -> Sequence[str]: ...
    def __getitem__(self, link: int | slice) -> str | Sequence[str]:
        if isinstance(link, slice):
            return [self[each] for each in range(*link.indices(len(self)))]
        if not 0 <= link < len(self):
            raise IndexError(f"link: expected 0 to {len(self) - 1}, got {link}")
        fabric, blocks = self._fabric, self._fabric._blocks
        block = int(np.searchsorted(blocks, link, side="right")) - 1
        place = int(link) - blocks[block]
        way = ("up", "down")[block % 2]
        if block < 2:
            node, device = divmod(place, fabric.devices_per_node)
            return f"node{node}.device{device}.{way}"
        if block >= 6:
            return f"{_by_rail_name(fabric, 'pod', place)}.core.{way}"
        if block >= 4:
            return f"{leaf_name(fabric, place)}.spine.{way}"
        node, nic = divmod(place, fabric.nics_per_node)
        return f"node{node}.{_SIDES[nic]}" if fabric._is_torus else f"node{node}.nic{nic}.{way}"


def leaf_name(fabric: Fabric, leaf: int) -> str:
    """Return the name of a leaf: leaf3, or leaf1.rail5."""
    return _by_rail_name(fabric, "leaf", leaf)


def _by_rail_name(fabric: Fabric, kind: str, number: int) -> str:
    assert isinstance(fabric.network, LeafSpine)
    if not fabric.network.by_rail:
        return f"{kind}{number}"
    group, rail = divmod(number, fabric.nics_per_node)
    return f"{kind}{group}.rail{rail}"


def with_nodes(fabric: Fabric, nodes: int) -> Fabric:
    """Return the cluster with its first nodes only, or with more like them."""
    if nodes == fabric.nodes:
        return fabric
    if isinstance(fabric.network, Torus):
        raise UsageError(
            f"nodes: {fabric.name} is a torus of {fabric.network.rows} x {fabric.network.columns}, "
            f"expected {fabric.nodes}, got {nodes}: change rows and columns in its description"
        )
    others = tuple(each for each in fabric.other_hosts if each.node < nodes)
    return replace(fabric, nodes=nodes, other_hosts=others)


def flat(cluster: Cluster) -> Fabric:
    """Describe workers around one switch as a fabric of one device and one NIC a node."""
    return Fabric(
        name="flat",
        nodes=cluster.workers,
        nics=Nics(rate_bps=cluster.rate_bps, latency_s=cluster.latency_s),
        other_hosts=tuple(
            OtherHost(node=worker, nic_rate_bps=rate_bps)
            for worker, rate_bps in dict(cluster.other_rates_bps).items()
        ),
    )


def _routes(fabric: Fabric, source: Ints, target: Ints) -> Routes:
    blocks, inside, nics = fabric._blocks, fabric.inside, fabric.nics_per_node
    from_node, source_place = np.divmod(source, fabric.devices_per_node)
    to_node, target_place = np.divmod(target, fabric.devices_per_node)
    own_nic, in_nic = fabric.nic_of_device[source_place], fabric.nic_of_device[target_place]
    out_nic = in_nic if _is_by_rail(fabric) else own_nic
    leaves = from_node != to_node
    stays = ~leaves & (source != target)
    hands_over = leaves & (out_nic != own_nic)
    crosses, up, down = _through_spine(fabric, from_node, to_node, out_nic, in_nic)
    climbs, pod_up, pod_down = _through_core(fabric, up, down)
    columns = [
        (leaves, blocks[2] + from_node * nics + out_nic),
        (crosses, blocks[4] + up),
        (climbs, blocks[6] + pod_up),
        (climbs, blocks[7] + pod_down),
        (crosses, blocks[5] + down),
        (leaves, blocks[3] + to_node * nics + in_nic),
    ]
    latency_s = np.where(leaves, fabric.nics.latency_s, 0.0)
    if isinstance(fabric.network, LeafSpine):
        latency_s += (crosses + climbs.astype(np.int64)) * fabric.network.latency_s
    if inside is not None:
        over_lanes = leaves & (inside.kind == "pcie")
        at_relay = hands_over & (inside.kind == "switch")
        relay = from_node * fabric.devices_per_node + _first_devices(fabric)[out_nic]
        columns = [
            (stays | over_lanes | at_relay, blocks[0] + source),
            (at_relay, blocks[1] + relay),
            *columns,
            (stays | over_lanes, blocks[1] + target),
        ]
        latency_s += (stays | hands_over) * inside.latency_s
    return _joined(columns, latency_s)


def _is_by_rail(fabric: Fabric) -> bool:
    return isinstance(fabric.network, LeafSpine) and fabric.network.by_rail


def _first_devices(fabric: Fabric) -> Ints:
    """Return, for each NIC of a node, the first device that uses it; 0 where none does."""
    first = np.zeros(fabric.nics_per_node, np.int64)
    used, places = np.unique(fabric.nic_of_device, return_index=True)
    first[used] = places
    return first


def _through_spine(
    fabric: Fabric, from_node: Ints, to_node: Ints, out_nic: Ints, in_nic: Ints
) -> tuple[Mask, Ints, Ints]:
    """Say which transfers leave their leaf, and over which leaves' uplinks."""
    network = fabric.network
    if not fabric.leaves or not isinstance(network, LeafSpine):
        return np.zeros(from_node.shape, bool), np.zeros_like(from_node), np.zeros_like(from_node)
    up, down = from_node // network.nodes_per_leaf, to_node // network.nodes_per_leaf
    if network.by_rail:
        up, down = up * fabric.nics_per_node + out_nic, down * fabric.nics_per_node + in_nic
    return up != down, up, down


def _through_core(fabric: Fabric, up: Ints, down: Ints) -> tuple[Mask, Ints, Ints]:
    """Say which transfers leave their pod, and over which pods' uplinks."""
    network = fabric.network
    if not fabric.pods or not isinstance(network, LeafSpine):
        return np.zeros(up.shape, bool), np.zeros_like(up), np.zeros_like(down)
    assert network.leaves_per_pod is not None
    rails = fabric.nics_per_node if network.by_rail else 1
    pod_up, pod_down = (
        leaf // rails // network.leaves_per_pod * rails + leaf % rails for leaf in (up, down)
    )
    return pod_up != pod_down, pod_up, pod_down


def _joined(columns: Sequence[tuple[Mask, Ints]], latency_s: Floats) -> Routes:
    """Write the links of each transfer one after the other, those that it uses."""
    used = np.stack([mask for mask, _ in columns], axis=1)
    links = np.stack([link.astype(np.int32) for _, link in columns], axis=1)
    begin = np.zeros(len(latency_s) + 1, np.int64)
    np.cumsum(used.sum(axis=1), out=begin[1:])
    return Routes(begin=begin, link=links[used], latency_s=latency_s)


def _cable_rates_bps(of_node: Floats, torus: Torus) -> Floats:
    """Return the rate towards each side of each node: a cable is as fast as its slower end."""
    here = of_node.reshape(torus.rows, torus.columns)
    ends = [np.roll(here, shift, axis) for shift, axis in ((-1, 1), (1, 1), (-1, 0), (1, 0))]
    return np.stack([np.minimum(here, there) for there in ends], axis=-1).reshape(-1)


def _torus_routes(fabric: Fabric, source: Ints, target: Ints) -> Routes:
    network, inside, blocks = fabric.network, fabric.inside, fabric._blocks
    assert isinstance(network, Torus)
    from_node, to_node = source // fabric.devices_per_node, target // fabric.devices_per_node
    from_row, from_column = np.divmod(from_node, network.columns)
    to_row, to_column = np.divmod(to_node, network.columns)
    east, steps_x = _shorter_way(to_column - from_column, network.columns)
    south, steps_y = _shorter_way(to_row - from_row, network.rows)
    leaves = from_node != to_node
    stays = ~leaves & (source != target)
    lanes = np.zeros(len(source), np.int64)
    if inside is not None:
        lanes += stays | (leaves & (inside.kind == "pcie"))
    counts = np.stack([lanes, steps_x, steps_y, lanes], axis=1)
    begin = np.zeros(len(source) + 1, np.int64)
    np.cumsum(counts.sum(axis=1), out=begin[1:])
    part_begin = (begin[:-1, None] + np.cumsum(counts, axis=1) - counts).T
    link = np.empty(begin[-1], np.int32)

    def along(part: int, first: Ints, step: Ints, around: int) -> tuple[Ints, Ints, Ints]:
        """Return where a part's links stand, of which transfer, and at which place of the ring."""
        which = np.repeat(np.arange(len(source)), counts[:, part])
        hop = np.arange(len(which)) - np.repeat(
            np.cumsum(counts[:, part]) - counts[:, part], counts[:, part]
        )
        return part_begin[part][which] + hop, which, (first[which] + hop * step[which]) % around

    where, which, column = along(1, from_column, np.where(east, 1, -1), network.columns)
    node = from_row[which] * network.columns + column
    link[where] = blocks[2] + 4 * node + np.where(east[which], 0, 1)
    where, which, row = along(2, from_row, np.where(south, 1, -1), network.rows)
    node = row * network.columns + to_column[which]
    link[where] = blocks[2] + 4 * node + np.where(south[which], 2, 3)
    uses = lanes > 0
    link[part_begin[0][uses]] = blocks[0] + source[uses]
    link[part_begin[3][uses]] = blocks[1] + target[uses]
    latency_s = np.multiply(steps_x + steps_y, fabric.nics.latency_s, dtype=np.float64)
    if inside is not None:
        latency_s += stays * inside.latency_s
    return Routes(begin=begin, link=link, latency_s=latency_s)


def _shorter_way(difference: Ints, around: int) -> tuple[Mask, Ints]:
    """Return whether to go forwards around a ring, as where both ways are equal, and how far."""
    forwards = difference % around
    is_forwards = 2 * forwards <= around
    return is_forwards, np.where(is_forwards, forwards, around - forwards)


def _check_link(where: str, rate_bps: float, latency_s: float, payload_share: float) -> None:
    _check_above_zero(f"{where}.rate", rate_bps, "a rate in bit/s")
    _check_latency(where, latency_s)
    if not 0 < payload_share <= 1:
        raise UsageError(f"{where}.payload_share: expected above 0, up to 1, got {payload_share}")


def _check_latency(where: str, latency_s: float) -> None:
    _check_not_negative(f"{where}.latency", latency_s)


def _check_not_negative(what: str, time_s: float) -> None:
    if not (time_s >= 0 and math.isfinite(time_s)):
        raise UsageError(f"{what}: expected 0 s or more, got {time_s}")


def _check_above_zero(what: str, value: float, expected: str) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise UsageError(f"{what}: expected {expected} above 0, got {value}")


def _check_count(what: str, value: int) -> None:
    if value < 1:
        raise UsageError(f"{what}: expected at least 1, got {value}")


def _shortened(values: Sequence[int]) -> str:
    shown = ", ".join(map(str, values[:8]))
    return f"{shown}, ... ({len(values)} values)" if len(values) > 8 else shown
