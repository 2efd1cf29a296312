"""Questions to old runs: their answers, stored as files, and the comparison of two answers.

    python -m tests.old_answers NAME...
    python -m tests.old_answers --all

asks the questions of these answers again, or all of them, and writes their files in `data/answers`
anew, from the root of a checkout. With --all, answers without a question go. Look at the difference
that git shows before you commit it. A number may change only if an answer was wrong. A
`.txt` may change if its words were changed on purpose. Runs and inputs are never written again,
because they test that files of older programs still open (`data/README.md` says how).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import math
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fullwire.cli import main

DATA = Path(__file__).with_name("data")
ANSWERS = DATA / "answers"
RELATIVE, ABSOLUTE = 1e-9, 1e-12  # the second is for values that are 0 except for rounding
# Words for people: two answers need only have the same number of them.
REGISTRIES = {"workloads", "clusters"}
WORDS = {
    "audit",
    "change",
    "changes",
    "cluster_sentences",
    "missing",
    "reasons",
    "remarks",
    "sentence",
    "sentences",
    "setting",
    "warnings",
}


def questions() -> dict[str, str]:
    """Return the questions, by the name of the file that holds the answer."""
    lines = (DATA / "questions.txt").read_text().splitlines()
    asked = (line.partition(": ") for line in lines if line and not line.startswith("#"))
    return {name: question for name, _, question in asked}


def old_runs() -> list[Path]:
    """Return the runs of all formats."""
    return sorted(path.parent.relative_to(DATA) for path in DATA.glob("format-*/*.run/run.json"))


def answer(question: str) -> str:
    """Ask the command line, in this process, and return its output."""
    said, refused = io.StringIO(), io.StringIO()
    often = gc.get_threshold()
    with (
        _among_the_data(),
        patch.dict(os.environ, COLUMNS="80"),
        patch.object(sys, "argv", ["fullwire", *shlex.split(question)]),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(refused),
    ):
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise AssertionError(f"fullwire {question}: {refused.getvalue()}") from None
        finally:
            gc.set_threshold(*often)
    return said.getvalue()


@contextlib.contextmanager
def _among_the_data() -> Iterator[None]:
    """Work in the folder of the questions' files, so that answers hold no path of a checkout."""
    before = Path.cwd()
    os.chdir(DATA)
    try:
        yield
    finally:
        os.chdir(before)


def differences(expected: Any, got: Any, where: str = "") -> Iterator[str]:
    """Yield the differences from the expected answer; keys that came since then do not count."""
    if isinstance(expected, dict) and isinstance(got, dict):
        for key, value in expected.items():
            inside = f"{where}.{key}"
            if key not in got:
                yield f"{inside}: is gone, it was {value!r}"
            elif key in REGISTRIES:  # entries that came since do not count
                names = {entry["name"] for entry in value}
                known = [entry for entry in got[key] if entry["name"] in names]
                yield from differences(value, known, inside)
            elif key in WORDS:
                yield from _words(value, got[key], inside)
            else:
                yield from differences(value, got[key], inside)
    elif isinstance(expected, list) and isinstance(got, list):
        if len(expected) != len(got):
            yield f"{where}: was {len(expected)} long, and is {len(got)}: {expected!r}, {got!r}"
        for number, (one, other) in enumerate(zip(expected, got, strict=False)):
            yield from differences(one, other, f"{where}[{number}]")
    elif not _alike(expected, got):
        yield f"{where}: was {expected!r}, and is {got!r}"


def _words(expected: Any, got: Any, where: str) -> Iterator[str]:
    if type(expected) is not type(got) or bool(expected) != bool(got):
        yield f"{where}: was {expected!r}, and is {got!r}"
    elif isinstance(expected, list) and len(expected) != len(got):
        yield f"{where}: had {len(expected)} entries, and has {len(got)}: {expected!r}, {got!r}"


def _alike(expected: Any, got: Any) -> bool:
    if isinstance(expected, bool) or isinstance(got, bool):
        return expected is got
    if isinstance(expected, int | float) and isinstance(got, int | float):
        return math.isclose(expected, got, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return bool(expected == got)


def write_answers(given: list[str]) -> None:
    """Ask the questions of the named answers, and write the answers."""
    parser = argparse.ArgumentParser(prog="python -m tests.old_answers")
    parser.add_argument("names", nargs="*", metavar="NAME", help="an answer, as explain-lab.json")
    parser.add_argument("--all", action="store_true", help="write every answer")
    chosen = parser.parse_args(given)
    asked = questions()
    for name in chosen.names:
        if name not in asked:
            parser.error(f"expected the name of an answer in {DATA / 'questions.txt'}, got {name}")
    if bool(chosen.names) == chosen.all:
        parser.error("expected names of answers or --all")
    ANSWERS.mkdir(exist_ok=True)
    for path in ANSWERS.iterdir():
        if chosen.all and path.name not in asked:
            path.unlink()
    for name in chosen.names or asked:
        text = answer(asked[name])
        if name.endswith(".json"):
            text = json.dumps(json.loads(text), indent=1, ensure_ascii=False) + "\n"
        (ANSWERS / name).write_text(text)


if __name__ == "__main__":
    write_answers(sys.argv[1:])
