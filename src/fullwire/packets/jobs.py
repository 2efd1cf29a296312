"""Tell training jobs apart in flows of a whole network, as switches report them.

Hosts that send each other much are a job. The bytes of a job come again with each step. A ring of
data parallel replicas sends one way; the neighbours of a pipeline send activations one way and
gradients back. Where both ways carry alike, as in a ring of two, the time tells: a pipeline sends
through most of the step, and replicas send together.

Records do not tell over which links a flow went. Two jobs share a link where bursts of one take
longer while the other sends, compared with bursts of the same pair and size at other times.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fullwire.packets.edges import host_names, numbered_hosts
from fullwire.packets.pattern import Pattern, components, find_pattern
from fullwire.packets.rhythm import flow_of, rhythm_of
from fullwire.run.intervals import union
from fullwire.run.run import Run

Reals = NDArray[np.float64]

_FAINT = 0.02  # of the largest edge of its hosts: a heartbeat joins no two jobs
_BOTH_WAYS = 0.5  # of the bytes, that flow back between neighbours of a pipeline
_CELLS = 32  # of a step
_WIDE = 0.4  # of a step, where no edge is known to be of replicas
# Share of what repeats that repeats with the step: where time and bytes both tell it, and one does.
_BELIEVED, _BELIEVED_ALONE, _AGREE = 0.85, 0.99, 0.03
_FEW_STEPS = 12  # are not believed: three steps look like one where few wholes were seen
_MOST_POINTS = 1 << 20  # of a job's bytes in time
# Shared links: bursts beside and apart from the other job's, and by how much they must differ.
_APART, _BESIDE, _FEW_BURSTS = 0.1, 0.5, 5
_SLOWER, _MOSTLY = 1.15, 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLink:
    """Another job that slows a job's bursts while it sends."""

    job: int  # its place among the jobs
    slower: float  # times as long as a burst takes otherwise
    cost: float  # share of the time in which its bursts take longer
    cost_s: float | None  # of a step; None where no step is known
    pairs: int  # of hosts whose bursts are slower


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaGroup:
    """Hosts that add up the same gradients, and the shape of their transfers."""

    pattern: str  # "ring", "tree", "all-to-all" ...; "none" where no known shape fits
    hosts: tuple[str, ...]  # in sending order, where the shape has one


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkJob:
    """A training job, as flows show it."""

    hosts: tuple[str, ...]
    step_s: float | None  # None where nothing repeats
    confidence: float
    step_bytes: float | None  # of all its hosts
    data_parallel: tuple[tuple[str, str], ...]  # neighbours among replicas
    groups: tuple[ReplicaGroup, ...]  # that these neighbours form
    pipeline: tuple[tuple[str, str], ...]  # neighbouring stages
    slowest: tuple[str, str] | None  # the pair with the lowest rate while bytes flow
    slowest_bps: float | None
    shares: tuple[SharedLink, ...] = ()  # links, with other jobs


@dataclass(frozen=True, slots=True)
class _Bursts:
    """The bursts of a job: number of the pair, begin and end in seconds, bytes."""

    pair: NDArray[np.int64]
    start_s: Reals
    end_s: Reals
    size: Reals

    def flowed_s(self, until_s: Reals) -> Reals:
        """Return for how long bytes of the job had flowed until each time."""
        return np.asarray(np.interp(until_s, *flow_of(*union(self.start_s, self.end_s))))

    def slowed_by(self, other: _Bursts, number: int, step_s: float | None) -> SharedLink | None:
        """Return what another job's bursts cost these, if they are longer beside them."""
        lasted_s = self.end_s - self.start_s
        known = lasted_s > 1e-6  # sampled packets have no length
        beside = (other.flowed_s(self.end_s) - other.flowed_s(self.start_s))[known]
        lasted_s = lasted_s[known]
        beside /= lasted_s
        rate = self.size[known] / lasted_s
        # Bursts of alike size alone are compared: activations and gradients differ in rate.
        kind = np.rint(2 * np.log2(np.maximum(self.size[known], 1))).astype(np.int64)
        _, group = np.unique(np.stack([self.pair[known], kind]), axis=1, return_inverse=True)
        order = np.argsort(group.ravel(), kind="stable")
        slower, costs = [], []
        for rows in np.split(order, np.flatnonzero(np.diff(group.ravel()[order])) + 1):
            apart, crowded = rows[beside[rows] < _APART], rows[beside[rows] > _BESIDE]
            if min(len(apart), len(crowded)) < _FEW_BURSTS:
                continue
            usual = float(np.median(rate[apart]))
            times = usual / float(np.median(rate[crowded]))
            if times >= _SLOWER and (rate[crowded] < usual).mean() >= _MOSTLY:
                slower.append(times)
                costs.append(float((lasted_s[crowded] * (1 - rate[crowded] / usual)).sum()))
        if not slower:
            return None
        length_s = float(self.end_s.max() - self.start_s.min())
        cost = min(max(float(np.median(costs)) / length_s, 0.0), 1.0)
        return SharedLink(
            job=number,
            slower=float(np.median(slower)),
            cost=cost,
            cost_s=None if step_s is None else cost * step_s,
            pairs=len(slower),
        )


