"""Described clusters: a TOML file, or one of those built in, which are such files too."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import TypeAlias

from fullwire.clusters.cluster import Cluster, with_nodes
from fullwire.errors import UsageError
from fullwire.files import opened, path_of
from fullwire.units import count, shown

ClusterLike: TypeAlias = str | Path | Cluster
MOST_BYTES = 256 * 1024
_BUILT_IN = Path(__file__).parent


def names() -> tuple[str, ...]:
    """List the built-in clusters."""
    return tuple(sorted(path.stem for path in _BUILT_IN.glob("*.toml")))


def cluster(given: ClusterLike, nodes: str | int | None = None) -> Cluster:
    """Take a described cluster, with another number of nodes if given.

    - `given`: a TOML file, or the name of a built-in cluster (`fullwire cluster list`).
    - `nodes`: how many there are.

        fw.cluster("dgx-h100", nodes=16).devices
    """
    known = given if isinstance(given, Cluster) else _read(given)
    return known if nodes is None else with_nodes(known, count(nodes, "nodes"))


def _read(given: str | Path) -> Cluster:
    path = path_of(given, "cluster")
    built_in = given if isinstance(given, str) and given in names() else None
    if built_in is not None:
        path = _BUILT_IN / f"{built_in}.toml"
    elif not path.exists():
        near = get_close_matches(str(given), names(), n=1)
        known = f"one of {', '.join(names())}" if not near else f"the built-in {near[0]}"
        raise UsageError(f"cluster: expected a file or {known}, got {shown(given)}")
    with opened(path) as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise UsageError(f"{path}: expected a cluster in at most {MOST_BYTES:,} bytes")
    try:
        text = content.decode("utf-8-sig")  # some editors put a mark before it
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: expected text in UTF-8, byte {error.start} is none") from None
    if text.lstrip().startswith("<") or "GPU0" in text[:200]:
        # Here: few are topologies.
        from fullwire.clusters.nccl_topology import (
            cluster_of_matrix,
            cluster_of_topology,
            has_matrix,
        )

        if text.lstrip().startswith("<"):
            return cluster_of_topology(text, str(path))
        if has_matrix(text):
            return cluster_of_matrix(text, str(path))
    from fullwire.clusters.description import described  # here: most questions name no cluster

    return described(text, built_in or str(path))
