"""Which cluster takes the times of these measured tables?"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from fullwire.clusters import ClusterLike, names
from fullwire.clusters import cluster as described_cluster
from fullwire.clusters.cluster import Cluster, Inside, Nics, with_nodes
from fullwire.clusters.measured import Protocol
from fullwire.collectives.cost import bus_factor
from fullwire.collectives.fitting import (
    LEAST_BYTES,
    Residual,
    Table,
    fitted,
    residuals,
)
from fullwire.collectives.left_open import FASTEST_NIC_BPS
from fullwire.collectives.library import (
    FITTED_OPS,
    library_time,
    needs,
    with_large,
)
from fullwire.collectives.usual import USUAL_PROTOCOLS, USUAL_TREE_SHARE, half_weight
from fullwire.errors import DamagedInput, UsageError
from fullwire.files import beginning_of, name_of, opened_plain, path_of
from fullwire.findings.collective import (
    FillsLittle,
    FillsMore,
    FitIsOff,
    FittedTo,
    RateOfBench,
    RatesOfTables,
    RestsOnLeastRate,
    TablesDisagree,
)
from fullwire.findings.finding import Finding
from fullwire.importers import FORMATS
from fullwire.importers import tables as printed_tables
from fullwire.importers._tables import Row
from fullwire.importers._tables import Table as Printed
from fullwire.units import show_bytes, show_rate
from fullwire.words import sentence
from fullwire.workloads.accelerators import family_in

_MOST_TABLES = 1_000
_MOST_PAST_LINE_RATE = 1.05  # Of the described rate: clocks and rounding may add that much.
# Of the bus bandwidth that a ring has at the line rate. Switches that add reached 1.07 on eight
# H100. Public tables have at most this.
_MOST_BY_ADDING = 1.3
# Of the NICs' rate: rings and trees of so large messages fill 60 to 96 % of it in public tables.
_LITTLE, _LARGE_BYTES = 0.4, 2**27
_RACKS, _OF_THEIR_HOSTS = (36, 72), (2, 4)  # devices, of NVL36 and NVL72 of GB200 and GB300
_MOST_OFF = 0.15  # the median error of a row; fits to public tables have at most half of it
# Two tables of one question disagree if their times are so many times apart at half of the sizes
# that they share. From small sizes on, one measurement differs from the next.
_MOST_APART, _COMPARED_FROM_BYTES = 2.0, 2**16
_BENCH_DTYPE = "float32"  # of the rows of our own bench that are read: others compress
_USUAL_DTYPES = ("float32", "bfloat16", "float16")
_FROM_BYTES, _TO_BYTES = 2**10, 2**33  # The sizes of the choices.


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The sizes for which the machine seems to use an algorithm and a protocol."""

    op: str
    workers: int
    algorithm: str
    protocol: str
    from_bytes: int
    to_bytes: int | None  # None for the last choice


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFit:
    """A fitted cluster, its error in each row, and the choices that the machine makes."""

    cluster: Cluster
    residuals: tuple[Residual, ...]
    choices: tuple[Choice, ...]
    unused: tuple[str, ...] = ()  # tables that no protocol was fitted to, with the reason
    problems: tuple[str, ...] = ()  # of the tables that it was fitted to

    @property
    def doubts(self) -> tuple[str, ...]:
        """Return why the fit is not to be relied on."""
        doubts: list[Finding] = []
        if self.quantile(0.5) > _MOST_OFF:
            worst = max(self.residuals, key=lambda residual: abs(math.log1p(residual.error)))
            doubts.append(
                FitIsOff(
                    median=self.quantile(0.5),
                    op=worst.op,
                    workers=worst.workers,
                    bytes=worst.bytes,
                    measured_s=worst.measured_s,
                    predicted_s=worst.predicted_s,
                )
            )
        share, is_described = self.protocols[-1].between_share, not self.cluster.nics.of_tables
        is_of_many = any(
            row.workers > self.cluster.devices_per_node
            and row.op != "alltoall"  # of which each device fills its own NIC alone
            and row.bytes >= _LARGE_BYTES
            for row in self.residuals
        )
        if share < _LITTLE and is_described and is_of_many:
            doubts.append(FillsLittle(share=share))
        if share > _MOST_PAST_LINE_RATE and is_described and is_of_many:
            doubts.append(FillsMore(share=share))
        if self.cluster.inside is not None and self.cluster.inside.rate_is_least:
            doubts.append(RestsOnLeastRate())
        return (*map(sentence, doubts), *(f"{problem}." for problem in self.problems))

    @property
    def protocols(self) -> tuple[Protocol, ...]:
        """Return the fitted values of each protocol."""
        assert self.cluster.measured is not None
        return self.cluster.measured.protocols

    def quantile(self, share: float) -> float:
        """Return the error that this share of the rows does not exceed."""
        return float(np.quantile([abs(residual.error) for residual in self.residuals], share))


