"""fullwire show: the content of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fullwire.cli.options import Json, print_json


def show(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, or a built-in workload")],
    json: Json = False,
) -> None:
    """List the content of a run.

    Its origin, facts and tables, the gaps in it, and the curves of its metrics:

    fullwire show job.run
    """
    from fullwire.findings.kinds_of_steps import about_passes
    from fullwire.importers import contents
    from fullwire.report.as_data import run_object
    from fullwire.report.contents import print_metrics, print_run
    from fullwire.run.kinds import kinds_of
    from fullwire.run.store import is_run, read_parts, read_run
    from fullwire.timeline.passes import passes_add_up, passes_of_step
    from fullwire.words import sentence

    outline, rows = contents(run)
    if json:
        print_json(run_object(outline, rows))
    else:
        # The first part has whole steps of its ranks, and the outline has no rows.
        is_stored = bool(rows.get("spans")) and is_run(Path(run))
        first = next(read_parts(run, only=("spans",))) if is_stored else outline
        work = None
        if (passes := passes_of_step(first) or 1) > 1:
            is_mean = bool(kinds_of(first).kinds)
            work = sentence(about_passes(passes, add_up=passes_add_up(first), is_mean=is_mean))
        print_run(outline, rows, run, work)
        metrics = outline.metrics
        if rows.get("metrics") and is_run(Path(run)):  # the outline has no rows
            metrics = read_run(run, only=("metrics",)).metrics
        print_metrics(metrics)
