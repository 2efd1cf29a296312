"""Jobs of several workers whose transport is known, because the test made it up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fullwire.collectives.closed_form import cost, half_a_part
from fullwire.collectives.cost import AddTimes
from fullwire.run.facts import FactValue, named
from fullwire.run.run import Collectives, Gradients, Provenance, Run, Spans, Whole
from fullwire.simulation.buckets import bucket_policy
from fullwire.simulation.transport import MeasuredTransport

MS = 1_000_000
MIB = 2**20
PROCESSORS = 2  # of the machine that all ranks share


def a_transport(**changed: float) -> MeasuredTransport:
    """Make a transport like Gloo's."""
    numbers = {
        "share": 0.95,
        "processor_s_per_byte": 1e-9,
        "processor_s_per_hop": 0.3e-3,
        "apart": 0.25,
    }
    numbers |= changed
    return MeasuredTransport(
        share=numbers["share"],
        processor_s_per_byte=numbers["processor_s_per_byte"],
        processor_s_per_hop=numbers["processor_s_per_hop"],
        apart=numbers["apart"],
        gathers_late=changed.get("gathers_late", 0.0),
    )


def a_trained_job(
    transport: MeasuredTransport,
    *,
    workers: int = 2,
    rate_bps: float = 1e9,
    gradients_mib: Sequence[float] = (2, 8, 16, 24),
    buckets: str = "ddp",
    steps: int = 12,
    slower_ms: float = 0.0,
    noise: float = 0.0,
    every_second: float = 0.0,
    split_mib: float = 0.0,
    by_hand: bool = False,
    op: str = "allreduce",
    facts: Mapping[str, FactValue] | None = None,
) -> Run:
    """Play steps: 20 ms forward, 10 ms backward for each gradient, buckets, 5 ms rest.

    The last rank takes `slower_ms` longer in its forward, and messages vary by `noise`. In every
    second step, the first one included, messages take longer by the share `every_second`. With
    `split_mib` the model is split over pairs of ranks, which sum that much amidst the forward. A
    script that sums `by_hand` sends its messages after the backward pass, without DDP, and may
    have another `op`.
    """
    random = np.random.default_rng(7)
    count = len(gradients_mib)
    sizes = np.array([round(each * MIB) for each in gradients_mib], np.int64)
    ready_ns = np.arange(1, count + 1) * 10 * MS
    messages = bucket_policy(buckets).group(ready_ns, sizes)
    spans: list[tuple[int, int, str, str, int, int]] = []
    gradients: list[tuple[int, int, int, int, int]] = []
    collectives: list[tuple[int, int, int, int, int, int, str]] = []
    among = workers // 2 if split_mib else workers
    split_ns = 0
    if split_mib:
        split_s = message_s(transport, 2, rate_bps, round(split_mib * MIB), crowd_of=workers)
        split_ns = round(split_s * 1e9)
    start_ns = 0
    for step in range(steps):
        begin_ns = [
            start_ns + round((20 + slower_ms * (rank == workers - 1)) * MS) + split_ns
            for rank in range(workers)
        ]
        if split_mib:
            amidst_ns = start_ns + 5 * MS
            for rank in range(workers):
                collectives.append(
                    (
                        rank,
                        step,
                        step,
                        round(split_mib * MIB),
                        amidst_ns,
                        amidst_ns + split_ns,
                        f"pair {rank // 2}",
                    )
                )
                spans.append((rank, step, "communication", "wait", amidst_ns, amidst_ns + split_ns))
        lane_ns = 0.0
        for order, (size, ready) in enumerate(
            zip(messages.bytes.tolist(), messages.ready_ns.tolist(), strict=True)
        ):
            issue_ns = [begin + (count * 10 * MS if by_hand else ready) for begin in begin_ns]
            time_s = message_s(transport, among, rate_bps, size, crowd_of=workers, op=op)
            time_s *= random.uniform(1, 1 + noise) * (1 + every_second * (step % 2 == 0))
            lane_ns = max(lane_ns, max(issue_ns)) + time_s * 1e9
            collectives += [
                (
                    rank,
                    step,
                    step * len(messages) + order,
                    size,
                    issue_ns[rank],
                    round(lane_ns),
                    f"replica {rank % 2}" if split_mib else "0",
                )
                for rank in range(workers)
            ]
        end_ns = max(round(lane_ns), max(begin_ns) + count * 10 * MS) + 5 * MS
        for rank in range(workers):
            begin = begin_ns[rank]
            spans += [
                (rank, step, "host", "step", start_ns, end_ns),
                (rank, step, "compute", "forward", start_ns, begin),
                (rank, step, "compute", "backward", begin, begin + count * 10 * MS),
                (rank, step, "compute", "optimizer", end_ns - 5 * MS, end_ns),
            ]
            gradients += [
                (rank, step, order, int(sizes[order]), begin + int(ready_ns[order]))
                for order in range(count)
            ]
        start_ns = end_ns
    known: dict[str, FactValue] = {
        "workers": workers,
        "line_rate_bps": rate_bps,
        "payload_share": 0.956,
        "backend": "gloo",
        "machines": 1,
        "processors": 2,
        **({} if by_hand else {"buckets": buckets}),
    }
    return Run(
        provenance=Provenance(origin="measured", source=f"{workers} workers"),
        facts=named({**known, **(facts or {})}),
        spans=_spans(spans),
        gradients=_gradients(gradients),
        collectives=_collectives(collectives, op),
    )


