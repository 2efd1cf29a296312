"""The conditions that a what-if varies: one record each, which gives every view its words.

The terminal, charts, sentences and the command line read this table, in the order in which people
state conditions. A `Change` makes another step of the recorded one. It brings its option, its
column and its effect, so that a new one needs no other code. The other conditions are axes of the
engine (`grid.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from fullwire.errors import UsageError
from fullwire.units import ratio, show_rate, show_time, shown

if TYPE_CHECKING:
    from fullwire.simulation.grid import Predictions, Subject

Changes: TypeAlias = Mapping[str, tuple[Any, ...]]  # by axis, the values that were asked for


class StepConditions(TypedDict, total=False):
    """The conditions of a step by their names, so that editors complete them."""

    bandwidth: Any
    workers: Any
    compression: Any
    codec: Any
    codec_costs: str | Path | None
    transport: Any
    buckets: Any
    algorithm: Any
    latency: Any
    cluster: Any
    nodes: Any
    placement: str
    accumulate: Any
    local_steps: Any
    jitter: Any
    lane: str
    compute_speed: Any
    ranks_per_host: Any
    fragments: Any


class AllConditions(StepConditions, total=False):
    """Those of a step, and those of a training that has a target."""

    target: str | float | None
    global_batch: Any
    curve: Any
    recorded_batch: Any
    critical_batch: float | None
    price: str | None


def _number(value: Any) -> str:
    return f"{value:g}"


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Condition:
    """One condition: its column, and how its values are shown."""

    axis: str  # the name of its column, with the unit
    heading: str  # of the column on a terminal
    title: str  # of an axis of a chart
    show: Callable[[Any], str] = str
    words: str = "{}"  # a value in a sentence, such as "{} workers"
    words_of_one: str = ""  # for the value 1, where not only a last "s" goes
    usual: object = None  # the default value, which sentences leave out
    across: int = 0  # how well it serves as the horizontal axis of a chart
    scale: float | None = None  # from its unit to a chart's; None where values are names

    def worded(self, value: Any) -> str:
        """Return a value as a sentence has it."""
        if value == 1 and self.words_of_one:
            return self.words_of_one
        is_counted = self.words.startswith("{} ")  # as 1 worker
        words = self.words.removesuffix("s") if is_counted and value == 1 else self.words
        return words.format(self.show(value))


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Change(Condition):
    """A condition that turns the recorded step into another one."""

    option: str  # of the command line, and the argument of `fw.whatif`
    help: str
    read: Callable[[Any], Any]  # one value, as people type it
    apply: Callable[[Subject, Any], Subject]
    keeps_step: bool = False  # only the place of its ranks changes
    as_recorded: Any = None  # the value that changes nothing

    def made(self, value: Any, subject: Subject) -> Subject:
        """Return the subject with the change made."""
        if value == self.as_recorded:
            return subject
        subject = self.apply(subject, value)
        if self.keeps_step:
            return subject
        # The measured length belongs to the recorded step and goes.
        step = replace(subject.step, measured_ns=None)
        return replace(subject, step=step, recorded=None)


def _at_own_work(subject: Subject, speed: float) -> Subject:
    """Return the subject with all that a worker does in a step so many times as fast.

    So it is with a part of the samples. Messages and additions take as long as before. Less of them
    hides behind computation.
    """
    step, others = subject.step, subject.step.others
    hidden_ns = round((others.total_ns - others.exposed_ns) / speed)
    alone = ("step_ns", "forward_ns", "backward_ns", "waiting_ns", "packing_ns", "processor_ns")
    beside = ("crowded_ns", "input_ns", "host_ns")
    return replace(
        subject,
        step=replace(
            step,
            **{name: round(getattr(step, name) / speed) for name in (*alone, *beside)},
            ready_ns=(step.ready_ns / speed).astype(step.ready_ns.dtype),
            meetings=step.meetings_after(1 / speed),
            spread=step.spread / speed,
            others=replace(others.slower(1 / speed), exposed_ns=others.total_ns - hidden_ns),
        ),
    )


def _at_speed(subject: Subject, speed: float) -> Subject:
    """Return the subject with computing so many times as fast.

    Waiting for data and the host's part take as long as before.
    """
    step = subject.step
    before_ns, after_ns = step.parts_of_host_ns
    before_ns += step.input_ns
    saved = 1 - 1 / speed
    faster = _at_own_work(subject, speed)
    return replace(
        faster,
        step=replace(
            faster.step,
            step_ns=faster.step.step_ns + round(saved * (before_ns + after_ns)),
            forward_ns=faster.step.forward_ns + round(saved * before_ns),
            spread=faster.step.spread + saved * (before_ns + after_ns) * 1e-9,
            input_ns=step.input_ns,
            host_ns=step.host_ns,
        ),
    )


def _whole(what: str, most: int) -> Callable[[Any], int]:
    """Return a reader of whole numbers from 1."""

    def read(value: Any) -> int:
        text = str(value).strip()
        is_whole = text.isascii() and text.isdigit() and len(text) <= 12
        if not (is_whole and 1 <= int(text) <= most):
            raise UsageError(
                f"{what}: expected a whole number from 1 to {most:,}, got {shown(value)}"
            )
        return int(text)

    return read


_TABLE = (
    Condition(axis="run", heading="run", title=""),
    Condition(
        axis="workers",
        heading="workers",
        title="workers",
        show=_number,
        words="{} workers",
        across=9,
        scale=1,
    ),
    Condition(
        axis="batch",
        heading="batch",
        title="samples in a step",
        show=_number,
        words="batch {}",
        across=8,
        scale=1,
    ),
    Condition(
        axis="bandwidth_bps",
        heading="link",
        title="bandwidth (Gbps)",
        show=show_rate,
        across=10,
        scale=1e-9,
    ),
    Condition(
        axis="compression",
        heading="compression",
        title="compression ratio",
        show=lambda ratio: f"{ratio:.4g}x",
        words="{} compression",
        usual=1,
        across=8,
        scale=1,
    ),
    Condition(
        axis="codec",
        heading="codec",
        title="compressor",
        show=lambda name: str(name or "free"),
        words="codec {}",
        across=1,
    ),
    Condition(axis="buckets", heading="buckets", title="buckets", words="buckets {}", across=4),
    Condition(axis="algorithm", heading="algorithm", title="algorithm", across=3),
    Condition(
        axis="transport", heading="transport", title="transport", words="transport {}", across=5
    ),
    Condition(
        axis="latency_s",
        heading="latency",
        title="latency (us)",
        show=show_time,
        words="latency {}",
        usual=0,
        across=7,
        scale=1e6,
    ),
    Condition(
        axis="accumulate",
        heading="passes",
        title="passes between sends",
        show=lambda value: f"{value:.4g}" if value < 10**4 else f"{value:,.0f}",
        words="gradients of {} passes",
        words_of_one="gradients of 1 pass",
        usual=1,
        across=6,
        scale=1,
    ),
    Condition(
        axis="local_steps",
        heading="local steps",
        title="local steps",
        show=_number,
        words="local steps {}",
        usual=1,
        across=6,
        scale=1,
    ),
    Condition(
        axis="jitter",
        heading="jitter",
        title="jitter",
        words="jitter {}",
        usual="recorded",
        across=2,
    ),
    Change(
        axis="compute_speed",
        heading="compute speed",
        title="speed of computation",
        show=lambda speed: f"{speed:.4g}x",
        words="computation {} as fast",
        usual=1,
        as_recorded=1,
        across=6,
        scale=1,
        option="compute_speed",
        help="Speed of a worker's computing, 1 as recorded: 1,1.5,2",
        read=lambda value: ratio(value, "compute speed"),
        apply=_at_speed,
    ),
    Change(
        axis="ranks_per_host",
        heading="ranks per host",
        title="ranks on each host",
        show=_number,
        words="ranks per host {}",
        across=6,
        scale=1,
        option="ranks_per_host",
        help="Ranks that share the processors of a host: 1,2,8 [default: as recorded]",
        read=_whole("ranks per host", 10**12 - 1),
        apply=lambda subject, ranks: replace(subject, ranks_per_host=ranks),
        keeps_step=True,
    ),
    Change(
        axis="fragments",
        heading="fragments",
        title="fragments",
        show=_number,
        words="fragments {}",
        usual=1,
        across=6,
        scale=1,
        option="fragments",
        help="Parts of the parameters that --local-steps averages one after the other, each beside "
        "the next step, as Streaming DiLoCo does; they divide the local steps: 1,5",
        read=_whole("fragments", 10_000),
        apply=lambda subject, fragments: replace(subject, fragments=fragments),
    ),
)
CONDITIONS: Mapping[str, Condition] = {condition.axis: condition for condition in _TABLE}
CHANGES: Mapping[str, Change] = {
    change.option: change for change in _TABLE if isinstance(change, Change)
}


def changed(
    subjects: Sequence[Subject],
    changes: Changes,
    others: Mapping[str, Change] = MappingProxyType({}),
) -> list[Subject]:
    """Return each subject once for every combination of changes; the last changes fastest.

    `others` stand for the usual changes of their options.
    """
    changed_subjects = []
    for subject, values in itertools.product(subjects, itertools.product(*changes.values())):
        wanted = dict(zip(changes, values, strict=True))
        for change in {**CHANGES, **others}.values():
            if change.axis in wanted:
                subject = subject.each(partial(change.made, wanted[change.axis]))
        changed_subjects.append(subject)
    return changed_subjects


def changed_in_pairs(
    subjects: Sequence[Subject], changes: Changes, pairs: Sequence[tuple[int, float]]
) -> tuple[list[Subject], Changes, tuple[int, ...]]:
    """Return each subject at the speed of each pair, and the number of workers that goes with it.

    At such a speed a worker takes a part of the samples: then all of its work is shorter, and
    computing may be faster besides. The number of workers stands once for each kind of steps of a
    subject. The speeds stand along the axis of the computing speed.
    """
    workers, speeds = zip(*pairs, strict=True)
    [computing] = changes.get("compute_speed", (1.0,))
    changes = {**changes, "compute_speed": speeds}
    at = list(changes).index("compute_speed")
    of_changes = itertools.product(*{**changes, "compute_speed": workers}.values())
    of_subjects = [values[at] for values in of_changes] * len(subjects)

    def at_both(subject: Subject, speed: float) -> Subject:
        return _at_speed(_at_own_work(subject, speed), computing)

    as_recorded = 1 if computing == 1 else None
    of_batch = replace(CHANGES["compute_speed"], apply=at_both, as_recorded=as_recorded)
    at_speeds = changed(subjects, changes, {"compute_speed": of_batch})
    own = [
        count
        for subject, count in zip(at_speeds, of_subjects, strict=True)
        for _ in range(max(len(subject.kinds), 1))
    ]
    return at_speeds, changes, tuple(own)


def with_names(subjects: Sequence[Subject], changes: Changes) -> list[Subject]:
    """Return changed subjects whose names say how they were changed."""
    combinations = list(itertools.product(*changes.values()))
    return [
        replace(
            subject,
            name=", ".join(
                [
                    subject.name,
                    *(
                        CONDITIONS[axis].worded(value)
                        for axis, value in zip(changes, values, strict=True)
                    ),
                ]
            ),
        )
        for subject, values in zip(
            subjects, combinations * (len(subjects) // len(combinations)), strict=True
        )
    ]


def unfolded(predictions: Predictions, changes: Changes) -> Predictions:
    """Return the predictions of changed subjects, with an axis of its own for each change."""
    if not changes:
        return predictions
    lengths = [len(values) for values in changes.values()]
    runs, *others = predictions.axes
    together = 1
    for length in lengths:
        together *= length
    names = predictions.axes[runs][::together]
    return replace(
        predictions,
        passes=predictions.passes[::together],
        axes={runs: names, **changes, **{axis: predictions.axes[axis] for axis in others}},
        measures={
            name: measure.reshape(measure.shape[0] // together, *lengths, *measure.shape[1:])
            for name, measure in predictions.measures.items()
        },
    )
