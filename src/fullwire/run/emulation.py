"""An emulated accelerator as a value: how long each part of a step takes, and what it sends.

Dilation is how many times slower than the accelerator everything is played, so that processors
which are slower than it can keep up: compute waits longer, links run slower, by the same factor.
What is seen then is brought back to the accelerator's own time, which `undilated` does to a run.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from fullwire.run.facts import REGISTRY, named
from fullwire.run.run import Run

BACKENDS = ("gloo", "fullwire")  # those that send what is in a processor's memory
BYTES_A_VALUE = 4  # gradients are sent as float32
_PYTORCH_BYTES = 200_000_000  # what a Python with torch takes before it trains


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """A training job of emulated accelerators, each of which takes this step again and again."""

    name: str
    forward_ns: int
    backward_ns: int
    rest_ns: int  # the optimizer, and whatever else comes after the backward pass
    ready_ns: tuple[int, ...]  # of each gradient, after the backward pass began; never decreasing
    gradient_bytes: tuple[int, ...]
    bucket_cap_bytes: int | None  # None: what DDP has when it is not told
    steps: int
    dilation: float = 1.0
    backend: str = BACKENDS[0]  # of torch.distributed

    @property
    def step_ns(self) -> int:
        """The step of one worker that has nobody to wait for."""
        return self.forward_ns + self.backward_ns + self.rest_ns

    @property
    def memory_bytes(self) -> int:
        """What one worker takes: buckets, gradients on their way there, the backend's copies."""
        return 3 * sum(self.gradient_bytes) + _PYTORCH_BYTES


def undilated(run: Run, dilation: float) -> Run:
    """Return the run in the accelerators' own time: its times divided, its rates multiplied."""
    changed: dict[str, Any] = {}
    for table_name, table in run.tables():
        columns = table.columns()
        for name, column in columns.items():
            if name.endswith("_ns"):
                columns[name] = (column / dilation).round().astype(column.dtype)
            elif name.endswith("_bps"):
                columns[name] = column * dilation
        changed[table_name] = type(table)(**columns)
    facts = run.facts.known()
    for name, value in facts.items():
        factor = {"s": 1 / dilation, "bit/s": dilation}.get(REGISTRY[name].measure.unit, 1.0)
        if isinstance(value, tuple):
            facts[name] = tuple((first, second * factor) for first, second in value)
        elif isinstance(value, float):
            facts[name] = value * factor
    return dataclasses.replace(run, facts=named(facts), **changed)
