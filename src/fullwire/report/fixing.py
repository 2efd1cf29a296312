"""Fixes for the terminal: the trials of a tuning, and the kinds of fixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fullwire.findings.tuning import (
    After,
    HostWorkTakes,
    LastShowNoise,
    LossesOfKept,
    NothingHelped,
    RiskierFix,
    time_range,
)
from fullwire.report.terminal import print_table, say, say_command
from fullwire.units import show_time
from fullwire.words import sentence

if TYPE_CHECKING:
    from fullwire.answers.trials import Tuning
    from fullwire.fixes import FixKind


def print_tuning(result: Tuning) -> None:
    """Print the trials of a tuning, the step before and after, and how to apply the recipe."""
    before, after = (
        ends or (None, None) for ends in (result.before_interval, result.after_interval)
    )
    say(f"  before  {show_time(result.before_s)} a step{_between(*before)}")
    rows = [
        [
            str(number),
            trial.words,
            f"{show_time(trial.predicted_s)}{_between(trial.low_s, trial.high_s)}",
            "-" if trial.measured_s is None else show_time(trial.measured_s),
            "yes" if trial.kept else f"no: {trial.reason}",
        ]
        for number, trial in enumerate(result.trials, 1)
    ]
    if rows:
        print_table(["trial", "fix", "predicted", "measured", "kept"], rows, {"fix", "kept"})
    for work in result.host_work:
        say(sentence(HostWorkTakes(call=work.call, step_s=work.step_s, place=work.place)))
    if not result.kept:
        say(f"  after   {sentence(NothingHelped())}")
        _say_riskier(result)
        return
    tuned = After(
        step_s=result.after_s,
        interval=time_range(*after),
        times=result.before_s / result.after_s,
        is_exact=all(trial.risk == "exact" for trial in result.kept),
    )
    say(f"  after   {sentence(tuned)}")
    if result.is_significant is False:
        say(f"  {sentence(LastShowNoise())}")
    for trial in result.kept:
        if trial.risk != "exact" and trial.loss_difference is not None:
            say(sentence(LossesOfKept(change=trial.words, difference=trial.loss_difference)))
    _say_riskier(result)
    say("")
    say_command(f"Next: fullwire run --recipe {result.recipe} -- {result.command}")


def _say_riskier(result: Tuning) -> None:
    if (fix := result.riskier) is not None:
        told = RiskierFix(
            risk=fix.risk,
            change=fix.why,
            predicted_s=float(fix.predicted_s or 0.0),
            interval=time_range(fix.low_s, fix.high_s),
        )
        say(f"  {sentence(told)}")


def _between(low_s: float | None, high_s: float | None) -> str:
    found = time_range(low_s, high_s)
    return "" if found is None else sentence(found)


def print_fix_kinds(kinds: Sequence[FixKind]) -> None:
    """Print the fixes: first those that `fullwire apply` can apply, then what the others need."""
    can = [kind for kind in kinds if kind.example]
    rows = [[f"{kind.key}:{kind.example}", kind.risk, kind.setting] for kind in can]
    print_table(["applied with", "risk", "setting"], rows, {"applied with", "risk", "setting"})
    print()
    rest = [[kind.label, kind.risk, kind.needs] for kind in kinds if not kind.example]
    print_table(["not applied", "risk", "needs"], rest, {"not applied", "risk", "needs"})
