"""fullwire export: a run for other tools."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from fullwire.cli.options import Force
from fullwire.cli.telling import tell


def export(
    run: Annotated[str, typer.Argument(metavar="RUN")],
    format_: Annotated[
        Literal["chrome"], typer.Option("--format", help="Format to write: chrome, for Perfetto")
    ] = "chrome",
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="[default: standard output]"),
    ] = None,
    force: Force = False,
) -> None:
    """Write a run as a trace for Perfetto.

    Each rank becomes a process, and each lane a thread. ui.perfetto.dev opens the file:

    fullwire export job.run --format chrome -o job.json
    """
    from fullwire.report import chrome

    if output is None:
        missing = chrome.write_chrome(run, sys.stdout.buffer)
    else:
        missing = chrome.export(run, output, replace=force)
        tell(f"written: {output}")
    for gap in missing:
        tell(f"missing: {gap}")
