"""fullwire codecs: compressors on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fullwire.cli.options import Force, Json, print_json
from fullwire.cli.telling import progress, tell


def codecs(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CODEC]...", help="Only these: bf16 powersgd:rank=2"),
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="RUN|WORKLOAD", help="Where a codec pays: for this model")
    ] = "vgg16@v100",
    workers: Annotated[int, typer.Option(min=2, help="Its workers")] = 4,
    gradients: Annotated[
        Path | None,
        typer.Option(help="A file with real gradients, .pt, .npy or .npz; a run holds none"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repeats")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw steps by bandwidth: codecs.png, .svg or .html (offline)"),
    ] = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Measure compressors on this machine.

    The table has bytes, speeds of packing and unpacking, errors, and the bandwidth below which
    each one pays:

    fullwire codecs --model job.run
    fullwire codecs bf16 powersgd:rank=4 --quick
    fullwire codecs --plot codecs.png

    A prediction takes these costs from the JSON:

    fullwire codecs --json > codecs.json
    fullwire whatif job.run --compression 1,bf16,int8 --codec-costs codecs.json
    """
    from fullwire.answers.codecs import codecs as answer

    if plot is not None:
        from fullwire.report.charts import check_plot_path

        check_plot_path(plot, replace=force)
    with progress("measured") as told:
        result = answer(
            names or None,
            model=model,
            workers=workers,
            gradients=gradients,
            quick=quick,
            progress=told,
        )
    if plot is not None:
        from fullwire.report.charts import plot_codecs

        plot_codecs(result, plot)
        tell(f"drawn: {plot}")
    if json:
        from fullwire.report.as_data import codecs_object

        print_json(codecs_object(result))
    else:
        from fullwire.report.terminal import print_codecs

        print_codecs(result)
