"""The figures of a study as tables; each is drawn and written as CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from fullwire.answers.whatif import whatif
from fullwire.studies.papers.explained import Explained
from fullwire.studies.papers.measures import NOBODY, Measured
from fullwire.studies.papers.predicted import FULL, Predicted
from fullwire.studies.papers.trials import BUCKETS, V100S, Trial

Row: TypeAlias = Mapping[str, Any]
FigureName: TypeAlias = Literal[
    "scaling",
    "computation",
    "utilization",
    "compression",
    "bytes",
    "ring",
    "iteration",
    "explained",
]
PAPER_WORKERS = 64
COMPRESSED_AT_BPS = (10e9, 100e9)
RATIOS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.5, 10.0, 20.0, 50.0, 100.0)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Figure:
    """One figure's rows; if the rows are empty, `note` gives the reason."""

    name: FigureName
    title: str
    note: str
    rows: tuple[Row, ...]


def alone(trial: Trial, results: Sequence[Measured]) -> Measured | None:
    """Return the trial of one worker with the same work, and the same dilation if there is one."""
    same = [
        result
        for result in results
        if result.trial.workers == 1
        and (result.trial.kind, result.trial.model, result.trial.batch)
        == (trial.kind, trial.model, trial.batch)
    ]
    return min(same, key=lambda result: result.trial.dilation != trial.dilation, default=None)


def setting(trial: Trial) -> str:
    """Name the hardware or emulation that a trial ran on."""
    if trial.kind == "real":
        return "real, on this machine's processors"
    if trial.dilation == 1:
        return "emulated V100, this machine's transport"
    return f"emulated V100, processors {trial.dilation}x as fast"


def scaling(results: Sequence[Measured], predicted: Sequence[Predicted]) -> Figure:
    """Scaling factor against workers and bandwidth: measured, and predicted in two ways."""
    rows = []
    for prediction in predicted:
        trial = prediction.trial
        baseline = alone(trial, results)
        if baseline is None or _is_compressed(trial) or trial.kind == "real":
            continue
        for kind, step_s in (
            ("measured", prediction.measured_s),
            ("predicted, measured transport", prediction.transport_s),
            ("predicted, full utilization", prediction.full_s),
        ):
            if step_s is not None:
                rows.append(
                    {
                        "model": trial.model,
                        "setting": setting(trial),
                        "workers": trial.workers,
                        "rate_bps": trial.rate_bps,
                        "kind": kind,
                        "step_s": step_s,
                        "scaling_factor": baseline.step_s / step_s,
                    }
                )
    return Figure(
        name="scaling",
        title="Scaling factor: predicted and measured",
        note="T1 is the run of one worker; full utilization leaves room for headers (1448/1514)",
        rows=tuple(rows),
    )


def _is_compressed(trial: Trial) -> bool:
    return trial.compression > 1 or trial.half or trial.buckets != "ddp"


def computation(results: Sequence[Measured]) -> Figure:
    """Computation time against workers, over that of one worker."""
    rows = [
        {
            "model": result.trial.model,
            "setting": setting(result.trial),
            "workers": result.trial.workers,
            "rate_bps": result.trial.rate_bps,
            "compute_s": result.compute_s,
            "over_one_worker": result.compute_s / baseline.compute_s,
        }
        for result in results
        if not _is_compressed(result.trial)
        and (baseline := alone(result.trial, results)) is not None
    ]
    return Figure(
        name="computation",
        title="Computation time over that of one worker",
        note="emulated accelerators wait, so they show lateness only; real jobs share processors",
        rows=tuple(rows),
    )


def utilization(results: Sequence[Measured]) -> Figure:
    """Use of the network and of the processors against bandwidth."""
    rows = [
        {
            "model": result.trial.model,
            "setting": setting(result.trial),
            "workers": result.trial.workers,
            "rate_bps": result.trial.rate_bps,
            "network_whole_step": result.network_utilization,
            "network_while_communicating": result.busy_utilization,
            "processors": result.processor_utilization,
            "bytes_from": result.sent_from,
            "processors_from": result.processors_from,
        }
        for result in results
        if result.trial.workers > 1 and not _is_compressed(result.trial)
    ]
    return Figure(
        name="utilization",
        title="How much of the links and processors was in use",
        note=_sources(results),
        rows=tuple(rows),
    )


def _sources(results: Sequence[Measured]) -> str:
    sent = " and ".join(sorted({result.sent_from for result in results}))
    used = " and ".join(sorted({result.processors_from for result in results}))
    return f"bytes from {sent}; processors from {used}"


