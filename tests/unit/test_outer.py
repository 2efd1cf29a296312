"""Workers that synchronise seldom: DiLoCo, its kin, and their published tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fullwire.simulation.outer import Outer, utilization, waits_s
from validation import diloco

RATES_BPS = np.array([1e9, 1e10, 1e11, 1e12])


def share(outer: Outer) -> np.ndarray:
    return utilization(outer, parameters=1e10, layers=48, step_s=0.8, rates_bps=RATES_BPS)


def test_faster_links_and_rarer_sums_never_lose() -> None:
    often, seldom = share(Outer()), share(Outer(every=100))
    streaming = share(Outer(every=100, is_streaming=True))
    later = share(Outer(every=100, is_streaming=True, overlap=1))
    for shares in (often, seldom, streaming, later):
        assert (np.diff(shares) >= 0).all()
    assert (often <= seldom).all()
    assert (seldom <= streaming).all()
    assert (streaming <= later).all()


def test_synchronising_every_step_is_data_parallel() -> None:
    every_step, data_parallel = (
        waits_s(outer, parameters=1e9, layers=24, step_s=0.1, rates_bps=RATES_BPS)
        for outer in (Outer(every=1), Outer())
    )
    assert every_step == pytest.approx(data_parallel)


def test_the_published_table_is_met_within_one_place(shared_data: Path) -> None:
    rows, left_out = diloco.offsets(shared_data / "accuracy" / "streaming_diloco_table4.csv")
    off = [abs(each) for _, those in rows for each in those]
    assert (len(off), sum(each == 0 for each in off), max(off)) == (75, 67, 1)
    assert not left_out


def test_other_tables_have_sizes_cadences_and_cells_beyond_the_grid(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(
        "model,params_B,step_s,method,H,cu50_gbps,cu99_gbps\n"
        "Chinchilla,10,0.8,data_parallel,,104.8,471.5\n"
        "Chinchilla,10,0.8,diloco,100,1.7,104.8\n"
        "Chinchilla,10,0.8,gossip,100,1.7,104.8\n"
        "Large,671,0.1,data_parallel,,1000.0+,1000.0+\n"
    )
    rows, left_out = diloco.offsets(path)
    assert left_out == ["Chinchilla gossip"]
    assert [name for name, _ in rows][1] == "Chinchilla diloco H=100"
    assert all(abs(each) <= 1 for _, those in rows for each in those)
