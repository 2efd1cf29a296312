"""The notes on an explanation: how far its run and its account can be believed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum

import numpy as np

from fullwire.findings.case import NOTABLE, Case, communicates, computes
from fullwire.findings.finding import Finding
from fullwire.findings.others import about_others
from fullwire.fixes import Fixes
from fullwire.run.placement import shares_one_host
from fullwire.run.run import Run
from fullwire.simulation.forecast import Forecast, Forecaster
from fullwire.timeline.account import Account, Part
from fullwire.timeline.contention import probe_steps
from fullwire.timeline.steadiness import changed_midway
from fullwire.timeline.transfers import recorded_ranks, stands_for_all, world
from fullwire.timeline.utilization import missing_tables

BETWEEN = 0.05  # Of the time from first to last step: a note needs more between steps.
CLOCKS_DIFFER = 0.01  # Of the step: clocks that are known better leave all answers the same.
BEYOND_LINE_RATE = 1.05  # Times the line rate: faster transfers show that it is the wrong rate.
_TRANSFER = (Part.LINE_RATE, Part.LATENCY, Part.TRANSPORT, Part.UNEXPLAINED)


# ---- the run -------------------------------------------------------------------------------------


class RestsOnModel(Finding):
    """The times of the run come from a model of a device."""

    template = "This rests on modelled times, not on measured ones."


class NoComputationHere(Finding):
    """The run lacks computation, so T1 is the time without communication, and may be longer."""

    template = "No computation is in this run: T1 is the time without traffic, and may be longer."


class RunIsPartial(Finding):
    """Some data of the run is missing."""

    template = "The run is partial: {what}."

    what: str


class WarnedWhereRecorded(Finding):
    """A warning of the recorder or of the lab."""

    template = "Where it was recorded: {what}."

    what: str


class RemarkedWhereRead(Finding):
    """A remark of the importer."""

    template = "As it was read: {what}."

    what: str


class BaselineIsEstimated(Finding):
    """T1 is estimated from the run itself."""

    template = "T1 is estimated from this run's computation, input and host; --baseline gives it."


class ProbeStepsLeftOut(Finding):
    """The account leaves out probe steps, in which communication waited for computing."""

    template = (
        "{probes:,} {probes:probe step is|probe steps are} left out: communication waited for "
        "computing there, in {probe_s:time} a step."
    )

    probes: int
    probe_s: float


class NoSamples(Finding):
    """The run was measured without samples of links, sockets or processors."""

    template = "No samples of {tables:list}: there is no evidence from them."

    tables: tuple[str, ...]


class NoFixesPredicted(Finding):
    """The reason why no fix is predicted."""

    template = "No fixes are predicted: {why}."

    why: str


class NothingToPredictFrom(Finding):
    """Fixes need communication, and the workers' steps hold none."""

    template = "No fixes are predicted: nothing was communicated in its steps."


# ---- the steps -----------------------------------------------------------------------------------


class NoStepMarked(Finding):
    """The account is of the whole trace."""

    template = "No step is marked: the whole trace is taken for one."


class StepsLeftOut(Finding):
    """The steps that the means leave out."""

    template = (
        "{left_out} of {steps} steps are left out as warm-up or exceptions; they are {share:.0%} "
        "of the time."
    )

    left_out: int
    steps: int
    share: float


class ChangedMidway(Finding):
    """The second half of the steps takes longer or shorter than the first."""

    template = (
        "The job changed midway: steps take {before_s:time} in the first half of the run and "
        "{after_s:time} in the second, most of the difference in {part}; the account is of both."
    )

    before_s: float
    after_s: float
    part: str


class TimeBetweenSteps(Finding):
    """Some time is outside of all steps, as for evaluation or a checkpoint."""

    template = (
        "{share:.0%} of the time from the first step to the last lies between steps, and is in no "
        "step's account."
    )

    share: float


class MeanIsNotMedian(Finding):
    """The account is of the mean step, but predictions start from the median one."""

    template = (
        "The account is of the mean step, {mean_s:time}; {is_fixed_from_mean:predictions but what "
        "would help|predictions} start from the median step, {median_s:time}."
    )

    mean_s: float
    median_s: float
    is_fixed_from_mean: bool


class BaselineIsLonger(Finding):
    """The baseline's step is longer than the job's, so it is hardly the same work."""

    template = (
        "The baseline's step, {baseline_s:time}, is longer than this job's: it can hardly be the "
        "same work on one worker."
    )

    baseline_s: float


# ---- ranks and transfers -------------------------------------------------------------------------


