"""A comparison for the terminal: better, worse or noise, in which part, and whether foretold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fullwire.report.explanation import part_labels
from fullwire.report.terminal import print_notes, print_table, say
from fullwire.units import show_time
from fullwire.words import sentence, sentences

if TYPE_CHECKING:
    from fullwire.answers.changed import Changed
    from fullwire.answers.compare import Comparison
    from fullwire.answers.verification import Verification


def print_comparison(
    result: Comparison,
    parts: Changed | None,
    verification: Verification | None,
    before: Sequence[str],
    after: Sequence[str],
) -> None:
    """Print whether the second run is better than the first, and whether that was predicted."""
    for each in sentences(result.findings):
        say(each)
    if verification is not None:
        say(sentence(verification.finding))
    say("")
    recordings = (*result.before_recordings, *result.after_recordings)
    rows = [
        [name, f"{each.steps:,}", show_time(each.step_s)]
        for name, each in zip((*before, *after), recordings, strict=True)
    ]
    of_what = "step" if result.passes is None else "pass"
    print_table(["run", "steps", f"median {of_what}"], rows, texts={"run"})
    if parts is not None:
        headings = [f"of the mean {of_what}", "before", "after", "change"]
        print_table(headings, _changed_rows(parts), texts={headings[0]})
    if result.differing_facts:
        print_table(
            ["differs", before[0], after[0]],
            [list(row) for row in result.differing_facts],
            texts={"differs", before[0], after[0]},
        )
    print_notes((*result.warnings, *sentences(result.advice)))


def _changed_rows(parts: Changed) -> list[list[str]]:
    labels = part_labels()
    both = {part: (before_s, parts.after[part]) for part, before_s in parts.before.items()}
    return [
        [labels[part], show_time(before_s), show_time(after_s), _signed(after_s - before_s)]
        for part, (before_s, after_s) in both.items()
        if before_s > 0 or after_s > 0
    ]


def _signed(time_s: float) -> str:
    return f"{'-' if time_s < 0 else '+'}{show_time(abs(time_s))}"
