"""Chakra execution traces, one for each rank: protobuf (.et), its JSON, or PyTorch's own JSON.

    .et                  messages behind their lengths: GlobalMetadata, then a Node each
                         (mlcommons/chakra, schema/protobuf/et_def.proto, version 0.0.4)
    its JSON             the same messages as JSON objects, one after another
    PyTorch's observer   {"schema": "1.1.1-chakra.0.0.4", "nodes": [{"name": "c10d::allreduce_"}]}

A trace holds the operations of a job and the dependencies between them. It holds times only where
the program that wrote it filled them in. So collectives come in the order of the file, with their
sizes. Computation is read where it has a beginning and a length. A collective that lacks times gets
start 0 and length 0, and the run's remarks count such collectives.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fullwire.errors import DamagedInput
from fullwire.files import name_of, opened_plain
from fullwire.importers._encodings import BrokenMessageError, fields, messages, signed
from fullwire.importers._format import (
    LIKELY,
    NEAR_BYTES,
    POSSIBLE,
    UNLIKE,
    Format,
    Likeness,
    near_miss,
)
from fullwire.importers.kineto.recognise import dtype_of, op_of
from fullwire.run.facts import Facts
from fullwire.run.gaps import gaps_of
from fullwire.run.run import SIZE_UNKNOWN, Collectives, Provenance, Run, Spans

_MOST_MESSAGE_BYTES = 64 * 2**20
_MOST_NODES = 100_000_000
_MOST_KEPT = 5_000_000  # collectives, or computations, of one rank
_MOST_BYTES = 2**50
_MOST_RANK = 100_000_000
_LATEST_US = 2**53  # 285 years after zero
_CHUNK = 2**20  # characters
_SCHEMA_BYTES = 1024  # before the nodes of PyTorch's form
_LONGEST_OBJECT = 64 * 2**20
_LONGEST_NAME = 200
_SHOWN = 5
# A number behind a dot is a rank unless another number stands before: that is a version.
_RANK_IN_NAME = re.compile(
    r"rank[-_]?(\d{1,9})|(?:(?<!\d)\.|[_-])(\d{1,9})(?:\.et|\.json)", re.IGNORECASE
)
_GROUPS = "## process_group:init ##"
_GROUP_SIZE = re.compile(r'\\?"group_size\\?"\s*:\s*(\d{1,9})\b')
_SCHEMA = re.compile(rb'\{\s*"schema"\s*:\s*"1\.\d{1,3}\.\d{1,3}["-]')
# GlobalMetadata in front, after its length: its version, or attributes alone.
_METADATA = re.compile(
    rb"(?:[\x05-\x7f]|[\x80-\xff]{1,3}[\x01-\x7f])"
    rb"(?:\x0a[\x03-\x14]\d+\.\d+|\x12(?:[\x04-\x7f]|[\x80-\xff][\x01-\x7f])\x0a[\x01-\x40][A-Za-z_])"
)
_NODES_LISTED = re.compile(r'\s*\{[^{}\[\]]*"nodes"\s*:\s*\[')
_GAP = re.compile(r"[\s,]*")
_TENSOR_OF = re.compile(r"Tensor\(([\w ]{1,40})\)")
_TENSOR_FIELDS = 6  # id, storage, offset, elements, bytes of one, device
_DEEPEST = 4  # lists of lists of tensors

_CALL = "c10d::"

_COMPUTES, _SENDS, _RECEIVES, _COLLECTIVE = 4, 5, 6, 7
_TYPES: Mapping[str, int] = {
    "COMP_NODE": _COMPUTES,
    "COMM_SEND_NODE": _SENDS,
    "COMM_RECV_NODE": _RECEIVES,
    "COMM_COLL_NODE": _COLLECTIVE,
}
_OPS = (
    "allreduce",
    "reduce",
    "allgather",
    "gather",
    "scatter",
    "broadcast",
    "alltoall",
    "reducescatter",
    "reducescatter",
    "barrier",
)


@dataclass(slots=True)
class _Node:
    """The fields of one node, the same for every form of the file."""

    name: str = ""
    type: int = 0
    start_us: int = 0
    duration_us: int = 0
    attributes: dict[str, int | str] = field(default_factory=dict)
    arguments: tuple[int, str] = (-1, "")  # bytes and type of the largest, in PyTorch's form
    largest_group: int = 0  # number of ranks, where the process groups are stated


@dataclass(frozen=True, slots=True)
class _Collective:
    op: str
    group: str
    dtype: str
    bytes: int
    start_ns: int
    duration_ns: int


@dataclass(slots=True)
class _Trace:
    """The collectives and computations of one file."""

    collectives: list[_Collective] = field(default_factory=list)
    calls: list[_Collective] = field(default_factory=list)  # PyTorch's c10d calls around them
    computations: list[tuple[str, int, int]] = field(default_factory=list)
    has_starts: bool = False
    nodes: int = 0
    world: int = 0
    problem: str = ""


def looks_like(beginning: bytes) -> Likeness:
    """Say whether a file with this beginning is such a trace."""
    text = beginning.lstrip()
    if text[:1] == b"{":
        keys = (b"-chakra.", b"COMM_COLL_NODE", b"COMP_NODE", b"METADATA_NODE")
        is_metadata = re.match(rb'\{\s*"version"\s*:\s*"[^"]*"\s*\}\s*\{', text) is not None
        # PyTorch wrote 1.0.1 before it took Chakra's names.
        is_graph = _SCHEMA.match(text) is not None and b'"nodes"' in text[:_SCHEMA_BYTES]
        is_chakra = is_metadata or is_graph or any(key in text for key in keys)
        if is_chakra:
            return POSSIBLE
        is_near = b'"nodes"' in text[:NEAR_BYTES] and (
            b'"op_schema"' in text[:NEAR_BYTES] or b'"ctrl_deps"' in text[:NEAR_BYTES]
        )
        return near_miss(is_near, 'its "schema" before its "nodes"')
    return LIKELY if _METADATA.match(beginning) else UNLIKE


def read_chakra(paths: Sequence[Path]) -> Run:
    """Read the traces of a job's ranks."""
    missing: list[str] = []
    traces: dict[int, _Trace] = {}
    for path in paths:
        trace = _traced(path)
        if trace.problem:
            missing.append(f"{name_of(path)}: {trace.problem}")
        named = _RANK_IN_NAME.search(path.name)
        rank = int(named[1] or named[2]) if named else len(traces)
        if rank in traces:
            missing.append(f"{name_of(path)}: rank {rank} is there already, so this is left out")
            continue
        traces[rank] = trace
    if not any(trace.collectives or trace.computations for trace in traces.values()):
        raise DamagedInput(
            paths[0],
            missing[0].partition(": ")[2]
            if missing
            else "this trace lacks collectives and timed computation",
        )
    return _run(paths, dict(sorted(traces.items())), missing)


