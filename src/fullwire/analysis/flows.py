"""What the traffic of a training says, with no access to its code.

Who talks with whom in which shape, how often and with how many bytes the same comes again, how
large the gradient must be for that, whether one link is slower than the others, and an audit of the
bytes that says what else was on the wire.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from ipaddress import ip_address

import numpy as np
from numpy.typing import NDArray

from fullwire.analysis.capture_audit import capture_audit
from fullwire.analysis.iterations import Iterations, Series, find_iterations
from fullwire.analysis.pattern import Pattern, find_pattern
from fullwire.errors import UsageError
from fullwire.model.endpoint import host_of
from fullwire.model.run import Real, Run, Text, Whole
from fullwire.units import show_bytes

_LEAST_HOST = 1e-3  # of all payload: a host with less has no part in the training
_LEAST_EDGE = 0.01  # of the largest edge: what sends less breaks no silence
_LEAST_BUSY = 0.5  # a slow link is busy most of the time...
_CLEAR = 0.95  # of the bytes lie in iterations that silence parts
_WHOLE = 0.05  # a number of iterations is as close to a whole one
_MUCH_BUSIER = 1.6  # ...and so much more than the others
_CLOSE = 4  # times the usual distance of packets: a sender that pauses longer waits
_MOST_RANKS = 64  # on one host
_AGREES = 0.005  # a start-up broadcast is of the gradient's size if it is that close


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLink:
    """The host whose sending keeps the others waiting, by how long each is busy."""

    host: str
    busy_fraction: float
    others_busy: tuple[float, float]  # the least and the most of the others


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Traffic:
    """What packets say of a training; `None` where they do not say it."""

    hosts: tuple[str, ...]
    matrix_payload_bytes: Whole  # row sends to column
    matrix_wire_bytes: Whole
    pattern: Pattern
    iterations: Iterations | None
    payload_bytes_per_edge: float | None
    gradient_bytes: float | None
    ranks: int | None
    busy_fractions: Real
    slow_link: SlowLink | None
    audit: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def order(self) -> tuple[str, ...]:
        """Return the addresses in the pattern's sending order."""
        return tuple(self.hosts[each] for each in self.pattern.order)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Rows:
    """The flows between the hosts that matter, hosts as numbers."""

    hosts: tuple[str, ...]
    source: Whole
    target: Whole
    slot: Whole
    payload_bytes: Whole
    wire_bytes: Whole
    width_ns: int

    def matrix(self, values: Whole) -> Whole:
        """Add values up by who sends to whom."""
        count = len(self.hosts)
        cells = np.bincount(self.source * count + self.target, values, count * count)
        return cells.reshape(count, count).astype(np.int64)


def analyse_flows(run: Run) -> Traffic:
    """Say what the packets of a run say."""
    if not len(run.flows):
        raise UsageError("flows: this holds no TCP, UDP or RoCEv2 packets between hosts")
    rows, strangers = _rows(run)
    payload = rows.matrix(rows.payload_bytes)
    iterations = _iterations(rows, payload)
    pattern = _pattern(rows, payload, iterations)
    iterations = _counted_by_bytes(iterations, payload)
    per_edge = gradient = None
    if iterations is not None and pattern.edge_bytes:
        per_edge = iterations.usual_bytes
        if pattern.gradient_bytes is not None:
            gradient = pattern.gradient_bytes * per_edge / pattern.edge_bytes
    before = _before(rows, iterations)
    ranks, gradient = _ranks(pattern, per_edge, gradient, before)
    busy = _busy_fractions(rows, iterations)
    wire = rows.matrix(rows.wire_bytes)
    audit = (
        *_byte_audit(run, int(payload.sum()), int(wire.sum()), strangers),
        *_startup_audit(rows.hosts, before, gradient, ranks),
        *capture_audit(run),
    )
    return Traffic(
        hosts=rows.hosts, matrix_payload_bytes=payload, matrix_wire_bytes=wire, pattern=pattern,
        iterations=iterations, payload_bytes_per_edge=per_edge, gradient_bytes=gradient,
        ranks=ranks, busy_fractions=busy, slow_link=_slow_link(rows.hosts, busy), audit=audit,
        warnings=run.missing,
    )  # fmt: skip


