"""Results for the terminal: a sentence first, then a table, then notes about it.

Text from files is printed literally, without markup. Control characters are shown as text; they
never reach the terminal.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from math import isnan
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from fullwire.simulation.conditions import CONDITIONS
from fullwire.units import show_bytes, show_duration, show_number, show_rate, show_time, visible
from fullwire.words import sentence, sentences

if TYPE_CHECKING:
    from fullwire.answers.audited import AuditedTraffic
    from fullwire.answers.codecs import CodecRow, Codecs
    from fullwire.answers.time_to_target import ToTarget
    from fullwire.answers.whatif import WhatIf
    from fullwire.collectives.playing import CollectiveTime
    from fullwire.packets.jobs import NetworkJob
    from fullwire.words import Told
    from fullwire.workloads import Workload
    from fullwire.workloads.architecture import Architecture

_TUNED_SAID = 4  # clusters whose tuner's choices are printed
MOST_ROWS = 400  # a terminal scrolls; for more rows a file serves better
_OF_SUMS = frozenset({"buckets", "algorithm"})  # conditions of gradients that are sent
_BAR = 10
_FIRST_NOTES = 2  # of the first screen
_LEAST_COLUMNS, _MOST_COLUMNS = 40, 100  # of a sentence: longer lines are hard to read
_LEAST_TEXT = 16  # columns of a text in a table
_MEASURES = {
    "step_s": "step",
    "scaling_factor": "scaling",
    "network_utilization": "link used",
}
_MOST_HOSTS = 16  # a larger matrix does not fit a terminal; the JSON has it
_MOST_EDGES = 12
_MOST_COLLECTIVES = 24
_MOST_SHAPES = 2  # of a job's replicas


def print_whatif(result: WhatIf, best: int | None = None, *, is_full: bool = True) -> None:
    """Print the answer, then predictions in their order, or the best ones. `is_full`: all notes."""
    print_sentences_of(result.goodputs)
    print_sentences_of((*result.holding_back, *result.reaching) or (result.answer,))
    say("")
    if result.to_target is not None:
        _print_to_target(result, result.to_target, best)
        _print_notes_of(result, is_full=is_full)
        return
    table = result.predictions
    varying, fixed = _split_axes(result)
    # Each condition that has one value: default ones go without saying. Where no run sends buckets,
    # so do those of buckets.
    unused = set(_OF_SUMS) if all(each.sends_no_buckets for each in result.subjects) else set()
    # A script that sums gradients itself is predicted as recorded, unless buckets were asked for.
    if all(each.sums_its_own_way for each in result.subjects):
        unused.add("buckets")
    say(
        ", ".join(
            condition.worded(table.told(axis, fixed[axis], 0))
            for axis, condition in CONDITIONS.items()
            if axis in fixed and fixed[axis] != condition.usual and axis not in unused
        )
    )
    chosen = () if best is None else result.best(best)
    rows_shown = [top.row for top in chosen] or list(range(min(len(table), MOST_ROWS)))
    names = [*varying, "step_s", "scaling_factor", "network_utilization"]
    values = {name: table.told_column(name)[rows_shown].tolist() for name in names}
    rows = [
        [_cell(name, values[name][number]) for name in names] for number in range(len(rows_shown))
    ]
    headings = [_MEASURES.get(name) or CONDITIONS[name].heading for name in names]
    if result.has_intervals:
        place = len(varying)
        headings[place] = "step (90 %)"
        ends = zip(*(end_s[rows_shown].tolist() for end_s in result.interval_s), strict=True)
        for row, step_s, (low_s, high_s) in zip(rows, values["step_s"], ends, strict=True):
            row[place] = show_between(step_s, low_s, high_s)
    # A bar beside each scaling factor, where there is room for one.
    place = names.index("scaling_factor")
    taken = sum(max(map(len, cells)) + 2 for cells in zip(headings, *rows, strict=True))
    if taken + _BAR - 1 <= columns():
        for row, factor in zip(rows, values["scaling_factor"], strict=True):
            row[place] += f" {_bar(factor)}"
    print_table(headings, rows, texts={"run", "buckets", "step (90 %)"} & set(headings))
    _print_kinds(result, rows_shown, varying)
    if chosen:  # for the first of each run: the effect of changing one of its conditions
        from fullwire.answers.search import NEAR

        say(f"The best of {len(table):,}. Rows within {NEAR:.0%} count as equal, cheaper first.")
        first = {str(table["run"][one.row]): one for one in reversed(chosen)}
        for run, top in reversed(first.items()):
            worth = []
            for one in top.instead:
                value = one.instead if isinstance(one.instead, int | float) else str(one.instead)
                told = table.told(one.condition, value, top.row)
                worth.append(f"{CONDITIONS[one.condition].worded(told)}: {one.change:+.1%}")
            instead = f" Instead {', '.join(worth)}." if worth else ""
            say(f"{run}: {top.speedup:.4g} times the speed of one worker.{instead}")
    elif len(table) > MOST_ROWS:
        say(f"... and {len(table) - MOST_ROWS:,} more rows: --format csv prints them all")
    if result.to_record is not None:
        say(sentence(result.to_record))
    if is_full:
        print_sentences_of(result.tuner[:_TUNED_SAID])
    _print_notes_of(result, is_full=is_full)


def _print_kinds(result: WhatIf, shown: Sequence[int], varying: Sequence[str]) -> None:
    """Print the step of each kind, in the rows shown of jobs that have several kinds of steps."""
    rows = [
        [
            *(_cell(name, result.predictions.told_column(name)[row]) for name in varying),
            kind.name,
            f"{kind.share:.0%}",
            show_between(kind.step_s, kind.low_s, kind.high_s),
        ]
        for row in shown
        for kind in result.kinds(row)
    ]
    if rows:
        say("Steps of each kind:")
        headings = [*(CONDITIONS[name].heading for name in varying), "kind", "share", "step (90 %)"]
        texts = {"run", "buckets", "kind", "step (90 %)"} & set(headings)
        print_table(headings, rows, texts=texts)


def _print_notes_of(result: WhatIf, *, is_full: bool) -> None:
    """Print the notes on predictions; on the first screen the first ones and all assumptions."""
    notes = result.all_notes
    first = [
        note
        for place, note in enumerate(notes)
        if is_full or place < _FIRST_NOTES or note.is_assumption
    ]
    print_notes(sentences(first))
    rest = 0 if is_full else len(notes) - len(first) + len(result.tuner)
    if rest:
        say(f"-v shows {rest} more note{'s' * (rest > 1)}.")


def _print_to_target(result: WhatIf, targets: ToTarget, best: int | None) -> None:
    """Print the time to a target by row: all in their order, or the soonest."""
    table = result.predictions
    varying, _ = _split_axes(result)
    rows = list(range(min(len(table), MOST_ROWS))) if best is None else targets.soonest(best)
    front = set(targets.front())
    names = [name for name in varying if name != "batch"]
    values = {name: table[name][rows].tolist() for name in names}
    cells = []
    for number, row in enumerate(rows):
        conditions = [_cell(name, values[name][number]) for name in names]
        step = show_time(float(table["step_s"][row]))
        if isnan(targets.time_s[row]):  # a note says why
            unknown = ["-"] * (2 if targets.price is None else 3)
            cells.append([*conditions, f"{targets.batch[row]:g}", "-", step, *unknown, ""])
            continue
        times_s = (targets.time_s[row], targets.low_s[row], targets.high_s[row])
        (middle, unit), (low, low_unit), high = (
            show_duration(time_s).split() for time_s in times_s
        )
        between = f"{low if low_unit == unit == high[1] else f'{low} {low_unit}'}-{' '.join(high)}"
        cost = (
            [] if targets.price is None else [targets.price.show(float(targets.device_hours[row]))]
        )
        cells.append(
            [
                *conditions,
                f"{targets.batch[row]:g}",
                f"{targets.steps[row]:,.0f}",
                step,
                f"{middle} {unit} ({between})",
                show_number(float(targets.device_hours[row])),
                *cost,
                "*" if row in front else "",
            ]
        )
    reached = f"to {targets.goal} (90 %)"
    headings = [*(CONDITIONS[name].heading for name in names), "batch", "steps", "step", reached]
    headings += ["device-hours", *([] if targets.price is None else ["cost"]), ""]
    print_table(headings, cells, texts={"run", "buckets", reached, ""} & set(headings))
    if best is None and len(table) > len(rows):
        say(f"... and {len(table) - len(rows):,} more rows: --format csv prints them all")
    say("* no other setting is both sooner and cheaper")


def _split_axes(result: WhatIf) -> tuple[list[str], dict[str, object]]:
    """Separate the conditions that vary, which become columns, from those said once above."""
    varying: list[str] = []
    fixed: dict[str, object] = {}
    for axis, values in result.predictions.axes.items():
        names = [axis]
        if axis == "codec":
            costs = any(not codec.is_free for codec in values)
            names = ["compression", "codec"] if costs else ["compression"]
        # Runs may add up different passes, and some may have buckets.
        differs = axis == "buckets" and len({*result.predictions.own_sums}) > 1
        if axis == "accumulate" and values[0] > 1:
            differs = len(set(result.predictions.told_column(axis))) > 1
        if len(values) > 1 or differs:
            varying += names
        else:
            fixed |= {name: result.predictions[name][0] for name in names}
    return varying, fixed


def _cell(name: str, value: Any) -> str:
    if name in CONDITIONS:
        return CONDITIONS[name].show(value)
    if name == "step_s":
        return show_time(value)
    if name == "network_utilization":
        return f"{value:.0%}"
    return f"{value:.3f}"


def _bar(share: float) -> str:
    """Draw a share of one; the last block shows it to an eighth of a character."""
    whole, eighths = divmod(round(max(0.0, min(share, 1.0)) * _BAR * 8), 8)
    return ("█" * whole + (" ▏▎▍▌▋▊▉"[eighths] if eighths else "")).ljust(_BAR)


def show_between(time_s: float, low_s: float, high_s: float) -> str:
    """Print a time with its interval, in one unit if all three figures use the same."""
    if isnan(low_s):
        return show_time(time_s)
    middle, low, high = (show_time(time_s_).rsplit(" ", 1) for time_s_ in (time_s, low_s, high_s))
    if middle[1] == low[1] == high[1]:
        return f"{' '.join(middle)} ({low[0]}-{high[0]})"
    return f"{' '.join(middle)} ({' '.join(low)} - {' '.join(high)})"


def print_sentences_of(findings: Sequence[Told]) -> None:
    """Print findings, a sentence each."""
    for line in sentences(findings):
        say(line)


def print_architectures(models: Sequence[Architecture]) -> None:
    """Print large transformers with their counts."""
    rows = [
        [
            model.name,
            f"{model.parameters / 1e9:,.2f}",
            f"{model.active_parameters / 1e9:,.2f}",
            str(model.layers),
            f"{model.hidden:,}",
            f"{model.heads}/{model.kv_heads}",
            "" if model.moe is None else f"{model.moe.top_k} of {model.moe.experts}",
        ]
        for model in models
    ]
    headings = ["large model", "billions", "active", "layers", "hidden", "heads", "experts"]
    print_table(headings, rows, {"large model", "heads", "experts"})
    say("Billions of parameters, and of those that one token uses; heads of queries and of keys.")


def print_workloads(loads: Sequence[Workload]) -> None:
    """Print the built-in models."""
    rows = [
        [
            load.name,
            f"{load.model.parameter_count:,}",
            show_bytes(int(load.gradient_bytes.sum())),
            load.batch,
            load.device.precision,
            show_time(load.forward_ns * 1e-9),
            show_time(load.backward_ns * 1e-9),
            show_time(load.step_ns * 1e-9),
            show_bytes(load.memory.needed),
            "yes" if load.memory.fits else "NO",
            f"{load.memory.largest_batch:,}",
        ]
        for load in loads
    ]
    heads = "workload parameters gradients batch precision forward backward step memory fits"
    headings = [*heads.split(), "largest batch"]
    print_table(headings, rows, texts={"workload", "batch", "precision", "fits"})
    say("Times are modelled from the layers' operations at a stated share of the device's peak:")
    for title, matrix, memory in dict.fromkeys(
        (load.device.title, load.device.matrix_efficiency, load.device.memory_efficiency)
        for load in loads
    ):
        say(f"  {title}: {matrix:.0%} in matrix work, {memory:.0%} where memory is the limit")
    say("")
    if len(loads) == 1:
        from fullwire.findings.memory import memory_finding  # here: other tables need no numpy

        say(sentence(memory_finding(loads[0])))


def print_collective(result: CollectiveTime) -> None:
    """Print the time of one collective."""
    from fullwire.collectives.playing import TunedTime
    from fullwire.findings.collective import collective_findings, tuning_findings

    print_sentences_of(tuple(collective_findings(result)))
    if not isinstance(result, TunedTime):
        return
    say("")
    print_sentences_of(tuple(tuning_findings(result)))
    say("")
    names = list(result.tuning.table[0].times_s)
    rows = [
        [show_bytes(one.bytes), one.algorithm, *(show_time(one.times_s[name]) for name in names)]
        for one in result.tuning.table
    ]
    print_table(["bytes", "cheapest", *names], rows, texts={"cheapest"})


def print_jobs(jobs: Sequence[NetworkJob]) -> None:
    """Print the jobs of a network, a row each."""
    rows = [
        [
            f"{job.hosts[0]} and {len(job.hosts) - 1} more",
            "none repeats" if job.step_s is None else show_time(job.step_s),
            "" if job.step_bytes is None else show_bytes(job.step_bytes),
            _groups_of(job),
            str(len(job.pipeline)),
            ""
            if job.slowest is None or job.slowest_bps is None
            else f"{' - '.join(job.slowest)}: {show_rate(job.slowest_bps)}",
        ]
        for job in jobs
    ]
    headings = ["hosts", "step", "a step", "replicas", "pipeline pairs", "slowest pair"]
    say_flush(f"{len(jobs)} job{'' if len(jobs) == 1 else 's'} in these flows.")
    if jobs:
        say("")
        print_table(headings, rows, texts={"hosts", "replicas", "slowest pair"})
    for job in jobs:
        for shared in job.shares:
            cost = "" if shared.cost_s is None else f", {show_time(shared.cost_s)} a step"
            say(
                f"The job of {job.hosts[0]} shares a link with that of "
                f"{jobs[shared.job].hosts[0]}. Beside it, {shared.pairs:,} "
                f"pair{' sends' if shared.pairs == 1 else 's send'} {shared.slower:.1f} times as "
                f"long. This costs {shared.cost:.0%} of the time{cost}."
            )


def _groups_of(job: NetworkJob) -> str:
    """Say which groups add up gradients: `16 x ring of 64`, the most frequent first."""
    counted = Counter((group.pattern, len(group.hosts)) for group in job.groups)
    said = []
    for (pattern, size), count in counted.most_common(_MOST_SHAPES):
        shape = f"{'no known shape' if pattern == 'none' else pattern} of {size:,}"
        said.append(shape if count == 1 else f"{count:,} x {shape}")
    return ", ".join(said) + (", ..." if len(counted) > _MOST_SHAPES else "")


def print_traffic(result: AuditedTraffic) -> None:
    """Print the findings from packets: transfers between hosts, one iteration, and the audit."""
    say_flush(" ".join(sentences(result.story)))
    say("")
    if len(result.hosts) <= _MOST_HOSTS:
        sent = zip(
            result.hosts,
            result.matrix_payload_bytes.tolist(),
            result.matrix_wire_bytes.tolist(),
            strict=True,
        )
        rows = [
            [host, *(show_bytes(size) if size else "" for size in row), show_bytes(sum(wire))]
            for host, row, wire in sent
        ]
        corner = "payload from \\ to"
        print_table([corner, *result.hosts, "sent on the wire"], rows, texts={corner})
    busy = dict(zip(result.hosts, result.busy_fractions.tolist(), strict=True))
    rows = [
        [
            f"{edge.source} -> {edge.target}",
            str(edge.connections),
            f"{busy[edge.source]:.0%}",
            *(
                "" if time_s is None else show_time(time_s)
                for time_s in (edge.rtt_least_s, edge.rtt_median_s, edge.rtt_long_s)
            ),
            f"{edge.bursts}",
            show_bytes(edge.burst_bytes),
            f"{edge.sent_again:.2%}",
        ]
        for edge in result.edges[:_MOST_EDGES]
    ]
    times = ["rtt least", "median", "95%"]
    headings = ["edge", "flows", "sender busy", *times, "bursts", "of", "sent again"]
    print_table(headings, rows, texts={"edge"})
    _print_iterations(result)
    _print_audit(result)
    print_notes(f"PARTIAL: {warning}" for warning in result.warnings)


def _print_iterations(result: AuditedTraffic) -> None:
    """Print an iteration of each training that was told apart, or of the only one."""
    from fullwire.packets.usual_iteration import usual_iteration

    for group in result.groups:
        _print_iterations(group)
    usual = None if result.groups else usual_iteration(result)
    if usual is None:
        return
    say(f"iteration {usual.number}, as its collectives:")
    rows = []
    for collective in usual.collectives[:_MOST_COLLECTIVES]:
        last = collective.last_to_come
        came_s = 0.0 if last is None else collective.came_s[last] or 0.0
        rows.append(
            [
                collective.op,
                str(collective.sequence),
                "" if collective.bytes is None else show_bytes(collective.bytes),
                f"{collective.data_s * 1e3:.2f}",
                f"{collective.end_s * 1e3:.2f}",
                "" if last is None else f"{result.hosts[last]} at {came_s * 1e3:.2f}",
            ]
        )
    headings = ["collective", "number", "bytes", "data from (ms)", "to", "last to come"]
    print_table(headings, rows, texts={"collective", "last to come"})


def _print_audit(result: AuditedTraffic) -> None:
    from fullwire.findings.traffic import training

    for finding in result.audit:
        say(f"  {finding}")
    for group in result.groups:
        say(f"of {sentence(training(group))}:")
        _print_audit(group)


def print_notes(notes: Iterable[str]) -> None:
    """Print notes about an answer, a line each."""
    for note in notes:
        say(f"note: {note}")


def mean_of(usual: int, kept: int) -> str:
    """Say of which steps a step's time is the mean: of `usual` ones among those that are kept."""
    return "mean of the middle half" if usual < kept else "mean of all"


