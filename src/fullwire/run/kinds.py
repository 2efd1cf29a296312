"""The kinds of steps of a job, by what steps do and never by how long they take.

Some jobs take turns: one step adds up three passes and the next only one, or only every other step
sums. A kind is the steps that have as many passes and gradients, and send about as many bytes. The
usual step of such a job is a mixture: of each kind its middle half, and each kind at its share. A
job whose steps are alike has no kinds, and neither has one whose kinds take about as long.

Workers may take several steps of their own between two sums. Then ranks wait for each other at the
end of such a round, and what a step costs shows in a later one. So whole rounds are compared, and
the usual step is the mean over the middle half of the rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from fullwire.run.facts import Facts
from fullwire.run.run import PROBES, Collectives, Gradients, Run, Spans, Whole
from fullwire.run.usual import (
    NEXT_TO_NOTHING,
    NO_ROUNDS,
    kept_steps,
    middle_half,
    regular_steps,
    rounds_of,
    rows_of_rounds,
    shared_steps,
    usual_steps,
)

_Floats = NDArray[np.float64]

FEWEST = 4  # steps of a kind
_LEAST_SHARE = 0.08  # of the steps: a rarer kind is an exception, if its steps come irregularly
_REGULAR = 0.9  # of the distances between steps of a rarer kind
_TIMES_DIFFER = 1.10  # kinds whose times differ by less are one
_BYTES_DIFFER = 0.05  # of the most bytes of a step: a logged loss makes no kind
_SHARE_OFF = 0.005  # of all: usual steps of a kind may be so many more or fewer than its share
LAST, EARLIER = "backward", "earlier backward"  # as the recorder names a step's backward passes
EARLIER_FORWARD = "earlier forward"
QUEUED = "queued"  # a transfer, from the end of the work that made it, until its line is free
LAYERS = "layers"  # of a simulated step of shards: computing between waits for them
LATE_PART = 4  # of a pass: its last bucket leaves no later than that after its end


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of steps; what it does is of one rank, in one step."""

    share: float  # of the steps
    passes: float | None  # None where a step does more than to accumulate, or passes are unknown
    gradients: float
    sent_bytes: float


def sums_of(kinds: Sequence[Kind]) -> tuple[float, ...]:
    """Return the bytes that the steps of each kind sum; 0 for next to nothing beside another kind.

    Such are a loss, or DDP's word of its new buckets.
    """
    few_bytes = NEXT_TO_NOTHING * max((kind.sent_bytes for kind in kinds), default=0.0)
    return tuple(kind.sent_bytes if kind.sent_bytes > few_bytes else 0.0 for kind in kinds)


