"""Join the traces of a job's ranks as one Run, at once or rank by rank.

All times are moved to one zero. The profiler states a base for them. The ends of collectives show
how far the clocks of ranks differ (`clocks.py`). For this, a rank has to give only its outline
(`rank.py`) and the ends of its collectives. The tables of ranks are placed one by one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fullwire.errors import DamagedInput
from fullwire.files import name_of
from fullwire.importers.kineto.clocks import Clocks, Ends, clocks_of, ends_of
from fullwire.importers.kineto.collectives import numbered
from fullwire.importers.kineto.contention import by_rank
from fullwire.importers.kineto.gloo import DefaultGroup, use_of_default
from fullwire.importers.kineto.rank import NOT_YET, Agreed, Outline, Tables, read_rank
from fullwire.importers.kineto.recognise import asked_for
from fullwire.importers.kineto.scan import scanned
from fullwire.importers.kineto.steps import EACH
from fullwire.run.facts import Facts
from fullwire.run.gaps import OF_SEVERAL_RUNS, gaps_of
from fullwire.run.process_groups import listed_name
from fullwire.run.run import (
    AnyTable,
    Collectives,
    Gradients,
    Operations,
    Provenance,
    Run,
    Spans,
)
from fullwire.units import show_bytes, show_ranks, show_time, shown

_MOST_NAMED = 5  # unknown kernels, in a warning
_RANK_IN_NAME = re.compile(r"rank[-_]?(\d{1,9})", re.IGNORECASE)
_MOST_GROUPS = 64  # descriptions; a job has some kinds of groups, and many of each
_MOST_GROUP_NAMES = 10_000
_ALIKE = 0.75  # of the collectives of a step: the edges of a trace may lack some
_AGREED = 0.01  # of a trace: ends of collectives that scatter less are of the same ones
_REPORTED_NS = 100_000  # clocks of hosts usually differ by less, which is not reported


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Placed:
    """One rank's tables as they stand in the Run."""

    spans: Spans
    gradients: Gradients
    collectives: Collectives
    operations: Operations


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """The numbering of collectives, which gives one collective the same number on all ranks."""

    own_numbers: frozenset[str]  # groups whose collectives the traces number themselves
    ambiguous: frozenset[str]  # names of groups that have other members on other ranks

    def of(self, tables: Tables) -> Collectives:
        """Return the numbered collectives of one rank."""
        return numbered(tables.found, self.own_numbers, self.ambiguous)


