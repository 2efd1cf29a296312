"""The loss of replicas that synchronise seldom."""

from __future__ import annotations

import pytest

from fullwire.convergence.batches import excess


@pytest.mark.parametrize(
    ("replicas", "steps", "parameters", "published"),
    [
        (2, 30, 35e6, 3.508 / 3.485),
        (8, 30, 90e6, 3.265 / 3.167),
        (4, 30, 550e6, 2.673 / 2.653),
        (8, 30, 2.4e9, 2.351 / 2.326),
        (4, 100, 200e6, 3.05 / 2.97),
        (2, 100, 4e9, 2.26 / 2.25),
    ],
)
def test_the_law_holds_published_losses(
    replicas: int, steps: int, parameters: float, published: float
) -> None:
    found = excess(replicas=replicas, steps=steps, parameters=parameters)
    assert found.ratio == pytest.approx(published, abs=0.006)
    assert found.low < found.ratio < found.high
    assert not found.is_beyond


def test_one_worker_or_one_step_costs_nothing() -> None:
    assert excess(replicas=1, steps=30, parameters=1e9).ratio == 1
    assert excess(replicas=8, steps=1, parameters=1e9).high == 1


def test_beyond_what_was_published_the_interval_is_wide() -> None:
    within = excess(replicas=8, steps=100, parameters=1e9)
    beyond = excess(replicas=16, steps=100, parameters=1e9)
    assert beyond.is_beyond
    assert beyond.high - beyond.low > 2 * (within.high - within.low)


@pytest.mark.parametrize(
    ("replicas", "steps", "parameters"),
    [(2, 2, 1.6e9), (2, 10, 1.6e9), (2, 30, 10e9), (4, 2, 1e11)],
)
def test_averaging_seldom_is_no_way_to_a_lower_loss(
    replicas: int, steps: int, parameters: float
) -> None:
    found = excess(replicas=replicas, steps=steps, parameters=parameters)
    assert found.low < found.ratio == 1 < found.high
