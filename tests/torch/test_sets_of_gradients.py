"""Passes that add up their gradients, and passes that only share a step."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import fullwire as fw
from fullwire.run.run import Run
from tests.torch.test_record import JOBS, UNCOMPILED, needs_torch, recorded, together

pytestmark = needs_torch
# B begins a set of gradients, A adds to it, and for ? the parameters show nothing.
EXPECTED = {
    "plain": "B",
    "accumulated": "BAAA",
    "accumulated, kept": "BA",
    "accumulated, fused": "BA",
    "accumulated, sent once": "BAAA",
    "accumulated, scaled": "BA",
    "accumulated, two optimizers": "BA",
    "accumulated, two tasks": "BA",
    "accumulated, embedded": "BAA",
    "accumulated, beside one without counts": "BA",
    "adversarial": "BAB",
    "adversarial, in one": "BB",
    "two models": "BB",
    "closure": "B",
    "closure, accumulated": "BAAA",
    "lbfgs": "BBB",
    "lbfgs, accumulated": "BABABA",
    "sharpness-aware": "BB",
    "penalized": "B",
    "penalized, apart": "BA",
    "fsdp2": "B?",
    "fsdp2, sent once": "?B",
    "fsdp1": "??",
}


@pytest.fixture(scope="module")
def all_ways(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, dict[str, str]]:
    """Record all ways once."""
    place = tmp_path_factory.mktemp("sets")
    job = str(JOBS / "sets_of_gradients.py")
    run, done = recorded(place, sys.executable, UNCOMPILED, job)
    return run, json.loads(done.stdout)


def test_each_pass_tells_whether_it_adds_to_the_one_before(
    all_ways: tuple[Run, dict[str, str]],
) -> None:
    assert all_ways[1] == EXPECTED


def test_steps_that_mix_both_count_as_several_sets(all_ways: tuple[Run, dict[str, str]]) -> None:
    assert (all_ways[0].facts.gradient_sets or 0) > 1


def test_two_passes_that_are_used_by_themselves_get_no_advice_to_add_up(tmp_path: Path) -> None:
    run, done = recorded(tmp_path, *together(2, "sharpness.py"))
    assert run.facts.gradient_sets == 2
    said = " ".join(done.stderr.decode().split())
    assert "A step has 2 passes, and not all of their gradients seem to add up" in said
    found = fw.explain(run, bandwidth="1Mbps")
    assert not {"accumulation", "synchronisation"} & {fix.kind for fix in found.fixes}


def test_where_each_pass_has_a_step_nobody_looks_until_a_step_has_two() -> None:
    import torch

    from fullwire.recorder.inside.gradients import ADDS, BEGINS, UNKNOWN, Adding
    from fullwire.recorder.inside.journal import Journal

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    adding = Adding(Journal(""))
    adding.watch(model.parameters())

    def step(passes: int) -> list[int]:
        optimizer.zero_grad()
        found = []
        for _ in range(passes):
            adding.pass_begins()
            model(torch.ones(2)).sum().backward()
            found.append(adding.pass_ended())
        optimizer.step()
        adding.step_ended(0)
        return found

    assert [step(1) for _ in range(5)] == [*3 * [[BEGINS]], *2 * [[UNKNOWN]]]
    step(2)  # which shows that there are such steps
    assert step(2) == [BEGINS, ADDS]
    assert [step(1) for _ in range(4)] == [*3 * [[BEGINS]], [UNKNOWN]]


def test_a_second_optimizer_that_steps_once_in_five_steps_makes_its_own_set() -> None:
    """Formerly nobody looked after three plain steps, so a GAN's two passes seemed to add up."""
    import torch

    from fullwire.recorder.inside.gradients import BEGINS, UNKNOWN, Adding
    from fullwire.recorder.inside.journal import Journal

    models = [torch.nn.Linear(2, 2) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    adding = Adding(Journal(""))
    for model in models:
        adding.watch(model.parameters())
    found = []
    for number in 3 * [0, 0, 0, 0, 0, 1]:
        optimizers[number].zero_grad()
        adding.pass_begins()
        models[number](torch.ones(2)).sum().backward()
        found.append(adding.pass_ended())
        optimizers[number].step()
        adding.step_ended(number)
    assert found[:6] == [BEGINS, BEGINS, BEGINS, UNKNOWN, UNKNOWN, UNKNOWN]
    assert found[6:] == 12 * [BEGINS]
