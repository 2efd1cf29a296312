"""What a transport itself tells of the collectives that it carried: waiting, transfer, adding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fullwire.run.run import Carried, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedTimes:
    """How a rank's step spent the time of its collectives."""

    waited_s: float  # for the first bytes of others
    moved_s: float
    added_s: float  # of what was transferred
    used: float | None  # of the line rate while transferring; None where that is not known


def carried(run: Run, rate_bps: Mapping[int, float]) -> CarriedTimes | None:
    """Sum up what the transport told in steps; None where it told nothing."""
    table = run.carried.rows(run.carried.step >= 0)
    if not len(table):
        return None
    rank_steps = len(np.unique(np.stack([table.rank, table.step]), axis=1).T)
    waited_ns, moved_ns = table.heard_ns - table.begun_ns, _moved_ns(table)
    waited_s, moved_s, added_s = (
        float(each.sum()) * 1e-9 / rank_steps for each in (waited_ns, moved_ns, table.reducing_ns)
    )
    rates = np.array([rate_bps.get(rank, np.nan) for rank in table.rank.tolist()])
    sends = table.sent_bytes > 0  # who only receives leaves its own link's way out idle
    sent_bits, could_bits = 8.0 * table.sent_bytes.sum(), 1e-9 * (moved_ns * rates)[sends].sum()
    # More than the line carries: bytes that had come before their rank did were no transfer to it.
    used = float(sent_bits / could_bits) if 0 < sent_bits <= could_bits else None
    return CarriedTimes(waited_s=waited_s, moved_s=moved_s, added_s=added_s, used=used)


def _moved_ns(table: Carried) -> NDArray[np.int64]:
    """Return how long each transferred; what several streams did at once counts once."""
    moved = np.zeros(len(table), np.int64)
    for rank in np.unique(table.rank).tolist():
        own = np.flatnonzero(table.rank == rank)
        own = own[np.argsort(table.heard_ns[own], kind="stable")]
        ended_ns = np.maximum.accumulate(table.end_ns[own])
        begun_ns = table.heard_ns[own].copy()
        begun_ns[1:] = np.maximum(begun_ns[1:], ended_ns[:-1])
        moved[own] = np.maximum(ended_ns - begun_ns, 0)
    return moved
