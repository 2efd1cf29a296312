"""From the account to one word and one sentence: the rules, and every threshold that they use.

The verdict is the largest part of the step other than computation, if it reaches the threshold.

    overlap    in place of line_rate, if the exposed floor would fit under computation that had no
               communication beside it
    transport  in place of either, if the line was not what limited transfers: less than FILLED of
               it was used while they were exposed, and what was not, latency included, reaches the
               threshold; but overlap stays where next to nothing had been overlapped
    compute    if computation takes longer than with one worker, and no part is larger than that
    scales     if nothing reaches the threshold
    unknown    if the largest part is what could not be attributed, the steps are too few to tell,
               or not all that was written of them can be read
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from fullwire.answers.fixes import MANY, MUCH_BYTES
from fullwire.run.run import Run
from fullwire.run.store import unread
from fullwire.timeline.account import Account, Late, Part, late_ranks
from fullwire.timeline.ahead import (
    gap_words,
    usual_ahead_s,
    usual_gaps,
    where_batches_are_read,
)
from fullwire.timeline.breakdown import UNTOLD
from fullwire.timeline.steadiness import few_steps_words
from fullwire.timeline.transfers import recorded_ranks, stands_for_all, world
from fullwire.timeline.utilization import LIMITED, SATURATED, Evidence
from fullwire.units import show_bytes, show_ranks, show_rate, show_time, shown

Kind: TypeAlias = Literal[
    "scales",
    "line_rate",
    "transport",
    "latency",
    "overlap",
    "straggler",
    "codec",
    "compute",
    "input",
    "host",
    "unknown",
]

THRESHOLD = 0.10  # of the step: what a part must reach to be the verdict
FEWEST_STEPS = 3  # of a measured job after its warm-up, to tell what a step usually is
MUCH_IN_ALL = 0.20  # of the step, lost in parts that are each below the threshold
# Of the line rate, used by exposed transfers. In 68 labs at 0.5 to 10 Gbps, Gloo used at most 72 %
# of a line faster than its processors fill, at least 79 % of a slower one (validation/README.md).
FILLED = 0.75
NOTABLE = 0.01  # of the step: of what is lost, less is not told apart or mentioned
LATE = 0.25  # of communication beside computation: with less, it was not begun early

RESTS_ON = ("spans", "collectives")  # tables: without some of their rows an account is another
_TOLD_BY_CLOCKS = ("straggler", "line_rate", "latency", "transport")  # from who came when
_OF_ONE = ("codec", "input", "host")  # what a worker alone may lose as well
_SET_UP = (
    "nccl_socket_fallback",
    "nccl_few_channels",
    "nccl_without_gdr",
    "nccl_shared_memory",
    "nccl_sockets",
)
_SAID_ALIKE: Mapping[str, tuple[str, str]] = {
    "codec": ("Packing and unpacking gradients is", "it takes"),
    "input": ("The input is", "ranks wait for data for"),
    "host": ("The host is", "nothing is computed, communicated or loaded for"),
}
_TRANSFERS = ("line_rate", "latency", "transport")
_ANOTHER: Mapping[str, str] = {
    "line_rate": "bytes at line rate",
    "latency": "the fixed cost of messages",
    "transport": "a transport that does not fill the line",
    "straggler": "waiting for late ranks, now one and now another",
    "codec": "packing and unpacking gradients",
    "input": "waiting for data",
    "host": "the host, with nothing computed, communicated or loaded",
}
_PART_IN_WORDS: Mapping[str, str] = {
    "line_rate": "line rate",
    "straggler": "waiting for late ranks",
    "unexplained": "communication that nothing hides",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the account amounts to, and why."""

    kind: Kind
    sentence: str
    threshold: float
    reasons: tuple[str, ...]
    missing: tuple[str, ...]  # what would settle it, where the kind is unknown


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Case:
    """All that a verdict rests on."""

    run: Run
    account: Account
    inflation_s: float | None
    evidence: Sequence[Evidence]
    rate_bps: Mapping[int, float]  # of each rank's link, as far as known
    faster_link: tuple[str, float] | None = None  # the next that would help, by so much of a step

    @property
    def step_s(self) -> float:
        """Return the length of a typical step."""
        return self.account.step_s

    @property
    def clock_error_s(self) -> float:
        """Return how far ranks' clocks disagree: as collectives show, or as the run says."""
        stated = self.run.facts.clock_uncertainty_s or ()
        known_to_s = max((s for _, s in stated), default=0.0)
        return max(self.account.clock_error_ns * 1e-9, known_to_s)

    @property
    def lost(self) -> tuple[str, ...]:
        """Return what is said of the tables that an account rests on, if not all can be read."""
        return unread(self.run, RESTS_ON)

    def largest(self) -> tuple[str, float]:
        """Return the largest part other than computation."""
        parts = {key: s for key, s in self.account.parts_s.items() if key != Part.COMPUTE.key}
        return max(parts.items(), key=lambda each: each[1])

    def share(self, time_s: float) -> str:
        """Print a time as a share of the step."""
        return f"{time_s / self.step_s:.1%}" if self.step_s else "0.0%"

    def reaches_threshold(self, time_s: float) -> bool:
        """Say whether a part is large enough to be the verdict, rounding aside."""
        return time_s > 0 and time_s >= THRESHOLD * self.step_s * (1 - 1e-9)

    def of_step(self, time_s: float) -> str:
        """Print a time of every step."""
        return f"{show_time(time_s)} of {self.every}"

    @property
    def every(self) -> str:
        """Name what the account is of: every step, or all of the trace where none is marked."""
        if self.account.is_whole_trace:
            return f"the {show_time(self.step_s)} of the trace"
        return f"every {show_time(self.step_s)} step"


