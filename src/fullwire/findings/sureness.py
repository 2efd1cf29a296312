"""How sure an answer is, and the reasons. Other programs on the processors affect every answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fullwire.findings.case import Case, lacks_ranks
from fullwire.findings.finding import Finding
from fullwire.run.placement import (
    hosts_of,
    most_on_one_host,
    shares_one_host,
    sums_on_processors,
)
from fullwire.run.processors import share_of_others
from fullwire.run.run import Run
from fullwire.run.split_layers import are_between_stages
from fullwire.simulation.calibrate import MUCH_BESIDE
from fullwire.simulation.grid import Grid, Subject
from fullwire.simulation.groups import ranks_among
from fullwire.simulation.interval import ENOUGH_STEPS
from fullwire.simulation.sweep import BESIDE_BUCKETS
from fullwire.simulation.transport import MeasuredTransport
from fullwire.timeline.account import Account, Part
from fullwire.timeline.contention import LEAST_COMPARED, compared_kernels
from fullwire.timeline.late import late_for_most, names_others_later
from fullwire.timeline.transfers import recorded_ranks, transfers_of, world

_SURELY_LATE = 0.75  # Of all waiting: beside other programs, a rank that causes less may be luck.
_FEW_STEPS = 10  # Of a measured job: with fewer, it may still be warming up.


class Sureness(Finding):
    """How sure the verdict is: the doubts, the number of steps, and the next largest loss."""

    template = (
        "{doubts:?Less sure: {doubts:and}.}{is_sure:?Sure: {steps:,} {steps:step was|steps were} "
        "measured.}{after:? Next largest: {after}, {share:.0%}.}"
    )

    doubts: tuple[Finding, ...]
    steps: int
    after: str | None
    share: float

    @property
    def is_sure(self) -> bool:
        """Say whether there are no doubts about the verdict."""
        return not self.doubts


class PartIsMissing(Finding):
    """Some data of the run is missing."""

    template = "the run is partial"


class LacksRanks(Finding):
    """Some ranks are missing, and the others cannot show what these lose."""

    template = (
        "{recorded} of {workers} ranks cannot show the lateness and the contention of the others"
    )

    recorded: int
    workers: int


class OnlySoMany(Finding):
    """The recorded steps are so few that the job may still have been warming up."""

    template = "only {steps:,} {steps:step|steps} were recorded"

    steps: int


class IsPredicted(Finding):
    """The run was simulated: no job has shown its step."""

    template = "the step is predicted, and no job has shown it"


class OthersWereBusy(Finding):
    """Other programs used the processors."""

    template = "other programs used {share:.0%} of the processors"

    share: float


class ContentionIsOpen(Finding):
    """Too few kernels beside communication ran alone, so contention may be as much."""

    template = "kernels beside communication may lose up to {share:.0%} of the step to it"

    share: float


class RepeatMayDiffer(Finding):
    """Another recording may give another verdict."""

    template = "a repeat may find {kinds:list}"

    kinds: tuple[str, ...]


class RepeatMayNameOthers(Finding):
    """Another recording may name other late ranks: half of this one does, or others were busy."""

    template = "a repeat may name other ranks as late"


class RanksMayBeStages(Finding):
    """Ranks hand work on as stages of a pipeline do, and no library tells that they are stages."""

    template = (
        "{share:.0%} of the waiting is in sends and receives between ranks: if they are stages of "
        "a pipeline, its schedule makes them wait, and no rank is late"
    )

    share: float


def sureness(case: Case, kind: str, near: Sequence[str]) -> Finding | None:
    """Return how sure a verdict is; None for the verdict "unknown".

    `near` are the kinds that another recording may give.
    """
    account = case.account
    if kind == "unknown" or not case.step_s:
        return None
    losses = sorted(
        ((time_s, key) for key, time_s in account.parts_s.items() if key != Part.COMPUTE.key),
        reverse=True,
    )
    if kind in account.parts_s:  # the verdict may name another part than the largest
        losses.sort(key=lambda loss: loss[1] != kind)
    _, (next_s, after), *_ = losses
    kept = int(account.is_kept.sum())
    doubts: list[Finding] = []
    if lacks_ranks(case):
        recorded = len(recorded_ranks(case.run))
        doubts.append(LacksRanks(recorded=recorded, workers=world(case.run)))
    elif case.lacks_a_part:
        doubts.append(PartIsMissing())
    if case.run.provenance.origin == "measured" and kept < _FEW_STEPS:
        doubts.append(OnlySoMany(steps=kept))
    if case.run.provenance.origin == "simulated":
        doubts.append(IsPredicted())
    if case.reaches_threshold(account.untold_crowding_s):
        doubts.append(ContentionIsOpen(share=case.share(account.untold_crowding_s)))
    beside = [
        OthersWereBusy(share=work.share)
        for work in about_others(case.run)
        if isinstance(work, OtherWork)
    ]
    doubts += beside
    if near:
        doubts.append(RepeatMayDiffer(kinds=tuple(kind.replace("_", " ") for kind in near)))
    late, there = late_for_most(account) if kind == "straggler" else (None, account)
    if kind == "straggler":
        are_calls = case.run.provenance.origin == "measured"
        handed_on = are_between_stages(case.run.collectives, are_calls=are_calls)
        caused_ns = transfers_of(case.run, {}).caused_ns if handed_on.any() else np.zeros(1)
        of_stages = float(caused_ns[handed_on].sum() / caused_ns.sum()) if caused_ns.any() else 0.0
        # Other ranks also wait in sends for a rank that has more work: then no schedule is needed.
        explained_s = 0.0
        if late is not None:
            rows = [there.ranks.index(rank) for rank in late.ranks]
            explained_s = (
                float(there.excess_ns[rows][:, there.is_typical].sum(axis=2).mean()) * 1e-9
            )
        if of_stages > 1 / 2 and explained_s < there.parts_s[Part.STRAGGLER.key] / 2:
            doubts.append(RanksMayBeStages(share=of_stages))
    is_close = late is not None and bool(beside) and late.share < _SURELY_LATE
    if late is not None and (is_close or names_others_later(there)):
        doubts.append(RepeatMayNameOthers())
    share = case.share(next_s)
    return Sureness(
        doubts=tuple(doubts),
        steps=len(account.steps),
        after=after.replace("_", " ") if round(share, 2) else None,
        share=share,
    )


class OtherWork(Finding):
    """Other programs used the processors on which a run was recorded."""

    template = (
        "Other work took {share:.0%} of the processors meanwhile: without it steps may be shorter"
        "{widens:?, and intervals are as much wider}."
    )

    share: float
    widens: bool = True  # intervals: those of a measured transport and of T1 allow for it


def about_others(run: Run, *, widens: bool = True) -> Iterator[Finding]:
    """Yield the share of other programs, where they used much of the processors of a run."""
    share = share_of_others(run)
    if share >= MUCH_BESIDE:
        yield OtherWork(share=share, widens=widens)


class LinkForEachRank(Finding):
    """Ranks that share a host are predicted with links of their own."""

    is_assumption = True
    template = (
        "{run}: {few:or its ranks} share one host and use no link. Here each rank has a link of "
        "its own, as on hosts of their own."
    )

    run: str
    few: str = ""  # Where that is not all of them.


class RanksShareLinks(Finding):
    """The user gave the ranks of a host, which share its link."""

    is_assumption = True
    template = (
        "{run}: ranks of a host share its link, which a ring of ranks in their order crosses once "
        "each way.{fitting:? Up to {fitting} workers fit on one host. Their sums use no link, and "
        "cost processor time with a measured transport only.}{keeping:? Up to {keeping} workers "
        "are taken to be in one lab, with a link for each.}"
    )

    run: str
    fitting: int | None
    keeping: int | None


class GroupsUseTheLinks(Finding):
    """Groups of some ranks may be inside nodes, and no description tells of links there."""

    is_assumption = True
    template = (
        "{run}: groups of {sizes:list} ranks are taken to use the links asked for. If a group is "
        "inside one node, its links are faster{can_be_described:?: describe them with --cluster}."
    )

    run: str
    sizes: tuple[int, ...]
    can_be_described: bool  # a cluster has no groups of one in so many ranks


class ContentionIsKept(Finding):
    """Predictions keep the recorded contention for processors."""

    is_assumption = True
    template = (
        "{run}: its ranks and its communication share processors, so computing takes longer. "
        "Predictions keep that as recorded, but for turns on a processor, and for a measured "
        "transport that does less work. T1 is without it."
    )

    run: str


class ContentionIsCarried(Finding):
    """Predictions carry contention for processors to other networks."""

    template = (
        "{run}: its ranks and its communication share processors, so computing takes longer. T1 is "
        "without that. Predicted, it follows the ranks on a processor, the bytes sent beside "
        "computing, and the time in which they are sent."
    )

    run: str


class SlowKernelsAreKept(Finding):
    """Predictions keep the recorded contention of a device."""

    is_assumption = True
    template = (
        "{run}: kernels beside communication take longer than alone. Predictions keep that as "
        "recorded; T1 is without it."
    )

    run: str


class SlowKernelsAreCarried(Finding):
    """Predictions carry the contention of a device to other networks."""

    template = (
        "{run}: kernels beside communication take longer than alone. T1 is without that. "
        "Predicted, it follows the time of communication beside computing."
    )

    run: str


def about_contention(name: str, *, is_carried: bool, is_on_devices: bool) -> Finding:
    """Choose the finding about the contention that predictions of a run allow for."""
    if is_on_devices:
        return SlowKernelsAreCarried(run=name) if is_carried else SlowKernelsAreKept(run=name)
    return ContentionIsCarried(run=name) if is_carried else ContentionIsKept(run=name)


def about_links(
    name: str, run: Run, subject: Subject, grid: Grid, per_host: Sequence[int]
) -> Iterator[Finding]:
    """Say how ranks of a host are predicted, where all ranks or so few workers are on one.

    `per_host` are the ranks of a host that the user gave.
    """
    where, workers, others = subject.placement, grid.workers, subject.step.others
    recorded = run.facts.workers or 1
    in_host = others.in_host or (False,) * len(others.op)
    sizes = {
        size
        for op, members, is_inside in zip(others.op, others.members, in_host, strict=True)
        if op not in ("send", "recv") and not is_inside
        if members and 1 < (size := ranks_among(members, recorded)) < recorded
    }
    # A run that names all hosts tells which groups are inside one, on processors. With a rank on
    # each host none is.
    hosts = hosts_of(run)
    is_told = hosts is not None and (sums_on_processors(run) or max(hosts.ranks) == 1)
    if grid.cluster is None and sizes and not (is_told or shares_one_host(run)):
        yield GroupsUseTheLinks(
            run=name,
            sizes=tuple(sorted(sizes)),
            can_be_described=subject.step.shards == 1,
        )
    if max(per_host, default=1) > 1:
        fitting = max((count for count in workers if 1 < count <= max(per_host)), default=None)
        keeping, fitting = (fitting, None) if where.has_links else (None, fitting)
        yield RanksShareLinks(run=name, fitting=fitting, keeping=keeping)
        return
    fitting_one = [count for count in workers if 1 < count <= most_on_one_host(run)]
    if shares_one_host(run):
        yield LinkForEachRank(run=name)
    elif fitting_one and sums_on_processors(run):
        yield LinkForEachRank(run=name, few=f"up to {max(fitting_one)} workers")


_ALL = 0.995  # of the time beside communication, as it is printed


class KernelsWereCompared(Finding):
    """How contention was estimated from the kernels of a trace."""

    template = (
        "Contention is estimated from kernels: beside communication they take {longer:.0%} longer "
        "than the same kernels alone. {compared:.0%} of the time beside communication is in "
        "kernels that ran both ways.{has_rest:? The rest is taken to be slowed alike.}"
    )

    longer: float
    compared: float
    has_rest: bool


class KernelsNeverRanAlone(Finding):
    """Contention is not told, because too few of the kernels beside communication ran alone."""

    template = (
        "Contention is not known, and counts as compute: {compared:.0%} of the time beside "
        "communication is in kernels that also ran alone, and {least:.0%} is needed. A trace of "
        "more steps may have them."
    )

    compared: float
    least: float


def about_kernels(run: Run, account: Account) -> Iterator[Finding]:
    """Say how kernels of a device tell contention, or why they do not."""
    compared = compared_kernels(run)
    if compared is None or not account.overlapped_ns.any():
        return
    if account.crowding.source == "kernels":
        slowed = np.median([share for _, share in run.facts.kernels_slowed_share or ()])
        longer, has_rest = float(slowed / max(1 - slowed, 0.01)), compared < _ALL
        yield KernelsWereCompared(longer=longer, compared=compared, has_rest=has_rest)
    elif compared < LEAST_COMPARED:
        yield KernelsNeverRanAlone(compared=compared, least=LEAST_COMPARED)


class AddsUpInRounds(Finding):
    """Workers take several steps of their own between two sums, and so do predictions."""

    is_assumption = True
    template = (
        "{run}: its workers add up in one of {every} steps, and so they do here. Times are the "
        "mean over these steps. --local-steps 1 predicts a sum in every step."
    )

    run: str
    every: int


class AddedUpInRounds(Finding):
    """Workers took several steps of their own between two sums, and predictions do not."""

    is_assumption = True
    template = (
        "{run}: its workers add up in one of {every} steps, and no prediction here does. "
        "--local-steps {every} predicts that."
    )

    run: str
    every: int


def about_rounds(
    run: str, every: int, local_steps: Sequence[int], accumulate: Sequence[int]
) -> Iterator[Finding]:
    """Say whether predictions add up once in so many steps, as the run did, or more often."""
    if every > 1 and set(local_steps) == {every}:
        yield AddsUpInRounds(run=run, every=every)
    elif every > 1 and every not in {*local_steps, *accumulate}:
        yield AddedUpInRounds(run=run, every=every)


class StepsAreTooFew(Finding):
    """A run has too few steps for an interval of its predictions."""

    is_assumption = True  # that the next steps are like these
    template = (
        "{run}: predictions{are_others_sure:? with a transport that was not measured} have no "
        "interval. {is_predicted:A predicted step does not show how much steps scatter|{steps:,} "
        "whole {steps:step does|steps do} not show how much steps scatter. At least {needed} are "
        "needed}."
    )

    run: str
    steps: int
    needed: int
    are_others_sure: bool  # those of a measured transport have one
    is_predicted: bool


class OthersAreKept(Finding):
    """A written step has the time of collectives beside its buckets, and not these themselves."""

    is_assumption = True
    template = (
        "{run}: this written step does not hold the collectives beside those of gradients. "
        "Predictions keep their {kept_s:time} on every link and with any transport: ask about the "
        "recording."
    )

    run: str
    kept_s: float


def about_evidence(
    name: str, run: Run, subject: Subject, grid: Grid, *, is_measured: bool
) -> Iterator[Finding]:
    """Say where a run shows too little: of how much steps scatter, or of its collectives."""
    is_modelled = run.provenance.basis == "modelled"
    are_all_measured = all(isinstance(each, MeasuredTransport) for each in grid.transports)
    if (steps := subject.step.count) < ENOUGH_STEPS and not (is_modelled or are_all_measured):
        yield StepsAreTooFew(
            run=name,
            steps=steps,
            needed=ENOUGH_STEPS,
            are_others_sure=is_measured,
            is_predicted=run.provenance.origin == "simulated",
        )
    spans = run.spans
    kept = spans.rows((spans.lane == "communication") & (spans.name == BESIDE_BUCKETS))
    kept_s = float((kept.end_ns - kept.start_ns).sum()) * 1e-9
    if run.provenance.origin == "simulated" and kept_s > 0:
        yield OthersAreKept(run=name, kept_s=kept_s)


class StepCountsAsPass(Finding):
    """A recorded step of several passes is the unit of the conditions."""

    template = (
        "{run}: a recorded step {add_up:adds up|has} {passes:.4g} passes, and times here are those "
        "of such a step.{add_up:? --accumulate says how many times these passes are in one sum.}"
    )

    run: str
    passes: float
    add_up: bool


class PassesMayNotShareASum(Finding):
    """Predictions send the gradients of several passes once, and they may not add up."""

    is_assumption = True
    template = (
        "{run}: not all gradients of its {passes:.4g} passes a step seem to add up. The job may be "
        "unable to send those of more passes in one sum, as predicted with --accumulate."
    )

    run: str
    passes: float
