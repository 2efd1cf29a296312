"""fullwire bench: what Fullwire's own parts cost and give on this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from fullwire.cli.options import Json, print_json

app = typer.Typer(
    name="bench",
    help="Measure Fullwire's own parts on this machine.",
    rich_markup_mode=None,
    no_args_is_help=True,
)


@app.command("recorder")
def recorder(
    pairs: Annotated[int, typer.Option(help="So many pairs, recorded and not; at least 5")] = 12,
    json: Json = False,
) -> None:
    """Train a model of 40 layers on two ranks, recorded and not, and compare the steps.

    fullwire bench recorder
    """
    from fullwire.report.overhead import overhead_lines, overhead_object
    from fullwire.sources.live.overhead import measure_overhead

    result = measure_overhead(pairs, _tell(pairs))
    if json:
        print_json(overhead_object(result))
    else:
        for line in overhead_lines(result):
            typer.echo(line)


def _tell(pairs: int) -> Callable[[int], None]:
    def tell(done: int) -> None:
        if sys.stderr.isatty():
            typer.echo(f"\r{done} of {pairs} pairs" + "\n" * (done == pairs), err=True, nl=False)

    return tell