def judged(case: Case) -> Verdict:
    """Judge a case."""
    kind, reasons = _kind(case)
    missing = tuple(_missing(case)) if kind == "unknown" else ()
    said = _first_sentence(case, kind, missing)
    sentence = f"{said}{_in_few_steps(case, kind)}{_another(case, kind)}{_besides(case, kind)}"
    return Verdict(
        kind=kind, sentence=sentence, threshold=THRESHOLD, reasons=reasons, missing=missing
    )


def communicates(case: Case) -> bool:
    """Say whether any communication was recorded, in steps where the recorder marked them."""
    spans, collectives = case.run.spans, case.run.collectives
    is_told = any(each.communication_s for each in case.account.breakdowns)
    if case.run.provenance.origin == "measured" and not case.account.is_whole_trace:
        spans = spans.rows(np.isin(spans.step, case.account.steps))
        collectives = collectives.rows(np.isin(collectives.step, case.account.steps))
        is_told = False  # that is of all the time
    return is_told or bool(len(collectives) or (spans.lane == "communication").any())


def computes(case: Case) -> bool:
    """Say whether any computation was recorded: in the steps, where they last."""
    account = case.account
    if account.step_s:
        is_excess = account.excess_ns[:, :, 0].any()
        return bool(account.parts_ns[:, :, Part.COMPUTE].any() or is_excess)
    return bool((case.run.spans.lane == "compute").any())


def is_transfer_alone(case: Case) -> bool:
    """Say whether what could not be attributed is transfer that no rank was waited for in."""
    unexplained_s = case.account.parts_s[Part.UNEXPLAINED.key]
    is_told = case.account.untold_s <= UNTOLD * unexplained_s
    return is_told and computes(case) and unexplained_s > 0


def unhidden_compute_s(account: Account) -> float:
    """Return the computation of a step that had no communication beside it."""
    compute_ns = (account.parts_ns[:, :, Part.COMPUTE] + account.excess_ns[:, :, 0])[
        :, account.is_typical
    ]
    overlapped_ns = account.overlapped_ns[:, account.is_typical]
    return max(float((compute_ns - overlapped_ns).mean()) * 1e-9, 0.0)


