"""What a user has decided or measured of a parallel plan: "tp=8,pp=4", and tables of steps."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path

from fullwire.answers.conditions import OneOrMany, count, several
from fullwire.clusters.cluster import Cluster
from fullwire.errors import DamagedInput, UsageError
from fullwire.simulation.plan_space import FIXABLE
from fullwire.units import shown
from fullwire.workloads.accelerators import Accelerator, accelerator

_DEVICE_OF = {"p3dn": "v100"}  # of built-in clusters whose name does not tell


def device_of(cluster: Cluster, given: str | None) -> Accelerator:
    """Return the device that is given, or that the cluster's name tells."""
    if given is not None:
        return accelerator(given)
    try:
        return accelerator(_DEVICE_OF.get(cluster.name, cluster.name))
    except UsageError:
        raise UsageError(
            f"device: the cluster {cluster.name} does not name its devices; say --device h100"
        ) from None


def fixed_degrees(given: OneOrMany | Mapping[str, int | str]) -> dict[str, int | str]:
    """Read "tp=8,pp=4": the degrees of a plan that are decided."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return dict(given)
    fixed: dict[str, int | str] = {}
    for part in several(given, str):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not value:
            raise UsageError(f"fix: expected NAME=VALUE such as tp=8, got {shown(part)}")
        is_word = name in ("recompute", "schedule")
        fixed[name] = value if is_word else int(value) if name == "zero" else count(value, name)
    return fixed


def measured_steps(path: Path) -> list[tuple[dict[str, int | str], float]]:
    """Read a table of measured steps: a column for each degree, and `step_time_s`."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"calibrate: expected a table of measured steps: {error}") from None
    result = []
    for number, row in enumerate(rows, start=2):
        text = (row.get("step_time_s") or "").strip()
        try:
            measured_s = float(text)
        except ValueError:
            measured_s = 0.0
        if not 0 < measured_s < math.inf:
            raise DamagedInput(
                path, f"step_time_s: expected seconds above 0, got {shown(text)}", line=number
            )
        named = [f"{name}={row[name]}" for name in FIXABLE if row.get(name)]
        result.append((fixed_degrees(named), measured_s))
    if not result:
        raise UsageError(f"calibrate: expected rows with step_time_s in {path}, got none")
    return result
