"""What if the network, the transport, the compressor or the cluster were another?"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fullwire.answers.believable import check_scaling, check_steps, check_times, check_use
from fullwire.answers.conditions import (
    Asked,
    OneOrMany,
    arguments_of,
    asked_changes,
    several,
    spread,
    taken,
)
from fullwire.answers.fragments import (
    about_fragments,
    only_reachable,
    only_runnable,
    only_shown,
    refuse_fragments,
)
from fullwire.answers.opening import RunLike
from fullwire.answers.subjects import (
    Conditions,
    Transports,
    in_asked_buckets,
    named,
    subjects_of,
    with_batches,
)
from fullwire.clusters.cluster import one_switch
from fullwire.collectives.cost import Floats
from fullwire.collectives.tuning import AUTO, Range, around_a_switch, over_links, ranges
from fullwire.compression.compressor import Compressor
from fullwire.crew import HERE, Crew, crew
from fullwire.display import Result, html_table
from fullwire.errors import UsageError
from fullwire.findings.finding import Finding
from fullwire.findings.kinds_of_steps import names_of
from fullwire.findings.predictions import further_finding, predicted_answer, prediction_notes
from fullwire.findings.suspicion import Suspicion, suspicion_finding
from fullwire.run.placement import shares_one_host
from fullwire.run.run import Run
from fullwire.simulation.conditions import (
    AllConditions,
    Changes,
    StepConditions,
    changed,
    changed_in_pairs,
    unfolded,
    with_names,
)
from fullwire.simulation.grid import (
    AXES_GIVEN,
    Grid,
    Order,
    Predictions,
    Subject,
    Swept,
    shaped,
    tried,
)
from fullwire.simulation.interval import Further, further_recording, interval_s
from fullwire.simulation.of_kinds import apart, in_the_mean
from fullwire.simulation.on_links import OnLinks
from fullwire.simulation.sweep import Progress, sweep
from fullwire.simulation.sweep import replay as replay_subject
from fullwire.simulation.transport import FullTransport
from fullwire.units import ratio, seconds, show_count, show_time
from fullwire.words import sentences

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fullwire.answers.search import Best
    from fullwire.answers.time_to_target import ToTarget
    from fullwire.findings.goodput import GoodputWith
    from fullwire.simulation.target import Targets

# Targets, searches and suspicions are loaded where they are asked for: most questions start faster.

MOST_TUNED = 16  # Clusters for which a result gives the tuner's choices.


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Tuned:
    """The algorithm that "auto" takes for each size, on one cluster with a full transport."""

    workers: int
    bandwidth_bps: float
    latency_s: float
    ranges: tuple[Range, ...]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class PredictedKind:
    """The predicted step of one kind of steps, with its interval: NaN without evidence."""

    name: str  # What such a step does.
    passes: float | None
    share: float  # Of the steps.
    step_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class WhatIf(Result):
    """Predictions as a table, the needs of the target if there is one, and notes."""

    predictions: Predictions
    interval_s: tuple[Floats, Floats]  # Of step_s, by row; NaN without evidence.
    targets: Targets | None
    basis: Mapping[str, str]  # By run: measured or modelled.
    lane: Order
    notes: tuple[Finding, ...]  # The notes on the predictions.
    tuning: tuple[Tuned, ...]
    subjects: tuple[Subject, ...]
    whole: tuple[Subject, ...]  # Before changes.
    grid: Grid
    changes: Changes = field(default_factory=dict)
    suspicions: tuple[Suspicion, ...] = ()  # On a described cluster.
    to_target: ToTarget | None = None  # If a metric is to reach a value.
    further: Further | None = None  # The recording that would narrow the widest interval.
    goodputs: tuple[GoodputWith, ...] = ()  # Of an elastic job, for each time between failures.
    of_kinds: Swept | None = None  # Of each kind of steps by itself, where a job has several.

    def __len__(self) -> int:
        return len(self.predictions)

    def __getitem__(self, column: str) -> NDArray[Any]:
        """Return a column of the table."""
        return self.predictions[column]

    @property
    def has_intervals(self) -> bool:
        """Say whether any row has an interval."""
        return not np.isnan(self.interval_s[0]).all()

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return the notes on the predictions, a sentence each."""
        return sentences(self.all_notes)

    @property
    def all_notes(self) -> tuple[Finding, ...]:
        """Return the notes on a metric's target, which say most, and then the predictions'."""
        return self.notes if self.to_target is None else (*self.to_target.notes, *self.notes)

    @property
    def answer(self) -> Finding:
        """Return the answer in short: the only prediction, or the ends of all."""
        [first, *others] = (subject.step.measured_ns for subject in self.subjects)
        is_known = first is not None and not any(others) and "modelled" not in self.basis.values()
        recorded_s = first * 1e-9 if first is not None and is_known else None
        return predicted_answer(self.predictions, self.interval_s, recorded_s)

    @property
    def to_record(self) -> Finding | None:
        """Return the recording that would narrow the widest interval, if one is known to."""
        return None if self.further is None else further_finding(self.predictions, self.further)

    @property
    def reaching(self) -> tuple[Finding, ...]:
        """Return the needs of the target, if one was asked for: a finding for each case."""
        if self.to_target is not None:
            from fullwire.answers.time_to_target import answer

            return answer(self.to_target, self.predictions)
        if self.targets is None:
            return ()
        from fullwire.findings.scaling import target_findings

        passes = {each.name: each.passes for each in with_names(self.subjects, self.changes)}
        return tuple(target_findings(self.targets, self._varying(), passes))

    @property
    def tuner(self) -> tuple[Finding, ...]:
        """Return the choices of "auto", on each cluster."""
        if not self.tuning:
            return ()
        from fullwire.findings.collective import TunerTakes, by_size

        return tuple(
            TunerTakes(
                workers=tuned.workers,
                rate_bps=tuned.bandwidth_bps,
                latency_s=tuned.latency_s,
                choices=by_size(tuned.ranges),
            )
            for tuned in self.tuning
        )

    @property
    def holding_back(self) -> tuple[Finding, ...]:
        """Return the links of a described cluster that hold each job back."""
        return tuple(suspicion_finding(suspicion) for suspicion in self.suspicions)

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return all columns by name, as a data frame takes them."""
        columns = self.predictions.columns() | self._interval_columns()
        if self.to_target is None:
            return columns
        return columns | self.to_target.columns() | self.to_target.interval_columns()

    def _interval_columns(self) -> dict[str, NDArray[Any]]:
        if not self.has_intervals:
            return {}
        return dict(zip(("step_low_s", "step_high_s"), self.interval_s, strict=True))

    def _in_short(self) -> Iterator[str]:
        yield f"{show_count(len(self), 'prediction')} of {', '.join(self.predictions.axes['run'])}"
        step_s, factor = self["step_s"], self["scaling_factor"]
        least, most = show_time(float(step_s.min())), show_time(float(step_s.max()))
        low, high = f"{factor.min():.3f}", f"{factor.max():.3f}"
        yield (
            f"step {least if least == most else f'{least} to {most}'}; "
            f"scaling factor {low if low == high else f'{low} to {high}'}"
        )

    def _tables(self) -> Mapping[str, Mapping[str, Any]]:
        return {"predictions": self.columns()}

    def _picture(self) -> str:
        varying = self._varying()
        if "codec" in varying:
            varying.add("compression")
            if all(codec.is_free for codec in self.predictions.axes["codec"]):
                varying.remove("codec")  # It is then a ratio and has no name.
        shown = varying | {"step_s", "scaling_factor"}
        columns = {name: self[name] for name in self.predictions.names() if name in shown}
        return html_table(columns | self._interval_columns())

    def _varying(self) -> set[str]:
        """Return the conditions with more than one value."""
        return {axis for axis, values in self.predictions.axes.items() if len(values) > 1}

    def _ipython_key_completions_(self) -> list[str]:
        """Complete `table["` with the names of columns."""
        return list(self.predictions.names())

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows as dictionaries of plain values."""
        own = self.predictions.columns()
        if self.to_target is not None:
            own |= self.to_target.columns()
        columns = {name: column.tolist() for name, column in own.items()}
        for values in zip(*columns.values(), strict=True):
            yield dict(zip(columns, values, strict=True))

    def kinds(self, row: int) -> tuple[PredictedKind, ...]:
        """Return what a row predicts for each kind of steps; none where all steps are alike."""
        rows = self.predictions.combinations // len(self.subjects)  # of each subject
        number, within = divmod(self.predictions.combination(row), rows)
        kinds = self.subjects[number].kinds
        if self.of_kinds is None or not kinds or self.to_target is not None:
            return ()  # With a metric's target, rows have speeds of their own.
        predictions, (low_s, high_s) = self.of_kinds
        step_s = predictions["step_s"]
        first = len(apart(self.subjects[:number]))
        places = [(first + place) * rows + within for place in range(len(kinds))]
        return tuple(
            PredictedKind(
                name=name,
                passes=kind.passes,
                share=kind.share,
                step_s=float(step_s[place]),
                low_s=float(low_s[place]),
                high_s=float(high_s[place]),
            )
            for place, name, (kind, _) in zip(
                places, names_of([kind for kind, _ in kinds]), kinds, strict=True
            )
        )

    def best(self, count: int) -> tuple[Best, ...]:
        """Return the best rows of each run, with the worth of each of their conditions."""
        from fullwire.answers.search import best

        return best(self.predictions, count)

    def finer(self, axis: str, points: int) -> Predictions | None:
        """Predict along an axis between its extremes; None if the axis lacks values between."""
        if axis == "bandwidth_bps":
            values = spread(self.grid.bandwidth_bps, points)
            return self._swept(replace(self.grid, bandwidth_bps=values))
        if axis == "compression" and all(
            compressor.is_free for compressor in self.grid.compressors
        ):
            ratios = spread([compressor.ratio for compressor in self.grid.compressors], points)
            free = tuple(Compressor(ratio=value) for value in ratios)
            return self._swept(replace(self.grid, compressors=free))
        return None

    def _swept(self, grid: Grid) -> Predictions:
        return only_runnable(unfolded(sweep(self.subjects, grid), self.changes))


