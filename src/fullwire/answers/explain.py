"""Where did every lost second go, and is it the network?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import nan
from typing import Any, NamedTuple

import numpy as np

from fullwire.answers.believable import check_scaling, check_steps, check_times
from fullwire.answers.compare import refuse_other_work
from fullwire.answers.conditions import rate
from fullwire.answers.opening import RunLike, many, opened, with_line_rate
from fullwire.answers.samples_to_goal import about_batch
from fullwire.answers.subjects import (
    check_calibrating,
    refuse_unseen,
    refuse_without_own_step,
)
from fullwire.clusters.cluster import Torus
from fullwire.collectives.cost import Floats
from fullwire.collectives.registry import with_formula
from fullwire.display import Bar, Result, html_account, html_table
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
    about_other_steps,
    about_rate,
    notes,
)
from fullwire.findings.scaling import (
    Estimated,
    NoMoreWithFullLinks,
    ReplayedWithFullLinks,
    ScalingFactor,
    WithFullLinks,
    turning,
)
from fullwire.findings.sureness import sureness
from fullwire.findings.verdicts import (
    Colour,
    besides,
    drawn_parts,
    kind_of,
    near_kinds,
    verdict_kinds,
)
from fullwire.fixes import Fix, Fixes, fixes, fixes_by_account
from fullwire.run.facts import Facts
from fullwire.run.placement import shares_one_host, sums_on_processors
from fullwire.run.run import Provenance, Run
from fullwire.run.usual import Alone
from fullwire.simulation.forecast import Forecast, Forecaster, forecaster
from fullwire.simulation.goodput import Goodput, Membership, membership, observed
from fullwire.simulation.sweep import sweep
from fullwire.simulation.transport import FullTransport, MeasuredTransport
from fullwire.timeline.account import Account, Part, account, nothing
from fullwire.timeline.alone import REPEATS, alone, is_recorded_alone
from fullwire.timeline.breakdown import RankBreakdown
from fullwire.timeline.passes import equal_work, passes_of_step
from fullwire.timeline.steadiness import judged_account
from fullwire.timeline.transfers import holds_times, recorded_ranks, world
from fullwire.units import show_rate, show_time
from fullwire.words import sentence, sentences, setting

_UNNAMED = Colour(light="#8c96a3", dark="#8c96a3")  # Of a part that lacks its own colour.
_POINTS = 600  # Rates that are tried, two of them 1.5 % apart.
_FAR = 100.0  # Times slower and faster than now: nobody asks for rates beyond.
_MOST_WORKERS = 4096
_SIZES = 100  # Sizes of a job that are tried first.


OF_ONE = (Part.COMPUTE, Part.INPUT, Part.HOST)  # Parts of a step that one worker has as well.


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict on the account, and its reasons, as findings that become sentences when read."""

    kind: str  # A key of `fullwire.findings.verdicts.verdict_kinds()`.
    threshold: float
    findings: tuple[Finding, ...]  # The verdict itself, then the findings beside it.
    why: tuple[Finding, ...]
    needed: tuple[Finding, ...]  # The missing data, if the kind is unknown.
    near: tuple[str, ...] = ()  # The kinds that a repeat may give as well.
    sureness: Finding | None = None  # How sure it is, and why; None if the kind is unknown.

    @property
    def sentence(self) -> str:
        """Return the verdict in words."""
        return " ".join(sentences(self.findings))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that the verdict names, such as late ones."""
        return tuple(getattr(self.findings[0], "ranks", ()))

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return the reasons, a clause each."""
        return sentences(self.why)

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the missing data that would settle the verdict, a clause each."""
        return sentences(self.needed)


def judged(case: Case) -> Verdict:
    """Return the verdict on a case."""
    kind, why = kind_of(case)
    return Verdict(
        kind=kind.key,
        threshold=THRESHOLD,
        findings=(kind.says(case), *besides(case, kind)),
        why=why,
        needed=tuple(kind.lacks(case)),
        near=near_kinds(case, kind),
        sureness=sureness(case, kind.key, near_kinds(case, kind)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """The link rate or the number of workers at which the verdict changes, if any."""

    bandwidth_bps: float | None
    workers: int | None
    line_takes_over_bps: float | None  # Below it the line is slower than the transport.
    is_limited: bool  # Now.
    finding: Finding

    @property
    def sentence(self) -> str:
        """Return the break-even in words."""
        return sentence(self.finding)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Explanation(Result):
    """The account of a job's step, the verdict on it, and the data of both."""

    verdict: Verdict
    step_s: float  # The time of a step (`run/usual.py`), which is the sum of the parts.
    baseline_step_s: float
    baseline_between_s: tuple[float, float]  # Encloses T1 in 95 of 100 cases.
    is_estimated: bool  # The baseline is the step of no recording of one worker.
    scaling_factor: float | None  # None if the run lacks times or computation.
    is_of_all_steps: bool  # The verdict and the fixes: few steps hold the largest loss.
    account: Mapping[str, float]  # Seconds per step, adding up to step_s.
    compute_inflation_s: float | None
    passes: float | None  # Of a step; None where they are unknown.
    ranks: tuple[RankBreakdown, ...]
    evidence: tuple[Evidence, ...]
    break_even: BreakEven | None
    fixes: tuple[Fix, ...]
    fixes_from_s: float | None  # The step that fixes start from, if there are any.
    full: Forecast | None  # The same job, if its links were used fully.
    notes: tuple[Finding, ...]  # The notes on the explanation.
    detail: Account
    facts: Facts  # Of the run.
    provenance: Provenance
    goodput: Goodput | None  # Of an elastic job.
    membership: Membership | None  # The workers of an elastic job over time.
    line_rates_bps: Mapping[int, float]  # By rank, for the links whose rate is known.
    predictor: Forecaster | None  # The job ready for predictions, if they are possible.

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return the notes on the explanation, a sentence each."""
        return sentences(self.notes)

    @property
    def predicted_from_s(self) -> float:
        """Return the T1 to which predictions refer: a baseline's, or that of their step."""
        if self.predictor is None or not self.is_estimated:
            return self.baseline_step_s
        return self.predictor.alone_s

    @property
    def median_step_s(self) -> float | None:
        """Return the step that predictions replay, if there are any; usually it is `step_s`."""
        return None if self.predictor is None else self.predictor.measured_s

    @property
    def replayed_s(self) -> float | None:
        """Return the step that predictions replay, if it differs from the account's."""
        step_s = self.median_step_s
        return None if step_s is None or abs(self.step_s / step_s - 1) <= NOTABLE else step_s

    @property
    def scaling(self) -> Finding | None:
        """Return the scaling factor, with T1 and the effect of full links, if it is known."""
        if self.scaling_factor is None:
            return None
        full: Finding | None = None
        if self.full is not None:
            step_s, factor = self.replayed_s, self.full.scaling_factor
            now = self.scaling_factor if step_s is None else self.predicted_from_s / step_s
            if factor <= now:
                full = NoMoreWithFullLinks()
            elif step_s is None:
                full = WithFullLinks(factor=factor)
            else:
                full = ReplayedWithFullLinks(factor=factor, now=now)
        longer_s = self.compute_inflation_s
        return ScalingFactor(
            factor=self.scaling_factor,
            alone_s=self.baseline_step_s,
            estimate=self._estimate(),
            full=full,
            longer_s=longer_s if longer_s is not None and longer_s > 0 else None,
        )

    def _estimate(self) -> Finding | None:
        if not self.is_estimated:
            return None
        low_s, high_s = self.baseline_between_s
        crowding = self.detail.crowding
        source = crowding.source if crowding.is_told else ""
        is_between = bool(source) or self.detail.untold_crowding_s > 0
        return Estimated(source=source, low_s=low_s, high_s=high_s, is_between=is_between)

    def _in_short(self) -> Iterator[str]:
        yield self.verdict.sentence
        if self.scaling is not None:
            yield sentence(self.scaling)
        if self.fixes:
            best = self.fixes[0]
            step = f"{show_time(best.step_s)} a step"
            yield f"best of {len(self.fixes)} fixes: {sentence(best)}, {step}"

    def _tables(self) -> Mapping[str, Mapping[str, Any]]:
        return {
            "account": {
                "part": list(self.account),
                "time_s": list(self.account.values()),
                "share": [time_s / self.step_s for time_s in self.account.values()]
                if self.step_s
                else [nan] * len(self.account),
            },
            "ranks": {
                field.name: [getattr(rank, field.name) for rank in self.ranks]
                for field in fields(RankBreakdown)
            },
            "fixes": {
                "change": list(sentences(self.fixes)),
                "setting": [setting(fix) for fix in self.fixes],
                "kind": [fix.kind for fix in self.fixes],
                "risk": [fix.risk for fix in self.fixes],
                "step_s": [fix.step_s for fix in self.fixes],
                "low_s": [fix.low_s for fix in self.fixes],
                "high_s": [fix.high_s for fix in self.fixes],
                "scaling_factor": [fix.scaling_factor for fix in self.fixes],
            },
            "evidence": {
                "name": [figure.key for figure in self.evidence],
                "value": [figure.value for figure in self.evidence],
                "sentence": list(sentences(self.evidence)),
            },
        }

    def _picture(self) -> str:
        if not self.step_s:
            return ""
        blamed = verdict_kinds()[self.verdict.kind].part
        drawn = drawn_parts()
        bars = [
            Bar(drawn[part].label, time_s, colour.light, is_blamed=part == blamed)
            for part, time_s in self.account.items()
            if time_s > 0 and (colour := drawn[part].colour or _UNNAMED)
        ]
        fixes = self._tables()["fixes"]
        shown = {name: fixes[name] for name in ("change", "step_s", "scaling_factor", "setting")}
        return html_account(bars) + (html_table(shown) if self.fixes else "")


