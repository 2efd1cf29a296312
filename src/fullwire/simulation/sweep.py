"""A grid of scenarios for one run or several, computed together.

Every message of a step costs `wire / rate + fixed`, so a step on one lane is a short chain of sums
and maxima per point; numpy does it for blocks of points that fit the processor's cache. The result
keeps the grid's axes apart from its measures: a million rows take the memory of the measures only.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fullwire.clusters.cluster import Cluster, one_switch, with_workers
from fullwire.collectives.closed_form import gradient_cost, recorded_as, recorded_cost
from fullwire.collectives.cost import AddTimes, Floats
from fullwire.collectives.registry import of_one_switch, open_to
from fullwire.collectives.tuning import AUTO
from fullwire.compression.compressor import Combining, Compressor
from fullwire.crew import ALONE, Crew
from fullwire.errors import UsageError
from fullwire.simulation.buckets import BucketPolicy, Buckets
from fullwire.simulation.on_links import OnLinks, Routed, routed_s
from fullwire.simulation.scenario import Order, Scenario
from fullwire.simulation.schedule import (
    fifo_end_and_busy_s,
    fifo_overhead_s,
    grouped,
    priority_overhead_s,
    priority_timeline,
)
from fullwire.simulation.stragglers import AsRecorded, Jitter
from fullwire.simulation.transport import FullTransport, MeasuredTransport, Transport
from fullwire.simulation.typical import Step

Progress: TypeAlias = Callable[[int, int], None]

BLOCK_POINTS = 16_384  # three arrays of so many numbers fit the second-level cache
PIECE_POINTS = 2**18  # some 10 MB of measures: what is computed at once, here or elsewhere
MOST_POINTS = 100_000_000  # 4 GB of measures
MOST_APART = 10_000  # passes between two synchronisations
AXES = (
    "run",
    "buckets",
    "algorithm",
    "transport",
    "latency_s",
    "accumulate",
    "local_steps",
    "jitter",
    "workers",
    "bandwidth_bps",
    "codec",
)
AXES_GIVEN = (
    "workers",
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
MEASURES = ("step_s", "communication_s", "overhead_s", "scaling_factor", "network_utilization")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Every combination of these conditions.

    On a described cluster workers are its first devices, the bandwidth is that of its NICs, and the
    latency theirs. One that is no more than workers around a switch needs no description.
    """

    workers: tuple[int, ...]
    bandwidth_bps: tuple[float, ...]
    compressors: tuple[Compressor, ...] = (Compressor(ratio=1),)
    transports: tuple[Transport, ...] = (FullTransport(),)
    buckets: tuple[BucketPolicy, ...]
    algorithms: tuple[str, ...] = ("ring",)
    latency_s: tuple[float, ...] = (0.0,)
    accumulate: tuple[int, ...] = (1,)  # gradients of so many passes are added up, then sent
    local_steps: tuple[int, ...] = (1,)  # so many of a worker's own, then parameters are averaged
    jitters: tuple[Jitter, ...] = (AsRecorded(),)
    lane: Order = "fifo"
    cluster: Cluster | None = None
    is_scattered: bool = False

    def __post_init__(self) -> None:
        for name in AXES_GIVEN:
            if not getattr(self, name):
                raise UsageError(f"{name.removesuffix('_bps')}: expected at least one value")
        for workers, rate_bps, latency_s in _corners(self):
            one_switch(workers=workers, rate_bps=rate_bps, latency_s=latency_s)
        for algorithm, transport in itertools.product(self.algorithms, self.transports):
            Scenario(
                workers=1,
                rate_bps=1,
                algorithm=algorithm,
                lane=self.lane,
                transport=transport,
                cluster=self.cluster,
            )
        if (most := max(self.accumulate) * max(self.local_steps)) > MOST_APART:
            raise UsageError(
                f"synchronising once in {most:,} passes: expected at most {MOST_APART:,}"
            )


