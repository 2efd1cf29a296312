"""The answer about a job that was watched from outside: its doubts, and the ranks that are stuck.

An idle rank may wait for another rank, for its data or for a disk. A burst ends somewhere between
two looks. So each part has a range, and the verdict is "cannot tell" where ranges let several
parts be the largest.
"""

from __future__ import annotations

import contextlib
import glob
import math
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from fullwire.answers.explain import Explanation
from fullwire.answers.idle import ALIKE, Idle, Waiting
from fullwire.display import Result
from fullwire.errors import FullwireError
from fullwire.findings.case import FILLED, THRESHOLD
from fullwire.findings.finding import Finding
from fullwire.findings.watching import (
    AdaptersServe,
    AskedForFewer,
    Computes,
    HostNotWatched,
    InterfacesServe,
    NetworkLimits,
    NoStep,
    RanksWaitFor,
    SeveralMayLimit,
    StepOnGpus,
    Stuck,
    Traced,
    TransferOrContention,
    WaitsFor,
)
from fullwire.importers import FORMATS
from fullwire.importers._format import Options
from fullwire.packets.rhythm import FEWEST_STEPS
from fullwire.recorder.jobs_here import JobHere, environment_of
from fullwire.recorder.outside import (
    COMPUTED,
    DELAYED,
    LIMITED_BY_BUFFER,
    LIMITED_BY_RECEIVER,
    RECEIVED,
    RETRANSMITS,
    ROUND_TRIPS,
    SENDING,
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
# The parts that a verdict may blame beside transfers. The idle ones look alike from outside.
_BESIDE = {"contention", "compute", "scales", "overlap"}  # transfer and computing at one time
_BLAMED = ("straggler", "input", "host", "contention")
_IDLE = ("input", "host", "unexplained")
_SLOWED = 0.2  # of computing: the most that it was ever slower beside memory traffic (0.05 to 0.18)
# Of the contention that run delay tells. Where it was 3 % of a step or more, a recording told as
# little as 0.86 of it in the first 14 jobs of validation.watch, and 0.91 in the others.
_SURELY_CROWDED = 0.85
_TOLD = 0.03  # of a line's use: a difference that looks do not tell
_FLOWS = 0.5  # of a rank's usual rate while bytes flow
# Where ranks dump what they asked for, later torch first. Each has its usual place.
_DUMPS = {
    "TORCH_FR_DUMP_TEMP_FILE": "~/.cache/torch/comm_lib_trace_rank_",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/tmp/nccl_trace_rank_",
    "TORCHCOMM_FR_DUMP_TEMP_FILE": "~/.cache/torchcomm_fr_trace_",
}


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
    gpu_sm_active: float | None = None  # mean share of its processors that worked
    memory_bytes: float | None = None  # in use at the end
    read_bytes_s: float | None = None  # from disks, a second
    faults_s: float | None = None  # pages that had to come from a disk, a second
    # TCP connections with bytes to send or to acknowledge: their mean count. Of the time with such
    # bytes, the shares in which the receiver, or the send buffer, had no room.
    connections_sending: float | None = None
    limited_by_receiver: float | None = None
    limited_by_buffer: float | None = None
    round_trip_s: float | None = None  # mean of the sent bytes, with their wait in queues


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
        is_asked = rank not in looks.without_connections
        columns = [SENT, ROUND_TRIPS, SENDING, LIMITED_BY_RECEIVER, LIMITED_BY_BUFFER]
        sent_bytes, trips_ns, sending_ns, *limited_ns = (
            table[-1, columns] - table[0, columns]
        ).tolist()
        by_receiver, by_buffer = (
            each_ns / sending_ns if is_asked and sending_ns else None for each_ns in limited_ns
        )
        ranks.append(
            SeenRank(
                rank=rank,
                computing=float((computing * weights).sum()),
                sending=float((free * weights)[flows].sum()),
                waiting=float((free * weights)[~flows].sum()),
                delayed=float((delayed * weights).sum()),
                sent_bytes=sent_bytes,
                received_bytes=float(did[:, RECEIVED].sum()),
                sent_bps=float(did[flows, SENT].sum() * 8 / flowing_s) if flowing_s else 0.0,
                retransmits=float(did[:, RETRANSMITS].sum()),
                connections_sending=sending_ns / float(spent_ns.sum()) if is_asked else None,
                limited_by_receiver=by_receiver,
                limited_by_buffer=by_buffer,
                round_trip_s=trips_ns / sent_bytes / 1e9 if is_asked and sent_bytes else None,
                gpu_busy=looks.gpus[rank].busy if rank in looks.gpus else None,
                gpu_pcie_bps=looks.gpus[rank].pcie_bps if rank in looks.gpus else None,
                gpu_sm_active=looks.gpus[rank].sm_active if rank in looks.gpus else None,
                **(asdict(looks.uses[rank]) if rank in looks.uses else {}),
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
    idle: Idle | None = None  # what a rank answered that was asked while it did nothing
    waiting: Waiting | None = None

    @property
    def step_s(self) -> float | None:
        """Return the time of a step, or None without any."""
        if self.step_on_gpus is not None:
            return self.step_on_gpus.step_s
        return None if self.explanation is None else self.explanation.step_s

    @property
    def possible(self) -> tuple[str, ...]:
        """Return the verdicts that the ranges leave open, the account's own first.

        A kind is possible if no other part is surely larger than its own.
        """
        explanation = self.explanation
        if explanation is None:
            return ()
        own = explanation.verdict.kind
        if self.source == "inside":
            return (own,)
        if own == "compute":  # it compares with one worker, whom nobody sees from outside
            return (own, "contention")
        limit_s, account = THRESHOLD * explanation.step_s, explanation.account
        low_s = {part: self.ranges[part][0] for part in ("straggler", "contention")}
        likely_s = {part: account[part] for part in low_s}
        idle_s = sum(account[part] for part in _IDLE)
        low_s |= {"transfer": self.transfer_s[0], "idle": max(idle_s - self.blur_s, 0.0)}
        likely_s |= {"transfer": sum(account[part] for part in _TRANSFER), "idle": idle_s}

        detail = explanation.detail
        is_told = detail.crowding.is_told and account["contention"] <= detail.crowded_s

        def may_be_largest(name: str, high_s: float) -> bool:
            """Say whether no other part is surely larger.

            What one part gains, another loses, so their errors add up. Contention that run delay
            tells has an error of its own.
            """
            own_s = min(likely_s[name], high_s)
            if high_s < limit_s:
                return False
            for other, least_s in low_s.items():
                errors_s = high_s - own_s, likely_s[other] - least_s
                is_apart = other == "contention" and is_told
                if likely_s[other] - own_s > (math.hypot(*errors_s) if is_apart else sum(errors_s)):
                    return False
            return True

        names = {part: "idle" if part in _IDLE else part for part in _BLAMED}
        found = {part for part in _BLAMED if may_be_largest(names[part], self.ranges[part][1])}
        if may_be_largest("transfer", self.transfer_s[1]):
            found |= self._transfers_possible(own)
        if max(low_s.values()) < limit_s:
            found.add("scales")
        return (own, *sorted(found - {own}))

    def _transfers_possible(self, own: str) -> set[str]:
        """Return what may limit the transfer: the line, the transport, or its late beginning."""
        assert self.explanation is not None
        low_s, high_s = self.transfer_s
        full_s = self.explanation.account["line_rate"]  # of the bytes, which are counted
        limit_s = THRESHOLD * self.explanation.step_s
        found = {own} if own in _TRANSFER or own == "overlap" else set()
        if full_s < (FILLED + _TOLD) * high_s and high_s - full_s >= limit_s:
            found.add("transport")
        fills = full_s >= (FILLED - _TOLD) * low_s or low_s - full_s < limit_s
        # Under computing it would be used too late, where it surely fits there.
        if fills and (own != "overlap" or high_s > self.ranges["compute"][0]):
            found.add("line_rate")
        return found

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
            idle, found = self.idle, explanation.verdict.findings
            if idle is None:
                return found
            explains = self.kind in ("input", "host") or idle.rank in explanation.verdict.ranks
            return (*found, *idle.findings) if explains else found
        low, high = (end_s / explanation.step_s for end_s in self.transfer_s)
        if "contention" in self.possible and set(self.possible) <= _BESIDE:
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
        untold_s = 0.0 if self.waiting is None else self.waiting.untold_s
        low_s = max(exposed_s - self.blur_s - untold_s, 0.0)
        return low_s, min(exposed_s + self.blur_s, explanation.step_s)

    @property
    def blur_s(self) -> float:
        """Return how far a part of a step may be off because bytes flow between two looks."""
        if self.explanation is None or not self.ranges:
            return 0.0
        return self.ranges["line_rate"][1] - self.explanation.account["line_rate"]

    def _in_short(self) -> Iterator[str]:
        yield self.sentence


def ranges_of(
    explanation: Explanation, run: Run, edge_s: float, waiting: Waiting
) -> dict[str, tuple[float, float]]:
    """Return the least and the most seconds of a step that each part may be.

    `edge_s`: how far a burst may be off, because it begins and ends between two looks. Several
    bursts of a step do so independently of each other, so the root of their number counts.

    Ranks that do nothing may wait for their data, a disk, a script's other work or a late rank.
    """
    own = run.collectives.rows(run.collectives.rank == run.collectives.rank[:1])
    bursts = len(own.rank) / max(len(np.unique(own.step)), 1)
    account, step_s = explanation.account, explanation.step_s
    blur_s = min(math.sqrt(bursts) * edge_s, step_s)
    idle_s = sum(account[part] for part in _IDLE)
    crowded_s, worked = account["contention"], explanation.detail
    is_told = worked.crowding.is_told and len(run.hosts) > 0
    # Without the backend or the processors' work, all run delay or none may be the job's doing.
    delays_s = [seconds for _, seconds in run.facts.run_delay_s or ()]
    most_s = crowded_s if is_told else max(crowded_s, *delays_s)
    # Beside memory traffic work is slower, too, without any delay.
    overlapped_s = float(worked.overlapped_ns[:, worked.is_typical].mean()) / 1e9
    most_s += _SLOWED * overlapped_s
    ranges = {}
    for part, value_s in account.items():
        low_s, high_s = value_s - blur_s, value_s + blur_s
        if part in _IDLE:
            low_s, high_s = 0.0, idle_s + waiting.untold_s + blur_s
            if waiting.is_loading is not None:
                is_other = part == ("host" if waiting.is_loading else "input")
                high_s -= ALIKE * waiting.elsewhere_s if is_other else 0.0
        elif part == "straggler":
            low_s -= waiting.untold_s
            high_s += max(idle_s - waiting.elsewhere_s, 0.0) + waiting.untold_s
        elif part == "transport":
            low_s -= waiting.untold_s
        elif part == "contention":
            # Transfers between ranks of one host are in it, too.
            surely_s = max(worked.crowded_s - waiting.untold_s, 0.0)
            low_s, high_s = _SURELY_CROWDED * surely_s if is_told else 0.0, most_s
        elif part == "compute":
            low_s -= most_s - crowded_s
        elif part == "codec":  # the processors do this, too
            low_s, high_s = 0.0, account["compute"] + crowded_s + blur_s
        elif part == "latency":  # small messages lie within the bursts
            low_s, high_s = 0.0, account["transport"] + value_s + blur_s
        ranges[part] = max(low_s, 0.0), min(max(high_s, value_s), step_s)
    return ranges


def no_step_within(watched_s: float) -> Finding:
    """Say that nothing repeated often enough."""
    return NoStep(fewest=FEWEST_STEPS, watched_s=watched_s)


def notes_of(looks: Looks) -> tuple[Finding, ...]:
    """Say which hosts, connections and processes were not as they should be."""
    lost = [
        HostNotWatched(host=host.host, problem=host.problem) for host in looks.hosts if host.problem
    ]
    closed = looks.without_connections
    over_rdma = tuple(rank.rank for rank in looks.job.ranks if rank.uses_rdma)
    return (
        *lost,
        *([InterfacesServe(ranks=closed)] if closed else []),
        *([AdaptersServe(ranks=over_rdma)] if over_rdma else []),
        *(Traced(rank=rank.rank, tracer=rank.tracer) for rank in looks.job.ranks if rank.tracer),
    )


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
        # Quiet since the last bytes that were seen, or since the kernel last saw any, which may
        # have been a heartbeat. A long gap between looks counts little: the machine stood still
        # then, for the ranks as for us.
        between_s = np.diff(table[moved[-1] + 1 if len(moved) else 0 :, 0]) / 1e9
        quiet_s = np.minimum(between_s, _LOOKED_S).sum()
        if not len(moved):
            quiet_s = max(quiet_s, table[-1, 7])
        since_s = min(since_s, quiet_s)
        latest = table[table[:, 0] > (now_s - 2) * 1e9]
        spent_s = (latest[-1, 0] - latest[0, 0]) / 1e9
        # A thread that is ready and has no processor would compute.
        worked_s = (latest[-1, 1:3] - latest[0, 1:3]).sum() / 1e9
        busy[rank] = worked_s / spent_s if spent_s > 0 else 0.0
    if not after_s <= since_s < np.inf or len(busy) < 2:
        return None
    fewer = _fewer_asked(looks.job, since_s)
    if fewer is None and min(busy.values()) > _BUSY:
        return None
    waits, hosts = looks.waits(), {ranked.rank: ranked.host for ranked in looks.job.ranks}
    late = waited_for(waits, busy)
    if fewer is not None and len(fewer.ranks) == 1 and fewer.ranks[0] in waits:
        [late] = fewer.ranks
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
    if fewer is not None:
        where = (*where, fewer)
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
        lambda rank: bool(waits[rank].link_down),
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


def _fewer_asked(job: JobHere, since_s: float) -> AskedForFewer | None:
    """Return the ranks that asked for fewer collectives than others, as their dumps tell.

    PyTorch's Flight Recorder writes a dump for each rank when a collective has waited for too long,
    or when somebody asks for it. Dumps lie under one beginning of a path and end in the number of
    the rank. On a shared disk those of other hosts lie there too.
    """
    here = [each.pid for each in job.ranks if each.host == socket.gethostname()]
    told = next(filter(None, map(environment_of, here)), {})
    beginnings = [
        told.get(name, usual.replace("~", told.get("HOME", "~"), 1))
        for name, usual in _DUMPS.items()
    ]
    owners = {os.geteuid()}
    for pid in here:
        with contextlib.suppress(OSError):  # it has ended
            owners.add(os.stat(f"/proc/{pid}").st_uid)
    last: dict[str, dict[int, tuple[int, str]]] = defaultdict(dict)
    for beginning in beginnings:
        for path in glob.glob(f"{glob.escape(beginning)}[0-9]*"):
            rank = path[len(beginning) :]
            with contextlib.suppress(OSError):
                about = os.stat(path)
                # Anybody may write to /tmp, and an older dump is of an earlier trouble.
                is_new = about.st_uid in owners and about.st_mtime >= time.time() - since_s
                if is_new and rank.isdecimal() and int(rank) < job.workers:
                    for group, asked in _last_asked(path, about.st_mtime_ns, about.st_size).items():
                        last[group].setdefault(int(rank), asked)
    found = [each for group, by_rank in last.items() if (each := _fewest(group, by_rank))]
    # A rank that is late in one group makes others late in theirs: the one with most ranks tells.
    return max(found, key=lambda each: each.others, default=None)


@lru_cache(maxsize=1024)
def _last_asked(path: str, written_ns: int, size_bytes: int) -> Mapping[str, tuple[int, str]]:
    """Return the last collective of each group in a dump: its number and its operation.

    A dump that is still being written cannot be read. It is read again once it has changed.
    """
    try:
        asked = FORMATS["flight-recorder"].read([Path(path)], Options()).collectives
    except (FullwireError, OSError):
        return {}
    last: dict[str, tuple[int, str]] = {}
    for group, number, op in zip(asked.group, asked.sequence.tolist(), asked.op, strict=True):
        last[group] = max(last.get(group, (0, "")), (number, op))
    return last


def _fewest(group: str, by_rank: Mapping[int, tuple[int, str]]) -> AskedForFewer | None:
    most, op = max(by_rank.values())
    asked = min(number for number, _ in by_rank.values())
    if asked == most:
        return None
    late = tuple(rank for rank, (number, _) in by_rank.items() if number == asked)
    return AskedForFewer(
        ranks=late, asked=asked, most=most, others=len(by_rank) - len(late), group=group, op=op
    )
