"""Join the journals of a job's processes as one Run.

All times are moved to one zero, the first moment recorded. The processes of one machine share a
monotonic clock. Between machines, the wall clocks count, and hosts.py corrects them.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fullwire.errors import DamagedInput
from fullwire.recorder.captured import read_captured
from fullwire.recorder.hosts import (
    SAME,
    Clock,
    Clocks,
    host_facts,
    machine_of,
    offsets,
    sample_shifts,
    wall_beyond_monotonic_ns,
    wall_zero_ns,
    what_is_not_sampled,
)
from fullwire.recorder.inside import ENTERED
from fullwire.recorder.inside.journal import ENDED, FAILED, Note
from fullwire.recorder.journals import Journal, Notes, last_attempts, read_journals
from fullwire.recorder.launch import ELSEWHERE
from fullwire.recorder.reported import KINDS, Reported
from fullwire.recorder.samples import read_samples, tables_of
from fullwire.recorder.steps import (
    OUTSIDE,
    Steps,
    found_steps,
    last_backward_start_ns,
    marks_of,
    spans_of,
    whole_steps,
)
from fullwire.run.emulation import undilated
from fullwire.run.facts import NO_FACTS, Facts, Pairs, named
from fullwire.run.gaps import Gap
from fullwire.run.run import (
    TABLES,
    Basis,
    Carried,
    Collectives,
    Gradients,
    Provenance,
    Run,
    Spans,
    Whole,
)
from fullwire.run.store import RunWriter

# The number of collectives that a process group works on at once: torch's ProcessGroupGloo has two
# threads, and ProcessGroupNCCL has one stream.
AT_ONCE = {"gloo": 2, "nccl": 1}
_LARGEST_OF_RANKS = ("wire_error", "wire_messages", "wire_widened")
_TOLD = (Note.BEGUN, Note.HEARD, Note.REDUCED, Note.SENT)
SPARSE = (  # few in a step
    Note.OPTIMIZER,
    Note.EVALUATION,
    Note.INFERENCE,
    Note.PROCESSOR,
    Note.CHILDREN,
    Note.BEFORE_FORWARD,
    Note.PROBE,
    Note.TURNS,
    Note.DELAY,
    *KINDS,
)
OFTEN = 0.5  # Share of the steps that must have work before the forward, for it to be usual.
DISK_BLOCK_BYTES = 512  # The kernel counts such blocks.
PART_NOTES = 2**14  # Notes of a rank in memory at once.
CLOCK_COLLECTIVES = 20_000  # Per rank. More would say little more of its machine's clock.


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Rank:
    """One rank's journal with its steps, and the shift of its times to the run's zero."""

    journal: Journal
    processors: Whole  # Notes of processor time.
    children: Whole  # Notes of its child processes' processor time.
    before_forward: Whole  # Notes of the program's thread before forward passes.
    delays: Whole  # Notes of computing threads that waited for a processor.
    reported: Mapping[int, Whole]  # Notes of what the program reports, by kind.
    steps: Steps
    marks: NDArray[np.object_]  # of each step: the times of probe steps are unusual
    in_sums_ns: Whole  # of each probe step's sums: the wait for a processor, and the running time
    turns_lack_ns: Whole  # of each whole step with turns: the issue of sums that they leave out
    shift_ns: int
    first_step: int = 0  # The number of its first step in the job, which it may have joined late.

    @property
    def number(self) -> int:
        return self.journal.rank

    def step_of(self, times_ns: Whole) -> Whole:
        """Return the usual step that each time falls into."""
        step = self.steps.of(times_ns)
        return np.where(np.append(self.marks != "step", [False])[step], OUTSIDE, step)

    def in_job(self, steps: Whole) -> Whole:
        """Return the numbers that the job gives to steps of this rank."""
        return np.where(steps == OUTSIDE, OUTSIDE, steps + self.first_step)

    def used_s(self, notes: Whole) -> tuple[float, float] | None:
        """Return the processor time of a step by these notes, in total and in communication.

        They count from the first reading after the first step, because the first step is unusual.
        """
        notes = notes[notes[:, 1] >= self.steps.end_ns[0]] if len(self.steps) else notes[:0]
        steps = np.searchsorted(self.steps.end_ns, notes[:, 1], side="right")
        if len(notes) < 2 or not (passed := int(steps[-1] - steps[0])):
            return None
        whole_s, part_s = (notes[1:, [0, 2]].sum(axis=0) * 1e-9 / passed).tolist()
        return whole_s, part_s

    def delays_s(self, of_probes: bool) -> tuple[float, float] | None:
        """Return how long a computing thread waited for a processor in a step, and how long it ran.

        For the few probe steps it is the median, for the others the mean. Readings before the end
        of the first step are left out, because the first step is unusual. A probe step shows what
        computing alone takes: the wait and the running time in its collectives are left out.
        """
        steps = np.searchsorted(self.steps.end_ns, self.delays[:, 1], side="right")
        chosen = np.append([0], np.cumsum(self.marks == ("probe" if of_probes else "step")))[steps]
        passed = np.diff(steps)
        is_told = (steps[:-1] > 0) & (passed > 0) & (np.diff(chosen) == passed)
        if not is_told.any():
            return None
        by_step_ns = self.delays[1:, [0, 2]][is_told] / passed[is_told, None]
        if of_probes:
            in_sums_ns = np.vstack([[0, 0], np.cumsum(self.in_sums_ns, axis=0)])[steps]
            by_step_ns -= np.diff(in_sums_ns, axis=0)[is_told] / passed[is_told, None]
            by_step_ns = np.maximum(by_step_ns, 0)
            delay_ns, run_ns = np.median(by_step_ns, axis=0).tolist()
        else:
            delay_ns, run_ns = np.average(by_step_ns, axis=0, weights=passed[is_told]).tolist()
        return delay_ns * 1e-9, run_ns * 1e-9

    def facts(self) -> dict[str, float]:
        """Return what its notes tell about it by the names of facts, in seconds or bytes a step."""
        told = dict[str, float]()
        if (of_process := self.used_s(self.processors)) is not None:
            told["processor_s"], told["communication_processor_s"] = of_process
        if (of_children := self.used_s(self.children)) is not None:
            told["children_processor_s"], _ = of_children
        if (usual := self.delays_s(of_probes=False)) is not None:
            told["run_delay_s"], told["run_s"] = usual
        if (probed := self.delays_s(of_probes=True)) is not None:
            told["probe_run_delay_s"], told["probe_compute_s"] = probed
        if len(self.turns_lack_ns):
            told["turns_lack_s"] = float(np.median(self.turns_lack_ns)) * 1e-9
        notes = self.before_forward  # the usual work of the program before a forward
        if len(notes) > OFTEN * len(self.steps):
            used_ns, blocks = np.median(notes[:, [0, 2]], axis=0).tolist()
            told["before_forward_processor_s"] = used_ns * 1e-9
            told["before_forward_read_bytes"] = blocks * DISK_BLOCK_BYTES
        return told


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The facts of a job that its processes do not write themselves; their times are undilated."""

    source: str
    basis: Basis = "measured"
    facts: Facts = NO_FACTS
    missing: tuple[str, ...] = ()

    @property
    def provenance(self) -> Provenance:
        """The provenance of the job's run."""
        return Provenance(origin="measured", source=self.source, basis=self.basis)

    def undilated(self, part: Run) -> Run:
        """Bring the times of a dilated job back to the times that they stand for."""
        dilation = self.facts.dilation
        return part if dilation is None else undilated(part, dilation)


