"""Tell the groups of Gloo's marks by the threads that they lie on.

Gloo's marks do not name their group. Each group has two threads of its own. Their numbers grow in
the order in which the job made its groups. If all groups are in use, this order tells each of them.

A job with other groups may leave the default one idle. One rank's trace does not tell that: any
group may be the idle one. Several ranks' traces may tell it, as no collective ends on a rank before
all ranks of its group began it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fullwire.importers.kineto.scan import Group, Trace
from fullwire.importers.kineto.steps import Steps

# Of the default group: if it is "idle", the first threads are those of the next group. If it is
# "unknown", no group is told.
DefaultGroup: TypeAlias = Literal["used", "idle", "unknown"]

_FEW_MARKS = 8
_DRIFT_NS = 2_000_000  # of hosts' clocks within a trace, at most
_MOST_MARKS = 20_000  # of a rank that are held against another's


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    """The evidence of one rank's threads for its groups."""

    tell_groups: bool  # as none is idle
    # When the marks of the first two threads began and ended, by step. There are none where these
    # threads can be only the default group's, or those of any group.
    first_ns: Mapping[int, Sequence[tuple[int, int]]]


def groups_of_threads(
    trace: Trace, rows: NDArray[np.intp], default: DefaultGroup = "used"
) -> list[Group]:
    """Return the group of each of Gloo's marks, or none where it is unknown.

    A single group needs no name. Sends lie on the thread of their caller, which is of no group.
    """
    groups = trace.own_groups
    names = {trace.names[name] for name in set(trace.marks["name"][rows].tolist())}
    is_told = all(
        name.startswith("gloo:") and not name.startswith(("gloo:send", "gloo:recv"))
        for name in names
    )
    if not names or not is_told:
        return []
    if len(groups) == 1:
        return [replace(groups[0], name="", members="")] * len(rows)
    thread = trace.marks["thread"][rows].tolist()
    numbers = sorted((trace.threads[place], place) for place in set(thread))
    if default == "unknown" or numbers[0][0] < 0:
        return []
    if default == "idle":
        groups = groups[1:]
    # A group takes its threads in turn, so it uses both unless it has few marks.
    count = Counter(thread)
    is_each_busy = min(count.values()) >= _FEW_MARKS and len(numbers) == 2 * len(groups)
    pairs: list[list[tuple[int, int]]] = []
    for number in numbers:
        # Else a group's threads follow each other, unless another process began one in between.
        is_next = bool(pairs) and number[0] == pairs[-1][-1][0] + 1
        if is_each_busy or (default == "used" and len(numbers) == 2 * len(groups)):
            is_next = bool(pairs) and len(pairs[-1]) == 1
        pairs[-1:] = [[*pairs[-1], number]] if is_next else [*pairs[-1:], [number]]
    # One thread of one group may have had nothing to do, if all groups are in use.
    fewest = 2 * len(groups) - (default == "used")
    if len(pairs) != len(groups) or len(numbers) < fewest or max(map(len, pairs)) > 2:
        return []
    group_of = {
        place: group for pair, group in zip(pairs, groups, strict=True) for _, place in pair
    }
    return [group_of[place] for place in thread]


def threads_of(trace: Trace, steps: Steps, rows: NDArray[np.intp]) -> Threads | None:
    """Return the evidence of Gloo's threads; None for a rank with one group."""
    own = trace.own_groups
    if len(own) < 2 or not len(rows):
        return None
    first_ns: dict[int, list[tuple[int, int]]] = {}
    # Two threads may be of any group. Of more, the first are the default group's if it is in use.
    if len(own) > 2 and own[0].description == "default_pg" and steps.is_numbered:
        groups = groups_of_threads(trace, rows, "idle")
        mine = rows[[group is own[1] for group in groups]][:_MOST_MARKS] if groups else rows[:0]
        start_ns, length_ns = trace.marks["start_ns"][mine], trace.marks["duration_ns"][mine]
        times_ns = zip(start_ns.tolist(), (start_ns + length_ns).tolist(), strict=True)
        for step, times in zip(steps.numbered(steps.of(start_ns)).tolist(), times_ns, strict=True):
            first_ns.setdefault(step, []).append(times)
    return Threads(tell_groups=bool(groups_of_threads(trace, rows)), first_ns=first_ns)


def use_of_default(ranks: Sequence[Threads]) -> DefaultGroup:
    """Return whether the default group is in use: all ranks' marks get groups, or no rank's do.

    It is idle if the marks of two ranks' first threads cannot be the same collectives. Each of them
    would end after the other rank began it. The ranks' clocks may differ by any time.
    """
    if all(rank.tell_groups for rank in ranks):
        return "used"
    if all(rank.first_ns for rank in ranks):
        one = ranks[0].first_ns
        for rank in ranks[1:]:
            other = rank.first_ns
            steps = [
                step for step in one if step >= 0 and len(one[step]) == len(other.get(step, []))
            ]
            pairs = [pair for step in steps for pair in zip(one[step], other[step], strict=True)]
            least_ns = max((there[0] - here[1] for here, there in pairs), default=0)
            most_ns = min((there[1] - here[0] for here, there in pairs), default=0)
            if len(steps) + 2 >= len(one) and least_ns > most_ns + _DRIFT_NS:
                return "idle"
    return "unknown"
