"""The additional time of computing because the job shares its processors: contention.

In a probe step communication waits until computing is done, so computing there runs at full speed.
In some of them the ranks of a machine also compute one after another, as one worker would. One
worker would also issue its sums meanwhile, which takes its thread longer than to hold them back.

Without such turns, ranks that share a processor still wait for it. So the time in which the
computing thread was ready and waited for a processor comes off. Some of that wait may lie outside
of computing. So computing is never taken to be shorter than the time for which the thread ran
without its sums, its input, its packing and the host's part.

A run without probe steps uses run delay: how long a computing thread was ready to run and waited
for a processor. Computing has the same share of it as of the time in which the thread was ready. It
is a lower bound, because work beside memory traffic is slower, too. A thread that was ready for a
part of computing alone waited for an accelerator, or for other threads that compute. So its run
delay tells nothing.

Other programs also cause run delay. It counts only by the job's own share of the processors' work.

On devices, an imported trace tells how much longer kernels take beside communication than the same
kernels alone. All computing beside communication is taken to be slowed as much as the kernels that
ran on both sides. If these are few, contention is not told.

The step of a plan, and a simulated step, name the computing by which communication makes it longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fullwire.collectives.cost import Floats
from fullwire.run.kinds import Kinds
from fullwire.run.placement import sums_on_processors
from fullwire.run.processors import share_of_others, used_share
from fullwire.run.run import PROBES, SLOWED, Run, Spans, Whole
from fullwire.timeline.timeline import Doing, Timeline

CrowdingSource: TypeAlias = Literal[
    "probe steps", "run delay", "kernels", "the plan", "the simulation", "none"
]

FEWEST_PROBES = 2  # of a rank, to believe their times
LEAST_COMPARED = 0.2  # of the time beside communication: kernels that also ran alone
MOST_DELAYED = 0.9  # of computing: the most that can be waiting for a processor
# Of computing. In 236 recordings a thread that computes was ready for all of it. One that waits for
# emulated accelerators was ready for 0.51 of it at the most.
_LEAST_READY = 0.75


@dataclass(frozen=True, eq=False, slots=True)
class Crowding:
    """The share of contention in each rank's computing, its source, and how sure it is."""

    source: CrowdingSource
    shares: Floats = field(default_factory=lambda: np.zeros(0))
    alone_s: float = 0.0  # from probe steps: the computing of the middle rank by itself
    host_s: float | None = None  # from turns: the host's part of the middle rank by itself
    by_ranks_s: float = 0.0  # beside it: as ranks of one machine slow each other without any sums
    probes: int = 0  # of a rank, that tell this
    is_by_turns: bool = False  # in these the ranks of a machine computed one after another
    scatter: float = 0.0  # of computing, from one probe step to the next
    compared: float = 1.0  # from kernels: of their time beside communication, those also alone
    ran: float = 1.0  # from run delay: of computing without contention, what waits for no others

    @property
    def is_told(self) -> bool:
        """Return whether the share is known."""
        return self.source != "none"


NOT_TOLD = Crowding("none")


def probe_steps(run: Run) -> Spans:
    """Return the marks of the steps in which communication was kept apart from computing."""
    return run.spans.rows((run.spans.lane == "host") & np.isin(run.spans.name, PROBES))


class Turns(NamedTuple):
    """What a rank did in turns: its computing as a share of that beside its machine's ranks."""

    share: float
    host_ns: Whole  # of each turn
    kind: Whole  # of each turn
    steps: int
    scatter: float

    def of(self, place: int) -> Turns:
        """Return the same with the host's part of the turns of one kind, if there are any."""
        return self._replace(host_ns=self.host_ns[self.kind == place])


@dataclass(frozen=True, eq=False, slots=True)
class Probed:
    """What a rank did in each of its probe steps."""

    marks: NDArray[np.object_]  # their names
    computed_ns: Whole
    host_ns: Whole

    @classmethod
    def by(cls, line: Timeline, probes: Spans) -> Probed:
        """Add up a rank's time in its probe steps; those of other ranks are left out."""
        mine = probes.rows(probes.rank == line.rank)
        begin, end = (np.searchsorted(line.moments, at) for at in (mine.start_ns, mine.end_ns))

        def inside_ns(chosen: NDArray[np.bool_]) -> Whole:
            since = np.append([0], np.cumsum(line.length_ns * chosen))
            return np.asarray(since[end] - since[begin], np.int64)

        return cls(mine.name, inside_ns(line.is_computing), inside_ns(line.doing == Doing.REST))

    def apart_ns(self, chosen: NDArray[np.bool_] | Literal[True] = True) -> Whole:
        """Return the computing in the chosen ones in which all ranks computed at once."""
        return np.asarray(self.computed_ns[chosen & (self.marks == "probe")], np.int64)

    def in_turns(self, kind: Whole) -> Turns | None:
        """Compare its turns with its other probe steps of the same kind; `kind` has each one's."""
        is_turn, each = self.marks == "turns", list[float]()
        for place in np.unique(kind[kind >= 0]).tolist():
            usual_ns = self.apart_ns(kind == place)
            if len(usual_ns) and usual_ns.all():
                each += (self.computed_ns[is_turn & (kind == place)] / np.median(usual_ns)).tolist()
        if len(each) < FEWEST_PROBES:
            return None
        share = float(np.median(each))
        # Of three turns, the median deviation would be 0 as soon as two agree.
        scatter = 1.2533 * float(np.mean(abs(np.array(each) / max(share, 1e-9) - 1)))
        return Turns(share, self.host_ns[is_turn], kind[is_turn], len(each), scatter)


