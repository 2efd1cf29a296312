"""How far a predicted step may be off: by the uncertainty of the calibration, and of the steps.

The prediction is made again with every transport that fits the observations nearly as well. A
replay with each of them must also match the measured step under its own conditions. The predicted
run will be a run of its own: its line and processors differ a little from the recorded run's. The
speed of packing gradients is known from elsewhere. These deviations are independent of each other,
so their squares add up, and the interval is 1.8 standard deviations wide on each side.

The recorded steps' median is unsure, too: steps of two kinds may have it at either. Ranks that slow
each other a lot may be on processors that were disturbed, and do so less in another run. The
squares of these bounds add up with the others. That was judged where ranks compute on processors.
On devices, and where nothing was fitted, the bounds of the median are added to the rest.

A step is never shorter than a worker's own. After each wait a processor computes slowly at first,
and a recording of steps that all synchronise cannot tell by how much. So steps in a row that do not
may be shorter. An interval needs repeated steps or a measured transport. A number from one
unrepeated profile, on any other transport, has none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fullwire.clusters.cluster import Nics, with_fastest_inside
from fullwire.collectives.cost import Floats
from fullwire.collectives.left_open import nics_at, nics_left_open, rests_on_least_rate
from fullwire.crew import ALONE, Crew
from fullwire.simulation.as_recorded import residues
from fullwire.simulation.buckets import EachGradient
from fullwire.simulation.calibrate import LINE_FROM_RUN_TO_RUN, Calibration
from fullwire.simulation.grid import AXES, AXES_GIVEN, Grid, Predictions, Subject, shaped
from fullwire.simulation.of_kinds import apart, mean_ends
from fullwire.simulation.step import Step
from fullwire.simulation.sweep import PIECE_POINTS, sweep
from fullwire.simulation.transport import FullTransport, MeasuredTransport

_OF_GRID = dict(zip(AXES_GIVEN, AXES_GIVEN, strict=True)) | {
    "compressors": "codec",
    "transports": "transport",
    "algorithms": "algorithm",
    "jitters": "jitter",
}  # the axis of a table that each field of a grid becomes
_WIDE = 0.2  # of the step: a narrower interval is good enough
_WORTH_IT = 0.7  # times as wide: a recording that narrows an interval less is not advised
_NEAR_BEST = 1.1
_LADDER_BPS = (1e9, 2.5e9, 5e9, 10e9, 25e9, 100e9, 400e9)
_MOST_TRIED = 3

_WIDTH = 1.8  # standard deviations, which hold nine truths of ten
# Of the same computation on the same machine: on processors, and on devices.
_FROM_RUN_TO_RUN, _OF_DEVICES_FROM_RUN_TO_RUN = 0.025, 0.01
# The next two hold on processors, where errors were measured. Priors make the spread of a fit, and
# of the line, larger than errors are. Bits that are sent elsewhere delay computing in other ways.
_OF_A_FIT = 0.6
_CONTENTION_OFF = 2.0  # times what T1 leaves open
_USUAL_BY_RANKS = 0.1  # of T1: nine of ten recordings show about as much, or less
ENOUGH_STEPS = 3  # fewer show no scatter
_EXCHANGE_LONGER = 1.08  # times: a standard deviation of the cases behind an exchange's factor
_COLD_S, _COLD_SHARE = 2e-3, 0.5  # of a step alone; 1.4 to 2.4 ms in small jobs of one machine
_CODEC_SLOWER = 1.5  # times: a standard deviation of speeds that were not measured in this job


def interval_s(
    subjects: Sequence[Subject],
    grid: Grid,
    predictions: Predictions,
    calibration: Calibration | None,
    crew: Crew = ALONE,
) -> tuple[Floats, Floats]:
    """Return the least and the largest step time of every row; of kinds of steps, their means."""
    if any(subject.kinds for subject in subjects):
        of_kinds = apart(subjects)
        found = sweep(of_kinds, grid, crew=crew)
        return mean_ends(subjects, interval_s(of_kinds, grid, found, calibration, crew))
    low_s, high_s = _of_one_kind(subjects, grid, predictions, calibration, crew)
    if grid.cluster is not None and (resting := rests_on_least(subjects, grid)):
        # The links within nodes may be as fast as any known.
        faster = replace(grid, cluster=with_fastest_inside(grid.cluster))
        found = sweep(subjects, faster, crew=crew)
        sooner_s = _of_one_kind(subjects, faster, found, calibration, crew)[0]
        rests = np.isin(predictions["workers"], resting)
        low_s = np.where(rests, np.minimum(low_s, sooner_s), low_s)
    for among, end in ends_of_nics(grid):
        found = sweep(subjects, end, crew=crew)
        ends_s = _of_one_kind(subjects, end, found, calibration, crew)
        rests = np.isin(predictions["workers"], among)
        low_s = np.where(rests, np.minimum(low_s, ends_s[0]), low_s)
        high_s = np.where(rests, np.maximum(high_s, ends_s[1]), high_s)
    # Without a recording of fragments nothing shows how much of them steps hide: maybe none.
    if any(each.fragments > 1 and each.step.measured_ns is None for each in subjects):
        whole = [replace(each, fragments=1) for each in subjects]
        found = sweep(whole, grid, crew=crew)
        high_s = np.maximum(high_s, _of_one_kind(whole, grid, found, calibration, crew)[1])
    # Nothing tells when the gradients of a traced bucket were ready: at the latest all at its end.
    are_other = not all(isinstance(policy, EachGradient) for policy in grid.buckets)
    if are_other and not all(each.has_parameters for each in subjects):
        at_once = [replace(each, has_parameters=True) for each in subjects]
        found = sweep(at_once, grid, crew=crew)
        ends_s = _of_one_kind(at_once, grid, found, calibration, crew)
        low_s, high_s = np.minimum(low_s, ends_s[0]), np.maximum(high_s, ends_s[1])
    may_hide = any(map(_may_hide_shards, subjects))
    if may_hide or any(each.step.others.untold_slowing for each in subjects):
        # The hidden step is as unsure as the predicted one, and no shorter than a worker's own.
        sooner_s = _without_untold_contention_s(subjects, grid, predictions, crew)
        if may_hide:
            hidden_s = with_shards_hidden_s(subjects, grid, predictions, crew)
            sooner_s = np.maximum(sooner_s, predictions["step_s"] - hidden_s)
        below = np.array([each.step.alone_off[0] for each in subjects])
        least_s = predictions["baseline_step_s"] * (1 - below[predictions.place("run")])
        low_s = np.minimum(low_s, np.maximum(low_s - np.maximum(sooner_s, 0.0), least_s))
    return low_s, high_s


def with_shards_hidden_s(
    subjects: Sequence[Subject], grid: Grid, predictions: Predictions, crew: Crew
) -> Floats:
    """Return the steps whose gathers and scatters of shards hide as long as they can.

    On devices a gather goes ahead of the layer that needs it. A recording tells how long
    collectives were hidden, and not how long they could be: at most as long as a worker computes.
    Shorter ones hide as long as they did. Longer ones leave the step no shorter than it was.
    """

    def hidden_s(*, is_longest: bool) -> Floats:
        changed = []
        for each in subjects:
            others = each.step.others
            room_ns = max(others.total_ns - others.exposed_ns, 0)
            if is_longest:
                room_ns = max(room_ns, each.step.alone_ns)
            if _may_hide_shards(each):
                others = replace(others, total_ns=room_ns, exposed_ns=0)
            changed.append(replace(each, step=replace(each.step, others=others)))
        return sweep(changed, grid, crew=crew).measures["step_s"]

    measured_s = np.array([(each.step.measured_ns or 0) * 1e-9 for each in subjects])
    measured_s = measured_s.reshape(shaped(run=len(subjects)))
    is_shorter = predictions.measures["step_s"] < measured_s
    longest_s = np.maximum(hidden_s(is_longest=True), measured_s)
    return np.asarray(np.where(is_shorter, hidden_s(is_longest=False), longest_s)).reshape(-1)


def _without_untold_contention_s(
    subjects: Sequence[Subject], grid: Grid, predictions: Predictions, crew: Crew
) -> Floats:
    """Return how much sooner sharded steps end if kernels that never ran alone were slowed, too.

    Fewer of them are beside communication on a faster link.
    """
    more, as_recorded_s = [], []
    for each in subjects:
        crowding, untold = each.crowding, each.step.others.untold_slowing
        more.append(replace(each, crowding=replace(crowding, s_each=crowding.s_each + untold)))
        as_recorded_s.append(untold * crowding.recorded_beside)
    step_s = predictions.measures["step_s"]
    longer_s = sweep(more, grid, crew=crew).measures["step_s"] - step_s
    sooner_s = np.array(as_recorded_s).reshape(shaped(run=len(subjects))) - longer_s
    return np.asarray(np.maximum(sooner_s, 0.0)).reshape(-1)


def _may_hide_shards(subject: Subject) -> bool:
    """Say whether shards hide behind a device's computing, and no trace tells how long they can."""
    others = subject.step.others
    return subject.is_on_devices and others.sum_gradients and others.course is None


