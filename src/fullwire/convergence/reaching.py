"""The step at which a curve reaches a goal, and a forecast where it has not yet.

One value is noisy, so a fit around the goal tells when it is reached. A metric that ends in NaN has
no forecast: such a training does not recover.

The first value that lies low enough is a lucky one, and so is the lowest of many windows. So the
curve is taken to cross where it parts best into values above and values below. A parabola in the
logarithm of the steps is then fitted to the means of blocks around that place. How far it misses
these means tells its error, whatever noise neighbours share. A wider window has less noise, and its
parabola fits less well: the one with the least error counts, and that does not depend on how long
the recording went on.

The forecast is a power law with an offset, `v = c + a (t + d)^-b`, fitted to means over stretches
of time that grow. Early values say little about c, the level at which the curve flattens. A curve
falls from a finite height, so it has a d above 0. One that falls late has a d below. A forecast
keeps every (b, c, d) with its weight, and refuses where they disagree about the goal. No curve
tells whether it has a d, so the interval holds that of the laws without one too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fullwire.collectives.cost import Floats
from fullwire.convergence.curves import FEWEST, Curve, Goal, Reach
from fullwire.errors import UsageError
from fullwire.run.centre import NORMAL_90
from fullwire.units import show_number

MOST_NOT_REACHING = 0.05  # of the forecast's weight
WIDEST = 10.0  # times, from the low end of a forecast to the high one
MOST_MISSES = 0.05  # of the curve's span, by which it may miss its power law beyond noise
_OF_NOISE = 3.0  # times its variance: that of 30 means is seldom more
WARM_UP = 0.05  # of the recorded steps, which follow no law yet
_STRETCHES = 30
_WINDOWS = (5.0, 3.0, 2.0, 1.5, 1.25, 1.12, 1.06, 1.03, 1.015)  # up to so many times the steps
_BLOCKS = 24
_FEWEST = 4  # values of a window
_NEAR = 200  # values on each side, whose differences tell the noise of one
_END = 0.1  # of the values of a curve, which tell its level at the end
_PARABOLA, _FOR_PARABOLA = 3, 8  # its coefficients, and the blocks that they need
_MORE = 6  # blocks beyond the coefficients, with which one more of them can be told
_MOST_SHARED = 0.9  # correlation of neighbouring blocks
_ROUNDS = 2  # the second one has its windows around the crossing that the first one found
_POINTS = 1001
_SIDE = 0.25  # of a window, by which its parabola is believed beyond the window
_SURE_OF_DIP = 3.0  # standard errors
_DIPS = 40  # blocks, of which one may be a dip
_MISFIT = 3e-3  # of the curve's span: no training follows these laws more closely
_SLOWEST = 2  # of the changes, in turns over the curve: the mean, and what the law follows
_SHARES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 1.0)  # of the noise, by neighbours
_QUICKEST, _FADES = 0.7, 12  # of the shared noise, that fades from one value to the next
_FEWEST_LENGTHS = 4  # of the slowest fading, in all values
_NOISES = 8
_LEAST_LEFT = 0.2  # of the noise, beside a trend: less of it tells nothing of the rest
_TREND = 6  # powers of the logarithm of steps, that a whole curve follows apart from its noise
_OF_TREND = 4  # turns over the curve, that the trend follows itself
_MOST_TOLD = 4000  # values, or means of as many groups, that tell the noise of a curve
_CUT = 4.0  # standard deviations, beyond which a value is a spike
_AT_PARABOLA = 9 / 4  # times the variance of a mean, in the middle of a parabola
_POWERS = np.geomspace(0.1, 2.0, 200)
_LEVELS = np.geomspace(1e-3, 3.0, 300)  # below the least value, in spans of the curve
_DELAYS = (-0.03, 0.0, 0.01, 0.03, 0.06, 0.1, 0.15, 0.25, 0.4)  # in recorded steps, the last one 1
_OF_DELAY = 0.005  # the weight of a law with a delay, beside one without, before the curve is seen
_LEAST_WEIGHT = 1e-7  # of a law, in relation to the likeliest: many goals are asked of few laws


class _Crossing(NamedTuple):
    """Where a curve crosses a value, and the ends of the 90 % interval."""

    at: float
    low: float
    high: float


class _Fit(NamedTuple):
    error: float  # of the curve's level in the middle of the window
    crossing: _Crossing | None  # in logarithms of steps; None if the curve does not cross


class _Refused(NamedTuple):
    """Why a curve has no forecast."""

    why: str
    says_later: bool = False  # the law holds, and says that the goal may be far away, or never met


def has_reached(curve: Curve, goal: Goal) -> bool:
    """Return whether the curve, as far as it was recorded, reaches the goal."""
    if _begins_there(curve, goal):
        return True
    found = _crossing_of(curve, goal)
    reached = None if found is None else _within(curve, goal, found)
    return isinstance(reached, Reach) and not reached.is_forecast


def end_of(curve: Curve, goal: Goal) -> str:
    """Say where a curve ends that has not reached a goal: its last values without their noise."""
    last = curve.values[-min(_NEAR, math.ceil(_END * len(curve.values))) :]
    [level], _ = _blocks(last, 1)
    beyond = curve.values <= goal.value if goal.is_least else curve.values >= goal.value
    said = f"ends {'near' if len(last) > 1 else 'at'} {level:.4g}"
    if not beyond.any():
        return said
    return f"{said}; single values were {'lower' if goal.is_least else 'higher'}"


def reach(curve: Curve, goal: Goal, run: str) -> Reach:
    """Return when the curve reaches the goal: as recorded, or else by a forecast."""
    if _begins_there(curve, goal):
        raise UsageError(
            f"{run}: {goal} is reached at its first value, {curve.values[0]:g} at {curve.unit} "
            f"{curve.steps[0]}: expected a target that takes training"
        )
    found = _crossing_of(curve, goal)
    if found is not None and found.at <= 0:
        raise UsageError(
            f"{run}: {goal} is reached at {curve.unit} {found.at:g}, expected {curve.unit}s above 0"
        )
    answer = _forecast(curve, goal) if found is None else _within(curve, goal, found)
    if isinstance(answer, _Refused):
        surely = "" if found is None else "surely "
        raise UsageError(f"{run}: {goal} is not {surely}reached{answer.why}")
    return answer


def _within(curve: Curve, goal: Goal, found: _Crossing) -> Reach | _Refused:
    """Return when the curve reaches the goal by a crossing that was found.

    Noise that neighbours share may bring a curve below a goal for a while. If the values after the
    crossing do not show that it stays there, the law of the whole curve tells how late it may be.
    """
    fewest = max(found.low, min(found.at, 1.0))  # not even one step at the first value
    last = int(curve.steps[-1])
    reached = Reach(steps=found.at, low=fewest, high=found.high, recorded=last)
    if found.high <= last or _stays_below(curve, goal, found):
        return reached
    later = _forecast(curve, goal)
    if isinstance(later, _Refused):
        return later if later.says_later else reached
    high = max(found.high, later.high)
    return replace(later if later.steps > last else reached, low=fewest, high=high)


def _stays_below(curve: Curve, goal: Goal, found: _Crossing) -> bool:
    """Return whether the values after a crossing are lower than shared noise alone makes them."""
    sign = 1.0 if goal.is_least else -1.0
    steps, values = curve.steps.astype(float), sign * curve.values
    after = values[steps >= found.at]
    below = sign * goal.value - float(after.mean())
    return below > _SURE_OF_DIP * _shared(steps, values).deviation(len(after))


def _begins_there(curve: Curve, goal: Goal) -> bool:
    """Return whether no beginning of a curve has more values short of the goal than others."""
    sign = 1.0 if goal.is_least else -1.0
    return _parting(sign * curve.values, sign * goal.value) == 0


@lru_cache(maxsize=64)  # the same curve is asked whether it reaches a goal, and then when
def _crossing_of(curve: Curve, goal: Goal) -> _Crossing | None:
    """Find the crossing within the recorded steps; None if the curve does not get there."""
    sign = 1.0 if goal.is_least else -1.0
    steps, values, wanted = curve.steps.astype(float), sign * curve.values, sign * goal.value
    found = _crossing_at(steps, values, wanted, _parting(values, wanted))
    if found is not None:
        return found
    # It may rise again after a dip, as the loss of a validation does: only its way down counts.
    means, ends = _blocks(values, _DIPS)
    lowest = int(np.argmin(means))
    of_block, noise = len(values) / len(means), _noise(steps, values)
    sure = max(noise / np.sqrt(of_block), _shared(steps, values).deviation(of_block))
    if means[lowest] > wanted - _SURE_OF_DIP * sure:
        return None
    place = _parting(values[: ends[lowest + 1]], wanted)
    by_noise = max(values[:place], default=wanted) < wanted + _SURE_OF_DIP * noise
    begins_there = lowest == 0 and place < _FEWEST and by_noise  # and moves away
    return None if begins_there else _crossing_at(steps, values, wanted, place)


def _parting(values: Floats, wanted: float) -> int:
    """Return the place that parts values best into those above and those below."""
    return int(np.argmax(np.append(0, np.cumsum(np.where(values > wanted, 1, -1)))))


def _crossing_at(steps: Floats, values: Floats, wanted: float, place: int) -> _Crossing | None:
    """Find the crossing near a place."""
    if not 0 < place < len(values):
        return None
    shift = 1 - min(0.0, float(steps[0]))
    logs = np.log(steps + shift)
    near = slice(max(0, place - _NEAR), place + _NEAR)
    noise, shared = _noise(logs[near], values[near]), _shared(steps, values)
    centre = float(logs[place - 1] + logs[place]) / 2
    widths, best = np.log(_WINDOWS), None
    for _ in range(_ROUNDS):
        begins, ends = np.searchsorted(logs, [centre - widths, centre + widths])
        begins = np.minimum(begins, max(0, place - 2))  # two values on each side at least
        ends = np.maximum(ends, min(len(logs), place + 2))
        pairs = zip(begins.tolist(), ends.tolist(), strict=True)
        spans = {(begin, end) for begin, end in pairs if end - begin >= _FEWEST}
        if not spans:
            # Hardly any other value: it crosses on the line between two.
            high, low = values[place - 1], values[place]
            share = (high - wanted) / (high - low) if high > wanted >= low else 1.0
            before, after = float(steps[place - 1]), float(steps[place])
            return _Crossing(float(before + share * (after - before)), before, after)
        fits = []
        for begin, end in sorted(spans):
            own = _AT_PARABOLA**0.5 * shared.deviation(end - begin)
            fits.append(_fit(logs[begin:end], values[begin:end] - wanted, centre, noise, own))
        best = min(fits, key=lambda fit: fit.error).crossing
        if best is None:
            return None
        centre = min(best.at, float(logs[-1]))
        place = min(max(int(np.searchsorted(logs, centre)), 1), len(logs) - 1)
    assert best is not None
    at, low, high = np.exp(best) - shift
    before, after = float(steps[place - 1]), float(steps[place])
    if at > steps[-1] + (after - before):
        return None
    return _Crossing(float(min(at, steps[-1])), float(min(low, before)), float(max(high, after)))


def _noise(logs: Floats, values: Floats) -> float:
    """Return the standard deviation of values around the line between their neighbours."""
    if len(values) < 3:
        return 0.0
    share = (logs[1:-1] - logs[:-2]) / (logs[2:] - logs[:-2])
    off = values[1:-1] - (1 - share) * values[:-2] - share * values[2:]
    off = np.abs(off) / np.sqrt(1 + np.square(share) + np.square(1 - share))
    if len(off) < _BLOCKS:
        return float(np.sqrt(np.mean(np.square(off))))
    return float(np.median(off)) / 0.6745


def _blocks(values: Floats, most: int) -> tuple[Floats, list[int]]:
    """Return the means of the middle halves of blocks, which spikes do not move, and the edges."""
    count = min(len(values), most)
    ends = np.linspace(0, len(values), count + 1).astype(int).tolist()
    means = []
    for begin, end in pairwise(ends):
        first = (end - begin) // 4
        last = end - begin - first
        own = np.partition(values[begin:end], sorted({first, last - 1}))
        means.append(float(own[first:last].mean()))
    return np.array(means), ends


def _fit(logs: Floats, values: Floats, centre: float, noise: float, shared: float) -> _Fit:
    """Fit a parabola to a window, and find where it falls through 0.

    It follows noise that all values of the window share: its height is no surer than `shared`.
    """
    means, ends = _blocks(values, _BLOCKS)
    sizes = np.diff(ends)
    place = np.add.reduceat(logs, ends[:-1]) / sizes - centre
    count = _PARABOLA if len(means) >= _FOR_PARABOLA else 2
    powers = np.vander(place, count, increasing=True)
    own, triangle = np.linalg.qr(powers)
    found = np.linalg.solve(triangle, own.T @ means)
    misses = means - powers @ found
    squares = float(misses @ misses)
    variance = max(squares / (len(means) - count), noise**2 / float(sizes.mean()))
    # A fit takes some of the correlation of its misses away.
    alike = count / len(means) + (float(misses[1:] @ misses[:-1]) / squares if squares else 0.0)
    alike = min(max(alike, 0.0), _MOST_SHARED)
    inverse = np.linalg.inv(triangle)
    covariance = variance * (1 + alike) / (1 - alike) * inverse @ inverse.T

    side = _SIDE * float(place[-1] - place[0])
    grid = np.linspace(place[0] - side, place[-1] + side, _POINTS)
    shapes = np.vander(grid, count, increasing=True)
    heights = shapes @ found
    falls = np.flatnonzero((heights[:-1] > 0) & (heights[1:] <= 0))
    at = int(falls[np.argmin(np.abs(grid[falls]))]) if len(falls) else None
    fall = 0.0 if at is None else float(heights[at] - heights[at + 1])
    step = float(grid[1] - grid[0])
    cross = 0.0 if at is None else float(grid[at] + step * heights[at] / fall)
    bent = 0.0  # the height that one more coefficient would add
    if len(means) >= count + _MORE:
        more = np.linalg.lstsq(np.vander(place, count + 1, increasing=True), means, rcond=None)[0]
        bent = float(np.polynomial.polynomial.polyval(cross, more - np.append(found, 0)))
    error = float(np.hypot(max(float(np.sqrt(covariance[0, 0])), shared), bent))
    if at is None:
        return _Fit(error, None)
    squared = np.einsum("ij,jk,ik->i", shapes, covariance, shapes)
    squared = np.maximum(squared, shared**2) + bent**2
    # The 95th percentile of Student's distribution, by its series in 1 / degrees of freedom.
    degrees = len(means) - count
    first = (NORMAL_90**3 + NORMAL_90) / 4
    second = (5 * NORMAL_90**5 + 16 * NORMAL_90**3 + 3 * NORMAL_90) / 96
    student = NORMAL_90 + first / degrees + second / degrees**2
    band = student * np.sqrt(np.maximum(squared, 0.0))
    off = float(band[at]) * step / fall
    above, below = grid[(grid < cross) & (heights > band)], grid[(grid > cross) & (heights < -band)]
    low = min(cross - off, above[-1] if len(above) else grid[0])
    high = max(cross + off, below[0] if len(below) else grid[-1])
    return _Fit(error, _Crossing(centre + cross, float(centre + low), float(centre + high)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Noise:
    """How much of their noise values share with their neighbours, and how far it reaches."""

    shared: float  # of the variance; the rest is each value's own
    kept: float  # of the shared noise, from one value to the next

    @property
    def in_a_mean(self) -> float:
        """How much more it adds to the variance of a long mean than each value's own noise."""
        return self.shared * (1 + self.kept) / (1 - self.kept) + 1 - self.shared

    @property
    def between_neighbours(self) -> float:
        """The variance around the line between two neighbours, as a share of that of a value."""
        return self.shared * (1 - self.kept) * (3 - self.kept) / 3 + 1 - self.shared

    def in_slow(self, turns: float, count: int) -> float:
        """The part of its variance in changes of fewer turns than these over so many values.

        The shared noise is a Lorentzian around 0 turns, as far as it fades over several values.
        """
        angle = math.pi * min(2 * turns / count, 1.0)
        across = (1 + self.kept) / (1 - self.kept) * math.tan(angle / 2)
        return self.shared * 2 / math.pi * math.atan(across) + (1 - self.shared) * angle / math.pi

    def apart(self, counts: Floats) -> tuple[Floats, Floats]:
        """Return what takes the correlation of neighbouring means away, and their weights.

        Means over more values count more, but by less than their variance says, because no curve
        follows its law as closely as many values tell.
        """
        kept = self.kept
        faded = kept**counts
        among = (1 - faded) / (1 - kept)  # the noise of a stretch at its end, added up
        own = counts * (1 + kept) - 2 * kept * among
        own = self.shared * own / (1 - kept) + (1 - self.shared) * counts
        ends = np.cumsum(counts)
        between = np.maximum((ends - counts)[None, :] - ends[:, None], 0) + 1
        above = np.triu(self.shared * among[:, None] * among[None, :] * kept**between, 1)
        covariance = (above + above.T + np.diag(own)) / np.outer(counts, counts)
        deviations = np.sqrt(np.diag(covariance))
        correlation = covariance / np.outer(deviations, deviations)
        return np.linalg.inv(np.linalg.cholesky(correlation)), deviations.min() / deviations


