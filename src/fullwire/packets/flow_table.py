"""Join the flows that several captures saw as the flows of one run.

Several captures may show the same flow. If both ends of a connection were captured, the end that
saw more counts. If both saw the same, the sender's end counts. Captures that follow each other in
time, as `tcpdump -C` writes them, are one capture. If the clocks of several hosts certainly differ,
the run's times are those of the first capture's clock.

Connections that were captured at both ends show how much clocks differ. A packet cannot arrive
before it was sent. So each packet bounds the offset between the two clocks: in one direction from
above, in the other from below. The packets that waited least set the bounds. Both bounds are
certain. The offset is their middle, and its uncertainty is half of their distance.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from ipaddress import ip_address
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fullwire._native import PacketScan
from fullwire.files import name_of
from fullwire.run.endpoint import address_of, endpoint, host_of
from fullwire.run.facts import Facts, named
from fullwire.run.gaps import gaps_of
from fullwire.run.run import (
    UNREAD,
    AnyTable,
    Connections,
    Flows,
    Messages,
    Provenance,
    Run,
    Whole,
)

_ROCE = 256  # The number in native/packets/packet_headers.hpp.
_MAIN_FLOW = 0.02  # Share of the largest flow's payload.
_ALL = 0.05  # Share of the payload that may be missing from a full copy.
_SAME = 0.2  # Share of common sequence numbers: by chance captures have none in common.
Columns: TypeAlias = Mapping[str, Whole]
Scanned: TypeAlias = tuple[Path, PacketScan, str]  # path, scan, and the reason of an early end


# The numbers of gloo/types.h. Programs that send by hand use tags of their own.
_GLOO_OPS = np.array(
    [
        "send",
        "gather",
        "allgather",
        "reduce",
        "allreduce",
        "scatter",
        "broadcast",
        "barrier",
        "alltoall",
        "reducescatter",
        "other",
    ],
    object,
)
_COUNTED = {
    "captured_packets": "packets",
    "captured_bytes": "bytes",
    "dropped_packets": "dropped",
}
_LACKS = {
    "dropped": "packets were dropped by the capture",
    "unread_links": "packets are of link type {link}, and not of Ethernet, Linux cooked or raw IP",
    "fragments": "fragments of IP packets belong to no flow that could be told",
    "cut_headers": "packets were cut before the end of their headers; 96 bytes are enough",
    "impossible": "packets have headers that contradict themselves",
    "crowded_packets": "packets belong to flows beyond the first 65,536",
    "untimed": "packets have no time",
}


@dataclass(frozen=True, eq=False, kw_only=True)
class _Capture:
    """The content of one file, flow by flow."""

    name: str
    file_name: str
    told_addresses: Sequence[str]  # of the host that captured, as the capture tells them
    ends: Sequence[tuple[str, str]]
    protocols: Sequence[int]
    totals: Columns
    bins: Columns
    shift: int
    gloo_traffic: Columns
    endings: Columns
    passages: Columns
    counts: Mapping[str, int]
    problem: str

    @classmethod
    def of(cls, path: Path, scan: PacketScan, problem: str) -> _Capture:
        """Return the capture of a scan, with each packet counted once."""
        ends, protocols = [], []
        for addresses, source_port, target_port, protocol, queue_pair, _ in scan.endpoints():
            source, target = address_of(addresses[:16]), address_of(addresses[16:])
            is_roce = protocol == _ROCE
            ends.append(
                (endpoint(source, 4791), endpoint(target, queue_pair, "#"))
                if is_roce
                else (endpoint(source, source_port), endpoint(target, target_port))
            )
            protocols.append(protocol)
        totals, bins = _once(scan.totals(), scan.bins())
        return cls(
            name=name_of(path),
            file_name=path.name,
            told_addresses=[str(address_of(each)) for each in scan.addresses()],
            ends=ends,
            protocols=protocols,
            totals=totals,
            bins=bins,
            shift=scan.shift(),
            gloo_traffic=scan.gloo_traffic(),
            endings=scan.endings(),
            passages=scan.passages(),
            counts=scan.counts(),
            problem=problem,
        )

    @cached_property
    def local(self) -> str | None:
        """The host in every flow, if there is one: the capture was made there."""
        hosts = [{host_of(source), host_of(target)} for source, target in self.ends]
        common = set.intersection(*hosts) if hosts else set()
        return common.pop() if len(common) == 1 else None

    @property
    def own_addresses(self) -> list[str]:
        """The addresses of the host that captured, if it tells them, or its packets a direction.

        The result is empty if both ends of a flow would be the host's own: then directions mislead.
        """
        if self.told_addresses:
            return sorted({*self.told_addresses}, key=lambda address: int(ip_address(address)))
        sides = zip(self.ends, self.totals["direction"].tolist(), strict=True)
        own = {host_of(ends[direction - 1]) for ends, direction in sides if direction}
        if any(host_of(source) in own and host_of(target) in own for source, target in self.ends):
            return []
        return sorted(own, key=lambda address: int(ip_address(address)))

    @property
    def unread_endings(self) -> Columns:
        """The ends of messages in the main flows whose headers have no reader."""
        payload = self.totals["payload_bytes"]
        is_main = payload > _MAIN_FLOW * payload.max(initial=1)
        is_main[self.gloo_traffic["flow"]] = False
        rows = is_main[self.endings["flow"]]
        return {name: column[rows] for name, column in self.endings.items()}

    def lacks(self) -> Iterator[str]:
        """Yield a sentence for each kind of packets or bytes that the capture lacks."""
        if self.problem:
            yield f"{self.name}: {self.problem}"
        for key, sentence in _LACKS.items():
            if self.counts[key]:
                what = sentence.format(link=self.counts["unread_link"])
                yield f"{self.name}: {self.counts[key]:,} {what}"


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Passed:
    """The moments when flows passed certain sequence numbers, in one capture.

    `local` is the host of the capture, if its packets show it.
    """

    local: str | None
    ends: Sequence[tuple[str, str]]
    columns: Mapping[str, Whole]  # flow, sequence, is_acknowledgement, time_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """How far a capture's clock is ahead of the first capture's, in nanoseconds."""

    offset_ns: int
    uncertainty_ns: int

    @property
    def is_proven(self) -> bool:
        """Whether the clocks certainly differ: the offset exceeds its uncertainty."""
        return abs(self.offset_ns) > self.uncertainty_ns


class _Seen(NamedTuple):
    """One flow as one capture saw it."""

    capture: int
    flow: int
    first_ns: int
    last_ns: int
    payload_bytes: int
    is_sender: bool


def run_of(scans: Sequence[Scanned], hosts: Sequence[str] = ()) -> Run:
    """Return the scanned captures as a run; `hosts` made them, if their names are known."""
    captures = [_Capture.of(*scanned) for scanned in scans]
    passed = [
        Passed(local=capture.local, ends=capture.ends, columns=capture.passages)
        for capture in captures
    ]
    chosen = _reconciled(captures, passed)
    clocks = clock_offsets(passed)
    ahead_ns = [clock.offset_ns if clock and clock.is_proven else 0 for clock in clocks]
    about_clocks = [
        f"{capture.file_name} {clock.offset_ns * 1e-3:+.0f} us "
        f"(+- {clock.uncertainty_ns * 1e-3:.0f} us{'' if clock.is_proven else ', so unchanged'})"
        for capture, clock in list(zip(captures, clocks, strict=True))[1:]
        if clock is not None
    ]
    # The addresses that belong to one host, where a capture shows it.
    own = [capture.own_addresses for capture in captures]
    several = [(each[0], each) for each in own if len(each) > 1]
    of_host = list(zip(hosts, own, strict=True)) if hosts else several
    addresses = [f"{host}={'+'.join(each)}" for host, each in of_host if each]
    return Run(
        provenance=Provenance(
            origin="imported", source=", ".join(capture.name for capture in captures)
        ),
        facts=_facts(captures, chosen)
        | Facts(
            capture_clocks=", ".join(about_clocks) or None, addresses=",".join(addresses) or None
        ),
        gaps=gaps_of(problem for capture in captures for problem in capture.lacks()),
        flows=_flows(captures, chosen, ahead_ns),
        connections=_connections(captures, chosen, ahead_ns),
        messages=_messages(captures, chosen, ahead_ns),
    )


def _once(totals: Columns, bins: Columns) -> tuple[Columns, Columns]:
    """Count each packet once if a switch mirrors both of its ports, so that each packet repeats.

    Real senders never retransmit every byte, so full repetition means mirroring. Packets without
    payload repeat as often as those with payload.
    """
    payload, again = totals["payload_bytes"].sum(), totals["retransmitted_bytes"].sum()
    copies = 1 + round(int(again) / max(int(payload), 1))
    if abs(again - (copies - 1) * payload) > _ALL * payload:
        copies = 1
    mirrored = totals["wire_bytes"] - totals["wire_bytes"] // copies
    if copies > 1:
        counted = ("wire_bytes", "packets", "supposed_packets")
        totals = {**totals, **{name: totals[name] // copies for name in counted}}
        bins = {**bins, **{name: bins[name] // copies for name in counted[:2]}}
        totals = {**totals, "retransmitted_bytes": totals["retransmitted_bytes"] * 0}
        bins = {**bins, "retransmits": bins["retransmits"] * 0}
    return {**totals, "mirrored_bytes": mirrored}, bins


def _reconciled(captures: Sequence[_Capture], passed: Sequence[Passed]) -> list[_Seen]:
    """Choose for every flow the place of capture that saw most of it."""

    @cache
    def are_apart(one: int, other: int) -> bool:
        return not show_the_same(passed[one], passed[other])

    seen: dict[tuple[tuple[str, str], int], list[_Seen]] = defaultdict(list)
    for number, capture in enumerate(captures):
        local = capture.local
        first, last, payload = (capture.totals[name].tolist() for name in _Seen._fields[2:5])
        for flow, ends in enumerate(zip(capture.ends, capture.protocols, strict=True)):
            is_sender = host_of(ends[0][0]) == local
            seen[ends].append(
                _Seen(number, flow, first[flow], last[flow], payload[flow], is_sender)
            )
    chosen: list[_Seen] = []
    for observations in seen.values():
        # Observations that follow each other in time come from one place. Two captures of the same
        # packets also seem to follow, if their clocks differ by more than their length.
        places: list[list[_Seen]] = []
        for later in sorted(observations, key=lambda each: (each.first_ns, not each.is_sender)):
            for place in places:
                latest = place[-1]
                follows = latest.last_ns <= later.first_ns and latest.capture != later.capture
                if follows and are_apart(latest.capture, later.capture):
                    place.append(later)
                    break
            else:
                places.append([later])
        fullest = max(
            places,
            key=lambda place: (sum(flow.payload_bytes for flow in place), place[0].is_sender),
        )
        chosen += fullest
    return chosen


def _flows(captures: Sequence[_Capture], chosen: Iterable[_Seen], ahead_ns: Sequence[int]) -> Flows:
    shift = max(capture.shift for capture in captures)

    def columns(capture: _Capture, bins: Columns, ahead: int) -> dict[str, Any]:
        start = (bins["number"] << capture.shift) - ahead >> shift << shift
        names = ("payload_bytes", "wire_bytes", "packets", "retransmits")
        times = {"start_ns": start, "end_ns": start + (1 << shift)}
        return times | {name: bins[name] for name in names}

    return _joined(Flows, captures, chosen, ahead_ns, lambda capture: capture.bins, columns)


def _connections(
    captures: Sequence[_Capture], chosen: Iterable[_Seen], ahead_ns: Sequence[int]
) -> Connections:
    def columns(_: _Capture, totals: Columns, ahead: int) -> dict[str, Any]:
        names = (
            "payload_bytes",
            "wire_bytes",
            "packets",
            "retransmitted_bytes",
            "rtt_samples",
            "rtt_least_ns",
            "rtt_median_ns",
            "rtt_long_ns",
        )
        return {
            "start_ns": totals["first_ns"] - ahead,
            "end_ns": totals["last_ns"] - ahead,
            **{name: totals[name] for name in names},
        }

    def totals(capture: _Capture) -> Columns:
        return {**capture.totals, "flow": np.arange(len(capture.ends))}

    return _joined(Connections, captures, chosen, ahead_ns, totals, columns)


def _messages(
    captures: Sequence[_Capture], chosen: Iterable[_Seen], ahead_ns: Sequence[int]
) -> Messages:
    def columns(_: _Capture, traffic: Columns, ahead: int) -> dict[str, Any]:
        has_data = traffic["first_ns"] > 0
        names = ("payload_bytes", "unread_bytes", "messages")
        return {
            "op": _GLOO_OPS[np.clip(traffic["collective"], 0, len(_GLOO_OPS) - 1)],
            "sequence": traffic["tag"],
            "begin_ns": traffic["asked_ns"] - ahead,
            "first_ns": np.where(has_data, traffic["first_ns"] - ahead, 0),
            "last_ns": np.where(has_data, traffic["last_ns"] - ahead, 0),
            **{name: traffic[name] for name in names},
        }

    def unread(_: _Capture, endings: Columns, ahead: int) -> dict[str, Any]:
        count = len(endings["flow"])
        ended_ns, nothing = endings["time_ns"] - ahead, np.zeros(count, np.int64)
        return {
            "op": np.full(count, UNREAD, object),
            "sequence": nothing,
            "begin_ns": ended_ns,
            "first_ns": ended_ns,
            "last_ns": ended_ns,
            "payload_bytes": endings["bytes"],
            "unread_bytes": nothing,
            "messages": nothing + 1,
        }

    chosen = list(chosen)
    tables = [
        _joined(Messages, captures, chosen, ahead_ns, lambda of: of.gloo_traffic, columns),
        _joined(Messages, captures, chosen, ahead_ns, lambda of: of.unread_endings, unread),
    ]
    both = Messages.joined(tables)
    return both.rows(np.argsort(both.begin_ns, kind="stable"))


def _joined(
    kind: type[AnyTable],
    captures: Sequence[_Capture],
    chosen: Iterable[_Seen],
    ahead_ns: Sequence[int],
    rows_of: Callable[[_Capture], Columns],
    columns: Callable[[_Capture, Columns, int], dict[str, Any]],
) -> AnyTable:
    """Make a table of the chosen flows' rows, ordered by the first capture's clock."""
    taken: dict[int, list[int]] = defaultdict(list)
    for seen in chosen:
        taken[seen.capture].append(seen.flow)
    parts = []
    for number, flows in sorted(taken.items()):
        capture = captures[number]
        is_taken = np.zeros(len(capture.ends), bool)
        is_taken[flows] = True
        rows = rows_of(capture)
        rows = {name: column[is_taken[rows["flow"]]] for name, column in rows.items()}
        sources, targets = (np.array(ends, object) for ends in zip(*capture.ends, strict=True))
        ends = {"source": sources[rows["flow"]], "destination": targets[rows["flow"]]}
        parts.append(kind(**ends, **columns(capture, rows, ahead_ns[number])))
    table = kind.joined(parts)
    begins = table.columns()["begin_ns" if kind is Messages else "start_ns"]
    return table.rows(np.argsort(begins, kind="stable"))


def _facts(captures: Sequence[_Capture], chosen: Iterable[_Seen]) -> Facts:
    names = (
        "retransmitted_bytes",
        "reordered_bytes",
        "lost_bytes",
        "missed_bytes",
        "supposed_packets",
        "mirrored_bytes",
    )
    facts = dict.fromkeys(names, 0)
    for seen in chosen:
        totals = captures[seen.capture].totals
        for name in names:
            facts[name] += int(totals[name][seen.flow])
    for name, count in _COUNTED.items():
        facts[name] = sum(capture.counts[count] for capture in captures)
    facts["captured_wire_bytes"] = sum(
        capture.counts["other_bytes"] + int(capture.totals["wire_bytes"].sum())
        for capture in captures
    )
    return named(facts)


def clock_offsets(captures: Sequence[Passed]) -> list[ClockOffset | None]:
    """Return each capture's offset from the first, if connections link the two."""
    offsets: list[ClockOffset | None] = [None] * len(captures)
    if not captures or captures[0].local is None:
        return offsets
    offsets[0] = ClockOffset(offset_ns=0, uncertainty_ns=0)
    # Captures of two hosts give their offset if they show packets in both directions between them.
    number: dict[tuple[str, str], int] = {}
    marks = [_marks(capture, number) for capture in captures]
    senders = np.array([host_of(source) for source, _ in number], object)
    links: dict[tuple[int, int], ClockOffset] = {}
    for first, second in combinations(range(len(captures)), 2):
        hosts = captures[first].local, captures[second].local
        if None in hosts or hosts[0] == hosts[1]:
            continue
        both, at_first, at_second = np.intersect1d(
            marks[first][0], marks[second][0], assume_unique=True, return_indices=True
        )
        differs_ns = marks[second][1][at_second] - marks[first][1][at_first]
        sender = senders[both >> 33]
        there, back = differs_ns[sender == hosts[0]], differs_ns[sender == hosts[1]]
        if not len(there) or not len(back):
            continue
        most, least = int(there.min()), int(back.max())
        # If clocks drift against each other, the bounds cross. The middle is as good as before.
        offset_ns, uncertainty_ns = (most + least) // 2, -(-abs(most - least) // 2)
        links[first, second] = ClockOffset(offset_ns=offset_ns, uncertainty_ns=uncertainty_ns)
        links[second, first] = ClockOffset(offset_ns=-offset_ns, uncertainty_ns=uncertainty_ns)
    while reachable := [
        (known.uncertainty_ns + link.uncertainty_ns, start, end)
        for (start, end), link in links.items()
        if (known := offsets[start]) is not None and offsets[end] is None
    ]:
        uncertainty_ns, start, end = min(reachable)
        begin = offsets[start]
        assert begin is not None
        offsets[end] = ClockOffset(
            offset_ns=begin.offset_ns + links[start, end].offset_ns, uncertainty_ns=uncertainty_ns
        )
    return offsets


def show_the_same(one: Passed, other: Passed) -> bool:
    """Whether two captures show the same packets of their common flows, by sequence numbers."""
    number: dict[tuple[str, str], int] = {ends: at for at, ends in enumerate(one.ends)}
    common = [number[ends] for ends in set(one.ends) & set(other.ends)]
    marks = [_marks(capture, number)[0] for capture in (one, other)]
    fewer = min(int(np.isin(passed >> 33, common).sum()) for passed in marks)
    return len(np.intersect1d(marks[0], marks[1], assume_unique=True)) > _SAME * fewer


def _marks(capture: Passed, number: dict[tuple[str, str], int]) -> tuple[Whole, Whole]:
    """Return the passed sequence numbers as keys that all captures share, and their times.

    Numbers that passed twice are left out: they were sent again, or have wrapped.
    """
    flows = np.array([number.setdefault(ends, len(number)) for ends in capture.ends], np.int64)
    columns = capture.columns
    marks = flows[columns["flow"]] << 33 if len(flows) else np.empty(0, np.int64)
    marks = marks | columns["sequence"] << 1 | columns["is_acknowledgement"]
    once, place, count = np.unique(marks, return_index=True, return_counts=True)
    return once[count == 1], columns["time_ns"][place[count == 1]]
