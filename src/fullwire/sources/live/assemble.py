"""The journals of a job's processes become one Run.

All times are moved to one zero, the first moment recorded, by each process's own reading of the
wall clock; the processes of one host share a monotonic clock, so there the offsets are the same.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fullwire.errors import DamagedInput
from fullwire.model.emulation import undilated
from fullwire.model.facts import FactValue
from fullwire.model.run import Basis, Collectives, Gradients, Provenance, Run, Spans, Whole
from fullwire.sources.live.inside.journal import ENDED, FAILED, Note
from fullwire.sources.live.journals import Journal, Notes, read_journals
from fullwire.sources.live.steps import (
    Steps,
    found_steps,
    last_backward_start_ns,
    spans_of,
    whole_steps,
)
from fullwire.store import RunWriter

# Collectives of a process group that are under way at once: torch's ProcessGroupGloo has so many
# threads, and ProcessGroupNCCL one stream.
AT_ONCE = {"gloo": 2, "nccl": 1}
SPARSE = (Note.OPTIMIZER, Note.EVALUATION, Note.INFERENCE, Note.PROCESSOR)  # few in a step


PART_NOTES = 2**16  # of a rank in memory at once


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Rank:
    """One rank's journal with its steps, and what brings its times to the run's zero."""

    journal: Journal
    sparse: Notes
    steps: Steps
    shift_ns: int

    @property
    def number(self) -> int:
        return self.journal.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of a job besides what its processes write; its times are undilated."""

    source: str
    basis: Basis = "measured"
    facts: dict[str, FactValue] = field(default_factory=dict)

    @property
    def provenance(self) -> Provenance:
        """Where the job's run comes from."""
        return Provenance(origin="measured", source=self.source, basis=self.basis)

    def undilated(self, part: Run) -> Run:
        """Bring what a dilated job wrote back to the time that it stands for."""
        dilation = self.facts.get("dilation")
        return undilated(part, dilation) if isinstance(dilation, float) else part


def assemble(directory: Path, writer: RunWriter, known: Known) -> Path:
    """Write the run of what a job's processes wrote into a directory, and of what else is known.

    It goes rank by rank, and of each rank no more than some steps are in memory at once.
    """
    if not directory.is_dir():
        raise DamagedInput(directory, "expected a directory with recordings, there is none")
    journals, missing = read_journals(directory)
    chosen, sentences = _last_attempts(journals)
    workers = _workers(chosen)
    missing += [*sentences, *_what_is_missing(chosen, workers)]
    found = _facts(chosen, workers)
    costs_s: list[float] = []
    used_s: list[tuple[float, float, float]] = []
    for rank in _on_one_clock(chosen):
        missing += _write_rank(rank, known, writer)
        costs_s += _recorder_cost_s(rank)
        used_s += _processor_s(rank)
    if costs_s:
        found["recorder_s"] = max(costs_s)
    if used_s:
        found["processor_s"] = tuple((rank, whole_s) for rank, whole_s, _ in used_s)
        found["communication_processor_s"] = tuple((rank, part_s) for rank, _, part_s in used_s)
    outline = known.undilated(Run(provenance=known.provenance, facts=found))
    return writer.finish(known.provenance, {**outline.facts, **known.facts}, missing)


def _write_rank(rank: _Rank, known: Known, writer: RunWriter) -> list[str]:
    """Write one rank's tables, and say what of its collectives is missing."""
    collectives = _Collectives(rank)
    for ended, notes in whole_steps(rank.journal, rank.steps, PART_NOTES):
        part = Run(
            provenance=known.provenance,
            spans=_spans(rank, notes, ended),
            gradients=_gradients(rank, notes),
            collectives=collectives.ended_in(notes),
        )
        writer.add(**dict(known.undilated(part).tables()))
    if not len(rank.steps):
        return [f"rank {rank.number}: no step ever ended: no torch optimizer took one",
                *collectives.missing()]  # fmt: skip
    return collectives.missing()


def _last_attempts(journals: Sequence[Journal]) -> tuple[list[Journal], list[str]]:
    """Keep one journal per rank: of the job's last attempt, and the one with most in it."""
    latest: dict[int, Journal] = {}
    left_out: dict[int, int] = defaultdict(int)
    for journal in sorted(journals, key=lambda each: (each.attempt, sum(each.counts.values()))):
        if journal.rank in latest:
            left_out[journal.rank] += 1
        latest[journal.rank] = journal
    sentences = [
        f"rank {rank}: {count} earlier or smaller recording{'s' if count > 1 else ''} of the same "
        "rank left out, as after a restart"
        for rank, count in sorted(left_out.items())
    ]
    return [latest[rank] for rank in sorted(latest)], sentences


