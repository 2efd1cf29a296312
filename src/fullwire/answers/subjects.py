"""Runs, prepared for predictions: opened, named, and with the transport that they show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fullwire.answers.conditions import OneOrMany, count, several
from fullwire.answers.opening import Opened, RunLike, completed, many, name_of_run, with_line_rate
from fullwire.errors import UsageError
from fullwire.files import name_of
from fullwire.importers import tables
from fullwire.run.placement import shares_one_host
from fullwire.run.run import Run
from fullwire.simulation.calibrate import Calibration, calibrated, line_rate_bps
from fullwire.simulation.grid import Subject
from fullwire.simulation.subject import plain_subject
from fullwire.simulation.sweep import with_residue
from fullwire.simulation.transport import TableTransport, Transport, full_transport
from fullwire.timeline.timeline import check_collectives
from fullwire.units import bits_per_second, shown
from fullwire.workloads import MOST_SAMPLES

_RATE_UNKNOWN = "the line rate of its links is not known"


def named(
    runs: RunLike | Sequence[RunLike], line_rate: str | float | None = None
) -> list[tuple[str, Run]]:
    """Open runs, each with the name that it was given, or else its source.

    `line_rate` is the rate of their links, for runs that lack it.
    """
    asked = many(runs)
    if not asked:
        raise UsageError("what-if: expected at least one run")
    found = []
    for each in asked:  # A run in memory has its source as its name.
        run = completed(each, line_rate).run
        check_collectives(run)
        found.append((name_of_run(each, run), run))
    if len({name for name, _ in found}) < len(found):
        return [(f"{name} ({number})", run) for number, (name, run) in enumerate(found, 1)]
    return found


def with_batches(
    runs: RunLike | Sequence[RunLike], batch: OneOrMany
) -> RunLike | Sequence[RunLike]:
    """Return built-in workloads with each of these batches; a recorded run has its own."""
    if batch is None:
        return runs
    sizes = several(batch, lambda value: count(value, "batch", MOST_SAMPLES))
    given = [runs] if isinstance(runs, str | Path | Run | Opened) else list(runs)
    for each in given:
        if not isinstance(each, str) or "@" not in each or ":" in each or Path(each).exists():
            raise UsageError(
                "batch: expected built-in workloads such as vgg16@v100, whose steps it can change, "
                f"got {shown(name_of(each) if isinstance(each, str | Path) else 'a run')}"
            )
    return [f"{each}:{size}" for each in given for size in sizes]


class Transports:
    """The transports by name; a measured one is fitted when it is first used."""

    def __init__(
        self,
        runs: Sequence[Run],
        calibrate: RunLike | Sequence[RunLike],
        names: tuple[str, ...] = (),
        line_rate: str | float | None = None,
    ) -> None:
        others = [run for _, run in named(calibrate)] if calibrate else []
        if line_rate is not None:  # Of the same cluster; where links differ, runs know theirs.
            rate_bps = bits_per_second(line_rate, "line rate")
            others = [with_line_rate(run, rate_bps) for run in others]
        self._runs = [*runs, *others]
        self._names = names or tuple(run.provenance.source for run in runs)
        self.calibration: Calibration | None = None

    def named(self, text: str) -> Transport:
        """Return a transport by its name."""
        if text != "measured" and Path(text).is_file():
            found = tables(text)
            table = next((each for each in found if each.op == "allreduce"), found[0])
            if table.workers == 1 and not any(row.bus_gb_s for row in table.rows):
                raise UsageError(
                    f"{text}: expected a table of several ranks: one alone sends nothing"
                )
            return TableTransport(name=Path(text).name, points=table.points())
        if text != "measured":
            return full_transport(text)
        if self.calibration is None:
            why = [_shows_no_transport(run) for run in self._runs]
            if None not in why:
                pairs = zip(self._names, why, strict=False)
                told = "; ".join(f"{name}: {reason}" for name, reason in pairs)
                give = "give it with --line-rate, " if _RATE_UNKNOWN in why else ""
                raise UsageError(
                    f"{told}. So nothing is known about the transport: {give}name a run on links "
                    "of a known rate with --calibrate, or ask for --transport full"
                )
            self.calibration = calibrated(self._runs)
        return self.calibration.transport


def _shows_no_transport(run: Run) -> str | None:
    """Return why a run hides its transport; None if it may show it."""
    if (run.facts.workers or 1) < 2:
        return "it had one worker"
    if shares_one_host(run):
        return "its ranks share one host, and use no link"
    if line_rate_bps(run) is None:
        return _RATE_UNKNOWN
    if not len(run.collectives):
        return "it has no collectives"
    return None


def subject_of(name: str, run: Run, found: Transports) -> Subject:
    """Return a run's typical step, with the time that the measured transport leaves unexplained."""
    subject = plain_subject(name, run)
    if found.calibration is None:
        return subject
    return with_residue(subject, found.calibration.transport)
