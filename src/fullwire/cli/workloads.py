"""fullwire workloads: the built-in models."""

from __future__ import annotations

from typing import Annotated

import typer

from fullwire.cli.options import Json, print_json


def workloads(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="Only this one: vgg16@v100, llama3-70b, or a config.json"
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples of one worker in one step, if not as usual")
    ] = None,
    json: Json = False,
) -> None:
    """List the built-in models.

    Every command that takes a run takes names with a device, such as vgg16@v100. vgg16@v100:64 has
    a batch of 64. With such a name and --json, the answer has every gradient. Large transformers
    take every device of `fullwire plan`: llama3-70b@b200. Without a device they are listed by their
    dimensions. They may also be a config.json, Megatron's arguments or a TOML file of torchtitan:

    fullwire workloads vgg16@v100 --json
    fullwire workloads llama3-70b
    """
    from fullwire.report.as_data import architecture_object, workload_object
    from fullwire.report.terminal import print_architectures, print_workloads
    from fullwire.workloads import MODELS, names, workload
    from fullwire.workloads.architecture_files import architecture
    from fullwire.workloads.architecture_files import names as architecture_names

    is_large = name is not None and "@" not in name and name not in MODELS and batch is None
    asked = [] if is_large else [name] if name else names()
    loads = [workload(name if batch is None else f"{name}:{batch}") for name in asked]
    large = [name] if is_large and name else [] if name or batch else architecture_names()
    models = [architecture(name) for name in large]
    if json:
        answer: dict[str, object] = {
            "workloads": [workload_object(load, with_gradients=name is not None) for load in loads]
        }
        if models:
            answer["models"] = [architecture_object(model) for model in models]
        print_json(answer)
        return
    if loads:
        print_workloads(loads)
    if loads and models:
        print()
    if models:
        print_architectures(models)
