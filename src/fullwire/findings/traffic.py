"""The findings about a training that captured packets show, in everyday words."""

from __future__ import annotations

from collections.abc import Iterator

from fullwire.findings.finding import Finding
from fullwire.packets.flows import Traffic


class TrainingsInTurn(Finding):
    """The packets hold several trainings, one after the other."""

    template = (
        "{trainings} trainings between {hosts} hosts, one after the other and without a connection "
        "in common."
    )

    trainings: int
    hosts: int


class HostsInGroups(Finding):
    """The packets hold several groups of hosts, which send each other nothing."""

    template = "{hosts} hosts in {groups} separate groups. Each may be a training of its own."

    hosts: int
    groups: int


class Training(Finding):
    """A training, named by its hosts."""

    template = "{hosts:list}"

    hosts: tuple[str, ...]


class TrainingAt(Finding):
    """A training, named by its time."""

    template = "{begin_s:time} to {end_s:time}"

    begin_s: float
    end_s: float


class OfTraining(Finding):
    """A heading: the next findings are about this training."""

    template = "{training}:"

    training: Finding


class HostsInPattern(Finding):
    """The number of hosts, and the pattern of their transfers."""

    template = "{hosts} hosts, {shape}."

    hosts: int
    shape: Finding


class NoPattern(Finding):
    """No known pattern fits the transfers."""

    template = "in no pattern that is known"


class ParameterServer(Finding):
    """Workers send to parameter servers."""

    template = "a parameter server at {servers:list}"

    servers: tuple[str, ...]


class Hierarchy(Finding):
    """Hosts sum within groups first, then between groups."""

    template = "a hierarchy of {groups:;}"

    groups: tuple[Training, ...]


class DoubleTree(Finding):
    """Hosts sum over two trees, each with half of the bytes."""

    template = "a double tree around {first} and {second}"

    first: str
    second: str


class Tree(Finding):
    """Hosts sum over one tree."""

    template = "a tree around {root}"

    root: str


class SeveralRings(Finding):
    """Hosts form several rings."""

    template = "{kind}: {rings:;}"

    kind: str
    rings: tuple[str, ...]


class Ring(Finding):
    """Hosts form one ring."""

    template = "a {kind} {hosts}"

    kind: str
    hosts: str


class AllToAll(Finding):
    """Every host sends to every other."""

    template = "everyone with everyone alike (all-to-all)"


class InPattern(Finding):
    """Any other pattern, by its name."""

    template = "in {kind}"

    kind: str


class NoIterations(Finding):
    """The transfers lack a repeating pattern, so there are no iterations."""

    template = "No iterations were found: transfers do not repeat their bytes after silence."


class IterationsFound(Finding):
    """The number of iterations, and their length."""

    template = (
        "{count} iterations of {period_s:time} ({communicating_s:time} communicating), confidence "
        "{confidence:.2f}."
    )

    count: int
    period_s: float
    communicating_s: float
    confidence: float


class BytesPerEdge(Finding):
    """The bytes of an edge in an iteration, and the gradient that they imply."""

    template = "{bytes:bytes} per edge and iteration{gradient}."

    bytes: float
    gradient: Finding | None


class GatheredAndReduced(Finding):
    """Parameters are sharded: they are gathered, and gradients are reduced."""

    template = (
        ": {gathered_bytes:bytes} of parameters are gathered and {gradient_bytes:bytes} of "
        "gradients reduced"
    )

    gathered_bytes: float
    gradient_bytes: float


class GradientIs(Finding):
    """The size of the gradient, as the headers of a collective library state it."""

    template = ", so the gradient is {gradient_bytes:bytes} at N={ranks}"

    gradient_bytes: float
    ranks: int


class GradientIfOneSum(Finding):
    """The size of the gradient, if an iteration is one all-reduce."""

    template = "{gradient}, if it is one all-reduce"

    gradient: GradientIs


class GradientIfSharded(Finding):
    """The size of the gradient in both cases that the bytes allow."""

    template = (
        "{gradient} if it is one all-reduce, or {if_sharded_bytes:bytes} if parameters are sharded "
        "(FSDP, ZeRO-3) and gathered twice"
    )

    gradient: GradientIs
    if_sharded_bytes: float


