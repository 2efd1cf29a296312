"""An emulated accelerator as a value: the time of each part of a step, and the bytes it sends.

Dilation is the factor by which everything runs slower than on the accelerator. Compute waits longer
and links run slower, by the same factor. So processors that are slower than the accelerator can
keep up. `undilated` converts a recorded run back to the accelerator's own time.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from fullwire.run.facts import REGISTRY, named
from fullwire.run.run import Run

BACKENDS = ("gloo", "fullwire")  # backends that send from a processor's memory
BYTES_A_VALUE = 4  # gradients are sent as float32
_PYTORCH_BYTES = 200_000_000  # memory of a Python process with torch before it trains


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """A training job of emulated accelerators, each of which repeats this step."""

    name: str
    forward_ns: int
    backward_ns: int
    rest_ns: int  # the optimizer, and everything else after the backward pass
    ready_ns: tuple[int, ...]  # of each gradient, after the backward pass began; never decreasing
    gradient_bytes: tuple[int, ...]
    bucket_cap_bytes: int | None  # None: DDP's default
    steps: int
    dilation: float = 1.0
    backend: str = BACKENDS[0]  # of torch.distributed

    @property
    def step_ns(self) -> int:
        """The step of a single worker, which waits for no other."""
        return self.forward_ns + self.backward_ns + self.rest_ns

    @property
    def memory_bytes(self) -> int:
        """Memory of one worker: buckets, gradients on their way there, the backend's copies."""
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
