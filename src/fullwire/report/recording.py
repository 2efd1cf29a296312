"""The lines after a recorded job has ended: a summary on standard error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from shlex import quote
from textwrap import wrap
from typing import cast

import numpy as np

from fullwire.findings.audit import audit_of_recording
from fullwire.findings.between import between_steps
from fullwire.findings.kinds_of_steps import about_passes, too_few_of_a_kind
from fullwire.report.terminal import columns, left_out, mean_of
from fullwire.run.run import Hosts, Links, Run
from fullwire.run.store import read_parts, read_rows, read_run, rows_written
from fullwire.timeline.contention import probe_steps
from fullwire.timeline.passes import passes_add_up
from fullwire.timeline.summary import (
    Windows,
    links_in_use,
    processor_use,
    summarised,
)
from fullwire.units import show_bytes, show_count, show_rate, show_time
from fullwire.words import sentence as in_words

_LABEL = 17  # columns before the text of a line
# of all ranks; for this many, the times when they were outstanding stay in memory
MOST_COLLECTIVES = 50_000


def recording_lines(path: Path) -> Iterator[str]:
    """Yield the lines that sum a recording up, fitted to the terminal, to the next command."""
    for line in _summary(path):
        hanging = _LABEL if line.startswith("  ") and line[_LABEL - 1 : _LABEL] == " " else 4
        yield from wrap(line, columns(), subsequent_indent=" " * hanging)
    has_steps = rows_written(path).get("spans", 0)
    yield f"Next: fullwire {'explain' if has_steps else 'show'} {quote(str(path))}"


def _counting_probes(parts: Iterable[Run], probes: list[int]) -> Iterator[Run]:
    """Hand the parts of a run on, and note how many probe steps each rank has had."""
    for part in parts:
        probes += np.unique(probe_steps(part).rank, return_counts=True)[1].tolist()
        yield part


def _summary(path: Path) -> Iterator[str]:
    """Yield the parts of the summary; only some ranks are in memory at a time."""
    run = read_run(path, only=())
    gaps = list(run.gaps)
    collectives = rows_written(path).get("collectives", 0)
    windows = Windows(every_nth_step=1 + collectives // MOST_COLLECTIVES)
    parts = read_parts(path, only=("spans", "gradients", "collectives"))
    probes = [0]
    summary = summarised(windows.seen_in(_counting_probes(parts, probes)))
    ranks = show_count(summary.ranks, "rank")
    if summary.step_s is None:
        yield f"fullwire: {ranks}, no steps"
    else:
        kept = summary.steps - summary.left_out
        which = mean_of(summary.usual, kept) + (" by duration" if summary.usual < kept else "")
        which += f", of each of {summary.kinds} kinds" if summary.kinds > 1 else ""
        which += left_out(summary.left_out)
        is_mean = kept > 1 or summary.left_out or summary.kinds > 1
        yield (
            f"fullwire: {ranks}, {show_count(summary.steps, 'step')} of "
            f"{show_time(summary.step_s)}"
            + (f" ({which})" if is_mean else "")
            + (f", and {show_count(max(probes), 'probe step')}" if max(probes) else "")
        )
    if (summary.passes or 1) > 1:
        add_up, is_mean = passes_add_up(run), summary.kinds > 1
        work = about_passes(summary.passes or 1, add_up=add_up, is_mean=is_mean)
        yield f"  work           {in_words(work)}"
    for few in too_few_of_a_kind(summary.unlike):
        yield f"  kinds of steps {in_words(few)}"
    if summary.longer:
        yield (
            f"  longer steps   {summary.longer:,} of {summary.steps:,}, "
            f"{show_time(summary.longer_by_s)} more than usual in all"
        )
    if summary.pauses is not None:
        yield f"  pauses         {in_words(between_steps(summary.pauses))}"
    if summary.exposed_s is not None and summary.step_s:
        yield (
            f"  communication  {show_bytes(summary.collective_bytes or 0)} a step on each rank, "
            f"exposed for {show_time(summary.exposed_s)} "
            f"({summary.exposed_s / summary.step_s:.0%} of the step)"
        )
        # The use of links and processors, if it was sampled.
        samples = cast(Iterator[Links], read_rows(path, "links", gaps))
        links = [link for link in links_in_use(run, samples, windows) if link.in_steps is not None]
        if links:
            busiest = max(links, key=lambda link: link.in_steps or 0)
            used = f"{busiest.in_steps:.0%} of {show_rate(busiest.line_rate_bps)} used"
            if busiest.while_communicating is not None:
                used += f", {busiest.while_communicating:.0%} while communication was outstanding"
            yield f"  links          {used} ({busiest.host}, the busiest of {len(links)})"
        in_use = processor_use(cast(Iterator[Hosts], read_rows(path, "hosts", gaps)), windows)
        if in_use is not None:
            yield f"  processors     {in_use:.0%} in use on average"
        cost_s, share = run.facts.recorder_s, run.facts.sampler_share
        own_cost = "its own cost is unknown: no process closed its recording"
        if cost_s is not None:
            own_cost = f"{show_time(cost_s)} of CPU time in a step ({cost_s / summary.step_s:.2%})"
        sampler = f"; sampler {share:.2%} of a processor" if share is not None else ""
        yield f"  recorder       {own_cost}{sampler}"
    captured, dropped = run.facts.captured_packets, run.facts.dropped_packets
    if captured is not None:
        yield f"  packets        {captured:,} captured, {dropped or 'none'} dropped"
        for finding in audit_of_recording(read_run(path, only=("links",))):
            yield f"                 {in_words(finding)}"
    if run.facts.dilation is not None:
        yield f"  undilated      all times; the job ran {run.facts.dilation:g} times slower"
    yield f"  written        {path}" + (", PARTIAL:" if gaps else "")
    for gap in gaps:
        yield f"    {gap}"
