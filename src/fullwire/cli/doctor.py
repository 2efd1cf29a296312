"""fullwire doctor: which parts of Fullwire work on this machine, and how to get the others."""

from __future__ import annotations

import typer

from fullwire.cli.options import Json, print_json

_INDENT = " " * 9


def doctor(json: Json = False) -> None:
    """Check which parts of Fullwire work on this machine.

    The answer tells how to get the others. It changes nothing. Paste it into a bug report:

    fullwire doctor
    """
    from textwrap import wrap

    from fullwire.answers.doctor import doctor as answer
    from fullwire.report.terminal import columns, say
    from fullwire.units import show_bytes, visible

    checkup = answer()
    if json:
        facts = ("fullwire", "python", "kernel", "processors", "memory_bytes", "checks")
        print_json({name: getattr(checkup, name) for name in facts})
        return
    width = columns() - len(_INDENT)
    say(
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