def assemble(directories: Sequence[Path], writer: RunWriter, known: Known) -> Path:
    """Write a run of the files of a job's processes in these directories, and of known facts.

    Ranks are written one by one. Memory holds only some steps of a rank at once.
    """
    for directory in directories:
        if not directory.is_dir():
            raise DamagedInput(directory, "expected a directory with recordings, there is none")
    journals, damaged = read_journals(directories)
    samples, unreadable = read_samples(directories)
    chosen, earlier, sentences = last_attempts(journals)
    announced = [int(identity["workers"]) for j in chosen for identity in j.defined("identity")]
    is_joined = "join" in Reported().events(directories).kind
    # The recording of a lost worker is there beside that of its successor.
    workers = max([*announced, *([] if is_joined else [len(chosen)])], default=0)
    clocks = _clocks(chosen)
    lost = _what_is_missing(directories, chosen, workers)
    missing: list[str | Gap] = [*damaged, *unreadable, *sentences, *lost]
    missing += what_is_not_sampled(chosen, clocks, samples)
    # The facts in the journals of processes, and those of their hosts.
    told: dict[str, Any] = {}
    for journal in chosen:
        for identity in journal.defined("identity"):
            told["backend"] = str(identity["backend"])
        for fact in journal.defined("fact"):
            name, value = str(fact["name"]), fact["value"]
            if name in _LARGEST_OF_RANKS:
                value = max(value, told.get(name, value))
            elif name == "threads" and told.get(name, value) != value:
                value = None  # It is told of jobs whose ranks have the same number.
            told[name] = value if isinstance(value, int | float | None) else str(value)
    late = sum(journal.late_ends for journal in chosen)
    told_facts = named(told) | Facts(workers=workers or None, late_ends=late or None)
    told_facts |= host_facts(chosen, workers, clocks, samples)
    costs, reported, of_ranks = _write_ranks(
        chosen, earlier, clocks, known, writer, directories, workers, is_joined
    )
    told_facts |= costs | reported.facts(workers)
    names = {kind: name for name, kind in TABLES.items()}
    shift_ns = sample_shifts(chosen, clocks, samples)
    for host in samples:
        for table in tables_of(host, shift_ns(host)):
            one = {names[type(table)]: table}
            part = Run(provenance=known.provenance, **one)  # type: ignore[arg-type]  # TABLES
            writer.add(**dict(known.undilated(part).tables()))
    captured, unreadable = read_captured(directories, wall_zero_ns(chosen, clocks, samples))
    missing += unreadable
    if captured is not None:
        missing += captured.missing
        told_facts |= captured.facts
        seen = known.undilated(captured)
        writer.add(flows=seen.flows, connections=seen.connections, messages=seen.messages)
    outline = known.undilated(Run(provenance=known.provenance, facts=told_facts))
    facts = outline.facts
    if known.facts.line_rate_bps is not None:  # a known rate excludes the adapters' own rates
        facts = facts.without(("line_rate_bps", "other_line_rates_bps"))
    facts |= _by_rank(known.facts, outline.facts.hosts or "")
    return writer.finish(known.provenance, facts, [*missing, *of_ranks, *known.missing])


