"""An explanation for the terminal: the sentence, then the step as a bar in pieces that add up.

A comparison of two runs is beside it: which part of the step became shorter or longer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import isclose
from shlex import quote
from statistics import median
from typing import TYPE_CHECKING

from fullwire.answers.explain import Explanation
from fullwire.findings.between import CheckpointsTook, EvaluationsTook
from fullwire.findings.case import NOTABLE
from fullwire.findings.changes import about_changes
from fullwire.findings.goodput import GoodputWas
from fullwire.findings.kinds_of_steps import told_kinds
from fullwire.findings.notes import RunIsPartial
from fullwire.findings.scaling import ScalingFactor
from fullwire.findings.targets import SamplesLostToTheBatch
from fullwire.findings.verdicts import drawn_parts, verdict_kinds
from fullwire.report.terminal import (
    columns,
    draw,
    left_out,
    mean_of,
    print_notes,
    print_table,
    say,
    say_code,
    say_command,
    say_flush,
    show_between,
)
from fullwire.simulation.transport import MeasuredTransport
from fullwire.timeline.account import Part
from fullwire.units import listed, show_bytes, show_change, show_rate, show_time, visible
from fullwire.words import lines_to_paste, sentence, sentences, setting

if TYPE_CHECKING:
    from fullwire.answers.changed import Changed
    from fullwire.answers.compare import Comparison, Gate
    from fullwire.answers.until import Until
    from fullwire.answers.verification import Verification
    from fullwire.answers.watched import Watched

_ALIKE = 0.02  # of the step: ranks whose parts differ by less are not shown one by one
_MOST_RANKS = 32
_FIRST_FIXES, _FIRST_PARTS, _FIRST_NOTES = 3, 5, 3  # of the first screen
_LITTLE = 0.001  # of the step: smaller parts have no row of their own there
_WIDEST = 100  # columns of an account
_OF_USUAL_FRAMES = 1_448 / 1_514  # the payload of a lab's frames, unless --mtu was given
_MUCH_GAINED = 1.1  # by a fix that `tune` can try, for it to be the next command
_MUCH_BESIDE_STEPS = 0.05  # of a run: evaluations or checkpoints that the first screen names


def print_explanation(result: Explanation, name: str = "job.run", *, is_full: bool = True) -> None:
    """Print the limit of a job, the account of its step, fixes that help, and the next command.

    This is the first screen. The whole answer also has the evidence, every fix with its lines, the
    ranks and all notes.
    """
    say_flush(result.verdict.sentence)
    if result.verdict.sureness is not None:
        say_flush(sentence(result.verdict.sureness))
    gaps = [sentence(note) for note in result.notes if isinstance(note, RunIsPartial)]
    if gaps and not is_full:
        say(f"{gaps[0]}{f' And {len(gaps) - 1} more.' if gaps[1:] else ''}")
    for note in result.notes if not is_full else ():
        if isinstance(note, GoodputWas):
            say_flush(sentence(note))
        if isinstance(note, SamplesLostToTheBatch):
            say(sentence(note))
    beside = [n for n in result.notes if isinstance(n, EvaluationsTook | CheckpointsTook)]
    for note in beside if not is_full else ():
        if note.total_s >= _MUCH_BESIDE_STEPS * note.run_s:
            say(sentence(note))
    say("")
    commands = next_commands(result, name, is_full=is_full)
    if result.step_s and is_full:
        _print_account(result, most=len(result.account))
    elif result.step_s:  # a command of several lines takes them from the smallest parts
        _print_account(result, most=max(_FIRST_PARTS - len(commands[0]) // (columns() - 10), 3))
    turning = result.break_even
    if is_full:
        say("")
        if result.scaling is not None:
            say(f"  {sentence(result.scaling)}")
        for reason in result.verdict.reasons:
            say(f"  because {reason}")
        for figure in result.evidence:
            say(f"  {sentence(figure)}")
        if turning is not None:
            say(f"  {turning.sentence}")
    else:
        if isinstance(result.scaling, ScalingFactor):
            say(f"  {sentence(replace(result.scaling, full=None, longer_s=None))}")
        if turning is not None:
            over = getattr(turning.finding, "takes_over", None)
            say(f"  {sentence(over or turning.finding).strip()}")
    say("")
    _print_fixes(result, is_full=is_full)
    if is_full:
        _print_ranks(result)
        print_notes(result.warnings)
        say("")
    else:
        fixes, notes = len(result.fixes), len(result.notes)
        counted = [
            f"{count} {word}{'' if count == 1 else ending}"
            for count, word, ending in ((fixes, "fix", "es"), (notes, "note", "s"))
            if count
        ]
        told = ["the evidence", *counted, *(["the ranks"] if len(result.detail.ranks) > 1 else [])]
        say(f"-v shows {listed(told)}.")
    for number, command in enumerate(commands):
        say_command(f"{'and: ' if number else 'Next:'} {command}")


def print_watched(result: Watched, name: str | None = None, *, is_full: bool = False) -> None:
    """Print what was seen of a running job: the answer, its account with ranges, what is open."""
    job, explanation = result.job, result.explanation
    ranks = f"{job.workers:,} rank{'' if job.workers == 1 else 's'}"
    here = f"{len(job.ranks)} of {ranks}" if len(job.ranks) < job.workers else ranks
    say_flush(result.sentence)
    steps = 0 if explanation is None else len(explanation.detail.steps)
    say_flush(
        f"Watched {here} of {job.ranks[0].command} for {show_time(result.seconds)}"
        f"{', until it ended' if result.has_ended else ''}. "
        + (f"Confidence {result.confidence:.0%}: {steps} steps repeat." if explanation else "")
    )
    print_notes(sentences(result.notes))
    if explanation is None:
        return
    say("")
    _print_account(explanation, most=len(explanation.account) if is_full else _FIRST_PARTS)
    say("")
    labels = part_labels()
    rows = [
        [labels[part], show_between(explanation.account[part], *result.ranges[part])]
        for part in explanation.account
        if is_full or explanation.account[part] > _LITTLE * explanation.step_s
    ]
    if result.source == "outside":
        print_table(["part", "from outside it may be"], rows, texts={"part"})
    busy = sorted(job.ranks, key=lambda rank: rank.rank)
    if is_full:
        on = {process.rank: f" on {process.host}" if result.hosts else "" for process in busy}
        told = (f"{process.pid} (rank {process.rank}{on[process.rank]})" for process in busy)
        say(f"  processes {', '.join(told)}")
        say("")
        _print_seen(result)
        print_notes(explanation.warnings)
    if job.is_guessed:
        say("note: No environment told the ranks: they are numbered by process.")
    if name is not None:
        say_command(f"Next: fullwire explain {quote(name)}")


def _print_seen(result: Watched) -> None:
    """Print what each rank did and used, where the kernel told it."""
    rows = []
    for rank in sorted(result.ranks, key=lambda each: each.rank)[:_MOST_RANKS]:
        shares = (rank.computing, rank.sending, rank.waiting, rank.delayed)
        memory, reads = rank.memory_bytes, rank.read_bytes_s
        rows.append(
            [
                str(rank.rank),
                *(f"{share:.0%}" for share in shares),
                show_rate(rank.sent_bps),
                "" if memory is None else show_bytes(memory),
                "" if reads is None else f"{show_bytes(reads)}/s",
            ]
        )
    headings = ["rank", "computing", "sending", "waiting", "delayed", "rate", "memory", "reads"]
    print_table(headings, rows, texts=set())


def _print_fixes(result: Explanation, *, is_full: bool) -> None:
    """Print the first fixes, or all, each with its gain, its risk and the place to change."""
    if not result.fixes or result.fixes_from_s is None:
        return
    is_of_usual = abs(result.fixes_from_s / result.step_s - 1) <= NOTABLE
    now = "now" if is_of_usual else "mean of all" if result.is_of_all_steps else "of replayed"
    headings = [
        "What would help",
        f"step ({now} {show_time(result.fixes_from_s)})",
        "gain",
        "risk",
        "where",
    ]
    fixes = result.fixes
    if not is_full and len(fixes) > _FIRST_FIXES:  # they answer the verdict, and one gains most
        first, best = fixes[:_FIRST_FIXES], min(fixes, key=lambda fix: fix.step_s)
        fixes = first if best in first else (*first[:-1], best)
    rows = [
        [
            sentence(fix),
            show_between(fix.step_s, fix.low_s, fix.high_s),
            f"{gain:.2f}x" if (gain := result.fixes_from_s / fix.step_s) < 1.1 else f"{gain:.1f}x",
            "-" if fix.place == "purchase" else fix.risk,
            fix.place,
        ]
        for fix in fixes
    ]
    print_table(headings, rows, texts={headings[0], headings[1], "risk", "where"})
    framework = result.facts.framework
    # its lines, ready to paste, or the place to look at
    for fix in result.fixes if is_full else ():
        say(f"{sentence(fix)}:" + (f" {setting(fix)}" if framework not in fix.lines else ""))
        for line in lines_to_paste(fix, framework).splitlines():
            say_code(f"    {line}".rstrip())
    if is_full:
        say("")


def next_commands(result: Explanation, name: str, *, is_full: bool) -> list[str]:
    """Return the commands that the answer leads to, complete."""
    run, facts, source = quote(name), result.facts, result.provenance.source
    if options := [need.option for need in result.verdict.needed if need.option]:
        return [f"fullwire explain {run} {options[0]}"]
    is_to_be_made = any(fix.place == "script" for fix in result.fixes)
    is_of_a_job = result.provenance.origin == result.provenance.basis == "measured"
    is_known = is_of_a_job and "***" not in source
    hosts, cluster, congestion = set((facts.hosts or "").split(",")), "", ""
    rates = [("", facts.line_rate_bps or 0.0)]
    rates += [(f"{host:.0f}:", rate_bps) for host, rate_bps in facts.other_line_rates_bps or ()]
    is_of_a_lab = facts.machines == 1 and (len(hosts) > 1 or facts.payload_share is not None)
    if is_of_a_lab and facts.line_rate_bps:
        links = [f"--rate {host}{show_rate(bps).replace(' ', '')}" for host, bps in rates]
        if facts.latency_s:
            links.append(f"--latency {show_time(facts.latency_s).replace(' ', '')}")
        cluster = f" --workers {len(hosts)} {' '.join(links)}"
        congestion = f" --congestion {facts.congestion}" if facts.congestion else ""
        # A run lacks the file of its cluster and the options of its faults. A lab made without
        # them differs by more than the fix.
        is_known &= facts.cluster is None and facts.faults is None
        is_known &= facts.payload_share is None or isclose(facts.payload_share, _OF_USUAL_FRAMES)
    if is_to_be_made and not is_full:
        most_s = (result.fixes_from_s or 0.0) / _MUCH_GAINED
        to_try = [
            fix
            for fix in result.fixes
            if fix.applied and fix.risk != "semantic" and fix.step_s < most_s
        ]
        are_alike = not (facts.other_line_rates_bps or facts.latency_s)  # tune has links of a kind
        if is_known and to_try and (are_alike or not cluster):
            allow = "" if to_try[0].risk == "exact" else f" --allow {to_try[0].risk}"
            lab = cluster and f" --lab{cluster}"
            return [f"fullwire tune{allow}{lab} -o tuned -- {source}"]
        return [f"fullwire explain {run} -v"]
    if is_to_be_made and is_known:
        record = f"fullwire lab run{cluster}{congestion}" if cluster else "fullwire record"
        return [f"{record} -o after.run -- {source}", f"fullwire compare {run} after.run"]
    if result.predictor is not None:
        is_measured = isinstance(result.predictor.grid.transports[0], MeasuredTransport)
        transport = " --transport measured" if is_measured else ""
        return [f"fullwire whatif {run}{transport} --workers 8,64 --bandwidth 10Gbps,100Gbps"]
    if is_full or not result.step_s:
        return [f"fullwire show {run}"]
    return [f"fullwire explain {run} -v"]


def part_labels() -> dict[str, str]:
    """Return the name of each part of an account in drawings."""
    return {part: kind.label for part, kind in drawn_parts().items()}


def blamed(result: Explanation) -> str:
    """Name the part of the account that the verdict blames, if it is one of them."""
    return verdict_kinds()[result.verdict.kind].part


def _print_account(result: Explanation, *, most: int) -> None:
    """Draw a row for each part, or for so many of the largest, and one for the others together.

    In the column of bars, each row's piece begins where the piece above ended.
    """
    labels, step_s = part_labels(), result.step_s
    parts = {key: time_s for key, time_s in result.account.items() if time_s > 0}
    largest = list(parts)
    if most < len(result.account):
        by_size = sorted(parts, key=lambda key: -parts[key])[:most]
        largest = [key for key in by_size if parts[key] > _LITTLE * step_s]
    to_mark = "" if result.is_of_all_steps else blamed(result)
    rows = [(labels[key], parts[key], key == to_mark) for key in parts if key in largest]
    others = [key for key in parts if key not in largest]
    others_s = sum(parts[key] for key in others)
    if others_s > _LITTLE * step_s:
        named = labels[others[0]] if len(others) == 1 else f"{len(others)} smaller"
        rows.append((named, others_s, False))
    widest = max(len(name) for name, *_ in rows)
    room = min(columns(), _WIDEST) - widest - len("    1.234 ms 100.0%   ◀")
    ends = [round(room * end_s / step_s) for end_s in accumulate(time_s for _, time_s, _ in rows)]
    of_which = of_which_steps(result)
    say(f"  step {show_time(step_s)}{f' ({of_which})' if of_which else ''}")
    for (name, time_s, is_blamed), (start, end) in zip(rows, pairwise([0, *ends]), strict=True):
        bar = f"{'·' * start}{'█' * (end - start)}{'·' * (room - end)} {'◀' if is_blamed else ''}"
        draw(f"  {name:<{widest}} {show_time(time_s):>9} {time_s / step_s:6.1%}  {bar}".rstrip())


def of_which_steps(result: Explanation) -> str:
    """Return the definition of a step's time, where there are several steps; else nothing."""
    usual, kept = int(result.detail.is_typical.sum()), int(result.detail.is_kept.sum())
    if kept < 2:
        return ""
    steps = result.detail.steps
    told = f"{mean_of(usual, kept)} of "
    if (every := result.detail.kinds.every) > 1:
        told += f"{len(result.detail.kinds.rounds):,} rounds of {every} steps"
    else:
        told += f"{len(steps):,} steps{left_out(len(steps) - kept)}"
    if kinds := result.detail.by_kind():
        found = told_kinds(result.detail.kinds.kinds, [kind.step_s for kind in kinds])
        told += f"; of {found.count} kinds: {'; '.join(sentences(found.kinds))}"
    if result.is_of_all_steps:
        mean_s = result.detail.over_all().step_s
        told += f"; the verdict is of all of them, {show_time(mean_s)} in the mean"
    return told


