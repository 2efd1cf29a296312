"""One worker's step as a schedule: gradients become ready, messages leave, the step ends.

Time 0 is the start of the backward pass. Messages leave over one communication lane:

    fifo        in the order in which they are ready; the optimizer, and with it the next forward,
                waits for the last one (PyTorch DDP, Horovod)
    priority    among those that are ready, first the one that the next forward needs first; each
                part of the next forward waits only for its own message (ByteScheduler, P3). The
                forward's time is spread over the messages as the backward's is: an assumption,
                since few traces tell the two apart by layer

Every function here works on arrays of any shape, point by point. So a grid of scenarios gives the
same bits as its points asked one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fullwire.collectives.cost import Floats
from fullwire.run.run import Whole
from fullwire.simulation.buckets import BucketPolicy, Buckets
from fullwire.simulation.groups import TIMES_GRADIENTS, Others
from fullwire.simulation.stacked import StackedStep
from fullwire.simulation.step import Step

_PIECE_BYTES, _MOST_PIECES = 2**20, 64  # of a bucket whose gradients nobody knows


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Timeline:
    """When each message of a step is on the lane, in seconds, in the order of the messages."""

    start_s: list[Floats]
    end_s: list[Floats]
    waits_s: tuple[Floats, ...] = ()  # of computing, at each meeting of passes


def grouped(step: Step, policy: BucketPolicy) -> Buckets:
    """Group the step's gradients into messages; a hook may send fewer bytes than they have.

    Gradients that are summed by hand are sent as recorded.
    """
    if isinstance(step, StackedStep):  # of policies that look at bytes alone
        buckets = grouped(step.steps[0], policy)
        closed = np.cumsum(buckets.gradient_count) - 1
        return replace(buckets, ready_ns=step.ready_after(closed))
    if step.others.are_gradients:  # they share the gradients in their order
        count = len(step.others.bytes)
        ends = np.arange(1, count + 1) * len(step.bytes) // count
        issue_ns = np.minimum(step.others.issue_ns, step.backward_ns).astype(np.int64)
        return Buckets(
            np.diff(ends, prepend=0),
            np.array(step.others.bytes, np.int64),
            np.maximum.accumulate(issue_ns),
        )
    buckets = _by_pass(step, policy) if step.meetings else policy.group(step.ready_ns, step.bytes)
    if step.sent_share == 1:
        return buckets
    sent_bytes = np.ceil(buckets.bytes * step.sent_share).astype(np.int64)
    return replace(buckets, bytes=sent_bytes)


def _by_pass(step: Step, policy: BucketPolicy) -> Buckets:
    """Group the gradients of each pass by themselves: a pass sends all of its own."""
    ends = [(each.gradients, each.after_ns) for each in step.meetings]
    found, first, since_ns = [], 0, 0
    for last, after_ns in [*ends, (len(step.bytes), step.backward_ns)]:
        if last > first:
            ready_ns = np.maximum(step.ready_ns[first:last] - since_ns, 0)
            of_pass = policy.group(ready_ns, step.bytes[first:last])
            found.append(replace(of_pass, ready_ns=of_pass.ready_ns + since_ns))
        first, since_ns = last, after_ns
    counts, sizes, ready = (
        np.concatenate([getattr(each, name) for each in found])
        for name in ("gradient_count", "bytes", "ready_ns")
    )
    return Buckets(counts, sizes, ready)


def meetings_s(step: Step, buckets: Buckets) -> tuple[tuple[int, float], ...]:
    """Return for each meeting of passes the messages before it, and its time without waits."""
    closed = np.cumsum(buckets.gradient_count)
    return tuple(
        (int(np.searchsorted(closed, each.gradients)) + 1, each.after_ns * 1e-9)
        for each in step.meetings
    )


def with_gradients_spread(step: Step) -> Step:
    """Return the step with gradients in place of each recorded bucket of them.

    A trace shows buckets alone. Their gradients are taken to be alike, and to have become ready at
    a steady pace since the bucket before, or since the passes before that sum nothing.
    """
    pieces = np.clip(-(-step.bytes // _PIECE_BYTES), 1, _MOST_PIECES)
    bucket = np.repeat(np.arange(len(pieces)), pieces)
    number = np.arange(len(bucket)) - (np.cumsum(pieces) - pieces)[bucket]
    count, size = pieces[bucket], step.bytes[bucket]
    begun_ns = min(round(step.earlier_share * step.backward_ns), int(step.ready_ns[0]))
    since_ns = np.append([begun_ns], step.ready_ns[:-1])[bucket]
    took_ns = step.ready_ns[bucket] - since_ns
    before = np.append([0], np.cumsum(pieces)).tolist()
    return replace(
        step,
        meetings=tuple(each._replace(gradients=before[each.gradients]) for each in step.meetings),
        ready_ns=since_ns + took_ns * (number + 1) // count,
        bytes=size * (number + 1) // count - size * number // count,
    )


def sent_in_buckets(step: Step) -> Step:
    """Return the step with buckets in the backward pass in place of sums by hand, if it has these.

    The script's calls for one sum after another go too. So does a collective beside the sums, such
    as that of a loss, which cannot be told from them. After several passes the sums may be of more
    models than the last pass has gradients of. Its buckets then have the bytes of all.
    """
    if not step.sums_only_gradients:
        return step
    summed_bytes, own_bytes = sum(step.others.of_the_last_pass().bytes), int(step.bytes.sum())
    whole = step.bytes
    if summed_bytes > TIMES_GRADIENTS * own_bytes:
        whole = np.round(whole * (summed_bytes / own_bytes)).astype(np.int64)
    joined = step.with_joined(range(len(step.others.op)))
    return replace(joined, bytes=whole, others=Others())


class Lane(NamedTuple):
    """When the last message has ended, how long the lane was busy, and the waits between passes."""

    end_s: Floats
    busy_s: Floats
    stalled_s: Floats


def fifo_lane_s(step: Step, buckets: Buckets, cost_s: Iterable[Floats]) -> Lane:
    """Return the times of the lane.

    It is `fifo_timeline` without its result lists, for grids: one pass, three arrays.
    """
    end_s = busy_s = np.zeros(())
    stalled_s: Floats = np.zeros(())
    at_s = dict(meetings_s(step, buckets))
    for number, (ready, cost) in enumerate(zip(buckets.ready_ns * 1e-9, cost_s, strict=True)):
        if number in at_s:  # all so far have ended, and the next ones are as much later
            stalled_s = np.maximum(end_s - at_s[number], stalled_s)
        leaves = ready + stalled_s if at_s else ready
        end_s = np.maximum(end_s, leaves, out=end_s if end_s.shape == cost.shape else None)
        end_s = np.add(end_s, cost, out=end_s if end_s.shape == cost.shape else None)
        busy_s = np.add(busy_s, cost, out=busy_s if busy_s.shape == cost.shape else None)
    if len(buckets.ready_ns) in at_s:  # the last pass sends nothing
        stalled_s = np.maximum(end_s - at_s[len(buckets.ready_ns)], stalled_s)
    return Lane(end_s, busy_s, stalled_s)


def shared_lane_s(
    step: Step, buckets: Buckets, cost_s: Iterable[Floats], others_s: Sequence[Floats]
) -> Lane:
    """Return the times of a lane whose link also carries sums that computing waits for.

    A model that is split over ranks has such sums in its backward pass. While computing waits for
    one, a bucket that is on its way has half of the link, and the sum takes as much longer. So no
    bucket hides behind a wait for free. The waits of the recording go: the moments at which buckets
    are ready, and at which computing comes to a sum, are of computing alone here. Another order of
    the buckets leaves the link as full, so `priority` counts as no quicker than `fifo` there.

    - `others_s`: how long each of the step's other collectives takes alone.
    """
    others, ready_ns = step.others, buckets.ready_ns
    waits = [place for place, wait_ns in enumerate(others.waits_ns) if wait_ns]
    come_ns = np.array([others.issue_ns[place] for place in waits])
    # One that is ready in the first half of a wait is taken to be there before it: times are means.
    turn_ns = come_ns + np.array([others.waits_ns[place] for place in waits]) / 2
    ready_s, come_s = (_own_s(others, moments_ns) for moments_ns in (ready_ns, come_ns))
    events = [
        *((at, 0, own_s, cost) for at, own_s, cost in zip(ready_ns, ready_s, cost_s, strict=True)),
        *(
            (at, 1, own_s, others_s[place])
            for at, own_s, place in zip(turn_ns, come_s, waits, strict=True)
        ),
    ]
    left_s: Floats = np.zeros(())  # of the buckets that are ready
    busy_s: Floats = np.zeros(())
    longer_s: Floats = np.zeros(())
    before_s = 0.0
    for _, is_awaited, own_s, cost in sorted(events, key=lambda event: event[:2]):
        left_s, before_s = np.maximum(left_s - (own_s - before_s), 0.0), own_s
        if is_awaited:
            shared_s = np.minimum(cost, left_s)
            left_s, longer_s = left_s - shared_s, longer_s + shared_s
        else:
            left_s, busy_s = left_s + cost, busy_s + cost
    [backward_s] = _own_s(others, np.array([step.backward_ns]))
    left_s = np.maximum(left_s - (backward_s - before_s), 0.0)
    return Lane(step.backward_ns * 1e-9 + longer_s + left_s, busy_s, np.zeros(()))


def of_computing_alone(step: Step, buckets: Buckets) -> tuple[Step, Buckets]:
    """Return a step whose passes have no waits for sums, and its buckets, as ready in such passes.

    Passes that are still longer than the step have the other waits in the forward pass.
    """
    others = step.others

    def own_ns(moments_ns: Whole) -> Whole:
        return np.round(_own_s(others, moments_ns) * 1e9).astype(np.int64)

    backward_ns = int(own_ns(np.array([step.backward_ns]))[0])
    own = replace(
        step,
        forward_ns=min(step.forward_ns, max(step.step_ns - backward_ns, 0)),
        backward_ns=backward_ns,
        ready_ns=own_ns(step.ready_ns),
    )
    return own, replace(buckets, ready_ns=own_ns(buckets.ready_ns))


def _own_s(others: Others, moments_ns: Floats | Whole) -> Floats:
    """Return how much of the backward pass's own computing is over at moments of the recording."""
    order = np.argsort(others.issue_ns, kind="stable")
    come_ns, waits_ns = np.array(others.issue_ns)[order], np.array(others.waits_ns)[order]
    before_ns = np.cumsum(waits_ns) - waits_ns
    # Computing waits for one at a time: a wait begins when the one before it has ended.
    begin_ns = np.maximum.accumulate(come_ns - before_ns) + before_ns
    waited_ns = np.clip(np.asarray(moments_ns)[:, None] - begin_ns, 0, waits_ns).sum(axis=1)
    return np.asarray((moments_ns - waited_ns) * 1e-9)


