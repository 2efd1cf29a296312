"""Collectives stated as transfers: right on real arrays, and no byte more than theory says."""

from __future__ import annotations

import numpy as np
import pytest

from fullwire.collectives.cost import _COSTS, AddTimes, bus_factor, cost
from fullwire.collectives.plan import (
    _BUILDERS,
    OPS,
    algorithms,
    plan,
    planned_transfers,
    power_of_two_within,
)
from fullwire.collectives.stages import execute
from fullwire.errors import UsageError

PAIRS = [(op, algorithm) for op in OPS for algorithm in algorithms(op)]
SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 31, 32, 33]


def is_offered(op: str, algorithm: str, workers: int) -> bool:
    needs_even_halves = algorithm == "halving-doubling" and op != "allreduce"
    return not needs_even_halves or workers == power_of_two_within(workers)


CASES = [(*pair, workers) for pair in PAIRS for workers in SIZES if is_offered(*pair, workers)]
each_case = pytest.mark.parametrize(("op", "algorithm", "workers"), CASES)


@each_case
def test_a_plan_carried_out_on_arrays_gives_what_the_collective_promises(
    op: str, algorithm: str, workers: int
) -> None:
    made = plan(op, algorithm, workers)
    vectors = np.random.default_rng(workers).integers(0, 1000, (workers, 71))
    held = execute(made, vectors)
    edges = np.arange(made.blocks + 1) * 71 // made.blocks
    own = [slice(edges[rank], edges[rank + 1]) for rank in range(min(workers, made.blocks))]
    total = vectors.sum(axis=0)
    if op == "allreduce":
        assert (held == total).all()
    elif op == "broadcast":
        assert (held == vectors[0]).all()
    elif op == "reducescatter":
        assert all((held[rank, mine] == total[mine]).all() for rank, mine in enumerate(own))
    else:
        gathered = np.concatenate([vectors[rank, mine] for rank, mine in enumerate(own)])
        assert (held == gathered).all()


@each_case
def test_the_closed_form_counts_what_the_plan_moves(op: str, algorithm: str, workers: int) -> None:
    made = plan(op, algorithm, workers)
    size = 1e6 * made.blocks
    known = cost(op, algorithm, workers, size, AddTimes())
    if workers == 1:
        assert float(known.wire_bytes) == known.hops == 0
        return
    busiest = max(made.sent_blocks().max(), made.received_blocks().max())
    assert float(known.sent_bytes) == pytest.approx(busiest * 1e6)
    if algorithm == "halving-doubling" or (op == "allreduce" and algorithm == "ring"):
        [part] = made.parts
        rounds = [part.block_count[part.round == number].max() for number in np.unique(part.round)]
        assert float(known.wire_bytes) == pytest.approx(sum(rounds) * 1e6)
        assert known.hops == len(rounds)


@each_case
def test_the_closed_form_adds_as_often_as_the_busiest_rank(
    op: str, algorithm: str, workers: int
) -> None:
    made = plan(op, algorithm, workers)
    size = 1e6 * made.blocks
    per_byte = AddTimes(((0.0, 0.0), (1e12, 1e3)))
    added = np.zeros(workers)
    for part in made.parts:
        np.add.at(added, part.target, part.reduces * part.block_count * 1e6 * 1e-9)
    known = cost(op, algorithm, workers, size, per_byte)
    assert float(known.add_s) == pytest.approx(added.max())


@pytest.mark.parametrize("workers", [2, 3, 8, 100])
def test_a_ring_sends_every_byte_twice_but_for_one_share(workers: int) -> None:
    made = plan("allreduce", "ring", workers)
    assert set(made.sent_blocks() / made.blocks) == {bus_factor("allreduce", workers)}


def test_in_a_double_tree_no_rank_is_an_inner_node_twice() -> None:
    for workers in range(2, 70):
        inner = [
            set(part.target[part.reduces].tolist())
            for part in plan("allreduce", "tree", workers).parts
        ]
        roots_apart = inner[0] & inner[1]
        assert len(roots_apart) <= (1 if workers % 2 else 2), workers


def test_planned_transfers_are_never_fewer_than_made() -> None:
    for op, algorithm in PAIRS:
        for workers in (1, 2, 4, 8, 32, 64):
            made = plan(op, algorithm, workers).transfer_count()
            assert planned_transfers(op, algorithm, workers) >= made
            if algorithm != "halving-doubling":
                assert planned_transfers(op, algorithm, workers) == made


def test_plan_and_cost_know_the_same_collectives() -> None:
    assert set(_BUILDERS) == set(_COSTS)


def test_an_uneven_halving_is_refused() -> None:
    with pytest.raises(UsageError, match="expected a power of two of workers, got 6"):
        plan("reducescatter", "halving-doubling", 6)


def test_add_times_are_straight_between_points_and_flat_outside() -> None:
    adds = AddTimes(((100.0, 1.0), (200.0, 3.0)))
    assert adds([0, 100, 150, 200, 10**9]).tolist() == [1, 1, 2, 3, 3]
    assert AddTimes()([5]).tolist() == [0]
    with pytest.raises(UsageError, match="ascending"):
        AddTimes(((2.0, 1.0), (1.0, 1.0)))
