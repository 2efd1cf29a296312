"""Damage other tools' output, 100,000 cases a reader: each gives a run, or one line of refusal.

    python -m validation.fuzz_formats [--cases 100000] [--reader chakra] [--seed 1] [--real FOLDER]

Each case changes a small whole input: bytes are flipped, cut, doubled, exchanged, nested deeply, or
replaced by words that mean something to the format. Some cases change their encoding, and some are
packed (gz, xz, zst), with further damage. `--real` adds the files of a folder that the reader reads
and that have at most 64 KiB. A case must end as a run or as a FullwireError within 10 s. Any other
case is printed with its number and seed, and ends the script with status 1. Each reader has a
process of its own, so the memory is that of one reader.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import pickle
import random
import resource
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow as pa

from fullwire import explain
from fullwire.errors import FullwireError
from fullwire.files import beginning_of, files_in
from fullwire.importers import FORMATS, read
from fullwire.importers._recognise import kinds_of
from fullwire.importers.tensorboard import masked_crc32c
from fullwire.report.chrome import write_chrome
from tests.builders import a_run
from tests.torch.test_flight_recorder import a_dump, an_entry
from tests.unit.test_chakra import COLLECTIVE, COMPUTES, a_node, attribute, text, varint
from tests.unit.test_flow_records import ipfix, netflow_5, netflow_9, sflow
from tests.unit.test_metric_folders import RUN as WANDB_RUN
from tests.unit.test_nccl_tests import CSV, JSON, ROWS
from tests.unit.test_osu import ALLREDUCE, METRICS
from tests.unit.test_tensorboard import EVENTS
from tests.unit.test_training_log import IMAGENET, MEGATRON, NANOGPT
from tests.unit.test_xla import of_a_tpu, of_gpus
from validation import arguments, damaged_captures, fuzz, results

_NUMBERS = (b"0", b"-1", b"9" * 20, b"9" * 400, b"1e999", b"NaN", b"2147483648", b"null")
TIMELINES = (of_gpus(), of_a_tpu())
_EXPLAINED = 0.05  # share of the readable cases that are explained, too
_RECODED, _PACKED = 0.03, 0.1  # shares of the cases
_ENCODINGS = ("utf-16", "utf-32", "utf-8-sig", "cp1252", "utf-7")
_PACKERS: tuple[Callable[[bytes], bytes], ...] = (
    lambda content: gzip.compress(content, 1),
    lambda content: lzma.compress(content, preset=0),
    lambda content: pa.compress(content, "zstd", asbytes=True),
)
_MOST_REAL_BYTES = 64 * 1024  # of a real file that is damaged; larger ones take too long
_LONGEST_S = 10.0


@dataclass(frozen=True, slots=True)
class Reader:
    """A format with whole inputs to damage, and words that mean something to it."""

    format: str
    inputs: Sequence[bytes]
    words: Sequence[bytes]
    mended: Callable[[bytes, random.Random], bytes] | None = None  # so that damage gets further in
    options: Mapping[str, Any] = field(default_factory=dict)


def readers() -> Mapping[str, Reader]:
    """Return the readers and their inputs, by name."""
    log = (
        b"NCCL version 2.27.7+cuda13.0\n"
        b"a:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.3<0>\n"
        b"a:1:2 [0] NCCL INFO Using network Socket\n"
        b"a:1:2 [0] NCCL INFO === System : maxBw 240.0 totalBw 240.0 ===\n"
        b"a:1:2 [0] NCCL INFO GPU/0-1 :GPU/0-1 (0/5000.0/LOC) GPU/0-2 (1/20.0/NVL)\n"
        b"a:1:2 [0] NCCL INFO Pattern 4, crossNic 0, nChannels 1, bw 20.0/20.0, type NVL/PIX\n"
        b"a:1:2 [0] NCCL INFO comm 0x1 rank 0 nRanks 2 nNodes 1 localRanks 2 localRank 0 MNNVL 0\n"
        b"a:1:2 [0] NCCL INFO Channel 00/02 :    0   1\n"
        b"a:1:2 [0] NCCL INFO Trees [0] 1/-1/-1->0->-1 [1] 1/-1/-1->0->-1\n"
        b"a:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via NET/IB/0/GDRDMA\n"
        b"a:1:2 [0] NCCL INFO 2 coll channels, 2 collnet channels, 0 nvls channels\n"
        b"a:1:2 [0] NCCL INFO comm 0x1 rank 0 nranks 2 cudaDev 0 busId 17000 - Init COMPLETE\n"
    )
    table = (
        b"# nThread 1 nGpus 2 minBytes 8 maxBytes 2048\n"
        b"#  Rank  0 Group  0 Pid  64904 on  mew0 device  0 [0000:17:00] NVIDIA A100\n"
        b"#       size   count   type   redop    root     time   algbw   busbw #wrong     time\n"
        b"           8       2   float     sum      -1     9.41  0.00  0.00      0    9.33  0 0\n"
        b"a:1:2 [0] NCCL INFO Using network IB\n"
        b"        1024     256   float     sum      -1    10.52  0.10  0.10      0   10.33  0 0\n"
        b"# Avg bus bandwidth    : 0.05\n"
    )
    dump = a_dump(an_entry(1), an_entry(2, duration_ms=1.5), an_entry(3, state="started"))
    parts = (
        text(1, "0.0.4"),
        a_node(1, COMPUTES, attribute("is_cpu_op", 0), start_us=5, length_us=70),
        a_node(2, COLLECTIVE, attribute("comm_type", 0), attribute("comm_size", 1 << 20)),
        a_node(3, COLLECTIVE, attribute("comm_type", 2), attribute("pg_name", "3"), start_us=90),
    )
    objects = [
        {"version": "0.0.4"},
        {
            "id": "1",
            "name": "x",
            "type": "COMM_COLL_NODE",
            "startTimeMicros": "5",
            "durationMicros": "7",
            "attr": [{"name": "comm_size", "int64Val": "4096"}],
        },
    ]
    observed = {
        "schema": "1.1.1-chakra.0.0.4",
        "nodes": [
            {
                "id": 3,
                "name": "c10d::allreduce_",
                "attrs": [{"name": "pg_name", "value": "0"}],
                "inputs": {"values": [[[1, 2, 0, 2080, 4, "cpu"]]], "types": ["Tensor(float)"]},
            }
        ],
    }
    timelines = [json.dumps({"traceEvents": [*each, {}]}).encode() for each in TIMELINES]
    trace = io.BytesIO()
    write_chrome(a_run(), trace)
    return {
        "nccl-log": Reader("nccl-log", [log], [b" NCCL INFO ", b"\n", b" : ", b", ", b"->", b"["]),
        "nccl-tests": Reader("nccl-tests", [table], [b"#", b"\n", b" float ", b"N/A", b" sum "]),
        "rccl-tests": Reader(
            "nccl-tests",
            [each.encode() for each in (CSV, JSON, ROWS)],
            [b",", b"\n", b'"', b" float ", b"N/A", b" -1 ", b"{", b'"size":'],
        ),
        "collective-csv": Reader(
            "collective-csv",
            [
                b"nodes,gpus,collective,size_bytes,time_us,algbw,busbw\n"
                b"2,16,all_reduce,1048576,104.3,10.05,18.85\n"
                b"2,16,all_reduce,4194304,305.1,13.75,25.77\n",
                b"op;Size (MB);time (ms);ranks\nall_gather;1,5;0,25;8\nall_gather;3;0,4;8\n",
            ],
            [b",", b";", b"\n", b'"', b"N/A", b"1,048,576", b"# avg", b" (GB)", b"\t", b"1e308"],
        ),
        "osu": Reader(
            "osu",
            [ALLREDUCE.encode(), METRICS.encode()],
            [b"# OSU MPI Allreduce Latency Test v7.5\n", b"\n", b"# ", b" -np 9 osu_", b"  "],
        ),
        "training-log": Reader(
            "training-log",
            [each.encode() for each in (NANOGPT, MEGATRON, IMAGENET)],
            [b"\n", b"iter 1: loss ", b", time ", b"ms", b"(", b"Time ", b"Epoch: [0]["],
        ),
        "tensorboard": Reader(
            "tensorboard",
            [EVENTS.read_bytes()],
            [b"\x0a\x04loss\x15", b"\x2a\x0e\x0a\x0c", b"\x42\x08", b"\x09" + b"\xff" * 8, b"\x10"],
            with_checksums,
        ),
        "xla": Reader("xla", timelines, [b"{", b"}", b'"X"', b'"ts": ', b"[", b'"Steps"', b","]),
        "wandb": Reader(
            "wandb",
            [WANDB_RUN.read_bytes()],
            [b"loss", b"_step", b"_timestamp", b"\x82\x01", b"\x12", b"\x0a", b":W&B"],
        ),
        "mlflow": Reader(
            "mlflow",
            [b"1795409435913 2.0 0\n1795409435914 nan 1\n1795409435915 1.5 2 data 1f\n"],
            [b"\n", b" ", b"-1", b"e300", b"inf", b"1795409435913 "],
        ),
        "flight-recorder": Reader(
            "flight-recorder",
            [pickle.dumps(dump, protocol) for protocol in (2, 4)] + [json.dumps(dump).encode()],
            [b"q\x00", b"h\x05", b"(", b"e", b"u", b"R", b"\x94", b"cos\nsystem\n", b"]", b"}"],
        ),
        "chakra": Reader(
            "chakra",
            [
                b"".join(varint(len(each)) + each for each in parts),
                b"\n".join(json.dumps(each).encode() for each in objects),
                json.dumps(observed).encode(),
            ],
            [b"\xff" * 9, b"\x0a", b"\x52", b"{", b"}", b'"type"', b"[", b'"nodes": [', b"\x80"],
        ),
        "chrome": Reader(
            "chrome",
            [trace.getvalue()],
            [b"\n", b'"X"', b'"C"', b"{", b"}", b"], ", b'"ts":', b'"'],
        ),
        "kineto": Reader("kineto", fuzz.kineto_seeds(), fuzz.TEXTS),
        "horovod": Reader("horovod", fuzz.horovod_seeds(), fuzz.TEXTS),
        "capture": Reader(
            "capture",
            damaged_captures.seeds(),
            [b"\xd4\xc3\xb2\xa1", b"\x0a\x0d\x0d\x0a", b"\xff" * 8, bytes(16), b"\x06\0\0\0"],
        ),
        "flow-records": Reader(
            "flow-records",
            [netflow_5(100), netflow_9(), ipfix(10), sflow(10)],
            [b"\0\x05", b"\0\x09", b"\0\x0a", b"\xff" * 4, bytes(4), b"\x01\0", b"\0\0\0\x05"],
        ),
        "netx": Reader(
            "netx",
            [b"first line is for explaination; ...\n1\n3\n483.5,4000\n0,16384\n12.25,64\n"],
            [b"\n", b",", b"-1,5\n", b"1e300", b"nan", b"3\n", b" "],
            options={"step_time": "2ms"},
        ),
    }


def with_real(known: Mapping[str, Reader], folder: Path) -> Mapping[str, Reader]:
    """Add the small files of a folder to the inputs of their readers."""
    found: dict[str, list[bytes]] = {}
    for path in files_in(folder):
        try:
            content = beginning_of(path, _MOST_REAL_BYTES + 1)
            [kind] = kinds_of(FORMATS, path)
        except FullwireError:
            continue
        if len(content) <= _MOST_REAL_BYTES:
            found.setdefault(kind, []).append(content)
    return {
        name: replace(reader, inputs=[*reader.inputs, *found.get(reader.format, [])])
        for name, reader in known.items()
    }


def damaged(reader: Reader, chance: random.Random) -> bytes:
    """Change one of a reader's inputs, in up to eight places."""
    content = bytearray(chance.choice(reader.inputs))
    for _ in range(chance.randint(1, 8)):
        at = chance.randrange(len(content) + 1)
        match chance.randrange(8):
            case 0:
                content[at : at + chance.randint(0, 4)] = chance.randbytes(chance.randint(0, 4))
            case 1:
                del content[at : at + chance.randint(1, 200)]
            case 2:
                other = chance.randrange(len(content) + 1)
                content[at:at] = content[other : other + chance.randint(1, 300)]
            case 3:
                content[at:at] = chance.choice(reader.words)
            case 4:
                content[at : at + 1] = chance.choice(_NUMBERS)
            case 5:
                length, other = chance.randint(1, 200), chance.randrange(len(content) + 1)
                one, two = content[at : at + length], content[other : other + length]
                content[other : other + length] = one
                content[at : at + length] = two
            case 6:
                content[at:at] = chance.choice((b"[", b"{", b'{"a":', b"(", b"\x0a\x7f")) * (
                    chance.choice((3, 2_000, 100_000))
                )
            case _:
                del content[at:]
        if not content:
            break
    whole = bytes(content) if reader.mended is None else reader.mended(bytes(content), chance)
    return wrapped(whole, chance)


