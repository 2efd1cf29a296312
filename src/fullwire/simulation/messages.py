"""The messages of a step: their time on a lane, and how much of it a step loses.

A message costs `wire / rate + fixed`, so a step on one lane is a short chain of sums and maxima.
Points of a grid are arrays: cluster sizes on the first axis, rates on the second, compressors on
the last.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fullwire.collectives.closed_form import gradient_cost, half_a_part, on_wire, recorded_cost
from fullwire.collectives.cost import Floats
from fullwire.collectives.tuning import AUTO
from fullwire.compression.compressor import Combining, Compressor
from fullwire.errors import UsageError
from fullwire.simulation.buckets import BucketPolicy, Buckets, EachGradient
from fullwire.simulation.grid import Grid, Order, Residue, Subject, tried
from fullwire.simulation.groups import ranks_among
from fullwire.simulation.on_links import OnLinks, Routed, routed_s
from fullwire.simulation.schedule import (
    Timeline,
    fifo_lane_s,
    fifo_overhead_s,
    grouped,
    priority_overhead_s,
    priority_timeline,
    running_sum,
    shared_lane_s,
    timeline_of,
    with_gradients_spread,
)
from fullwire.simulation.stragglers import AsRecorded, Jitter
from fullwire.simulation.transport import FullTransport, MeasuredTransport, Transport

# The part of a round's own work that copies all the state; the rest works on the parameters that
# are due. Measured as processor time with 1 to 8 fragments, of models of 8 and 20 MB with SGD and
# Adam: 0.32 to 0.55.
COPIES = 0.43


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Way:
    """The messages by one algorithm.

    `wire_bits`, `fixed_s`, `packing_s` and `sent_bits` have a row per message, then an axis for
    workers and one for compressors, as `hops` has. `wire_bits` is before compression. `work` is the
    processor work for a byte on the wire, for each compressor. `stretch` is how many times as long
    as an all-reduce of as many bytes its message takes on the line, for these two axes. On a
    described cluster `routed` has the times of links for them. They include the latencies, which
    `fixed_s` then leaves out.
    """

    wire_bits: Floats
    work: Floats
    stretch: Floats
    hops: Floats
    fixed_s: Floats
    packing_s: Floats
    sent_bits: Floats
    routed: tuple[tuple[Routed, ...], ...] = ()

    def only(self, column: slice) -> _Way:
        return _Way(
            wire_bits=self.wire_bits[:, :, column],
            work=self.work[column],
            stretch=self.stretch[:, column],
            hops=self.hops[:, column],
            fixed_s=self.fixed_s[:, :, column],
            packing_s=self.packing_s[:, :, column],
            sent_bits=self.sent_bits[:, :, column],
            routed=tuple(row[column] for row in self.routed),
        )


@dataclass(frozen=True, eq=False, slots=True)
class Exposed:
    """The exposed time of a step's communication, and its use of lane, processors and computing."""

    by_buckets_s: Floats
    by_others_s: Floats
    busy_s: Floats
    hidden_s: Floats  # of it and of other collectives, behind computing
    work_s: Floats
    # Where messages cause contention, their bits or seconds while a worker computes. Collectives
    # that are no buckets count by the second only.
    beside: Floats
    beside_others_s: Floats
    # The collectives of a step whose gradients are not sent: they are all of its communication.
    instead_s: Floats
    after_s: Floats  # of those exposed, after the passes


