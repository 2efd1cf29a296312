"""Flow records of switches: NetFlow v5 and v9, IPFIX (RFC 7011) and sFlow v5, as they are sent.

A file holds the payloads of the export packets one after another, as `nc -lu 4739 > x.ipfix` or
IPFIX files (RFC 5655) do. Files of nfdump 1.7 (`nfcapd`) hold their own records. Counts of sampled
packets are multiplied by the sampling rate. Of several switches that report a flow, the one that
saw most of it counts.
"""

from __future__ import annotations

import bz2
import ipaddress
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullwire.errors import DamagedInput
from fullwire.files import opened_plain
from fullwire.importers._format import LIKELY, UNLIKE, Format, Likeness

if TYPE_CHECKING:
    from fullwire.run.run import Run

_MOST_BYTES, _MOST_RECORDS = 1 << 31, 20_000_000
_MOST_TEMPLATES, _MOST_FIELDS = 4096, 512
_MOST_SAMPLING = 1 << 24
_MOST_NS, _MOST_COUNT = 1 << 61, 1 << 50
_HEADERS = 40  # bytes of IPv4 and TCP a packet
_NTP_S = 2_208_988_800  # from 1900 to 1970
# Elements of IPFIX and NetFlow v9 that are read.
_BYTES, _PACKETS = (1, 85), (2, 86)
_SOURCE, _TARGET = (8, 27), (12, 28)
_PORTS = (7, 11)
_SAMPLING = (305, 34, 50)
_SPACE = 306  # packets that are skipped
_VERSIONS = (5, 9, 10)
# Files of nfdump: magic, layout 2; kinds of records, elements of a flow, packed blocks.
_NFDUMP = {b"\x0c\xa5": "<", b"\xa5\x0c": ">"}
_NFDUMP_FLOW, _NFDUMP_GENERIC, _NFDUMP_IPV4, _NFDUMP_IPV6 = 11, 1, 2, 3
_LZO, _BZ2, _LZ4, _ZSTD = 1, 2, 3, 4
_MOST_BLOCK = 16 << 20


@dataclass(slots=True)
class _Template:
    """What the fields of a data record are, and how they are cut."""

    fields: tuple[tuple[int, int], ...]  # element and bytes; 65535 has a length of its own
    is_of_options: bool = False
    cut: struct.Struct | None = None

    def __post_init__(self) -> None:
        if all(size != 0xFFFF for _, size in self.fields):
            kinds = {1: "B", 2: "H", 4: "I", 8: "Q"}
            addresses = (*_SOURCE, *_TARGET)
            self.cut = struct.Struct(
                ">"
                + "".join(
                    f"{size}s" if element in addresses or size not in kinds else kinds[size]
                    for element, size in self.fields
                )
            )


@dataclass(slots=True)
class _Reading:
    """What was read of the exporters of a file."""

    templates: dict[tuple[int, int, int], _Template] = field(default_factory=dict)
    sampling: dict[tuple[int, int], int] = field(default_factory=dict)  # by version and domain
    # Domain, source, destination, begin and end in ns, bytes, packets.
    rows: list[tuple[int, bytes, bytes, int, int, int, int]] = field(default_factory=list)
    unknown: int = 0  # sets of data whose template was not seen


def looks_like(beginning: bytes) -> Likeness:
    """Say whether a file with this beginning holds flow records."""
    if len(beginning) < 24:
        return UNLIKE
    if beginning[:2] in _NFDUMP:
        layout = struct.unpack_from(f"{_NFDUMP[beginning[:2]]}H", beginning, 2)[0]
        return LIKELY if layout in (1, 2) else UNLIKE
    version, second = struct.unpack_from(">HH", beginning)
    if version == 10:
        sets = struct.unpack_from(">HH", beginning, 16)
        is_set = (sets[0] in (2, 3) or sets[0] >= 256) and 4 <= sets[1] <= second - 16
        return LIKELY if is_set else UNLIKE
    if version == 9:
        sets = struct.unpack_from(">HH", beginning, 20)
        is_set = (sets[0] in (0, 1) or sets[0] >= 256) and sets[1] >= 4
        return LIKELY if is_set and 0 < second < 4096 else UNLIKE
    if version == 5:
        seconds, nanoseconds = struct.unpack_from(">II", beginning, 8)
        return LIKELY if 0 < second <= 30 and seconds and nanoseconds < 10**9 else UNLIKE
    if (version, second) == (0, 5):
        kind = struct.unpack_from(">I", beginning, 4)[0]
        return LIKELY if kind in (1, 2) else UNLIKE
    return UNLIKE