def _run(paths: Sequence[Path], traces: Mapping[int, _Trace], missing: list[str]) -> Run:
    stated = max(trace.world for trace in traces.values())
    world = max(max(traces) + 1, stated)
    if len(traces) < world:
        least = "" if stated else "at least "  # the highest rank number implies that many
        missing.append(f"{len(traces)} of {least}{world} ranks are here")
    rows = [collective for trace in traces.values() for collective in trace.collectives]
    computations = [
        (rank, *computation) for rank, trace in traces.items() for computation in trace.computations
    ]
    starts = [collective.start_ns for collective in rows if collective.duration_ns]
    zero_ns = min([*starts, *(start_ns for _, _, start_ns, _ in computations)], default=0)
    untimed = sum(not collective.duration_ns for collective in rows)
    remarks = []
    if untimed:
        remarks.append(
            f"when {untimed:,} of {len(rows):,} collectives were, it does not hold: "
            "they stand at its beginning, in its order"
        )
    if not computations:
        remarks.append("no computation has times in it")
    start_ns = np.array([start for _, _, start, _ in computations], np.int64) - zero_ns
    return Run(
        provenance=Provenance(
            origin="imported", source=", ".join(name_of(path) for path in paths[:_SHOWN])
        ),
        facts=Facts(workers=world, remarks="; ".join(remarks) or None),
        gaps=gaps_of(missing),
        spans=Spans(
            rank=np.array([rank for rank, _, _, _ in computations], np.int64),
            step=np.full(len(computations), -1),
            lane=np.full(len(computations), "compute", object),
            name=np.array([name for _, name, _, _ in computations], object),
            start_ns=start_ns,
            end_ns=start_ns + np.array([length for _, _, _, length in computations], np.int64),
        ),
        collectives=Collectives.joined(
            [_table(rank, trace, zero_ns) for rank, trace in traces.items()]
        ),
    )


