"""What links, sockets and processors say about the time when communication was exposed.

Counters are read off between samples by straight lines. Where samples are further apart than the
stretches of exposed communication are long, they cannot tell these from the rest of a step, and
the figures are of all steps together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fullwire.collectives.cost import Floats
from fullwire.run.placement import host_of_rank
from fullwire.run.run import Run, Table, Whole
from fullwire.timeline.timeline import Doing, Interval, Timeline
from fullwire.timeline.transfers import codes_of

SAMPLES = ("links", "sockets", "hosts")
LIMITED = 0.3  # of a socket's busy time: what held it back
UNSEEN = 0.25  # of the time between samples: they do not see a gap that short, if gaps are few
SATURATED = 0.9  # of a processor's time


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """What share of the line rate the hosts' links sent, in the mean over hosts."""

    share: float
    is_exposed: bool  # only while communication was exposed; else over whole steps


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketUse:
    """What held sockets back, by the bytes that each sent; shares are None where none was busy."""

    send_buffer: float | None  # shares of the time with data to send
    receive_window: float | None
    idle: float | None  # share of the time looked at with nothing to send
    retransmits: int
    is_exposed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorUse:
    """How much of the busiest processor was used."""

    host: str
    device: str
    share: float
    is_exposed: bool


@dataclass(frozen=True, eq=False, slots=True)
class _Looked:
    """The time that is looked at: exposed communication, or all steps where samples are coarse."""

    starts_ns: Whole
    ends_ns: Whole
    is_exposed: bool

    @property
    def total_ns(self) -> int:
        return int((self.ends_ns - self.starts_ns).sum())


def missing_tables(run: Run) -> tuple[str, ...]:
    """Name the tables of samples that the run does not have."""
    return tuple(name for name in SAMPLES if not len(getattr(run, name)))


def links_used(
    run: Run, lines: Sequence[Timeline], rate_bps: Mapping[int, float]
) -> LinkUse | None:
    """Return how much of the links was used; None where no rate or no samples tell it."""
    used: dict[str, tuple[float, bool]] = {}
    for host, rows in series(run.links, run.links.host, run.links.interface):
        links = run.links.rows(rows)
        looked = _looked(run, lines, host, links.time_ns)
        rate = min((rate_bps[rank] for rank in _ranks_on(run, host) if rank in rate_bps), default=0)
        if rate > 0 and looked.total_ns:
            sent = 8e9 * _gained(links.time_ns, links.tx_bytes, looked)
            share = sent / (rate * looked.total_ns)
            used[host] = max(used.get(host, (0.0, False)), (share, looked.is_exposed))
    if not used:
        return None
    [is_exposed, *_] = [is_exposed for _, is_exposed in used.values()]
    return LinkUse(
        share=float(np.mean([share for share, _ in used.values()])), is_exposed=is_exposed
    )


def sockets_used(run: Run, lines: Sequence[Timeline]) -> SocketUse | None:
    """Return what held sockets back; None where there are no samples of them."""
    totals = np.zeros(5)  # bytes, busy, receive window, send buffer, idle; times by bytes
    retransmits, is_exposed = 0.0, False
    for host, rows in series(run.sockets, run.sockets.host, run.sockets.flow):
        flow = run.sockets.rows(rows)
        looked = _looked(run, lines, host, flow.time_ns)
        sent = _gained(flow.time_ns, flow.bytes_acked, looked)
        columns = (flow.busy_ns, flow.receiver_window_limited_ns, flow.send_buffer_limited_ns)
        busy, window, buffer = (_gained(flow.time_ns, each, looked) for each in columns)
        idle = max(looked.total_ns - busy, 0.0)
        totals += np.array([1.0, busy, window, buffer, idle]) * sent
        retransmits += _gained(flow.time_ns, flow.retransmits, looked)
        is_exposed = looked.is_exposed
    if not len(run.sockets):
        return None
    _, busy, window, buffer, idle = totals.tolist()
    return SocketUse(
        send_buffer=min(buffer / busy, 1.0) if busy > 0 else None,
        receive_window=min(window / busy, 1.0) if busy > 0 else None,
        idle=idle / (idle + busy) if busy > 0 else None,
        retransmits=round(retransmits),
        is_exposed=is_exposed,
    )


