"""Uneven workers: shares of a batch by speed, and slow workers that leave."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fullwire.resilience.pace import Pace, Paced, better_weights, shares, slow_ranks
from tests.transport.test_elastic import BATCH, SAMPLES, check_steps, played


@given(st.integers(0, 500), st.integers(1, 40))
def test_equal_weights_give_equal_parts_whatever_they_are(count: int, size: int) -> None:
    cuts = [count * rank // size for rank in range(size + 1)]
    assert shares(count, [3] * size) == [slice(*cut) for cut in pairwise(cuts)]
    assert shares(count, [1] * size) == shares(count, [3] * size)


@given(st.integers(2, 400), st.lists(st.floats(0.01, 10), min_size=2, max_size=20))
def test_weights_follow_speed_and_leave_each_rank_a_sample(
    batch_size: int, times_s: list[float]
) -> None:
    even = [part.stop - part.start for part in shares(batch_size, [1] * len(times_s))]
    paces = {
        rank: Paced(10, max(samples, 1), round(max(samples, 1) * time_s * 1e9))
        for rank, (samples, time_s) in enumerate(zip(even, times_s, strict=True))
    }
    weights = better_weights(paces, batch_size)
    if weights is None:
        return
    parts = shares(batch_size, list(weights.values()))
    sizes = [part.stop - part.start for part in parts]
    assert sum(sizes) == batch_size
    assert min(sizes) >= 1
    longest_s = max(size * time_s for size, time_s in zip(sizes, times_s, strict=True))
    ideal_s = batch_size / sum(1 / time_s for time_s in times_s)
    assert longest_s <= ideal_s + max(times_s) * (1 + 1e-6)  # samples are whole


def test_shares_stay_where_a_change_would_gain_little() -> None:
    paces = {0: Paced(10, 16, 1_000), 1: Paced(10, 16, 1_040), 2: Paced(10, 16, 980)}
    assert better_weights(paces, 48) is None
    paces[1] = Paced(10, 16, 3_000)
    weights = better_weights(paces, 48)
    assert weights is not None
    assert [part.stop - part.start for part in shares(48, list(weights.values()))] == [21, 6, 21]
    assert slow_ranks(paces) == {1: pytest.approx(3.0)}
    assert slow_ranks({0: paces[0], 1: Paced(10, 16, 1_490)}) == {}


def test_a_slow_worker_gets_fewer_samples_and_the_sums_are_those_of_equal_shares(
    tmp_path: Path,
) -> None:
    job = played(
        tmp_path, "none", "--balance", epochs=7, SLOW="1", SAMPLE_S="0.005", DROPPED="0", KEEPS="1",
    )  # fmt: skip
    assert job.returncode == 0, job.stderr
    assert "worker 1 is slow" in job.stderr
    assert "it gets fewer of them" in job.stderr
    check_steps(tmp_path, epochs=7, even=False)
    counts = {
        worker: [
            len(line.split()) - 4
            for line in (tmp_path / f"steps of {worker}").read_text().splitlines()
        ]
        for worker in range(3)
    }
    assert counts[1][0] == BATCH // 3
    assert counts[1][-1] < 10  # how the other two share the rest, the machine's other work decides
    assert min(counts[0][-1], counts[2][-1]) > BATCH // 3
    changes = [step for step in range(1, 70) if counts[0][step] != counts[0][step - 1]]
    assert all(later - sooner >= 20 for sooner, later in pairwise(changes))
    assert changes[0] >= 20

    torch.manual_seed(0)  # as worker 0, in one process
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 300), torch.nn.ReLU(), torch.nn.Dropout(0), torch.nn.Linear(300, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(3))
    for epoch in range(7):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(BATCH):
            wanted = inputs[batch].sum(1, keepdim=True)
            loss = torch.nn.functional.mse_loss(model(inputs[batch]), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
    trained = torch.load(tmp_path / "model of 0")
    for name, plain in model.state_dict().items():
        assert torch.allclose(trained[name], plain, rtol=1e-3, atol=1e-5), name


def test_a_slow_worker_leaves_only_when_asked(tmp_path: Path) -> None:
    more = {"SLOW": "1", "SAMPLE_S": "0.004"}
    job = played(tmp_path, "none", "--evict-slow", "--respawn", epochs=6, **more)
    assert job.returncode == 0, job.stderr
    assert "worker 1 is slow" in job.stderr
    assert "it leaves the job" in job.stderr
    assert "worker 1 left, because it was slow" in job.stderr
    sizes = check_steps(tmp_path, epochs=6)
    assert (sizes[20], sizes[60]) == (3, 2)


def test_ranks_that_enter_an_epoch_take_the_same_shares() -> None:
    old, new = Pace(None), Pace(None)
    old.enters([0, 1, 2], ['{"0":20,"1":8,"2":20}'], 30)
    assert old.weights_of([0, 1, 2]) == [20, 8, 20]
    said = [old.said]
    for pace in (old, new):
        pace.enters([0, 2, 4], said, 50)
        assert pace.weights_of([0, 2, 4]) == [20, 20, 20]  # the new one has the usual weight
    old.enters([0, 2], [""], 60)
    assert old.weights_of([0, 2]) == [1, 1]


def test_layers_with_batch_statistics_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    from fullwire.resilience.batches import tell_of_batch_statistics

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    tell_of_batch_statistics(model, 1)
    tell_of_batch_statistics(model[0], 0)
    assert capsys.readouterr().err == ""
    tell_of_batch_statistics(model, 0)
    assert "--balance changes the result of 1 (BatchNorm1d)" in capsys.readouterr().err
