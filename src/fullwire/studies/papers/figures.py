"""The figures of a study as tables: what is drawn, and what is written beside it as CSV."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    """One figure's rows; empty rows mean that nothing of it could be had, and `note` says why."""

    name: FigureName
    title: str
    note: str
    rows: tuple[Row, ...]


def alone(trial: Trial, found: Sequence[Measured]) -> Measured | None:
    """Return the trial of one worker that does the same work, with the same dilation if there."""
    same = [
        each
        for each in found
        if each.trial.workers == 1
        and (each.trial.kind, each.trial.model, each.trial.batch)
        == (trial.kind, trial.model, trial.batch)
    ]
    return min(same, key=lambda each: each.trial.dilation != trial.dilation, default=None)


def setting(trial: Trial) -> str:
    """Say on what a trial ran."""
    if trial.kind == "real":
        return "real, on this machine's processors"
    if trial.dilation == 1:
        return "emulated V100, this machine's transport"
    return f"emulated V100, processors {trial.dilation}x as fast"


def scaling(found: Sequence[Measured], predicted: Sequence[Predicted]) -> Figure:
    """Scaling factor against workers and bandwidth: measured, and predicted in two ways."""
    return Figure(
        name="scaling",
        title="Scaling factor: predicted and measured",
        note="T1 is the run of one worker; full utilization leaves room for headers (1448/1514)",
        rows=tuple(_scaling_rows(found, predicted)),
    )


def _scaling_rows(found: Sequence[Measured], predicted: Sequence[Predicted]) -> Iterator[Row]:
    for each in predicted:
        baseline = alone(each.trial, found)
        if baseline is None or _is_compressed(each.trial) or each.trial.kind == "real":
            continue
        for kind, step_s in (
            ("measured", each.measured_s),
            ("predicted, measured transport", each.transport_s),
            ("predicted, full utilization", each.full_s),
        ):
            if step_s is not None:
                yield {
                    "model": each.trial.model,
                    "setting": setting(each.trial),
                    "workers": each.trial.workers,
                    "rate_bps": each.trial.rate_bps,
                    "kind": kind,
                    "step_s": step_s,
                    "scaling_factor": baseline.step_s / step_s,
                }


def _is_compressed(trial: Trial) -> bool:
    return trial.compression > 1 or trial.half or trial.buckets != "ddp"


def computation(found: Sequence[Measured]) -> Figure:
    """Computation time against workers, over that of one worker."""
    rows = [
        {
            "model": each.trial.model,
            "setting": setting(each.trial),
            "workers": each.trial.workers,
            "rate_bps": each.trial.rate_bps,
            "compute_s": each.compute_s,
            "over_one_worker": each.compute_s / baseline.compute_s,
        }
        for each in found
        if not _is_compressed(each.trial) and (baseline := alone(each.trial, found)) is not None
    ]
    return Figure(
        name="computation",
        title="Computation time over that of one worker",
        note="emulated accelerators wait, so they show lateness only; real jobs share processors",
        rows=tuple(rows),
    )


def utilization(found: Sequence[Measured]) -> Figure:
    """Use of the network and of the processors against bandwidth."""
    rows = [
        {
            "model": each.trial.model,
            "setting": setting(each.trial),
            "workers": each.trial.workers,
            "rate_bps": each.trial.rate_bps,
            "network_whole_step": each.network_utilization,
            "network_while_communicating": each.busy_utilization,
            "processors": each.processor_utilization,
            "bytes_from": each.sent_from,
            "processors_from": each.processors_from,
        }
        for each in found
        if each.trial.workers > 1 and not _is_compressed(each.trial)
    ]
    return Figure(
        name="utilization",
        title="How much of the links and processors was in use",
        note=_sources(found),
        rows=tuple(rows),
    )


def _sources(found: Sequence[Measured]) -> str:
    sent = " and ".join(sorted({each.sent_from for each in found}))
    used = " and ".join(sorted({each.processors_from for each in found}))
    return f"bytes from {sent}; processors from {used}"


def compression(found: Sequence[Measured]) -> Figure:
    """Scaling factor against compression ratio at 10 and 100 Gbps."""
    return Figure(
        name="compression",
        title="Scaling factor against compression ratio",
        note=f"lines: predicted at full utilization; points: measured; 4 workers {BUCKETS}, "
        f"{PAPER_WORKERS} the paper's buckets; codecs that cost nothing",
        rows=(*_predicted_compression(), *_measured_compression(found)),
    )


