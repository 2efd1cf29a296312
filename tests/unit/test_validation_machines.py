"""Tables of real machines are judged; damaged rows and places without tables are told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from validation import machines as judging
from validation import results
from validation.machines import machines, main

MULTI_NODE = "system,gpus,collective,size,oop_time_us\n"
IN_NODE = "gpu,op,dtype,num_gpus,message_size,latency_ms\n"


def test_rows_that_cannot_be_read_are_left_out_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "many.csv"
    path.write_text(
        MULTI_NODE + "m,16,,1024,20.5\nm,16,all-gather,1024,20.5\nm,16,scan,1024,20.5\n"
        "m,16,scan,2048,20.5\nm,16,,20x8,20.5\nm,16,,40"
    )
    [machine] = machines([path])
    assert [(table.op, table.points) for table in machine.tables] == [
        ("allreduce", ((1024, 20.5e-6),)),
        ("allgather", ((1024, 20.5e-6),)),
    ]
    told = capsys.readouterr().out
    assert f"left out: {path}, line 4: collective: expected one of allreduce" in told
    assert "got scan (and 1 more)" in told
    assert f"left out: {path}, line 6: expected all columns" in told


def test_an_operation_within_a_node_may_have_another_spelling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.csv"
    path.write_text(IN_NODE + "h100,all_to_all,half,8,512,0.01\nh100,sort,half,8,512,0.01\n")
    [machine] = machines([path])
    assert [(table.op, table.points) for table in machine.tables] == [("alltoall", ((1024, 1e-5),))]
    assert f"left out: {path}, line 3: op: expected" in capsys.readouterr().out


def test_a_folder_may_hold_a_table_of_ones_own_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{ranks},{2**20},{ranks * 10}" for ranks in (8, 16)]
    (tmp_path / "all_reduce.csv").write_text("\n".join(["ranks,size_bytes,time_us", *rows]))
    (tmp_path / "prices.csv").write_text("device,price\nh100,1\n")
    [machine] = machines([tmp_path])
    assert [(table.op, table.workers) for table in machine.tables] == [
        ("allreduce", 8),
        ("allreduce", 16),
    ]
    assert (
        f"left out: {tmp_path / 'prices.csv'}: a table (CSV): not read" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("name", "why"), [("none", "expected a file or a folder"), ("", "expected tables, and none")]
)
def test_places_without_tables_end_with_status_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    why: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["machines.py", str(tmp_path / name)])
    with pytest.raises(SystemExit) as told:
        main()
    assert told.value.code == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("is_published", [False, True])
def test_only_the_published_set_of_tables_renews_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_published: bool
) -> None:
    path = tmp_path / "one.csv"
    rows = [
        f"h100,all_reduce,half,{ranks},{2**bits},{0.02 + ranks * 2**bits * 1e-9}"
        for ranks in (2, 4, 8)
        for bits in range(15, 26)
    ]
    path.write_text(IN_NODE + "\n".join(rows))
    written: list[str] = []
    monkeypatch.setattr(results, "write", lambda name, **_: written.append(name))
    monkeypatch.setattr(sys, "argv", ["machines.py", str(path)])
    if is_published:
        monkeypatch.setattr(judging, "PUBLISHED", {path})
    main()
    assert written == ["machines"] * is_published


def test_the_published_command_names_the_published_set() -> None:
    words = results.read("machines").command.split()[3:]
    checkout = Path(judging.__file__).parents[1]
    assert judging.is_published([checkout / word for word in words])