def _print_ranks(result: Explanation) -> None:
    """Print the parts of each rank, or that ranks are alike; of many, those that wait unusually."""
    parts = result.detail.rank_parts_s()
    spread = [max(row[key] for row in parts) - min(row[key] for row in parts) for key in parts[0]]
    if len(parts) < 2:
        return
    if max(spread) <= _ALIKE * result.step_s:
        alike = f"no part of a step differs by more than {_ALIKE:.0%} of the step"
        say(f"The {len(parts):,} ranks are alike: {alike}.")
        say("")
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
    goal: Until | None = None,
    *,
    is_full: bool = True,
) -> None:
    """Print whether the second run is better, whether that was predicted, and what changed.

    This is the first screen. The whole answer also has each recording, the account of both sides,
    every fact that differs, and all notes.
    """
    if gate is not None:
        say_flush(gate.sentence)
    if goal is not None:
        say_flush(sentence(goal.finding))
    for line in sentences(result.findings):
        say_flush(line)
    if verification is not None:
        say_flush(sentence(verification.finding))
    if not is_full:
        _print_changes(result, parts)
        return
    say("")
    recordings = (*result.before_recordings, *result.after_recordings)
    rows = [
        [name, f"{recording.steps:,}", show_time(recording.step_s)]
        for name, recording in zip((*before, *after), recordings, strict=True)
    ]
    of_what = "step" if result.passes is None else "pass"
    print_table(["run", "steps", f"usual {of_what}"], rows, texts={"run"})
    if parts is not None:
        headings = [f"of the usual {of_what}", "before", "after", "change"]
        print_table(headings, _changed_rows(parts), texts={headings[0]})
    if result.differing_facts:
        print_table(
            ["differs", before[0], after[0]],
            [[*row] for row in result.differing_facts],
            texts={"differs", before[0], after[0]},
        )
    print_notes((*result.warnings, *sentences(result.advice)))


