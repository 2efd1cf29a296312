"""The best plan on each of some clusters and networks, and its assumptions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from fullwire.answers.conditions import OneOrMany, rate, several
from fullwire.answers.plan_search import (
    DEGREES,
    Question,
    Searched,
    planned,
    search,
    search_or_refusal,
)
from fullwire.answers.planned import OnNetwork
from fullwire.clusters.cluster import Cluster, LeafSpine
from fullwire.crew import Crew
from fullwire.errors import UsageError
from fullwire.findings.finding import Finding
from fullwire.findings.plans import (
    EvenExperts,
    LessToExperts,
    MemoryOfAnother,
    NearestFamily,
    NotInRecording,
    ProcessorsNotTold,
    ProcessorsShared,
    SplitByMesh,
    UsualMemory,
    UsualShareOfLinks,
)
from fullwire.simulation.habits import habits_of
from fullwire.simulation.recorded_plan import SPLITTING_S
from fullwire.units import ratio
from fullwire.workloads.stage_memory import GIB

_MESSAGES = {  # of each degree
    "tp": "messages of tensor parallelism",
    "pp": "transfers between stages",
    "dp": "sums of gradients",
    "zero": "gathers of parameters",
}


def assumptions(searched: Searched) -> Iterator[Finding]:
    """Yield what the best plan of a cluster takes for granted."""
    question, row = searched.question, searched.order[0]
    degrees = {name: int(getattr(searched.plans, name)[row]) for name in DEGREES}
    device = question.device
    yield from question.notes
    if question.assumed:
        yield NearestFamily(device=device.title)
    if device.other_memory_gb is not None:
        yield MemoryOfAnother(
            device=device.title,
            gib=device.memory_bytes / GIB,
            stated_gb=device.other_memory_gb,
        )
    elif not device.is_memory_stated and device.memory_differs:
        yield UsualMemory(
            device=device.title,
            gib=device.memory_bytes / GIB,
            sizes=tuple(f"{size_gb} GB" for size_gb in device.memories_gb),
        )
    if question.cluster.measured is None:
        yield UsualShareOfLinks()
    if question.model.moe is not None:
        yield EvenExperts()
        ranks = degrees["ep"] * int(searched.plans.etp[row])
        share = habits_of(device.family, question.precision).ep
        if 1 < ranks <= question.cluster.devices_per_node and share < 1:
            yield LessToExperts(share=share)
    if question.recorded is not None:
        for name in question.recorded.unseen(degrees):
            if name in _MESSAGES:
                yield NotInRecording(messages=_MESSAGES[name])
            else:
                yield ProcessorsNotTold(
                    devices=math.prod(degrees[name] for name in ("tp", "pp", "dp", "cp")),
                    recorded=question.recorded.recognised.layout.devices,
                )
        if question.recorded.splits_by_mesh and degrees["tp"] > 1:
            yield SplitByMesh(milliseconds=1e3 * SPLITTING_S)
        if question.recorded.processors is not None:
            yield ProcessorsShared(processors=question.recorded.processors)


def networks_of(
    questions: Sequence[Question], bandwidth: OneOrMany, oversubscription: OneOrMany, those: Crew
) -> tuple[OnNetwork, ...]:
    """Search on each network anew: another network may have another best plan."""
    if bandwidth is None and oversubscription is None and len(questions) == 1:
        return ()
    rates = (None,) if bandwidth is None else several(bandwidth, rate)
    ratios = (
        (None,)
        if oversubscription is None
        else several(oversubscription, lambda value: ratio(value, "oversubscription"))
    )
    asked = [
        replace(one, objective="step", cluster=_with_network(one.cluster, rate_bps, over))
        for one in questions
        for rate_bps, over in product(rates, ratios)
    ]
    found = those.each(search_or_refusal, asked)
    return tuple(_on_network(*both) for both in zip(asked, found, strict=True))


def _on_network(question: Question, found: Searched | UsageError) -> OnNetwork:
    cluster, network = question.cluster, question.cluster.network
    return OnNetwork(
        cluster=cluster.name,
        device=question.device.title,
        bandwidth_bps=cluster.nics.rate_bps,
        oversubscription=network.oversubscription if isinstance(network, LeafSpine) else 1.0,
        plan=planned(found, found.order[0]) if isinstance(found, Searched) else None,
        assumed=tuple(assumptions(found)) if isinstance(found, Searched) else question.notes,
        does_not_fit=str(found) if isinstance(found, UsageError) else None,
    )


def on_half(question: Question) -> OnNetwork | None:
    """Return the best plan with half of the bandwidth between nodes."""
    cluster = question.cluster
    if cluster.nodes == 1:
        return None
    slow = replace(question, cluster=_with_network(cluster, cluster.nics.rate_bps / 2, None))
    return _on_network(slow, search(slow))


def _with_network(cluster: Cluster, rate_bps: float | None, over: float | None) -> Cluster:
    if rate_bps is not None:
        cluster = replace(cluster, nics=replace(cluster.nics, rate_bps=rate_bps), other_hosts=())
    if over is None:
        return cluster
    if not isinstance(cluster.network, LeafSpine):
        raise UsageError(
            f"oversubscription: expected a cluster with leaves and a spine, got {cluster.name}"
        )
    return replace(cluster, network=replace(cluster.network, oversubscription=over))