def processors_used(run: Run, lines: Sequence[Timeline]) -> ProcessorUse | None:
    """Return the busiest processor; None where there are no samples of any."""
    used: list[tuple[float, str, str, bool]] = []
    for host, rows in series(run.hosts, run.hosts.host, run.hosts.device):
        samples = run.hosts.rows(rows)
        looked = _looked(run, lines, host, samples.time_ns)
        if not str(samples.device[0]).startswith("cpu") or not looked.total_ns:
            continue
        busy = np.clip(np.nan_to_num(samples.utilization, posinf=1.0, neginf=0.0), 0, 1)
        spent = np.cumsum(busy * np.diff(samples.time_ns, prepend=samples.time_ns[:1]))
        mean = _gained(samples.time_ns, spent, looked) / looked.total_ns
        used.append((mean, host, str(samples.device[0]), looked.is_exposed))
    if not used:
        return None
    share, host, device, is_exposed = max(used, key=lambda each: (each[0], f"{each[1]} {each[2]}"))
    return ProcessorUse(host=host, device=device, share=share, is_exposed=is_exposed)


def series(
    table: Table, first: NDArray[np.object_], second: NDArray[np.object_]
) -> Iterator[tuple[str, NDArray[np.intp]]]:
    """Go through the rows of each pair of names, in order of time."""
    one, other = codes_of(first), codes_of(second)
    key, time_ns = one.codes * max(len(other.names), 1) + other.codes, table.columns()["time_ns"]
    order = np.arange(len(key))
    is_later = (key[1:] > key[:-1]) | ((key[1:] == key[:-1]) & (time_ns[1:] >= time_ns[:-1]))
    if not is_later.all():  # tables are written in order, mostly
        order = np.lexsort((time_ns, key))
    for rows in np.split(order, np.flatnonzero(np.diff(key[order])) + 1):
        if len(rows) > 1:
            yield one.names[one.codes[rows[0]]], rows


def _looked(run: Run, lines: Sequence[Timeline], host: str, time_ns: Whole) -> _Looked:
    """Choose what to look at for the samples of a host, within the time that they cover."""
    ranks = _ranks_on(run, host)
    chosen = [line for line in lines if line.rank in ranks]
    exposed = [_pieces(line, (Doing.TRANSFER, Doing.UNTOLD)) for line in chosen]
    spacing_ns = float(np.median(np.diff(time_ns)))
    exact = _Looked(*_joined(exposed, time_ns), is_exposed=True)
    seen = _Looked(*_joined(exposed, time_ns, spacing_ns * UNSEEN), is_exposed=True)
    is_seen = len(seen.starts_ns) and spacing_ns <= seen.total_ns / len(seen.starts_ns)
    if is_seen and seen.total_ns <= (1 + UNSEEN) * exact.total_ns:
        return seen
    return _Looked(*_joined([_pieces(line, None) for line in chosen], time_ns), is_exposed=False)


def _ranks_on(run: Run, host: str) -> set[int]:
    """Return the ranks of a host; where the run does not say, any rank may be there."""
    named = {rank for rank, name in host_of_rank(run).items() if name == host}
    return named or {int(rank) for rank in np.unique(run.spans.rank)}


def _pieces(line: Timeline, doing: Sequence[Doing] | None) -> Interval:
    chosen = line.step >= 0
    if doing is not None:
        chosen = chosen & np.isin(line.doing, doing)
    return line.moments[:-1][chosen], line.moments[1:][chosen]


def _joined(pieces: Sequence[Interval], time_ns: Whole, gap_ns: float = 0.0) -> Interval:
    """Join pieces of ranks to stretches further apart than a gap, in the time of the samples."""
    if not pieces:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    start = np.clip(np.concatenate([each for each, _ in pieces]), time_ns[0], time_ns[-1])
    end = np.clip(np.concatenate([each for _, each in pieces]), time_ns[0], time_ns[-1])
    order = np.argsort(start, kind="stable")
    start, reached = start[order], np.maximum.accumulate(end[order])
    first = np.flatnonzero(np.append([True], start[1:] - reached[:-1] > gap_ns)[: len(start)])
    last = np.append(first[1:], len(start)) - 1 if len(start) else first
    start, end = start[first], reached[last]
    return start[end > start], end[end > start]


def _gained(time_ns: Whole, counter: Whole | Floats, looked: _Looked) -> float:
    """Return by how much a counter grew in the time looked at; it may have begun anew between."""
    grown = np.cumsum(np.maximum(np.diff(counter.astype(np.float64), prepend=counter[:1]), 0.0))
    at_end, at_start = (
        np.interp(each, time_ns, grown) for each in (looked.ends_ns, looked.starts_ns)
    )
    return float((at_end - at_start).sum())