def rests_on_least(subjects: Sequence[Subject], grid: Grid) -> tuple[int, ...]:
    """Return the numbers of workers whose times rest on a rate that is only known to be reached."""
    if grid.cluster is None or with_fastest_inside(grid.cluster) is grid.cluster:
        return ()
    steps = [subject.step for subject in subjects]
    ops = set[str]().union(*(step.others.sent for step in steps))
    if not all(step.sends_no_buckets for step in steps):
        ops.add("allreduce")
    return tuple(
        workers
        for workers in grid.workers
        if any(rests_on_least_rate(op, grid.cluster, workers) for op in ops)
    )


def ends_of_nics(grid: Grid) -> Iterator[tuple[tuple[int, ...], Grid]]:
    """Yield numbers of workers for which tables leave the NICs open, with them at either end."""
    where = grid.cluster
    if where is None:
        return
    if grid.bandwidth_bps != (where.nics.rate_bps,):  # that was asked for
        where = replace(where, nics=nics_at(where, where.nics.rate_bps))
    among: dict[Nics, list[int]] = {}
    for workers in grid.workers:
        for end in nics_left_open(where, workers)[1]:
            among.setdefault(end.nics, []).append(workers)
    for nics, found in among.items():
        times = nics.rate_bps / where.nics.rate_bps
        rates_bps = tuple(times * bps for bps in grid.bandwidth_bps)
        cluster = replace(where, nics=nics)
        yield tuple(found), replace(grid, cluster=cluster, bandwidth_bps=rates_bps)


