"""An explanation for the terminal: the sentence, then the step as a bar in pieces that add up.

A comparison of two runs is beside it: which part of the step became shorter or longer.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import isnan
from statistics import median
from textwrap import wrap
from typing import TYPE_CHECKING

from fullwire.answers.explain import Explanation
from fullwire.findings.verdicts import drawn_parts, verdict_kinds
from fullwire.report.terminal import print_notes, print_table, say
from fullwire.timeline.account import Part
from fullwire.units import show_time, visible
from fullwire.words import sentence, sentences, setting

if TYPE_CHECKING:
    from fullwire.answers.changed import Changed
    from fullwire.answers.compare import Comparison, Gate
    from fullwire.answers.verification import Verification

_ALIKE = 0.02  # of the step: ranks whose parts differ by less are not shown one by one
_MOST_RANKS = 32
_BAR = 40


def print_explanation(result: Explanation) -> None:
    """Print what limits a job, the account of its step, and what it rests on."""
    for line in wrap(result.verdict.sentence, min(shutil.get_terminal_size().columns, 100)):
        say(line)
    say("")
    if result.step_s:
        _print_account(result)
        say("")
        if result.scaling is not None:
            say(sentence(result.scaling))
    for reason in result.verdict.reasons:
        say(f"  because {reason}")
    for figure in result.evidence:
        say(f"  {sentence(figure)}")
    if result.break_even is not None:
        say(f"  {result.break_even.sentence}")
    say("")
    if result.fixes:
        median_s = result.other_median_s
        of_which = "" if median_s is None else f" the median step, {show_time(median_s)}"
        if median_s is not None and median_s != result.fixes_from_s:
            of_which = f" the mean step, {show_time(result.step_s)}"
        say(f"What would help{of_which}, predicted:")
        rows = [
            [
                sentence(fix),
                show_time(fix.step_s),
                "" if isnan(fix.low_s) else f"{show_time(fix.low_s)} to {show_time(fix.high_s)}",
                f"{fix.scaling_factor:.3f}",
                setting(fix),
            ]
            for fix in result.fixes
        ]
        headings = ["change", "step", "interval", "scaling", "setting"]
        print_table(headings, rows, texts={"change", "interval", "setting"})
    _print_ranks(result)
    print_notes(result.warnings)


def part_labels() -> dict[str, str]:
    """Return how each part of an account is called where it is drawn."""
    return {part: kind.label for part, kind in drawn_parts().items()}


def blamed(result: Explanation) -> str:
    """Name the part of the account that the verdict speaks of, if it is one of them."""
    return verdict_kinds()[result.verdict.kind].part


def _print_account(result: Explanation) -> None:
    """Draw one row a part; each row's piece of the bar begins where the one above ended."""
    labels = part_labels()
    shown = [(key, time_s) for key, time_s in result.account.items() if time_s > 0]
    total_s = sum(time_s for _, time_s in shown)
    ends = [round(_BAR * end_s / total_s) for end_s in accumulate(time_s for _, time_s in shown)]
    lines = [
        (labels[key], time_s, start, end, "◀" if key == blamed(result) else "")
        for (key, time_s), (start, end) in zip(shown, pairwise([0, *ends]), strict=True)
    ]
    for name, time_s, start, end, mark in (*lines, ("a step", result.step_s, 0, _BAR, "")):
        bar = f"{'·' * start}{'█' * (end - start)}{'·' * (_BAR - end)}"
        share = time_s / result.step_s
        say(f"  {name:<22} {show_time(time_s):>9} {share:6.1%}  {bar} {mark}".rstrip())


def _print_ranks(result: Explanation) -> None:
    """Print the parts of each rank, if ranks differ; of many, those that wait unlike the others."""
    parts = result.detail.rank_parts_s()
    spread = [max(row[key] for row in parts) - min(row[key] for row in parts) for key in parts[0]]
    if len(parts) < 2 or max(spread) <= _ALIKE * result.step_s:
        return
    waiting = [row[Part.STRAGGLER.key] for row in parts]
    usual = median(waiting)
    by_distance = sorted(range(len(parts)), key=lambda number: -abs(waiting[number] - usual))
    keys = [part.key for part in Part if any(row[part.key] > 0 for row in parts)]
    drawn = drawn_parts()
    headings = [drawn[key].heading or key.replace("_", " ") for key in keys]
    rows = [
        [str(result.detail.ranks[number]), *(show_time(parts[number][key]) for key in keys)]
        for number in sorted(by_distance[:_MOST_RANKS])
    ]
    print_table(["rank", *headings], rows, texts=set())
    if len(rows) < len(parts):
        say(f"These {len(rows)} of {len(parts)} ranks differ most; --json has them all.")


def print_comparison(
    result: Comparison,
    parts: Changed | None,
    verification: Verification | None,
    before: Sequence[str],
    after: Sequence[str],
    gate: Gate | None = None,
) -> None:
    """Print whether the second run is better than the first, and whether that was predicted."""
    if gate is not None:
        say(gate.sentence)
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
    """Return a row for each part that a step of either side has."""
    labels, rows = part_labels(), []
    for part, before_s in parts.before.items():
        after_s = parts.after[part]
        change = f"{'-' if after_s < before_s else '+'}{show_time(abs(after_s - before_s))}"
        if before_s > 0 or after_s > 0:
            rows.append([labels[part], show_time(before_s), show_time(after_s), change])
    return rows


def comparison_markdown(
    result: Comparison,
    parts: Changed | None,
    verification: Verification | None,
    gate: Gate | None = None,
) -> str:
    """Return a comparison as Markdown, for a pull request: the answer, two tables, the notes."""
    of_what = "step" if result.passes is None else "pass"
    said = [*sentences(result.findings)]
    if verification is not None:
        said.append(sentence(verification.finding))
    if gate is not None:
        said.insert(0, gate.sentence)
    sides = [
        [name, f"{len(recordings)}", f"{steps:,}", show_time(step_s)]
        for name, recordings, steps, step_s in (
            ("before", result.before_recordings, result.before_steps, result.before_s),
            ("after", result.after_recordings, result.after_steps, result.after_s),
        )
    ]
    blocks = [f"### {_plain(said[0])}", *map(_plain, said[1:])]
    blocks.append(_markdown_table(["", "recordings", "steps", f"median {of_what}"], sides))
    if parts is not None:
        headings = [f"of the mean {of_what}", "before", "after", "change"]
        blocks.append(_markdown_table(headings, _changed_rows(parts)))
    notes = [f"{name}: {old} before, {new} after" for name, old, new in result.differing_facts]
    notes += [*result.warnings, *sentences(result.advice)]
    if notes:
        listed = "\n".join(f"- {_plain(note)}" for note in notes)
        blocks.append(f"<details><summary>Notes</summary>\n\n{listed}\n\n</details>")
    return "\n\n".join(blocks) + "\n"


def _markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    marks = ["---", *["---:"] * (len(headings) - 1)]
    lines = [headings, marks, *([_plain(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(text: str) -> str:
    """Show text from a run as it is: Markdown and HTML in it are no markup."""
    return re.sub(r"([\\`*_\[\]<>|#@])", r"\\\1", " ".join(visible(text).split()))
