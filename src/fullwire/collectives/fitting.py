"""Fit the numbers that a description cannot know to tables of measured collectives.

The protocols of `library.py` have 17 numbers: start-ups, hops within and between nodes, shares of
the line rates, and the shares that a tree and adding switches fill. Two tables do not determine
them all. So each number begins at its usual value. It is held to that value as loosely as machines
differ in it, and the tables move the numbers that they show. The fit works in logarithms, by Gauss
and Newton with damping. A row that is far off, such as a size at which the library chose badly,
pulls less. The fitted cluster keeps how far rows are from its protocols, in `Shown`.

A library may lack a tree. A tree of two nodes may send half as much over the NICs as a ring does,
as NCCL's does where links in the nodes are fast. So rows are fitted with a tree, with a tree that
sends half, and without a tree. Over several numbers of nodes, fits that are clearly farther from
the rows than another one are dropped. The cluster keeps the others. The likeliest one gives the
times, and intervals hold all answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from fullwire.clusters.cluster import Cluster, Floats, with_fastest_inside
from fullwire.clusters.measured import MOST_SHARE, Measured, Protocol, Shown
from fullwire.collectives.library import Needs, library_time, needs, ways_s
from fullwire.collectives.usual import USUAL_PAIR_SHARE, half_weight, usual

LEAST_BYTES = 1024  # smaller messages take as long
_ROW_SPREAD = 0.08  # of a row's logarithm, where protocols describe a machine well
_LEAST_SPREAD = 0.07  # of a prediction
_SHARPNESS = 20  # of the minimum over ways, rounded to have a slope everywhere
_ROUNDS = 60
_CLEARLY_LESS = 0.6  # of the other fit's misfit of rows: then the tables tell which one holds
_UNUSUAL = 6.0  # of the misfit: twice the logarithm of 20, for few libraries lack a tree
_REPEATS = 0.01  # a time, measured again: rows that are this close show no difference of two fits

# How much machines differ from the usual, as standard deviations of logarithms. The four are of the
# start-up, of hops within and between nodes, and of a protocol's share as a part of the last one's.
_PROTOCOL_SPREADS = ((0.7, 0.6, 0.6, 0.5), (0.7, 0.6, 0.6, 0.15), (0.7, 0.6, 0.6, 1e-3))
# Within nodes, between them, of a tree, of a pair, of adding switches.
_SHARES_SPREAD = (0.2, 0.4, 0.12, 0.7, 0.12)
_OF_SEVERAL_NODES = (2, 6, 10, 13, 14, 15)  # of these numbers: tables of one node do not move them


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One measured table: a collective among so many ranks, and the time of each size."""

    op: str
    workers: int
    points: tuple[tuple[int, float], ...]  # bytes of the whole vector ascending, seconds
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """One row of a table, and its time by the fitted protocols."""

    table: int  # its number among those of the fit, from 1
    op: str
    workers: int
    bytes: int
    measured_s: float
    predicted_s: float
    algorithm: str

    @property
    def error(self) -> float:
        """Return how far the prediction is off."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True)
class _Rows:
    """A table as the fit takes it."""

    table: Table
    needs: Mapping[str, Needs]
    sizes: Floats
    times_s: Floats

    def held_up_by_nics(self) -> _Rows:
        """Return the table without links in the nodes that hold up other ways than the ring.

        By this table alone, NICs of an unknown rate may be as slow as that.
        """
        (ring, around), *others = self.needs.items()
        quick = {name: replace(way, inside_s=0.0) for name, way in others}
        return replace(self, needs={ring: around, **quick})


def fitted(cluster: Cluster, tables: Sequence[Table], *, nics_are_stated: bool = True) -> Cluster:
    """Return the cluster with the figures that fit these tables.

    - `nics_are_stated`: whether the rate of the NICs comes from elsewhere than from the tables.
    """
    rows = [
        _Rows(
            table,
            needs(table.op, cluster, table.workers),
            np.array([size for size, _ in table.points if size >= LEAST_BYTES], np.float64),
            np.array([time_s for size, time_s in table.points if size >= LEAST_BYTES]),
        )
        for table in tables
    ]
    measured = None
    for fit in reversed(_likely(cluster, rows, nics_are_stated)):
        measured = replace(_with_rows(cluster, fit), other=measured)
    return replace(cluster, measured=measured)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Library:
    """A library as tables may leave it open."""

    has_tree: bool = True
    adds: bool = True  # by the switches of a node, if they can
    sends_half: bool = False  # by a tree of two nodes, as of one of more
    half_weight: float = 0.0  # or so far from the usual tree to that one


@dataclass(frozen=True, slots=True)
class _Fit:
    """The protocols that fit one kind of library best, and their misfits."""

    measured: Measured
    rows: Sequence[_Rows]  # as it takes them
    of_rows: float  # in squares of what a repeated measurement differs by
    of_all: float  # with the distance from the usual numbers
    of_reduces: float  # the same without rows of other operations than all-reduce


def _likely(cluster: Cluster, rows: Sequence[_Rows], nics_are_stated: bool) -> list[_Fit]:
    """Return the fits that the rows allow, the likeliest first.

    Where no table of an all-reduce spans nodes, a tree between nodes is taken to be there.
    """
    nodes = [-(-row.table.workers // cluster.devices_per_node) for row in rows]
    spanned = {
        count for count, row in zip(nodes, rows, strict=True) if row.table.op == "allreduce"
    } - {1}
    inside, nics_bps = cluster.inside, cluster.nics.rate_bps * cluster.nics.per_node
    can_add = inside is not None and inside.can_add  # a library may still not use that

    def closest(library: _Library, rows: Sequence[_Rows]) -> list[_Fit]:
        """Fit a library with switches that add and without, and drop what is clearly farther.

        Rows of other operations show no switches, so only all-reduces order the two.
        """
        fits = [adding := _fit(cluster, rows, library)]
        if can_add:
            lacking = replace(adding, measured=replace(adding.measured, switch_share=0.0))
            reduces = any(row.table.op == "allreduce" for row in rows)
            without = _fit(cluster, rows, replace(library, adds=False)) if reduces else lacking
            of_all = adding.of_all + without.of_reduces - adding.of_reduces + _UNUSUAL
            fits = _close([adding, replace(without, of_all=of_all)], rows)
        return fits

    nics_are_known = nics_are_stated or any(  # by tables that leave no tree that sends half open
        count > 1 and (row.table.op, count) != ("allreduce", 2)
        for count, row in zip(nodes, rows, strict=True)
    )
    half = half_weight(nics_bps, inside)
    # Links in a node may be as fast as any. A quarter of the way is as right for Echo's machine.
    if inside is not None and inside.rate_is_least:
        half += (half_weight(nics_bps, with_fastest_inside(cluster).inside) - half) / 4
    between = half if nics_are_known and 2 not in spanned and half < 1 else 0.0

    def as_of(measured: Measured) -> list[_Rows]:
        """Return the rows where links within a node may be faster than tables show."""
        return [
            replace(row, needs=needs(row.table.op, cluster, row.table.workers, measured))
            for row in rows
        ]

    either = replace(usual(cluster), pair_share=USUAL_PAIR_SHARE, half_weight=between)
    fits = closest(_Library(half_weight=between), as_of(either))
    if spanned:
        rings = closest(_Library(has_tree=False), rows)
        fits += [replace(ring, of_all=ring.of_all + _UNUSUAL) for ring in rings]
    is_of_one_node = set(nodes) == {1}  # then no row depends on a tree
    usual_ones = [replace(fit, measured=replace(fit.measured, half_weight=0.0)) for fit in fits]
    guesses = [] if not between else usual_ones if is_of_one_node else closest(_Library(), rows)
    if cluster.devices_per_node > 1:  # else a ring of two nodes sends as little
        pulled = [
            row.held_up_by_nics() if count == 2 and not nics_are_known else row
            for count, row in zip(
                nodes, as_of(replace(usual(cluster), pair_share=0.0)), strict=True
            )
        ]
        if is_of_one_node:
            halves = [
                replace(fit, measured=replace(fit.measured, pair_share=0.0)) for fit in usual_ones
            ]
        else:
            halves = closest(_Library(sends_half=True), pulled)
        if are_slow := half == 1:  # a library takes such a tree there
            halves = [replace(fit, of_all=fit.of_all - _UNUSUAL) for fit in halves]
        is_usual = nics_are_known if 2 in spanned else nics_are_known and are_slow
        (fits if is_usual or (2 in spanned and are_slow) else guesses).extend(halves)
    of_all = attrgetter("of_all")
    fits = [*sorted(fits, key=of_all), *sorted(guesses, key=of_all)]
    # Each of the fits goes through the tables of one number of nodes.
    return _close(fits, rows) if len(spanned) > 1 else fits


def _close(fits: Sequence[_Fit], rows: Sequence[_Rows]) -> list[_Fit]:
    """Return the fits that are not clearly farther from the rows than another one."""
    noise = sum(len(row.sizes) for row in rows)
    closest = min(fit.of_rows for fit in fits) + noise
    return [fit for fit in fits if closest >= _CLEARLY_LESS * (fit.of_rows + noise)]


def _fit(cluster: Cluster, rows: Sequence[_Rows], library: _Library) -> _Fit:
    """Fit the protocols of such a library."""
    first = _logarithms(replace(usual(cluster), pair_share=USUAL_PAIR_SHARE))
    spreads = np.array([*(spread for row in _PROTOCOL_SPREADS for spread in row), *_SHARES_SPREAD])

    def as_measured(at: Floats) -> Measured:
        measured = _measured(at)
        return replace(
            measured,
            tree_share=measured.tree_share if library.has_tree else 0.0,
            switch_share=measured.switch_share if library.adds else 0.0,
            pair_share=0.0 if library.sends_half else measured.pair_share,
            half_weight=library.half_weight,
            tree_nics_share=usual(cluster).tree_nics_share,
        )

    def misfits(at: Floats) -> Floats:
        measured = as_measured(at)
        off = np.concatenate([np.log(_rounded_s(measured, row) / row.times_s) for row in rows])
        off = off / _ROW_SPREAD
        pull = np.sqrt(np.minimum(1.0, 2 / np.maximum(np.abs(off), 1e-9)))
        return np.concatenate([off * pull, (at - first) / spreads])

    moved = np.arange(len(first))
    if all(row.table.workers <= cluster.devices_per_node for row in rows):
        moved = np.delete(moved, _OF_SEVERAL_NODES)
    axes = np.eye(len(first))[moved]
    at, damping, now = first, 1.0, misfits(first)
    for _ in range(_ROUNDS):
        step = 1e-4
        slopes = np.stack(
            [(misfits(at + step * axis) - misfits(at - step * axis)) / (2 * step) for axis in axes],
            axis=1,
        )
        square = slopes.T @ slopes
        gained = 0.0
        for _ in range(8):
            damped = square + damping * np.diag(np.diag(square))
            change = np.linalg.solve(damped, -slopes.T @ now) @ axes
            then = misfits(at + np.clip(change, -0.5, 0.5))
            gained = float(now @ now - then @ then)
            if gained > 0:
                at, now, damping = at + np.clip(change, -0.5, 0.5), then, damping / 3
                break
            damping *= 4
        if gained < 1e-4:
            break
    of_rows = now[: sum(len(row.sizes) for row in rows)] * (_ROW_SPREAD / _REPEATS)
    counts = [len(row.sizes) for row in rows] + [len(at)]
    reduces = now[np.repeat([row.table.op == "allreduce" for row in rows] + [True], counts)]
    of_all, of_reduces = float(now @ now), float(reduces @ reduces)
    return _Fit(as_measured(at), rows, float(of_rows @ of_rows), of_all, of_reduces)


def residuals(cluster: Cluster, tables: Sequence[Table]) -> list[Residual]:
    """Compare every row of the tables with the protocols alone, without the tables' corrections."""
    assert cluster.measured is not None
    cluster = replace(cluster, measured=replace(cluster.measured, shown=()))
    residues = []
    for number, table in enumerate(tables, 1):
        for size, time_s in table.points:
            if size < LEAST_BYTES:
                continue
            library = library_time(table.op, cluster, size, table.workers)
            residues.append(
                Residual(
                    table=number,
                    op=table.op,
                    workers=table.workers,
                    bytes=size,
                    measured_s=time_s,
                    predicted_s=library.time_s,
                    algorithm=library.algorithm,
                )
            )
    return residues


