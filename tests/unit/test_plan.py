"""Collectives stated as transfers: right on real arrays, and no byte more than theory says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fullwire.clusters.cluster import one_switch
from fullwire.collectives import algorithms
from fullwire.collectives.closed_form import cost
from fullwire.collectives.cost import AddTimes, bus_factor
from fullwire.collectives.plan import plan
from fullwire.collectives.registry import OPS, fitting, known, with_formula
from fullwire.collectives.stages import execute
from fullwire.errors import UsageError

PAIRS = [(op, algorithm) for op in OPS for algorithm in with_formula(op)]
SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 31, 32, 33]


def is_offered(op: str, algorithm: str, workers: int) -> bool:
    return algorithm in fitting(op, one_switch(workers=workers, rate_bps=1e9))


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


def test_every_algorithm_is_found_in_its_folder_and_says_what_it_does() -> None:
    folder = Path(algorithms.__path__[0])
    files = {path.stem.replace("_", "-") for path in folder.glob("*.py")} - {"--init--"}
    registered = {name for op in OPS for name in known(op)}
    assert files <= registered  # one file may register its variants, such as hierarchical-tree
    for op in OPS:
        for name, algorithm in known(op).items():
            assert algorithm.label[0].islower() or algorithm.label.startswith("NCCL"), name
            assert any(name.startswith(file) for file in files), name


def test_what_has_a_formula_says_where_it_is_exact() -> None:
    for op, algorithm in PAIRS:
        assert known(op)[algorithm].ops[op].exactly_s is not None


def test_an_uneven_halving_is_refused() -> None:
    with pytest.raises(UsageError, match="expected a power of two of workers, got 6"):
        plan("reducescatter", "halving-doubling", 6)


def test_add_times_are_straight_between_points_and_flat_outside() -> None:
    adds = AddTimes(((100.0, 1.0), (200.0, 3.0)))
    assert adds([0, 100, 150, 200, 10**9]).tolist() == [1, 1, 2, 3, 3]
    assert AddTimes()([5]).tolist() == [0]
    with pytest.raises(UsageError, match="ascending"):
        AddTimes(((2.0, 1.0), (1.0, 1.0)))
