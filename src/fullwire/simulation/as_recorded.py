"""What a recording tells of a step beyond its messages: T1, contention, and what is unexplained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fullwire.run.centre import NORMAL_90
from fullwire.run.usual import Alone
from fullwire.simulation.grid import (
    Crowding,
    Residue,
    Subject,
)
from fullwire.simulation.messages import BY_BITS, messages_of
from fullwire.simulation.sweep import sweep
from fullwire.simulation.transport import FullTransport, MeasuredTransport, Transport

_LEAST_BESIDE = 0.1  # of the messages' time: less beside computing does not tell contention
_LEAST_T1_OFF = 0.04  # of T1, at the least: one worker is another run, which differs
_LEAST_BUSY = 0.5  # share of messages' work: in 265 recordings 0.66 at the least
_LIKELY_OFF = 0.3  # of the work for messages: a standard deviation of what it delays


def with_alone(subject: Subject, alone: Alone, transport: Transport) -> Subject:
    """Return the subject with the T1 of its account, and with the contention that this tells."""
    if alone.tells_contention:
        found = _with_contention_of(subject, alone, transport)
    else:
        waits = _sends_beside_computing(subject)
        step = subject.step.with_alone(round(alone.time_s * 1e9), waits=waits)
        found = replace(subject, step=step)
    return replace(found, step=found.step.with_parts(alone.input_s, alone.host_s))


def _with_contention_of(subject: Subject, alone: Alone, transport: Transport) -> Subject:
    """Return the subject with its contention, of which the other ranks' part stays as recorded."""
    times = 1 + alone.by_ranks_s / alone.time_s if alone.time_s else 1.0
    low_s, time_s, high_s = (times * each_s for each_s in (alone.low_s, alone.time_s, alone.high_s))
    unsent = alone._replace(low_s=low_s, time_s=time_s, high_s=high_s)
    found = with_contention(subject, unsent, transport)
    by_ranks_ns = min(round(alone.by_ranks_s * 1e9), found.step.alone_ns)
    crowded_ns = found.step.crowded_ns + by_ranks_ns
    step = replace(found.step, crowded_ns=crowded_ns, crowded_by_ranks_ns=by_ranks_ns)
    return replace(found, step=step)


def _sends_beside_computing(subject: Subject) -> bool:
    """Say whether it sends in all steps, as averages of parameters do not."""
    recorded = subject.recorded
    return recorded is None or subject.sends_beside_computing(*recorded.local_steps)


def with_contention(subject: Subject, alone: Alone, transport: Transport) -> Subject:
    """Return the subject with the T1 of its account; the rest of its step is contention.

    On processors it grows with the bytes that are sent while a worker computes, and with the time
    for which they are sent. On devices it grows with that time alone. What these do not explain,
    beyond the error of T1, all predictions keep as recorded. The turns of ranks on a processor are
    no part of a typical step.
    """
    alone_s, alone_ns, step = alone.time_s, round(alone.time_s * 1e9), subject.step
    # Averages of parameters slow no computing down: all that is not T1 is their exposed time.
    is_beside = _sends_beside_computing(subject)
    if step.step_ns > 0 and (alone_ns > step.step_ns or not is_beside):
        step = step.with_own_work(alone_ns / step.step_ns)
    off = (1 - alone.low_s / alone_s, alone.high_s / alone_s - 1) if alone_s else (0.0, 0.0)
    step = replace(step, crowded_ns=max(step.step_ns - alone_ns, 0), alone_off=off)
    if subject.recorded is None:
        return replace(subject, step=step)
    point = replace(subject.recorded, transports=(transport,))
    busy = min(step.processor_ns / max(step.step_ns, 1), 1.0)
    crowding = Crowding(busy_by_a_rank=busy or 1.0, is_by_time=subject.is_on_devices)
    taken = 0.0  # of the processors, by computing that messages delay
    if isinstance(transport, MeasuredTransport) and busy:
        [recorded_ranks] = subject.ranks_per_processor(point.workers).tolist()
        crowding = replace(crowding, recorded_ranks=recorded_ranks)
        if not crowding.is_by_time:
            taken = min(busy * recorded_ranks, 1.0)
    if is_beside and crowding.recorded_ranks <= 1:  # else ranks are late by turns of their own
        before_ns = step.crowded_ns
        step = step.with_lateness_as_contention(taken)
        lateness_share = 1 - before_ns / max(step.crowded_ns, 1) if step.crowded_ns else 0.0
        crowding = replace(crowding, lateness_share=lateness_share)
    crowded = replace(subject, step=step, crowding=crowding)
    [apart] = point.local_steps
    if not is_beside:
        return crowded
    [policy], [algorithm], [latency_s] = point.buckets, point.algorithms, point.latency_s
    telling = replace(crowded, crowding=replace(crowding, s_each=1.0))
    messages = messages_of(telling, policy, algorithm, latency_s, point)
    asked = slice(None), np.array([[[point.bandwidth_bps[0]]]]), transport, np.ones((1, 1, 1))
    exposed, all_bits = messages.exposed(*asked), float(messages.sent_bits(*asked).sum())
    beside, others_s = float(exposed.beside.sum()), float(exposed.beside_others_s.sum())
    t1_off = sum(off) / 2 / NORMAL_90  # of T1, a standard deviation
    work_s = float(exposed.work_s.sum())
    if crowding.is_by_time:
        beside += float(messages.waited_beside_s(exposed, step.waiting_ns * 1e-9).sum())
    else:
        t1_off = max(t1_off, _LEAST_T1_OFF)
        most = _most_busy_share(subject, crowding.recorded_ranks, step.own_s, work_s / apart)
        crowding = replace(crowding, recorded_work_s=work_s / apart, most_busy_share=most)
        crowded = replace(crowded, crowding=crowding)
    likely = 0.0
    if isinstance(transport, MeasuredTransport) and all_bits:
        for_bits = replace(transport, processor_s_per_hop=0.0)
        work_s = float(messages.exposed(asked[0], asked[1], for_bits, asked[3]).work_s.sum())
        crowding = replace(crowding, s_per_bit=work_s / all_bits)
        likely = taken * (crowding.s_per_bit / max(crowding.recorded_ranks, 1.0)) ** BY_BITS
    whole_s = float((exposed.busy_s + exposed.by_others_s).sum()) + others_s
    is_told = float(exposed.hidden_s.sum()) >= _LEAST_BESIDE * whole_s or likely * t1_off > 0
    if not beside + others_s or not is_told:
        return crowded
    beside = beside / apart + others_s  # in a step
    told = _Estimate(step.crowded_by_messages_s / beside, t1_off * alone_s / beside)
    if likely and told.off:  # on busy processors alone
        told = told.with_another(_Estimate(likely, likely * _LIKELY_OFF))
    crowded_s = step.crowded_by_messages_s
    rest_s = max(crowded_s - told.value * beside - NORMAL_90 * t1_off * alone_s, 0.0)
    crowding = replace(
        crowding,
        s_each=told.value,
        off_s_each=told.off,
        recorded_beside=beside,
        steady_share=rest_s / crowded_s if crowded_s else 0.0,
    )
    return replace(crowded, crowding=crowding)


