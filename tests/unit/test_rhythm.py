"""Steps of 20 ms to 5 s in counters that this file makes up, looked at as a watch looks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from fullwire.packets.rhythm import Rhythm, before_pauses, rhythm_of

Part = tuple[float, float]  # seconds, bytes


def looked_at(steps: Sequence[Sequence[Part]], look_s: float, seconds: float) -> Rhythm | None:
    """Play steps, and look at their bytes and their computing every now and then."""
    random = np.random.default_rng(5)
    at_s, sent, computed = [0.0], [0.0], [0.0]
    for lasts_s, size in (part for step in steps for part in step):
        # Bytes come unevenly, some milliseconds at a time.
        pieces = random.lognormal(0, 0.3, 1 if not size else min(int(lasts_s / 0.004) + 1, 400))
        for piece_s in pieces * lasts_s / pieces.sum():
            at_s.append(at_s[-1] + piece_s)
            sent.append(sent[-1] + size / len(pieces))
            computed.append(computed[-1] + (0 if size else piece_s))
    looks: NDArray[np.float64] = np.cumsum(look_s * random.uniform(0.5, 1.5, 30_000))
    looks = looks[looks < min(seconds, at_s[-1])]
    grid = np.arange(looks[0], looks[-1], max(0.005, look_s / 2))
    carried, work = (
        np.interp(grid, looks, np.interp(looks, at_s, counter)) for counter in (sent, computed)
    )
    return rhythm_of(grid, carried, work, look=look_s)


def ddp(
    step_s: float, count: int, *, buckets: int = 1, jitter: float = 0.1, evaluates: int = 0
) -> list[list[Part]]:
    """Return steps that compute, send and compute, each part shorter or longer by chance."""
    random = np.random.default_rng(7)
    steps = []
    for number in range(1, count + 1):
        parts = [(0.35 * step_s, 0.0)]
        for bucket in range(buckets):
            if bucket:
                parts.append((0.15 * step_s / (buckets - 1), 0.0))
            parts.append((0.5 * step_s / buckets, 1e7 / buckets))
        steps.append([(lasts_s * random.lognormal(0, jitter), size) for lasts_s, size in parts])
        if evaluates and number % evaluates == 0:
            steps[-1].append((8 * step_s, 0.0))
    return steps


def step_of(found: Rhythm | None) -> float:
    assert found is not None
    return float(np.median(np.diff(found.starts)))


@pytest.mark.parametrize("look_s", [0.005, 0.008])
def test_steps_of_20_ms_are_found(look_s: float) -> None:
    found = looked_at(ddp(0.02, 600), look_s, 10)
    assert step_of(found) == pytest.approx(0.017, rel=0.03)


def test_short_steps_with_an_evaluation_after_each_15_are_no_groups_of_15() -> None:
    for evaluates in (10, 15, 20):
        found = looked_at(ddp(0.05, 400, evaluates=evaluates), 0.005, 20)
        assert step_of(found) == pytest.approx(0.0425, rel=0.05)


@pytest.mark.parametrize("buckets", [2, 5, 8])
def test_alike_buckets_are_one_step_and_no_multiple_of_it(buckets: int) -> None:
    for step_s, seconds in ((0.3, 12), (1.0, 60)):
        found = looked_at(ddp(step_s, 80, buckets=buckets, jitter=0.2), 0.012, seconds)
        assert step_of(found) == pytest.approx(1.0 * step_s, rel=0.06)


@pytest.mark.parametrize("buckets", [1, 2, 5])
def test_steps_of_5_s_are_found_in_a_while_and_not_taken_for_their_parts_before(
    buckets: int,
) -> None:
    steps = ddp(5.0, 20, buckets=buckets)
    found = looked_at(steps, 0.018, 90 if buckets == 2 else 60)
    lasted_s = [sum(lasts_s for lasts_s, _ in step) for step in steps[:14]]
    assert step_of(found) == pytest.approx(float(np.median(lasted_s)), rel=0.05)
    for seconds in (20, 25):
        found = looked_at(steps, 0.018, seconds)
        assert found is None, step_of(found)


def test_parts_of_a_step_are_no_steps_however_few_steps_were_seen() -> None:
    """Four buckets leave a backward pass of 3 s; then the forward pass takes 1.7 s more."""
    random = np.random.default_rng(2)
    steps: list[list[Part]] = [
        [
            part
            for bucket in range(4)
            for part in (
                ((0.7 if bucket else 2.4) * random.lognormal(0, 0.01), 0.0),
                (0.1, 12.5e6),
            )
        ]
        for _ in range(20)
    ]
    for seconds in (8, 11, 14, 17, 20, 24, 28, 40, 60, 90):
        found = looked_at(steps, 0.011, seconds)
        if found is not None:
            assert step_of(found) == pytest.approx(4.9, rel=0.02), seconds
    assert found is not None


@pytest.mark.parametrize("seconds", [15, 20, 28, 30, 40, 60])
def test_the_beat_in_which_bytes_leave_a_queue_is_no_step(seconds: float) -> None:
    """As watched: at 100 Mbps 64 KB left each 5 ms, and steps of 3.8 s had one pause each."""
    lumps = [(0.0002, 64e3), (0.005, 0.0)] * 420
    found = looked_at([[(1.6, 0.0), *lumps]] * 20, 0.0048, seconds)
    assert found is not None or seconds <= 30
    assert found is None or step_of(found) == pytest.approx(1.6 + 420 * 0.0052, rel=0.02)


@pytest.mark.parametrize("jitter", [0.0, 0.02, 0.05])
def test_alternate_steps_that_hardly_differ_are_no_step_of_two(jitter: float) -> None:
    """As watched: of batches that a process loads, each second one took 1.3 % less."""
    random = np.random.default_rng(1)
    steps = [
        [
            ((0.237 if at % 2 else 0.24) * random.lognormal(0, jitter), 0.0),
            (0.064 * random.lognormal(0, jitter), 8e6),
        ]
        for at in range(110)
    ]
    assert step_of(looked_at(steps, 0.0033, 30)) == pytest.approx(0.302, rel=0.02)


def test_a_step_begins_where_its_pause_begins() -> None:
    flowing = np.array([bool(int(digit)) for digit in "1111000011110000111111110000"])
    edges = np.array([0, 6, 13, 19, 26])  # before, in and just after a pause; amid bytes; in one
    assert before_pauses(edges, flowing).tolist() == [0, 4, 12, 19, 24]


@pytest.mark.parametrize("step_s", [0.018, 0.0216, 0.03])
def test_a_step_of_few_looks_is_found_or_refused_and_no_multiple_is_told(step_s: float) -> None:
    """Looks at equal distances would show steps of 5 to 70 times the length."""
    found = [
        looked_at(ddp(step_s, 500, jitter=0.02), look_s, seconds)
        for look_s in np.linspace(0.0085, 0.0105, 6).tolist()
        for seconds in (4, 9)
    ]
    for each in found:
        assert each is None or step_of(each) == pytest.approx(0.85 * step_s, rel=0.05)
    assert any(each is not None for each in found)


def test_a_band_of_the_spectrum_without_anything_in_it_divides_nothing_by_zero() -> None:
    """Bytes that come as evenly as they can leave exact zeros beside the line of their steps."""
    even = np.arange(0.0, 400.0)
    with np.errstate(all="raise"):
        assert rhythm_of(even, even) is None