class ByKind(NamedTuple):
    """The contention of a run's steps, that of each kind of them, and the shares in each step."""

    of_all: Crowding
    of_kinds: tuple[Crowding, ...]
    shares: Floats  # of computing, by rank and step


def crowding_by_kind(
    run: Run,
    ranks: Sequence[int],
    probed: Sequence[Probed],
    computed_ns: Whole,
    outside_ns: Whole,
    overlapped_ns: Whole,
    is_usual: NDArray[np.bool_],
    kinds: Kinds,
    places: Whole,
) -> ByKind:
    """Return the share of contention in the computing of all steps, and of each kind of them.

    Times are by rank and step, as in `crowding_of`; `places` has each step's kind. A kind's probe
    steps tell its contention. A kind without them has that of the run delay.
    """
    counts = [len(each.marks) for each in probed]
    kind_of = [kinds.probes[:count] if kinds.kinds else np.zeros(count, int) for count in counts]
    turned = [each.in_turns(kind) for each, kind in zip(probed, kind_of, strict=True)]
    apart_ns = [each.apart_ns() for each in probed]

    def told(
        chosen: NDArray[np.bool_],
        probed_ns: Sequence[Whole],
        turned: Sequence[Turns | None],
        times: float = 1.0,
    ) -> Crowding:
        computed, outside, overlapped = (
            list(each[:, chosen]) for each in (computed_ns, outside_ns, overlapped_ns)
        )
        return crowding_of(run, ranks, probed_ns, turned, computed, outside, overlapped, times)

    of_all = told(is_usual, apart_ns, turned)
    shares, of_kinds = np.broadcast_to(of_all.shares[:, None], computed_ns.shape), []
    for place in range(len(kinds.kinds)):
        of_kind_ns = [
            each.apart_ns(kind == place) for each, kind in zip(probed, kind_of, strict=True)
        ]
        times = 1.0
        if all(map(len, of_kind_ns)):
            every_ns, own_ns = (sum(map(np.median, each)) for each in (apart_ns, of_kind_ns))
            times = float(own_ns / max(every_ns, 1.0))
        in_kind = [each and each.of(place) for each in turned]
        of_kinds.append(told(is_usual & (places == place), of_kind_ns, in_kind, times))
        shares = np.where(places == place, of_kinds[-1].shares[:, None], shares)
    return ByKind(of_all, tuple(of_kinds), shares)


def crowding_of(
    run: Run,
    ranks: Sequence[int],
    apart_ns: Sequence[Whole],
    turned: Sequence[Turns | None],
    computed_ns: Sequence[Whole],
    outside_ns: Sequence[Whole],
    overlapped_ns: Sequence[Whole],
    times: float = 1.0,
) -> Crowding:
    """Return the share of contention in computing, from probe steps or else from run delay.

    `apart_ns` has each rank's computing in each probe step in which all computed at once, and
    `computed_ns` in each usual step. `turned` tells how the ranks computed in turns.
    In each usual step, `outside_ns` is the time in which the program packs, reads, or does else.
    Of `computed_ns`, `overlapped_ns` is beside communication. Devices have only kernels to tell it.
    Of a kind of steps, these are its own. The run's facts belong to the middle one of all probe
    steps, and the kind's probe steps compute so many `times` as long as that.
    """
    none = np.zeros(len(ranks))
    facts = run.facts
    if (facts.workers or 0) < 2:
        return Crowding("none", none)
    slowed_ns = slowed_as_simulated_ns(run)
    if slowed_ns or run.provenance.is_plan:
        each = zip(ranks, computed_ns, strict=True)
        slowed_shares = [slowed_ns.get(rank, 0) / max(computed.sum(), 1) for rank, computed in each]
        source: CrowdingSource = "the plan" if run.provenance.is_plan else "the simulation"
        return Crowding(source, np.clip(slowed_shares, 0.0, 1.0))
    if facts.kernels_slowed_share is not None:
        slowed, compared = dict(facts.kernels_slowed_share), compared_kernels(run)
        if compared is None or compared < LEAST_COMPARED:
            return Crowding("none", none, compared=compared or 0.0)
        usual = float(np.median(list(slowed.values())))  # for ranks whose trace tells none
        beside = np.array(
            [
                overlapped.sum() / max(computed.sum(), 1)
                for overlapped, computed in zip(overlapped_ns, computed_ns, strict=True)
            ]
        )
        shares = beside * [slowed.get(rank, usual) for rank in ranks]
        return Crowding("kernels", np.clip(shares, 0.0, 1.0), compared=compared)
    if not sums_on_processors(run):
        return Crowding("none", none)
    usual_ns = np.array(
        [np.median(lengths_ns) if len(lengths_ns) else 0.0 for lengths_ns in computed_ns]
    )
    if not (usual_ns > 0).all():
        return Crowding("none", none)
    if min(map(len, apart_ns), default=0) >= FEWEST_PROBES:
        return _by_probe_steps(run, ranks, apart_ns, turned, usual_ns, outside_ns, times)
    if facts.run_delay_s is None:
        return Crowding("none", none)
    delay_ns = _by_rank_ns(facts.run_delay_s, ranks)
    ready_ns = delay_ns + _by_rank_ns(facts.run_s, ranks)
    if facts.run_s is not None and (ready_ns < _LEAST_READY * usual_ns).any():
        return Crowding("none", none)
    # The thread also waits for a processor in the rest of the step, as at the end of each sum.
    ready_ns = np.maximum(ready_ns, usual_ns)
    delayed = np.minimum(delay_ns / ready_ns, MOST_DELAYED)
    by_own = _own_share(run) * delayed
    ran = float(np.median((1 - delayed) / (1 - by_own)))
    return Crowding("run delay", by_own, ran=ran)


