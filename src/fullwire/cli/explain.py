"""fullwire explain: where did every lost second go?"""

from __future__ import annotations

from typing import Annotated

import typer

from fullwire.cli.options import Json, print_json


def _print_glossary(asked: bool) -> None:
    if asked:
        from fullwire.report.terminal import columns
        from fullwire.words.glossary import glossary_lines

        for line in glossary_lines(columns()):
            typer.echo(line)
        raise typer.Exit


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
            help="Line rate of the recorded links, where the run does not say: 10Gbps",
        ),
    ] = None,
    calibrate: Annotated[
        list[str] | None,
        typer.Option(metavar="RUN", help="More runs of the same cluster, for predictions"),
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option("-v", "--verbose", help="Evidence, all fixes with their lines, ranks, notes."),
    ] = False,
    glossary: Annotated[
        bool,
        typer.Option(
            "--glossary",
            help="Print the meaning of each word of an answer.",
            callback=_print_glossary,
            is_eager=True,
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Say what limits a job, and what would help.

    The first screen has the verdict, the account of a step, three fixes and the next command. -v
    adds evidence, all fixes with their lines, the parts of each rank, and notes:

    fullwire explain job.run
    fullwire explain job.run -v
    fullwire explain job.run --baseline one.run
    fullwire explain job.run --line-rate 10Gbps
    """
    from fullwire.answers.explain import explain as answer
    from fullwire.report.as_data import explanation_object
    from fullwire.report.explanation import print_explanation

    result = answer(run, baseline=baseline, bandwidth=bandwidth, calibrate=calibrate or ())
    if json:
        print_json(explanation_object(result))
    else:
        print_explanation(result, run, is_full=verbose)
