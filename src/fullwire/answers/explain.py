"""Where did every lost second go, and is it the network?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fullwire.answers.believable import check_scaling, check_steps, check_times
from fullwire.answers.break_even import BreakEven, break_even
from fullwire.answers.compare import refuse_other_work
from fullwire.answers.conditions import rate
from fullwire.answers.opening import RunLike, opened
from fullwire.answers.verdict import Verdict, judged
from fullwire.errors import DamagedInput, UsageError
from fullwire.findings.case import NOTABLE, THRESHOLD, Case, communicates, computes, enough_steps
from fullwire.findings.evidence import evidence
from fullwire.findings.evidence.nccl import nccl_evidence
from fullwire.findings.finding import Evidence, Finding
from fullwire.findings.notes import (
    NoFixesPredicted,
    NothingToPredictFrom,
    about_baseline,
    about_host,
    about_median,
    about_rate,
    notes,
)
from fullwire.findings.scaling import (
    Estimated,
    MedianWithFullLinks,
    NoMoreWithFullLinks,
    ScalingFactor,
    WithFullLinks,
)
from fullwire.fixes import Fix, Fixes, fixes, fixes_by_account
from fullwire.run.placement import shares_one_host, sums_on_processors
from fullwire.run.run import Run
from fullwire.simulation.forecast import Forecast, Forecaster, forecaster
from fullwire.timeline.account import Account, Part, account, nothing
from fullwire.timeline.breakdown import RankBreakdown
from fullwire.timeline.contention import CrowdingSource
from fullwire.timeline.transfers import holds_times, recorded_ranks, world
from fullwire.units import show_rate
from fullwire.words import sentences


@dataclass(frozen=True, eq=False, kw_only=True)
class Explanation:
    """The account of a job's step, what it amounts to, and what it rests on."""

    verdict: Verdict
    step_s: float  # the mean: parts add up to nothing else
    baseline_step_s: float
    baseline_between_s: tuple[float, float]  # what encloses it in 95 of 100 cases
    is_estimated: bool  # the baseline is what this run spends on its own, not a run of one worker
    scaling_factor: float | None  # None where the run holds no times, or no computation
    account: Mapping[str, float]  # seconds per step, adding up to step_s
    compute_inflation_s: float | None
    ranks: tuple[RankBreakdown, ...]
    evidence: tuple[Evidence, ...]
    break_even: BreakEven | None
    fixes: tuple[Fix, ...]
    fixes_from_s: float | None  # the step that they are held against, where there are any
    full: Forecast | None  # the same job, were its links used to the full
    notes: tuple[Finding, ...]  # what to know about it
    detail: Account
    line_rates_bps: Mapping[int, float]  # of each rank's link, as far as known
    predictor: Forecaster | None  # the job ready to be asked, where it can be predicted

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return what to know about it, a sentence each."""
        return sentences(self.notes)

    @property
    def predicted_from_s(self) -> float:
        """Return the T1 that predictions are held against: a baseline's, or that of their step."""
        if self.predictor is None or not self.is_estimated:
            return self.baseline_step_s
        return self.predictor.alone_s

    @property
    def median_step_s(self) -> float | None:
        """Return the median step, which predictions start from, where there are any."""
        return None if self.predictor is None else self.predictor.measured_s

    @property
    def other_median_s(self) -> float | None:
        """Return the median step that predictions start from, where it is not the mean one."""
        median_s = self.median_step_s
        if median_s is None or abs(self.step_s / median_s - 1) <= NOTABLE:
            return None
        return median_s

    @property
    def scaling(self) -> Finding | None:
        """Return what the step loses to having several workers, where that is known."""
        if self.scaling_factor is None:
            return None
        longer_s = self.compute_inflation_s
        return ScalingFactor(
            factor=self.scaling_factor,
            alone_s=self.baseline_step_s,
            estimate=self._estimate(),
            step_s=self.step_s,
            full=self._with_full_links(),
            longer_s=longer_s if longer_s is not None and longer_s > 0 else None,
        )

    def _estimate(self) -> Finding | None:
        if not self.is_estimated:
            return None
        low_s, high_s = self.baseline_between_s
        probes = self.detail.crowding.probes or None
        return Estimated(probes=probes, low_s=low_s, high_s=high_s)

    def _with_full_links(self) -> Finding | None:
        if self.full is None:
            return None
        factor, median_s = self.full.scaling_factor, self.other_median_s
        now = self.scaling_factor if median_s is None else self.predicted_from_s / median_s
        if now is not None and factor <= now:
            return NoMoreWithFullLinks()
        if median_s is None:
            return WithFullLinks(factor=factor)
        return MedianWithFullLinks(factor=factor, now=self.predicted_from_s / median_s)


