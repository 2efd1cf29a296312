"""The journals of a job's processes become one Run.

All times are moved to one zero, the first moment recorded. The processes of one machine share a
monotonic clock; between machines there are the wall clocks, corrected by clocks.py.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fullwire.errors import DamagedInput
from fullwire.model.emulation import undilated
from fullwire.model.facts import FactValue
from fullwire.model.run import Basis, Collectives, Gradients, Provenance, Run, Spans, Table, Whole
from fullwire.sources.live.clocks import SAME, Offset, offsets
from fullwire.sources.live.inside.journal import ENDED, FAILED, Note
from fullwire.sources.live.journals import Journal, read_journals
from fullwire.sources.live.sampled import (
    Shift,
    hosts_of,
    line_rates_bps,
    links_of,
    sampler_defects,
    sampler_share,
    sockets_of,
)
from fullwire.sources.live.samples import HostSamples, read_samples
from fullwire.sources.live.steps import Steps, found_steps, last_backward_start_ns, spans_of

GLOO_THREADS = 2  # of each process group, in torch's ProcessGroupGloo: so many collectives at once
_AnyTable = TypeVar("_AnyTable", bound=Table)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Rank:
    """One rank's journal with its steps, and what brings its times to the run's zero."""

    journal: Journal
    steps: Steps
    shift_ns: int
    clock: Offset

    @property
    def number(self) -> int:
        return self.journal.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of a job besides what its processes write; its times are undilated."""

    source: str
    basis: Basis = "measured"
    facts: dict[str, FactValue] = field(default_factory=dict)


def assembled(directories: Sequence[Path], known: Known) -> Run:
    """Make a run of what the processes of a job wrote into directories, and of what else is known.

    What a dilated job wrote is brought back to the time that it stands for.
    """
    for directory in directories:
        if not directory.is_dir():
            raise DamagedInput(directory, "expected a directory with recordings, there is none")
    journals, missing = read_journals(directories)
    samples, unreadable = read_samples(directories)
    chosen, sentences = _last_attempts(journals)
    missing += unreadable + sentences
    ranks = _on_one_clock(chosen)
    workers = _workers(chosen)
    missing += _what_is_missing(ranks, workers)
    collectives = [_collectives(rank) for rank in ranks]
    missing += [sentence for _, sentence in collectives if sentence]
    missing += _what_is_not_sampled(ranks, samples)
    shift_ns = _shifts(ranks, samples)
    run = Run(
        provenance=Provenance(origin="measured", source=known.source, basis=known.basis),
        facts={**_facts(ranks, workers), **_host_facts(ranks, samples)},
        missing=tuple(missing),
        spans=_joined(Spans, [_spans(rank) for rank in ranks]),
        gradients=_joined(Gradients, [_gradients(rank) for rank in ranks]),
        collectives=_joined(Collectives, [table for table, _ in collectives]),
        links=links_of(samples, shift_ns),
        sockets=sockets_of(samples, shift_ns),
        hosts=hosts_of(samples, shift_ns),
    )
    dilation = known.facts.get("dilation")
    run = undilated(run, dilation) if isinstance(dilation, float) else run
    return dataclasses.replace(run, facts={**run.facts, **known.facts})


def _last_attempts(journals: Sequence[Journal]) -> tuple[list[Journal], list[str]]:
    """Keep one journal per rank: of the job's last attempt, and the one with most in it."""
    latest: dict[int, Journal] = {}
    left_out: dict[int, int] = defaultdict(int)
    for journal in sorted(journals, key=lambda each: (each.attempt, len(each.notes))):
        if journal.rank in latest:
            left_out[journal.rank] += 1
        latest[journal.rank] = journal
    sentences = [
        f"rank {rank}: {count} earlier or smaller recording{'s' if count > 1 else ''} of the same "
        "rank left out, as after a restart"
        for rank, count in sorted(left_out.items())
    ]
    return [latest[rank] for rank in sorted(latest)], sentences