def _table(rank: int, trace: _Trace, zero_ns: int) -> Collectives:
    rows = trace.collectives
    counted = Counter[tuple[str, str]]()
    sequence = []
    for sum_ in rows:
        sequence.append(counted[sum_.group, sum_.op])
        counted[sum_.group, sum_.op] += 1
    start_ns = np.array(
        [row.start_ns - zero_ns if row.duration_ns else 0 for row in rows], np.int64
    )
    return Collectives(
        rank=np.full(len(rows), rank),
        step=np.full(len(rows), -1),
        sequence=np.array(sequence, np.int64),
        group=np.array([row.group for row in rows], object),
        op=np.array([row.op for row in rows], object),
        dtype=np.array([row.dtype for row in rows], object),
        bytes=np.array([row.bytes for row in rows], np.int64),
        issue_ns=start_ns,
        start_ns=start_ns,
        end_ns=start_ns + np.array([row.duration_ns for row in rows], np.int64),
    )


def _traced(path: Path) -> _Trace:
    trace = _Trace()
    with opened_plain(path) as file:
        is_text = file.read(1) == b"{"
        file.seek(0)
        # Before the nodes stands the metadata: the first message, or an object without a name.
        nodes = (
            (_json_node(given) for given in _objects(file) if "name" in given or "type" in given)
            if is_text
            else map(_node, itertools.islice(messages(file, _MOST_MESSAGE_BYTES), 1, None))
        )
        try:
            for node in nodes:
                trace.nodes += 1
                if trace.nodes > _MOST_NODES:
                    trace.problem = f"more than {_MOST_NODES:,} nodes; those before are read"
                    break
                _take(trace, node)
        except BrokenMessageError as error:
            if not trace.nodes:
                raise DamagedInput(path, f"not a Chakra trace: {error}") from None
            trace.problem = f"damaged or cut ({error}); the {trace.nodes:,} nodes before are read"
    trace.collectives = trace.collectives or trace.calls
    if not trace.has_starts:  # only beginnings show overlap, so lengths alone are dropped
        trace.computations.clear()
        trace.collectives = [replace(collective, duration_ns=0) for collective in trace.collectives]
    return trace


def _take(trace: _Trace, node: _Node) -> None:
    start_us, duration_us = node.start_us, node.duration_us
    if not (0 <= start_us <= _LATEST_US and 0 <= duration_us <= _LATEST_US):
        start_us = duration_us = 0
    trace.has_starts |= start_us > 0
    if node.type == _COMPUTES:
        is_on_device = node.attributes.get("is_cpu_op", 0) == 0
        if duration_us and is_on_device and len(trace.computations) < _MOST_KEPT:
            trace.computations.append(
                (_storable(node.name) or "computation", start_us * 1000, duration_us * 1000)
            )
    elif node.name == _GROUPS:
        trace.world = max(trace.world, node.largest_group)
    elif node.type in (_SENDS, _RECEIVES, _COLLECTIVE) and len(trace.collectives) < _MOST_KEPT:
        size, dtype = _size(node)
        size_of_group = node.attributes.get("group_size", 0)
        if isinstance(size_of_group, int) and 0 < size_of_group <= _MOST_RANK:
            trace.world = max(trace.world, size_of_group)
        into = trace.calls if node.name.startswith(_CALL) else trace.collectives
        told = node.attributes.get("pg_name", node.attributes.get("comm_group", ""))
        group = f"group {told}" if told != "" else "default_pg"
        sender, receiver = node.attributes.get("comm_src"), node.attributes.get("comm_dst")
        if node.type != _COLLECTIVE and sender is not None and receiver is not None:
            group += f" {sender}>{receiver}"
        into.append(
            _Collective(
                op=_op(node),
                group=_storable(group),
                dtype=dtype,
                bytes=size,
                start_ns=start_us * 1000,
                duration_ns=duration_us * 1000,
            )
        )


