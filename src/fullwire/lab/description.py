"""The description of a lab: hosts, lines and settings, checked before anything is made."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from fullwire.clusters.cluster import Cluster, LeafSpine, Torus, one_switch
from fullwire.errors import UsageError
from fullwire.units import bits_per_second, seconds, show_rate

MOST_HOSTS = MOST_RANKS = 128
LEAST_RATE_BPS = 1e6  # below, one packet takes longer than a measurement may
MOST_RATE_BPS = 8 * (2**32 - 1)  # tbf counts bytes per second in 32 bits
LEAST_ADDED_S = 50e-6  # a small message between two hosts takes as long without added latency
LEAST_MTU, MOST_MTU = 576, 9000

_ETHERNET_HEADER_BYTES = 14
_TCP_IP_HEADER_BYTES = 52  # IPv4 20, TCP 20, the time stamp option 12


@dataclass(frozen=True, slots=True, kw_only=True)
class LabDescription:
    """A cluster to be made of namespaces, one host for each worker.

    `cpus` holds, for each host, the processors that its job may use; empty means all of them.
    The cluster's latency is added on the way out of each host, and `loss` drops that share of the
    frames there. With a dilation of 10, links are 10 times slower than the cluster's and times are
    10 times longer, for a job that also computes 10 times slower. A host is a node: it has one rank
    for each device and may have several NICs. Hosts may be on leaves below a spine. `is_described`
    is true for a cluster from a cluster description, false for workers, a rate and a latency.
    On the folder `disk` the lab has a disk of its own, which chaos can fill.
    """

    cluster: Cluster
    is_described: bool = False
    mtu: int = 1500
    congestion: str | None = None
    cpus: tuple[frozenset[int], ...] = ()
    loss: float = 0.0
    dilation: float = 1.0
    disk: str = ""

    def __post_init__(self) -> None:
        if self.cluster.nodes > MOST_HOSTS:
            raise UsageError(
                f"workers: expected at most {MOST_HOSTS} hosts in one machine, "
                f"got {self.cluster.nodes}"
            )
        if self.ranks > MOST_RANKS:
            raise UsageError(
                f"devices: expected at most {MOST_RANKS} ranks in one machine, got "
                f"{self.cluster.nodes} hosts of {self.ranks_per_host}"
            )
        for host in range(self.cluster.nodes):
            check_rate(self.cluster.node_rate_bps(host), self.dilation)
        if self.leaves:
            check_rate(self.cluster.uplink_rate_bps, self.dilation)
        if not LEAST_MTU <= self.mtu <= MOST_MTU:
            raise UsageError(f"mtu: expected {LEAST_MTU} to {MOST_MTU} bytes, got {self.mtu}")
        if not (0 <= self.loss < 1 and math.isfinite(self.loss)):
            raise UsageError(f"loss: expected a share from 0 to below 1, got {self.loss}")

    @property
    def rates_bps(self) -> Sequence[float]:
        """The line rate of each host, with dilation."""
        hosts = range(self.cluster.nodes)
        return [self.cluster.node_rate_bps(host) / self.dilation for host in hosts]

    @property
    def latency_s(self) -> float:
        """The latency added on the way out of each host, with dilation."""
        return self._added_s(self.cluster.nics.latency_s)

    @property
    def left_out_s(self) -> float:
        """The described latency that is too short to be added."""
        return 0.0 if self.latency_s else self.cluster.nics.latency_s

    def _added_s(self, latency_s: float) -> float:
        """Return the latency to add: 0 where a message in any lab takes that long anyway."""
        dilated_s = latency_s * self.dilation
        return dilated_s if not self.is_described or dilated_s >= LEAST_ADDED_S else 0.0

    @property
    def ranks_per_host(self) -> int:
        """The number of ranks on each host, one for each device."""
        return self.cluster.devices_per_node

    @property
    def ranks(self) -> int:
        """The number of ranks; they are numbered from host to host."""
        return self.cluster.nodes * self.ranks_per_host

    def host_of(self, rank: int) -> int:
        """Return the host that a rank is on."""
        return rank // self.ranks_per_host

    @property
    def nics_per_host(self) -> int:
        """The number of NICs of each host."""
        return self.cluster.nics_per_node

    def nic_of(self, rank: int) -> int:
        """Return the number of the NIC that is nearest to a rank's device."""
        return int(self.cluster.nic_of_device[self.place_of(rank)])

    def place_of(self, rank: int) -> int:
        """Return the local rank: the place of a rank on its host."""
        return rank % self.ranks_per_host

    @property
    def leaves(self) -> int:
        """The number of leaves below a spine; 0 where all hosts are on one switch."""
        return self.cluster.leaves

    def leaf_of(self, host: int, nic: int) -> int:
        """Return the leaf that a NIC of a host is on."""
        assert isinstance(self.cluster.network, LeafSpine)
        group = host // self.cluster.network.nodes_per_leaf
        return group * self.nics_per_host + nic if self.cluster.network.by_rail else group

    @property
    def uplink_rate_bps(self) -> float:
        """The line rate of a leaf's uplinks together, with dilation."""
        return self.cluster.uplink_rate_bps / self.dilation

    @property
    def spine_latency_s(self) -> float:
        """The latency added on the way up to the spine, with dilation."""
        if not isinstance(self.cluster.network, LeafSpine):
            return 0.0
        return self._added_s(self.cluster.network.latency_s)

    @property
    def payload_share(self) -> float:
        """The share of the line rate that TCP leaves for payload."""
        return (self.mtu - _TCP_IP_HEADER_BYTES) / (self.mtu + _ETHERNET_HEADER_BYTES)

    def check_host(self, host: int, what: str) -> None:
        """Refuse a host that this lab does not have."""
        if not 0 <= host < self.cluster.nodes:
            raise UsageError(
                f"{what}: expected a host from 0 to {self.cluster.nodes - 1}, got {host}"
            )


