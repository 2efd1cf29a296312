"""The findings of a tuning: how each trial ended, why a fix does not hold, and the progress."""

from __future__ import annotations

from fullwire.findings.finding import Finding


class TimeRange(Finding):
    """The ends of an interval, in brackets."""

    template = " ({low_s:time} to {high_s:time})"

    low_s: float
    high_s: float


def time_range(low_s: float | None, high_s: float | None) -> TimeRange | None:
    """Return the ends of an interval, if there is one."""
    return None if low_s is None or high_s is None else TimeRange(low_s=low_s, high_s=high_s)


class NoGain(Finding):
    """The first look at a fix is no faster than the best so far."""

    template = "no gain"


class NoTimeToRepeat(Finding):
    """The first look is faster, and the budget has no time for a second one."""

    template = "no time left to repeat it"


class WithinNoise(Finding):
    """Pairs of recordings differ by no more than the job does by itself."""

    template = "within noise"


class Faster(Finding):
    """Pairs of recordings show a gain."""

    template = "{times:.2f}x"

    times: float


class NotDecided(Finding):
    """The search was interrupted within a trial."""

    template = "not decided: interrupted"


class AnotherGainsMore(Finding):
    """The look at a fix is faster, and the look at another one still more so."""

    template = "put off: another fix gains more"


class Replaced(Finding):
    """Another setting of a kept fix gains more."""

    template = "replaced by another setting"


class LossesDiffer(Finding):
    """The first losses are not those of the job as it is."""

    template = "its first losses differ by {by:.2g} of the loss"

    by: float


class TrialEnded(Finding):
    """The recording of a trial was refused, or ended early."""

    template = "{why}"

    why: str  # As the job, or the refusal, put it.


class FixToldWhy(Finding):
    """A process of the job says why it does not have the fix."""

    template = "{did}"

    did: str


class NobodyCalled(Finding):
    """A fix changes a call that no process made."""

    template = "not applied: no process called the function that it changes"


class NobodyLoadedTorch(Finding):
    """Variables make a fix, so the job has it, and no process could say so."""

    template = "its variables are set; no process loaded torch"


class AppliedInSome(Finding):
    """Some ranks have a fix that each of them needs."""

    template = "applied in {having} of {ranks} ranks"

    having: int
    ranks: int


class AsFastWithout(Finding):
    """A fix that was kept early no longer helps beside those after it."""

    template = "rolled back: as fast without it"


class LastShowNoGain(Finding):
    """The tuned job is no faster than the job as it is in their last recordings."""

    template = "rolled back: the last recordings show no gain"


class RecordingAsItIs(Finding):
    """The first recording begins."""

    template = "recording the job as it is, {path}"

    path: str


class JobWrites(Finding):
    """The job writes, moves or removes a file outside of its working directory."""

    template = "warning: the job changes {path}, in each trial anew"

    path: str


class Before(Finding):
    """The step of the job as it is."""

    template = "before: {step_s:time} a step"

    step_s: float


class BudgetUsedUp(Finding):
    """No time is left for another trial."""

    template = "the budget is used up"


class TrialBegins(Finding):
    """A fix is about to be tried."""

    template = (
        "trial {number}: {change} ({fix}), predicted {predicted_s:time}{interval}, "
        "{left_s:duration} left"
    )

    number: int
    change: str
    fix: str
    predicted_s: float
    interval: TimeRange | None
    left_s: float


class TrialResult(Finding):
    """A trial has ended."""

    template = "  {is_kept:kept|left out}: {outcome}{measured_s:?, measured {measured_s:time}}"

    is_kept: bool
    outcome: Finding
    measured_s: float | None


class EarlierTrialResult(TrialResult):
    """A trial has ended after others had begun."""

    template = "  trial {number}," + TrialResult.template[1:]

    number: int


class Without(Finding):
    """A kept fix is left out once more."""

    template = "without {fix}, {left_s:duration} left"

    fix: str
    left_s: float


class AsFastWithoutIt(Finding):
    """The job is as fast without a fix that was kept."""

    template = "  rolled back: the job is as fast without it"


class RecordingBoth(Finding):
    """The job as it is and the tuned one are recorded for the last time."""

    template = "recording both once more"


class NotHeldOnceMore(Finding):
    """The last recordings failed."""

    template = "not held against the job as it is once more: {why}"

    why: str


class Interrupted(Finding):
    """The user has ended the search."""

    template = "interrupted: the best so far is kept"


class Outcome(Finding):
    """Notes of a job's processes about a fix."""

    template = "fix {fix}: {did}, in {processes} {processes:process|processes}"

    fix: str
    did: str  # As the processes put it.
    processes: int


class NoOutcome(Finding):
    """No process noted anything about a fix."""

    template = "fix {fix}: {why}"

    fix: str
    why: Finding


class Followed(Finding):
    """The ranks of this host took part in a trial of another host's tuning."""

    template = "trial {trial} of rank 0's host: {fixes:list}, status {status}"

    trial: str
    fixes: tuple[str, ...]
    status: int


class NothingCame(Finding):
    """No fixes came from rank 0's host."""

    template = "no fixes came from rank 0: expected `fullwire run` or `fullwire tune` on its host"


class HostWorkTakes(Finding):
    """Work of the script between steps, by its line."""

    template = "{call} takes {step_s:time} of each step, at {place}"

    call: str
    step_s: float
    place: str  # file:line


class NothingHelped(Finding):
    """No fix was kept."""

    template = "the same: no fix helped by more than noise"


class After(Finding):
    """The step of the tuned job."""

    template = (
        "{step_s:time} a step{interval}: {times:.2g}x"
        "{is_exact:, same results up to the order of sums|}"
    )

    step_s: float
    interval: TimeRange | None
    times: float  # As fast as before.
    is_exact: bool


class RiskierFix(Finding):
    """A fix that was not tried, because it may change results."""

    template = "With --allow {risk}: {change}, predicted {predicted_s:time}{interval}"

    risk: str
    change: str
    predicted_s: float
    interval: TimeRange | None


class LastShowNoise(Finding):
    """The last recordings of both jobs differ by no more than noise."""

    template = "the two last recordings together show no more than noise: tune with more --steps"


class LossesOfKept(Finding):
    """A fix that was kept changes the first losses."""

    template = "{change}: the first losses differ by {difference:.2g} of the loss"

    change: str
    difference: float  # Relative to the mean loss.


class RecipeOfAnotherCommand(Finding):
    """A recipe was made for another command."""

    template = "command: the recipe was made for {command}"

    command: str


class MaskedWordsDiffer(Finding):
    """The secrets of a command are not those of the recipe's."""

    template = "command: the words that are masked in the recipe are others"


class OtherVersion(Finding):
    """A recipe was made with another version of a program."""

    template = "{program}: expected {expected}, got {got}"

    program: str
    expected: str
    got: str