def explain(
    run: RunLike,
    *,
    baseline: RunLike | None = None,
    bandwidth: str | float | None = None,
    calibrate: RunLike | Sequence[RunLike] = (),
) -> Explanation:
    """Explain where the time of a step goes, in seconds, and name the limit of the job.

    - `run`: a run, or the path of one or of a trace.
    - `baseline`: a run of the same work on one worker. Without it, T1 is estimated.
    - `bandwidth`: the line rate of the links, `"10Gbps"` or bits per second, if a run does not
      know its own.
    - `calibrate`: other runs of the same cluster, from which predictions learn its transport.

        found = fw.explain("job.run")
        found.verdict.sentence
        found.to_pandas("fixes")
    """
    asked = opened(run)
    job, rate_bps = asked.run, line_rates(asked.run, bandwidth)
    found = account(job, rate_bps, asked.parts()) if _is_to_account(job) else nothing()
    found, t1, inflation_s, left_s, one = _beside(job, found, baseline)
    baseline_s = t1.time_s
    judged_by, told = judged_account(found, THRESHOLD), evidence(job, found, rate_bps)
    given_s = None if baseline is None else baseline_s
    case = Case(run=job, account=judged_by, inflation_s=left_s, evidence=told, rate_bps=rate_bps)
    parts, turns = judged_by.parts_s, None
    is_told = found.step_s > 0 and not case.lost and not case.unseen
    is_told = is_told and (baseline is not None or computes(case))
    given_bps = None if bandwidth is None else rate(bandwidth)
    others = [with_line_rate(opened(run).run, given_bps) for run in many(calibrate)]
    check_calibrating(others, job)
    predictor, why_not = _forecaster(case, rate_bps, others, t1)
    if (helpful := _helpful(case, predictor)) is not None:
        link = helpful.next_link
        gain = 0.0 if link is None else 1 - link.step_s / helpful.from_s
        case = replace(case, faster_link=link, gain=gain, gains_by_sooner=helpful.sooner)
    verdict = judged(case)
    # Full utilization, as `whatif --transport full` predicts it: packet headers are no part of it.
    full = None if predictor is None else predictor.ask(transports=(FullTransport(),))
    if predictor is not None:
        waited = case.share(parts[Part.STRAGGLER.key])
        lost = 1 - case.share(sum(parts[part.key] for part in OF_ONE))
        turns = break_even(predictor, THRESHOLD, waited=waited, lost=lost)
    explained = Explanation(
        verdict=verdict,
        step_s=found.step_s,
        baseline_step_s=baseline_s,
        baseline_between_s=(t1.low_s, t1.high_s),
        is_estimated=one is None,
        scaling_factor=baseline_s / found.step_s if is_told and baseline_s else None,
        is_of_all_steps=judged_by is not found,
        account=found.parts_s,
        compute_inflation_s=inflation_s,
        passes=passes_of_step(job),
        ranks=found.breakdowns,
        evidence=told,
        break_even=turns,
        fixes=() if helpful is None else helpful.first_for(verdict.kind),
        fixes_from_s=None if helpful is None else helpful.from_s,
        full=full,
        notes=(
            *notes(case, is_estimated=one is None, rate_bps=rate_bps),
            *about_baseline(job, found, one, given_s, left_s),
            *about_other_steps(found, judged_by, predictor),
            *about_host(job, given_bps, is_told=bool(given_s) or found.crowding.is_told),
            *about_rate(job, predictor),
            *about_batch(job),
            *why_not,
        ),
        detail=found,
        facts=job.facts,
        provenance=job.provenance,
        goodput=observed(job.events),
        membership=membership(job.events),
        line_rates_bps=rate_bps,
        predictor=predictor,
    )
    return _believed(job, explained)