class Job:
    """The ranks of a job by their outlines.

    Some traces tell the number of ranks of their job. If they come from several jobs, only the job
    with the most ranks is read. Traces that tell their rank come first. All other traces are left
    out, and the gaps of the run name them.
    """

    def __init__(self, outlines: Sequence[Outline | str]) -> None:
        """Take for each trace its outline, or the reason why it has none."""
        self.ranks: dict[int, Outline] = {}
        self.traces: dict[int, int] = {}  # by rank, the place in `outlines`
        self.missing = [remark for remark in outlines if isinstance(remark, str)]
        read = [(n, outline) for n, outline in enumerate(outlines) if isinstance(outline, Outline)]
        self._in_folder = Counter(outline.path.parent for _, outline in read)
        # Take the number of ranks that the traces of most ranks tell; of equals, the largest.
        tell: dict[int, set[int | None]] = {}
        for _, outline in read:
            if outline.world is not None:
                tell.setdefault(outline.world, set()).add(outline.rank)
        world = max(tell, key=lambda size: (len(tell[size]), size), default=None)
        for number, outline in sorted(read, key=lambda numbered: numbered[1].rank is None):
            self.missing += outline.problems
            other = outline.world not in (None, world)
            why = f"it is of a job of {outline.world} ranks, others are of one of {world}"
            if other:
                self._leave_out(outline, why)
                continue
            rank = self._rank_of(outline)
            if rank is None:
                self._leave_out(outline, "it does not say which rank it is of, as others do")
            elif rank in self.ranks:
                place = name_of(self.ranks[rank].path)
                self._leave_out(outline, f"rank {rank} is in {place} already")
            else:
                self.ranks[rank], self.traces[rank] = outline, number

    def _leave_out(self, outline: Outline, why: str) -> None:
        self.missing.append(f"{name_of(outline.path)}: {why}, so it is left out")

    def _rank_of(self, outline: Outline) -> int | None:
        """Return the rank that a trace or its file names, or else the first free one.

        If other traces tell their ranks, no rank is free.
        """
        if outline.rank is not None:
            return outline.rank
        named = _RANK_IN_NAME.search(outline.path.name)
        if named is None and self._in_folder[outline.path.parent] == 1:  # alone in its folder
            named = _RANK_IN_NAME.fullmatch(outline.path.parent.name)
        if named is None and any(rank.rank is not None for rank in self.ranks.values()):
            return None
        free = next(n for n in range(len(self.ranks) + 1) if n not in self.ranks)
        rank, where = (int(named[1]), "as its name says") if named else (free, "for want of better")
        self.missing.append(
            f"{name_of(outline.path)}: it does not say which rank it is of, so it is taken for "
            f"rank {rank}, {where}"
        )
        return rank

    def as_agreed(
        self,
        outlines: Sequence[Outline | str],
        read_again: Callable[[Sequence[int], Agreed], Iterable[Outline | str]],
    ) -> Job:
        """Return the job with what its ranks agree on: the marks of a step, and Gloo's groups.

        A trace may be too short to tell how many marks are a step, and follows the others then.
        Where they differ, each mark is a step. `read_again` reads the traces at some places of
        `outlines`.
        """
        found = list(outlines)

        def again(places: Sequence[int], agreed: Agreed) -> Job:
            for place, outline in zip(places, read_again(places, agreed), strict=True):
                found[place] = outline
            return Job(found)

        told = {outline.marks for outline in self.ranks.values() if outline.tells_marks}
        marks = told.pop() if len(told) == 1 else EACH
        others = [self.traces[rank] for rank, each in self.ranks.items() if each.marks != marks]
        job = again(others, Agreed(marks)) if others else self
        if (default := job.use_of_default) != "used":
            job = again(list(job.traces.values()), Agreed(marks, default))
        return job

    def refuse_nothing(self, paths: Sequence[Path]) -> None:
        """Refuse the paths if every trace of them is unreadable."""
        if not self.ranks:
            why = self.missing[0] if self.missing else "no profiler trace is in it"
            raise DamagedInput(paths[0], why.removeprefix(f"{paths[0]}: "))

    @property
    def use_of_default(self) -> DefaultGroup:
        """Return how to read the traces again: where "used" is all that they tell, as they were."""
        threads = [rank.threads for rank in self.ranks.values() if rank.threads is not None]
        default = use_of_default(threads)
        is_named = any(rank.tell_groups for rank in threads)
        return "used" if default == "unknown" and not is_named else default

    def naming(self) -> Naming:
        """Return the numbering for the collectives of all ranks."""
        members: dict[str, set[str]] = {}
        for outline in self.ranks.values():
            for name, of in outline.members.items():
                members.setdefault(name, set()).update(of)
        wrong = frozenset(name for rank in self.ranks.values() for name in rank.miscounted)
        return Naming(
            own_numbers=frozenset(members) - wrong,
            ambiguous=frozenset(name for name, of in members.items() if len(of - {""}) > 1),
        )

    def places(self, ends: Mapping[int, Ends]) -> Places:
        """Return where each rank's tables go; `ends` are in the traces' own clocks."""
        base_ns = {rank: outline.base_ns or 0 for rank, outline in self.ranks.items()}
        clocks = clocks_of(
            {rank: Ends(own.number, own.end_ns + base_ns[rank]) for rank, own in ends.items()}
        )
        shift_ns = {rank: base_ns[rank] - clocks.ahead_ns.get(rank, 0) for rank in self.ranks}
        zero_ns = min(
            (
                outline.first_ns + shift_ns[rank]
                for rank, outline in self.ranks.items()
                if outline.first_ns is not None
            ),
            default=0,
        )
        by_ns = {rank: shift - zero_ns for rank, shift in shift_ns.items()}
        by_steps = self._step_shifts(by_ns)
        moves = {rank: Move(by, by_steps.get(rank, 0)) for rank, by in by_ns.items()}
        return Places(moves, clocks)

    def _step_shifts(self, by_ns: Mapping[int, int]) -> dict[int, int]:
        """Return the number to add to each rank's steps, so that simultaneous steps match.

        Steps that the trace numbers are the same on every rank. Other steps are counted from the
        first step of each rank, and the recordings of ranks may begin at different steps.
        """
        ends_ns = {
            rank: outline.step_ends_ns + by_ns[rank]
            for rank, outline in self.ranks.items()
            if len(outline.step_ends_ns)
        }
        longest = max(ends_ns, key=lambda rank: len(ends_ns[rank]), default=None)
        if longest is None:
            return {}
        others_ns = ends_ns[longest]
        between_ns = (others_ns[1:] + others_ns[:-1]) // 2
        later = dict.fromkeys(ends_ns, 0)
        for rank, own_ns in ends_ns.items():
            inside = (own_ns >= others_ns[0]) & (own_ns <= others_ns[-1])
            if inside.any():
                place = np.searchsorted(between_ns, own_ns[inside])
                later[rank] = int(np.median(place - np.flatnonzero(inside)))
        return {rank: steps - min(later.values()) for rank, steps in later.items()}

    def outline(self, paths: Sequence[Path], clocks: Clocks) -> Run:
        """Return the Run without its tables."""
        ordered = sorted(self.ranks.items())
        missing = list(self.missing)
        if len({outline.base_ns is None for _, outline in ordered}) > 1:
            missing.append("some traces lack baseTimeNanoseconds, so their times stand apart")
        # The number of ranks of the job, or its least value: a job that communicates has two.
        told = [rank.world for rank in self.ranks.values() if rank.world]
        groups = [rank.largest_group for rank in self.ranks.values()]
        communicates = any(rank.is_distributed or rank.collectives for rank in self.ranks.values())
        least = 2 if communicates and not told else 1
        world = max([*told, *groups, max(self.ranks) + 1, least])
        if len(self.ranks) < world:
            missing.append(f"{len(self.ranks)} of {world} ranks are here")
        if not told:
            missing.append(f"no trace says how many ranks the job had; it had at least {world}")
        missing += _of_several_runs(dict(ordered), world)
        missing += _at_other_times(dict(ordered), clocks)
        total = sum(rank.collectives for rank in self.ranks.values())
        if unknown := sum(rank.without_size for rank in self.ranks.values()):
            missing.append(f"of {unknown:,} of {total:,} collectives the size is not told")
        hosts = [outline.host for _, outline in ordered]
        all_known = all(hosts) and [rank for rank, _ in ordered] == list(range(len(ordered)))
        scatter_s = tuple((rank, ns * 1e-9) for rank, ns in sorted(clocks.scatter_ns.items()))
        remarks = [*_about_ranks(dict(ordered)), *_about_clocks(dict(ordered), clocks)]
        slowing = {rank: each.slowing for rank, each in ordered if each.slowing is not None}
        passes = {outline.passes for _, outline in ordered}
        groups_told, group_names = _groups(ordered, is_whole=len(self.ranks) == world)
        sources = ", ".join(map(name_of, paths[:_MOST_NAMED]))
        return Run(
            provenance=Provenance(
                origin="imported",
                source=sources if len(paths) <= _MOST_NAMED else f"{sources} and others",
            ),
            facts=Facts(
                workers=world,
                # A gradient in these tables is a whole bucket already.
                buckets="none" if any(outline.has_buckets for _, outline in ordered) else None,
                marked_passes=next(iter(passes)) if len(passes) == 1 else None,
                backend=_listed(outline.backend for _, outline in ordered),
                groups=groups_told,
                group_names=group_names,
                device=_listed(outline.device for _, outline in ordered),
                hosts=",".join(host.replace(",", ".") for host in hosts) if all_known else None,
                clock_scatter_s=scatter_s if len(ordered) > 1 else None,
                kernels_slowed_share=by_rank(slowing, "share"),
                kernels_compared_share=by_rank(slowing, "compared"),
                remarks="; ".join(remarks) or None,
            ),
            gaps=gaps_of(missing),
        )