def explain(
    run: RunLike,
    *,
    baseline: RunLike | None = None,
    bandwidth: str | float | None = None,
    calibrate: Sequence[RunLike] = (),
) -> Explanation:
    """Say where the time of a step goes, and what limits the job.

    `baseline` is a run of the same work on one worker; `bandwidth` is the line rate of the links,
    for runs that do not know theirs; `calibrate` are other runs of the same cluster.
    """
    asked = opened(run)
    job, rate_bps = asked.run, line_rates(asked.run, bandwidth)
    found = account(job, rate_bps, asked.parts()) if _is_to_account(job) else nothing()
    parts = found.parts_s
    baseline_s, between_s, inflation_s = _baseline(job, found, baseline)
    given_s = None if baseline is None else baseline_s
    told = evidence(job, found, rate_bps)
    case = Case(run=job, account=found, inflation_s=inflation_s, evidence=told, rate_bps=rate_bps)
    is_told = found.step_s > 0 and not case.lost and (baseline is not None or computes(case))
    predictor, why_not = _forecaster(case, rate_bps, [opened(each).run for each in calibrate])
    helpful = _helpful(case, predictor)
    full = None if predictor is None else _at_full_utilization(given_s, predictor)
    link, gain = _faster_link(helpful)
    case = replace(case, faster_link=link, gain=gain)
    return _believed(
        job,
        Explanation(
            verdict=judged(case),
            step_s=found.step_s,
            baseline_step_s=baseline_s,
            baseline_between_s=between_s,
            is_estimated=baseline is None,
            scaling_factor=baseline_s / found.step_s if is_told and baseline_s else None,
            account=parts,
            compute_inflation_s=inflation_s,
            ranks=found.breakdowns,
            evidence=told,
            break_even=None
            if predictor is None
            else break_even(predictor, THRESHOLD, case.share(parts[Part.STRAGGLER.key])),
            fixes=() if helpful is None else _against(given_s, helpful),
            fixes_from_s=None if helpful is None else helpful.from_s,
            full=full,
            notes=(
                *notes(case, is_estimated=baseline is None, rate_bps=rate_bps),
                *about_baseline(found, given_s),
                *about_median(found, predictor, helpful),
                *about_host(
                    job,
                    None if bandwidth is None else rate(bandwidth),
                    is_estimated=baseline is None,
                    is_told=found.crowding.source != "none",
                ),
                *about_rate(job, predictor, full),
                *why_not,
            ),
            detail=found,
            line_rates_bps=rate_bps,
            predictor=predictor,
        ),
    )


def _believed(run: Run, found: Explanation) -> Explanation:
    """Return an explanation in which every number can be; `_forecaster` looked at predictions."""
    source, workers = run.provenance.source, world(run)
    check_times(source, step=found.step_s, baseline=found.baseline_step_s)
    check_times(source, **dict(found.account))
    check_scaling(source, workers, found.scaling_factor)
    predicted = [fix.forecast for fix in found.fixes] + ([found.full] if found.full else [])
    check_steps(source, predicted_step=[each.step_s for each in predicted])
    check_times(source, low_end=[each.low_s for each in predicted])
    check_scaling(source, workers, [each.scaling_factor for each in predicted])
    return found


def _is_to_account(run: Run) -> bool:
    """Say whether a run has an account; logs and schedules hold no times, which is no fault."""
    if holds_times(run):
        return True
    is_told = bool(len(run.collectives)) or bool(nccl_evidence(run))
    if run.provenance.origin == "imported" and is_told:
        return False
    if len(recorded_ranks(run)):
        raise UsageError(f"{run.provenance.source}: its steps take no time at all")
    return True  # which says what is missing


def _helpful(case: Case, predictor: Forecaster | None) -> Fixes | None:
    """Return what would help: as predicted, or as far as the account of a job tells by itself."""
    if predictor is not None:
        return fixes(case.run, predictor, case.account)
    is_told = computes(case) and enough_steps(case) and not case.lost
    if case.account.is_whole_trace or not is_told:
        return None
    return fixes_by_account(case.account)


def _against(given_s: float | None, helpful: Fixes) -> tuple[Fix, ...]:
    """Hold fixes against a baseline's T1, where there is one.

    A fix that one worker would profit from too has shortened the T1 that it was predicted with.
    """
    times = 1.0 if given_s is None else given_s / helpful.alone_s
    return tuple(
        replace(fix, forecast=replace(fix.forecast, scaling_factor=times * fix.scaling_factor))
        for fix in helpful.found
    )


