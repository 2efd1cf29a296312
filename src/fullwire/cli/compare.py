"""fullwire compare: did it get better?"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from fullwire.cli.options import Json, print_json


def compare(
    before: Annotated[str, typer.Argument(metavar="BEFORE.run")],
    after: Annotated[str, typer.Argument(metavar="AFTER.run")],
    json: Json = False,
) -> None:
    """Compare the steps of two runs of the same work: better, worse, or noise?"""
    from fullwire.analysis.compare import compare as answer
    from fullwire.report.terminal import print_comparison
    from fullwire.sources import read

    result = answer(read(before), read(after))
    if json:
        print_json(asdict(result))
    else:
        print_comparison(result, before, after)