@dataclass(frozen=True, slots=True)
class Move:
    """The shift of one rank's times and steps that matches them with other ranks'."""

    by_ns: int
    by_steps: int

    def placed(self, rank: int, tables: Tables, collectives: Collectives) -> Placed:
        """Return the tables as those of this rank, with shifted times and steps."""
        return Placed(
            spans=self._moved(tables.spans, rank),
            gradients=self._moved(tables.sent.gradients, rank),
            collectives=self._moved(collectives, rank),
            operations=self._moved(tables.operations, rank),
        )

    def _moved(self, table: AnyTable, rank: int) -> AnyTable:
        columns = dict(table.columns())
        for name, column in columns.items():
            if name.endswith("_ns") and name != "busy_ns":
                columns[name] = column + self.by_ns
            elif name == "step":
                columns[name] = np.where(column >= 0, column + self.by_steps, column)
        return type(table)(**columns | {"rank": np.full(len(table), rank)})


@dataclass(frozen=True, eq=False, slots=True)
class Places:
    """The shift of each rank's tables, and the comparison of clocks."""

    moves: Mapping[int, Move]
    clocks: Clocks


def read_kineto(
    paths: Sequence[Path], files: Iterable[Path], *, communication: str | None = None
) -> Run:
    """Read the traces of one or more ranks; `files` are the traces at the user's `paths`."""
    pattern, all_files = asked_for(communication), list(files)
    read: dict[int, Tables] = {}

    def outlines(places: Sequence[int], agreed: Agreed = NOT_YET) -> Iterator[Outline | str]:
        for place in places:
            try:
                outline, read[place] = read_rank(scanned(all_files[place]), pattern, agreed)
            except DamagedInput as error:
                yield str(error)
            else:
                yield outline

    found = list(outlines(range(len(all_files))))
    job = Job(found).as_agreed(found, outlines)
    job.refuse_nothing(paths)
    tables = {rank: read[number] for rank, number in job.traces.items()}
    naming = job.naming()
    collectives = {rank: naming.of(table) for rank, table in tables.items()}
    places = job.places({rank: ends_of(table) for rank, table in collectives.items()})
    ranks = [
        places.moves[rank].placed(rank, tables[rank], collectives[rank]) for rank in sorted(tables)
    ]
    outline_of_all = job.outline(paths, places.clocks)
    return Run(
        provenance=outline_of_all.provenance,
        facts=outline_of_all.facts,
        gaps=outline_of_all.gaps,
        spans=Spans.joined([rank.spans for rank in ranks]),
        gradients=Gradients.joined([rank.gradients for rank in ranks]),
        collectives=Collectives.joined([rank.collectives for rank in ranks]),
        operations=Operations.joined([rank.operations for rank in ranks]),
    )


