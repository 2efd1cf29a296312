"""Tables of real machines against their descriptions, and against fits to two of their tables.

    .venv/bin/python -m validation.machines ../shared/data/llm ../shared/data/nccl

An argument is a file that `fullwire cluster fit` reads, or a folder of them: one machine. A file
`cluster.toml` beside its tables describes it. The CSV files of ../shared/data/llm hold several
machines. There are two kinds of results. Described: every size from 16 MiB, and the share that is
in its interval. Fitted: fits to two device counts of an operation, for all pairs of them. Each fit
is judged from 64 KiB on the other device counts. Only the published set of tables renews
`results/machines.json`.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from fullwire.answers.cluster_fit import fit_cluster, made_of, tables_in
from fullwire.clusters import cluster
from fullwire.clusters.cluster import Cluster, Inside, with_nodes
from fullwire.collectives.fitting import Table, fitted
from fullwire.collectives.library import FITTED_OPS, library_time
from fullwire.errors import DamagedInput, UsageError
from validation import arguments, results
from validation.tables import PUBLISHED as SHARED

KIB, MIB = 2**10, 2**20
DESCRIBED_FROM, FITTED_FROM = 16 * MIB, 64 * KIB
# The tables of the published result. Those in build/tables are copies of public ones; six are of
# clouds, and their `cluster.toml` is the built-in cluster.
_POSTED = ("xe9680", "eight-hosts", "nd-a100-v4", "a3-ultra", "a3-mega", "a3-high", "p5", "p4d")
PUBLISHED = {SHARED / name for name in ("llm", "nccl")} | {
    Path(__file__).resolve().parents[1] / "build" / "tables" / name for name in _POSTED
}
MULTI_NODE = {"system", "gpus", "collective", "size", "oop_time_us"}  # columns
IN_NODE = {"gpu", "op", "dtype", "num_gpus", "message_size", "latency_ms"}
# Of data sheets: the rate at which a device sends over the links of its node, each way.
INSIDE_GB_S = {"a100": 300, "h100": 450, "h200": 450, "b200": 900, "b300": 900, "gb200": 900}
INSIDE_GB_S["gb300"] = 900


@dataclass(frozen=True, slots=True)
class Machine:
    """Tables of one machine; described if its specification is known."""

    name: str
    described: Cluster | None
    tables: tuple[Table, ...]
    devices_per_node: int | None = None  # where it is not described


@dataclass(slots=True)
class Judged:
    """Relative errors of times, and whether the interval held each."""

    errors: list[float] = field(default_factory=list)
    holds: list[bool] = field(default_factory=list)

    def add(self, where: Cluster, table: Table, least: int) -> None:
        """Predict the sizes of a table, from `least` on."""
        for size, time_s in table.points:
            if size >= least:
                said = library_time(table.op, where, size, table.workers)
                self.errors.append(said.time_s / time_s - 1)
                self.holds.append(said.low_s <= time_s <= said.high_s)

    def cells(self) -> list[results.Cell]:
        """Return sizes, median, p90 and coverage as cells of the table."""
        if not self.errors:
            return [0, "", "", ""]
        off = np.abs(self.errors)
        shares = (np.median(off), np.quantile(off, 0.9), np.mean(self.holds))
        return [len(off), *(f"{float(share):.1%}" for share in shares)]


def machines(places: Sequence[Path]) -> Iterator[Machine]:
    """Read the machines of these files and folders; files beside each other are of one machine."""
    folders: dict[Path, list[Path]] = defaultdict(list)
    for place in places:
        files = sorted(place.iterdir()) if place.is_dir() else [place]
        for path in files:
            columns = columns_of(path) if path.suffix == ".csv" else set()
            if columns >= MULTI_NODE:
                yield from multi_node(path)
            elif columns >= IN_NODE:
                yield from in_node(path)
            elif path.suffix not in (".md", ".toml") and path.is_file():
                folders[path.parent].append(path)
    for folder, files in folders.items():
        tables, readable = [], []
        for path in files:
            try:
                tables += tables_in(path)
                readable.append(path)
            except (DamagedInput, UsageError) as error:
                print(f"left out: {error}")
        tables = [each for each in tables if each.op in FITTED_OPS and each.workers > 1]
        if tables:
            described = folder / "cluster.toml"
            where = cluster(described) if described.exists() else None
            if folder.name == "nccl" and where is None:
                where = stated("dgx-a100", 1)
            yield Machine(folder.name, where, tuple(tables), devices_of(folder, where, readable))


def devices_of(folder: Path, where: Cluster | None, files: Sequence[Path]) -> int | None:
    """Return the devices of a node of an undescribed machine, as its tables list their hosts."""
    if where is not None:
        return where.devices_per_node
    try:
        return fit_cluster(files).cluster.devices_per_node
    except (DamagedInput, UsageError) as error:
        print(f"not fitted: {folder}: {error}")
        return None


def stated(name: str, nodes: int) -> Cluster:
    """Return a built-in cluster as its data sheet states it: no start-up, line rates."""
    known = replace(cluster(name, nodes), startup_s=0.0)
    assert known.inside is not None
    return replace(known, inside=replace(known.inside, payload_share=1.0))


def columns_of(path: Path) -> set[str]:
    """Return the names of a CSV file's columns."""
    with path.open(newline="", errors="replace") as file:
        return set(next(csv.reader(file), []))


