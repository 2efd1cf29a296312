"""How gathers and scatters of shards go beside the layers that need them, on devices.

A trace shows when each collective began and ended, and when the device computed. A device that
rests until a gather has ended needed it there. A gather that was hidden is needed where the next
layer begins: a scatter is ready there, or a later gather begins on an idle line. A gather that
began at once after another collective had waited for the line since the layer before it began.

With these moments a step is played under other conditions. The line carries the collectives one
after another, as a device gives them to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fullwire.collectives.cost import Floats
from fullwire.run.intervals import union, within, without
from fullwire.run.run import Collectives, Gradients, Run, Spans, Text, Whole
from fullwire.run.usual import MOST_SLOWED

_SOON_NS = 20_000  # a device goes on so soon after the event that it waited for
_Table = TypeVar("_Table", Spans, Gradients)
_BEFORE, _NEEDED, _AFTER = range(3)  # the order of events at the same place of the computing


@dataclass(frozen=True, eq=False, slots=True)
class Course:
    """When the collectives of a sharded step are ready, and when computing needs them.

    An event is the share of the step's own time that is over then, the place of a collective, and
    whether computing needs its result. Else the collective is ready for the line.
    """

    events: tuple[tuple[float, int, bool], ...]
    own_ns: int  # of the recorded step: all but the waits for collectives
    untold_slowing: float = 0.0  # at most, of all computing beside them: by kernels never alone

    def of(self, places: Sequence[int]) -> Course:
        """Return the course of some of the collectives, which take new places in this order."""
        new = {place: number for number, place in enumerate(places)}
        kept = [event for event in self.events if event[1] in new]
        events = tuple((share, new[place], is_needed) for share, place, is_needed in kept)
        return replace(self, events=events)

    def stalled_s(self, each_s: Sequence[Floats], own_s: float | Floats) -> Floats:
        """Return how long computing waits for collectives that take these times."""
        stalled_s: Floats = np.zeros(())
        free_s: Floats = np.zeros(())
        end_s: dict[int, Floats] = {}
        for share, place, is_needed in self.events:
            now_s = share * own_s + stalled_s
            if is_needed:
                stalled_s = stalled_s + np.maximum(end_s[place] - now_s, 0.0)
            else:
                free_s = end_s[place] = np.maximum(free_s, now_s) + each_s[place]
        return stalled_s


@dataclass(frozen=True, eq=False, slots=True)
class _Progress:
    """The computing of a step that is over at a moment: its time without the waits."""

    start_ns: int
    waits_ns: tuple[Whole, Whole]

    def at(self, time_ns: Whole) -> Whole:
        start_ns = np.full(len(time_ns), self.start_ns)
        done_ns: Whole = time_ns - start_ns - within(start_ns, time_ns, self.waits_ns)
        return done_ns

    def is_amidst(self, time_ns: Whole) -> NDArray[np.bool_]:
        """Say which moments lie in a wait, and not at its end."""
        begun = np.searchsorted(self.waits_ns[0] - _SOON_NS, time_ns, side="right")
        return np.asarray(begun > np.searchsorted(self.waits_ns[1] - _SOON_NS, time_ns))


def course_of(run: Run, rows: Collectives, step_ns: tuple[int, int], passed_ns: int) -> Course:
    """Return the course of the collectives of one step of a rank.

    - `step_ns`: when the step began and ended.
    - `passed_ns`: when its backward pass was over.
    """

    def of_step(table: _Table) -> _Table:
        return table.rows((table.rank == rows.rank[0]) & (table.step == rows.step[0]))

    spans, ready_ns = of_step(run.spans), of_step(run.gradients).ready_ns
    computing = spans.rows(spans.lane == "compute")
    order = np.lexsort((rows.end_ns, rows.issue_ns))
    start_ns, end_ns = rows.issue_ns[order], rows.end_ns[order]
    is_gather, is_scatter = rows.op[order] == "allgather", rows.op[order] == "reducescatter"
    progress, waited_for = _progress(start_ns, end_ns, is_gather, computing, step_ns[0])
    issued_ns = start_ns.copy()
    if is_scatter.sum() == len(ready_ns):
        issued_ns[is_scatter] = np.minimum(np.sort(ready_ns), start_ns[is_scatter])
    busy_until_ns = np.append([step_ns[0] - 2 * _SOON_NS], np.maximum.accumulate(end_ns)[:-1])
    is_queued = start_ns <= busy_until_ns + _SOON_NS
    begun, over = progress.at(issued_ns), progress.at(end_ns)
    passed = int(progress.at(np.array([passed_ns]))[0])
    begins_layer = is_scatter | (is_gather & ~is_queued) | (is_gather & (waited_for >= 0))
    layers = np.unique(np.where(is_gather & (waited_for >= 0), waited_for, begun)[begins_layer])
    amidst = progress.is_amidst(start_ns)
    own_ns = max(int(progress.at(np.array([step_ns[1]]))[0]), 1)
    sources = _sources(start_ns, end_ns, rows.op[order])
    events: list[tuple[int, int, int, int]] = []  # the computing done, the order there, the place
    moments: list[int] = []
    latest = needed = ready = 0  # of the collectives so far, and of the gathers among them
    for place in range(len(order)):
        moment, turn = int(begun[place]), _BEFORE
        need = int(waited_for[place])
        if is_gather[place]:
            if is_queued[place]:  # since the layer before began, and behind those that went before
                earlier = layers[layers < moment] if amidst[place] else layers[layers <= moment]
                moment = min(moment, max(latest, int(earlier[-1]) if len(earlier) else 0))
            moment = ready = max(moment, ready)
            if need < 0:
                least = max(int(over[place]), needed + 1)
                following = int(np.searchsorted(layers, least))
                need = int(layers[following]) if following < len(layers) else least
            need = needed = max(need, moment, needed)
            turn = _AFTER if need > moment else _BEFORE
        else:
            if place in sources:
                moment = moments[sources[place]]
            need = max(need, moment) if need >= 0 else passed if moment <= passed else -1
        moments.append(moment)
        latest = max(latest, moment)
        events.append((moment, turn, len(events), place))
        if need >= 0:
            events.append((need, _NEEDED, len(events), place))
    course = (
        (moment / own_ns, int(order[place]), turn == _NEEDED)
        for moment, turn, _, place in sorted(events)
    )
    compared = [share for _, share in run.facts.kernels_compared_share or ((0, 1.0),)]
    return Course(tuple(course), own_ns, (1 - float(np.median(compared))) * (1 - 1 / MOST_SLOWED))


def _sources(start_ns: Whole, end_ns: Whole, op: Text) -> dict[int, int]:
    """Return for each sum the scatter whose shard it adds up, where each scatter has such a sum."""
    sums, scatters = np.flatnonzero(op == "allreduce"), np.flatnonzero(op == "reducescatter")
    if len(sums) != len(scatters) or (start_ns[sums] < end_ns[scatters]).any():
        return {}
    return dict(zip(sums.tolist(), scatters.tolist(), strict=True))


def _progress(
    start_ns: Whole, end_ns: Whole, is_gather: NDArray[np.bool_], computing: Spans, began_ns: int
) -> tuple[_Progress, Whole]:
    """Return the progress of a step, and where in it computing waited for each collective, or -1.

    Computing waits for the gather that ends as it goes on, or else for the last collective. Where
    a gather ends in a rest of the device, the rest has another reason: it is no wait, and does not
    tell that the gather is needed there.
    """
    exposed_ns = without(
        union(start_ns, end_ns), union(computing.start_ns, computing.end_ns, _SOON_NS // 4)
    )
    waited_for = np.full(len(start_ns), -1)
    by_end = np.argsort(end_ns, kind="stable")
    ends_ns = end_ns[by_end]
    first = np.searchsorted(ends_ns, exposed_ns[0], side="right")
    last = np.searchsorted(ends_ns, exposed_ns[1] + _SOON_NS, side="right")
    chosen = np.flatnonzero(last > first)
    places = by_end[last[chosen] - 1]
    for row, wait in enumerate(chosen.tolist()):
        soon = by_end[first[wait] : last[wait]]
        soon = soon[is_gather[soon] & (end_ns[soon] >= exposed_ns[1][wait] - _SOON_NS)]
        places[row] = soon[-1] if len(soon) else places[row]
    ended_ns = np.minimum(end_ns[places], exposed_ns[1][chosen])
    begins_ns = np.append(np.sort(computing.start_ns), 2**62)
    begins_ns = begins_ns[np.searchsorted(begins_ns, ended_ns)]
    rests = (ended_ns + _SOON_NS < begins_ns) & (begins_ns < 2**62)
    is_needed = ~(is_gather[places] & rests)
    until_ns = np.where(is_needed, exposed_ns[1][chosen], ended_ns)
    progress = _Progress(began_ns, (exposed_ns[0][chosen], until_ns))
    waited_for[places[is_needed]] = progress.at(exposed_ns[0][chosen])[is_needed]
    return progress, waited_for
