"""What would make a job faster, by how much, and with which setting: one file a kind of fix.

A fix is the job's own step, predicted again with one thing changed. They come sorted by what they
gain; what gains less than `LEAST_GAIN` of the step is not worth a meeting. Where gains are as good
as equal, what is set in the job comes before what is bought.

The step is the median one, but where a part that the median does not have is the largest loss: of a
rank that is late in every fifth step, say, or of metrics that are summed in every tenth. Then fixes
are of the mean step, the long ones included.

A new kind is a new file in this folder with a class that `register` marks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fullwire.fixes.fix import Fix, FixKind, Risk, fix_kinds
from fullwire.run.run import Run
from fullwire.simulation.forecast import Forecast, Forecaster
from fullwire.timeline.account import Account, Part
from fullwire.timeline.steadiness import few_steps

__all__ = ["Fix", "FixKind", "Fixes", "Risk", "fix_kinds", "fixes", "fixes_by_account"]

LEAST_GAIN = 0.01  # of the step
_AS_GOOD = 0.02  # of the step: gains that differ by less are as good as equal
# Losses that some steps may have and others do not.
_IN_FEW_STEPS = (Part.STRAGGLER, Part.INPUT, Part.HOST, Part.LATENCY)
_REPEATS = 0.02  # within this a job repeats that is begun anew, where nothing holds it up
_SENT_BY_FEW = "what only they send: less often, or joined into one (torch.cat)"


@dataclass(frozen=True, slots=True)
class Fixes:
    """What would help, the most helpful first, the step that it is held against, and its T1."""

    found: tuple[Fix, ...]
    from_s: float
    alone_s: float
    tried: frozenset[str] = frozenset()  # the kinds that this job allows to predict

    @property
    def sooner(self) -> bool | None:
        """Say whether transfers that begin sooner would help; None where that is not known."""
        kinds = {key for key, kind in fix_kinds().items() if kind.begins_sooner}
        if not self.tried & kinds:
            return None
        return any(fix.kind in kinds for fix in self.found)

    @property
    def next_link(self) -> Fix | None:
        """Return the next link on sale that would help."""
        links = [fix for fix in self.found if fix.kind == "link"]
        return max(links, key=lambda fix: fix.step_s, default=None)

    def first_for(self, verdict: str, alone_s: float | None = None) -> tuple[Fix, ...]:
        """Return them with those first that are an answer to this kind of verdict.

        Scaling factors are held against a baseline's T1, where one is given: a fix that one worker
        would profit from too has shortened the T1 that it was predicted with.
        """
        times = 1.0 if alone_s is None else alone_s / self.alone_s
        answers = {key for key, kind in fix_kinds().items() if verdict in kind.addresses}
        answers.add(verdict)
        return tuple(
            replace(fix, forecast=replace(fix.forecast, scaling_factor=times * fix.scaling_factor))
            for fix in sorted(self.found, key=lambda fix: fix.kind not in answers)
        )


@dataclass(frozen=True, kw_only=True)
class NoLongSteps(Fix):
    """Steps that all take as long as the usual ones."""

    template = "{few} long steps of {of} like the others"

    few: int
    of: int


def fixes(run: Run, job: Forecaster, account: Account) -> Fixes:
    """Predict everything that could help this job, the most helpful first."""
    lost_s = {part: account.parts_s[part.key] for part in Part if part != Part.COMPUTE}
    part = max(lost_s, key=lost_s.__getitem__)
    rare = few_steps(account, part) if part in _IN_FEW_STEPS else None
    beyond_s = 0.0 if rare is None else max(account.step_s - job.measured_s, 0.0)
    from_s = job.measured_s + beyond_s
    considered = [
        _longer(fix, beyond_s, part)
        for kind in fix_kinds().values()
        for fix in kind.predict(run, job, account)
    ]
    if rare is not None:
        usual, own = rare.usual_s, fix_kinds().get(part.key)
        all_usual = Forecast(
            step_s=usual.value,
            scaling_factor=min(job.alone_s / usual.value, 1.0),
            low_s=usual.low * (1 - _REPEATS),
            high_s=usual.high * (1 + _REPEATS),
        )
        setting = (own.in_few_steps(run, account) if own else "") or _SENT_BY_FEW
        considered.append(
            NoLongSteps(kind=part.key, few=rare.few, of=rare.of, how=setting, forecast=all_usual)
        )
    useful = [fix for fix in considered if fix.step_s < (1 - LEAST_GAIN) * from_s]
    useful.sort(
        key=lambda fix: (round(fix.step_s / (_AS_GOOD * from_s)), fix.kind == "link", fix.step_s)
    )
    tried = frozenset(fix.kind for fix in considered)
    return Fixes(tuple(useful), from_s, job.alone_s, tried)


def fixes_by_account(run: Run, account: Account) -> Fixes:
    """Take off the step what is lost beside the network, where no line rate allows a prediction.

    It is what the account says that a step would be without, so there is no interval.
    """
    step_s, alone_s = account.step_s, account.alone_s
    found = [fix for kind in fix_kinds().values() for fix in kind.by_account(run, account)]
    return Fixes(tuple(sorted(found, key=lambda fix: fix.step_s)), step_s, alone_s)


def _longer(fix: Fix, beyond_s: float, part: Part) -> Fix:
    """Return a fix of the median step as one of a mean step that a part makes so much longer."""
    step_s = fix.step_s + beyond_s
    may_help = part == Part.LATENCY and fix.kind == "transport"
    surely_s = 0.0 if may_help else beyond_s
    longer = replace(
        fix.forecast,
        step_s=step_s,
        low_s=fix.low_s + surely_s,
        high_s=fix.high_s + beyond_s,
        scaling_factor=fix.scaling_factor * fix.step_s / step_s,
    )
    return replace(fix, forecast=longer)