def _believed(run: Run, explanation: Explanation) -> Explanation:
    """Return an explanation after a check of its numbers; `_forecaster` checks predictions."""
    source, workers = run.place, world(run)
    check_times(source, step=explanation.step_s, baseline=explanation.baseline_step_s)
    check_times(source, **dict(explanation.account))
    check_steps(source, step_of_a_kind=[kind.step_s for kind in explanation.detail.by_kind()])
    check_scaling(source, workers, explanation.scaling_factor)
    predicted = [fix.forecast for fix in explanation.fixes] + (
        [explanation.full] if explanation.full else []
    )
    check_steps(source, predicted_step=[forecast.step_s for forecast in predicted])
    check_times(source, low_end=[forecast.low_s for forecast in predicted])
    check_scaling(source, workers, [forecast.scaling_factor for forecast in predicted])
    return explanation


def _is_to_account(run: Run) -> bool:
    """Say whether a run has an account; logs and schedules hold no times, and are still valid."""
    if holds_times(run):
        return True
    is_told = bool(len(run.collectives)) or bool(nccl_evidence(run))
    if run.provenance.origin == "imported" and is_told:
        return False
    if len(recorded_ranks(run)):
        raise UsageError(f"{run.place}: its steps take no time at all")
    return True  # The account then names the missing data.


