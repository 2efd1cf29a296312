"""Local steps between sums (`sync_every`): a round counts for all workers or for none."""

from __future__ import annotations

import copy
from collections import defaultdict
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import fullwire
from fullwire.errors import UsageError
from tests.transport.test_elastic import BATCH, SAMPLES, played

STEPS_IN_EPOCH = SAMPLES // BATCH


def check_rounds(
    folder: Path, epochs: int, of_a_round: int, *, is_streamed: bool = False
) -> dict[int, int]:
    """Hold the workers' notes of each round against each other; return the ranks of each."""
    samples: dict[int, list[int]] = defaultdict(list)
    digests: dict[int, set[str]] = defaultdict(set)
    ranks: dict[int, list[int]] = defaultdict(list)
    for path in folder.glob("steps of *"):
        for line in path.read_text().splitlines():
            committed, digest, rank, _, *own = line.split()
            samples[int(committed)] += map(int, own)
            digests[int(committed)].add(digest)
            ranks[int(committed)].append(int(rank))
    count, before = epochs * STEPS_IN_EPOCH, 0
    orders = [
        torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist()
        for epoch in range(epochs)
    ]
    for step in sorted(samples):
        wanted: list[int] = []
        for number in range(before, step):
            epoch, place = divmod(number, STEPS_IN_EPOCH)
            order = orders[epoch]
            wanted += order[place * BATCH : (place + 1) * BATCH]
        assert step == min(before + of_a_round, count)
        assert sorted(samples[step]) == sorted(wanted), f"step {step}"
        if not is_streamed or step == count:
            assert len(digests[step]) == 1, f"parameters differ after step {step}"
        assert len(set(ranks[step])) == len(ranks[step])
        before = step
    assert before == count
    return {step: len(each) for step, each in ranks.items()}


@pytest.mark.parametrize(
    ("phase", "tries"), [("forward", "3"), ("backward", "4"), ("between", "1")]
)
def test_a_round_with_a_lost_worker_is_taken_again_by_the_others(
    tmp_path: Path, phase: str, tries: str
) -> None:
    job = played(tmp_path, phase, SYNC="4", TRIES=tries)
    assert job.returncode == 0, job.stderr
    sizes = check_rounds(tmp_path, 3, 4)
    assert [sizes[step] for step in (8, 16, 30)] == [3, 2, 2]
    # The scheduler, too, goes back to the beginning of the round.
    assert job.stdout.count("done 30 [1.0000000000000005e-09]") == 2


def test_a_new_worker_gets_the_outer_momentum_and_takes_part_from_a_round_on(
    tmp_path: Path,
) -> None:
    more = {"NEW": "3", "PAUSE_S": "0.003", "SYNC": "3"}
    job = played(tmp_path, "forward", "--respawn", epochs=20, **more)
    assert job.returncode == 0, job.stderr
    sizes = check_rounds(tmp_path, 20, 3)
    assert [sizes[step] for step in (9, 12, 200)] == [3, 2, 3]


def test_a_large_state_comes_while_the_others_take_rounds(tmp_path: Path) -> None:
    more = {"BALLAST": str(8 * 2**20), "NEW": "3", "PAUSE_S": "0.003", "SYNC": "3"}
    job = played(tmp_path, "forward", "--respawn", epochs=60, AWAITED_S="0.003", **more)
    assert job.returncode == 0, job.stderr
    sizes = check_rounds(tmp_path, 60, 3)
    assert sizes[600] == 3
    lines = (tmp_path / "steps of 3").read_text().splitlines()
    assert any(len(line.split()) == 4 for line in lines), "it waited for the state with the others"
    assert job.stdout.count("ballast [0.0]") == 3