@dataclass(frozen=True, slots=True)
class Residue:
    """What a replay as recorded lacks of the measured step, and the overhead that it had there.

    Nobody knows what took it. It is taken for communication's: with less of that it shrinks in
    proportion, with more it stays as it was.
    """

    time_s: float = 0.0
    at_overhead_s: float = 0.0

    def beside(self, overhead_s: Floats) -> Floats:
        """Return what to add to these overheads."""
        if self.at_overhead_s <= 0:
            return np.full(overhead_s.shape, self.time_s)
        return self.time_s * np.minimum(overhead_s / self.at_overhead_s, 1.0)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Subject:
    """A run as the sweep sees it: its name, its typical step, and what adding costs there."""

    name: str
    step: Step
    adds: AddTimes
    recorded: Grid | None = None  # the one point at which the step was measured, if it is known
    residue: Residue = Residue()
    ranks_per_host: int | None = None  # on the processors of one; None for as many as it had


@dataclass(frozen=True, eq=False, kw_only=True)
class Predictions:
    """A table with a row for every combination of its axes, the last axis changing fastest."""

    axes: Mapping[str, tuple[Any, ...]]
    measures: Mapping[str, NDArray[np.float64]]  # each shaped like the axes

    def __len__(self) -> int:
        return int(np.prod([len(values) for values in self.axes.values()]))

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return a column."""
        if name in self.measures:
            return np.broadcast_to(self.measures[name], self._shape()).reshape(-1)
        if name == "compression":
            return self._along("codec", [each.ratio for each in self.axes["codec"]])
        if name == "codec":
            shown = [None if each.is_free else each.label for each in self.axes["codec"]]
            return self._along("codec", shown)
        if name in ("transport", "buckets", "jitter"):
            return self._along(name, [str(each) for each in self.axes[name]])
        if name not in self.axes:
            raise KeyError(f"no column {name!r}: there are {', '.join(self.names())}")
        return self._along(name, list(self.axes[name]))

    def names(self) -> tuple[str, ...]:
        """Name the columns in the order in which they are shown."""
        axes = [axis for axis in self.axes if axis != "codec"]
        return (
            *axes,
            "compression",
            "codec",
            "step_s",
            "baseline_step_s",
            "backward_s",
            *MEASURES[1:],
        )

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return all columns by name, as a data frame takes them."""
        return {name: self[name] for name in self.names()}

    def _shape(self) -> tuple[int, ...]:
        return tuple(len(values) for values in self.axes.values())

    def _along(self, axis: str, values: Sequence[Any]) -> NDArray[Any]:
        position = list(self.axes).index(axis)
        column = np.array(values, object if isinstance(values[0], str | None) else None)
        shape = [1] * len(self.axes)
        shape[position] = len(values)
        return np.broadcast_to(column.reshape(shape), self._shape()).reshape(-1)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Way:
    """What one algorithm makes of the messages.

    `wire_bits`, `fixed_s` and `sent_bits` have a row per message, then an axis for workers and one
    for compressors, as `hops` has. Wires are not yet divided by the compression ratio. `work` is
    what a byte on the wire takes of processors, for each compressor. On a described cluster
    `routed` says for these two axes what the links take; latencies are in that, not in `fixed_s`.
    """

    wire_bits: Floats
    work: Floats
    hops: Floats
    fixed_s: Floats
    sent_bits: Floats
    routed: tuple[tuple[Routed, ...], ...] = ()

    def only(self, column: slice) -> _Way:
        return _Way(
            wire_bits=self.wire_bits[:, :, column],
            work=self.work[column],
            hops=self.hops[:, column],
            fixed_s=self.fixed_s[:, :, column],
            sent_bits=self.sent_bits[:, :, column],
            routed=tuple(row[column] for row in self.routed),
        )


