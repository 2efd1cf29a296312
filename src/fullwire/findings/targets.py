"""The findings of a time to target: the best settings, and the evidence behind their steps."""

from __future__ import annotations

from fullwire.findings.finding import Finding


class Setting(Finding):
    """One setting of a prediction, with its time to the target."""

    template = (
        "{conditions:list}: {time_s:duration} ({low_s:duration} to {high_s:duration}), "
        "{steps:,.0f} {whole_steps:step|steps} of batch {batch:,.0f}, "
        "{device_hours:number} device-hours{cost}"
    )

    conditions: tuple[str, ...]
    time_s: float
    low_s: float
    high_s: float
    steps: float
    batch: float
    device_hours: float
    cost: str

    @property
    def whole_steps(self) -> int:
        """Return the steps as they are shown."""
        return round(self.steps)


class Soonest(Finding):
    """The setting that reaches the target first."""

    template = "Soonest at {goal}: {setting}."

    goal: str
    setting: Setting


class Cheapest(Finding):
    """The setting that takes the fewest device-hours, if it is another one."""

    template = "Cheapest: {setting}."

    setting: Setting


class CriticalFromRuns(Finding):
    """The critical batch, from the samples that several batches needed."""

    template = (
        "At the critical batch, {batch:number} samples ({low:number} to {high:number}), a training "
        "needs twice the samples of a tiny one; from runs at batches {batches:list}."
    )

    batch: float
    low: float
    high: float
    batches: tuple[str, ...]


class CriticalAtLeast(Finding):
    """Runs at several batches tell the least critical batch, and no largest one."""

    is_assumption = True
    template = (
        "The critical batch is {low:number} samples or more. Runs at batches {batches:list} do not "
        "tell how much more: they need about equal samples. It is taken to be {batch:number}, "
        "which is usual for such batches, and intervals hold all larger ones."
    )

    batch: float
    low: float
    batches: tuple[str, ...]


class CriticalFromNoise(Finding):
    """The critical batch, from gradient noise."""

    template = (
        "The critical batch is {batch:number} samples by gradient noise over {steps:,} steps "
        "({low:number} to {high:number}); a run at another batch (--curve) would tell it better."
    )

    batch: float
    low: float
    high: float
    steps: int


class CriticalAsGiven(Finding):
    """The critical batch, as the user gives it."""

    template = "The critical batch is taken as given: {batch:,.10g} samples."

    batch: float


class CriticalContradictsRuns(Finding):
    """The user gives a critical batch that runs at several batches do not show."""

    is_assumption = True
    template = (
        "The recorded curves contradict --critical-batch {given:,.10g}: by themselves they show "
        "{batch:number} samples ({low:number}{high:? to {high:number}}{is_open:? or more}). Steps "
        "follow the value that was given."
    )

    given: float
    batch: float
    low: float
    high: float | None  # None where the curves tell no largest one
    is_open: bool  # where they tell none


class GoalIsForecast(Finding):
    """A recorded curve ends above the goal."""

    is_assumption = True
    template = (
        "{run} ends before {goal}: its curve goes on to step {steps:,.0f} ({low:,.0f} to "
        "{high:,.0f}){is_far:?, more than four times what was recorded}."
    )

    run: str
    goal: str
    steps: float
    low: float
    high: float
    is_far: bool


class FarBatches(Finding):
    """Some batches are far beyond the recorded ones."""

    is_assumption = True
    template = (
        "{count:,} {count:setting|settings} {count:has a batch|have batches} more than four times "
        "the largest recorded one, {largest:,.0f}: their steps are extrapolated."
    )

    count: int
    largest: float


class SamplesCostAlike(Finding):
    """The time of computing follows the samples of a worker."""

    is_assumption = True
    template = (
        "{run}: computing is assumed to grow with a worker's samples, from the {samples:,} "
        "recorded. Small batches use a device less well."
    )

    run: str
    samples: int


