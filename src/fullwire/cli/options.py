"""Options that several commands share, and how JSON is printed."""

from __future__ import annotations

import sys
from typing import Annotated, Any, TypeAlias

import typer

Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Force: TypeAlias = Annotated[bool, typer.Option("--force", help="Replace a run that exists.")]
ClusterOption: TypeAlias = Annotated[
    str | None,
    typer.Option("--cluster", metavar="FILE|NAME", help="A described cluster: dgx-h100, ours.toml"),
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
        help="Who works: this machine; the Ray cluster that RAY_ADDRESS names, or one that is "
        "started here; or the one at HOST:PORT or ray://HOST:PORT",
    ),
]
ALGORITHMS = (
    "ring, tree, halving-doubling, or on clusters multi-ring, hierarchical, torus, in-network and "
    "others: an unknown name lists them all; auto:"
)
Packets: TypeAlias = Annotated[
    bool, typer.Option("--packets", help="Capture packet headers meanwhile, for fullwire flows")
]


def print_json(shown: Any) -> None:
    """Print one JSON object; numbers keep all their digits."""
    import msgspec

    sys.stdout.write(msgspec.json.encode(shown).decode() + "\n")