def _on_one_clock(journals: Sequence[Journal]) -> Iterator[_Rank]:
    wall_minus_monotonic = [
        int(each.header["unix_ns"]) - int(each.header["monotonic_ns"]) for each in journals
    ]
    by_host: dict[str, int] = {}
    for journal, offset in zip(journals, wall_minus_monotonic, strict=True):
        by_host.setdefault(str(journal.header["host"]), offset)
    to_wall = [by_host[str(each.header["host"])] for each in journals]
    zero = min(
        (_first_time(each) + offset for each, offset in zip(journals, to_wall, strict=True)),
        default=0,
    )
    for journal, offset in zip(journals, to_wall, strict=True):
        sparse = journal.only(SPARSE)
        steps = found_steps(journal, sparse)
        yield _Rank(journal=journal, sparse=sparse, steps=steps, shift_ns=offset - zero)


def _first_time(journal: Journal) -> int:
    return min(journal.first_ns.values(), default=int(journal.header["monotonic_ns"]))


def _workers(journals: Sequence[Journal]) -> int:
    announced = [int(each["workers"]) for j in journals for each in j.defined("identity")]
    return max([*announced, len(journals)], default=0)


def _what_is_missing(journals: Sequence[Journal], workers: int) -> list[str]:
    if not journals:
        return ["nothing was recorded: no process of the job used torch to train or communicate"]
    here = {journal.rank for journal in journals}
    sentences = [
        f"rank {rank}: nothing was recorded" for rank in range(workers) if rank not in here
    ]
    for journal in journals:
        sentences += [f"rank {journal.rank}: {each}" for each in _defects(journal)]
    return sentences


def _defects(journal: Journal) -> list[str]:
    header = journal.header
    found = [str(each["sentence"]) for each in journal.defined("missing")]
    if header["status"] == FAILED:
        found.append(f"its recorder failed and the job went on without it ({header['reason']})")
    elif header["status"] != ENDED:
        found.append("its process ended without closing its recording (was it killed?)")
    if journal.bytes_not_read:
        found.append(f"the last {journal.bytes_not_read} bytes of its recording are no whole block")
    return found


def _facts(journals: Sequence[Journal], workers: int) -> dict[str, FactValue]:
    facts: dict[str, FactValue] = {}
    if workers:
        facts["workers"] = workers
    for journal in journals:
        for identity in journal.defined("identity"):
            facts |= {"backend": str(identity["backend"]), "torch": str(identity["torch"])}
        for fact in journal.defined("fact"):
            facts[str(fact["name"])] = str(fact["value"])
    late = sum(journal.late_ends for journal in journals)
    if late:
        facts["late_ends"] = late
    return facts | _machine_facts(journals)


def _machine_facts(journals: Sequence[Journal]) -> dict[str, FactValue]:
    facts: dict[str, FactValue] = {"machines": len({str(j.header["machine"]) for j in journals})}
    offered = [int(journal.header["processors"]) for journal in journals]
    return facts | ({"processors": min(offered)} if offered else {})


def _processor_s(rank: _Rank) -> tuple[tuple[float, float, float], ...]:
    """Return a rank with its processor seconds in a step, whole and in communication, if known.

    They are counted from the first reading after the first step, which is not like others.
    """
    notes = rank.sparse.of(Note.PROCESSOR)
    notes = notes[notes[:, 1] >= rank.steps.end_ns[0]] if len(rank.steps) else notes[:0]
    if len(notes) < 2:
        return ()
    steps = np.searchsorted(rank.steps.end_ns, notes[[0, -1], 1], side="right")
    passed = int(steps[1] - steps[0])
    if not passed:
        return ()
    whole_s, part_s = (notes[1:, [0, 2]].sum(axis=0) * 1e-9 / passed).tolist()
    return ((float(rank.number), whole_s, part_s),)


def _recorder_cost_s(rank: _Rank) -> Iterable[float]:
    if len(rank.steps):
        for cost in rank.journal.defined("cost"):
            cost_ns = cost["notes"] * cost["note_ns"] + cost["write_ns"]
            yield float(cost_ns) * 1e-9 / len(rank.steps)