def _on_one_clock(journals: Sequence[Journal]) -> list[_Rank]:
    """Bring all times to one zero, by the wall clocks and then by what the collectives tell."""
    to_wall = _wall_by_machine(journals)
    zero = min(
        (_first_time(each) + to_wall[_machine(each)] for each in journals),
        default=0,
    )
    ranks = [
        _Rank(
            journal=each, steps=found_steps(each), shift_ns=to_wall[_machine(each)] - zero,
            clock=SAME,
        )
        for each in journals
    ]  # fmt: skip
    if len(to_wall) < 2:
        return ranks
    told = _joined(Collectives, [_collectives(rank)[0] for rank in ranks])
    found = offsets(told, {rank.number: _machine(rank.journal) for rank in ranks})
    clocks = [found[_machine(rank.journal)] for rank in ranks]
    return [
        dataclasses.replace(rank, shift_ns=rank.shift_ns + clock.offset_ns, clock=clock)
        for rank, clock in zip(ranks, clocks, strict=True)
    ]


def _wall_by_machine(journals: Sequence[Journal]) -> dict[str, int]:
    """Return what each machine's wall clock showed beyond its monotonic one, read once."""
    to_wall: dict[str, int] = {}
    for each in journals:
        to_wall.setdefault(
            _machine(each), int(each.header["unix_ns"]) - int(each.header["monotonic_ns"])
        )
    return to_wall


def _shifts(ranks: Sequence[_Rank], samples: Sequence[HostSamples]) -> Shift:
    """Return what brings each sampler's times to the zero of the ranks."""
    known = {_machine(rank.journal): rank.shift_ns for rank in ranks}
    first_ns = min((int(each.header["unix_ns"]) for each in samples), default=0)
    zero = next((_wall_zero(rank) for rank in ranks), first_ns)

    def shift_ns(host: HostSamples) -> int:
        own = int(host.header["unix_ns"]) - int(host.header["monotonic_ns"]) - zero
        return known.get(str(host.header["machine"]), own)

    return shift_ns


def _wall_zero(rank: _Rank) -> int:
    """Return the run's zero on the first machine's wall clock."""
    header = rank.journal.header
    return int(header["unix_ns"]) - int(header["monotonic_ns"]) - rank.shift_ns


def _first_time(journal: Journal) -> int:
    single = [journal.of(kind)[:, 1] for kind in (Note.GRADIENT, Note.END, Note.ZERO_GRAD)]
    intervals = [
        journal.of(kind)[:, 1]
        for kind in (Note.OPTIMIZER, Note.FORWARD, Note.BACKWARD, Note.WAIT, Note.INPUT)
    ]
    times = np.concatenate([*single, *intervals, journal.of(Note.ISSUE)[:, 2]])
    return int(times.min()) if len(times) else int(journal.header["monotonic_ns"])


def _workers(journals: Sequence[Journal]) -> int:
    announced = [int(each["workers"]) for j in journals for each in j.defined("identity")]
    return max([*announced, len(journals)], default=0)


def _what_is_missing(ranks: Sequence[_Rank], workers: int) -> list[str]:
    if not ranks:
        return ["nothing was recorded: no process of the job used torch to train or communicate"]
    here = {rank.number for rank in ranks}
    sentences = [
        f"rank {rank}: nothing was recorded" for rank in range(workers) if rank not in here
    ]
    for rank in ranks:
        sentences += [f"rank {rank.number}: {each}" for each in _defects(rank)]
    return sentences


def _defects(rank: _Rank) -> list[str]:
    journal, header = rank.journal, rank.journal.header
    found = [str(each["sentence"]) for each in journal.defined("missing")]
    if header["status"] == FAILED:
        found.append(f"its recorder failed and the job went on without it ({header['reason']})")
    elif header["status"] != ENDED:
        found.append("its process ended without closing its recording (was it killed?)")
    if journal.bytes_not_read:
        found.append(f"the last {journal.bytes_not_read} bytes of its recording are no whole block")
    if not len(rank.steps):
        found.append("no step ever ended: no torch optimizer took one")
    return found


def _facts(ranks: Sequence[_Rank], workers: int) -> dict[str, FactValue]:
    facts: dict[str, FactValue] = {}
    if workers:
        facts["workers"] = workers
    for rank in ranks:
        for identity in rank.journal.defined("identity"):
            facts |= {"backend": str(identity["backend"]), "torch": str(identity["torch"])}
        for fact in rank.journal.defined("fact"):
            facts[str(fact["name"])] = str(fact["value"])
    late = sum(int((rank.journal.of(Note.END)[:, 2] == 1).sum()) for rank in ranks)
    if late:
        facts["late_ends"] = late
    facts |= _processor_facts(ranks)
    costs = [cost for rank in ranks for cost in _recorder_cost_s(rank)]
    if costs:
        facts["recorder_s"] = max(costs)
    return facts


