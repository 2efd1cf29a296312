"""Better, worse, or noise?"""

from __future__ import annotations

import numpy as np
import pytest

import fullwire as fw
from fullwire.errors import UsageError
from tests.builders import a_run, steps_run


def noisy(median_ms: float, seed: int, steps: int = 60) -> list[float]:
    spread = 0.03 * np.random.default_rng(seed).standard_normal(steps)
    return [median_ms * (1 + each) for each in spread.tolist()]


def test_a_real_improvement_is_told_from_noise() -> None:
    found = fw.compare(steps_run(noisy(100, 1)), steps_run(noisy(90, 2)))
    assert found.is_significant is True
    assert found.low is not None
    assert found.high is not None
    assert found.low < 0.9 < found.high < 1


def test_noise_alone_is_called_noise() -> None:
    calls = [
        fw.compare(steps_run(noisy(100, seed)), steps_run(noisy(100, seed + 100))).is_significant
        for seed in range(20)
    ]
    assert calls.count(True) <= 3  # a 95 % interval is wrong now and then


def test_the_answer_is_the_same_every_time() -> None:
    one, other = steps_run(noisy(100, 1)), steps_run(noisy(99, 2))
    assert fw.compare(one, other) == fw.compare(one, other)


def test_too_few_steps_tell_nothing_about_noise() -> None:
    found = fw.compare(steps_run([100, 101]), steps_run([50, 51]))
    assert found.is_significant is None
    assert found.ratio == pytest.approx(50.5 / 100.5)


def test_runs_of_other_work_are_not_compared() -> None:
    one = steps_run([100], facts={"model": "VGG16"})
    other = steps_run([100], facts={"model": "ResNet50"})
    with pytest.raises(UsageError, match="the network being trained is 'VGG16' in one"):
        fw.compare(one, other)


def test_a_run_without_steps_is_refused() -> None:
    empty = fw.Run(provenance=a_run().provenance)
    with pytest.raises(UsageError, match="no steps to compare"):
        fw.compare(empty, a_run())


def test_what_watching_cost_is_no_difference_between_jobs() -> None:
    one, other = (
        steps_run([100], facts={"recorder_s": cost, "sampler_share": cost, "hosts": "a"})
        for cost in (0.1, 0.2)
    )
    assert fw.compare(one, other).differing_facts == ()