def _rows(run: Run) -> tuple[_Rows, int]:
    """Number the hosts in order of address; return also the payload of those left out."""
    flows = run.flows
    sources, source = _numbered(flows.source)
    targets, target = _numbered(flows.destination)
    everyone = sorted({*sources, *targets}, key=_place)
    number = {host: place for place, host in enumerate(everyone)}
    source = np.array([number[host] for host in sources])[source]
    target = np.array([number[host] for host in targets])[target]
    touched = np.bincount(source, flows.payload_bytes, len(everyone))
    touched += np.bincount(target, flows.payload_bytes, len(everyone))
    chosen = touched >= _LEAST_HOST * max(int(flows.payload_bytes.sum()), 1)
    kept = chosen[source] & chosen[target] & (source != target)
    renumbered = np.cumsum(chosen) - 1
    width_ns = int((flows.end_ns - flows.start_ns).max())
    rows = _Rows(
        hosts=tuple(host for host, is_chosen in zip(everyone, chosen, strict=True) if is_chosen),
        source=renumbered[source[kept]], target=renumbered[target[kept]],
        slot=flows.start_ns[kept] // max(width_ns, 1), width_ns=width_ns,
        payload_bytes=flows.payload_bytes[kept], wire_bytes=flows.wire_bytes[kept],
    )  # fmt: skip
    return rows, int(flows.payload_bytes[~kept].sum())


def _numbered(ends: Text) -> tuple[list[str], Whole]:
    """Return the hosts of a column, and for each row which one it is."""
    hosts: dict[str, int] = {}
    known: dict[str, int] = {}
    for end in dict.fromkeys(ends.tolist()):
        known[end] = hosts.setdefault(host_of(end), len(hosts))
    return list(hosts), np.fromiter(map(known.__getitem__, ends.tolist()), np.int64, len(ends))


def _place(host: str) -> tuple[int, int, str]:
    try:
        address = ip_address(host)
    except ValueError:
        return 0, 0, host
    return address.version, int(address), host


def _iterations(rows: _Rows, payload: Whole) -> Iterations | None:
    """Look for iterations in what the edges send that carry most."""
    main = np.flatnonzero(payload >= _LEAST_EDGE * payload.max(initial=1))
    edge = rows.source * len(rows.hosts) + rows.target
    kept = np.isin(edge, main) & (rows.payload_bytes > 0)
    return find_iterations(
        Series(
            slot=rows.slot[kept], edge=edge[kept], payload_bytes=rows.payload_bytes[kept],
            width_ns=rows.width_ns,
        )
    )  # fmt: skip


def _pattern(rows: _Rows, payload: Whole, iterations: Iterations | None) -> Pattern:
    """Find the pattern of a usual iteration, or else of all together.

    A usual iteration knows nothing of start-up; where a slow link makes iterations run into each
    other, bytes of one edge count for the next, and only the sum over all is sure.
    """
    if iterations is None:
        return find_pattern(payload.astype(float))
    usual = np.zeros(payload.size)
    usual[iterations.edges] = iterations.edge_bytes
    found = find_pattern(usual.reshape(payload.shape))
    if found.kind != "none":
        return found
    within = (rows.slot >= iterations.first_slot) & (rows.slot <= iterations.last_slot)
    together = rows.matrix(np.where(within, rows.payload_bytes, 0)).astype(float)
    return find_pattern(together)


def _counted_by_bytes(iterations: Iterations | None, payload: Whole) -> Iterations | None:
    """Where silences are unclear, count how often an iteration's bytes fit into what edges sent.

    A slow link hardly falls silent, and its iterations run into each other; bytes do not. Each edge
    must say a whole number. An edge may say more than the others: start-up went over it as well.
    """
    if iterations is None or iterations.share >= _CLEAR:
        return iterations
    main = iterations.edges[iterations.edge_bytes > iterations.usual_bytes / 2]
    times = payload.ravel()[main] / iterations.usual_bytes
    if (np.abs(times - np.rint(times)) > _WHOLE).any():
        return iterations
    return replace(iterations, count=int(np.rint(times.min())))


def _before(rows: _Rows, iterations: Iterations | None) -> Whole | None:
    """Return who sent what before the first iteration."""
    if iterations is None:
        return None
    return rows.matrix(np.where(rows.slot < iterations.first_slot, rows.payload_bytes, 0))


def _ranks(
    pattern: Pattern, per_edge: float | None, gradient: float | None, before: Whole | None
) -> tuple[int | None, float | None]:
    """Count ranks rather than hosts where a start-up broadcast of the model says how large it is.

    A ring of n ranks moves 2(n-1)/n of the gradient over each edge between hosts, however many of
    the ranks a host has.
    """
    hosts = len(pattern.order)
    if pattern.kind != "ring" or per_edge is None or gradient is None or before is None:
        return None, gradient
    sent = before[before > 0.1 * gradient]
    if not len(sent):
        return hosts, gradient
    model = float(np.median(sent))
    counts = np.arange(hosts, _MOST_RANKS * hosts + 1, hosts)
    shares = 2 * (counts - 1) / counts
    error = np.abs(per_edge / model - shares)
    nearest = int(np.argmin(error[:-1]))
    apart = shares[nearest + 1] - shares[nearest]
    if error[nearest] > min(_AGREES * shares[nearest], apart / 4):
        return hosts, gradient
    return int(counts[nearest]), float(per_edge / shares[nearest])


