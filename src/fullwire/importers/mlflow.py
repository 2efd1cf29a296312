"""Read the folder of an MLflow run (`mlruns/EXPERIMENT/RUN`): its metrics.

    https://mlflow.org/docs/latest/ml/tracking    (mlflow/store/tracking/file_store.py)

Each metric has a file of its name below `metrics/`. A line is one value: the time in milliseconds,
the value, and the step. Some versions add columns for a data set.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from fullwire.errors import DamagedInput, UsageError
from fullwire.files import lines_of
from fullwire.importers._format import (
    LIKELY,
    Format,
    Likeness,
    MetricRow,
    near_miss,
    run_of_metrics,
)
from fullwire.run.run import Run
from fullwire.units import NO_NUMBER, NUMBER

_LINE = re.compile(
    rb"(?P<ms>[1-8]?\d{12}) "
    rb"(?P<value>" + rf"{NUMBER}|{NO_NUMBER}".encode() + rb")"
    rb" (?P<step>-?\d{1,18})(?: [^\r\n]{0,200})?\r?\n?"
)
_NO_STEP = re.compile(rb"[1-8]?\d{12} [-+\d.eE]{1,60}\r?")
_LONGEST_LINE = 1024
_MOST_LINES = 10_000_000  # of a file


def looks_like(beginning: bytes) -> Likeness:
    """Say whether a file with this beginning holds the values of a metric."""
    first = beginning.split(b"\n", 1)[0]
    if _LINE.fullmatch(first):
        return LIKELY
    return near_miss(_NO_STEP.fullmatch(first), "the step behind each time and value")


def read_mlflow(paths: Sequence[Path]) -> Run:
    """Read the files of one run's metrics."""
    rows: list[MetricRow] = []
    problems: list[str] = []
    homes = {  # the `metrics` folder of each file, or the file's own folder
        next((parent for parent in path.parents if parent.name == "metrics"), path.parent)
        for path in paths
    }
    # Ultralytics calls its metrics `metrics/NAME`: such a folder lies below the run's own.
    homes = {home for home in homes if homes.isdisjoint(home.parents)}
    if len(homes) > 1:
        raise UsageError(
            f"{paths[0]}: expected one run of MLflow, got {len(homes)}: name the folder of one"
        )
    home = homes.pop()
    for path in sorted(paths):
        name, odd = path.relative_to(home).as_posix(), 0
        for text in lines_of(path, most=_MOST_LINES, longest=_LONGEST_LINE):
            line = _LINE.fullmatch(text)
            if line is None:
                odd += bool(text.strip())
                continue
            rows.append((int(line["step"]), name, float(line["value"]), int(line["ms"]) * 10**6))
        if odd:
            problems.append(f"{name}: {odd:,} lines are no value of a metric, and left out")
    if not rows:
        raise DamagedInput(paths[0], "expected lines of time, value and step; got none")
    return run_of_metrics(paths[0], rows, problems)


FORMAT = Format(
    key="mlflow",
    label="metrics of MLflow",
    looks_like=looks_like,
    read=lambda files, options: read_mlflow(files),
    is_of_many=True,
    tells=4,
)
