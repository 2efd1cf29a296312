"""What wire formats save on a slow link, lose in accuracy, and cost in processor time.

    python -m validation.wire_formats [--rounds 5]

Four hosts of a lab sum 25 MiB at 1 Gbps in each format, in turns with float32. At 10 Gbps two and
four hosts sum 4 KiB to 64 MiB with `auto`, in turns with float32. Ranks in one process average
gaussian gradients for the errors. One thread packs and unpacks beside a plain copy of as many
bytes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from fullwire import _native
from fullwire.studies.contest import KIB, MIB, PLAIN, Contest, contest_in_lab, contest_object
from fullwire.transport import programs
from fullwire.transport.wire import FORMATS
from fullwire.units import show_bytes, show_time
from tests.transport.test_transport import Mesh, in_threads
from validation import results
from validation.arguments import parser

PACKED = ("bf16", "fp16", "int8")
MOST_TIMES = {"bf16": 2.0, "fp16": 2.0, "int8": 256 / 65}  # 1,040 bytes come to 260
BYTES = 25 * MIB
SIZES = (4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)  # for `auto`
WORKERS = (2, 4, 8, 16, 32)
_NUMBERS = 40_000  # of a gaussian gradient
_COPIES = 15


def times_faster(
    workers: int,
    rate_bps: float,
    wires: tuple[str, ...],
    rounds: int,
    sizes_bytes: tuple[int, ...] = (BYTES,),
) -> Any:
    """Let formats and float32 take turns in a lab; return the rows of the contest."""
    contest = Contest(
        rate_bps=rate_bps, against=(PLAIN,), sizes_bytes=sizes_bytes, rounds=rounds, wires=wires
    )
    return contest_object(contest_in_lab(contest, workers))["rows"]


def error_of_mean(name: str, workers: int) -> float:
    """Return the relative error of the mean of gaussian gradients; all ranks have to be equal."""
    generator = np.random.default_rng(workers)
    given = [generator.standard_normal(_NUMBERS).astype(np.float32) for _ in range(workers)]
    exact = np.mean([values.astype(np.float64) for values in given], axis=0)
    mesh = Mesh(workers)

    def average(rank: int) -> None:
        place = [(given[rank].ctypes.data, given[rank].nbytes)]
        task = mesh.engines[rank].collective(
            f"all_reduce as {name}",
            programs.packed_allreduce(workers, rank),
            place,
            place,
            0,
            0,
            workers,
            30.0,
            False,
            FORMATS[name],
            math.inf,
        )
        mesh.engines[rank].wait(task, 30.0)

    try:
        in_threads([partial(average, rank) for rank in range(workers)])
    finally:
        mesh.close()
    if any((values != given[0]).any() for values in given):
        raise AssertionError(f"{name}: {workers} ranks hold different bits")
    return float(np.linalg.norm(given[0] - exact) / np.linalg.norm(exact))


def speeds(name: str) -> tuple[float, float]:
    """Return how many float32 bytes a second one thread packs, and unpacks and adds."""
    values = np.random.default_rng(0).standard_normal(BYTES // 4).astype(np.float32)
    code = FORMATS[name]
    packed = np.zeros(_native.packed_bytes(code, len(values)), np.uint8)
    work: list[Callable[[], Any]] = [
        lambda: _native.pack_numbers(code, values, packed),
        lambda: _native.unpack_numbers(code, packed, values, True),
    ]
    pack_s, add_s = (_usual_s(each) for each in work)
    return BYTES / pack_s, BYTES / add_s


def copied() -> float:
    """Return how many bytes a second one thread copies."""
    values = np.ones(BYTES // 4, np.float32)
    there = np.empty_like(values)
    return BYTES / _usual_s(lambda: np.copyto(there, values))


def _usual_s(work: Callable[[], Any]) -> float:
    took_s = []
    for _ in range(_COPIES):
        began_s = time.perf_counter()
        work()
        took_s.append(time.perf_counter() - began_s)
    return median(took_s)


def rows_of(contest: Any) -> Iterator[list[results.Cell]]:
    """Yield a line of the table for each format."""
    for row in contest:
        yield [
            row["workers"],
            f"{row['rate_bps'] / 1e9:g} Gbps",
            show_bytes(row["bytes"]),
            row["wire"],
            show_time(row["theirs_s"]),
            show_time(row["ours_s"]),
            round(row["times_faster"], 2),
            round(MOST_TIMES.get(row["wire"], 1.0), 2),
        ]


def main() -> None:
    """Measure all, and write the results."""
    taken = parser(__doc__)
    taken.add_argument("--rounds", type=int, default=5)
    rounds = taken.parse_args().rounds
    slow = times_faster(4, 1e9, PACKED, rounds)
    fast = [
        row for workers in (2, 4) for row in times_faster(workers, 10e9, ("auto",), rounds, SIZES)
    ]
    longest = max(1 / row["times_faster"] for row in fast)
    errors = {name: [error_of_mean(name, count) for count in WORKERS] for name in PACKED}
    copy_bytes = copied()
    packing: list[list[results.Cell]] = [["a copy", round(copy_bytes / 1e9, 1), ""]]
    packing += [[name, *(round(speed / 1e9, 1) for speed in speeds(name))] for name in PACKED]
    faster = ", ".join(f"{row['wire']} {row['times_faster']:.2f}x" for row in slow)
    results.write(
        "wire-formats",
        claim="Wire formats save their share of a slow link, and auto costs a fast one nothing.",
        anchor="float32 in turns in the same lab; 2, 2 and 3.94 times are the limits",
        summary=f"{faster}; auto at 10 Gbps takes {longest:.2f} of float32 at most",
        cases=len(slow) + len(fast),
        tables=[
            results.Table(
                title="Formats on a slow link, auto on a fast one",
                columns=[
                    "workers",
                    "link",
                    "size",
                    "format",
                    "float32",
                    "packed",
                    "times",
                    "limit",
                ],
                rows=[*rows_of(slow), *rows_of(fast)],
            ),
            results.Table(
                title="Relative error of the mean of gaussian gradients, by workers",
                columns=["format", *map(str, WORKERS)],
                rows=[[name, *(f"{each:.2e}" for each in found)] for name, found in errors.items()],
            ),
            results.Table(
                title="GB/s of float32 in one thread",
                columns=["", "packs", "unpacks and adds"],
                rows=packing,
            ),
        ],
    )
    print(f"{faster}; auto at 10 Gbps {longest:.2f} at most; errors {errors}")
    print(packing)


if __name__ == "__main__":
    main()
