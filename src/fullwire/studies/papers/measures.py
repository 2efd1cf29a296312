"""The figures that both papers look at, taken from the run of a trial.

A rank's bytes on the wire and the processors' use come from samples of the host's own counters. A
run without such samples gives them by the collectives' sizes and the ranks' own processor time, and
the figure says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from fullwire.collectives.cost import bus_factor
from fullwire.run.intervals import covered_ns
from fullwire.run.run import Run
from fullwire.simulation.typical import typical_step
from fullwire.studies.papers.trials import Trial
from fullwire.timeline.account import Part, account

NEARLY_ALL = 0.8  # of a host's bytes: the rest is a broadcast at the start and the like
NOBODY = -1
BytesFrom: TypeAlias = Literal["NIC counters", "sizes of collectives"]
ProcessorsFrom: TypeAlias = Literal[
    "/proc/stat, all work on the machine", "processor time of the ranks"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One trial as recorded; times and rates are undilated, shares are the same either way."""

    trial: Trial
    step_s: float
    deviation: float  # of the steps from the typical step, as a share of it
    compute_s: float
    communication_s: float  # time of a step in which a collective is outstanding
    gradient_bytes: float  # that a rank gives to collectives in a step
    sent_bytes: float  # that leave a host in a step
    sent_from: BytesFrom
    processor_utilization: float
    processors_from: ProcessorsFrom
    processors: int
    # by host in the order of the launch; None if the run lacks samples
    sends_to: tuple[int, ...] | None

    @property
    def network_utilization(self) -> float:
        """Bits sent over the bits that the line rate allows, in whole steps."""
        return 8 * self.sent_bytes / (self.trial.rate_bps * self.step_s)

    @property
    def busy_utilization(self) -> float:
        """The same share while a collective was outstanding."""
        return 8 * self.sent_bytes / (self.trial.rate_bps * self.communication_s)


def measured(trial: Trial, run: Run) -> Measured:
    """Take a trial's figures from its run."""
    step = typical_step(run)
    assert step.measured_ns is not None  # every recorded step has a length
    accounted = account(run, dict.fromkeys(range(trial.workers), trial.rate_bps))
    steps = accounted.steps[accounted.is_typical]
    rows = run.collectives.rows(np.isin(run.collectives.step, steps))
    rank_steps = trial.workers * len(steps)
    first = int(steps.min())
    marks = run.spans.rows((run.spans.name == "step") & (run.spans.step >= first))
    window = _Window(int(marks.start_ns.min()), int(marks.end_ns.max()), len(np.unique(marks.step)))
    gradient_bytes = float(rows.bytes.sum()) / rank_steps
    sent = _sent_bytes(run, window)
    factors = [bus_factor(op, trial.workers) for op in rows.op.tolist()]
    step_s = step.measured_ns * 1e-9
    used, used_from = _processor_utilization(run, window, step_s)
    return Measured(
        trial=trial,
        step_s=step_s,
        deviation=step.deviation,
        compute_s=accounted.parts_s[Part.COMPUTE.key],
        communication_s=_communication_s(run, steps, trial.workers),
        gradient_bytes=gradient_bytes,
        sent_bytes=float(rows.bytes @ np.array(factors)) / rank_steps if sent is None else sent,
        sent_from="sizes of collectives" if sent is None else "NIC counters",
        processor_utilization=used,
        processors_from=used_from,
        processors=run.facts.processors or 1,
        sends_to=_sends_to(run),
    )


@dataclass(frozen=True, slots=True)
class _Window:
    """From the start of the first typical step to the end of the last, and their number."""

    start_ns: int
    end_ns: int
    steps: int


def _communication_s(run: Run, steps: np.ndarray, workers: int) -> float:
    """Return how long a collective was outstanding in a step, on the average rank."""
    total_ns = 0
    rows = run.collectives.rows(np.isin(run.collectives.step, steps))
    for rank in range(workers):
        mine = rows.rows(np.flatnonzero(rows.rank == rank))
        total_ns += covered_ns(mine.issue_ns, mine.end_ns)
    return total_ns * 1e-9 / (workers * len(steps))


def _sent_bytes(run: Run, window: _Window) -> float | None:
    """Return the bytes that left the average host in a step, from its interface's counters."""
    edges_ns = np.array([window.start_ns, window.end_ns])
    totals = []
    for host in sorted(set(run.links.host)):
        rows = run.links.rows(run.links.host == host)
        gained = []
        for name in set(rows.interface):  # a counter is taken to grow evenly between samples
            chosen = rows.interface == name
            time_ns, counter = rows.time_ns[chosen], rows.tx_bytes[chosen]
            begin, end = np.interp(
                edges_ns - time_ns[0], time_ns - time_ns[0], counter - counter[0]
            )
            gained.append(float(end - begin))
        totals.append(max(gained))
    return float(np.mean(totals)) / window.steps if totals else None


def _processor_utilization(
    run: Run, window: _Window, step_s: float
) -> tuple[float, ProcessorsFrom]:
    is_processor = np.array([name.startswith("cpu") for name in run.hosts.device], bool)
    inside = (run.hosts.time_ns >= window.start_ns) & (run.hosts.time_ns <= window.end_ns)
    shares = run.hosts.utilization[is_processor & inside]
    if len(shares):
        return float(shares.mean()), "/proc/stat, all work on the machine"
    per_rank, processors = run.facts.processor_s or (), run.facts.processors or 1
    used_s = sum(used_s for _, used_s in per_rank)
    return used_s / (processors * step_s), "processor time of the ranks"


def _sends_to(run: Run) -> tuple[int, ...] | None:
    """Return the host that receives nearly all bytes of each host over TCP, or NOBODY."""
    names = (run.facts.hosts or "").split(",")
    if not len(run.sockets) or len(names) < 2:
        return None
    # The host of each address that connections leave from.
    pairs = zip(run.sockets.host.tolist(), run.sockets.flow.tolist(), strict=True)
    address_of = {_address(flow.partition(">")[0]): host for host, flow in dict.fromkeys(pairs)}
    receivers = []
    for name in names:
        sent: dict[str, int] = {}
        rows = run.sockets.rows(run.sockets.host == name)
        for flow in set(rows.flow.tolist()):
            remote = _address(flow.partition(">")[2])
            gained = int(np.ptp(rows.bytes_acked[rows.flow == flow]))
            sent[remote] = sent.get(remote, 0) + gained
        most = max(sent, key=lambda address: sent[address], default="")
        is_nearly_all = sent.get(most, 0) >= NEARLY_ALL * sum(sent.values()) > 0
        to = address_of.get(most, "") if is_nearly_all else ""
        receivers.append(names.index(to) if to in names else NOBODY)
    return tuple(receivers)


def _address(end: str) -> str:
    """Return the address of one end of a connection, without its port."""
    return end.strip().rpartition(":")[0].strip("[]").removeprefix("::ffff:")
