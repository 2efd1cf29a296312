"""The notes on an explanation: how far its run and its account can be believed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum

import numpy as np

from fullwire.findings.between import outside_of_steps
from fullwire.findings.case import NOTABLE, Case, communicates, computes, lacks_ranks
from fullwire.findings.finding import Finding
from fullwire.findings.goodput import about_goodput
from fullwire.findings.kinds_of_steps import about_passes, told_kinds, too_few_of_a_kind
from fullwire.findings.sureness import about_kernels, about_others
from fullwire.run.placement import shares_one_host, sums_on_processors
from fullwire.run.run import Run
from fullwire.run.usual import (
    LONGER,
)
from fullwire.simulation.forecast import Forecaster
from fullwire.simulation.of_kinds import NO_COMMUNICATION
from fullwire.timeline.account import Account, Part
from fullwire.timeline.contention import probe_steps
from fullwire.timeline.passes import passes_add_up, passes_of_step
from fullwire.timeline.steadiness import changed_midway
from fullwire.timeline.transfers import recorded_ranks, world
from fullwire.timeline.utilization import missing_tables

CLOCKS_DIFFER = 0.01  # Of the step: clocks that are known better leave all answers the same.
BEYOND_LINE_RATE = 1.05  # Times the line rate: faster transfers show that it is the wrong rate.
_TRANSFER = (Part.LINE_RATE, Part.LATENCY, Part.TRANSPORT, Part.UNEXPLAINED)


# ---- the run -------------------------------------------------------------------------------------


class RestsOnModel(Finding):
    """The times of the run come from a model of a device."""

    template = "This rests on modelled times, not on measured ones."


class NoComputationHere(Finding):
    """The run lacks computation, so T1 is the time without communication, and may be longer."""

    template = (
        "This run holds no computation. T1 is the time outside communication, and may be longer."
    )


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
        "computing there, in {probe_s:time} a step.{turns:? In {turns} of them ranks of a machine "
        "computed one after another.}"
    )

    probes: int
    probe_s: float
    turns: int | None


class HostIsAsInTurns(Finding):
    """One worker's host part is that of the steps with turns, and not that of the account."""

    template = (
        "The host's part is {alone_s:time} where ranks computed one after another, and one "
        "worker's step has that. In the account it is {usual_s:time}: sums hide some of it there, "
        "or it waits for processors."
    )

    alone_s: float
    usual_s: float


class NoSamples(Finding):
    """The run was measured without samples of links, sockets or processors."""

    template = "The run lacks samples of {tables:list}, and so their evidence."

    tables: tuple[str, ...]


class NoFixesPredicted(Finding):
    """The reason why no fix is predicted."""

    template = "No fixes are predicted: {why}."

    why: str


class NothingToPredictFrom(Finding):
    """Fixes need communication, and the workers' steps hold none."""

    template = f"Fixes are not predicted: {NO_COMMUNICATION}."


# ---- the steps -----------------------------------------------------------------------------------


class NoStepMarked(Finding):
    """The account is of the whole trace."""

    template = "No step is marked: the whole trace is taken for one."


class LongerSteps(Finding):
    """The steps that take much longer than usual, warm-up included, and the reason."""

    template = (
        "{count:,} of {steps:,} steps {count:takes|take} over {times} times the usual: "
        "{beyond_s:time} more in all{cause:?, most of it {cause}}."
    )

    count: int
    steps: int
    times: float
    beyond_s: float
    cause: str | None


class ChangedMidway(Finding):
    """The second half of the steps takes longer or shorter than the first."""

    template = (
        "The job changed midway: steps take {before_s:time} in the first half of the run and "
        "{after_s:time} in the second. Most of the difference is in {part}. The account is of "
        "both."
    )

    before_s: float
    after_s: float
    part: str


class FixedFromAllSteps(Finding):
    """The account is of the usual step, but few other steps hold the loss."""

    template = (
        "The account is of the usual step, {usual_s:time}. The verdict and the fixes are of all "
        "{steps:,} steps, {mean_s:time} in the mean, because few of them hold the loss."
    )

    usual_s: float
    mean_s: float
    steps: int


