"""fullwire workloads: the built-in models."""

from __future__ import annotations

from typing import Annotated

import typer

from fullwire.cli.options import Json, print_json


def workloads(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Only this one, such as vgg16@v100")
    ] = None,
    json: Json = False,
) -> None:
    """List the built-in models, usable wherever a run is; --json NAME prints every gradient."""
    from fullwire.model.workloads import names, workload
    from fullwire.report.as_data import workload_object
    from fullwire.report.terminal import print_workloads

    loads = [workload(each) for each in ([name] if name else names())]
    if json:
        objects = [workload_object(load, with_gradients=name is not None) for load in loads]
        print_json({"workloads": objects})
    else:
        print_workloads(loads)
