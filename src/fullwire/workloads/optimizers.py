"""Optimizers, as the time of a step and the memory of a device see them."""

from __future__ import annotations

from typing import NamedTuple


class Optimizer(NamedTuple):
    """An optimizer: the values of state for each parameter, and those that a step moves."""

    title: str
    state_values: int
    moved_values: int


# Both read weight and gradient and write the weight; the state is read and written.
SGD = Optimizer("SGD with momentum", 1, 5)
ADAM = Optimizer("AdamW", 2, 7)
