"""Traffic of trainings, made up: the run of a capture, without any packets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from fullwire.run.facts import FactValue, named
from fullwire.run.run import Flows, Messages, Provenance, Run

MS = 10**6
Sent = tuple[int, int, int, float, float]  # source, target, bytes, from ms, to ms


def traffic(
    sent: Iterable[Sent],
    *,
    again: float = 0,
    facts: dict[str, FactValue] | None = None,
    messages: Messages | None = None,
) -> Run:
    """Make the run of a capture in which each amount is spread evenly over its time.

    The share `again` of the packets to host 0 is sent again.
    """
    rows = []
    for source, target, size, start_ms, end_ms in sent:
        slots = np.arange(round(start_ms), max(round(end_ms), round(start_ms) + 1))
        share = np.diff(np.linspace(0, size, len(slots) + 1).astype(np.int64))
        rows += [(source, target, slot, part) for slot, part in zip(slots, share, strict=True)]
    source, target, slot, payload = np.array(rows, np.int64).T
    names = np.array([f"10.0.0.{host + 1}:29500" for host in range(64)], object)
    return Run(
        provenance=Provenance(origin="imported", source="made up"),
        facts=named(facts or {}),
        messages=messages or Messages.empty(),
        flows=Flows(
            source=names[source],
            destination=names[target],
            start_ns=slot * MS,
            end_ns=(slot + 1) * MS,
            payload_bytes=payload,
            wire_bytes=payload * 105 // 100,
            packets=payload // 1448 + 1,
            retransmits=np.where(target == 0, again * payload // 1448, 0).astype(np.int64),
        ),
    )


def ring(
    hosts: int,
    iterations: int,
    *,
    gradient: int = 8_000_000,
    compute_ms: float = 60,
    send_ms: float = 100,
    buckets: Sequence[float] = (1,),
    bucket_gap_ms: float = 0,
    pause_every: int = 0,
    startup: bool = True,
    ranks: int | None = None,
) -> list[Sent]:
    """Return a training over a ring in which each host sends to the one before it."""
    n = ranks or hosts
    per_edge = 2 * (n - 1) / n * gradient
    sent: list[Sent] = [(0, 1, gradient, 0, 80)] if startup else []
    now = 300.0
    for iteration in range(iterations):
        if pause_every and iteration and iteration % pause_every == 0:
            now += 700
        for part in buckets:
            size, length = round(part * per_edge), part * send_ms
            sent += [(host, (host - 1) % hosts, size, now, now + length) for host in range(hosts)]
            now += length + bucket_gap_ms
        now += compute_ms
    return sent


def told(
    hosts: int,
    collectives: Iterable[tuple[str, int, int, float, float]],
    *,
    late: int | None = None,
) -> tuple[list[Sent], Messages]:
    """Return the traffic and the messages of collectives (op, number, bytes, from ms, to ms).

    Each goes around a ring; the host `late` comes 5 ms after the others.
    """
    sent: list[Sent] = []
    columns: dict[str, list[object]] = {name: [] for name in Messages.column_types()}
    for op, number, size, start, end in collectives:
        share = {"allreduce": 2, "allgather": 1, "broadcast": hosts / (hosts - 1)}[op]
        part = round(share * (hosts - 1) / hosts * size)
        for host in range(hosts):
            target = (host - 1) % hosts
            sent.append((host, target, part, start, end))
            row = (
                f"10.0.0.{host + 1}:29500",
                f"10.0.0.{target + 1}:29500",
                op,
                number,
                round((start - (0 if host == late else 5)) * MS),
                round(start * MS),
                round(end * MS),
                part,
                0,
                1,
            )
            for column, value in zip(columns.values(), row, strict=True):
                column.append(value)
    kinds = Messages.column_types()
    table = {name: np.array(values, kinds[name]) for name, values in columns.items()}
    return sent, Messages(**table)
