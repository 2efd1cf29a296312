"""The step that stands for all steps of a run: the usual time of each part.

Workers that add up their gradients go in lockstep. So the job's step begins when its ranks do, on
average, and a gradient counts as ready when the last rank has it. Every part is a mean over the
usual steps (`run/usual.py`), as in the account. A warm-up or a hiccup does not move it, and steps
of two lengths have one mean. The step that the parts add up to is then held against the measured
one. T1, the time of one worker alone, leaves out the exposed communication of the step. It is that
of the lower median of the ranks in each step. The additional time of the slowest rank is
`waiting_ns`: all ranks lose it as soon as there are others.
A communication hook may send less than the gradients, `sent_share` of them. It packs amidst the
backward pass, or packs and unpacks after it while no bucket is on its way: `packing_ns`, which T1
leaves out. The account draws T1 part by part, and answers take it from there (`timeline/alone.py`).

Collectives that are no gradient buckets are kept apart: their sizes, and their exposed time.
Examples are a loss that is averaged, FSDP's gathering of weights, and a loop over gradients after
the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fullwire.compression.codec import named_in
from fullwire.run.centre import median_of
from fullwire.run.intervals import covered_ns
from fullwire.run.kinds import EARLIER, LAST, kinds_of
from fullwire.run.placement import host_of_rank, ranks_per_processor, sums_on_processors
from fullwire.run.processors import own_work_s
from fullwire.run.run import Collectives, Run, Spans, Whole
from fullwire.run.split_layers import are_between_stages
from fullwire.run.usual import local_steps_of, means_of_rounds, shared_steps
from fullwire.simulation.beside_layers import Course, Stages, course_of, stages_of
from fullwire.simulation.between_passes import Meetings, meetings_of, without_waits
from fullwire.simulation.groups import (
    AFTER_NS,
    AS_MANY,
    TIMES_GRADIENTS,
    Others,
    are_awaited,
    are_buckets,
    calling_ns_of,
    exposed_by_rank,
    is_pipeline,
    members_of,
    shows_devices,
    summing_group,
)
from fullwire.simulation.step import Step
from fullwire.simulation.step_table import MOST_NS, Steps, is_in, table_of_steps

_SENT_BY_OUR_HOOK = ("allreduce", "alltoall", "allgather")
_BUCKET_LEAVES_NS = 5_000_000  # after its last gradient, at the latest: it may be copied first

# What a step sends: all its gradients at the least, its recorded buckets where these hold other
# bytes, or nothing.
Sending: TypeAlias = Literal["gradients", "buckets", "nothing"]


def typical_step(run: Run, sends: Sending = "gradients") -> Step:
    """Work out the usual step of a run."""
    table = table_of_steps(run)
    sent = _communication(run, table, _workers(run), sends)
    others = sent.others
    # Some traces end a step before its last bucket.
    tail_ns = np.maximum(table.end_ns - np.maximum(table.computed_ns, sent.bucket_end_ns), 0)
    table, meetings = without_waits(table, sent.meetings)
    in_rounds = local_steps_of(run) > 1
    if in_rounds:  # between two sums, no rank waits for another
        table = table.side_by_side()
    kinds, usual, length_ns = kinds_of(run), table.usual, table.length_ns

    def middle(values: NDArray[Any]) -> int:
        return _mean_ns(values[usual])

    begin_ns = table.backward_ns.max(axis=0)
    forward_ns = middle(begin_ns - table.start_ns.mean(axis=0))
    backward_ns = middle(table.computed_ns.max(axis=0) - begin_ns)
    apart_ns = others.exposed_ns + sent.amidst_ns + sent.unpacking_ns  # of the step, with others
    waited_ns = _waited_ns(run, table)  # for ranks that are not in the run
    alone_ns = table.computed_ns - table.start_ns + tail_ns - apart_ns
    alone_ns = alone_ns - waited_ns - sent.more_exposed_ns
    # Take the lower median of the ranks in each step: another rank may be late in each.
    usual_rank_ns = np.sort(alone_ns, axis=0)[(len(alone_ns) - 1) // 2]
    step_ns = table.mean_of_rounds_ns(run, usual_rank_ns) if in_rounds else middle(usual_rank_ns)
    if step_ns <= 0 and not in_rounds:  # ranks wait by turns, and `apart_ns` is the mean of all
        step_ns = int(np.sort(alone_ns[:, usual].mean(axis=1))[(len(alone_ns) - 1) // 2])
    tail_alone_ns = middle(tail_ns.mean(axis=0)) - apart_ns
    together_ns = forward_ns + backward_ns + tail_alone_ns
    measured_ns, spread = length_ns, alone_ns.astype(np.float64)
    usual_ns = float(length_ns[usual].mean())
    if in_rounds:
        numbers, lengths_ns, _ = shared_steps(run)  # also those that make no gradients
        measured_ns = means_of_rounds(run, numbers, lengths_ns)
        usual_ns = float(lengths_ns[kinds.usual(numbers, lengths_ns)].mean())
        own_ns = np.maximum(usual_rank_ns, 1).astype(np.float64)
        spread = spread * kinds.as_mean(table.numbers, own_ns) / own_ns
    late_ns, waiting_ns = (alone_ns - usual_rank_ns)[:, usual], max(0, together_ns - step_ns)
    # Steps do not show it where ranks meet at a round's end, or where early ranks wait for shards.
    if in_rounds or others.course is not None:
        waiting_ns = round(float(late_ns.max(axis=0).mean()))
    if others.course is not None:
        others = replace(others, rest_ns=max(others.course.own_ns - step_ns - waiting_ns, 0))
    around_ns = median_of(measured_ns.tolist())
    off_ns = median_of(np.abs(measured_ns - around_ns.value).tolist()).value
    deviation = 1.4826 * off_ns / max(around_ns.value, 1.0)
    ready_ns = (table.ready_ns.max(axis=0) - begin_ns[:, None])[usual].mean(axis=0)
    sizes = table.bytes
    if sent.buckets is not None:
        rows, left_ns, sizes = sent.buckets
        ready_ns = left_ns[usual[rows] if usual[rows].any() else slice(None)].mean(axis=0)
    step = Step(
        step_ns=step_ns,
        forward_ns=forward_ns,
        backward_ns=backward_ns,
        ready_ns=np.maximum.accumulate(np.round(ready_ns).astype(np.int64)),
        earlier_share=_earlier_share(run, table),
        bytes=sizes,
        meetings=meetings,
        is_estimated=_workers(run) > 1,
        waiting_ns=waiting_ns if len(table.ranks) > 1 or waited_ns.any() else 0,
        lasting_share=_lasting_share(late_ns),
        others=others,
        packing_ns=sent.amidst_ns + sent.packed_late_ns,
        shards=sent.shards,
        sent_share=sent.share,
        sends_nothing=sends == "nothing" or others.are_all_that_is_sent(run),
        sums_amidst=in_rounds and sent.are_amidst,
        processor_ns=round(own_work_s(run) * 1e9),
        measured_ns=round(usual_ns),
        measured_off=(
            max(1 - round(around_ns.low) / max(round(usual_ns), 1), 0.0),
            max(round(around_ns.high) / max(round(usual_ns), 1) - 1, 0.0),
        ),
        count=len(table.numbers),
        deviation=float(deviation),  # a standard deviation
        spread=spread.reshape(-1),
    )
    return step.on_processors_of_its_own(ranks_per_processor(run))


def _earlier_share(run: Run, table: Steps) -> float:
    """Return the share of the backward passes that is over before the last of several begins.

    The last pass of a stage begins when it has taken the last batch. The share is 0 where passes
    before the last sum gradients too.
    """
    spans, taken = run.spans, run.collectives
    passes = spans.rows((spans.lane == "host") & (spans.name == EARLIER))
    taken = taken.rows(are_between_stages(taken) & (taken.op == "recv"))
    over_ns = np.array(table.backward_ns)
    for rows in (passes, taken):
        rows = rows.rows(is_in(rows, table.ranks, table.numbers))
        place = np.searchsorted(table.ranks, rows.rank), np.searchsorted(table.numbers, rows.step)
        is_within = rows.end_ns <= table.computed_ns[place]
        np.maximum.at(over_ns, tuple(axis[is_within] for axis in place), rows.end_ns[is_within])
    begin_ns, computed_ns = table.backward_ns.max(axis=0), table.computed_ns.max(axis=0)
    early_ns = np.minimum(over_ns.max(axis=0), computed_ns) - begin_ns
    if (table.ready_ns.max(axis=0)[:, 0] < over_ns.max(axis=0)).any():
        return 0.0
    return float((early_ns / np.maximum(computed_ns - begin_ns, 1))[table.usual].mean())


def _waited_ns(run: Run, table: Steps) -> Whole:
    """Return how long each rank waits in each step for late ranks, as a simulated step tells it."""
    rows = run.spans.rows((run.spans.lane == "host") & (run.spans.name == "wait"))
    rows = rows.rows(is_in(rows, table.ranks, table.numbers))
    waited_ns = np.zeros(table.start_ns.shape, np.int64)
    place = np.searchsorted(table.ranks, rows.rank), np.searchsorted(table.numbers, rows.step)
    np.add.at(waited_ns, place, rows.end_ns - rows.start_ns)
    return waited_ns


def _lasting_share(late_ns: Whole) -> float:
    """Return how late the latest rank is over all steps, as a share of the latest in each step."""
    of_each_ns, of_all_ns = late_ns.max(axis=0).mean(), late_ns.mean(axis=1).max()
    return float(max(of_all_ns, 0) / of_each_ns) if of_each_ns else 1.0


@dataclass(frozen=True, eq=False, slots=True)
class _Sent:
    """The end of each step's last bucket, and the collectives in buckets and beside them."""

    bucket_end_ns: Whole
    others: Others = field(default_factory=Others)
    more_exposed_ns: Whole | int = 0  # of each rank's shards, than those of `others`
    shards: int = 1
    are_amidst: bool = False  # the first bucket leaves in the backward pass, as gradients do
    share: float = 1.0
    amidst_ns: int = 0  # packed in the backward pass,
    packed_late_ns: int = 0  # and after it, with no bucket on its way;
    unpacking_ns: int = 0  # of this, after the last bucket
    # The steps by their place, when each bucket left in each of them, and the bytes of each, where
    # they are not the gradients'.
    buckets: tuple[Whole, Whole, Whole] | None = None
    meetings: Meetings | None = None  # of the passes of each step


