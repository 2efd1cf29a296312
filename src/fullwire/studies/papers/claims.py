"""Each claim of the two papers as a row: our measurement, the judgement, and its reason.

Zhang et al. is "Is Network the Bottleneck of Distributed Training?" (NetAI 2020), Farhat & Ghobadi
"Communication Patterns in Distributed Deep Learning" (MIT). Each row has its rule below. A claim
is "not measured" if the trials are missing, or if their data leaves the answer open.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from fullwire.answers.whatif import whatif
from fullwire.studies.papers.explained import Explained
from fullwire.studies.papers.figures import PAPER_WORKERS, alone
from fullwire.studies.papers.measures import NOBODY, Measured
from fullwire.studies.papers.predicted import Predicted
from fullwire.studies.papers.trials import V100S, Trial
from fullwire.units import show_bytes, show_rate, show_time

Holds: TypeAlias = Literal["yes", "no", "in part", "not measured"]
Basis: TypeAlias = Literal["measured", "modelled", "measured and modelled", ""]

WELL_BELOW = 0.9  # A scaling factor that is "far from linear" is below this.
STEADY = 0.15  # Share of computation time: a smaller change counts as "does not change".
# Shares of the line rate while communicating: "leaves it idle" is below, "fills it" is above.
IDLE, FULL = 0.75, 0.85
NOT_BUSY = 0.5  # Share of the processors: below this they are no bottleneck.
WANTED = 0.95  # A job with this scaling factor needs no faster network.
# Shares of the step: within the first a prediction "agrees", beyond the second it is far off.
AS_PREDICTED, GAP = 0.05, 0.10
# Our own predictions: median error, and the share of true values inside the interval.
USUALLY, HELD = 0.02, 0.9
SLOPE = 0.01  # Relative error allowed for 2(N-1)/N, besides HEADERS.
# Extra bytes that interface counters may hold besides payload: packet headers.
HEADERS = 1514 / 1448 - 1
MOST_OF_IT = 0.8  # Share of the variance: above this, one condition alone decides.

Z, F, OURS = "Zhang et al.", "Farhat & Ghobadi", "Fullwire"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One claim, judged on this machine."""

    key: str
    paper: str
    claim: str
    measured: str
    holds: Holds
    why: str  # it does not hold, or under which conditions it does
    basis: Basis


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Findings:
    """All data that claims are judged by."""

    measured: Sequence[Measured]
    predicted: Sequence[Predicted]
    explained: Sequence[Explained]

    def undilated(self, kind: str) -> list[Measured]:
        """Return the trials of this kind at the machine's own speed, uncompressed."""
        return [
            result
            for result in self.measured
            if result.trial.kind == kind
            and result.trial.dilation == 1
            and result.trial.compression == 1
            and not result.trial.half
        ]

    def dilated(self) -> list[Measured]:
        """Return the trials of several workers that stand for faster processors, uncompressed."""
        return [
            result
            for result in self.measured
            if result.trial.dilation > 1
            and result.trial.workers > 1
            and result.trial.compression == 1
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judgement:
    """A rule's judgement of its claim."""

    measured: str
    holds: Holds
    why: str
    basis: Basis


_Judge: TypeAlias = Callable[[Findings], _Judgement]
_RULES: list[tuple[str, str, str, _Judge]] = []  # key, paper, claim; in the order of this file


def claims(findings: Findings) -> tuple[Claim, ...]:
    """Judge every claim."""
    return tuple(
        Claim(key=key, paper=paper, claim=claim, **dataclasses.asdict(judge(findings)))
        for key, paper, claim, judge in _RULES
    )


def _judges(key: str, paper: str, claim: str) -> Callable[[_Judge], _Judge]:
    """Register the rule of a claim."""

    def register(judge: _Judge) -> _Judge:
        _RULES.append((key, paper, claim, judge))
        return judge

    return register


def _judged(
    measured: str,
    holds: bool,
    why_not: str,
    *,
    condition: str = "",
    basis: Basis = "measured",
) -> _Judgement:
    why = condition if holds else "; ".join(reason for reason in (why_not, condition) if reason)
    return _Judgement(measured=measured, holds="yes" if holds else "no", why=why, basis=basis)


def _not_measured(why: str) -> _Judgement:
    return _Judgement(measured="-", holds="not measured", why=why, basis="")


def _where(trial: Trial) -> str:
    dilated = f", dilated {trial.dilation}x" if trial.dilation > 1 else ""
    return f"{trial.model}, {trial.workers} x {show_rate(trial.rate_bps)}{dilated}"


@_judges("below_linear", Z, "training scales far below linear")
def _below_linear(findings: Findings) -> _Judgement:
    pairs = [
        (result, baseline.step_s / result.step_s)
        for result in findings.undilated("emulated")
        if result.trial.workers > 1
        and (baseline := alone(result.trial, findings.measured)) is not None
    ]
    if not pairs:
        return _not_measured("no trial of several workers with its T1")
    most = max(result.trial.workers for result, _ in pairs)
    at_most = [(result, factor) for result, factor in pairs if result.trial.workers == most]
    best = max(factor for _, factor in at_most)
    faster = [
        (result, baseline.step_s / result.step_s)
        for result in findings.dilated()
        if result.trial.workers == most
        and result.trial.buckets == "ddp"
        and (baseline := alone(result.trial, findings.measured)) is not None
    ]
    words = []
    for some in filter(None, (at_most, faster)):  # the smallest and the largest factor
        ordered = sorted(some, key=lambda pair: pair[1])
        ends = ordered[:1] if len(ordered) == 1 else [ordered[0], ordered[-1]]
        words.append(
            " to ".join(f"{factor:.2f} ({_where(result.trial)})" for result, factor in ends)
        )
    is_near = [result for result, factor in faster if factor >= WELL_BELOW]
    holds: Holds = "no" if best >= WELL_BELOW else "in part" if is_near else "yes"
    why = f"{most} workers share one machine; the paper has 64 GPUs"
    if holds == "in part":
        why = f"not in {len(is_near)} of {len(faster)} with faster processors; {why}"
    elif holds == "no":
        why = f"the best is not below {WELL_BELOW}; {why}"
    return _Judgement(
        measured=f"scaling factor {'; '.join(words)}",
        holds=holds,
        why=why,
        basis="measured",
    )


@_judges("computation", Z, "computation time does not change with the number of workers")
def _computation_steady(findings: Findings) -> _Judgement:
    pairs = [
        (result, result.compute_s / baseline.compute_s - 1)
        for result in findings.undilated("real")
        if result.trial.workers > 1
        and (baseline := alone(result.trial, findings.measured)) is not None
    ]
    if not pairs:
        return _not_measured("no real trial of several workers with its T1")
    own = [pair for pair in pairs if pair[0].trial.workers <= pair[0].processors]
    crowded = [pair for pair in pairs if pair[0].trial.workers > pair[0].processors]
    words = "; ".join(
        f"{result.trial.workers} x {show_rate(result.trial.rate_bps)} {change:+.0%}"
        for result, change in sorted(pairs, key=lambda pair: pair[0].trial.workers)
    )
    alright = [abs(change) <= STEADY for _, change in own]
    holds: Holds = "no"
    if alright and all(alright):
        holds = "yes" if all(abs(change) <= STEADY for _, change in crowded) else "in part"
    processors = pairs[0][0].processors
    why = {
        "yes": "",
        "in part": f"more workers than the {processors} processors share them",
        "no": f"workers and Gloo's threads share {processors} processors here",
    }[holds]
    return _Judgement(
        measured=f"real {pairs[0][0].trial.model} against one worker: {words}",
        holds=holds,
        why=why,
        basis="measured",
    )


@_judges("links_idle", Z, "transport leaves fast links idle")
def _links_idle(findings: Findings) -> _Judgement:
    chosen = [
        result
        for result in findings.undilated("emulated")
        if result.trial.workers > 1 and result.trial.buckets == "ddp"
    ]
    if len({result.trial.rate_bps for result in chosen}) < 2:
        return _not_measured("links of one rate only")
    fast = max(chosen, key=lambda result: (result.trial.rate_bps, result.busy_utilization))
    slow = min(chosen, key=lambda result: (result.trial.rate_bps, -result.busy_utilization))
    words = (
        f"while communicating {slow.busy_utilization:.0%} of {slow.trial.rate} and "
        f"{fast.busy_utilization:.0%} of {fast.trial.rate} at best (whole steps: "
        f"{slow.network_utilization:.0%} and {fast.network_utilization:.0%})"
    )
    faster = [
        result for result in findings.dilated() if result.trial.rate_bps > fast.trial.rate_bps
    ]
    if faster:
        fastest = max(faster, key=lambda result: (result.trial.rate_bps, result.busy_utilization))
        words += f"; {fastest.busy_utilization:.0%} with {_where(fastest.trial)}"
    return _judged(
        words,
        slow.busy_utilization >= FULL and fast.busy_utilization < IDLE,
        "the slow link is not full either"
        if slow.busy_utilization < FULL
        else "Gloo fills the fast link here",
        condition=f"bytes from {fast.sent_from}; here it is two processors that hold Gloo back"
        if fast.processor_utilization >= NOT_BUSY
        else f"bytes from {fast.sent_from}",
    )


@_judges("processors", Z, "the CPU is not the bottleneck")
def _processors_free(findings: Findings) -> _Judgement:
    chosen = [result for result in findings.undilated("emulated") if result.trial.workers > 1]
    if not chosen:
        return _not_measured("no undilated trial of several workers")
    busiest = max(chosen, key=lambda result: result.processor_utilization)
    words = (
        f"{busiest.processor_utilization:.0%} of {busiest.processors} processors at most "
        f"({_where(busiest.trial)}; from {busiest.processors_from})"
    )
    return _judged(
        words,
        busiest.processor_utilization < NOT_BUSY,
        f"{busiest.trial.workers} workers' sending, receiving and adding share "
        f"{busiest.processors} processors, which also are all network cards",
    )


@_judges("as_full_when_slow", Z, "slow links behave as full utilization predicts, fast ones do not")
def _as_full_when_slow(findings: Findings) -> _Judgement:
    chosen = [
        prediction
        for prediction in findings.predicted
        if prediction.trial.kind == "emulated" and prediction.trial.dilation == 1
    ]
    if len({prediction.trial.rate_bps for prediction in chosen}) < 2:
        return _not_measured("links of one rate only")
    slow = min(chosen, key=lambda prediction: (prediction.trial.rate_bps, prediction.trial.workers))
    fast = max(chosen, key=lambda prediction: (prediction.trial.rate_bps, prediction.trial.workers))
    off = [prediction.measured_s / prediction.full_s - 1 for prediction in (slow, fast)]
    words = (
        f"steps take {off[0]:+.0%} against the prediction with {_where(slow.trial)} and "
        f"{off[1]:+.0%} with {_where(fast.trial)}"
    )
    return _judged(
        words,
        abs(off[0]) <= AS_PREDICTED and off[1] >= GAP,
        "the slow link is off too" if abs(off[0]) > AS_PREDICTED else "the fast one is not",
        condition="this machine's transport, undilated",
    )


@_judges("no_compression", Z, "with full utilization 100 Gbps needs no compression")
def _no_compression(findings: Findings) -> _Judgement:
    table = whatif(list(V100S), workers=PAPER_WORKERS, bandwidth="100Gbps", buckets="paper")
    factors = dict(zip(table["run"].tolist(), table["scaling_factor"].tolist(), strict=True))
    words = f"{PAPER_WORKERS} workers, predicted: " + ", ".join(
        f"{name.partition('@')[0]} {factor:.3f}" for name, factor in factors.items()
    )
    # The largest scaling factors of emulated trials on such links.
    played = [
        (result, baseline)
        for result in findings.measured
        if result.trial.kind == "emulated"
        and result.trial.rate_bps == 100e9
        and result.trial.workers > 1
        and result.trial.compression == 1
        and (baseline := alone(result.trial, findings.measured)) is not None
    ]
    lab = ""
    if played:
        result, baseline = max(played, key=lambda pair: pair[0].trial.workers)
        lab = f"; measured {baseline.step_s / result.step_s:.3f} ({_where(result.trial)})"
    return _judged(
        words + lab,
        min(factors.values()) >= WANTED,
        f"below {WANTED}",
        condition="modelled V100 profiles; the prediction lacks Gloo's idle time",
        basis="measured and modelled" if lab else "modelled",
    )


@_judges("little_compression", Z, "10 Gbps needs only 2x to 5x (ResNets; VGG16 more)")
def _little_compression(findings: Findings) -> _Judgement:
    table = whatif(
        list(V100S),
        workers=PAPER_WORKERS,
        bandwidth="10Gbps",
        compression=[1, 100],
        buckets="paper",
        target=WANTED,
    )
    assert table.targets is not None
    needed = {row.run: row.compression for row in table.targets.least_compression}
    words = f"{PAPER_WORKERS} workers to {WANTED}, predicted: " + ", ".join(
        f"{name.partition('@')[0]} {'never' if value is None else f'{value:.2g}x'}"
        for name, value in needed.items()
    )
    is_so = [
        value is not None and (2 <= value <= 5 if "resnet" in name else value > 5)
        for name, value in needed.items()
    ]
    # The effect of compression in the lab.
    played = {
        result.trial.compression: baseline.step_s / result.step_s
        for result in findings.measured
        if result.trial.rate_bps == 10e9
        and result.trial.dilation > 1
        and result.trial.workers == 4
        and result.trial.model == "resnet50@v100"
        and (baseline := alone(result.trial, findings.measured)) is not None
    }
    lab = ""
    if any(ratio > 1 for ratio in played):
        factors = ", ".join(f"{ratio}x {factor:.2f}" for ratio, factor in sorted(played.items()))
        lab = f"; measured with 4 workers, resnet50, dilated: {factors}"
    return _judged(
        words + lab,
        all(is_so),
        "not so for each of them",
        condition="codecs that cost nothing",
        basis="measured and modelled" if lab else "modelled",
    )


@_judges("bytes", F, "bytes per iteration are 2(N-1)/N times the model's size")
def _bytes(findings: Findings) -> _Judgement:
    by_workers: dict[int, list[Measured]] = {}
    for result in findings.measured:
        if result.trial.workers > 1:
            by_workers.setdefault(result.trial.workers, []).append(result)
    slopes = {}
    for workers, rows in sorted(by_workers.items()):
        if len({round(result.gradient_bytes) for result in rows}) > 1:
            matrix = np.array([[result.gradient_bytes, 1.0] for result in rows])
            sent = np.array([result.sent_bytes for result in rows])
            slopes[workers] = float(np.linalg.lstsq(matrix, sent, rcond=None)[0][0])
    if not slopes:
        return _not_measured("models of one size only")
    sizes = [result.gradient_bytes for rows in by_workers.values() for result in rows]
    words = f"gradients of {show_bytes(min(sizes))} to {show_bytes(max(sizes))}: " + "; ".join(
        f"N={workers} slope {slope:.4f} (ring {2 * (workers - 1) / workers:.4f})"
        for workers, slope in slopes.items()
    )
    if any(result.sent_from != "NIC counters" for result in findings.measured):
        return _Judgement(
            measured=words,
            holds="not measured",
            basis="measured",
            why="without NIC counters the factor is the ring's by definition: wait for samples",
        )
    over = [slope / (2 * (workers - 1) / workers) - 1 for workers, slope in slopes.items()]
    worst = max(over, key=abs)
    return _judged(
        words,
        all(-SLOPE <= excess <= HEADERS + SLOPE for excess in over),
        f"off by {worst:+.1%}",
        condition=f"NIC counters, {worst:+.2%} at most; they hold headers, from next to nothing "
        f"(one for each packet of up to 64 kB that the kernel hands over) to {HEADERS:.1%}",
    )


@_judges("ring", F, "servers form a ring in the order of hosts in the launch command")
def _ring(findings: Findings) -> _Judgement:
    seen = [
        result
        for result in findings.measured
        if result.sends_to is not None and result.trial.workers > 2
    ]
    if not seen:
        why = "no samples of connections in these runs: waits for packets"
        return _not_measured(why)
    rings = 0
    for result in seen:  # each sends to its neighbour in the launch's order, all in one direction
        count = len(result.sends_to or ())
        ways = {(to - host) % count for host, to in enumerate(result.sends_to or ())}
        rings += ways in ({1}, {count - 1})
    most = max(seen, key=lambda result: result.trial.workers)
    # Follow the transfers from host to host, from host 0 on.
    sends_to = most.sends_to or ()
    way = [0]
    while len(way) <= len(sends_to) and (to := sends_to[way[-1]]) != NOBODY:
        way.append(to)
    way_round = " -> ".join(map(str, way))
    return _judged(
        f"{rings} of {len(seen)} trials; {_where(most.trial)}: {way_round}",
        rings == len(seen),
        "some send otherwise",
        condition="Gloo goes around against the order of ranks; host i is rank i here",
    )


@_judges("not_size_alone", F, "iteration time does not follow from model size alone")
def _not_size_alone(findings: Findings) -> _Judgement:
    rows = [shares for shares in findings.explained if "model size" in shares.alone]
    if not rows:
        return _not_measured("too few sizes to tell")
    basis: Basis = "measured and modelled"
    if len(rows) == 1:
        basis = "measured" if rows[0].basis.startswith("measured") else "modelled"
    words = "; ".join(
        f"{shares.basis} ({shares.count}): R2 of size alone {shares.alone['model size']:.2f}, "
        f"of all {shares.together:.2f}"
        for shares in rows
    )
    return _judged(
        words,
        all(shares.alone["model size"] < MOST_OF_IT for shares in rows),
        f"size alone explains {MOST_OF_IT:.0%} or more",
        condition="device, batch and bandwidth vary too",
        basis=basis,
    )


@_judges("half", OURS, "a real float16 hook gains what is predicted, casts included")
def _half(findings: Findings) -> _Judgement:
    rows = [
        (full, half, prediction)
        for half in findings.measured
        if half.trial.half
        for full in findings.undilated("real")
        if dataclasses.replace(half.trial, half=False, steps=full.trial.steps) == full.trial
        for prediction in findings.predicted
        if prediction.trial == half.trial and prediction.error is not None
    ]
    if not rows:
        return _not_measured("no pair of real trials with and without float16")
    words = "; ".join(
        f"{half.trial.rate}: {show_time(full.step_s)} to {show_time(half.step_s)}, predicted "
        f"{show_time(prediction.transport_s or 0.0)} ({prediction.error:+.0%})"
        for full, half, prediction in rows
    )
    return _judged(
        f"real {rows[0][0].trial.model}, 2 workers, at {words}",
        all(abs(prediction.error or 0.0) <= GAP for *_, prediction in rows),
        f"off by more than {GAP:.0%}",
        condition="casts share the processors with computation and transport",
    )


@_judges("foretold", OURS, "with the measured transport, steps never shown are predicted")
def _foretold(findings: Findings) -> _Judgement:
    rows = [
        (prediction, prediction.error)
        for prediction in findings.predicted
        if prediction.error is not None
    ]
    errors = np.array([abs(error) for _, error in rows if error is not None])
    if not len(errors):
        return _not_measured("no trial but the one that was shown")
    worst = max(rows, key=lambda pair: abs(pair[1] or 0.0))[0]
    holds = sum(prediction.holds for prediction, _ in rows)
    counted = (
        f"{len(errors)} trials: median error {np.median(errors):.1%}, worst {errors.max():.1%} "
        f"({worst.trial.name}); the interval holds {holds} of {len(errors)}"
    )
    short = [
        words
        for words, is_kept in (
            (f"the median is above {USUALLY:.0%}", float(np.median(errors)) <= USUALLY),
            (f"the worst is above {AS_PREDICTED:.0%}", float(errors.max()) <= AS_PREDICTED),
            (f"the interval holds less than {HELD:.0%}", holds >= HELD * len(errors)),
        )
        if not is_kept
    ]
    is_useful = float(np.median(errors)) <= AS_PREDICTED
    return _Judgement(
        measured=counted,
        basis="measured",
        holds="yes" if not short else "in part" if is_useful else "no",
        why="; ".join([*short, "one shown trial for each kind and dilation"]),
    )