@dataclass(frozen=True, slots=True)
class Exposed:
    """What a step's communication exposes, how long it is on the lane, and what it works."""

    by_buckets_s: Floats
    by_others_s: Floats
    busy_s: Floats
    work_s: Floats


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Messages:
    """The messages of a step among several cluster sizes, for several compressors.

    Of several ways to send a message each takes the one that is quickest for it.
    """

    subject: Subject
    buckets: Buckets
    lane: Order
    workers: tuple[int, ...]
    ways: tuple[_Way, ...]
    others: tuple[_Other, ...]

    def only(self, column: slice) -> Messages:
        """Return the same messages for some of the compressors."""
        return replace(self, ways=tuple(each.only(column) for each in self.ways))

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
        """Return what the busiest link sends of the whole step."""
        if len(self.ways) == 1:
            return running_sum(self.ways[0].sent_bits[:, chosen, None, :]) / ratio
        total: Floats = np.zeros(())
        for number, times_s in enumerate(self._times_s(chosen, rate_bps, transport, ratio)):
            quickest = np.argmin(np.stack(times_s), axis=0)
            sent = [each.sent_bits[number, chosen, None, :] for each in self.ways]
            total = total + np.choose(quickest, np.broadcast_arrays(*sent))
        return total / ratio

    def exposed(
        self, chosen: slice, rate_bps: Floats, transport: Transport, ratio: Floats
    ) -> Exposed:
        """Return what the communication of a step that synchronises exposes."""
        cost_s = self.cost_s(chosen, rate_bps, transport, ratio)
        by_buckets_s, busy_s = self._by_buckets_and_busy_s(cost_s)
        if self.subject.step.others.sum_gradients:  # so there are no buckets to wait for
            by_buckets_s = np.zeros_like(by_buckets_s)
        by_others_s = self._exposed_others_s(chosen, rate_bps, transport)
        work_s = running_sum(self._work_s(chosen, transport, ratio))
        return Exposed(by_buckets_s, by_others_s, busy_s, work_s)

    def overhead_s(
        self,
        exposed: Exposed,
        chosen: slice,
        transport: Transport,
        accumulate: int,
        local_steps: int,
        jitter: Jitter,
    ) -> Floats:
        """Return what a step loses, on average over those until the next that synchronises.

        Local steps end in averages of parameters, which nothing hides, since all are there at once.
        Collectives that are no buckets are there in every step, unless they sum gradients.
        """
        overhead_s = exposed.by_buckets_s if local_steps == 1 else exposed.busy_s
        overhead_s = overhead_s + exposed.by_others_s
        overhead_s = overhead_s + self.subject.step.packing_ns * 1e-9
        apart = accumulate * local_steps
        if apart > 1:
            overhead_s = (overhead_s - exposed.by_others_s) / apart + exposed.by_others_s
        workers = self.workers[chosen]
        if isinstance(transport, MeasuredTransport):
            work_s = exposed.work_s / apart
            overhead_s = self._with_shared_processors(overhead_s, work_s, workers, transport)
        if not isinstance(transport, FullTransport):
            overhead_s = overhead_s + self.subject.residue.beside(overhead_s)
        late_s = jitter.late_s(self.subject.step, workers, apart)
        overhead_s = np.maximum(overhead_s + late_s[:, None, None], 0.0)
        overhead_s[np.array(workers) == 1] = 0.0  # nobody to talk to: no messages
        return overhead_s

    def _with_shared_processors(
        self,
        overhead_s: Floats,
        work_s: Floats,
        workers: Sequence[int],
        transport: MeasuredTransport,
    ) -> Floats:
        """Return the overhead where ranks compute on processors that they share.

        Computation takes no less than its work for all ranks, and neither does the step with what
        the transport works: what one hides behind the other waits for the same processors.
        """
        own_s, alone_s = self.subject.step.processor_ns * 1e-9, self.subject.step.step_ns * 1e-9
        per_host = self.subject.ranks_per_host
        longer_s = np.maximum(own_s * transport.crowd(workers, per_host) - alone_s, 0.0)
        overhead_s = overhead_s + longer_s[:, None, None]
        ranks = transport.ranks_per_processor(workers, per_host)[:, None, None]
        all_s = own_s * ranks + work_s * np.minimum(ranks, 1.0)
        return np.maximum(overhead_s, all_s - alone_s)

    def _work_s(self, chosen: slice, transport: Transport, ratio: Floats) -> Iterator[Floats]:
        """Go through what messages take of the processors, each in the way with the least."""
        if not isinstance(transport, MeasuredTransport):
            return
        crowd = self._crowd(chosen, transport)
        for number in range(0 if self.subject.step.others.sum_gradients else len(self.buckets)):
            yield functools.reduce(
                np.minimum,
                [
                    transport.work_s(
                        way.wire_bits[number, chosen, None, :] * way.work / (8 * ratio),
                        way.hops[chosen, None, :],
                        crowd,
                    )
                    for way in self.ways
                ],
            )
        for each in self.others:
            wire_bits, hops = each.wire_bits[chosen, None, None], each.hops[chosen, None, None]
            yield each.count * transport.work_s(wire_bits / 8, hops, crowd)

    def _times_s(
        self, chosen: slice, rate_bps: Floats, transport: Transport, ratio: Floats
    ) -> Iterator[tuple[Floats, ...]]:
        """Go through the messages, with the times that the ways to send it take."""
        per_bit = 1 / (rate_bps * transport.share)
        per_bit_before_packing = per_bit / ratio
        crowd = self._crowd(chosen, transport)

        def time_s(way: _Way, number: int) -> Floats:
            wire_bits = way.wire_bits[number, chosen, None, :]
            hops, fixed_s = way.hops[chosen, None, :], way.fixed_s[number, chosen, None, :]
            if way.routed:
                size = float(self.buckets.bytes[number]) / ratio
                line_s = routed_s(way.routed[chosen], size, per_bit)
            else:
                line_s = wire_bits * per_bit_before_packing
            worked_bytes = wire_bits * way.work / (8 * ratio)
            return transport.message_s(line_s, worked_bytes, hops, crowd) + fixed_s

        for number in range(len(self.buckets)):
            yield tuple(time_s(way, number) for way in self.ways)

    def _exposed_others_s(self, chosen: slice, rate_bps: Floats, transport: Transport) -> Floats:
        """Return how long collectives that are no buckets are exposed.

        As large a share as was recorded, but no more hides behind computation than did there.
        """
        others = self.subject.step.others
        total_s = running_sum(self._others_s(chosen, rate_bps, transport))
        hidden_s = max(others.total_ns - others.exposed_ns, 0) * 1e-9
        share = others.exposed_ns / max(others.total_ns, 1)
        return np.maximum(share * total_s, total_s - hidden_s)

    def _others_s(self, chosen: slice, rate_bps: Floats, transport: Transport) -> Iterator[Floats]:
        """Go through the times of the collectives that are no buckets."""
        crowd = self._crowd(chosen, transport)
        for each in self.others:
            wire_bits, hops = each.wire_bits[chosen, None, None], each.hops[chosen, None, None]
            line_s = wire_bits / (rate_bps * transport.share) + hops * each.latency_s
            if each.routed:
                per_bit = 1 / (rate_bps * transport.share)
                line_s = routed_s(each.routed[chosen], np.ones((1, 1, 1)), per_bit)
            yield each.count * transport.message_s(line_s, wire_bits / 8, hops, crowd)

    def _crowd(self, chosen: slice, transport: Transport) -> Floats:
        crowd = transport.crowd(self.workers[chosen], self.subject.ranks_per_host)
        return crowd[:, None, None]

    def _by_buckets_and_busy_s(self, cost_s: Iterable[Floats]) -> tuple[Floats, Floats]:
        ready_s = [ready_ns * 1e-9 for ready_ns in self.buckets.ready_ns.tolist()]
        if self.lane == "fifo":
            end_s, busy_s = fifo_end_and_busy_s(ready_s, cost_s)
            return fifo_overhead_s(self.subject.step, end_s), busy_s
        costs = list(cost_s)
        timeline = priority_timeline(ready_s, costs)
        return priority_overhead_s(self.subject.step, self.buckets, timeline), running_sum(costs)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Other:
    """Equal collectives of a step that are no buckets, by workers."""

    wire_bits: Floats
    hops: Floats
    latency_s: float
    count: int
    routed: tuple[tuple[Routed, ...], ...] = ()