def _rounded_s(measured: Measured, row: _Rows) -> Floats:
    """Return the time of the quickest way, or a little less where two are nearly as quick."""
    _, times_s = ways_s(measured, row.needs, row.sizes)
    least_s = times_s.min(axis=0)
    near = ((times_s / least_s) ** -_SHARPNESS).sum(axis=0)
    return np.asarray(least_s * near ** (-1 / _SHARPNESS))


def _logarithms(measured: Measured) -> Floats:
    last = measured.protocols[-1]
    numbers = [
        number
        for protocol in measured.protocols
        for number in (
            protocol.startup_s,
            protocol.inside_hop_s,
            protocol.between_hop_s,
            protocol.between_share / last.between_share,
        )
    ]
    numbers += [last.inside_share, last.between_share]
    shares = (measured.tree_share, measured.pair_share, measured.switch_share)
    return np.log([*numbers, *shares])


def _measured(at: Floats) -> Measured:
    numbers = np.exp(at).tolist()
    *_, inside, between, tree, pair, switch = numbers
    protocols = []
    for name, place in (("small", 0), ("middle", 4), ("large", 8)):
        startup_s, inside_hop_s, between_hop_s, share = numbers[place : place + 4]
        protocols.append(
            Protocol(
                name=name,
                startup_s=startup_s,
                inside_hop_s=inside_hop_s,
                between_hop_s=between_hop_s,
                inside_share=min(inside * share, MOST_SHARE),
                between_share=min(between * share, MOST_SHARE),
            )
        )
    return Measured(
        protocols=tuple(protocols),
        tree_share=min(tree, MOST_SHARE),
        pair_share=min(pair, 1.0),
        switch_share=min(switch, MOST_SHARE),
        spread=0.0,
        source="",
    )


def _with_rows(cluster: Cluster, fit: _Fit) -> Measured:
    """Return a fit with its rows' distance from it, and the spread of the rows that it takes."""
    measured, rows = fit.measured, fit.rows
    shown, off = [], []
    for row in rows:
        off += np.log(row.times_s / ways_s(measured, row.needs, row.sizes)[1].min(axis=0)).tolist()
        of_cluster = needs(row.table.op, cluster, row.table.workers, measured)
        beyond = row.times_s / ways_s(measured, of_cluster, row.sizes)[1].min(axis=0)
        shown.append(
            Shown(
                op=row.table.op,
                workers=row.table.workers,
                bytes=tuple(int(size) for size in row.sizes),
                times=tuple(round(float(value), 4) for value in beyond),
            )
        )
    deviation = 1.4826 * float(np.median(np.abs(off)))
    source = ", ".join(dict.fromkeys(row.table.source for row in rows))
    return replace(
        measured, shown=tuple(shown), source=source, spread=round(max(deviation, _LEAST_SPREAD), 4)
    )