def _predicted_compression() -> Iterator[Row]:
    """Predict what the lab can show, and what the paper asks with its own rule for buckets."""
    for workers, buckets, transport in ((4, BUCKETS, FULL), (PAPER_WORKERS, "paper", "full")):
        table = whatif(
            list(V100S),
            workers=workers,
            bandwidth=COMPRESSED_AT_BPS,
            compression=list(RATIOS),
            buckets=buckets,
            transport=transport,
        )
        for row in table.rows():
            yield {
                "model": row["run"],
                "workers": row["workers"],
                "rate_bps": row["bandwidth_bps"],
                "compression": row["compression"],
                "kind": "predicted",
                "scaling_factor": row["scaling_factor"],
                "buckets": row["buckets"],
            }


def _measured_compression(found: Sequence[Measured]) -> Iterator[Row]:
    for each in found:
        baseline, is_drawn = alone(each.trial, found), each.trial.rate_bps in COMPRESSED_AT_BPS
        if (
            is_drawn
            and each.trial.dilation > 1
            and baseline is not None
            and each.trial.workers == 4
        ):
            yield {
                "model": each.trial.model,
                "workers": each.trial.workers,
                "rate_bps": each.trial.rate_bps,
                "compression": float(each.trial.compression),
                "kind": "measured",
                "scaling_factor": baseline.step_s / each.step_s,
                "buckets": each.trial.buckets,
            }


def sent_bytes(found: Sequence[Measured]) -> Figure:
    """Bytes that leave a host in an iteration, against the gradients' size."""
    rows = [
        {
            "model": each.trial.model,
            "kind": each.trial.kind,
            "workers": each.trial.workers,
            "gradient_bytes": each.gradient_bytes,
            "sent_bytes": each.sent_bytes,
            "ratio": each.sent_bytes / each.gradient_bytes,
            "ring": 2 * (each.trial.workers - 1) / each.trial.workers,
            "from": each.sent_from,
        }
        for each in found
        if each.trial.workers > 1
    ]
    return Figure(
        name="bytes",
        title="Bytes that each host sends in an iteration",
        note=f"{_sources(found).partition(';')[0]}; lines: 2(N-1)/N times the gradients",
        rows=tuple(rows),
    )


def ring(found: Sequence[Measured]) -> Figure:
    """To whom each host sends, in the order of the launch."""
    rows = [
        {"trial": each.trial.name, "workers": each.trial.workers, "host": host, "sends_to": to}
        for each in found
        if each.sends_to is not None and each.trial.workers > 2
        for host, to in enumerate(each.sends_to)
        if to != NOBODY
    ]
    note = (
        "from TCP connections; hosts in the order of the launch; so many trials"
        if rows
        else "no samples of connections: waits for packets"
    )
    return Figure(name="ring", title="To which host each one sends", note=note, rows=tuple(rows))


def iteration(found: Sequence[Measured], modelled: Sequence[Row]) -> Figure:
    """Iteration time against model size, for devices, batches and links."""
    rows = [
        {
            "basis": "measured",
            "model": each.trial.model,
            "device": setting(each.trial),
            "batch": each.trial.batch,
            "workers": each.trial.workers,
            "rate_bps": each.trial.rate_bps,
            "gradient_bytes": each.gradient_bytes,
            "step_s": each.step_s,
        }
        for each in found
        if each.trial.workers == 2 and not _is_compressed(each.trial)
    ]
    return Figure(
        name="iteration",
        title="Iteration time against model size",
        note="measured in the lab on 2 workers; modelled at full utilization on 4",
        rows=(*rows, *modelled),
    )


def explained(shares: Sequence[Explained]) -> Figure:
    """How much of the iteration time each condition explains."""
    rows = [
        {
            "basis": each.basis,
            "trials": each.count,
            "condition": name,
            "alone": alone_share,
            "only_it": each.only_it[name],
            "all_together": each.together,
        }
        for each in shares
        for name, alone_share in each.alone.items()
    ]
    return Figure(
        name="explained",
        title="How much of the iteration time each condition explains",
        note="R2 of log(step) on it alone; on all, over without it",
        rows=tuple(rows),
    )