def _kind(case: Case) -> tuple[Kind, tuple[str, ...]]:
    if not case.step_s:
        return "unknown", ("nothing in the run lasts: it tells what happened, but not when",)
    if case.lost:
        return "unknown", case.lost
    if not enough_steps(case):
        return "unknown", (f"{_typical_count(case)} to judge by",)
    if world(case.run) > 1 and not communicates(case):
        where = "the run" if case.account.is_whole_trace else "its steps"
        return "unknown", (f"{world(case.run)} workers, and no communication in {where}",)
    if not computes(case):
        return "unknown", tuple(_without_computation(case))
    key, largest_s = case.largest()
    said = f"{key} is {case.share(largest_s)} of the step, the largest part but computation,"
    inflation_s = case.inflation_s or 0.0
    if inflation_s >= largest_s and case.reaches_threshold(inflation_s):
        inflated = f"computation takes {show_time(inflation_s)} longer than with one worker"
        return "compute", (inflated, f"{key} is less: {case.share(largest_s)} of the step")
    if world(case.run) == 1 and (key not in _OF_ONE or not case.reaches_threshold(largest_s)):
        return "unknown", ("there was one worker, and so nothing to scale or wait for",)
    if not case.reaches_threshold(largest_s):
        return "scales", (f"{said} and below the threshold of {THRESHOLD:.0%}",)
    reason = f"{said} and reaches the threshold of {THRESHOLD:.0%}"
    if key == Part.UNEXPLAINED.key:
        return "unknown", (reason,)
    if key in _TOLD_BY_CLOCKS and case.clock_error_s > largest_s:
        disagree = f"ranks' clocks disagree by {show_time(case.clock_error_s)}, more than that"
        return "unknown", (reason, disagree)
    if key == Part.LINE_RATE.key:
        kind, why = _kind_of_line(case)
        return kind, (reason, *why)
    return key, (reason,)  # type: ignore[return-value]  # every other part is a kind


def _kind_of_line(case: Case) -> tuple[Kind, tuple[str, ...]]:
    """Say what it is where the bytes' time at line rate is the largest part."""
    floor_s, free_s = case.account.parts_s[Part.LINE_RATE.key], unhidden_compute_s(case.account)
    exposed_s = exposed_transfer_s(case.account)
    is_filled = floor_s >= FILLED * exposed_s
    is_limited = is_filled or not case.reaches_threshold(exposed_s - floor_s)
    if floor_s <= free_s and (is_limited or _overlapped(case.account) < LATE):
        fits = f"it would fit under {show_time(free_s)} of computation without communication"
        return "overlap", (fits,)
    if is_limited:
        return "line_rate", ()
    used = f"exposed transfers used {floor_s / exposed_s:.1%} of the line rate"
    return "transport", (f"{used}, and below {FILLED:.0%} it is not the line that limits them",)


def exposed_transfer_s(account: Account) -> float:
    """Return the exposed transfers of a step: the floor, and what latency and transport lose."""
    network = (Part.LINE_RATE, Part.LATENCY, Part.TRANSPORT)
    return sum(account.parts_s[part.key] for part in network)


def _overlapped(account: Account) -> float:
    """Return the share of communication that had computation beside it."""
    hidden_s = float(account.overlapped_ns[:, account.is_typical].mean()) * 1e-9
    together_s = hidden_s + exposed_transfer_s(account)
    return hidden_s / together_s if together_s else 0.0


def _without_computation(case: Case) -> Iterator[str]:
    yield "no computation is in the run, so communication cannot be told hidden from exposed"
    late = late_ranks(case.account)
    if late is not None:
        named = show_ranks(late.ranks)
        yield f"{named} came last most: {late.share:.0%} of all waiting was for {late.it}"


def enough_steps(case: Case) -> bool:
    """Say whether there are steps enough to judge by."""
    count = 0 if case.account.is_whole_trace else int(case.account.is_typical.sum())
    return case.run.provenance.origin != "measured" or count >= FEWEST_STEPS


def _typical_count(case: Case) -> str:
    if case.account.is_whole_trace:
        return "no marked step"
    count, total = int(case.account.is_typical.sum()), len(case.account.steps)
    left_out = "" if count == total else f", {total - count} left out as warm-up or exceptions"
    return f"{count} step{'' if count == 1 else 's'}{left_out}"