def _read_stream(data: memoryview, reading: _Reading) -> str:
    """Read messages up to the end or to damage; return the damage."""
    if bytes(data[:2]) in _NFDUMP:
        return _read_nfdump(data, _NFDUMP[bytes(data[:2])], reading)
    at = 0
    while at + 4 <= len(data):
        if len(reading.rows) > _MOST_RECORDS:
            return f"read up to record {_MOST_RECORDS:,}"
        version, second = struct.unpack_from(">HH", data, at)
        try:
            if version == 10:
                if not 16 <= second <= len(data) - at:
                    return f"read up to byte {at:,}: an IPFIX message of {second} bytes is cut off"
                seconds, _, domain = struct.unpack_from(">III", data, at + 4)
                _read_sets(data[at + 16 : at + second], 10, domain, seconds * 10**9, 0, reading)
                at += second
            elif version == 9:
                uptime, seconds, _, domain = struct.unpack_from(">IIII", data, at + 4)
                length = 20
                while at + length + 4 <= len(data):
                    number, of_set = struct.unpack_from(">HH", data, at + length)
                    if 2 <= number < 256:  # no set, but a new message
                        break
                    if not 4 <= of_set <= len(data) - at - length:
                        return f"read up to byte {at:,}: a set of NetFlow v9 is cut off"
                    length += of_set
                boot_ns = seconds * 10**9 - uptime * 10**6
                body = data[at + 20 : at + length]
                _read_sets(body, 9, domain, seconds * 10**9, boot_ns, reading)
                at += length
            elif version == 5:
                at += _read_v5(data[at:], second, reading)
            elif (version, second) == (0, 5):
                at += _read_sflow(data[at:], reading)
            else:
                return f"read up to byte {at:,}: expected a message of NetFlow, IPFIX or sFlow"
        except (struct.error, ValueError, IndexError):
            return f"read up to byte {at:,}: a message is damaged or cut off"
    return "" if at == len(data) else f"read up to byte {at:,}: a message is cut off"


def _read_sets(
    data: memoryview, version: int, domain: int, now_ns: int, boot_ns: int, reading: _Reading
) -> None:
    at = 0
    while at + 4 <= len(data):
        number, length = struct.unpack_from(">HH", data, at)
        if not 4 <= length <= len(data) - at:
            raise ValueError("length of a set")
        body = data[at + 4 : at + length]
        at += length
        key = version, domain
        if number in (0, 2):
            _read_templates(body, key, reading, is_of_options=False)
        elif number in (1, 3):
            _read_templates(body, key, reading, is_of_options=True)
        elif number >= 256:
            template = reading.templates.get((*key, number))
            if template is None:
                reading.unknown += 1
                continue
            for values in _cut(body, template):
                _take(values, template, key, now_ns, boot_ns, reading)


def _fields(body: memoryview, at: int, count: int, version: int) -> tuple[Any, int]:
    if count > _MOST_FIELDS:
        raise ValueError("number of fields")
    fields = []
    for _ in range(count):
        element, size = struct.unpack_from(">HH", body, at)
        at += 4
        if version == 10 and element & 0x8000:  # of an enterprise: not one of ours
            at += 4
            element = -1
        fields.append((element, size))
    return tuple(fields), at


def _read_templates(
    body: memoryview, key: tuple[int, int], reading: _Reading, *, is_of_options: bool
) -> None:
    at, head = 0, 6 if is_of_options else 4
    while at + head <= len(body):
        number, count = struct.unpack_from(">HH", body, at)
        if number < 256:  # padding
            return
        scopes = 0
        if is_of_options and key[0] == 9:
            # IPFIX counts all fields; NetFlow v9 has the bytes of those of the scope, and the rest.
            scopes = count // 4
            count = (count + struct.unpack_from(">H", body, at + 4)[0]) // 4
        fields, at = _fields(body, at + head, count, key[0])
        # Elements of a scope have numbers of their own.
        fields = (*((-1, size) for _, size in fields[:scopes]), *fields[scopes:])
        if len(reading.templates) < _MOST_TEMPLATES and sum(size for _, size in fields) > 0:
            reading.templates[(*key, number)] = _Template(fields, is_of_options)


