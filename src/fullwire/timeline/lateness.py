"""Who makes the others wait: each collective's waiting, shared among the ranks that came late.

A rank is late by as much as it issues a collective after the middle one of its members. It may be
late because it waited itself, for a rank of another group: where a node shares each layer's work
and nodes share gradients, one slow rank brings all ranks of its node late to their gradients. So
what a rank waited since its group last met, beyond what the middle one did, excuses it; that part
of the waiting is nobody's here, for it is told already where the cause of it was waited for.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fullwire.collectives.cost import Floats
from fullwire.run.run import Collectives, Whole


def caused_ns(
    table: Collectives,
    group: Whole,
    ready_ns: Whole,
    order: NDArray[np.intp],
    first: Whole,
    count: Whole,
) -> Floats:
    """Return for each row what the others waited for its rank.

    In `order` the rows of one collective follow each other by issue, from `first` on, so many as
    `count`; it could begin at `ready_ns`.
    """
    found = np.zeros(len(table))
    if not len(order):
        return found
    issue_ns = table.issue_ns[order]
    waited_ns = _waited_before(table, group, ready_ns)[order]
    middle = np.repeat(first + (count - 1) // 2, count)
    late_ns = np.maximum(issue_ns - issue_ns[middle], 0)
    excused_ns = np.maximum(waited_ns - waited_ns[middle], 0)
    latest_ns = np.repeat(issue_ns[first + count - 1], count)
    all_waited_ns = np.add.reduceat(latest_ns - issue_ns, first)
    all_late_ns = np.maximum(np.add.reduceat(late_ns, first), 1)
    found[order] = np.maximum(late_ns - excused_ns, 0) * np.repeat(
        all_waited_ns / all_late_ns, count
    )
    return found


def _waited_before(table: Collectives, group: Whole, ready_ns: Whole) -> Whole:
    """Return what each row's rank waited since its group had met before, in other groups."""
    own_ns = ready_ns - table.issue_ns
    by_rank = np.lexsort((table.issue_ns, table.rank))
    reached_ns = np.empty(len(by_rank), np.int64)
    reached_ns[by_rank] = np.cumsum(own_ns[by_rank])
    by_group = np.lexsort((table.issue_ns, group, table.rank))
    before, later = by_group[:-1], by_group[1:]
    is_same = (table.rank[before] == table.rank[later]) & (group[before] == group[later])
    since_ns = np.zeros(len(by_group), np.int64)
    since_ns[later[is_same]] = (reached_ns - own_ns)[later[is_same]] - reached_ns[before[is_same]]
    return since_ns
