"""The question and the answer of a sweep: runs, a grid of conditions, a table of predictions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np
from numpy.typing import NDArray

from fullwire.clusters.cluster import Cluster, one_switch, with_workers
from fullwire.collectives.closed_form import host_load
from fullwire.collectives.cost import AddTimes, Floats
from fullwire.collectives.library import has_tables
from fullwire.collectives.registry import names, of_one_switch, open_to, with_formula
from fullwire.collectives.tuning import AUTO, LIBRARY
from fullwire.compression.compressor import Combining, Compressor
from fullwire.errors import UsageError
from fullwire.run.kinds import Kind
from fullwire.run.placement import UNKNOWN_PLACEMENT, Placement
from fullwire.simulation.buckets import BucketPolicy, fragment_shares
from fullwire.simulation.step import Step
from fullwire.simulation.stragglers import AsRecorded, Jitter
from fullwire.simulation.transport import FullTransport, Transport

Order: TypeAlias = Literal["fifo", "priority"]

_TRANSPORT_OFF = 0.05  # of the exposed time: a usual misfit (validation/cells.py)
# Of the turns of other ranks on a processor, so much hides messages. It was chosen on labs.
_HIDE_BY_TURNS = 0.4
MOST_APART = 10_000  # passes between two synchronisations
BUCKET = "bucket"  # the unit of gradients whose parameters are not known
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


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Grid:
    """Every combination of these conditions.

    On a described cluster workers are its first devices, and bandwidth and latency are those of its
    NICs. Workers around a switch need no description.
    """

    workers: tuple[int, ...]
    bandwidth_bps: tuple[float, ...]
    compressors: tuple[Compressor, ...] = (Compressor(ratio=1),)
    transports: tuple[Transport, ...] = (FullTransport(),)
    buckets: tuple[BucketPolicy, ...]
    are_buckets_asked: bool = False  # else sums by hand stay as they are
    algorithms: tuple[str, ...] = ("ring",)
    latency_s: tuple[float, ...] = (0.0,)
    accumulate: tuple[int, ...] = (1,)  # passes whose gradients are added up before sending
    local_steps: tuple[int, ...] = (1,)  # of a worker alone, before parameters are averaged
    jitters: tuple[Jitter, ...] = (AsRecorded(),)
    lane: Order = "fifo"
    cluster: Cluster | None = None
    is_startup_usual: bool = False  # the cluster states none
    is_scattered: bool = False
    own_workers: tuple[int, ...] | None = None  # of each subject, in place of all `workers`

    def among(self, subjects: slice) -> Grid:
        """Return the grid for some subjects, whose own numbers of workers are then on its axis."""
        if self.own_workers is None:
            return self
        return replace(self, workers=self.own_workers[subjects], own_workers=None)

    def workers_of_points(self) -> Floats:
        """Return the number of workers, in the shape of an array that varies with it."""
        if self.own_workers is None:
            return np.reshape(np.array(self.workers, float), shaped(workers=len(self.workers)))
        return np.reshape(np.array(self.own_workers, float), shaped(run=len(self.own_workers)))

    def __post_init__(self) -> None:
        for name in AXES_GIVEN:
            if not getattr(self, name):
                raise UsageError(f"{name.removesuffix('_bps')}: expected at least one value")
        for pick in (min, max):  # these are valid only if all between them are
            one_switch(
                workers=pick(self.workers),
                rate_bps=pick(self.bandwidth_bps),
                latency_s=pick(self.latency_s),
            )
        is_cluster = self.cluster is not None and not self.cluster.is_flat
        formulas = (*with_formula("allreduce"), AUTO)
        known = (*names("allreduce"), AUTO) if is_cluster else formulas
        if self.cluster is not None and has_tables(self.cluster, is_scattered=self.is_scattered):
            known = (*known, LIBRARY)
        for algorithm, transport in itertools.product(self.algorithms, self.transports):
            if algorithm not in known:
                raise UsageError(f"algorithm: expected {' or '.join(known)}, got {algorithm!r}")
            if algorithm not in formulas and not isinstance(transport, FullTransport):
                raise UsageError(
                    f"algorithm: {algorithm} is known with a full transport only, got {transport}"
                )
        if (most := max(self.accumulate) * max(self.local_steps)) > MOST_APART:
            raise UsageError(
                f"synchronising once in {most:,} passes: expected at most {MOST_APART:,}"
            )


def lane_order(text: str) -> Order:
    """Read the order of a communication lane."""
    for order in get_args(Order):
        if text == order:
            return cast(Order, order)
    raise UsageError(f"lane: expected fifo or priority, got {text!r}")


@dataclass(frozen=True, slots=True)
class Residue:
    """The measured step less its replay as recorded, and what that replay had.

    The cause of the difference is unknown. It counts as communication: with less communication it
    shrinks in proportion, with more it stays as it was. A faster link saves no more time than the
    bytes take less of it. The overhead has what is exposed of that, so the residue shrinks by what
    the replay hides. A misfit of the transport is in proportion to the overhead, and shrinks so.
    With fewer messages all of the residue shrinks in proportion.
    """

    time_s: float | Floats = 0.0
    at_overhead_s: float | Floats = 0.0
    at_hidden_s: float | Floats = math.inf  # communication behind computing, for each sum
    passes: float | Floats = 1.0  # between sums
    messages: float | Floats = 1.0  # of each sum
    of_full_s: float | Floats = -math.inf  # on devices: the measured step less its full line's

    @classmethod
    def stacked(cls, several: Sequence[Residue]) -> Residue:
        """Return several as one, along a first axis before those of the points."""
        figures = np.array([each.figures for each in several])
        return cls(*figures.T.reshape(figures.shape[1], -1, 1, 1, 1))

    @property
    def figures(self) -> tuple[float | Floats, ...]:
        """Return its figures, in the order of its fields."""
        return (
            self.time_s,
            self.at_overhead_s,
            self.at_hidden_s,
            self.passes,
            self.messages,
            self.of_full_s,
        )

    @property
    def of_any_transport(self) -> Residue:
        """Return what another transport keeps of it.

        A step that is longer than its replay may owe that to its transport. One that is shorter may
        owe it to T1, where that is estimated too long, and is then as much shorter on a full line.
        Else a full line would seem slower than the measured one. On devices, kernels tell T1. It is
        right if the step is as long as its replay on a full line, and then nothing is kept.
        """
        return replace(self, time_s=np.minimum(np.maximum(self.time_s, self.of_full_s), 0.0))

    def beside(self, overhead_s: Floats, hidden_s: Floats, passes: int, messages: int) -> Floats:
        """Return the time to add to these overheads.

        - `passes`: between sums.
        - `messages`: of each sum.
        """
        is_known = np.greater(self.at_overhead_s, 0)
        at_s = np.where(is_known, self.at_overhead_s, 1.0)
        ratio = np.where(is_known, np.minimum(overhead_s / at_s, 1.0), 1.0)
        shrunk_s = self.time_s * ratio
        misfit_s = np.minimum(self.time_s, _TRANSPORT_OFF * at_s)
        less_s = np.maximum(self.at_hidden_s - hidden_s, 0.0) / self.passes
        fewer = np.minimum(messages / self.messages, 1.0) * self.passes / passes
        unhidden_s = np.maximum(self.time_s - less_s, 0.0) * fewer
        least_s = np.minimum(unhidden_s, self.time_s - misfit_s * (1 - ratio))
        return np.asarray(np.maximum(shrunk_s, least_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowding:
    """The contention that messages cause beside computing.

    On processors, handling their bytes delays computing. So each bit beside it has a cost, more so
    if it is sent slowly. Kernels of a device are slower as long as a collective is on its way, so
    each second beside them has.
    """

    is_by_time: bool = False
    s_each: float = 0.0  # for each second, or each bit^(2/3) * s^(1/3)
    off_s_each: float = 0.0  # a standard deviation
    recorded_beside: float = 0.0  # seconds or that mean beside computing, in the recorded step
    s_per_bit: float = 1.0  # of work on a measured transport; alike for all bits on another one
    steady_share: float = 1.0  # of the recorded contention, which these bits do not explain
    recorded_work_s: float = 0.0  # of a measured transport in the recorded step, on processors
    lateness_share: float = 0.0  # of the recorded contention: ranks that were late by turns
    busy_by_a_rank: float = 1.0  # of a processor, by a rank's own computing
    recorded_ranks: float = 1.0  # that computed on each processor
    late_by_turns: float = 1.0  # share of the lateness that ranks on a processor cause
    # Of the messages' work, at most, that keeps processors busy. The recorded step had no more room
    # beside its computing: in the rest of that time ranks wait for each other.
    most_busy_share: float = 1.0

    def with_ranks(self, ranks: Floats) -> Floats:
        """Return how many times the recorded contention a bit causes with so many ranks on each."""
        busy = np.minimum(self.busy_by_a_rank * ranks, 1.0)
        return np.asarray(busy / min(self.busy_by_a_rank * self.recorded_ranks, 1.0))

    def still_late(self, ranks: Floats) -> Floats:
        """Return the share of the recorded lateness that other ranks on each processor have.

        Ranks that compute by turns are late for each other. Ranks that sleep are not.
        """
        fewer = np.minimum(np.maximum(ranks, 1.0) / max(self.recorded_ranks, 1.0), 1.0)
        return np.asarray(1 - self.busy_by_a_rank * self.late_by_turns * (1 - fewer))

    @property
    def late_for_each_other(self) -> float:
        """Return the share of the recorded lateness that ends only where no ranks take turns."""
        return 1 - float(self.still_late(np.ones(1))[0])


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Subject:
    """A run as the sweep sees it: its name, its typical step, and the cost of additions there."""

    name: str
    step: Step
    adds: AddTimes
    # Times as long as an all-reduce of as many bytes takes an exchange or a gather of packed ones:
    # between two workers, and how much longer where all data meet those of others at a receiver.
    exchange_factor: float = 1.0
    meeting_factor: float = 0.0
    recorded: Grid | None = None  # the one point at which the step was measured, if it is known
    residues: tuple[Residue, ...] = (Residue(),)  # of each transport, or one for all of them
    placement: Placement = UNKNOWN_PLACEMENT  # of the recorded ranks
    ranks_per_host: int | None = None  # that share processors; None for as many as recorded
    crowding: Crowding = Crowding()
    is_on_devices: bool = False  # which carry out its collectives; else processors do
    fragments: int = 1  # of the parameters; several are averaged apart, each beside a step
    has_parameters: bool = True  # else each of its gradients is a whole bucket of them
    round_s: float = 0.0  # what a rank does once in a round of local steps, beyond its steps
    recorded_rounds: float = 0.0  # in a step, whose recorded time has their part of that
    passes: float = 1.0  # of a recorded step; a mean where steps differ
    # Where steps are of several kinds: each kind as a subject, whose mean step is `step`.
    kinds: tuple[tuple[Kind, Subject], ...] = ()

    def each(self, change: Callable[[Subject], Subject]) -> Subject:
        """Return the subject with a change to it, and to each kind of its steps."""
        kinds = tuple((kind, change(subject)) for kind, subject in self.kinds)
        return replace(change(self), kinds=kinds)

    @property
    def sums_by_hand(self) -> bool:
        """Say whether its script sums gradients itself, in any kind of its steps."""
        return any(step.sums_only_gradients for step in self._steps)

    @property
    def sums_more_by_hand(self) -> bool:
        """Say whether its script sums more than gradients, in any kind of its steps."""
        return any(step.others.are_gradients for step in self._steps) and not self.sums_by_hand

    @property
    def sums_its_own_way(self) -> bool:
        """Say whether gradients go as recorded, and in no buckets, unless buckets are asked for."""
        return self.sends_no_buckets or self.sums_by_hand or self.sums_more_by_hand

    @property
    def _steps(self) -> list[Step]:
        return [kind.step for _, kind in self.kinds] or [self.step]

    def with_new_step(self, change: Callable[[Step], Step]) -> Subject:
        """Return the subject with a change of its steps: no measured step is like it."""
        return self.each(
            lambda each: replace(
                each, step=replace(change(each.step), measured_ns=None, measured_off=(0.0, 0.0))
            )
        )

    @property
    def keeps_gradients(self) -> bool:
        """Say whether no step sends gradients: the recorded collectives are all that is sent."""
        steps = [kind.step for _, kind in self.kinds] or [self.step]
        return all(step.sends_nothing for step in steps)

    @property
    def sends_no_buckets(self) -> bool:
        """Say whether no step has buckets: gradients stay local, or are summed as shards are."""
        steps = [kind.step for _, kind in self.kinds] or [self.step]
        return all(step.sends_no_buckets for step in steps)

    def nic_loads(self, workers: Sequence[int], op: str, algorithm: str) -> Floats:
        """Return the bytes on a host's link, over those of one rank with a link of its own.

        Without a number of ranks for each host they are placed as recorded, which times already
        show. Ranks of one machine have no link between them, unless they had in a lab.
        """
        per_host = self.ranks_per_host
        if per_host is None:
            return np.ones(len(workers))
        inside = 1.0 if self.placement.has_links else 0.0
        return np.array(
            [
                host_load(op, algorithm, count, per_host) if count > per_host else inside
                for count in workers
            ]
        )

    def loads(self, sizes: Sequence[int], algorithm: str, kind: Combining) -> Floats:
        """Return the load of a host's link by a message, over that of a rank with its own link."""
        if self.step.shards > 1:  # the ranks of a group are on hosts that the run does not name
            return np.ones(len(sizes))
        if kind == "sum":
            return self.nic_loads(sizes, "allreduce", algorithm)
        ring = self.nic_loads(sizes, "allgather", "ring")
        if kind == "exchange":  # half of its bytes go to their owners, and a ring gathers them
            return (ring + self.nic_loads(sizes, "alltoall", "ring")) / 2
        return ring

    def ranks_per_processor(self, workers: Sequence[int]) -> Floats:
        """Return how many ranks there are for each processor, if there are so many workers."""
        return self.placement.ranks_per_processor(workers, self.ranks_per_host)

    @property
    def crowded_by_ranks_s(self) -> Floats:
        """Return how much longer the ranks of a machine compute because of each other."""
        is_shared = self.ranks_per_host != 1
        return np.asarray(self.step.crowded_by_ranks_ns * 1e-9 * is_shared)

    def passes_by_turns(self, workers: Sequence[int]) -> Floats:
        """Return how many times as long passes are for messages, where ranks compute by turns.

        While other ranks have the processors, messages that wait for the line go on.
        """
        turns_s = self.step.by_turns_s(self.ranks_per_processor(workers)[:, None, None])
        alone_s = np.maximum(self.step.alone_ns * 1e-9, np.finfo(float).tiny)
        return np.asarray(1 + _HIDE_BY_TURNS * turns_s / alone_s)

    def sends_beside_computing(self, local_steps: int) -> bool:
        """Say whether messages are sent while a worker computes, with a sum in so many steps.

        Averages of parameters are not, unless they go in fragments. Sums of gradients may be sent
        in the last backward pass of a round.
        """
        return local_steps == 1 or self.fragments > 1 or self.step.sums_amidst

    def shares_of(self, fragments: int) -> Floats:
        """Return the share of the bytes that each of so many fragments of the parameters has.

        Where a bucket has parameters that nobody knows, fragments of like sizes may end within it.
        """
        if self.has_parameters:
            return fragment_shares(self.step.bytes, fragments)
        return np.full(fragments, 1 / fragments)

    def crowd(self, workers: Sequence[int]) -> Floats:
        """Return how many ranks share a processor, one at the least."""
        return np.maximum(self.ranks_per_processor(workers), 1.0)


