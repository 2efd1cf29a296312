"""fullwire export: a run for other tools."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer


def export(
    run: Annotated[str, typer.Argument(metavar="RUN")],
    format_: Annotated[
        Literal["chrome"], typer.Option("--format", help="What to write: chrome, for Perfetto")
    ] = "chrome",
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="[default: standard output]"),
    ] = None,
) -> None:
    """Write a run as a Chrome trace: a process for each rank, lanes as threads.

    fullwire export job.run --format chrome -o job.json
    """
    from fullwire.report import chrome

    if output is None:
        chrome.write_chrome(run, sys.stdout.buffer)
        return
    chrome.export(run, output)
    sys.stderr.write(f"written: {output}\n")
