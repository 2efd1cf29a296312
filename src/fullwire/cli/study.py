"""fullwire study: both papers, redone on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fullwire.cli.options import Json, print_json
from fullwire.cli.telling import say


def study(
    quick: Annotated[
        bool, typer.Option("--quick", help="A short form: under 4 minutes on 2 processors")
    ] = False,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="DIR", help="Runs, figures and claims; go on there"),
    ] = Path("study"),
    json: Json = False,
) -> None:
    """Redo the two papers in the lab.

    Each claim is predicted and measured, and the answer says which of them hold on this machine:

    fullwire study --quick -o study
    """
    from fullwire.cli.leaving import signals_end_it
    from fullwire.report.charts import check_pictures
    from fullwire.studies.papers import study as answer
    from fullwire.studies.papers.view import print_study, study_object, write_study

    check_pictures("study")  # before minutes of trials
    with signals_end_it():
        result = answer(output, quick=quick, say=say)
    written = write_study(result)
    if json:
        print_json(study_object(result, written))
    else:
        print_study(result, written)
    if not result.measured:
        raise typer.Exit(1)
