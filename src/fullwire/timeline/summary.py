"""The summary of a recorded run, in the few figures that are shown when the job has ended.

Exposed communication is the time within steps when a collective was outstanding and the rank did
not compute.

For links and processors it has the share in use, in the job's whole steps and while communicating.
Utilization of a link is bits sent / (line rate x window). Counters are assumed to grow evenly
between two samples, which lie some 10 ms apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from fullwire.run.intervals import union
from fullwire.run.kinds import ROWS, in_probes, in_steps, over_ranks, sorted_steps
from fullwire.run.placement import host_line_rates_bps, host_of_rank
from fullwire.run.run import Hosts, Links, Run, Spans, Whole
from fullwire.run.usual import (
    LONGER,
    NEXT_TO_NOTHING,
    NO_ROUNDS,
    Pauses,
    gaps_between_steps_s,
    local_steps_of,
    marks_between_gaps,
    marks_of_steps,
    pauses,
    regular_steps,
    whole_rounds,
)
from fullwire.timeline.passes import passes_of_step
from fullwire.timeline.timeline import timelines
from fullwire.timeline.transfers import transfers_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of a run; those per step are means over its usual steps and over ranks."""

    ranks: int
    steps: int
    step_s: float | None  # of the usual steps
    usual: int  # the number of these
    kinds: int  # of steps; 1 where all are alike
    unlike: int  # steps that do other work and are too few for a kind of their own
    left_out: int  # steps that are warm-up or rare exceptions
    passes: float | None  # of a step, where they are known
    longer: int  # steps longer than LONGER usual ones, warm-up included
    longer_by_s: float  # all of these together
    pauses: Pauses | None
    collective_bytes: float | None  # per rank and step, as the program gave them
    exposed_s: float | None


def summarised(parts: Iterable[Run]) -> Summary:
    """Sum up a run from its parts, each with whole steps; one part may be the whole run."""
    sums = _Sums()
    for part in parts:
        sums.add(part)
    return sums.summary()


class _Sums:
    """Sums over the parts so far."""

    def __init__(self) -> None:
        self._ranks: set[int] = set()
        # By step: the ranks that have it, and their sums of lengths, bytes and exposed time.
        self._by_step = np.zeros((4, 0), np.int64)
        self._did = np.zeros((ROWS, 0))  # by step: what makes its kind
        self._probed: dict[int, np.ndarray] = {}  # by rank: the same of each probe step
        self._marks: list[Spans] = []  # steps and probe steps of the first rank
        self._passes: float | None = None
        self._every = 1  # steps of a round

    def add(self, part: Run) -> None:
        table = part.collectives
        self._ranks |= set(np.unique(np.concatenate([part.spans.rank, table.rank])).tolist())
        self._passes = self._passes or passes_of_step(part)
        self._every = max(self._every, local_steps_of(part))
        marks = marks_of_steps(part)
        most = max(self._by_step.shape[1], marks.step.max(initial=-1) + 1)
        more = np.zeros((4, most), np.int64)
        more[:, : self._by_step.shape[1]] = self._by_step
        np.add.at(more[0], marks.step, 1)
        np.add.at(more[1], marks.step, marks.end_ns - marks.start_ns)
        is_inside = (table.step >= 0) & (table.step < most)
        np.add.at(more[2], table.step[is_inside], table.bytes[is_inside])
        for line in timelines(part, transfers_of(part, {})):
            is_exposed = (line.step >= 0) & line.is_communicating & ~line.is_computing
            number = line.step_number[line.step[is_exposed]]
            np.add.at(more[3], number, line.length_ns[is_exposed])
        self._by_step = more
        self._did = np.pad(self._did, ((0, 0), (0, most - self._did.shape[1])))
        self._did += in_steps(part, np.arange(most))
        for rank, did in in_probes(part).items():
            before = self._probed.get(rank, did[:, :0])
            self._probed[rank] = np.concatenate([before, did], axis=1)
        of_first = marks_between_gaps(part.spans)
        first = min(self._ranks, default=0)
        self._marks = [mark for mark in self._marks if mark.rank[0] == first]
        if len(of_first) and of_first.rank[0] == first:
            self._marks.append(of_first)

    def summary(self) -> Summary:
        count, *sums = self._by_step
        # As in an account: the steps that all ranks have.
        shared = np.flatnonzero((count > 0) & (count == count.max(initial=0)))
        length_s, of_bytes, exposed_s = (sum_[shared] / count[shared] for sum_ in sums)
        length_s, exposed_s = length_s * 1e-9, exposed_s * 1e-9
        if not (length_s > 0).any():
            return Summary(
                ranks=len(self._ranks),
                steps=0,
                step_s=None,
                usual=0,
                kinds=1,
                unlike=0,
                left_out=0,
                passes=None,
                longer=0,
                longer_by_s=0.0,
                pauses=None,
                collective_bytes=None,
                exposed_s=None,
            )
        did = self._did[:, shared] / count[shared]
        probed = over_ranks(self._probed) / count.max()
        kinds = sorted_steps(shared, length_s, did, probed, self._rounds(shared, did[-1]))
        is_usual = kinds.usual(shared, length_s)
        step_s = float(length_s[is_usual].mean())
        expected_s = kinds.expected(shared, is_usual, length_s)
        is_longer = length_s > LONGER * expected_s
        return Summary(
            ranks=len(self._ranks),
            steps=len(length_s),
            step_s=step_s,
            usual=int(is_usual.sum()),
            kinds=max(len(kinds.kinds), 1),
            unlike=kinds.unlike,
            left_out=int((~(kinds.kept(shared, length_s) | regular_steps(length_s))).sum()),
            passes=self._passes,
            longer=int(is_longer.sum()),
            longer_by_s=float((length_s - expected_s)[is_longer].sum()),
            pauses=pauses(gaps_between_steps_s(Spans.joined(self._marks)), step_s),
            collective_bytes=float(of_bytes[is_usual].mean()),
            exposed_s=float(exposed_s[is_usual].mean()),
        )

    def _rounds(self, shared: Whole, sent_bytes: np.ndarray) -> Whole:
        """Return the steps of each whole round, if steps make rounds."""
        sums = shared[sent_bytes > NEXT_TO_NOTHING * sent_bytes.max()]
        if self._every == 1 or not len(sums):
            return NO_ROUNDS
        marks = Spans.joined(self._marks)
        marks = marks.rows(np.argsort(marks.start_ns, kind="stable"))
        in_order = np.where(marks.name == "step", marks.step, -1)
        return whole_rounds(in_order[np.argmax(in_order == sums[0]) :], self._every)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """The use of one link, out of its host; a share is None where measurements are missing."""

    host: str
    interface: str
    line_rate_bps: float
    in_steps: float | None
    while_communicating: float | None


