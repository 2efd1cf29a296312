"""The use of links, sockets and processors in the time when communication was exposed.

Counters are read off between samples by straight lines. Samples may be further apart than the
stretches of exposed communication are long. Then they cannot tell these from the rest of a step,
and the figures are of all steps together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fullwire.collectives.cost import Floats
from fullwire.run.gaps import NOT_SEEN
from fullwire.run.intervals import union
from fullwire.run.placement import host_of_rank
from fullwire.run.run import MARKS, Links, Run, Sockets, Table, Whole
from fullwire.timeline.timeline import Doing, Interval, Timeline
from fullwire.timeline.transfers import codes_of, recorded_ranks, transfers_of

SAMPLES = ("links", "sockets", "hosts")
LIMITED = 0.3  # of a socket's busy time: a larger share held it back
UNSEEN = 0.25  # of the time between samples: they miss a gap that short, if gaps are few
SATURATED = 0.9  # of a processor's time


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """The share of the line rate that the hosts' links sent, as the mean over hosts."""

    share: float
    is_exposed: bool  # only while communication was exposed; else over whole steps


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketUse:
    """The limits of sockets, weighted by bytes sent; shares are None if all sockets were idle."""

    send_buffer: float | None  # shares of the time with data to send
    receive_window: float | None
    idle: float | None  # share of the examined time without data to send
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
    """The examined time: exposed communication, or all steps where samples are coarse."""

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
    """Return the used share of the links; None if rates or samples are missing."""
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
    """Return the limits of sockets; None where samples of them are missing."""
    totals = np.zeros(5)  # bytes, busy, receive window, send buffer, idle; times by bytes
    retransmits, is_exposed = 0.0, False
    for host, rows in series(run.sockets, run.sockets.host, run.sockets.flow):
        flow = run.sockets.rows(rows)
        looked = _looked(run, lines, host, flow.time_ns)
        sent = _gained(flow.time_ns, flow.bytes_acked, looked)
        columns = (flow.busy_ns, flow.receiver_window_limited_ns, flow.send_buffer_limited_ns)
        busy, window, buffer = (_gained(flow.time_ns, column, looked) for column in columns)
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
    """Return the busiest processor; None where samples of processors are missing."""
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
    """Choose the time to examine for the samples of a host, within the time that they cover."""
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
    """Return the ranks of a host; all ranks if the run does not name hosts."""
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
    start, end = union(start, end, gap_ns)
    return start[end > start], end[end > start]


def _gained(time_ns: Whole, counter: Whole | Floats, looked: _Looked) -> float:
    """Return how much a counter grew in the examined time; it may have restarted meanwhile."""
    grown = np.cumsum(np.maximum(np.diff(counter.astype(np.float64), prepend=counter[:1]), 0.0))
    at_end, at_start = (
        np.interp(edges_ns, time_ns, grown) for edges_ns in (looked.ends_ns, looked.starts_ns)
    )
    return float((at_end - at_start).sum())


MOST_PIECES = 400
MARGIN = 0.02  # of the time of all steps, shown before the first and after the last
MOST_LINES = 12  # in one picture: the busiest are kept


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Line:
    """Shares or rates of one link, socket or device; NaN where samples are missing."""

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
    """Return the known use over time; None where samples are missing."""
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
    if len(inside):  # starting up is long in a short job, and outside training
        begin_ns, end_ns = int(inside.start_ns.min()), int(inside.end_ns.max())
        margin_ns = round(MARGIN * (end_ns - begin_ns))
        everything = np.clip(everything, begin_ns - margin_ns, end_ns + margin_ns)
    first, last = int(everything.min()), int(everything.max())
    pieces = min(MOST_PIECES, len(np.unique(everything)) - 1)
    return np.linspace(first, last, pieces + 1) if pieces > 0 else None


