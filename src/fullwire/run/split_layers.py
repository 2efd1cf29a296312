"""Collectives that tell how a model is split over ranks: by parts of layers, or by layers.

The forward pass sums the layers' outputs, and the backward pass sums what corresponds to them, in
one group and of one size. Inputs and outputs of experts are exchanged in both passes, of any size.
Gradients are summed in the backward pass alone. That a pass waits for a sum does not tell them
apart: a job may wait for each gradient, and launches may come late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fullwire.run.run import Collectives, Text, Whole

_IN_BOTH_PASSES = ("allreduce", "reducescatter", "alltoall")
LEAST_BYTES = 1024  # a loss and a count of tokens are smaller, and are no layer's
_AT_ONCE_NS = 20_000  # from a transfer to the one of the other direction
_CALLED_AT_ONCE_NS = 1_000_000  # where a script calls both


def are_of_split_layers(
    group: Text,
    op: Text,
    size: Whole,
    step: Sequence[int] | Sequence[tuple[int, int]],
    is_before: NDArray[np.bool_],
    is_amidst: NDArray[np.bool_],
    *,
    as_many: bool = False,
) -> NDArray[np.bool_]:
    """Return which collectives are those of split layers, by their group, operation and size.

    `is_before` marks those before the first backward pass of their step, and `is_amidst` those in
    a backward pass. Of the steps with such sums amidst, most have several before: one step whose
    pass is marked too late tells nothing. On processors some sums of the step before may come in
    the forward pass. So `as_many` asks for as many before as amidst, but for one: the first layer's
    inputs need no gradients. It asks so of the first step, too, which none was recorded before.
    """
    of_any_size = (op == "alltoall") & (size >= LEAST_BYTES)
    sizes = np.where(of_any_size, LEAST_BYTES, size).tolist()
    kinds = list(zip(group.tolist(), op.tolist(), sizes, strict=True))
    before = Counter((kinds[row], step[row]) for row in np.flatnonzero(is_before).tolist())
    amidst = Counter((kinds[row], step[row]) for row in np.flatnonzero(is_amidst).tolist())
    with_some = {
        key
        for key, count in before.items()
        if count > 1 and (not as_many or count >= amidst[key] - 1)
    }
    steps_before = Counter(kind for kind, _ in with_some)
    first = dict(sorted(amidst, reverse=True))
    layers = {
        kind
        for kind, steps in Counter(kind for kind, _ in amidst).items()
        if kind[1] in _IN_BOTH_PASSES and kind[2] >= LEAST_BYTES and 2 * steps_before[kind] > steps
        if not as_many or (kind, first[kind]) in with_some
    }
    return np.array([kind in layers for kind in kinds], bool)


def are_between_stages(rows: Collectives, *, are_calls: bool = False) -> NDArray[np.bool_]:
    """Return which transfers hand work on from one stage of a pipeline to another.

    Around a ring, each rank takes something at the moment when it hands something on. The last
    stage of a pipeline takes a batch, and hands it back after its passes. A script that calls its
    transfers (`are_calls`) may wait for one before it calls the other. It may also send data one
    way alone, which tells nothing.
    """
    are_work = np.isin(rows.op, ("send", "recv")) & (rows.bytes >= LEAST_BYTES)
    places = np.flatnonzero(are_work & (rows.step >= 0))
    places = places[np.lexsort((rows.issue_ns[places], rows.rank[places]))]
    is_taken = rows.op[places] == "recv"
    taken, sent = rows.rows(places[is_taken]), rows.rows(places[~is_taken])
    if not (len(taken) and len(sent)):
        return np.zeros(len(rows), bool)
    if not np.array_equal(taken.rank, sent.rank):  # a trace may lack a part of them
        return are_work & (not are_calls)
    rank = np.unique(sent.rank, return_inverse=True)[1].reshape(-1)
    apart_ns = np.abs(taken.issue_ns - sent.issue_ns)
    if are_calls:
        apart_ns = np.minimum(apart_ns, np.abs(sent.issue_ns - taken.end_ns))
        apart_ns = np.minimum(apart_ns, np.abs(taken.issue_ns - sent.end_ns))
    is_apart = apart_ns > (_CALLED_AT_ONCE_NS if are_calls else _AT_ONCE_NS)
    is_stage = 2 * np.bincount(rank, is_apart) > np.bincount(rank)
    return are_work & is_stage.any()
