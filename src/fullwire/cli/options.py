"""Options that several commands share, and how JSON is printed."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias, get_type_hints

import typer

from fullwire.simulation.conditions import CHANGES

Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Verbose: TypeAlias = Annotated[
    bool, typer.Option("-v", "--verbose", help="Everything behind the answer, and all notes.")
]
Force: TypeAlias = Annotated[bool, typer.Option("--force", help="Replace what exists.")]
ClusterOption: TypeAlias = Annotated[
    str | None,
    typer.Option("--cluster", metavar="FILE|NAME", help="A described cluster: dgx-h100, ours.toml"),
]
LineRate: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--line-rate", help="Line rate of the recorded links, where a run does not say: 10Gbps"
    ),
]
Placement: TypeAlias = Annotated[
    str,
    typer.Option(help="Ranks on its devices: packed node by node, or scattered over its leaves"),
]
On: TypeAlias = Annotated[
    str,
    typer.Option(
        "--on",
        metavar="here|ray|ADDRESS",
        help="Where to compute: this machine, the Ray cluster of RAY_ADDRESS or a new one (ray), "
        "or the cluster at HOST:PORT or ray://HOST:PORT",
    ),
]
ALGORITHMS = (
    "ring, tree, halving-doubling, or on clusters multi-ring, hierarchical, torus, in-network and "
    "others (an unknown name lists them all), auto:"
)
Packets: TypeAlias = Annotated[
    bool, typer.Option("--packets", help="Capture packet headers meanwhile, for fullwire flows")
]
Noise: TypeAlias = Annotated[
    bool,
    typer.Option("--noise", help="Note gradient noise, which tells how large a batch helps"),
]
Metric: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="A metric in the job's output: 'loss: ([0-9.]+)'. Can be given several times.",
    ),
]


def with_options(
    *declared: type, changes: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command that takes any options those that these classes declare, before its own.

    With `changes`, it has one for each condition that changes the recorded step too.
    """

    def give(command: Callable[..., None]) -> Callable[..., None]:
        signature, hints = inspect.signature(command), get_type_hints(command, include_extras=True)
        parameters = [
            parameter.replace(annotation=hints[parameter.name])
            for parameter in signature.parameters.values()
            if parameter.kind is not parameter.VAR_KEYWORD
        ]
        options = [
            (name, hint, getattr(options_of, name, inspect.Parameter.empty))
            for options_of in declared
            for name, hint in get_type_hints(options_of, include_extras=True).items()
        ]
        more = [
            (change.option, Annotated[str | None, typer.Option(help=change.help)], None)
            for change in (CHANGES.values() if changes else ())
        ]
        first = [
            parameter for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY
        ]
        whole = [
            *first,
            *(_option(*option) for option in options),
            *parameters[len(first) :],
            *(_option(*option) for option in more),
        ]
        command.__signature__ = signature.replace(parameters=whole)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in whole}
        return command  # typer makes options of its signature

    return give


def _option(name: str, hint: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def print_json(shown: Any) -> None:
    """Print one JSON object; numbers keep all their digits."""
    import json

    import msgspec

    plain = msgspec.json.encode(shown)
    encoded = plain.decode()
    # A terminal would obey U+202E and others: escaped, as JSON does.
    if (not plain.isascii() or b"\x7f" in plain) and not encoded.isprintable():
        encoded = "".join(
            character if character.isprintable() else json.dumps(character)[1:-1]
            for character in encoded
        )
    sys.stdout.write(encoded + "\n")
