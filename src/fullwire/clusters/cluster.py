"""A cluster as people buy it: devices in nodes, NICs, switches, and the links between them.

Workers around one switch are the simplest case (`one_switch`). `collectives/placed.py` finds the
links that a transfer uses. A link may be the bottleneck. A switch never is.

    device -- in-node links -- NIC -- leaf -- spine -- leaf -- NIC -- in-node links -- device

Every link is one direction of a cable, with a number, a name and a capacity. The inside of a switch
is never a bottleneck. The uplinks of a leaf count together as one link, as if packets were spread
over them evenly. A device reaches every NIC of its node, and uses the nearest one:

    switch    all NICs are on one switch
    fat-tree  the NICs of some nodes are on one leaf, and leaves reach each other through the
              spine. Where some leaves are a pod with a spine of its own, pods reach each other
              through the core
    rails     NIC 0 of some nodes is on one leaf, NIC 1 on another, and so on. A transfer leaves
              through the NIC of the rail that its target is on. If the source is on another rail,
              the transfer first crosses in-node links (NCCL calls this PXN), so that no traffic
              goes from rail to rail
    torus     four NICs a node, cabled to the neighbours east, west, south and north; a transfer
              goes along the row first, then along the column, the shorter way round

A switch between the devices of a node (NVSwitch) carries only transfers within the node. Where PCIe
joins the devices, a transfer that leaves the node also uses the device's PCIe lane.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from fullwire.clusters.measured import Measured
from fullwire.display import Result
from fullwire.errors import UsageError
from fullwire.units import show_count, show_rate

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]
InsideKind: TypeAlias = Literal["switch", "pcie"]

MOST_DEVICES = 1_000_000
LINK_KINDS = ("in-node links", "NICs", "spine uplinks", "torus links", "core uplinks")
IN_NODE, NIC, SPINE, TORUS, CORE = range(len(LINK_KINDS))
_SIDES = ("east", "west", "south", "north")
_ADDS_FROM_BPS = 8 * 400e9
_FASTEST_INSIDE_BPS = 8 * 900e9  # of a device each way: B200, B300, GB200 and GB300


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """The links between the devices of a node: each device has one of this rate, up and down.

    The switch may add up values while they pass (`adds`; NVLink SHARP). Where a description does
    not say so, switches of at least 400 GB/s a device each way are taken to: those of H100 and
    later do, and those of A100 (300 GB/s) do not. With `rate_is_least`, the links may be faster:
    the rate is of a fit without a table of one node.
    """

    kind: InsideKind
    rate_bps: float
    latency_s: float = 0.0
    payload_share: float = 1.0
    adds: bool | None = None
    rate_is_least: bool = False

    def __post_init__(self) -> None:
        _check_link("inside", self.rate_bps, self.latency_s, self.payload_share)
        if self.adds and self.kind != "switch":
            raise UsageError(f'inside.adds: expected kind = "switch", got "{self.kind}"')

    @property
    def can_add(self) -> bool:
        """Say whether the switch adds up values, as stated or as usual at this rate."""
        usually = self.kind == "switch" and self.rate_bps >= _ADDS_FROM_BPS
        return usually if self.adds is None else self.adds


@dataclass(frozen=True, slots=True, kw_only=True)
class Nics:
    """The NICs of a node; `of_device` names the one that each device uses, even shares if empty.

    `latency_s` is one way, to another node without the spine; in a torus, to the next node. With
    `lengthens_hops` it is a transport's, which each of a hop's messages pays. With `of_tables` the
    rate is of full nodes in tables, which do not tell how many NICs they have."""

    rate_bps: float
    per_node: int = 1
    latency_s: float = 0.0
    payload_share: float = 1.0
    of_device: tuple[int, ...] = ()
    of_tables: bool = False
    lengthens_hops: bool = False

    def __post_init__(self) -> None:
        _check_link("nics", self.rate_bps, self.latency_s, self.payload_share)
        _check_count("nics.per_node", self.per_node)


@dataclass(frozen=True, slots=True)
class OneSwitch:
    """All NICs on one switch."""

    kind = "switch"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafSpine:
    """Leaves below a spine; the way through the spine adds `latency_s`.

    The uplinks of a leaf have the rate of its ports, divided by the oversubscription. With
    `leaves_per_pod`, so many leaves are a pod, and each pod has a spine. The spine's uplinks to the
    core have the rate of its leaves' uplinks, divided by the core's oversubscription. The way
    through the core adds the latency once more. Switches that are known to add up values while
    they pass have `adds`.
    """

    nodes_per_leaf: int
    oversubscription: float = 1.0
    by_rail: bool = False
    latency_s: float = 0.0
    leaves_per_pod: int | None = None
    core_oversubscription: float = 1.0
    adds: bool = False

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
        """Return the usual name of such a network."""
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


@dataclass(frozen=True, repr=False, kw_only=True)
class Cluster(Result):
    """A described cluster. Devices count from node to node, links as `link_names` names them.

    `startup_s` is the time that any collective takes before its bytes move: it is launched on all
    devices, and their links get going.
    """

    name: str
    nodes: int
    nics: Nics
    devices_per_node: int = 1
    inside: Inside | None = None
    network: Network = OneSwitch()
    other_hosts: tuple[OtherHost, ...] = ()
    startup_s: float = 0.0
    device: str = ""  # the name of the devices, where the cluster's own name does not tell it
    rests_on: str = ""  # the source of the figures
    measured: Measured | None = None  # by `fullwire cluster fit`

    def __post_init__(self) -> None:
        _check_count("nodes", self.nodes)
        _check_not_negative("startup", self.startup_s)
        _check_count("devices_per_node", self.devices_per_node)
        if self.devices > MOST_DEVICES and not self.is_flat:
            raise UsageError(f"devices: expected at most {MOST_DEVICES:,}, got {self.devices:,}")
        if self.devices_per_node > 1 and self.inside is None:
            raise UsageError(
                f"inside: expected the links between the {self.devices_per_node} devices of a node"
            )
        self._check_nics()
        network = self.network
        if isinstance(network, Torus) and network.rows * network.columns != self.nodes:
            raise UsageError(
                f"network: {network.rows} rows x {network.columns} columns are "
                f"{network.rows * network.columns} nodes, expected {self.nodes}"
            )
        seen: set[int] = set()
        for other in self.other_hosts:
            if not 0 <= other.node < self.nodes or other.node in seen:
                raise UsageError(
                    f"hosts.node: expected a node from 0 to {self.nodes - 1}, each once, "
                    f"got {other.node}"
                )
            seen.add(other.node)

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
        if given and (len(given) != devices or not all(0 <= nic < nics for nic in given)):
            shortened = ", ".join(map(str, given[:8]))
            if len(given) > 8:
                shortened += f", ... ({len(given)} values)"
            raise UsageError(
                f"nics.of_device: expected a NIC from 0 to {nics - 1} for each of {devices} "
                f"devices, got {shortened}"
            )

    def _in_short(self) -> Iterator[str]:
        yield (
            f"{self.name}; {show_count(self.nodes, 'node')} of "
            f"{show_count(self.devices_per_node, 'device')}, "
            f"{self.nics_per_node} x {show_rate(self.nics.rate_bps)} a node"
        )

    @property
    def devices(self) -> int:
        """Return the number of devices of all nodes."""
        return self.nodes * self.devices_per_node

    def node_rate_bps(self, node: int) -> float:
        """Return the line rate of each NIC of a node."""
        own_bps = {other.node: other.nic_rate_bps for other in self.other_hosts}
        return own_bps.get(node, self.nics.rate_bps)

    @property
    def slowest_nic_bps(self) -> float:
        """Return the line rate of the slowest NIC of all nodes."""
        return min([self.nics.rate_bps, *(host.nic_rate_bps for host in self.other_hosts)])

    @property
    def nics_per_node(self) -> int:
        """Return the number of NICs of a node."""
        return self.nics.per_node

    @property
    def is_flat(self) -> bool:
        """Whether it has only workers with equal links around one switch."""
        return (
            self.devices_per_node == 1
            and self.inside is None
            and isinstance(self.network, OneSwitch)
            and not self.other_hosts
            and not self.startup_s
            and self.measured is None
            and self.nics.payload_share == 1
        )

    @property
    def leaves(self) -> int:
        """Return the number of leaf switches, 0 where there is no spine."""
        if not isinstance(self.network, LeafSpine):
            return 0
        groups = -(-self.nodes // self.network.nodes_per_leaf)
        if groups == 1:
            return 0
        return groups * (self.nics_per_node if self.network.by_rail else 1)

    @property
    def pods(self) -> int:
        """Return the number of pods that reach each other through the core, 0 without a core."""
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

    @property
    def uplinks(self) -> tuple[tuple[int, float], ...]:
        """The nodes below the uplinks of a leaf, and of a pod, with the uplinks' line rate."""
        network = self.network
        if not isinstance(network, LeafSpine):
            return ()
        of_leaf = network.nodes_per_leaf, self.uplink_rate_bps
        if network.leaves_per_pod is None:
            return (of_leaf,)
        return of_leaf, (network.nodes_per_leaf * network.leaves_per_pod, self.core_rate_bps)

    @cached_property
    def nic_of_device(self) -> Ints:
        """The NIC that each device of a node uses."""
        if self.nics.of_device:
            return np.array(self.nics.of_device, np.int64)
        device = np.arange(self.devices_per_node)
        return device * self.nics_per_node // self.devices_per_node

    @property
    def link_count(self) -> int:
        """Return the number of links."""
        return self.link_blocks[-1]

    @cached_property
    def link_rate_bps(self) -> Floats:
        """The payload rate of each link, in bit/s."""
        rate_bps = np.empty(self.link_count)
        if self.inside is not None:
            rate_bps[: self.link_blocks[2]] = self.inside.rate_bps * self.inside.payload_share
        of_node = np.full(self.nodes, self.nics.rate_bps)
        for other in self.other_hosts:
            of_node[other.node] = other.nic_rate_bps
        nics_bps = np.repeat(of_node, self.nics_per_node)
        if isinstance(self.network, Torus):
            # Towards each side of each node: a cable is as fast as its slower end.
            here = of_node.reshape(self.network.rows, self.network.columns)
            ends = [
                np.roll(here, shift, axis) for shift, axis in ((-1, 1), (1, 1), (-1, 0), (1, 0))
            ]
            cables_bps = [np.minimum(here, there) for there in ends]
            nics_bps = np.stack(cables_bps, axis=-1).reshape(-1)
        rate_bps[self.link_blocks[2] : self.link_blocks[4]] = np.tile(
            nics_bps * self.nics.payload_share, self._nic_ends
        )
        if self.leaves:
            rate_bps[self.link_blocks[4] :] = self.uplink_rate_bps * self.nics.payload_share
        if self.pods:
            rate_bps[self.link_blocks[6] :] = self.core_rate_bps * self.nics.payload_share
        return rate_bps

    @cached_property
    def link_kind(self) -> NDArray[np.int8]:
        """The kind of each link, as a place in LINK_KINDS."""
        kinds = np.empty(self.link_count, np.int8)
        kinds[: self.link_blocks[2]] = IN_NODE
        kinds[self.link_blocks[2] : self.link_blocks[4]] = TORUS if self.is_torus else NIC
        kinds[self.link_blocks[4] :] = SPINE
        kinds[self.link_blocks[6] :] = CORE
        return kinds

    @property
    def link_names(self) -> LinkNames:
        """The name of each link, such as node3.nic2.up, made on demand."""
        return LinkNames(self)

    @property
    def is_torus(self) -> bool:
        """Whether its nodes are cabled in rows and columns whose ends are joined."""
        return isinstance(self.network, Torus)

    @property
    def _nic_ends(self) -> int:
        """Return 2, for up and down; 1 in a torus, where the neighbour's NIC has the other way."""
        return 1 if self.is_torus else 2

    @cached_property
    def link_blocks(self) -> tuple[int, ...]:
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
    latency_s: float  # of the way over them; uplinks add this to the way