def _of_links(run: Run, edges_ns: Floats, rate_bps: Mapping[int, float]) -> Iterator[Usage]:
    table, names = run.links, host_of_rank(run)
    # The line rate of each host's link; where hosts are unnamed, the only rate of the run.
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
    """Show the limits of the sockets, weighted by the bytes that each sent in all."""
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
    with np.errstate(invalid="ignore"):  # unknown shares are left out of the picture
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
    """Keep the busiest lines: a picture of many lines is unreadable."""
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
    """Return how fast a counter grew in each piece; it may have restarted between samples."""
    amounts = counter.astype(np.float64)
    grown = np.cumsum(np.maximum(np.diff(amounts, prepend=amounts[:1]), 0.0))
    at_edges = np.interp(edges_ns, time_ns, grown, left=np.nan, right=np.nan)
    return np.asarray(np.diff(at_edges) / np.diff(edges_ns), np.float64)


# ---- collectives that the recorder did not see ---------------------------------------------------

MUCH_MORE = 2.0  # times the bytes of the noted collectives: headers and lost packets add a tenth


@dataclass(frozen=True, slots=True, kw_only=True)
class SentUnseen:
    """What the hosts sent beside the noted collectives, of a run that lacks some collectives."""

    reason: str  # of the gap
    sent_bytes: int  # in the steps, by all hosts whose ranks are recorded
    noted_bytes: int  # that their noted collectives need


def sent_unseen(run: Run) -> SentUnseen | None:
    """Return what the hosts sent if that is far more than the noted collectives need, else None.

    Connections tell it, or else links, which carry nothing between ranks of one host. Only a run
    that lacks collectives is examined: other programs send, too.
    """
    reason = next((gap.reason for gap in run.gaps if gap.reason.endswith(NOT_SEEN)), None)
    if reason is None:
        return None
    table, transfers = run.collectives, transfers_of(run, {})
    by_sockets = bool(len(run.sockets))
    on_links = np.where(transfers.is_in_host, 0.0, transfers.sent_bytes)
    needs = transfers.sent_bytes if by_sockets else on_links
    if np.isnan(needs).any():
        return None
    recorded, hosts = set(recorded_ranks(run).tolist()), host_of_rank(run)
    sent_bytes = noted_bytes = 0.0
    for host in sorted(set(hosts.values())):
        ranks = {rank for rank, name in hosts.items() if name == host}
        is_mark = np.isin(run.spans.name, MARKS) & np.isin(run.spans.rank, list(ranks))
        if not ranks <= recorded or not is_mark.any():
            continue
        starts_ns, ends_ns = run.spans.start_ns[is_mark], run.spans.end_ns[is_mark]
        steps = _Looked(starts_ns.min(keepdims=True), ends_ns.max(keepdims=True), is_exposed=False)
        if by_sockets:
            of_host = run.sockets.rows(run.sockets.host == host)
            sent_bytes += sum(_each_gained(of_host, of_host.flow, of_host.bytes_acked, steps))
        else:  # a packet may pass two interfaces of a host, a bridge and its port
            links = run.links.rows(run.links.host == host)
            sent_bytes += max(
                _each_gained(links, links.interface, links.tx_bytes, steps), default=0
            )
        is_here = np.isin(table.rank, list(ranks))
        is_here &= (table.end_ns > steps.starts_ns[0]) & (table.issue_ns < steps.ends_ns[0])
        noted_bytes += float(needs[is_here].sum())
    if sent_bytes <= MUCH_MORE * noted_bytes:
        return None
    return SentUnseen(reason=reason, sent_bytes=round(sent_bytes), noted_bytes=round(noted_bytes))


def _each_gained(
    table: Links | Sockets, of: NDArray[np.object_], counter: Whole, looked: _Looked
) -> list[float]:
    """Return how much the counter of each interface or connection of a host grew."""
    return [
        _gained(table.time_ns[rows], counter[rows], looked)
        for _, rows in series(table, table.host, of)
    ]