def wrapped(content: bytes, chance: random.Random) -> bytes:
    """Give some cases another encoding, and pack some, with or without further damage."""
    if chance.random() < _RECODED:
        content = content.decode(errors="replace").encode(chance.choice(_ENCODINGS), "replace")
    if chance.random() < _PACKED:
        for _ in range(chance.choice((1, 1, 1, 2))):
            content = chance.choice(_PACKERS)(content)
        if chance.random() < 0.5:
            damage = bytearray(content)
            damage[chance.randrange(len(damage))] ^= 1 << chance.randrange(8)
            content = bytes(damage[: chance.randint(1, len(damage))])
    return content


def with_checksums(content: bytes, chance: random.Random) -> bytes:
    """Give the damaged events of a file their checksums, and often their lengths."""
    whole, place = b"", 0
    while place + 12 < len(content):
        [length] = struct.unpack_from("<Q", content, place)
        event = content[place + 12 : place + 12 + length]
        head = struct.pack("<Q", len(event) if chance.random() < 0.9 else length)
        sums = [struct.pack("<I", masked_crc32c(part)) for part in (head, event)]
        whole += head + sums[0] + event + sums[1]
        place += 16 + len(event)
    return whole


def fuzzed(name: str, reader: Reader, cases: int, seed: int, where: Path) -> list[results.Cell]:
    """Try `cases` cases; return reader, cases, their ends, the slowest one and the memory."""
    began, read_, bad, slowest_s = time.monotonic(), 0, 0, 0.0
    path = where / f"{name}_rank_0.json"
    for case in range(cases):
        chance = random.Random(f"{name} {seed} {case}")
        path.write_bytes(damaged(reader, chance))
        start_s, problem = time.process_time(), ""
        try:
            run = read(path, format=reader.format, **reader.options)
            read_ += 1
            if chance.random() < _EXPLAINED:
                explain(run)
        except FullwireError as error:
            problem = "several lines" * ("\n" in str(error))
        except Exception:
            problem = traceback.format_exc()
        took_s = time.process_time() - start_s
        slowest_s = max(slowest_s, took_s)
        if took_s > _LONGEST_S:
            problem = f"{took_s:.1f} s"
        if problem:
            bad += 1
            print(f"case {case} of {name}, seed {seed}: {problem}\n{path.read_bytes()[:300]!r}")
    took_s = time.monotonic() - began
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(
        f"{name:<16} {cases:>9,} cases, {read_:>9,} read, {cases - read_ - bad:>9,} refused, "
        f"{bad} neither; slowest {slowest_s:.2f} s, {largest} MB resident; {took_s:.0f} s",
        flush=True,
    )
    return [name, cases, read_, cases - read_ - bad, bad, round(slowest_s, 2), largest]


