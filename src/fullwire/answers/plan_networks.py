"""The best plan on each of some clusters and networks, and its assumptions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeAlias

from fullwire.answers.conditions import OneOrMany, Price, rate, read_price, several
from fullwire.answers.plan_goodput import USUAL_TROUBLES, Troubles
from fullwire.answers.plan_search import (
    DEGREES,
    Question,
    Searched,
    best_first,
    is_measured,
    planned,
    search,
    search_each,
    search_or_refusal,
    usable,
)
from fullwire.answers.planned import Lasting, OnNetwork, OtherCluster, Range
from fullwire.clusters import ClusterLike
from fullwire.clusters import cluster as described_cluster
from fullwire.clusters.cluster import Cluster, LeafSpine, with_fastest_inside
from fullwire.collectives.left_open import nics_at, nics_left_open
from fullwire.crew import Crew
from fullwire.errors import UsageError
from fullwire.findings.collective import RestsOnLeastRate, about_nics
from fullwire.findings.finding import Finding
from fullwire.findings.plans import (
    EvenExperts,
    LessToExperts,
    LongerThanPositions,
    MemoryOfAnother,
    NearestFamily,
    NoNearFamily,
    NotInRecording,
    OtherNodes,
    ProcessorsNotTold,
    ProcessorsShared,
    ScatteredRanks,
    SplitByMesh,
    UnlikeHosts,
    UsualMemory,
    UsualShareOfLinks,
)
from fullwire.simulation.goodput import CHECKPOINT_BYTES, PUBLISHED_DEVICE_HOURS
from fullwire.simulation.habits import habits_of, has_near_family
from fullwire.simulation.recorded_plan import SPLITTING_S, Recorded
from fullwire.units import count, ratio, seconds, shown
from fullwire.workloads.accelerators import Accelerator, accelerator
from fullwire.workloads.stage_memory import GIB

OtherNetwork: TypeAlias = "tuple[float | None, float | None]"  # rate of NICs, oversubscription
USUAL_HOURS = 24.0  # of training, where goodput is asked for and no hours are given
_MESSAGES = {  # by kind
    "tp": "messages of tensor parallelism",
    "pp": "transfers between stages",
    "dp": "sums of gradients",
    "cp": "messages of context parallelism",
    "zero": "gathers of parameters",
    "whole": "sums of gradients without ZeRO-3",
}


def device_of(cluster: Cluster, given: str | None) -> Accelerator:
    """Return the device that is given, or that the cluster tells."""
    stated = cluster.device if given is None else given
    device = accelerator(stated) if stated else named_device(cluster)
    if device is None:
        raise UsageError(
            f"device: expected one with the cluster {cluster.name}: --device NAME, or a line "
            'device = "NAME" in the cluster\'s file'
        )
    return device


def with_devices(
    given: Sequence[ClusterLike],
    nodes: str | int | None,
    devices: str | int,
    degrees: Mapping[str, int | str],
) -> list[Cluster]:
    """Return each cluster with the nodes on which plans use so many devices."""
    if nodes is not None:
        raise UsageError("devices: expected --devices or --nodes, got both")
    if not given:
        raise UsageError("devices: expected a cluster that has them (--cluster)")
    number = count(devices, "devices")
    return [on_devices(described_cluster(one), number, degrees) for one in given]


def on_devices(
    machine: Cluster, devices: int, degrees: Mapping[str, int | str], what: str = "devices"
) -> Cluster:
    """Return a cluster with so many devices in use: a part of each node's, or all of them.

    - `what`: the option that asks for them, which a refusal names.
    """
    if there := _nodes_for(machine, devices, degrees):
        return there
    if machine.is_torus:
        raise UsageError(
            f"{what}: expected all {usable(machine, degrees).devices:,} devices of the torus "
            f"{machine.name}, got {devices:,}"
        )
    reach = 4 * machine.devices_per_node
    sides = range(devices - 1, max(0, devices - reach), -1), range(devices + 1, devices + reach)
    found = [next((n for n in side if _nodes_for(machine, n, degrees)), None) for side in sides]
    nearest = [f"{value:,}" for value in found if value is not None]
    near = f". The nearest: {' and '.join(nearest)}" if nearest else ""
    raise UsageError(
        f"{what}: expected as many as whole nodes of {machine.name} have in use, got {devices:,}"
        + near
    )


def _nodes_for(machine: Cluster, devices: int, degrees: Mapping[str, int | str]) -> Cluster | None:
    for of_node in (usable(machine, {}).devices_per_node, machine.devices_per_node):
        nodes, others = divmod(devices, of_node)
        if nodes and not others and (nodes == machine.nodes or not machine.is_torus):
            there = described_cluster(machine, nodes)
            if usable(there, degrees).devices == devices:
                return there
    return None


def named_device(cluster: Cluster) -> Accelerator | None:
    """Return the known device that a cluster states or that its name tells, if there is one."""
    try:
        return accelerator(cluster.device or cluster.name)
    except UsageError:
        return None


def assumptions(searched: Searched) -> Iterator[Finding]:
    """Yield what the best plan of a cluster takes for granted."""
    question, row = searched.question, searched.order[0]
    degrees = {name: int(getattr(searched.plans, name)[row]) for name in DEGREES}
    device = question.device
    yield from question.notes
    if 0 < question.model.learned_positions < question.sequence:
        yield LongerThanPositions(
            positions=question.model.learned_positions, sequence=question.sequence
        )
    if question.assumed:
        is_near = has_near_family(device.family)
        yield (NearestFamily if is_near else NoNearFamily)(device=device.title)
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
    is_bound = with_fastest_inside(question.cluster) is not question.cluster
    if is_bound and not is_measured(searched, row):
        yield RestsOnLeastRate()
    if not is_measured(searched, row):
        yield from about_nics(nics_left_open(question.cluster, question.cluster.devices)[0])
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
        yield from _about_hosts(question.recorded, question)
        if question.recorded.splits_by_mesh and degrees["tp"] > 1:
            yield SplitByMesh(milliseconds=1e3 * SPLITTING_S)
        if question.recorded.processors is not None:
            yield ProcessorsShared(processors=question.recorded.processors)


def _about_hosts(recorded: Recorded, question: Question) -> Iterator[Finding]:
    """Yield how the hosts of a recording differ from the nodes that its messages are priced on."""
    hosts = recorded.hosts
    if hosts is None or not recorded.whole_node:
        return
    least, most = min(hosts.ranks), max(hosts.ranks)
    if recorded.is_elsewhere:
        if recorded.recorded_on is None:
            devices = question.cluster.devices_per_node + question.idle_of_node
            yield OtherNodes(cluster=question.cluster.name, ranks=most, devices=devices)
        return
    if least < most:
        yield UnlikeHosts(least=least, most=most)
    if not hosts.are_in_row:
        yield ScatteredRanks()


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The length of a training without failures, and the price of a device."""

    hours: float
    price: Price | None
    is_usual: bool  # nobody gave the hours


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The steps of a training: its hours are those of the best plan, others take longer."""

    training: Training | None
    step_s: float  # of the best plan

    @classmethod
    def of_best(cls, searches: Sequence[Searched], training: Training | None) -> Work:
        """Return the work that the best of some plans does in these hours."""
        _, searched, row = best_of(searches)
        return cls(training=training, step_s=float(searched.step_s[row]))

    def lasting(self, searched: Searched, row: int) -> Lasting | None:
        """Return the course of the same steps with a plan: failures, restarts and steps vary."""
        if self.training is None:
            return None
        question, troubles = searched.question, searched.question.troubles
        devices, price = question.paid_devices, self.training.price
        work_s = self.training.hours * 3600 * float(searched.step_s[row]) / self.step_s
        worst, middle, best = troubles.goodput(question.cluster, question.model, work_s)
        _, between, _ = troubles.device_hours or PUBLISHED_DEVICE_HOURS
        device_hours = middle.wall_s / 3600 * devices
        return Lasting(
            wall_s=middle.wall_s,
            wall_interval=Range(low_s=best.wall_s, high_s=worst.wall_s),
            work_s=work_s,
            goodput=middle.share,
            goodput_low=worst.share,
            goodput_high=best.share,
            losses=middle.losses_s,
            checkpoint_bytes=int(CHECKPOINT_BYTES * question.model.parameters),
            checkpoint_interval_s=middle.interval_s,
            interruptions=middle.interruptions,
            failures_device_hours=between,
            device_hours=device_hours,
            cost=None if price is None else price.amount * device_hours,
            currency=None if price is None else price.currency or None,
        )


def training_of(
    hours: str | float | None, price: str | float | None, troubles: Troubles, objective: str
) -> Training | None:
    """Read the length of a training and the price; they are needed together."""
    paid = read_price(price)
    if hours is None and objective != "goodput":
        if paid is not None or troubles != USUAL_TROUBLES:
            raise UsageError(
                "hours: expected the hours of training (--hours 1000), which a price, failures, "
                "storage and restarts need"
            )
        return None
    return Training(
        hours=USUAL_HOURS if hours is None else _hours(hours), price=paid, is_usual=hours is None
    )


def _hours(given: str | float) -> float:
    """Read a plain number of hours, or a time with its unit."""
    if isinstance(given, str) and given.strip()[-1:].isalpha():
        try:
            return ratio(seconds(given, "hours") / 3600, "hours")
        except UsageError:
            raise UsageError(
                f"hours: expected hours, like 1000, or a time, like 30d, got {shown(given)}"
            ) from None
    return ratio(given, "hours")


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Found:
    """What was found on a cluster: the searches on it and on its parts, or why no plan fits."""

    question: Question
    searches: list[Searched]
    refusal: UsageError | None = None


def found_each(questions: Sequence[Question], those: Crew) -> list[Found]:
    """Search on each cluster; where fewer devices may be better, on parts of them too."""
    if all(one.objective == "step" for one in questions):
        pairs = zip(questions, those.each(search_or_refusal, questions), strict=True)
        return [
            Found(question=one, searches=[found])
            if isinstance(found, Searched)
            else Found(question=one, searches=[], refusal=found)
            for one, found in pairs
        ]
    compared = []
    for question in questions:
        try:
            compared.append(Found(question=question, searches=search_each(question, those)))
        except UsageError as refusal:
            compared.append(Found(question=question, searches=[], refusal=refusal))
    return compared


def best_of(searches: Sequence[Searched]) -> tuple[float, Searched, int]:
    """Return the best plan of some searches, after its score."""
    return next(best_first(searches))


def best_cluster(compared: Sequence[Found]) -> tuple[list[Searched], tuple[OtherCluster, ...]]:
    """Return the searches on the best cluster by the objective, and how far the others are from it.

    If no plan fits anywhere, refuse as on the first cluster.
    """
    scores = [best_of(one.searches)[0] if one.searches else math.inf for one in compared]
    best = scores.index(min(scores))
    if (refusal := compared[best].refusal) is not None:
        raise refusal
    others = tuple(
        OtherCluster(
            cluster=one.question.cluster.name,
            times=score / scores[best] if one.searches else None,
        )
        for place, (one, score) in enumerate(zip(compared, scores, strict=True))
        if place != best
    )
    return compared[best].searches, others


def asked_networks(
    bandwidth: OneOrMany, oversubscription: OneOrMany, *, is_recorded: bool
) -> tuple[tuple[OtherNetwork, ...], OtherNetwork | None]:
    """Return the networks that are asked about, and the one that the whole answer is for.

    A single network replaces the described one. Beside a recording it is compared with that.
    """
    if bandwidth is None and oversubscription is None:
        return (), None
    rates = (None,) if bandwidth is None else several(bandwidth, rate)
    ratios = (None,) if oversubscription is None else several(oversubscription, _oversubscription)
    wanted = tuple(product(rates, ratios))
    return wanted, wanted[0] if len(wanted) == 1 and not is_recorded else None


def on_network(question: Question, network: OtherNetwork) -> Question:
    """Ask the same on another network."""
    return replace(question, cluster=_with_network(question.cluster, *network))


def networks_of(
    compared: Sequence[Found],
    wanted: Sequence[OtherNetwork],
    only: OtherNetwork | None,
    work: Work,
    those: Crew,
) -> tuple[OnNetwork, ...]:
    """Return what was found on each cluster or network, if there are several or others are wanted.

    - `only`: the wanted one if there is one. The clusters were searched on it.
    """
    if not wanted and len(compared) == 1:
        return ()
    if wanted and only is None:  # another network may have another best plan
        asked = [on_network(one.question, other) for one in compared for other in wanted]
        compared = found_each(asked, those)
    return tuple(_on_network(one, work) for one in compared)


def _oversubscription(given: str | float) -> float:
    """Read how many times the rate below a leaf exceeds that above it."""
    value = ratio(given, "oversubscription")
    if value < 1:
        raise UsageError(
            "oversubscription: expected 1 or more, the rate below a leaf over that of its "
            f"uplinks, got {shown(given)}"
        )
    return value


def _on_network(found: Found, work: Work | None) -> OnNetwork:
    question, searched = found.question, None
    if found.searches:
        _, searched, row = best_of(found.searches)
    cluster, network = question.cluster, question.cluster.network
    return OnNetwork(
        cluster=cluster.name,
        device=question.device.title,
        bandwidth_bps=cluster.nics.rate_bps,
        oversubscription=network.oversubscription if isinstance(network, LeafSpine) else 1.0,
        is_below_one_leaf=isinstance(network, LeafSpine) and cluster.leaves == 0,
        plan=None if searched is None else planned(searched, row),
        assumed=question.notes if searched is None else tuple(assumptions(searched)),
        does_not_fit=None if found.refusal is None else str(found.refusal),
        lasting=None if searched is None or work is None else work.lasting(searched, row),
    )


def on_half(question: Question) -> OnNetwork | None:
    """Return the best plan with half of the bandwidth between nodes."""
    cluster = question.cluster
    if cluster.nodes == 1:
        return None
    slow = on_network(question, (cluster.nics.rate_bps / 2, None))
    return _on_network(Found(question=slow, searches=[search(slow)]), None)


def _with_network(cluster: Cluster, rate_bps: float | None, over: float | None) -> Cluster:
    if rate_bps is not None:
        cluster = replace(cluster, nics=nics_at(cluster, rate_bps), other_hosts=())
    if over is None:
        return cluster
    if not isinstance(cluster.network, LeafSpine):
        raise UsageError(
            f"oversubscription: expected a cluster with leaves and a spine, got {cluster.name}"
        )
    return replace(cluster, network=replace(cluster.network, oversubscription=over))
