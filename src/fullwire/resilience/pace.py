"""The pace of an elastic job's workers: shares of a batch by speed, and workers that are slow.

Each rank notes how long it was busy in a step, up to its wait for the others. The lowest rank hears
it now and then. With `--balance` it names shares of the global batch, for which all would wait
least, and the step from which they hold, two steps ahead. All hear it with a commit, as they hear
of a checkpoint. With equal times nobody waits: so shares follow samples a second, again and again,
which also suits work that does not grow with samples.

A slow rank is told once. With `--evict-slow` it leaves the job.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from fullwire.resilience.place import tell

SLOW_STATUS = 5  # of a worker that leaves because it is slow
LOOKS_STEPS = 10  # a rank tells its pace that often
CHANGES_STEPS = 20  # shares hold at least so long
_GAINS = 0.05  # of the longest time: a smaller gain may be chance
SLOW = 1.5  # times the usual time for a sample
_SLOW_LOOKS = 3  # in a row


class Paced(NamedTuple):
    """The usual time of a rank's last steps, and the samples of each."""

    step: int
    samples: int
    busy_ns: int

    @property
    def speed(self) -> float:
        """Return samples a second."""
        return self.samples / max(self.busy_ns, 1) * 1e9


def shares(count: int, weights: Sequence[int]) -> list[slice]:
    """Divide so many samples by weights. Equal weights give parts that differ by one at most."""
    total, reached, cuts = sum(weights), 0, [0]
    for weight in weights:
        reached += weight
        cuts.append(count * reached // total)
    return [slice(low, high) for low, high in pairwise(cuts)]


def better_weights(paces: Mapping[int, Paced], batch_size: int) -> dict[int, int] | None:
    """Return samples by speed, if all ranks together would wait clearly less; else None.

    Each rank keeps a sample at least. The samples of a whole batch are the weights of any batch.
    """
    speeds = {rank: paced.speed for rank, paced in paces.items()}
    samples = sum(paced.samples for paced in paces.values())
    longest_s = max(paced.busy_ns for paced in paces.values()) * 1e-9
    if samples / sum(speeds.values()) > (1 - _GAINS) * longest_s or batch_size < len(paces):
        return None
    total = sum(speeds.values())
    sizes = {rank: max(int(batch_size * speed / total), 1) for rank, speed in speeds.items()}
    while (left := batch_size - sum(sizes.values())) > 0:
        sizes[min(sizes, key=lambda rank: (sizes[rank] + 1) / speeds[rank])] += 1
    while left < 0:
        sizes[max(sizes, key=lambda rank: (sizes[rank] > 1, sizes[rank] / speeds[rank]))] -= 1
        left += 1
    return None if list(sizes.values()) == [paced.samples for paced in paces.values()] else sizes


def slow_ranks(paces: Mapping[int, Paced]) -> dict[int, float]:
    """Return the ranks that take much longer for a sample than the usual one, and how much."""
    usual = statistics.median_high([paced.speed for paced in paces.values()])
    times = {rank: usual / paced.speed for rank, paced in paces.items() if paced.speed > 0}
    return {rank: factor for rank, factor in times.items() if factor >= SLOW}


class Pace:
    """One rank's part: what it tells, and as the lowest rank what it decides."""

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh
        self._weights: dict[int, int] = {}  # by rank; none: equal shares
        self._busy_ns: deque[int] = deque(maxlen=LOOKS_STEPS)
        self._since_ns: int | None = None  # this rank computes since
        self._changed_step = self._looked_step = self._decided_step = 0
        self._slow: dict[int, int] = {}  # by rank: in how many looks
        self._samples = 0

    def weights_of(self, ranks: Sequence[int]) -> list[int]:
        """Return the weights of ranks; a new one has the usual weight."""
        known = [self._weights[rank] for rank in ranks if rank in self._weights]
        usual = statistics.median_low(known) if known else 1
        return [self._weights.get(rank, usual) for rank in ranks]

    # What a rank notes.

    def goes_on(self) -> None:
        """The others are done, too: the next step begins."""
        self._since_ns = time.monotonic_ns()

    def waits(self, samples: int) -> None:
        """This rank is ready with its samples of a whole batch, and waits for the others."""
        if samples != self._samples:
            self._samples = samples
            self._busy_ns.clear()
        if self._since_ns is not None:
            self._busy_ns.append(time.monotonic_ns() - self._since_ns)
        self._since_ns = None

    def enters(self, members: Sequence[int], said: Sequence[str], step: int) -> None:
        """An epoch begins: take the weights that the first of those who have the state holds."""
        self._busy_ns.clear()
        self._since_ns = None
        self._changed_step = self._looked_step = self._decided_step = step
        self._weights = next(
            (msgspec.json.decode(each, type=dict[int, int]) for each in said if each), {}
        )
        self._weights = {rank: self._weights[rank] for rank in members if rank in self._weights}

    @property
    def said(self) -> str:
        """Return the weights, for those who come."""
        return msgspec.json.encode(self._weights).decode() if self._weights else ""

    # At a step's beginning.

    def look(self, epoch: int, step: int, ranks: Sequence[int], batch_size: int) -> None:
        """Tell this rank's pace, decide if it is the lowest one, and take what was decided."""
        mesh, rank = self._mesh, self._mesh.rank
        if mesh.posted(epoch, f"leave {rank}") is not None:
            mesh.place.folder.set(f"slow {rank}", "")
            raise SystemExit(SLOW_STATUS)
        said = mesh.posted(epoch, "shares")
        if said is not None and int(said.partition(" ")[0]) == step:
            self._weights = msgspec.json.decode(said.partition(" ")[2], type=dict[int, int])
            self._changed_step = step
            self._busy_ns.clear()
        if len(self._busy_ns) == LOOKS_STEPS and step - self._looked_step >= LOOKS_STEPS:
            self._looked_step = step
            busy_ns = round(statistics.median(self._busy_ns))
            mesh.post(epoch, f"pace {rank}", f"{step} {self._samples} {busy_ns}", ranks[:1])
        if rank == ranks[0] and len(ranks) > 1:
            self._decide(epoch, step, ranks, batch_size)

    def _decide(self, epoch: int, step: int, ranks: Sequence[int], batch_size: int) -> None:
        mesh, place = self._mesh, self._mesh.place
        told = {rank: mesh.posted(epoch, f"pace {rank}") for rank in ranks}
        paces = {
            rank: Paced(*map(int, each.split())) for rank, each in told.items() if each is not None
        }
        # Of each rank, one that it told after the last change and after the last look.
        since = max(self._changed_step + LOOKS_STEPS, self._decided_step + 1)
        if len(paces) < len(ranks) or min(paced.step for paced in paces.values()) < since:
            return
        self._decided_step = step
        self._tell_slow(epoch, slow_ranks(paces), ranks)
        if place.balances and step - self._changed_step >= CHANGES_STEPS:
            weights = better_weights(paces, batch_size)
            if weights is not None:
                self._changed_step = step  # until it holds
                named = msgspec.json.encode(weights).decode()
                mesh.post(epoch, "shares", f"{step + 2} {named}")
                now_ns = time.monotonic_ns()
                tell("balance", list(ranks), now_ns, now_ns)

    def _tell_slow(self, epoch: int, slow: Mapping[int, float], ranks: Sequence[int]) -> None:
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank in slow}
        place = self._mesh.place
        for rank, looks in self._slow.items():
            if looks != _SLOW_LOOKS:
                continue
            now_ns = time.monotonic_ns()
            tell("slow", [rank], now_ns, now_ns)
            evicts = place.evicts and len(ranks) > max(place.least, 2)
            then = "it leaves the job" if evicts else "the others wait for it"
            if place.balances:
                then = "it gets fewer of them"
            sys.stderr.write(
                f"fullwire: worker {rank} is slow: {slow[rank]:.1f} times the usual time for a "
                f"sample; {then}\n"
            )
            if evicts:
                self._mesh.post(epoch, f"leave {rank}", "")