def _missing(case: Case) -> Iterator[str]:
    run, account = case.run, case.account
    if not case.step_s:
        yield "times: profiler traces of the job, or a recording"
        return
    if case.lost:
        yield "the run as it was written; what can be read of it is shown without a verdict"
        return
    if not enough_steps(case):
        is_unmarked = account.is_whole_trace
        yield (
            "marks of where each step begins and ends"
            if is_unmarked
            else f"more steps: at least {FEWEST_STEPS} after the warm-up"
        )
    if world(run) == 1:
        yield "a run of several workers"
    if case.clock_error_s > case.largest()[1]:
        yield f"ranks' clocks to better than {show_time(case.largest()[1])}"
    if not computes(case):
        yield "computation, which a recording of the job has, or a profiler's trace of it"
    elif world(run) > 1 and not communicates(case):
        yield "the collectives"
    recorded = len(recorded_ranks(run))
    if recorded < world(run) and not stands_for_all(run):
        yield f"the other ranks' traces: {recorded} of {world(run)} ranks are here"
    elif not computes(case):
        return
    elif account.untold_s > UNTOLD * account.parts_s[Part.UNEXPLAINED.key]:
        yield f"every rank's part in every collective{_unnamed(run)}"
    elif world(run) > 1 and account.parts_s[Part.UNEXPLAINED.key] > 0 and not case.rate_bps:
        yield "the line rate of the links: --bandwidth"


def _unnamed(run: Run) -> str:
    """Name what communicates longest without telling what it is a part of."""
    spans = run.spans.rows(run.spans.lane == "communication")
    lasted_ns: dict[str, int] = {}
    for name, length_ns in zip(spans.name, (spans.end_ns - spans.start_ns).tolist(), strict=True):
        if name not in ("wait", "codec"):
            lasted_ns[name] = lasted_ns.get(name, 0) + length_ns
    if not lasted_ns:
        return ""
    return f" ({shown(max(lasted_ns, key=lasted_ns.__getitem__))} names none)"


def _first_sentence(case: Case, kind: Kind, missing: Sequence[str]) -> str:
    parts = case.account.parts_s
    time_s = parts.get(kind, 0.0)
    if kind == "scales":
        return _scales_sentence(case)
    if kind == "unknown":
        return _unknown_sentence(case, missing)
    if kind == "overlap":
        free = show_time(unhidden_compute_s(case.account))
        return (
            "The network is not too slow, it is used too late: "
            f"{case.of_step(parts[Part.LINE_RATE.key])} went to transfers that would fit under "
            f"{free} of computation with no communication beside it."
        )
    if kind == "compute":
        return (
            f"Computation is the bottleneck: it takes {show_time(case.inflation_s or 0.0)} longer "
            f"than with one worker, {case.share(case.inflation_s or 0.0)} of the step."
        )
    if kind in _SAID_ALIKE:
        what, costs = _SAID_ALIKE[kind]
        is_alone = not case.reaches_threshold(parts[Part.UNEXPLAINED.key])
        bottleneck = "the bottleneck, not the network" if is_alone else "the largest loss seen here"
        said = f"{what} {bottleneck}: {costs} {case.of_step(time_s)} ({case.share(time_s)})."
        return f"{said}{_ahead_words(case)}" if kind == "host" else said
    if kind == "straggler":
        return _straggler_sentence(case, time_s)
    if kind == "latency":
        return _latency_sentence(case, time_s)
    return (_transport_sentence if kind == "transport" else _line_rate_sentence)(case, time_s)


def _ahead_words(case: Case) -> str:
    ahead_s, host_s = usual_ahead_s(case.account), case.account.parts_s[Part.HOST.key]
    if usual_gaps(case.account)[0] > host_s / 2 and (words := gap_words(case.account)):
        return f" {words}."
    if ahead_s < host_s / 2:
        return ""
    return (
        f" {show_time(min(ahead_s, host_s))} of that is before anything is computed, "
        f"{where_batches_are_read(case.account)}."
    )