def jobs_of(run: Run) -> tuple[NetworkJob, ...]:
    """Return the jobs in a run's flows, the largest first."""
    flows, names = run.flows, host_names(run)
    ends = np.concatenate([flows.source, flows.destination])
    named, place = numbered_hosts(ends, names)  # captures give a port with each address
    hosts, in_order = np.unique(np.array(named, str), return_inverse=True)
    source, target = np.split(in_order[place], 2)
    size = np.asarray(flows.wire_bytes, float)
    edges, edge_of = np.unique(source * len(hosts) + target, return_inverse=True)
    carried = np.bincount(edge_of, size, len(edges))
    one, other = edges // len(hosts), edges % len(hosts)
    most = np.zeros(len(hosts))
    np.maximum.at(most, one, carried)
    np.maximum.at(most, other, carried)
    strong = (carried > _FAINT * np.maximum(most[one], most[other])) & (one != other)
    job_of_host = np.arange(len(hosts))
    while True:  # each host takes the least number of its neighbours
        before = job_of_host.copy()
        np.minimum.at(job_of_host, one[strong], before[other[strong]])
        np.minimum.at(job_of_host, other[strong], before[one[strong]])
        job_of_host = job_of_host[job_of_host]
        if (job_of_host == before).all():
            break
    found: list[tuple[NetworkJob, _Bursts]] = []
    for number, count in Counter(job_of_host.tolist()).items():
        if count < 2:
            continue
        own = (job_of_host[source] == number) & strong[edge_of]
        bursts = _Bursts(
            edge_of[own],
            np.asarray(flows.start_ns, float)[own] / 1e9,
            np.asarray(flows.end_ns, float)[own] / 1e9,
            size[own],
        )
        job = _job(hosts, source[own], target[own], bursts.start_s, bursts.end_s, size[own])
        found.append((job, bursts))
    found.sort(key=lambda each: (-len(each[0].hosts), each[0].hosts))
    with_shares = []
    for job, own_bursts in found:
        shares = [
            own_bursts.slowed_by(other, number, job.step_s)
            for number, (_, other) in enumerate(found)
            if other is not own_bursts
        ]
        with_shares.append(replace(job, shares=tuple(each for each in shares if each is not None)))
    return tuple(with_shares)


def _job(
    hosts: NDArray[np.str_],
    source: NDArray[np.int64],
    target: NDArray[np.int64],
    start_s: Reals,
    end_s: Reals,
    size: Reals,
) -> NetworkJob:
    members = np.unique(np.concatenate([source, target]))
    step = _step(start_s, end_s, size)
    step_s = None if step is None else step.length_s
    pairs: dict[tuple[int, int], list[int]] = {}
    for place, (one, other) in enumerate(zip(source.tolist(), target.tolist(), strict=True)):
        pairs.setdefault((one, other), []).append(place)
    totals = {pair: float(size[places].sum()) for pair, places in pairs.items()}
    period_s = step_s or float(end_s.max() - start_s.min()) or 1.0
    widths, is_two_way, rates = {}, {}, {}
    for one, other in pairs:
        pair = min(one, other), max(one, other)
        if pair in widths:
            continue
        there, back = totals.get(pair, 0.0), totals.get(pair[::-1], 0.0)
        is_two_way[pair] = min(there, back) >= _BOTH_WAYS * max(there, back)
        places = pairs.get(pair, []) + pairs.get(pair[::-1], [])
        cells = (start_s[places] % period_s / period_s * _CELLS).astype(int) % _CELLS
        weights = np.bincount(cells, size[places], _CELLS)
        widths[pair] = float(weights.sum() ** 2 / (weights**2).sum() / _CELLS)
        lasted_s = np.maximum(end_s[places] - start_s[places], 1e-9)
        if (lasted_s > 1e-6).all():  # sampled packets have no length
            rates[pair] = float(np.median(size[places] * 8 / lasted_s))
    has_one_way = not all(is_two_way.values())
    # Without a step, bytes were laid over the whole time, and are wide in each job.
    is_pipeline = {
        pair: both and (has_one_way or (step is not None and widths[pair] > _WIDE))
        for pair, both in is_two_way.items()
    }

    def named(wanted: bool) -> tuple[tuple[str, str], ...]:
        chosen = sorted(pair for pair, found in is_pipeline.items() if found == wanted)
        return tuple((str(hosts[one]), str(hosts[other])) for one, other in chosen)

    slow = min(rates, key=rates.__getitem__) if rates else None
    return NetworkJob(
        hosts=tuple(str(hosts[member]) for member in members),
        step_s=step_s,
        confidence=0.0 if step is None else step.confidence,
        step_bytes=None if step is None else step.bytes,
        data_parallel=named(False),
        groups=_groups(
            hosts,
            members,
            {pair: size for pair, size in totals.items() if not is_pipeline[min(pair), max(pair)]},
        ),
        pipeline=named(True),
        slowest=None if slow is None else (str(hosts[slow[0]]), str(hosts[slow[1]])),
        slowest_bps=None if slow is None else rates[slow],
    )