def print_target_alone(goal: Until, why: str) -> None:
    """Print which run reached the target first, and why their steps are not compared."""
    say_flush(sentence(goal.finding))
    say("")
    print_notes([why])


def _print_changes(result: Comparison, parts: Changed | None) -> None:
    """Print what differs in a sentence each, missing data, and what would tell more."""
    labels = part_labels()
    pairs = [] if parts is None else [(k, s, parts.after[k]) for k, s in parts.before.items()]
    changes = about_changes(
        result.differing_facts,
        [(labels[part], before_s, after_s) for part, before_s, after_s in pairs],
        (result.before_s, result.after_s),
        of_passes=result.passes is not None,
    )
    for change in changes:
        say_flush(sentence(change))
    say("")
    notes = list(result.warnings)
    advice = list(sentences(result.advice))
    if not result.is_significant:  # more recordings would decide it
        notes, advice = advice + notes, []
    print_notes(notes[:_FIRST_NOTES])
    rest = len(notes[_FIRST_NOTES:]) + len(advice)
    told = f" and {rest} more note{'s' * (rest > 1)}" if rest else ""
    say(f"-v shows each recording, the account of both sides, every difference{told}.")


def _changed_rows(parts: Changed) -> list[list[str]]:
    """Return a row for each part that a step of either side has."""
    labels, rows = part_labels(), []
    for part, before_s in parts.before.items():
        after_s = parts.after[part]
        change = show_change(before_s, after_s)
        if before_s > 0 or after_s > 0:
            rows.append([labels[part], show_time(before_s), show_time(after_s), change])
    return rows