def compression(results: Sequence[Measured]) -> Figure:
    """Scaling factor against compression ratio at 10 and 100 Gbps."""
    rows = []
    # Two predictions: the step in the lab, and the step by the paper's own rule for buckets.
    for workers, buckets, transport in ((4, BUCKETS, FULL), (PAPER_WORKERS, "paper", "full")):
        table = whatif(
            list(V100S),
            workers=workers,
            bandwidth=COMPRESSED_AT_BPS,
            compression=list(RATIOS),
            buckets=buckets,
            transport=transport,
        )
        rows += [
            {
                "model": row["run"],
                "workers": row["workers"],
                "rate_bps": row["bandwidth_bps"],
                "compression": row["compression"],
                "kind": "predicted",
                "scaling_factor": row["scaling_factor"],
                "buckets": row["buckets"],
            }
            for row in table.rows()
        ]
    rows += [
        {
            "model": result.trial.model,
            "workers": result.trial.workers,
            "rate_bps": result.trial.rate_bps,
            "compression": float(result.trial.compression),
            "kind": "measured",
            "scaling_factor": baseline.step_s / result.step_s,
            "buckets": result.trial.buckets,
        }
        for result in results
        if result.trial.rate_bps in COMPRESSED_AT_BPS
        and result.trial.dilation > 1
        and result.trial.workers == 4
        and (baseline := alone(result.trial, results)) is not None
    ]
    return Figure(
        name="compression",
        title="Scaling factor against compression ratio",
        note=f"lines: predicted at full utilization; points: measured; 4 workers {BUCKETS}, "
        f"{PAPER_WORKERS} the paper's buckets; codecs that cost nothing",
        rows=tuple(rows),
    )


def sent_bytes(results: Sequence[Measured]) -> Figure:
    """Bytes that leave a host in an iteration, against the gradients' size."""
    rows = [
        {
            "model": result.trial.model,
            "kind": result.trial.kind,
            "workers": result.trial.workers,
            "gradient_bytes": result.gradient_bytes,
            "sent_bytes": result.sent_bytes,
            "ratio": result.sent_bytes / result.gradient_bytes,
            "ring": 2 * (result.trial.workers - 1) / result.trial.workers,
            "from": result.sent_from,
        }
        for result in results
        if result.trial.workers > 1
    ]
    return Figure(
        name="bytes",
        title="Bytes that each host sends in an iteration",
        note=f"{_sources(results).partition(';')[0]}; lines: 2(N-1)/N times the gradients",
        rows=tuple(rows),
    )


def ring(results: Sequence[Measured]) -> Figure:
    """The host that each host sends to, in the order of the launch."""
    rows = [
        {"trial": result.trial.name, "workers": result.trial.workers, "host": host, "sends_to": to}
        for result in results
        if result.sends_to is not None and result.trial.workers > 2
        for host, to in enumerate(result.sends_to)
        if to != NOBODY
    ]
    note = (
        "from TCP connections; hosts in the order of the launch; so many trials"
        if rows
        else "no samples of connections: waits for packets"
    )
    return Figure(name="ring", title="To which host each one sends", note=note, rows=tuple(rows))


def iteration(results: Sequence[Measured], modelled: Sequence[Row]) -> Figure:
    """Iteration time against model size, for devices, batches and links."""
    rows = [
        {
            "basis": "measured",
            "model": result.trial.model,
            "device": setting(result.trial),
            "batch": result.trial.batch,
            "workers": result.trial.workers,
            "rate_bps": result.trial.rate_bps,
            "gradient_bytes": result.gradient_bytes,
            "step_s": result.step_s,
        }
        for result in results
        if result.trial.workers == 2 and not _is_compressed(result.trial)
    ]
    return Figure(
        name="iteration",
        title="Iteration time against model size",
        note="measured in the lab on 2 workers; modelled at full utilization on 4",
        rows=(*rows, *modelled),
    )


def explained(shares: Sequence[Explained]) -> Figure:
    """The share of the iteration time that each condition explains."""
    rows = [
        {
            "basis": shares_of.basis,
            "trials": shares_of.count,
            "condition": name,
            "alone": alone_share,
            "only_it": shares_of.only_it[name],
            "all_together": shares_of.together,
        }
        for shares_of in shares
        for name, alone_share in shares_of.alone.items()
    ]
    return Figure(
        name="explained",
        title="How much of the iteration time each condition explains",
        note="R2 of log(step) on it alone; on all, over without it",
        rows=tuple(rows),
    )
