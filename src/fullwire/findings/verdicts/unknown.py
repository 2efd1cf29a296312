"""The verdict where the data cannot decide, with the observations and the missing data."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fullwire.findings.case import (
    FEWEST_STEPS,
    Case,
    communicates,
    computes,
    enough_steps,
    is_alone,
    is_transfer_alone,
    lacks_ranks,
)
from fullwire.findings.finding import Amount, Evidence, Finding
from fullwire.findings.held_back import set_up_short
from fullwire.findings.verdicts import Colour, VerdictKind, register
from fullwire.run.run import SIZE_UNKNOWN
from fullwire.timeline.account import Part
from fullwire.timeline.breakdown import UNTOLD as UNTOLD_SHARE
from fullwire.timeline.transfers import recorded_ranks, world
from fullwire.units import shown

_NOTABLE = 0.05  # of the step: a rank that spends so much more than others is late
_EXPOSED = (Part.LINE_RATE, Part.LATENCY, Part.TRANSPORT, Part.UNEXPLAINED)


class NotTold(Finding):
    """The run holds no times, or some of it was not seen or cannot be read."""

    template = "{falls_short:?{falls_short} }What limits the job is not told. Missing: {missing:;}."

    falls_short: Evidence | None
    missing: tuple[Finding, ...]


class AloneInTheJob(Finding):
    """The job had one worker, so the network takes no part in it."""

    template = (
        "This job had one worker, and a network has no part in that: computation is "
        "{computing:.1%} of its step. Missing: {missing:;}."
    )

    computing: float
    missing: tuple[Finding, ...]


class TransfersAlone(Finding):
    """Every rank had arrived, so the loss is the network; the data cannot say which part of it."""

    template = (
        "Exposed transfers take {exposed} ({exposed.share:.1%}). Every rank had come, so this is "
        "the network and no late rank. Whether bandwidth, transport or overlap is "
        "short, this run cannot tell. Missing: {missing:;}."
    )

    exposed: Amount
    missing: tuple[Finding, ...]


class TransfersAndALateRank(Finding):
    """Transfers are exposed, and a rank that does more than the others may have delayed them."""

    template = (
        "Exposed transfers take {exposed} ({exposed.share:.1%}), and one rank spends {late_s:time} "
        "more of a step by itself than the others. A late rank delays the transfers of other "
        "buckets too. Whether the network or that rank is short, this run cannot tell. "
        "Missing: {missing:;}."
    )

    exposed: Amount
    late_s: float
    missing: tuple[Finding, ...]


class NothingCommunicated(Finding):
    """Several workers computed, but their steps hold no communication."""

    template = (
        "{falls_short:?{falls_short} }The steps hold no communication. Either each of the "
        "{workers} workers trains by itself, or their communication was not recorded. "
        "Missing: {missing:;}."
    )

    falls_short: Evidence | None
    workers: int
    missing: tuple[Finding, ...]


class CannotTell(Finding):
    """All communication is hidden, and no rule decides."""

    template = (
        "{falls_short:?{falls_short} }This run cannot tell what limits the job. Missing: "
        "{missing:;}."
    )

    falls_short: Evidence | None
    missing: tuple[Finding, ...]


class CommunicationOnly(Finding):
    """The run holds communication only, so its effect on the job is unknown."""

    template = (
        "{falls_short:?{falls_short} }This run holds communication only, so it does not tell "
        "whether that holds up a job. Its largest collective, {op}{bytes:? of {bytes:bytes}}, took "
        "{took_s:time}. Missing: {missing:;}."
    )

    falls_short: Evidence | None
    op: str
    bytes: int
    took_s: float
    missing: tuple[Finding, ...]


class ExposedForSomeReason(Finding):
    """Communication is exposed, and the reason is unknown."""

    template = (
        "{falls_short:?{falls_short} }Communication is exposed for {exposed} "
        "({exposed.share:.1%}), but this run cannot tell why. Missing: {missing:;}."
    )

    falls_short: Evidence | None
    exposed: Amount
    missing: tuple[Finding, ...]


# ---- the missing data ----------------------------------------------------------------------------


class TimesMissing(Finding):
    """The run lacks times."""

    template = "times: profiler traces of the job, or a recording"


class RestOfTheRun(Finding):
    """The run lacks rows that were written and cannot be read."""

    template = "the whole run: its readable part is shown without a verdict"


class CollectivesUnseen(Finding):
    """The recorder missed collectives that are most of the traffic."""

    template = (
        "the collectives that were not seen: the hosts sent {sent_bytes:bytes} in the steps, and "
        "those that were seen need {noted_bytes:bytes}"
    )

    sent_bytes: int
    noted_bytes: int


class StepMarks(Finding):
    """The run lacks marks of where steps begin and end."""

    template = "marks of where each step begins and ends"


class MoreSteps(Finding):
    """The run holds too few steps."""

    template = "more steps: at least {fewest} after the warm-up"

    fewest: int


class SeveralWorkers(Finding):
    """The run has one worker; a run of several is missing."""

    template = "a run of several workers"


class BetterClocks(Finding):
    """The ranks' clocks are too inexact for the largest part."""

    template = "ranks' clocks to better than {to_s:time}"

    to_s: float


class ComputationMissing(Finding):
    """The run lacks the times of computation."""

    template = "computation, which a recording of the job has, or a profiler's trace of it"


class CollectivesMissing(Finding):
    """The run lacks the collectives."""

    template = "the collectives"


