"""Console blocks of the documentation: runs their commands, and compares or writes their output.

    .venv/bin/python -m docs.making.blocks README.md docs/tutorial.md    # write the output anew

A block begins with "```console" and holds commands behind "$ ", each with the output that it
prints. A line of three dots leaves output out. The blocks of a page are one session: they run in
order, in one folder that holds a copy of examples/.

Output is compared word by word. Where a command measures (the lab, record, bench, study) or asks
about a run that was measured, numbers with a unit, shares and decimals may differ.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ELIDED = "..."
WIDTH = "80"  # of the terminal that blocks are written for
LONGEST_S = 300.0
_BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
_MEASURING = re.compile(r"fullwire (?:lab|record|bench|study|tune|watch|doctor)\b|torchrun\b")
_UNITS = "ns|us|ms|s|min|kB|MB|GB|TB|B|bps|kbps|Mbps|Gbps|Tbps|KiB|MiB|GiB|x"
_RANGE = r"(?<=[ num]s \()\d[\d,.]*-\d[\d,.]*(?=\))"  # of times: its ends may be whole numbers
_NUMBER = re.compile(rf"{_RANGE}|[-+]?\d[\d,]*(?:\.\d+)?\s?(?:(?:{_UNITS})\b|%)|[-+]?\d+\.\d+")
_SOMETIMES = re.compile(r"^  (?:longer steps|pauses) .*\n", re.MULTILINE)  # of busy machines
_DRAWN = re.compile(r"[·█▏▎▍▌▋▊▉░▒▓◀]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One command of a block, and the output that the page shows below it."""

    command: str
    output: str
    page: Path

    def pieces(self, *, measured: bool) -> list[list[str]]:
        """Return the words of each stretch of output between lines of three dots."""
        stretches: list[list[str]] = [[]]
        for line in self.output.splitlines():
            if line.strip() == ELIDED:
                stretches.append([])
            else:
                stretches[-1].append(line)
        return [
            words("".join(f"{line}\n" for line in lines), measured=measured)
            for lines in stretches
            if lines
        ]

    @property
    def measures(self) -> bool:
        """Whether the command measures, or asks about a run that a command before it recorded."""
        return bool(_MEASURING.match(self.command)) or ".run" in self.command


@dataclass(frozen=True, slots=True)
class Session:
    """The commands of one page."""

    page: Path
    commands: tuple[Shown, ...]

    @property
    def measures(self) -> bool:
        """Whether a command measures, so that numbers differ from run to run."""
        return any(each.measures for each in self.commands)


def session(page: Path) -> Session:
    """Read the console blocks of a page."""
    found = [
        shown for block in _BLOCK.findall(page.read_text()) for shown in _of_block(block, page)
    ]
    return Session(page, tuple(found))


def _of_block(block: str, page: Path) -> Iterator[Shown]:
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        lines = part.splitlines(keepends=True)
        command = lines.pop(0)
        while command.rstrip().endswith("\\"):
            command = command.rstrip()[:-1] + lines.pop(0).strip() + "\n"
        yield Shown(command=command.strip(), output="".join(lines), page=page)


def words(text: str, *, measured: bool) -> list[str]:
    """Split output into words; in measured output, make all numbers and drawings alike."""
    if measured:
        text = _DRAWN.sub(" ", _NUMBER.sub(" # ", _SOMETIMES.sub("", text)))
    return text.split()


def differences(shown: Shown, printed: str) -> list[str]:
    """Return the stretches of a page's output that are missing from the command's output."""
    actual, reached, missing = words(printed, measured=shown.measures), 0, []
    for piece in shown.pieces(measured=shown.measures):
        place = _find(piece, actual, reached)
        if place is None:
            missing.append(" ".join(piece))
        else:
            reached = place + len(piece)
    return missing


def _find(piece: Sequence[str], actual: Sequence[str], start: int) -> int | None:
    for place in range(start, len(actual) - len(piece) + 1):
        if list(actual[place : place + len(piece)]) == list(piece):
            return place
    return None


def workplace(folder: Path) -> None:
    """Prepare the folder in which a session runs."""
    shutil.copytree(ROOT / "examples", folder / "examples")


def printed_by(command: str, folder: Path) -> str:
    """Run one command in a shell and return both streams, as a terminal shows them."""
    environment = os.environ | {"COLUMNS": WIDTH}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    return done.stdout


def rewritten(page: Path) -> str:
    """Return a page with its commands' output of today, and with its omissions."""
    text = page.read_text()
    with tempfile.TemporaryDirectory() as name:
        workplace(Path(name))
        for shown in session(page).commands:
            printed = printed_by(shown.command, Path(name))
            kept = _with_gaps(shown.output, printed)
            text = text.replace(shown.output, kept, 1) if shown.output.strip() else text
    return text


def _with_gaps(before: str, printed: str) -> str:
    """Repeat the page's omissions: a line is found again by its first two words.

    Between lines without an omission all that was printed stays, as the rest of a sentence does.
    """
    if ELIDED not in [line.strip() for line in before.splitlines()]:
        return printed
    lines, kept, reached = printed.splitlines(), [], 0
    is_after_gap = True
    for line in before.splitlines():
        if line.strip() == ELIDED:
            kept.append(line)
            is_after_gap = True
            continue
        head = words(line, measured=True)[:2]
        place = next(
            (n for n in range(reached, len(lines)) if words(lines[n], measured=True)[:2] == head),
            None,
        )
        if place is not None:
            kept += lines[place if is_after_gap else reached : place + 1]
            reached, is_after_gap = place + 1, False
    return "\n".join(kept) + "\n"


def main() -> None:
    """Write the output of the named pages anew."""
    for name in sys.argv[1:]:
        page = Path(name).resolve()
        page.write_text(rewritten(page))
        print(f"written: {name}")


if __name__ == "__main__":
    main()
