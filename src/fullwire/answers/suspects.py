"""Which links of a described cluster hold a job back? Each kind is predicted wider.

A kind of link is to blame if the step gets shorter when only this kind is faster:

- slow hosts get NICs like those of the others;
- the spine loses its oversubscription;
- NICs, or in-node links, get twice the rate;
- all links lose their latency.

If no kind helps alone, as on a spine that is as wide as its NICs, NICs and spine get faster
together. The answer depends on the hosts of the ranks, so it is also given for ranks that are
scattered over the leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fullwire.clusters.cluster import (
    CORE,
    IN_NODE,
    LINK_KINDS,
    NIC,
    SPINE,
    TORUS,
    Cluster,
    LeafSpine,
    Torus,
    with_workers,
)
from fullwire.collectives.registry import known, usual_algorithm
from fullwire.collectives.tuning import AUTO, LIBRARY
from fullwire.findings.suspicion import WORTH_BLAMING, Suspect, Suspicion
from fullwire.simulation.grid import Grid, Subject, tried
from fullwire.simulation.on_links import OnLinks
from fullwire.simulation.sweep import sweep
from fullwire.units import show_rate

NICS_AND_SPINE = "NICs and the spine's uplinks together"
SLOW_HOSTS, LATENCIES = "slow hosts", "latencies"
_FASTER = 2.0


def suspicions(subjects: Sequence[Subject], grid: Grid) -> tuple[Suspicion, ...]:
    """Return a suspicion for each job, at the first of all conditions and the most workers."""
    if grid.cluster is None:
        return ()
    axes = (
        "bandwidth_bps",
        "compressors",
        "transports",
        "buckets",
        "algorithms",
        "latency_s",
        "accumulate",
        "local_steps",
        "jitters",
    )
    point = replace(
        grid, workers=(max(grid.workers),), **{name: getattr(grid, name)[:1] for name in axes}
    )
    placements = [grid.is_scattered]
    ways = known("allreduce")
    is_cabled = any(name in ways and ways[name].switches_add for name in point.algorithms)
    if not grid.is_scattered and not is_cabled and _leaves(grid.cluster, point.workers[0]):
        placements.append(True)
    return tuple(
        _suspicion(subject, _placed(point, is_scattered=is_scattered))
        for subject in subjects
        for is_scattered in placements
    )


def _placed(point: Grid, *, is_scattered: bool) -> Grid:
    """Return the point with its ranks packed or scattered; tables of a library are of packed ones.

    Scattered ranks take the usual algorithm on the links.
    """
    assert point.cluster is not None
    algorithms = point.algorithms
    if is_scattered and LIBRARY in algorithms:
        algorithms = (usual_algorithm("allreduce", point.cluster),)
    return replace(point, is_scattered=is_scattered, algorithms=algorithms)


def _leaves(cluster: Cluster, workers: int) -> int:
    return with_workers(cluster, workers).leaves


def _suspicion(subject: Subject, point: Grid) -> Suspicion:
    cluster = point.cluster
    assert cluster is not None
    [workers], [rate_bps] = point.workers, point.bandwidth_bps
    found = sweep([subject], point)
    network = cluster.network
    has_spine = isinstance(network, LeafSpine) and _leaves(cluster, workers) > 0
    size, per_bit = float(subject.step.bytes.sum()), 1 / rate_bps
    names = tried(point) if point.algorithms[0] == AUTO else point.algorithms
    where = OnLinks(cluster, point.is_scattered)
    costs = [where.cost("allreduce", name, workers) for name in names]
    cost = min(costs, key=lambda each: float(each.time_s(size, per_bit)))
    step_s = float(found["step_s"][0])
    suspects = tuple(_asked(subject, each) for each in _wider(point, has_spine=has_spine))
    if has_spine and all(suspect.step_s >= (1 - WORTH_BLAMING) * step_s for suspect in suspects):
        suspects += (_asked(subject, (NICS_AND_SPINE, "both twice as fast", _faster(point))),)
    inside = cluster.inside
    at_once = replace(
        cluster,
        network=replace(network, latency_s=0.0) if isinstance(network, LeafSpine) else network,
        inside=None if inside is None else replace(inside, latency_s=0.0),
    )
    without_latency = replace(point, latency_s=(0.0,), cluster=at_once)
    suspects += (_asked(subject, (LATENCIES, "none", without_latency)),)
    return Suspicion(
        run=subject.name,
        cluster=cluster.name,
        workers=workers,
        is_scattered=point.is_scattered,
        oversubscription=network.oversubscription
        if has_spine and isinstance(network, LeafSpine)
        else None,
        step_s=step_s,
        overhead_s=float(found["overhead_s"][0]),
        busiest=cost.busiest(size, per_bit),
        suspects=suspects,
    )


def _asked(subject: Subject, wider: tuple[str, str, Grid]) -> Suspect:
    links, change, point = wider
    return Suspect(links=links, change=change, step_s=float(sweep([subject], point)["step_s"][0]))


def _wider(point: Grid, *, has_spine: bool) -> Iterator[tuple[str, str, Grid]]:
    """Yield the kinds of links: each in turn wider, the others unchanged.

    Faster NICs keep their spine, which is made for the rate that they had.
    """
    cluster = point.cluster
    assert cluster is not None
    network, faster = cluster.network, _faster(point)
    [rate_bps] = point.bandwidth_bps
    not_slow = tuple(
        other_host for other_host in cluster.other_hosts if other_host.nic_rate_bps >= rate_bps
    )
    if not_slow != cluster.other_hosts:
        wider = replace(cluster, other_hosts=not_slow)
        change = f"every host at {show_rate(rate_bps)}"
        yield SLOW_HOSTS, change, replace(point, cluster=wider)
    if has_spine and isinstance(network, LeafSpine):
        if network.oversubscription > 1:
            wide = replace(network, oversubscription=1.0)
            if network.leaves_per_pod is not None:  # the core stays as wide as it was
                kept_ratio = network.oversubscription * network.core_oversubscription
                wide = replace(wide, core_oversubscription=kept_ratio)
            wider = replace(cluster, network=wide)
            yield LINK_KINDS[SPINE], "a 1:1 spine", replace(point, cluster=wider)
        if network.core_oversubscription > 1:
            wider = replace(cluster, network=replace(network, core_oversubscription=1.0))
            yield LINK_KINDS[CORE], "a 1:1 core", replace(point, cluster=wider)
        kept = replace(network, oversubscription=_FASTER * network.oversubscription)
        assert faster.cluster is not None
        faster = replace(faster, cluster=replace(faster.cluster, network=kept))
    if isinstance(network, Torus):
        yield LINK_KINDS[TORUS], "links twice as fast", faster
    else:
        yield LINK_KINDS[NIC], "NICs twice as fast", faster
    if cluster.inside is not None:
        wider = replace(
            cluster, inside=replace(cluster.inside, rate_bps=_FASTER * cluster.inside.rate_bps)
        )
        yield LINK_KINDS[IN_NODE], "in-node links twice as fast", replace(point, cluster=wider)


def _faster(point: Grid) -> Grid:
    """Return the cluster with NICs of twice the rate, slow hosts too; uplinks follow."""
    assert point.cluster is not None
    others = tuple(
        replace(other_host, nic_rate_bps=_FASTER * other_host.nic_rate_bps)
        for other_host in point.cluster.other_hosts
    )
    return replace(
        point,
        bandwidth_bps=(_FASTER * point.bandwidth_bps[0],),
        cluster=replace(point.cluster, other_hosts=others),
    )
