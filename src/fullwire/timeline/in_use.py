"""How much of a job's links and processors was in use, on its whole steps and while communicating.

Utilization of a link is bits sent / (line rate x window). Counters are taken as growing evenly
between two samples, which lie some 10 ms apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from fullwire.run.placement import host_line_rates_bps, host_of_rank
from fullwire.run.run import Hosts, Links, Run, Whole


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """What one link carried out of its host; shares are None where nothing was measured."""

    host: str
    interface: str
    line_rate_bps: float
    in_steps: float | None
    while_communicating: float | None


class Windows:
    """When steps ran and when collectives were outstanding, by rank; kept while parts go by.

    Of a long job the collectives of every so many steps are enough, and all of an hour too many.
    """

    def __init__(self, every_nth_step: int = 1) -> None:
        self._every_nth_step = every_nth_step
        self._steps: dict[int, list[Whole]] = defaultdict(list)
        self._outstanding: dict[int, list[Whole]] = defaultdict(list)

    def seen_in(self, parts: Iterable[Run]) -> Iterator[Run]:
        """Hand on the parts of a run, and remember the windows of each."""
        for part in parts:
            spans, collectives = part.spans, part.collectives
            steps = spans.rows((spans.lane == "host") & (spans.name == "step"))
            _remember(self._steps, steps.rank, steps.start_ns, steps.end_ns)
            kept = collectives.rows(collectives.step % self._every_nth_step == 0)
            _remember(self._outstanding, kept.rank, kept.issue_ns, kept.end_ns)
            yield part

    def steps(self, ranks: Iterable[int]) -> Whole:
        """Return when any of some ranks was in a step."""
        return _union(_together([piece for rank in ranks for piece in self._steps[rank]]))

    def outstanding(self, ranks: Iterable[int]) -> Whole:
        """Return when a collective of any of some ranks was outstanding."""
        return _union(_together([piece for rank in ranks for piece in self._outstanding[rank]]))

    @property
    def whole(self) -> tuple[int, int] | None:
        """The time from the first step of any rank to the end of the last, if there is one."""
        steps = self.steps(list(self._steps))
        return (int(steps[0, 0]), int(steps[-1, 1])) if len(steps) else None


def links_in_use(run: Run, samples: Iterable[Links], windows: Windows) -> list[LinkUse]:
    """Return the use of each host's busiest link whose line rate is known.

    Samples come in pieces, so that all of an hour never are in memory with their names.
    """
    rates_bps = host_line_rates_bps(run)
    found = []
    for host, links in _counters(samples, rates_bps).items():
        busiest = max(sorted(links), key=lambda name: int(np.ptp(links[name][1])))
        ranks = [rank for rank, name in host_of_rank(run).items() if name == host]
        steps = windows.steps(ranks)
        outstanding = _common(steps, windows.outstanding(ranks))
        found.append(
            LinkUse(
                host=host,
                interface=busiest,
                line_rate_bps=rates_bps[host],
                in_steps=_share(*links[busiest], steps, rates_bps[host]),
                while_communicating=_share(*links[busiest], outstanding, rates_bps[host]),
            )
        )
    return found


def _counters(
    samples: Iterable[Links], hosts: Collection[str]
) -> dict[str, dict[str, tuple[Whole, Whole]]]:
    """Return when links of some hosts were sampled and what they had sent, by host and name."""
    pieces: dict[tuple[str, str], list[Whole]] = defaultdict(list)
    for table in samples:
        columns = np.stack([table.time_ns, table.tx_bytes])
        for host, name in dict.fromkeys(zip(table.host, table.interface, strict=True)):
            if host in hosts:
                here = (table.host == host) & (table.interface == name)
                pieces[host, name].append(columns[:, here])
    found: dict[str, dict[str, tuple[Whole, Whole]]] = defaultdict(dict)
    for (host, name), parts in sorted(pieces.items()):
        time_ns, tx_bytes = np.concatenate(parts, axis=1)
        found[host][name] = time_ns, tx_bytes
    return found


def processor_use(samples: Iterable[Hosts], windows: Windows) -> float | None:
    """Return the mean share of the job's processors in use while its steps ran."""
    if windows.whole is None:
        return None
    begin_ns, end_ns = windows.whole
    count, total = 0, 0.0
    for table in samples:
        is_processor = np.array([name.startswith("cpu") for name in table.device], bool)
        inside = (table.time_ns >= begin_ns) & (table.time_ns <= end_ns)
        shares = table.utilization[is_processor & inside]
        count, total = count + len(shares), total + float(shares.sum())
    return total / count if count else None


def _remember(windows: dict[int, list[Whole]], rank: Whole, start: Whole, end: Whole) -> None:
    for each in np.unique(rank).tolist():
        windows[each].append(_union(np.stack([start, end], axis=1)[rank == each]))


def _together(pieces: list[Whole]) -> Whole:
    return np.concatenate([np.empty((0, 2), np.int64), *pieces])


def _union(intervals: Whole) -> Whole:
    """Return intervals that cover the same times and do not touch."""
    ordered = intervals[np.argsort(intervals[:, 0], kind="stable")]
    if not len(ordered):
        return ordered
    reached = np.maximum.accumulate(ordered[:, 1])
    opens = np.append([True], ordered[1:, 0] > reached[:-1])
    closes = np.append(opens[1:], [True])
    return np.stack([ordered[opens, 0], reached[closes]], axis=1)


def _common(first: Whole, second: Whole) -> Whole:
    """Return the times that both cover; neither touches itself."""
    return _together(list(_overlaps(first, second)))


def _overlaps(first: Whole, second: Whole) -> Iterator[Whole]:
    for start, end in first.tolist():
        low = np.searchsorted(second[:, 1], start, side="right")
        high = np.searchsorted(second[:, 0], end, side="left")
        yield np.clip(second[low:high], start, end)


def _share(time_ns: Whole, tx_bytes: Whole, windows: Whole, rate_bps: float) -> float | None:
    """Return bits sent in the windows over what the line could have sent in them."""
    is_seen = (windows[:, 0] >= time_ns[0]) & (windows[:, 1] <= time_ns[-1])
    seen = windows[is_seen]
    length_ns = int((seen[:, 1] - seen[:, 0]).sum())
    if not length_ns:
        return None
    # From the first sample on: a float holds those differences exactly, and the clock's times not.
    sent = np.interp(seen - time_ns[0], time_ns - time_ns[0], tx_bytes - tx_bytes[0])
    return float((sent[:, 1] - sent[:, 0]).sum()) * 8e9 / (rate_bps * length_ns)