def _of_one_kind(
    subjects: Sequence[Subject],
    grid: Grid,
    predictions: Predictions,
    calibration: Calibration | None,
    crew: Crew,
) -> tuple[Floats, Floats]:
    repeated = np.array([subject.step.count >= ENOUGH_STEPS for subject in subjects])
    measured = np.array([isinstance(way, MeasuredTransport) for way in grid.transports])
    has_evidence = repeated[:, None] | measured[None, :]
    is_known = has_evidence.reshape(shaped(run=len(subjects), transport=len(grid.transports)))
    if not is_known.any() or (calibration is not None and calibration.is_played):
        nothing = np.broadcast_to(np.nan, len(predictions))
        return nothing, nothing
    step_s = predictions.measures["step_s"]
    of_runs, on_devices = _from_run_to_run(subjects), any(each.is_on_devices for each in subjects)
    variance = np.square(of_runs * step_s) + _of_the_codec(subjects, grid, step_s, crew)
    variance = variance + _of_contention(subjects, grid, step_s, crew)
    variance = variance + _of_lateness(subjects, grid, step_s, crew)
    own_s = [subject.step.alone_ns * 1e-9 for subject in subjects]  # of a worker, at the least
    # How far below and above the measured step its median may be, as shares of it.
    off = np.array([subject.step.measured_off for subject in subjects]).T
    below, above = (shares.reshape(shaped(run=len(subjects))) for shares in off)
    sooner_s, later_s = step_s * below, step_s * above
    if calibration is not None:
        busier = [
            replace(subject, step=_in_another_run(subject.step, calibration))
            for subject in subjects
        ]
        for place, (subject, other) in enumerate(zip(subjects, busier, strict=True)):
            work_s, longer_s = subject.step.processor_ns * 1e-9, other.step.alone_ns * 1e-9
            less_s = own_s[place] - _WIDTH * (longer_s - own_s[place])
            own_s[place] = max(less_s, min(own_s[place], work_s))
        # Another run may have slower work, and a slower line.
        slower_line, slower_work = _transports_in_another_run(calibration)
        slower_s = next(_on_each((slower_work,), busier, grid, crew))
        variance = variance + np.square(slower_s - step_s)
    if calibration is not None and not all(
        isinstance(way, FullTransport) for way in grid.transports
    ):
        # For each direction of the transport take the worse sign.
        others = (*calibration.variants, *calibration.between, slower_line)
        fitted = [_with_residues(subject, calibration) for subject in subjects]
        of_a_fit = 1.0 if on_devices else _OF_A_FIT
        others_s = _on_each(others, fitted, grid, crew)
        for _ in calibration.variants[::2]:
            away_s = [np.abs(next(others_s) - step_s) for _ in range(2)]
            variance = variance + np.square(of_a_fit * np.maximum(*away_s))
        # With the measured step at its bounds, the predicted one is this much shorter or longer.
        at_bounds_s = next(others_s), next(others_s)
        # No replay has to match a changed step, or another transport. These scatter as recorded.
        is_changed = np.array([each.step.measured_ns is None for each in subjects])
        is_free = (is_changed[:, None] | ~measured[None, :]).reshape(is_known.shape)
        sooner_s = np.maximum(step_s - np.minimum(*at_bounds_s), sooner_s * is_free)
        later_s = np.maximum(np.maximum(*at_bounds_s) - step_s, later_s * is_free)
        variance = variance + np.square(of_a_fit * (next(others_s) - step_s))
    half_s = np.where(is_known, _WIDTH * np.sqrt(variance), np.nan)
    joined = np.add if calibration is None or on_devices else np.hypot
    sooner_s, later_s = joined(half_s, sooner_s), joined(half_s, later_s)
    by_run = shaped(run=len(subjects))
    quieter_s = np.array([_by_quieter_processors_s(subject) for subject in subjects])
    sooner_s = np.hypot(sooner_s, quieter_s.reshape(by_run))
    warm_s = _by_warm_processors(subjects, grid)
    alone_s = np.array(own_s).reshape(by_run) * (1 - _WIDTH * of_runs) - warm_s
    t1_s, below, above = (
        np.array(column).reshape(by_run)
        for column in zip(
            *((each.step.alone_ns * 1e-9, *each.step.alone_off) for each in subjects), strict=True
        )
    )
    alone_s = np.minimum(alone_s, t1_s * (1 - below))
    # An interval of a step that scatters a lot may be wider than the step. Times end at 0.
    low_s = np.maximum(np.maximum(step_s - sooner_s - warm_s, alone_s), 0.0)
    high_s = step_s + later_s
    is_t1 = (grid.workers_of_points() == 1) & (above > 0)
    low_s, high_s = (
        np.where(is_t1 & is_known, t1_s * share, end_s)
        for share, end_s in ((1 - below, low_s), (1 + above, high_s))
    )
    return low_s.reshape(-1), high_s.reshape(-1)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Further:
    """The widest interval of a table, and the recording that would narrow it."""

    row: int
    rate_bps: float | None  # of the links to record; None: the same ones, beside no other work
    share: float  # of the width, which would remain
    lab_workers: int | None  # of a job whose hosts were in one machine


