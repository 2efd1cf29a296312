"""How far links may differ from the tables of a fit, and clusters as far off as that."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypeAlias

from fullwire.clusters.cluster import Cluster, Nics, with_fastest_inside
from fullwire.clusters.measured import Measured, Shown
from fullwire.collectives.usual import usual

OpenOfNics: TypeAlias = Literal["rate", "count", "faster"]
FASTEST_NIC_BPS, SLOWEST_NIC_BPS = 800e9, 10e9  # of unknown ones: one a device, or one a node


def of_this_side(
    measured: Measured, cluster: Cluster, workers: int, machine: Cluster | None = None
) -> list[Shown]:
    """Return the tables within a node, or of several nodes, as so many workers are."""
    is_inside, devices = workers <= cluster.devices_per_node, (machine or cluster).devices_per_node
    return [table for table in measured.shown if (table.workers <= devices) == is_inside]


def nics_left_open(cluster: Cluster, workers: int) -> tuple[OpenOfNics | None, tuple[Cluster, ...]]:
    """Return what no table tells of the NICs, with clusters that are as far off as may be.

    Tables of one node tell nothing of them. Tables of full nodes leave open how many a partly
    filled node uses: those of its devices, or as many as a full one. A table of such a node tells.
    """
    nics, devices = cluster.nics, cluster.devices_per_node
    if not nics.of_tables or workers <= devices:
        return None, ()
    all_bps, measured = nics.per_node * nics.rate_bps, cluster.measured
    if measured is None or all(table.workers <= devices for table in measured.shown):
        fast = replace(nics, rate_bps=max(nics.rate_bps, FASTEST_NIC_BPS))
        slow = replace(nics, per_node=1, rate_bps=min(all_bps, SLOWEST_NIC_BPS), of_device=())
        return "rate", (replace(cluster, nics=fast), replace(cluster, nics=slow))
    part, many = workers % devices, [each.workers for each in measured.shown]
    if part == 0 or any(each > devices and each % devices == part for each in many):
        return None, ()
    shared = replace(nics, per_node=1, rate_bps=all_bps, of_device=())
    return "count", (replace(cluster, nics=shared),)


def shows_nics_by_rings(measured: Measured, cluster: Cluster, workers: int) -> bool:
    """Say whether tables over several nodes, without an all-to-all, are all that tells the NICs.

    Links within the nodes may hold up rings. In an all-to-all each device uses its own NIC.
    """
    if not cluster.nics.of_tables or cluster.inside is None or workers <= cluster.devices_per_node:
        return False
    ops = {table.op for table in of_this_side(measured, cluster, workers)}
    return bool(ops) and "alltoall" not in ops


def with_fastest_nics(cluster: Cluster) -> Cluster:
    """Return a cluster with NICs as fast as any, and with such links in a node if these may be."""
    nics = replace(cluster.nics, rate_bps=max(cluster.nics.rate_bps, FASTEST_NIC_BPS))
    return replace(with_fastest_inside(cluster), nics=nics)


def nics_at(cluster: Cluster, rate_bps: float) -> Nics:
    """Return the NICs at a rate that is stated: tables of several nodes leave their number open."""
    shown = () if cluster.measured is None else cluster.measured.shown
    is_open = any(table.workers > cluster.devices_per_node for table in shown)
    nics = cluster.nics
    return replace(nics, rate_bps=rate_bps, of_tables=nics.of_tables and is_open)


def rests_on_least_rate(op: str, cluster: Cluster, workers: int) -> bool:
    """Say whether a time rests on a rate within a node that is only known to be reached.

    A table of the operation among as many nodes holds this rate's part of its times.
    """
    if cluster.inside is None or not cluster.inside.rate_is_least or workers == 1:
        return False
    measured = usual(cluster) if cluster.measured is None else cluster.measured
    return not any(table.op == op for table in of_this_side(measured, cluster, workers))
