"""Collectives in events, compared with another simulator and with our own closed forms.

    .venv/bin/python -m validation.collectives ../shared/data/astra

There are four tables:

- The serial ring beside ASTRA-sim's analytical backend, plainly and with the two costs that it
  adds: 10 ns per send, and 3 x bytes / 1600 GB/s per reduction.
- Events beside the closed form, where the form is exact.
- How far the double tree is above full utilization.
- Every algorithm on a fat tree. Equal transfers are played once, and the result is compared with a
  play of all transfers. The closed form is compared with the events.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from fullwire.clusters.cluster import Cluster, Inside, LeafSpine, Nics, one_switch
from fullwire.collectives.cost import AddTimes
from fullwire.collectives.link_cost import cost_of
from fullwire.collectives.placed import placed
from fullwire.collectives.plan import plan_on
from fullwire.collectives.playing import collective_time
from fullwire.collectives.registry import fitting
from validation import arguments, results
from validation.results import Table

RATE_BPS = 50 * 2**30 * 8.0
LATENCY_S = 500e-9
CHUNKS = 4
ASTRA_SEND_S = 10e-9
ASTRA_REDUCE_S_PER_BYTE = 3 / 1600e9
ASTRA_TOLERANCE = 0.05
CLOSED_TOLERANCE = 0.001


def astra_errors(data: Path) -> list[tuple[int, int, float, float]]:
    """Return (workers, bytes, our error, our error with ASTRA-sim's own two costs)."""
    with (data / "ring.csv").open() as file:
        rows = [{key: int(value) for key, value in row.items()} for row in csv.DictReader(file)]
    return [
        (
            row["workers"],
            row["bytes"],
            serial_ring_s(row["workers"], row["bytes"]) * 1e9 / row["time_ns"] - 1,
            serial_ring_s(row["workers"], row["bytes"], astra_costs=True) * 1e9 / row["time_ns"]
            - 1,
        )
        for row in rows
    ]


def serial_ring_s(workers: int, size: int, *, astra_costs: bool = False) -> float:
    """Time the ring that ASTRA-sim plays: chunks one after another."""
    adds = AddTimes(((0.0, 0.0), (1e12, 1e12 * ASTRA_REDUCE_S_PER_BYTE))) if astra_costs else None
    latency_s = LATENCY_S + (ASTRA_SEND_S if astra_costs else 0)
    cluster = one_switch(workers=workers, rate_bps=RATE_BPS, latency_s=latency_s)
    return collective_time(
        "allreduce", "ring", cluster, size, chunks=CHUNKS, chunk_order="serial", adds=adds
    ).time_s


def closed_form_errors() -> list[tuple[str, str, str, int, float]]:
    """Return (op, algorithm, chunks, cases, worst difference) where a closed form is offered."""
    found = []
    for op, algorithm, chunk_counts, order in (
        ("allreduce", "ring", (1, 4, 16), "pipelined"),
        ("allreduce", "ring", (4,), "serial"),
        ("allreduce", "halving-doubling", (1,), "pipelined"),
        ("reducescatter", "ring", (1, 8), "pipelined"),
        ("reducescatter", "halving-doubling", (1,), "pipelined"),
        ("allgather", "ring", (1, 8), "pipelined"),
        ("allgather", "halving-doubling", (1,), "pipelined"),
        ("broadcast", "ring", (1, 8), "pipelined"),
        ("broadcast", "tree", (1,), "pipelined"),
    ):
        errors = [
            closed_form_error(op, algorithm, workers, size, latency_s, chunks, order)
            for workers in (2, 8, 64, 256)
            for size in (4_096, 2**20, 2**26)
            for latency_s in (0.0, 500e-9, 20e-6)
            for chunks in chunk_counts
        ]
        shown = f"{'/'.join(map(str, chunk_counts))} {order}"
        found.append((op, algorithm, shown, len(errors), max(errors)))
    return found


def closed_form_error(
    op: str, algorithm: str, workers: int, size: int, latency_s: float, chunks: int, order: str
) -> float:
    """Return the relative difference between events and the closed form."""
    cluster = one_switch(workers=workers, rate_bps=RATE_BPS, latency_s=latency_s)
    adds = AddTimes(((1e3, 1e-6), (1e6, 2e-6), (1e9, 1e-3)))
    event, closed = (
        collective_time(
            op, algorithm, cluster, size, chunks=chunks, chunk_order=order, level=level, adds=adds
        ).time_s
        for level in ("event", "closed")
    )
    return abs(event / closed - 1)


def tree_over_full_utilization(workers: int, chunks: int) -> float:
    """Return how much longer a pipelined double tree takes than its busiest link at line rate."""
    cluster = one_switch(workers=workers, rate_bps=RATE_BPS)
    size = 2**26
    played = collective_time("allreduce", "tree", cluster, size, chunks=chunks).time_s
    return played / (2 * size * 8 / RATE_BPS) - 1


def fat_tree(nodes: int) -> Cluster:
    """Describe nodes of 8 devices and 8 NICs on leaves of 4, below a 2:1 spine."""
    return Cluster(
        name="fat-tree",
        nodes=nodes,
        devices_per_node=8,
        inside=Inside(kind="switch", rate_bps=3.6e12, latency_s=1e-6),
        nics=Nics(rate_bps=400e9, per_node=8, latency_s=4e-6),
        network=LeafSpine(nodes_per_leaf=4, oversubscription=2.0, latency_s=1e-6),
    )


def on_a_fat_tree(nodes: int, algorithm: str, size: int) -> tuple[float, float, float]:
    """Return the share of transfers played, the difference that makes, and the closed form's."""
    fabric = fat_tree(nodes)
    folded, whole = (
        collective_time("allreduce", algorithm, fabric, size, folds=folds)
        for folds in (True, False)
    )
    where = placed(plan_on("allreduce", algorithm, fabric), fabric)
    closed_s = float(cost_of(where, fabric).whole_s(size))
    assert folded.played is not None
    assert whole.played is not None
    return (
        folded.played / whole.played,
        abs(folded.time_s / whole.time_s - 1),
        closed_s / whole.time_s - 1,
    )


def main() -> None:
    """Print the four tables, and write their figures as results."""
    taken = arguments.parser(__doc__)
    taken.add_argument("astra", type=Path)
    place = taken.parse_args().astra
    astra = astra_errors(place)
    closed = closed_form_errors()
    fabric = fabric_rows()
    tables = [astra_table(astra), closed_table(closed), tree_table(), fabric_table(fabric)]
    for table in tables:
        print(f"{table.title}\n" + "  ".join(table.columns))
        for row in table.rows:
            print("  ".join(map(str, row)))
        print()
    write_astra(place, astra, tables[:1])
    write_forms(closed, fabric, tables[1:])
    is_off = any(abs(plain) > ASTRA_TOLERANCE for _, _, plain, _ in astra)
    is_off |= any(differs > CLOSED_TOLERANCE for _, _, _, differs, _, _ in fabric)
    sys.exit(is_off or any(error > CLOSED_TOLERANCE for *_, error in closed))


def fabric_rows() -> list[tuple[str, int, float, float, float, float]]:
    """Return (algorithm, devices, share played, difference, closed form at 64 KiB and 1 GiB)."""
    found = []
    for algorithm in fitting("allreduce", fat_tree(8)):
        for nodes in (8, 32):
            small, large = (on_a_fat_tree(nodes, algorithm, size) for size in (2**16, 2**30))
            differs = max(small[1], large[1])
            found.append((algorithm, 8 * nodes, large[0], differs, small[2], large[2]))
    return found


def astra_table(found: list[tuple[int, int, float, float]]) -> Table:
    """Show our serial ring beside ASTRA-sim's."""
    return Table(
        title="Serial ring, 4 chunks, 50 GiB/s, 500 ns: ours against ASTRA-sim",
        columns=["workers", "bytes", "plain", "with its two costs"],
        rows=[
            [workers, size, f"{plain:.1%}", f"{alike:.2%}"] for workers, size, plain, alike in found
        ],
    )


def closed_table(found: list[tuple[str, str, str, int, float]]) -> Table:
    """Show events beside the closed form."""
    return Table(
        title="Events against the closed form",
        columns=["collective", "algorithm", "chunks", "cases", "worst difference"],
        rows=[
            [op, algorithm, chunks, cases, f"{error:.0e}"]
            for op, algorithm, chunks, cases, error in found
        ],
    )


def tree_table() -> Table:
    """Show how far the double tree is above full utilization."""
    return Table(
        title="Double tree, no latency: time above full utilization (2 S / rate)",
        columns=["workers", "4 chunks", "16 chunks", "64 chunks"],
        rows=[
            [
                workers,
                *(f"{tree_over_full_utilization(workers, chunks):.1%}" for chunks in (4, 16, 64)),
            ]
            for workers in (8, 64, 256)
        ],
    )


def fabric_table(found: list[tuple[str, int, float, float, float, float]]) -> Table:
    """Compare plays of the different transfers with plays of all, and with the closed form."""
    return Table(
        title="All-reduce on a fat tree, 8 devices a node, 4 nodes a leaf, 2:1",
        columns=[
            "algorithm",
            "devices",
            "transfers played",
            "differs from all played",
            "closed form, 64 KiB",
            "closed form, 1 GiB",
        ],
        rows=[
            [
                algorithm,
                devices,
                f"{played:.1%}",
                f"{differs:.0e}",
                f"{small:.1%}",
                f"{large:.1%}",
            ]
            for algorithm, devices, played, differs, small, large in found
        ],
    )


def write_astra(
    place: Path, found: list[tuple[int, int, float, float]], tables: list[Table]
) -> None:
    """Write how close our ring is to ASTRA-sim's."""
    errors = [alike for *_, alike in found]
    plain = max(abs(error) for _, _, error, _ in found)
    results.write(
        "astra",
        place,
        "astra",
        claim="A ring takes the time that another simulator gives.",
        anchor="ASTRA-sim's analytical backend",
        summary=f"within {max(map(abs, errors)):.2%} with its two costs, {plain:.1%} without",
        measure="relative error of the time, with ASTRA-sim's two costs",
        cases=len(errors),
        **results.spread(errors),
        tables=tables,
    )


def write_forms(
    closed: list[tuple[str, str, str, int, float]],
    fabric: list[tuple[str, int, float, float, float, float]],
    tables: list[Table],
) -> None:
    """Write how close events are to the closed forms."""
    errors = [error for *_, error in closed]
    above = [abs(share) for row in fabric for share in row[4:]]
    results.write(
        "collectives",
        claim="Events and closed forms give the same time of a collective.",
        anchor="our own closed forms",
        summary=f"worst difference {max(errors):.0e}; on a fat tree {max(above):.1%}",
        measure="relative difference between events and the closed form",
        cases=sum(cases for *_, cases, _ in closed) + 2 * len(fabric),
        worst=max(above),
        tables=tables,
    )


if __name__ == "__main__":
    main()