def _groups(
    ranks: Sequence[tuple[int, Outline]], *, is_whole: bool
) -> tuple[str | None, str | None]:
    """Return the ranks of the largest group of each description, and the names of its groups.

    A name that ranks describe differently is left out. Where traces of some ranks are missing, the
    groups without a description are listed by their names, if all ranks agree on their size.
    Transfers always have two ranks, and are not listed.
    """
    sizes: dict[str, int] = {}
    told: dict[str, set[str]] = {}
    for _, outline in ranks:
        for description, size in outline.groups.items():
            sizes[description] = max(size, sizes.get(description, 0))
        for name, description in outline.group_names.items():
            told.setdefault(name, set()).add(description)
    if not is_whole:
        own = Counter(each for _, outline in ranks for each in {*outline.group_ranks.items()})
        names_told = Counter(name for name, _ in own)
        for name, size in own:
            if names_told[name] == 1 and size and name not in told and ">" not in name:
                sizes.setdefault(name, size)
    named = sorted(sizes.items())[:_MOST_GROUPS]
    groups = ", ".join(f"{listed_name(name)} {size}" for name, size in named)
    names: dict[str, list[str]] = {}
    for name, descriptions in sorted(told.items())[:_MOST_GROUP_NAMES]:
        if len(descriptions) == 1 and not re.search(r"[\s,:]", name):
            names.setdefault(re.sub("[,:]", " ", descriptions.pop()), []).append(name)
    listed = ", ".join(f"{what}: {' '.join(of_it)}" for what, of_it in sorted(names.items()))
    return groups or None, listed or None


def _listed(told: Iterable[str]) -> str | None:
    return ", ".join(sorted({*filter(None, told)})[:8]) or None


def _of_several_runs(ranks: Mapping[int, Outline], world: int) -> Iterator[str]:
    """Yield which ranks of a group do not call the collectives that each of its ranks must call.

    Marks of Gloo do not name their group. It is the one of all ranks where a job has no other.
    """
    means: dict[tuple[str, str], dict[int, Mapping[str, float]]] = {}
    for rank, outline in ranks.items():
        if outline.problems or not outline.has_steps:
            continue  # of a part of a trace, the mean of a step is unknown
        if set(outline.groups.values()) == {world}:
            of_all: Counter[str] = Counter()
            for of_group in outline.joint.values():
                of_all.update(of_group)
            means.setdefault(("", ""), {})[rank] = of_all
            continue
        for group, of_group in outline.joint.items():
            if all(group):
                means.setdefault(group, {})[rank] = of_group
    for of_ranks in means.values():
        first = min(of_ranks)
        for rank, of_rank in of_ranks.items():
            if _is_unlike(of_ranks[first], of_rank):
                yield (
                    f"ranks {first} and {rank} share a group, but a step of rank {first} has "
                    f"{_joint_in_words(of_ranks[first])}, and one of rank {rank} has "
                    f"{_joint_in_words(of_rank)}: {OF_SEVERAL_RUNS}"
                )
                return