def left_out(steps: int) -> str:
    """Return how many steps the time of a step leaves out, as the end of its definition."""
    return f", {steps:,} left out as unusual" if steps else ""


def columns() -> int:
    """Return the width of the terminal; 80 without a terminal."""
    return max(shutil.get_terminal_size().columns, _LEAST_COLUMNS)


def say(text: str) -> None:
    """Print a sentence; the lines after its first stand two columns further to the right."""
    indent = " " * (len(text) - len(text.lstrip()))
    room = min(columns(), _MOST_COLUMNS)
    lines = wrap(
        visible(text.strip()),
        room,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_on_hyphens=False,
    )
    sys.stdout.write("\n".join(lines) + "\n")


def say_flush(text: str) -> None:
    """Print the sentences of an answer, each line at the left."""
    for line in wrap(visible(text), min(columns(), _MOST_COLUMNS), break_on_hyphens=False):
        sys.stdout.write(f"{line}\n")


def draw(line: str) -> None:
    """Print a line of a drawing, cut at the width of the terminal."""
    sys.stdout.write(visible(line)[: columns()] + "\n")


def say_code(line: str) -> None:
    """Print a line of code, which stays whole."""
    sys.stdout.write(visible(line) + "\n")


def say_command(command: str) -> None:
    """Print a command that can be pasted; a line that is too long continues after a backslash."""
    lines = wrap(
        visible(command),
        columns() - 4,
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    sys.stdout.write(" \\\n".join(lines) + "\n")


def print_table(headings: list[str], rows: list[list[str]], texts: set[str]) -> None:
    """Print columns, numbers to the right and the named texts to the left, within the terminal.

    If they are too wide, texts continue in the next line. Columns that still do not fit follow
    below, each time beside the first column.
    """
    table = [[visible(cell) for cell in row] for row in [headings, *rows]]
    widths = [max(len(row[column]) for row in table) for column in range(len(headings))]
    is_text = [heading in texts for heading in headings]
    room = columns() - 2 * (len(widths) - 1)
    texts_at = [place for place, is_left in enumerate(is_text) if is_left]
    least = [
        min(width, _LEAST_TEXT) if is_left else width
        for width, is_left in zip(widths, is_text, strict=True)
    ]
    while texts_at and sum(least) <= room < sum(widths):
        widths[max(texts_at, key=widths.__getitem__)] -= 1
    first = min(widths[0], columns() // 2)
    widths = [first, *(min(width, columns() - 2 - first) for width in widths[1:])]
    for places in _parts_of_table(widths):
        for number, row in enumerate(table):
            cells = [wrap(row[place], max(widths[place], 1)) or [""] for place in places]
            for line in zip_longest(*cells, fillvalue=""):
                written = [
                    cell.ljust(widths[place]) if is_text[place] else cell.rjust(widths[place])
                    for cell, place in zip(line, places, strict=True)
                ]
                sys.stdout.write("  ".join(written).rstrip() + "\n")
            if number == 0:
                sys.stdout.write("  ".join("─" * widths[place] for place in places) + "\n")
        sys.stdout.write("\n")


def _parts_of_table(widths: Sequence[int]) -> Iterator[list[int]]:
    """Divide columns into tables that fit the terminal, each beginning with the first column."""
    part = [0]
    for place in range(1, len(widths)):
        if len(part) > 1 and sum(widths[column] + 2 for column in [*part, place]) - 2 > columns():
            yield part
            part = [0]
        part.append(place)
    yield part


def print_codecs(result: Codecs) -> None:
    """Print the table, and the conditions of its last column."""
    say(f"Codecs on {result.machine}, for a bucket of {show_bytes(result.bucket_bytes)}.")
    headings = ["codec", "bytes", "ratio"]
    for speed in result.codecs[0].speeds:
        count = int(speed["threads"])
        threads = f"{count} thread{'s' * (count > 1)}"
        headings += [f"pack, {threads}", f"unpack, {threads}"]
    headings += ["error, gaussian", "error, real", "pays"]
    print_table(headings, [_codec_cells(row) for row in result.codecs], texts={"codec", "pays"})
    say("")
    say(
        f"Pays: {result.model} on {result.workers} workers takes a shorter step with the codec, "
        "packed by one thread in line with the transfer, on a full line. Errors are squared and "
        f"relative to the gradients; the real ones are of {result.gradients}."
    )


def _codec_cells(row: CodecRow) -> list[str]:
    from fullwire.answers.codecs import pays

    cells = [row.codec, show_bytes(row.packed_bytes), f"{row.ratio:.4g}"]
    for speed in row.speeds:
        cells += [f"{speed[name] / 8e9:.3g} GB/s" for name in ("pack_bps", "unpack_bps")]
    return [*cells, f"{row.gaussian_error:.2g}", f"{row.gradient_error:.2g}", pays(row)]
