"""fullwire doctor: which parts of Fullwire work on this machine, and how to get the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from fullwire.cli.options import Json, print_json

if TYPE_CHECKING:
    from fullwire.answers.doctor import Checkup

_INDENT = " " * 9


def doctor(json: Json = False) -> None:
    """Check this machine: which parts of Fullwire work, and how to get the others.

    It changes nothing. Paste the answer into a bug report:

    fullwire doctor
    """
    from fullwire.answers.doctor import doctor as answer

    checkup = answer()
    if json:
        print_json(checkup)
    else:
        _print(checkup)


def _print(checkup: Checkup) -> None:
    from shutil import get_terminal_size
    from textwrap import wrap

    from fullwire.units import show_bytes, visible

    width = get_terminal_size().columns - len(_INDENT)
    typer.echo(
        f"fullwire {checkup.fullwire}, Python {checkup.python}, {checkup.kernel}, "
        f"{checkup.processors} processors, {show_bytes(checkup.memory_bytes)} of memory"
    )
    for check in checkup.checks:
        lines = wrap(visible(f"{check.name}: {check.seen}"), width)
        if check.state != "ok":
            lines += wrap(f"  {check.means}", width, subsequent_indent="  ")
            lines += (
                wrap(f"  do: {check.do}", width, subsequent_indent="      ") if check.do else []
            )
        for mark, line in zip([check.state, *[""] * len(lines)], lines, strict=False):
            typer.echo(f"{mark:<{len(_INDENT)}}{line}")
    states = [check.state for check in checkup.checks]
    typer.echo(
        ", ".join(f"{states.count(state)} {state}" for state in ("ok", "limited", "missing"))
    )
