"""How many collectives went past us: groups count their own, whoever issues them.

What C++ issues past every group of `visible.py` meets no method of Python's. It is not recorded,
and a run in whose steps it happens says so. What happens before the first step is over, as when
DistributedDataParallel looks at a model, matters to no step.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, TypeAlias

import torch.distributed as dist

from .journal import Journal

_EVERY_NS = 250_000_000

_Look: TypeAlias = dict[str, tuple[int, int]]  # of each group: how many it counts, how many we saw


class Unseen:
    """Compares what was seen of each group with what it counts."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._first: _Look | None = None
        self._last: _Look = {}
        self._steps = 0
        self._looked_ns = 0
        self.seen: Counter[str] = Counter()  # by name of the group, since it began

    def step_ends(self) -> None:
        """Look, if the last time is long enough ago."""
        self._steps += 1
        now_ns = time.monotonic_ns()
        if self._journal.is_open and now_ns - self._looked_ns > _EVERY_NS:
            self._looked_ns = now_ns
            groups = list(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else []
            named = [(group.group_name, group) for group in groups]
            self._last = {name: (_counted(group), self.seen[name]) for name, group in named}
            if self._first is None:
                self._first, self._steps = self._last, 0

    def say(self) -> None:
        """Say how many there were, where steps have some; a few belong to models made later."""
        count = sum((_past_us(self._last) - _past_us(self._first or {})).values())
        if self._steps and count >= self._steps:
            sentence = f"{count} collectives were issued by C++ and not seen"
            self._journal.define(kind="missing", sentence=sentence)


def _past_us(look: _Look) -> Counter[str]:
    return +Counter({name: counted - seen for name, (counted, seen) in look.items()})


def _counted(group: Any) -> int:
    try:
        return int(group._get_sequence_number_for_group())
    except (RuntimeError, AttributeError):  # a transport that does not count
        return 0
