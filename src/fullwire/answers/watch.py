"""A verdict on a job that is already running, from the kernel's counters of its processes.

Steps are found where bytes and computing repeat. The counters of one step then tell when each rank
computed and when its connections carried bytes, and both become spans of a Run. Every other
question works on that Run: `explain`, `report`, `compare`.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fullwire.answers.alerts import Alert, alert
from fullwire.answers.conditions import looking_s, rate
from fullwire.answers.explain import explain
from fullwire.answers.idle import Asking, Elsewhere, Idle, Waiting
from fullwire.answers.opening import write
from fullwire.answers.watched import (
    SeenRank,
    Watched,
    no_step_within,
    notes_of,
    ranges_of,
    seen_ranks,
    stuck_in,
)
from fullwire.errors import UsageError
from fullwire.findings.case import THRESHOLD
from fullwire.findings.finding import Finding
from fullwire.findings.watching import (
    NothingSeen,
    NothingSent,
    OnOtherHosts,
    StepOnGpus,
    TakenForAllReduces,
)
from fullwire.outputs import refuse_existing
from fullwire.packets.rhythm import FEWEST_STEPS, before_pauses, repeated, rhythm_of
from fullwire.recorder.jobs_here import job_named, job_of
from fullwire.recorder.outside import (
    COLUMNS,
    COMMUNICATED,
    COMPUTED,
    DELAYED,
    ELSEWHERE,
    RECEIVED,
    SENT,
    TIME,
    UNCLEAR,
    Looks,
    Watcher,
)
from fullwire.recorder.several_hosts import HostsWatcher, host_names, is_here
from fullwire.run.facts import Facts
from fullwire.run.gaps import gaps_of
from fullwire.run.run import Collectives, Hosts, Provenance, Run, Spans
from fullwire.run.usual import usual_steps
from fullwire.words import sentence

Reals = NDArray[np.float64]

_BIN_S = 0.005  # of the counters, when steps are looked for
_RUNS = 0.5  # of a bin, for a rank that computes in it
_LOOK_BINS = 3  # between two looks there are two bins at most
_FIRST_BYTES = 4096  # in a bin; less is the launcher's own talk
_FLOWS = 0.5  # of the usual rate while bytes flow
_GAP_S = 0.02  # between bytes that flow
_BLUR = 0.75  # of a look: how far a burst was off in the first 14 jobs of validation.watch
_ENOUGH = 40  # steps that make a sure answer
_FIRST_ANSWER_S, _LATER = 4.0, 1.5  # the next answer comes after so many times the time so far
_EVERY_S, _JUDGING = 5.0, 0.02  # between windows; share of a processor that judging them takes
MOST_S = 600.0


@dataclass(frozen=True, slots=True)
class _Seen:
    """The counters of each rank as rates in bins of equal length."""

    start_ns: int
    bin_ns: int
    ranks: tuple[int, ...]
    computing: Reals  # by rank and bin: share of the bin in which a thread ran, up to 1
    communicating: Reals  # share that the library's own threads ran
    delayed: Reals  # share in which none ran and one waited for a processor
    # Shares in which the main thread slept and waited for no rank (not a number where untold), and
    # in which it may have waited for one.
    elsewhere: Reals
    unclear: Reals
    sent: Reals  # bytes
    received: Reals
    flowing: NDArray[np.bool_]  # by bin: bytes of the job flowed

    @classmethod
    def of(cls, looks: Mapping[int, Reals], bin_s: float, *, waits_are_told: bool) -> _Seen:
        """Put the looks at all ranks on one grid of time.

        `waits_are_told`: a rank that seems to wait for others surely does nothing else.
        """
        tables = {rank: rows for rank, rows in looks.items() if len(rows) > 1}
        if len(tables) < len(looks):
            none = np.zeros((0, 0))
            return cls(0, 1, (), none, none, none, none, none, none, none, np.zeros(0, bool))
        start_ns = max(rows[0, TIME] for rows in tables.values())
        end_ns = min(rows[-1, TIME] for rows in tables.values())
        grid = np.arange(start_ns, end_ns, bin_s * 1e9)

        def per_bin(column: int) -> Reals:
            return np.array(
                [
                    np.diff(np.interp(grid, rows[:, TIME], rows[:, column]))
                    for rows in tables.values()
                ]
            )

        sent, received = per_bin(SENT), per_bin(RECEIVED)
        bytes_ = (sent + received).sum(axis=0)
        # Before the first real bytes a job loads its modules and its data.
        flowed = np.flatnonzero(bytes_ > _FIRST_BYTES)
        first = int(flowed[0]) if len(flowed) else 0
        computing = np.minimum(per_bin(COMPUTED)[:, first:] / (bin_s * 1e9), 1)
        delayed = np.minimum(per_bin(DELAYED)[:, first:] / (bin_s * 1e9), 1 - computing)
        elsewhere = per_bin(ELSEWHERE)[:, first:] / (bin_s * 1e9)
        does_other = (computing + delayed >= _RUNS / 2) | (elsewhere >= _RUNS)
        return cls(
            int(grid[first]) if len(grid) else int(start_ns),
            round(bin_s * 1e9),
            tuple(tables),
            computing,
            per_bin(COMMUNICATED)[:, first:] / (bin_s * 1e9),
            delayed,
            elsewhere,
            per_bin(UNCLEAR)[:, first:] / (bin_s * 1e9),
            sent[:, first:],
            received[:, first:],
            _flowing(bytes_[first:], does_other.any(axis=0) if waits_are_told else None, bin_s),
        )

    @property
    def bins(self) -> int:
        return int(self.sent.shape[1])

    @property
    def busy(self) -> NDArray[np.bool_]:
        """Say in which bins each rank computes, or would with a processor."""
        return np.asarray(self.computing + self.delayed >= _RUNS, bool)


def _flowing(
    bytes_: Reals, does_other: NDArray[np.bool_] | None, bin_s: float
) -> NDArray[np.bool_]:
    """Say in which bins bytes flowed.

    Bytes come in lumps. So a short gap counts as flowing, too, in which no rank does anything else.
    Where that is untold, the gap has one bin at most.
    """
    usual = np.quantile(bytes_[bytes_ > 0], 0.8) if (bytes_ > 0).any() else 0.0
    flowing = bytes_ > _FLOWS * usual
    if does_other is None:
        flowing[1:-1] |= flowing[:-2] & flowing[2:]
        return flowing
    before = np.cumsum(np.concatenate([[0], does_other]))
    for first, last in zip(*_stretches(~flowing), strict=True):
        is_short = first > 0 and last < len(flowing) and (last - first) * bin_s <= _GAP_S
        if is_short and before[first] == before[last]:
            flowing[first:last] = True
    return flowing


def watch(
    pid: int | str,
    *,
    hosts: str = "",
    seconds: str | float = 30,
    bandwidth: str | float | None = None,
    until_sure: bool = True,
    out: str | Path | None = None,
    on_look: Callable[[Watched], None] | None = None,
) -> Watched:
    """Watch a running job from outside, and say what limits it.

    - `pid`: a process of the job: a rank, or the launcher above its ranks. Or a name of the job:
      words of its command, `"slurm:1234"`, `"k8s:bert"`, or where its ranks meet,
      `"master:10.0.0.1:29500"`.
    - `hosts`: hosts with ranks of the job, `"gpu[1-8]"`, which your own ssh reaches.
    - `seconds`: how long to look at most, 30 or `"30s"`.
    - `bandwidth`: the line rate of the links, as in `explain`.
    - `until_sure`: stop as soon as many steps were seen.
    - `out`: the directory that the run becomes.
    - `on_look`: called with the answer so far, a few times.

        fw.watch(48213, bandwidth="10Gbps").explanation.verdict.sentence
    """
    line_bps = None if bandwidth is None else rate(bandwidth)
    most_s = looking_s(seconds, MOST_S)
    if out is not None:
        refuse_existing(Path(out), replace=False)
    with closing(_watcher(pid, hosts)) as watcher, closing(Asking()) as asking:
        is_running, is_interrupted, until_s = True, False, min(_FIRST_ANSWER_S, most_s)
        while True:
            try:
                is_running = watcher.watch(until_s - watcher.seconds)
            except KeyboardInterrupt:  # the answer so far is the answer
                most_s, is_interrupted = until_s, True
            looks = watcher.looks
            found = judged(looks, line_bps, has_ended=not is_running, idle=asking.idle)
            if is_running and not is_interrupted:
                _ask(asking, found, looks)
            if on_look is not None:
                on_look(found)
            if not is_running or until_s >= most_s:
                break
            told = found.explanation
            if until_sure and (found.stuck or (told and len(told.detail.steps) >= _ENOUGH)):
                break
            until_s = min(_LATER * until_s, most_s)
        if is_running and not is_interrupted:
            with suppress(KeyboardInterrupt):
                idle = asking.wait()
                if idle is not found.idle:
                    found = judged(looks, line_bps, idle=idle)
    if out is not None and found.run is not None:
        write(found.run, out)
    return found


def watching(
    pid: int | str,
    *,
    hosts: str = "",
    seconds: str | float = math.inf,
    bandwidth: str | float | None = None,
    alerts: Sequence[str | Alert] = (),
    window_s: str | float = 60.0,
) -> Iterator[Watched]:
    """Watch a running job until it ends; yield the answer about its last seconds again and again.

    - `pid`, `hosts`, `bandwidth`: as in `watch`.
    - `seconds`: how long to look at most. Memory stays bounded for weeks.
    - `alerts`: conditions such as `"step > 1.2x"`. Those that begin are in `Watched.alerts`.
    - `window_s`: how much of the past an answer is about.

        for window in fw.watching(48213, alerts=["stuck"]):
            print(window.sentence)
    """
    line_bps = None if bandwidth is None else rate(bandwidth)
    conditions = [alert(each) if isinstance(each, str) else each for each in alerts]
    most_s, keeps_s = looking_s(seconds), looking_s(window_s, what="window_s")
    is_running, next_s = True, 0.0
    with (
        closing(_watcher(pid, hosts, keeps_s)) as watcher,
        closing(Asking()) as asking,
    ):
        while is_running and next_s < most_s:
            next_s = min(next_s + _EVERY_S, most_s)
            is_running = watcher.watch(next_s - watcher.seconds)
            before_s = time.process_time()
            looks = watcher.looks.latest(keeps_s)
            found = judged(looks, line_bps, has_ended=not is_running, idle=asking.idle)
            if is_running:
                _ask(asking, found, looks)
            # Judging may take a share of a processor, too.
            next_s = max(next_s, watcher.seconds) + max(
                (time.process_time() - before_s) / _JUDGING - _EVERY_S, 0.0
            )
            begun = (condition.check(found) for condition in conditions)
            yield replace(found, alerts=tuple(alerted for alerted in begun if alerted is not None))


def _watcher(pid: int | str, hosts: str, keeps_s: float = math.inf) -> Watcher | HostsWatcher:
    """Return what looks at a job, here or on several hosts."""
    watcher: Watcher | HostsWatcher
    names = host_names(hosts) if hosts else ()
    if names and isinstance(pid, str):
        watcher = HostsWatcher(dict.fromkeys(names, ("--job", pid)), keeps_s)
    elif names:
        own = job_of(int(pid))
        if not own.meets:
            raise UsageError(
                f"watch {pid} --hosts: expected a job whose environment tells where its ranks meet "
                "(MASTER_ADDR, MASTER_PORT); name it with --job, as it is named on all hosts"
            )
        watcher = HostsWatcher(
            {socket.gethostname(): (str(pid),)}
            | dict.fromkeys(
                [name for name in names if not is_here(name)], ("--job", f"master:{own.meets}")
            ),
            keeps_s,
        )
    else:
        watcher = Watcher(job_named(pid) if isinstance(pid, str) else job_of(pid), keeps_s)
    return watcher


def _ask(asking: Asking, found: Watched, looks: Looks) -> None:
    """Ask a rank what it waits for, if it is idle and the answer would say more with it."""
    waiting, told = found.waiting, found.explanation
    if waiting is None or told is None or found.stuck is not None:
        return
    least_s = THRESHOLD * told.step_s
    rank = max(waiting.of_rank_s, key=lambda each: waiting.of_rank_s[each])
    if found.kind == "straggler":
        rank = next(iter(told.verdict.ranks), rank)
        is_idle = waiting.of_rank_s[rank] >= least_s
    else:
        is_idle = waiting.quiet_s >= least_s
    if is_idle:
        asking.begin(rank, looks)


def judged(
    looks: Looks, line_bps: float | None, *, has_ended: bool = False, idle: Idle | None = None
) -> Watched:
    """Say what looks at a job show: its step, its account, its stuck rank.

    `idle`: the answer of a rank that was asked why it does nothing.
    """
    first = next(iter(looks.by_rank.values()), np.zeros((0, COLUMNS)))
    between_s = looks.seconds
    if len(first) > 1:
        between_s = float(first[-1, TIME] - first[0, TIME]) / 1e9 / (len(first) - 1)
    bin_s = max(_BIN_S, between_s / 2)
    # Clocks of several hosts blur where a burst ends, too.
    clocks_s = max((host.clock_uncertainty_s for host in looks.hosts), default=0.0)
    blur_s = _BLUR * max(between_s, bin_s) + clocks_s
    # What processors do is not the work of ranks on GPUs: their account would be wrong.
    on_gpus = any(rank.uses_gpu for rank in looks.job.ranks)
    all_seen = len(looks.job.ranks) == looks.job.workers
    tells = all(len(rows) and np.isfinite(rows[-1, ELSEWHERE]) for rows in looks.by_rank.values())
    waits_are_told = all_seen and tells and not on_gpus
    seen = _Seen.of(looks.by_rank, bin_s, waits_are_told=waits_are_told)
    edges, confidence, no_step = _steps(seen, between_s * 1e9 / seen.bin_ns)
    run = explanation = waiting = None
    ranges: dict[str, tuple[float, float]] = {}
    if len(edges) and not on_gpus:
        works = seen.busy | seen.flowing
        elsewhere = Elsewhere.of(seen.elsewhere, seen.unclear, works, idle, all_seen=all_seen)
        run = _as_run(looks, seen, edges, elsewhere.bins, idle, line_bps)
        explanation = explain(run)
        untold_s = _untold_s(seen, run, elsewhere.untold)
        waiting = Waiting.of(elsewhere, seen.ranks, edges, seen.bin_ns / 1e9, untold_s, idle)
        ranges = ranges_of(explanation, run, blur_s, waiting)
    ranks = seen_ranks(looks)
    return Watched(
        job=looks.job,
        seconds=looks.seconds,
        confidence=confidence,
        explanation=explanation,
        ranges=ranges,
        stuck=stuck_in(looks, None if explanation is None else explanation.step_s),
        no_step=no_step,
        run=run,
        ranks=ranks,
        looked_share=looks.took_s / looks.seconds if looks.seconds else 0.0,
        between_looks_s=between_s,
        has_ended=has_ended,
        hosts=looks.hosts,
        notes=notes_of(looks),
        step_on_gpus=_step_on_gpus(seen, edges, ranks) if on_gpus and len(edges) > 1 else None,
        idle=idle,
        waiting=waiting,
    )


def _untold_s(seen: _Seen, run: Run, untold: NDArray[np.bool_]) -> float:
    """Return for how long in a step a rank waits for bytes, and nothing tells why: the longest."""
    table, before = run.collectives, np.concatenate([[0], np.cumsum(untold)])
    issued, begun = (
        (each - seen.start_ns) // seen.bin_ns for each in (table.issue_ns, table.start_ns)
    )
    waited = before[begun] - before[issued]
    most = max(int(waited[table.rank == rank].sum()) for rank in seen.ranks)
    return most / max(len(np.unique(table.step)), 1) * seen.bin_ns / 1e9


def _step_on_gpus(seen: _Seen, edges: NDArray[np.int64], ranks: Sequence[SeenRank]) -> StepOnGpus:
    """Return what counters tell of a step whose computing they do not show."""
    lengths = np.diff(edges) * seen.bin_ns / 1e9
    sent = seen.sent[:, edges[0] : edges[-1]].sum(axis=1) / len(lengths)
    busy = [rank.gpu_busy for rank in ranks if rank.gpu_busy is not None]
    return StepOnGpus(
        step_s=float(lengths[usual_steps(lengths)].mean()),
        step_bytes=float(sent.max()),
        flows=float(seen.flowing[edges[0] : edges[-1]].mean()),
        busy=sum(busy) / len(busy) if busy else None,
    )


def _steps(seen: _Seen, look_bins: float) -> tuple[NDArray[np.int64], float, Finding | None]:
    """Return the bins at which steps begin, how alike steps are, and a reason where none is.

    The start of the script, or another phase of it, may hide the steps. So the latest half and the
    latest quarter are tried as well.
    """
    none = np.empty(0, np.int64)
    if not seen.bins or not (seen.sent.any() or seen.computing.any()):
        return none, 0.0, NothingSeen()
    bytes_ = (seen.sent + seen.received).sum(axis=0)
    if len(seen.ranks) > 1 and bytes_.max() <= _FIRST_BYTES:
        return none, 0.0, NothingSent()
    computing = seen.computing.mean(axis=0)
    bins = np.arange(seen.bins + 1)
    for first in (0, seen.bins // 2, 3 * seen.bins // 4):
        carried, computed = (
            np.concatenate([[0.0], np.cumsum(part[first:])]) for part in (bytes_, computing)
        )
        rhythm = rhythm_of(bins[first:].astype(float), carried, computed, look=look_bins)
        if rhythm is not None:
            starts = np.rint(rhythm.starts).astype(np.int64)
            return before_pauses(starts, seen.flowing), rhythm.confidence, None
        if len(seen.ranks) == 1 and computing[first:].any():
            edges, confidence = repeated(computing[first:])
            if len(edges) > FEWEST_STEPS:
                return edges + first, confidence, None
    return none, 0.0, no_step_within(seen.bins * seen.bin_ns / 1e9)


def _as_run(
    looks: Looks,
    seen: _Seen,
    edges: NDArray[np.int64],
    elsewhere: NDArray[np.bool_],
    idle: Idle | None,
    line_bps: float | None,
) -> Run:
    """Make spans of each rank: its steps, its computing, and the bytes of each burst."""
    job, loads = looks.job, idle is not None and bool(idle.is_loading)
    spans = _spans(seen, edges, elsewhere & loads)
    columns = np.array(_bursts(seen, edges, elsewhere), np.int64).reshape(-1, 7)
    of_all = job.workers / max(2 * (job.workers - 1), 1)  # a rank sends 2 (N-1)/N of its gradients

    def at_ns(bins: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.asarray(seen.start_ns + bins * seen.bin_ns, np.int64)

    steps = max(len(edges) - 1, 1)

    def of_a_step(*shares: Reals) -> tuple[tuple[float, float], ...]:
        """Return the seconds of a step that some shares of the bins are, for each rank."""
        inside = np.stack(shares)[:, :, edges[0] : edges[-1]]
        rows = inside.sum(axis=(0, 2)) * seen.bin_ns / 1e9 / steps
        return tuple(zip(map(float, seen.ranks), rows.tolist(), strict=True))

    missing = job.workers - len(job.ranks)
    hosts = {each.rank: f"{each.host}/{each.network}" for each in job.ranks}
    return Run(
        provenance=Provenance(origin="measured", source=job.ranks[0].command),
        facts=Facts(
            workers=job.workers,
            hosts=",".join(hosts.get(rank, "") for rank in range(job.workers)),
            line_rate_bps=line_bps,
            backend=job.backend or None,
            machines=len({each.host for each in job.ranks}),
            processors=looks.processors.shape[1] - 1 or None,
            processor_s=of_a_step(seen.computing, seen.communicating),
            communication_processor_s=of_a_step(seen.communicating),
            run_s=of_a_step(seen.computing),
            run_delay_s=of_a_step(seen.delayed),
            remarks=sentence(TakenForAllReduces()),
        ),
        gaps=gaps_of(
            [sentence(OnOtherHosts(missing=missing, workers=job.workers))] if missing else []
        ),
        hosts=_samples(looks),
        spans=Spans(
            rank=np.array([row[0] for row in spans], np.int64),
            step=np.array([row[1] for row in spans], np.int64),
            lane=np.array([row[2] for row in spans], object),
            name=np.array([row[3] for row in spans], object),
            start_ns=at_ns(np.array([row[4] for row in spans], np.int64)),
            end_ns=at_ns(np.array([row[5] for row in spans], np.int64)),
        ),
        collectives=Collectives(
            rank=columns[:, 0],
            step=columns[:, 1],
            sequence=columns[:, 2],
            group=np.full(len(columns), "", object),
            op=np.full(len(columns), "allreduce", object),
            dtype=np.full(len(columns), "float32", object),
            bytes=np.rint(columns[:, 3] * of_all).astype(np.int64),
            issue_ns=at_ns(columns[:, 4]),
            start_ns=at_ns(columns[:, 5]),
            end_ns=at_ns(columns[:, 6]),
        ),
    )


def _samples(looks: Looks) -> Hosts:
    """Return how busy each processor of this host was, from one look at it to the next."""
    worked = looks.processors
    between_s = np.diff(worked[:, TIME]) / 1e9
    used = np.clip(np.diff(worked[:, 1:], axis=0) / np.maximum(between_s, 1e-3)[:, None], 0, 1)
    names = [f"cpu{number}" for number in range(used.shape[1])]
    return Hosts(
        host=np.full(used.size, looks.job.ranks[0].host, object),
        device=np.array(names * len(used), object),
        time_ns=np.repeat(worked[1:, TIME].astype(np.int64), used.shape[1]),
        utilization=used.ravel(),
        memory_bytes=np.zeros(used.size, np.int64),
    )


def _spans(
    seen: _Seen, edges: NDArray[np.int64], loads: NDArray[np.bool_]
) -> list[tuple[int, int, str, str, int, int]]:
    """Return the steps of each rank, the stretches in which it computed and those it loaded in."""
    spans: list[tuple[int, int, str, str, int, int]] = []
    busy = seen.busy
    for place, rank in enumerate(seen.ranks):
        for step, (first, last) in enumerate(pairwise(edges)):
            spans.append((rank, step, "host", "step", int(first), int(last)))
        for lane, name, mask in (
            ("compute", "threads that compute", busy[place]),
            ("input", "wait", loads[place]),
        ):
            for first, last in zip(*_cut(*_stretches(mask), edges), strict=True):
                step = int(np.searchsorted(edges, first, "right")) - 1
                if 0 <= step < len(edges) - 1:
                    spans.append((rank, step, lane, name, int(first), int(last)))
    return spans


def _bursts(
    seen: _Seen, edges: NDArray[np.int64], elsewhere: NDArray[np.bool_]
) -> list[tuple[int, int, int, int, int, int, int]]:
    """Return each rank's bursts: step, number, bytes, and the bins of issue, start and end."""
    flowing = seen.flowing
    starts, ends = _cut(*_stretches(flowing), edges)
    # Bytes between two bursts belong to the nearer one, so that all are counted.
    borders = np.concatenate([[0], (ends[:-1] + starts[1:]) // 2, [seen.bins]]).astype(np.int64)
    starts, ends = _without_blur(starts, ends, np.asarray(seen.busy.all(axis=0), bool))
    # Looks blur which bytes belong to which burst. So each has its part of a step's by its length.
    step_of = np.searchsorted(edges, starts, "right")
    lengths = (ends - starts).astype(float)
    shares = lengths / np.bincount(step_of, lengths)[step_of]
    rows: list[tuple[int, int, int, int, int, int, int]] = []
    waiting = ~(seen.busy | flowing | elsewhere)
    for place, rank in enumerate(seen.ranks):
        waits = waiting[place]
        before = np.concatenate([[0], np.cumsum(seen.sent[place])])
        sent = np.bincount(step_of, np.diff(before[borders]))[step_of] * shares
        for number, (first, last) in enumerate(zip(starts, ends, strict=True)):
            step = int(step_of[number]) - 1
            if not 0 <= step < len(edges) - 1:
                continue
            issued = first
            while issued > edges[step] and waits[issued - 1]:
                issued -= 1
            if first - issued <= _LOOK_BINS:  # too short to be seen
                issued = first
            payload = int(sent[number])
            rows.append((rank, step, number, payload, int(issued), int(first), int(last)))
    return rows


def _without_blur(
    starts: NDArray[np.int64], ends: NDArray[np.int64], busy: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Leave out the begin and the end of bursts where all ranks compute.

    A look comes up to so many bins after a burst's first bytes, or after its last ones.
    """
    starts, ends = starts.copy(), ends.copy()
    for _ in range(_LOOK_BINS - 1):
        is_long = ends - starts > 1
        starts += is_long & busy[np.minimum(starts, len(busy) - 1)]
        is_long = ends - starts > 1
        ends -= is_long & busy[ends - 1]
    return starts, ends


def _cut(
    starts: NDArray[np.int64], ends: NDArray[np.int64], edges: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut stretches that go on from one step to the next, so that each step has its own part."""
    inner = np.array([edge for edge in edges if ((starts < edge) & (edge < ends)).any()], np.int64)
    return np.sort(np.append(starts, inner)), np.sort(np.append(ends, inner))


def _stretches(mask: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where each stretch of true values begins, and where it has ended."""
    turns = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return turns[::2], turns[1::2]
