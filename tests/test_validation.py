"""The figures that we publish hold; the scripts in validation/ print the tables."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from validation import collectives, damaged_captures, damaged_traces, netx


def test_the_papers_240_rows_are_reproduced_within_1e_5(shared_data: Path) -> None:
    found = netx.worst_errors(shared_data / "netx")
    assert sum(count for count, _ in found.values()) == 2 * 240
    assert max(error for _, error in found.values()) < netx.TOLERANCE


def test_the_serial_ring_is_within_5_percent_of_astra_sim_and_we_know_why(
    shared_data: Path,
) -> None:
    for _, _, plain, alike in collectives.astra_errors(shared_data / "astra"):
        assert abs(plain) < collectives.ASTRA_TOLERANCE
        assert abs(alike) < 0.005


@pytest.mark.skipif(not shutil.which("g++"), reason="building the native reader needs g++")
def test_damaged_captures_harm_nothing_under_sanitizers(tmp_path: Path) -> None:
    program = damaged_captures.build(tmp_path, [*damaged_captures.SANITIZED, "-O0"])
    outcome = damaged_captures.read_damaged(program, 2_000, first=2**40)
    assert outcome.captures == 2_000
    assert outcome.whole > 200
    assert outcome.partial > 500


@pytest.mark.skipif(not shutil.which("g++"), reason="building the native scanner needs g++")
def test_damaged_traces_harm_nothing_under_sanitizers(tmp_path: Path) -> None:
    program = damaged_traces.build(tmp_path, [*damaged_captures.SANITIZED, "-O0"])
    read, whole = damaged_traces.scan_damaged(program, 2_000)
    assert read == 2_000
    assert whole > 200
