"""Fit a transport to a run's own collectives, which it carried.

    Run --> busy periods --> MeasuredTransport, and how sure that is

A busy period is a time in which some collective was on its way. It begins when the last rank issues
a collective while none is on its way. It ends with the last collective that was issued meanwhile.
Gloo sends two at a time, so single durations overlap. The contents and the length of a period do
not depend on the order inside. Periods with equal contents are one observation, by its median.
All periods are of one rank: where ranks form groups, others send over other links meanwhile.

The four numbers of a transport are fitted to all observations at once, in logarithms. Prior
knowledge enters as observations of its own, each with its uncertainty. It includes the share of the
line rate that headers leave, and the processor time that the ranks' communication threads have
used. So even a run on a slow line, which never loads its processors fully, tells their speed,
less surely. Beside computing on the same processors, messages wait for a processor by turns with
it. So periods beside computing tell less of the work for messages, as far as those clocks tell it.

Beside other programs, some messages wait for a processor. Medians leave that out, and whole steps
tell it. Any transport there waits as long for each message in a row.

Two uncertainties make the prediction's interval wider. One is left by the fit. The other is that a
run of any length shows the line and the processors only as they were while it lasted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fullwire.collectives.closed_form import half_a_part, recorded_cost, sent_as
from fullwire.collectives.cost import AddTimes, Floats
from fullwire.errors import UsageError
from fullwire.run.centre import median_of
from fullwire.run.kinds import kinds_of
from fullwire.run.placement import Placement, placement_of, sums_on_processors
from fullwire.run.processors import KERNEL_FACTOR, own_work_s, share_of_others
from fullwire.run.run import Run
from fullwire.simulation.groups import Held, Period, busy_periods, computing_s, members_of
from fullwire.simulation.transport import MeasuredTransport

MUCH_BESIDE = 0.15  # of the processors, in other work: samples and clocks agree to a tenth
_LEAST_SPREAD = 0.02  # the least spread of an observation
_START_S = 2e-3  # likewise, in seconds: idle connections take a moment to be up to speed
# What a period takes longer that is all beside computing, which may have most of the processors: a
# standard deviation of its logarithm. Chosen on labs of two to four ranks on two processors.
_BESIDE_COMPUTING = 1.0
_ROUNDS = 40  # of Gauss and Newton: a handful is enough, more cost nothing


@dataclass(frozen=True, eq=False, slots=True)
class _Known:
    """A number and how sure it is, as the standard deviation of its logarithm."""

    value: float
    spread: float

    def off_by(self, spreads: float) -> float:
        """Return the value that is off by so many of its spreads."""
        return float(self.value * np.exp(spreads * self.spread))

    def times(self, other: _Known) -> _Known:
        """Return the product of both, which are independent."""
        return _Known(self.value * other.value, float(np.hypot(self.spread, other.spread)))


# Part of Gloo's work is outside the clocks of its threads. Where processors hold a message up, it
# takes so many times the threads' time. This and Gloo's three numbers below were chosen on labs.
_KERNEL_FACTOR = _Known(KERNEL_FACTOR, 0.08)
# A byte takes less work of processors that are idle most of the time: two of them share caches,
# memory, and often a core. So the same bytes take so much more where processors hold them up. Where
# they compute as well, the job's data fills the caches, and bytes take this much more besides. Both
# are so unsure (docs/design/measured-transport.md).
_MORE_WHERE_BUSY, _MORE_WHERE_COMPUTING, _MORE_OFF = 0.25, 0.55, 0.25
# On slower lines than this, TCP sends about as much at a time as a millisecond of the line holds,
# and not 64 KiB. So Gloo's threads wake up more often for the same bytes. Their work grows by this
# power of the line's slowness, and each e-fold of it is so unsure.
_SMALLER_SEGMENTS_BELOW_BPS, _BY_SLOWNESS, _SLOWNESS_OFF = 600e6, 0.5, 0.2
SHARE_OF_PAYLOAD = _Known(0.997, 0.02)  # acknowledgements take the rest
_APART = _Known(0.28, 0.3)  # of Gloo's work; the work of other transports is too little to matter
PAYLOAD_SHARE = 1448 / 1514  # of a 1500 byte MTU, the default
_GLOO_GATHERS_LATE = 0.9  # of those between two ranks: 0.89 to 0.97 on 0.2 to 1 Gbps
_GLOO_S_PER_BYTE = _Known(1.0e-9, 0.4)
_GLOO_S_PER_HOP = _Known(0.4e-3, 0.4)
_OTHER_S_PER_BYTE = _Known(1.0e-11, 1.5)  # of unknown transports, and those that are mixed
_OTHER_S_PER_HOP = _Known(20e-6, 1.5)
# Devices send and add by their own kernels. H100 and H200 do so at 84 % of 450 GB/s, by the public
# tables behind collectives/library.py. B200 and its like are quicker (72 % of 900 GB/s), and A100
# slower (76 % of 300 GB/s), so the spread is half the logarithm between these two and a little.
_DEVICE_S_PER_BYTE = _Known(1 / (0.84 * 450e9), 0.6)

# How much the share of the line and the processors' work differ between runs of the same job on the
# same machine, hours apart. They are standard deviations of logarithms (validation/README.md).
LINE_FROM_RUN_TO_RUN = 0.018
_WORK_FROM_RUN_TO_RUN = 0.06

# Our transport's work for a byte, as a share of Gloo's on the same processors. All of it is done
# while something is on the line. Chosen on labs of two and four ranks (validation/README.md).
OURS_OF_GLOOS_WORK = _Known(0.88, 0.2)
# Our transport's cost of a message in a row, as a share of Gloo's on the same processors: 0.03
# where each rank has a processor of its own, and up to 0.2 elsewhere.
OURS_OF_GLOOS_HOP = _Known(0.05, 0.7)
OURS_APART = _Known(0.05, 1.0)  # next to none of it waits for the line to be idle


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Observation:
    """The time of busy periods that held the same collectives, under the same conditions."""

    workers: int
    crowd: float  # of ranks on each processor, one at the least
    rate_bps: float
    wire_bytes: tuple[float, ...]
    hops: tuple[float, ...]
    halves: tuple[float, ...]  # of a rank's part, as shares of a gather's bytes
    time_s: float
    spread: float  # of the median's logarithm
    longer: float  # another spread: computing beside it may have added so much
    count: int

    def off_and_spread(self, predicted_s: float) -> tuple[float, float]:
        """Return the logarithm of a prediction over it, and the spread of that.

        Computing makes times longer, so a prediction that is shorter may be off by more.
        """
        off = float(np.log(predicted_s / self.time_s))
        return off, self.spread if off > 0 else float(np.hypot(self.spread, self.longer))


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Calibration:
    """A fitted transport, the observations behind it, and other transports that fit as well.

    The two of `between` are fits for a usual step as short, and as long, as the runs' steps allow.
    """

    transport: MeasuredTransport
    placement: Placement  # of the largest of the runs
    observations: tuple[Observation, ...]
    misfit: float  # of a busy period's predicted time: standard deviation of its logarithm
    variants: tuple[MeasuredTransport, ...]
    between: tuple[MeasuredTransport, MeasuredTransport]
    work_off: float  # how much other runs' work may differ: standard deviation of its logarithm
    fit: _Fit  # what it was fitted to
    is_played: bool = False  # to simulated runs alone, which show no scatter
    wait_s_per_hop: float = 0.0  # for processors that other programs had: on any transport

    def after_another(self, rate_bps: float) -> Calibration:
        """Return the calibration that one more recording at this line rate is likely to give.

        The job, its processors and the other work beside it are as recorded, and the periods take
        as long as this calibration predicts.
        """
        return self.fit.with_another(self.transport, rate_bps).solved()

    def beside_nothing(self) -> Calibration:
        """Return the calibration that the same recording is likely to give without other work."""
        return self.fit.with_quiet_processors().solved()


def calibrated(runs: Sequence[Run]) -> Calibration:
    """Fit a transport to the collectives of one run, or of several from the same cluster."""
    kept_of: list[tuple[Run, list[Period]]] = []  # the other runs have no busy periods
    for run in runs:
        if line_rate_bps(run) is not None and _workers(run) > 1:
            fewest = 1 if _is_played(run) else 2
            if kept := list(busy_periods(run, members_of(run), fewest)):
                kept_of.append((run, kept))
    if not kept_of:
        names = ", ".join(run.place for run in runs)
        raise UsageError(
            f"{names}: nothing is known about the transport. Expected collectives of several "
            "ranks, from each of them, on links of a known line rate. --calibrate RUN takes them "
            "from another run"
        )
    telling = [run for run, _ in kept_of]
    used = [_used_in(run, kept) for run, kept in kept_of]
    observed = [
        list(_observed(run, kept, own)) for (run, kept), own in zip(kept_of, used, strict=True)
    ]
    by_step_s = [_by_step_s(run, kept) for run, kept in kept_of]
    fit = _Fit(
        [observation for each in observed for observation in each],
        [own for own in used if own is not None],
        list(_known_before(telling)),
        _placement(max(telling, key=_workers)),
        _GLOO_GATHERS_LATE if {run.facts.backend for run in telling} == {"gloo"} else 0.0,
        by_step_s,
        _work_off(telling),
    )
    found = fit.solved()
    waits_s = [
        _wait_s_per_hop(found, *each) for each in zip(telling, by_step_s, observed, strict=True)
    ]
    is_played = all(map(_is_played, telling))
    return replace(found, is_played=is_played, wait_s_per_hop=float(np.mean(waits_s)))


def _wait_s_per_hop(
    fitted: Calibration, run: Run, steps_s: Sequence[float], observed: Sequence[Observation]
) -> float:
    """Return how long messages in a row waited for processors that other programs had, each.

    It is what the messages of a step took beyond their fit, which is of medians. A thread waits for
    the others' share of the time, so more than that share has another cause.
    """
    whole_s = median_of(steps_s).value * len(steps_s)
    fitted_s = 0.0
    for one in observed:
        predicted_s = fitted.fit.predicted_s(fitted.transport, one)
        # Computing may have made it longer, by as much as it is.
        fitted_s += one.count * (max(predicted_s, one.time_s) if one.longer else predicted_s)
    hops = sum(sum(one.hops) * one.count for one in observed)
    return max(min(whole_s - fitted_s, share_of_others(run) * whole_s), 0.0) / max(hops, 1.0)


def held_against(calibration: Calibration, runs: Sequence[Run]) -> Calibration:
    """Return the calibration, made less sure by the other work that ran beside these runs."""
    return replace(
        calibration, work_off=float(np.hypot(calibration.work_off, _off_beside_others(runs)))
    )


def _work_off(runs: Sequence[Run]) -> float:
    """Return how far other runs' work may be off: as far as usual, and from others' share."""
    return float(np.hypot(_WORK_FROM_RUN_TO_RUN, _off_beside_others(runs)))


def _off_beside_others(runs: Sequence[Run]) -> float:
    """Return how far work is off that had to share: a standard deviation of its logarithm.

    It takes at least its own time, and at most that time on the share that others left.
    """
    shares = [share_of_others(run) for run in runs]
    return float(np.mean([-np.log(1 - share) for share in shares])) / 2


def _workers(run: Run) -> int:
    return run.facts.workers or 1


def _placement(run: Run) -> Placement:
    """Return where the ranks of a job were; where that is unknown, each has a machine."""
    ranks = _workers(run)
    return placement_of(run) or Placement(ranks=ranks, machines=run.facts.machines or ranks)


def _crowd(run: Run) -> float:
    """Return how many ranks shared each processor, one at the least."""
    [ranks] = _placement(run).ranks_per_processor([_workers(run)]).tolist()
    return max(float(ranks), 1.0)


def _is_played(run: Run) -> bool:
    """Say whether the run is simulated on a measured transport: its one rank stands for all."""
    return run.provenance.origin == "simulated" and run.facts.transport == "measured"


def _observed(run: Run, periods: Sequence[Period], used: _Used | None) -> Iterator[Observation]:
    rate_bps, workers, crowd = line_rate_bps(run), _workers(run), _crowd(run)
    # Computing makes no time of the line longer, and without clocks nothing else tells the work.
    most_longer = 0.0 if used is None else _BESIDE_COMPUTING * (1 - used.idle_share)
    alike: dict[Held, list[Period]] = defaultdict(list)
    for period in periods:
        alike[period.held].append(period)
    for held, each in alike.items():
        times_s = [period.time_s for period in each]
        assert rate_bps is not None  # else there are no periods
        costs = [
            recorded_cost(sent_as(op, run.facts.backend), members, size, AddTimes())
            for op, size, members in held
        ]
        middle_s = float(np.median(times_s))
        deviation = 1.4826 * float(np.median(np.abs(np.log(np.array(times_s) / middle_s))))
        # A lone value has no spread of its own. Busy machines show 15 %.
        of_median = 1.25 * max(deviation, 0.15 / len(times_s)) / np.sqrt(len(times_s))
        spreads = _LEAST_SPREAD, of_median, _START_S / middle_s
        yield Observation(
            workers=workers,
            crowd=crowd,
            rate_bps=rate_bps,
            time_s=middle_s,
            count=len(times_s),
            wire_bytes=tuple(float(cost.wire_bytes) for cost in costs),
            hops=tuple(float(cost.hops) for cost in costs),
            halves=tuple(half_a_part(op, members) for op, _, members in held),
            spread=float(np.linalg.norm(spreads)),
            longer=most_longer * float(np.mean([period.beside for period in each])),
        )


def _by_step_s(run: Run, periods: Sequence[Period]) -> list[float]:
    """Return how long each step communicates; a kind of steps counts as the mean of all kinds."""
    steps, place = np.unique([period.step for period in periods], return_inverse=True)
    times_s = np.zeros(len(steps))
    np.add.at(times_s, place, [period.time_s for period in periods])
    found: list[float] = kinds_of(run).as_mean(steps, times_s).tolist()
    return found


def line_rate_bps(run: Run) -> float | None:
    """Return the line rate of the slowest link, which is the one that a ring runs at."""
    rate_bps = run.facts.line_rate_bps
    if rate_bps is None:
        return None
    others = run.facts.other_line_rates_bps or ()
    workers = _workers(run)
    usual = [rate_bps] if len(others) != workers else []
    return min([*usual, *(other_bps for _, other_bps in others)])


def _known_before(runs: Sequence[Run]) -> Iterator[_Known]:
    """Go through the prior values of the four numbers, before any observation."""
    payload = [run.facts.payload_share or PAYLOAD_SHARE for run in runs]
    share = float(np.mean(np.array(payload, np.float64)))
    yield replace(SHARE_OF_PAYLOAD, value=SHARE_OF_PAYLOAD.value * share)
    backends = {run.facts.backend for run in runs}
    if backends == {"gloo"}:
        yield from (_GLOO_S_PER_BYTE, _GLOO_S_PER_HOP, _APART)
    elif backends == {"fullwire"}:
        yield _GLOO_S_PER_BYTE.times(OURS_OF_GLOOS_WORK)
        yield _GLOO_S_PER_HOP.times(OURS_OF_GLOOS_HOP)
        yield OURS_APART
    elif all(run.facts.backend and not sums_on_processors(run) for run in runs):
        yield from (_DEVICE_S_PER_BYTE, _OTHER_S_PER_HOP, _APART)
    else:
        yield from (_OTHER_S_PER_BYTE, _OTHER_S_PER_HOP, _APART)


@dataclass(frozen=True, eq=False, slots=True)
class _Used:
    """The time that a rank's communication threads used in a step, and the bytes that it sent."""

    wire_bytes: float
    hops: float
    processor_s: float
    idle_share: float  # of the time of messages: they held no processor
    computing_share: float  # of the processors, in use while ranks compute
    rate_bps: float

    def misfit(self, s_per_byte: float, s_per_hop: float) -> float:
        """Return how far this work for bytes and messages is from the used time, in spreads."""
        idle = self.idle_share**2
        more_where_busy = _MORE_WHERE_BUSY + _MORE_WHERE_COMPUTING * self.computing_share
        slowness = max(_SMALLER_SEGMENTS_BELOW_BPS / self.rate_bps, 1.0)
        here = slowness**_BY_SLOWNESS / (1 + more_where_busy * idle)
        work_s = self.wire_bytes * s_per_byte * here + self.hops * s_per_hop
        usual_s = self.wire_bytes * _GLOO_S_PER_BYTE.value, self.hops * _GLOO_S_PER_HOP.value
        of_bytes = usual_s[0] / sum(usual_s)
        off = np.hypot(_MORE_OFF * idle, _SLOWNESS_OFF * np.log(slowness)) * of_bytes
        spread = np.hypot(_KERNEL_FACTOR.spread, off)
        return float(np.log(_KERNEL_FACTOR.value * self.processor_s / work_s) / spread)


