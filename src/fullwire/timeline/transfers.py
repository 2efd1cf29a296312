"""Collectives matched over ranks: when each could begin, and how much it had to send.

Rows belong together by group, operation and sequence. Sending and receiving are one operation of a
group of two. A collective cannot begin before its latest rank has issued it. A rank's time on it
before that moment is waiting, and after it transfer. Where some ranks are missing from the
recording, the latest known issue is only a lower bound.

Each collective's waiting is shared among the ranks that came late. A rank is late by as much as it
issues a collective after the middle one of its members. It may be late because it waited itself,
for a rank of another group. An example is a job in which a node shares each layer's work and nodes
share gradients. There one slow rank brings all ranks of its node late to their gradients.

So a rank is excused for its waiting since its group last met, beyond that of the middle rank. That
part of the waiting is assigned to no rank here. It already counts where the rank itself waited.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fullwire.collectives.closed_form import gradient_cost, observed_cost, sent_as
from fullwire.collectives.cost import AddTimes, Cost, Floats
from fullwire.collectives.link_cost import collective_cost
from fullwire.collectives.registry import usual_algorithm, with_formula
from fullwire.collectives.tuning import AUTO, LIBRARY
from fullwire.compression.compressor import Compressor, parse_codec
from fullwire.errors import UsageError
from fullwire.run.placement import (
    host_of_rank,
    is_inside_a_node,
    shares_one_host,
    sums_on_processors,
)
from fullwire.run.process_groups import descriptions_of, told_ranks
from fullwire.run.run import SIZE_UNKNOWN, Collectives, Run, Text, Whole
from fullwire.run.split_layers import are_between_stages
from fullwire.units import ratio, shown

MOST_WORKERS = 100_000_000
CLOCK_SHARE = 0.1  # of the collectives may end before their latest issue: clocks differ a little
_NEED_ALL = ("allreduce", "allgather", "reducescatter", "alltoall", "barrier")
_PIPELINE = re.compile(r"(?:^|[^a-z])(?:pp|pipe(?:line)?|stages)(?:[^a-z]|$)")


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Transfers:
    """Columns beside those of `run.collectives`, row by row."""

    ready_ns: Whole  # the latest issue on any rank, within this rank's own issue and end
    is_known: NDArray[np.bool_]  # every rank's issue is there
    sent_bytes: Floats  # that a rank sends for it, on a line or inside its host; NaN if unknown
    floor_ns: Floats  # on the wire at line rate; NaN where the rate is unknown
    is_in_host: NDArray[np.bool_]  # between ranks of one host, without any line
    codec_ns: Floats  # packing and unpacking, for runs that state a compressor's speed
    hops: Whole  # messages that wait for each other
    caused_ns: Floats  # the waiting of all other ranks for this one, but for stages of a pipeline
    is_of_pipeline: NDArray[np.bool_]  # in groups that join its stages
    clock_error_ns: int  # the least error between ranks' clocks; 0 where none is seen


def transfers_of(run: Run, rate_bps: Mapping[int, float]) -> Transfers:
    """Match the collectives of a run; `rate_bps` is each rank's line rate, as far as known."""
    table = run.collectives
    group, op = codes_of(table.group), codes_of(table.op)
    # Operations as they are matched: one rank sends and another one receives.
    kinds = ["sendrecv" if name in ("send", "recv") else name for name in op.names]
    kind = codes_of(np.array(kinds, object)).codes[op.codes]
    matched = _Matched.over(table, group.codes, kind)
    latest_ns = np.empty(len(table), np.int64)
    latest_ns[matched.order] = matched.latest_ns
    members, is_known = _members(run, group, matched.ranks_by_row())
    cost, codec_ns = _costs(run, op, members)
    # The slowest link of a row's group paces it; 0 where that is unknown.
    recorded = recorded_ranks(run)
    rates = np.array([rate_bps.get(rank, 0.0) for rank in recorded.tolist()])
    slowest = np.full(len(group.names), np.inf)
    np.minimum.at(slowest, group.codes, rates[np.searchsorted(recorded, table.rank)])
    slowest_bps = slowest[group.codes]
    floor_ns = 8e9 * cost.wire_bytes / np.maximum(slowest_bps, 1e-3)
    is_in_host = _are_in_one_host(run, group)[group.codes]
    has_size = table.dtype != SIZE_UNKNOWN
    ready_ns = np.clip(latest_ns, table.issue_ns, table.end_ns)
    is_of_pipeline = _join_stages(run, group)[group.codes]
    return Transfers(
        ready_ns=ready_ns,
        is_known=is_known,
        sent_bytes=np.where(has_size, cost.wire_bytes, np.nan),
        floor_ns=np.where(
            is_in_host, 0.0, np.where((slowest_bps > 0) & has_size, floor_ns, np.nan)
        ),
        is_in_host=is_in_host,
        codec_ns=codec_ns,
        # A collective of unknown size cannot serve as a small one that shows a message's cost.
        hops=np.where(has_size, np.asarray(cost.hops, np.int64), 0),
        caused_ns=np.where(is_of_pipeline, 0.0, matched.caused_ns(table, group.codes, ready_ns)),
        is_of_pipeline=is_of_pipeline,
        clock_error_ns=_clock_error_ns(run, latest_ns, is_known),
    )


