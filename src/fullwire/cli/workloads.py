"""fullwire workloads: the built-in models."""

from __future__ import annotations

from typing import Annotated

import typer

from fullwire.cli.options import Json, print_json


def workloads(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Only this one, such as vgg16@v100")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples of one worker in one step, if not as usual")
    ] = None,
    json: Json = False,
) -> None:
    """List the built-in models.

    Every command that takes a run takes these names too. vgg16@v100:64 is vgg16@v100 with a batch
    of 64. With a name and --json, the answer has every gradient:

    fullwire workloads vgg16@v100 --json
    """
    from fullwire.report.as_data import workload_object
    from fullwire.report.terminal import print_workloads
    from fullwire.workloads import names, workload

    asked = [name] if name else names()
    loads = [workload(name if batch is None else f"{name}:{batch}") for name in asked]
    if json:
        objects = [workload_object(load, with_gradients=name is not None) for load in loads]
        print_json({"workloads": objects})
    else:
        print_workloads(loads)
