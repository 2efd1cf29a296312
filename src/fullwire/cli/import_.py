"""fullwire import: a foreign trace becomes a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fullwire.cli.options import Force


def import_(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="What to read")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="X.run", help="The run to write")
    ],
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="What it is, if the content does not tell: kineto, horovod, nccl-tests, nccl-log, "
            "flight-recorder, chakra, chrome or netx",
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
    force: Force = False,
) -> None:
    """Read another tool's trace and write it as a run.

    fullwire import traces/ nccl-logs/ -o job.run

    fullwire import vgg16.bk.log --step-time 194.5ms --reduce-cost cuda_vec_add.log -o vgg16.run
    """
    from fullwire.sources import read
    from fullwire.store import write

    run = read(
        *files, format=format_, step_time=step_time, reduce_cost=reduce_cost,
        communication=communication,
    )  # fmt: skip
    place = write(run, output, replace=force)
    sys.stderr.write(f"written: {place}\n")
