"""Horovod timelines, written as horovod/common/timeline.cc writes them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fullwire
from fullwire.errors import DamagedInput, FullwireError
from fullwire.importers import read
from tests.conftest import Cli
from tests.strategies import cases


class Timeline:
    """Builds a timeline, in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [
            {
                "name": "process_name",
                "ph": "M",
                "pid": 0,
                "args": {"start_time_since_epoch_in_micros": 1_700_000_000_000_000},
            }
        ]
        self.tensors: dict[str, int] = {}

    def reduce(
        self,
        tensor: str,
        ready: Mapping[int, float],
        begin: float,
        end: float,
        shape: str = "[1000]",
    ) -> Timeline:
        pid = self.tensors.setdefault(tensor, len(self.tensors) + 1)
        if not any(each["pid"] == pid for each in self.events):
            self.add("M", name="process_name", pid=pid, args={"name": tensor})
        if ready:
            self.add("B", name="NEGOTIATE_ALLREDUCE", ts=min(ready.values()), pid=pid)
            for rank, time in sorted(ready.items(), key=lambda item: item[1]):
                self.add("X", name=str(rank), ts=time, pid=pid, dur=0)
            self.add("E", ts=max(ready.values()), pid=pid)
        self.add("B", name="ALLREDUCE", ts=begin, pid=pid)
        self.add("B", name="WAIT_FOR_DATA", ts=begin, pid=pid).add("E", ts=begin + 1, pid=pid)
        self.add("B", name="NCCL_ALLREDUCE", ts=begin + 2, pid=pid).add("E", ts=end - 1, pid=pid)
        return self.add("E", ts=end, pid=pid, args={"dtype": "float32", "shape": shape})

    def add(self, phase: str, **fields: Any) -> Timeline:
        self.events.append({"ph": phase, **fields})
        return self

    def text(self, between: str = ",") -> str:
        return "[\n" + between.join(map(json.dumps, self.events)) + "]"

    def write(self, path: Path, **how: str) -> Path:
        path.write_text(self.text(**how))
        return path


def a_job(late: int = 2, steps: int = 6) -> Timeline:
    """Make a job of four ranks in which one is ready 50 us after the others."""
    timeline = Timeline()
    timeline.reduce("start", dict.fromkeys(range(4), 10), 20, 30)
    for number in range(steps):
        begin = 1_000 * (number + 1)
        for place, tensor in enumerate(("dense/kernel", "dense/bias")):
            ready = {rank: begin + 100 * place + 50 * (rank == late) for rank in range(4)}
            timeline.reduce(
                tensor,
                ready,
                begin + 100 * place + 60,
                begin + 100 * place + 90,
                shape="[1000, 50]" if place == 0 else "[50]",
            )
    return timeline


@pytest.mark.parametrize("between", [",", ",\n", ", \r\n "])
def test_collectives_have_the_ranks_that_negotiated_them(tmp_path: Path, between: str) -> None:
    run = read(a_job().write(tmp_path / "timeline.json", between=between))
    table = run.collectives.rows(run.collectives.group == "dense/kernel")
    assert run.facts.workers == 4
    assert table.rank.tolist()[:4] == [0, 1, 2, 3]
    assert table.issue_ns.tolist()[:4] == [1_000_000, 1_000_000, 1_050_000, 1_000_000]
    assert set(table.bytes) == {200_000}
    assert set(table.op) == {"allreduce"}
    assert table.end_ns.tolist()[0] == 1_090_000
    assert table.sequence.tolist()[::4] == [0, 1, 2, 3, 4, 5]


def test_a_step_lasts_until_its_first_tensor_comes_again(tmp_path: Path) -> None:
    run = read(a_job().write(tmp_path / "timeline.json"))
    marks = run.spans.rows((run.spans.name == "step") & (run.spans.rank == 3))
    assert marks.start_ns.tolist() == [1_000_000, 2_000_000, 3_000_000, 4_000_000, 5_000_000]
    assert set(marks.end_ns - marks.start_ns) == {1_000_000}
    assert run.collectives.step.tolist()[:5] == [-1, -1, -1, -1, 0]


def test_the_last_rank_is_named_and_no_cause_is_claimed(tmp_path: Path) -> None:
    found = fullwire.explain(a_job().write(tmp_path / "timeline.json"))
    assert found.verdict.kind == "unknown"
    assert found.verdict.missing == (
        "computation, which a recording of the job has, or a profiler's trace of it",
    )
    assert any("rank 2 came last most: 100%" in reason for reason in found.verdict.reasons)
    assert found.ranks[0].waiting_s == pytest.approx(12 * 50e-6)
    assert found.ranks[2].waiting_s == 0


def test_phases_of_rank_0_are_kept(tmp_path: Path) -> None:
    spans = read(a_job().write(tmp_path / "timeline.json")).spans
    assert {"NCCL_ALLREDUCE (phase)", "WAIT_FOR_DATA (phase)"} < set(spans.name)


def test_without_negotiation_the_timeline_is_of_one_rank(tmp_path: Path) -> None:
    timeline = Timeline()
    for number in range(4):
        timeline.reduce("t", {}, 100 * number, 100 * number + 50)
    run = read(timeline.write(tmp_path / "cached.json"))
    assert set(run.collectives.rank) == {0}
    assert any("rank 0 alone" in sentence for sentence in run.missing)


