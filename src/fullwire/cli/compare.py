"""fullwire compare: did it get better?"""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from fullwire.cli.options import Json, LineRate, Verbose, print_json
from fullwire.errors import UsageError

if TYPE_CHECKING:
    from fullwire.answers.until import Until

_AFTER = "fullwire.compare.after"  # how many runs stand after --


class TwoSides(TyperCommand):
    """Remembers where `--` parts the recordings of one side from the other's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Count the runs after `--`, and let options stand there as well."""
        if "--" in args:
            place = args.index("--")
            options, _, _ = self.make_parser(ctx).parse_args(args[place + 1 :])
            ctx.meta[_AFTER] = len(options["runs"] or ())
            args = args[:place] + args[place + 1 :]
        return super().parse_args(ctx, args)


def two_sides(context: typer.Context, runs: list[str]) -> tuple[list[str], list[str]]:
    """Return the runs before and after `--`; two runs need none."""
    stand_after = context.meta.get(_AFTER)
    if stand_after is None and len(runs) != 2:
        raise UsageError(
            f"compare: expected BEFORE.run and AFTER.run, or -- between several of each, got "
            f"{len(runs)} without --"
        )
    stand_before = len(runs) - (1 if stand_after is None else stand_after)
    if not 0 < stand_before < len(runs):
        raise UsageError("compare: expected runs on both sides of --")
    return runs[:stand_before], runs[stand_before:]


def _tell_target(goal: Until, why: str, json: bool) -> None:
    from fullwire.report.as_data import until_object
    from fullwire.report.explanation import print_target_alone

    if json:
        print_json({"until": until_object(goal), "warnings": [why]})
    else:
        print_target_alone(goal, why)


def compare(
    context: typer.Context,
    runs: Annotated[list[str], typer.Argument(metavar="BEFORE.run... [--] AFTER.run...")],
    fail_if_slower: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="Exit status 1 if steps became longer by more than this, and than noise: 5%",
        ),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(metavar="METRIC<=VALUE", help="Which side reached it first: 'loss<=0.3'"),
    ] = None,
    line_rate: LineRate = None,
    verbose: Verbose = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print Markdown, for a pull request.")
    ] = False,
    json: Json = False,
) -> None:
    """Compare two runs: faster, slower, or noise?

    Several recordings of each side tell smaller changes from noise:

    fullwire compare before.run after.run
    fullwire compare before*.run -- after*.run
    fullwire compare main*.run -- pr*.run --fail-if-slower 5% --markdown
    fullwire compare before.run after.run --until 'loss<=0.3'

    The first run predicts the second where links, workers, buckets, the backend or a casting hook
    changed. The answer then has the prediction beside the measurement. -v adds each recording, the
    account of both sides, every fact that differs, and notes.
    """
    from fullwire.answers.changed import changed
    from fullwire.answers.compare import compare as answer
    from fullwire.answers.compare import refuse_without_steps
    from fullwire.answers.opening import completed
    from fullwire.answers.until import until_of_named
    from fullwire.answers.verification import verify
    from fullwire.report.as_data import whole_comparison
    from fullwire.report.explanation import comparison_markdown, print_comparison
    from fullwire.units import share

    if markdown and json:
        raise UsageError("compare: expected --markdown or --json, got both")
    if fail_if_slower is not None:
        share(fail_if_slower, "--fail-if-slower")  # refused before runs are read
    before, after = two_sides(context, runs)
    sides = [[completed(run, line_rate) for run in side] for side in (before, after)]
    first, second = ([recording.run for recording in side] for side in sides)
    goal = None
    if until is not None:
        goal = until_of_named(
            list(zip(before, first, strict=True)), list(zip(after, second, strict=True)), until
        )
    try:
        for name, each in zip(runs, itertools.chain(*sides), strict=True):
            refuse_without_steps(each.run, name)
        result, parts = answer(first, second), changed(*sides)
    except UsageError as error:
        if goal is None or fail_if_slower is not None:
            raise
        # Imported curves have no steps, and two devices are no comparison: the target still is one.
        _tell_target(goal, f"steps are not compared: {error}", json)
        return
    verification = verify(first[0], second[0], before_again=first[1:], after_again=second[1:])
    gate = None if fail_if_slower is None else result.gate(fail_if_slower)
    if json:
        print_json(whole_comparison(result, parts, verification, gate, goal))
    elif markdown:
        sys.stdout.write(comparison_markdown(result, parts, verification, gate, goal))
    else:
        print_comparison(result, parts, verification, before, after, gate, goal, is_full=verbose)
    if gate is not None and gate.state == "slower":
        raise typer.Exit(1)
