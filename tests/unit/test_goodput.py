"""Trainings with failures: published figures, and laws."""

from __future__ import annotations

import math
import random
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


def _simulated_s(work_s: float, between_s: float, given: Reliability, seed: int) -> float:
    """Play one training of 16,384 devices, failure by failure, at the interval that is used."""
    written_s = given.checkpoint_bytes / given.storage_bytes_per_s
    stopped_s = given.checkpoint_bytes / (16384 * 20e9)  # the copy to the host
    interval_s = best_interval_s(between_s, stopped_s, written_s)
    chance = random.Random(seed)
    now_s, done_s, safe_s = given.start_s, 0.0, 0.0
    written: tuple[float, float] | None = None  # when a checkpoint is written, and its work
    failure_s = now_s + chance.expovariate(1 / between_s)
    while done_s < work_s:
        piece_s = min(interval_s, work_s - done_s)
        end_s = now_s + piece_s + stopped_s
        if written is not None and written[0] <= min(failure_s, end_s):
            safe_s, written = written[1], None
        if failure_s >= end_s:
            now_s, done_s = end_s, done_s + piece_s
            written = end_s + written_s - stopped_s, done_s
            continue
        now_s, done_s, written = failure_s, safe_s, None
        failure_s += chance.expovariate(1 / between_s)
        while failure_s < now_s + given.restart_s + written_s:
            now_s, failure_s = failure_s, failure_s + chance.expovariate(1 / between_s)
        now_s += given.restart_s + written_s
    return now_s


@pytest.mark.parametrize("storage_bytes_per_s", [2e9, 5e9, 50e9])
def test_failures_strike_while_work_is_repeated_for_a_checkpoint_that_was_not_written(
    storage_bytes_per_s: float,
) -> None:
    """Writing takes 47, 19 and 2 minutes of the 128 between two failures."""
    given = replace(LLAMA3, device_hours=35_000, storage_bytes_per_s=storage_bytes_per_s)
    work_s, between_s = 200 * 3600.0, 35_000 * 3600 / 16384
    played_s = [_simulated_s(work_s, between_s, given, seed) for seed in range(100)]
    mean_s = sum(played_s) / len(played_s)
    assert goodput(work_s, 16384, given).wall_s == pytest.approx(mean_s, rel=0.02)


def test_a_training_of_one_stretch_loses_no_checkpoint_that_is_written() -> None:
    """Its end comes before any failure while the only checkpoint is written."""
    given = replace(LLAMA3, device_hours=35_000, storage_bytes_per_s=2e9)
    result = goodput(600.0, 16384, given)
    between_s, stopped_s = 35_000 * 3600 / 16384, given.checkpoint_bytes / (16384 * 20e9)
    failures = math.expm1((600 + stopped_s) / between_s)
    back_s = 600 + given.checkpoint_bytes / 2e9
    assert result.wall_s - result.start_s == pytest.approx(
        between_s * math.exp(back_s / between_s) * failures
    )