class OtherRanks(Finding):
    """The run lacks the other ranks of the job."""

    template = "the other ranks' traces: {recorded} of {workers} ranks are here"

    recorded: int
    workers: int


class EveryPart(Finding):
    """The run does not say which collective each rank's communication belongs to."""

    template = "every rank's part in every collective{unnamed:? ({unnamed} names none)}"

    unnamed: str | None


class LineRateMissing(Finding):
    """The run lacks the rate of the links."""

    template = "the line rate of the links: --line-rate"
    option = "--line-rate 10Gbps"


class SizesMissing(Finding):
    """The run does not tell how many bytes its collectives send."""

    template = "the sizes of {unsized} of {count} collectives"

    unsized: int
    count: int


class MoreThanThisRun(Finding):
    """The rules know no data that would settle the verdict."""

    template = "more than this run holds"


@register
class Unknown(VerdictKind):
    """The data cannot decide."""

    key = "unknown"
    meaning = "The verdict where the data cannot decide. It lists the missing data."
    part = Part.UNEXPLAINED.key
    label = "unexplained"
    colour = Colour("#7d7468", "#8d867c")
    within = "communication that nothing hides"

    def says(self, case: Case) -> Finding:
        """Return the observation that describes the run best, with the missing data."""
        parts = case.account.parts_s
        exposed_s = sum(parts[part.key] for part in _EXPOSED)
        missing = tuple(self.lacks(case)) or (MoreThanThisRun(),)
        short = set_up_short(case.evidence)
        if not case.step_s or case.lost or case.unseen:
            return NotTold(falls_short=short, missing=missing)
        if is_alone(case):
            return AloneInTheJob(computing=case.share(parts[Part.COMPUTE.key]), missing=missing)
        if enough_steps(case) and is_transfer_alone(case):
            exposed = case.of_step(exposed_s)
            excess_ns = case.account.excess_ns[:, case.account.is_typical].sum(axis=2)
            late_s = float(excess_ns.mean(axis=1).max()) * 1e-9
            if late_s >= _NOTABLE * case.step_s:
                return TransfersAndALateRank(exposed=exposed, late_s=late_s, missing=missing)
            return TransfersAlone(exposed=exposed, missing=missing)
        is_whole = computes(case) and enough_steps(case) and not case.run.missing
        if is_whole and not communicates(case):
            return NothingCommunicated(falls_short=short, workers=world(case.run), missing=missing)
        if exposed_s == 0:
            return CannotTell(falls_short=short, missing=missing)
        table = case.run.collectives
        if computes(case) or not len(table):
            exposed = case.of_step(exposed_s)
            return ExposedForSomeReason(falls_short=short, exposed=exposed, missing=missing)
        largest_at = int(np.argmax(table.bytes))
        # Take a slice of one row, because numpy drops a NUL at the end of a lone name.
        first = slice(largest_at, largest_at + 1)
        is_alike = (table.op == table.op[first]) & (table.group == table.group[first])
        largest = table.rows(is_alike & (table.bytes == table.bytes[first]))
        started_ns = np.maximum(largest.start_ns, largest.issue_ns)  # Before, it waited for ranks.
        return CommunicationOnly(
            falls_short=short,
            op=str(largest.op[0]),
            bytes=int(largest.bytes[0]),
            took_s=float(np.median(largest.end_ns - started_ns)) * 1e-9,
            missing=missing,
        )

    def lacks(self, case: Case) -> Iterator[Finding]:
        """Yield the missing data that would settle the verdict."""
        run, account = case.run, case.account
        if not case.step_s:
            yield TimesMissing()
            return
        if case.lost:
            yield RestOfTheRun()
            return
        if (unseen := case.unseen) is not None:
            yield CollectivesUnseen(sent_bytes=unseen.sent_bytes, noted_bytes=unseen.noted_bytes)
            return
        if not enough_steps(case):
            yield StepMarks() if account.is_whole_trace else MoreSteps(fewest=FEWEST_STEPS)
        if is_alone(case):
            yield SeveralWorkers()
        if case.clock_error_s > case.largest()[1]:
            yield BetterClocks(to_s=case.largest()[1])
        if not computes(case):
            yield ComputationMissing()
        elif not is_alone(case) and not communicates(case):
            yield CollectivesMissing()
        if lacks_ranks(case):
            yield OtherRanks(recorded=len(recorded_ranks(run)), workers=world(run))
        elif not computes(case):
            return
        elif account.untold_s > UNTOLD_SHARE * account.parts_s[Part.UNEXPLAINED.key]:
            # Name the longest communication that belongs to no known collective.
            spans = run.spans.rows(run.spans.lane == "communication")
            lengths_ns: dict[str, int] = {}
            for name, begin_ns, end_ns in zip(
                spans.name, spans.start_ns.tolist(), spans.end_ns.tolist(), strict=True
            ):
                if name not in ("wait", "codec"):
                    lengths_ns[name] = lengths_ns.get(name, 0) + end_ns - begin_ns
            longest = max(lengths_ns, key=lengths_ns.__getitem__, default=None)
            yield EveryPart(unnamed=None if longest is None else shown(longest))
        elif not is_alone(case) and account.parts_s[Part.UNEXPLAINED.key] > 0:
            if not case.rate_bps:
                yield LineRateMissing()
            if unsized := int((run.collectives.dtype == SIZE_UNKNOWN).sum()):
                yield SizesMissing(unsized=unsized, count=len(run.collectives))
