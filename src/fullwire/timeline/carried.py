"""What a transport itself tells of the collectives that it carried: waiting, transfer, adding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from fullwire.run.run import Carried, Run
from fullwire.timeline.utilization import Evidence
from fullwire.units import show_time


def carried_evidence(run: Run, rate_bps: Mapping[int, float]) -> Iterator[Evidence]:
    """Say how a rank's steps spent the time of their collectives, and how full its link was."""
    table = run.carried.rows(run.carried.step >= 0)
    if not len(table):
        return
    rank_steps = len(np.unique(np.stack([table.rank, table.step]), axis=1).T)
    waited_ns, moved_ns = table.heard_ns - table.begun_ns, _moved_ns(table)
    waited_s, moved_s, added_s = (
        float(each.sum()) * 1e-9 / rank_steps for each in (waited_ns, moved_ns, table.reducing_ns)
    )
    said = (
        f"The transport itself tells: in a step a rank waited {show_time(waited_s)} for the first "
        f"bytes of others and transferred for {show_time(moved_s)}, {show_time(added_s)} of it "
        "adding"
    )
    rates = np.array([rate_bps.get(rank, np.nan) for rank in table.rank.tolist()])
    sends = table.sent_bytes > 0  # who only receives leaves its own link's way out idle
    sent_bits, could_bits = 8.0 * table.sent_bytes.sum(), 1e-9 * (moved_ns * rates)[sends].sum()
    # More than the line carries: bytes that had come before their rank did were no transfer to it.
    if 0 < sent_bits <= could_bits:
        share = float(sent_bits / could_bits)
        yield Evidence(
            name="transport_utilization",
            value=share,
            sentence=f"{said}; meanwhile it used {share:.0%} of the line rate.",
        )
    else:
        yield Evidence(name="transport_time", value=moved_s, sentence=f"{said}.")


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
