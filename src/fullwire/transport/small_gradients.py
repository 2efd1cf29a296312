"""Where DDP puts norm layers, biases and small gradients in its buckets: a wire format spares them.

A group is handed a bucket as one row of numbers, during a backward pass. DDP's reducer knows what
lies where, and can be asked only outside of one. So a group is told when the reducer is made, when
it has moved parameters between buckets, and when it gets another group.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from fullwire.compression.method import is_small
from fullwire.transport.untraced import untraced


@dataclass
class _Watched:
    """A reducer, as far as we know it."""

    group: Any
    has_sparse: bool  # Buckets of sparse gradients, which have no numbers before a backward pass.
    has_moved: bool = False  # Its group does not know yet where parameters lie now.


_reducers: weakref.WeakKeyDictionary[Any, _Watched] = weakref.WeakKeyDictionary()


def watch_buckets() -> None:
    """From now on, tell groups of this backend where small gradients lie in buckets."""
    reducer = torch._C._distributed_c10d.Reducer
    if reducer.__init__ is not _Watching.__init__:
        for name, method in vars(_Watching).items():
            if callable(method):
                _originals[name] = getattr(reducer, name)
                setattr(reducer, name, method)


def read_buckets(group: Any) -> None:
    """Tell a group that packs where the parameters lie that were moved between buckets."""
    for reducer, known in list(_reducers.items()):
        if known.group is group and known.has_moved and group.wire.is_on and not known.has_sparse:
            known.has_moved = False
            buckets = reducer._get_zeros_like_grad_buckets()
            tell_small(group, [bucket.parameters() for bucket in buckets])


def tell_small(group: Any, buckets: Sequence[Sequence[Any]]) -> None:
    """Add the places in these buckets to those that a group spares.

    Places are never forgotten, as ranks free their models at different times and have to agree.
    """
    for parameters in buckets:
        ends = accumulate((parameter.numel() for parameter in parameters), initial=0)
        small = [
            torch.arange(first, end)
            for each, (first, end) in zip(parameters, pairwise(ends), strict=True)
            if is_small(each) and each.dtype is torch.float32
        ]
        if small:
            numbers = sum(parameter.numel() for parameter in parameters)
            known = group.small_places.get(numbers, small[0][:0])
            group.small_places[numbers] = torch.cat([known, *small]).unique()


_originals: dict[str, Any] = {}


@untraced
class _Watching:
    """Methods that take the place of a reducer's own, which they call."""

    def __init__(
        self,
        params: Sequence[Any],
        bucket_indices: Sequence[Sequence[int]],
        per_bucket_size_limits: Sequence[int],
        process_group: Any,
        expect_sparse_gradients: Sequence[bool] = (),
        *args: Any,
        **kwargs: Any,
    ) -> None:
        sparse = list(expect_sparse_gradients)
        make = _originals["__init__"]
        make(
            *(self, params, bucket_indices, per_bucket_size_limits, process_group, sparse),
            *args,
            **kwargs,
        )
        if hasattr(process_group, "small_places"):
            _reducers[self] = _Watched(process_group, any(sparse))
            tell_small(
                process_group,
                [[params[index] for index in bucket_index] for bucket_index in bucket_indices],
            )

    def _rebuild_buckets(self) -> Any:
        has_moved = _originals["_rebuild_buckets"](self)
        if has_moved and self in _reducers:
            _reducers[self].has_moved = True
            read_buckets(_reducers[self].group)
        return has_moved

    def _update_process_group(self, group: Any) -> None:
        _originals["_update_process_group"](self, group)
        known = _reducers.pop(self, None)
        if hasattr(group, "small_places"):
            _reducers[self] = _Watched(group, known is None or known.has_sparse, has_moved=True)
            read_buckets(group)