def further_recording(
    subjects: Sequence[Subject],
    grid: Grid,
    predictions: Predictions,
    around_s: tuple[Floats, Floats],
    calibration: Calibration | None,
) -> Further | None:
    """Return the recording that would narrow the widest interval; None if nothing is known to.

    The interval is computed again as if the calibration had that recording, too.
    """
    if calibration is None:
        return None
    width_s = around_s[1] - around_s[0]
    relative = np.where(predictions["transport"] == "measured", width_s / predictions["step_s"], 0)
    row = int(np.argmax(np.nan_to_num(relative)))
    if not relative[row] > _WIDE:
        return None
    shape = [len(values) for values in predictions.axes.values()]
    places = map(int, np.unravel_index(row, shape))
    place = dict(zip(predictions.axes, places, strict=True))
    one: dict[str, Any] = {
        name: (getattr(grid, name)[place[axis]],) for name, axis in _OF_GRID.items()
    }
    point = replace(grid, **one)
    whole = subjects[place["run"]]
    residue = whole.residues[place["transport"] % len(whole.residues)]
    subject = [replace(whole, residues=(residue,))]
    alone = sweep(subject, point)

    def share_with(other: Calibration) -> float:
        low_s, high_s = interval_s(subject, point, alone, other)
        return float((high_s - low_s)[0] / width_s[row])

    asked_bps, recorded = point.bandwidth_bps[0], {o.rate_bps for o in calibration.observations}
    between = [rate for rate in _LADDER_BPS if min(recorded) < rate < asked_bps]
    rates = sorted({*between, asked_bps} - recorded)[-_MOST_TRIED:]
    shares = [(share_with(calibration.after_another(rate)), rate) for rate in rates]
    quiet = share_with(calibration.beside_nothing())
    best = min([quiet, *(share for share, _ in shares)])
    if best > _WORTH_IT:
        return None
    placement = whole.placement
    lab_workers = placement.ranks if placement.shares_processors else None
    if quiet <= _NEAR_BEST * best:  # that costs no other links
        return Further(row=row, rate_bps=None, share=quiet, lab_workers=lab_workers)
    share, rate_bps = next(share for share in shares if share[0] <= _NEAR_BEST * best)
    return Further(row=row, rate_bps=rate_bps, share=share, lab_workers=lab_workers)