def fifo_timeline(ready_s: Sequence[float], cost_s: Sequence[Floats]) -> Timeline:
    """Send the messages in order: each begins when it is ready and the one before has ended."""
    starts: list[Floats] = []
    ends: list[Floats] = []
    lane_free_s: Floats = np.zeros(())
    for ready, cost in zip(ready_s, cost_s, strict=True):
        start = np.maximum(lane_free_s, ready)
        lane_free_s = start + cost
        starts.append(start)
        ends.append(lane_free_s)
    return Timeline(start_s=starts, end_s=ends)


def priority_timeline(ready_s: Sequence[float], cost_s: Sequence[Floats]) -> Timeline:
    """Send always the last one made of the ready messages: it is needed first."""
    ready = np.array(ready_s)
    cost = np.stack(np.broadcast_arrays(*cost_s))
    ready_column = ready.reshape((-1,) + (1,) * (cost.ndim - 1))
    start, waits = np.zeros_like(cost), np.ones(cost.shape, bool)
    lane_free_s: Floats = np.zeros(cost.shape[1:])
    for _ in range(len(ready)):
        next_ready_s = np.where(waits, ready_column, np.inf).min(axis=0)
        now_s = np.maximum(lane_free_s, next_ready_s)
        can_leave = waits & (ready_column <= now_s)
        chosen = (len(can_leave) - 1 - np.argmax(can_leave[::-1], axis=0))[None]  # the last made
        np.put_along_axis(start, chosen, now_s[None], axis=0)
        np.put_along_axis(waits, chosen, np.False_, axis=0)
        lane_free_s = now_s + np.take_along_axis(cost, chosen, axis=0)[0]
    return Timeline(start_s=list(start), end_s=list(start + cost))