def sweep(
    subjects: Sequence[Subject], grid: Grid, progress: Progress | None = None, crew: Crew = ALONE
) -> Predictions:
    """Predict every point of the grid for every subject."""
    axes = _axes(subjects, grid)
    shape = tuple(len(values) for values in axes.values())
    total = int(np.prod([float(size) for size in shape]))
    if total > MOST_POINTS:
        raise UsageError(f"a grid of {total:,} points: expected at most {MOST_POINTS:,}")
    measures = {name: np.empty(shape) for name in MEASURES}
    pieces = list(_pieces(subjects, grid))
    computed = crew.each(partial(_predicted, subjects, grid), pieces)
    done = 0
    for piece, found in zip(pieces, computed, strict=True):
        for name, measure in measures.items():
            measure[piece.place] = found[name]
        done += found["step_s"].size
        if progress:
            progress(done, total)
    return Predictions(axes=axes, measures=measures | _of_the_run(subjects))


def with_residue(subject: Subject, transport: Transport) -> Subject:
    """Return the subject with what a replay under this transport lacks of the measured step."""
    measured_ns, recorded = subject.step.measured_ns, subject.recorded
    if measured_ns is None or recorded is None:
        return subject
    plain = replace(subject, residue=Residue())
    played = sweep([plain], replace(recorded, transports=(transport,)))
    lacking_s = measured_ns * 1e-9 - float(played["step_s"][0])
    step = subject.step
    at_s = float(played["overhead_s"][0]) - (step.waiting_ns + step.packing_ns) * 1e-9
    return replace(subject, residue=Residue(lacking_s, at_s))


