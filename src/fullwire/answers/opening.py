"""The forms in which a run is given: as a value, by its path, or with its ranks left on disk."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from fullwire.errors import UsageError
from fullwire.files import name_of, path_of
from fullwire.run.facts import Facts
from fullwire.run.placement import shares_one_host
from fullwire.run.run import TABLES, Run, Spans
from fullwire.units import bits_per_second, show_rate

if TYPE_CHECKING:
    from fullwire.run.store import ByRanks

LARGE = 250_000  # spans: some 100 MB with their timelines


@dataclass(frozen=True, eq=False, slots=True)
class Opened:
    """A run, or the outline of a large one, with spans that are read some ranks at a time."""

    run: Run
    _by_ranks: ByRanks | None = None

    def parts(self) -> Iterator[Spans] | None:
        """Yield all spans, some ranks at a time; None if the run holds them."""
        return None if self._by_ranks is None else self._by_ranks.spans()


RunLike: TypeAlias = Run | str | Path | Opened  # a run, the path of one, or a workload's name


def write(run: Run | str | Path, path: str | Path, *, replace: bool = False) -> Path:
    """Write a run so that it appears whole or not at all, and return where.

    - `run`: a run, or the path of one, of a trace, or the name of a workload.
    - `path`: the directory that the run becomes.
    - `replace`: a run that exists is replaced.

        fw.write(fw.replay("vgg16@v100", workers=8, bandwidth="10Gbps"), "predicted.run")
    """
    from fullwire.importers import read
    from fullwire.run.store import write as write_run

    return write_run(read(run) if isinstance(run, str | Path) else run, path, replace=replace)


def with_own_time(found: Opened) -> Run:
    """Return a run for predictions, with the T1 of an outline taken from all of its spans."""
    if (parts := found.parts()) is not None:
        from fullwire.timeline.alone import alone_by_account

        alone_by_account(found.run, parts)
    return found.run


def many(given: RunLike | Sequence[RunLike]) -> tuple[RunLike, ...]:
    """Return runs that were given one by one or as a sequence; a path is one."""
    if isinstance(given, Iterable) and not isinstance(given, str):
        return tuple(given)
    return (given,)


def name_of_run(given: RunLike, run: Run) -> str:
    """Return the path by which a run was given, or else its source."""
    return name_of(given) if isinstance(given, str | Path) else run.provenance.source


def opened(given: RunLike) -> Opened:
    """Open a run; a large one that was written rank by rank becomes an outline.

    An outline has all data of a typical step. Samples are compared with timelines, so a run with
    samples is opened whole.
    """
    if isinstance(given, Opened):
        return given
    if isinstance(given, Run):
        return Opened(given)
    from fullwire.importers import read

    place = path_of(given, "read")
    if os.path.isdir(place):  # a workload is a name, which needs none of this
        from fullwire.run.store import by_ranks, is_run
        from fullwire.timeline.utilization import SAMPLES, missing_tables

        found = by_ranks(place, LARGE) if is_run(place) else None
        if found is not None and len(missing_tables(found.outline)) == len(SAMPLES):
            return Opened(found.outline, found)
    return Opened(read(given))


def completed(given: RunLike, line_rate: str | float | None) -> Opened:
    """Open a run, and give it the line rate of its links if it lacks one.

    A useless rate is refused: one that contradicts the run's own, or one for ranks that share a
    host.
    """
    found = opened(given)
    if line_rate is None:
        return found
    run, rate_bps = found.run, bits_per_second(line_rate, "line rate")
    name = name_of_run(given, run)
    known_bps = run.facts.line_rate_bps
    if run.provenance.origin == "modelled":
        raise UsageError(f"line rate: expected a recorded run, got the built-in workload {name}")
    if shares_one_host(run):
        raise UsageError(f"line rate: expected ranks on several hosts, all of {name} share one")
    if known_bps not in (None, rate_bps):
        raise UsageError(
            f"line rate: expected {show_rate(known_bps)}, as {name} has it, "
            f"got {show_rate(rate_bps)}"
        )
    return replace(found, run=with_line_rate(run, rate_bps))


def with_line_rate(run: Run, rate_bps: float | None) -> Run:
    """Return a run with the line rate of its links, if one is given and it lacks its own."""
    if rate_bps is None or run.facts.line_rate_bps is not None or shares_one_host(run):
        return run
    return replace(run, facts=run.facts | Facts(line_rate_bps=rate_bps))


def are_one_recording(run: Run, other: Run) -> bool:
    """Say whether two runs that were opened apart hold the same facts and the same rows.

    Equal times of steps are not enough: simulations of two networks may have them.
    """
    return (
        run is not other
        and (run.facts, run.gaps) == (other.facts, other.gaps)
        and all(
            np.array_equal(
                column, getattr(other, table).columns()[name], equal_nan=column.dtype.kind == "f"
            )
            for table in TABLES
            for name, column in getattr(run, table).columns().items()
        )
    )


def refuse_copies(sides: Sequence[Sequence[Run]]) -> None:
    """Refuse copies of a recording, which would show less noise than there is."""
    for side, which in zip(sides, ("before", "after"), strict=True):
        seen: dict[bytes, int] = {}
        for number, run in enumerate(side, 1):
            marks = (run.spans.lane == "host") & (run.spans.name == "step")
            times_ns = np.stack([run.spans.start_ns[marks], run.spans.end_ns[marks]])
            if (once := seen.setdefault(times_ns.tobytes(), number)) != number and times_ns.size:
                raise UsageError(
                    f"compare: recordings {once} and {number} {which} are one and the same: "
                    "expected each once, since a copy tells nothing about noise"
                )
