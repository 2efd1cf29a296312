"""The findings of the scripts in this folder, as data: one file `results/NAME.json` for each claim.

The site's tables, the README's figures and the tests read these files. A script ends with

    results.write("netx", claim=..., anchor=..., summary=..., cases=..., ...)

which adds the machine, the date, the command and the commit. Shares (errors, coverage) are numbers
between 0 and 1 and not percent.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from validation.tables import is_published

FOLDER = Path(__file__).with_name("results")
HERE = "this script"  # the source of a result that its own script wrote
Cell: TypeAlias = str | int | float | bool | None


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows of a table, as printed."""

    columns: list[str]
    rows: list[list[Cell]]
    title: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row of {len(row)} cells below {len(self.columns)} columns")


class Result(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One claim, its finding, and the reference that it was compared with."""

    claim: str  # The claim in one sentence.
    anchor: str  # The reference: somebody else's numbers, or a measurement.
    summary: str  # The finding in a few words, for the first table of the site.
    measure: str  # The quantity of median, p90 and worst; "" if there are none.
    cases: int
    median: float | None
    p90: float | None
    worst: float | None
    coverage: float | None  # share of the true values that lie in their predicted interval
    machine: str
    date: str  # year-month-day
    command: str
    commit: str  # "not recorded" if it is unknown
    source: str  # HERE, or where the figures were published or printed before this file existed
    tables: list[Table] = []

    def __post_init__(self) -> None:
        datetime.strptime(self.date, "%Y-%m-%d")
        if self.cases < 1:
            raise ValueError(f"cases: expected at least 1, got {self.cases}")
        for name in ("coverage",):
            share = getattr(self, name)
            if share is not None and not 0 <= share <= 1:
                raise ValueError(f"{name}: expected a share between 0 and 1, got {share}")


def spread(errors: Sequence[float]) -> dict[str, float]:
    """Return the median, the 90th percentile and the largest of the errors' absolute values."""
    sizes = np.abs(errors)
    return {
        "median": float(np.median(sizes)),
        "p90": float(np.quantile(sizes, 0.9)),
        "worst": float(sizes.max()),
    }


def write(
    name: str,
    given: Path | None = None,
    ours: str = "",
    /,
    *,
    tables: Sequence[Table] = (),
    **found: Any,
) -> None:
    """Write a script's findings, and add machine, date, command and commit.

    - `given`: the place of the tables that the script read, and `ours` the name of the published
      ones below the shared data. Other tables leave the result as it is.
    """
    if given is not None and not is_published(given, ours):
        return
    unknown: dict[str, Any] = dict.fromkeys(("median", "p90", "worst", "coverage"))
    result = Result(
        **{"measure": "", **unknown, **found},
        machine=machine(),
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        command=command(),
        commit=commit(),
        source=HERE,
        tables=list(tables),
    )
    path = FOLDER / f"{name}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


def renew(name: str, **found: Any) -> None:
    """Replace a script's findings; claim, anchor and measure stay those of the file."""
    before = read(name)
    kept = {field: getattr(before, field) for field in ("claim", "anchor", "measure")}
    write(name, **{**kept, **found})


def rows(lines: Sequence[str]) -> list[list[Cell]]:
    """Return the cells of printed Markdown rows."""
    return [[cell.strip() for cell in line.strip().strip("|").split(" |")] for line in lines]


def split(counted: str, kinds: Sequence[tuple[str, Sequence[float], Sequence[bool]]]) -> Table:
    """Print the figures of fitted and of judged cells, and return them as a table.

    A kind has a name, its errors, and whether each interval holds. One without cells has no row.
    """
    lines = []
    for name, errors, holds in kinds:
        if errors:
            figures = spread(errors)
            lines.append(
                f"| {name} | {len(errors)} | {figures['median']:.1%} | {figures['p90']:.1%} | "
                f"{figures['worst']:.1%} | {sum(holds)} of {len(holds)} |"
            )
    columns = ["cells are", counted, "median", "p90", "worst", "in their interval"]
    print("\n".join(["", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *lines]))
    return Table(columns=columns, rows=rows(lines))


def said_of(errors: Sequence[float], holds: Sequence[bool] = ()) -> dict[str, Any]:
    """Return the summary, the spread and the coverage of predictions."""
    figures = spread(errors)
    summary = f"median error {figures['median']:.1%}, worst {figures['worst']:.1%}"
    if not holds:
        return {"summary": summary, "cases": len(errors), **figures}
    return {
        "summary": f"{summary}; {sum(holds)} of {len(holds)} in their interval",
        "cases": len(errors),
        "coverage": sum(holds) / len(holds),
        **figures,
    }


def read(name: str) -> Result:
    """Read one result."""
    return msgspec.json.decode((FOLDER / f"{name}.json").read_bytes(), type=Result)


def names() -> list[str]:
    """Return the names of all results."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def machine() -> str:
    """Describe this machine in a line."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    kernel, python = platform.release().split("-")[0], platform.python_version()
    processors = f"{os.cpu_count()} processors ({models[0] if models else platform.machine()})"
    return f"{processors}, Linux {kernel}, Python {python}"


def command() -> str:
    """Return the running command, as it is typed in a checkout."""
    script = Path(sys.argv[0]).stem
    words = [_as_typed(word) for word in sys.argv[1:]]
    return shlex.join([".venv/bin/python", "-m", f"validation.{script}", *words])


def _as_typed(word: str) -> str:
    """Return a word of the command; DIRECTORY replaces a path that only this machine has."""
    if not os.path.isabs(word):
        return word
    # Shared data lie beside a checkout, wherever that is.
    shared = FOLDER.parents[2] / "shared"
    return os.path.relpath(word) if Path(word).is_relative_to(shared) else "DIRECTORY"


def commit() -> str:
    """Return the checkout's commit, with a mark if files other than results differ from it."""
    head = _git("rev-parse", "--short=7", "HEAD") or "unknown"
    changed = _git(
        "status", "--porcelain", "--untracked-files=no", "--", ":/", f":(exclude){FOLDER}"
    )
    return f"{head}-dirty" if changed else head


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", *words], cwd=FOLDER.parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()
