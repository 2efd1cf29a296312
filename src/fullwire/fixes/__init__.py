"""The fixes of a job: their gains and their settings, with one file for each kind.

A fix is the job's own step, predicted again with one change. Fixes that answer the verdict
come first. Within these, and within the others, fixes are sorted by their gains. A gain of less
than `LEAST_GAIN` of the step is left out. Among gains that are about equal, settings of the job
come before purchases.

Predictions start from the usual step, with one exception: the largest loss is a part that the
usual step lacks. An example is a rank that is late in every fifth step, or a metric that is summed
in every tenth. Then fixes start from the mean of all steps, the long ones included.

A new kind is a new file in this folder with a class that `register` marks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fullwire.fixes.fix import (
    Fix,
    FixKind,
    Risk,
    Seen,
    alone_without_s,
    fix_kinds,
    without_loss,
)

if TYPE_CHECKING:
    from fullwire.run.run import Run
    from fullwire.simulation.forecast import Forecast, Forecaster
    from fullwire.timeline.account import Account, Part
    from fullwire.timeline.steadiness import FewSteps

__all__ = ["Fix", "FixKind", "Fixes", "Risk", "Seen", "fix_kinds", "fixes", "fixes_by_account"]

LEAST_GAIN = 0.01  # Of the step.
_AS_GOOD = 0.02  # Of the step: gains that differ by less count as equal.
_REPEATS = 0.02  # A job that is started again repeats within this, if nothing delays it.
_SENT_BY_FEW = "send those collectives less often, or join them into one (torch.cat)"


@dataclass(frozen=True, slots=True)
class Fixes:
    """The fixes that help, the best first, with the step of their predictions."""

    found: tuple[Fix, ...]
    from_s: float
    tried: frozenset[str] = frozenset()  # The kinds that this job allows to predict.

    @property
    def sooner(self) -> bool | None:
        """Say whether transfers that begin sooner would help; None where it is unknown."""
        kinds = {key for key, kind in fix_kinds().items() if kind.begins_sooner}
        if not self.tried & kinds:
            return None
        return any(fix.kind in kinds for fix in self.found)

    @property
    def next_link(self) -> Fix | None:
        """Return the next link on sale that would help."""
        links = [fix for fix in self.found if fix.kind == "link"]
        return max(links, key=lambda fix: fix.step_s, default=None)

    def first_for(self, verdict: str) -> tuple[Fix, ...]:
        """Return the fixes, first those that answer this kind of verdict."""
        answers = {key for key, kind in fix_kinds().items() if verdict in kind.addresses}
        answers.add(verdict)
        return tuple(sorted(self.found, key=lambda fix: fix.kind not in answers))

    def of_one_worker(self) -> Fixes:
        """Return the fixes of a job of one worker: its step is T1, also with a fix."""
        return replace(
            self,
            found=tuple(
                replace(fix, forecast=replace(fix.forecast, scaling_factor=1.0))
                for fix in self.found
            ),
        )


@dataclass(frozen=True, kw_only=True)
class NoLongSteps(Fix):
    """All steps take as long as the usual ones."""

    template = "{few} long steps of {of} like the others"

    few: int
    of: int


def fixes(run: Run, job: Forecaster, account: Account) -> Fixes:
    """Predict all fixes that could help this job, the best first."""
    from fullwire.simulation.forecast import Forecast
    from fullwire.timeline.account import Part

    part, rare = _few_steps_with_the_loss(account)
    is_of_one = part in (Part.INPUT, Part.HOST)  # one worker has it too
    beyond_s = 0.0 if rare is None else max(account.step_s - job.measured_s, 0.0)
    from_s = job.measured_s + beyond_s
    considered = [
        _longer(fix, beyond_s, part, is_of_one=is_of_one)
        for kind in fix_kinds().values()
        for fix in kind.predict(run, job, account)
    ]
    if rare is not None:
        usual = rare.usual_s
        gone_s = max(job.measured_s - usual.value, 0.0) if is_of_one else 0.0
        given_s = alone_without_s(account, gone_s) if account.baseline_s else None
        all_usual = Forecast(
            step_s=usual.value,
            scaling_factor=min((given_s or job.alone_s - gone_s) / usual.value, 1.0),
            low_s=usual.low * (1 - _REPEATS),
            high_s=usual.high * (1 + _REPEATS),
        )
        considered.append(_no_long_steps(run, account, part, rare, all_usual))
    useful = [fix for fix in considered if fix.step_s < (1 - LEAST_GAIN) * from_s]
    useful.sort(
        key=lambda fix: (round(fix.step_s / (_AS_GOOD * from_s)), fix.kind == "link", fix.step_s)
    )
    tried = {fix.kind for fix in considered}
    if run.facts.buckets == "none":
        # Each gradient is one collective, as in a trace: smaller pieces may begin sooner, and
        # nothing tells for sure when they would be ready.
        tried -= {key for key, kind in fix_kinds().items() if kind.begins_sooner}
    return Fixes(tuple(useful), from_s, frozenset(tried))


def fixes_by_account(run: Run, account: Account) -> Fixes:
    """Return the fixes of losses beside the network, where no line rate allows a prediction.

    The account gives the step after the loss is removed, so these fixes have no interval.
    """
    from fullwire.timeline.account import Part

    step_s = account.step_s
    found = [fix for kind in fix_kinds().values() for fix in kind.by_account(run, account)]
    part, rare = _few_steps_with_the_loss(account)
    if rare is not None:
        all_usual = without_loss(
            account, step_s - rare.usual_s.value, of_one=part in (Part.INPUT, Part.HOST)
        )
        if all_usual is not None:
            found.append(_no_long_steps(run, account, part, rare, all_usual))
    return Fixes(tuple(sorted(found, key=lambda fix: fix.step_s)), step_s)


def _few_steps_with_the_loss(account: Account) -> tuple[Part, FewSteps | None]:
    """Return the part with the largest loss, and the few steps that have it, if others lack it."""
    from fullwire.timeline.account import Part
    from fullwire.timeline.steadiness import few_steps

    # Losses that some steps may have and others lack.
    in_few_steps = (Part.STRAGGLER, Part.INPUT, Part.HOST, Part.LATENCY)
    lost_s = {part: account.parts_s[part.key] for part in Part if part != Part.COMPUTE}
    part = max(lost_s, key=lost_s.__getitem__)
    return part, few_steps(account, part) if part in in_few_steps else None


def _no_long_steps(
    run: Run, account: Account, part: Part, rare: FewSteps, all_usual: Forecast
) -> NoLongSteps:
    """Return the fix of the few steps that have a loss, with the setting for this part."""
    own = fix_kinds().get(part.key)
    setting = (own.in_few_steps(run, account) if own else "") or _SENT_BY_FEW
    return NoLongSteps(kind=part.key, few=rare.few, of=rare.of, how=setting, forecast=all_usual)


def _longer(fix: Fix, beyond_s: float, part: Part, *, is_of_one: bool) -> Fix:
    """Return a fix of the usual step as one of the mean of all, which a part makes longer.

    `is_of_one` says that one worker has the part too: its step is then as much longer.
    """
    from fullwire.timeline.account import Part

    step_s = fix.step_s + beyond_s
    may_help = part == Part.LATENCY and fix.kind == "transport"
    surely_s = 0.0 if may_help else beyond_s
    longer = replace(
        fix.forecast,
        step_s=step_s,
        low_s=fix.low_s + surely_s,
        high_s=fix.high_s + beyond_s,
        scaling_factor=(fix.scaling_factor * fix.step_s + beyond_s * is_of_one) / step_s,
    )
    return replace(fix, forecast=longer)