def comparison_markdown(
    result: Comparison,
    parts: Changed | None,
    verification: Verification | None,
    gate: Gate | None = None,
    goal: Until | None = None,
) -> str:
    """Return a comparison as Markdown, for a pull request: the answer, two tables, the notes."""
    of_what = "step" if result.passes is None else "pass"
    lines = [*sentences(result.findings)]
    if verification is not None:
        lines.append(sentence(verification.finding))
    if gate is not None:
        lines.insert(0, gate.sentence)
    if goal is not None:
        lines.append(sentence(goal.finding))
    sides = [
        [name, f"{len(recordings)}", f"{steps:,}", show_time(step_s)]
        for name, recordings, steps, step_s in (
            ("before", result.before_recordings, result.before_steps, result.before_s),
            ("after", result.after_recordings, result.after_steps, result.after_s),
        )
    ]
    blocks = [f"### {_plain(lines[0])}", *map(_plain, lines[1:])]
    blocks.append(_markdown_table(["", "recordings", "steps", f"usual {of_what}"], sides))
    if parts is not None:
        headings = [f"of the usual {of_what}", "before", "after", "change"]
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
    """Escape text from a run, so that Markdown and HTML in it appear as plain text."""
    return re.sub(r"([\\`*_\[\]<>|#@])", r"\\\1", " ".join(visible(text).split()))