def _helpful(case: Case, predictor: Forecaster | None) -> Fixes | None:
    """Return the fixes that help, as predicted, or as far as the account alone supports them."""
    is_told = computes(case) and enough_steps(case) and not case.lost and not case.unseen
    if predictor is not None:
        found = fixes(case.run, predictor, case.account)
    elif case.account.is_whole_trace or not is_told:
        return None
    else:
        found = fixes_by_account(case.run, case.account)
    return found.of_one_worker() if is_recorded_alone(case.run) else found


def _forecaster(
    case: Case, rate_bps: Mapping[int, float], calibrate: Sequence[Run], t1: Alone
) -> tuple[Forecaster | None, tuple[Finding, ...]]:
    """Return the job ready for predictions, or the reason why there are none."""
    if world(case.run) > 1 and computes(case) and not communicates(case):
        return None, (NothingToPredictFrom(),)
    try:
        refuse_unseen(case.run.place, case.run)
        predictor = forecaster(
            case.run,
            min(rate_bps.values(), default=None),
            calibrate,
            alone=t1,
        )
        if predictor is not None:
            refuse_without_own_step(case.run.place, predictor.subject)
            # An impossible step stops predictions only: its account may still be true.
            now, source = predictor.ask(), case.run.provenance.source
            check_steps(
                source,
                median_step=predictor.measured_s,
                step_of_one_worker=predictor.alone_s,
                predicted_step=now.step_s,
            )
            check_scaling(source, world(case.run), now.scaling_factor)
    except (UsageError, DamagedInput) as error:
        return None, (NoFixesPredicted(why=str(error)),)
    return predictor, ()


