"""The man page, made from the help of the commands: `man fullwire` after an installation.

.venv/bin/python -m docs.making.manual          # writes docs/fullwire.1 anew
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import fullwire
from docs.making.reference import VARIABLES, walk

PAGE = Path(__file__).resolve().parents[1] / "fullwire.1"
EXIT_STATUS = {
    "0": "The command is done.",
    "1": "The command is a check, and its answer is negative.",
    "2": "The command line has a mistake. One line says what was expected, what came, and where.",
    "3": "The input is damaged or incomplete.",
    "4": "run --workers: fewer workers than --min were left.",
    "others": "record, lab, apply, run and join end with the exit status of the job.",
}


def manual() -> str:
    """Return the page, as roff with the macros of man."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    from fullwire.cli.app import app_of

    group = typer.main.get_command(app_of())
    yield f'.TH FULLWIRE 1 "" "fullwire {fullwire.__version__}" "Fullwire"'
    yield from (".nh", ".ad l")  # whole words, and lines without justification
    yield from (".SH NAME", "fullwire \\- where the time of a distributed training job goes")
    yield from (".SH SYNOPSIS", ".B fullwire", "COMMAND [OPTIONS] [ARGUMENTS]")
    yield from (".SH DESCRIPTION", _plain(group.help or ""), ".PP", _plain(group.epilog or ""))
    yield ".SH COMMANDS"
    for path, command in walk(group, ("fullwire",)):
        context = typer.Context(
            command, info_name=" ".join(path), help_option_names=["-h", "--help"]
        )
        yield f'.SS "{_plain(" ".join(path))}"'
        for paragraph in (command.help or "").split("\n\n"):
            if paragraph.startswith("\b\n"):  # examples keep their lines
                yield from (".PP", ".nf", _plain(paragraph.removeprefix("\b\n")), ".fi")
            else:
                yield from (".PP", _plain(paragraph))
        for parameter in command.get_params(context):
            record = parameter.get_help_record(context)
            if record is not None:
                yield from (".TP", f'.B "{_plain(record[0])}"', _plain(record[1]))
    yield ".SH EXIT STATUS"
    for status, meaning in EXIT_STATUS.items():
        yield from (".TP", f".B {status}", _plain(meaning))
    yield ".SH ENVIRONMENT"
    for name, meaning in sorted(VARIABLES.items()):
        yield from (".TP", f".B {name}", _plain(meaning))
    yield from (".SH SEE ALSO", ".BR tcpdump (8)")


def _plain(text: Any) -> str:
    """Escape characters that mean something to roff."""
    without_links = re.sub(r" \(\[[^]]*\]\([^)]*\)\)", "", str(text))
    escaped = without_links.replace("\\", "\\e").replace("-", "\\-").replace('"', "\\(dq")
    return re.sub(r"^(?=[.'])", r"\\&", escaped, flags=re.MULTILINE)


def main() -> None:
    """Write the page anew."""
    PAGE.write_text(manual())


if __name__ == "__main__":
    main()
