"""fullwire whatif: predict a training step under other conditions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullwire.cli.leaving import signals_end_it
from fullwire.cli.options import (
    ALGORITHMS,
    ClusterOption,
    Force,
    Json,
    On,
    Placement,
    print_json,
    with_changes,
)
from fullwire.cli.progress import progress
from fullwire.errors import UsageError
from fullwire.registry import keys_in
from fullwire.units import visible

if TYPE_CHECKING:
    from fullwire.answers.whatif import WhatIf
    from fullwire.run.run import Run

Text = str | None
_CODECS = ",".join(keys_in("fullwire.compression.codecs"))


@with_changes
def whatif(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Runs, or built-in workloads such as vgg16@v100."),
    ],
    bandwidth: Annotated[Text, typer.Option(help="Line rates: 10Gbps,25Gbps")] = None,
    workers: Annotated[Text, typer.Option(help="Cluster sizes: 8,64")] = None,
    compression: Annotated[
        Text,
        typer.Option(help=f"Ratios of a compressor that costs nothing, or codecs: 1,4,{_CODECS}"),
    ] = None,
    codec: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RATIO,ENCODE_RATE,DECODE_RATE,sum|gather",
            help="A compressor with its cost: 4,20GB/s,20GB/s,sum. Can be given several times.",
        ),
    ] = None,
    transport: Annotated[
        str,
        typer.Option(
            help="full, full:SHARE of the line rate that carries payload, measured: as the "
            "collectives of the runs show, or a file that nccl-tests printed"
        ),
    ] = "full",
    calibrate: Annotated[
        list[str] | None,
        typer.Option(metavar="RUN", help="More runs of the same cluster, for --transport measured"),
    ] = None,
    buckets: Annotated[
        Text,
        typer.Option(
            help="ddp, ddp:50MiB, paper, none, 25MiB/5ms or horovod:64MiB/5ms; "
            "if not given, as recorded, else ddp"
        ),
    ] = None,
    algorithm: Annotated[
        Text,
        typer.Option(
            help=f"{ALGORITHMS} the quickest for each message; if not given, as recorded, else "
            "ring, or a ring for each NIC of a cluster"
        ),
    ] = None,
    latency: Annotated[Text, typer.Option(help="From one worker to another: 5us")] = None,
    cluster: ClusterOption = None,
    nodes: Annotated[Text, typer.Option(help="Nodes of the cluster: 2,16")] = None,
    placement: Placement = "packed",
    accumulate: Annotated[
        str, typer.Option(help="Gradients of so many passes are added up, then sent: 1,4")
    ] = "1",
    local_steps: Annotated[
        str, typer.Option(help="Workers average parameters after so many steps of their own: 1,16")
    ] = "1",
    jitter: Annotated[
        str,
        typer.Option(
            help="How ranks scatter, for whose slowest all wait: lognormal:5%, exponential:5%, "
            "measured: as the run's own do, none, or recorded: the waiting that the run shows"
        ),
    ] = "recorded",
    batch: Annotated[
        Text, typer.Option(help="Samples of each worker, for built-in workloads: 32,64")
    ] = None,
    lane: Annotated[
        str,
        typer.Option(help="fifo, or priority: the next forward's first need is sent first"),
    ] = "fifo",
    target: Annotated[
        Text, typer.Option(help="Find the least bandwidth and compression for this scaling: 0.95")
    ] = None,
    best: Annotated[
        int | None,
        typer.Option(min=1, help="Show the best so many, and what their conditions are worth"),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png|svg|html", help="Draw the scaling factors.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="X.run", help="Write the one simulated step as a run."
        ),
    ] = None,
    on: On = "here",
    force: Force = False,
    format_: Annotated[str, typer.Option("--format", help="table, csv or json")] = "table",
    json: Json = False,
    **more: Text,
) -> None:
    """Predict steps and scaling under other networks, cluster sizes and compressors.

    Lists are separated by commas, and every combination is predicted:

    fullwire whatif vgg16@v100 --workers 8,64 --bandwidth 10Gbps,100Gbps --target 0.95
    """
    from fullwire.answers import whatif as answers

    if json and format_ == "csv":
        raise UsageError("--json: expected it or --format csv, got both")
    if calibrate and "measured" not in transport.split(","):
        raise UsageError(
            f"--calibrate: expected --transport measured with it, got --transport {transport}"
        )
    _check_output(plot, format_, force)
    conditions: dict[str, Any] = {
        "bandwidth": bandwidth,
        "workers": workers,
        "compression": compression,
        "codec": codec,
        "transport": transport,
        "buckets": buckets,
        "algorithm": algorithm,
        "latency": latency,
        "jitter": jitter,
        "calibrate": calibrate or (),
        "cluster": cluster,
        "nodes": nodes,
        "placement": placement,
        **more,
    }
    if output is not None:
        if len(runs) != 1:
            raise UsageError(f"-o: expected one run to replay, got {len(runs)}")
        _refuse_unsynchronised(accumulate, local_steps)
        _write(answers.replay(runs[0], lane=lane, **conditions), output, force)
    with progress("predicted") as told, signals_end_it():
        result = answers.whatif(
            runs,
            lane=lane,
            target=target,
            progress=told,
            accumulate=accumulate,
            local_steps=local_steps,
            batch=batch,
            on=on,
            **conditions,
        )
    if plot is not None:
        from fullwire.report.charts import plot_whatif

        plot_whatif(result, plot)
        _tell(f"drawn: {plot}")
    _show(result, "json" if json else format_, best)


def _check_output(plot: Path | None, format_: str, force: bool) -> None:
    if format_ not in ("table", "csv", "json"):
        raise UsageError(f"--format: expected table, csv or json, got {format_!r}")
    if plot is not None:
        from fullwire.report.charts import check_plot_path

        check_plot_path(plot, replace=force)


def _refuse_unsynchronised(accumulate: str, local_steps: str) -> None:
    if (accumulate, local_steps) != ("1", "1"):
        raise UsageError(
            "-o: one simulated step has its collectives; expected no --accumulate, no --local-steps"
        )


def _show(result: WhatIf, format_: str, best: int | None) -> None:
    from fullwire.report import as_data, terminal
    from fullwire.words import sentences

    if format_ == "csv":
        as_data.write_whatif_csv(result, sys.stdout)
    elif format_ == "json":
        print_json(as_data.whatif_object(result, best))
    else:
        for lines in (sentences(result.holding_back), sentences(result.reaching)):
            if lines:
                terminal.print_sentences(lines)
        terminal.print_whatif(result, best)


def _write(run: Run, output: Path, force: bool) -> None:
    from fullwire.run.store import write

    _tell(f"written: {write(run, output, replace=force)}")


def _tell(line: str) -> None:
    sys.stderr.write(f"{visible(line)}\n")
