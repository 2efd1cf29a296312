"""The fix "shares by speed": a rank that computes more slowly gets fewer samples of each batch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from statistics import median_low
from typing import TYPE_CHECKING

from fullwire.errors import UsageError
from fullwire.fixes.fix import Fix, FixKind, Process, Seen, Worthwhile, register, worthwhile
from fullwire.resilience.place import BALANCE_VARIABLE, FOLDER_VARIABLE
from fullwire.units import shown

if TYPE_CHECKING:
    from fullwire.run.run import Run
    from fullwire.simulation.forecast import Forecaster
    from fullwire.timeline.account import Account

_ON = "on"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharesBySpeed(Fix):
    """Each rank has as many samples as it computes in the time of the others."""

    template = "fewer samples of each batch for {ranks:ranks}"

    kind: str = "balance"
    how: str = "fullwire run --balance, in a script with fullwire.elastic"
    ranks: tuple[int, ...]


class OfAnElasticJob(SharesBySpeed):
    """The same, where the script has fullwire.elastic already: `tune` can try it."""

    applied = _ON


def _is_elastic(run: Run) -> bool:
    return "start" in run.events.kind.tolist()


def _lasting(account: Account) -> tuple[tuple[int, ...], float, float] | None:
    """Return ranks that always compute more slowly, the time with shares by speed, and the usual.

    None without such ranks.
    """
    from fullwire.timeline.account import Part
    from fullwire.timeline.late import late_ranks, names_others_later

    late = late_ranks(account)
    if late is None or names_others_later(account):
        return None
    by_rank = dict(zip(account.ranks, account.rank_parts_s(), strict=True))
    times_s = {rank: parts_s[Part.COMPUTE.key] for rank, parts_s in by_rank.items()}
    usual_s = median_low(time_s for rank, time_s in times_s.items() if rank not in late.ranks)
    excess_s = sum(times_s[rank] - usual_s for rank in late.ranks)
    rests_s = {
        rank: parts_s[Part.INPUT.key] + parts_s[Part.HOST.key] for rank, parts_s in by_rank.items()
    }
    usual_rest_s = median_low(rests_s.values())
    rest_s = sum(rests_s[rank] - usual_rest_s for rank in late.ranks)
    if min(times_s.values()) <= 0 or excess_s <= max(rest_s, 0):
        return None  # it is late for another reason than its computing
    balanced_s = len(times_s) / sum(1 / time_s for time_s in times_s.values())
    return late.ranks, balanced_s, usual_s


@register
class Balance(FixKind):
    """Give ranks shares of the global batch by their speed."""

    key = "balance"
    label = "shares of a batch by speed"
    addresses = ("straggler",)
    example = _ON
    setting = f"{_ON}; for scripts with fullwire.elastic. Batch norm then sees other batches"

    def predict(self, run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
        """Predict a step without late ranks, whose computing is that of shares by speed."""
        from fullwire.simulation.stragglers import NoJitter

        found = _lasting(account)
        if found is None or not job.subject.step.waiting_ns:
            return
        ranks, balanced_s, usual_s = found
        alike = job.ask(jitters=(NoJitter(),))
        more_s = max(balanced_s - usual_s, 0.0)
        step_s = alike.step_s + more_s
        if step_s >= account.step_s:
            return
        forecast = dataclasses.replace(
            alike,
            step_s=step_s,
            scaling_factor=min(alike.scaling_factor * alike.step_s / step_s, 1.0),
            low_s=alike.low_s + more_s,
            high_s=alike.high_s + more_s,
        )
        kind = OfAnElasticJob if _is_elastic(run) else SharesBySpeed
        yield kind(ranks=ranks, forecast=forecast)

    def to_try(
        self, run: Run, account: Account, seen: Seen, job: Forecaster | None
    ) -> Iterator[Worthwhile]:
        """Yield shares by speed for an elastic job with a rank that always computes more slowly."""
        from fullwire.timeline.account import Part

        if _is_elastic(run) and _lasting(account) is not None:
            most_s = account.parts_s[Part.STRAGGLER.key]
            yield from worthwhile(self, _ON, "shares of a batch by speed", account, 0.0, most_s)

    def checked(self, setting: str) -> str:
        """Take the one setting."""
        if setting != _ON:
            raise UsageError(f"fix balance: expected {_ON}, got {shown(setting)}")
        return setting

    def environment(self, setting: str) -> Mapping[str, str]:
        """Return the variable that elastic workers read."""
        return {BALANCE_VARIABLE: "1"}

    def apply(self, setting: str, process: Process) -> None:
        """Say whether this process is an elastic worker, which reads the variable."""
        if FOLDER_VARIABLE in os.environ:
            process.did("applied: shares of a batch by speed")