class Windows:
    """When steps ran and when collectives were outstanding, by rank; gathered part by part.

    For a long job the collectives of every n-th step are enough: those of an hour are too many.
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
        """Return the time from the first step of any rank to the end of the last, if any."""
        steps = self.steps(list(self._steps))
        return (int(steps[0, 0]), int(steps[-1, 1])) if len(steps) else None


def links_in_use(run: Run, samples: Iterable[Links], windows: Windows) -> list[LinkUse]:
    """Return the use of each host's busiest link whose line rate is known.

    Samples come in pieces, so that an hour of them is never in memory at once with their names.
    """
    rates_bps = host_line_rates_bps(run)
    in_use = []
    for host, links in _counters(samples, rates_bps).items():
        busiest = max(sorted(links), key=lambda name: int(np.ptp(links[name][1])))
        ranks = [rank for rank, name in host_of_rank(run).items() if name == host]
        steps = windows.steps(ranks)
        outstanding = windows.outstanding(ranks)
        # The times that both cover; the intervals of each are apart.
        both = []
        for start, end in steps.tolist():
            low = np.searchsorted(outstanding[:, 1], start, side="right")
            high = np.searchsorted(outstanding[:, 0], end, side="left")
            both.append(np.clip(outstanding[low:high], start, end))
        in_use.append(
            LinkUse(
                host=host,
                interface=busiest,
                line_rate_bps=rates_bps[host],
                in_steps=_share(*links[busiest], steps, rates_bps[host]),
                while_communicating=_share(*links[busiest], _together(both), rates_bps[host]),
            )
        )
    return in_use


def _counters(
    samples: Iterable[Links], hosts: Collection[str]
) -> dict[str, dict[str, tuple[Whole, Whole]]]:
    """Return the times of samples of hosts' links, and the bytes sent, by host and name."""
    pieces: dict[tuple[str, str], list[Whole]] = defaultdict(list)
    for table in samples:
        columns = np.stack([table.time_ns, table.tx_bytes])
        for host, name in dict.fromkeys(zip(table.host, table.interface, strict=True)):
            if host in hosts:
                here = (table.host == host) & (table.interface == name)
                pieces[host, name].append(columns[:, here])
    by_host: dict[str, dict[str, tuple[Whole, Whole]]] = defaultdict(dict)
    for (host, name), parts in sorted(pieces.items()):
        time_ns, tx_bytes = np.concatenate(parts, axis=1)
        by_host[host][name] = time_ns, tx_bytes
    return by_host


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
    for number in np.unique(rank).tolist():
        windows[number].append(_union(np.stack([start, end], axis=1)[rank == number]))


def _together(pieces: list[Whole]) -> Whole:
    return np.concatenate([np.empty((0, 2), np.int64), *pieces])


def _union(intervals: Whole) -> Whole:
    """Return intervals that cover the same times and do not touch."""
    return np.stack(union(*intervals.T), axis=1)


def _share(time_ns: Whole, tx_bytes: Whole, windows: Whole, rate_bps: float) -> float | None:
    """Return bits sent in the windows, as a share of those that the line could have sent."""
    is_seen = (windows[:, 0] >= time_ns[0]) & (windows[:, 1] <= time_ns[-1])
    seen = windows[is_seen]
    length_ns = int((seen[:, 1] - seen[:, 0]).sum())
    if not length_ns:
        return None
    # Since the first sample: a float holds these differences exactly, unlike the clock's times.
    sent = np.interp(seen - time_ns[0], time_ns - time_ns[0], tx_bytes - tx_bytes[0])
    return float((sent[:, 1] - sent[:, 0]).sum()) * 8e9 / (rate_bps * length_ns)