class PredictedFromOthers(Finding):
    """Predictions replay other steps than the account's: those that are whole on every rank."""

    template = (
        "The account's step takes {usual_s:time}. Predictions replay the steps that are whole on "
        "every rank. These take {replayed_s:time}."
    )

    usual_s: float
    replayed_s: float


class ComputesLongerThanOne(Finding):
    """Computing takes longer than in the baseline, and contention is not the reason."""

    template = (
        "Computing takes {longer_s:time} longer than in the run of one worker, and contention does "
        "not explain it. It stays in compute."
    )

    longer_s: float


class BaselineIsLonger(Finding):
    """The baseline's step is longer than the job's, so it is hardly the same work."""

    template = (
        "The baseline's step, {baseline_s:time}, is longer than this job's: it can hardly be the "
        "same work on one worker."
    )

    baseline_s: float


class BaselineHasOtherThreads(Finding):
    """The baseline's worker computed with another number of threads than the job's ranks."""

    template = (
        "The baseline's worker computed with {of_one} {of_one:thread|threads}, and each rank of "
        "this job with {of_rank}. So T1 is not of the same work: record the baseline with "
        "{of_rank} {of_rank:thread|threads} (OMP_NUM_THREADS, or torch.set_num_threads in the "
        "script)."
    )

    of_one: int
    of_rank: int


class RanksBeyondTheAccount(Finding):
    """A part of the account is less than the ranks' own, because their excess is set apart."""

    template = (
        "The account's {part}, {account_s:time}, is that of the lower median of the ranks in "
        "each step. The ranks' own is {low_s:time} to {high_s:time}. {beyond_s:time} of it counts "
        "as straggler."
    )

    part: str
    account_s: float
    low_s: float
    high_s: float
    beyond_s: float


# A late rank's excess in these is `straggler`.
_OTHER_HOST = 0.02  # of one worker's step: a smaller difference is no news
_WITH_EXCESS = {Part.COMPUTE: "computing", Part.INPUT: "wait for input", Part.HOST: "host part"}

# ---- ranks and transfers -------------------------------------------------------------------------


class RanksLeftOut(Finding):
    """Some ranks share no step with the others."""

    template = (
        "The account leaves out {count} ranks that share no step with the others: {ranks:ranks}."
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
        "To predict the job with a host for each rank: whatif --bandwidth RATE (full "
        "utilization), or with --transport measured --calibrate OTHER.run --ranks-per-host 1."
    )


class GivenRateIsUnused(Finding):
    """A line rate was given, but the ranks share one host and use no line."""

    template = "The given {rate_bps:rate} has no effect: ranks of one host share its memory."

    rate_bps: float


class LateEnds(Finding):
    """Some collectives have no recorded end, so the program's wait bounds it."""

    template = "{count} collectives ended at the latest when the program had waited for them."

    count: object


class LatencyUnknown(Finding):
    """The latency of a message is unknown, and counts as 0."""

    template = "Latency counts as 0: the run lacks small collectives and a recorded latency."


class FasterThanTheLine(Finding):
    """Collectives were faster than the line rate allows."""

    template = "The line rate is too low: collectives were {times:.2f} times as fast as it allows."

    times: float


class RateCannotBe(Finding):
    """The given line rate is too low for the step that was measured."""

    template = (
        "The line rate of {rate_bps:rate} is too low: even full links would make a step of "
        "{step_s:time}. Predictions that rest on it are as wrong."
    )

    rate_bps: float
    step_s: float


