"""Where did every lost second go, and is it the network?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fullwire.answers.break_even import BreakEven, break_even
from fullwire.answers.compare import refuse_other_work
from fullwire.answers.conditions import rate
from fullwire.answers.fixes import Fix, Fixes, fixes, fixes_by_account
from fullwire.answers.opening import RunLike, opened
from fullwire.answers.subjects import about_others
from fullwire.answers.verdict import (
    NOTABLE,
    THRESHOLD,
    Case,
    Verdict,
    communicates,
    computes,
    enough_steps,
    judged,
)
from fullwire.errors import DamagedInput, UsageError
from fullwire.run.run import SIZE_UNKNOWN, Run
from fullwire.simulation.forecast import Forecast, Forecaster, forecaster
from fullwire.timeline.account import Account, Part, account, nothing
from fullwire.timeline.ahead import ahead_evidence
from fullwire.timeline.breakdown import RankBreakdown
from fullwire.timeline.carried import carried_evidence
from fullwire.timeline.nccl import nccl_evidence
from fullwire.timeline.steadiness import change_words
from fullwire.timeline.transfers import holds_times, recorded_ranks, stands_for_all, world
from fullwire.timeline.utilization import Evidence, evidence, missing_tables
from fullwire.units import show_bytes, show_ranks, show_rate, show_time

BETWEEN = 0.05  # of the time from the first step to the last: more of it outside of steps is said
CLOCKS_DIFFER = 0.01  # of the step: clocks that are known better than this change no answer
_CLOCKS_DISAGREE = "ranks' clocks disagree, and waiting is uncertain by as much"
_UNNAMED_GROUPS = (
    "the traces do not name groups of ranks, so collectives of several were taken for one, and "
    "waiting is uncertain by as much"
)
_TRANSFER = (Part.LINE_RATE, Part.LATENCY, Part.TRANSPORT, Part.UNEXPLAINED)
BEYOND_LINE_RATE = 1.05  # transfers faster than this many line rates: it is not the right rate


@dataclass(frozen=True, eq=False, kw_only=True)
class Explanation:
    """The account of a job's step, what it amounts to, and what it rests on."""

    verdict: Verdict
    step_s: float  # the mean: parts add up to nothing else
    baseline_step_s: float
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
    warnings: tuple[str, ...]
    detail: Account
    line_rates_bps: Mapping[int, float]  # of each rank's link, as far as known
    predictor: Forecaster | None  # the job ready to be asked, where it can be predicted

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
    baseline_s, inflation_s = _baseline(job, found, baseline)
    given_s = None if baseline is None else baseline_s
    samples = (
        *nccl_evidence(job),
        *evidence(job, found.lines, rate_bps),
        *carried_evidence(job, rate_bps),
        *_of_copies(found),
        *ahead_evidence(job, found),
    )
    if not found.step_s:
        samples += tuple(_of_schedule(job))
    case = Case(
        run=job, account=found, inflation_s=inflation_s, evidence=samples, rate_bps=rate_bps
    )
    is_told = found.step_s > 0 and not case.lost and (baseline is not None or computes(case))
    predictor, why_not = _forecaster(case, rate_bps, [opened(each).run for each in calibrate])
    helpful = _helpful(case, predictor)
    full = None if predictor is None else _at_full_utilization(given_s, predictor)
    case = replace(case, faster_link=_faster_link(helpful))
    return Explanation(
        verdict=judged(case),
        step_s=found.step_s,
        baseline_step_s=baseline_s,
        is_estimated=baseline is None,
        scaling_factor=baseline_s / found.step_s if is_told and baseline_s else None,
        account=parts,
        compute_inflation_s=inflation_s,
        ranks=found.breakdowns,
        evidence=samples,
        break_even=None if predictor is None else break_even(predictor, THRESHOLD),
        fixes=() if helpful is None else _against(given_s, helpful),
        fixes_from_s=None if helpful is None else helpful.from_s,
        full=full,
        warnings=(
            *_warnings(case, baseline is None, rate_bps),
            *_about_baseline(found, given_s),
            *_about_median(found, predictor, helpful),
            *_about_rate(job, predictor, full),
            *why_not,
        ),
        detail=found,
        line_rates_bps=rate_bps,
        predictor=predictor,
    )


def _of_copies(found: Account) -> Iterator[Evidence]:
    """Say what of the host's part is no idle device, but one that copies."""
    copies_s = found.copies_s
    has_devices = any(each.compute_s for each in found.breakdowns)
    if has_devices and copies_s > NOTABLE * found.step_s:
        yield Evidence(
            name="device_copies",
            value=copies_s / found.step_s,
            sentence=f"Devices copied or filled memory, and computed nothing meanwhile, for "
            f"{show_time(copies_s)} of a step; that is counted to the host.",
        )


