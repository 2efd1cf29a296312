"""Why a rank computes nothing while no bytes flow.

It waits for other ranks, or for something of its own: its data, a disk, a sleep of its script. The
kernel tells in which of its functions the main thread sleeps, and that tells most of these apart.
The stack of the main thread tells the rest, with the line of the script.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fullwire.findings.watching import IdlesAt
from fullwire.recorder.outside import Looks

_MOST = 0.5  # of a bin, for a rank that is elsewhere in it
_SELDOM = 0.25  # of the time in which a rank works: the main thread of a training is elsewhere
_SURELY = 2.0  # standard deviations
_MOST_QUESTIONS, _BETWEEN_QUESTIONS_S, _ENOUGH_ANSWERS, _MOST_S = 30, 0.2, 5, 8.0
_AGAIN_S = 60.0  # after which an answer is too old
# So many answers that are all alike are likely (95 %) where this share of the time is like them.
ALIKE = 0.05 ** (1 / _ENOUGH_ANSWERS)

Bits = NDArray[np.bool_]
Reals = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """The answer of a rank that was asked a few times why it does nothing."""

    rank: int
    line: str = ""  # of the script; empty where nothing told it
    is_loading: bool | None = None  # None where it was not told, or not the same each time
    is_always: bool = False  # it was never seen to wait for another rank where it may have
    is_in_lock: bool = False  # it waits for a thread of its own, as others do for other ranks

    @property
    def findings(self) -> tuple[IdlesAt, ...]:
        """Return what it waits for and where, if that was told."""
        if self.is_loading is None:
            return ()
        return (IdlesAt(rank=self.rank, is_loading=self.is_loading, line=self.line),)


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Where ranks are idle and wait for something of their own, in bins of time."""

    bins: Bits  # by rank and bin
    untold: Bits  # by bin: nobody works, and for some rank nothing tells why
    quiet: Bits  # by bin: nobody works

    @classmethod
    def of(
        cls, elsewhere: Reals, unclear: Reals, works: Bits, idle: Idle | None, *, all_seen: bool
    ) -> Elsewhere:
        """Find them by the share of each bin in which the main thread slept in such a place.

        - `unclear`: the share in which it may have waited for another rank.
        - `works`: whether a rank computes, or bytes flow.
        - `idle`: the answer of a rank that was asked.
        - `all_seen`: no rank of the job is hidden from us.
        """
        if idle is not None and idle.is_always:
            elsewhere = elsewhere + unclear
        is_elsewhere = np.asarray(elsewhere >= _MOST, bool)
        # Where another thread than the main one trains, the main one sleeps in one place for ever.
        often = (is_elsewhere & works).sum(axis=1) >= _SELDOM * np.maximum(works.sum(axis=1), 1)
        trains = np.isfinite(elsewhere).any(axis=1) & ~often
        bins = is_elsewhere & ~works & trains[:, None]
        is_told = trains & all_seen & (idle is None or not idle.is_in_lock)
        quiet = ~works.any(axis=0)
        is_open = (unclear >= _MOST) | ~is_told[:, None]
        untold = quiet & is_open.any(axis=0) & ~bins.any(axis=0)
        return cls(bins, np.asarray(untold, bool), np.asarray(quiet, bool))


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """The time of a step in which ranks do nothing, as far as its reasons are known."""

    quiet_s: float  # no rank works, and no bytes flow
    untold_s: float  # of the time until bytes flow, and nothing tells why
    of_rank_s: Mapping[int, float]  # that the rank spends elsewhere
    elsewhere_s: float  # that every rank surely spends elsewhere, each at its own moments
    is_loading: bool | None  # elsewhere means their data; None where nothing told

    @classmethod
    def of(
        cls,
        found: Elsewhere,
        ranks: tuple[int, ...],
        edges: NDArray[np.int64],
        bin_s: float,
        untold_s: float,
        idle: Idle | None,
    ) -> Waiting:
        """Take the means over the steps between these bins."""
        bins = found.bins[:, edges[0] : edges[-1]]
        step_s, shares = float(np.diff(edges).mean()) * bin_s, bins.mean(axis=1)
        # There is a look for each two bins at least.
        least = shares - _SURELY * np.sqrt(shares * (1 - shares) / max(bins.shape[1] / 2, 1))
        return cls(
            quiet_s=float(found.quiet[edges[0] : edges[-1]].mean()) * step_s,
            untold_s=untold_s,
            of_rank_s={
                rank: float(share) * step_s for rank, share in zip(ranks, shares, strict=True)
            },
            elsewhere_s=max(float(least.min()), 0.0) * step_s,
            is_loading=None if idle is None else idle.is_loading,
        )


class Asking:
    """Asks an idle rank what it waits for, while the looks go on."""

    def __init__(self) -> None:
        self._beside = ThreadPoolExecutor(1)
        self._answer: Future[Idle] | None = None
        self._begun_s = 0.0

    def begin(self, rank: int, looks: Looks) -> None:
        """Ask this rank, unless an answer is on its way or there is a fresh one."""
        if self._answer is None or self._is_old:
            self._begun_s = time.monotonic()
            self._answer = self._beside.submit(idle_at, rank, looks)

    @property
    def _is_old(self) -> bool:
        return time.monotonic() - self._begun_s > _AGAIN_S

    @property
    def idle(self) -> Idle | None:
        """Return the latest answer, or None if there is none yet."""
        is_fresh = self._answer is not None and self._answer.done() and not self._is_old
        return self._answer.result() if self._answer is not None and is_fresh else None

    def wait(self) -> Idle | None:
        """Wait for the answer that is on its way."""
        return None if self._answer is None else self._answer.result()

    def close(self) -> None:
        """Ask no more."""
        self._beside.shutdown(wait=False, cancel_futures=True)


def idle_at(rank: int, looks: Looks) -> Idle:
    """Ask a rank why it sleeps, at a few moments that are drawn by chance."""
    answers, for_ranks, until_s = [], 0, time.monotonic() + _MOST_S
    for _ in range(_MOST_QUESTIONS):
        time.sleep(random.uniform(0, _BETWEEN_QUESTIONS_S))
        waits = looks.waits((rank,)).get(rank)
        if waits is None or time.monotonic() > until_s:  # its host is lost
            break
        is_idle = waits.state in ("S", "D") and waits.line and waits.place
        if is_idle and waits.is_in_collective:
            for_ranks += not waits.for_other_threads
        elif is_idle and (waits.is_loading or not waits.for_other_threads):
            answers.append(waits)
        if len(answers) == _ENOUGH_ANSWERS:
            break
    kinds = {waits.is_loading for waits in answers}
    if len(answers) < _ENOUGH_ANSWERS or len(kinds) > 1:
        return Idle(rank=rank)
    lines = [waits.line for waits in answers]
    return Idle(
        rank=rank,
        line=max(lines, key=lines.count),
        is_loading=kinds.pop(),
        is_always=not for_ranks,
        is_in_lock=all(waits.for_other_threads for waits in answers),
    )