def _used_in(run: Run, periods: Sequence[Period]) -> _Used | None:
    per_rank, rate_bps = run.facts.communication_processor_s, line_rate_bps(run)
    if run.facts.backend != "gloo" or per_rank is None:
        return None  # other backends poll, and use all the time they get
    rows = run.collectives.rows(run.collectives.step >= 0)
    processor_s = float(np.mean([used_s for _, used_s in per_rank]))
    if rate_bps is None or not len(rows) or not processor_s:  # a clock may be too coarse for it
        return None
    rank_steps = len(np.unique(np.stack([rows.rank, rows.step]), axis=1).T)
    by_name = members_of(run)
    members = np.array([by_name[name] for name in rows.group.astype(str).tolist()])
    costs = [
        recorded_cost(
            sent_as(op, "gloo"), count, rows.bytes[(rows.op == op) & (members == count)], AddTimes()
        )
        for op, count in dict.fromkeys(zip(rows.op.tolist(), members.tolist(), strict=True))
    ]
    work_s = KERNEL_FACTOR * processor_s * _crowd(run)
    return _Used(
        wire_bytes=sum(float(cost.wire_bytes.sum()) for cost in costs) / rank_steps,
        hops=sum(cost.hops * cost.wire_bytes.size for cost in costs) / rank_steps,
        processor_s=processor_s,
        idle_share=max(1 - work_s / float(np.mean(_by_step_s(run, periods))), 0.0),
        computing_share=_share_of_computing(run),
        rate_bps=rate_bps / (run.facts.dilation or 1.0),
    )


