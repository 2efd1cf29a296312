"""Clocks of machines: the differences that collectives show, and those that they hide."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullwire.recorder.hosts import SAME, UNKNOWN, offsets
from fullwire.recorder.inside.journal import HEADER_BYTES
from fullwire.recorder.record import join
from fullwire.run.run import Collectives
from tests.builders import a_process


def collectives(rows: list[tuple[int, int, int, int]], op: str = "allreduce") -> Collectives:
    """Make rows of rank, sequence, issue and end."""
    table = np.array(rows, np.int64).reshape(-1, 4)
    return Collectives(
        rank=table[:, 0],
        step=np.zeros(len(table), np.int64),
        sequence=table[:, 1],
        group=np.full(len(table), "0", object),
        op=np.full(len(table), op, object),
        dtype=np.full(len(table), "float32", object),
        bytes=np.full(len(table), 4),
        issue_ns=table[:, 2],
        start_ns=table[:, 2],
        end_ns=table[:, 3],
    )


@given(
    ahead=st.integers(-(10**12), 10**12),
    issues=st.lists(st.tuples(*[st.integers(0, 10**6)] * 2), min_size=1, max_size=20),
    last=st.integers(1, 10**5),
)
def test_the_true_offset_is_always_within_its_uncertainty(
    ahead: int, issues: list[tuple[int, int]], last: int
) -> None:
    rows = []
    for sequence, (first, second) in enumerate(issues):
        begin = sequence * 10**8
        end = begin + max(first, second) + last
        rows += [(0, sequence, begin + first, end)]
        rows += [(1, sequence, begin + second + ahead, end + last + ahead)]
    found = offsets(collectives(rows), {0: "here", 1: "there"})
    assert found["here"] == SAME
    uncertainty_ns = found["there"].uncertainty_ns
    assert uncertainty_ns is not None
    assert abs(found["there"].offset_ns + ahead) <= uncertainty_ns <= 10**6 + 3 * last


def test_hosts_of_one_machine_read_one_clock() -> None:
    assert offsets(collectives([]), {0: "here", 1: "here"}) == {"here": SAME}


def test_nothing_is_known_without_a_collective_in_common() -> None:
    alone = collectives([(0, 0, 1, 2), (1, 1, 1, 2)])
    assert offsets(alone, {0: "here", 1: "there"})["there"] == UNKNOWN


def test_a_broadcast_tells_nothing_for_its_root_waits_for_nobody() -> None:
    table = collectives([(0, 0, 0, 1), (1, 0, 100, 200)], op="broadcast")
    assert offsets(table, {0: "here", 1: "there"})["there"] == UNKNOWN


def test_clocks_that_drifted_are_believed_with_what_the_collectives_disagree_by() -> None:
    rows = [(0, 0, 0, 10), (1, 0, 0, 10), (0, 1, 1000, 1010), (1, 1, 2000, 2010)]
    found = offsets(collectives(rows), {0: "here", 1: "there"})["there"]
    assert (found.offset_ns, found.uncertainty_ns) == (0, 990)


def two_machines(directory: Path, steps: int) -> None:
    """Leave the journals of two ranks, the second on a machine whose clock is a minute ahead."""
    for rank in (0, 1):
        a_process(directory, steps, rank=rank).close()
    first, second = sorted(directory.glob("*.journal"))
    set_header(first, rank=0, machine="a", unix_ns=10**15, monotonic_ns=10**9, host="a")
    set_header(
        second, rank=1, machine="b", unix_ns=10**15 + 60 * 10**9, monotonic_ns=10**9, host="b"
    )


def test_a_machine_whose_clock_is_a_minute_ahead_is_brought_back(tmp_path: Path) -> None:
    two_machines(tmp_path, steps=3)
    run = join([tmp_path], tmp_path / "x.run").run
    offset_s = dict(run.facts.clock_offset_s or ())
    uncertainty_s = dict(run.facts.clock_uncertainty_s or ())
    assert offset_s[0.0] == uncertainty_s[0.0] == 0
    assert offset_s[1.0] == pytest.approx(-60)
    assert 0 < uncertainty_s[1.0] < 1e-6
    ends = run.collectives.end_ns.reshape(2, -1)
    assert abs(ends[0] - ends[1]).max() < 1_000


def test_of_a_long_recording_some_collectives_tell_as_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "x.recording"
    directory.mkdir()
    two_machines(directory, steps=200)
    whole = join([directory], tmp_path / "whole.run").run
    monkeypatch.setattr("fullwire.recorder.assemble.PART_NOTES", 64)
    monkeypatch.setattr("fullwire.recorder.assemble.CLOCK_COLLECTIVES", 7)
    run = join([directory], tmp_path / "parts.run").run
    assert run.facts.clock_offset_s == whole.facts.clock_offset_s
    assert run.facts.clock_uncertainty_s == whole.facts.clock_uncertainty_s
    assert run.collectives.end_ns.tolist() == whole.collectives.end_ns.tolist()


def set_header(path: Path, **values: object) -> None:
    content = path.read_bytes()
    header = {**json.loads(content[:HEADER_BYTES]), **values}
    path.write_bytes(json.dumps(header).encode().ljust(HEADER_BYTES) + content[HEADER_BYTES:])