@dataclass(frozen=True, eq=False, kw_only=True)
class Predictions:
    """A table with a row for every combination of its axes, the last axis changing fastest.

    It may be told which of these rows it shows.
    """

    axes: Mapping[str, tuple[Any, ...]]
    measures: Mapping[str, NDArray[np.float64]]  # each shaped like the axes
    passes: tuple[float, ...]  # of a recorded step of each run
    own_sums: tuple[bool, ...] = ()  # of each run, if of any: they go as recorded, in no buckets
    shown: NDArray[np.int64] | None = None  # the numbers of the combinations shown; None for all

    def __len__(self) -> int:
        return self.combinations if self.shown is None else len(self.shown)

    @property
    def combinations(self) -> int:
        """The number of combinations of the axes, shown or not."""
        return int(np.prod(self._shape()))

    def combination(self, row: int) -> int:
        """Return the number of a row among all combinations."""
        return row if self.shown is None else int(self.shown[row])

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return a column."""
        if name in self.measures:
            return self._rows(self.measures[name])
        if name == "compression":
            return self._along("codec", [codec.ratio for codec in self.axes["codec"]])
        if name == "codec":
            labels = [None if codec.is_free else codec.label for codec in self.axes["codec"]]
            return self._along("codec", labels)
        if name in ("transport", "buckets", "jitter"):
            values = self._along(name, [str(value) for value in self.axes[name]])
            if name == "buckets" and any(self.own_sums):
                return np.where(self._along("run", self.own_sums), "recorded", values)
            return values
        if name not in self.axes:
            raise KeyError(f"no column {name!r}: there are {', '.join(self.names())}")
        return self._along(name, list(self.axes[name]))

    def told(self, name: str, value: Any, row: int) -> Any:
        """Return a condition of a row as people read it: the passes in one sum, recorded ones too.

        The axis says how many times the recorded passes a sum has.
        """
        return value * self._passes_of_rows()[row] if name == "accumulate" else value

    def told_column(self, name: str) -> NDArray[Any]:
        """Return a column as people read it."""
        return self[name] * self._passes_of_rows() if name == "accumulate" else self[name]

    def _passes_of_rows(self) -> NDArray[Any]:
        return self._along("run", self.passes)

    def place(self, axis: str) -> NDArray[Any]:
        """Return the place of each row along an axis."""
        return self._along(axis, range(len(self.axes[axis])))

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

    def of_several(self, steps: int) -> Predictions:
        """Return the table with the times of so many steps together."""
        times_s = {
            name: values * steps if name.endswith("_s") else values
            for name, values in self.measures.items()
        }
        return replace(self, measures=times_s)

    def _shape(self) -> tuple[int, ...]:
        return tuple(len(values) for values in self.axes.values())

    def _along(self, axis: str, values: Sequence[Any]) -> NDArray[Any]:
        position = list(self.axes).index(axis)
        column = np.array(values, object if isinstance(values[0], str | None) else None)
        shape = [1] * len(self.axes)
        shape[position] = len(values)
        return self._rows(column.reshape(shape))

    def _rows(self, values: NDArray[Any]) -> NDArray[Any]:
        flat = np.broadcast_to(values, self._shape()).reshape(-1)
        return flat if self.shown is None else flat[self.shown]


# A table, and the ends of the interval of each row.
Swept: TypeAlias = tuple[Predictions, tuple[Floats, Floats]]


def tried(grid: Grid) -> tuple[str, ...]:
    """List the choices of "auto": the algorithms that all of a grid's workers can use."""
    usual = of_one_switch("allreduce")
    if grid.cluster is None or grid.cluster.is_flat:
        return usual
    if not all(isinstance(transport, FullTransport) for transport in grid.transports):
        return usual  # other transports are only known for these
    fits = [
        open_to(
            "allreduce",
            with_workers(grid.cluster, workers),
            workers,
            in_order=not grid.is_scattered,
        )
        for workers in grid.workers
    ]
    return tuple(name for name in fits[0] if all(name in others for others in fits))


def shaped(**lengths: int) -> tuple[int, ...]:
    """Return the shape of an array that varies along these axes only."""
    return tuple(lengths.get(axis, 1) for axis in AXES)


def synchronising(grid: Grid) -> Iterator[tuple[tuple[int, ...], tuple[int, int, Jitter]]]:
    """Go through how often workers synchronise and how they scatter, with the place of each."""
    axes = (grid.accumulate, grid.local_steps, grid.jitters)
    places = itertools.product(*(range(len(axis)) for axis in axes))
    return zip(places, itertools.product(*axes), strict=True)
