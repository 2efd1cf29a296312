"""fullwire collective: time one collective on a cluster."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fullwire.cli.options import ALGORITHMS, ClusterOption, Json, Placement, print_json
from fullwire.cli.telling import progress


def collective(
    op: Annotated[
        str,
        typer.Argument(metavar="OP", help="allreduce, reducescatter, allgather, broadcast ..."),
    ],
    bytes_: Annotated[str, typer.Option("--bytes", help="Size of the whole vector: 64MiB")],
    workers: Annotated[str | None, typer.Option(help="How many take part: 64")] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="Line rate of every worker's link: 100Gbps")
    ] = None,
    latency: Annotated[str | None, typer.Option(help="From one worker to another: 5us")] = None,
    cluster: ClusterOption = None,
    nodes: Annotated[str | None, typer.Option(help="Nodes of the cluster: 16")] = None,
    placement: Placement = "packed",
    order: Annotated[
        str | None, typer.Option(help="The device of each rank, for rings: 0,4,1,5,2,6,3,7")
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(help=f"{ALGORITHMS} the quickest"),
    ] = None,
    servers: Annotated[int, typer.Option(help="So many ranks serve parameters")] = 1,
    chunks: Annotated[int, typer.Option(help="Cut the message into so many")] = 1,
    chunk_order: Annotated[
        str, typer.Option(help="pipelined (all at once) or serial (one after another)")
    ] = "pipelined",
    level: Annotated[
        str | None,
        typer.Option(help="event (play every transfer) or closed (a formula, where one is exact)"),
    ] = None,
    reduce_cost: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measured additions, bytes,seconds a line")
    ] = None,
    json: Json = False,
) -> None:
    """Time one collective on a described network.

    The answer plays every transfer, and compares algorithms with --algorithm auto:

    fullwire collective allreduce --bytes 64MiB --workers 64 --bandwidth 100Gbps
    fullwire collective allreduce --bytes 1GiB --cluster dgx-h100 --algorithm auto
    """
    from fullwire.answers.collective import collective as answer
    from fullwire.report.terminal import print_collective

    with progress("played") as told:
        result = answer(
            op,
            bytes=bytes_,
            workers=workers,
            bandwidth=bandwidth,
            latency=latency,
            algorithm=algorithm,
            chunks=chunks,
            chunk_order=chunk_order,
            level=level,
            reduce_cost=reduce_cost,
            cluster=cluster,
            nodes=nodes,
            placement=placement,
            order=order,
            servers=servers,
            progress=told,
        )
    if json:
        print_json(asdict(result))
    else:
        print_collective(result)