def _by_rank(known: Facts, hosts: str) -> Facts:
    """Assign a lab's facts of its hosts to their ranks, if hosts have several."""
    names, host_of = (known.hosts or "").split(","), hosts.split(",")
    if not hosts or not set(host_of) <= set(names):
        return known
    number_of = [names.index(host) for host in host_of]

    def of_ranks(by_host: Pairs | None) -> Pairs | None:
        value_of = dict(by_host or ())
        return (
            tuple(
                (float(rank), value_of[number])
                for rank, number in enumerate(number_of)
                if number in value_of
            )
            or None
        )

    return dataclasses.replace(
        known,
        hosts=hosts,
        other_line_rates_bps=of_ranks(known.other_line_rates_bps),
        delivered_out_bps=of_ranks(known.delivered_out_bps),
        delivered_in_bps=of_ranks(known.delivered_in_bps),
    )


def _write_ranks(
    journals: Sequence[Journal],
    earlier: Mapping[int, Sequence[Journal]],
    clocks: Clocks,
    known: Known,
    writer: RunWriter,
    directories: Sequence[Path],
    workers: int,
    is_joined: bool,
) -> tuple[Facts, Reported, list[Gap]]:
    """Write all ranks' tables; return the recorder's cost, what ranks reported, and the gaps."""
    gaps: list[Gap] = []
    costs_s: list[float] = []
    told = defaultdict[str, list[tuple[float, float]]](list)  # by fact, of each rank
    reported = Reported()
    ranks = [(journal, clocks[machine_of(journal)].shift_ns) for journal in journals]
    first_steps = _first_steps(ranks) if is_joined else {}
    for rank in (_rank(*each, first_steps.get(each[0].rank, 0)) for each in ranks):
        for journal in earlier.get(rank.number, ()):
            if (machine := machine_of(journal)) in clocks:
                reported.add_earlier(journal, clocks[machine].shift_ns)
        reported.add(rank.journal, rank.steps, rank.reported, rank.shift_ns, rank.first_step)
        gaps += (Gap(problem, rank=rank.number) for problem in _write_rank(rank, known, writer))
        for cost in rank.journal.defined("cost") if len(rank.steps) else ():
            spent_ns = cost.get("spent_ns", cost.get("write_ns", 0))  # older journals: write_ns
            cost_ns = cost["notes"] * cost["note_ns"] + spent_ns
            costs_s.append(float(cost_ns) * 1e-9 / len(rank.steps))
        for name, value in rank.facts().items():
            told[name].append((float(rank.number), value))
    writer.add(
        metrics=reported.metrics(directories, None if is_joined else workers),
        noise=reported.noise(),
        events=reported.events(directories),
    )
    costs = Facts(
        recorder_s=max(costs_s, default=None),
        **cast(dict[str, Any], {name: tuple(pairs) for name, pairs in told.items()}),
    )
    return costs, reported, gaps