def _processor_facts(ranks: Sequence[_Rank]) -> dict[str, FactValue]:
    """Return the processor time that each rank used in a step, once the first had passed."""
    facts: dict[str, FactValue] = {"machines": len({_machine(rank.journal) for rank in ranks})}
    used = [(float(rank.number), *_processor_s(rank)) for rank in ranks]
    known = [each for each in used if len(each) == 3]
    if known:
        facts["processor_s"] = tuple((rank, whole_s) for rank, whole_s, _ in known)
        facts["communication_processor_s"] = tuple((rank, part_s) for rank, _, part_s in known)
    offered = [int(rank.journal.header["processors"]) for rank in ranks]
    return facts | ({"processors": min(offered)} if offered else {})


def _processor_s(rank: _Rank) -> tuple[float, ...]:
    """Return a rank's processor seconds in a step, whole and in communication, if known."""
    notes = rank.journal.of(Note.PROCESSOR)
    notes = notes[notes[:, 2] >= rank.steps.end_ns[0]] if len(rank.steps) else notes[:0]
    if len(notes) < 2:
        return ()
    steps = np.searchsorted(rank.steps.end_ns, notes[[0, -1], 2], side="right")
    passed = int(steps[1] - steps[0])
    if not passed:
        return ()
    used_s: list[float] = ((notes[-1, :2] - notes[0, :2]) * 1e-9 / passed).tolist()
    return tuple(used_s)


def _machine(journal: Journal) -> str:
    return str(journal.header["machine"])


def _what_is_not_sampled(ranks: Sequence[_Rank], samples: Sequence[HostSamples]) -> list[str]:
    there = {each.host for each in samples}
    hosts = dict.fromkeys(_host(rank) for rank in ranks)
    sentences = [
        f"host {host}: its links, connections and processors were not sampled"
        for host in hosts
        if host not in there
    ]
    unknown = dict.fromkeys(_host(rank) for rank in ranks if rank.clock.uncertainty_ns is None)
    sentences += [
        f"host {host}: its clock is believed as it is; no collective shows how far it is off"
        for host in unknown
    ]
    return sentences + sampler_defects(samples)


def _host(rank: _Rank) -> str:
    return str(rank.journal.header["host"])


def _host_facts(ranks: Sequence[_Rank], samples: Sequence[HostSamples]) -> dict[str, FactValue]:
    """Return what is known of the hosts of the ranks: their names, clocks, links and samplers."""
    facts: dict[str, FactValue] = {}
    if ranks:
        facts["hosts"] = ",".join(_host(rank) for rank in ranks)
        clocks = [(float(rank.number), rank.clock) for rank in ranks]
        facts["clock_offset_s"] = tuple((rank, each.offset_ns * 1e-9) for rank, each in clocks)
        facts["clock_uncertainty_s"] = tuple(
            (rank, each.uncertainty_ns * 1e-9)
            for rank, each in clocks
            if each.uncertainty_ns is not None
        )
    share = sampler_share(samples)
    if share is not None:
        facts["sampler_share"] = share
    return facts | _line_rate_facts(ranks, line_rates_bps(samples))


def _line_rate_facts(
    ranks: Sequence[_Rank], rates_bps: Mapping[str, float]
) -> dict[str, FactValue]:
    """Name the commonest line rate of the ranks, and the ranks with another; all must be known."""
    if not ranks or not all(_host(rank) in rates_bps for rank in ranks):
        return {}
    by_rank = [(float(rank.number), rates_bps[_host(rank)]) for rank in ranks]
    [(common_bps, _)] = Counter(rate_bps for _, rate_bps in by_rank).most_common(1)
    others = tuple(each for each in by_rank if each[1] != common_bps)
    facts: dict[str, FactValue] = {"line_rate_bps": common_bps}
    return facts | ({"other_line_rates_bps": others} if others else {})


def _recorder_cost_s(rank: _Rank) -> Iterable[float]:
    if len(rank.steps):
        for cost in rank.journal.defined("cost"):
            cost_ns = cost["notes"] * cost["note_ns"] + cost["write_ns"]
            yield float(cost_ns) * 1e-9 / len(rank.steps)