@arguments_of(Conditions, Asked)
def whatif(
    runs: RunLike | Sequence[RunLike],
    *,
    calibrate: RunLike | Sequence[RunLike] = (),
    batch: OneOrMany = None,
    line_rate: str | float | None = None,
    failures: OneOrMany = None,
    progress: Progress | None = None,
    on: str = HERE,
    **more: Unpack[AllConditions],
) -> WhatIf:
    """Predict a step under every combination of the conditions given.

    A condition takes one value, or several as a list or as text with commas. A condition that you
    leave out is as recorded, or else usual: gradients go in PyTorch's buckets around a ring.

    - `runs`: runs, paths of runs or traces, or workloads such as `vgg16@v100`.
    - `workers`: the number of workers.
    - `bandwidth` (bits per second), `latency` (seconds): those of the links.
    - `compression`, `codec`: an ideal ratio, `"none"`, or the name of a compressor.
    - `codec_costs`: a file that `fullwire codecs --json` printed: the costs of named compressors.
    - `transport`: `"full"`, or `"measured"`, the one that the collectives of the runs show.
    - `calibrate`: more runs of the same cluster that show its transport.
    - `line_rate` (bits per second): that of the recorded links, if a run does not know it.
    - `buckets`, `algorithm`, `lane`: the groups of gradients, the algorithm of collectives, and the
      order of messages.
    - `cluster`, `nodes`, `placement`: a described cluster, by file or name. Workers are then its
      devices. `bandwidth` and `latency` are those of its NICs, and its uplinks follow. Ranks are
      `"packed"` node by node, or `"scattered"` over its leaves.
    - `accumulate`: how many times the recorded passes are added up before gradients are sent.
    - `local_steps`: the number of steps after which parameters are averaged, as recorded if you
      leave it out. Times of both are those of one pass.
    - `jitter`: the scatter of ranks. All of them wait for the slowest.
    - `batch`: the batch of a worker, for built-in workloads.
    - `target`: a scaling factor to be reached, or a metric with its value, `"loss<=0.3"`. With a
      metric, rows have the steps and the time to it. These conditions go with it:
    - `global_batch`: the samples of a step of the whole job. Without it, a worker keeps its own.
    - `curve`: more runs that show the metric, at other batches.
    - `recorded_batch`: the global batch of each run, the first one included, if runs lack it.
    - `critical_batch`: the batch at which a training needs twice the samples, if you know it.
    - `price`: of a device, such as `"2.10 EUR/device-hour"`.
    - `failures`: the time between two losses of a worker, such as `"5min"`, for a run of an elastic
      job that lost some. The answer has its goodput.
    - `progress`: is called with the number of predictions that are done, and of all.
    - `on`: `"ray"`, or a Ray cluster's address, computes the grid there.
    - `more`: conditions that change the recorded step, as `fullwire whatif --help` lists them.

    Times of the answer are seconds, rates bits per second.

        table = fw.whatif("job.run", bandwidth="10Gbps,100Gbps", workers=[8, 64])
        table.to_pandas()
    """
    others: dict[str, OneOrMany] = {**more}
    goal, conditions = taken(Asked, others), taken(Conditions, others)
    changes = asked_changes("whatif", others, Conditions, Asked)
    many = named(with_batches(runs, batch), line_rate)
    goodputs = () if failures is None else _goodputs(many, failures)
    names, only = zip(*many, strict=True)
    transports = Transports(only, calibrate, names, line_rate)
    predict = partial(_table, many, transports=transports, on=on)
    if not goal.is_metric:
        found = predict(conditions, changes, target=goal.target, progress=progress)
        return replace(found, goodputs=goodputs)

    def with_workers(**workers: OneOrMany) -> WhatIf:
        return predict(replace(conditions, **workers), changes)

    from fullwire.answers.time_to_target import to_goal

    first, predictions, around_s, to_target = to_goal(
        with_workers, partial(_at_speeds, transports, on), many, goal, conditions, others
    )
    return replace(
        first,
        predictions=predictions,
        interval_s=around_s,
        to_target=to_target,
        further=None,
        goodputs=goodputs,
    )


