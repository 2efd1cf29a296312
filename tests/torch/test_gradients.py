"""Each way to pass backward: every gradient is recorded once, in the pass of its step."""

from __future__ import annotations

import sys

import pytest

from fullwire.run.run import Run
from tests.torch.test_record import JOBS, UNCOMPILED, needs_torch, recorded

pytestmark = needs_torch
STEPS = 3


@pytest.fixture(scope="module")
def passes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[str]]:
    """Record all ways once; return the run and their names in order."""
    place = tmp_path_factory.mktemp("passes")
    run, done = recorded(place, sys.executable, UNCOMPILED, str(JOBS / "passes.py"))
    return run, done.stdout.decode().splitlines()


def of_way(passes: tuple[Run, list[str]], way: str) -> range:
    begin = passes[1].index(way) * STEPS
    return range(begin, begin + STEPS)


def names_in(run: Run, step: int) -> list[str]:
    return sorted(run.spans.name[(run.spans.step == step) & (run.spans.lane == "compute")])


@pytest.mark.parametrize(
    "way",
    ["plain", "accumulated", "checkpointed", "unused", "static", "optimizer first", "starved"],
)
def test_every_gradient_is_told_once_in_its_last_backward_pass(
    passes: tuple[Run, list[str]], way: str
) -> None:
    run, _ = passes
    for step in of_way(passes, way):
        gradients = run.gradients.rows(run.gradients.step == step)
        assert sorted(gradients.bytes) == [32, 32, 256, 256]
        in_backward = (run.spans.step == step) & (run.spans.name == "backward")
        [start_ns], [end_ns] = run.spans.start_ns[in_backward], run.spans.end_ns[in_backward]
        assert (start_ns <= gradients.ready_ns).all()
        assert gradients.ready_ns.max() == end_ns


def test_a_backward_pass_inside_another_is_part_of_it(passes: tuple[Run, list[str]]) -> None:
    for step in of_way(passes, "checkpointed"):
        assert names_in(passes[0], step) == ["backward", "forward", "optimizer"]


def test_passes_without_communication_are_earlier_ones(passes: tuple[Run, list[str]]) -> None:
    for step in of_way(passes, "accumulated"):
        assert names_in(passes[0], step) == [
            "backward",
            "earlier backward",
            "earlier forward",
            "forward",
            "optimizer",
        ]


def test_where_a_reducer_is_passed_by_hooks_take_over_after_a_step(
    passes: tuple[Run, list[str]],
) -> None:
    run = passes[0]
    counts = [int((run.gradients.step == step).sum()) for step in of_way(passes, "around")]
    assert counts == [0, 4, 4]