def _op(node: _Node) -> str:
    if node.type != _COLLECTIVE:
        return "sendrecv"
    told = node.attributes.get("comm_type")
    if isinstance(told, int) and 0 <= told < len(_OPS):
        return _OPS[told]
    named = str(node.attributes.get("collective_name", "")) or str(told or "") or node.name
    return op_of(named.removesuffix("_")) or _storable(named) or "unknown"


def _size(node: _Node) -> tuple[int, str]:
    """Return the bytes of the larger side, or 0 and "unknown" where the trace lacks them."""
    told = node.attributes.get("comm_size")
    if _op(node) == "barrier":
        return 0, ""
    if isinstance(told, int) and 0 <= told <= _MOST_BYTES:
        return told, ""
    dtype, item_bytes = dtype_of(str(node.attributes.get("dtype", "")))
    elements = [node.attributes.get(f"{side}_msg_nelems") for side in ("in", "out")]
    known = [element for element in elements if isinstance(element, int) and element >= 0]
    if item_bytes and known and max(known) * item_bytes <= _MOST_BYTES:
        return max(known) * item_bytes, dtype
    size, named = node.arguments
    if 0 <= size <= _MOST_BYTES:
        return size, named
    return 0, SIZE_UNKNOWN


def _node(message: bytes) -> _Node:
    node = _Node()
    for number, value in fields(message):
        if number == 2 and isinstance(value, bytes):
            node.name = value[:_LONGEST_NAME].decode(errors="replace")
        elif number == 3 and isinstance(value, int):
            node.type = value
        elif number == 6 and isinstance(value, int):
            node.start_us = value
        elif number == 7 and isinstance(value, int):
            node.duration_us = value
        elif number == 8 and isinstance(value, bytes) and node.name == _GROUPS:
            node.largest_group = _largest_group(value.decode(errors="replace"))
        elif number == 10 and isinstance(value, bytes):
            name, told = _attribute(value)
            if name and told is not None:
                node.attributes[name] = told
    return node


# Numbers of AttributeProto's fields: plain integers, zigzag integers, and text.
_AS_WRITTEN = (7, 9, 11, 13, 19, 21, 23, 25, 27)
_ZIGZAG = (15, 17)
_TEXT = 29


def _attribute(message: bytes) -> tuple[str, int | str | None]:
    name = ""
    told: int | str | None = None
    for number, value in fields(message):
        if number == 1 and isinstance(value, bytes):
            name = value[:_LONGEST_NAME].decode(errors="replace")
        elif number == _TEXT and isinstance(value, bytes):
            told = value[:_LONGEST_NAME].decode(errors="replace")
        elif number in _AS_WRITTEN and isinstance(value, int):
            told = signed(value)
        elif number in _ZIGZAG and isinstance(value, int):
            told = (value >> 1) ^ -(value & 1)
        elif number > 2:
            told = None
    return name, told


def _objects(file: BinaryIO) -> Iterator[dict[str, Any]]:
    """Yield JSON objects that follow each other, or are listed as "nodes"."""
    decoder, text, place, is_first = json.JSONDecoder(), "", 0, True
    while True:
        chunk = file.read(_CHUNK)
        text, place = text[place:] + chunk.decode(errors="replace"), 0
        if is_first and (listed := _NODES_LISTED.match(text)) is not None:
            place = listed.end()
        is_first = False
        place = _after_gap(text, place)
        while text[place : place + 1] == "{":
            try:
                node, end = decoder.raw_decode(text, place)
            except (ValueError, RecursionError):
                break
            place = _after_gap(text, end)
            yield node
        if not chunk:
            break
        if len(text) - place > _LONGEST_OBJECT:
            raise BrokenMessageError(f"an object of more than {_LONGEST_OBJECT:,} characters")
        if text[place : place + 1] not in ("", "{"):
            return  # the end of the list of nodes
    if text[place : place + 1] == "{":
        raise BrokenMessageError("it ends within an object")


