"""Play a measured step again under other conditions; the answer is a run like any other."""

from __future__ import annotations

import numpy as np

from fullwire.run.facts import Facts
from fullwire.run.run import Collectives, Gradients, Lane, Provenance, Run, Spans
from fullwire.simulation.grid import Grid, Subject
from fullwire.simulation.messages import Messages, messages_of
from fullwire.simulation.scenario import Scenario
from fullwire.simulation.schedule import (
    Timeline,
    fifo_timeline,
    priority_timeline,
)
from fullwire.simulation.typical import Step

_KEPT_FACTS = ("model", "device", "batch", "precision", "efficiency", "reduce_cost", "hook")


def replay(run: Run, subject: Subject, scenario: Scenario) -> Run:
    """Play the run's typical step under a scenario.

    All ranks do the same, so the first stands for them all; times are rounded to nanoseconds.
    """
    grid = Grid(
        workers=(scenario.workers,),
        bandwidth_bps=(scenario.rate_bps,),
        compressors=(scenario.compressor,),
        transports=(scenario.transport,),
        buckets=(scenario.buckets,),
        algorithms=(scenario.algorithm,),
        latency_s=(scenario.latency_s,),
        jitters=(scenario.jitter,),
        lane=scenario.lane,
        cluster=scenario.cluster,
        is_scattered=scenario.is_scattered,
    )
    messages = messages_of(subject, scenario.buckets, scenario.algorithm, scenario.latency_s, grid)
    timeline, overhead_s = _played(messages, scenario)
    is_alone = scenario.workers == 1
    step = subject.step
    first = np.zeros(len(step.bytes), np.int64)  # the only step, of the only rank
    return Run(
        provenance=Provenance(
            origin="simulated", source=run.provenance.source, basis=run.provenance.basis
        ),
        facts=run.facts.only(_KEPT_FACTS)
        | Facts(
            workers=scenario.workers,
            line_rate_bps=scenario.rate_bps,
            latency_s=scenario.latency_s,
            transport=str(scenario.transport),
            buckets=str(scenario.buckets),
            algorithm=scenario.algorithm,
            compression=str(scenario.compressor),
            lane=scenario.lane,
        ),
        spans=_spans(step, step.step_ns + _whole_ns(overhead_s), None if is_alone else timeline),
        gradients=Gradients(
            rank=first,
            step=first,
            order=np.arange(len(step.bytes)),
            bytes=step.bytes,
            ready_ns=step.forward_ns + step.ready_ns,
        ),
        collectives=Collectives.empty() if is_alone else _collectives(step, messages, timeline),
    )


def _played(messages: Messages, scenario: Scenario) -> tuple[Timeline, float]:
    rate_bps, ratio = (
        np.array([[[scenario.rate_bps]]]),
        np.array([[[scenario.compressor.ratio]]]),
    )
    cost_s = messages.cost_s(slice(None), rate_bps, scenario.transport, ratio)
    ready_s = [ready_ns * 1e-9 for ready_ns in messages.buckets.ready_ns.tolist()]
    on_lane = fifo_timeline if scenario.lane == "fifo" else priority_timeline
    timeline = on_lane(ready_s, [message_s[0, 0, 0] for message_s in cost_s])
    exposed = messages.exposed(slice(None), rate_bps, scenario.transport, ratio)
    overhead_s = messages.overhead_s(
        exposed, slice(None), scenario.transport, 1, 1, scenario.jitter
    )
    return timeline, float(overhead_s[0, 0, 0])


def _spans(step: Step, length_ns: int, timeline: Timeline | None) -> Spans:
    """Lay the step out from time 0: forward, backward, and the messages beside and after it."""
    begin_ns = step.forward_ns
    backward_end_ns = begin_ns + step.backward_ns
    rest_ns = step.step_ns - backward_end_ns
    rows: list[tuple[Lane, str, int, int]] = [
        ("host", "step", 0, length_ns),
        ("compute", "forward", 0, begin_ns),
        ("compute", "backward", begin_ns, backward_end_ns),
    ]
    if rest_ns > 0:
        rows.append(("compute", "optimizer", length_ns - rest_ns, length_ns))
    for start_s, end_s in zip(*_on_the_lane(timeline), strict=True):
        start_ns, end_ns = begin_ns + _whole_ns(start_s), begin_ns + _whole_ns(end_s)
        rows.append(("communication", "allreduce", start_ns, end_ns))
    lanes, names, starts, ends = zip(*rows, strict=True)
    none = np.zeros(len(rows), np.int64)
    return Spans(
        rank=none,
        step=none,
        lane=np.array(lanes, object),
        name=np.array(names, object),
        start_ns=np.array(starts),
        end_ns=np.array(ends),
    )


def _on_the_lane(timeline: Timeline | None) -> tuple[list[float], list[float]]:
    if timeline is None:
        return [], []
    return [*map(float, timeline.start_s)], [*map(float, timeline.end_s)]


def _collectives(step: Step, messages: Messages, timeline: Timeline) -> Collectives:
    buckets = messages.buckets
    count = len(buckets)
    starts, ends = _on_the_lane(timeline)
    return Collectives(
        rank=np.zeros(count, np.int64),
        step=np.zeros(count, np.int64),
        sequence=np.arange(count),
        group=_all("world", count),
        op=_all("allreduce", count),
        dtype=_all("float32", count),
        bytes=buckets.bytes,
        issue_ns=step.forward_ns + buckets.ready_ns,
        start_ns=step.forward_ns + np.array([_whole_ns(start_s) for start_s in starts]),
        end_ns=step.forward_ns + np.array([_whole_ns(end_s) for end_s in ends]),
    )


def _all(text: str, count: int) -> np.ndarray:
    return np.full(count, text, object)


def _whole_ns(time_s: float) -> int:
    return round(time_s * 1e9)
