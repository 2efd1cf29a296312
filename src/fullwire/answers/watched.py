"""The answer about a job that was watched from outside: its doubts, and the ranks that are stuck.

An idle rank may wait for another rank, for its data or for a disk. A burst ends somewhere between
two looks. So each part has a range, and the verdict is "cannot tell" where ranges let several
parts be the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from fullwire.answers.explain import Explanation
from fullwire.display import Result
from fullwire.findings.finding import Finding
from fullwire.findings.watching import (
    Computes,
    NetworkLimits,
    NoStep,
    RanksWaitFor,
    SeveralMayLimit,
    StepOnGpus,
    Stuck,
    TransferOrContention,
    WaitsFor,
)
from fullwire.packets.rhythm import FEWEST_STEPS
from fullwire.recorder.jobs_here import JobHere
from fullwire.recorder.outside import (
    COMPUTED,
    DELAYED,
    RECEIVED,
    RETRANSMITS,
    SENT,
    TIME,
    Looks,
    Waits,
    WatchedHost,
)
from fullwire.run.run import Run
from fullwire.words import sentences

STUCK_AFTER_S = 10.0
_STUCK_STEPS = 10  # a job is stuck after so many steps without bytes, too
_STUCK_BYTES = 4096  # a second and rank; less is heartbeats
_BUSY = 0.2  # of a processor: a rank computes, or would with one
_LOOKED_S = 1.0  # between two looks, longer gaps tell nothing
_TRANSFER = {"line_rate", "latency", "transport"}
# The parts that a verdict may blame. The second ones all look idle from outside.
_BLAMED = ("line_rate", "transport", "straggler", "input", "host")
_IDLE = ("input", "host", "unexplained")
_NOTABLE = 0.1  # of the step: smaller parts are no verdict
_SLOWED = 0.2  # of computing: the most that it was ever slower beside memory traffic (0.05 to 0.18)
_FLOWS = 0.5  # of a rank's usual rate while bytes flow


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRank:
    """A rank while it was watched: shares of the time, which add up to 1 but for the delay."""

    rank: int
    computing: float
    sending: float  # bytes flowed, and it did not compute
    waiting: float  # neither
    delayed: float  # of the time it did not compute: ready, and without a processor
    sent_bytes: float
    received_bytes: float
    sent_bps: float  # while bytes flowed
    retransmits: float
    gpu_busy: float | None = None  # share of the time in which a kernel ran, as NVML tells it
    gpu_pcie_bps: float | None = None  # both ways


def seen_ranks(looks: Looks) -> tuple[SeenRank, ...]:
    """Return what each rank did, from its counters alone."""
    ranks = []
    for rank, rows in looks.by_rank.items():
        table = np.asarray(rows, float)
        if len(table) < 2:
            continue
        spent_ns = np.maximum(np.diff(table[:, TIME]), 1)
        did = np.diff(table[:, : RETRANSMITS + 1], axis=0)
        computing = np.minimum(did[:, COMPUTED] / spent_ns, 1)
        delayed = np.minimum(did[:, DELAYED] / spent_ns, 1 - computing)
        rate_bps = (did[:, SENT] + did[:, RECEIVED]) * 8e9 / spent_ns
        usual_bps = np.quantile(rate_bps[rate_bps > 0], 0.8) if (rate_bps > 0).any() else 0.0
        flows = rate_bps > _FLOWS * usual_bps
        weights = spent_ns / spent_ns.sum()
        free = 1 - computing - delayed
        flowing_s = spent_ns[flows].sum() / 1e9
        ranks.append(
            SeenRank(
                rank=rank,
                computing=float((computing * weights).sum()),
                sending=float((free * weights)[flows].sum()),
                waiting=float((free * weights)[~flows].sum()),
                delayed=float((delayed * weights).sum()),
                sent_bytes=float(did[:, SENT].sum()),
                received_bytes=float(did[:, RECEIVED].sum()),
                sent_bps=float(did[flows, SENT].sum() * 8 / flowing_s) if flowing_s else 0.0,
                retransmits=float(did[:, RETRANSMITS].sum()),
                gpu_busy=looks.gpus[rank].busy if rank in looks.gpus else None,
                gpu_pcie_bps=looks.gpus[rank].pcie_bps if rank in looks.gpus else None,
            )
        )
    return tuple(ranks)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Watched(Result):
    """The answer about a running job. `explanation` is None if no step repeats."""

    job: JobHere
    seconds: float  # of watching
    confidence: float  # from 0 to 1: how alike one step is to the next
    explanation: Explanation | None
    ranges: Mapping[str, tuple[float, float]]  # seconds a step that a part may be
    stuck: Stuck | None
    no_step: Finding | None  # why there is no explanation
    run: Run | None
    ranks: tuple[SeenRank, ...]
    looked_share: float  # of a processor that watching took
    between_looks_s: float
    has_ended: bool
    alerts: tuple[Finding, ...] = ()  # that began in this window
    hosts: tuple[WatchedHost, ...] = ()  # that were asked for ranks; empty: this one alone
    notes: tuple[Finding, ...] = ()  # about the way in which the job was watched
    source: str = "outside"  # or "inside": a recording that goes on
    step_on_gpus: StepOnGpus | None = None  # in place of an explanation, for ranks on GPUs

    @property
    def step_s(self) -> float | None:
        """Return the time of a step, or None without any."""
        if self.step_on_gpus is not None:
            return self.step_on_gpus.step_s
        return None if self.explanation is None else self.explanation.step_s

    @property
    def possible(self) -> tuple[str, ...]:
        """Return the verdicts that the ranges leave open, the account's own first."""
        explanation = self.explanation
        if explanation is None:
            return ()
        own = explanation.verdict.kind
        if self.source == "inside":
            return (own,)
        blamed = "line_rate" if own == "overlap" else own  # that part, which begins too late
        if blamed not in self.ranges or own == "compute":  # contention does not show
            return (own, "contention")
        low_s = max(self.ranges[blamed][0], _NOTABLE * explanation.step_s)
        others = [part for part in _BLAMED if part != blamed and self.ranges[part][1] >= low_s]
        if own == "overlap":
            delayed = max((rank.delayed for rank in self.ranks), default=1.0)
            most_s = delayed * explanation.step_s + _SLOWED * self.ranges["compute"][1]
            if most_s >= low_s:
                others.append("contention")
            if self.transfer_s[1] > self.ranges["compute"][0]:  # it may not fit under computing
                others.append("line_rate")
        return (own, *others)

    @property
    def kind(self) -> str:
        """Return the kind of the verdict, unknown where ranges leave several open."""
        return self.possible[0] if len(self.possible) == 1 else "unknown"

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Return what limits the job, as far as that can be told from outside."""
        explanation = self.explanation
        if self.stuck is not None:
            return (self.stuck.finding,)
        if explanation is None:
            told = self.step_on_gpus or self.no_step
            return () if told is None else (told,)
        if self.kind != "unknown" or self.source == "inside":
            return explanation.verdict.findings
        low, high = (end_s / explanation.step_s for end_s in self.transfer_s)
        if "contention" in self.possible:
            return (TransferOrContention(low=low, high=high),)
        if set(self.possible) <= _TRANSFER:
            return (NetworkLimits(low=low, high=high),)
        return (SeveralMayLimit(parts=tuple(part.replace("_", " ") for part in self.possible)),)

    @property
    def sentence(self) -> str:
        """Return the findings in words."""
        return " ".join(sentences(self.findings))

    @property
    def transfer_s(self) -> tuple[float, float]:
        """Return the least and the most time of a step in which ranks wait for bytes."""
        explanation = self.explanation
        if explanation is None:
            return 0.0, 0.0
        exposed_s = sum(explanation.account[part] for part in _TRANSFER)
        blur_s = self.ranges["line_rate"][1] - explanation.account["line_rate"]
        return max(exposed_s - blur_s, 0.0), min(exposed_s + blur_s, explanation.step_s)

    def _in_short(self) -> Iterator[str]:
        yield self.sentence


def ranges_of(
    explanation: Explanation, run: Run, between_s: float
) -> dict[str, tuple[float, float]]:
    """Return the least and the most seconds of a step that each part may be.

    A burst begins and ends between two looks, so each burst of a step moves a part by one look.
    Ranks that do nothing may wait for their data, a disk, a script's other work or a late rank.
    """
    own = run.collectives.rows(run.collectives.rank == run.collectives.rank[:1])
    bursts = len(own.rank) / max(len(np.unique(own.step)), 1)
    account, step_s = explanation.account, explanation.step_s
    blur_s = min(bursts * between_s, step_s)
    idle_s = sum(account[part] for part in _IDLE)
    computed_s = account["compute"] + account["contention"]
    ranges = {}
    for part, value_s in account.items():
        low_s, high_s = value_s - blur_s, value_s + blur_s
        if part in _IDLE:
            low_s, high_s = 0.0, idle_s + blur_s
        elif part == "straggler":
            high_s += idle_s
        elif part in ("contention", "codec"):  # the processors do these too
            low_s, high_s = 0.0, computed_s + blur_s
        elif part == "latency":  # small messages lie within the bursts
            low_s, high_s = 0.0, account["transport"] + value_s + blur_s
        ranges[part] = max(low_s, 0.0), min(high_s, step_s)
    return ranges


def no_step_within(watched_s: float) -> Finding:
    """Say that nothing repeated often enough."""
    return NoStep(fewest=FEWEST_STEPS, watched_s=watched_s)


def stuck_in(looks: Looks, step_s: float | None) -> Stuck | None:
    """Return who waits for whom, if the job's connections carry nothing for too long.

    Connections say when they last carried anything, so this holds for a hang that is older than
    the watch. Ranks that all compute alike evaluate, or load. Such a job is not stuck, and so is
    one whose ranks wait for a processor.
    """
    after_s = max(STUCK_AFTER_S, _STUCK_STEPS * (step_s or 0.0))
    since_s, busy = np.inf, {}
    for rank, rows in looks.by_rank.items():
        table = np.array(rows, float)
        if not len(table):
            return None
        now_s = table[-1, 0] / 1e9
        carried = table[:, 4] + table[:, 5]
        moved = np.flatnonzero(carried[-1] - carried > _STUCK_BYTES)
        # Quiet since the last bytes that were seen, or since the kernel last saw any. A long
        # gap between looks counts little: the machine stood still then, for the ranks as for us.
        between_s = np.diff(table[moved[-1] + 1 :, 0]) / 1e9 if len(moved) else np.zeros(0)
        quiet_s = np.minimum(between_s, _LOOKED_S).sum() if len(moved) else table[-1, 7]
        since_s = min(since_s, quiet_s)
        latest = table[table[:, 0] > (now_s - 2) * 1e9]
        spent_s = (latest[-1, 0] - latest[0, 0]) / 1e9
        # A thread that is ready and has no processor would compute.
        worked_s = (latest[-1, 1:3] - latest[0, 1:3]).sum() / 1e9
        busy[rank] = worked_s / spent_s if spent_s > 0 else 0.0
    if not after_s <= since_s < np.inf or len(busy) < 2 or min(busy.values()) > _BUSY:
        return None
    waits, hosts = looks.waits(), {ranked.rank: ranked.host for ranked in looks.job.ranks}
    late = waited_for(waits, busy)
    where: tuple[Finding, ...]
    if late is None:
        together: dict[str, list[int]] = {}
        for rank, waiting in waits.items():
            together.setdefault(str(waiting), []).append(rank)
        where = tuple(
            RanksWaitFor(ranks=tuple(ranks), state=state) for state, ranks in together.items()
        )
    elif busy[late] > _BUSY:
        where = (Computes(processors=busy[late]),)
    else:
        where = (WaitsFor(state=str(waits[late])),)
    return Stuck(
        rank=late,
        host=hosts.get(late, "") if late is not None else next(iter(hosts.values()), ""),
        where=where,
        since_s=float(since_s),
        waiting=tuple(rank for rank in busy if rank != late),
    )


def waited_for(waits: Mapping[int, Waits], busy: Mapping[int, float]) -> int | None:
    """Return the one rank that is not waiting as the others are, if there is one."""
    signs: tuple[Callable[[int], bool], ...] = (
        lambda rank: waits[rank].state in ("T", "Z"),
        lambda rank: busy[rank] > _BUSY,
        lambda rank: waits[rank].state == "D",
        lambda rank: bool(waits[rank].line) and not waits[rank].is_in_collective,
        lambda rank: bool(waits[rank].place) and not waits[rank].for_other_threads,
        lambda rank: _is_elsewhere(rank, waits),
    )
    for is_late in signs:
        late = [rank for rank in waits if is_late(rank)]
        if len(late) == 1:
            return late[0]
    return None


def _is_elsewhere(rank: int, waits: Mapping[int, Waits]) -> bool:
    """Return whether the others are together at one line of the script, and a rank is not."""
    others = [waiting.line for one, waiting in waits.items() if one != rank]
    return len(others) > 1 and set(others) == {others[0]} != {waits[rank].line} and others[0] != ""
