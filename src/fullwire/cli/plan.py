"""fullwire plan: parallel plans of a large model on a cluster, best first."""

# Annotations are no text here: to compile those of all options takes 2 ms at each start.
from pathlib import Path
from typing import Annotated, Any

import typer

from fullwire.cli.options import Force, Json, On, print_json, with_options
from fullwire.cli.telling import tell


class Question:
    """The options of a search, in the order in which help shows them."""

    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|NAME", help="A described cluster, or several: dgx-a100,dgx-h100"
        ),
    ] = None
    global_batch: Annotated[
        str | None, typer.Option(help="Sequences of a step, of the whole job: 512")
    ] = None
    recorded: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="RUN|TRACES",
            help="A traced job: its plan is recognised, its work corrects the prices",
        ),
    ] = None
    to: Annotated[
        str | None,
        typer.Option(help="With --from, another plan: tp=4,pp=8. The rest stays as recorded"),
    ] = None
    nodes: Annotated[str | None, typer.Option(help="Nodes of the cluster: 64")] = None
    devices: Annotated[
        str | None, typer.Option(help="Devices in use, in place of --nodes: 512 of each cluster")
    ] = None
    seq: Annotated[str | None, typer.Option(help="Tokens of a sequence: 8192")] = None
    precision: Annotated[
        str, typer.Option(help="Of the layers' multiplications: bf16, fp8, mxfp8, nvfp4")
    ] = "bf16"
    device: Annotated[
        str | None,
        typer.Option(help="Where neither cluster nor trace names it: h100, ours.toml"),
    ] = None
    objective: Annotated[
        str,
        typer.Option(help="step (the least time), cost (device-hours) or goodput (with failures)"),
    ] = "step"
    fix: Annotated[
        str | None, typer.Option(help="Choices that the search keeps: tp=8,recompute=none")
    ] = None
    top: Annotated[int, typer.Option(help="Show so many plans")] = 20
    why: Annotated[bool, typer.Option("--why", help="The gain of each choice")] = False
    bandwidth: Annotated[
        str | None, typer.Option(help="NICs of another rate; several are compared: 100Gbps,400Gbps")
    ] = None
    oversubscription: Annotated[
        str | None, typer.Option(help="Other networks between the leaves: 1,2,4")
    ] = None
    hours: Annotated[
        str | None,
        typer.Option(help="Hours of training without failures, on the best cluster: 1000, 30d"),
    ] = None
    failures: Annotated[
        str | None,
        typer.Option(help="Device-hours between two failures: 50000, or a range: 15000-60000"),
    ] = None
    storage: Annotated[
        str | None, typer.Option(help="Rate at which checkpoints are written: 200GB/s, or a range")
    ] = None
    restart: Annotated[
        str | None, typer.Option(help="From a failure to reading the checkpoint: 10min, 5min-30min")
    ] = None
    synchronous_checkpoints: Annotated[
        bool,
        typer.Option("--synchronous-checkpoints", help="Training stops until they are written"),
    ] = False
    price: Annotated[
        str | None, typer.Option(help="Of a device in an hour: '2.10 EUR/device-hour'")
    ] = None
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Measured steps: tp,pp,...,step_time_s (or tokens_s_gpu)"
        ),
    ] = None


@with_options(Question)
def plan(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="llama3-70b, a Hugging Face folder, config.json .."),
    ] = None,
    *,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw time and memory, or time by bandwidth"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="X.run", help="Write the best plan's step as a run."
        ),
    ] = None,
    on: On = "here",
    force: Force = False,
    json: Json = False,
    **asked: Any,
) -> None:
    """Search the parallel plans of a large model, best first.

    Each plan that fits has its step with an interval, its memory, and the communication it shows:

    fullwire plan llama3-8b --cluster dgx-h100 --nodes 4 --global-batch 256
    fullwire plan llama3-70b --cluster dgx-h100 --nodes 64 --global-batch 512
    fullwire plan config.json --cluster ours.toml --device h100 --global-batch 8
    fullwire plan --from job.run --to tp=4,pp=8 --cluster ours.toml

    -o writes the best plan's step as a run: `explain`, `report` and `compare` read it.
    """
    from fullwire.answers.plan import plan as answer
    from fullwire.report.plans import plan_data, plot_plans, print_plan

    if plot is not None:
        from fullwire.report.charts import check_plot_path

        check_plot_path(plot, replace=force)
    result = answer(model, **asked, on=on)
    if plot is not None:
        plot_plans(result, plot)
    if output is not None:
        from fullwire.run.store import write

        tell(f"written: {write(result.run(), output, replace=force)}")
    if json:
        print_json(plan_data(result))
    else:
        print_plan(result)