def of_reader(name: str, cases: int, seed: int, real: Path | None) -> list[results.Cell]:
    """Fuzz one reader."""
    known = readers() if real is None else with_real(readers(), real)
    # In memory: some file systems wait for the disk before they write a file anew.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as where:
        return fuzzed(name, known[name], cases, seed, Path(where))


def main() -> int:
    """Fuzz the requested readers."""
    known = sorted(readers())
    taken = arguments.parser(__doc__)
    taken.add_argument("--cases", type=int, default=100_000)
    taken.add_argument("--seed", type=int, default=1)
    taken.add_argument("--reader", choices=known, action="append")
    taken.add_argument("--real", type=Path)
    taken.add_argument("--processes", type=int, default=1, help="readers at a time")
    asked = taken.parse_args()
    wanted = asked.reader or known
    with ProcessPoolExecutor(
        asked.processes, mp_context=get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        work = [
            pool.submit(of_reader, each, asked.cases, asked.seed, asked.real) for each in wanted
        ]
        rows = [each.result() for each in work]
    # The results of other readers stay as they were.
    columns = ["reader", "inputs", "read", "refused", "neither", "slowest (s)", "memory (MB)"]
    before = results.read("fuzz-formats").tables[0]
    if before.columns == columns:
        rows = [*(row for row in before.rows if row[0] not in wanted), *rows]
    rows.sort(key=lambda row: str(row[0]))
    cases, bad = (sum(int(row[at] or 0) for row in rows) for at in (1, 4))
    results.renew(
        "fuzz-formats",
        anchor=f"{cases:,} damaged files of {len(rows)} kinds, for every reader",
        summary=f"neither a run nor a refusal: {bad:,} of {cases:,}",
        cases=cases,
        tables=[results.Table(columns=columns, rows=rows)],
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