def _most_busy_share(subject: Subject, ranks: float, own_s: float, work_s: float) -> float:
    """Return the share of the messages' work, at most, that kept the recorded processors busy."""
    if subject.step.measured_ns is None or not work_s:
        return 1.0
    room_s = subject.step.measured_ns * 1e-9 - own_s * ranks
    return min(max(room_s / (work_s * min(ranks, 1.0)), _LEAST_BUSY), 1.0)


class _Estimate(NamedTuple):
    value: float
    off: float  # a standard deviation

    def with_another(self, other: _Estimate) -> _Estimate:
        """Return the mean of both, by how sure they are."""
        weight, others = self.off**-2, other.off**-2
        value = (self.value * weight + other.value * others) / (weight + others)
        return _Estimate(value, (weight + others) ** -0.5)


def with_residue(subject: Subject, transport: Transport) -> Subject:
    """Return the subject with the residue between its measured step and this transport's replay."""
    return replace(subject, residues=residues(subject, [transport], [subject.step.measured_ns]))


def residues(
    subject: Subject, transports: Sequence[Transport], measured_ns: Sequence[int | None]
) -> tuple[Residue, ...]:
    """Return the residue between a measured step and its replay, for each of several transports.

    Where nothing was measured, the subject keeps the residue that it has.
    """
    if subject.recorded is None or None in measured_ns:
        return subject.residues * len(transports)
    # Its ranks were placed as recorded, wherever they are asked to be.
    step, plain = subject.step, replace(subject, residues=(Residue(),), ranks_per_host=None)
    point = replace(subject.recorded, transports=tuple(transports))
    full = (FullTransport(),) if subject.is_on_devices else ()
    played = sweep([plain], replace(point, transports=point.transports + full))
    [policy], [algorithm], [latency_s] = point.buckets, point.algorithms, point.latency_s
    messages = messages_of(plain, policy, algorithm, latency_s, point)
    rate_bps, unpacked = np.array([[[point.bandwidth_bps[0]]]]), np.ones((1, 1, 1))
    before_s = (step.waiting_ns + step.packing_ns) * 1e-9
    found = []
    steps_s, overheads_s = played["step_s"].tolist(), played["overhead_s"].tolist()
    full_s = steps_s.pop() if full else math.inf
    times_s = steps_s, overheads_s[: len(steps_s)]
    for at, transport, step_s, overhead_s in zip(measured_ns, transports, *times_s, strict=True):
        assert at is not None  # None in measured_ns has been asked
        hidden_s = messages.exposed(slice(None), rate_bps, transport, unpacked).hidden_s
        found.append(
            Residue(
                time_s=at * 1e-9 - step_s,
                at_overhead_s=overhead_s - before_s,
                at_hidden_s=float(np.max(hidden_s)),
                passes=point.accumulate[0] * point.local_steps[0],
                messages=max(messages.count, 1),
                of_full_s=at * 1e-9 - full_s,
            )
        )
    return tuple(found)