class SamplesCostApart(Finding):
    """Runs at several batches show which part of computing follows the samples."""

    is_assumption = True
    template = (
        "A worker computes for {start_s:time} in each pass and {sample_s:time} for each sample, "
        "as {runs:list} show."
    )

    runs: tuple[str, ...]
    start_s: float
    sample_s: float


class CodecStepsUnknown(Finding):
    """Some compressors change gradients, and nobody measured the steps that this costs."""

    template = (
        "{codecs:list}: {codecs:it has|they have} no time to the target. Nobody measured how many "
        "more steps {codecs:its|their} errors cost.{measured:? Of {measured:and} it is known.}"
    )

    codecs: tuple[str, ...]
    measured: tuple[str, ...]  # the same compressors with other settings


class IdealCompression(Finding):
    """Ratios without a compressor change no gradient."""

    is_assumption = True
    template = (
        "{ratios:list}: an ideal compressor of this ratio is taken to need no more steps. A real "
        "one may need more."
    )

    ratios: tuple[str, ...]


class CodecIsLate(Finding):
    """A compressor sends a part of each gradient, and trainings are late by some steps."""

    template = (
        "{codec} is taken to need {steps:.0f} steps more ({low:.0f} to {high:.0f}), as in small "
        "trainings: it sends a part of each gradient, and the rest in later steps. Your model may "
        "differ."
    )

    codec: str
    steps: float
    low: float
    high: float


class CodecStepsMeasured(Finding):
    """A compressor needs more steps, as trainings of other models showed."""

    template = (
        "{codec} is taken to need {times:.2f} times the steps ({low:.2f} to {high:.2f}), as in "
        "small trainings. Your model may differ."
    )

    codec: str
    times: float
    low: float
    high: float


class LocalStepsCost(Finding):
    """Workers that average seldom end at a higher loss."""

    is_assumption = True
    template = (
        "Workers that average every few steps end at a higher loss. How much higher is taken from "
        "DiLoCo's papers, which use an outer optimizer{is_beyond:?. They tried 2 to 8 workers, 30 "
        "and 100 steps, and models of 35 million to 10 billion parameters. Some settings here lie "
        "outside, so their intervals are wider}."
    )

    is_beyond: bool


class BeyondTheCurve(Finding):
    """Some settings need a loss that the recorded curve does not show."""

    template = "{count:,} {count:setting has|settings have} no time to the target: {why}."

    count: int
    why: Finding


class BatchBelowWorkers(Finding):
    """Some settings have fewer samples in a batch than workers to take them."""

    template = (
        "{count:,} {count:setting has|settings have} no time to the target: the batch has not one "
        "sample for each worker."
    )

    count: int


class BatchIsUneven(Finding):
    """Some settings have a batch that their workers cannot share equally."""

    is_assumption = True
    template = (
        "In {count:,} {count:setting|settings} the workers cannot share the batch equally. All "
        "wait for a worker that has one sample more than others."
    )

    count: int


class LocalStepsBeyondTheCurve(Finding):
    """Workers that average seldom need a loss that the curve does not show."""

    template = "local steps {local_steps} of {workers} workers: {why}"

    local_steps: int
    workers: int
    why: str  # As the curve's reader put it.


class FewerStepsThanLocal(Finding):
    """A training ends before its workers have averaged once."""

    template = "local steps {local_steps}: the training has {steps:,.0f} steps in all"

    local_steps: int
    steps: float


class CurveWasCleaned(Finding):
    """Some values of a metric were given up by a restart, reported twice, or are no number."""

    template = (
        "{run}: left out of {metric}: {repeated:?{repeated:,} {repeated:value|values} with a later "
        "one at the same step, or given up by a restart}{has_both:?, and }"
        "{not_numbers:?{not_numbers:,} {not_numbers:value that is|values that are} no number}."
    )

    run: str
    metric: str
    repeated: int
    not_numbers: int

    @property
    def has_both(self) -> bool:
        """Return whether values were left out for both reasons."""
        return self.repeated > 0 and self.not_numbers > 0