def _scales_sentence(case: Case) -> str:
    key, next_s = case.largest()
    lost_s = case.step_s - case.account.parts_s[Part.COMPUTE.key]
    if not next_s:
        its_step = case.every.replace("every", "its", 1)
        return f"This job scales: all of {its_step} is computation."
    if lost_s < MUCH_IN_ALL * case.step_s:
        start = f"This job scales: {case.of_step(lost_s)}"
    else:
        start = (
            f"No one thing holds this job back, but {case.of_step(lost_s)} ({case.share(lost_s)})"
        )
    return (
        f"{start} is not computation, and the largest part of that, "
        f"{_PART_IN_WORDS.get(key, key)}, is "
        f"{case.share(next_s)}."
    )


def _unknown_sentence(case: Case, missing: Sequence[str]) -> str:
    exposed_s = sum(
        case.account.parts_s[part.key]
        for part in (Part.LINE_RATE, Part.LATENCY, Part.TRANSPORT, Part.UNEXPLAINED)
    )
    wanted = "; ".join(missing) or "more than this run holds"
    falls_short = _falls_short(case.evidence)
    if not case.step_s or case.lost:
        return f"{falls_short}What limits the job is not told. Missing: {wanted}."
    if world(case.run) == 1:
        return (
            "This job had one worker, and a network has no part in that: "
            f"computation is {case.share(case.account.parts_s[Part.COMPUTE.key])} of its step. "
            f"Missing: {wanted}."
        )
    if enough_steps(case) and is_transfer_alone(case):
        return (
            f"Transfers that nothing hides take {case.of_step(exposed_s)} "
            f"({case.share(exposed_s)}), and every rank had come: it is the network, not a late "
            "rank. Whether bandwidth, transport or overlap is short, this run cannot tell. "
            f"Missing: {wanted}."
        )
    is_whole = computes(case) and enough_steps(case) and not case.run.missing
    if is_whole and not communicates(case):
        return (
            f"{falls_short}Nothing was communicated in its steps: either each of the "
            f"{world(case.run)} workers trains by itself, and no network holds it back, or what "
            f"they communicate was not recorded. Missing: {wanted}."
        )
    if exposed_s == 0:
        return f"{falls_short}This run cannot tell what limits the job. Missing: {wanted}."
    if not computes(case) and len(case.run.collectives):
        return (
            f"{falls_short}Only communication is in this run, so whether it holds up a job is not "
            f"told: {_largest_collective(case.run)}. Missing: {wanted}."
        )
    return (
        f"{falls_short}Communication is exposed for {case.of_step(exposed_s)} "
        f"({case.share(exposed_s)}), but this run cannot tell why. Missing: {wanted}."
    )


def _largest_collective(run: Run) -> str:
    table = run.collectives
    first = int(np.argmax(table.bytes))
    is_alike = (table.op == table.op[first]) & (table.group == table.group[first])
    largest = table.rows(is_alike & (table.bytes == table.bytes[first]))
    length_s = float(np.median(largest.end_ns - largest.issue_ns)) * 1e-9
    size = f" of {show_bytes(int(largest.bytes[0]))}" if largest.bytes[0] else ""
    return f"its largest collective, {largest.op[0]}{size}, took {show_time(length_s)}"


def _in_few_steps(case: Case, kind: Kind) -> str:
    """Say which steps have what the verdict is about, if few of them do."""
    key = {"overlap": Part.LINE_RATE.key}.get(kind, kind)
    parts = [part for part in Part if part.key == key]
    words = few_steps_words(case.account, parts[0]) if parts else ""
    return f" {words}." if words else ""


def _another(case: Case, kind: Kind) -> str:
    """Name what else reaches the threshold: without it, the job would only wait for that."""
    own = _TRANSFERS if kind in (*_TRANSFERS, "overlap") else (kind,)
    parts = {key: case.account.parts_s[key] for key in _ANOTHER if key not in own}
    key = max(parts, key=parts.__getitem__)
    if kind in ("unknown", "scales") or not case.reaches_threshold(parts[key]):
        return ""
    said = f"{show_time(parts[key])} ({case.share(parts[key])})"
    late = late_ranks(case.account)
    if key == Part.STRAGGLER.key and late is not None:
        return f" Another {said} is lost to waiting, most of it for {show_ranks(late.ranks)}."
    return f" Another {said} is lost to {_ANOTHER[key]}."


