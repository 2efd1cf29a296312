"""Read the files of a job's samplers as the tables links, sockets and hosts.

They are read piece by piece, as far as they are whole.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

from fullwire.recorder.inside.journal import BLOCK, DEFINITIONS, ENDED, FAILED, HEADER_BYTES
from fullwire.recorder.journals import (
    DAMAGED,
    Header,
    block_from,
    blocks_in,
    files_in,
    read_header,
)
from fullwire.recorder.sampler import SUFFIX
from fullwire.run.run import Hosts, Links, Real, Sockets, Text, Whole

SAMPLES = 3  # Kind of a block, beside those of a journal.
PIECE_ROWS = 10_000  # Rows of one series in memory at once.
_LONGEST_NUMBER_BYTES = 10
_WHOLE_NUMBERS = ("watched", "monotonic_ns", "unix_ns")


class Kind(IntEnum):
    """The kinds of samples, with the numbers of native/sampling/sample_file.hpp."""

    LINK = 1
    SOCKET = 2
    PROCESSOR = 3
    MEMORY = 4
    GPU = 5
    OWN_COST = 6


COLUMNS: Mapping[Kind, tuple[str, ...]] = {
    Kind.LINK: ("time_ns", "tx_bytes", "rx_bytes", "tx_packets", "rx_packets", "drops"),
    Kind.SOCKET: (
        "time_ns",
        "bytes_acked",
        "retransmits",
        "rtt_us",
        "cwnd_packets",
        "delivery_rate_bytes",
        "application_limited",
        "busy_us",
        "receiver_window_limited_us",
        "send_buffer_limited_us",
    ),
    Kind.PROCESSOR: ("time_ns", "busy", "all"),
    Kind.MEMORY: ("time_ns", "used_bytes", "all_bytes"),
    Kind.GPU: ("time_ns", "percent", "memory_bytes"),
    Kind.OWN_COST: ("time_ns", "processor_ns"),
}


@dataclass(eq=False, slots=True)
class _Series:
    """The samples of one object: the offsets of its blocks, and its first and last row."""

    first: Whole
    last: Whole
    places: array[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSamples:
    """The file of one sampler: its header, and the place of the rows of each sampled object."""

    path: Path
    header: Header
    series: Mapping[tuple[Kind, int], _Series]  # by kind and number
    definitions: tuple[Mapping[str, Any], ...]
    bytes_not_read: int

    @property
    def host(self) -> str:
        """The name of the host."""
        return str(self.header["host"])

    def of(self, kind: Kind) -> Iterator[tuple[int, Mapping[str, Whole]]]:
        """Yield the samples of a kind, some rows at a time: the object's number and columns."""
        with self.path.open("rb") as file:
            for (series_kind, number), series in self.series.items():
                if series_kind != kind:
                    continue
                held: list[Whole] = []
                for place in series.places:
                    file.seek(place)
                    block = block_from(file)
                    if block is None:  # the file has changed since the survey
                        break
                    held.append(_rows(block[1])[2])
                    if sum(rows.shape[1] for rows in held) >= PIECE_ROWS:
                        yield number, _columns(kind, held)
                        held = []
                if held:
                    yield number, _columns(kind, held)

    def ends_of(self, kind: Kind) -> Iterator[tuple[int, Mapping[str, int], Mapping[str, int]]]:
        """Yield for each series of a kind its number, first row and last row."""
        for (series_kind, number), series in self.series.items():
            if series_kind == kind:
                yield number, _named(kind, series.first), _named(kind, series.last)

    @property
    def links(self) -> list[Mapping[str, Any]]:
        """The name and the speed of each link, in the order of their numbers."""
        return next(
            (list(definition["links"]) for definition in self.definitions if "links" in definition),
            [],
        )

    @property
    def flows(self) -> dict[int, str]:
        """The name of each connection by its number."""
        definitions = (
            definition for definition in self.definitions if definition.get("kind") == "flow"
        )
        return {int(definition["number"]): str(definition["name"]) for definition in definitions}


def read_samples(directories: Sequence[Path]) -> tuple[list[HostSamples], list[str]]:
    """Read every sampler's file in some directories; return a sentence for each unreadable one."""
    samples, unreadable = [], []
    for path in files_in(directories, SUFFIX):
        try:
            samples.append(_read(path))
        except (OSError, *DAMAGED) as error:
            unreadable.append(f"{path.name}: not a readable file of samples ({error})")
    return samples, unreadable


