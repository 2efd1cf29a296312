"""Join the parts of a job: of a recording, or the runs that `watch -o` wrote on each of its hosts.

Bytes flow at both ends of a connection at one time. So two watches of one job are laid over each
other where their bursts of bytes meet, and the hosts need no common clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fullwire.errors import UsageError
from fullwire.findings.watching import OnOtherHosts, TakenForAllReduces
from fullwire.packets.rhythm import FEWEST_STEPS, flow_of
from fullwire.recorder.record import Recording
from fullwire.recorder.record import join as join_recording
from fullwire.run.facts import Facts
from fullwire.run.gaps import gaps_of
from fullwire.run.placement import host_of_rank
from fullwire.run.run import Collectives, Run, Spans
from fullwire.run.store import is_run, read_run
from fullwire.run.store import write as write_run
from fullwire.units import shown
from fullwire.words import sentence

Whole = NDArray[np.int64]

_LAGS = 1000  # that are tried over one step
_MEETS = 0.5  # of the time in which one host's bytes flow, those of the other flow
_AS_GOOD = 0.02  # below the best: of alike lags the smallest is taken


def join(
    directories: Sequence[str | Path], output: str | Path, *, replace: bool = False
) -> Recording:
    """Make one run of a job recorded or watched in parts, or of a job that lost its recorder.

    - `directories`: the directories of its recordings, from one host or from several; or the runs
      that `watch` wrote on each host at the same time.
    - `output`: the path of the run.
    - `replace`: replace a run that exists.

        fw.join(["host0.recording", "host1.recording"], "job.run").path
    """
    if isinstance(directories, str) or not isinstance(directories, Iterable):
        raise UsageError(f"join: expected a list of directories, got {shown(directories)}")
    places = [Path(directory) for directory in directories]
    if not places:
        raise UsageError("join: expected one directory or more, got none")
    if not all(place.is_dir() and is_run(place) for place in places):
        return join_recording(directories, output, replace=replace)
    run = joined_watches([(str(place), read_run(place)) for place in places])
    return Recording(path=write_run(run, output, replace=replace), exit_status=0)


def joined_watches(runs: Sequence[tuple[str, Run]]) -> Run:
    """Return one run of a job that was watched on each of its hosts, in the steps of the first."""
    told, hosts = sentence(TakenForAllReduces()), dict[int, str]()
    for name, run in runs:
        if told not in (run.facts.remarks or ""):
            raise UsageError(
                f"join: expected runs that fullwire watch wrote, and {name} is another; recordings "
                "are joined from their .recording folders"
            )
        ranks = np.unique(run.spans.rank).tolist()
        twice = [rank for rank in ranks if rank in hosts]
        if twice:
            raise UsageError(f"join: expected each rank in one run, and rank {twice[0]} is in two")
        hosts |= {rank: host_of_rank(run).get(rank, "") for rank in ranks}
    first_name, first = max(runs, key=lambda each: len(np.unique(each[1].spans.rank)))
    workers = first.facts.workers or len(hosts)
    parts, offsets, delays = [], [], []
    edges = _edges(first)
    for name, run in runs:
        if run.facts.workers != first.facts.workers:
            raise UsageError(
                f"join: expected runs of one job, got {run.facts.workers} ranks in {name} and "
                f"{first.facts.workers} in {first_name}"
            )
        ahead_ns = 0 if run is first else _ahead_ns(name, run, first)
        own = _edges(run) + ahead_ns
        edges = edges[(edges >= own[0]) & (edges <= own[-1])]
        parts.append((run, ahead_ns))
        offsets += [(rank, ahead_ns / 1e9) for rank in np.unique(run.spans.rank).tolist()]
        delays += list(run.facts.run_delay_s or ())
    if len(edges) <= FEWEST_STEPS:
        raise UsageError(
            "join: expected runs that were watched at one time, and "
            f"{max(len(edges) - 1, 0)} steps are in all of them: {FEWEST_STEPS} are the fewest"
        )
    missing = workers - len(hosts)
    own_gaps = {
        sentence(OnOtherHosts(missing=workers - count, workers=workers)) for count in range(workers)
    }
    gaps = dict.fromkeys(gap for _, run in runs for gap in run.gaps if gap.reason not in own_gaps)
    lacking = [sentence(OnOtherHosts(missing=missing, workers=workers))] if missing else []
    return replace(
        first,
        facts=first.facts
        | Facts(
            hosts=",".join(hosts.get(rank, "") for rank in range(workers)),
            run_delay_s=tuple(sorted(delays)),
            clock_offset_s=tuple(sorted(offsets)),
        ),
        gaps=(*gaps, *gaps_of(lacking)),
        spans=Spans.joined([_spans(run, ahead_ns, edges) for run, ahead_ns in parts]),
        collectives=Collectives.joined(
            [_collectives(run, ahead_ns, first, edges) for run, ahead_ns in parts]
        ),
    )


def _edges(run: Run) -> Whole:
    """Return when steps begin, and the end of the last: one for all ranks of a watched run."""
    steps = run.spans.rows(run.spans.name == "step")
    own = steps.rows(steps.rank == steps.rank[:1])
    if not len(own.rank):
        raise UsageError("join: expected runs with steps, and one has none")
    return np.append(np.sort(own.start_ns), own.end_ns.max())


def _bursts(run: Run) -> tuple[Whole, Whole]:
    """Return when bytes began and ceased to flow; this is the same for all ranks of a run."""
    own = run.collectives.rows(run.collectives.rank == run.collectives.rank[:1])
    order = np.argsort(own.start_ns)
    return own.start_ns[order], own.end_ns[order]


def _ahead_ns(name: str, run: Run, first: Run) -> int:
    """Return what must be added to the times of a run, so that its bytes flow as the first's do."""
    step_ns = float(np.median(np.diff(_edges(first))))
    begin, end = (times.astype(np.float64) for times in _bursts(first))
    starts, ends = _bursts(run)
    within = (starts > begin[:1]) & (ends < end[-1:])
    starts, ends = starts[within], ends[within]
    flow = flow_of(begin, end)
    lags = np.linspace(-step_ns / 2, step_ns / 2, _LAGS)
    met = [(np.interp(ends + lag, *flow) - np.interp(starts + lag, *flow)).sum() for lag in lags]
    shares = np.array(met) / max(float((ends - starts).sum()), 1.0)
    if not len(starts) or shares.max() < _MEETS:
        raise UsageError(
            f"join: the bytes of {shown(name)} flow at other times than those of the first run: "
            "expected runs of one job, watched at the same time, with clocks less than half a "
            "step apart"
        )
    good = lags[shares >= shares.max() - _AS_GOOD]
    return int(good[np.argmin(abs(good))])