def link_classes(cluster: Cluster) -> Iterator[LinkClass]:
    """Go through the kinds of links that a cluster has."""
    network, inside, nics = cluster.network, cluster.inside, cluster.nics
    for kind, name in enumerate(LINK_KINDS):
        rates_bps = cluster.link_rate_bps[cluster.link_kind == kind]
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
    """The names of a cluster's links."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def __len__(self) -> int:
        return self._cluster.link_count

    @overload
    def __getitem__(self, link: int) -> str: ...
    @overload
    def __getitem__(self, link: slice) -> Sequence[str]: ...
    def __getitem__(self, link: int | slice) -> str | Sequence[str]:
        if isinstance(link, slice):
            return [self[place] for place in range(*link.indices(len(self)))]
        if not 0 <= link < len(self):
            raise IndexError(f"link: expected 0 to {len(self) - 1}, got {link}")
        cluster, blocks = self._cluster, self._cluster.link_blocks
        block = int(np.searchsorted(blocks, link, side="right")) - 1
        place = int(link) - blocks[block]
        way = ("up", "down")[block % 2]
        if block < 2:
            node, device = divmod(place, cluster.devices_per_node)
            return f"node{node}.device{device}.{way}"
        if block >= 6:
            return f"{_by_rail_name(cluster, 'pod', place)}.core.{way}"
        if block >= 4:
            return f"{leaf_name(cluster, place)}.spine.{way}"
        node, nic = divmod(place, cluster.nics_per_node)
        return f"node{node}.{_SIDES[nic]}" if cluster.is_torus else f"node{node}.nic{nic}.{way}"


def leaf_name(cluster: Cluster, leaf: int) -> str:
    """Return the name of a leaf: leaf3, or leaf1.rail5."""
    return _by_rail_name(cluster, "leaf", leaf)


def _by_rail_name(cluster: Cluster, kind: str, number: int) -> str:
    assert isinstance(cluster.network, LeafSpine)
    if not cluster.network.by_rail:
        return f"{kind}{number}"
    group, rail = divmod(number, cluster.nics_per_node)
    return f"{kind}{group}.rail{rail}"


def with_nodes(cluster: Cluster, nodes: int) -> Cluster:
    """Return the cluster with its first nodes only, or with more like them."""
    if nodes == cluster.nodes:
        return cluster
    if isinstance(cluster.network, Torus):
        raise UsageError(
            f"nodes: {cluster.name} is a torus of {cluster.network.rows} x "
            f"{cluster.network.columns}, expected {cluster.nodes}, "
            f"got {nodes}: change rows and columns in its description"
        )
    others = tuple(host for host in cluster.other_hosts if host.node < nodes)
    return replace(cluster, nodes=nodes, other_hosts=others)


def with_workers(cluster: Cluster, workers: int) -> Cluster:
    """Return the cluster with as many nodes as these workers need, each worker on a device."""
    if isinstance(cluster.network, Torus):
        if workers > cluster.devices:
            raise UsageError(
                f"workers: expected at most {cluster.devices} on the torus {cluster.name}, "
                f"got {workers}"
            )
        return cluster
    return with_nodes(cluster, -(-workers // cluster.devices_per_node))


def scattered(cluster: Cluster) -> Ints:
    """Return the device of each rank, with consecutive nodes on different leaves and pods."""
    node = np.arange(cluster.nodes)
    if isinstance(cluster.network, LeafSpine):
        leaf, place = np.divmod(node, cluster.network.nodes_per_leaf)
        pod, leaf = np.divmod(leaf, cluster.network.leaves_per_pod or cluster.nodes)
        node = np.lexsort((pod, leaf, place))
    within = np.arange(cluster.devices_per_node)
    return (node[:, None] * cluster.devices_per_node + within).reshape(-1)


def one_switch(
    *,
    workers: int,
    rate_bps: float,
    latency_s: float = 0.0,
    other_rates_bps: Mapping[int, float] | None = None,
) -> Cluster:
    """Return the simplest cluster: workers around one switch, each behind a link of this rate.

    `other_rates_bps` holds the workers whose line rate differs; `latency_s` is one way.
    """
    others = other_rates_bps or {}
    if workers < 1:
        raise UsageError(f"workers: expected at least 1, got {workers}")
    for each_bps in (rate_bps, *others.values()):
        if not (each_bps > 0 and math.isfinite(each_bps)):
            raise UsageError(f"line rate: expected more than 0 bit/s, got {each_bps}")
    for worker in others:
        if not 0 <= worker < workers:
            raise UsageError(f"line rate: expected a worker from 0 to {workers - 1}, got {worker}")
    _check_not_negative("latency", latency_s)
    return Cluster(
        name="flat",
        nodes=workers,
        nics=Nics(rate_bps=rate_bps, latency_s=latency_s),
        other_hosts=tuple(
            OtherHost(node=worker, nic_rate_bps=own_bps) for worker, own_bps in others.items()
        ),
    )


def with_fastest_inside(cluster: Cluster, share: float = 1.0) -> Cluster:
    """Return a cluster with links in a node as fast as any, if they may be; or a `share` as far."""
    inside = cluster.inside
    if inside is None or not inside.rate_is_least or inside.rate_bps >= _FASTEST_INSIDE_BPS:
        return cluster
    rate_bps = inside.rate_bps ** (1 - share) * _FASTEST_INSIDE_BPS**share
    return replace(cluster, inside=replace(inside, rate_bps=rate_bps))


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