def header_of(path: Path) -> Header:
    """Read a sampler's header."""
    return read_header(path, _WHOLE_NUMBERS)


def _read(path: Path) -> HostSamples:
    header, length, place = header_of(path), path.stat().st_size, HEADER_BYTES
    series: dict[tuple[Kind, int], _Series] = {}
    definitions: list[Mapping[str, Any]] = []
    for block, payload in blocks_in(path, length):
        if block == DEFINITIONS:
            definitions += json.loads(payload)
        elif block == SAMPLES:
            kind, number, rows = _rows(payload)
            if rows.shape[1]:
                if (kind, number) not in series:
                    series[kind, number] = _Series(rows[:, 0].copy(), rows[:, -1], array("q"))
                series[kind, number].last = rows[:, -1].copy()
                series[kind, number].places.append(place)
        place += BLOCK.size + len(payload)
    read = HostSamples(
        path=path,
        header=header,
        series=series,
        definitions=tuple(definitions),
        bytes_not_read=max(0, length - place),
    )
    # Samples of objects without a definition are refused.
    flows, links = read.flows, range(len(read.links))
    for kind, number in read.series:
        known = flows if kind == Kind.SOCKET else links
        if kind in (Kind.SOCKET, Kind.LINK) and number not in known:
            raise ValueError(f"samples of a {kind.name.lower()} that nothing names")
    for link in read.links:
        str(link["name"]), float(link["speed_bps"])
    return read


def _named(kind: Kind, row: Whole) -> dict[str, int]:
    return dict(zip(COLUMNS[kind], row.tolist(), strict=True))


def _columns(kind: Kind, pieces: Sequence[Whole]) -> dict[str, Whole]:
    return dict(zip(COLUMNS[kind], np.concatenate(pieces, axis=1), strict=True))


def _rows(payload: bytes) -> tuple[Kind, int, Whole]:
    """Read a block: kind and number, then its columns one after another, as differences.

    Numbers have a variable length, described in native/sampling/sample_file.hpp.
    """
    content = np.frombuffer(payload, np.uint8)
    ends = np.flatnonzero(content < 128)
    if not len(ends) or ends[-1] != len(content) - 1:
        raise ValueError("a block of samples that ends within a number")
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > _LONGEST_NUMBER_BYTES:
        raise ValueError("a block of samples with a number that is too long")
    place = np.arange(len(content)) - np.repeat(starts, lengths)
    pieces = (content & 127).astype(np.uint64) << (7 * place).astype(np.uint64)
    folded = np.add.reduceat(pieces, starts)
    sign = np.where(folded & np.uint64(1), np.uint64(2**64 - 1), np.uint64(0))
    numbers: Whole = np.asarray((folded >> np.uint64(1)) ^ sign).view(np.int64)
    if len(numbers) < 2:
        raise ValueError("a block of samples without a kind")
    kind = Kind(int(numbers[0]))
    columns = len(COLUMNS[kind])
    if (len(numbers) - 2) % columns:
        raise ValueError("a block of samples with rows of several lengths")
    return kind, int(numbers[1]), np.cumsum(numbers[2:].reshape(columns, -1), axis=1)


Shift = Callable[[HostSamples], int]  # returns the shift of its times to the run's zero


