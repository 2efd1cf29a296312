"""Windows of a job that is being recorded: the view of `watch`, with all that a recording knows.

The recording so far becomes a run again and again, and its last minute is explained. So the parts
of a step need no ranges.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fullwire.answers.alerts import Alert, alert
from fullwire.answers.conditions import looking_s
from fullwire.answers.explain import Explanation, explain
from fullwire.answers.watched import SeenRank, Watched, no_step_within
from fullwire.errors import FullwireError, UsageError
from fullwire.recorder.assemble import assemble
from fullwire.recorder.jobs_here import JobHere, RankHere
from fullwire.recorder.record import known_of
from fullwire.run.placement import host_of_rank
from fullwire.run.run import Run
from fullwire.run.store import RunWriter, read_run

_EVERY_S, _MAKING = 5.0, 0.02  # between windows; share of a processor that making them takes
_LOOK_S = 0.1


def watching_recording(
    directory: str | Path,
    *,
    seconds: str | float = float("inf"),
    bandwidth: str | float | None = None,
    alerts: Sequence[str | Alert] = (),
    window_s: str | float = 60.0,
    ended: threading.Event | None = None,
) -> Iterator[Watched]:
    """Look at a job that is being recorded; yield the answer about its last seconds, until its end.

    - `directory`: the recording, `job.run.recording`. It goes when the job ends.
    - `seconds`, `bandwidth`, `alerts`, `window_s`: as in `watching`.
    - `ended`: set by another thread, it ends the view.

        for window in watching_recording("job.run.recording"):
            print(window.sentence)
    """
    place = Path(directory)
    if not place.is_dir():
        raise UsageError(
            f"{place}: expected the folder of a recording that goes on, job.run.recording"
        )
    conditions = [alert(each) if isinstance(each, str) else each for each in alerts]
    most_s, keeps_s = looking_s(seconds), looking_s(window_s, what="window_s")
    begun_s, next_s, ended = time.monotonic(), 0.0, ended or threading.Event()
    while next_s < most_s:
        next_s = min(next_s + _EVERY_S, most_s)
        while (left_s := begun_s + next_s - time.monotonic()) > 0 and place.is_dir():
            if ended.wait(min(left_s, _LOOK_S)):
                return
        before_s = time.thread_time()
        try:
            found = _window(place, bandwidth, keeps_s)
        except (FullwireError, OSError, ValueError):
            if not place.is_dir():
                return
            continue  # a file is just being written
        next_s += max((time.thread_time() - before_s) / _MAKING - _EVERY_S, 0.0)
        begun = (condition.check(found) for condition in conditions)
        yield replace(found, alerts=tuple(alerted for alerted in begun if alerted is not None))


def _window(place: Path, bandwidth: str | float | None, window_s: float) -> Watched:
    """Make a run of a recording so far, and explain its last seconds."""
    with tempfile.TemporaryDirectory() as folder:
        with RunWriter(Path(folder) / "so-far.run") as writer:
            path = assemble([place], writer, known_of([place]))
        whole = read_run(path)
    steps = whole.spans.rows((whole.spans.name == "step") & (whole.spans.step >= 0))
    last_ns = int(steps.end_ns.max(initial=0))
    late = steps.step[steps.start_ns >= last_ns - window_s * 1e9]
    first = int(late.min()) if len(late) else 0
    run = replace(
        whole,
        spans=whole.spans.rows(whole.spans.step >= first),
        collectives=whole.collectives.rows(whole.collectives.step >= first),
        gradients=whole.gradients.rows(whole.gradients.step >= first),
    )
    hosts, workers = host_of_rank(run), run.facts.workers or 1
    ranks = np.unique(run.spans.rank).tolist() or [0]
    explanation = explain(run, bandwidth=bandwidth) if len(late) else None
    began_ns = int(steps.start_ns[steps.step >= first].min()) if len(late) else last_ns
    lasted_s = (last_ns - began_ns) / 1e9
    return Watched(
        job=JobHere(
            ranks=tuple(
                RankHere(
                    pid=0,  # a recording notes ranks, and no processes
                    rank=rank,
                    user="",
                    command=run.provenance.source,
                    network=0,
                    uses_gpu=False,
                    host=hosts.get(rank, ""),
                )
                for rank in ranks
            ),
            workers=workers,
            is_guessed=False,
        ),
        seconds=lasted_s,
        confidence=1.0,
        explanation=explanation,
        ranges={}
        if explanation is None
        else {part: (value_s, value_s) for part, value_s in explanation.account.items()},
        stuck=None,
        no_step=None if len(late) else no_step_within(window_s),
        run=run,
        ranks=() if explanation is None else _ranks(run, hosts, explanation, began_ns, lasted_s),
        looked_share=0.0,
        between_looks_s=0.0,
        has_ended=False,
        source="inside",
    )


def _ranks(
    run: Run,
    hosts: Mapping[int, str],
    explanation: Explanation,
    began_ns: int,
    lasted_s: float,
) -> tuple[SeenRank, ...]:
    """Return each rank's shares of the time; bytes of a host are shared among its ranks."""
    ranks_on = Counter(hosts.values())
    sockets = run.sockets.rows(run.sockets.time_ns >= began_ns)
    sent, again = dict[str, float](), dict[str, float]()
    for key in {*zip(sockets.host.tolist(), sockets.flow.tolist(), strict=True)}:
        own = sockets.rows((sockets.host == key[0]) & (sockets.flow == key[1]))
        sent[key[0]] = sent.get(key[0], 0.0) + float(np.ptp(own.bytes_acked))
        again[key[0]] = again.get(key[0], 0.0) + float(np.ptp(own.retransmits))
    delays = dict(run.facts.run_delay_s or ())
    found = []
    for each in explanation.ranks:
        host, span_s = hosts.get(each.rank, ""), each.span_s or 1.0
        together = max(ranks_on[host], 1)
        waited_s = each.waiting_s or 0.0
        sent_bytes = sent.get(host, 0.0) / together
        found.append(
            SeenRank(
                rank=each.rank,
                computing=each.compute_s / span_s,
                sending=max(each.exposed_s - waited_s, 0.0) / span_s,
                waiting=(waited_s + each.idle_s) / span_s,
                delayed=min(delays.get(each.rank, 0.0) / explanation.step_s, 1.0),
                sent_bytes=sent_bytes,
                received_bytes=float("nan"),  # connections tell those that were acknowledged
                sent_bps=sent_bytes * 8 / (each.communication_s / span_s * lasted_s)
                if each.communication_s and lasted_s
                else 0.0,
                retransmits=again.get(host, 0.0) / together,
            )
        )
    return tuple(found)
