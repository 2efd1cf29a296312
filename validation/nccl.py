"""Tables of nccl-tests on 8 A100 against the same machine as it is described.

    .venv/bin/python -m validation.nccl ../shared/data/nccl

The script plays every size above 16 MiB, as a ring around the devices of one dgx-a100, in events.
The description rests on three things: data sheets, NCCL's own cap of 235 GB/s, and a start-up time.
The start-up is the time of sizes from 4 to 16 MiB beyond those two. The script derives it again,
and does not predict these sizes.

Beside it stands the answer of `collective` without a level: the usual protocols of libraries, with
the stated start-up. This table is one of those that gave the usual protocols.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from fullwire.answers.collective import collective
from fullwire.clusters import cluster
from fullwire.clusters.cluster import Cluster
from fullwire.collectives.playing import CollectiveTime, collective_time
from fullwire.importers._tables import Row
from fullwire.importers.nccl_tests import read_tables
from validation import arguments, results

MIB = 2**20
CLUSTER, DEVICES = "dgx-a100", 8
OPS = ("allreduce", "reducescatter", "allgather")
TOLERANCE = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One size of a table, and its prediction."""

    op: str
    bytes: int
    measured_s: float
    in_place_s: float
    predicted_s: float
    usual: CollectiveTime  # as libraries take it

    @property
    def error(self) -> float:
        """Return the relative error of the prediction against the time out of place."""
        return self.predicted_s / self.measured_s - 1

    @property
    def usual_error(self) -> float:
        """Return the same of the answer without a level."""
        return self.usual.time_s / self.measured_s - 1

    @property
    def is_inside(self) -> bool:
        """Whether the time lies in the interval of the answer without a level."""
        around = self.usual.interval
        return around is not None and around.low_s <= self.measured_s <= around.high_s


def compared(data: Path) -> list[Compared]:
    """Predict every size above 16 MiB."""
    fabric = cluster(CLUSTER)
    return [
        Compared(
            op=op,
            bytes=row.bytes,
            measured_s=row.time_us * 1e-6,
            in_place_s=(row.in_place_us or row.time_us) * 1e-6,
            predicted_s=predicted_s(fabric, op, row.bytes),
            usual=collective(op, bytes=row.bytes, cluster=fabric, workers=DEVICES),
        )
        for op in OPS
        for row in rows_of(data, op)
        if row.bytes > 16 * MIB
    ]


def startup_s(data: Path) -> float:
    """Return the median time of sizes from 4 to 16 MiB beyond their bytes and latencies."""
    fabric = cluster(CLUSTER)
    return median(
        row.time_us * 1e-6 - (predicted_s(fabric, op, row.bytes) - fabric.startup_s)
        for op in OPS
        for row in rows_of(data, op)
        if 4 * MIB <= row.bytes <= 16 * MIB
    )


def predicted_s(fabric: Cluster, op: str, size_bytes: int) -> float:
    """Time a ring around the devices of one node."""
    return collective_time(op, "ring", fabric, size_bytes, workers=DEVICES).time_s


def rows_of(data: Path, op: str) -> tuple[Row, ...]:
    """Read one table."""
    return read_tables(data / f"nccl_{op}.log")[0].rows


def main() -> None:
    """Print the table; the status says whether all but two are within the tolerance."""
    taken = arguments.parser(__doc__)
    taken.add_argument("data", type=Path)
    data = taken.parse_args().data
    found = compared(data)
    print(f"start-up of 4 to 16 MiB: {startup_s(data) * 1e6:.1f} us")
    print("collective          bytes   measured   in place  predicted   error  usual   error")
    for each in found:
        print(
            f"{each.op:<13} {each.bytes:>11} {each.measured_s * 1e6:>7.0f} us "
            f"{each.in_place_s * 1e6:>7.0f} us {each.predicted_s * 1e6:>7.0f} us "
            f"{each.error:>7.1%} {each.usual.time_s * 1e6:>7.0f} us {each.usual_error:>7.1%}"
            f"{'  *' if abs(each.error) > TOLERANCE else ''}"
        )
    close = sum(abs(each.error) <= TOLERANCE for each in found)
    print(f"{close} of {len(found)} within {TOLERANCE:.0%}")
    usually = sum(abs(each.usual_error) <= TOLERANCE for each in found)
    inside = sum(each.is_inside for each in found)
    as_usual = f"by the usual protocols {usually}, and {inside} inside their interval"
    print(as_usual)
    errors = results.spread([each.error for each in found])
    results.write(
        "nccl",
        data,
        "nccl",
        claim="Collectives on eight A100 are predicted from the machine's description.",
        anchor="tables of nccl-tests, every size above 16 MiB",
        summary=f"{close} of {len(found)} within {TOLERANCE:.0%}, worst {errors['worst']:.0%}; "
        + as_usual,
        measure="relative error of the time",
        cases=len(found),
        **errors,
        tables=[
            results.Table(
                columns=[
                    "collective",
                    "bytes",
                    "measured",
                    "in place",
                    "predicted",
                    "error",
                    "usual protocols",
                    "their error",
                ],
                rows=[
                    [
                        each.op,
                        each.bytes,
                        *(
                            f"{time_s * 1e6:.0f} us"
                            for time_s in (each.measured_s, each.in_place_s, each.predicted_s)
                        ),
                        f"{each.error:+.1%}",
                        f"{each.usual.time_s * 1e6:.0f} us",
                        f"{each.usual_error:+.1%}",
                    ]
                    for each in found
                ],
            )
        ],
    )
    sys.exit(close < len(found) - 2)


if __name__ == "__main__":
    main()