def _goodputs(many: Sequence[tuple[str, Run]], failures: OneOrMany) -> tuple[GoodputWith, ...]:
    """Predict the goodput of one elastic job for each time between failures."""
    from fullwire.findings.goodput import GoodputWith
    from fullwire.simulation.goodput import with_failures

    if len(many) != 1:
        raise UsageError(f"failures: expected one run with them, got {len(many)}")
    [(name, run)] = many
    given = []
    for between_s in several(failures, lambda value: seconds(value, "failures")):
        found = with_failures(run.events, between_s)
        if found is None:
            raise UsageError(
                f"failures: expected a run of an elastic job that lost a worker, got {name}. "
                "Record one: fullwire record -o job.run -- fullwire run --workers 3 ..."
            )
        if found.lost_s >= between_s:
            raise UsageError(
                f"failures: expected more time between two of them than one costs, "
                f"{show_time(found.lost_s)}, got {show_time(between_s)}"
            )
        given.append(GoodputWith(**asdict(found)))
    return tuple(given)


def _table(
    many: Sequence[tuple[str, Run]],
    conditions: Conditions,
    changes: Changes,
    *,
    transports: Transports,
    on: str,
    target: str | float | None = None,
    progress: Progress | None = None,
) -> WhatIf:
    """Read the conditions, and predict; a target is a scaling factor here."""
    only = [run for _, run in many]
    grid = conditions.grid(only, transports)
    if "ranks_per_host" in changes and not any(map(transports.of, only)):
        why = [
            f"{name} {'has its ranks on one host' if shares_one_host(run) else 'shows none'}"
            for name, run in many
        ]
        raise UsageError(
            "ranks per host: expected a run that shows how its ranks share processors and links, "
            f"and {', '.join(why)}. Give a run on several hosts with --calibrate, or leave the "
            "ranks out: each then has a host of its own"
        )
    wanted = None if target is None else ratio(target, "target")
    with crew(on) as those:
        return _predicted(many, transports, grid, changes, wanted, progress, those)