def _of_schedule(run: Run) -> Iterator[Evidence]:
    """Say what a schedule holds, all that there is where nothing lasts."""
    table, ranks = run.collectives, len(np.unique(run.collectives.rank))
    said = []
    for op in dict.fromkeys(table.op.tolist()):
        mine = table.rows(table.op == op)
        size = int(mine.bytes.sum()) // ranks
        amount = f" with {show_bytes(size)}" if size else ""
        unknown = ", some sizes unknown" if (mine.dtype == SIZE_UNKNOWN).any() else ""
        said.append(f"{op} {len(mine) / ranks:,.0f}{amount}{unknown}")
    if said:
        yield Evidence(
            name="schedule",
            value=len(table) / ranks,
            sentence=f"A rank has {len(table) / ranks:,.0f} collectives: {'; '.join(said)}.",
        )


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
    return tuple(replace(fix, scaling_factor=times * fix.scaling_factor) for fix in helpful.found)


def _at_full_utilization(given_s: float | None, predictor: Forecaster) -> Forecast:
    found = predictor.ask(transports=(predictor.full(),))
    return found if given_s is None else replace(found, scaling_factor=given_s / found.step_s)


def _forecaster(
    case: Case, rate_bps: Mapping[int, float], calibrate: Sequence[Run]
) -> tuple[Forecaster | None, tuple[str, ...]]:
    """Make the job ready for predictions, or say why there are none."""
    if world(case.run) > 1 and computes(case) and not communicates(case):
        return None, ("No fixes are predicted: nothing was communicated in its steps.",)
    try:
        return forecaster(case.run, min(rate_bps.values(), default=None), calibrate), ()
    except (UsageError, DamagedInput) as error:
        return None, (f"No fixes are predicted: {error}.",)


def line_rates(run: Run, bandwidth: str | float | None = None) -> dict[int, float]:
    """Return the line rate of each rank's link: as the run knows it, or as it was given."""
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


def _baseline(run: Run, found: Account, baseline: RunLike | None) -> tuple[float, float | None]:
    """Return T1, and how much longer computation takes than there; None where T1 is estimated."""
    parts = found.parts_s
    if baseline is None:
        # Input and host are there with one worker too: what scaling loses is the rest.
        own = (Part.COMPUTE, Part.INPUT, Part.HOST)
        return sum(parts[part.key] for part in own), None
    alone = opened(baseline)
    refuse_other_work(alone.run, run)
    if world(alone.run) != 1:
        raise UsageError(f"baseline: expected a run of one worker, got one of {world(alone.run)}")
    by_one = account(alone.run, {}, alone.parts())
    if by_one.is_whole_trace or not by_one.step_s:
        raise UsageError("baseline: it has no marked steps, so it does not say how long one takes")
    return by_one.step_s, parts[Part.COMPUTE.key] - by_one.parts_s[Part.COMPUTE.key]


def _warnings(case: Case, is_estimated: bool, rate_bps: Mapping[int, float]) -> Iterator[str]:
    run, found = case.run, case.account
    if run.provenance.basis == "modelled":
        yield "This rests on modelled times, not on measured ones."
    if communicates(case) and not computes(case):
        yield "No computation is in this run: T1 is the time without traffic, and may be longer."
    for sentence in run.missing:
        yield f"The run is partial: {sentence}."
    if run.facts.warnings is not None:
        yield f"Where it was recorded: {run.facts.warnings}."
    if run.facts.remarks is not None:
        yield f"As it was read: {run.facts.remarks}."
    if not found.step_s:
        return
    yield from _steps_left_out(found)
    if changed := change_words(found):
        yield f"The job changed midway: {changed}; the account is of both."
    yield from _between_steps(run)
    yield from _ranks_left_out(run, found)
    if is_estimated and world(run) > 1:
        yield "T1 is estimated from this run's computation, input and host; --baseline gives it."
    if len(run.collectives) and world(run) > 1:
        yield from _about_transfers(case, rate_bps)
        yield from _about_samples(run)
        yield from about_others(run)


def _steps_left_out(found: Account) -> Iterator[str]:
    if found.is_whole_trace:
        yield "No step is marked: the whole trace is taken for one."
    left_out = int((~found.is_typical).sum())
    if left_out:
        all_ns = found.parts_ns.sum(axis=(0, 2))
        share = float(all_ns[~found.is_typical].sum() / all_ns.sum())
        yield (
            f"{left_out} of {len(found.steps)} steps are left out as warm-up or exceptions; "
            f"they are {share:.0%} of the time."
        )