def _spans(run: Run, ahead_ns: int, edges: Whole) -> Spans:
    """Return the steps of all ranks of a run, and the spans in them, in the common steps."""
    spans = run.spans.rows(run.spans.name != "step")
    step = np.searchsorted(edges, spans.start_ns + ahead_ns, "right") - 1
    inside = (step >= 0) & (step < len(edges) - 1)
    kept = spans.rows(inside)
    ranks, steps = np.unique(run.spans.rank), len(edges) - 1
    whole = Spans(
        rank=np.repeat(ranks, steps),
        step=np.tile(np.arange(steps), len(ranks)),
        lane=np.full(len(ranks) * steps, "host", object),
        name=np.full(len(ranks) * steps, "step", object),
        start_ns=np.tile(edges[:-1], len(ranks)),
        end_ns=np.tile(edges[1:], len(ranks)),
    )
    moved = replace(
        kept,
        step=step[inside],
        start_ns=kept.start_ns + ahead_ns,
        end_ns=kept.end_ns + ahead_ns,
    )
    return Spans.joined([whole, moved])


def _collectives(run: Run, ahead_ns: int, first: Run, edges: Whole) -> Collectives:
    """Return the bursts of a run, each as part of that burst of the first run which it meets."""
    begin, end = _bursts(first)
    own = run.collectives
    middle = (own.start_ns + own.end_ns) // 2 + ahead_ns
    number = np.searchsorted((end[:-1] + begin[1:]) // 2, middle)
    step = np.searchsorted(edges, begin[number], "right") - 1
    inside = (step >= 0) & (step < len(edges) - 1)
    own, number, step = own.rows(inside), number[inside], step[inside]
    keys, place = np.unique(np.stack([own.rank, number]), axis=1, return_inverse=True)
    place, count = place.ravel(), keys.shape[1]
    issue, start, last = (np.full(count, limit) for limit in (2**62, 2**62, 0))
    np.minimum.at(issue, place, own.issue_ns + ahead_ns)
    np.minimum.at(start, place, own.start_ns + ahead_ns)
    np.maximum.at(last, place, own.end_ns + ahead_ns)
    payload, steps = np.zeros(count, np.int64), np.zeros(count, np.int64)
    np.add.at(payload, place, own.bytes)
    steps[place] = step
    return Collectives(
        rank=keys[0],
        step=steps,
        sequence=keys[1],
        group=np.full(count, "", object),
        op=np.full(count, "allreduce", object),
        dtype=np.full(count, "float32", object),
        bytes=payload,
        issue_ns=issue,
        start_ns=start,
        end_ns=last,
    )