def _from_run_to_run(subjects: Sequence[Subject]) -> Floats:
    """Return the standard deviation between runs, as a share of the step."""
    shares = [
        _OF_DEVICES_FROM_RUN_TO_RUN if subject.is_on_devices else _FROM_RUN_TO_RUN
        for subject in subjects
    ]
    return np.array(shares).reshape(shaped(run=len(subjects)))


def _of_the_codec(subjects: Sequence[Subject], grid: Grid, step_s: Floats, crew: Crew) -> Floats:
    """Return the variance from packing and unpacking gradients, and from exchanging them."""
    if all(codec.is_free for codec in grid.compressors):
        return np.zeros_like(step_s)
    slower = [codec.slower(_CODEC_SLOWER) for codec in grid.compressors]
    those_s = sweep(subjects, replace(grid, compressors=tuple(slower)), crew=crew)
    variance = np.square(those_s.measures["step_s"] - step_s)
    if all(subject.exchange_factor == 1 for subject in subjects):
        return variance
    longer = [
        replace(subject, exchange_factor=subject.exchange_factor * _EXCHANGE_LONGER)
        if subject.exchange_factor > 1
        else subject
        for subject in subjects
    ]
    longer_s = sweep(longer, grid, crew=crew).measures["step_s"]
    return variance + np.square(longer_s - step_s)


def _with_residues(subject: Subject, calibration: Calibration) -> Subject:
    """Return the subject with its residue on each transport that fits, and on another run's.

    The fits of `between` belong to a measured step at its bounds. Another run's transport comes
    last. It does not explain the measured step, so the residue is the subject's own.
    """
    step, transports = subject.step, (*calibration.variants, *calibration.between)
    measured_ns = [step.measured_ns] * len(transports)
    if step.measured_ns is not None:
        below, above = step.measured_off
        measured_ns[-2:] = (round(step.measured_ns * share) for share in (1 - below, 1 + above))
    fitted = residues(subject, transports, measured_ns)
    return replace(subject, residues=fitted + subject.residues)


def _transports_in_another_run(calibration: Calibration) -> tuple[MeasuredTransport, ...]:
    """Return the transport with a slower line, and with slower work."""
    transport, work = calibration.transport, float(np.exp(calibration.work_off))
    return (
        replace(transport, share=transport.share * float(np.exp(-LINE_FROM_RUN_TO_RUN))),
        replace(
            transport,
            processor_s_per_byte=transport.processor_s_per_byte * work,
            processor_s_per_hop=transport.processor_s_per_hop * work,
            wait_s_per_hop=transport.wait_s_per_hop * work,
        ),
    )