def _after_gap(text: str, place: int) -> int:
    gap = _GAP.match(text, place)
    return place if gap is None else gap.end()


def _json_node(given: Mapping[str, Any]) -> _Node:
    told = given.get("type")
    node = _Node(name=str(given.get("name", ""))[:_LONGEST_NAME])
    node.start_us = _whole(given.get("startTimeMicros", given.get("start_time_micros")))
    node.duration_us = _whole(given.get("durationMicros", given.get("duration_micros")))
    listed = given.get("attr", given.get("attrs"))
    for entry in listed if isinstance(listed, list) else []:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            continue
        for key, value in entry.items():  # the first value counts, under any name of its type
            if key in ("name", "type", "docString", "doc_string"):
                continue
            if isinstance(value, bool | int):
                node.attributes[entry["name"][:_LONGEST_NAME]] = int(value)
                break
            if isinstance(value, str):
                is_number = "str" not in key.lower() and re.fullmatch(r"-?\d{1,18}", value)
                node.attributes[entry["name"][:_LONGEST_NAME]] = (
                    int(value) if is_number else value[:_LONGEST_NAME]
                )
                break
    if isinstance(told, str):
        node.type = _TYPES.get(told, 0)
    elif node.name == "record_param_comms":  # PyTorch's form nests names: this one counts
        is_named = node.attributes.get("collective_name", "") not in ("", "wait", "init")
        node.type = _COLLECTIVE if is_named else 0
    elif node.name.startswith(_CALL):
        plain = node.name.removeprefix(_CALL)
        if plain.startswith(("send", "recv")):
            node.type = _SENDS
        else:
            node.type = _COLLECTIVE if op_of(plain.removesuffix("_")) else 0
    if node.name == _GROUPS:
        node.largest_group = _largest_group(json.dumps(given.get("inputs")))
    elif "inputs" in given and told is None:
        inputs, types = given["inputs"], given.get("input_types")  # a field of its own in 1.0.1
        is_early = isinstance(inputs, list)
        node.arguments = _arguments({"values": inputs, "types": types} if is_early else inputs)
    return node


def _whole(value: object) -> int:
    if isinstance(value, str) and re.fullmatch(r"\d{1,18}", value):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _largest_group(stated: str) -> int:
    """Return the size of the largest process group, which holds all ranks."""
    sizes = (int(digits) for digits in _GROUP_SIZE.findall(stated))
    return max((size for size in sizes if size <= _MOST_RANK), default=0)


def _arguments(inputs: object) -> tuple[int, str]:
    """Return the bytes of the largest argument, with its type, in PyTorch's form."""
    if not isinstance(inputs, dict):
        return -1, ""
    values, types = inputs.get("values"), inputs.get("types")
    if not isinstance(values, list) or not isinstance(types, list):
        return -1, ""
    sizes = [(_tensor_bytes(value, 0), kind) for value, kind in zip(values, types, strict=False)]
    size, kind = max(sizes, default=(0, ""), key=lambda sized: sized[0])
    named = _TENSOR_OF.search(kind) if isinstance(kind, str) else None
    return (size, dtype_of(named[1])[0]) if size and named else (-1, "")


def _tensor_bytes(value: object, depth: int) -> int:
    if not isinstance(value, list) or depth > _DEEPEST:
        return 0
    if len(value) >= _TENSOR_FIELDS and isinstance(value[-1], str):
        elements, item_bytes = value[3:5]
        is_told = isinstance(elements, int) and isinstance(item_bytes, int)
        return elements * item_bytes if is_told and elements > 0 < item_bytes else 0
    return sum(_tensor_bytes(part, depth + 1) for part in value)


def _storable(text: str) -> str:
    return text[:_LONGEST_NAME].encode(errors="backslashreplace").decode()


FORMAT = Format(
    key="chakra",
    label="Chakra traces",
    looks_like=looks_like,
    read=lambda files, options: read_chakra(files),
    is_of_many=True,
    tells=40,
)