def _join_stages(run: Run, group: Coded) -> NDArray[np.bool_]:
    """Return for each group whether it joins stages of a pipeline, so that these wait there.

    Its name or its description says so, or the transfers of a job do. So does a group with two
    stages among its ranks. These meet at a norm or at the end of a step, and the first one is the
    last to drain. The calls of a recording tell so only beside a library for pipelines: workers and
    their parameter server, or ranks that exchange models, call the same.
    """
    described = descriptions_of(run.facts.group_names or "")
    texts = [str(name) for name in group.names]
    told = [(text, described.get(text.split(" ")[0], "")) for text in texts]
    found = np.array(
        [any(_PIPELINE.search(text.lower()) for text in texts) for texts in told], bool
    )
    is_written = run.facts.stages is not None  # as a prediction from such a job
    if run.provenance.origin == "simulated" and not is_written:
        return found
    are_calls = run.provenance.origin == "measured"
    if run.facts.pipelining if are_calls else not sums_on_processors(run):
        found[group.codes[are_between_stages(run.collectives, are_calls=are_calls)]] = True
    if not found.any():
        return found
    pairs = np.unique(np.stack([group.codes, run.collectives.rank]), axis=1)
    ranks = [set(pairs[1][pairs[0] == code].tolist()) for code in range(len(texts))]
    stages = [ranks[code] for code in np.flatnonzero(found)]
    found |= np.array([any(len(of & mine) > 1 for of in stages) for mine in ranks], bool)
    return found


def world(run: Run) -> int:
    """Return how many ranks the job had: as announced, or as many as left a trace."""
    announced = run.facts.workers or 0
    if announced > MOST_WORKERS:
        raise UsageError(f"{run.place}: a job of {shown(announced)} workers cannot be")
    return max(announced, len(recorded_ranks(run)), 1)


def is_world_told(run: Run) -> bool:
    """Say whether a run tells the number of its ranks: a log of a training script does not."""
    return run.facts.workers is not None or run.provenance.origin != "imported"


def recorded_ranks(run: Run) -> Whole:
    """Return the ranks that left a trace, in order."""
    ranks = np.concatenate([_changes(run.spans.rank), _changes(run.collectives.rank)])
    return np.array(sorted({*ranks.tolist()}), ranks.dtype)  # np.unique loads masked arrays


def _changes(column: Whole) -> Whole:
    """Return a column without repetitions of the row before, so that few rows are sorted."""
    is_new = np.ones(len(column), bool)
    is_new[1:] = column[1:] != column[:-1]
    return column[is_new]