class _BenchRow(msgspec.Struct):
    bytes: Annotated[int, msgspec.Meta(ge=1, le=2**50)]
    ours_s: Annotated[float, msgspec.Meta(ge=1e-9, le=1e6)]
    wire: str = _BENCH_DTYPE


class _Bench(msgspec.Struct):
    """The fields that are read from the output of `fullwire bench transport --json`."""

    workers: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    rows: list[_BenchRow]
    rate_bps: Annotated[float, msgspec.Meta(ge=1, le=1e18)] | None = None


def fit_cluster(
    tables: Sequence[str | Path],
    *,
    cluster: ClusterLike | None = None,
    devices_per_node: int | None = None,
    name: str = "fitted",
) -> ClusterFit:
    """Fit a cluster to measured tables, so that it predicts other sizes and device counts.

    - `tables`: files of nccl-tests, of the OSU benchmarks, or of `bench transport --json`.
    - `cluster`: its description, by name or file. Values that it states stay.
    - `devices_per_node`: the number of devices of a node, if there is no description. Line rates
      are then the best that the tables show.
    - `name`: the name of the fitted cluster.

    The answer holds the cluster, the error of its protocols in each row, and the algorithm of each
    size. Times are seconds, sizes bytes.

        import pathlib

        rows = '{"workers": 2, "rows": [{"bytes": 1048576, "ours_s": 0.001}]}'
        pathlib.Path("bench.json").write_text(rows)
        fw.fit_cluster(["bench.json"], devices_per_node=1).cluster.nodes
    """
    if not tables:
        raise UsageError("cluster fit: expected at least one table")
    curves = [curve for path in tables for curve in _shown(path_of(path, "cluster fit"))]
    kept = [curve for curve in curves if not curve.why_unused]
    tables_of, unused = Counter(curve.path for curve in curves), []
    for curve in (curve for curve in curves if curve.why_unused):
        line = f", line {curve.line}" if tables_of[curve.path] > 1 and curve.line else ""
        unused.append(f"{name_of(curve.path)}{line} {curve.why_unused}")
    if not kept:
        raise UsageError(
            f"cluster fit: expected a table of {', '.join(FITTED_OPS)} among several ranks, and "
            f"there is none in {', '.join(name_of(path) for path in tables)}"
            + "".join(f". {reason}" for reason in unused)
        )
    if cluster is None:
        where = _made(kept, devices_per_node, name)
    else:
        where = described_cluster(cluster)
        if devices_per_node is not None and devices_per_node != where.devices_per_node:
            raise UsageError(
                f"devices_per_node: {where.name} states {where.devices_per_node}, got "
                f"--devices-per-node {devices_per_node}"
            )
        if where.is_torus:
            raise UsageError(f"cluster fit: {where.name} is a torus, expected switches")
    most = max(kept, key=lambda curve: curve.workers)
    if most.workers > where.devices:
        if not (isinstance(cluster, str) and cluster in names()):  # whose nodes are an example
            raise UsageError(
                f"{most.place(most.line)}: {most.workers} ranks, and {where.name} states nodes = "
                f"{where.nodes} and devices_per_node = {where.devices_per_node}, which are "
                f"{where.devices} devices"
            )
        where = with_nodes(where, -(-most.workers // where.devices_per_node))
    has_parts = any(map(_is_beyond_nics, kept))
    problems = [note for curve in kept for note in _check_against(where, curve, has_parts)]
    problems += [problem for curve in kept for problem in curve.problems]
    for one, other in itertools.combinations(kept, 2):
        _check_together(one, other)
    rows = [curve.table() for curve in kept]
    fitted_cluster = fitted(where, rows, nics_are_stated=cluster is not None)
    sources = tuple(dict.fromkeys(curve.source for curve in kept))
    rests_on = sentence(FittedTo(before=where.rests_on, sources=sources))
    assert fitted_cluster.measured is not None
    fitted_cluster = with_large(
        replace(fitted_cluster, name=name, rests_on=rests_on), fitted_cluster.measured
    )
    return ClusterFit(
        cluster=fitted_cluster,
        residuals=tuple(residuals(fitted_cluster, rows)),
        choices=tuple(_choices(fitted_cluster, rows)),
        unused=tuple(dict.fromkeys(unused)),
        problems=tuple(dict.fromkeys(problems)),
    )


@dataclass(frozen=True, slots=True)
class _Shown:
    """A table as it was read."""

    op: str
    workers: int
    nodes: int  # 0 if unknown
    points: tuple[tuple[int, float], ...]
    path: Path
    source: str
    lacks_ranks: bool = False  # the OSU benchmarks do not print them
    line: int = 0  # that tells the ranks; 0 if unknown
    line_rate_bps: float | None = None  # of each rank's link, where the file states it
    fullest: int = 0  # ranks of the host with the most; 0 if unknown
    lines: Mapping[int, int] = field(default_factory=dict)  # of each size, where files have lines
    device: str = ""  # the names of its devices, where the file has them
    of_dtype: str = ""  # the only one whose rows are read, where a file has rows of several
    problems: tuple[str, ...] = ()

    @property
    def why_unused(self) -> str:
        """Return why no protocol can be fitted to it; "" if it can."""
        if not self.op and self.path.suffix in (".csv", ".tsv"):
            return (
                "does not name its operation: expected a column op, such as alltoall in each row, "
                "or a file name like alltoall_16.csv"
            )
        if not self.op:
            return (
                "does not name its operation: expected the command above the table, such as "
                "`# alltoall_perf -b 8 -e 1G`, or a file name like alltoall_16.log"
            )
        if self.op not in FITTED_OPS:
            return f"is of {self.op}, which is not fitted"
        if self.lacks_ranks:
            return (
                "does not say its number of ranks: expected the command above the table, such "
                "as `# mpirun -np 16 osu_allreduce`"
            )
        if self.workers < 2:
            return "has one rank, which sends nothing"
        if not self.points and self.of_dtype:
            return f"has no row of {self.of_dtype}"
        if not any(size >= LEAST_BYTES for size, _ in self.points):
            return f"has only sizes below {show_bytes(LEAST_BYTES)}"
        return ""

    def place(self, line: int) -> str:
        """Return the words for a line of the file."""
        return f"{self.path}, line {line}" if line else str(self.path)

    def table(self) -> Table:
        """Return the table in the form that a fit needs."""
        return Table(op=self.op, workers=self.workers, points=self.points, source=self.source)


def tables_in(path: Path) -> list[Table]:
    """Read the tables of a file of nccl-tests, of the OSU benchmarks or of our own bench."""
    return [curve.table() for curve in _shown(path) if not curve.why_unused]


def _shown(path: Path) -> Iterator[_Shown]:
    """Read a file of tables from any of the programs."""
    if not path.is_file():
        raise UsageError(f"cluster fit: expected a file, and {path} is none")
    beginning = beginning_of(path)
    benchmarks = (form for form in FORMATS.values() if form.tables)  # nccl-tests writes JSON, too
    if beginning.lstrip().startswith(b"{") and not any(
        form.looks_like(beginning).score for form in benchmarks
    ):
        found = _of_bench(path)
    else:
        found = [_printed(path, table) for table in printed_tables(path)[:_MOST_TABLES]]
    for shown in found:
        if not all(size > 0 and time_s > 0 for size, time_s in shown.points):
            raise DamagedInput(path, "expected sizes and times above 0")
        yield shown


def _of_bench(path: Path) -> list[_Shown]:
    """Read the output of our own bench."""
    try:
        with opened_plain(path) as file:
            bench = msgspec.json.decode(file.read(), type=_Bench)
    except msgspec.MsgspecError as error:
        raise DamagedInput(path, f"expected JSON of fullwire bench transport: {error}") from None
    points: dict[int, float] = {}  # of a repeated size, the slower time
    for row in bench.rows:
        if row.wire == _BENCH_DTYPE:
            points[row.bytes] = max(row.ours_s, points.get(row.bytes, 0.0))
    workers = bench.workers
    curve = tuple(sorted(points.items()))
    rest: dict[str, Any] = {"line_rate_bps": bench.rate_bps, "of_dtype": _BENCH_DTYPE}
    return [_Shown("allreduce", workers, workers, curve, path, name_of(path), **rest)]


def _printed(path: Path, table: Printed) -> _Shown:
    """Take a complete table of a benchmark; of a repeated size, the slower time.

    People's CSV lists repetitions, of which the middle one counts. Data types that devices add up
    slowly, as f8e4m3, say nothing about links: where a size has several types, the rows of one are
    taken. It is the one with the most sizes, the largest, or a usual one.
    """
    table.refuse_damage(path)
    sizes = sorted({(row.bytes, row.dtype) for row in table.rows if row.bytes >= LEAST_BYTES})
    counts, largest = Counter(dtype for _, dtype in sizes), {dtype: size for size, dtype in sizes}
    dtype = max((*_USUAL_DTYPES, *counts), key=lambda each: (counts[each], largest.get(each, 0)))
    has_several = len(sizes) > len({size for size, _ in sizes})
    others = ", ".join(each for each in counts if each != dtype) if has_several else ""
    left = [f"{name_of(path)}: rows of {others} are left out beside those of {dtype}"]
    rows: dict[int, list[Row]] = {}
    for row in sorted(table.rows, key=lambda row: row.time_us):
        if row.dtype == dtype or not others:
            rows.setdefault(row.bytes, []).append(row)
    rows.pop(0, None)
    is_repeated = table.tool == "csv"
    taken = {
        size: alike[(len(alike) - 1) // 2 if is_repeated else -1] for size, alike in rows.items()
    }
    return _Shown(
        table.op,
        table.workers,
        table.nodes,
        tuple((size, taken[size].time_us * 1e-6) for size in sorted(taken)),
        path,
        name_of(path),
        table.tool == "osu" and table.workers == 1,
        table.line,
        fullest=table.fullest,
        lines={size: row.line for size, row in taken.items()},
        device=table.device,
        problems=(*table.problems, *(left if others else [])),
    )


def _made(tables: Sequence[_Shown], devices_per_node: int | None, name: str) -> Cluster:
    """Return a cluster that is made from the tables alone, with the devices that they tell of."""
    if devices_per_node is None:
        told = {table.fullest for table in tables if table.nodes and table.fullest}
        if not told:
            some = [table for table in tables if table.fullest]
            why = f"{some[0].path} lists only some of its hosts" if some else ""
            raise UsageError(
                "cluster fit: expected --devices-per-node N, or --cluster FILE that states it: "
                + (why or "no table lists its hosts")
            )
        joined = [table.workers for table in tables if _is_beyond_nics(table)]  # NVL72, as one node
        devices_per_node = max(joined or told)
    if devices_per_node < 1:
        raise UsageError(f"--devices-per-node: expected at least 1, got {devices_per_node}")
    made = made_of([curve.table() for curve in tables], devices_per_node, name)
    stated = sorted({table.line_rate_bps for table in tables if table.line_rate_bps})
    if len(stated) > 1:
        raise UsageError(
            "cluster fit: expected benches on links of one rate, got "
            + " and ".join(map(show_rate, stated))
        )
    if stated and devices_per_node == 1:
        nics = replace(made.nics, rate_bps=stated[0], of_tables=False)
        made = replace(made, nics=nics, rests_on=sentence(RateOfBench()))
    return made


def made_of(tables: Sequence[Table], devices_per_node: int, name: str) -> Cluster:
    """Return a cluster whose line rates are the best ones that the tables show.

    Tables of several nodes show of the links within a node only a rate that these have at least.
    """
    large = USUAL_PROTOCOLS[-1]
    nodes = -(-max(table.workers for table in tables) // devices_per_node)
    unit = _unit(nodes, devices_per_node, name)
    inside_bps = nic_bps = ring_bps = 0.0
    for table in tables:
        most_bytes_s = max((size / time_s for size, time_s in table.points), default=0.0)
        inside_share, nic_bits, ring_bits = _through_links(table, unit)
        inside_bps = max(inside_bps, 8 * most_bytes_s * inside_share / large.inside_share)
        nic_bps = max(nic_bps, most_bytes_s * nic_bits / large.between_share)
        ring_bps = max(ring_bps, most_bytes_s * ring_bits / large.between_share)
    counts = {(table.op, -(-table.workers // devices_per_node)) for table in tables}
    is_of_one_node = any(count == 1 for _, count in counts)
    if nic_bps and not is_of_one_node:  # a device reaches its NIC by links of no lower rate
        inside_bps = max(inside_bps, nic_bps, ring_bps)
    inside = None
    if devices_per_node > 1:
        inside = Inside(kind="switch", rate_bps=inside_bps, rate_is_least=not is_of_one_node)
    # All-reduces of two nodes alone do not tell trees from rings. Libraries take a tree that NICs
    # hold up. Else NICs are likelier as fast as a ring shows.
    is_of_pairs = {count for count in counts if count[1] > 1} == {("allreduce", 2)}
    if is_of_pairs and half_weight(nic_bps * devices_per_node, inside) < 1:
        nic_bps = ring_bps
    nic_bps = nic_bps or min(inside_bps / large.between_share / devices_per_node, FASTEST_NIC_BPS)
    nics = replace(unit.nics, rate_bps=nic_bps, of_tables=True)
    return replace(unit, inside=inside, nics=nics, rests_on=sentence(RatesOfTables()))


def _unit(nodes: int, devices_per_node: int, name: str = "unit") -> Cluster:
    """Return a cluster whose links send a bit a second, so the needs of a byte on them are bits."""
    return Cluster(
        name=name,
        nodes=nodes,
        devices_per_node=devices_per_node,
        inside=Inside(kind="switch", rate_bps=1.0) if devices_per_node > 1 else None,
        nics=Nics(per_node=devices_per_node, rate_bps=1.0),
    )


def _through_links(table: Table, unit: Cluster) -> tuple[float, float, float]:
    """Return the share of a table's bytes on a device's link, and the bits of a byte on a NIC.

    They are those of a ring, or of an all-to-all in pairs. There a device sends within its node
    only the parts of its neighbours, and over its own NIC all other parts. An all-reduce of two
    nodes sends fewer bits by a tree, and its table does not tell which one it was. So the bits are
    those of the tree, and the third number is those of the ring.
    """
    plain, *others = needs(table.op, unit, table.workers).values()
    here = min(table.workers, unit.devices_per_node)
    is_in_pairs = table.op == "alltoall"
    share = (here - 1) / table.workers if is_in_pairs else bus_factor(table.op, table.workers)
    nic_bits = plain.between_s
    if here < table.workers <= 2 * here:
        of_trees = [way.between_s / USUAL_TREE_SHARE for way in others if way.is_tree]
        nic_bits = min([nic_bits, *of_trees])
    return share, nic_bits, plain.between_s


def _is_beyond_nics(table: _Shown) -> bool:
    """Say whether its hosts exchange more than any NICs carry: then they are parts of one node.

    The devices of such a node have links of their own, as in a rack of GB200 NVL72.
    """
    if table.nodes < 2 or not table.fullest:
        return False
    ways = needs(table.op, _unit(table.nodes, table.fullest), table.workers).values()
    least_bits = min(way.between_s for way in ways)  # of a byte, on the NIC of each device
    if table.op == "allreduce":  # switches between nodes may add: each node sends a byte once
        least_bits = min(least_bits, 8 / table.fullest)
    most_bytes_s = max(size / time_s for size, time_s in table.points)
    return most_bytes_s * least_bits > FASTEST_NIC_BPS


def _check_against(where: Cluster, table: _Shown, has_parts: bool) -> list[str]:
    """Refuse a table that contradicts the description, with the line and the field.

    The result says if its hosts are parts of a node, or its devices others. `has_parts` says if the
    hosts of any table are parts.
    """
    nodes = -(-table.workers // where.devices_per_node)
    notes, stated = [], family_in(where.device or (where.name if where.name in names() else ""))
    if stated and family_in(table.device) not in (stated, ""):
        measured = f"{name_of(table.path)} was measured on {table.device}"
        notes.append(f"{measured}, and {where.name} describes {stated}")
    is_beyond = _is_beyond_nics(table)
    # Of several racks, NICs hold up what their hosts exchange.
    is_of_racks = nodes > 1 and where.devices_per_node in _RACKS
    is_of_racks = is_of_racks and table.fullest in _OF_THEIR_HOSTS
    divides = table.fullest and not where.devices_per_node % table.fullest
    if table.nodes > nodes and (is_beyond or (divides and (has_parts or is_of_racks))):
        more = "are like those of another table" if has_parts else "are parts of stated nodes"
        more = "exchange more than NICs carry" if is_beyond else more
        notes.append(
            f"{name_of(table.path)}: its {table.nodes:,} hosts {more}, and are taken as parts of a "
            "node"
        )
    elif table.nodes and table.nodes != nodes:
        raise UsageError(
            f"{table.place(table.line)}: {table.workers} ranks on {table.nodes} "
            f"{'host' if table.nodes == 1 else 'hosts'}, and devices_per_node = "
            f"{where.devices_per_node} of {where.name} places them on {nodes}"
        )
    if table.fullest > where.devices_per_node:
        raise UsageError(
            f"{table.place(table.line)}: {table.fullest} of its {table.workers} ranks are on one "
            f"host, and devices_per_node = {where.devices_per_node} of {where.name}"
        )
    inside, nics = where.inside, where.nics
    rate_bps = table.line_rate_bps
    if rate_bps is not None and not math.isclose(rate_bps, nics.rate_bps * nics.per_node):
        raise UsageError(
            f"{table.path}: rate_bps is {show_rate(rate_bps)}, and {nics.per_node} NICs a node of "
            f"{show_rate(nics.rate_bps)} are stated (nics.rate of {where.name})"
        )
    # The least bytes that leave a node or a device: switches that add send no vector twice.
    parted = table.op in ("allgather", "reducescatter", "alltoall")
    of_device = 1 - 1 / table.workers if parted else 1.0
    if nodes > 1:
        told = f"{nics.per_node} NICs a node of {show_rate(nics.rate_bps)}"
        of_node = (nodes - 1) / nodes if parted else 1.0
        if table.op == "alltoall":  # each device has a vector of its own to send
            here = where.devices_per_node
            of_node = here * (table.workers - here) / table.workers
        _refuse_beyond(where, table, of_node, nics.rate_bps * nics.per_node, "nics.rate", told)
    elif table.op == "allreduce":
        of_device = max(of_device, bus_factor(table.op, table.workers) / _MOST_BY_ADDING)
    if inside is None:
        return notes
    allowed_bps, told = inside.rate_bps, f"{show_rate(inside.rate_bps)} a device"
    if nodes > 1 and inside.kind == "switch":  # NICs are beside such links, and not behind them
        allowed_bps += nics.rate_bps * nics.per_node / where.devices_per_node
        told += " and its share of the NICs"
    _refuse_beyond(where, table, of_device, allowed_bps, "inside.rate", told)
    return notes


def _check_together(one: _Shown, other: _Shown) -> None:
    """Refuse two tables of one operation and device count if most of their times contradict."""
    if (one.op, one.workers) != (other.op, other.workers):
        return
    others_s = dict(other.points)
    times_s = [
        (size, time_s, others_s[size])
        for size, time_s in one.points
        if size in others_s and size >= _COMPARED_FROM_BYTES
    ]
    apart = [max(times) / min(times) for _, *times in times_s]
    if not apart or float(np.median(apart)) <= _MOST_APART:
        return
    size, one_s, other_s = times_s[int(np.argmax(apart))]
    raise UsageError(
        sentence(
            TablesDisagree(
                op=one.op,
                workers=one.workers,
                bytes=size,
                first=one.place(one.lines.get(size, 0)),
                first_s=one_s,
                second=other.place(other.lines.get(size, 0)),
                second_s=other_s,
            )
        )
    )


def _refuse_beyond(
    where: Cluster, table: _Shown, share: float, allowed_bps: float, key: str, told: str
) -> None:
    """Refuse a table that moves this share of its bytes faster than the stated links can."""
    for size, time_s in table.points:
        moved_bps = 8 * size * share / time_s
        if moved_bps > _MOST_PAST_LINE_RATE * allowed_bps:
            raise UsageError(
                f"{table.place(table.lines.get(size, 0))}: {table.op} of {show_bytes(size)} "
                f"among {table.workers} moves {show_rate(moved_bps)}, and {told} allow "
                f"{show_rate(allowed_bps)} ({key} of {where.name})"
            )


def _choices(cluster: Cluster, tables: Sequence[Table]) -> Iterator[Choice]:
    """Yield the choices of the fitted machine, for each operation and device count shown."""
    for op, workers in dict.fromkeys((table.op, table.workers) for table in tables):
        starts: list[tuple[int, str, str]] = []
        size = _FROM_BYTES
        while size <= _TO_BYTES:
            library = library_time(op, cluster, size, workers)
            way = (library.algorithm, library.protocol or "")
            if not starts or way != starts[-1][1:]:
                starts.append((size, *way))
            size *= 2
        for (begin, algorithm, protocol), after in itertools.zip_longest(starts, starts[1:]):
            yield Choice(
                op=op,
                workers=workers,
                algorithm=algorithm,
                protocol=protocol,
                from_bytes=begin,
                to_bytes=None if after is None else after[0] - 1,
            )