class ClocksUncertain(Finding):
    """The clocks of the ranks are known with a limited accuracy only."""

    template = (
        "The clocks of the ranks are known to {to_s:time} only. Waiting times are as uncertain."
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
    run, account = case.run, case.account
    if run.provenance.basis == "modelled":
        yield RestsOnModel()
    if communicates(case) and not computes(case):
        yield NoComputationHere()
    yield from (RunIsPartial(what=gap) for gap in run.missing)
    if run.facts.warnings is not None:
        yield WarnedWhereRecorded(what=str(run.facts.warnings))
    if run.facts.remarks is not None:
        yield RemarkedWhereRead(what=str(run.facts.remarks))
    yield from about_goodput(run.events)
    if not account.step_s:
        return
    if account.is_whole_trace:
        yield NoStepMarked()
    else:
        yield from _longer_steps(account)
    if kinds := account.by_kind():
        yield told_kinds(account.kinds.kinds, [kind.step_s for kind in kinds])
    elif (passes := passes_of_step(run) or 1) > 1:
        yield about_passes(passes, add_up=passes_add_up(run))
    yield from too_few_of_a_kind(account.kinds.unlike)
    change = changed_midway(account)
    if change is not None:
        part = change.part.key.replace("_", " ")
        yield ChangedMidway(before_s=change.before_s, after_s=change.after_s, part=part)
    probes = probe_steps(run)
    if len(probes):
        yield ProbeStepsLeftOut(
            probes=int((probes.rank == probes.rank[0]).sum()),
            probe_s=float((probes.end_ns - probes.start_ns).mean()) * 1e-9,
            turns=int(((probes.rank == probes.rank[0]) & (probes.name == "turns")).sum()) or None,
        )
    yield from outside_of_steps(run.spans, account.step_s)
    if computes(case):
        yield from _ranks_beyond(account)
    without = tuple(sorted(set(recorded_ranks(run).tolist()) - set(account.ranks)))
    if without:
        yield RanksLeftOut(count=len(without), ranks=without)
    if lacks_ranks(case):
        yield RanksMissing(recorded=len(recorded_ranks(run)), workers=world(run))
    if is_estimated and world(run) > 1:
        yield BaselineIsEstimated()
        alone_s, usual_s = account.crowding.host_s, account.parts_s[Part.HOST.key]
        if alone_s is not None and abs(alone_s - usual_s) >= _OTHER_HOST * account.alone_s:
            yield HostIsAsInTurns(alone_s=alone_s, usual_s=usual_s)
    if world(run) > 1:
        yield from about_kernels(run, account)
    if len(run.collectives) and world(run) > 1:
        yield from _about_transfers(case, rate_bps)
        missing = missing_tables(run)
        if missing and run.provenance.origin == "measured":
            yield NoSamples(tables=missing)
        yield from about_others(run)


def _ranks_beyond(account: Account) -> Iterator[Finding]:
    """Yield the parts of the account that notably differ from the table of ranks."""
    of_ranks = account.rank_parts_s()
    for part, name in _WITH_EXCESS.items():
        own_s, account_s = [parts[part.key] for parts in of_ranks], account.parts_s[part.key]
        beyond_s = float(np.mean(own_s)) - account_s
        if beyond_s > NOTABLE * account.step_s:
            yield RanksBeyondTheAccount(
                part=name,
                account_s=account_s,
                low_s=min(own_s),
                high_s=max(own_s),
                beyond_s=beyond_s,
            )


def _longer_steps(account: Account) -> Iterator[Finding]:
    """Yield a note on the steps that take much longer than the usual ones, if any."""
    by_step_s = account.parts_ns.mean(axis=0) * 1e-9
    length_s = by_step_s.sum(axis=1)
    is_usual = account.kinds.usual(account.steps, length_s)
    usual_s = account.kinds.expected(account.steps, is_usual, by_step_s)
    is_longer = length_s > LONGER * usual_s.sum(axis=1)
    if not is_longer.any():
        return
    beyond_s = (by_step_s[is_longer] - usual_s[is_longer]).sum(axis=0)
    part = Part(int(np.argmax(beyond_s)))
    is_most = beyond_s[part] > beyond_s.sum() / 2
    yield LongerSteps(
        count=int(is_longer.sum()),
        steps=len(length_s),
        times=LONGER,
        beyond_s=float(beyond_s.sum()),
        cause=part.key.replace("_", " ") if is_most else None,
    )


def _about_transfers(case: Case, rate_bps: Mapping[int, float]) -> Iterator[Finding]:
    account, parts, facts = case.account, case.account.parts_s, case.run.facts
    told_s = sum(parts[part.key] for part in _TRANSFER) - account.untold_s
    if not rate_bps and told_s > 0 and not shares_one_host(case.run):
        yield LineRateUnknown()
    late_ends = facts.late_ends
    if late_ends:
        yield LateEnds(count=late_ends)
    if account.latency == "none" and told_s > 0:
        yield LatencyUnknown()
    # A plan's step has the bytes of all transfers, and the time of those that are not hidden.
    if account.beyond_line_rate > BEYOND_LINE_RATE and not case.run.provenance.is_plan:
        yield FasterThanTheLine(times=account.beyond_line_rate)
    stated = facts.clock_uncertainty_s or ()
    uncertain_s = max((rank_s for _, rank_s in stated), default=0.0)
    if uncertain_s > CLOCKS_DIFFER * case.step_s:
        yield ClocksUncertain(to_s=uncertain_s)
    if account.clock_error_ns > CLOCKS_DIFFER * case.step_s * 1e9:
        is_unnamed = any(
            str(name).startswith("stream ") for name in set(case.run.collectives.group)
        )
        because = ClocksBecause.UNNAMED_GROUPS if is_unnamed else ClocksBecause.DISAGREE
        yield EndsBeforeIssue(by_s=account.clock_error_ns * 1e-9, because=because)


def about_host(run: Run, given_bps: float | None, *, is_told: bool) -> Iterator[Finding]:
    """Yield the notes on ranks that share a host, and on a line rate that was given for them."""
    if not shares_one_host(run):
        return
    if not is_told:
        yield RanksSlowEachOther()
    yield SeveralHostsWouldGive()
    if given_bps is not None:
        yield GivenRateIsUnused(rate_bps=given_bps)


def about_baseline(
    run: Run, account: Account, one: Run | None, given_s: float | None, left_s: float | None
) -> Iterator[Finding]:
    """Yield notes on a given baseline: a longer step, other threads, less computing by `left_s`."""
    of_rank, of_one = run.facts.threads, None if one is None else one.facts.threads
    if of_rank and of_one and of_rank != of_one and sums_on_processors(run):
        yield BaselineHasOtherThreads(of_one=of_one, of_rank=of_rank)
    if given_s is not None and given_s > account.step_s:
        yield BaselineIsLonger(baseline_s=given_s)
    if left_s is not None and left_s > NOTABLE * account.step_s:
        yield ComputesLongerThanOne(longer_s=left_s)


def about_other_steps(
    account: Account, judged: Account, predictor: Forecaster | None
) -> Iterator[Finding]:
    """Yield a note if the verdict, or predictions, are of other steps than the account."""
    if judged is not account:
        steps = int(judged.is_typical.sum())
        yield FixedFromAllSteps(usual_s=account.step_s, mean_s=judged.step_s, steps=steps)
    if predictor is not None and abs(account.step_s / predictor.measured_s - 1) > NOTABLE:
        yield PredictedFromOthers(usual_s=account.step_s, replayed_s=predictor.measured_s)


def about_rate(run: Run, predictor: Forecaster | None) -> Iterator[Finding]:
    """Yield a note if a given line rate is too low: a full line would take longer than the job."""
    if predictor is None or run.facts.line_rate_bps is not None:
        return
    # The measured step would set the prediction right, and so hide that the rate is wrong.
    full = predictor.as_modelled().ask(transports=(predictor.full(),))
    if full.step_s > BEYOND_LINE_RATE * predictor.measured_s:
        yield RateCannotBe(rate_bps=predictor.rate_bps, step_s=full.step_s)


class EmulationSendsGradientsOnly(Finding):
    """The recorded job has collectives that emulated accelerators do not send."""

    template = (
        "{count} other {count:collective|collectives} of each recorded step ({kinds:list}) "
        "{count:is|are} left out: emulated accelerators send gradients only"
    )

    count: int
    kinds: tuple[str, ...]
