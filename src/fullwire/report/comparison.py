"""A comparison for the terminal: better, worse or noise, in which part, and whether foretold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fullwire.answers.compare import SMALL
from fullwire.report.explanation import SHOWN_AS
from fullwire.report.terminal import print_notes, print_table, say
from fullwire.units import show_bytes, show_time

if TYPE_CHECKING:
    from fullwire.answers.changed import Changed
    from fullwire.answers.compare import Comparison
    from fullwire.answers.verification import Verification

_NOT_SHOWN = 0.0005  # of the step: it would be printed as nothing
_MUCH = 0.05  # more bytes, or longer steps, by as much are worth a sentence


def print_comparison(
    result: Comparison,
    parts: Changed | None,
    verification: Verification | None,
    before: Sequence[str],
    after: Sequence[str],
) -> None:
    """Print whether the second run is better than the first, and whether that was predicted."""
    say(comparison_sentence(result))
    if result.workers[0] != result.workers[1]:
        say(work_sentence(result))
    if result.edge_bytes is not None:
        say(bytes_sentence(result))
    if verification is not None:
        say(verification_sentence(verification))
    say("")
    recordings = (*result.before_recordings, *result.after_recordings)
    rows = [
        [name, f"{each.steps:,}", show_time(each.step_s)]
        for name, each in zip((*before, *after), recordings, strict=True)
    ]
    print_table(["run", "steps", "median step"], rows, texts={"run"})
    if parts is not None:
        headings = ["of the mean step", "before", "after", "change"]
        print_table(headings, _changed_rows(parts), texts={headings[0]})
    if result.differing_facts:
        print_table(
            ["differs", before[0], after[0]],
            [list(row) for row in result.differing_facts],
            texts={"differs", before[0], after[0]},
        )
    print_notes((*result.warnings, *_recorded_once(result)))


def _changed_rows(parts: Changed) -> list[list[str]]:
    both = {part: (before_s, parts.after[part]) for part, before_s in parts.before.items()}
    return [
        [SHOWN_AS[part], show_time(before_s), show_time(after_s), _signed(after_s - before_s)]
        for part, (before_s, after_s) in both.items()
        if before_s > 0 or after_s > 0
    ]


def _signed(time_s: float) -> str:
    return f"{'-' if time_s < 0 else '+'}{show_time(abs(time_s))}"


def _recorded_once(result: Comparison) -> Iterator[str]:
    """Say that more recordings tell more, and how many would show a small change."""
    needed = result.recordings_for_small
    is_open = result.is_significant is False and (result.unseen or 0) > SMALL
    more = "Several, made in turns, tell more"
    if is_open and needed is not None:
        more = f"Some {needed} of each, made in turns, would show {SMALL:.0%}"
    if len(result.before_recordings) == len(result.after_recordings) == 1:
        yield (
            "One recording of each: whatever else changed between them counts as the change. "
            f"{more}: fullwire compare before*.run -- after*.run"
        )
    elif is_open and needed is not None:
        yield f"{more}."


def work_sentence(result: Comparison) -> str:
    """Say what another number of workers is worth: each of them does as much in a step."""
    before, after = result.workers
    workers = f"{after:,} worker{'s' if after > 1 else ''}"
    return (
        f"With {workers} in place of {before:,} the job does {result.work_ratio:.2f} times "
        f"the work in the same time; {after / before:.2f} would be perfect."
    )


def comparison_sentence(result: Comparison) -> str:
    """Say whether the second run is better, and whether that is more than noise."""
    changed = abs(result.ratio - 1)
    how = f"{changed:.1%} {'shorter' if result.ratio < 1 else 'longer'}"
    if changed < _NOT_SHOWN:
        how = "as long as before"
    if result.is_significant is None:
        return f"Steps are {how}; too few steps to tell this from noise."
    interval = f"95 % interval of after/before {result.low:.4f} to {result.high:.4f}"
    if not result.is_significant:
        return (
            f"No difference beyond noise: steps are {how} ({interval}); less than "
            f"{result.unseen:.1%} would not show."
        )
    return f"Steps are {how}, more than noise ({interval})."


def bytes_sentence(result: Comparison) -> str:
    """Say whether the length of iterations follows their bytes, as packets show them."""
    assert result.edge_bytes is not None
    before, after = result.edge_bytes
    times = after / before
    moved = (
        f"An iteration moves {times:.2f} times the bytes ({show_bytes(after)} per edge against "
        f"{show_bytes(before)}) and takes {result.ratio:.2f} times as long"
    )
    if abs(times - 1) > _MUCH and (times - 1) * (result.ratio - 1) < -(_MUCH**2):
        return f"{moved}: bytes alone do not set its time."
    return f"{moved}."


def verification_sentence(result: Verification) -> str:
    """Say what was predicted and what was measured."""
    interval = f"{show_time(result.low_s)} to {show_time(result.high_s)}"
    if result.full_s is not None:
        interval += f"; {show_time(result.full_s)} on a full wire"
    return (
        f"With {', '.join(result.changes)}: predicted {show_time(result.predicted_s)} "
        f"({interval}), measured {show_time(result.measured_s)}: {abs(result.error):.1%} off, "
        f"{'within' if result.holds else 'OUTSIDE'} the interval."
    )