def _besides(case: Case, kind: Kind) -> str:
    """Say what a verdict of something else, or of nothing, would leave unsaid."""
    if kind != "unknown":
        return _exposed_besides(case, kind)
    late, waited_s = late_ranks(case.account), case.account.parts_s[Part.STRAGGLER.key]
    if late is None or not case.reaches_threshold(waited_s):
        return ""
    return (
        f" Ranks wait for each other for {show_time(waited_s)} besides "
        f"({case.share(waited_s)}), {late.share:.0%} of it for {show_ranks(late.ranks)}."
    )


def _exposed_besides(case: Case, kind: Kind) -> str:
    """Say what communication is exposed that nothing explains, where the verdict is another."""
    exposed_s = case.account.parts_s[Part.UNEXPLAINED.key]
    here, of = len(recorded_ranks(case.run)), world(case.run)
    if exposed_s < NOTABLE * case.step_s:
        return ""
    if here < of:
        is_said = kind == "scales" and case.largest()[0] == Part.UNEXPLAINED.key
        another = (
            "" if is_said else f"Communication is exposed for another {case.share(exposed_s)}; "
        )
        whether = "Whether" if is_said else "whether"
        return f" {another}{whether} that is waiting or transfer, {here} of {of} ranks cannot tell."
    if not case.reaches_threshold(exposed_s) or is_transfer_alone(case):
        return ""
    return (
        f" Communication is exposed for {show_time(exposed_s)} besides "
        f"({case.share(exposed_s)}), and this run cannot tell why."
    )


def _line_rate_sentence(case: Case, time_s: float) -> str:
    exposed_s = exposed_transfer_s(case.account)
    if time_s < FILLED * exposed_s:
        return (
            f"The network is the bottleneck: {case.of_step(time_s)} ({case.share(time_s)}) is what "
            f"the bytes take at line rate, and {show_time(exposed_s - time_s)} more is lost as the "
            f"line is not filled{_slow_link(case)}{_links(case)}."
        )
    return (
        f"The network is the bottleneck, and bandwidth is what it lacks: {case.of_step(time_s)} "
        f"({case.share(time_s)}) is what the bytes take at line rate{_slow_link(case)}"
        f"{_links(case)}."
    )


def _slow_link(case: Case) -> str:
    """Name the links that hold all others up, if few are slower than the rest."""
    rates = case.rate_bps
    slowest_bps = min(rates.values(), default=0.0)
    slow = [rank for rank, rate_bps in rates.items() if rate_bps == slowest_bps]
    if not slow or 2 * len(slow) > len(rates):
        return ""
    verb = "has" if len(slow) == 1 else "have"
    return (
        f"; {show_ranks(slow)} {verb} {show_rate(slowest_bps)}, the others up to "
        f"{show_rate(max(rates.values()))}"
    )


def _transport_sentence(case: Case, time_s: float) -> str:
    parts, why = case.account.parts_s, _what_held_transport(case.evidence)
    lost_s, beside = time_s, ""
    if parts[Part.LINE_RATE.key] > time_s:  # then all that the line is idle for counts
        lost_s = time_s + parts[Part.LATENCY.key]
        beside = _of_what_is_lost(case)
    not_for = "" if _gains_by_link(case) else ", but not for lack of bandwidth"
    return (
        f"The network is the bottleneck{not_for}: "
        f"{case.of_step(lost_s)} ({case.share(lost_s)}) is lost by a transport that does not fill "
        f"the line{beside}{_links(case)}{f'; {why}' if why else ''}{_many_words(case)}."
        f"{_link_words(case)}"
    )


def _gains_by_link(case: Case) -> bool:
    return case.faster_link is not None and case.faster_link[1] >= THRESHOLD


def _link_words(case: Case) -> str:
    """Say that a faster line would help all the same: some transports leave a share of any idle."""
    if case.faster_link is None or not _gains_by_link(case):
        return ""
    change, gain = case.faster_link
    return f" A faster line would help all the same: {change} by {gain:.0%}, predicted."


