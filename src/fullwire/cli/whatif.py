"""fullwire whatif: predict a training step under other conditions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from fullwire.cli.leaving import signals_end_it
from fullwire.cli.options import (
    ALGORITHMS,
    ClusterOption,
    Force,
    Json,
    LineRate,
    On,
    Placement,
    print_json,
    with_changes,
)
from fullwire.cli.telling import progress, tell
from fullwire.errors import UsageError
from fullwire.registry import keys_in

if TYPE_CHECKING:
    from fullwire.answers.whatif import WhatIf

Text = str | None
_CODECS = ",".join(keys_in("fullwire.compression.codecs"))


Runs: TypeAlias = Annotated[
    list[str],
    typer.Argument(metavar="RUN...", help="Runs, or built-in workloads such as vgg16@v100."),
]
Bandwidth: TypeAlias = Annotated[Text, typer.Option(help="Line rates: 10Gbps,25Gbps")]
Workers: TypeAlias = Annotated[Text, typer.Option(help="Cluster sizes: 8,64")]
Compression: TypeAlias = Annotated[
    Text,
    typer.Option(help=f"Ratios of a compressor that costs nothing, or codecs: 1,4,{_CODECS}"),
]
Codec: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RATIO,ENCODE_RATE,DECODE_RATE,sum|exchange|gather",
        help="A compressor with its cost: 4,20GB/s,20GB/s,sum. Can be given several times.",
    ),
]
CodecCosts: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="Costs of codecs, as fullwire codecs --json printed them on your machine"),
]
Transport: TypeAlias = Annotated[
    str,
    typer.Option(
        help="full, full:SHARE of the line rate that carries payload, measured: as the "
        "collectives of the runs show, or a file that nccl-tests or an OSU benchmark printed"
    ),
]
Calibrate: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(metavar="RUN", help="More runs of the same cluster, for --transport measured"),
]
Buckets: TypeAlias = Annotated[
    Text,
    typer.Option(
        help="ddp, ddp:50MiB, paper, none, 25MiB/5ms or horovod:64MiB/5ms; "
        "if not given, as recorded, else ddp"
    ),
]
Algorithm: TypeAlias = Annotated[
    Text,
    typer.Option(
        help=f"{ALGORITHMS} the quickest for each message; if not given, as recorded, else "
        "ring, or a ring for each NIC of a cluster"
    ),
]
Latency: TypeAlias = Annotated[Text, typer.Option(help="From one worker to another: 5us")]
Nodes: TypeAlias = Annotated[Text, typer.Option(help="Nodes of the cluster: 2,16")]
Accumulate: TypeAlias = Annotated[
    str, typer.Option(help="Gradients of so many passes are added up, then sent: 1,4")
]
LocalSteps: TypeAlias = Annotated[
    str, typer.Option(help="Workers average parameters after so many steps of their own: 1,16")
]
Jitter: TypeAlias = Annotated[
    str,
    typer.Option(
        help="How ranks scatter, for whose slowest all wait: lognormal:5%, exponential:5%, "
        "measured: as the run's own do, none, or recorded: the waiting that the run shows"
    ),
]
Batch: TypeAlias = Annotated[
    Text, typer.Option(help="Samples of each worker, for built-in workloads: 32,64")
]
Lane: TypeAlias = Annotated[
    str,
    typer.Option(help="fifo, or priority: the next forward's first need is sent first"),
]
Target: TypeAlias = Annotated[
    Text,
    typer.Option(
        help="0.95: the least bandwidth and compression for this scaling factor; or 'loss<=0.3': "
        "the time until a metric of the run is there"
    ),
]
GlobalBatch: TypeAlias = Annotated[
    Text, typer.Option(help="Samples of a step of the whole job, with a metric's target: 256,1024")
]
Curve: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(metavar="RUN", help="More runs with the target's metric, at other batches"),
]
RecordedBatch: TypeAlias = Annotated[
    Text,
    typer.Option(help="Global batch of RUN and of each --curve, where runs do not say: 256,1024"),
]
CriticalBatch: TypeAlias = Annotated[
    float | None,
    typer.Option(help="Batch at which a training needs twice the samples, if you know it"),
]
Price: TypeAlias = Annotated[
    Text, typer.Option(help="Of a device, for the cost of a target: '2.10 EUR/device-hour'")
]
Best: TypeAlias = Annotated[
    int | None,
    typer.Option(min=1, help="Show the best so many, and what their conditions are worth"),
]
Plot: TypeAlias = Annotated[
    Path | None, typer.Option(metavar="FILE.png|svg|html", help="Draw the scaling factors.")
]
Output: TypeAlias = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="X.run", help="Write the one simulated step as a run."),
]
Format: TypeAlias = Annotated[str, typer.Option("--format", help="table, csv or json")]


@with_changes
def whatif(
    runs: Runs,
    bandwidth: Bandwidth = None,
    workers: Workers = None,
    compression: Compression = None,
    codec: Codec = None,
    codec_costs: CodecCosts = None,
    transport: Transport = "full",
    calibrate: Calibrate = None,
    line_rate: LineRate = None,
    buckets: Buckets = None,
    algorithm: Algorithm = None,
    latency: Latency = None,
    cluster: ClusterOption = None,
    nodes: Nodes = None,
    placement: Placement = "packed",
    accumulate: Accumulate = "1",
    local_steps: LocalSteps = "1",
    jitter: Jitter = "recorded",
    batch: Batch = None,
    lane: Lane = "fifo",
    target: Target = None,
    global_batch: GlobalBatch = None,
    curve: Curve = None,
    recorded_batch: RecordedBatch = None,
    critical_batch: CriticalBatch = None,
    price: Price = None,
    best: Best = None,
    plot: Plot = None,
    output: Output = None,
    on: On = "here",
    force: Force = False,
    format_: Format = "table",
    json: Json = False,
    **more: Text,
) -> None:
    """Predict a step under other conditions.

    Commas separate the values of a list. Every combination is predicted:

    fullwire whatif job.run --bandwidth 10Gbps,25Gbps --workers 8,64
    fullwire whatif job.run --transport measured --bandwidth 10Gbps
    fullwire whatif job.run --line-rate 1Gbps --transport measured
    fullwire whatif job.run --cluster dgx-h100 --nodes 2,16
    fullwire whatif vgg16@v100 --workers 8,64 --bandwidth 10Gbps --target 0.95
    fullwire whatif job.run --curve b.run --target 'loss<=0.3' --global-batch 256

    `fullwire workloads` lists the built-in models, `fullwire cluster list` the built-in clusters.
    """
    from fullwire.answers import whatif as answers
    from fullwire.run.store import write

    _check_together(format_, json, calibrate, transport)
    if output is not None:
        _check_replay(runs, accumulate, local_steps)
    if plot is not None:
        from fullwire.report.charts import check_plot_path, plot_whatif

        check_plot_path(plot, replace=force)
    network = {"bandwidth": bandwidth, "latency": latency, "line_rate": line_rate}
    placed = {"workers": workers, "cluster": cluster, "nodes": nodes, "placement": placement}
    sent = {"compression": compression, "buckets": buckets, "algorithm": algorithm}
    believed = {"transport": transport, "calibrate": calibrate or (), "jitter": jitter}
    conditions: dict[str, Any] = {
        **network,
        **placed,
        **sent,
        "codec": codec,
        "codec_costs": codec_costs,
        **believed,
        **more,
    }
    if output is not None:
        step = answers.replay(runs[0], lane=lane, **conditions)
        tell(f"written: {write(step, output, replace=force)}")
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
            global_batch=global_batch,
            curve=curve or (),
            recorded_batch=recorded_batch,
            critical_batch=critical_batch,
            price=price,
            **conditions,
        )
    if plot is not None:
        plot_whatif(result, plot)
        tell(f"drawn: {plot}")
    _show(result, "json" if json else format_, best)


def _check_together(format_: str, json: bool, calibrate: object, transport: str) -> None:
    """Refuse options of which one would be ignored."""
    if format_ not in ("table", "csv", "json"):
        raise UsageError(f"--format: expected table, csv or json, got {format_!r}")
    if json and format_ == "csv":
        raise UsageError("--json: expected it or --format csv, got both")
    if calibrate and "measured" not in transport.split(","):
        raise UsageError(
            f"--calibrate: expected --transport measured with it, got --transport {transport}"
        )


def _check_replay(runs: list[str], accumulate: str, local_steps: str) -> None:
    """Refuse several runs, and steps that one simulated step cannot show."""
    if len(runs) != 1:
        raise UsageError(f"-o: expected one run to replay, got {len(runs)}")
    if (accumulate, local_steps) != ("1", "1"):
        raise UsageError(
            "-o: one simulated step has its collectives; expected no --accumulate, no --local-steps"
        )


def _show(result: WhatIf, format_: str, best: int | None) -> None:
    from fullwire.report import as_data, terminal

    if format_ == "csv":
        as_data.write_whatif_csv(result, sys.stdout)
    elif format_ == "json":
        print_json(as_data.whatif_object(result, best))
    else:
        for found in filter(None, (result.holding_back, result.reaching)):
            terminal.print_sentences_of(found)
            terminal.say("")
        terminal.print_whatif(result, best)
