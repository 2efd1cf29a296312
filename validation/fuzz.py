"""Damaged traces of every kind: does each give a run, or a refusal in one line?

    .venv/bin/python -m validation.fuzz kineto|horovod [CASES] [SEED]

A case is a small valid trace with some damage. It is cut, or a piece is removed, doubled or moved.
Bytes change. An impossible value replaces a number, or a hostile one replaces any value. Keys are
removed or repeated, and values are nested deeply. Some cases are compressed, whole or with further
damage. Each case is read and, if it is a run, explained. The script stops at the first case with
any other end, and leaves it as `fuzz-SEED-NUMBER`.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fullwire
from fullwire.errors import FullwireError
from fullwire.importers import read
from validation import arguments, results

CASES = 100_000
OUTCOMES = ("whole", "partial", "refused", "explaining nothing")
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?")
_STRING = re.compile(rb'"[^"\\]*"')
_NUMBERS = (
    b"-1",
    b"0",
    b"1e999",
    b"-1e999",
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"9" * 19,
    b"9" * 400,
    b"-" + b"9" * 19,
    b"1e15",
    b"2e15",
    b"-2e15",
    b"0.5",
    b"1e-400",
    b"007",
    b"+1",
    b"0x10",
    b'"5"',
    b"1.2.3",
    b"--1",
    b"null",
    b"true",
    b"[]",
    b"{}",
    b"9223372036854775807",
    b"-9223372036854775808",
    b"2147483648",
    b"1_000",
    b"",
)
TEXTS = (
    b'""',
    b'"\\ud800"',
    b'"\\u0000"',
    b'"\\"',
    b'"<script>alert(1)</script>"',
    b'"../../etc/x"',
    b'"' + b"n" * 5_000 + b'"',
    b'"\xff\xfe"',
    b'"\x1b[2J"',
    b"null",
    b"5",
    b"[[[[]]]]",
    b'{"a":',
    b'"nccl:all_reduce"',
    b'"kernel"',
    b'"ProfilerStep#7"',
    b'"ProfilerStep#999999999"',
    b'"step"',
    b'"X"',
    b'"NEGOTIATE_ALLREDUCE"',
    b'"record_param_comms"',
    b'"[4, -1]"',
    b"'a'",
)
_PIECES = (b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\0", b"\xef\xbb\xbf", b"\n", b"/*")


def _replaced(pattern: re.Pattern[bytes], by: tuple[bytes, ...]) -> Callable[..., bytes]:
    def change(content: bytes, source: random.Random) -> bytes:
        place = source.randrange(len(content) + 1)
        found = pattern.search(content, place) or pattern.search(content)
        if found is None:
            return content
        return content[: found.start()] + source.choice(by) + content[found.end() :]

    return change


def _cut(content: bytes, source: random.Random) -> bytes:
    return content[: source.randrange(len(content) + 1)]


def _without(content: bytes, source: random.Random) -> bytes:
    place = source.randrange(len(content) + 1)
    return content[:place] + content[place + source.randrange(1, 200) :]


def _moved(content: bytes, source: random.Random) -> bytes:
    begin = source.randrange(len(content) + 1)
    piece = content[begin : begin + source.randrange(1, 300)]
    place = source.randrange(len(content) + 1)
    return content[:place] + piece * source.choice((1, 1, 2, 50)) + content[place:]


def _spliced(content: bytes, source: random.Random) -> bytes:
    place = source.randrange(len(content) + 1)
    piece = source.choice(_PIECES) * source.choice((1, 1, 1, 3, 2_000))
    return content[:place] + piece + content[place + source.randrange(4) :]


def _flipped(content: bytes, source: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(source.randrange(1, 9)):
        if changed:
            changed[source.randrange(len(changed))] = source.randrange(256)
    return bytes(changed)


CHANGES = (
    _cut,
    _without,
    _moved,
    _spliced,
    _flipped,
    _replaced(_NUMBER, _NUMBERS),
    _replaced(_NUMBER, _NUMBERS),
    _replaced(_STRING, TEXTS),
    _replaced(_STRING, TEXTS),
)


def damaged(content: bytes, source: random.Random, *, is_ever_compressed: bool) -> bytes:
    """Damage a trace."""
    for _ in range(source.randrange(1, 5)):
        content = source.choice(CHANGES)(content, source)
    if is_ever_compressed and source.random() < 0.15:
        content = gzip.compress(content, 1)
        if source.random() < 0.5:
            content = source.choice((_cut, _without, _flipped))(content, source)
    return content


def outcome(content: bytes, reader: str, path: Path) -> str:
    """Read a trace and explain it; return how that ended, or raise an unexpected error."""
    path.write_bytes(content)
    said: list[str] = []
    ending = _read_and_explained(path, reader, said)
    if any("\n" in sentence for sentence in said):
        raise AssertionError(f"several lines: {said}")
    return ending


def _read_and_explained(path: Path, reader: str, said: list[str]) -> str:
    try:
        run = read(path, format=reader)
        said += [*run.missing, (run.facts.remarks or "")]
    except FullwireError as error:
        said.append(str(error))
        return "refused"
    try:
        said.append(fullwire.explain(run).verdict.sentence)
    except FullwireError as error:
        said.append(str(error))
        return "explaining nothing"
    return "partial" if run.missing else "whole"


def kineto_seeds() -> list[bytes]:
    """Make small traces: a GPU's with arguments, marks and loading, a CPU job's with Gloo."""
    told = {
        "Collective name": "allreduce",
        "In msg nelems": 250,
        "Out msg nelems": 250,
        "dtype": "Float",
        "Group size": 2,
        "Process Group Name": "0",
        "Process Group Ranks": "[0, 1]",
        "Seq": 3,
    }
    sent = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(int)"
    device, processor = [], []
    for step in range(4):
        begin = 1_000 * step
        launches = [(begin + 5 + each, 10 * step + each) for each in range(3)]
        mark = _event("user_annotation", f"ProfilerStep#{step}", begin, 990, 1, {})
        device += [
            mark,
            _event("cpu_op", "autograd::engine::evaluate_function: M", begin + 4, 20, 1, {}),
            _event("user_annotation", "enumerate(DataLoader)#_S.__next__", begin + 1, 3, 1, {}),
            *(
                _event("cuda_runtime", "cudaLaunchKernel", at, 1, 1, {"correlation": n})
                for at, n in launches
            ),
            _event("kernel", "ampere_sgemm", begin + 20, 300, 7, _on(7, launches[0][1])),
            _event("gpu_memcpy", "Memcpy HtoD", begin + 350, 9, 8, _on(8, launches[1][1])),
            _event("kernel", sent, begin + 300, 200, 9, _on(9, launches[2][1]) | told),
            _event("user_annotation", "Optimizer.step#SGD.step", begin + 900, 20, 1, {}),
        ]
        processor += [
            mark,
            _event("cpu_op", "aten::addmm", begin + 10, 400, 1, {"Input Dims": [[3, 4], []]}),
            _event(
                "user_annotation",
                "gloo:all_reduce",
                begin + 420,
                300,
                2,
                {"Input Dims": [[3, 4]], "Input type": ["float"]},
            ),
        ]
    header = {"schemaVersion": 1, "baseTimeNanoseconds": 10**18, "host_name": "h"}
    info = {"distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 2}}
    return [
        json.dumps(header | info | {"traceEvents": events}).encode()
        for events in (device, processor)
    ]


def _on(stream: int, correlation: int) -> dict[str, Any]:
    return {"device": 0, "stream": stream, "correlation": correlation}


def _event(
    category: str, name: str, start: float, length: float, thread: int, arguments: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 1,
        "tid": thread,
        "ts": start,
        "dur": length,
        "args": arguments,
    }


def horovod_seeds() -> list[bytes]:
    """Make a small timeline of two tensors and two ranks."""
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": tensor, "args": {"name": f"t{tensor}"}}
        for tensor in (1, 2)
    ]
    for step in range(4):
        for tensor in (1, 2):
            begin = 1_000 * step + 100 * tensor
            events += [
                {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": begin, "pid": tensor},
                {"ph": "X", "name": "0", "ts": begin, "pid": tensor, "dur": 0},
                {"ph": "X", "name": "1", "ts": begin + 20, "pid": tensor, "dur": 0},
                {"ph": "E", "ts": begin + 25, "pid": tensor},
                {"ph": "B", "name": "ALLREDUCE", "ts": begin + 30, "pid": tensor},
                {"ph": "B", "name": "NCCL_ALLREDUCE", "ts": begin + 31, "pid": tensor},
                {"ph": "E", "ts": begin + 90, "pid": tensor},
                {
                    "ph": "E",
                    "ts": begin + 91,
                    "pid": tensor,
                    "args": {"dtype": "float32", "shape": "[10, 20]"},
                },
            ]
    text = json.dumps(events).replace("}, {", "},\n{")
    return [text.encode(), text[:-1].encode() + b",\n"]


SEEDS: dict[str, Callable[[], list[bytes]]] = {"kineto": kineto_seeds, "horovod": horovod_seeds}


def outcomes(reader: str, cases: int, seed: int) -> Counter[str]:
    """Try `cases` cases and count their outcomes."""
    source, seeds = random.Random(seed), SEEDS[reader]()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        for number in range(cases):
            content = damaged(source.choice(seeds), source, is_ever_compressed=reader == "kineto")
            try:
                counts[outcome(content, reader, path)] += 1
            except BaseException:
                Path(f"fuzz-{seed}-{number}").write_bytes(content)
                raise
    return counts


def write(reader: str, counts: Counter[str]) -> None:
    """Replace one reader's row in the table of all."""
    rows = {str(row[0]): row for table in results.read("fuzz").tables for row in table.rows}
    rows[reader] = [reader, f"{counts.total():,}", *(f"{counts[name]:,}" for name in OUTCOMES)]
    results.renew(
        "fuzz",
        summary="no failure",
        cases=sum(int(str(row[1]).replace(",", "")) for row in rows.values()),
        tables=[
            results.Table(
                columns=["reader", "cases", *OUTCOMES], rows=[rows[name] for name in sorted(rows)]
            )
        ],
    )


def main() -> None:
    """Print the counts of outcomes."""
    taken = arguments.parser(__doc__)
    taken.add_argument("reader", choices=["kineto", "horovod"])
    taken.add_argument("cases", type=int, nargs="?", default=CASES)
    taken.add_argument("seed", type=int, nargs="?", default=0)
    given = taken.parse_args()
    warnings.simplefilter("error")
    begin_s = time.perf_counter()
    counts = outcomes(given.reader, given.cases, given.seed)
    said = ", ".join(f"{count:,} {name}" for name, count in counts.most_common())
    took_s = time.perf_counter() - begin_s
    write(given.reader, counts)
    print(f"{given.reader}, seed {given.seed}: {given.cases:,} cases in {took_s:.0f} s: {said}")


if __name__ == "__main__":
    main()
