"""The least bandwidth, or the least compression ratio, with which a scaling factor is reached.

With a fifo lane the scaling factor never falls when the wire gets faster, so the answer is found by
halving an interval. The returned value reaches the target when it is asked for again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from fullwire.collectives.cost import Floats
from fullwire.crew import ALONE, Crew
from fullwire.errors import UsageError
from fullwire.simulation.buckets import BucketPolicy
from fullwire.simulation.grid import Grid, Subject, synchronising
from fullwire.simulation.messages import Messages, messages_of
from fullwire.simulation.stragglers import Jitter
from fullwire.simulation.transport import Transport

LEAST_BPS, MOST_BPS = 1.0, 1e18
MOST_RATIO = 1e9
_HALVINGS = 200  # enough for neighbouring floats; the loop ends when no float is between


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """The least value with which one scenario reaches the target; None if it is unreachable."""

    run: str
    buckets: str
    algorithm: str
    transport: str
    latency_s: float
    accumulate: int
    local_steps: int
    jitter: str
    workers: int
    bandwidth_bps: float | None
    compression: float | None
    codec: str | None
    best_scaling_factor: float  # with an infinitely fast wire

    @property
    def is_reachable(self) -> bool:
        """Whether any wire is fast enough."""
        return self.bandwidth_bps is not None and self.compression is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The least values for a scaling factor: bandwidths by compressor, ratios by bandwidth."""

    scaling_factor: float
    least_bandwidth: tuple[Reached, ...]
    least_compression: tuple[Reached, ...]


def targets(subjects: Sequence[Subject], grid: Grid, wanted: float, crew: Crew = ALONE) -> Targets:
    """Find the values that reach the wanted scaling factor, for every other condition."""
    if not 0 < wanted < 1:
        raise UsageError(f"target: expected a scaling factor between 0 and 1, got {wanted:g}")
    if grid.lane != "fifo":
        raise UsageError(
            "target: expected a fifo lane, got priority, where more bandwidth can make a step "
            "slower"
        )
    scenes = list(
        itertools.product(range(len(subjects)), grid.buckets, grid.algorithms, grid.latency_s)
    )
    bandwidths: list[Reached] = []
    ratios: list[Reached] = []
    for those in crew.each(partial(_reached, subjects, grid, wanted), scenes):
        bandwidths += those[0]
        ratios += those[1]
    return Targets(
        scaling_factor=wanted, least_bandwidth=tuple(bandwidths), least_compression=tuple(ratios)
    )


def _reached(
    subjects: Sequence[Subject],
    grid: Grid,
    wanted: float,
    scene: tuple[int, BucketPolicy, str, float],
) -> tuple[list[Reached], list[Reached]]:
    """Find the least bandwidths and ratios of one scene."""
    number, policy, algorithm, latency_s = scene
    subject = subjects[number]
    # Of each kind of steps, with its share: of most runs, all steps are one kind.
    messages = [
        (kind.share, messages_of(each, policy, algorithm, latency_s, grid))
        for kind, each in subject.kinds
    ] or [(1.0, messages_of(subject, policy, algorithm, latency_s, grid))]
    names = (subject.name, str(policy), algorithm, latency_s)
    bandwidths: list[Reached] = []
    ratios: list[Reached] = []
    for transport, (_, (accumulate, local_steps, scatter)) in itertools.product(
        grid.transports, synchronising(grid)
    ):
        search = _Search(messages, grid, transport, accumulate, local_steps, scatter, wanted, names)
        bandwidths += search.bandwidths()
        if not subject.sends_no_buckets:  # no codec shortens what else a job sends
            ratios += search.ratios()
    return bandwidths, ratios