# Messages delay computing on the same processors by their work, and also each time they wake up
# beside it. So the delay follows the bits beside computing and the time in which they are sent, as
# a mean of both with these weights, which were chosen on labs (validation/README.md). On a
# transport that was not measured they take the time of their work at the least.
BY_BITS = 2 / 3


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Messages:
    """The messages of a step among several cluster sizes, for several compressors.

    Each message takes the quickest of several ways to send it.
    """

    subject: Subject
    buckets: Buckets
    lane: Order
    workers: tuple[int, ...]
    ways: tuple[_Way, ...]
    others: tuple[_Other, ...]

    def only(self, column: slice) -> Messages:
        """Return the same messages for some of the compressors."""
        return replace(self, ways=tuple(way.only(column) for way in self.ways))

    @property
    def count(self) -> int:
        """The number of messages and of other collectives in a step that synchronises."""
        no_buckets = self.subject.step.sends_no_buckets
        return (0 if no_buckets else len(self.buckets)) + sum(other.count for other in self.others)

    def cost_s(
        self, chosen: slice, rate_bps: Floats, transport: Transport, ratio: Floats
    ) -> Iterator[Floats]:
        """Go through the messages' times.

        `chosen` cluster sizes are on the first axis of the points, compressors on the last.
        """
        for times_s in self._times_s(chosen, rate_bps, transport, ratio):
            yield functools.reduce(np.minimum, times_s)

    def sent_bits(
        self, chosen: slice, rate_bps: Floats, transport: Transport, ratio: Floats
    ) -> Floats:
        """Return the bits that the busiest link sends in the whole step."""
        if len(self.ways) == 1:
            return running_sum(self.ways[0].sent_bits[:, chosen, None, :]) / ratio
        total: Floats = np.zeros(())
        for number, times_s in enumerate(self._times_s(chosen, rate_bps, transport, ratio)):
            quickest = np.argmin(np.stack(times_s), axis=0)
            sent = [way.sent_bits[number, chosen, None, :] for way in self.ways]
            total = total + np.choose(quickest, np.broadcast_arrays(*sent))
        return total / ratio

    def others_bits(self, chosen: slice, passes: int, *, of_all: bool) -> Floats:
        """Return the bits on a host's link, a pass, of other collectives: of all ranks or some."""
        others = (each for each in self.others if of_all != bool(each.kind[2]))
        bits = [each.pass_bits + each.once_bits / passes for each in others]
        return np.asarray(running_sum(bits)[chosen, None, None]) if bits else np.zeros(())

    def exposed(
        self, chosen: slice, rate_bps: Floats, transport: Transport, ratio: Floats
    ) -> Exposed:
        """Return the exposed communication of a step that synchronises."""
        step, cost_s = self.subject.step, self.cost_s(chosen, rate_bps, transport, ratio)
        # Passes that take longer by turns hide more: as if they took as long, and messages less.
        longer = self.subject.passes_by_turns(self.workers[chosen])
        if is_longer := bool(np.any(longer > 1)):
            cost_s = (each_s / longer for each_s in cost_s)
        if self.lane == "priority" and not step.others.waits_ns:
            costs = list(cost_s)
            timeline = timeline_of(step, self.buckets, priority_timeline, costs)
            by_buckets_s = priority_overhead_s(step, self.buckets, timeline)
            busy_s = running_sum(costs)
        else:
            if step.others.waits_ns:
                alone_s = [s / longer for s in self.each_other_s(chosen, rate_bps, transport)]
                lane = shared_lane_s(step, self.buckets, cost_s, alone_s)
            else:
                lane = fifo_lane_s(step, self.buckets, cost_s)
            busy_s, by_buckets_s = lane.busy_s, fifo_overhead_s(step, lane)
        if is_longer:
            by_buckets_s, busy_s = by_buckets_s * longer, busy_s * longer
        if step.sends_no_buckets:  # there are none to wait for
            by_buckets_s = np.zeros_like(by_buckets_s)
        by_others_s, others_s, after_s = self._others_s(chosen, rate_bps, transport)
        work_s = running_sum(self._work_s(chosen, transport, ratio))
        beside = beside_others_s = np.zeros(())
        if (crowding := self.subject.crowding).is_by_time:
            beside_others_s = others_s - by_others_s
            if not step.others.sum_gradients:
                beside = np.maximum(busy_s - by_buckets_s, 0.0)
        elif crowding.s_each:
            hidden = 1 - by_buckets_s / np.maximum(busy_s, np.finfo(float).tiny)
            bits = self.sent_bits(chosen, rate_bps, transport, ratio)
            is_timed = isinstance(transport, MeasuredTransport)
            time_s = busy_s if is_timed else np.maximum(busy_s, bits * crowding.s_per_bit)
            beside = bits**BY_BITS * np.asarray(time_s) ** (1 - BY_BITS) * np.clip(hidden, 0.0, 1.0)
        instead_s = others_s if step.sends_nothing else np.zeros(())
        hidden_s = others_s - by_others_s
        if not step.others.sum_gradients:
            hidden_s = hidden_s + np.maximum(busy_s - by_buckets_s, 0.0)
        more = hidden_s, work_s, beside, beside_others_s, instead_s, after_s
        return Exposed(by_buckets_s, by_others_s, busy_s, *more)

    def overhead_s(
        self,
        exposed: Exposed,
        chosen: slice,
        transport: Transport,
        residue: Residue,
        accumulate: int,
        local_steps: int,
        jitter: Jitter,
    ) -> Floats:
        """Return a step's loss, as the mean over the steps until the next that synchronises.

        Local steps end in averages of parameters. These are always exposed, since all parameters
        are ready at once. A fragment of them has the whole next step to arrive, and a large one may
        need longer. A recorded round may end in a sum of gradients instead, bucket by bucket in the
        backward pass. Other collectives are in every pass, but for those after it.
        """
        is_bucket_by_bucket = local_steps == 1 or self.subject.step.sums_amidst
        overhead_s = exposed.by_buckets_s if is_bucket_by_bucket else exposed.busy_s
        parts = min(self.subject.fragments, local_steps)
        if parts > 1:
            longer = self.subject.passes_by_turns(self.workers[chosen])
            step_s = self.subject.step.step_ns * 1e-9 * accumulate * longer
            overhead_s = running_sum(
                np.maximum(exposed.busy_s * share - step_s, 0.0)
                for share in self.subject.shares_of(parts).tolist()
            )
        overhead_s = overhead_s + exposed.by_others_s
        overhead_s = overhead_s + self.subject.step.packing_ns * 1e-9
        apart = accumulate * local_steps
        if apart > 1:
            others_s = exposed.by_others_s - exposed.after_s * (1 - 1 / accumulate)
            overhead_s = (overhead_s - exposed.by_others_s) / apart + others_s
        workers = self.workers[chosen]
        # Each fragment has a round: it copies all the state, and changes its own parameters alone.
        rounds = (1 + COPIES * (parts - 1)) / apart if local_steps > 1 else 0.0  # in a pass
        overhead_s = overhead_s + self.subject.round_s * (rounds - self.subject.recorded_rounds)
        # Ranks meet for each fragment, and are late for each other as often.
        late_s = jitter.late_s(self.subject.step, workers, apart // parts)[:, None, None]
        if isinstance(jitter, AsRecorded):
            still_late = self.subject.crowding.still_late(self.subject.ranks_per_processor(workers))
            late_s = late_s * still_late[:, None, None]
        crowded_s = self._crowded_s(exposed, workers, transport, accumulate, local_steps, late_s)
        if not isinstance(jitter, AsRecorded):  # which has its own lateness
            crowded_s = crowded_s * (1 - self.subject.crowding.lateness_share)
        overhead_s = overhead_s + crowded_s + self.subject.crowded_by_ranks_s
        step = self.subject.step
        if np.any(step.own_s) or isinstance(transport, MeasuredTransport):
            # Ranks on the same processors compute by turns. The step takes at least the work of all
            # of them and of the transport. It does not help that some of it is beside other work or
            # a late rank: it all waits for the same processors.
            ranks = self.subject.ranks_per_processor(workers)[:, None, None]
            busy_s = exposed.work_s / apart * np.minimum(ranks, 1.0)
            all_s = step.own_s * ranks + busy_s * self.subject.crowding.most_busy_share
            least_s = all_s - step.alone_ns * 1e-9 - late_s
            overhead_s = np.maximum(overhead_s + step.by_turns_s(ranks), least_s)
        beside = exposed.hidden_s, apart, self.count
        if isinstance(transport, FullTransport):
            # T1 may be too long by its error, and no step is shorter than its bytes on the line.
            alone_s = step.alone_ns * 1e-9
            shorter_s = overhead_s - step.alone_off[0] * alone_s
            line_s = np.minimum(overhead_s, exposed.busy_s / apart - alone_s)
            matched_s = overhead_s + residue.of_any_transport.beside(overhead_s, *beside)
            overhead_s = np.maximum(matched_s, np.maximum(shorter_s, line_s))
        else:
            overhead_s = overhead_s + residue.beside(overhead_s, *beside)
        overhead_s = np.maximum(overhead_s + late_s, 0.0)
        is_alone = np.array(workers)[:, None, None] == 1  # one worker sends no messages
        return np.where(is_alone, 0.0, overhead_s) if is_alone.any() else overhead_s

    def waited_beside_s(self, exposed: Exposed, late_s: Floats | float) -> Floats:
        """Return how long collectives of the early ranks wait for a late one beside computing.

        On a device a collective that waits runs, too. It waits at most until the backward pass
        ends, and no other may then be on its way.
        """
        step = self.subject.step
        if step.others.sum_gradients or step.sends_nothing or not len(self.buckets):
            return np.zeros(())
        open_s = (step.backward_ns - self.buckets.ready_ns[0]) * 1e-9
        return np.asarray(np.minimum(late_s, np.maximum(open_s - exposed.beside, 0.0)))

    def _crowded_s(
        self,
        exposed: Exposed,
        workers: Sequence[int],
        transport: Transport,
        accumulate: int,
        local_steps: int,
        late_s: Floats,
    ) -> Floats:
        """Return the contention of a step, without turns on processors.

        It follows the bits and the seconds, or the seconds alone, beside computing. What these do
        not explain is as recorded. A transport that does less work causes as much less of it.
        """
        subject, crowding, passes = self.subject, self.subject.crowding, accumulate * local_steps
        steady_s = np.array(subject.step.crowded_by_messages_s * crowding.steady_share)
        if crowding.recorded_work_s and isinstance(transport, MeasuredTransport):
            less = exposed.work_s / (passes * crowding.recorded_work_s)
            steady_s = steady_s * np.minimum(less, 1.0)
        if not crowding.s_each:
            return steady_s
        each_s = np.array(crowding.s_each * subject.sends_beside_computing(local_steps) / passes)
        if crowding.is_by_time:
            beside_s = exposed.beside + self.waited_beside_s(exposed, late_s)
            others_s = exposed.beside_others_s * crowding.s_each
            return np.asarray(beside_s * each_s + others_s + steady_s)
        if isinstance(transport, MeasuredTransport):
            times = crowding.with_ranks(subject.ranks_per_processor(workers))[:, None, None]
            each_s, steady_s = each_s * times, steady_s * times
        return np.asarray(exposed.beside * each_s + steady_s)

    def _work_s(self, chosen: slice, transport: Transport, ratio: Floats) -> Iterator[Floats]:
        """Go through the processor work of messages, each in the way with the least."""
        if not isinstance(transport, MeasuredTransport):
            return
        crowd = self._crowd(chosen)
        for number in range(0 if self.subject.step.others.sum_gradients else len(self.buckets)):
            yield functools.reduce(
                np.minimum,
                [
                    transport.work_s(
                        way.wire_bits[number, chosen, None, :] * way.work / (8 * ratio),
                        way.hops[chosen, None, :],
                        crowd,
                    )
                    + way.packing_s[number, chosen, None, :] * crowd
                    for way in self.ways
                ],
            )
        for other in self.others:
            wire_bits, hops = other.wire_bits[chosen, None, None], other.hops[chosen, None, None]
            yield other.count * transport.work_s(wire_bits / 8, hops, crowd)

    def _times_s(
        self, chosen: slice, rate_bps: Floats, transport: Transport, ratio: Floats
    ) -> Iterator[tuple[Floats, ...]]:
        """Go through the messages, with the time of each way to send it."""
        per_bit = 1 / (rate_bps * transport.share)
        per_bit_before_packing = per_bit / ratio
        crowd = self._crowd(chosen)

        def time_s(way: _Way, number: int) -> Floats:
            wire_bits = way.wire_bits[number, chosen, None, :]
            hops, fixed_s = way.hops[chosen, None, :], way.fixed_s[number, chosen, None, :]
            stretch = way.stretch[chosen, None, :]
            if way.routed:
                size = float(self.buckets.bytes[number]) / ratio
                line_s = routed_s(way.routed[chosen], size, per_bit) * stretch
            else:
                line_s = wire_bits * stretch * per_bit_before_packing
            worked_bytes = wire_bits * way.work / (8 * ratio)
            if self.subject.step.sends_nothing:
                return line_s  # 0, where a table of times has one for a message without bytes
            fixed_s = fixed_s + way.packing_s[number, chosen, None, :] * crowd
            return transport.message_s(line_s, worked_bytes, hops, crowd) + fixed_s

        for number in range(len(self.buckets)):
            yield tuple(time_s(way, number) for way in self.ways)

    def _others_s(
        self, chosen: slice, rate_bps: Floats, transport: Transport
    ) -> tuple[Floats, Floats, Floats]:
        """Return how long other collectives are exposed, and take, and those after the passes.

        Where a trace tells when layers need them, they are played. Else the exposed share is as
        recorded, but no more time hides behind computation than in the recording.
        """
        others = self.subject.step.others
        of_kinds = list(self._kinds_s(chosen, rate_bps, transport))
        total_s = running_sum(other.count * each_s for other, each_s in of_kinds)
        if others.course is not None:
            each_s = self.each_other_s(chosen, rate_bps, transport)
            # The slowest rank's own time; the rests in it have been counted with these collectives.
            late_ns = np.reshape(self.subject.step.waiting_ns, (-1, 1, 1))
            own_s = (self.subject.step.step_ns + others.rest_ns + late_ns) * 1e-9
            exposed_s = others.course.stalled_s(each_s, own_s) + others.rest_ns * 1e-9
            return exposed_s, np.maximum(total_s, exposed_s), np.zeros(())
        hidden_s = np.maximum(others.total_ns - others.exposed_ns, 0) * 1e-9
        share = others.exposed_ns / max(others.total_ns, 1)
        exposed_s = np.maximum(share * total_s, total_s - hidden_s)
        after_s = running_sum(other.after * each_s for other, each_s in of_kinds)
        return exposed_s, total_s, np.minimum(after_s, exposed_s)

    def each_other_s(self, chosen: slice, rate_bps: Floats, transport: Transport) -> list[Floats]:
        """Return the times of a step's collectives that are no buckets, in their order."""
        of_kinds = self._kinds_s(chosen, rate_bps, transport)
        of_kind = {other.kind: each_s for other, each_s in of_kinds}
        return [of_kind[kind] for kind in self.subject.step.others.kinds]

    def _kinds_s(
        self, chosen: slice, rate_bps: Floats, transport: Transport
    ) -> Iterator[tuple[_Other, Floats]]:
        """Go through the collectives that are no buckets, with the time that one of each takes."""
        crowd = self._crowd(chosen)
        for other in self.others:
            wire_bits, hops = other.wire_bits[chosen, None, None], other.hops[chosen, None, None]
            load = other.load[chosen, None, None]
            line_s = wire_bits * load / (rate_bps * transport.share)
            line_s = line_s + hops * np.minimum(load, 1.0) * other.latency_s
            if other.routed:
                per_bit = 1 / (rate_bps * transport.share)
                line_s = routed_s(other.routed[chosen], np.ones((1, 1, 1)), per_bit)
            if isinstance(transport, MeasuredTransport):
                line_s = line_s * (1 + transport.gathers_late * other.halves[chosen, None, None])
            yield other, transport.message_s(line_s, wire_bits / 8, hops, crowd)

    def each_instead_s(self, rate_bps: Floats, transport: Transport) -> Floats:
        """Return the times of the collectives that go in place of gradients, at one point."""
        each_s = self.each_other_s(slice(None), rate_bps, transport)
        return np.array([float(one_s[0, 0, 0]) for one_s in each_s])

    def instead_timeline(self, rate_bps: Floats, transport: Transport) -> Timeline:
        """Return when the collectives that go in place of gradients are on the lane, at one point.

        They go one after another, in the order of `Others`, and end as long after the backward pass
        as they are exposed. More of them than fit before that went at once, and so they do here.
        """
        step, each_s = self.subject.step, self.each_instead_s(rate_bps, transport)
        of_all = self._others_s(slice(None), rate_bps, transport)
        exposed_s, total_s, _ = (float(np.ravel(time_s)[0]) for time_s in of_all)
        end_s = step.backward_ns * 1e-9 + exposed_s
        start_s = max(end_s - total_s, -step.forward_ns * 1e-9)
        before_s = np.cumsum(each_s) - each_s
        squeezed = min((end_s - start_s) / total_s, 1.0) if total_s else 1.0
        starts_s = start_s + before_s * squeezed
        ends_s = np.minimum(starts_s + each_s, end_s)
        return Timeline(start_s=[*starts_s], end_s=[*ends_s])

    def _crowd(self, chosen: slice) -> Floats:
        return self.subject.crowd(self.workers[chosen])[:, None, None]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Other:
    """Equal collectives of a step that are no buckets, by workers."""

    wire_bits: Floats
    pass_bits: Floats  # that a host's link carries for all in the passes: 0 for groups on one host
    once_bits: Floats  # the same after the passes, where each rank broadcasts what it owns
    hops: Floats
    load: Floats  # of a host's link, over that of a rank with its own
    halves: Floats  # of a rank's part, as a share of a gather's bytes
    latency_s: float
    count: int
    after: int  # of these, after the passes of a step: once, however many passes it has
    kind: tuple[str, int, int]  # the operation as sent, its bytes, and the members of its group
    routed: tuple[tuple[Routed, ...], ...] = ()


def messages_of(
    subject: Subject,
    policy: BucketPolicy,
    algorithm: str,
    latency_s: float,
    grid: Grid,
    sizes: slice = slice(None),
) -> Messages:
    """Work out the messages of a step for a grid's compressors and some or all cluster sizes."""
    if not (subject.has_parameters or isinstance(policy, EachGradient)):
        subject = replace(subject, step=with_gradients_spread(subject.step))
    buckets = grouped(subject.step, policy)
    on_links = OnLinks.of(grid.cluster, latency_s, is_scattered=grid.is_scattered)
    ways = tried(grid) if algorithm == AUTO else (algorithm,)
    workers, compressors = grid.workers[sizes], grid.compressors
    shards = subject.step.shards
    if shards > 1 and on_links is not None and not subject.step.others.adds_up_shards:
        raise UsageError(
            f"{subject.name}: its gradients are summed in groups of one in {shards} ranks, and on "
            "a described cluster only sums over all ranks are predicted"
        )
    among = [-(-count // shards) for count in workers]  # that hold the same part of the model
    return Messages(
        subject=subject,
        buckets=buckets,
        lane=grid.lane,
        workers=workers,
        ways=tuple(
            _way(subject, buckets, name, latency_s, among, compressors, on_links) for name in ways
        ),
        others=tuple(_others(subject, latency_s, workers, on_links)),
    )


def _way(
    subject: Subject,
    buckets: Buckets,
    algorithm: str,
    latency_s: float,
    sizes: Sequence[int],
    compressors: Sequence[Compressor],
    on_links: OnLinks | None,
) -> _Way:
    """Work out the messages by one algorithm."""
    shape = (len(buckets), len(sizes), len(compressors))
    if subject.step.sends_nothing:
        none, alike = np.zeros(shape), np.ones(len(compressors))
        return _Way(
            wire_bits=none,
            work=alike,
            stretch=np.ones(shape[1:]),
            hops=np.zeros(shape[1:]),
            fixed_s=none,
            packing_s=none,
            sent_bits=none,
        )
    wire_bits, fixed_s, packing_s, sent_bits = (np.empty(shape) for _ in range(4))
    hops = np.empty(shape[1:])
    hop_s = latency_s if on_links is None else 0.0  # the times of links hold their latencies
    kinds = {codec.combining for codec in compressors}
    routed: list[dict[Combining, Routed]] = []
    around_a_switch = {
        workers: {
            kind: gradient_cost(kind, algorithm, workers, buckets.bytes, subject.adds)
            for kind in kinds
        }
        for workers in (set(sizes) if on_links is None else ())
    }
    for row, workers in enumerate(sizes):
        if on_links is None:
            by_kind = around_a_switch[workers]
        else:
            routed.append({kind: on_links.gradients(kind, algorithm, workers) for kind in kinds})
            by_kind = {
                kind: links.as_cost(buckets.bytes, subject.adds)
                for kind, links in routed[-1].items()
            }
        for column, compressor in enumerate(compressors):
            whole = by_kind[compressor.combining]
            packing = compressor.codec_s_per_byte(workers)
            wire_bits[:, row, column] = 8 * whole.wire_bytes
            hops[row, column] = whole.hops
            sent_bits[:, row, column] = 8 * whole.sent_bytes
            fixed_s[:, row, column] = whole.hops * hop_s + whole.add_s
            packing_s[:, row, column] = packing * buckets.bytes + compressor.bucket_s
    packing_s[:, np.array(sizes) == 1] = 0.0
    work = np.array([codec.work_per_byte for codec in compressors])
    senders = np.maximum(np.array(sizes) - 1, 1)  # to each receiver
    factor = subject.exchange_factor + subject.meeting_factor * (1 - 1 / senders)
    are_sums = np.array([codec.combining == "sum" for codec in compressors])
    stretch = np.where(are_sums, 1.0, factor[:, None])
    order = [codec.combining for codec in compressors]
    by_codec = tuple(tuple(row[codec.combining] for codec in compressors) for row in routed)
    if on_links is not None:  # by the busiest link of the network
        carried = [[kind.network_bits_per_byte for kind in row] for row in by_codec]
        sent_bits = np.array(carried)[None] * buckets.bytes[:, None, None].astype(np.float64)
    else:
        loads = np.stack([subject.loads(sizes, algorithm, kind) for kind in order], axis=1)
        stretch, sent_bits = stretch * loads, sent_bits * loads
        fixed_s -= np.where(loads > 0, 0.0, hops * hop_s)  # a link's latency
    return _Way(
        wire_bits=wire_bits,
        work=work,
        stretch=stretch,
        hops=hops,
        fixed_s=fixed_s,
        packing_s=packing_s,
        sent_bits=sent_bits,
        routed=by_codec,
    )


def _others(
    subject: Subject, latency_s: float, workers: Sequence[int], on_links: OnLinks | None
) -> Iterator[_Other]:
    """Work out the step's collectives that are no buckets, equal ones together."""
    others = subject.step.others
    if others.are_gradients:  # they are the messages
        return
    after, inside = Counter(others.kinds_after), Counter(others.kinds_in_hosts)
    for (op, size, members), count in Counter(others.kinds).items():
        ranks = [ranks_among(members, among) for among in workers]
        cost_of = {each: recorded_cost(op, each, size, subject.adds) for each in set(ranks)}
        costs = [cost_of[each] for each in ranks]
        loads = subject.nic_loads(workers, *on_wire(op))
        on_link, late = np.minimum(loads, 1.0) if members else loads, after[op, size, members]
        sent_bytes = np.array([0.0 if op == "recv" else float(cost.sent_bytes) for cost in costs])
        mean_bytes = size * (1 - 1 / np.array(ranks)) if op == "broadcast" else sent_bytes
        pass_bits, once_bits, routed = 8 * sent_bytes * on_link, 8 * mean_bytes * on_link, []
        if on_links is not None:  # the load of the busiest link of the network
            routed = [Routed(on_links.recorded(op, among), float(size)) for among in workers]
            pass_bits = once_bits = np.array([each.network_bits_per_byte for each in routed])
        yield _Other(
            wire_bits=np.array([8 * float(cost.wire_bytes) for cost in costs]),
            pass_bits=pass_bits * (count - late - inside[op, size, members]),
            once_bits=once_bits * late,
            hops=np.array([float(cost.hops) for cost in costs]),
            halves=np.array([half_a_part(op, each) for each in ranks]),
            load=np.ones(len(workers)) if members else loads,
            latency_s=latency_s,
            count=count,
            after=late,
            kind=(op, size, members),
            routed=tuple((each,) for each in routed),
        )
