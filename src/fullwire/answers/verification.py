"""Did a change have its predicted effect? This closes the loop from measurement to prediction."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isnan
from typing import Any

import numpy as np

from fullwire.answers.conditions import rate, worker_count
from fullwire.compression.codec import named_in, parse_choice
from fullwire.compression.codecs.fp16 import TORCH_HOOK
from fullwire.compression.compressor import Compressor
from fullwire.compression.method import FLOAT_BYTES
from fullwire.errors import FullwireError
from fullwire.findings.changes import (
    ChangedBackend,
    ChangedBuckets,
    ChangedHook,
    ChangedLinks,
    ChangedPasses,
    ChangedWorkers,
    Verified,
)
from fullwire.findings.finding import Finding
from fullwire.findings.scaling import ChangedLocalSteps, ChangedSums
from fullwire.fixes.fix import FILLS_THE_LINE, TIMES_ON_THE_WIRE
from fullwire.run.kinds import kinds_of, usual_step_s
from fullwire.run.run import Run
from fullwire.run.usual import local_steps_of
from fullwire.simulation.buckets import bucket_policy
from fullwire.simulation.calibrate import held_against
from fullwire.simulation.forecast import Forecaster, forecaster
from fullwire.simulation.grid import Subject
from fullwire.simulation.schedule import sent_in_buckets
from fullwire.simulation.typical import typical_step
from fullwire.timeline.alone import alone_by_account
from fullwire.timeline.passes import (
    equal_work,
    passes_add_up,
    passes_of_step,
    passes_that_each_sum,
    sums_once,
)
from fullwire.words import sentences

_CASTING_HOOKS = ("fp16_compress_hook", "bf16_compress_hook")
_ABOUT_WHOLE = 0.05  # times as many passes: one step more of a kind than of another is no other job


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The first run's prediction for the conditions of the second, and the measurement."""

    made: tuple[Finding, ...]  # the changes
    predicted_s: float
    low_s: float
    high_s: float
    full_s: float | None  # on a full line, if the second run has a backend that fills it
    measured_s: float

    @property
    def changes(self) -> tuple[str, ...]:
        """Return the changes, in words."""
        return sentences(self.made)

    @property
    def finding(self) -> Verified:
        """Return the prediction and the measurement."""
        return Verified(
            changes=self.made,
            predicted_s=self.predicted_s,
            low_s=None if isnan(self.low_s) else self.low_s,
            high_s=None if isnan(self.high_s) else self.high_s,
            full_s=self.full_s,
            measured_s=self.measured_s,
            off=abs(self.error),
            holds=self.holds,
        )

    @property
    def error(self) -> float:
        """Return the error of the prediction, as a share of the measurement."""
        return self.predicted_s / self.measured_s - 1

    @property
    def holds(self) -> bool:
        """Say whether the interval holds the measurement."""
        return self.low_s <= self.measured_s <= self.high_s


def verify(
    before: Run, after: Run, *, before_again: Sequence[Run] = (), after_again: Sequence[Run] = ()
) -> Verification | None:
    """Predict the second run from the first; None if that is impossible.

    A prediction needs a change that the predictor knows. Other recordings of the first run show
    more of its transport. Other recordings of the second run are further measurements of it.
    """
    if any(run.provenance.is_computed for run in (before, after)):
        return None  # a model's times verify no prediction
    if before.facts.hook is not None and before.facts.hook != after.facts.hook:
        return None  # the predictor cannot undo the first run's hook
    if before.facts.dilation != after.facts.dilation or equal_work([before], [after]).samples:
        return None  # its processors were other ones, or nobody recorded what other samples take
    passes = passes_of_step(before), passes_of_step(after)
    is_other_work = None not in passes and passes[0] != passes[1]
    # A prediction replays whole steps of the first run. The answer is then of one pass.
    passes_before, passes_after = (passes[0] or 1, passes[1] or 1) if is_other_work else (1, 1)
    times = round(passes_after / passes_before)
    has_others = is_other_work and not (passes_add_up(before) and passes_add_up(after))
    if has_others or abs(passes_after / passes_before - times) > _ABOUT_WHOLE or not times:
        return None  # a part of a step was never seen
    each_sums = bool(passes_that_each_sum(before)), bool(passes_that_each_sum(after))
    becomes_one_sum = each_sums == (True, False)
    if each_sums == (False, True) or (becomes_one_sum and not sums_once(after)):
        return None  # sums that a step was never seen with
    backends = tuple(run.facts.backend for run in (before, after) if run.facts.backend is not None)
    becomes_ours = backends == ("gloo", FILLS_THE_LINE)
    if len(set(backends)) > 1 and not becomes_ours:
        return None  # the other backend is unknown
    try:
        predictor = forecaster(before, calibrate=before_again, alone=alone_by_account(before))
        if before.facts.buckets is not None and _sums_itself(after):
            return None  # buckets in the backward pass do not tell how a script sums after it
        # Of several kinds all count; a typical step is of those with the usual gradients.
        measured_s = [
            usual_step_s(run)
            if kinds_of(run).kinds
            else (typical_step(run).measured_ns or 0) * 1e-9
            for run in (after, *after_again)
        ]
        changes = dict(_changes(before, after))
        if is_other_work:
            changes[ChangedPasses(passes=passes_after)] = (
                "accumulate",
                (times,),
            )
    except FullwireError:
        return None  # one of them has no step to predict from
    if predictor is None or not all(measured_s):
        return None
    if not (changes or becomes_ours or becomes_one_sum):
        return None
    if becomes_one_sum:
        if not predictor.sums_early:
            return None  # the sums of its earlier passes are unknown
        predictor = replace(predictor, subject=predictor.subject.each(_with_one_sum))
    axes: dict[str, Any] = dict(changes.values())
    are_buckets_new = before.facts.buckets is None and "buckets" in axes
    if not _sums_are_known(predictor, axes, are_buckets_new=are_buckets_new):
        return None
    if predictor.calibration is not None:
        unsure = held_against(predictor.calibration, [after, *after_again])
        predictor = replace(predictor, calibration=unsure)
    predictor = _laid_out(predictor, before, after, axes)
    change = sent_in_buckets if are_buckets_new else None
    ask = partial((predictor.filling() if becomes_ours else predictor).ask, change=change, **axes)
    found, full_s = ask(), ask(transports=(predictor.full(),)).step_s if becomes_ours else None
    return Verification(
        made=(
            *changes,
            *([ChangedSums()] if becomes_one_sum else ()),
            *([ChangedBackend(backend=FILLS_THE_LINE)] if becomes_ours else ()),
        ),
        predicted_s=found.step_s / passes_before,
        low_s=found.low_s / passes_before,
        high_s=found.high_s / passes_before,
        full_s=None if full_s is None else min(full_s, found.step_s) / passes_before,
        measured_s=float(np.mean(np.array(measured_s, np.float64))) / passes_after,
    )