def _many_words(case: Case) -> str:
    """Say that what is sent is many and small, which no transport fills a line with."""
    count = _collectives_per_step(case)
    sizes = case.run.collectives.bytes[np.isin(case.run.collectives.step, case.account.steps)]
    usual = int(np.median(sizes)) if len(sizes) else 0
    if count < MANY or not 0 < usual <= MUCH_BYTES:
        return ""
    return f"; it has {count:,.0f} collectives to carry in a step, most of {show_bytes(usual)}"


def _of_what_is_lost(case: Case) -> str:
    """Say what of it goes to messages, and how much of the line was used if no link says so."""
    parts = case.account.parts_s
    latency_s, floor_s = parts[Part.LATENCY.key], parts[Part.LINE_RATE.key]
    used = f" (exposed transfers used {floor_s / exposed_transfer_s(case.account):.0%} of it)"
    messages = f", {show_time(latency_s)} of that by the fixed cost of messages"
    return f"{'' if _links(case) else used}{messages if latency_s > NOTABLE * case.step_s else ''}"


def _latency_sentence(case: Case, time_s: float) -> str:
    count = _collectives_per_step(case)
    return (
        f"Too many small collectives: {case.of_step(time_s)} ({case.share(time_s)}) is the fixed "
        f"cost of their messages, with {count:,.0f} "
        f"collective{'' if round(count) == 1 else 's'} in a step."
    )


def _straggler_sentence(case: Case, time_s: float) -> str:
    lost = f"{case.of_step(time_s)} ({case.share(time_s)})"
    late = late_ranks(case.account)
    if late is None:
        return f"Ranks wait for each other, now one and now another: {lost} is lost to it."
    one, named = len(late.ranks) == 1, show_ranks(late.ranks).replace("rank", "Rank", 1)
    return (
        f"{named} {'is' if one else 'are'} late and the others wait for {late.it}, not for the "
        f"network: {lost} is lost to it. {late.share:.0%} of all waiting was for "
        f"{'this rank' if one else 'these ranks'}{_excess_words(case, late)}."
    )


def _excess_words(case: Case, late: Late) -> str:
    rows = [case.account.ranks.index(rank) for rank in late.ranks]
    excess_ns = case.account.excess_ns[rows][:, case.account.is_typical]
    excess_s = excess_ns.mean(axis=(0, 1)) * 1e-9
    lane = int(np.argmax(excess_s))
    if excess_s[lane] < THRESHOLD * case.step_s / 2:
        return ""
    name = ("computation", "waiting for input", "the host's work between")[lane]
    verb = "spends" if len(rows) == 1 else "spend"
    return f", which {verb} {show_time(float(excess_s[lane]))} more than usual in {name}"


def _links(case: Case) -> str:
    said = [each.sentence for each in case.evidence if each.name == "link_utilization"]
    return "".join(f"; {each[0].lower()}{each[1:].rstrip('.')}" for each in said)


def _collectives_per_step(case: Case) -> float:
    steps, table = case.account.steps, case.run.collectives
    ranks = max(len(case.account.ranks), 1)
    return float(np.isin(table.step, steps).sum()) / len(steps) / ranks


def _falls_short(evidence: Sequence[Evidence]) -> str:
    """Return what falls short in how communication was set up, whatever that costs."""
    return next((f"{each.sentence} " for each in evidence if each.name in _SET_UP), "")


def _what_held_transport(evidence: Sequence[Evidence]) -> str:
    """Name what logs and samples show to have held the transport back, the surest first."""
    falls_short = _falls_short(evidence).rstrip(" .")
    if falls_short:
        return falls_short
    for name, least, words in (
        ("send_buffer_limited", LIMITED, "the transport was limited by its send buffers"),
        ("receive_window_limited", LIMITED, "the transport was limited by the receiver's window"),
        ("cpu_busiest", SATURATED, "a processor was saturated"),
        ("socket_idle", LIMITED, "its sockets often had nothing to send"),
    ):
        value = _value(evidence, name)
        if value is not None and value >= least:
            return words
    return ""


def _value(evidence: Sequence[Evidence], name: str) -> float | None:
    return next((each.value for each in evidence if each.name == name), None)