def _in_another_run(step: Step, calibration: Calibration) -> Step:
    """Return a step whose own work takes processors longer, by as much as another run's may."""
    own_ns = round(step.processor_ns * float(np.exp(calibration.work_off)))
    longer_ns = own_ns - step.processor_ns
    return replace(step, processor_ns=own_ns, step_ns=step.step_ns + longer_ns)


def _by_warm_processors(subjects: Sequence[Subject], grid: Grid) -> Floats:
    """Return by how much shorter steps are, at the most, that follow each other without a wait."""
    cold_s = [
        min(_COLD_S, _COLD_SHARE * step.alone_ns * 1e-9)
        if step.is_estimated and step.processor_ns  # the ranks compute on processors
        else 0.0
        for step in (subject.step for subject in subjects)
    ]
    passes = np.array(grid.accumulate).reshape(shaped(accumulate=len(grid.accumulate)))
    steps = np.array(grid.local_steps).reshape(shaped(local_steps=len(grid.local_steps)))
    in_a_row: Floats = 1 - 1 / (passes * steps)
    return np.array(cold_s).reshape(shaped(run=len(subjects))) * in_a_row


def _by_quieter_processors_s(subject: Subject) -> float:
    """Return by how much shorter steps are, at the most, of ranks that slow each other less.

    Ranks on one machine share its memory. Where that costs more than usual, the machine may have
    been disturbed while it was recorded: two processors of a virtual machine may share a core.
    """
    usual_s = _USUAL_BY_RANKS * subject.step.alone_ns * 1e-9
    return max(float(subject.crowded_by_ranks_s) - usual_s, 0.0)


def _of_contention(
    subjects: Sequence[Subject], grid: Grid, step_s: Floats, crew: Crew
) -> Floats | float:
    """Return the variance from T1, which tells how much of the recorded step is contention.

    As recorded the step is known, whatever its parts. Elsewhere, more contention for each bit adds
    as much as there are more bits.
    """
    if not any(subject.crowding.s_each for subject in subjects):
        return 0.0
    more, as_recorded_s = [], []
    for subject in subjects:
        crowding = subject.crowding
        off_s_each = crowding.off_s_each * (1.0 if crowding.is_by_time else _CONTENTION_OFF)
        s_each = crowding.s_each + off_s_each
        more.append(replace(subject, crowding=replace(crowding, s_each=s_each)))
        as_recorded_s.append(off_s_each * crowding.recorded_beside)
    longer_s = sweep(more, grid, crew=crew).measures["step_s"] - step_s
    away_s = longer_s - np.array(as_recorded_s).reshape(shaped(run=len(subjects)))
    return np.square(np.where(longer_s == 0, 0.0, away_s))


def _of_lateness(
    subjects: Sequence[Subject], grid: Grid, step_s: Floats, crew: Crew
) -> Floats | float:
    """Return the variance from ranks that shared a processor, and were late for each other.

    Nothing tells how much of their lateness goes with these ranks. Half of it is a standard
    deviation.
    """
    if all(subject.crowding.recorded_ranks <= 1 for subject in subjects):
        return 0.0
    later = [
        replace(subject, crowding=replace(subject.crowding, late_by_turns=0.5))
        for subject in subjects
    ]
    return np.square(sweep(later, grid, crew=crew).measures["step_s"] - step_s)


def _on_each(
    others: Sequence[MeasuredTransport], subjects: Sequence[Subject], grid: Grid, crew: Crew
) -> Iterator[Floats]:
    """Go through the step times with each of these in place of the measured transport.

    The subjects have a residue for each of them. They are computed together as far as the results
    are small.
    """
    points = len(subjects) * math.prod(len(getattr(grid, axis)) for axis in AXES_GIVEN)
    together = max(1, PIECE_POINTS // points)
    for first in range(0, len(others), together):
        places = range(len(others))[first : first + together]
        transports = tuple(
            others[place] if isinstance(transport, MeasuredTransport) else transport
            for place in places
            for transport in grid.transports
        )
        those = [
            replace(
                subject,
                residues=tuple(
                    subject.residues[place % len(subject.residues)]
                    for place in places
                    for _ in grid.transports
                ),
            )
            for subject in subjects
        ]
        computed = sweep(those, replace(grid, transports=transports), crew=crew)
        yield from np.split(computed.measures["step_s"], len(places), AXES.index("transport"))