def line_rates(run: Run, bandwidth: str | float | None = None) -> dict[int, float]:
    """Return the line rate of each rank's link, as the run knows it, or as it was given.

    Ranks that share a host have no line between them, so the result is then empty.
    """
    if shares_one_host(run):
        return {}
    known = run.facts.line_rate_bps
    given = None if bandwidth is None else rate(bandwidth)
    if known is not None:
        if given is not None and given != known:
            raise UsageError(
                f"line rate: expected {show_rate(known)}, the line rate in this run, "
                f"got {show_rate(given)}"
            )
        given = known
    if given is None:
        return {}
    rates = dict.fromkeys(recorded_ranks(run).tolist(), given)
    others = {int(rank): rate_bps for rank, rate_bps in run.facts.other_line_rates_bps or ()}
    return rates | others


class _Beside(NamedTuple):
    """The account of a job beside T1."""

    account: Account
    t1: Alone
    longer_s: float | None  # Computation beyond that of T1; None where T1 is estimated.
    left_s: float | None  # Of it, what is no contention.
    one: Run | None  # The run whose step is T1, if there is one: the baseline, or the job itself.


def _beside(run: Run, usual: Account, baseline: RunLike | None) -> _Beside:
    """Return T1, and the account with what it tells of contention."""
    estimated = alone(run, usual)
    if baseline is None:
        return _Beside(usual, estimated, None, None, run if is_recorded_alone(run) else None)
    one = opened(baseline)
    refuse_other_work(one.run, run)
    if world(one.run) != 1:
        raise UsageError(f"baseline: expected a run of one worker, got one of {world(one.run)}")
    work = equal_work([run], [one.run])
    pairs = (("{:.4g} passes a step", work.passes), ("{} samples a pass", work.samples))
    for told, pair in pairs:
        if pair is not None:
            job, got = map(told.format, pair)
            raise UsageError(f"baseline: expected the same work as in the job, {job}, got {got}")
    by_one = account(one.run, {}, one.parts())
    if by_one.is_whole_trace or not by_one.step_s:
        raise UsageError("baseline: expected marked steps, got a run without any")
    if by_one.step_s > world(run) * usual.step_s > 0:
        raise UsageError(
            f"baseline: expected a step of at most {world(run)} times the job's "
            f"{show_time(usual.step_s)}, for one worker does no more than all of them, got "
            f"{show_time(by_one.step_s)}. Record both with as many threads (OMP_NUM_THREADS), on "
            "processors that other programs use as little"
        )
    lengths_s = by_one.parts_ns.sum(axis=2).mean(axis=0) * 1e-9
    lengths_s = by_one.kinds.as_mean(by_one.steps, lengths_s)[by_one.is_kept]
    by_chance = 2 * float(np.std(lengths_s)) / by_one.step_s / len(lengths_s) ** 0.5
    off = math.hypot(REPEATS, by_chance)
    between_s = by_one.step_s * max(1 - off, 0.0), by_one.step_s * (1 + off)
    # Where ranks share processors, all computing beyond T1 is contention. Elsewhere only
    # computing beside communication can be.
    shares = sums_on_processors(run) and (run.facts.machines or world(run)) < world(run)
    beside_s = float(usual.overlapped_ns[:, usual.is_typical].mean()) * 1e-9
    one_s = by_one.parts_s[Part.COMPUTE.key]
    found_with = usual.beside_one_worker(one_s, math.inf if shares else beside_s)
    found_with = replace(found_with, baseline_s=by_one.step_s)
    longer_s, left_s = (
        max(each.parts_s[Part.COMPUTE.key] - one_s, 0.0) for each in (usual, found_with)
    )
    # Of steps of several kinds, each kind has its share of T1, as the job itself tells it.
    t1 = Alone(
        by_one.step_s,
        *between_s,
        input_s=by_one.parts_s[Part.INPUT.key],
        host_s=by_one.parts_s[Part.HOST.key],
    )
    parts = [each.time_s / (estimated.time_s or 1.0) for each in estimated.of_kinds]
    of_kinds = tuple(Alone(part * t1.time_s, part * t1.low_s, part * t1.high_s) for part in parts)
    return _Beside(found_with, t1._replace(of_kinds=of_kinds), longer_s, left_s, one.run)


