"""The files of a job's samplers, read as far as they are whole, and never all at once."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fullwire.recorder.inside.journal import BLOCK, DEFINITIONS, HEADER_BYTES
from fullwire.recorder.journals import (
    Header,
    block_from,
    blocks_in,
    files_in,
    read_header,
)
from fullwire.recorder.sampler import SUFFIX
from fullwire.run.run import Whole

SAMPLES = 3  # the kind of block, beside those of a journal
PIECE_ROWS = 10_000  # of one series, in memory at once
_LONGEST_NUMBER_BYTES = 10
_WHOLE_NUMBERS = ("watched", "monotonic_ns", "unix_ns")


class Kind(IntEnum):
    """What is sampled, as native/sampling/sample_file.hpp numbers it."""

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
    """What was sampled of one thing: where its blocks begin, its first row and its last."""

    first: Whole
    last: Whole
    places: array[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSamples:
    """What one sampler left: its header, and where the rows of each thing are that it sampled."""

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
        """Go through what was sampled of a kind, some rows at a time: its number and columns."""
        with self.path.open("rb") as file:
            for (each, number), series in self.series.items():
                if each == kind:
                    for rows in _pieces(file, series.places):
                        yield number, dict(zip(COLUMNS[kind], rows, strict=True))

    def ends_of(self, kind: Kind) -> Iterator[tuple[int, Mapping[str, int], Mapping[str, int]]]:
        """Go through the series of a kind: each one's number, first row and last row."""
        for (each, number), series in self.series.items():
            if each == kind:
                yield number, _named(kind, series.first), _named(kind, series.last)

    @property
    def links(self) -> list[Mapping[str, Any]]:
        """The name and the speed of each link, in the order of their numbers."""
        return next((list(each["links"]) for each in self.definitions if "links" in each), [])

    @property
    def flows(self) -> dict[int, str]:
        """The name of each connection by its number."""
        found = (each for each in self.definitions if each.get("kind") == "flow")
        return {int(each["number"]): str(each["name"]) for each in found}


def read_samples(directories: Sequence[Path]) -> tuple[list[HostSamples], list[str]]:
    """Read every sampler's file in some directories; one that cannot be read gets a sentence."""
    samples, unreadable = [], []
    for path in files_in(directories, SUFFIX):
        try:
            samples.append(_read(path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            unreadable.append(f"{path.name}: not a readable file of samples ({error})")
    return samples, unreadable


def header_of(path: Path) -> Header:
    """Read what a sampler said of itself."""
    return read_header(path, _WHOLE_NUMBERS)


def _read(path: Path) -> HostSamples:
    header, length, place = header_of(path), path.stat().st_size, HEADER_BYTES
    series: dict[tuple[Kind, int], _Series] = {}
    definitions: list[Mapping[str, Any]] = []
    for block, payload in blocks_in(path, length):
        if block == DEFINITIONS:
            definitions += json.loads(payload)
        elif block == SAMPLES:
            _survey(payload, place, series)
        place += BLOCK.size + len(payload)
    read = HostSamples(
        path=path,
        header=header,
        series=series,
        definitions=tuple(definitions),
        bytes_not_read=max(0, length - place),
    )
    _refuse_nameless(read)
    return read


def _named(kind: Kind, row: Whole) -> dict[str, int]:
    return dict(zip(COLUMNS[kind], row.tolist(), strict=True))


def _survey(payload: bytes, place: int, series: dict[tuple[Kind, int], _Series]) -> None:
    """Add a block to the series that it continues."""
    kind, number, rows = _rows(payload)
    if not rows.shape[1]:
        return
    if (kind, number) not in series:
        series[kind, number] = _Series(rows[:, 0].copy(), rows[:, -1].copy(), array("q"))
    series[kind, number].last = rows[:, -1].copy()
    series[kind, number].places.append(place)


def _pieces(file: BinaryIO, places: Sequence[int]) -> Iterator[Whole]:
    """Join a series's blocks to pieces of some thousand rows."""
    held: list[Whole] = []
    for place in places:
        file.seek(place)
        block = block_from(file)
        if block is None:  # the file has changed since it was surveyed
            break
        held.append(_rows(block[1])[2])
        if sum(rows.shape[1] for rows in held) >= PIECE_ROWS:
            yield np.concatenate(held, axis=1)
            held = []
    if held:
        yield np.concatenate(held, axis=1)


def _rows(payload: bytes) -> tuple[Kind, int, Whole]:
    """Read a block: kind and number, then its columns one after another, as differences."""
    numbers = _numbers(payload)
    if len(numbers) < 2:
        raise ValueError("a block of samples without a kind")
    kind = Kind(int(numbers[0]))
    columns = len(COLUMNS[kind])
    if (len(numbers) - 2) % columns:
        raise ValueError("a block of samples with rows of several lengths")
    return kind, int(numbers[1]), np.cumsum(numbers[2:].reshape(columns, -1), axis=1)


def _numbers(payload: bytes) -> Whole:
    """Read numbers of variable length, written as native/sampling/sample_file.hpp says."""
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
    return np.asarray((folded >> np.uint64(1)) ^ sign).view(np.int64)


def _refuse_nameless(read: HostSamples) -> None:
    flows, links = read.flows, range(len(read.links))
    for kind, number in read.series:
        known = flows if kind == Kind.SOCKET else links
        if kind in (Kind.SOCKET, Kind.LINK) and number not in known:
            raise ValueError(f"samples of a {kind.name.lower()} that nothing names")
    for link in read.links:
        str(link["name"]), float(link["speed_bps"])