def _busy_fractions(rows: _Rows, iterations: Iterations | None) -> Real:
    """Return, for each host, the share of communication during which it was sending.

    A sender is busy from packet to packet as long as they follow each other as closely as they
    usually do; on a slow line that distance is longer, and it is the line that is busy.
    """
    first = iterations.first_slot if iterations else int(rows.slot.min(initial=0))
    last = iterations.last_slot if iterations else int(rows.slot.max(initial=0))
    share = 1.0 if iterations is None else iterations.communicating_s / iterations.period_s
    window = max((last - first + 1) * share, 1.0)
    within = (rows.slot >= first) & (rows.slot <= last) & (rows.payload_bytes > 0)
    return np.array(
        [
            min(_busy_slots(rows, within & (rows.source == host)) / window, 1.0)
            for host in range(len(rows.hosts))
        ]
    )


def _busy_slots(rows: _Rows, chosen: NDArray[np.bool_]) -> float:
    slots, place = np.unique(rows.slot[chosen], return_inverse=True)
    if len(slots) < 2:
        return float(len(slots))
    payload = np.bincount(place, rows.payload_bytes[chosen])
    steps = np.diff(slots)
    order = np.argsort(steps, kind="stable")
    reached = np.cumsum(payload[1:][order])  # a step ends with the bytes that it took to send
    usual = steps[order][np.searchsorted(reached, reached[-1] / 2)]
    return float(steps[steps <= _CLOSE * usual].sum() + 1)


def _slow_link(hosts: tuple[str, ...], busy: Real) -> SlowLink | None:
    if len(hosts) < 2:
        return None
    slowest = int(np.argmax(busy))
    others = np.delete(busy, slowest)
    others = others[others > 0]
    if not len(others) or busy[slowest] < _LEAST_BUSY:
        return None
    if busy[slowest] < _MUCH_BUSIER * float(np.median(others)):
        return None
    return SlowLink(
        host=hosts[slowest],
        busy_fraction=float(busy[slowest]),
        others_busy=(float(others.min()), float(others.max())),
    )


def _byte_audit(run: Run, payload: int, wire: int, strangers: int) -> Iterator[str]:
    """Say what else than an iteration's payload was on the wire."""
    if payload:
        yield (
            f"{show_bytes(payload)} of payload took {show_bytes(wire)} on the wire: "
            f"{wire / payload - 1:.1%} for headers, acknowledgements and retransmission"
        )
    for name, sentence in _SAID.items():
        if run.facts.get(name):
            yield sentence.format(show_bytes(int(run.facts[name])))  # type: ignore[arg-type]
    if run.facts.get("supposed_packets"):
        yield (
            f"{run.facts['supposed_packets']:,} packets on the wire are supposed: the capture "
            "holds larger ones, from before segmentation, and no opening, which would say the size"
        )
    if strangers:
        yield f"{show_bytes(strangers)} were sent to, from or within other hosts, and are left out"


_SAID = {
    "retransmitted_bytes": "{} were sent again (retransmission)",
    "reordered_bytes": "{} came out of order, soon enough not to be retransmission",
    "lost_bytes": "{} were never seen and never acknowledged: lost, or sent after the capture",
    "missed_bytes": "{} were acknowledged but are not in the capture, which missed them",
}


def _startup_audit(
    hosts: tuple[str, ...], before: Whole | None, gradient: float | None, ranks: int | None
) -> Iterator[str]:
    """Say what was sent before the first iteration, which is no part of any."""
    if before is None or gradient is None:
        return
    large = np.argwhere(before > 0.1 * gradient)
    if len(large):
        sizes = before[before > 0.1 * gradient]
        edges = ", ".join(f"{hosts[source]} -> {hosts[target]}" for source, target in large[:8])
        yield (
            f"before the first iteration {show_bytes(float(np.median(sizes)))} went over each of "
            f"{len(large)} edges: a start-up broadcast ({edges}{', ...' if len(large) > 8 else ''})"
        )
        error = float(np.median(sizes)) / gradient - 1
        if abs(error) < _AGREES:
            yield f"the broadcast and the gradient agree within {max(abs(error), 1e-4):.2%}"
    if ranks is not None and ranks > len(hosts):
        yield f"by its bytes the ring has {ranks} ranks on {len(hosts)} hosts"
