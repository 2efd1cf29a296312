"""Which files of a folder are read, which are refused and why, and which are read wrongly?

    python -m validation.corpus FOLDER [--truth FILE.csv]

Each file is read by itself, without --format. The truth has a line for each known fact of a file:
`path,fact,value`. A fact is one of a run's (`workers`), the rows of a table (`rows.spans`), the
operations of the collectives (`ops`), or `format`. The script fetches nothing. It exits with 1 if a
file of the truth is refused, or read differently.
"""

from __future__ import annotations

import csv
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from fullwire.errors import FullwireError
from fullwire.files import files_in
from fullwire.importers import FORMATS, read
from fullwire.importers._recognise import kinds_of
from fullwire.run.run import Run
from validation import arguments

Truth = Mapping[str, Mapping[str, str]]  # by path below the folder, by fact


def main() -> int:
    """Print a line for each file, then how many were read, refused and wrong."""
    parser = arguments.parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--truth", type=Path)
    given = parser.parse_args()
    counts: Counter[str] = Counter()
    for verdict, path, words in judged(given.folder, truth_of(given.truth)):
        counts[verdict] += 1
        print(f"{verdict:8}{path}: {words}", flush=True)
    print(", ".join(f"{counts[each]:,} {each}" for each in ("read", "refused", "wrong")))
    return 1 if counts["wrong"] else 0


def judged(folder: Path, truth: Truth) -> Iterator[tuple[str, str, str]]:
    """Yield the files, each with its result (read, refused or wrong) and the reason."""
    for path in files_in(folder):
        name = str(path.relative_to(folder))
        known = truth.get(name, {})
        try:
            [kind] = kinds_of(FORMATS, path)
            run = read(path)
        except FullwireError as error:
            words = " ".join(str(error).split()).removeprefix(f"{path}: ")
            yield ("wrong" if known else "refused"), name, words
            continue
        facts = facts_of(kind, run)
        lies = [
            f"{fact} is {facts.get(fact, 'absent')}, expected {value}"
            for fact, value in known.items()
            if facts.get(fact) != value
        ]
        rows = ", ".join(f"{len(table):,} {each}" for each, table in run.tables() if len(table))
        yield ("wrong", name, "; ".join(lies)) if lies else ("read", name, f"{kind}, {rows}")


def facts_of(kind: str, run: Run) -> dict[str, str]:
    """Return the facts of a run that a truth may contain, as text."""
    return {
        **{name: str(value) for name, value in run.facts.known().items()},
        **{f"rows.{name}": str(len(table)) for name, table in run.tables()},
        "format": kind,
        "ops": " ".join(sorted(set(run.collectives.op))),
    }


def truth_of(path: Path | None) -> Truth:
    """Read the known facts of the files."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    if path is not None:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                found[row["path"]][row["fact"]] = row["value"]
    return found


if __name__ == "__main__":
    sys.exit(main())
