"""Dumps of PyTorch's Flight Recorder, one for each rank: pickled or as JSON.

    {"version": "2.10", "pg_config": {"0": {"desc": "default_pg", "ranks": "[0, 1]"}}, "entries": [
        {"process_group": ("0", "default_pg"), "collective_seq_id": 7, "p2p_seq_id": 0,
         "profiling_name": "nccl:all_reduce", "time_created_ns": 1795262599998139649,
         "input_sizes": [[2080]], "input_dtypes": ["Float"], "state": "completed",
         "duration_ms": 1.5, ...}]}                                   with timing enabled only

A dump is a schedule: the collectives that each rank asked for, their order and their sizes.
`time_created_ns` is the moment when the program asked. Only `duration_ms` shows the device's time.
The `time_discovered` fields are the moments when a watchdog looked, which may be much later. So a
collective begins when the program asked for it. Its length is `duration_ms`, or 0 if the dump has
none. The remarks name each rank that never asked for a collective that others asked for: users make
dumps mostly to find that rank.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fullwire.errors import DamagedInput
from fullwire.files import name_of, opened_plain
from fullwire.importers._encodings import is_pickle, read_pickle
from fullwire.importers._format import NEAR_BYTES, POSSIBLE, Format, Likeness, near_miss
from fullwire.importers.kineto.recognise import dtype_of, op_of
from fullwire.run.facts import Facts
from fullwire.run.gaps import gaps_of
from fullwire.run.run import SIZE_UNKNOWN, Collectives, Provenance, Run

_MOST_FILE_BYTES = 512 * 2**20  # pickled: the pickle reader bounds its own memory.
_MOST_JSON_BYTES = 64 * 2**20  # 100,000 entries: JSON dumps lack the stacks.
_MOST_ENTRIES = 1_000_000
_MOST_TENSORS = 10_000  # tensors of one collective
_MOST_DIMENSIONS = 64
_MOST_BYTES = 2**50
_MOST_RANK = 100_000_000
_LONGEST_MS = 3.2e10  # a year
_LATEST_NS = 2**62
_LONGEST_NAME = 200
_NAMED = 5  # names of a kind in a sentence
_RANK_IN_NAME = re.compile(r"(?:rank[-_]?)(\d{1,9})|(\d{1,9})$", re.IGNORECASE)
_PEERS = re.compile(r"(send|recv) (\d{1,9})(->|<-)(\d{1,9})")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One collective that one rank asked for."""

    group: str
    op: str
    sequence: int
    dtype: str
    bytes: int
    issue_ns: int
    duration_ns: int
    has_ended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dump:
    """The content of one file."""

    path: Path
    rank: int | None
    world: int
    library: str
    entries: tuple[_Entry, ...]
    problems: tuple[str, ...]


def looks_like(beginning: bytes) -> Likeness:
    """Say whether a file with this beginning is such a dump."""
    is_one = is_pickle(beginning) or beginning.lstrip()[:1] == b"{"
    told = (b"profiling_name", b"collective_seq_id", b"pg_config", b"comm_lib_version")
    is_one = is_one and any(key in beginning for key in told) and b"traceEvents" not in beginning
    if is_one:
        return POSSIBLE
    soon = beginning[:NEAR_BYTES]
    is_near = b"entries" in soon and (b"pg_status" in soon or b"nccl_comm_state" in soon)
    return near_miss(is_near, "entries with their profiling_name")


def read_flight_recorder(paths: Sequence[Path]) -> Run:
    """Read the dumps of a job's ranks as a run of the collectives that they asked for."""
    missing: list[str] = []
    dumps: dict[int, _Dump] = {}
    for path in paths:
        try:
            dump = _dump(path)
        except DamagedInput as error:
            missing.append(str(error))
            continue
        rank = next(n for n in range(len(dumps) + 1) if n not in dumps)
        if dump.rank is None:
            missing.append(f"{name_of(path)}: its name tells no rank, so it is taken for {rank}")
        rank = rank if dump.rank is None else dump.rank
        if rank in dumps:
            missing.append(f"{name_of(path)}: rank {rank} is there already, so this is left out")
            continue
        dumps[rank] = dump
        missing += [f"{name_of(path)}: {problem}" for problem in dump.problems]
    if not any(dump.entries for dump in dumps.values()):
        why = missing[0].removeprefix(f"{name_of(paths[0])}: ") if missing else "it has no entries"
        raise DamagedInput(paths[0], why)
    dumps = dict(sorted(dumps.items()))
    rows = [(rank, entry) for rank, dump in dumps.items() for entry in dump.entries]
    world = max(max(dumps) + 1, *(dump.world for dump in dumps.values()))
    if len(dumps) < world:
        missing.append(f"{len(dumps)} of {world} ranks are here")
    libraries = Counter(dump.library for dump in dumps.values() if dump.library)
    facts = Facts(
        workers=world,
        backend=libraries.most_common(1)[0][0] if libraries else None,
        remarks="; ".join(_remarks([entry for _, entry in rows], dumps)),
    )
    zero_ns = min(entry.issue_ns for _, entry in rows)
    issue_ns = np.array([entry.issue_ns - zero_ns for _, entry in rows], np.int64)
    return Run(
        provenance=Provenance(
            origin="imported", source=", ".join(name_of(path) for path in paths[:_NAMED])
        ),
        facts=facts,
        gaps=gaps_of(missing),
        collectives=Collectives(
            rank=np.array([rank for rank, _ in rows], np.int64),
            step=np.full(len(rows), -1),
            sequence=np.array([entry.sequence for _, entry in rows], np.int64),
            group=np.array([entry.group for _, entry in rows], object),
            op=np.array([entry.op for _, entry in rows], object),
            dtype=np.array([entry.dtype for _, entry in rows], object),
            bytes=np.array([entry.bytes for _, entry in rows], np.int64),
            issue_ns=issue_ns,
            start_ns=issue_ns,
            end_ns=issue_ns + np.array([entry.duration_ns for _, entry in rows], np.int64),
        ),
    )


