"""fullwire whatif: predict a training step under other conditions."""

# Annotations are no text here: to compile those of all options takes 2 ms at each start.
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
    LineRate,
    On,
    Placement,
    Verbose,
    print_json,
    with_options,
)
from fullwire.cli.telling import progress, tell
from fullwire.errors import UsageError
from fullwire.registry import keys_in

if TYPE_CHECKING:
    from fullwire.answers.whatif import WhatIf

Text = str | None
_CODECS = ",".join(keys_in("fullwire.compression.codecs"))


class Conditions:
    """The conditions of a prediction, in the order in which help shows them."""

    bandwidth: Annotated[Text, typer.Option(help="Line rates: 10Gbps,25Gbps")] = None
    workers: Annotated[Text, typer.Option(help="Cluster sizes: 8,64")] = None
    compression: Annotated[
        Text,
        typer.Option(
            help=f"Ratios of a compressor that costs nothing, none, or codecs: none,4,{_CODECS}"
        ),
    ] = None
    codec: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RATIO,ENCODE_RATE,DECODE_RATE,sum|exchange|gather[,TIME]",
            help="A compressor with its cost: 4,20GB/s,20GB/s,sum. TIME is for each bucket. "
            "Can be given several times.",
        ),
    ] = None
    codec_costs: Annotated[
        Path | None,
        typer.Option(
            help="Costs of codecs, as fullwire codecs --json printed them on your machine"
        ),
    ] = None
    transport: Annotated[
        str,
        typer.Option(
            help="full, full:SHARE of the line rate that carries payload, measured: as the "
            "collectives of the runs show, or a file that nccl-tests or an OSU benchmark printed"
        ),
    ] = "full"
    calibrate: Annotated[
        list[str] | None,
        typer.Option(metavar="RUN", help="More runs of the same cluster, for --transport measured"),
    ] = None
    line_rate: LineRate = None
    buckets: Annotated[
        Text,
        typer.Option(
            help="ddp, ddp:50MiB, paper, none, 25MiB/5ms or horovod:64MiB/5ms "
            "[default: as recorded, else ddp]"
        ),
    ] = None
    algorithm: Annotated[
        Text,
        typer.Option(
            help=f"{ALGORITHMS} the quickest for each message; if not given, as recorded, else "
            "ring, or a ring for each NIC of a cluster"
        ),
    ] = None
    latency: Annotated[Text, typer.Option(help="From one worker to another: 5us")] = None
    cluster: ClusterOption = None
    nodes: Annotated[Text, typer.Option(help="Nodes of the cluster: 2,16")] = None
    placement: Placement = "packed"
    accumulate: Annotated[
        str,
        typer.Option(
            help="Gradients of so many times the recorded passes are added up, then sent: 1,4"
        ),
    ] = "1"
    local_steps: Annotated[
        Text,
        typer.Option(
            help="Workers average parameters after so many steps of their own: 1,16; if not "
            "given, as recorded"
        ),
    ] = None
    jitter: Annotated[
        str,
        typer.Option(
            help="How the times of ranks scatter: lognormal:5%, exponential:5%, none, measured "
            "(as in the run), or recorded (the waiting of the run). All ranks wait for the slowest."
        ),
    ] = "recorded"
    batch: Annotated[
        Text, typer.Option(help="Samples of each worker, for built-in workloads: 32,64")
    ] = None
    failures: Annotated[
        Text,
        typer.Option(
            metavar="TIME",
            help="Goodput of an elastic job that loses a worker each so often: 20s,5min",
        ),
    ] = None
    lane: Annotated[
        str,
        typer.Option(help="fifo, or priority: the next forward's first need is sent first"),
    ] = "fifo"


class Target:
    """A target, and the evidence for the time until a metric is there."""

    target: Annotated[
        Text,
        typer.Option(
            help="0.95: the least bandwidth and compression for this scaling factor. "
            "'loss<=0.3': the time until a metric of the run is there"
        ),
    ] = None
    global_batch: Annotated[
        Text,
        typer.Option(help="Samples of a step of the whole job, with a metric's target: 256,1024"),
    ] = None
    curve: Annotated[
        list[str] | None,
        typer.Option(metavar="RUN", help="More runs with the target's metric, at other batches"),
    ] = None
    recorded_batch: Annotated[
        Text,
        typer.Option(
            help="Global batch of RUN and of each --curve, where runs do not say: 256,1024"
        ),
    ] = None
    critical_batch: Annotated[
        float | None,
        typer.Option(help="Batch at which a training needs twice the samples, if you know it"),
    ] = None
    price: Annotated[
        Text, typer.Option(help="Of a device, for the cost of a target: '2.10 EUR/device-hour'")
    ] = None


@with_options(Conditions, Target, changes=True)
def whatif(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Runs, or built-in workloads such as vgg16@v100."),
    ],
    *,
    best: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Show so many of the best rows, each with the gain of its conditions; csv has all",
        ),
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
    verbose: Verbose = False,
    json: Json = False,
    **asked: Any,
) -> None:
    """Predict a step with other links, workers or compression.

    Commas separate the values of a list. Every combination is predicted:

    fullwire whatif job.run --bandwidth 10Gbps,25Gbps --workers 8,64
    fullwire whatif job.run --transport measured --bandwidth 10Gbps
    fullwire whatif job.run --line-rate 1Gbps --transport measured
    fullwire whatif job.run --cluster dgx-h100 --nodes 2,16
    fullwire whatif vgg16@v100 --workers 8,64 --bandwidth 10Gbps --target 0.95
    fullwire whatif job.run --curve b.run --target 'loss<=0.3' --global-batch 256

    The first line is the answer. -v adds all notes. `fullwire workloads` lists the built-in
    models, `fullwire cluster list` the built-in clusters.
    """
    from fullwire.answers import whatif as answers

    _check_together(format_, json, asked["calibrate"], asked["transport"])
    if output is not None and len(runs) != 1:
        raise UsageError(f"-o: expected one run to replay, got {len(runs)}")
    if plot is not None:
        from fullwire.report.charts import check_plot_path, plot_whatif

        check_plot_path(plot, replace=force)
    if output is not None:
        from fullwire.run.store import write

        kept = set(asked) - set(vars(Target)) - {"failures"}
        conditions = {name: asked[name] for name in asked if name in kept}
        step = answers.replay(runs[0], **conditions)
        tell(f"written: {write(step, output, replace=force)}")
    with progress("predicted") as told, signals_end_it():
        result = answers.whatif(runs, progress=told, on=on, **asked)
    if plot is not None:
        plot_whatif(result, plot)
        tell(f"drawn: {plot}")
    _show(result, "json" if json else format_, best, is_full=verbose)


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


def _show(result: "WhatIf", format_: str, best: int | None, *, is_full: bool) -> None:
    from fullwire.report import as_data, terminal

    if format_ == "csv":
        as_data.write_whatif_csv(result, sys.stdout)
    elif format_ == "json":
        print_json(as_data.whatif_object(result, best))
    else:
        terminal.print_whatif(result, best, is_full=is_full)
