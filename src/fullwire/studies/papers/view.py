"""A study for people and programs: the table of claims, and the files of its directory."""

from __future__ import annotations

import csv
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullwire.errors import UsageError
from fullwire.report.terminal import print_notes, say
from fullwire.studies.papers.pictures import draw_figure

if TYPE_CHECKING:
    from fullwire.studies.papers import Study
    from fullwire.studies.papers.figures import Row

_WIDTH = 100
_MARKS = {"yes": "holds", "no": "does NOT hold", "in part": "holds in part"}


def write_study(result: Study) -> list[Path]:
    """Write claims.csv, trials.csv, predictions.csv and each figure as CSV and PNG."""
    place = result.directory
    try:
        written = [
            _csv([asdict(claim) for claim in result.claims], place / "claims.csv"),
            _csv(list(_trial_rows(result)), place / "trials.csv"),
            _csv(list(_prediction_rows(result)), place / "predictions.csv"),
        ]
        for figure in result.figures:
            written.append(_csv(figure.rows, place / f"{figure.name}.csv"))
            picture = place / f"{figure.name}.png"
            draw_figure(figure, picture)
            if figure.rows:
                written.append(picture)
    except OSError as error:
        raise UsageError(
            f"{error.filename or place}: cannot be written: {error.strerror}"
        ) from None
    return written


def _csv(rows: Sequence[Row], path: Path) -> Path:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    return path


def _trial_rows(result: Study) -> Iterator[dict[str, Any]]:
    for measured in result.measured:
        row = asdict(measured)
        trial = row.pop("trial")
        ring = row.pop("sends_to")
        yield {
            "trial": measured.trial.name,
            **trial,
            **row,
            "network_utilization": measured.network_utilization,
            "busy_utilization": measured.busy_utilization,
            "sends_to": "" if ring is None else " ".join(map(str, ring)),
        }


def _prediction_rows(result: Study) -> Iterator[dict[str, Any]]:
    for predicted in result.predicted:
        row = asdict(predicted)
        row.pop("trial")
        yield {
            "trial": predicted.trial.name,
            **row,
            "error": predicted.error,
            "holds": predicted.holds,
        }


def study_object(result: Study, written: Sequence[Path]) -> dict[str, Any]:
    """Return a study as JSON takes it."""
    return {
        "claims": [asdict(claim) for claim in result.claims],
        "trials": list(_trial_rows(result)),
        "predictions": list(_prediction_rows(result)),
        "explained": [asdict(explained) for explained in result.explained],
        "failed": [{"trial": trial.name, "problem": problem} for trial, problem in result.failed],
        "files": [str(path) for path in written],
    }


def print_study(result: Study, written: Sequence[Path]) -> None:
    """Print the claims, what failed, and where the figures are."""
    paper = ""
    for claim in result.claims:
        if claim.paper != paper:
            paper = claim.paper
            say(paper)
        say(f"  {_MARKS.get(claim.holds, claim.holds).ljust(15)} {claim.claim}")
        for words in (claim.measured, claim.why):
            for line in textwrap.wrap(words, _WIDTH - 18) if words != "-" else ():
                say(f"{'':18}{line}")
    say("")
    print_notes(f"{trial.name} failed: {problem}" for trial, problem in result.failed)
    figures = [path for path in written if path.suffix == ".png"]
    tables = [path for path in written if path.suffix == ".csv"]
    say(f"{len(figures)} figures and {len(tables)} tables in {result.directory}:")
    for path in (*figures, *tables[:1]):
        say(f"  {path}")