def _remarks(entries: Sequence[_Entry], dumps: Mapping[int, _Dump]) -> Iterator[str]:
    yield "collectives stand where the program asked for them"
    timed = sum(entry.duration_ns > 0 for entry in entries)
    if timed < len(entries):
        yield (
            f"how long {len(entries) - timed:,} of {len(entries):,} took is not in the dumps "
            "(TORCH_NCCL_ENABLE_TIMING=1 would tell)"
        )
    open_ = sum(not entry.has_ended for entry in entries)
    if open_:
        yield f"{open_:,} had not been seen to end"
    # Name the ranks that never asked for a group's last collective, which others wait for.
    last: dict[str, dict[int, int]] = defaultdict(dict)
    for rank, dump in dumps.items():
        for entry in dump.entries:
            last[entry.group][rank] = max(entry.sequence, last[entry.group].get(rank, 0))
    behind = [
        f"rank {rank} asked for {sequence:,} collectives of {group}, others for {most:,}"
        for group, by_rank in last.items()
        for most in [max(by_rank.values())]
        for rank, sequence in by_rank.items()
        if sequence < most
    ]
    yield from behind[:_NAMED]


def _dump(path: Path) -> _Dump:
    with opened_plain(path) as file:
        is_packed = file.read(1) == b"\x80"
        most_bytes = _MOST_FILE_BYTES if is_packed else _MOST_JSON_BYTES
        if file.seek(0, os.SEEK_END) > most_bytes:
            raise DamagedInput(path, f"larger than {most_bytes:,} bytes, as no dump is")
        file.seek(0)
        if is_packed:
            dump = read_pickle(path, file)
            value, unfinished, problem = dump.value, dump.unfinished, dump.problem
        else:
            value, unfinished, problem = _from_json(path, file.read())
    whole: dict[Any, Any] = value if isinstance(value, dict) else {"entries": value}
    if problem:
        # The file ended early: search the values read so far for the parts of a dump.
        values = list(unfinished)
        entries = [value for value in values if _is_entry(value)]
        for entry in values:
            if isinstance(entry, list):
                entries += [inner for inner in entry if _is_entry(inner)]
        config = next(
            (after for key, after in itertools.pairwise(values) if key == "pg_config"), {}
        )
        whole = {"entries": entries, "pg_config": config}
        problem = f"{problem}; the entries before are read"
    return _of_values(path, whole, [problem] if problem else [])


def _from_json(path: Path, content: bytes) -> tuple[object, tuple[object, ...], str]:
    """Decode a dump; return the whole entries of one that ends early."""
    text = content.decode(errors="replace")
    try:
        return json.loads(text), (), ""
    except (ValueError, RecursionError):
        decoder, entries = json.JSONDecoder(), list[object]()
        place = text.find("[", text.find('"entries"')) + 1
    while 0 < place < len(text):
        try:
            entry, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            break
        entries.append(entry)
        while place < len(text) and text[place] in ", \t\r\n":
            place += 1
    if not entries:
        raise DamagedInput(path, "expected the JSON of a Flight Recorder dump")
    return None, tuple(entries), f"it is cut or damaged after {len(entries):,} entries"


def _is_entry(value: object) -> bool:
    return isinstance(value, dict) and "profiling_name" in value


def _of_values(path: Path, whole: Mapping[Any, Any], problems: list[str]) -> _Dump:
    listed = _list(whole.get("entries"))
    config = whole.get("pg_config")
    members: dict[str, tuple[int, ...]] = {}  # ranks of each process group that the dump lists
    for name, told in config.items() if isinstance(config, dict) else ():
        ranks = told.get("ranks") if isinstance(told, dict) else None
        text = ranks if isinstance(ranks, str) else ""
        members[str(name)[:_LONGEST_NAME]] = tuple(
            int(digits) for digits in re.findall(r"\d{1,9}", text[:10_000_000])
        )
    work = _Work()
    entries = []
    for values in listed[:_MOST_ENTRIES]:
        entry = _entry(values, members, work) if isinstance(values, dict) else None
        if entry is not None:
            entries.append(entry)
    if len(entries) < len(listed):
        problems.append(f"{len(listed) - len(entries):,} entries cannot be understood")
    # Take the rank from the dump, else from the file's name, which may also end in a date.
    rank = _whole(whole.get("rank"), _MOST_RANK)
    if rank is None and (named := _RANK_IN_NAME.search(path.name.removesuffix(".json"))):
        known = {member for of in members.values() for member in of}
        in_name = int(named[1] or named[2])
        rank = in_name if not known or in_name in known else None
    library = str(listed[0].get("profiling_name", "")) if listed and entries else ""
    return _Dump(
        path=path,
        rank=rank,
        world=max(map(len, members.values()), default=0),
        library=library.partition(":")[0] if ":" in library else "",
        entries=tuple(entries),
        problems=tuple(problems),
    )