def _communication(run: Run, table: Steps, workers: int, sends: Sending) -> _Sent:
    """Return the communication of the steps.

    A model may be split over ranks, which then also communicate in groups of their own.
    """
    none = np.full(table.end_ns.shape, -MOST_NS, np.int64)
    rows = run.collectives
    if workers == 1:
        return _Sent(none)
    rows = rows.rows(np.isin(rows.rank, table.ranks) & np.isin(rows.step, table.numbers))
    if not len(rows):  # none in a step
        return _Sent(none)
    place = np.searchsorted(table.ranks, rows.rank), np.searchsorted(table.numbers, rows.step)
    if named_in(run.facts.hook) is None:
        is_sum, until_ns = rows.op == "allreduce", _packed_ns(run, table) + _BUCKET_LEAVES_NS
    else:  # Our own hook sends a bucket in two collectives, from a thread of its own.
        is_sum, until_ns = np.isin(rows.op, _SENT_BY_OUR_HOOK), table.end_ns
    is_sum &= rows.issue_ns >= table.backward_ns[place]
    is_bucket = (
        is_sum
        & ((rows.issue_ns <= until_ns[place]) | are_buckets(run, rows, is_sum))
        & (run.facts.buckets is not None and sends != "nothing")
    )
    # Keep the rows of the group that sums a rank's gradients: it sums as many bytes.
    names, group = np.unique(rows.group.astype(str), return_inverse=True)
    pair = place[0] * len(names) + group.reshape(-1)
    bucket_bytes = np.where(is_bucket, rows.bytes, 0)
    sums = np.bincount(pair, bucket_bytes, len(table.ranks) * len(names))
    off = np.abs(sums - float(table.bytes.sum()) * len(table.numbers))
    off[sums == 0] = np.inf
    nearest = off.reshape(len(table.ranks), len(names)).argmin(axis=1)
    is_bucket &= nearest[place[0]] == group.reshape(-1)
    np.maximum.at(none, tuple(axis[is_bucket] for axis in place), rows.end_ns[is_bucket])
    members = members_of(run)
    among = [members[name] for name in set(rows.group[is_bucket].astype(str).tolist())]
    numbers, apart = (
        table.numbers[table.looked_at],
        (rows.rows(~is_bucket), _exposed(run, rows.rows(is_bucket))),
    )
    exposed_ns = exposed_by_rank(run, *apart, table.ranks, numbers)
    rank = table.ranks[np.argmin(exposed_ns)]  # all ranks wait for this one
    others = _others(run, rows, is_bucket, table, members, rank)
    more_ns = (exposed_ns - exposed_ns.min())[:, None] if others.course is not None else 0
    leaves_ns = np.full(table.end_ns.shape, MOST_NS, np.int64)
    np.minimum.at(leaves_ns, tuple(axis[is_bucket] for axis in place), rows.issue_ns[is_bucket])
    is_amidst = (leaves_ns < table.computed_ns)[leaves_ns < MOST_NS]
    are_amidst = bool(2 * is_amidst.sum() > len(is_amidst))
    shards = max(1, workers // max(among, default=workers), others.shards)
    sent = _Sent(none, others, more_ns, shards, are_amidst)
    if sends != "nothing":
        sent = replace(sent, meetings=meetings_of(run, table, rows.rows(is_bucket)))
    if run.facts.hook is not None and sends != "nothing":
        return _by_hook(run, sent, rows.rows(is_bucket), table)
    buckets = _other_than_gradients(rows.rows(is_bucket), table)
    is_more = buckets is not None and buckets[2].sum() > table.bytes.sum()
    # Fewer bytes may be of buckets that were not found. They are not where a recording has no other
    # sums: each rank then has gradients of its own, such as those of its experts.
    other_bytes = float(rows.bytes[(rows.op == "allreduce") & ~is_bucket].sum())
    whole_bytes = float(table.bytes.sum()) * len(table.numbers) * len(table.ranks)
    is_all = run.provenance.origin == "measured" and other_bytes <= AS_MANY * whole_bytes
    return replace(sent, buckets=buckets) if is_more or is_all or sends == "buckets" else sent


def _other_than_gradients(buckets: Collectives, table: Steps) -> tuple[Whole, Whole, Whole] | None:
    """Return steps by their place, when buckets left in each, and the bytes of each bucket.

    Return None where they hold gradients. DDP sends a bucket as a whole, with the places of
    gradients that a step does not make.
    """
    mine = buckets.rows(buckets.rank == table.ranks[0])
    mine = mine.rows(np.lexsort((mine.issue_ns, mine.step)))
    place = np.searchsorted(table.numbers, mine.step)
    counts = np.bincount(place, minlength=len(table.numbers))
    usual = int(np.sort(counts)[(len(counts) - 1) // 2])
    alike = np.flatnonzero(counts == usual)
    mine = mine.rows(np.isin(place, alike))
    sizes = mine.bytes.reshape(len(alike), usual)[len(alike) // 2]
    whole_bytes = int(table.bytes.sum())
    if not usual or abs(int(sizes.sum()) - whole_bytes) <= AS_MANY * whole_bytes:
        return None
    begin_ns = table.backward_ns[0, alike]
    return alike, mine.issue_ns.reshape(len(alike), usual) - begin_ns[:, None], sizes


def _packed_ns(run: Run, table: Steps) -> Whole:
    """Return when the backward pass and a hook's packing at its end were over."""
    packed_ns = table.computed_ns.copy()
    work = run.spans.rows(
        (run.spans.name == "codec") & is_in(run.spans, table.ranks, table.numbers)
    )
    order = np.argsort(work.start_ns, kind="stable")
    for rank, step, start_ns, end_ns in zip(
        np.searchsorted(table.ranks, work.rank[order]).tolist(),
        np.searchsorted(table.numbers, work.step[order]).tolist(),
        work.start_ns[order].tolist(),
        work.end_ns[order].tolist(),
        strict=True,
    ):
        if start_ns <= packed_ns[rank, step] + _BUCKET_LEAVES_NS:
            packed_ns[rank, step] = max(packed_ns[rank, step], end_ns)
    return packed_ns


def _by_hook(run: Run, sent: _Sent, buckets: Collectives, table: Steps) -> _Sent:
    """Add the share that a hook sends of the gradients, and how long it packs alone."""
    whole = float(table.bytes.sum()) * len(table.numbers) * len(table.ranks)
    rank = table.ranks[0]
    work = run.spans.rows((run.spans.name == "codec") & (run.spans.rank == rank))
    mine = buckets.rows(buckets.rank == rank)
    packing_ns = []
    for place in table.looked_at:
        number, computed_ns = table.numbers[place], table.computed_ns[0, place]
        packed, sent_then = work.rows(work.step == number), mine.rows(mine.step == number)
        start_ns, end_ns = packed.start_ns, packed.end_ns
        sending = (sent_then.issue_ns, sent_then.end_ns)
        # In the backward pass, and after it while no bucket is on its way.
        amidst_end_ns = np.where(packed.lane == "host", np.minimum(end_ns, computed_ns), start_ns)
        late = np.maximum(start_ns, computed_ns), np.maximum(end_ns, computed_ns)
        summed_ns = max(computed_ns, sent.bucket_end_ns[0, place])
        packing_ns.append(
            (
                covered_ns(np.minimum(start_ns, amidst_end_ns), amidst_end_ns),
                covered_ns(*_both(late, sending)) - covered_ns(*sending),
                covered_ns(np.maximum(start_ns, summed_ns), np.maximum(end_ns, summed_ns)),
            )
        )
    amidst_ns, late_ns, last_ns = np.mean(packing_ns, axis=0).round().astype(int).tolist()
    # An exchange and a gather each move half the bytes of an all-reduce.
    summed_bytes = np.where(buckets.op == "allreduce", buckets.bytes, buckets.bytes / 2)
    share = min(float(summed_bytes.sum()) / whole, 1.0)
    return replace(
        sent,
        share=share,
        amidst_ns=amidst_ns,
        packed_late_ns=late_ns,
        unpacking_ns=last_ns,
    )


def _others(
    run: Run,
    rows: Collectives,
    is_bucket: NDArray[np.bool_],
    table: Steps,
    members: Mapping[str, int],
    rank: int,
) -> Others:
    of_all, all_buckets = rows.rows(~is_bucket), _exposed(run, rows.rows(is_bucket))
    buckets, rows = (each.rows(each.rank == rank) for each in (all_buckets, of_all))
    if not len(rows):
        return Others()
    spans = run.spans.rows(run.spans.rank == rank)
    # The middle one of the steps that have as many rows as is usual.
    counts = np.bincount(np.searchsorted(table.numbers, rows.step), minlength=len(table.numbers))
    alike = np.flatnonzero(counts == np.sort(counts)[(len(counts) - 1) // 2])
    middle = int(alike[len(alike) // 2])
    usual = rows.rows(rows.step == table.numbers[middle])
    if not len(usual):  # only unusual steps have some, as where a bucket left late
        return Others()
    place = int(np.searchsorted(table.ranks, rank)), middle
    length_ns = (table.end_ns - table.start_ns)[place[0]]
    own_ns, hidden_ns, calling_ns = [], [], []
    for number, took_ns in zip(
        table.numbers[table.looked_at], length_ns[table.looked_at], strict=True
    ):
        here, during = rows.rows(rows.step == number), spans.rows(spans.step == number)
        exposed_ns = _exposed_ns(here, during, buckets.rows(buckets.step == number))
        own_ns.append(took_ns - exposed_ns)
        hidden_ns.append(_on_the_way_ns(run, here) - exposed_ns)
        calling_ns.append(calling_ns_of(here, during))
    among = [members[name] for name in usual.group.astype(str).tolist()]
    # A step's own time varies little. Its exposed time varies as much as the step does.
    exposed_ns = max(_mean_ns(length_ns[table.usual]) - _mean_ns(own_ns), 0)
    awaited = are_awaited(usual, spans.rows(spans.step == table.numbers[middle]))
    issue_ns, waits_ns = _moments(rows, spans, table, place, usual, awaited)
    # Beside buckets they share a link, unless devices carry both.
    waits_ns = waits_ns * np.array(awaited) * (len(all_buckets) > 0 and sums_on_processors(run))
    in_host = _are_in_host(run, of_all, usual, members)
    is_sum = (usual.op == "allreduce") | (usual.op == "reducescatter")
    sums_all = bool(usual.bytes[is_sum].sum() >= table.bytes.sum() > 0)
    sum_gradients = run.facts.buckets is None and sums_all
    workers = _workers(run)
    by_hand = set(usual.op.tolist()) == {"allreduce"} and set(among) == {workers}
    # Of several passes the run has the gradients of the last one, which may be those of one model
    # among several. Such sums cannot be judged.
    is_one_pass = not (spans.name[spans.step == table.numbers[middle]] == EARLIER).any()
    in_pass = usual.bytes[usual.issue_ns > table.backward_ns[place]].sum()
    of_more = is_one_pass and in_pass > TIMES_GRADIENTS * table.bytes.sum()
    growing, adds_up, are_shards = None, False, sum_gradients and not by_hand
    if are_shards:
        sums = usual.rows(is_sum & (usual.issue_ns >= table.backward_ns[place]))
        growing, adds_up = summing_group(sums, members, int(table.bytes.sum()), workers)
    counts, is_growing = np.array(among), usual.group.astype(str) == str(growing)
    of_each = np.where(is_growing & (growing is not None), -(workers // counts), counts)
    of_each[counts == workers] = 0
    of_each[np.isin(usual.op, ("send", "recv"))] = 2  # of more workers, too
    return Others(
        op=tuple(usual.op.tolist()),
        backend=run.facts.backend,
        bytes=tuple(usual.bytes.tolist()),
        members=tuple(of_each.tolist()),
        exposed_ns=exposed_ns,
        total_ns=exposed_ns + max(_mean_ns(hidden_ns), 0),
        calling_ns=_mean_ns(calling_ns),
        awaited=awaited,
        issue_ns=tuple(issue_ns.tolist()),
        waits_ns=tuple(waits_ns.tolist()) if waits_ns.any() else (),
        in_host=in_host if any(in_host) else (),
        are_gradients=sum_gradients and by_hand,
        are_of_more=sum_gradients and by_hand and bool(of_more),
        sum_gradients=are_shards,
        adds_up_shards=adds_up,
        course=_course(run, (of_all, all_buckets), usual, table, place, are_shards=are_shards),
    )


def _are_in_host(
    run: Run, of_all: Collectives, usual: Collectives, members: Mapping[str, int]
) -> tuple[bool, ...]:
    """Return which are between ranks of one host, as far as the run names the hosts of all."""
    hosts = host_of_rank(run)
    if not sums_on_processors(run) or len(hosts) != _workers(run):
        return (False,) * len(usual)
    inside = set()
    for name in set(usual.group.astype(str).tolist()):
        ranks = set(of_all.rank[of_all.group == name].tolist())
        if len(ranks) == members[name] and len({hosts.get(rank) for rank in ranks}) == 1:
            inside.add(name)
    return tuple(name in inside for name in usual.group.astype(str).tolist())


def _moments(
    rows: Collectives,
    spans: Spans,
    table: Steps,
    place: tuple[int, int],
    usual: Collectives,
    awaited: Sequence[bool],
) -> tuple[Whole, Whole]:
    """Return when a rank comes to its usual collectives in a backward pass, and its waits there.

    Both are means over the steps that have the same collectives. A collective is after the pass if
    it is in most of these steps. A sum of the kind and the group that computing waits for within
    the pass is of the pass, too: it is that of the last layer.
    """

    def in_order(each: Collectives) -> NDArray[np.intp]:
        return np.argsort(each.issue_ns, kind="stable")

    def kinds(each: Collectives) -> list[tuple[str, int]]:
        return list(zip(each.op.tolist(), each.bytes.tolist(), strict=True))

    moments = []
    for step in np.union1d(table.looked_at, [place[1]]).tolist():
        number, begin_ns = table.numbers[step], table.backward_ns[place[0], step]
        here = rows.rows(rows.step == number)
        here = here.rows(in_order(here))
        if kinds(here) == kinds(usual.rows(in_order(usual))):
            during = spans.rows((spans.step == number) & (spans.name == "wait"))
            during = during.rows(during.lane == "communication")
            # Several may be on their way: a wait is for the one whose end is nearest to its own.
            apart_ns = np.abs(here.end_ns - during.end_ns[:, None])
            is_beside = (here.issue_ns < during.end_ns[:, None]) & (
                here.end_ns > during.start_ns[:, None]
            )
            waited_for = np.where(is_beside, apart_ns, MOST_NS).argmin(axis=1)
            over_ns = np.minimum(during.end_ns, table.computed_ns[place[0], step])
            waited_ns = np.maximum(over_ns - during.start_ns, 0) * is_beside.any(axis=1)
            waited_ns = np.bincount(waited_for, waited_ns, len(here))
            is_after = here.issue_ns >= table.computed_ns[place[0], step]
            moments.append((here.issue_ns - begin_ns, waited_ns, is_after))
    means = np.empty((3, len(usual)))
    means[:, in_order(usual)] = np.mean(moments, axis=0)
    came_ns, waits_ns = means[:2].round().astype(np.int64)
    is_after = means[2] > 0.5
    is_amidst = (came_ns > 0) & ~is_after
    names = [f"{name} {kind}" for name, kind in zip(usual.group, kinds(usual), strict=True)]
    of_layers = np.array(names)[is_amidst & np.array(awaited)]
    is_after &= ~np.isin(names, of_layers)
    backward_ns = table.computed_ns[place] - table.backward_ns[place]
    came_ns = np.where(is_after, AFTER_NS, np.clip(came_ns, 0, backward_ns))
    return came_ns, np.where(is_amidst, waits_ns, 0)


def _exposed_ns(here: Collectives, during: Spans, beside: Collectives) -> int:
    """Return how long a step's collectives went on while no computation ran, or were waited for.

    Computation may wait for them amidst it. Time beside buckets belongs to the buckets.
    """
    is_wait = (during.lane == "communication") & (during.name == "wait")
    computing, waits = during.rows((during.lane == "compute") | is_wait), during.rows(is_wait)
    issued, waiting = (here.issue_ns, here.end_ns), (waits.start_ns, waits.end_ns)
    busy = _both((computing.start_ns, computing.end_ns), (beside.issue_ns, beside.end_ns))
    beside_none_ns = covered_ns(*_both(issued, busy)) - covered_ns(*busy)
    waited_for_ns = covered_ns(*issued) - covered_ns(*_both(issued, waiting))
    return beside_none_ns + waited_for_ns + covered_ns(*waiting)


def _on_the_way_ns(run: Run, here: Collectives) -> int:
    """Return how long the lines of a step's collectives have them on the way.

    Several that a script begins at once are on the way together, and share a line. Groups of
    devices may each have a line of their own.
    """
    if sums_on_processors(run):
        return covered_ns(here.start_ns, here.end_ns)
    groups = (here.rows(here.group == name) for name in set(here.group.tolist()))
    return sum(covered_ns(each.start_ns, each.end_ns) for each in groups)


def _course(
    run: Run,
    of_all: tuple[Collectives, Collectives],
    usual: Collectives,
    table: Steps,
    place: tuple[int, int],
    *,
    are_shards: bool,
) -> Course | Stages | None:
    """Return the course of a step's collectives on devices, if shards or stages go so.

    - `of_all`: the collectives of all ranks and steps, and the buckets apart.
    - `usual`: those of the rank and the step at this place of the table.
    """
    if is_pipeline(run, usual):
        step = table.numbers[place[1]]
        moments = (table.start_ns, table.end_ns, table.backward_ns, table.computed_ns)
        others, buckets = (each.rows(each.step == step) for each in of_all)
        steps_ns = dict(
            zip(
                table.ranks.tolist(),
                zip(*(each[:, place[1]].tolist() for each in moments), strict=True),
                strict=True,
            )
        )
        stages = stages_of(run, others, buckets, int(usual.rank[0]), steps_ns)
        if stages is not None:
            return stages
    if not are_shards or not shows_devices(run):
        return None
    of_step_ns = int(table.start_ns[place]), int(table.end_ns[place])
    return course_of(run, usual, of_step_ns, int(table.computed_ns[place]))


def _exposed(run: Run, buckets: Collectives) -> Collectives:
    """Return buckets from the end of their rank's last pass on, where a pipeline was predicted.

    Its ranks wait for buckets after all other messages of the pass, and not beside these.
    """
    if run.facts.stages is None:
        return buckets
    last = run.spans.rows(run.spans.name == LAST)
    over_ns = dict(zip(last.rank.tolist(), last.end_ns.tolist(), strict=True))
    from_ns = np.array([over_ns.get(rank, 0) for rank in buckets.rank.tolist()], np.int64)
    return replace(buckets, issue_ns=from_ns, end_ns=np.maximum(buckets.end_ns, from_ns))


def _both(first: tuple[Whole, Whole], second: tuple[Whole, Whole]) -> tuple[Whole, Whole]:
    return np.append(first[0], second[0]), np.append(first[1], second[1])


def _workers(run: Run) -> int:
    return run.facts.workers or 1


def _mean_ns(values: Sequence[int] | NDArray[Any]) -> int:
    return round(float(np.mean(values)))
