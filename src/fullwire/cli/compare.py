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
    """Compare the steps of two runs of the same work: better, worse, or noise?

    Where what changed can be predicted (links, workers, buckets, a casting hook), the prediction
    that the first run gives is held against the second.
    """
    from fullwire.analysis.compare import compare as answer
    from fullwire.answers.opening import opened
    from fullwire.answers.verification import verify
    from fullwire.report.as_data import verification_object
    from fullwire.report.terminal import print_comparison

    first, second = opened(before).run, opened(after).run
    result, verification = answer(first, second), verify(first, second)
    if json:
        print_json({**asdict(result), "prediction": verification_object(verification)})
    else:
        print_comparison(result, verification, before, after)
