"""The parts of the time of a training step of a large model, for many plans at once."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from fullwire.clusters.cluster import Floats
from fullwire.simulation.habits import DOUBTED, Calibration


@dataclass(frozen=True, eq=False, slots=True)
class Priced:
    """The time of a step under each plan, and its parts, which add up to `step_s`."""

    step_s: Floats
    compute_s: Floats  # of the slowest stage, all microbatches, with recomputation
    bubble_s: Floats
    tp_s: Floats  # exposed communication by its kind
    pp_s: Floats
    dp_s: Floats
    cp_s: Floats
    ep_s: Floats
    slowdown_s: Floats  # of computing beside communication
    optimizer_s: Floats
    host_s: Floats  # launches that the device waited for, and what no part explains
    # Parts of `compute_s`, which a measured step tells apart.
    attention_s: Floats
    moved_s: Floats
    experts_s: Floats
    heeded: Floats  # share of these, and of what is sent, that the host does not hide
    mean_compute: Floats  # of the mean stage, as a share of the slowest one's
    mean_layers: Floats

    @property
    def shares(self) -> Floats:
        """How a step follows each part that is doubted, as shares of it: a row for each plan.

        Where the host is late, a longer time of the device hardly shows, and the host's counts.
        """
        worked_s = self.step_s - self.bubble_s
        on_device_s = self.compute_s + self.tp_s + self.cp_s + self.ep_s
        counted_s = {name: self.heeded * getattr(self, name) for name in DOUBTED}
        counted_s["sums_s"] = self.sums_s
        counted_s["host_s"] = self.host_s + (1 - self.heeded) * on_device_s
        return np.stack(list(counted_s.values()), axis=1) / worked_s[:, None]

    @property
    def sums_s(self) -> Floats:
        """What data parallelism costs: shown, and where it slows computing."""
        return self.dp_s + self.slowdown_s

    @property
    def products_s(self) -> Floats:
        """The rest of `compute_s`: products of matrices outside of experts."""
        return self.compute_s - self.attention_s - self.moved_s - self.experts_s

    def calibrated(self, calibration: Calibration) -> Priced:
        """Return the times that measured steps make likely."""
        return self.times(calibration.factors(self.shares))

    def times(self, factors: Floats) -> Priced:
        """Return the times with all parts of each plan longer by a factor."""
        parts = [field.name for field in fields(self) if field.name.endswith("_s")]
        return replace(self, **{name: factors * getattr(self, name) for name in parts})