def _predicted(
    many: Sequence[tuple[str, Run]],
    transports: Transports,
    grid: Grid,
    changes: Changes,
    wanted: float | None,
    progress: Progress | None,
    those: Crew,
) -> WhatIf:
    """Predict each run under every change and every point of the grid."""
    recorded = subjects_of(many, transports, grid)
    whole = in_asked_buckets(recorded, grid)
    fragments = changes.get("fragments", (1,))
    refuse_fragments(fragments, grid.local_steps, whole)
    subjects = changed(whole, changes)
    of_kinds = _swept(apart(subjects), grid, transports, progress, those)
    predictions, around_s = in_the_mean(subjects, of_kinds)
    reaching = None
    if wanted is not None:
        from fullwire.simulation.target import targets

        named_subjects = with_names(subjects, changes)
        reaching = targets(named_subjects, grid, wanted, those)
        if "fragments" in changes:
            reaching = only_reachable(reaching, {one.name: one.fragments for one in named_subjects})
    suspected: tuple[Suspicion, ...] = ()
    if grid.cluster is not None:
        from fullwire.answers.suspects import suspicions

        suspected = suspicions(subjects[:: len(subjects) // len(whole)], grid)
    own_sums = [each.sums_its_own_way and not grid.are_buckets_asked for each in whole]
    runnable = only_runnable(replace(unfolded(predictions, changes), own_sums=tuple(own_sums)))
    notes = prediction_notes(many, recorded, grid, per_host=changes.get("ranks_per_host", ()))
    return WhatIf(
        predictions=runnable,
        interval_s=only_shown(runnable, around_s),
        targets=reaching,
        basis={name: run.provenance.basis for name, run in many},
        lane=grid.lane,
        notes=(*about_fragments(fragments, grid.local_steps, whole), *notes),
        tuning=tuple(itertools.islice(_tuning(subjects[0], grid), MOST_TUNED)),
        subjects=tuple(subjects),
        whole=tuple(whole),
        grid=grid,
        changes=changes,
        further=further_recording(subjects, grid, predictions, around_s, transports.calibration),
        suspicions=suspected,
        of_kinds=of_kinds,
    )


def _swept(
    subjects: Sequence[Subject],
    grid: Grid,
    transports: Transports,
    progress: Progress | None,
    those: Crew,
) -> Swept:
    """Predict each subject at every point of the grid, and check the numbers."""
    predictions = sweep(subjects, grid, progress, those)
    around_s = interval_s(subjects, grid, predictions, transports.calibration, those)
    measures = predictions.measures
    names = np.array(predictions.axes["run"], object).reshape(shaped(run=len(subjects)))
    check_steps(names, step=measures["step_s"], step_of_one_worker=measures["baseline_step_s"])
    check_times(
        names, backward_pass=measures["backward_s"], communication=measures["communication_s"]
    )
    low_s, high_s = (np.reshape(end_s, measures["step_s"].shape) for end_s in around_s)
    check_times(names, low_end=low_s, high_end=high_s)
    check_scaling(names, grid.workers_of_points(), measures["scaling_factor"])
    check_use(names, measures["network_utilization"])
    return predictions, around_s


def _at_speeds(
    transports: Transports, on: str, first: WhatIf, pairs: Sequence[tuple[int, float]]
) -> Swept:
    """Predict the same job again, for pairs of workers and a speed along the axis of the speed."""
    subjects, changes, own = changed_in_pairs(first.whole, first.changes, pairs)
    grid = replace(first.grid, workers=(max(own),), own_workers=own)
    with crew(on) as those:
        of_kinds = _swept(apart(subjects), grid, transports, None, those)
    predictions, around_s = in_the_mean(subjects, of_kinds)
    return unfolded(predictions, changes), around_s


@arguments_of(Conditions)
def replay(
    run: RunLike,
    *,
    calibrate: RunLike | Sequence[RunLike] = (),
    batch: OneOrMany = None,
    line_rate: str | float | None = None,
    **more: Unpack[StepConditions],
) -> Run:
    """Play a run's typical step under one set of conditions, and return it as a run.

    - `run`: a run, the path of one or of a trace, or a workload.
    - `bandwidth`, `latency`, `workers`, `cluster`, `nodes`, `placement`, `compression`, `codec`,
      `codec_costs`, `transport`, `buckets`, `algorithm`, `jitter`, `lane`, `batch`, `calibrate`,
      `line_rate` and `more`: as for `whatif`, each with one value.
    - `accumulate`, `local_steps`: one, since a replay sends all messages of its one pass.

        fw.explain(fw.replay("vgg16@v100", workers=8, bandwidth="10Gbps"))
    """
    given: dict[str, OneOrMany] = {**more}
    conditions = taken(Conditions, given)
    if conditions.local_steps is None:  # whatever was recorded: a replay has a sum
        conditions = replace(conditions, local_steps=1)
    changes = asked_changes("replay", given, Conditions)
    [(name, only), *others] = named(with_batches(run, batch), line_rate)
    transports = Transports([only], calibrate, (name,), line_rate)
    grid = conditions.grid([only], transports)
    axes = [getattr(grid, name) for name in AXES_GIVEN]
    if others or any(len(axis) != 1 for axis in (*axes, *changes.values())):
        raise UsageError("a replay needs one value of each condition: name workers and bandwidth")
    if (grid.accumulate, grid.local_steps) != ((1,), (1,)):
        raise UsageError(
            "a replay plays one pass with all of its messages: expected accumulate 1 and local "
            "steps 1"
        )
    as_asked = in_asked_buckets(subjects_of([(name, only)], transports, grid), grid)
    [subject] = changed(as_asked, changes)
    return replay_subject(only, subject, grid)


def _tuning(subject: Subject, grid: Grid) -> Iterator[Tuned]:
    """Yield the choices of "auto" where the line decides; other transports weigh messages."""
    transports = [
        transport for transport in grid.transports if isinstance(transport, FullTransport)
    ]
    if AUTO not in grid.algorithms or not transports or subject.sends_no_buckets:
        return
    share = transports[0].share
    for latency_s, workers, rate_bps in itertools.product(
        grid.latency_s, grid.workers, grid.bandwidth_bps
    ):
        if grid.cluster is None or grid.cluster.is_flat:
            flat = one_switch(workers=workers, rate_bps=share * rate_bps, latency_s=latency_s)
            times = around_a_switch("allreduce", flat, subject.adds)
        else:
            nics = replace(grid.cluster.nics, rate_bps=share * rate_bps)
            cluster = replace(grid.cluster, nics=nics)
            where = OnLinks.of(cluster, latency_s, is_scattered=grid.is_scattered)
            assert where is not None
            costs = {
                algorithm: (where.cost("allreduce", algorithm, workers),)
                for algorithm in tried(grid)
            }
            times = over_links(costs, subject.adds)
        yield Tuned(
            workers=workers,
            bandwidth_bps=rate_bps,
            latency_s=latency_s,
            ranges=tuple(ranges(times)),
        )
