"""Runs as questions are asked of them: a value, a place, or one whose ranks stay on disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from fullwire.files import path_of
from fullwire.importers import read
from fullwire.run.run import Run, Spans
from fullwire.run.store import ByRanks, by_ranks, is_run
from fullwire.run.store import write as write_run
from fullwire.timeline.utilization import SAMPLES, missing_tables

LARGE = 250_000  # spans: some 100 MB with their timelines


@dataclass(frozen=True, eq=False, slots=True)
class Opened:
    """A run, or the outline of a large one, whose spans are read some ranks at a time."""

    run: Run
    _by_ranks: ByRanks | None = None

    def parts(self) -> Iterator[Spans] | None:
        """Go through all spans, some ranks at a time; None where they are in the run."""
        return None if self._by_ranks is None else self._by_ranks.spans()


RunLike: TypeAlias = Run | str | Path | Opened  # a run, where one is, or the name of a workload


def write(run: Run | str | Path, path: str | Path, *, replace: bool = False) -> Path:
    """Write a run so that it appears whole or not at all, and return where.

    - `run`: a run, or the path of one, of a trace, or the name of a workload.
    - `path`: the directory that the run becomes.
    - `replace`: a run that exists is replaced.

        fw.write(fw.replay("vgg16@v100", workers=8, bandwidth="10Gbps"), "predicted.run")
    """
    return write_run(read(run) if isinstance(run, str | Path) else run, path, replace=replace)


def many(given: RunLike | Sequence[RunLike]) -> tuple[RunLike, ...]:
    """Return runs that were given one by one or as a sequence; a path is one."""
    if isinstance(given, Iterable) and not isinstance(given, str):
        return tuple(given)
    return (given,)


def opened(given: RunLike) -> Opened:
    """Open a run; of one that was written rank by rank and is large, an outline.

    An outline has all that a typical step is made of. Samples are held against timelines, so a run
    that has any is opened whole.
    """
    if isinstance(given, Opened):
        return given
    if isinstance(given, Run):
        return Opened(given)
    place = path_of(given, "read")
    if is_run(place):
        found = by_ranks(place, LARGE)
        if found is not None and len(missing_tables(found.outline)) == len(SAMPLES):
            return Opened(found.outline, found)
    return Opened(read(given))
