"""Recursive doubling compared with its alternatives; test_plan.py checks its sums."""

from __future__ import annotations

from typing import Any

import pytest

import fullwire as fw
from fullwire.clusters.cluster import one_switch
from fullwire.collectives.playing import collective_time

ASKED: dict[str, Any] = {"workers": 64, "bandwidth": "10Gbps", "latency": "20us"}


@pytest.mark.parametrize("workers", [2, 4, 64])
@pytest.mark.parametrize("size_bytes", [1_000, 2**26])
def test_its_formula_is_what_events_say(workers: int, size_bytes: int) -> None:
    cluster = one_switch(workers=workers, rate_bps=1e10, latency_s=5e-6)
    event, closed = (
        collective_time("allreduce", "recursive-doubling", cluster, size_bytes, level=level).time_s
        for level in ("event", "closed")
    )
    rounds = workers.bit_length() - 1
    assert event == pytest.approx(rounds * (8 * size_bytes / 1e10 + 5e-6), rel=1e-9)
    assert closed == pytest.approx(event, rel=1e-9)


def test_beyond_a_power_of_two_a_rank_is_added_before_and_told_after() -> None:
    cluster = one_switch(workers=5, rate_bps=1e10, latency_s=5e-6)
    found = collective_time("allreduce", "recursive-doubling", cluster, 1_000)
    assert found.transfers == 1 + 4 * 2 + 1
    hop_s = 8e3 / 1e10 + 5e-6
    assert 3 * hop_s < found.time_s < 4 * hop_s  # some ranks need not wait for all others
    with pytest.raises(fw.UsageError, match="only for a power of two"):
        collective_time("allreduce", "recursive-doubling", cluster, 1_000, level="closed")


def test_it_is_quicker_for_small_messages_and_slower_for_large_ones() -> None:
    def time_s(algorithm: str, size: str) -> float:
        return fw.collective("allreduce", bytes=size, algorithm=algorithm, **ASKED).time_s

    assert time_s("recursive-doubling", "1kB") < 0.6 * time_s("halving-doubling", "1kB")
    assert time_s("recursive-doubling", "64MiB") > time_s("ring", "64MiB")


def test_it_is_taken_when_it_is_asked_for_by_name_only() -> None:
    found = fw.collective("allreduce", bytes="1kB", algorithm="auto", **ASKED)
    assert found.algorithm == "halving-doubling"
    table = fw.whatif("resnet50@v100", algorithm="auto,recursive-doubling", **ASKED)
    auto, doubling = table["communication_s"].tolist()
    assert auto < doubling