def _write_rank(rank: _Rank, known: Known, writer: RunWriter) -> list[str]:
    """Write one rank's tables, and return the problems of its collectives."""
    collectives = _Collectives(rank)
    for ended, notes in whole_steps(rank.journal, rank.steps, PART_NOTES):
        whole, carried = collectives.ended_in(notes)
        spans = sorted(spans_of(notes, rank.steps, ended), key=lambda span: span.start_ns)
        # A probe step has a mark of its own, so that step times leave it out.
        names = np.array([span.name for span in spans], object)
        step = _whole(span.step for span in spans)
        mark = np.append(rank.marks, ["step"])[step]
        names = np.where(names == "step", mark, names)
        step = np.where(mark != "step", OUTSIDE, rank.in_job(step))
        part = Run(
            provenance=known.provenance,
            spans=Spans(
                rank=np.full(len(spans), rank.number),
                step=step,
                lane=np.array([span.lane for span in spans], object),
                name=names,
                start_ns=_whole(span.start_ns for span in spans) + rank.shift_ns,
                end_ns=_whole(span.end_ns for span in spans) + rank.shift_ns,
            ),
            gradients=_gradients(rank, notes),
            collectives=whole,
            carried=carried,
        )
        writer.add(**dict(known.undilated(part).tables()))
    # If a process was killed, the end of its recording may be missing, and steps with it.
    if not len(rank.steps) and rank.journal.header["status"] == ENDED:
        return [
            f"rank {rank.number}: its torch optimizers took no step",
            *collectives.missing(),
        ]
    return collectives.missing()


