"""fullwire import: a foreign trace becomes a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fullwire.cli.leaving import signals_end_it
from fullwire.cli.options import Force, On
from fullwire.cli.telling import tell
from fullwire.registry import keys_in

_MOST_SAID = 5  # gaps
_FORMATS = ", ".join(keys_in("fullwire.importers"))


def import_(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Files or folders")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="X.run", help="The run to write")
    ],
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            help=f"Format, where the content does not tell it: {_FORMATS}",
        ),
    ] = None,
    step_time: Annotated[
        str | None, typer.Option(help="Length of a whole step, for a netx log: 194.5ms")
    ] = None,
    reduce_cost: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Measured additions for a netx log, bytes,seconds a line"
        ),
    ] = None,
    communication: Annotated[
        str | None,
        typer.Option(metavar="REGEX", help="Names of kernels that communicate, besides known ones"),
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX",
            help="How a training log tells a step: a group named s, ms, us or per_s is its length",
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="How many profiler traces are read at once [default: processors]"),
    ] = None,
    on: On = "here",
    force: Force = False,
) -> None:
    """Make a run of another tool's traces.

    Profiler traces, Horovod timelines, NCCL logs and others, single files or whole folders. The
    format is recognised from the content. One rank is enough: the answer names what the other ranks
    would show.

    fullwire import traces/ nccl-logs/ -o job.run
    fullwire import rank0.json -o job.run
    fullwire import vgg16.log --step-time 194.5ms -o vgg16.run
    """
    from fullwire.importers import import_run
    from fullwire.run.store import read_run

    def show_progress(done: int, of: int) -> None:
        if sys.stderr.isatty() and of > 1:
            end = "\n" if done == of else ""
            sys.stderr.write(f"\rread: {done:,} of {of:,} traces{end}")
            sys.stderr.flush()

    with signals_end_it():
        place = import_run(
            output,
            *files,
            format=format_,
            step_time=step_time,
            reduce_cost=reduce_cost,
            communication=communication,
            pattern=pattern,
            processes=processes,
            on=on,
            replace=force,
            told=show_progress,
        )
    tell(f"written: {place}")
    missing = read_run(place, only=()).missing
    for sentence in missing[:_MOST_SAID]:
        tell(f"note: PARTIAL: {sentence}")
    if len(missing) > _MOST_SAID:
        more = len(missing) - _MOST_SAID
        tell(f"note: PARTIAL: {more:,} more, which `fullwire show` names")