class SlowLinkFound(Finding):
    """The host whose slow link keeps the other hosts waiting."""

    template = (
        "Host {host} sends over the slow link: busy {busy:.0%} of the time against {least:.0%} to "
        "{most:.0%}."
    )

    host: str
    busy: float
    least: float
    most: float


class NoLinkToCallSlow(Finding):
    """The transfers lack a repeating pattern, so a slow link cannot be found."""

    template = "Slow links are found by iterations, and the transfers show none."


class NoSlowLinkOfTwo(Finding):
    """No slow link was found, but two hosts show little of their links."""

    template = "No slow link, as far as two hosts can show one."


class NoSlowLink(Finding):
    """All links are equally fast."""

    template = "No slow link."


def traffic_findings(result: Traffic) -> Iterator[Finding]:
    """Yield the findings about a training that packets show, or about each of several."""
    if result.groups:
        count, hosts = len(result.groups), len(result.hosts)
        if result.groups[0].during_s is not None:
            yield TrainingsInTurn(trainings=count, hosts=hosts)
        else:
            yield HostsInGroups(hosts=hosts, groups=count)
        for group in result.groups:
            yield OfTraining(training=training(group))
            yield from traffic_findings(group)
        return
    yield HostsInPattern(hosts=len(result.hosts), shape=_shape(result))
    found = result.iterations
    if found is None:
        yield NoIterations()
    else:
        yield IterationsFound(
            count=found.count,
            period_s=found.period_s,
            communicating_s=found.communicating_s,
            confidence=found.confidence,
        )
    if result.payload_bytes_per_edge is not None:
        gradient_bytes = result.gradient_bytes
        gradient: Finding | None = None
        if gradient_bytes is not None and result.gathered_bytes:
            gradient = GatheredAndReduced(
                gathered_bytes=result.gathered_bytes, gradient_bytes=gradient_bytes
            )
        elif gradient_bytes is not None:
            ranks = result.ranks or len(result.pattern.order) or len(result.hosts)
            gradient = told = GradientIs(gradient_bytes=gradient_bytes, ranks=ranks)
            if_sharded = result.if_sharded_bytes
            if result.collectives is None and if_sharded is not None:
                gradient = GradientIfSharded(gradient=told, if_sharded_bytes=if_sharded)
            elif result.collectives is None:
                gradient = GradientIfOneSum(gradient=told)
        yield BytesPerEdge(bytes=result.payload_bytes_per_edge, gradient=gradient)
    slow = result.slow_link
    if slow is not None:
        least, most = slow.others_busy
        yield SlowLinkFound(host=slow.host, busy=slow.busy_fraction, least=least, most=most)
    elif found is None:
        yield NoLinkToCallSlow()
    elif len(result.hosts) == 2 and result.busy_fractions.min(initial=1.0) > 0:
        yield NoSlowLinkOfTwo()
    else:
        yield NoSlowLink()


def training(group: Traffic) -> Finding:
    """Return the name of a training: its time, or else its hosts."""
    if group.during_s is None:
        return Training(hosts=group.hosts)
    begin_s, end_s = group.during_s
    return TrainingAt(begin_s=begin_s, end_s=end_s)


def _shape(result: Traffic) -> Finding:
    kind = result.pattern.kind
    parts = [tuple(result.hosts[host] for host in part) for part in result.pattern.parts]
    if kind == "none":
        return NoPattern()
    if kind == "parameter server":
        return ParameterServer(servers=parts[0])
    if kind == "hierarchical":
        return Hierarchy(groups=tuple(Training(hosts=group) for group in parts))
    if kind == "double tree":
        return DoubleTree(first=parts[0][0], second=parts[1][0])
    if kind == "tree":
        return Tree(root=result.order[0])
    if parts:
        return SeveralRings(kind=kind, rings=tuple(" -> ".join(ring) for ring in parts))
    if kind.endswith("ring"):
        return Ring(kind=kind, hosts=" -> ".join(result.order))
    return AllToAll() if kind == "all-to-all" else InPattern(kind=kind)
