"""The few long steps as short as the others: a fix of the part that only these have."""

from __future__ import annotations

from dataclasses import dataclass

from fullwire.fixes.fix import Fix
from fullwire.fixes.host import ELSEWHERE
from fullwire.fixes.input import LOADER
from fullwire.fixes.straggler import setting_for_late_ranks
from fullwire.simulation.forecast import Forecast, Forecaster
from fullwire.timeline.account import Account, Part, late_ranks
from fullwire.timeline.steadiness import FewSteps

_REPEATS = 0.02  # within this a job repeats that is begun anew, where nothing holds it up
_SETTINGS = {
    Part.INPUT: LOADER,
    Part.HOST: ELSEWHERE,
    Part.LATENCY: "what only they send: less often, or joined into one (torch.cat)",
}


@dataclass(frozen=True, kw_only=True)
class NoLongSteps(Fix):
    """Steps that all take as long as the usual ones."""

    template = "the {few} long of {of} steps as short as the others"

    few: int
    of: int


def no_long_steps(job: Forecaster, account: Account, part: Part, rare: FewSteps) -> Fix:
    """Try steps that all take as long as the usual ones."""
    usual = rare.usual_s
    return NoLongSteps(
        kind=part.key,
        few=rare.few,
        of=rare.of,
        how=_SETTINGS.get(part) or setting_for_late_ranks(account, late_ranks(account)),
        forecast=Forecast(
            step_s=usual.value,
            scaling_factor=min(job.alone_s / usual.value, 1.0),
            low_s=usual.low * (1 - _REPEATS),
            high_s=usual.high * (1 + _REPEATS),
        ),
    )
