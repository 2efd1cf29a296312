"""What several captures saw of each flow becomes the flows of one run.

What several of them saw of one flow is reconciled: of a connection captured at both ends, the end
that saw more counts, and where both saw the same, the sender's. Captures that follow each other in
time, as `tcpdump -C` writes them, are one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fullwire._native import PacketScan
from fullwire.model.endpoint import address_of, endpoint, host_of
from fullwire.model.facts import FactValue
from fullwire.model.run import Flows, Provenance, Run, Whole
from fullwire.sources.files import name_of
from fullwire.sources.pcap import Scanned

_ROCE = 256  # as native/packet_headers.hpp numbers it
Columns: TypeAlias = Mapping[str, Whole]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Capture:
    """What one file says, flow by flow."""

    name: str
    ends: Sequence[tuple[str, str]]
    protocols: Sequence[int]
    totals: Columns
    bins: Columns
    shift: int
    counts: Mapping[str, int]
    problem: str

    @property
    def local(self) -> str | None:
        """The host that takes part in every flow, if there is one: here the capture was made."""
        hosts = [{host_of(source), host_of(target)} for source, target in self.ends]
        common = set.intersection(*hosts) if hosts else set()
        return common.pop() if len(common) == 1 else None


class _Seen(NamedTuple):
    """One flow as one capture saw it."""

    capture: int
    flow: int
    first_ns: int
    last_ns: int
    payload_bytes: int
    is_sender: bool


def run_of(scans: Sequence[Scanned]) -> Run:
    """Return the run of what was scanned."""
    captures = [_capture(*each) for each in scans]
    chosen = _reconciled(captures)
    return Run(
        provenance=Provenance(origin="imported", source=", ".join(each.name for each in captures)),
        facts=_facts(captures, chosen),
        missing=tuple(_missing(captures)),
        flows=_flows(captures, chosen),
    )


def _capture(path: Path, scan: PacketScan, problem: str) -> _Capture:
    keys = scan.endpoints()
    return _Capture(
        name=name_of(path), ends=[_ends(*key) for key in keys], protocols=[key[3] for key in keys],
        totals=scan.totals(), bins=scan.bins(), shift=scan.shift(), counts=scan.counts(),
        problem=problem,
    )  # fmt: skip


def _ends(
    addresses: bytes, source_port: int, target_port: int, protocol: int, queue_pair: int, _: int
) -> tuple[str, str]:
    source, target = address_of(addresses[:16]), address_of(addresses[16:])
    if protocol == _ROCE:
        return endpoint(source, 4791), endpoint(target, queue_pair, "#")
    return endpoint(source, source_port), endpoint(target, target_port)


def _reconciled(captures: Sequence[_Capture]) -> list[_Seen]:
    """Choose, for every flow, the place that saw most of it."""
    seen: dict[tuple[tuple[str, str], int], list[_Seen]] = defaultdict(list)
    for number, capture in enumerate(captures):
        local = capture.local
        first, last, payload = (capture.totals[name].tolist() for name in _Seen._fields[2:5])
        for flow, ends in enumerate(zip(capture.ends, capture.protocols, strict=True)):
            is_sender = host_of(ends[0][0]) == local
            seen[ends].append(
                _Seen(number, flow, first[flow], last[flow], payload[flow], is_sender)
            )
    return [each for observations in seen.values() for each in _fullest(observations)]


def _fullest(observations: list[_Seen]) -> list[_Seen]:
    """Join observations that follow each other in time, and return the joined ones with most."""
    if len(observations) == 1:
        return observations
    places: list[list[_Seen]] = []
    for each in sorted(observations, key=lambda seen: (seen.first_ns, not seen.is_sender)):
        for place in places:
            if place[-1].last_ns <= each.first_ns and place[-1].capture != each.capture:
                place.append(each)
                break
        else:
            places.append([each])
    return max(
        places,
        key=lambda place: (sum(seen.payload_bytes for seen in place), place[0].is_sender),
    )


def _flows(captures: Sequence[_Capture], chosen: Iterable[_Seen]) -> Flows:
    shift = max(capture.shift for capture in captures)
    taken: dict[int, list[int]] = defaultdict(list)
    for each in chosen:
        taken[each.capture].append(each.flow)
    parts = [_rows(captures[number], flows, shift) for number, flows in sorted(taken.items())]
    if not parts:
        return Flows.empty()
    table = Flows(**{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
    return table.rows(np.argsort(table.start_ns, kind="stable"))


def _rows(capture: _Capture, flows: list[int], shift: int) -> dict[str, Any]:
    is_taken = np.zeros(len(capture.ends), bool)
    is_taken[flows] = True
    bins = {name: column[is_taken[capture.bins["flow"]]] for name, column in capture.bins.items()}
    sources, targets = (np.array(ends, object) for ends in zip(*capture.ends, strict=True))
    start = (bins["number"] >> (shift - capture.shift)) << shift
    return {
        "source": sources[bins["flow"]],
        "destination": targets[bins["flow"]],
        "start_ns": start,
        "end_ns": start + (1 << shift),
        **{name: bins[name] for name in ("payload_bytes", "wire_bytes", "packets", "retransmits")},
    }


def _facts(captures: Sequence[_Capture], chosen: Iterable[_Seen]) -> dict[str, FactValue]:
    names = ("retransmitted_bytes", "reordered_bytes", "lost_bytes", "missed_bytes",
             "supposed_packets")  # fmt: skip
    facts: dict[str, FactValue] = dict.fromkeys(names, 0)
    for each in chosen:
        totals = captures[each.capture].totals
        for name in names:
            facts[name] = int(facts[name]) + int(totals[name][each.flow])  # type: ignore[arg-type]
    for name, count in _COUNTED.items():
        facts[name] = sum(capture.counts[count] for capture in captures)
    facts["captured_wire_bytes"] = sum(
        capture.counts["other_bytes"] + int(capture.totals["wire_bytes"].sum())
        for capture in captures
    )
    return facts


def _missing(captures: Iterable[_Capture]) -> Iterator[str]:
    """Say, for each capture, what it lacks of what was on the wire."""
    for capture in captures:
        name = capture.name
        if capture.problem:
            yield f"{name}: {capture.problem}"
        for key, sentence in _LACKS.items():
            if capture.counts[key]:
                yield f"{name}: {capture.counts[key]:,} {sentence}"


_COUNTED = {
    "captured_packets": "packets",
    "captured_bytes": "bytes",
    "dropped_packets": "dropped",
}
_LACKS = {
    "dropped": "packets were dropped by the capture",
    "fragments": "fragments of IP packets belong to no flow that could be told",
    "cut_headers": "packets were cut before the end of their headers; 96 bytes are enough",
    "impossible": "packets have headers that contradict themselves",
    "crowded_packets": "packets belong to flows beyond the first 65,536",
    "untimed": "packets have no time",
}