_ALONE = _Noise(shared=0.0, kept=0.0)


@dataclass(frozen=True, slots=True)
class _Shared:
    """The noise that values of a curve share with their neighbours, as several likely ones."""

    variance: float  # of a value, or of a group's mean, around a smooth trend that follows some
    between: float  # of one around the line between its neighbours, as a deviation
    noises: tuple[_Noise, ...]
    group: float  # values of a group
    count: int = 1  # groups

    def deviation(self, count: float) -> float:
        """Return the standard deviation of the mean of so many values by what they share.

        What a smooth curve misses its trend by is no noise: neighbours then hardly differ.
        """
        groups = max(count / self.group, 1.0)
        variances = [
            min(
                self.variance / max(1 - each.in_slow(_TREND / 2, self.count), _LEAST_LEFT),
                self.between**2 / each.between_neighbours,
            )
            * each.shared
            * min(1.0, (1 + each.kept) / (1 - each.kept) / groups)
            for each in self.noises
        ]
        return float(np.sqrt(np.mean(variances)))


def _shared(steps: Floats, values: Floats) -> _Shared:
    """Tell the shared noise by how far a curve is from a smooth trend."""
    count = min(len(values), _MOST_TOLD)
    begins = np.linspace(0, len(values), count + 1).astype(int)[:-1]
    sizes = np.diff(np.append(begins, len(values)))
    logs = np.log(np.add.reduceat(steps, begins) / sizes + 1 - min(0.0, float(steps[0])))
    means = np.add.reduceat(values, begins) / sizes
    late = steps[begins] >= WARM_UP * steps[-1]
    if np.count_nonzero(late) < _TREND * _FEWEST:
        return _Shared(0.0, 0.0, (_ALONE,), 1.0)
    logs, means = logs[late], means[late]
    trend = np.polynomial.Polynomial.fit(logs, means, _TREND)
    off = means - trend(logs)
    most = _CUT * float(np.median(np.abs(off))) / 0.6745
    off = np.clip(off, -most, most)
    noises = tuple(_noises_of(off, _OF_TREND))
    return _Shared(float(off.var()), _noise(logs, off), noises, len(values) / count, len(off))


