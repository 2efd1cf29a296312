"""A run as a Chrome trace: the events that viewers need, and the import of the trace."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fullwire
from fullwire.errors import DamagedInput, FullwireError, UsageError
from fullwire.importers import read
from fullwire.report.chrome import write_chrome
from fullwire.run.run import Run, Spans
from fullwire.run.store import RunWriter, write
from tests.builders import a_run
from tests.conftest import Cli
from tests.jobs_by_hand import a_trained_job
from tests.strategies import cases


def exported(run: Run | Path) -> dict[str, Any]:
    file = io.BytesIO()
    write_chrome(run, file)
    found: dict[str, Any] = json.loads(file.getvalue())
    return found


def rows(run: Run) -> dict[str, list[tuple[Any, ...]]]:
    return {
        name: sorted(zip(*(column.tolist() for column in table.columns().values()), strict=True))
        for name, table in run.tables()
    }


def test_ranks_are_processes_and_lanes_are_threads_of_slices_side_by_side() -> None:
    events = exported(a_trained_job())["traceEvents"]
    named = {
        (each["pid"], each["tid"]): each["args"]["name"]
        for each in events
        if each["name"] == "thread_name"
    }
    assert {each["args"]["name"] for each in events if each["name"] == "process_name"} == {
        "rank 0",
        "rank 1",
        "rank 2",
    }
    slices = [each for each in events if each["ph"] == "X"]
    reached: dict[tuple[int, int], float] = {}
    for each in sorted(slices, key=lambda each: each["ts"]):
        thread = each["pid"], each["tid"]
        assert each["ts"] >= reached.get(thread, each["ts"]) - 1e-3
        reached[thread] = each["ts"] + each["dur"]
        assert named[thread].split()[0] in (each["args"].get("lane", "collectives"), "steps")
    collective = next(each for each in slices if each["cat"] == "collective")
    assert collective["name"] == "allreduce"
    assert {"step", "sequence", "group", "dtype", "bytes", "queued_us"} == set(collective["args"])


def test_the_way_back_gives_the_same_run_and_the_same_answer(tmp_path: Path, cli: Cli) -> None:
    run = a_trained_job(late_ms=30.0)
    write(run, tmp_path / "job.run")
    done = cli("export", tmp_path / "job.run", "--format", "chrome", "-o", tmp_path / "job.json")
    assert done.returncode == 0, done.stderr
    assert cli("import", tmp_path / "job.json", "-o", tmp_path / "back.run").returncode == 0
    back = read(tmp_path / "back.run")
    assert rows(back) == rows(run)
    assert back.facts == run.facts
    assert back.provenance == run.provenance
    assert fullwire.explain(back).account == fullwire.explain(run).account
    assert cli("export", tmp_path / "job.run").stdout == (tmp_path / "job.json").read_text()


@pytest.mark.parametrize("name", ["nccl_data_rank0_of_2", "gloo_cpu_only_rank34_of_300"])
def test_real_traces_come_back_alike(shared_data: Path, tmp_path: Path, name: str) -> None:
    run = read(shared_data / f"kineto/{name}.json.gz")
    fullwire.export(run, tmp_path / "x.json")
    back = read(tmp_path / "x.json")
    assert rows(back) == rows(run)
    assert fullwire.explain(back).account == fullwire.explain(run).account


def test_a_run_in_pieces_is_exported_piece_by_piece(tmp_path: Path) -> None:
    run = a_trained_job(steps=8)
    with RunWriter(tmp_path / "x.run") as writer:
        for step in range(8):
            writer.add(
                spans=run.spans.rows(run.spans.step == step),
                collectives=run.collectives.rows(run.collectives.step == step),
            )
            writer._write_piece()
        writer.finish(run.provenance, run.facts, ())
    fullwire.export(tmp_path / "x.run", tmp_path / "x.json")
    back = rows(read(tmp_path / "x.json"))
    assert (back["spans"], back["collectives"]) == (rows(run)["spans"], rows(run)["collectives"])


def test_names_stay_names(tmp_path: Path) -> None:
    name = '</script>"\\\n\u2028<b>é'
    run = a_run()
    spans = {**run.spans.columns(), "name": np.array([name] * len(run.spans), object)}
    odd = Run(provenance=run.provenance, spans=Spans(**spans))
    assert name in {each["name"] for each in exported(odd)["traceEvents"]}
    fullwire.export(odd, tmp_path / "x.json")
    assert set(read(tmp_path / "x.json").spans.name.tolist()) == {name}


def test_lanes_that_nobody_knows_have_threads_of_their_own() -> None:
    run = a_run()
    lanes = np.array([f"lane {number}" for number in range(len(run.spans))], object)
    odd = Run(provenance=run.provenance, spans=Spans(**{**run.spans.columns(), "lane": lanes}))
    slices = [each for each in exported(odd)["traceEvents"] if each["ph"] == "X"]
    assert len({each["tid"] for each in slices}) == len(lanes)


def test_an_export_that_is_cut_is_partial(tmp_path: Path) -> None:
    fullwire.export(a_trained_job(), tmp_path / "x.json")
    whole = (tmp_path / "x.json").read_bytes()
    (tmp_path / "x.json").write_bytes(whole[: len(whole) // 2])
    run = read(tmp_path / "x.json")
    assert len(run.spans) > 0
    assert "ends before its facts" in run.missing[-1]
    (tmp_path / "x.json").write_bytes(whole[:70])
    with pytest.raises(DamagedInput):
        read(tmp_path / "x.json")


def test_what_cannot_be_written_is_said(tmp_path: Path, cli: Cli) -> None:
    with pytest.raises(UsageError, match="there is no directory"):
        fullwire.export(a_run(), tmp_path / "no such place" / "x.json")
    done = cli("export", tmp_path / "nothing.run")
    assert (done.returncode, done.stdout) == (2, "")


@given(
    st.lists(
        st.tuples(
            st.integers(0, 10**6),
            st.sampled_from(
                [
                    "NaN",
                    "1e999",
                    "-1",
                    '"',
                    "}",
                    "\\ud800",
                    '{"a":',
                    "\n",
                    "9" * 30,
                    "null",
                    "[" * 50,
                ]
            ),
        ),
        max_size=5,
    )
)
@cases(200)
def test_any_damage_gives_a_run_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, str]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    file = io.BytesIO()
    write_chrome(a_run(), file)
    text = file.getvalue().decode()
    for place, words in edits:
        at = place % len(text)
        text = text[:at] + words + text[at + len(words) :]
    path.write_text(text)
    with contextlib.suppress(FullwireError):
        fullwire.explain(read(path, format="chrome"))