def with_long_steps(job: Run, *, every: int, longer_ms: int) -> Run:
    """Make one step in `every` longer, at its end."""
    spans, gradients, rows = job.spans, job.gradients, job.collectives

    def later_ns(step: Whole) -> Whole:
        return np.asarray(step // every * longer_ms * MS)

    is_longer = (spans.name == "step") & (spans.step % every == every - 1)
    ends_ns = spans.end_ns + later_ns(spans.step) + np.where(is_longer, longer_ms * MS, 0)
    moved = {
        name: getattr(rows, name) + later_ns(rows.step)
        for name in ("issue_ns", "start_ns", "end_ns")
    }
    return replace(
        job,
        spans=replace(spans, start_ns=spans.start_ns + later_ns(spans.step), end_ns=ends_ns),
        collectives=replace(rows, **moved),
        gradients=replace(gradients, ready_ns=gradients.ready_ns + later_ns(gradients.step)),
    )


def message_s(
    transport: MeasuredTransport,
    workers: int,
    rate_bps: float,
    size: int,
    crowd_of: int | None = None,
    op: str = "allreduce",
) -> float:
    """Return the time of one collective; of more ranks than it is among, others are there too."""
    ring = cost(op, "ring", workers, float(size), AddTimes())
    line_s = 8 * ring.wire_bytes / (rate_bps * transport.share)
    line_s = line_s * (1 + transport.gathers_late * half_a_part(op, workers))
    crowd = np.array(max((crowd_of or workers) / PROCESSORS, 1.0))
    return float(transport.message_s(line_s, ring.wire_bytes, np.array(float(ring.hops)), crowd))


def _spans(rows: Sequence[tuple[int, int, str, str, int, int]]) -> Spans:
    rank, step, lane, name, start, end = zip(*rows, strict=True)
    return Spans(
        rank=np.array(rank),
        step=np.array(step),
        lane=np.array(lane, object),
        name=np.array(name, object),
        start_ns=np.array(start),
        end_ns=np.array(end),
    )


def _gradients(rows: Sequence[tuple[int, int, int, int, int]]) -> Gradients:
    rank, step, order, size, ready = map(np.array, zip(*rows, strict=True))
    return Gradients(rank=rank, step=step, order=order, bytes=size, ready_ns=ready)


def _collectives(rows: Sequence[tuple[int, int, int, int, int, int, str]], op: str) -> Collectives:
    *numbers, groups = zip(*rows, strict=True)
    rank, step, sequence, size, issue, end = map(np.array, numbers)
    words = {
        name: np.full(len(rows), word, object) for name, word in (("op", op), ("dtype", "float32"))
    }
    return Collectives(
        rank=rank,
        step=step,
        sequence=sequence,
        bytes=size,
        issue_ns=issue,
        start_ns=issue,
        end_ns=end,
        group=np.array(groups, object),
        **words,
    )