@pytest.mark.parametrize(("sync", "fragments"), [("6", "2"), ("2", "2"), ("8", "4")])
def test_fragments_travel_in_turn_and_a_loop_ends_with_equal_parameters(
    tmp_path: Path, sync: str, fragments: str
) -> None:
    more = {"SYNC": sync, "FRAGMENTS": fragments}
    job = played(tmp_path, "forward", epochs=3, **more)
    assert job.returncode == 0, job.stderr
    sizes = check_rounds(tmp_path, 3, int(sync) // int(fragments), is_streamed=True)
    assert (sizes[2 if sync != "6" else 3], sizes[30]) == (3, 2)


def test_a_new_worker_takes_part_in_streamed_rounds(tmp_path: Path) -> None:
    more = {"BALLAST": str(8 * 2**20), "NEW": "3", "PAUSE_S": "0.003", "AWAITED_S": "0.003"}
    more |= {"SYNC": "6", "FRAGMENTS": "2"}
    job = played(tmp_path, "forward", "--respawn", epochs=60, **more)
    assert job.returncode == 0, job.stderr
    assert check_rounds(tmp_path, 60, 3, is_streamed=True)[600] == 3


def test_rounds_alone_are_those_of_diloco() -> None:
    """With one worker, an outer step follows from the definition in four lines."""
    torch.manual_seed(3)
    inputs, wanted = torch.randn(60, 4), torch.randn(60, 1)
    model = torch.nn.Linear(4, 1)
    twin = copy.deepcopy(model)
    optimizer, its = (torch.optim.AdamW(each.parameters(), lr=0.05) for each in (model, twin))
    job = fullwire.elastic(model, optimizer, sync_every=3, outer_rate=0.6, outer_momentum=0.8)
    dataset = torch.utils.data.TensorDataset(inputs, wanted)
    seen = []
    for given, target in job.batches(dataset, batch_size=10, epochs=2, shuffle=False):
        with job.step():
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(given), target).backward()
            optimizer.step()
        seen.append((job.step_number, len(job.samples)))
    assert seen == [(0, 0), (0, 0), (3, 30), (3, 30), (3, 30), (6, 30), *seen[6:]]
    assert seen[-1] == (12, 30)
    momenta = [torch.zeros_like(each) for each in twin.parameters()]
    for number in range(4):
        begins = [each.detach().clone() for each in twin.parameters()]
        for step in range(3 * number, 3 * number + 3):
            part = slice(10 * step % 60, 10 * step % 60 + 10)
            its.zero_grad()
            torch.nn.functional.mse_loss(twin(inputs[part]), wanted[part]).backward()
            its.step()
        for each, begin, momentum in zip(twin.parameters(), begins, momenta, strict=True):
            change = begin - each.detach()
            momentum.mul_(0.8).add_(change)
            each.data = begin - 0.6 * (change + 0.8 * momentum)
    for each, own in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own, each)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"sync_every": 4, "fragments": 3}, "expected a divisor of sync_every=4, got 3"),
        ({"sync_every": 4, "fragments": 4}, "expected at most 2, one for each parameter .* got 4"),
        ({"sync_every": 0}, "sync_every: expected 1 step or more, got 0"),
        ({"sync_every": 2, "outer_rate": 0.0}, "expected outer_rate above 0 .* got 0 and 0.9"),
        ({"sync_every": 2, "outer_momentum": 1.0}, "to below 1, got 0.7 and 1"),
        ({"sync_every": 4, "fragments": 3}, r"got 3\. The nearest is 2"),
        ({"sync_every": 4, "outer_rate": float("nan")}, "expected outer_rate above 0 .* got nan"),
        ({"sync_every": 4, "outer_rate": float("inf")}, "expected outer_rate above 0 .* got inf"),
        ({"sync_every": "30"}, "sync_every: expected a whole number of steps, got '30'"),
        ({"sync_every": 2.5}, r"sync_every: expected a whole number of steps, got 2\.5"),
        ({"sync_every": True}, "sync_every: expected a whole number of steps, got True"),
        ({"sync_every": 4, "fragments": 2.0}, "fragments: expected a whole number of parts, got 2"),
        ({"sync_every": 4, "outer_rate": "0.7"}, "outer_rate: expected a number, got '0.7'"),
        ({"sync_every": 4, "outer_momentum": False}, "outer_momentum: expected a number, got"),
        ({"outer_rate": 0.7}, "outer_momentum: expected sync_every above 1 with them"),
    ],
)
def test_settings_of_rounds_are_checked(more: dict[str, Any], said: str) -> None:
    model = torch.nn.Linear(2, 1)
    with pytest.raises(UsageError, match=said):
        fullwire.elastic(model, torch.optim.SGD(model.parameters(), 0.1), **more)


def test_changes_travel_in_a_wire_format_and_ranks_stay_equal(tmp_path: Path) -> None:
    job = played(tmp_path, "forward", FULLWIRE_WIRE="bf16", WIDTH="8000", SYNC="4")
    assert job.returncode == 0, job.stderr
    assert check_rounds(tmp_path, 3, 4)[30] == 2


def test_a_round_begins_quickly_and_each_interrupted_one_goes_back_to_its_own_beginning() -> None:
    """The copy of the state took new memory in each round, and so three times as long."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    job = fullwire.elastic(model, optimizer, sync_every=2)
    job._loop = job._loop.next(8)
    job._mesh = cast(Any, object())  # without one, no round is kept

    def take(steps: int) -> list[Any]:
        for _ in range(steps):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        momenta = [optimizer.state[each]["momentum_buffer"] for each in model.parameters()]
        return [each.detach().clone() for each in (*model.parameters(), *momenta)]

    before = take(1)
    for _ in range(3):
        places = []
        for _ in range(2):
            job._begin_round()
            assert job._kept is not None
            row: Any = job._kept[1]
            places.append(row.data_ptr())
        assert places[0] == places[1]
        take(3)
        job._go_back()
        momenta = [optimizer.state[each]["momentum_buffer"] for each in model.parameters()]
        for each, own in zip(before, (*model.parameters(), *momenta), strict=True):
            torch.testing.assert_close(each, own.detach())
        before = take(1)