def tables_of(samples: HostSamples, shift_ns: int) -> Iterator[Links | Sockets | Hosts]:
    """Yield a sampler's tables, some rows at a time: links, connections, then devices."""
    for number, rows in samples.of(Kind.LINK):
        link = samples.links[number]
        yield Links(
            host=_text(samples.host, rows),
            interface=_text(link["name"], rows),
            speed_bps=np.full(len(rows["time_ns"]), float(link["speed_bps"])),
            **{**rows, "time_ns": rows["time_ns"] + shift_ns},
        )
    for number, rows in samples.of(Kind.SOCKET):
        yield (
            Sockets(
                host=_text(samples.host, rows),
                flow=_text(samples.flows[number], rows),
                time_ns=rows["time_ns"] + shift_ns,
                bytes_acked=rows["bytes_acked"],
                retransmits=rows["retransmits"],
                rtt_ns=rows["rtt_us"] * 1000,
                cwnd_packets=rows["cwnd_packets"],
                delivery_rate_bps=rows["delivery_rate_bytes"].astype(np.float64) * 8,
                application_limited=rows["application_limited"],
                busy_ns=rows["busy_us"] * 1000,
                receiver_window_limited_ns=rows["receiver_window_limited_us"] * 1000,
                send_buffer_limited_ns=rows["send_buffer_limited_us"] * 1000,
            )
        )
    last: dict[int, Mapping[str, Whole]] = {}  # last sample of each processor, for differences
    for number, rows in samples.of(Kind.PROCESSOR):
        before = last.get(number, {name: column[:0] for name, column in rows.items()})
        last[number] = {name: column[-1:] for name, column in rows.items()}
        joined = {name: np.append(before[name], column) for name, column in rows.items()}
        # Turn counted ticks into the share in use between two samples.
        passed = np.diff(joined["all"])
        is_known = passed > 0
        in_use = np.diff(joined["busy"])[is_known] / passed[is_known]
        time_ns = joined["time_ns"][1:][is_known] + shift_ns
        no_memory = np.zeros(len(time_ns), np.int64)
        yield _device(samples.host, f"cpu{number}", time_ns, np.clip(in_use, 0.0, 1.0), no_memory)
    for _, rows in samples.of(Kind.MEMORY):
        share, time_ns = rows["used_bytes"] / np.maximum(rows["all_bytes"], 1), rows["time_ns"]
        yield _device(samples.host, "memory", time_ns + shift_ns, share, rows["used_bytes"])
    for number, rows in samples.of(Kind.GPU):
        share, time_ns = rows["percent"] / 100, rows["time_ns"]
        yield _device(samples.host, f"gpu{number}", time_ns + shift_ns, share, rows["memory_bytes"])


def sampler_defects(samples: Sequence[HostSamples]) -> list[str]:
    """Return the problems of each sampler."""
    sentences = []
    for sampler in samples:
        status, reason = sampler.header["status"], sampler.header["reason"]
        defects = []
        if status == FAILED:
            defects.append(f"its sampler failed and the job went on without it ({reason})")
        elif status != ENDED:
            defects.append("its sampler ended before the job (was it killed?)")
        if sampler.bytes_not_read:
            defects.append(
                f"the last {sampler.bytes_not_read} bytes of its samples are no whole block"
            )
        sentences += [f"host {sampler.host}: {defect}" for defect in defects]
    return sentences


def sampler_share(samples: Sequence[HostSamples]) -> float | None:
    """Return the processor time of the samplers of the costliest host, over the time that they ran.

    The samplers of a host follow each other, as its ranks end. The last one may run for a moment.
    """
    of_hosts: dict[str, list[tuple[int, int, int]]] = {}  # begin, end, processor time
    for sampler in samples:
        for _, _, last in sampler.ends_of(Kind.OWN_COST):
            began_ns = int(sampler.header["monotonic_ns"])
            times_ns = began_ns, int(last["time_ns"]), int(last["processor_ns"])
            of_hosts.setdefault(sampler.host, []).append(times_ns)
    shares = []
    for of_host in of_hosts.values():
        begin_ns, end_ns, used_ns = zip(*of_host, strict=True)
        if max(end_ns) > min(begin_ns):
            shares.append(sum(used_ns) / (max(end_ns) - min(begin_ns)))
    return max(shares, default=None)


def line_rates_bps(samples: Sequence[HostSamples]) -> dict[str, float]:
    """Return the line rate of each host's busiest link, if its adapter gives one."""
    rates: dict[str, float] = {}
    for sampler in samples:
        moved = {
            number: last["tx_bytes"] - first["tx_bytes"]
            for number, first, last in sampler.ends_of(Kind.LINK)
        }
        if moved:
            busiest = max(moved, key=lambda number: moved[number])
            rates[sampler.host] = float(sampler.links[busiest]["speed_bps"])
    return {host: rate_bps for host, rate_bps in rates.items() if rate_bps > 0}


def _device(
    host: str, device: str, time_ns: Whole, utilization: Real, memory_bytes: Whole
) -> Hosts:
    return Hosts(
        host=np.full(len(time_ns), host, object),
        device=np.full(len(time_ns), device, object),
        time_ns=time_ns,
        utilization=utilization,
        memory_bytes=memory_bytes,
    )


def _text(value: str, rows: Mapping[str, Whole]) -> Text:
    return np.full(len(rows["time_ns"]), value, object)