def _groups(
    hosts: NDArray[np.str_], members: NDArray[np.int64], carried: dict[tuple[int, int], float]
) -> tuple[ReplicaGroup, ...]:
    """Return the groups of replicas among a job's hosts, from the bytes of each directed pair."""
    sent = np.zeros((len(members), len(members)))
    for (one, other), size in carried.items():
        sent[np.searchsorted(members, one), np.searchsorted(members, other)] = size
    found = []
    for group in components(sent > 0):
        if len(group) < 2:
            continue
        pattern = _shape_of(sent[np.ix_(group, group)])
        order = pattern.order or range(len(group))
        names = tuple(str(hosts[members[group[place]]]) for place in order)
        found.append(ReplicaGroup(pattern=pattern.kind, hosts=names))
    return tuple(found)


def _shape_of(sent: Reals) -> Pattern:
    """Return the shape of a group's transfers, though sampled packets show them only roughly."""
    exact = find_pattern(sent)
    if exact.kind != "none":
        return exact
    # Amounts of a shape differ by factors of two, or not at all.
    median = float(np.median(sent[sent > 0]))
    steps = np.rint(np.log2(np.maximum(sent, 1) / median))
    return find_pattern(np.where(sent > 0, median * 2.0**steps, 0.0))


@dataclass(frozen=True, slots=True)
class _Step:
    """The step of a job."""

    length_s: float
    bytes: float
    confidence: float


def _step(start_s: Reals, end_s: Reals, size: Reals) -> _Step | None:
    """Return the time after which a job's bytes come again, if much of them does."""
    end_s = np.maximum(end_s, start_s + 1e-6)
    rate = size / (end_s - start_s)
    times, place = np.unique(np.concatenate([start_s, end_s]), return_inverse=True)
    change = np.bincount(place, np.concatenate([rate, -rate]), len(times))
    carried = np.concatenate([[0.0], np.cumsum(np.cumsum(change)[:-1] * np.diff(times))])
    if len(times) > _MOST_POINTS:
        kept = np.linspace(0, len(times) - 1, _MOST_POINTS).astype(int)
        times, carried = times[kept], carried[kept]
    carried = np.maximum.accumulate(carried)
    # Steps carry the same bytes, unless packets are sampled; and last about as long, unless the
    # network changes. So both axes are looked along: so many bytes pass at each moment, too.
    by_time, by_bytes = rhythm_of(carried, times), rhythm_of(times, carried)
    steps = []
    # Steps alone tell their bytes: a job also starts, loads and ends while packets are seen.
    if by_time is not None:
        step_bytes = float(np.median(np.diff(by_time.starts)))
        steps.append(_Step(by_time.step_bytes, step_bytes, by_time.confidence))
    if by_bytes is not None:
        length_s = float(np.diff(by_bytes.starts).mean())
        steps.append(_Step(length_s, by_bytes.step_bytes, by_bytes.confidence))
    few_s = float(times[-1] - times[0]) / _FEW_STEPS
    believed = [each for each in steps if each.confidence >= _BELIEVED and each.length_s < few_s]
    if len(believed) == 2:
        first, second = believed
        # Where they differ, one is some steps: a wrong whole is never shorter than the step.
        if abs(first.length_s / second.length_s - 1) < _AGREE:
            return first
        return min(believed, key=lambda each: each.length_s)
    return next((found for found in believed if found.confidence >= _BELIEVED_ALONE), None)
