"""An explanation for the terminal: the sentence, then the step as a bar in pieces that add up."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from math import isnan
from statistics import median
from textwrap import wrap

from fullwire.answers.explain import Explanation
from fullwire.findings.verdicts import drawn_parts, verdict_kinds
from fullwire.report.terminal import print_notes, print_table, say
from fullwire.timeline.account import Part
from fullwire.units import show_time
from fullwire.words import sentence, setting

_ALIKE = 0.02  # of the step: ranks whose parts differ by less are not shown one by one
_MOST_RANKS = 32
_BAR = 40


def print_explanation(result: Explanation) -> None:
    """Print what limits a job, the account of its step, and what it rests on."""
    for line in wrap(result.verdict.sentence, min(shutil.get_terminal_size().columns, 100)):
        say(line)
    say("")
    if result.step_s:
        for line in _account_lines(result):
            say(line)
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
    _print_fixes(result)
    if _ranks_differ(result):
        _print_ranks(result)
    print_notes(result.warnings)


def part_labels() -> dict[str, str]:
    """Return how each part of an account is called where it is drawn."""
    return {part: kind.label for part, kind in drawn_parts().items()}


def _account_lines(result: Explanation) -> Iterator[str]:
    """Draw one row a part; each row's piece of the bar begins where the one above ended."""
    shown = [(key, time_s) for key, time_s in result.account.items() if time_s > 0]
    edges, labels = _edges([time_s for _, time_s in shown]), part_labels()
    for (key, time_s), (start, end) in zip(shown, edges, strict=True):
        mark = "◀" if key == blamed(result) else ""
        bar = f"{'·' * start}{'█' * (end - start)}{'·' * (_BAR - end)}"
        yield _row(labels[key], time_s, result.step_s, bar, mark)
    yield _row("a step", result.step_s, result.step_s, "█" * _BAR, "")


def _row(name: str, time_s: float, step_s: float, bar: str, mark: str) -> str:
    return f"  {name:<22} {show_time(time_s):>9} {time_s / step_s:6.1%}  {bar} {mark}".rstrip()


def _edges(times_s: Sequence[float]) -> list[tuple[int, int]]:
    """Return where each piece of the bar begins and ends, so that together they fill it."""
    total, reached, edges, last = sum(times_s), 0.0, [], 0
    for time_s in times_s:
        reached += time_s
        edge = round(_BAR * reached / total)
        edges.append((last, edge))
        last = edge
    return edges


def blamed(result: Explanation) -> str:
    """Name the part of the account that the verdict speaks of, if it is one of them."""
    return verdict_kinds()[result.verdict.kind].part


def _print_fixes(result: Explanation) -> None:
    if not result.fixes:
        return
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


def _ranks_differ(result: Explanation) -> bool:
    parts = result.detail.rank_parts_s()
    spread = [max(row[key] for row in parts) - min(row[key] for row in parts) for key in parts[0]]
    return len(parts) > 1 and max(spread) > _ALIKE * result.step_s


def _print_ranks(result: Explanation) -> None:
    parts = result.detail.rank_parts_s()
    keys = [part.key for part in Part if any(row[part.key] > 0 for row in parts)]
    drawn = drawn_parts()
    headings = [drawn[key].heading or key.replace("_", " ") for key in keys]
    rows = [
        [str(result.detail.ranks[number]), *(show_time(parts[number][key]) for key in keys)]
        for number in _most_unlike(parts)
    ]
    print_table(["rank", *headings], rows, texts=set())
    if len(rows) < len(parts):
        say(f"These {len(rows)} of {len(parts)} ranks differ most; --json has them all.")


def _most_unlike(parts: Sequence[Mapping[str, float]]) -> list[int]:
    """Choose the ranks to show: all of a few, and of many those whose waiting is furthest off."""
    waiting = [row[Part.STRAGGLER.key] for row in parts]
    usual = median(waiting)
    by_distance = sorted(range(len(parts)), key=lambda number: -abs(waiting[number] - usual))
    return sorted(by_distance[:_MOST_RANKS])
