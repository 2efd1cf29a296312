"""A step whose workers synchronise seldom: data parallel, DiLoCo and Streaming DiLoCo, by layers.

The model of the papers (arXiv 2311.08105, 2501.18512, 2503.09799): layers have equal sizes. A
third of the step is the forward pass, and the rest the backward pass. The sum of a layer's
gradients, or of its outer gradients, may begin when its backward pass is done. Sums go one after
the other over one link. A layer's sum must be there when its forward pass begins: in the next step,
or `overlap` steps later. Workers wait until it is.

    data parallel      all layers, every step
    DiLoCo             all layers, every H steps
    Streaming DiLoCo   a fragment of a few layers at a time; each fragment every H steps. Fragments
                       are strided: with 8 of them, one has layers 0, 8 and 16
    with overlap       the sum of a fragment may take one step more
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fullwire.collectives.cost import Floats
from fullwire.errors import UsageError

FORWARD_SHARE = 1 / 3
# The one fitted constant: 67 of the 75 cells of Streaming DiLoCo's Table 4 have it exactly. It is
# close to bf16, as sizes such as "10B" and the grid of rates are rounded.
BITS = 13.5
FRAGMENT_LAYERS = 3  # the paper's choice
OVERLAP_STEPS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """How often workers synchronise, how much at once, and how late a sum may come."""

    every: int = 1  # H, inner steps
    is_streaming: bool = False
    overlap: int = 0  # steps
    bits: float = BITS  # a parameter

    def __post_init__(self) -> None:
        if self.every < 1 or self.bits <= 0 or self.overlap < 0:
            raise UsageError(
                f"synchronisation: expected at least 1 step and more than 0 bits, got {self.every} "
                f"and {self.bits:g}"
            )


def waits_s(
    outer: Outer, *, parameters: float, layers: int, step_s: float, rates_bps: Floats
) -> Floats:
    """Return how long workers wait, in all `outer.every` steps, at each rate."""
    forward_s = step_s * FORWARD_SHARE / layers
    backward_s = step_s * (1 - FORWARD_SHARE) / layers
    layer_s = outer.bits * parameters / layers / rates_bps
    total_s = np.zeros_like(rates_bps)
    fragments = max(1, layers // FRAGMENT_LAYERS) if outer.is_streaming else 1
    for first in range(fragments):
        end_s, longest_s = np.zeros_like(rates_bps), np.zeros_like(rates_bps)
        for layer in reversed(
            range(first, layers, fragments)
        ):  # the backward pass begins with the last one
            end_s = np.maximum(end_s, (layers - layer) * backward_s) + layer_s
            needed_s = layers * backward_s + outer.overlap * step_s + layer * forward_s
            longest_s = np.maximum(longest_s, end_s - needed_s)
        total_s += longest_s
    return total_s


def utilization(
    outer: Outer, *, parameters: float, layers: int, step_s: float, rates_bps: Floats
) -> Floats:
    """Return the share of time that workers compute, at each rate."""
    waiting_s = waits_s(
        outer, parameters=parameters, layers=layers, step_s=step_s, rates_bps=rates_bps
    )
    computing_s = outer.every * step_s
    return np.asarray(computing_s / (computing_s + waiting_s))
