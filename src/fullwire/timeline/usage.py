"""How much of links, sockets and processors was in use, over the time of a run.

Counters are read off between samples by straight lines, as `utilization.py` does, at the edges of
equal pieces of time: what was sent in a piece is exact as far as the samples are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fullwire.collectives.cost import Floats
from fullwire.run.placement import host_of_rank
from fullwire.run.run import Run, Whole
from fullwire.timeline.utilization import series

MOST_PIECES = 400
MARGIN = 0.02  # of the time of all steps: shown before the first and after the last
MOST_LINES = 12  # in one picture; the busiest are kept


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Line:
    """Shares or rates of one link, socket or device; not a number where there are no samples."""

    name: str
    values: Floats


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Usage:
    """One picture: lines over the same pieces of time."""

    title: str
    unit: str  # "share" of 1, or "bps"
    lines: tuple[Line, ...]
    left_out: int


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class UsageOverTime:
    """Pictures over common edges of time, in seconds since the first step."""

    edges_s: Floats
    pictures: tuple[Usage, ...]


def usage_over_time(run: Run, rate_bps: Mapping[int, float]) -> UsageOverTime | None:
    """Return what is known about use over time; None where there are no samples."""
    edges_ns = _edges_ns(run)
    if edges_ns is None:
        return None
    pictures = (
        *_of_links(run, edges_ns, rate_bps),
        *_of_sockets(run, edges_ns),
        *_of_devices(run, edges_ns),
    )
    first_step = run.spans.start_ns[run.spans.step >= 0]
    start_ns = int(first_step.min()) if len(first_step) else int(edges_ns[0])
    return UsageOverTime(edges_s=(edges_ns - start_ns) * 1e-9, pictures=pictures)


def _edges_ns(run: Run) -> Floats | None:
    """Return the edges of equal pieces of the time of the steps in which there are samples."""
    times = [table.time_ns for table in (run.links, run.sockets, run.hosts) if len(table)]
    if not times:
        return None
    everything = np.concatenate(times)
    inside = run.spans.rows(run.spans.step >= 0)
    if len(inside):  # starting up is long in a short job, and no part of training
        begin_ns, end_ns = int(inside.start_ns.min()), int(inside.end_ns.max())
        margin_ns = round(MARGIN * (end_ns - begin_ns))
        everything = np.clip(everything, begin_ns - margin_ns, end_ns + margin_ns)
    first, last = int(everything.min()), int(everything.max())
    pieces = min(MOST_PIECES, len(np.unique(everything)) - 1)
    return np.linspace(first, last, pieces + 1) if pieces > 0 else None


def _of_links(run: Run, edges_ns: Floats, rate_bps: Mapping[int, float]) -> Iterator[Usage]:
    table, names = run.links, host_of_rank(run)
    # The line rate of each host's link; where hosts are not named, the one there is.
    rate_of = {name: rate_bps[rank] for rank, name in names.items() if rank in rate_bps}
    if not names and len(rates := set(rate_bps.values())) == 1:
        rate_of = dict.fromkeys(table.host.tolist(), rates.pop())
    by_direction: dict[str, list[Line]] = {"tx_bytes": [], "rx_bytes": []}
    hosts = [table.host[rows[0]] for _, rows in series(table, table.host, table.interface)]
    is_share = bool(hosts) and all(host in rate_of for host in hosts)
    for host, rows in series(table, table.host, table.interface):
        name = f"{host} {table.interface[rows[0]]}"
        for column, lines in by_direction.items():
            bps = 8e9 * _rate(table.time_ns[rows], table.columns()[column][rows], edges_ns)
            lines.append(Line(name=name, values=bps / rate_of[host] if is_share else bps))
    unit = "share" if is_share else "bps"
    yield from _picture("links, sent", unit, by_direction["tx_bytes"])
    yield from _picture("links, received", unit, by_direction["rx_bytes"])


def _of_sockets(run: Run, edges_ns: Floats) -> Iterator[Usage]:
    """Show what held the sockets back, weighted by the bytes that each sent in all."""
    table = run.sockets
    columns = ("busy_ns", "send_buffer_limited_ns", "receiver_window_limited_ns")
    total, weights = np.zeros((len(columns), len(edges_ns) - 1)), np.zeros(len(edges_ns) - 1)
    for _, rows in series(table, table.host, table.flow):
        sent = float(np.ptp(table.bytes_acked[rows])) + 1.0
        values = np.array(
            [_rate(table.time_ns[rows], table.columns()[name][rows], edges_ns) for name in columns]
        )
        is_known = np.isfinite(values[0])
        total += np.where(is_known, values, 0.0) * sent
        weights += is_known * sent
    names = ("had data to send", "held back by send buffer", "by receiver's window")
    with np.errstate(invalid="ignore"):  # where nothing is known nothing is drawn
        lines = [Line(name=n, values=v / weights) for n, v in zip(names, total, strict=True)]
    yield from _picture("sockets, share of time", "share", lines if weights.any() else [])


def _of_devices(run: Run, edges_ns: Floats) -> Iterator[Usage]:
    table = run.hosts
    kinds: dict[str, list[Line]] = {"cpu": [], "gpu": []}
    is_one_machine = run.facts.machines == 1  # hosts of a lab all see the same processors
    drawn: set[str] = set()
    for host, rows in series(table, table.host, table.device):
        device = str(table.device[rows[0]])
        kind = next((kind for kind in kinds if device.startswith(kind)), None)
        if kind is None or (is_one_machine and device in drawn):
            continue
        drawn.add(device)
        time_ns = table.time_ns[rows]
        used = np.clip(np.nan_to_num(table.utilization[rows], posinf=1.0, neginf=0.0), 0, 1)
        spent = np.cumsum(used * np.diff(time_ns, prepend=time_ns[:1]))
        name = device if is_one_machine else f"{host} {device}"
        kinds[kind].append(Line(name=name, values=_rate(time_ns, spent, edges_ns)))
    yield from _picture("processors", "share", kinds["cpu"])
    yield from _picture("GPUs", "share", kinds["gpu"])


def _picture(title: str, unit: str, lines: list[Line]) -> Iterator[Usage]:
    """Keep the busiest lines: a picture of many shows none."""
    if not lines:
        return
    busy = [float(np.nansum(line.values)) for line in lines]
    kept = sorted(sorted(range(len(lines)), key=lambda number: -busy[number])[:MOST_LINES])
    yield Usage(
        title=title,
        unit=unit,
        lines=tuple(lines[number] for number in kept),
        left_out=len(lines) - len(kept),
    )


def _rate(time_ns: Whole, counter: NDArray[np.generic], edges_ns: Floats) -> Floats:
    """Return how fast a counter grew in each piece; it may have begun anew between samples."""
    amounts = counter.astype(np.float64)
    grown = np.cumsum(np.maximum(np.diff(amounts, prepend=amounts[:1]), 0.0))
    at_edges = np.interp(edges_ns, time_ns, grown, left=np.nan, right=np.nan)
    return np.asarray(np.diff(at_edges) / np.diff(edges_ns), np.float64)