def _at_full_utilization(given_s: float | None, predictor: Forecaster) -> Forecast:
    found = predictor.ask(transports=(predictor.full(),))
    return found if given_s is None else replace(found, scaling_factor=given_s / found.step_s)


def _forecaster(
    case: Case, rate_bps: Mapping[int, float], calibrate: Sequence[Run]
) -> tuple[Forecaster | None, tuple[Finding, ...]]:
    """Make the job ready for predictions, or say why there are none."""
    if world(case.run) > 1 and computes(case) and not communicates(case):
        return None, (NothingToPredictFrom(),)
    try:
        found = forecaster(case.run, min(rate_bps.values(), default=None), calibrate)
        if found is not None:
            _check(found, case.run)
    except (UsageError, DamagedInput) as error:
        return None, (NoFixesPredicted(why=str(error)),)
    return found, ()


def _check(found: Forecaster, run: Run) -> None:
    """Refuse to predict from a step that cannot be: its account may be true all the same."""
    now = found.ask()
    check_steps(
        run.provenance.source,
        median_step=found.measured_s,
        step_of_one_worker=found.alone_s,
        predicted_step=now.step_s,
    )
    check_scaling(run.provenance.source, world(run), now.scaling_factor)


def line_rates(run: Run, bandwidth: str | float | None = None) -> dict[int, float]:
    """Return the line rate of each rank's link: as the run knows it, or as it was given.

    Ranks that share a host have no line between them, whatever was given.
    """
    if shares_one_host(run):
        return {}
    known = run.facts.line_rate_bps
    given = None if bandwidth is None else rate(bandwidth)
    if known is not None:
        if given is not None and given != known:
            raise UsageError(
                f"bandwidth: this run knows its line rate, {show_rate(known)}; "
                f"got {show_rate(given)}"
            )
        given = known
    if given is None:
        return {}
    rates = dict.fromkeys(recorded_ranks(run).tolist(), given)
    others = {int(rank): rate_bps for rank, rate_bps in run.facts.other_line_rates_bps or ()}
    return rates | others


# How far T1 of one run may be off, below and above, as shares of it.
_OFF: Mapping[CrowdingSource, tuple[float, float]] = {
    "probe steps": (0.10, 0.10),
    "run delay": (0.20, 0.10),  # work beside memory traffic is slower, too
    "none": (0.40, 0.10),  # on processors; devices compute beside communication nearly as alone
}
_OFF_ON_DEVICES = (0.10, 0.05)
_REPEATS = 0.02  # within this a job repeats that is begun anew


def _baseline(
    run: Run, found: Account, baseline: RunLike | None
) -> tuple[float, tuple[float, float], float | None]:
    """Return T1, between what it lies, and how much longer computation takes than there.

    The last is None where T1 is estimated.
    """
    parts = found.parts_s
    if baseline is None:
        alone_s = found.alone_s
        if world(run) == 1:
            below, above = _REPEATS, _REPEATS
        elif found.crowding.source == "none" and not sums_on_processors(run):
            below, above = _OFF_ON_DEVICES
        else:
            below, above = _OFF[found.crowding.source]
            by_chance = 2 * found.crowding.scatter / max(found.crowding.probes, 1) ** 0.5
            below, above = math.hypot(below, by_chance), math.hypot(above, by_chance)
        return alone_s, (alone_s * max(1 - below, 0.0), alone_s * (1 + above)), None
    alone = opened(baseline)
    refuse_other_work(alone.run, run)
    if world(alone.run) != 1:
        raise UsageError(f"baseline: expected a run of one worker, got one of {world(alone.run)}")
    by_one = account(alone.run, {}, alone.parts())
    if by_one.is_whole_trace or not by_one.step_s:
        raise UsageError("baseline: it has no marked steps, so it does not say how long one takes")
    lengths_s = by_one.parts_ns[:, by_one.is_typical].sum(axis=2).mean(axis=0) * 1e-9
    by_chance = 2 * float(np.std(lengths_s)) / by_one.step_s / len(lengths_s) ** 0.5
    off = math.hypot(_REPEATS, by_chance)
    between_s = by_one.step_s * max(1 - off, 0.0), by_one.step_s * (1 + off)
    return by_one.step_s, between_s, parts[Part.COMPUTE.key] - by_one.parts_s[Part.COMPUTE.key]


def _faster_link(helpful: Fixes | None) -> tuple[Fix | None, float]:
    """Return the next link on sale that would help, and what share of the step it would gain."""
    links = [] if helpful is None else [fix for fix in helpful.found if fix.kind == "link"]
    if helpful is None or not links:
        return None, 0.0
    next_one = max(links, key=lambda fix: fix.step_s)
    return next_one, 1 - next_one.step_s / helpful.from_s
