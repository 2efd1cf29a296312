"""Collectives for clusters of nodes: right on real arrays, and no byte more than they must move."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fullwire.answers.collective import collective
from fullwire.clusters import cluster
from fullwire.collectives.cost import bus_factor
from fullwire.collectives.plan import plan, plan_on
from fullwire.collectives.registry import OPS, names
from fullwire.collectives.stages import Layout, Plan, execute
from fullwire.errors import UsageError
from tests.strategies import cases

PAIRS = [(op, algorithm) for op in OPS for algorithm in names(op)]
NEEDS_POWER_OF_TWO = [("reducescatter", "halving-doubling"), ("allgather", "halving-doubling")]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    per_node = draw(st.integers(1, 5))
    nodes = rows * columns
    return Layout(
        nodes=nodes,
        per_node=per_node,
        nics_per_node=draw(st.integers(1, per_node)),
        nodes_per_leaf=draw(st.integers(1, nodes)),
        torus=(rows, columns),
        servers=draw(st.integers(1, nodes * per_node)),
    )


def stated(op: str, algorithm: str, layout: Layout) -> Plan | None:
    if (op, algorithm) in NEEDS_POWER_OF_TWO and layout.workers & (layout.workers - 1):
        return None
    return plan(op, algorithm, layout)


def promised(made: Plan, vectors: NDArray[np.int64], held: NDArray[np.int64]) -> bool:
    """Say whether every rank ends with the result that the collective promises."""
    workers, total = made.workers, vectors.sum(axis=0)
    edges = np.arange(made.blocks + 1) * vectors.shape[1] // made.blocks
    if made.op == "allreduce":
        return bool((held == total).all())
    if made.op == "broadcast":
        return bool((held == vectors[0]).all())
    if made.op == "alltoall":
        blocks = [slice(*edges[each : each + 2]) for each in range(made.blocks)]
        return all(
            (
                held[rank, blocks[sender * workers + rank]]
                == vectors[sender, blocks[sender * workers + rank]]
            ).all()
            for rank in range(workers)
            for sender in range(workers)
        )
    pieces = made.blocks // workers
    own = [slice(edges[rank * pieces], edges[(rank + 1) * pieces]) for rank in range(workers)]
    if made.op == "reducescatter":
        return all((held[rank, mine] == total[mine]).all() for rank, mine in enumerate(own))
    gathered = np.concatenate([vectors[rank, mine] for rank, mine in enumerate(own)])
    return bool((held == gathered).all())


@pytest.mark.parametrize(("op", "algorithm"), PAIRS)
@cases(25)
@given(layout=layouts(), size=st.integers(0, 700))
def test_a_plan_carried_out_on_arrays_gives_what_the_collective_promises(
    op: str, algorithm: str, layout: Layout, size: int
) -> None:
    made = stated(op, algorithm, layout)
    if made is None:
        return
    vectors = np.random.default_rng(size).integers(0, 1000, (layout.workers, size))
    assert promised(made, vectors, execute(made, vectors))


@pytest.mark.parametrize(("op", "algorithm"), PAIRS)
@cases(25)
@given(layout=layouts())
def test_what_is_sent_is_received_and_nobody_sends_to_itself(
    op: str, algorithm: str, layout: Layout
) -> None:
    made = stated(op, algorithm, layout)
    if made is None:
        return
    assert made.sent_blocks().sum() == made.received_blocks().sum()
    for part in made.stages:
        for stage in part:
            assert len(stage) * stage.rounds > 0
            assert (stage.source != stage.target).all()
            assert min(stage.source.min(), stage.target.min()) >= 0
            assert max(stage.source.max(), stage.target.max()) < made.seats


BALANCED = [
    (op, algorithm)
    for op, algorithm in PAIRS
    if algorithm in ("bidirectional-ring", "multi-ring", "hierarchical", "torus", "pairwise")
    and op != "broadcast"
    and (op, algorithm) != ("alltoall", "hierarchical")
]


@pytest.mark.parametrize(("op", "algorithm"), BALANCED)
@cases(20)
@given(layout=layouts())
def test_every_rank_sends_and_receives_what_an_ideal_collective_must(
    op: str, algorithm: str, layout: Layout
) -> None:
    made = plan(op, algorithm, layout)
    ideal = bus_factor(op, layout.workers) * made.message_blocks
    assert made.sent_blocks() == pytest.approx(np.full(layout.workers, ideal))
    assert made.received_blocks() == pytest.approx(np.full(layout.workers, ideal))


def between_nodes(made: Plan, layout: Layout) -> float:
    """Return how many times the message leaves each node, on average."""
    crossing = sum(
        stage.rounds
        * stage.block_count
        * int((stage.source // layout.per_node != stage.target // layout.per_node).sum())
        for part in made.stages
        for stage in part
    )
    return crossing / made.message_blocks / layout.nodes


def test_a_hierarchy_keeps_all_but_one_copy_of_the_message_within_nodes() -> None:
    layout = Layout(nodes=6, per_node=8, nics_per_node=8)
    for algorithm in ("hierarchical", "hierarchical-leader", "multi-ring"):
        made = plan("allreduce", algorithm, layout)
        expected = 2 * 47 / 48 if algorithm == "multi-ring" else 2 * 5 / 6
        assert between_nodes(made, layout) == pytest.approx(expected)
    scattered = plan("allreduce", "halving-doubling", Layout(nodes=8, per_node=8))
    assert between_nodes(scattered, Layout(nodes=8, per_node=8)) == pytest.approx(14)


def test_an_aggregating_switch_receives_once_what_a_ring_sends_twice() -> None:
    made = plan("allreduce", "in-network", Layout(nodes=8, nodes_per_leaf=4))
    assert made.switches == 3
    assert set(made.sent_blocks()[:8] / made.blocks) == {1.0}
    assert made.received_blocks()[8:].tolist() == [5, 5, 2]  # four nodes and the spine; two leaves


def test_one_rank_has_nothing_to_do() -> None:
    for op, algorithm in PAIRS:
        assert plan(op, algorithm, Layout(nodes=1, torus=(1, 1))).transfer_count() == 0


@pytest.mark.parametrize(
    ("op", "algorithm", "layout", "said"),
    [
        ("allreduce", "torus", Layout(nodes=4), "expected a cluster whose nodes form a torus"),
        ("allreduce", "in-network", Layout(nodes=4), "expected one switch, or leaves below"),
        ("allreduce", "parameter-server", Layout(nodes=4, servers=5), "servers: expected 1 to 4"),
        ("alltoall", "pairwise", Layout(nodes=10_000), "99,990,000 different transfers"),
        ("alltoall", "ring", Layout(nodes=4), "expected pairwise, hierarchical, got 'ring'"),
        ("sum", "ring", Layout(nodes=4), "collective: expected one of allreduce"),
    ],
)
def test_what_cannot_be_stated_is_refused(
    op: str, algorithm: str, layout: Layout, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        plan(op, algorithm, layout)


@pytest.mark.parametrize("workers", [9, 12, 15, 20])
@pytest.mark.parametrize("op", ["allreduce", "reducescatter", "allgather"])
def test_rings_of_nics_go_over_a_last_node_that_is_not_full(op: str, workers: int) -> None:
    stated = plan_on(op, "multi-ring", cluster("dgx-h100", 4), workers)
    vectors = np.random.default_rng(1).integers(0, 100, (workers, stated.blocks))
    held = execute(stated, vectors)
    if op == "allreduce":
        assert (held == vectors.sum(axis=0)).all()
    else:  # rank r begins or ends with the r-th piece of the message
        own = np.repeat(np.arange(workers), stated.blocks // workers)
        pieces = np.arange(stated.blocks)
        expected = vectors.sum(axis=0) if op == "reducescatter" else vectors[own, pieces]
        assert (held[own, pieces] == expected).all()
    assert len(stated.stages) == workers % 8  # as many NICs as the last node uses


@pytest.mark.parametrize("workers", [9, 12, 14, 20])
@pytest.mark.parametrize(
    ("op", "algorithm"),
    [(op, name) for op, name in PAIRS if name.startswith("hierarchical")],
)
def test_hierarchies_go_over_a_last_node_that_is_not_full(
    op: str, algorithm: str, workers: int
) -> None:
    stated = plan_on(op, algorithm, cluster("dgx-h100", 4), workers)
    size = stated.blocks if op != "alltoall" else workers * workers
    vectors = np.random.default_rng(2).integers(0, 100, (workers, size))
    assert promised(stated, vectors, execute(stated, vectors))


def test_ranks_that_leave_the_last_node_part_empty_are_not_left_to_flat_algorithms() -> None:
    fabric = cluster("gb200-nvl72", 2)
    some, whole = (
        collective("allreduce", bytes=2**20, algorithm="auto", cluster=fabric, workers=workers)
        for workers in (128, 144)
    )
    assert some.algorithm.startswith("hierarchical")
    assert some.time_s < 1.5 * whole.time_s
