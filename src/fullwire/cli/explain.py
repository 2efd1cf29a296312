"""fullwire explain: where did every lost second go?"""

from __future__ import annotations

from typing import Annotated

import typer

from fullwire.cli.options import Json, print_json


def explain(
    run: Annotated[str, typer.Argument(metavar="RUN")],
    baseline: Annotated[
        str | None,
        typer.Option(metavar="ONE.run", help="The same work on one worker [default: estimated]"),
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            "--line-rate",
            "--bandwidth",
            help="Line rate of the links, where the run does not say: 10Gbps",
        ),
    ] = None,
    calibrate: Annotated[
        list[str] | None,
        typer.Option(metavar="RUN", help="More runs of the same cluster, for what is predicted"),
    ] = None,
    json: Json = False,
) -> None:
    """Say what limits a job, and where the time of its step goes.

    fullwire explain job.run --baseline one.run
    """
    from fullwire.answers.explain import explain as answer
    from fullwire.report.as_data import explanation_object
    from fullwire.report.explanation import print_explanation

    result = answer(run, baseline=baseline, bandwidth=bandwidth, calibrate=calibrate or ())
    if json:
        print_json(explanation_object(result))
    else:
        print_explanation(result)