def _by_probe_steps(
    run: Run,
    ranks: Sequence[int],
    apart_ns: Sequence[Whole],
    turned: Sequence[Turns | None],
    usual_ns: Floats,
    outside_ns: Sequence[Whole],
    times: float,
) -> Crowding:
    """Return the share of contention in computing that takes `usual_ns`, from probe steps."""
    facts = run.facts
    wall_ns = np.array([float(np.median(lengths_ns)) for lengths_ns in apart_ns])
    delay_ns = times * _by_rank_ns(facts.probe_run_delay_s, ranks)
    # The thread's own work in a probe step, without its sums and without what is no computing.
    apart_from_ns = np.array([np.median(lengths_ns) for lengths_ns in outside_ns])
    before_ns = _by_rank_ns(facts.before_forward_processor_s, ranks)
    ran_ns = times * _by_rank_ns(facts.probe_compute_s, ranks)
    ran_ns = ran_ns - np.maximum(apart_from_ns, before_ns)
    undelayed_ns = np.maximum(wall_ns - delay_ns, ran_ns) + (1 - _own_share(run)) * delay_ns
    undelayed_ns = np.minimum(undelayed_ns, wall_ns)
    unsent_ns = alone_ns = np.maximum(undelayed_ns, (1 - MOST_DELAYED) * wall_ns)
    scatter = [
        1.4826 * float(np.median(abs(lengths_ns / max(np.median(lengths_ns), 1.0) - 1)))
        for lengths_ns in apart_ns
    ]
    hosts_ns = np.full(len(ranks), np.nan)
    in_turns = [each for each in turned if each is not None]
    probes = min(map(len, apart_ns))
    if is_by_turns := len(in_turns) == len(ranks):
        lack_ns = _by_rank_ns(facts.turns_lack_s, ranks)
        unsent_ns = unsent_ns + lack_ns
        alone_ns = np.maximum(wall_ns * [each.share for each in in_turns] + lack_ns, 0.0)
        probes = min(each.steps for each in in_turns)
        scatter = [each.scatter for each in in_turns]
        if all(len(each.host_ns) for each in in_turns):
            hosts_ns = np.array([np.median(each.host_ns) for each in in_turns])
    unsent_s, alone_s, host_s = (
        float(np.sort(lengths_ns)[(len(ranks) - 1) // 2]) * 1e-9
        for lengths_ns in (unsent_ns, alone_ns, hosts_ns)
    )
    return Crowding(
        "probe steps",
        np.clip(1 - alone_ns / usual_ns, 0.0, 1.0),
        alone_s,
        None if math.isnan(host_s) else host_s,
        max(unsent_s - alone_s, 0.0),
        probes,
        is_by_turns,
        float(np.median(scatter)),
    )


def slowed_as_simulated_ns(run: Run) -> dict[int, int]:
    """Return by how much communication makes the computing of each simulated rank longer."""
    if run.provenance.origin != "simulated":
        return {}
    slowed = run.spans.rows((run.spans.lane == "compute") & (run.spans.name == SLOWED))
    lengths_ns = (slowed.end_ns - slowed.start_ns).tolist()
    return dict(zip(slowed.rank.tolist(), lengths_ns, strict=True))


def compared_kernels(run: Run) -> float | None:
    """Return the share of kernels' time beside communication in kernels that also ran alone."""
    told = run.facts.kernels_compared_share
    return float(np.mean([share for _, share in told])) if told else None


def _by_rank_ns(pairs: Sequence[tuple[float, float]] | None, ranks: Sequence[int]) -> Floats:
    told = {int(rank): seconds * 1e9 for rank, seconds in pairs or ()}
    return np.array([told.get(rank, 0.0) for rank in ranks])


def _own_share(run: Run) -> float:
    """Return the job's share of the processors' work in steps; 1 where it is unknown."""
    used = used_share(run)
    return 1 - share_of_others(run) / used if used else 1.0
