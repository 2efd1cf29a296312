"""The data that a verdict rests on, and every threshold of the rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fullwire.findings.finding import Amount, Evidence, Length
from fullwire.run.gaps import reasons
from fullwire.run.run import Run
from fullwire.timeline.account import Account, Part
from fullwire.timeline.breakdown import UNTOLD
from fullwire.timeline.transfers import is_world_told, recorded_ranks, stands_for_all, world
from fullwire.timeline.utilization import SentUnseen, sent_unseen

if TYPE_CHECKING:
    from fullwire.fixes import Fix

THRESHOLD = 0.10  # Of the step: a part must reach this to be the verdict.
FEWEST_STEPS = 3  # Of a measured job after its warm-up: fewer do not show the usual step.
NEAR = 0.02  # Of the step: in a repeat, a part may be larger or smaller by this.
MUCH_IN_ALL = 0.20  # Of the step, lost in parts that are each below the threshold.
# Of the line rate, used by exposed transfers. In 68 labs at 0.5 to 10 Gbps, Gloo used at most 72 %
# of a line that its processors could not fill. It used at least 79 % of a line that they could fill
# (validation/README.md).
FILLED = 0.75
NOTABLE = 0.01  # Of the step: smaller losses are merged or left out.
LATE = 0.25  # Of communication, overlapped with computation: with less, it began late.

RESTS_ON = ("spans", "collectives")  # Tables of the run: if rows are missing, the account is wrong.
_BESIDE = ("metrics", "noise")  # Tables of the run that no account takes anything from.


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Case:
    """All data that a verdict rests on."""

    run: Run
    account: Account
    inflation_s: float | None
    evidence: Sequence[Evidence]
    rate_bps: Mapping[int, float]  # By rank, for the links whose rate is known.
    faster_link: Fix | None = None  # The fix with the next link on sale that would help.
    gain: float = 0.0  # The share of a step that this link would gain.
    floor_off_s: float = 0.0  # Added to the floor, to try more or less time at line rate.
    gains_by_sooner: bool | None = None  # Whether earlier transfers would help, if predicted.

    @property
    def step_s(self) -> float:
        """Return the time of a step."""
        return self.account.step_s

    @property
    def clock_error_s(self) -> float:
        """Return how far the ranks' clocks disagree: the larger of the measured and the stated."""
        stated = self.run.facts.clock_uncertainty_s or ()
        known_to_s = max((uncertain_s for _, uncertain_s in stated), default=0.0)
        return max(self.account.clock_error_ns * 1e-9, known_to_s)

    @property
    def lost(self) -> tuple[str, ...]:
        """Return why the tables of the account cannot all be read, or an empty tuple."""
        return reasons(self.run.gaps, RESTS_ON)

    @property
    def lacks_a_part(self) -> bool:
        """Say whether anything is missing that an account may rest on."""
        return any(gap.table not in _BESIDE for gap in self.run.gaps)

    @property
    def unseen(self) -> SentUnseen | None:
        """Return what the hosts sent beside the noted collectives, if that is most of it."""
        return sent_unseen(self.run)

    def largest(self) -> tuple[str, float]:
        """Return the largest part other than compute, with its time."""
        parts = {key: s for key, s in self.account.parts_s.items() if key != Part.COMPUTE.key}
        return max(parts.items(), key=lambda each: each[1])

    def share(self, time_s: float) -> float:
        """Return the share of the step that a time is."""
        return time_s / self.step_s if self.step_s else 0.0

    def reaches_threshold(self, time_s: float) -> bool:
        """Say whether a part is large enough to be the verdict, up to rounding errors."""
        return time_s > 0 and time_s >= THRESHOLD * self.step_s * (1 - 1e-9)

    def of_step(self, time_s: float) -> Amount:
        """Return a time as sentences print it: as a part of every step."""
        return Amount(time_s=time_s, whole=self.whole)

    @property
    def whole(self) -> Length:
        """Return the length of the account: every step, or the trace where no step is marked."""
        return Length(
            step_s=self.step_s,
            is_whole_trace=self.account.is_whole_trace,
            is_of_all=self.account.is_over_all,
        )

    @property
    def floor_s(self) -> float:
        """Return the time that the bytes of exposed transfers need at line rate."""
        return max(self.account.parts_s[Part.LINE_RATE.key] + self.floor_off_s, 0.0)

    @property
    def gains_by_link(self) -> bool:
        """Say whether a faster line would help, though some transports leave a share of it idle."""
        return self.gain >= THRESHOLD

    @property
    def collectives_per_step(self) -> float:
        """Return the number of collectives that a rank has in a step."""
        steps, table = self.account.steps, self.run.collectives
        ranks = max(len(self.account.ranks), 1)
        return float(np.isin(table.step, steps).sum()) / len(steps) / ranks


def communicates(case: Case) -> bool:
    """Say whether any communication was recorded: within the steps, if the recorder marked them."""
    spans, collectives = case.run.spans, case.run.collectives
    is_told = any(breakdown.communication_s for breakdown in case.account.breakdowns)
    if case.run.provenance.origin == "measured" and not case.account.is_whole_trace:
        spans = spans.rows(np.isin(spans.step, case.account.steps))
        collectives = collectives.rows(np.isin(collectives.step, case.account.steps))
        is_told = False  # The breakdowns cover all the time, not only the steps.
    return is_told or bool(len(collectives) or (spans.lane == "communication").any())


def computes(case: Case) -> bool:
    """Say whether any computation was recorded: within the steps, if these have a length."""
    account = case.account
    if account.step_s:
        is_excess = account.excess_ns[:, :, 0].any()
        return bool(account.parts_ns[:, :, Part.COMPUTE].any() or is_excess)
    return bool((case.run.spans.lane == "compute").any())


def enough_steps(case: Case) -> bool:
    """Say whether there are enough steps to judge by."""
    count = 0 if case.account.is_whole_trace else int(case.account.is_kept.sum())
    return case.run.provenance.origin != "measured" or count >= FEWEST_STEPS


def is_transfer_alone(case: Case) -> bool:
    """Say whether all unexplained time is transfer during which no rank waited for a late one."""
    unexplained_s = case.account.parts_s[Part.UNEXPLAINED.key]
    is_told = case.account.untold_s <= UNTOLD * unexplained_s
    return is_told and computes(case) and unexplained_s > 0


def lacks_ranks(case: Case) -> bool:
    """Say whether ranks of the job are missing, whose lateness and contention nothing shows."""
    return len(recorded_ranks(case.run)) < world(case.run) and not stands_for_all(case.run)


def is_alone(case: Case) -> bool:
    """Say whether the job had one worker, which has nothing to scale or to wait for.

    An imported run shows so only by work that one rank alone did: a log of steps shows no rank.
    """
    return world(case.run) == 1 and (is_world_told(case.run) or computes(case))


def unhidden_compute_s(account: Account) -> float:
    """Return the time of a step's computation that ran without communication beside it."""
    compute_ns = (account.parts_ns[:, :, Part.COMPUTE] + account.excess_ns[:, :, 0])[
        :, account.is_typical
    ]
    overlapped_ns = account.overlapped_ns[:, account.is_typical]
    return max(float((compute_ns - overlapped_ns).mean()) * 1e-9, 0.0)


def exposed_transfer_s(account: Account) -> float:
    """Return the time of a step's exposed transfers on lines: at line rate, latency, transport."""
    network = (Part.LINE_RATE, Part.LATENCY, Part.TRANSPORT)
    return sum(account.parts_s[part.key] for part in network) - account.inside_s