def _sums_itself(run: Run) -> bool:
    """Say whether a job sums its gradients in other ways than in DDP's buckets."""
    others = typical_step(run).others
    return run.facts.buckets is None and (others.are_gradients or others.sum_gradients)


def _laid_out(predictor: Forecaster, before: Run, after: Run, axes: Collection[str]) -> Forecaster:
    """Return the first job with the second one's ranks on a host and its parts of parameters."""
    on_machines = after.facts.machines
    if on_machines and "workers" in axes:  # the hosts of the ranks are known
        ranks = -(-(after.facts.workers or 1) // on_machines)
        placed = predictor.subject.each(partial(replace, ranks_per_host=ranks))
        predictor = replace(predictor, subject=placed)
    if before.facts.fragments != after.facts.fragments:
        parts = predictor.subject.each(partial(replace, fragments=after.facts.fragments or 1))
        predictor = replace(predictor, subject=parts)
    return predictor


def _sums_are_known(predictor: Forecaster, axes: Collection[str], *, are_buckets_new: bool) -> bool:
    """Say whether the first run's sums of gradients tell those of the second run."""
    if are_buckets_new and not predictor.subject.sums_by_hand:
        return False
    return not (predictor.subject.keeps_gradients and {"compressors", "local_steps"} & set(axes))


def _with_one_sum(subject: Subject) -> Subject:
    """Return a subject without the sums of passes before the last: no measured step is like it."""
    step = subject.step.summed_once()
    return replace(subject, step=replace(step, measured_ns=None, measured_off=(0.0, 0.0)))


def _changes(before: Run, after: Run) -> Iterator[tuple[Finding, tuple[str, Any]]]:
    """Yield the predictable differences: each as a finding, and as an axis with its value."""

    known, now_known = before.facts.known(), after.facts.known()

    def differs(fact: str) -> bool:
        return fact in now_known and known.get(fact) != now_known[fact]

    if differs("line_rate_bps"):
        rate_bps = rate(after.facts.line_rate_bps)
        yield ChangedLinks(rate_bps=rate_bps), ("bandwidth_bps", (rate_bps,))
    if differs("workers"):
        workers = worker_count(after.facts.workers)
        yield ChangedWorkers(workers=workers), ("workers", (workers,))
    if differs("buckets"):
        buckets = str(after.facts.buckets)
        yield ChangedBuckets(buckets=buckets), ("buckets", (bucket_policy(buckets),))
    every = local_steps_of(after)
    if every != local_steps_of(before):
        told = ChangedLocalSteps(is_each=every == 1, apart=None if every == 1 else every)
        yield told, ("local_steps", (every,))
    if differs("hook") and (name := named_in(after.facts.hook)) is not None:
        sizes = [size // FLOAT_BYTES for size in typical_step(before).bytes.tolist()]
        codec = parse_choice(name).compressor(on_gpu=after.facts.backend == "nccl", sizes=sizes)
        yield ChangedHook(hook=str(after.facts.hook)), ("compressors", (codec,))
    if differs("wire") and before.facts.wire is None and after.facts.wire in TIMES_ON_THE_WIRE:
        packed = Compressor(ratio=TIMES_ON_THE_WIRE[after.facts.wire])
        yield ChangedHook(hook=f"{after.facts.wire} on the wire"), ("compressors", (packed,))
    if differs("hook") and after.facts.hook in _CASTING_HOOKS:
        cast = TORCH_HOOK.compressor(on_gpu=after.facts.backend == "nccl")
        yield ChangedHook(hook=str(after.facts.hook)), ("compressors", (cast,))