def messages_of(
    subject: Subject,
    policy: BucketPolicy,
    algorithm: str,
    latency_s: float,
    grid: Grid,
    sizes: slice = slice(None),
) -> Messages:
    """Work out the messages of a step for the cluster sizes, or some, and compressors of a grid."""
    buckets = grouped(subject.step, policy)
    on_links = OnLinks.of(grid.cluster, latency_s, is_scattered=grid.is_scattered)
    ways = tried(grid) if algorithm == AUTO else (algorithm,)
    workers, compressors = grid.workers[sizes], grid.compressors
    shards = subject.step.shards
    if shards > 1 and on_links is not None:
        raise UsageError(
            f"{subject.name}: its gradients are summed in groups of one in {shards} ranks, and on "
            "a described cluster only sums over all ranks are predicted"
        )
    among = [-(-each // shards) for each in workers]  # that hold the same part of the model
    return Messages(
        subject=subject,
        buckets=buckets,
        lane=grid.lane,
        workers=workers,
        ways=tuple(
            _way(subject, buckets, each, latency_s, among, compressors, on_links) for each in ways
        ),
        others=tuple(_others(subject, latency_s, workers, on_links)),
    )


def tried(grid: Grid) -> tuple[str, ...]:
    """List what "auto" chooses from: algorithms that all of a grid's workers can use."""
    usual = of_one_switch("allreduce")
    if grid.cluster is None or grid.cluster.is_flat:
        return usual
    if not all(isinstance(each, FullTransport) for each in grid.transports):
        return usual  # what another transport takes for the others nobody knows
    fits = [
        open_to("allreduce", with_workers(grid.cluster, workers), workers)
        for workers in grid.workers
    ]
    return tuple(each for each in fits[0] if all(each in others for others in fits))


def _way(
    subject: Subject,
    buckets: Buckets,
    algorithm: str,
    latency_s: float,
    sizes: Sequence[int],
    compressors: Sequence[Compressor],
    on_links: OnLinks | None,
) -> _Way:
    """Work out what one algorithm makes of the messages."""
    shape = (len(buckets), len(sizes), len(compressors))
    wire_bits, fixed_s, sent_bits = np.empty(shape), np.empty(shape), np.empty(shape)
    hops = np.empty(shape[1:])
    hop_s = latency_s if on_links is None else 0.0  # what links take holds their latencies
    kinds = {each.combining for each in compressors}
    routed: list[dict[Combining, Routed]] = []
    for row, workers in enumerate(sizes):
        if on_links is None:
            by_kind = {
                kind: gradient_cost(kind, algorithm, workers, buckets.bytes, subject.adds)
                for kind in kinds
            }
        else:
            routed.append({kind: on_links.gradients(kind, algorithm, workers) for kind in kinds})
            by_kind = {
                kind: each.as_cost(buckets.bytes, subject.adds) for kind, each in routed[-1].items()
            }
        for column, compressor in enumerate(compressors):
            whole = by_kind[compressor.combining]
            packing = 0.0 if workers == 1 else compressor.codec_s_per_byte(workers)
            wire_bits[:, row, column] = 8 * whole.wire_bytes
            hops[row, column] = whole.hops
            sent_bits[:, row, column] = 8 * whole.sent_bytes
            fixed_s[:, row, column] = whole.hops * hop_s + whole.add_s + packing * buckets.bytes
    work = np.array([each.work_per_byte for each in compressors])
    way = _Way(wire_bits=wire_bits, work=work, hops=hops, fixed_s=fixed_s, sent_bits=sent_bits)
    return way if on_links is None else _over_links(way, buckets, routed, compressors)


def _over_links(
    way: _Way,
    buckets: Buckets,
    by_kind: Sequence[Mapping[Combining, Routed]],
    compressors: Sequence[Compressor],
) -> _Way:
    """Return the same messages as the links of a cluster take them."""
    routed = tuple(tuple(row[each.combining] for each in compressors) for row in by_kind)
    carried = [[each.network_bits_per_byte for each in row] for row in routed]
    sent_bits = np.array(carried)[None] * buckets.bytes[:, None, None].astype(np.float64)
    return replace(way, routed=routed, sent_bits=sent_bits)


def _others(
    subject: Subject, latency_s: float, workers: Sequence[int], on_links: OnLinks | None
) -> Iterator[_Other]:
    """Work out the step's collectives that are no buckets, equal ones together."""
    others = subject.step.others
    if others.are_gradients:  # they are the messages
        return
    kinds = Counter(zip(others.op, others.bytes, others.members, strict=True))
    for (op, size, members), count in kinds.items():
        costs = [recorded_cost(op, members or each, size, subject.adds) for each in workers]
        yield _Other(
            wire_bits=np.array([8 * float(each.wire_bytes) for each in costs]),
            hops=np.array([float(each.hops) for each in costs]),
            latency_s=latency_s,
            count=count,
            routed=()
            if on_links is None
            else tuple(
                (Routed(on_links.cost(*recorded_as(op), each), float(size)),) for each in workers
            ),
        )


def shaped(**lengths: int) -> tuple[int, ...]:
    """Return the shape of what varies along these axes only."""
    return tuple(lengths.get(axis, 1) for axis in AXES)


def scaling_factor(step: Step, overhead_s: Floats) -> Floats:
    """Return T1 / Tn."""
    baseline_s = step.step_ns * 1e-9
    return baseline_s / (baseline_s + overhead_s)


@dataclass(frozen=True, slots=True)
class _Piece:
    """What is computed at once, by its places on the axes: all that follows from some messages."""

    sizes: slice  # of the workers
    run: int
    buckets: int
    algorithm: int
    latency: int

    @property
    def place(self) -> tuple[Any, ...]:
        """Return where it is on all axes."""
        whole = slice(None)
        return (
            self.run,
            self.buckets,
            self.algorithm,
            whole,
            self.latency,
            whole,
            whole,
            whole,
            self.sizes,
        )


def _pieces(subjects: Sequence[Subject], grid: Grid) -> Iterator[_Piece]:
    """Cut a grid; what has the same cluster sizes comes in a row, since it shares their routes."""
    axes = (subjects, grid.buckets, grid.algorithms, grid.latency_s)
    places = itertools.product(_sizes(grid), *(range(len(axis)) for axis in axes))
    return itertools.starmap(_Piece, places)


def _sizes(grid: Grid) -> Iterator[slice]:
    """Cut the cluster sizes so that pieces are small; a described one takes long enough alone."""
    others = (
        grid.transports,
        grid.accumulate,
        grid.local_steps,
        grid.jitters,
        grid.bandwidth_bps,
        grid.compressors,
    )
    together = max(1, PIECE_POINTS // math.prod(map(len, others)))
    if grid.cluster is not None and not grid.cluster.is_flat:
        together = 1
    for first in range(0, len(grid.workers), together):
        yield slice(first, first + together)


def _predicted(subjects: Sequence[Subject], grid: Grid, piece: _Piece) -> dict[str, Floats]:
    """Compute the measures of one piece."""
    messages = messages_of(
        subjects[piece.run],
        grid.buckets[piece.buckets],
        grid.algorithms[piece.algorithm],
        grid.latency_s[piece.latency],
        grid,
        piece.sizes,
    )
    shape = (
        len(grid.transports),
        len(grid.accumulate),
        len(grid.local_steps),
        len(grid.jitters),
        len(messages.workers),
        len(grid.bandwidth_bps),
        len(grid.compressors),
    )
    found = {name: np.empty(shape) for name in MEASURES}
    for number, transport in enumerate(grid.transports):
        block = {name: measure[number] for name, measure in found.items()}
        _fill(block, messages, transport, grid)
    return found


def _fill(
    block: Mapping[str, Floats], messages: Messages, transport: Transport, grid: Grid
) -> None:
    """Compute the measures of one transport, block by block."""
    rate_bps = np.array(grid.bandwidth_bps)[None, :, None]
    ratio = np.array([each.ratio for each in grid.compressors])[None, None, :]
    baseline_s = messages.subject.step.step_ns * 1e-9
    for sizes, rates in _blocks(len(messages.workers), len(grid.bandwidth_bps), ratio.size):
        asked = (sizes, rate_bps[:, rates], transport, ratio)
        exposed = messages.exposed(*asked)
        used_s = messages.sent_bits(*asked) / rate_bps[:, rates]
        for place, (accumulate, local_steps, jitter) in synchronising(grid):
            here: Any = (*place, sizes, rates)
            overhead_s = messages.overhead_s(
                exposed, sizes, transport, accumulate, local_steps, jitter
            )
            apart = accumulate * local_steps
            block["overhead_s"][here] = overhead_s
            block["communication_s"][here] = exposed.busy_s / apart
            step_s = np.add(baseline_s, overhead_s, out=block["step_s"][here])
            np.divide(baseline_s, step_s, out=block["scaling_factor"][here])
            np.divide(used_s / apart, step_s, out=block["network_utilization"][here])


def synchronising(grid: Grid) -> Iterator[tuple[tuple[int, ...], tuple[int, int, Jitter]]]:
    """Go through how often workers synchronise and how they scatter, with the place of each."""
    axes = (grid.accumulate, grid.local_steps, grid.jitters)
    places = itertools.product(*(range(len(axis)) for axis in axes))
    return zip(places, itertools.product(*axes), strict=True)


def _blocks(workers: int, rates: int, compressors: int) -> Iterator[tuple[slice, slice]]:
    rate_step = max(1, min(rates, BLOCK_POINTS // compressors))
    worker_step = max(1, BLOCK_POINTS // (compressors * rates))
    for first_worker in range(0, workers, worker_step):
        for first_rate in range(0, rates, rate_step):
            yield (
                slice(first_worker, first_worker + worker_step),
                slice(first_rate, first_rate + rate_step),
            )


def running_sum(terms: Iterable[Floats]) -> Floats:
    """Add up in order, so that the digits do not depend on how many points stand beside."""
    total: Floats = np.zeros(())
    for term in terms:
        total = total + term
    return total


def _axes(subjects: Sequence[Subject], grid: Grid) -> dict[str, tuple[Any, ...]]:
    values = (
        tuple(subject.name for subject in subjects),
        grid.buckets,
        grid.algorithms,
        grid.transports,
        grid.latency_s,
        grid.accumulate,
        grid.local_steps,
        grid.jitters,
        grid.workers,
        grid.bandwidth_bps,
        grid.compressors,
    )
    return dict(zip(AXES, values, strict=True))


def _of_the_run(subjects: Sequence[Subject]) -> dict[str, Floats]:
    """Return the measures that depend on nothing but the run."""
    shape = shaped(run=len(subjects))
    steps = [subject.step for subject in subjects]
    return {
        "baseline_step_s": np.array([step.step_ns * 1e-9 for step in steps]).reshape(shape),
        "backward_s": np.array([step.backward_ns * 1e-9 for step in steps]).reshape(shape),
    }


def _corners(grid: Grid) -> Iterator[tuple[int, float, float]]:
    """Name the extreme values, which are valid only if all between them are."""
    for pick in (min, max):
        yield pick(grid.workers), pick(grid.bandwidth_bps), pick(grid.latency_s)