def fifo_overhead_s(step: Step, lane: Lane) -> Floats:
    """Return the step's loss: the optimizer waits for the last message."""
    backward_s = step.backward_ns * 1e-9
    return np.maximum(lane.end_s, backward_s + lane.stalled_s) - backward_s


def timeline_of(
    step: Step,
    buckets: Buckets,
    on_lane: Callable[[Sequence[float], Sequence[Floats]], Timeline],
    cost_s: Sequence[Floats],
) -> Timeline:
    """Send the messages of each pass in the order of a lane, which is idle when a pass begins."""
    starts: list[Floats] = []
    ends: list[Floats] = []
    waits: list[Floats] = []
    stalled_s: Floats = np.zeros(())
    ready_s, first = (buckets.ready_ns * 1e-9).tolist(), 0
    for last, at_s in [*meetings_s(step, buckets), (len(ready_s), math.inf)]:
        if last == first:  # the last pass sends nothing
            continue
        of_pass = on_lane(ready_s[first:last], cost_s[first:last])
        starts += [start_s + stalled_s for start_s in of_pass.start_s]
        ends += [end_s + stalled_s for end_s in of_pass.end_s]
        if at_s < math.inf:
            waits.append(np.maximum(np.max(of_pass.end_s, axis=0) - at_s, 0.0))
            stalled_s = stalled_s + waits[-1]
        first = last
    return Timeline(start_s=starts, end_s=ends, waits_s=tuple(waits))


def priority_overhead_s(step: Step, buckets: Buckets, timeline: Timeline) -> Floats:
    """Return the step's loss: each part of the next forward waits for its own message."""
    own_s = step.backward_ns * 1e-9
    backward_s = own_s + np.asarray(sum(timeline.waits_s))
    rest_s = max(step.step_ns - step.backward_ns, 0) * 1e-9  # 0 where only the late rank's is long
    made_ns = step.ready_ns[np.maximum(np.cumsum(buckets.gradient_count) - 1, 0)]
    share = np.diff(made_ns, prepend=0) / max(int(made_ns[-1]), 1)
    now_s: Floats = np.broadcast_to(backward_s, timeline.end_s[-1].shape)
    for part_s, end_s in zip(share[::-1] * rest_s, timeline.end_s[::-1], strict=True):
        now_s = np.maximum(now_s, end_s) + part_s
    return np.maximum(now_s - (own_s + rest_s), 0.0)


def running_sum(terms: Iterable[Floats]) -> Floats:
    """Add up in order, so that the digits do not depend on the number of points."""
    total: Floats = np.zeros(())
    for term in terms:
        total = total + term
    return total