def _first_steps(ranks: Sequence[tuple[Journal, int]]) -> dict[int, int]:
    """Number the first step of ranks that joined later as the ranks beside them number theirs."""
    known: list[_Rank] = []
    found = [rank for rank in (_rank(*each) for each in ranks) if len(rank.steps)]
    for rank in sorted(found, key=lambda rank: rank.steps.end_ns[0] + rank.shift_ns):
        steps = rank.steps
        middle_ns = steps.end_ns[0] - np.median(steps.end_ns - steps.start_ns) / 2 + rank.shift_ns
        first_steps = [
            other.first_step + int(number)
            for other in known
            for number in other.steps.of(np.array([middle_ns - other.shift_ns], np.int64))
            if number != OUTSIDE
        ]
        known.append(dataclasses.replace(rank, first_step=max(first_steps, default=0)))
    return {rank.number: rank.first_step for rank in known}


def _rank(journal: Journal, shift_ns: int, first_step: int = 0) -> _Rank:
    sparse = journal.only(SPARSE)
    steps = found_steps(journal, sparse)
    probes = sparse[Note.PROBE]
    probes = probes[steps.of(probes[:, 1]) != OUTSIDE]
    probed, turns = steps.of(probes[:, 1]), sparse[Note.TURNS]
    return _Rank(  # all other notes, which may be of hours of steps, are let go
        journal=journal,
        processors=sparse[Note.PROCESSOR],
        children=sparse[Note.CHILDREN],
        before_forward=sparse[Note.BEFORE_FORWARD],
        delays=sparse[Note.DELAY],
        reported={kind: sparse[kind] for kind in KINDS},
        steps=steps,
        marks=marks_of(steps, sparse),
        in_sums_ns=np.stack(
            [np.bincount(probed, probes[:, at], len(steps)).astype(np.int64) for at in (2, 0)],
            axis=1,
        ),
        turns_lack_ns=turns[turns[:, 0] > 0, 2],
        shift_ns=shift_ns,
        first_step=first_step,
    )