def _noises_of(off: Floats, slowest: int = _SLOWEST) -> list[_Noise]:
    """Tell a few likely noises from how far values are from their law; each is as likely.

    Shared noise is strong in slow changes, and each value's own is the same in all. So a little
    shared noise shows, though it hardly correlates two values. The law follows the slowest changes
    itself, which are left out. Few values do not tell their noise well: the few that are taken
    spread over all that are likely, by how much they add to a long mean.
    """
    power = np.square(np.abs(np.fft.rfft(off - off.mean())))[slowest:]
    if len(power) < FEWEST or not power.any():
        return [_ALONE]
    turn = np.cos(2 * np.pi * np.arange(slowest, slowest + len(power)) / len(off))
    fades = np.geomspace(_QUICKEST, min(_QUICKEST, max(_FEWEST_LENGTHS / len(off), 1e-3)), _FADES)
    noises = [_ALONE] + [
        _Noise(shared=shared, kept=1 - float(fade)) for shared in _SHARES for fade in fades
    ]
    likely = np.empty(len(noises))
    for place, noise in enumerate(noises):
        kept = noise.kept
        shape = 1 - noise.shared + noise.shared * (1 - kept**2) / (1 - 2 * kept * turn + kept**2)
        likely[place] = -np.log(shape).sum() - len(power) * np.log((power / shape).mean())
    weight = np.exp(likely - likely.max())
    weight[0] *= len(noises) - 1  # noise without neighbours is as usual as all other
    order = np.argsort([noise.in_a_mean for noise in noises])
    reached = np.cumsum(weight[order]) / weight.sum()
    middles = (np.arange(_NOISES) + 0.5) / _NOISES
    return [noises[order[place]] for place in np.searchsorted(reached, middles).tolist()]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Extended:
    """The power laws of a curve: v = level + scale ((t + delay) / (last + delay))^-power."""

    level: Floats
    scale: Floats
    power: Floats
    delay: Floats
    weight: Floats  # adds up to 1
    misses: float  # of the best one, at the means: standard deviation, in spans of the curve
    last: float  # the middle of the last stretch, in steps

    @property
    def flattens(self) -> float:
        """The level below which a curve goes on as surely as a forecast asks for."""
        order = np.argsort(-self.level)
        above = np.cumsum(self.weight[order]) > MOST_NOT_REACHING
        return float(self.level[order[np.argmax(above)]])

    def reached(self, wanted: float) -> list[float]:
        """Return the middle, the low and the high end of the steps to a value."""
        there = self.level < wanted
        times, delay = self.scale[there] / (wanted - self.level[there]), self.delay[there]
        needed = (self.last + delay) * times ** (1 / self.power[there]) - delay
        order = np.argsort(needed)
        reached = np.cumsum(self.weight[there][order])
        ends = np.interp((0.5, 0.05, 0.95), reached / reached[-1], np.log(needed[order]))
        return [float(end) for end in np.exp(ends)]