def measured(
    path: Path, op: str, numbers: tuple[str, str, str]
) -> Iterator[tuple[dict[str, str], str, float, float, float]]:
    """Yield the rows of a CSV file, each with its operation and these numbers of it.

    Rows that are cut, or of an operation that no fit knows, are left out and told.
    """
    left_out: dict[str, list[int]] = defaultdict(list)
    with path.open(newline="", errors="replace") as file:
        reader = csv.DictReader(file)
        for row in reader:
            known = (row[op] or "").lower().replace("_", "").replace("-", "") or "allreduce"
            try:
                first, second, third = (float(row[name]) for name in numbers)
                is_whole = all(0 < number < math.inf for number in (first, second, third))
            except (TypeError, ValueError):
                is_whole = False
            if not is_whole or None in row.values():
                why = f"expected all columns, and numbers above 0 as {', '.join(numbers)}"
                left_out[why].append(reader.line_num)
            elif known not in FITTED_OPS:
                why = f"{op}: expected one of {', '.join(FITTED_OPS)}, got {row[op]}"
                left_out[why].append(reader.line_num)
            else:
                yield row, known, first, second, third
    for why, lines in left_out.items():
        more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
        print(f"left out: {path}, line {lines[0]}: {why}{more}")


def multi_node(path: Path) -> Iterator[Machine]:
    """Read tables of nccl-tests in one CSV file; those of A100-SXM4 are of DGX A100.

    A file `cluster.toml` beside it describes other machines.
    """
    points: dict[str, dict[tuple[str, int], dict[int, float]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    columns = ("gpus", "size", "oop_time_us")
    for row, op, workers, size, time_us in measured(path, "collective", columns):
        points[row["system"]][op, int(workers)][int(size)] = time_us * 1e-6
    beside = path.with_name("cluster.toml")
    for system, of_tables in points.items():
        tables = [a_table(op, workers, rows) for (op, workers), rows in of_tables.items()]
        many = tuple(each for each in tables if each.workers > 1)
        where = cluster(beside) if beside.exists() else None
        if where is None and many and "A100-SXM4" in system:
            where = stated("dgx-a100", -(-max(each.workers for each in many) // 8))
        yield Machine(system, where, many)


def in_node(path: Path) -> Iterator[Machine]:
    """Read the tables of ai-dynamo/aiconfigurator, of two-byte elements within a node."""
    points: dict[str, dict[tuple[str, int], dict[int, float]]] = defaultdict(dict)
    columns = ("num_gpus", "message_size", "latency_ms")
    for row, op, workers, elements, time_ms in measured(path, "op", columns):
        if row["dtype"] == "half":
            of_size = points[row["gpu"]].setdefault((op, int(workers)), {})
            of_size[2 * int(elements)] = time_ms * 1e-3
    for gpu, of_tables in points.items():
        where, gb_s = None, INSIDE_GB_S.get(gpu.removesuffix("_sxm"))
        if gb_s is not None:
            inside = Inside(kind="switch", rate_bps=8e9 * gb_s, latency_s=1e-6)
            where = replace(stated("dgx-h100", 1), name=gpu, inside=inside)
        tables = [a_table(op, workers, rows) for (op, workers), rows in of_tables.items()]
        yield Machine(f"aiconfigurator, {gpu}", where, tuple(tables))


def a_table(op: str, workers: int, rows: dict[int, float]) -> Table:
    """Make a table of sizes and times."""
    return Table(op=op, workers=workers, points=tuple(sorted(rows.items())), source=op)


def judged(machine: Machine) -> tuple[Judged, Judged]:
    """Judge a machine as described, and fitted to each two of its device counts."""
    described, of_fits = Judged(), Judged()
    if machine.described is not None:
        for table in machine.tables:
            described.add(machine.described, table, DESCRIBED_FROM)
    for op in dict.fromkeys(table.op for table in machine.tables):
        tables = [table for table in machine.tables if table.op == op]
        most = max(table.workers for table in tables)
        for pair in itertools.combinations(dict.fromkeys(table.workers for table in tables), 2):
            shown = [table for table in tables if table.workers in pair]
            others = [table for table in tables if table.workers not in pair]
            if not others:
                continue
            where = machine.described
            if where is None and machine.devices_per_node is not None:
                where = made_of(shown, machine.devices_per_node, machine.name)
                where = with_nodes(where, -(-most // machine.devices_per_node))
            if where is None:
                continue
            found = fitted(where, shown, nics_are_stated=machine.described is not None)
            for table in others:
                of_fits.add(found, table, FITTED_FROM)
    return described, of_fits


def is_published(places: Sequence[Path]) -> bool:
    """Whether these are all tables of the published result: others leave it alone."""
    return {place.resolve() for place in places} == PUBLISHED


def main() -> None:
    """Print a line for each machine, and write the result."""
    taken = arguments.parser(__doc__)
    taken.add_argument("tables", nargs="+", type=Path)
    places = taken.parse_args().tables
    for place in places:
        if not place.exists():
            taken.error(f"{place}: expected a file or a folder, and there is none")
    columns = ["machine", "device counts"]
    columns += [f"described, {name}" for name in ("sizes", "median", "p90", "coverage")]
    columns += [f"fitted, {name}" for name in ("sizes", "median", "p90", "coverage")]
    print(" | ".join(columns))
    rows, all_fits, all_described = [], Judged(), Judged()
    for machine in machines(places):
        described, of_fits = judged(machine)
        counts = ", ".join(map(str, sorted({table.workers for table in machine.tables})))
        rows.append([machine.name, counts, *described.cells(), *of_fits.cells()])
        print(" | ".join(map(str, rows[-1])))
        for whole, part in ((all_fits, of_fits), (all_described, described)):
            whole.errors += part.errors
            whole.holds += part.holds
    if not rows:
        taken.error(f"expected tables, and none was read in {', '.join(map(str, places))}")
    rows.append(["all", "", *all_described.cells(), *all_fits.cells()])
    print(" | ".join(map(str, rows[-1])))
    if all_fits.errors and is_published(places):
        results.write(
            "machines",
            claim="Two tables of a machine predict its other device counts.",
            anchor="public tables of nccl-tests and alike; each two device counts fitted in turn, "
            "the others judged from 64 KiB. Start-ups and widths of intervals were chosen on the "
            "machines of ../shared/data. The others come from NVIDIA/nccl-tests#309 and public "
            "repositories. Tables of p5, a3-high and a3-mega chose their latencies, and the "
            "payload shares of the last two; p4d has the latency that AWS states.",
            measure="relative error of the time",
            tables=[results.Table(columns=columns, rows=rows)],
            **results.said_of(all_fits.errors, all_fits.holds),
        )


if __name__ == "__main__":
    main()