def _is_unlike(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Say whether too few collectives of two ranks' steps can be the same ones."""
    pairs = {op: sorted((one.get(op, 0.0), other.get(op, 0.0))) for op in {*one, *other}}
    low_bytes, high_bytes = pairs.pop("bytes", (0.0, 0.0))
    low, high = (sum(pair[place] for pair in pairs.values()) for place in (0, 1))
    return low < _ALIKE * high or low_bytes < _ALIKE * high_bytes


def _joint_in_words(means: Mapping[str, float]) -> str:
    calls = [f"{means[op]:.3g} {op}" for op in sorted(means) if op != "bytes"]
    sums = f" ({show_bytes(means['bytes'])})" if means.get("bytes") else ""
    return " and ".join(calls) + sums if calls else "none"


def _at_other_times(ranks: Mapping[int, Outline], clocks: Clocks) -> Iterator[str]:
    """Yield which ranks of one host were traced when others were not.

    Clocks of several hosts may differ, and hosts may bear one name. Collectives that end together
    tell such clocks.
    """
    on_host: dict[str, list[tuple[int, int, int]]] = {}
    for rank, outline in ranks.items():
        if outline.host and outline.base_ns is not None and outline.first_ns is not None:
            last_ns = outline.first_ns if outline.last_ns is None else outline.last_ns
            scatter_ns = clocks.scatter_ns.get(rank, 0)
            is_agreed = scatter_ns < _AGREED * (last_ns - outline.first_ns)
            ahead_ns = clocks.ahead_ns.get(rank, 0) if is_agreed else 0
            shift_ns = outline.base_ns - ahead_ns
            window = (outline.first_ns + shift_ns, last_ns + shift_ns, rank)
            on_host.setdefault(outline.host, []).append(window)
    for windows in on_host.values():
        windows.sort()
        until_ns = windows[0][1]
        for place, (first_ns, last_ns, rank) in enumerate(windows):
            if first_ns > until_ns:
                before = show_ranks(sorted(earlier for *_, earlier in windows[:place]))
                yield (
                    f"on one host the trace of rank {rank} begins "
                    f"{show_time((first_ns - until_ns) * 1e-9)} after that of {before} ends, so "
                    "they may be of several runs"
                )
                break
            until_ns = max(until_ns, last_ns)


def _about_ranks(ranks: Mapping[int, Outline]) -> Iterator[str]:
    unknown: dict[str, tuple[float, int]] = {}
    for rank, outline in ranks.items():
        for name, share in outline.unknown.items():
            unknown[name] = max(unknown.get(name, (0.0, 0)), (share, rank))
    longest = sorted(unknown.items(), key=lambda item: -item[1][0])[:_MOST_NAMED]
    if longest:
        named = ", ".join(
            f"{shown(name)} ({share:.0%} of rank {rank}'s trace)" for name, (share, rank) in longest
        )
        yield (
            f"nobody recognises these long kernels, which are taken for computation: {named}. "
            "--communication REGEX says which communicate"
        )
    said: dict[str, list[int]] = {}
    for rank, outline in ranks.items():
        for remark in outline.remarks:
            said.setdefault(remark, []).append(rank)
    for remark, of in list(said.items())[:_MOST_NAMED]:
        yield f"{show_ranks(of)}: {remark}"
    if len(said) > _MOST_NAMED:
        yield f"and {len(said) - _MOST_NAMED} more remarks of this kind"


def _about_clocks(ranks: Mapping[int, Outline], clocks: Clocks) -> Iterator[str]:
    moved = {rank: ahead for rank, ahead in clocks.ahead_ns.items() if abs(ahead) > _REPORTED_NS}
    if moved:
        rank = max(moved, key=lambda other: abs(moved[other]))
        direction = "ahead of" if moved[rank] > 0 else "behind"
        yield (
            f"clocks of {len(moved)} ranks were corrected, by the ends of their collectives; rank "
            f"{rank}'s was {show_time(abs(moved[rank]) * 1e-9)} {direction} rank {min(ranks)}'s"
        )
    if clocks.unsettled:
        yield (
            f"the clocks of {show_ranks(clocks.unsettled)} could not be held against the others', "
            "for want of common collectives"
        )