def _between_steps(run: Run) -> Iterator[str]:
    """Say how much of the time lies between steps, as evaluation or a checkpoint may."""
    marks = run.spans.rows((run.spans.lane == "host") & (run.spans.name == "step"))
    ranks, place = np.unique(marks.rank, return_inverse=True)
    first_ns = np.full(len(ranks), marks.start_ns.max(initial=0))
    last_ns = np.full(len(ranks), marks.end_ns.min(initial=0))
    np.minimum.at(first_ns, place, marks.start_ns)
    np.maximum.at(last_ns, place, marks.end_ns)
    whole_ns = int((last_ns - first_ns).sum())
    between = 1 - int((marks.end_ns - marks.start_ns).sum()) / max(whole_ns, 1)
    if len(marks) and between > BETWEEN:
        yield (
            f"{between:.0%} of the time from the first step to the last lies between steps, "
            "and is in no step's account."
        )


def _faster_link(helpful: Fixes | None) -> tuple[str, float] | None:
    """Return the next link on sale that would help, and what share of the step it would gain."""
    links = [] if helpful is None else [fix for fix in helpful.found if fix.kind == "link"]
    if helpful is None or not links:
        return None
    next_one = max(links, key=lambda fix: fix.step_s)
    return next_one.change, 1 - next_one.step_s / helpful.from_s


def _about_median(
    found: Account, predictor: Forecaster | None, helpful: Fixes | None
) -> Iterator[str]:
    """Say where the step that is accounted for is not the one that is predicted from."""
    if predictor is None or helpful is None or not found.step_s:
        return
    if abs(found.step_s / predictor.measured_s - 1) > NOTABLE:
        is_mean = helpful.from_s > predictor.measured_s
        what = "predictions but what would help" if is_mean else "predictions"
        yield (
            f"The account is of the mean step, {show_time(found.step_s)}; {what} start from "
            f"the median step, {show_time(predictor.measured_s)}."
        )


def _about_rate(run: Run, predictor: Forecaster | None, full: Forecast | None) -> Iterator[str]:
    """Say that a line rate which was given cannot be right, if a full line would take longer."""
    if predictor is None or full is None or run.facts.line_rate_bps is not None:
        return
    if full.step_s > BEYOND_LINE_RATE * predictor.measured_s:
        yield (
            f"At {show_rate(predictor.rate_bps)} even links used to the full would make a step of "
            f"{show_time(full.step_s)}: it is not the rate of the links that this job used, and "
            "what is predicted from it is as wrong."
        )


def _about_baseline(found: Account, given_s: float | None) -> Iterator[str]:
    if given_s is not None and given_s > found.step_s:
        yield (
            f"The baseline's step, {show_time(given_s)}, is longer than this job's: it can hardly "
            "be the same work on one worker."
        )


def _ranks_left_out(run: Run, found: Account) -> Iterator[str]:
    without = sorted(set(recorded_ranks(run).tolist()) - set(found.ranks))
    if without:
        yield (
            f"{len(without)} ranks share no step with the others and are not in the account: "
            f"{show_ranks(without)}."
        )
    recorded = len(recorded_ranks(run))
    if recorded < world(run) and not stands_for_all(run):
        yield f"{recorded} of {world(run)} ranks are here: transfer cannot be told from waiting."


def _about_transfers(case: Case, rate_bps: Mapping[int, float]) -> Iterator[str]:
    found, parts = case.account, case.account.parts_s
    told_s = sum(parts[part.key] for part in _TRANSFER) - found.untold_s
    if not rate_bps and told_s > 0:
        yield "The line rate is unknown, so transfers are unexplained: --bandwidth gives it."
    late_ends = case.run.facts.late_ends or 0
    if late_ends:
        yield f"{late_ends} collectives ended at the latest when the program had waited for them."
    if found.latency == "none" and told_s > 0:
        yield "Latency counts as 0: there are no small collectives, and no fact says what it is."
    if found.beyond_line_rate > BEYOND_LINE_RATE:
        yield (
            f"Collectives took 1/{found.beyond_line_rate:.2f} of what the line rate allows: it is "
            "not the rate of the links that they used."
        )
    uncertain_s = max((s for _, s in case.run.facts.clock_uncertainty_s or ()), default=0.0)
    if uncertain_s > CLOCKS_DIFFER * case.step_s:
        yield (
            f"Ranks' clocks are known to {show_time(uncertain_s)} only, and who waited for whom is "
            "as uncertain."
        )
    if found.clock_error_ns > CLOCKS_DIFFER * case.step_s * 1e9:
        is_unnamed = any(
            str(name).startswith("stream ") for name in set(case.run.collectives.group)
        )
        yield (
            f"Collectives end up to {show_time(found.clock_error_ns * 1e-9)} before their last "
            f"rank issued them: {_UNNAMED_GROUPS if is_unnamed else _CLOCKS_DISAGREE}."
        )


def _about_samples(run: Run) -> Iterator[str]:
    missing = missing_tables(run)
    if missing and run.provenance.origin == "measured":
        yield f"No samples of {', '.join(missing)}: there is no evidence from them."