def _spans(rank: _Rank) -> Spans:
    spans = sorted(spans_of(rank.journal, rank.steps), key=lambda each: each.start_ns)
    return Spans(
        rank=np.full(len(spans), rank.number),
        step=_whole(each.step for each in spans),
        lane=np.array([each.lane for each in spans], object),
        name=np.array([each.name for each in spans], object),
        start_ns=_whole(each.start_ns for each in spans) + rank.shift_ns,
        end_ns=_whole(each.end_ns for each in spans) + rank.shift_ns,
    )


def _gradients(rank: _Rank) -> Gradients:
    """Take each step's gradients from its last backward pass, in the order of becoming ready."""
    notes = rank.journal.of(Note.GRADIENT)
    notes = notes[np.argsort(notes[:, 1], kind="stable")]
    step = rank.steps.of(notes[:, 1])
    begin = last_backward_start_ns(rank.journal, rank.steps)
    kept = step >= 0
    kept[kept] = notes[kept, 1] >= begin[step[kept]]
    notes, step = notes[kept], step[kept]
    sizes = {each["number"]: each["bytes"] for each in rank.journal.defined("parameter")}
    first = np.searchsorted(step, step)
    return Gradients(
        rank=np.full(len(step), rank.number),
        step=step,
        order=np.arange(len(step)) - first,
        bytes=_whole(sizes[number] for number in notes[:, 0].tolist()),
        ready_ns=notes[:, 1] + rank.shift_ns,
    )


def _collectives(rank: _Rank) -> tuple[Collectives, str]:
    """Make a row of each collective that ended, in the order of issue, and count the others."""
    issues = rank.journal.of(Note.ISSUE)
    issues = issues[np.argsort(issues[:, 2], kind="stable")]
    ends = dict(rank.journal.of(Note.END)[:, :2].tolist())
    ended = np.array([number in ends for number in issues[:, 0].tolist()], bool)
    signatures = {each["number"]: each for each in rank.journal.defined("signature")}
    told = [signatures[number] for number in issues[:, 1].tolist()]
    groups = [str(each["group"]) for each in told]
    sequence = _numbered_in_group(groups)
    lost = int(len(issues) - ended.sum())
    rows = np.flatnonzero(ended)
    issue = issues[rows, 2]
    end = np.maximum(_whole(ends[number] for number in issues[rows, 0].tolist()), issue)
    kept = [told[row] for row in rows.tolist()]
    table = Collectives(
        rank=np.full(len(rows), rank.number),
        step=rank.steps.of(issue),
        sequence=sequence[rows],
        group=np.array([groups[row] for row in rows.tolist()], object),
        op=np.array([each["op"] for each in kept], object),
        dtype=np.array([each["dtype"] for each in kept], object),
        bytes=_whole(each["bytes"] for each in kept),
        issue_ns=issue + rank.shift_ns,
        start_ns=_starts(rank, [groups[row] for row in rows.tolist()], issue, end) + rank.shift_ns,
        end_ns=end + rank.shift_ns,
    )
    verb = "collective has" if lost == 1 else "collectives have"
    return table, f"rank {rank.number}: {lost} {verb} no end" if lost else ""


def _numbered_in_group(groups: Sequence[str]) -> Whole:
    counts: dict[str, int] = defaultdict(int)
    numbers = []
    for group in groups:
        numbers.append(counts[group])
        counts[group] += 1
    return _whole(numbers)


def _starts(rank: _Rank, groups: Sequence[str], issue: Whole, end: Whole) -> Whole:
    """Say when each collective began: with Gloo, when one of its group's threads was free.

    Gloo does not tell; it takes collectives in order, `GLOO_THREADS` at a time. Other backends are
    believed to begin at once.
    """
    if not any(each["backend"] == "gloo" for each in rank.journal.defined("identity")):
        return issue
    free: dict[str, list[int]] = defaultdict(lambda: [0] * GLOO_THREADS)
    starts = []
    for group, issued, ended in zip(groups, issue.tolist(), end.tolist(), strict=True):
        start = min(max(issued, heapq.heappop(free[group])), ended)
        heapq.heappush(free[group], ended)
        starts.append(start)
    return _whole(starts)


def _joined(kind: type[_AnyTable], tables: Sequence[_AnyTable]) -> _AnyTable:
    if not tables:
        return kind.empty()
    columns = [table.columns() for table in tables]
    joined: dict[str, Any] = {
        name: np.concatenate([each[name] for each in columns]) for name in kind.column_types()
    }
    return kind(**joined)


def _whole(values: Iterable[int]) -> Whole:
    return np.fromiter(values, np.int64)
