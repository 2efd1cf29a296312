"""The figures that we publish hold; the scripts in validation/ print the tables."""

from __future__ import annotations

from pathlib import Path

from validation import collectives, netx


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