def describe(
    *,
    workers: int | None = None,
    rate: Sequence[str] = (),
    cluster: Cluster | None = None,
    latency: str = "0s",
    mtu: int = 1500,
    congestion: str | None = None,
    cpus: Sequence[str] = (),
    loss: str = "0%",
    dilation: float = 1.0,
) -> LabDescription:
    """Read the options of a user: "1Gbps" is for every host, "2:300Mbps" for host 2 alone.

    Hosts, rates and latency come from a described cluster, if there is one.
    """
    hosts = _one_switch(workers, rate, latency) if cluster is None else _as_made(cluster)
    if cluster is not None and (workers is not None or rate or seconds(latency, "latency")):
        raise UsageError(
            "a described cluster has its own hosts, rates and latency: "
            "expected it, or workers, rate and latency"
        )
    common_cpus, own_cpus = _for_all_and_one(cpus, "cpus")
    if len(common_cpus) > 1:
        raise UsageError(f"cpus: expected one list for all hosts, got {len(common_cpus)}")
    description = LabDescription(
        cluster=hosts,
        is_described=cluster is not None,
        mtu=mtu,
        congestion=congestion,
        loss=_share(loss),
        dilation=dilation,
        cpus=_affinity(hosts.nodes, common_cpus, own_cpus),
    )
    for host in own_cpus:
        description.check_host(host, "cpus")
    return description


def _one_switch(workers: int | None, rate: Sequence[str], latency: str) -> Cluster:
    common_rates, own_rates = _for_all_and_one(rate, "rate")
    if workers is None or not rate:
        raise UsageError(
            "a lab needs hosts: expected workers and their rate, or a cluster: "
            "--workers 2 --rate 1Gbps, or --cluster dgx-h100"
        )
    if len(common_rates) != 1:
        raise UsageError(
            f"rate: expected one line rate for all hosts, like 1Gbps, got {len(common_rates)}"
        )
    return one_switch(
        workers=workers,
        rate_bps=bits_per_second(common_rates[0]),
        latency_s=seconds(latency, "latency"),
        other_rates_bps={host: bits_per_second(text) for host, text in own_rates.items()},
    )


def _as_made(cluster: Cluster) -> Cluster:
    """Return a described cluster; refuse one that a lab cannot make, with the reason."""
    if isinstance(cluster.network, Torus):
        raise UsageError(
            f"{cluster.name}: expected a switch or a fat tree, got a torus, which a lab cannot make"
        )
    if cluster.pods:
        raise UsageError(
            f"{cluster.name}: expected leaves below one spine, got pods. A lab cannot make their "
            "core. Leave out leaves_per_pod, or ask for fewer nodes"
        )
    return cluster


def _for_all_and_one(texts: Sequence[str], what: str) -> tuple[list[str], dict[int, str]]:
    """Separate values for every host from values that begin with a host and a colon."""
    common: list[str] = []
    own: dict[int, str] = {}
    for text in texts:
        host, colon, value = text.partition(":")
        if not colon:
            common.append(text)
        else:
            own[host_number(host, what)] = value
    return common, own


def interface_of(nic: int) -> str:
    """Return the name of a NIC inside its host."""
    return f"eth{nic}"


def host_number(text: str, what: str) -> int:
    """Read the number of a host."""
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise UsageError(f"{what}: expected the number of a host, counted from 0, got {text!r}")
    return int(text)


def _affinity(
    workers: int, common: Sequence[str], own: dict[int, str]
) -> tuple[frozenset[int], ...]:
    if not common and not own:
        return ()
    everywhere = _processors(common[0]) if common else frozenset(os.sched_getaffinity(0))
    apart = {host: _processors(text) for host, text in own.items()}
    return tuple(apart.get(host, everywhere) for host in range(workers))


def _processors(text: str) -> frozenset[int]:
    """Read a list of processors as the kernel writes it: 0,2-3."""
    offered = os.sched_getaffinity(0)
    wanted: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or not (last.isdecimal() or not dash) or len(part) > 12:
            raise UsageError(f"cpus: expected a list of processors like 0,2-3, got {text!r}")
        wanted |= set(range(int(first), int(last if dash else first) + 1))
    if not wanted or not wanted <= offered:
        usable = ",".join(map(str, sorted(offered)))
        raise UsageError(f"cpus: expected some of {usable}, which we may use here, got {text!r}")
    return frozenset(wanted)


def _share(text: str) -> float:
    """Read a percentage as a share: 0.1% is 0.001."""
    number = text.strip()
    try:
        if number.endswith("%"):
            return float(number[:-1]) / 100
    except ValueError:
        pass
    raise UsageError(f"loss: expected a percentage like 0.1%, got {text!r}")


def check_rate(rate_bps: float, dilation: float) -> None:
    """Refuse a line rate too high for the kernel's token bucket, or too low to be measured."""
    made_bps = rate_bps / dilation
    if not LEAST_RATE_BPS <= made_bps <= MOST_RATE_BPS:
        dilated = f", {show_rate(made_bps)} when dilated" if dilation > 1 else ""
        raise UsageError(
            f"rate: expected {show_rate(LEAST_RATE_BPS)} to {show_rate(MOST_RATE_BPS)}, the range "
            f"of the kernel's token bucket, got {show_rate(rate_bps)}{dilated}"
        )