class RanksLeftOut(Finding):
    """Some ranks share no step with the others."""

    template = (
        "{count} ranks share no step with the others and are not in the account: {ranks:ranks}."
    )

    count: int
    ranks: tuple[int, ...]


class RanksMissing(Finding):
    """Some ranks were not recorded."""

    template = "{recorded} of {workers} ranks are here: transfer cannot be told from waiting."

    recorded: int
    workers: int


class LineRateUnknown(Finding):
    """The line rate of the links is unknown."""

    template = "The line rate is unknown, so transfers are unexplained: --line-rate gives it."


class RanksSlowEachOther(Finding):
    """The ranks share processors, and the run does not show how much that slows them."""

    template = (
        "All ranks share one host. How much their computation slows down for it is not told here: "
        "T1 may be shorter. A run of one worker (--baseline) tells it."
    )


class SeveralHostsWouldGive(Finding):
    """The command that predicts the same ranks on hosts of their own."""

    template = (
        "What hosts of their own would give: whatif --bandwidth RATE, at full utilization, or with "
        "--transport measured --calibrate OTHER.run --ranks-per-host 1."
    )


class GivenRateIsUnused(Finding):
    """A line rate was given, but the ranks share one host and use no line."""

    template = "No line is between ranks of one host: the given {rate_bps:rate} says nothing here."

    rate_bps: float


class LateEnds(Finding):
    """Some collectives have no recorded end, so the program's wait bounds it."""

    template = "{count} collectives ended at the latest when the program had waited for them."

    count: object


class LatencyUnknown(Finding):
    """The latency of a message is unknown, and counts as 0."""

    template = "Latency counts as 0: there are no small collectives, and no fact says what it is."


class FasterThanTheLine(Finding):
    """Collectives were faster than the line rate allows."""

    template = (
        "Collectives took 1/{times:.2f} of what the line rate allows: it is not the rate of the "
        "links that they used."
    )

    times: float


class RateCannotBe(Finding):
    """The given line rate is too low for the step that was measured."""

    template = (
        "At {rate_bps:rate} even links used to the full would make a step of {step_s:time}: it is "
        "not the rate of the links that this job used, and what is predicted from it is as wrong."
    )

    rate_bps: float
    step_s: float


class ClocksUncertain(Finding):
    """The clocks of the ranks are known with a limited accuracy only."""

    template = (
        "Ranks' clocks are known to {to_s:time} only, and who waited for whom is as uncertain."
    )

    to_s: float


class ClocksBecause(Enum):
    """The reasons why collectives can end before their last rank issued them."""

    DISAGREE = "ranks' clocks disagree, and waiting is uncertain by as much"
    UNNAMED_GROUPS = (
        "the traces do not name groups of ranks, so collectives of several were taken for one, and "
        "waiting is uncertain by as much"
    )


class EndsBeforeIssue(Finding):
    """Some collectives end before their last rank issued them, which is impossible."""

    template = (
        "Collectives end up to {by_s:time} before their last rank issued them: {because.value}."
    )

    by_s: float
    because: ClocksBecause


# ---- the conditions of the notes -----------------------------------------------------------------