def holds_times(run: Run) -> bool:
    """Return whether the run has durations: logs and schedules name events without times."""
    spans, table = run.spans, run.collectives
    return bool((spans.end_ns > spans.start_ns).any() or (table.end_ns > table.issue_ns).any())


def stands_for_all(run: Run) -> bool:
    """Return whether few ranks stand for every rank: one of a simulation, one of each stage."""
    return run.provenance.origin == "simulated" and len(recorded_ranks(run)) < world(run)


@dataclass(frozen=True, eq=False, slots=True)
class Coded:
    """A column of text as whole numbers: `names[codes]` is the column."""

    codes: Whole
    names: tuple[str, ...]


def codes_of(column: Text) -> Coded:
    """Number the texts of a column in the order in which they come."""
    is_new = np.ones(len(column), bool)
    is_new[1:] = column[1:] != column[:-1]
    first = np.flatnonzero(is_new)  # of equal texts in a row, which samples have by the thousand
    if 2 * len(first) > len(column):
        return _numbered(column.tolist())
    coded = _numbered(column[first].tolist())
    return Coded(np.repeat(coded.codes, np.diff(np.append(first, len(column)))), coded.names)


def _numbered(values: list[str]) -> Coded:
    number = {name: code for code, name in enumerate(dict.fromkeys(values))}
    codes = np.fromiter(map(number.__getitem__, values), np.int64, len(values))
    return Coded(codes, tuple(number))


