"""Workers that synchronise seldom: DiLoCo, its kin, and their published tables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fullwire.errors import DamagedInput
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


HEADS = "model,params_B,step_s,method,H,cu50_gbps"


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (f"{HEADS}\nx,10,,diloco,30,10\n", ":2: step_s: expected a number above 0, got ''"),
        (f"{HEADS}\nx,10,-0.8,diloco,30,10\n", ":2: step_s: expected a number above 0"),
        (f"{HEADS}\nx,10,1,diloco,30,5\n\nx,10,1,diloco,30,inf\n", ":4: cu50_gbps: expected"),
        (f"{HEADS}\nx,10,1,diloco,30,0\n", ":2: cu50_gbps: expected a number above 0, got '0'"),
        (f"{HEADS}\nx,10,1,diloco,30,5000\n", ":2: cu50_gbps: expected a rate of the grid, 0.1"),
        (f"{HEADS}\nx,10,1,diloco,30,0.001\n", ":2: cu50_gbps: expected a rate of the grid, 0.1"),
        (f"{HEADS}\nx,10,1,diloco,30,3+\n", ":2: cu50_gbps: expected a rate of the grid, 0.1"),
        (f"{HEADS}\nx,10,1,diloco,30,+\n", ":2: cu50_gbps: expected a number above 0, got '+'"),
        (f"{HEADS}\nx,10,1,diloco_h100,30,5\n", ":2: H: expected 100, as the method diloco_h100"),
        (f"{HEADS},cu50_gbps\nx,10,1,diloco,30,5,5\n", ":1: expected each column once, got cu50"),
        (f"{HEADS},cu100_gbps\nx,10,1,diloco,30,5,5\n", ":2: cu100_gbps: expected a share of the"),
        (f"{HEADS}\nx,10,1,diloco,often,5\n", ":2: H: expected a number above 0, got 'often'"),
        (f"{HEADS}\nx,ten,1,diloco,30,5\n", ":2: params_B: expected a number above 0"),
        (f"{HEADS}\nx,10,1\n", ":2: method: expected a name such as diloco, got none"),
        (f"{HEADS}\nx,10,1,diloco,30,1,000.0+\n", ":2: expected 6 cells, got 7"),
        (f"{HEADS}\nx,10,1,diloco,30,\n", ": expected cells in columns such as cu50_gbps"),
        ("model,step_s,cu50_gbps\n10B,1,5\n", ": expected the columns step_s, method: no method"),
        (f"{HEADS}\n", ": expected rows below the heading, got none"),
        ("", ": expected the columns step_s, method: no step_s"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused_with_its_place(
    table: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "table.csv"
    path.write_text(table)
    with pytest.raises(DamagedInput) as refused:
        diloco.offsets(path)
    assert str(refused.value).startswith(f"{path}{said}")


def test_the_share_of_a_column_has_one_digit_or_two(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(f"{HEADS},cu5_gbps\nx,10,0.8,diloco,100,1.7,0.1\n")
    [(_, off)] = diloco.offsets(path)[0]
    assert off == [0, 0]


def test_spreadsheets_tables_and_cells_beyond_the_grid_are_read(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(f"\ufeff{HEADS}\nx,671,0.1,data_parallel,,>1000\nx,10,0.8,diloco,100.0,1.7\n")
    rows, _ = diloco.offsets(path)
    assert [those for _, those in rows] == [[0], [0]]


def test_cells_without_a_value_and_below_the_grid_are_read(tmp_path: Path) -> None:
    """One cell of a dash or n/a refused the table."""
    path = tmp_path / "table.csv"
    heads = "model,params_B,layers,step_s,method,H,cu50_gbps,cu99_gbps"
    rows = "10B,n/a,-,0.8,diloco,N/A,1.7,\u2014\n10B,10,48,1000,diloco,100,<0.1,NaN\n"
    path.write_text(f"{heads}\n{rows}")
    rows_off, _ = diloco.offsets(path)
    assert [those for _, those in rows_off] == [[0], [0]]


def test_the_names_of_columns_count_in_any_case(tmp_path: Path) -> None:
    """The steps in a column `h` were passed over, and 100 stood for them."""
    path = tmp_path / "table.csv"
    rows = "x,10,0.8,diloco,10,1.7\nx,10,0.8,diloco,1,1.7\n"
    path.write_text(f"{HEADS}\n{rows}")
    as_written = diloco.offsets(path)
    for heads in (HEADS.lower(), HEADS.upper()):
        path.write_text(f"{heads}\n{rows}")
        assert diloco.offsets(path) == as_written
    assert [name for name, _ in as_written[0]] == ["x diloco H=10", "x diloco H=1"]
    path.write_text(f"{HEADS},h\nx,10,0.8,diloco,10,1.7,30\n")
    with pytest.raises(DamagedInput, match="expected each column once, got H twice or more"):
        diloco.offsets(path)


@pytest.mark.parametrize("script", ["diloco", "reference_points"])
def test_a_scripts_refusal_is_one_line_and_its_results_stay(script: str, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(f"{HEADS}\nx,671,0.1,data_parallel,,1000.0+\n")
    results = Path(diloco.__file__).with_name("results")
    before = {file: file.read_bytes() for file in results.glob("*.json")}
    command = [sys.executable, "-m", f"validation.{script}", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert {file: file.read_bytes() for file in results.glob("*.json")} == before
    if script == "diloco":
        assert json.loads(done.stdout.splitlines()[-1]) == {"cells": 1, "exact": 1, "within_one": 1}
    else:
        assert done.returncode == 3
        assert done.stderr == (
            f"validation.reference_points: {path}: expected the columns suite, benchmark, batch, "
            "n, olympic_mean, std: no suite\n"
        )


def test_a_table_of_unknown_methods_alone_has_no_cells(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("model,step_s,method,cu50_gbps\n10B,0.8,gossip,1.7\n")
    done = subprocess.run(
        [sys.executable, "-m", "validation.diloco", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts == {"cells": 0, "exact": 0, "within_one": 0}