@lru_cache(maxsize=64)  # the same curve is asked for many goals
def _extended(curve: Curve, is_least: bool) -> tuple[_Extended, _Extended] | None:
    """Fit power laws without and with a delay to a falling curve; None if it does not fall."""
    steps, values = curve.steps.astype(float), (1.0 if is_least else -1.0) * curve.values
    late = steps >= WARM_UP * steps[-1]
    late_steps, late_values = np.maximum(steps, 1.0)[late], values[late]
    times, means, counts = _stretches(late_steps, late_values)
    third = max(2, len(means) // 3)
    scatter = float(np.std(np.diff(means[third:]))) if len(means) > third + 2 else 0.0
    span = float(means[0] - means[-1])
    if not span > 2 * scatter or span <= 0:
        return None
    shared = _shared(steps, values)
    # The law is wrong by as much as it misses beyond what noise explains.
    noise = float(np.square(_noise(steps[late], late_values)) * np.mean(1 / counts))
    noise += float(np.mean([shared.deviation(count) ** 2 for count in counts.tolist()]))
    delay, power = (grid.reshape(-1) for grid in np.meshgrid(_DELAYS, _POWERS))
    delay *= steps[-1]
    laws = _Laws(
        times=times, means=means, counts=counts, span=span, noise=noise, power=power, delay=delay
    )
    plain = replace(laws, power=power[delay == 0], delay=delay[delay == 0])
    return plain.extended(late_steps, late_values), laws.extended(late_steps, late_values)


class _Fitted(NamedTuple):
    """Laws of each shape in rows, and each level in columns."""

    scale: Floats
    weight: Floats  # adds up to 1
    best: tuple[int, int]
    misses: float  # of the best one


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Laws:
    """The means of a curve, and the shapes that they may have: powers, each with a delay."""

    times: Floats
    means: Floats
    counts: Floats
    span: float
    noise: float  # the variance of the means by noise
    power: Floats
    delay: Floats

    def extended(self, steps: Floats, values: Floats) -> _Extended:
        """Weigh the laws by several likely noises of the values."""
        first = self.fitted(_ALONE)  # a fit tells the noise, and the noise weighs the next fits
        shape, at = first.best
        law = first.scale[first.best] * self._shapes(steps, slice(shape, shape + 1))[0]
        level = self.means.min() - self.span * _LEVELS
        fits = [self.fitted(noise) for noise in _noises_of(values - level[at] - law)]
        weight = np.stack([fit.weight for fit in fits])
        kept = _, of_shape, of_level = np.nonzero(weight > _LEAST_WEIGHT * weight.max())
        return _Extended(
            level=level[of_level],
            scale=np.stack([fit.scale for fit in fits])[kept],
            power=self.power[of_shape],
            delay=self.delay[of_shape],
            weight=weight[kept] / weight[kept].sum(),
            misses=fits[len(fits) // 2].misses / self.span,
            last=float(self.times[-1]),
        )

    def _shapes(self, steps: Floats, which: slice) -> Floats:
        """Return the height of laws above their level, in relation to that at the last time."""
        delay, power = self.delay[which, None], self.power[which, None]
        return np.asarray(((steps + delay) / (self.times[-1] + delay)) ** -power)

    def fitted(self, noise: _Noise) -> _Fitted:
        """Weigh the laws as this noise tells."""
        apart, share = noise.apart(self.counts)
        shapes = self._shapes(self.times, slice(None))
        heights = self.means - self.means.min() + self.span * _LEVELS[:, None]
        fitted, left = ((rows * np.sqrt(share)) @ apart.T for rows in (shapes, heights))
        of_shape = np.square(fitted).sum(axis=1)[:, None]
        scale = fitted @ left.T / of_shape
        squares = np.maximum(np.square(left).sum(axis=1) - np.square(scale) * of_shape, 0.0)
        best, count = divmod(int(np.argmin(squares)), len(left)), len(self.counts)
        off = heights[best[1]] - scale[best] * shapes[best[0]]
        squared = float(share @ np.square(off)) / float(share.sum())
        misses = max(squared - _OF_NOISE * self.noise, 0.0)
        # Neighbours that miss alike tell less than their number.
        off, least = apart @ off, (_MISFIT * self.span) ** 2
        shared = float(off[1:] @ off[:-1] / max(off @ off, 1e-300)) if misses > least else 0.0
        told = (1 - max(shared, 0.0)) / (1 + max(shared, 0.0))
        likely = -told * (count - 3) / 2 * np.log(squares + least * count)
        weight = np.exp(likely - likely.max()) * np.where(self.delay == 0, 1.0, _OF_DELAY)[:, None]
        return _Fitted(scale, weight / weight.sum(), best, misses**0.5)


def _forecast(curve: Curve, goal: Goal) -> Reach | _Refused:
    """Extend a curve to a value that it has not reached."""
    if curve.lost_at is not None:
        return _Refused(f", and {curve.name} is not a number from step {curve.lost_at} on")
    if len(curve.values) < FEWEST:
        return _Refused(f" in {len(curve.values)} values, expected {FEWEST} for a forecast")
    if curve.steps[-1] <= 0:
        return _Refused(f" by {curve.unit} {curve.steps[-1]:g}, expected {curve.unit}s above 0")
    laws = _extended(curve, goal.is_least)
    if laws is None:
        return _Refused(": the metric stays, or moves away from it")
    # With a delay, a power law comes near any curve that falls, and does not tell how it goes on.
    if laws[0].misses > MOST_MISSES:
        return _Refused(
            f", and there is no forecast: {curve.name} misses the power law that fits best by "
            f"{laws[0].misses:.1%} of its fall, more than its noise explains"
        )
    sign = 1.0 if goal.is_least else -1.0
    last, flat = float(curve.steps[-1]), max(each.flattens for each in laws)
    if flat >= sign * goal.value:
        digits = 6 if f"{sign * flat:.3g}" == f"{goal.value:.3g}" else 3
        return _Refused(
            f" by {curve.unit} {last:.0f}. The curve may flatten as early as at "
            f"{sign * flat:.{digits}g}, before it gets there",
            says_later=True,
        )
    middles, lows, highs = zip(*(each.reached(sign * goal.value) for each in laws), strict=True)
    low = min(lows)
    # Noise that neighbours share may hide that the law has got there; the recording ends above it.
    middle, high, later = max(middles[-1], last), max(*highs, last), max(low, last)
    if high > WIDEST * later:
        return _Refused(
            f" by {curve.unit} {last:.0f}. The forecast is too wide to use: "
            f"{curve.unit}s {later:,.0f} to {show_number(high)}",
            says_later=True,
        )
    return Reach(steps=middle, low=low, high=high, recorded=int(last), is_forecast=True)


def _stretches(steps: Floats, values: Floats) -> tuple[Floats, Floats, Floats]:
    """Return means over stretches of steps, each longer than the one before by the same factor."""
    edges = np.geomspace(steps[0], steps[-1] * 1.0001, _STRETCHES + 1)
    _, place = np.unique(np.searchsorted(edges, steps, side="right"), return_inverse=True)
    counts = np.bincount(place)
    means = np.bincount(place, steps) / counts, np.bincount(place, values) / counts
    return *means, counts.astype(float)
