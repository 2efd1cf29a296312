"""Collectives that are no gradient buckets, and the ranks of a collective.

These are all ranks, or a group such as a model is split over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fullwire.collectives.closed_form import sent_as
from fullwire.run.intervals import covered_ns, union, within, without
from fullwire.run.kinds import LAYERS, usual_step_s
from fullwire.run.placement import ranks_per_processor, sums_on_processors
from fullwire.run.process_groups import told_ranks
from fullwire.run.processors import own_work_s
from fullwire.run.run import SIZE_UNKNOWN, Collectives, Run, Spans, Whole
from fullwire.run.split_layers import LEAST_BYTES, are_of_split_layers
from fullwire.run.usual import local_steps_of
from fullwire.simulation.beside_layers import Course, Stages, matched_rows

# The bytes of their sums, at most: halves of a float summed as whole ones.
TIMES_GRADIENTS = 2.1
AS_MANY = 0.05  # of a step's gradients: sums whose bytes differ by less hold all of them
_MOST_PERIODS = 20_000  # used: later ones add little
AFTER_NS = 2**50  # longer than any pass
Held: TypeAlias = tuple[tuple[str, int, int], ...]  # kind, bytes and ranks of each collective


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Others:
    """The collectives of a step that are no gradient buckets."""

    op: tuple[str, ...] = ()  # as the job issues them
    backend: str | None = None  # which may send one as another; see `sent`
    bytes: tuple[int, ...] = ()
    # The ranks that each is among; 0 for all, however many, and -N for one in N of all.
    members: tuple[int, ...] = ()
    exposed_ns: int = 0
    total_ns: int = 0  # of their durations
    calling_ns: int = 0  # from the end of each to the next, where the host is otherwise idle
    awaited: tuple[bool, ...] = ()  # amidst computation, which needs their results
    issue_ns: tuple[int, ...] = ()  # after the backward pass began: 0 before, AFTER_NS after it
    waits_ns: tuple[int, ...] = ()  # of computing in the backward pass for each, if for any
    in_host: tuple[bool, ...] = ()  # between ranks of one host, which no line joins, if any are
    are_gradients: bool = False  # summed by hand, in place of buckets
    are_of_more: bool = False  # these sums, as they have many more bytes than the gradients
    sum_gradients: bool = False  # in another way, as shards are, in place of buckets too
    adds_up_shards: bool = False  # in another group than the one whose scatters make them
    course: Course | Stages | None = None  # on devices, of these ways
    rest_ns: int = 0  # of the time exposed in a course: rests for another reason than these

    @property
    def sent(self) -> tuple[str, ...]:
        """Return the operation whose messages the backend sends for each, which costs the time."""
        return tuple(sent_as(op, self.backend) for op in self.op)

    @property
    def kinds(self) -> list[tuple[str, int, int]]:
        """Return for each the operation that is sent, its bytes, and its members."""
        return list(zip(self.sent, self.bytes, self.members, strict=True))

    @property
    def kinds_after(self) -> list[tuple[str, int, int]]:
        """Return the kinds of those after the backward pass: one optimizer's step has them once."""
        return [
            kind for kind, at_ns in zip(self.kinds, self.issue_ns, strict=True) if at_ns == AFTER_NS
        ]

    @property
    def kinds_in_hosts(self) -> list[tuple[str, int, int]]:
        """Return the kinds of those within one host, but for those after the backward pass."""
        rows = zip(self.kinds, self.issue_ns, self.in_host, strict=bool(self.in_host))
        return [kind for kind, at_ns, is_inside in rows if is_inside and at_ns != AFTER_NS]

    def slower(self, times: float) -> Others:
        """Return the collectives of a step whose own work takes so many times as long."""
        return replace(
            self,
            calling_ns=round(self.calling_ns * times),
            issue_ns=tuple(
                at_ns if at_ns == AFTER_NS else round(at_ns * times) for at_ns in self.issue_ns
            ),
            waits_ns=tuple(round(each_ns * times) for each_ns in self.waits_ns),
        )

    @property
    def untold_slowing(self) -> float:
        """Return the most slowing of computing beside a course that no kernels tell."""
        return 0.0 if self.course is None else self.course.untold_slowing

    @property
    def stages(self) -> int | None:
        """Return the ranks of the pipeline that the step is played in, if it is one."""
        if not isinstance(self.course, Stages) or self.course.are_a_ring:
            return None
        return len(self.course.over)

    @property
    def shards(self) -> int:
        """Return N where one in N ranks sum the same gradients in a group of their own."""
        return max(1, -min(self.members, default=0))

    def are_all_that_is_sent(self, run: Run) -> bool:
        """Say whether a job of several workers sends these collectives and keeps its gradients.

        So it is where layers or experts are split over ranks: each rank has gradients of its own.
        Neither DDP nor these collectives sum the gradients then, and no step ends a round of
        several with an average of parameters.
        """
        are_sums = self.are_gradients or self.sum_gradients
        is_ddp = run.facts.buckets is not None or run.facts.hook is not None
        return bool(self.op) and not (are_sums or is_ddp or local_steps_of(run) > 1)

    def small(self, wanted: str, most_bytes: int) -> list[int]:
        """Return the places of small collectives of one kind, among all ranks, that can wait."""
        rows = zip(self.op, self.bytes, self.members, self.awaited, strict=True)
        return [
            place
            for place, (op, size, members, is_awaited) in enumerate(rows)
            if op == wanted and not members and size <= most_bytes and not is_awaited
        ]

    def joined(self, places: Sequence[int]) -> Others:
        """Return the collectives with those at some places joined into one, at the last place."""
        whole = [*self.bytes]
        whole[places[-1]] = sum(self.bytes[place] for place in places)
        return replace(self, bytes=tuple(whole))._without(set(places[:-1]))

    def of_the_last_pass(self) -> Others:
        """Return the collectives without the sums over all ranks in a step's earlier passes.

        These were issued before the last backward pass began.
        """
        rows = enumerate(zip(self.sent, self.members, self.issue_ns, strict=True))
        return self._without(
            {
                place
                for place, (op, members, issue_ns) in rows
                if op == "allreduce" and not members and not issue_ns
            }
        )

    def _without(self, gone: Collection[int]) -> Others:
        places = [place for place in range(len(self.op)) if place not in gone]

        def kept(values: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(values[place] for place in places)

        return replace(
            self,
            op=kept(self.op),
            bytes=kept(self.bytes),
            members=kept(self.members),
            issue_ns=kept(self.issue_ns),
            waits_ns=kept(self.waits_ns) if self.waits_ns else (),
            in_host=kept(self.in_host) if self.in_host else (),
            awaited=kept(self.awaited),
            course=self.course and self.course.of(places),
        )


def ranks_among(members: int, workers: int) -> int:
    """Return how many of these workers a collective is among, by its `Others.members`."""
    return members if members > 0 else -(-workers // max(1, -members))


def members_of(run: Run) -> dict[str, int]:
    """Return how many ranks each group has, by its name.

    From a few ranks' traces the group's other members are unknown. These may tell how many ranks a
    group has. Else a group of all ranks in the run counts as a group of all workers.
    """
    workers, table = run.facts.workers or 1, run.collectives
    if not len(table):
        return {}
    names = table.group.tolist()
    place = {name: number for number, name in enumerate(dict.fromkeys(names))}
    of_group = np.fromiter(map(place.__getitem__, names), np.int64, len(names))  # sorts soon
    ranks, of_rank = np.unique(table.rank, return_inverse=True)
    pairs = np.unique(of_group * len(ranks) + of_rank.reshape(-1))
    counts = np.bincount(pairs // len(ranks))
    told = told_ranks(run.facts)

    def ranks_of(name: str, count: int) -> int:
        size = told(name) if len(ranks) < workers else 0
        if 2 <= size <= workers:  # groups may share a name, and then it has more ranks here
            return size
        return workers if count == len(ranks) else count

    return {name: ranks_of(name, count) for name, count in zip(place, counts.tolist(), strict=True)}


def summing_group(
    sums: Collectives, members: Mapping[str, int], gradient_bytes: int, workers: int
) -> tuple[str | None, bool]:
    """Return the group of some ranks that more workers make larger, and if it adds up shards.

    It sums as many bytes as a rank's gradients have, so its ranks have the same part of a model.
    Where it shards its sums and another group adds these up, more workers make the other one
    larger: its ranks hold the same shards.
    """
    names, place = np.unique(sums.group.astype(str), return_inverse=True)
    if not len(names):
        return None, False
    of_each = np.bincount(place.reshape(-1), sums.bytes, len(names))
    nearest = int(np.abs(of_each - gradient_bytes).argmin())
    name = str(names[nearest])

    def are_near(wanted_bytes: float) -> NDArray[np.bool_]:
        return np.asarray(np.abs(of_each - wanted_bytes) <= AS_MANY * wanted_bytes)

    is_summing = bool(are_near(gradient_bytes)[nearest])
    adds_up_shards = are_near(gradient_bytes / members[name])
    adds_up_shards[nearest] = False
    if adds_up_shards.any():
        name = str(names[np.argmax(adds_up_shards)])
    grows = is_summing and workers % members[name] == 0
    return name if grows else None, bool(adds_up_shards.any())


def calling_ns_of(rows: Collectives, spans: Spans) -> int:
    """Return the time between collectives that are called one after another, computation aside.

    It counts every pause as long as the usual one: a longer pause has another reason.
    """
    order = np.argsort(rows.issue_ns)
    before_ns, after_ns = rows.end_ns[order][:-1], rows.issue_ns[order][1:]
    computing = spans.rows((spans.lane == "compute") | (spans.lane == "input"))
    begun = np.searchsorted(np.sort(computing.start_ns), after_ns)
    over = np.searchsorted(np.sort(computing.end_ns), before_ns, side="right")
    pauses_ns = np.sort(np.maximum(after_ns - before_ns, 0)[begun == over])
    return int(pauses_ns[(len(pauses_ns) - 1) // 2]) * len(pauses_ns) if len(pauses_ns) else 0


def shows_devices(run: Run) -> bool:
    """Say whether a run has the devices' own times of computing and collectives, as a trace has.

    So has a step of shards that was simulated from one.
    """
    is_of_trace = run.provenance.origin == "imported" or (run.spans.name == LAYERS).any()
    return bool(is_of_trace) and not sums_on_processors(run)


def is_pipeline(run: Run, rows: Collectives) -> bool:
    """Say whether devices hand these on and take others, as stages of a pipeline do.

    A flag or a count is no work that is handed on.
    """
    is_work = rows.bytes >= LEAST_BYTES
    return shows_devices(run) and {"send", "recv"} <= set(rows.op[is_work].tolist())


def exposed_by_rank(
    run: Run, rows: Collectives, buckets: Collectives, ranks: Whole, numbers: Whole
) -> Whole:
    """Return by rank how long shards, or a pipeline's, are exposed on devices; else 0.

    Time beside buckets belongs to the buckets. Another rank stands for one without computing, which
    gets the largest number.
    """
    computing = run.spans.rows(run.spans.lane == "compute")
    has_none = ~np.isin(ranks, computing.rank)
    are_shards = run.facts.buckets is None and shows_devices(run)
    if not (are_shards or is_pipeline(run, rows)):
        return has_none.astype(np.int64)
    rows, buckets = (each.rows(np.isin(each.step, numbers)) for each in (rows, buckets))
    computing = computing.rows(np.isin(computing.step, numbers))
    found = []
    for rank in ranks:
        mine, busy = rows.rows(rows.rank == rank), computing.rows(computing.rank == rank)
        sums = buckets.rows(buckets.rank == rank)
        busy_ns = np.append(busy.start_ns, sums.issue_ns), np.append(busy.end_ns, sums.end_ns)
        start_ns, end_ns = np.append(mine.issue_ns, busy_ns[0]), np.append(mine.end_ns, busy_ns[1])
        found.append(covered_ns(start_ns, end_ns) - covered_ns(*busy_ns))
    exposed_ns = np.array(found, np.int64) // max(len(numbers), 1)
    return np.where(has_none, exposed_ns.max(), exposed_ns)


def are_awaited(rows: Collectives, spans: Spans) -> tuple[bool, ...]:
    """Return which are called in a computation that waits for them, as a split layer's sums."""
    computing = spans.rows(spans.lane == "compute")
    order = np.argsort(computing.start_ns)
    start_ns, end_ns = computing.start_ns[order], computing.end_ns[order]

    def within(moments_ns: Whole) -> Whole:
        place = np.searchsorted(start_ns, moments_ns, side="right") - 1
        # The last is for moments before the first computation.
        over_ns = np.append(end_ns, np.iinfo(np.int64).min)[place]
        return np.where(moments_ns < over_ns, place, -1)

    is_wait = (spans.lane == "communication") & (spans.name == "wait")
    called = within(rows.issue_ns)
    return tuple(((called >= 0) & np.isin(called, within(spans.start_ns[is_wait]))).tolist())


def are_buckets(run: Run, rows: Collectives, is_sum: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Say which of these sums are buckets, where the run has each bucket as one gradient.

    So it is in the trace of a device. Kernels on one stream run in turn. A bucket that was ready in
    the backward pass may begin any time after it, when the sums before it have ended.
    """
    found = np.zeros(len(rows), bool)
    if run.facts.buckets != "none":
        return found
    places = np.flatnonzero(is_sum)
    sums, gradients = rows.rows(places), run.gradients
    keys = [np.stack((table.rank, table.step, table.bytes), axis=1) for table in (sums, gradients)]
    key = np.unique(np.concatenate(keys), axis=0, return_inverse=True)[1].reshape(-1)
    made = np.bincount(key[len(sums) :], minlength=len(key))
    order = np.lexsort((sums.issue_ns, key[: len(sums)]))
    own = key[order]
    number = np.arange(len(own)) - np.searchsorted(own, own)  # among sums of as many bytes
    found[places[order]] = number < made[own]
    return found


def splits_model(run: Run, backwards: Spans) -> bool:
    """Return whether a trace shows all sizes, and the sums of layers that are split over ranks.

    Or it shows all stages of a pipeline. Such a trace may show no gradients, as each rank keeps its
    own. Neither does a step that was simulated from it.
    """
    rows = run.collectives.rows(run.collectives.step >= 0)
    if (rows.dtype == SIZE_UNKNOWN).any():
        return False
    if is_pipeline(run, rows) and len(np.unique(rows.rank)) == run.facts.workers:
        return True
    if run.provenance.origin == "simulated":
        return run.facts.buckets is None and len(rows) > 0
    if run.provenance.origin != "imported" or run.facts.buckets is not None:
        return False
    return bool(_are_of_layers(run, rows, backwards).any())


def share_for_layers(run: Run) -> float:
    """Return the share of the bytes that layers wait for amidst computing.

    They are in groups that a layer is split over, or go from one stage of a pipeline to the next.
    """
    rows = run.collectives.rows(run.collectives.step >= 0)
    all_bytes = float(rows.bytes.sum(dtype=np.float64))
    if not all_bytes:
        return 0.0
    backwards = run.spans.rows((run.spans.lane == "host") & (run.spans.name == "backward"))
    are_sums = _are_of_layers(run, rows, backwards)
    is_of_layers = are_sums | np.isin(rows.op, ("send", "recv"))
    splitting = set(rows.group[are_sums].tolist()) - {""}  # other groups may lack a name, too
    is_of_layers |= np.array([name in splitting for name in rows.group.tolist()], bool)
    return float(rows.bytes[is_of_layers].sum(dtype=np.float64)) / all_bytes


def _are_of_layers(run: Run, rows: Collectives, backwards: Spans) -> NDArray[np.bool_]:
    """Return which rows are of layers that are split over ranks, as their sums are.

    The reader of a processor's trace takes a sum in the backward pass for gradients, unless it is
    one of a layer. So without any gradients, all of them are.
    """
    columns = (backwards.rank, backwards.step, backwards.start_ns, backwards.end_ns)
    of_step = {
        (rank, step): (start, end) for rank, step, start, end in np.stack(columns, 1).tolist()
    }
    none = (-(2**62), -(2**62))  # without a pass, sums are neither before it nor in it
    step = list(zip(rows.rank.tolist(), rows.step.tolist(), strict=True))
    start_ns, end_ns = np.array([of_step.get(key, none) for key in step]).reshape(-1, 2).T
    is_before = rows.issue_ns < start_ns
    is_amidst = ~is_before & (rows.issue_ns <= end_ns)
    as_many = sums_on_processors(run)
    if as_many and run.provenance.origin == "imported" and not len(run.gradients):
        return np.asarray(is_amidst & (rows.op == "allreduce") & (rows.bytes > 0))
    which = (rows.group, rows.op, rows.bytes, step)
    return are_of_split_layers(*which, is_before, is_amidst, as_many=as_many)


class Period(NamedTuple):
    """A time in which some collective was on its way."""

    step: int
    held: Held  # in order of size
    time_s: float
    beside: float  # share of it in which computing had the processors that messages need


def busy_periods(run: Run, members: Mapping[str, int], fewest: int) -> Iterator[Period]:
    """Go through the busy periods of the steps, of collectives of so many ranks or more."""
    rows = run.collectives.rows(run.collectives.step >= 0)
    issued_ns, ended_ns, first = _of_all_ranks(rows, fewest)
    order = np.argsort(issued_ns, kind="stable")[:_MOST_PERIODS]
    issued_ns, ended_ns, first = issued_ns[order], ended_ns[order], first[order]
    if not len(order):
        return
    reached_ns = np.maximum.accumulate(ended_ns)
    begins = np.flatnonzero(np.append([True], issued_ns[1:] > reached_ns[:-1]))
    ends = np.append(begins[1:], len(issued_ns))
    beside = _share_beside_computing(run, issued_ns[begins], reached_ns[ends - 1])
    for begin, end, share in zip(begins, ends, beside, strict=True):
        time_ns = int(reached_ns[end - 1] - issued_ns[begin])
        held = [
            (str(rows.op[row]), int(rows.bytes[row]), members[str(rows.group[row])])
            for row in first[begin:end]
        ]
        if time_ns > 0:
            yield Period(int(rows.step[first[begin]]), _one_way(held), time_ns * 1e-9, share)


def _share_beside_computing(run: Run, start_ns: Whole, end_ns: Whole) -> list[float]:
    """Return of each stretch of time the share in which computing had the processors.

    It is the mean of the ranks. A rank that only waits for its accelerator leaves them free, and so
    do few ranks on many processors.
    """
    step_s, own_s = usual_step_s(run), own_work_s(run)
    if not sums_on_processors(run) or not step_s or not own_s:
        return [0.0] * len(start_ns)
    beside: NDArray[np.float64] = np.zeros(len(start_ns))
    for rank in (ranks := np.unique(run.spans.rank)):
        stretches = _computing(run.spans.rows(run.spans.rank == rank))
        beside += within(start_ns, end_ns, stretches) / np.maximum(end_ns - start_ns, 1)
    busy = min(own_s * (ranks_per_processor(run) or 1.0) / step_s, 1.0)
    return [busy * share / max(len(ranks), 1) for share in beside.tolist()]


def computing_s(run: Run) -> float:
    """Return how long the rank computes in a step that computes least: no late rank."""
    whole_ns, steps = [], 1
    for rank in np.unique(run.spans.rank):
        # Probe steps and evaluations have no number of a step.
        mine = run.spans.rows((run.spans.rank == rank) & (run.spans.step >= 0))
        start_ns, end_ns = _computing(mine)
        whole_ns.append(int((end_ns - start_ns).sum()))
        steps = max(steps, int(((mine.lane == "host") & (mine.name == "step")).sum()))
    return min(whole_ns, default=0) * 1e-9 / steps


def _computing(spans: Spans) -> tuple[Whole, Whole]:
    """Return the stretches of time in which a rank computes, but for its waits."""
    computing, waits = (spans.rows(spans.lane == lane) for lane in ("compute", "communication"))
    return without(union(computing.start_ns, computing.end_ns), union(waits.start_ns, waits.end_ns))


def _one_way(held: Sequence[tuple[str, int, int]]) -> Held:
    """Return collectives with the transfers of one direction alone, that with the most bytes.

    A rank's link carries what it sends to a stage beside what another stage sends to it.
    """
    sizes = {op: sum(size for name, size, _ in held if name == op) for op in ("recv", "send")}
    less = min(sizes, key=sizes.__getitem__)
    return tuple(sorted(each for each in held if each[0] != less or not all(sizes.values())))


def _of_all_ranks(rows: Collectives, fewest: int) -> tuple[Whole, Whole, NDArray[np.intp]]:
    """Bring the ranks' rows of each collective together: last issue, end, one of the rows.

    The end is the mean of the ranks. Of a gather it is the last: one rank has its data late, and
    others then wait for this rank in the next collective.
    A collective that some rank of its group lacks is left out, because the moment when it could
    begin is unknown. So is one that the first rank has no part in.
    """
    groups = np.unique(rows.group.astype(str), return_inverse=True)[1]
    number = matched_rows(rows)
    order = np.lexsort((rows.rank, number))
    begins = np.flatnonzero(np.append([True], np.diff(number[order]) > 0))
    if not len(order):
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.intp)
    count = np.diff(np.append(begins, len(order)))
    issued_ns = np.maximum.reduceat(rows.issue_ns[order], begins)
    took_ns = rows.end_ns[order] - issued_ns.repeat(count)
    is_gather = rows.op[order][begins] == "allgather"
    ended_ns = np.where(
        is_gather, np.maximum.reduceat(took_ns, begins), np.add.reduceat(took_ns, begins) // count
    )
    most = np.zeros(int(groups.max()) + 1, np.int64)
    np.maximum.at(most, groups[order][begins], count)
    is_whole = (count == most[groups[order][begins]]) & (count >= fewest)
    is_whole &= rows.rank[order][begins] == rows.rank.min()
    return (issued_ns[is_whole], (issued_ns + ended_ns)[is_whole], order[begins][is_whole])