@dataclass(frozen=True, eq=False, slots=True)
class Kinds:
    """The kinds of a run's steps, and the kind of each step; no kinds where all steps are alike."""

    kinds: tuple[Kind, ...] = ()
    numbers: Whole = field(default_factory=lambda: np.zeros(0, np.int64))  # in order of size
    places: Whole = field(default_factory=lambda: np.zeros(0, np.int64))  # -1 for steps of no kind
    probes: Whole = field(default_factory=lambda: np.zeros(0, np.int64))  # of each probe step
    rounds: Whole = field(default_factory=lambda: NO_ROUNDS)  # the steps of each, a line each
    chosen: Whole | None = None  # the usual steps, chosen among steps of other kinds too
    unlike: int = 0  # steps that do other work and take other times, too few for kinds of their own

    @property
    def every(self) -> int:
        """The steps of a round."""
        return self.rounds.shape[1] if len(self.rounds) else 1

    def of(self, numbers: Whole) -> Whole:
        """Return the place of each of these steps' kind, -1 for a step of no kind."""
        if not len(self.numbers):
            return np.full(len(numbers), -1)
        at = np.minimum(np.searchsorted(self.numbers, numbers), len(self.numbers) - 1)
        return np.where(self.numbers[at] == numbers, self.places[at], -1)

    def among(self, numbers: Whole) -> Kinds:
        """Return the kinds, if each has some of these steps; else these count as alike."""
        places = self.of(numbers)
        if all((places == at).any() for at in range(len(self.kinds))):
            return self
        return Kinds(rounds=self.rounds)

    def kept(self, numbers: Whole, length_ns: Whole | _Floats) -> NDArray[np.bool_]:
        """Choose all steps but the warm-up and rare exceptions of each kind, in order of time."""
        if (rounds := self._as_rounds(numbers, length_ns)) is not None:
            return rounds.steps(len(numbers), _kept(rounds.length_ns, rounds.places))
        return _kept(length_ns, self.of(numbers))

    def usual(self, numbers: Whole, length_ns: Whole | _Floats) -> NDArray[np.bool_]:
        """Choose the usual steps: the middle ones of each kind, and of each kind its share."""
        if self.chosen is not None and (is_chosen := np.isin(numbers, self.chosen)).any():
            return is_chosen
        if (rounds := self._as_rounds(numbers, length_ns)) is not None:
            shares = np.bincount(rounds.places) / len(rounds.places)
            chosen = _middle(rounds.length_ns, rounds.places, shares.tolist())
            return rounds.steps(len(numbers), chosen)
        return _middle(length_ns, self.of(numbers), [kind.share for kind in self.kinds])

    def _as_rounds(self, numbers: Whole, length_ns: Whole | _Floats) -> _Rounds | None:
        """Return the whole rounds among these steps; None where steps make no rounds.

        Rounds are of one kind if they have as many steps of each kind.
        """
        rows = rows_of_rounds(self.rounds, numbers)
        if not len(rows):
            return None
        of_steps = np.sort(self.of(numbers)[rows], axis=1)
        _, places, counts = np.unique(of_steps, axis=0, return_inverse=True, return_counts=True)
        if counts.min() < FEWEST:
            places = np.zeros(len(rows), np.int64)
        return _Rounds(rows, length_ns[rows].mean(axis=1), places.reshape(-1))

    def expected(
        self, numbers: Whole, is_usual: NDArray[np.bool_], values: _Floats | Whole
    ) -> _Floats:
        """Return the mean over the usual steps of each step's kind; steps are the first axis."""
        expected = np.broadcast_to(values[is_usual].mean(axis=0), values.shape).copy()
        places = self.of(numbers)
        for place in range(len(self.kinds)):
            if (is_usual & (places == place)).any():
                expected[places == place] = values[is_usual & (places == place)].mean(axis=0)
        return expected

    def as_mean(self, numbers: Whole, lengths: _Floats) -> _Floats:
        """Return each length in proportion to its kind's, as if all steps were the mean step."""
        if self.every > 1:
            rounds, alike = rows_of_rounds(self.rounds, numbers), lengths.astype(np.float64)
            alike[rounds] = lengths[rounds].mean(axis=1, keepdims=True)
            return alike
        if not self.kinds:
            return lengths
        is_usual = self.usual(numbers, lengths)
        mean, expected = lengths[is_usual].mean(), self.expected(numbers, is_usual, lengths)
        if not expected.all():
            return lengths
        alike = np.where(self.of(numbers) >= 0, lengths * mean / expected, lengths)
        # The middle half over all kinds is to be the mean step, too.
        told = middle_half(alike[self.kept(numbers, lengths)]).mean()
        return np.asarray(alike * (mean / told))