def test_a_killed_job_leaves_a_timeline_that_is_read(tmp_path: Path) -> None:
    text = a_job().text()
    whole = len(read(a_job().write(tmp_path / "whole.json")).collectives)
    path, opened = tmp_path / "cut.json", 0
    for end in range(len(text) - 1, 0, -61):
        path.write_text(text[:end])
        try:
            run = read(path)
        except DamagedInput:
            continue
        opened += 1
        assert len(run.collectives) <= whole
    assert opened > 50
    path.write_text(text.removesuffix("]"))  # killed between two events: all events are read
    assert len(read(path).collectives) == whole


def test_a_tensor_under_way_at_the_end_is_said(tmp_path: Path) -> None:
    timeline = a_job().add("B", name="NEGOTIATE_ALLREDUCE", ts=9_000, pid=1)
    run = read(timeline.write(tmp_path / "open.json"))
    assert any("1 tensors were under way" in sentence for sentence in run.missing)


def test_many_events_on_one_line_are_read_in_pieces(tmp_path: Path) -> None:
    run = read(a_job(steps=4_000).write(tmp_path / "long.json"))
    assert (tmp_path / "long.json").stat().st_size > 2 * 2**20
    assert len(run.collectives) == 4 + 4_000 * 8
    assert not run.missing


@pytest.mark.parametrize(
    "content",
    [
        "[",
        "[]",
        "[{}]",
        "[" * 3_000_000,
        '[{"ph": "B"' + ', "a": {"b": ' * 500_000,
        '[{"ph":"M","name":"process_name","pid":1e999}]',
        '[{"ph": 5}, {"ph": "E"}]',
        '[{"ph":"X","name":"99999999999999999999","ts":1,"pid":1}]',
    ],
)
def test_hostile_timelines_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "hostile.json"
    path.write_text(content)
    with pytest.raises(FullwireError):
        read(path, format="horovod")


def test_times_that_cannot_be_and_shapes_that_lie_are_left_out(tmp_path: Path) -> None:
    timeline = Timeline().reduce("t", {0: 1, 1: 2}, 3, 20, shape="[" + "9" * 15 + ", 999999999]")
    timeline.add("B", name="ALLREDUCE", ts=-5, pid=1).add("B", name="ALLREDUCE", ts=1e300, pid=1)
    timeline.add("E", ts=25, pid=1)
    run = read(timeline.write(tmp_path / "odd.json"))
    assert set(run.collectives.dtype) == {"unknown"}
    assert any("3 events do not fit" in sentence for sentence in run.missing)


def test_a_shape_made_to_stop_a_regular_expression_does_not(tmp_path: Path) -> None:
    timeline = Timeline().reduce("t", {0: 1, 1: 2}, 3, 20, shape="[" + "1" * 1_900 + "x]")
    run = read(timeline.write(tmp_path / "shape.json"))
    assert set(run.collectives.dtype) == {"unknown"}


def test_text_that_is_none_ends_what_can_be_read(tmp_path: Path) -> None:
    content = a_job().text().encode()
    place = content.rindex(b'"name"')
    (tmp_path / "bytes.json").write_bytes(
        content[:place] + b'"\xe6\xff": "\xe6", ' + content[place:]
    )
    run = read(tmp_path / "bytes.json")
    assert len(run.collectives)
    half = content.rstrip(b"], \n") + b', {"ph": "X", "name": "\\ud800", "ts": 1, "pid": 1}]'
    (tmp_path / "half.json").write_bytes(half)
    assert any("1 events do not fit" in each for each in read(tmp_path / "half.json").missing)


_TEXT = a_job(steps=3).text()


@cases(300)
@given(
    st.lists(
        st.tuples(
            st.integers(0, len(_TEXT)),
            st.integers(0, 30),
            st.sampled_from(
                [
                    '"',
                    "{",
                    "}",
                    "[",
                    "]",
                    ",",
                    "\\",
                    "NaN",
                    "-1",
                    "1e999",
                    "9" * 400,
                    "null",
                    "\0",
                    '"ts": -3',
                    '"ph": "E"',
                    "é",
                    '"pid": 7',
                ]
            ),
        ),
        max_size=6,
    )
)
def test_any_damage_gives_a_run_or_one_line(
    tmp_path: Path, edits: list[tuple[int, int, str]]
) -> None:
    text = _TEXT
    for place, length, splice in edits:
        text = text[:place] + splice + text[place + length :]
    path = tmp_path / "fuzzed.json"
    path.write_text(text)
    with contextlib.suppress(FullwireError):
        fullwire.explain(read(path, format="horovod"))


def test_the_command_takes_a_timeline(tmp_path: Path, cli: Cli) -> None:
    path = a_job().write(tmp_path / "timeline.json")
    assert cli("import", path, "-o", tmp_path / "job.run").returncode == 0
    assert "came last most" in cli("explain", tmp_path / "job.run", "-v").stdout


def test_the_largest_collective_is_told_without_its_waiting(tmp_path: Path) -> None:
    timeline = Timeline()
    for begin in range(0, 12_000, 2_000):  # ready at once, and sent half of the time later
        timeline.reduce("dense/kernel", dict.fromkeys(range(2), begin), begin + 461, begin + 925)
    said = fullwire.explain(timeline.write(tmp_path / "timeline.json")).verdict.sentence
    assert "Its largest collective, allreduce of 4 kB, took 462 us" in said
