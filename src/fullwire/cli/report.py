"""fullwire report: a job on one page that anybody can open."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fullwire.cli.options import Force
from fullwire.cli.telling import tell


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="PAGE.html")],
    baseline: Annotated[
        str | None,
        typer.Option(metavar="ONE.run", help="The same work on one worker [default: estimated]"),
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            "--line-rate",
            "--bandwidth",
            help="Line rate of the recorded links, where a run does not say: 10Gbps",
        ),
    ] = None,
    calibrate: Annotated[
        list[str] | None,
        typer.Option(metavar="RUN", help="More runs of the same cluster, for predictions"),
    ] = None,
    force: Force = False,
) -> None:
    """Write the explanation as one offline HTML page.

    The page also has timelines, charts and an explorer. It opens in any browser:

    fullwire report job.run -o report.html
    fullwire report before.run after.run -o report.html
    """
    from fullwire.report.page import write_page

    write_page(
        runs,
        output,
        baseline=baseline,
        bandwidth=bandwidth,
        calibrate=calibrate or (),
        replace=force,
    )
    tell(f"written: {output}")