def _spans(rank: _Rank, notes: Notes, ended: range) -> Spans:
    spans = sorted(spans_of(notes, rank.steps, ended), key=lambda each: each.start_ns)
    return Spans(
        rank=np.full(len(spans), rank.number),
        step=_whole(each.step for each in spans),
        lane=np.array([each.lane for each in spans], object),
        name=np.array([each.name for each in spans], object),
        start_ns=_whole(each.start_ns for each in spans) + rank.shift_ns,
        end_ns=_whole(each.end_ns for each in spans) + rank.shift_ns,
    )


def _gradients(rank: _Rank, all_notes: Notes) -> Gradients:
    """Take each step's gradients from its last backward pass, in the order of becoming ready."""
    notes = all_notes.of(Note.GRADIENT)
    notes = notes[np.argsort(notes[:, 1], kind="stable")]
    step = rank.steps.of(notes[:, 1])
    begin = last_backward_start_ns(all_notes, rank.steps)
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


class _Collectives:
    """Makes a row of each collective that ended; those that did not yet wait for a later part."""

    def __init__(self, rank: _Rank) -> None:
        self._rank = rank
        self._signatures = {each["number"]: each for each in rank.journal.defined("signature")}
        self._issued = np.empty((0, 4), np.int64)  # number, when, signature, sequence in its group
        self._ends = np.empty((0, 2), np.int64)  # number, when
        self._sequence: dict[str, int] = defaultdict(int)
        backends = [str(each["backend"]) for each in rank.journal.defined("identity")]
        self._at_once = max((AT_ONCE.get(backend, 0) for backend in backends), default=0)
        self._free_ns: dict[str, list[int]] = defaultdict(lambda: [0] * self._at_once)

    def ended_in(self, notes: Notes) -> Collectives:
        """Return those that had ended by the end of this part, in the order of issue."""
        issued = np.concatenate([self._issued, self._numbered(notes.of(Note.ISSUE))])
        ends = np.concatenate([self._ends, notes.of(Note.END)[:, :2]])
        _, of_issue, of_end = np.intersect1d(issued[:, 0], ends[:, 0], return_indices=True)
        self._issued = np.delete(issued, of_issue, axis=0)
        self._ends = np.delete(ends, of_end, axis=0)
        in_order = np.argsort(issued[of_issue, 1], kind="stable")
        return self._table(issued[of_issue[in_order]], ends[of_end[in_order], 1])

    def missing(self) -> list[str]:
        """Say how many never ended."""
        lost = len(self._issued)
        verb = "collective has" if lost == 1 else "collectives have"
        return [f"rank {self._rank.number}: {lost} {verb} no end"] if lost else []

    def _numbered(self, issues: Whole) -> Whole:
        issues = issues[np.argsort(issues[:, 1], kind="stable")]
        sequence = []
        for signature in issues[:, 2].tolist():
            group = str(self._signatures[signature]["group"])
            sequence.append(self._sequence[group])
            self._sequence[group] += 1
        return np.column_stack([issues, _whole(sequence)])

    def _table(self, issued: Whole, end_ns: Whole) -> Collectives:
        rank, issue_ns = self._rank, issued[:, 1]
        end_ns = np.maximum(end_ns, issue_ns)
        told = [self._signatures[number] for number in issued[:, 2].tolist()]
        groups = [str(each["group"]) for each in told]
        return Collectives(
            rank=np.full(len(issued), rank.number),
            step=rank.steps.of(issue_ns),
            sequence=issued[:, 3],
            group=np.array(groups, object),
            op=np.array([each["op"] for each in told], object),
            dtype=np.array([each["dtype"] for each in told], object),
            bytes=_whole(each["bytes"] for each in told),
            issue_ns=issue_ns + rank.shift_ns,
            start_ns=self._starts(groups, issue_ns, end_ns) + rank.shift_ns,
            end_ns=end_ns + rank.shift_ns,
        )

    def _starts(self, groups: Sequence[str], issue_ns: Whole, end_ns: Whole) -> Whole:
        """Say when each collective began: when its group had come so far.

        Neither Gloo nor NCCL tells; both take the collectives of a group in order, so many at once.
        Other backends are believed to begin at once.
        """
        if not self._at_once:
            return issue_ns
        starts = []
        for group, issued, ended in zip(groups, issue_ns.tolist(), end_ns.tolist(), strict=True):
            start = min(max(issued, heapq.heappop(self._free_ns[group])), ended)
            heapq.heappush(self._free_ns[group], ended)
            starts.append(start)
        return _whole(starts)


def _whole(values: Iterable[int]) -> Whole:
    return np.fromiter(values, np.int64)