def notes(case: Case, *, is_estimated: bool, rate_bps: Mapping[int, float]) -> Iterator[Finding]:
    """Yield the notes on a run and its account."""
    run, found = case.run, case.account
    if run.provenance.basis == "modelled":
        yield RestsOnModel()
    if communicates(case) and not computes(case):
        yield NoComputationHere()
    yield from (RunIsPartial(what=each) for each in run.missing)
    if run.facts.warnings is not None:
        yield WarnedWhereRecorded(what=str(run.facts.warnings))
    if run.facts.remarks is not None:
        yield RemarkedWhereRead(what=str(run.facts.remarks))
    if not found.step_s:
        return
    if found.is_whole_trace:
        yield NoStepMarked()
    left_out = int((~found.is_typical).sum())
    if left_out:
        all_ns = found.parts_ns.sum(axis=(0, 2))
        share = float(all_ns[~found.is_typical].sum() / all_ns.sum())
        yield StepsLeftOut(left_out=left_out, steps=len(found.steps), share=share)
    change = changed_midway(found)
    if change is not None:
        part = change.part.key.replace("_", " ")
        yield ChangedMidway(before_s=change.before_s, after_s=change.after_s, part=part)
    probes = probe_steps(run)
    if len(probes):
        yield ProbeStepsLeftOut(
            probes=int((probes.rank == probes.rank[0]).sum()),
            probe_s=float((probes.end_ns - probes.start_ns).mean()) * 1e-9,
        )
    # Find the share of time between steps, as for evaluation or a checkpoint.
    is_mark = (run.spans.lane == "host") & np.isin(run.spans.name, ["step", "probe"])
    marks = run.spans.rows(is_mark)
    ranks, place = np.unique(marks.rank, return_inverse=True)
    first_ns = np.full(len(ranks), marks.start_ns.max(initial=0))
    last_ns = np.full(len(ranks), marks.end_ns.min(initial=0))
    np.minimum.at(first_ns, place, marks.start_ns)
    np.maximum.at(last_ns, place, marks.end_ns)
    whole_ns = int((last_ns - first_ns).sum())
    between = 1 - int((marks.end_ns - marks.start_ns).sum()) / max(whole_ns, 1)
    if len(marks) and between > BETWEEN:
        yield TimeBetweenSteps(share=between)
    without = tuple(sorted(set(recorded_ranks(run).tolist()) - set(found.ranks)))
    if without:
        yield RanksLeftOut(count=len(without), ranks=without)
    recorded = len(recorded_ranks(run))
    if recorded < world(run) and not stands_for_all(run):
        yield RanksMissing(recorded=recorded, workers=world(run))
    if is_estimated and world(run) > 1:
        yield BaselineIsEstimated()
    if len(run.collectives) and world(run) > 1:
        yield from _about_transfers(case, rate_bps)
        missing = missing_tables(run)
        if missing and run.provenance.origin == "measured":
            yield NoSamples(tables=missing)
        yield from about_others(run)


def _about_transfers(case: Case, rate_bps: Mapping[int, float]) -> Iterator[Finding]:
    found, parts, facts = case.account, case.account.parts_s, case.run.facts
    told_s = sum(parts[part.key] for part in _TRANSFER) - found.untold_s
    if not rate_bps and told_s > 0 and not shares_one_host(case.run):
        yield LineRateUnknown()
    late_ends = facts.late_ends
    if late_ends:
        yield LateEnds(count=late_ends)
    if found.latency == "none" and told_s > 0:
        yield LatencyUnknown()
    if found.beyond_line_rate > BEYOND_LINE_RATE:
        yield FasterThanTheLine(times=found.beyond_line_rate)
    stated = facts.clock_uncertainty_s or ()
    uncertain_s = max((rank_s for _, rank_s in stated), default=0.0)
    if uncertain_s > CLOCKS_DIFFER * case.step_s:
        yield ClocksUncertain(to_s=uncertain_s)
    if found.clock_error_ns > CLOCKS_DIFFER * case.step_s * 1e9:
        is_unnamed = any(
            str(name).startswith("stream ") for name in set(case.run.collectives.group)
        )
        because = ClocksBecause.UNNAMED_GROUPS if is_unnamed else ClocksBecause.DISAGREE
        yield EndsBeforeIssue(by_s=found.clock_error_ns * 1e-9, because=because)


def about_host(run: Run, given_bps: float | None, *, is_told: bool) -> Iterator[Finding]:
    """Yield the notes on ranks that share a host, and on a line rate that was given for them."""
    if not shares_one_host(run):
        return
    if not is_told:
        yield RanksSlowEachOther()
    yield SeveralHostsWouldGive()
    if given_bps is not None:
        yield GivenRateIsUnused(rate_bps=given_bps)


def about_baseline(found: Account, given_s: float | None) -> Iterator[Finding]:
    """Yield a note if a given baseline takes longer than the job."""
    if given_s is not None and given_s > found.step_s:
        yield BaselineIsLonger(baseline_s=given_s)


def about_median(
    found: Account, predictor: Forecaster | None, helpful: Fixes | None
) -> Iterator[Finding]:
    """Yield a note if the account's step differs from the step that predictions start from."""
    if predictor is None or helpful is None or not found.step_s:
        return
    median_s = predictor.measured_s
    if abs(found.step_s / median_s - 1) > NOTABLE:
        yield MeanIsNotMedian(
            mean_s=found.step_s,
            median_s=median_s,
            is_fixed_from_mean=helpful.from_s > median_s,
        )


def about_rate(run: Run, predictor: Forecaster | None, full: Forecast | None) -> Iterator[Finding]:
    """Yield a note if a given line rate is too low: a full line would take longer than the job."""
    if predictor is None or full is None or run.facts.line_rate_bps is not None:
        return
    if full.step_s > BEYOND_LINE_RATE * predictor.measured_s:
        yield RateCannotBe(rate_bps=predictor.rate_bps, step_s=full.step_s)
