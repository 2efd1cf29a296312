"""Trainings with failures: published figures, and laws."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fullwire.errors import UsageError
from fullwire.simulation.goodput import Reliability, best_interval_s, goodput

LLAMA3 = Reliability(
    device_hours=50_680, restart_s=600, checkpoint_bytes=14 * 405e9, storage_bytes_per_s=2e12
)
DAY_S = 86400.0


def test_llama_3_had_more_than_nine_tenths_of_its_time() -> None:
    result = goodput(54 * DAY_S, 16384, LLAMA3)
    assert 0.90 < result.share < 0.97
    assert result.interruptions == pytest.approx(419, rel=0.1)


def test_losses_and_work_add_up() -> None:
    result = goodput(10 * DAY_S, 4096, replace(LLAMA3, is_asynchronous=False))
    parts = result.work_s + result.start_s + result.checkpoint_s
    assert parts + result.repeated_s + result.recovery_s == pytest.approx(result.wall_s)


def test_failures_during_restarts_are_interruptions_too() -> None:
    """Each failure of a stretch starts restarts until one of them meets no failure."""
    given = replace(LLAMA3, device_hours=15_300, storage_bytes_per_s=2e11, is_asynchronous=False)
    result = goodput(100 * 3600, 16384, given)
    between_s, written_s = 15_300 * 3600 / 16384, 14 * 405e9 / 2e11
    stretches = result.work_s / result.interval_s
    of_work = stretches * math.expm1((result.interval_s + written_s) / between_s)
    restarts = math.exp((600 + written_s) / between_s)  # until one goes through
    assert restarts > 1.2
    assert result.interruptions == pytest.approx(of_work * restarts)


def test_the_best_interval_is_that_of_young_and_daly() -> None:
    """The first order is the square root of 2 C M."""
    assert best_interval_s(36000.0, 30.0) == pytest.approx((2 * 30 * 36000) ** 0.5, rel=0.03)


def test_fewer_failures_and_asynchronous_checkpoints_never_take_longer() -> None:
    slow = replace(LLAMA3, storage_bytes_per_s=5e10, is_asynchronous=False)
    usual = goodput(DAY_S, 8192, slow).wall_s
    assert goodput(DAY_S, 8192, replace(slow, device_hours=100_000)).wall_s < usual
    assert goodput(DAY_S, 8192, replace(slow, is_asynchronous=True)).wall_s < usual


def test_a_job_that_cannot_get_ahead_is_refused() -> None:
    with pytest.raises(UsageError, match="failures: expected longer between two of them"):
        goodput(DAY_S, 1_000_000, replace(LLAMA3, device_hours=100, restart_s=3600))
