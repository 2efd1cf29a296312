"""fullwire show: the content of a run."""

from __future__ import annotations

from typing import Annotated

import typer

from fullwire.cli.options import Json, print_json


def show(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, or a built-in workload")],
    json: Json = False,
) -> None:
    """List the content of a run.

    Its origin, facts and tables, and the gaps in it:

    fullwire show job.run
    """
    from fullwire.importers import contents
    from fullwire.report.as_data import run_object
    from fullwire.report.terminal import print_run

    outline, rows = contents(run)
    if json:
        print_json(run_object(outline, rows))
    else:
        print_run(outline, rows, run)
