"""A parallel plan as it is asked for and answered: decided degrees, measured steps, and results."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

from fullwire.answers.conditions import OneOrMany, count, several
from fullwire.clusters.cluster import Cluster
from fullwire.display import Result
from fullwire.errors import DamagedInput, UsageError
from fullwire.files import opened
from fullwire.simulation.plan_space import FIXABLE
from fullwire.units import shown
from fullwire.workloads.accelerators import Accelerator, accelerator

Objective: TypeAlias = Literal["step", "cost", "goodput"]
OBJECTIVES: tuple[Objective, ...] = ("step", "cost", "goodput")


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A 90 % interval of a time."""

    low_s: float
    high_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on the device that holds the most, at its peak."""

    params_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    buffers_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposed:
    """Communication of a step that no computing hides."""

    tp_s: float
    pp_s: float
    dp_s: float
    cp_s: float
    ep_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One parallel plan and its step."""

    tp: int
    pp: int
    vpp: int
    dp: int
    cp: int
    ep: int
    zero: int
    recompute: str
    recompute_layers: int | None
    microbatch: int
    schedule: str
    devices: int
    step_s: float
    interval: Range
    tokens_per_s_per_device: float
    model_flops_utilization: float
    memory: Memory
    compute_s: float
    bubble_s: float
    exposed: Exposed
    slowdown_s: float
    optimizer_s: float
    host_s: float
    device_hours: float  # of a million tokens
    fits: bool
    equal: bool  # cannot be told from the best


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """What one choice of the best plan is worth: the best plan with another value of it."""

    choice: str
    value: str
    other: str
    step_s: float
    slower: float  # as a share of the best step


@dataclass(frozen=True, slots=True, kw_only=True)
class Lasting:
    """The training under failures: expected wall time, losses by name, and its range."""

    wall_s: float
    wall_interval: Range
    work_s: float
    goodput: float
    goodput_low: float
    goodput_high: float
    losses: Mapping[str, float]
    checkpoint_bytes: int
    checkpoint_interval_s: float
    interruptions: float
    failures_device_hours: float
    device_hours: float
    cost: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OnNetwork:
    """The best plan on one network."""

    cluster: str
    bandwidth_bps: float
    oversubscription: float
    plan: Planned


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class PlanAnswer(Result):
    """Plans that fit, best first."""

    model: str
    cluster: str
    device: str
    objective: Objective
    plans: tuple[Planned, ...]
    considered: int
    left_out: Mapping[str, int]
    device_bytes: int
    global_batch: int
    sequence: int
    precision: str
    assumed: tuple[str, ...]
    why: tuple[Worth, ...] = ()
    networks: tuple[OnNetwork, ...] = ()
    half_bandwidth: OnNetwork | None = None  # None on one node
    lasting: Lasting | None = None
    landscape: Mapping[str, Any] | None = None  # for pictures: every plan's degrees and figures

    @property
    def best(self) -> Planned:
        """Return the first plan."""
        return self.plans[0]

    def _in_short(self) -> Iterator[str]:
        best = self.best
        yield f"{self.model} on {self.cluster}: tp {best.tp}, pp {best.pp}, dp {best.dp}"
        yield f"step {best.step_s:.3g} s, the best of {self.considered:,} plans"

    def _tables(self) -> Mapping[str, Mapping[str, Any]]:
        simple = [
            field.name
            for field in fields(Planned)
            if field.name not in ("memory", "interval", "exposed")
        ]
        return {"plans": {name: [getattr(one, name) for one in self.plans] for name in simple}}


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
        if name in fixed:
            raise UsageError(f"fix: expected one {name}, got {fixed[name]} and {value}")
        is_word = name in ("recompute", "schedule")
        is_none = name == "zero" and value == "0"  # the one degree that may be none
        fixed[name] = value if is_word else 0 if is_none else count(value, name)
    return fixed


def measured_steps(path: Path) -> list[tuple[dict[str, int | str], float]]:
    """Read a table of measured steps: a column for each degree, and `step_time_s`."""
    try:
        with opened(path) as file:
            rows = list(csv.DictReader(io.StringIO(file.read().decode(), newline="")))
    except (UnicodeDecodeError, csv.Error) as error:
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
