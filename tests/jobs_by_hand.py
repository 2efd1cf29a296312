"""Jobs of several ranks written down by hand, in milliseconds, for tests of the account."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fullwire.run.facts import FactValue, named
from fullwire.run.gaps import gaps_of
from fullwire.run.run import Collectives, Gradients, Origin, Provenance, Run, Spans

MS = 1_000_000  # nanoseconds
GIGABIT = {"line_rate_bps": 1e9}  # 125,000 bytes a millisecond


@dataclass(frozen=True)
class Rank:
    """The work of one rank in each of its steps; collectives are (bytes, issue, end)."""

    length: float
    spans: Sequence[tuple[str, str, float, float]] = ()
    collectives: Sequence[tuple[int, float, float]] = ()


def a_job(
    *ranks: Rank,
    steps: int = 5,
    facts: Mapping[str, FactValue] | None = None,
    origin: Origin = "measured",
    missing: tuple[str, ...] = (),
    op: str = "allreduce",
    workers: int | None = None,
) -> Run:
    """Make a run in which every rank repeats its step; all collectives are in one group."""
    spans: list[tuple[int, int, str, str, float, float]] = []
    collectives: list[tuple[int, int, int, int, float, float]] = []
    for number, rank in enumerate(ranks):
        for step in range(steps):
            begin = step * rank.length
            spans.append((number, step, "host", "step", begin, begin + rank.length))
            spans += [(number, step, *names, begin + a, begin + b) for *names, a, b in rank.spans]  # type: ignore[misc]
            collectives += [
                (number, step, step * len(rank.collectives) + order, size, begin + a, begin + b)
                for order, (size, a, b) in enumerate(rank.collectives)
            ]
    count = workers or len(ranks)
    return Run(
        provenance=Provenance(origin=origin, source="a test"),
        facts=named({"workers": count, **(GIGABIT if facts is None else facts)}),
        gaps=gaps_of(missing),
        spans=spans_of(spans),
        collectives=_collectives(collectives, op),
    )


def spans_of(rows: Sequence[tuple[int, int, str, str, float, float]]) -> Spans:
    rank, step, lane, name, start, end = zip(*rows, strict=True)
    return Spans(
        rank=np.array(rank),
        step=np.array(step),
        lane=np.array(lane, object),
        name=np.array(name, object),
        start_ns=in_ns(start),
        end_ns=in_ns(end),
    )


def _collectives(rows: Sequence[tuple[int, int, int, int, float, float]], op: str) -> Collectives:
    if not rows:
        return Collectives.empty()
    rank, step, sequence, size, issue, end = zip(*rows, strict=True)
    return Collectives(
        rank=np.array(rank),
        step=np.array(step),
        sequence=np.array(sequence),
        group=np.full(len(rows), "0", object),
        op=np.full(len(rows), op, object),
        dtype=np.full(len(rows), "float32", object),
        bytes=np.array(size),
        issue_ns=in_ns(issue),
        start_ns=in_ns(issue),
        end_ns=in_ns(end),
    )


def in_ns(times_ms: Sequence[float]) -> np.ndarray:
    return np.array([round(each * MS) for each in times_ms], np.int64)


def a_trained_job(
    *,
    ranks: int = 3,
    steps: int = 6,
    buckets: int = 4,
    late_ms: float = 0.0,
    by_turns: bool = False,
) -> Run:
    """Make a run of DDP on 1 Gbps: 100 ms of work, and buckets of 1 MB.

    The last rank is late in each step; or each rank is, by turns.
    """
    spans, collectives, gradients = [], [], []
    length = 110.0 + late_ms + 9 * buckets
    for rank in range(ranks):
        for step in range(steps):
            is_late = rank == (step % ranks if by_turns else ranks - 1)
            late = late_ms if is_late else 0.0
            begin = step * length
            spans += [
                (rank, step, lane, name, begin + a, begin + b)
                for lane, name, a, b in (
                    ("host", "step", 0.0, length),
                    ("compute", "forward", 1.0, 40.0 + late),
                    ("compute", "backward", 40.0 + late, 100.0 + late),
                    ("compute", "optimizer", length - 2, length - 1),
                )
            ]
            for order in range(buckets):
                ready = begin + 40.0 + late + 60.0 * (order + 1) / buckets
                last = begin + 40.0 + late_ms + 60.0 * (order + 1) / buckets
                gradients.append((rank, step, order, 1_000_000, ready))
                collectives.append(
                    (rank, step, step * buckets + order, 1_000_000, ready, last + 12.0)
                )
    rank_, step_, order_, size, ready_ = zip(*gradients, strict=True)
    facts: dict[str, FactValue] = {"workers": ranks, "buckets": "ddp:1MB", "backend": "gloo"}
    return Run(
        provenance=Provenance(origin="measured", source="a test"),
        facts=named({**facts, **GIGABIT}),
        spans=spans_of(spans),
        collectives=_collectives(collectives, "allreduce"),
        gradients=Gradients(
            rank=np.array(rank_),
            step=np.array(step_),
            order=np.array(order_),
            bytes=np.array(size),
            ready_ns=in_ns(ready_),
        ),
    )


def a_job_of_experts(*, ranks: int = 3) -> Run:
    """Make a run whose ranks exchange data beside each backward pass, and sum no gradients."""
    run = a_trained_job(ranks=ranks)
    known = {name: value for name, value in run.facts.known().items() if name != "buckets"}
    op = np.full(len(run.collectives), "alltoall", object)
    return replace(run, facts=named(known), collectives=replace(run.collectives, op=op))


def a_job_by_turns(
    passes: Sequence[int],
    *,
    rate_bps: float = 1e9,
    probes: Sequence[int] = (),
    silent: Sequence[int] = (),
    sums_each: bool = False,
    slow: Sequence[int] = (),
) -> Run:
    """Make a run of DDP on two ranks, in which each step adds up so many passes of 40 ms.

    The last pass of a step sends two buckets of 1 MB, or each pass does. Passes scatter by a few
    percent. Steps of `probes` are probe steps, whose computing takes 36 ms a pass. Steps of
    `silent` send nothing, and those of `slow` compute twice as long.
    """
    spans: list[tuple[int, int, str, str, float, float]] = []
    collectives, gradients = [], []
    send_ms = 1.05 * 8e9 / rate_bps
    for rank in (0, 1):
        now, sequence = 0.0, 0
        for number, count in enumerate(passes):
            step, begin = -1 if number in probes else number, now
            pass_ms = (36.0 if number in probes else 40.0) * (1 + 0.02 * np.sin(2.4 * number))
            pass_ms *= 2 if number in slow else 1
            for place in range(count):
                is_last = place == count - 1
                earlier = "" if is_last else "earlier "
                middle, end = now + 0.4 * pass_ms, now + pass_ms
                spans.append((rank, step, "compute", f"{earlier}forward", now, middle))
                spans.append((rank, step, "compute", f"{earlier}backward", middle, end))
                now, sent = end, middle
                for order, ready in enumerate((end - 0.3 * pass_ms, end)):
                    issue = end if number in probes else ready
                    if (is_last or sums_each) and number not in silent:
                        sent = max(sent, issue) + send_ms
                        collectives.append((rank, step, sequence, 1_000_000, issue, sent))
                        sequence += 1
                    if is_last and number not in probes:
                        gradients.append((rank, step, order, 1_000_000, ready))
                now = max(now, sent)
            now += 1.0
            spans.append((rank, step, "host", "step" if step >= 0 else "probe", begin, now))
    rank_, step_, order_, size, ready_ = zip(*gradients, strict=True)
    facts: dict[str, FactValue] = {"workers": 2, "buckets": "ddp:1MB", "backend": "gloo"}
    return Run(
        provenance=Provenance(origin="measured", source="a test"),
        facts=named({**facts, "line_rate_bps": rate_bps}),
        spans=spans_of(spans),
        collectives=_collectives(collectives, "allreduce"),
        gradients=Gradients(
            rank=np.array(rank_),
            step=np.array(step_),
            order=np.array(order_),
            bytes=np.array(size),
            ready_ns=in_ns(ready_),
        ),
    )


def with_data(job: Run, data_ms: float) -> Run:
    """Return a job whose ranks wait for data before each forward pass, which is shorter by that."""
    spans, data_ns = job.spans, round(data_ms * 1e6)
    first = spans.rows(spans.name == "forward")
    waits = replace(
        first,
        lane=np.full(len(first), "input", object),
        name=np.full(len(first), "data", object),
        end_ns=first.start_ns + data_ns,
    )
    start_ns = np.where(spans.name == "forward", spans.start_ns + data_ns, spans.start_ns)
    shorter = replace(spans, start_ns=start_ns)
    return replace(job, spans=type(spans).joined([shorter, waits]))