def _cut(body: memoryview, template: _Template) -> Iterator[tuple[Any, ...]]:
    if template.cut is not None:
        size = template.cut.size
        yield from template.cut.iter_unpack(body[: len(body) // size * size])
        return
    at = 0
    while at < len(body):
        values: list[Any] = []
        for _, size in template.fields:
            length = size
            if size == 0xFFFF:
                length, at = body[at], at + 1
                if length == 0xFF:
                    length, at = struct.unpack_from(">H", body, at)[0], at + 2
            if at + length > len(body):
                return  # padding
            values.append(bytes(body[at : at + length]))
            at += length
        yield tuple(values)


def _take(
    values: tuple[Any, ...],
    template: _Template,
    key: tuple[int, int],
    now_ns: int,
    boot_ns: int,
    reading: _Reading,
) -> None:
    told = {element: value for (element, _), value in zip(template.fields, values, strict=True)}

    def number(*elements: int) -> int | None:
        for element in elements:
            if (value := told.get(element)) is not None:
                return int.from_bytes(value, "big") if isinstance(value, bytes) else int(value)
        return None

    sampling = number(*_SAMPLING)
    if sampling:
        sampling += number(_SPACE) or 0
    if template.is_of_options:
        if sampling and sampling <= _MOST_SAMPLING:
            reading.sampling[key] = sampling
        return
    source: bytes = told.get(_SOURCE[0], told.get(_SOURCE[1], b""))
    target: bytes = told.get(_TARGET[0], told.get(_TARGET[1], b""))
    carried, packets = number(*_BYTES), number(*_PACKETS)
    if {len(source), len(target)} - {4, 16} or carried is None:
        return
    begins, ends = (156, 154, 152, 150, 22), (157, 155, 153, 151, 21)
    begin_ns = _time_ns([number(element) for element in begins], now_ns, boot_ns)
    end_ns = _time_ns([number(element) for element in ends], now_ns, boot_ns)
    rate = sampling if sampling and sampling <= _MOST_SAMPLING else reading.sampling.get(key, 1)
    domain = key[0] << 32 | key[1]
    row = domain, source, target, begin_ns, max(begin_ns, end_ns), carried * rate
    reading.rows.append((*row, (packets or 0) * rate))


def _time_ns(told: Sequence[int | None], now_ns: int, boot_ns: int) -> int:
    """Return a time that was told in one of five ways: NTP (ns and us), ms, s, ms since boot."""
    for value in told[:2]:
        if value:
            return ((value >> 32) - _NTP_S) * 10**9 + ((value & 0xFFFFFFFF) * 10**9 >> 32)
    if told[2]:
        return told[2] * 10**6
    if told[3]:
        return told[3] * 10**9
    return now_ns if told[4] is None else boot_ns + told[4] * 10**6


def _read_v5(data: memoryview, count: int, reading: _Reading) -> int:
    uptime, seconds, nanoseconds = struct.unpack_from(">III", data, 4)
    engine, sampling = struct.unpack_from(">HH", data, 20)
    rate = max(sampling & 0x3FFF, 1)
    boot_ns = seconds * 10**9 + nanoseconds - uptime * 10**6
    length = 24 + 48 * count
    if not 0 < count <= 30 or length > len(data):
        raise ValueError("records of a message")
    for values in struct.iter_unpack(">4s4s8xIIII16x", data[24:length]):
        source, target, packets, carried, first, last = values
        begin_ns, end_ns = boot_ns + first * 10**6, boot_ns + last * 10**6
        row = 5 << 32 | engine, source, target, begin_ns, max(begin_ns, end_ns), carried * rate
        reading.rows.append((*row, packets * rate))
    return length


def _read_sflow(data: memoryview, reading: _Reading) -> int:
    kind = struct.unpack_from(">I", data, 4)[0]
    if kind not in (1, 2):
        raise ValueError("kind of an agent's address")
    at = 8 + (4 if kind == 1 else 16)
    agent = zlib.crc32(data[8:at])
    _, _, uptime, samples = struct.unpack_from(">IIII", data, at)
    at += 16
    for _ in range(min(samples, len(data) // 8 + 1)):
        kind, length = struct.unpack_from(">II", data, at)
        body = data[at + 8 : at + 8 + length]
        if len(body) < length:
            raise ValueError("length of a sample")
        at += 8 + length
        if kind not in (1, 3):  # counters
            continue
        rate, records, begin = (
            (*struct.unpack_from(">I", body, 8), *struct.unpack_from(">I", body, 28), 32)
            if kind == 1
            else (*struct.unpack_from(">I", body, 12), *struct.unpack_from(">I", body, 40), 44)
        )
        for _ in range(min(records, len(body) // 8)):
            kind, length = struct.unpack_from(">II", body, begin)
            record = body[begin + 8 : begin + 8 + length]
            begin += 8 + length
            if kind != 1 or not 0 < rate <= _MOST_SAMPLING:
                continue
            protocol, size, _, length = struct.unpack_from(">IIII", record)
            packet, to_ip = record[16 : 16 + length], 14
            if protocol != 1 or len(packet) < 34 or size > 1 << 16:  # Ethernet
                continue
            kind = packet[12] << 8 | packet[13]
            while kind in (0x8100, 0x88A8) and len(packet) >= to_ip + 4:
                kind, to_ip = packet[to_ip + 2] << 8 | packet[to_ip + 3], to_ip + 4
            first, length = {0x0800: (12, 4), 0x86DD: (8, 16)}.get(kind, (0, 0))
            source = bytes(packet[to_ip + first :][:length])
            target = bytes(packet[to_ip + first + length :][:length])
            if len(target) in (4, 16):
                now_ns = uptime * 10**6
                row = agent, source, target, now_ns, now_ns, (size - to_ip) * rate, rate
                reading.rows.append(row)
    return at


def _read_nfdump(data: memoryview, order: str, reading: _Reading) -> str:
    """Read a file of nfdump 1.7; nfcapd has multiplied its counts by the sampling rate."""
    layout = struct.unpack_from(f"{order}H", data, 2)[0]
    if layout != 2:
        return (
            f"expected a file of nfdump 1.7, got layout {layout}: "
            "`nfdump -r OLD -w NEW` of 1.7 writes one"
        )
    at = 40
    try:
        packing, encryption = data[16], data[17]
        if encryption:
            return "expected a file that is not encrypted"
        blocks = struct.unpack_from(f"{order}I", data, 36)[0]
        for _ in range(blocks):
            records, size, kind, flags = struct.unpack_from(f"{order}IIHH", data, at)
            body = data[at + 12 : at + 12 + size]
            if len(body) < size:
                return f"read up to byte {at:,}: a block is cut off"
            at += 12 + size
            if kind == 3:  # others hold no flows
                block = bytes(body) if flags & 1 or not packing else _unpacked(body, packing)
                _read_nfdump_block(memoryview(block), records, order, reading)
    except (struct.error, ValueError, IndexError, OSError):
        return f"read up to byte {at:,}: a block is damaged"
    return ""


def _read_nfdump_block(block: memoryview, records: int, order: str, reading: _Reading) -> None:
    at, header = 0, struct.Struct(f"{order}HH")
    for _ in range(records):
        kind, size = header.unpack_from(block, at)
        record = block[at : at + size]
        if not 4 <= size == len(record):
            raise ValueError("length of a record")
        at += size
        if kind != _NFDUMP_FLOW:
            continue
        exporter = struct.unpack_from(f"{order}H", record, 8)[0]
        source = target = b""
        counted = None
        element = 12
        while element + 4 <= size:
            kind, length = header.unpack_from(record, element)
            if length < 4:
                raise ValueError("length of an element")
            body = record[element + 4 : element + length]
            element += length
            if kind == _NFDUMP_GENERIC:
                counted = struct.unpack_from(f"{order}QQQQQ", body)
            elif kind in (_NFDUMP_IPV4, _NFDUMP_IPV6):
                words = f"{order}II" if kind == _NFDUMP_IPV4 else f"{order}QQQQ"
                numbers = struct.unpack_from(words, body)
                ends = struct.pack(words.replace(order, ">"), *numbers)
                source, target = ends[: len(ends) // 2], ends[len(ends) // 2 :]
        if counted is not None and target:
            begin_ms, end_ms, _, packets, carried = counted
            begin_ns, end_ns = begin_ms * 10**6, max(begin_ms, end_ms) * 10**6
            domain = 7 << 32 | exporter
            reading.rows.append((domain, source, target, begin_ns, end_ns, carried, packets))


def _unpacked(body: memoryview, packing: int) -> bytes:
    if packing == _LZO:
        return _unpacked_lzo(bytes(body))
    if packing == _BZ2:
        return bz2.BZ2Decompressor().decompress(bytes(body), _MOST_BLOCK)
    if packing in (_LZ4, _ZSTD):
        import pyarrow as pa

        if packing == _ZSTD:
            with pa.CompressedInputStream(pa.BufferReader(bytes(body)), "zstd") as stream:
                return bytes(stream.read(_MOST_BLOCK))
        # What lies behind its end is not read: the block tells how many records it has.
        codec = pa.Codec("lz4_raw")
        return bytes(codec.decompress(bytes(body), decompressed_size=_MOST_BLOCK, asbytes=True))
    raise ValueError("kind of packing")


def _unpacked_lzo(packed: bytes) -> bytes:
    """Unpack LZO1X, whose format the kernel's page staging/lzo.rst describes."""
    out, at, state = bytearray(), 0, 0

    def more(first: int, most: int) -> int:
        """Return a length that goes on in further bytes where its own bits are 0."""
        nonlocal at
        if first:
            return first
        while not packed[at]:
            at, most = at + 1, most + 255
        at += 1
        return most + packed[at - 1]

    if packed[0] > 17:  # the block begins with so many bytes as they are
        at = 1 + packed[0] - 17
        out += packed[1:at]
        state = min(packed[0] - 17, 4)
    while len(out) <= _MOST_BLOCK:
        code, at = packed[at], at + 1
        if code < 16 and not state:
            length = more(code, 15) + 3
            out += packed[at : at + length]
            at, state = at + length, 4
            continue
        before, state = state, code & 3
        if code >= 64:
            length = 3 + (code >> 5 & 1) if code < 128 else 5 + (code >> 5 & 3)
            distance = (packed[at] << 3) + (code >> 2 & 7) + 1
            at += 1
        elif code >= 16:
            mask = 31 if code >= 32 else 7
            length = more(code & mask, mask) + 2
            told = packed[at] | packed[at + 1] << 8
            at, state = at + 2, told & 3
            distance = (told >> 2) + (1 if code >= 32 else 16384 + ((code & 8) << 11))
            if distance == 16384 and code < 32:
                return bytes(out)
        else:
            length, distance = (3, 2049) if before == 4 else (2, 1)
            distance += (packed[at] << 2) + (code >> 2 & 3)
            at += 1
        if distance > len(out) or length > _MOST_BLOCK:
            raise ValueError("distance or length")
        piece = out[len(out) - distance : len(out) - distance + length]
        out += (piece * -(-length // len(piece)))[:length]  # it may overlap what it makes
        out += packed[at : at + state]
        at += state
    raise ValueError("size of a block")


def read_flow_records(paths: Sequence[Path]) -> Run:
    """Read files of flow records as the flows of a run."""
    import numpy as np

    from fullwire.run.gaps import gaps_of
    from fullwire.run.run import Flows, Provenance, Run

    reading, problems = _Reading(), []
    for path in paths:
        with opened_plain(path) as file:
            data = file.read(_MOST_BYTES + 1)
        damage = _read_stream(memoryview(data)[:_MOST_BYTES], reading)
        if len(data) > _MOST_BYTES:
            damage = damage or f"read up to byte {_MOST_BYTES:,}"
        problems += [f"{path.name}: {damage}"] if damage else []
    if reading.unknown:
        problems.append(f"{reading.unknown:,} sets of records came before their template")
    possible = [
        row
        for row in reading.rows
        if 0 <= row[3] <= row[4] < _MOST_NS and 0 <= row[5] < _MOST_COUNT and row[6] < _MOST_COUNT
    ]
    if len(possible) < len(reading.rows):
        problems.append(f"{len(reading.rows) - len(possible):,} records have impossible numbers")
    if not possible:
        why = f"; {problems[0]}" if problems else ""
        raise DamagedInput(paths[0], f"expected records of flows between two addresses{why}")
    seen: defaultdict[tuple[bytes, bytes], defaultdict[int, int]] = defaultdict(
        lambda: defaultdict(int)
    )
    for domain, source, target, _, _, carried, _ in possible:
        seen[source, target][domain] += carried
    most = {pair: max(by_domain, key=by_domain.__getitem__) for pair, by_domain in seen.items()}
    rows = [row for row in possible if most[row[1], row[2]] == row[0]]
    names = {each: str(ipaddress.ip_address(each)) for pair in most for each in pair}
    numbers = np.array([row[3:] for row in rows], np.int64)
    numbers[:, :2] -= numbers[:, 0].min()
    return Run(
        provenance=Provenance(origin="imported", source=str(paths[0])),
        gaps=gaps_of(problems),
        flows=Flows(
            source=np.array([names[row[1]] for row in rows], object),
            destination=np.array([names[row[2]] for row in rows], object),
            start_ns=numbers[:, 0],
            end_ns=np.maximum(numbers[:, 1], numbers[:, 0] + 1),
            payload_bytes=np.maximum(numbers[:, 2] - _HEADERS * numbers[:, 3], 0),
            wire_bytes=numbers[:, 2],
            packets=numbers[:, 3],
            retransmits=np.zeros(len(rows), np.int64),
        ),
    )


FORMAT = Format(
    key="flow-records",
    label="flow records",
    looks_like=looks_like,
    read=lambda files, options: read_flow_records(files),
    is_of_many=True,
    tells=25,
)
