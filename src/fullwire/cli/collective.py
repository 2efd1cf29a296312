"""fullwire collective: time one collective on a cluster."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fullwire.cli.options import Json, print_json


def collective(
    op: Annotated[
        str,
        typer.Argument(metavar="OP", help="allreduce, reducescatter, allgather or broadcast"),
    ],
    bytes_: Annotated[str, typer.Option("--bytes", help="Size of the whole vector: 64MiB")],
    workers: Annotated[str, typer.Option(help="How many take part: 64")],
    bandwidth: Annotated[str, typer.Option(help="Line rate of every worker's link: 100Gbps")],
    latency: Annotated[str, typer.Option(help="From one worker to another: 5us")] = "0s",
    algorithm: Annotated[str, typer.Option(help="ring, tree or halving-doubling")] = "ring",
    chunks: Annotated[int, typer.Option(help="Cut the message into so many")] = 1,
    chunk_order: Annotated[
        str, typer.Option(help="pipelined: all at once; serial: one after another")
    ] = "pipelined",
    level: Annotated[
        str, typer.Option(help="event: play every transfer; closed: a formula, where one is exact")
    ] = "event",
    reduce_cost: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measured additions, bytes,seconds a line")
    ] = None,
    json: Json = False,
) -> None:
    """Time one collective, transfer by transfer.

    fullwire collective allreduce --bytes 64MiB --workers 64 --bandwidth 100Gbps --latency 5us
    """
    from fullwire.answers.collective import collective as answer
    from fullwire.report.terminal import print_collective

    result = answer(
        op, bytes=bytes_, workers=workers, bandwidth=bandwidth, latency=latency,
        algorithm=algorithm, chunks=chunks, chunk_order=chunk_order, level=level,
        reduce_cost=reduce_cost,
    )  # fmt: skip
    if json:
        print_json(asdict(result))
    else:
        print_collective(result)