class CurveIsLostLater(Finding):
    """A metric reached the goal, and later became no number."""

    is_assumption = True
    template = (
        "{run}: {goal} was reached before {metric} became no number, which it is from step "
        "{lost_at:,} on."
    )

    run: str
    goal: str
    metric: str
    lost_at: int


class CurveIsLeftOut(Finding):
    """A run's curve cannot tell when the goal is reached, and those of others can."""

    is_assumption = True
    template = "{why}. So this curve is left out, and the others count."

    why: str  # As the curve's reader put it.


class BatchChanges(Finding):
    """A job changed its batch during the training."""

    is_assumption = True
    template = (
        "{run}: its batch changes from {first:,.0f} to {last:,.0f} samples during the training. "
        "Samples count as they were taken, and after the recorded steps the last batch goes on. A "
        "predicted training has one batch in all its steps; the recorded mean is {mean:,.0f}."
    )

    run: str
    first: float
    last: float
    mean: float


class BatchContradictsRun(Finding):
    """The user gives another batch than a run knows."""

    is_assumption = True
    template = (
        "{run}: its batch is taken to be {given:,}, as --recorded-batch says. The run itself has "
        "{own:,}."
    )

    run: str
    own: int
    given: int


class StepLengthUnsure(Finding):
    """The interval of some times leaves out that of the step's length, which nothing tells."""

    template = (
        "In {count:,} {count:setting|settings} nothing tells how far the length of a step may be "
        "off: {count:the interval of its time leaves|the intervals of their times leave} that out."
    )

    count: int


class ReachedFirst(Finding):
    """One side reached a metric's value clearly before the other."""

    template = (
        "After is {share:.0%} {is_sooner:sooner|later} at {goal}: {after_s:duration}, before "
        "{before_s:duration} (95 %: after/before {low:ratio} to {high:ratio}){before_hours:?; "
        "{after_hours:number} and {before_hours:number} device-hours}{of_unknown:?. The devices of "
        "{of_unknown:and} are unknown, and so are device-hours}{of_late:?. Time before the first "
        "value counts at the pace of the later ones in {of_late:and}}."
    )

    goal: str
    before_s: float
    after_s: float
    low: float
    high: float
    before_hours: float | None  # of both sides, or of none
    after_hours: float | None
    of_unknown: tuple[str, ...]  # the runs that do not tell their devices
    of_late: tuple[str, ...]  # curves alone that begin late
    is_sooner: bool
    share: float


class ReachedAlike(Finding):
    """Both sides reached a metric's value at times that noise may explain."""

    template = (
        "No difference beyond noise at {goal}: after {after_s:duration}, before "
        "{before_s:duration} (95 %: after/before {low:ratio} to {high:ratio}){before_hours:?; "
        "{after_hours:number} and {before_hours:number} device-hours}{of_unknown:?. The devices of "
        "{of_unknown:and} are unknown, and so are device-hours}{of_late:?. Time before the first "
        "value counts at the pace of the later ones in {of_late:and}}. Runs that start anew differ "
        "by {scatter:.0%}."
    )

    goal: str
    before_s: float
    after_s: float
    low: float
    high: float
    before_hours: float | None  # of both sides, or of none
    after_hours: float | None
    of_unknown: tuple[str, ...]  # the runs that do not tell their devices
    of_late: tuple[str, ...]  # curves alone that begin late
    scatter: float


class NoiseTellsNothing(Finding):
    """The gradient noise of a run gives no critical batch."""

    template = "{why}."

    why: str


class SamplesLostToTheBatch(Finding):
    """The share of the samples that a smaller batch would not need."""

    template = (
        "{share:.0%} of the samples of this batch, {batch:,}, are lost to its size: the critical "
        "batch is {critical:number} by gradient noise ({low:number} to {high:number})."
    )

    share: float
    batch: int
    critical: float
    low: float
    high: float
