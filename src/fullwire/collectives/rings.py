"""Stages around rings of ranks, for the algorithms that are made of rings."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fullwire.collectives.stages import Layout, Part, Stage, Stated, stage


def around(order: NDArray[Any], *, base: int, lead: int, reduces: bool) -> Stage:
    """Pass blocks on around the ring of these ranks, each beginning `lead` blocks before its own.

    The blocks begin at `base`.
    """
    count = len(order)
    place = np.arange(count)
    return stage(
        order,
        np.roll(order, -1),
        base + (place - lead) % count,
        reduces=reduces,
        rounds=count - 1,
        shift=-1,
        window=count,
    )


def rings(op: str, orders: list[NDArray[Any]]) -> Stated:
    """Go around several rings at once, an equal share of the message on each."""
    size = len(orders[0])
    parts = []
    for number, order in enumerate(orders):
        base = number * size
        scatter = around(order, base=base, lead=1, reduces=True)
        gather = around(order, base=base, lead=0, reduces=False)
        parts.append(phases(op, (scatter,), (), (gather,)))
    places = [order * len(orders) + number for number, order in enumerate(orders)]
    return Stated(size * len(orders), tuple(parts), np.concatenate(places))


def one_ring(op: str, layout: Layout) -> Stated:
    """Go around all ranks in their order; block b of the message belongs to rank b."""
    stated = rings(op, [np.arange(layout.workers)])
    return Stated(stated.blocks, stated.parts)


def phases(op: str, scatter: Part, between: Part, gather: Part) -> Part:
    """Put together the phases that an operation has of a reduce-scatter and an all-gather."""
    first = () if op == "allgather" else scatter
    last = () if op == "reducescatter" else gather
    return (*first, *between, *last)
