"""The loss of workers that synchronise seldom, against workers that synchronise in each step.

DiLoCo's papers publish final losses: of 2 to 8 replicas, synchronised every 30 or 100 steps, for
models of 35 million to 10 billion parameters (arXiv 2501.18512, 2503.09799). The loss is higher by

    0.74 % log2(replicas) (parameters / 1e9)^-0.2 (steps / 30)^0.4 - 0.72 %

The constants are fitted to the 56 published losses. Their standard deviation from the law is 0.2 %
of the loss (`validation/replicas.py`). Streaming DiLoCo has the losses of DiLoCo there, and the
same law.

Other models, optimizers and data may differ more than these do from each other. So beyond the
published range the interval has half of the excess beside its usual width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_HEIGHT, _BY_PARAMETERS, _BY_STEPS = 0.00739, -0.2, 0.4
_OFFSET = 0.00722
SCATTER = 0.0020  # standard deviation of the loss's logarithm from the law
REPLICAS, PARAMETERS, STEPS = (2, 8), (35e6, 10e9), (30, 100)
_90 = 1.645  # standard deviations


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """The loss in relation to that of workers that synchronise each step, with a 90 % interval."""

    ratio: float
    low: float
    high: float
    is_beyond: bool  # the published range


def excess(*, replicas: int, steps: int, parameters: float) -> Excess:
    """Return how much higher the loss is, if replicas average every so many steps."""
    if steps == 1 or replicas == 1:
        return Excess(ratio=1, low=1, high=1, is_beyond=False)
    more = _HEIGHT * math.log2(replicas) * (parameters / 1e9) ** _BY_PARAMETERS
    more *= (steps / 30) ** _BY_STEPS
    asked = ((replicas, REPLICAS), (parameters, PARAMETERS), (steps, STEPS))
    is_beyond = any(not low <= value <= high for value, (low, high) in asked)
    half = _90 * SCATTER + (more / 2 if is_beyond else 0)
    middle = more - _OFFSET
    return Excess(
        ratio=math.exp(middle),
        low=math.exp(middle - half),
        high=math.exp(middle + half),
        is_beyond=is_beyond,
    )