class _Work:
    """A budget for reading sizes: shared lists can look larger than the file that holds them."""

    def __init__(self) -> None:
        self.left = 10_000_000


def _entry(
    given: Mapping[Any, Any], members: Mapping[str, tuple[int, ...]], work: _Work
) -> _Entry | None:
    """Return an entry of a dump, or None if the entry is unusable."""
    name, issued = given.get("profiling_name"), _whole(given.get("time_created_ns"), _LATEST_NS)
    own = given.get("p2p_seq_id" if given.get("is_p2p") is True else "collective_seq_id")
    sequence = _whole(given.get("seq_id") if own is None else own, _LATEST_NS)
    if not isinstance(name, str) or issued is None or sequence is None:
        return None
    plain = name.partition(":")[2] or name
    op, group = op_of(plain), _group(given.get("process_group"), members)
    peers = _PEERS.search(plain)
    if peers is not None:
        sender, receiver = (peers[2], peers[4]) if peers[3] == "->" else (peers[4], peers[2])
        op, group = "sendrecv", f"{group} {sender}>{receiver}"
    size, dtype = _size(given, op, work)
    lasted_ms = given.get("duration_ms")
    is_timed = isinstance(lasted_ms, int | float) and 0 <= lasted_ms <= _LONGEST_MS
    return _Entry(
        group=_storable(group),
        op=op or _storable(plain) or "unknown",
        sequence=sequence,
        dtype=dtype,
        bytes=size,
        issue_ns=issued,
        duration_ns=round(lasted_ms * 1e6) if is_timed else 0,  # type: ignore[operator]  # a number
        has_ended=given.get("state") == "completed" or given.get("retired") is True,
    )


def _group(given: object, members: Mapping[str, tuple[int, ...]]) -> str:
    """Name a process group the same on all its ranks; list the ranks if it lacks some."""
    parts = [str(part)[:_LONGEST_NAME] for part in _list(given)[:2] if isinstance(part, str | int)]
    if not parts:
        return str(given)[:_LONGEST_NAME] if isinstance(given, str | int) else "default_pg"
    name, described = parts[0], parts[-1]
    ranks = members.get(name, ())
    is_of_all = len(ranks) == max(map(len, members.values()), default=0)
    of = "" if is_of_all else f" {','.join(map(str, ranks))}".rstrip()
    return f"{described if described not in ('', 'undefined') else name}{of}"


def _size(given: Mapping[Any, Any], op: str, work: _Work) -> tuple[int, str]:
    """Return the bytes of the larger side and its type, or 0 and "unknown" if the dump lacks it."""
    if op == "barrier":
        return 0, ""
    size, dtype = max(
        _bytes(_list(given.get(f"{side}_sizes")), _list(given.get(f"{side}_dtypes")), work)
        for side in ("input", "output")
    )
    return (size, dtype) if 0 <= size <= _MOST_BYTES else (0, SIZE_UNKNOWN)


def _bytes(shapes: Sequence[Any], dtypes: Sequence[Any], work: _Work) -> tuple[int, str]:
    """Return the bytes of some tensors and the last one's type; below 0 if the dump lacks them."""
    if not shapes or len(shapes) != len(dtypes) or len(shapes) > _MOST_TENSORS:
        return -1, ""
    total, named = 0, ""
    for given, dtype in zip(shapes, dtypes, strict=True):
        shape = [_whole(size, _MOST_BYTES) for size in _list(given)[:_MOST_DIMENSIONS]]
        named, item_bytes = dtype_of(dtype) if isinstance(dtype, str) else ("", 0)
        work.left -= 1 + len(shape)
        if work.left < 0 or not item_bytes or None in shape:
            return -1, ""
        total += item_bytes * math.prod(size or 0 for size in shape)
    return total, named


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _whole(value: object, most: int) -> int | None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return value if is_whole and 0 <= value <= most else None  # type: ignore[operator, return-value]  # an int, by the line above


def _storable(text: str) -> str:
    return text[:_LONGEST_NAME].encode(errors="backslashreplace").decode()


FORMAT = Format(
    key="flight-recorder",
    label="Flight Recorder dumps",
    looks_like=looks_like,
    read=lambda files, options: read_flight_recorder(files),
    is_of_many=True,
    tells=50,
)
