"""A built-in network as its file states it: key, title, usual sample, and layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fullwire.workloads.layers import Layer
from fullwire.workloads.optimizers import ADAM, SGD, Optimizer

CLASSES = 1000  # of ImageNet


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A network whose layers are worked out on demand."""

    key: str
    title: str
    sample: str  # such as "image of 224 x 224"
    samples: int  # of one worker in one step, usually
    optimizer: Optimizer
    layers: Callable[[], Iterator[Layer]]  # in forward order, each counted for one sample


def images(
    key: str, title: str, layers: Callable[[], Iterator[Layer]], *, side: int = 224
) -> Recipe:
    """State a network for images; 32 for each worker, as in the paper."""
    return Recipe(
        key=key,
        title=title,
        sample=f"image of {side} x {side}",
        samples=32,
        optimizer=SGD,
        layers=layers,
    )


def sequences(
    key: str,
    title: str,
    layers: Callable[[], Iterator[Layer]],
    *,
    samples: int,
    length: int,
) -> Recipe:
    """State a network for sequences of so many tokens."""
    return Recipe(
        key=key,
        title=title,
        sample=f"sequence of {length}",
        samples=samples,
        optimizer=ADAM,
        layers=layers,
    )