def _share_of_computing(run: Run) -> float:
    """Return the share of the processors that ranks and other programs use while ranks compute."""
    own = own_work_s(run) * _crowd(run) / max(computing_s(run), 1e-9)
    return float(min(own + share_of_others(run), 1.0))


class _Fit:
    """Four logarithms, and the observations that they have to agree with."""

    def __init__(
        self,
        observations: Sequence[Observation],
        used: Sequence[_Used],
        known: Sequence[_Known],
        placement: Placement,
        gathers_late: float,
        runs: Sequence[Sequence[float]],  # how long each step communicates
        work_off: float,
        *,
        seen: int | None = None,
    ) -> None:
        self._observations = observations
        self._seen = len(observations) if seen is None else seen  # the others are supposed
        self._used = used
        self._known = known
        self._placement = placement
        self._gathers_late = gathers_late
        self._runs = runs
        self._work_off = work_off

    def solved(self) -> Calibration:
        """Find the transport that agrees best, by Gauss and Newton, and those nearly as good."""
        at = np.log([free.value for free in self._known])
        for _ in range(_ROUNDS):
            misfits, slopes = self._misfits(at), self._slopes(at)
            if not (np.isfinite(misfits).all() and np.isfinite(slopes).all()):
                raise UsageError(
                    "expected times that a transport can have, got collectives that none fits"
                )
            change = np.linalg.lstsq(slopes, -misfits, rcond=None)[0]
            at = at + np.clip(change, -0.5, 0.5)
            if np.abs(change).max() < 1e-9:
                break
        recorded = self._observations[: self._seen]
        transport = self._transport(at)
        relative, spreads = np.array(
            [each.off_and_spread(self.predicted_s(transport, each)) for each in recorded]
        ).T
        weights = np.array([each.count * each.time_s for each in recorded])
        # Computing explains what it may have added.
        unexplained = relative * np.array([each.spread for each in recorded]) / spreads
        misfit = float(np.sqrt(np.average(unexplained**2, weights=weights)))
        slopes = self._slopes(at)
        among_runs = np.diag([LINE_FROM_RUN_TO_RUN**2, 0.0, 0.0, 0.0])
        among_runs[1:3, 1:3] = self._work_off**2
        covariance = np.linalg.inv(slopes.T @ slopes) + among_runs / len(self._runs)
        lengths, axes = np.linalg.eigh(covariance)
        turns = [
            sign * np.sqrt(max(length, 0.0)) * axis
            for length, axis in zip(lengths, axes.T, strict=True)
            for sign in (-1, 1)
        ]
        # Longer periods have a slower line, or slower processors, as far as each decides them.
        by_line, *by_work, _ = (weights * spreads) @ slopes[: self._seen] / weights.sum()
        slower = np.array([by_line, *2 * [sum(by_work)], 0.0])
        slower = np.clip(slower / (by_line**2 + sum(by_work) ** 2), -1.0, 1.0)
        turns += [sign * misfit * slower for sign in (-1, 1)]
        # How far below and above the usual time of a step's periods may be.
        usual_s = [median_of(steps_s) for steps_s in self._runs]
        ends = np.log([[each.low / each.value, each.high / each.value] for each in usual_s])
        below, above = np.linalg.norm(ends, axis=0) / len(usual_s)
        sooner, later = self._transport(at - below * slower), self._transport(at + above * slower)
        return Calibration(
            transport=transport,
            placement=self._placement,
            observations=tuple(self._observations),
            misfit=misfit,
            variants=tuple(self._transport(at + turn) for turn in turns),
            between=(sooner, later),
            work_off=self._work_off,
            fit=self,
        )

    def with_another(self, transport: MeasuredTransport, rate_bps: float) -> _Fit:
        """Return the fit to one more recording like the first, on links of another rate."""
        first = self._observations[0]
        supposed = [
            replace(
                observation,
                rate_bps=rate_bps,
                time_s=predicted_s,
                spread=float(np.hypot(observation.spread, observation.longer)),
                longer=0.0,
            )
            for observation in self._observations
            if (observation.rate_bps, observation.workers) == (first.rate_bps, first.workers)
            for predicted_s in [
                self.predicted_s(transport, replace(observation, rate_bps=rate_bps))
            ]
        ]
        return _Fit(
            [*self._observations, *supposed],
            [*self._used, *self._used[:1]],
            self._known,
            self._placement,
            self._gathers_late,
            [*self._runs, self._runs[0]],
            self._work_off,
            seen=self._seen,
        )

    def with_quiet_processors(self) -> _Fit:
        """Return the fit to the same recordings, had no other work run beside them."""
        return _Fit(
            self._observations,
            self._used,
            self._known,
            self._placement,
            self._gathers_late,
            self._runs,
            min(self._work_off, _WORK_FROM_RUN_TO_RUN),
            seen=self._seen,
        )

    def _transport(self, at: Floats) -> MeasuredTransport:
        share, per_byte, per_hop, apart = np.exp(at).tolist()
        return MeasuredTransport(
            share=min(share, 1.0),
            processor_s_per_byte=per_byte,
            processor_s_per_hop=per_hop,
            apart=apart,
            gathers_late=self._gathers_late,
        )

    def predicted_s(self, transport: MeasuredTransport, observed: Observation) -> float:
        """Return how long periods like the observed ones take on a transport."""
        wire_bytes, hops = np.array(observed.wire_bytes), np.array(observed.hops)
        line_s = 8 * wire_bytes / (observed.rate_bps * transport.share)
        line_s = line_s * (1 + transport.gathers_late * np.array(observed.halves))
        crowd = np.array(observed.crowd)
        return float(transport.message_s(line_s, wire_bytes, hops, crowd).sum())

    def _misfits(self, at: Floats) -> Floats:
        """Return how far each prediction is from its observation, in the observation's spreads."""
        transport, seen = self._transport(at), []
        for observed in self._observations:
            off, spread = observed.off_and_spread(self.predicted_s(transport, observed))
            seen.append(off / spread)
        _, per_byte, per_hop, _ = np.exp(at).tolist()
        used = [one.misfit(per_byte, per_hop) for one in self._used]
        before = [
            (value - np.log(known.value)) / known.spread
            for value, known in zip(at, self._known, strict=True)
        ]
        return np.array([*seen, *used, *before])

    def _slopes(self, at: Floats) -> Floats:
        step = 1e-3  # shorter ones leave digits that differ from processor to processor
        columns = [
            (self._misfits(at + step * axis) - self._misfits(at - step * axis)) / (2 * step)
            for axis in np.eye(len(at))
        ]
        return np.stack(columns, axis=1)