@dataclass(frozen=True, eq=False, slots=True)
class _Matched:
    """Rows in an order in which those of one collective follow each other, by issue."""

    order: NDArray[np.intp]
    first: Whole  # place of each collective's first row in that order
    count: Whole  # its rows
    latest_ns: Whole  # its latest issue, for each row in that order

    @classmethod
    def over(cls, table: Collectives, group: Whole, kind: Whole) -> _Matched:
        order = np.lexsort((table.issue_ns, table.sequence, kind, group))
        keys = [column[order] for column in (group, kind, table.sequence)]
        is_new = np.ones(len(order), bool)
        is_new[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
        first = np.flatnonzero(is_new)
        count = np.diff(np.append(first, len(order)))
        latest_ns = table.issue_ns[order][first + count - 1]
        return cls(order, first, count, np.repeat(latest_ns, count))

    def ranks_by_row(self) -> Whole:
        by_row = np.empty(len(self.order), np.int64)
        by_row[self.order] = np.repeat(self.count, self.count)
        return by_row

    def caused_ns(self, table: Collectives, group: Whole, ready_ns: Whole) -> Floats:
        """Return for each row the others' waiting for its rank; it could begin at `ready_ns`."""
        caused_ns = np.zeros(len(table))
        if not len(self.order):
            return caused_ns
        issue_ns = table.issue_ns[self.order]
        # The waiting of each rank in other groups since its group last met.
        own_ns = ready_ns - table.issue_ns
        by_rank = np.lexsort((table.issue_ns, table.rank))
        reached_ns = np.empty(len(by_rank), np.int64)
        reached_ns[by_rank] = np.cumsum(own_ns[by_rank])
        by_group = np.lexsort((table.issue_ns, group, table.rank))
        before, later = by_group[:-1], by_group[1:]
        is_same = (table.rank[before] == table.rank[later]) & (group[before] == group[later])
        before, later = before[is_same], later[is_same]
        since_ns = np.zeros(len(by_group), np.int64)
        since_ns[later] = (reached_ns - own_ns)[later] - reached_ns[before]
        waited_ns = since_ns[self.order]
        middle = np.repeat(self.first + (self.count - 1) // 2, self.count)
        late_ns = np.maximum(issue_ns - issue_ns[middle], 0)
        excused_ns = np.maximum(waited_ns - waited_ns[middle], 0)
        all_waited_ns = np.add.reduceat(self.latest_ns - issue_ns, self.first)
        all_late_ns = np.maximum(np.add.reduceat(late_ns, self.first), 1)
        caused_ns[self.order] = np.maximum(late_ns - excused_ns, 0) * np.repeat(
            all_waited_ns / all_late_ns, self.count
        )
        return caused_ns


def _members(run: Run, group: Coded, here: Whole) -> tuple[Whole, NDArray[np.bool_]]:
    """Return the size of each row's group, and whether all of it was recorded for this row."""
    recorded, workers = recorded_ranks(run), world(run)
    if stands_for_all(run):  # the others of a group that one rank stands for do as that one does
        return np.where(here == 1, workers, here), np.ones(len(here), bool)
    rank = np.searchsorted(recorded, run.collectives.rank)
    used = np.unique(group.codes * len(recorded) + rank) // max(len(recorded), 1)
    size = np.bincount(used, minlength=len(group.names))
    # A group of all ranks that have collectives counts as the whole job's: a rank with spans only
    # has lost its collectives.
    communicating = len(np.unique(rank))
    members = np.where(size == communicating, workers, size)
    if len(recorded) < workers:  # the traces of few ranks may still tell the size of their groups
        told = np.array([*map(told_ranks(run.facts), group.names)], np.int64)
        members = np.where((told >= 2) & (told <= workers), told, members)
    members = members[group.codes]
    return members, (here == members) & (len(recorded) == workers)


def _costs(run: Run, op: Coded, members: Whole) -> tuple[Cost, Floats]:
    """Return each row's cost and its compressor's time, worked out once per operation and size."""
    count = len(members)
    compressor = stated_compressor(run)
    algorithm, usual = run.facts.algorithm or "ring", with_formula("allreduce")
    wire_bytes, codec_ns, hops = np.zeros(count), np.zeros(count), np.zeros(count, np.int64)
    most = int(members.max(initial=1)) + 1
    for pair in np.unique(op.codes * most + members).tolist():
        code, workers = divmod(pair, most)
        rows = np.flatnonzero((op.codes == code) & (members == workers))
        size = run.collectives.bytes[rows].astype(np.float64)
        stated = compressor if op.names[code] == "allreduce" else None
        is_sum = stated is not None and stated.combining == "sum"
        if is_sum and algorithm not in usual and run.facts.cluster and workers == world(run):
            cost = _on_links(run.facts.cluster, algorithm, workers, size)
        elif stated is not None:
            by_formula = algorithm if algorithm in usual else usual[0]
            cost = gradient_cost(stated.combining, by_formula, workers, size, AddTimes())
        else:
            sent = sent_as(op.names[code], run.facts.backend)
            cost = observed_cost(sent, algorithm, workers, size)
        wire_bytes[rows] = cost.wire_bytes / (1.0 if stated is None else stated.ratio)
        if stated is not None:
            packing_s = stated.codec_s_per_byte(workers) * size + stated.bucket_s
            codec_ns[rows] = 1e9 * packing_s
        hops[rows] = cost.hops
    return Cost(wire_bytes, hops, np.zeros(count)), codec_ns  # type: ignore[arg-type]


def _on_links(text: str, algorithm: str, workers: int, size: Floats) -> Cost:
    """Return the cost of an all-reduce by an algorithm that has a cost only on described links.

    Its bytes are as many as the NICs would carry in the time that the busiest links take. Where the
    algorithm depends on the size, they are those of the usual one.
    """
    from fullwire.clusters.description import described  # here: most runs have none

    cluster = described(text, "the run's cluster")
    if algorithm in (AUTO, LIBRARY):
        algorithm = usual_algorithm("allreduce", cluster)
    cost, rate_bps = (
        collective_cost("allreduce", algorithm, cluster, workers=workers),
        cluster.nics.rate_bps,
    )
    line_s = cost.time_s(size, 1 / rate_bps) - cost.time_s(0.0, 1 / rate_bps)
    return Cost(line_s * rate_bps / 8, cost.hops, np.zeros_like(size))


def stated_compressor(run: Run) -> Compressor | None:
    """Return the compressor that the run's facts state, as a simulation writes it."""
    text = run.facts.compression or ""
    if not text:
        return None
    return parse_codec(text) if "," in text else Compressor(ratio=ratio(text, "compression"))


def _are_in_one_host(run: Run, group: Coded) -> NDArray[np.bool_]:
    """Return for each group whether its ranks are on one host, and no line is between them.

    They sum on its processors. Or they are a plan's devices of one node, on the links of the node.
    """
    count, hosts = len(group.names), host_of_rank(run)
    if shares_one_host(run):
        return np.ones(count, bool)
    recorded = recorded_ranks(run)
    is_everyone_known = set(hosts) >= set(recorded.tolist()) and len(recorded) == world(run)
    if not sums_on_processors(run) or not is_everyone_known:
        return np.array([is_inside_a_node(run, str(name)) for name in group.names], bool)
    pairs = np.unique(group.codes * len(recorded) + np.searchsorted(recorded, run.collectives.rank))
    ranks_of: list[list[int]] = [[] for _ in range(count)]
    for pair in pairs.tolist():
        ranks_of[pair // len(recorded)].append(int(recorded[pair % len(recorded)]))
    return np.array(
        [len(ranks) > 1 and len({hosts[rank] for rank in ranks}) == 1 for ranks in ranks_of], bool
    )


def _clock_error_ns(run: Run, latest_ns: Whole, is_known: NDArray[np.bool_]) -> int:
    """Return how far collectives end before they can have begun, rare exceptions aside."""
    needs_all = codes_of(run.collectives.op)
    codes = [code for code, name in enumerate(needs_all.names) if name in _NEED_ALL]
    rows = np.flatnonzero(is_known & np.isin(needs_all.codes, codes))
    if not len(rows):
        return 0
    early_ns = latest_ns[rows] - run.collectives.end_ns[rows]
    return max(0, int(np.quantile(early_ns, 1 - CLOCK_SHARE / 2)))


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class CarriedTimes:
    """How a rank's step spent the time of its collectives."""

    waited_s: float  # for the first bytes of others
    moved_s: float
    added_s: float  # of the bytes transferred
    used: float | None  # of the line rate while transferring; None where that is unknown


def carried(run: Run, rate_bps: Mapping[int, float]) -> CarriedTimes | None:
    """Sum up the transport's own figures in steps; None if they are missing."""
    table = run.carried.rows(run.carried.step >= 0)
    if not len(table):
        return None
    rank_steps = len(np.unique(np.stack([table.rank, table.step]), axis=1).T)
    waited_ns, moved_ns = table.heard_ns - table.begun_ns, np.zeros(len(table), np.int64)
    for rank in np.unique(table.rank).tolist():
        own = np.flatnonzero(table.rank == rank)
        own = own[np.argsort(table.heard_ns[own], kind="stable")]
        # Time in which several streams moved bytes at once counts once.
        ended_ns = np.maximum.accumulate(table.end_ns[own])
        begun_ns = table.heard_ns[own].copy()
        begun_ns[1:] = np.maximum(begun_ns[1:], ended_ns[:-1])
        moved_ns[own] = np.maximum(ended_ns - begun_ns, 0)
    waited_s, moved_s, added_s = (
        float(part_ns.sum()) * 1e-9 / rank_steps
        for part_ns in (waited_ns, moved_ns, table.reducing_ns)
    )
    rates = np.array([rate_bps.get(rank, np.nan) for rank in table.rank.tolist()])
    sends = table.sent_bytes > 0  # a rank that only receives leaves its own link's way out idle
    sent_bits, could_bits = 8.0 * table.sent_bytes.sum(), 1e-9 * (moved_ns * rates)[sends].sum()
    # A share above 1 is dropped: bytes that came before their rank did are no transfer time to it.
    used = float(sent_bits / could_bits) if 0 < sent_bits <= could_bits else None
    return CarriedTimes(waited_s=waited_s, moved_s=moved_s, added_s=added_s, used=used)