def break_even(
    job: Forecaster, threshold: float, waited: float | None = None, lost: float | None = None
) -> BreakEven:
    """Find where the share of the step that communication costs crosses the threshold.

    `waited` is the share of a step that ranks waited for late ones, by the account. `lost` is the
    share of a step that the job loses to having several workers, by the account. If the account and
    the prediction are on two sides of the threshold, the prediction is moved to the account.
    """
    rates_bps = np.geomspace(job.rate_bps / _FAR, job.rate_bps * _FAR, _POINTS)
    [now] = _lost(job)
    is_apart = lost is not None and (lost >= threshold) != bool(now >= threshold)
    away = lost - float(now) if lost is not None and is_apart else 0.0
    is_limited = bool(now + away >= threshold)
    by_rate = _lost(job, bandwidth_bps=tuple(rates_bps.tolist())) + away
    enough = np.flatnonzero(by_rate < threshold)
    rate_bps = float(rates_bps[enough[0]]) if len(enough) and enough[0] > 0 else None
    # The smallest job that loses so much is found among some sizes, then among all next to them. An
    # algorithm that has no formula for any number of workers needs all devices of its nodes.
    cluster, unit = job.grid.cluster, 1
    if cluster is not None and not set(job.grid.algorithms) <= set(with_formula("allreduce")):
        unit = cluster.devices_per_node
    workers, sizes = None, np.geomspace(max(2, unit), _MOST_WORKERS, _SIZES).astype(np.int64)
    sizes = np.unique(sizes // unit * unit)
    if cluster is not None and isinstance(cluster.network, Torus):
        sizes = sizes[:0]  # The number of its devices is fixed.
    for _ in ("some", "all"):
        if not len(sizes):
            break
        of_sizes = _lost(job, workers=tuple(sizes.tolist())) + away
        losing = np.flatnonzero(of_sizes >= threshold)
        if not len(losing):
            workers = None
            break
        workers, below = int(sizes[losing[0]]), int(sizes[max(losing[0] - 1, 0)])
        sizes = np.arange(below, workers + 1, unit)
    [transport] = job.grid.transports
    line_bps = None
    if isinstance(transport, MeasuredTransport) and not job.subject.is_on_devices:
        [crowd] = job.subject.crowd([job.workers])
        line_bps = transport.line_limits_up_to_bps(crowd)
        if line_bps >= _FAR * job.rate_bps:
            line_bps = None  # The processors' work is too small to have been seen.
    told_bps = line_bps
    if line_bps is not None and line_bps > job.rate_bps:
        # The rate is that of long messages. Short ones may gain nothing by any faster line.
        far = by_rate[-1] - away
        told_bps = line_bps if 1 - now < (1 - NOTABLE) * (1 - far) else None
    step = job.subject.step
    is_waiting = step.waiting_ns >= threshold * (step.step_ns + step.waiting_ns)
    is_waiting &= waited is None or waited >= threshold  # Else ranks scatter, but none waits.
    finding = turning(
        is_limited=is_limited,
        is_waiting=is_waiting,
        rate_bps=rate_bps,
        workers=workers,
        line_bps=told_bps,
        threshold=threshold,
    )
    return BreakEven(
        bandwidth_bps=rate_bps,
        workers=workers,
        line_takes_over_bps=line_bps,
        is_limited=is_limited,
        finding=finding,
    )


def _lost(job: Forecaster, **axis: object) -> Floats:
    grid = replace(job.grid, **axis)  # type: ignore[arg-type]  # an axis of the grid
    return np.asarray(1 - sweep([job.subject], grid)["scaling_factor"])
