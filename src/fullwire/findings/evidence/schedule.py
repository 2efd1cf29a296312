"""The evidence from a run without times: its collectives, and their bytes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fullwire.findings.evidence import Source
from fullwire.findings.finding import Evidence, Finding
from fullwire.run.run import SIZE_UNKNOWN, Run


class ScheduledOp(Finding):
    """The collectives of one operation that a rank has."""

    template = "{op} {count:,.0f}{bytes:? with {bytes:bytes}}{has_unknown:?, some sizes unknown}"

    op: str
    count: float
    bytes: int
    has_unknown: bool


class Schedule(Evidence):
    """The collectives that a rank has."""

    template = "A rank has {value:,.0f} collectives: {ops:;}."

    ops: tuple[ScheduledOp, ...]


def schedule_evidence(run: Run) -> Iterator[Evidence]:
    """Yield the collectives of a schedule, which are all its data when it holds no times."""
    table, ranks = run.collectives, len(np.unique(run.collectives.rank))
    ops = []
    for op in dict.fromkeys(table.op.tolist()):
        mine = table.rows(table.op == op)
        ops.append(
            ScheduledOp(
                op=str(op),
                count=len(mine) / ranks,
                bytes=int(mine.bytes.sum()) // ranks,
                has_unknown=bool((mine.dtype == SIZE_UNKNOWN).any()),
            )
        )
    if ops:
        yield Schedule(value=len(table) / ranks, ops=tuple(ops))


SOURCE = Source(
    key="schedule",
    place=4,
    of=lambda run, account, rate_bps: () if account.step_s else schedule_evidence(run),
)