@dataclass(frozen=True, slots=True)
class _Search:
    """The search in one scene: cluster sizes by bandwidths by compressors."""

    messages: Sequence[tuple[float, Messages]]
    grid: Grid
    transport: Transport
    accumulate: int
    local_steps: int
    jitter: Jitter
    wanted: float
    names: tuple[str, str, str, float]

    def bandwidths(self) -> list[Reached]:
        ratio = np.array([codec.ratio for codec in self.grid.compressors])[None, None, :]
        shape = (len(self.grid.workers), 1, ratio.size)
        least = _least(
            lambda rate: self._factor(rate, ratio), shape, LEAST_BPS, MOST_BPS, self.wanted
        )
        best = self._best(shape)
        return [
            self._reached(
                best[row, 0, column],
                workers=workers,
                bandwidth_bps=_or_none(least[row, 0, column]),
                compression=compressor.ratio,
                codec=None if compressor.is_free else compressor.label,
            )
            for row, workers in enumerate(self.grid.workers)
            for column, compressor in enumerate(self.grid.compressors)
        ]

    def ratios(self) -> list[Reached]:
        """Find the least ratio of the paper's free compressor."""
        column = next((i for i, codec in enumerate(self.grid.compressors) if codec.is_free), None)
        if column is None:
            return []
        free = slice(column, column + 1)
        rate = np.array(self.grid.bandwidth_bps)[None, :, None]
        shape = (len(self.grid.workers), rate.size, 1)
        least = _least(
            lambda ratio: self._factor(rate, ratio, free), shape, 1.0, MOST_RATIO, self.wanted
        )
        best = self._best((len(self.grid.workers), 1, 1), free)
        return [
            self._reached(
                best[row, 0, 0],
                workers=workers,
                bandwidth_bps=rate_bps,
                compression=_or_none(least[row, number, 0]),
                codec=None,
            )
            for row, workers in enumerate(self.grid.workers)
            for number, rate_bps in enumerate(self.grid.bandwidth_bps)
        ]

    def _factor(self, rate: Floats, ratio: Floats, column: slice = slice(None)) -> Floats:
        everyone, alone_s, lost_s = slice(None), 0.0, np.zeros(())
        for share, of_kind in self.messages:
            messages = of_kind.only(column)
            exposed = messages.exposed(everyone, rate, self.transport, ratio)
            overhead_s = messages.overhead_s(
                exposed,
                everyone,
                self.transport,
                messages.subject.residues[0],
                self.accumulate,
                self.local_steps,
                self.jitter,
            )
            alone_s = alone_s + share * messages.subject.step.alone_ns * 1e-9
            lost_s = lost_s + share * overhead_s
        return alone_s / (alone_s + lost_s)

    def _best(self, shape: tuple[int, ...], column: slice = slice(None)) -> Floats:
        return self._factor(np.full(shape, np.inf), np.ones(shape), column)

    def _reached(
        self,
        best: float,
        *,
        workers: int,
        bandwidth_bps: float | None,
        compression: float | None,
        codec: str | None,
    ) -> Reached:
        run, buckets, algorithm, latency_s = self.names
        return Reached(
            run=run,
            buckets=buckets,
            algorithm=algorithm,
            transport=str(self.transport),
            latency_s=latency_s,
            accumulate=self.accumulate,
            local_steps=self.local_steps,
            jitter=str(self.jitter),
            workers=workers,
            bandwidth_bps=bandwidth_bps,
            compression=compression,
            codec=codec,
            best_scaling_factor=float(best),
        )


def _least(
    factor: Callable[[Floats], Floats],
    shape: tuple[int, ...],
    low: float,
    high: float,
    wanted: float,
) -> Floats:
    """Return the least argument whose factor is at least `wanted`; NaN if there is none."""
    fails, reaches = np.full(shape, low), np.full(shape, high)
    can = factor(reaches) >= wanted
    at_once = factor(fails) >= wanted
    for _ in range(_HALVINGS):
        middle = np.sqrt(fails) * np.sqrt(reaches)
        if not ((middle > fails) & (middle < reaches)).any():
            break
        good = factor(middle) >= wanted
        reaches, fails = np.where(good, middle, reaches), np.where(good, fails, middle)
    return np.where(can, np.where(at_once, low, reaches), np.nan)


def _or_none(number: float) -> float | None:
    return None if np.isnan(number) else float(number)