def _clocks(journals: Sequence[Journal]) -> dict[str, Clock]:
    """Bring all times to one zero, by the wall clocks and then by the collectives."""
    to_wall: dict[str, int] = {}
    for journal in journals:  # read a machine's clocks once: the wall clock may be set
        to_wall.setdefault(machine_of(journal), wall_beyond_monotonic_ns(journal.header))
    first_ns = []
    for journal in journals:
        began_ns = min(journal.first_ns.values(), default=int(journal.header["monotonic_ns"]))
        first_ns.append(began_ns + to_wall[machine_of(journal)])
    zero = min(first_ns, default=0)
    shifts_ns = {machine: wall - zero for machine, wall in to_wall.items()}
    if len(to_wall) < 2:
        return {machine: Clock(shift_ns, SAME) for machine, shift_ns in shifts_ns.items()}
    # Long recordings give some collectives of each group, the same ones on all ranks. They are read
    # again when they are written, because the shift of their times is known only then.
    most = max(journal.counts.get(Note.ISSUE, 0) for journal in journals)
    nth = -(-most // CLOCK_COLLECTIVES) or 1
    kept = []
    for rank in (_rank(journal, shifts_ns[machine_of(journal)]) for journal in journals):
        collectives = _Collectives(rank)
        for _, notes in whole_steps(rank.journal, rank.steps, PART_NOTES):
            ended, _ = collectives.ended_in(notes)
            kept.append(ended.rows(ended.sequence % nth == 0))
    offset_of = offsets(
        Collectives.joined(kept), {journal.rank: machine_of(journal) for journal in journals}
    )
    return {
        machine: Clock(shift_ns + offset_of[machine].offset_ns, offset_of[machine])
        for machine, shift_ns in shifts_ns.items()
    }


def _what_is_missing(
    directories: Sequence[Path], journals: Sequence[Journal], workers: int
) -> list[str | Gap]:
    """Return the ranks that left no journal, and the problem of each damaged or missing one."""
    here = {journal.rank for journal in journals}
    sentences: list[str | Gap] = [
        f"rank {rank}: nothing was recorded" for rank in range(workers) if rank not in here
    ]
    for journal in journals:
        header = journal.header
        for defect in journal.defined("missing"):  # a table of its own leaves the others whole
            reason, table = f"rank {journal.rank}: {defect['sentence']}", defect.get("table")
            sentences.append(reason if table is None else Gap(reason, str(table), journal.rank))
        defects: list[str] = []
        if header["status"] == FAILED:
            defects.append(
                f"its recorder failed and the job went on without it ({header['reason']})"
            )
        elif header["status"] != ENDED:
            defects.append("its process ended without closing its recording (was it killed?)")
        if journal.bytes_not_read:
            defects.append(
                f"the last {journal.bytes_not_read} bytes of its recording are no whole block"
            )
        sentences += [f"rank {journal.rank}: {defect}" for defect in defects]
    if journals:
        return sentences
    elsewhere = [path for path in (each / ELSEWHERE for each in directories) if path.exists()]
    if elsewhere:
        return [f"nothing was recorded: the job recorded itself into {elsewhere[0].read_text()}"]
    if any((directory / ENTERED).exists() for directory in directories):
        return [
            "nothing was recorded: no process that the recorder saw trained or communicated with "
            "torch. It sees no Python that starts with -I, -E or -S, or whose environment lacks "
            "the PYTHONPATH that `fullwire record` sets"
        ]
    return [
        "nothing was recorded: the job ran other programs only, or a Python that does not see "
        "PYTHONPATH, where the recorder is (-I, -E, -S, or a PYTHONPATH of its own)"
    ]


def _gradients(rank: _Rank, all_notes: Notes) -> Gradients:
    """Return each step's gradients of its last backward pass, in the order of readiness."""
    notes = all_notes.of(Note.GRADIENT)
    notes = notes[np.argsort(notes[:, 1], kind="stable")]
    step = rank.step_of(notes[:, 1])
    notes, step = notes[step >= 0], step[step >= 0]
    among = range(step.min(initial=len(rank.steps)), step.max(initial=-1) + 1)
    begin_ns = last_backward_start_ns(all_notes, rank.steps, among)
    is_last = notes[:, 1] >= begin_ns[step - among.start]
    notes, step = notes[is_last], step[is_last]
    sizes = {
        parameter["number"]: parameter["bytes"] for parameter in rank.journal.defined("parameter")
    }
    first = np.searchsorted(step, step)
    return Gradients(
        rank=np.full(len(step), rank.number),
        step=rank.in_job(step),
        order=np.arange(len(step)) - first,
        bytes=_whole(sizes[number] for number in notes[:, 0].tolist()),
        ready_ns=notes[:, 1] + rank.shift_ns,
    )


class _Collectives:
    """Makes a row of each collective that has ended; others wait for a later part."""

    def __init__(self, rank: _Rank) -> None:
        self._rank = rank
        self._signatures = {
            signature["number"]: signature for signature in rank.journal.defined("signature")
        }
        self._issued = np.empty((0, 4), np.int64)  # Number, time, signature, sequence in group.
        self._ends = np.empty((0, 2), np.int64)  # Number, time.
        self._told = np.empty((0, 3), np.int64)  # Number, kind, value from the transport.
        self._sequence: dict[str, int] = defaultdict(int)
        backends = [str(identity["backend"]) for identity in rank.journal.defined("identity")]
        self._at_once = max((AT_ONCE.get(backend, 0) for backend in backends), default=0)
        self._free_ns: dict[str, list[int]] = defaultdict(lambda: [0] * self._at_once)

    def ended_in(self, notes: Notes) -> tuple[Collectives, Carried]:
        """Return the collectives that had ended by the end of this part, in the order of issue."""
        issues = notes.of(Note.ISSUE)
        issues = issues[np.argsort(issues[:, 1], kind="stable")]
        sequence = []
        for signature in issues[:, 2].tolist():
            group = str(self._signatures[signature]["group"])
            sequence.append(self._sequence[group])
            self._sequence[group] += 1
        issued = np.concatenate([self._issued, np.column_stack([issues, _whole(sequence)])])
        ends = np.concatenate([self._ends, notes.of(Note.END)[:, :2]])
        _, of_issue, of_end = np.intersect1d(issued[:, 0], ends[:, 0], return_indices=True)
        self._issued = np.delete(issued, of_issue, axis=0)
        self._ends = np.delete(ends, of_end, axis=0)
        in_order = np.argsort(issued[of_issue, 1], kind="stable")
        issued, end_ns = issued[of_issue[in_order]], ends[of_end[in_order], 1]
        return self._with_carried(self._table(issued, end_ns), notes, issued[:, 0])

    def _with_carried(
        self, table: Collectives, notes: Notes, numbers: Whole
    ) -> tuple[Collectives, Carried]:
        """Return collectives with the starts that their transport noted, and all its notes."""
        rows = notes.rows[np.isin(notes.rows[:, 0], _TOLD)]
        told = np.concatenate([self._told, rows[:, [1, 0, 3]]])
        is_due = np.isin(told[:, 0], numbers)
        self._told, told = told[~is_due], told[is_due]
        order = np.argsort(numbers)
        by_collective = np.full((len(numbers), len(_TOLD)), -1, np.int64)  # -1: the note is missing
        place = order[np.searchsorted(numbers, told[:, 0], sorter=order)]
        by_collective[place, np.searchsorted(_TOLD, told[:, 1])] = told[:, 2]
        is_told: NDArray[np.bool_] = np.asarray((by_collective >= 0).all(axis=1))
        known = table.rows(is_told)
        before_ns, heard_ns, reducing_ns, sent_bytes = by_collective[is_told].T
        carried = Carried(
            rank=known.rank,
            step=known.step,
            sequence=known.sequence,
            group=known.group,
            begun_ns=known.end_ns - before_ns,
            heard_ns=known.end_ns - heard_ns,
            end_ns=known.end_ns,
            reducing_ns=reducing_ns,
            sent_bytes=sent_bytes,
        )
        start_ns = table.start_ns.copy()
        start_ns[is_told] = np.maximum(carried.begun_ns, known.issue_ns)
        return replace(table, start_ns=start_ns), carried

    def missing(self) -> list[str]:
        """Say how many collectives never ended."""
        lost = len(self._issued)
        verb = "collective has" if lost == 1 else "collectives have"
        return [f"rank {self._rank.number}: {lost} {verb} no end"] if lost else []

    def _table(self, issued: Whole, end_ns: Whole) -> Collectives:
        rank, issue_ns = self._rank, issued[:, 1]
        end_ns = np.maximum(end_ns, issue_ns)
        told = [self._signatures[number] for number in issued[:, 2].tolist()]
        groups = [str(signature["group"]) for signature in told]
        # Each collective began when its group came to it. Gloo and NCCL do not note that moment.
        # Both work on the collectives of a group in order, `AT_ONCE` of them at a time. On other
        # transports, a collective begins at its issue, unless they note the moment.
        start_ns = issue_ns.copy()
        for row, group in enumerate(groups if self._at_once else ()):
            free_ns = heapq.heappop(self._free_ns[group])
            start_ns[row] = min(max(int(issue_ns[row]), free_ns), int(end_ns[row]))
            heapq.heappush(self._free_ns[group], int(end_ns[row]))
        return Collectives(
            rank=np.full(len(issued), rank.number),
            step=rank.in_job(rank.step_of(issue_ns)),
            sequence=issued[:, 3],
            group=np.array(groups, object),
            op=np.array([signature["op"] for signature in told], object),
            dtype=np.array([signature["dtype"] for signature in told], object),
            bytes=_whole(signature["bytes"] for signature in told),
            issue_ns=issue_ns + rank.shift_ns,
            start_ns=start_ns + rank.shift_ns,
            end_ns=end_ns + rank.shift_ns,
        )


def _whole(values: Iterable[int]) -> Whole:
    return np.fromiter(values, np.int64)
