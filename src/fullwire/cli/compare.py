"""fullwire compare: did it get better?"""

from __future__ import annotations

import itertools
from dataclasses import asdict
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from fullwire.cli.options import Json, LineRate, print_json
from fullwire.errors import UsageError

_AFTER = "fullwire.compare.after"  # how many runs stand after --


class TwoSides(TyperCommand):
    """Remembers where `--` parts the recordings of one side from the other's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Count what stands after `--`, which is then dropped as everywhere."""
        if "--" in args:
            ctx.meta[_AFTER] = len(args) - 1 - args.index("--")
        return super().parse_args(ctx, args)


def compare(
    context: typer.Context,
    runs: Annotated[list[str], typer.Argument(metavar="BEFORE.run... [--] AFTER.run...")],
    line_rate: LineRate = None,
    json: Json = False,
) -> None:
    """Compare two runs: faster, slower, or noise?

    Several recordings of each side tell smaller changes from noise:

    fullwire compare before.run after.run
    fullwire compare before*.run -- after*.run

    The first run predicts the second where links, workers, buckets or a casting hook changed. The
    answer then has the prediction beside the measurement.
    """
    from fullwire.answers.changed import changed
    from fullwire.answers.compare import compare as answer
    from fullwire.answers.compare import refuse_without_steps
    from fullwire.answers.opening import completed
    from fullwire.answers.verification import verify
    from fullwire.report.as_data import comparison_object, verification_object
    from fullwire.report.explanation import print_comparison

    stand_after = context.meta.get(_AFTER)
    if stand_after is None and len(runs) != 2:
        raise UsageError(
            f"compare: expected BEFORE.run and AFTER.run, or -- between several of each, got "
            f"{len(runs)} without --"
        )
    stand_before = len(runs) - (1 if stand_after is None else stand_after)
    if not 0 < stand_before < len(runs):
        raise UsageError("compare: expected runs on both sides of --")
    before, after = runs[:stand_before], runs[stand_before:]
    sides = [[completed(each, line_rate) for each in side] for side in (before, after)]
    for name, each in zip(runs, itertools.chain(*sides), strict=True):
        refuse_without_steps(each.run, name)
    first, second = ([each.run for each in side] for side in sides)
    result, parts = answer(first, second), changed(*sides)
    verification = verify(first[0], second[0], before_again=first[1:], after_again=second[1:])
    if json:
        print_json(
            {
                **comparison_object(result),
                "account": None if parts is None else asdict(parts),
                "prediction": verification_object(verification),
            }
        )
    else:
        print_comparison(result, parts, verification, before, after)