@dataclass(frozen=True, eq=False, slots=True)
class _Rounds:
    """Whole rounds of steps, in order of time."""

    rows: Whole  # of the steps, a round in each line
    length_ns: _Floats  # of the mean step of each
    places: Whole  # of the kind of each

    def steps(self, count: int, chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Choose the steps of some rounds, among so many steps."""
        is_in = np.zeros(count, bool)
        is_in[self.rows[chosen]] = True
        return is_in


def _kept(length_ns: Whole | _Floats, places: Whole) -> NDArray[np.bool_]:
    """Choose all but the warm-up and rare exceptions of each kind."""
    is_kept = kept_steps(length_ns)
    for place in range(places.max(initial=-1) + 1):
        if (mine := places == place).any():
            is_kept[mine] = kept_steps(length_ns[mine])
    return is_kept


def _middle(
    length_ns: Whole | _Floats, places: Whole, shares: Sequence[float]
) -> NDArray[np.bool_]:
    """Choose the middle ones of each kind, and of each kind its share."""
    is_kept = _kept(length_ns, places)
    members = [
        (share, np.flatnonzero(is_kept & (places == place))) for place, share in enumerate(shares)
    ]
    members = [(share, rows) for share, rows in members if len(rows)]
    if len(members) < 2:
        return usual_steps(length_ns)
    is_usual = np.zeros(len(length_ns), bool)
    for (_, rows), count in zip(members, _in_shares(members), strict=True):
        by_length = rows[np.argsort(length_ns[rows], kind="stable")]
        off = (len(rows) - count) // 2
        is_usual[by_length[off : off + count]] = True
    return is_usual


def _in_shares(members: Sequence[tuple[float, Whole]]) -> list[int]:
    """Return how many of each kind's steps are usual ones: about half of them, in their shares.

    As many are left out at the lower end as at the upper one, where steps are enough for that.
    """
    shares = np.array([share for share, _ in members])
    sizes = np.array([len(rows) for _, rows in members])
    rarest = int(np.argmin(sizes))
    wanted = np.arange(1, sizes[rarest] + 1)[:, None] * (shares / shares[rarest])
    odd = sizes % 2
    even_ends = 2 * np.round((wanted - odd) / 2) + odd
    counts = np.clip(np.concatenate([even_ends, np.round(wanted)]), 1, sizes)
    off = np.abs(counts / counts.sum(axis=1, keepdims=True) - shares / shares.sum()).max(axis=1)
    is_near = off <= max(_SHARE_OFF, off.min())
    worse = np.abs(counts.sum(axis=1) - sizes.sum() / 2)
    worse += sizes.sum() * ((counts - sizes) % 2).any(axis=1)
    return [int(count) for count in counts[int(np.argmin(np.where(is_near, worse, np.inf)))]]


ONE_KIND = Kinds()
_FOUND: WeakKeyDictionary[Run, Kinds] = WeakKeyDictionary()


def kinds_of(run: Run) -> Kinds:
    """Return the kinds of a run's steps."""
    if run not in _FOUND:
        numbers, length_ns, ranks = shared_steps(run)
        found = ONE_KIND
        if len(numbers) >= FEWEST:  # modelled runs have fewer, and start sooner without
            did = in_steps(run, numbers) / ranks
            probed = over_ranks(in_probes(run)) / ranks
            found = sorted_steps(numbers, length_ns, did, probed, rounds_of(run))
        _FOUND[run] = found
    return _FOUND[run]


# What steps do: a row each for passes, steps' last passes, gradients and sent bytes.
ROWS = 4
_WITHOUT_GRADIENTS = [0, 1, 3]


def in_steps(run: Run, numbers: Whole) -> _Floats:
    """Add up what all ranks do in each of these steps."""
    did = np.zeros((ROWS, len(numbers)))
    if not len(numbers):  # as in the part of a recording that ends before its first step does
        return did
    for row, table, _, weights in _tables(run):
        at = np.minimum(np.searchsorted(numbers, table.step), len(numbers) - 1)
        chosen = numbers[at] == table.step
        did[row] += np.bincount(at[chosen], weights[chosen], len(numbers))
    return did


def in_probes(run: Run) -> dict[int, _Floats]:
    """Add up what each rank does in each of its probe steps, whose rows belong to no step.

    Gradients of probe steps are not recorded.
    """
    marks = run.spans.rows((run.spans.lane == "host") & np.isin(run.spans.name, PROBES))
    marks = marks.rows(np.lexsort((marks.start_ns, marks.rank)))
    by_rank = {}
    for rank in np.unique(marks.rank).tolist():
        of_rank = marks.rows(marks.rank == rank)
        did = by_rank[rank] = np.zeros((ROWS, len(of_rank)))
        for row, table, times_ns, weights in _tables(run):
            mine = np.flatnonzero((table.step < 0) & (table.rank == rank))
            at = np.searchsorted(of_rank.start_ns, times_ns[mine], side="right") - 1
            inside = (at >= 0) & (times_ns[mine] < of_rank.end_ns[at])
            did[row] += np.bincount(at[inside], weights[mine[inside]], len(of_rank))
    return by_rank


def over_ranks(by_rank: Mapping[int, _Floats]) -> _Floats:
    """Add up what all ranks do in each probe step."""
    did = np.zeros((ROWS, max((each.shape[1] for each in by_rank.values()), default=0)))
    for each in by_rank.values():
        did[:, : each.shape[1]] += each
    return did


def _tables(run: Run) -> Iterator[tuple[int, Spans | Gradients | Collectives, Whole, _Floats]]:
    """Go through the tables of what is done, each with its row, its times and its amounts."""
    is_computing = run.spans.lane == "compute"
    last = run.spans.rows(is_computing & (run.spans.name == LAST))
    earlier = run.spans.rows(is_computing & (run.spans.name == EARLIER))
    gradients, collectives = run.gradients, run.collectives
    yield 0, last, last.start_ns, np.ones(len(last))
    yield 0, earlier, earlier.start_ns, np.ones(len(earlier))
    yield 1, last, last.start_ns, np.ones(len(last))
    yield 2, gradients, gradients.ready_ns, np.ones(len(gradients))
    yield 3, collectives, collectives.issue_ns, collectives.bytes.astype(np.float64)


def _come_regularly(rows: Whole, count: int) -> bool:
    """Say whether these of so many steps come at equal distances, all over the run."""
    apart = np.diff(rows)
    usual = float(np.median(apart))
    return bool(np.mean(apart == usual) >= _REGULAR and usual * (len(rows) + 1) >= count)


def sorted_steps(
    numbers: Whole, length_ns: _Floats, did: _Floats, probed: _Floats, rounds: Whole
) -> Kinds:
    """Sort steps into kinds, from what they did and what the probe steps did.

    `rounds` has the steps of each round, if they make some.
    """
    none = Kinds(rounds=rounds)
    if len(numbers) < FEWEST or (did == did[:, :1]).all():
        return none
    # Of bytes only large differences count, so neighbours in order of size are taken together.
    together = np.concatenate([did, probed], axis=1)
    bytes_ = np.unique(together[-1])
    apart = np.diff(bytes_) > _BYTES_DIFFER * bytes_[-1]
    together[-1] = np.searchsorted(bytes_[1:][apart], together[-1], side="right")
    done, probed = np.split(together, [len(numbers)], axis=1)
    _, found = np.unique(done, axis=1, return_inverse=True)
    found = found.reshape(-1)
    is_kept = kept_steps(length_ns) | regular_steps(length_ns)
    fewest = max(FEWEST, _LEAST_SHARE * is_kept.sum())
    times, few = {}, {}
    for place in np.unique(found[is_kept]).tolist():
        rows = np.flatnonzero(is_kept & (found == place))
        if _LEAST_SHARE * is_kept.sum() <= len(rows) < FEWEST:
            few[place] = len(rows)
        if len(rows) >= fewest or (len(rows) >= FEWEST and _come_regularly(rows, len(numbers))):
            times[place] = float(length_ns[rows][usual_steps(length_ns[rows])].mean())
    often = int(np.argmax(np.bincount(found[is_kept])))
    often_ns = length_ns[is_kept & (found == often)].mean()
    unlike = 0
    for place, count in few.items():
        shorter_ns, longer_ns = sorted([often_ns, length_ns[is_kept & (found == place)].mean()])
        unlike += count if longer_ns >= _TIMES_DIFFER * shorter_ns else 0
    none = replace(none, unlike=unlike)
    groups: list[list[int]] = []
    for place in sorted(times, key=lambda each: times[each]):
        if groups and times[place] < _TIMES_DIFFER * times[groups[-1][0]]:
            groups[-1].append(place)
        else:
            groups.append([place])
    if len(groups) < 2:
        return none
    places = np.select([np.isin(found, group) for group in groups], [*range(len(groups))], -1)
    # A probe step is of the kind that does as much, gradients aside; of none where several do.
    told = _WITHOUT_GRADIENTS
    alike = (probed[told][:, :, None] == done[told][:, None, :]).all(axis=0)
    fits = np.stack([alike[:, places == at].any(axis=1) for at in range(len(groups))])
    probes = np.where(fits.sum(axis=0) == 1, fits.argmax(axis=0), -1)
    rows = rows_of_rounds(rounds, numbers)
    counted = places[rows.reshape(-1)] if len(rows) else places
    counts = [int((counted == at).sum() + (probes == at).sum()) for at in range(len(groups))]
    kinds = []
    for at, count in enumerate(counts):
        passes, lasts, gradients, sent_bytes = did[:, places == at]
        kinds.append(
            Kind(
                share=count / sum(counts),
                passes=float(passes.mean()) if (lasts == 1).all() else None,
                gradients=float(gradients.mean()),
                sent_bytes=float(sent_bytes.mean()),
            )
        )
    return replace(none, kinds=tuple(kinds), numbers=numbers, places=places, probes=probes)


def usual_step_s(run: Run) -> float | None:
    """Return the time of a run's step; None where steps are missing."""
    numbers, length_ns, _ = shared_steps(run)
    if not len(numbers):
        return None
    return float(length_ns[kinds_of(run).usual(numbers, length_ns)].mean()) * 1e-9


def run_of_kind(run: Run, place: int) -> Run:
    """Return a run with the steps of one kind alone, and with the ranks' own work in these.

    Its usual steps are those of this kind that count as usual in the whole run.
    """
    kinds, spans = kinds_of(run), run.spans
    numbers = kinds.numbers[kinds.places == place]
    computing = spans.rows((spans.lane == "compute") & (spans.step >= 0))
    lasted_ns = (computing.end_ns - computing.start_ns).astype(np.float64)
    of_kind = kinds.of(computing.step)
    each_ns = [
        lasted_ns[of_kind == at].sum() / max((kinds.places == at).sum(), 1)
        for at in range(len(kinds.kinds))
    ]
    mean_ns = float(np.dot([kind.share for kind in kinds.kinds], each_ns))
    times = each_ns[place] / mean_ns if mean_ns else 1.0
    facts, used = run.facts, run.facts.processor_s
    if used is not None:
        sent_s = dict(facts.communication_processor_s or ())
        own = (
            (rank, used_s - sent_s.get(rank, 0.0), sent_s.get(rank, 0.0)) for rank, used_s in used
        )
        facts = facts | Facts(
            processor_s=tuple((rank, times * own_s + calls_s) for rank, own_s, calls_s in own)
        )
    found = replace(
        run,
        facts=facts,
        spans=spans.rows(np.isin(spans.step, numbers)),
        gradients=run.gradients.rows(np.isin(run.gradients.step, numbers)),
        collectives=run.collectives.rows(np.isin(run.collectives.step, numbers)),
    )
    shared, length_ns, _ = shared_steps(run)
    usual = shared[kinds.usual(shared, length_ns)]
    _FOUND[found] = Kinds(chosen=usual[np.isin(usual, numbers)])
    return found
