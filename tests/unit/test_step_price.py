"""The time of a step under parallel plans: its laws, and some measured runs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

import fullwire as fw
from fullwire.clusters import cluster
from fullwire.clusters.cluster import Cluster, LeafSpine, Nics
from fullwire.simulation.group_times import GroupTimes, Hops, as_seen
from fullwire.simulation.habits import (
    DOUBTED,
    Calibration,
    guessed_variance,
    habits_of,
    interval_factor,
)
from fullwire.simulation.plan_columns import plans_of
from fullwire.simulation.priced import Priced
from fullwire.simulation.step_price import Job, price
from fullwire.workloads.accelerators import accelerator, accelerator_names
from fullwire.workloads.architecture import Architecture
from fullwire.workloads.architecture_files import architecture
from fullwire.workloads.layout import Layout, Precision

GPT3 = Layout(
    tp=4, pp=8, vpp=12, dp=16, global_batch=2048, sequence=2048, precision="fp8", tp_overlap=True,
    gradient_bytes=2, schedule="interleaved",
)  # fmt: skip


def priced(
    *layouts: Layout,
    model: str | Architecture = "gpt3-175b",
    device: str = "h100",
    where: str = "dgx-h100",
    precision: Precision | None = None,
    faster: float = 1.0,
) -> Priced:
    fabric = cluster(where, nodes=max(1, layouts[0].devices // 8))
    fabric = replace(fabric, nics=replace(fabric.nics, rate_bps=fabric.nics.rate_bps * faster))
    known = architecture(model) if isinstance(model, str) else model
    kind = precision or layouts[0].precision
    return price(
        Job(
            plans=plans_of(layouts, known.layers),
            model=known,
            device=accelerator(device),
            groups=GroupTimes(fabric),
            habits=habits_of(device, kind),
            precision=kind,
        )
    )


def test_a_published_run_is_met() -> None:
    """MLPerf 4.0, GPT-3 on 512 H100: 12.1 s without overlapping TP, 11.07 s with it."""
    assert priced(GPT3).step_s[0] == pytest.approx(11.07, rel=0.1)
    assert priced(replace(GPT3, tp_overlap=False)).step_s[0] == pytest.approx(12.107, rel=0.1)


OF_COMPUTE = ("attention_s", "moved_s", "experts_s")
SHARES = ("heeded", "mean_compute", "mean_layers")


def test_the_parts_add_up_to_the_step() -> None:
    result = priced(GPT3, replace(GPT3, tp=8, dp=8))
    parts = [
        getattr(result, name)
        for name in Priced.__slots__
        if name not in ("step_s", *OF_COMPUTE, *SHARES)
    ]
    assert np.allclose(sum(parts), result.step_s)
    assert all((part >= 0).all() for part in parts)


def test_plans_together_equal_each_alone() -> None:
    layouts = [GPT3, replace(GPT3, tp=8, dp=8), replace(GPT3, recompute="full")]
    together = priced(*layouts).step_s
    assert together.tolist() == [priced(layout).step_s[0] for layout in layouts]


def test_faster_networks_never_slow_a_step() -> None:
    layouts = [GPT3, replace(GPT3, zero=3, pp=1, vpp=1, dp=128, schedule="1f1b")]
    slow, fast = (priced(*layouts, faster=factor).step_s for factor in (0.25, 1.0))
    assert (fast <= slow).all()


def test_recomputation_costs_a_third_of_computing() -> None:
    plain, full = priced(GPT3, replace(GPT3, recompute="full")).compute_s
    assert 1.2 < full / plain < 1.45


def test_schedules_differ_in_their_bubbles() -> None:
    plain = replace(GPT3, vpp=1, schedule="1f1b")
    layouts = [
        plain,
        GPT3,
        replace(plain, schedule="zero-bubble"),
        replace(plain, schedule="dualpipe"),
    ]
    usual, interleaved, zero, dual = priced(*layouts).bubble_s
    assert interleaved == pytest.approx(usual / 12)
    assert zero < usual
    assert dual < usual


def test_devices_of_dualpipe_hold_two_stages_each() -> None:
    two = Layout(pp=2, dp=8, zero=1, global_batch=256, sequence=4096)
    four = replace(two, pp=4, dp=4)
    layouts = [two, four, replace(four, pp=8, dp=2)]
    plain = priced(*layouts, model="llama3-8b")
    dual = priced(*(replace(layout, schedule="dualpipe") for layout in layouts), model="llama3-8b")
    # Of two stages, each device holds both, so the head delays nobody. Of more, the device of the
    # last stage holds the first one too: it is as uneven as half as many stages are without.
    assert dual.mean_compute[0] == pytest.approx(1)
    assert dual.bubble_s[0] == 0
    assert dual.mean_compute[1:] == pytest.approx(plain.mean_compute[:2])
    means_s = (one.compute_s * one.mean_compute for one in (plain, dual))
    assert next(means_s) == pytest.approx(next(means_s))


def test_the_two_copies_of_dualpipe_add_their_gradients_up() -> None:
    plain = replace(GPT3, vpp=1, schedule="1f1b", zero=0)
    result = priced(plain, replace(plain, schedule="dualpipe"))
    usual, dual = result.sums_s
    assert dual > 1.5 * usual
    usual, dual = result.optimizer_s
    assert dual == pytest.approx(2 * usual, rel=0.1)


def test_both_ends_of_a_pipeline_hold_a_tied_embedding_and_add_its_gradients_up() -> None:
    tied = architecture("llama3.2-1b")
    assert tied.is_tied
    ends = Layout(pp=2, dp=32, zero=1, global_batch=256, sequence=4096)
    layouts = [ends, replace(ends, zero=3), replace(ends, schedule="dualpipe")]
    here, apart = (
        priced(*layouts, model=replace(tied, is_tied=is_tied)) for is_tied in (True, False)
    )
    assert here.optimizer_s.tolist() == apart.optimizer_s.tolist()
    more_s = here.dp_s - apart.dp_s
    wire_s = 8 * 4 * tied.vocab * tied.hidden / 400e9  # each of two ranks sends half of it twice
    assert wire_s < more_s[0] < 2 * wire_s
    assert more_s[1] == pytest.approx(more_s[0] / 32, rel=0.2)  # each of 32 ranks keeps its share
    assert more_s[2] == 0  # the sum over both copies of a stage covers it
    # The links of a node join the ends of a pipeline that fits there.
    small = Layout(pp=4, dp=2, zero=1, global_batch=256, sequence=4096)
    one, other = (
        priced(small, model=replace(tied, is_tied=is_tied)).dp_s for is_tied in (True, False)
    )
    assert 0 < (one - other)[0] < wire_s / 4


def test_a_shard_group_of_one_node_gathers_experts_there_and_adds_them_up_once_a_step() -> None:
    whole = Layout(dp=64, zero=3, recompute="full", global_batch=512, sequence=4096)
    node = replace(whole, shard=8)
    known, faster = architecture("qwen3-30b-a3b"), 1 / 16
    result = priced(whole, node, model="qwen3-30b-a3b", faster=faster)
    assert result.sums_s[1] < 0.2 * result.sums_s[0]
    # Between nodes a rank sends its share of all gradients on one NIC, and only its own values are
    # updated.
    sent_bytes = 2 * 7 / 8 * 4 * known.parameters / 8
    assert result.sums_s[1] > 8 * sent_bytes / (faster * 400e9)
    assert result.optimizer_s[1] == pytest.approx(8 * result.optimizer_s[0], rel=0.02)
    # Where a group holds one copy of each expert, it gathers none of them.
    spread = replace(node, ep=8)
    assert priced(spread, model="qwen3-30b-a3b", faster=faster).sums_s[0] < result.sums_s[1]


def test_tokens_for_experts_on_other_nodes_take_longer() -> None:
    near = Layout(dp=64, ep=8, global_batch=256, sequence=4096)
    result = priced(near, replace(near, ep=64), model="qwen3-30b-a3b")
    assert 0 < result.ep_s[0] < result.ep_s[1]


def test_ranks_of_one_expert_are_neighbours_and_share_its_rows() -> None:
    whole = Layout(tp=8, ep=4, dp=4, global_batch=256, sequence=4096)
    halves = replace(whole, etp=2)  # 4 x 2 ranks are one node
    result = priced(whole, halves, replace(whole, ep=1, etp=8), model="mixtral-8x7b")
    assert result.ep_s[1] == pytest.approx(result.ep_s[0], rel=0.01)
    assert result.tp_s[0] < result.tp_s[1] < result.tp_s[2]
    # Each layer gathers all rows of the node, forward and backward, and adds as many up.
    fabric = cluster("dgx-h100", nodes=4)
    assert fabric.inside is not None
    received_bytes = 4 * 7 * (4096 / 8 * 2) * 4096 * 2
    least_s = 32 * 64 * 8 * received_bytes / fabric.inside.rate_bps
    assert least_s < result.tp_s[2] - result.tp_s[0] < 2 * least_s


def test_context_parallelism_with_mla_sends_the_keys_and_values_of_heads() -> None:
    known = architecture("deepseek-v2")
    assert known.mla is not None
    of_head = known.mla.nope_dim + known.mla.rope_dim + known.mla.value_dim
    sent_bytes = 2 * 8192 * known.keys_and_values(np.array([1, 4]))
    assert sent_bytes.tolist() == [2 * 8192 * heads * of_head for heads in (128, 32)]
    few = architecture("llama3-8b")  # 8 heads of keys: each of 16 ranks keeps one of them whole
    shared = 2 * few.keys_and_values(np.array([4, 8, 16]))
    assert shared.tolist() == [2 * heads * 2 * few.head_dim for heads in (2, 1, 1)]
    ring = Layout(
        tp=4, cp=16, dp=4, ep=16, global_batch=64, sequence=8192, context_kind="all-gather"
    )
    cp_s = priced(ring, model="deepseek-v2").cp_s[0]
    least_s = 3 * known.layers * 16 * 8 * sent_bytes[1] * 15 / 16 / 800e9  # two of a node, two NICs
    assert least_s < cp_s < 2 * least_s


def test_more_ranks_than_heads_of_keys_multiply_copies_of_these() -> None:
    known = architecture("llama3-8b")  # 32 heads of queries
    for tp in (8, 16):
        layout = Layout(tp=tp, dp=2, global_batch=64, sequence=8192)
        few, enough, all_heads = (
            priced(layout, model=replace(known, kv_heads=heads)) for heads in (2, tp, 32)
        )
        assert few.step_s[0] == enough.step_s[0]
        assert few.step_s[0] < all_heads.step_s[0]


def test_ulysses_needs_no_ring_of_keys() -> None:
    ring = Layout(tp=4, cp=4, dp=4, global_batch=64, sequence=65536)
    times_s = priced(ring, replace(ring, context_kind="ulysses"), model="llama3-70b").cp_s
    assert (times_s > 0).all()
    assert times_s[0] != times_s[1]


def test_ulysses_swaps_as_many_heads_of_keys_as_there_are() -> None:
    known = architecture("llama3-70b")  # 64 heads of queries, 8 of keys
    node = Layout(cp=8, dp=8, global_batch=64, sequence=262144, context_kind="ulysses")
    cp_s = {
        keys: priced(node, model=replace(known, kv_heads=keys)).cp_s[0] for keys in (4, 8, 16, 64)
    }
    assert cp_s[8] / cp_s[64] == pytest.approx((2 + 2 * 8 / 64) / 4, rel=0.04)
    assert cp_s[16] / cp_s[64] == pytest.approx((2 + 2 * 16 / 64) / 4, rel=0.04)
    assert cp_s[4] == cp_s[8]  # each of 8 ranks needs a head
    wide = replace(known, head_dim=2 * known.head_dim)  # more than the hidden vector
    assert priced(node, model=wide).cp_s[0] == pytest.approx(2 * cp_s[8], rel=0.05)


def test_a_group_across_nodes_shares_the_nics_with_its_neighbours() -> None:
    fabric = cluster("dgx-h100", nodes=16)
    alone, strided = as_seen(fabric, 128, 1), as_seen(fabric, 16, 8)
    assert (alone.nodes, alone.devices_per_node) == (16, 8)
    assert (strided.nodes, strided.devices_per_node) == (16, 1)
    assert strided.nics.rate_bps == 400e9
    assert alone.nics.rate_bps == 8 * 400e9


def group_s(where: Cluster, op: str, ranks: int, stride: int) -> float:
    """Time a large message of a group."""
    return float(GroupTimes(where).collective_s(op, ranks, stride, np.array([2**30]))[0])


@pytest.mark.parametrize("op", ["allreduce", "allgather", "alltoall"])
@pytest.mark.parametrize(("ranks", "stride"), [(24, 1), (12, 2), (3, 8)])
def test_groups_that_fill_a_pod_in_part_share_its_uplinks_with_their_neighbours(
    op: str, ranks: int, stride: int
) -> None:
    """Of groups of three nodes in pods of two, both send over the uplinks of the second pod."""
    pods = LeafSpine(nodes_per_leaf=1, leaves_per_pod=2, core_oversubscription=8)
    leaves = LeafSpine(nodes_per_leaf=2, oversubscription=8)
    rails = replace(leaves, by_rail=True)
    for network in (pods, leaves, rails):
        alone = replace(cluster("dgx-h100", nodes=3), network=network)
        if stride == 1:
            by_command_s = fw.collective(op, bytes=2**30, cluster=alone).time_s
            assert group_s(alone, op, ranks, stride) == pytest.approx(by_command_s)
        if network.leaves_per_pod is None:
            half = replace(network, oversubscription=2 * network.oversubscription)
        else:
            half = replace(network, core_oversubscription=2 * network.core_oversubscription)
        slower = replace(alone, network=half)
        two = replace(alone, nodes=6)
        assert group_s(two, op, ranks, stride) == pytest.approx(group_s(slower, op, ranks, stride))
        assert group_s(two, op, ranks, stride) > 1.9 * group_s(alone, op, ranks, stride)


def test_a_group_that_begins_amidst_a_leaf_crosses_its_uplinks() -> None:
    """Of groups of three nodes on leaves of four, the second one is on two leaves."""
    leaves = LeafSpine(nodes_per_leaf=4, oversubscription=8)
    one = replace(cluster("dgx-h100", nodes=3), network=leaves)
    assert group_s(replace(one, nodes=12), "allreduce", 24, 1) > 2 * group_s(
        one, "allreduce", 24, 1
    )
    even = replace(one, nodes=16)
    assert as_seen(even, 32, 1) == as_seen(replace(one, nodes=4), 32, 1)


def test_a_group_that_begins_amidst_a_node_leaves_it() -> None:
    """Of groups of three ranks, one has ranks 6 and 7 of a node, and a rank of the next node."""
    one, three = (cluster("dgx-h100", nodes=nodes) for nodes in (1, 3))
    assert as_seen(one, 3, 1).nodes == 1
    assert as_seen(three, 3, 1).nodes > 1
    assert as_seen(three, 4, 1).nodes == 1


HOP_BYTES = 1e9


def hop_s(fabric: Cluster, stages: int, stride: int) -> float:
    """Time the slowest of large transfers between pipeline stages."""
    return float(hops(fabric, stages, stride).slowest_s[0])


def hops(fabric: Cluster, stages: int, stride: int) -> Hops:
    """Time large transfers between pipeline stages."""
    return GroupTimes(fabric).hops(np.array([stages]), np.array([stride]), np.array([HOP_BYTES]))


def test_a_pipeline_over_several_nodes_is_as_slow_as_its_slowest_hop() -> None:
    fabric = cluster("dgx-h100", nodes=2)
    wire_s = 8 * HOP_BYTES / fabric.nics.rate_bps
    assert hop_s(fabric, 2, 4) < wire_s  # all of it in one node
    assert hop_s(fabric, 4, 4) == pytest.approx(hop_s(fabric, 2, 8))
    assert hop_s(fabric, 4, 4) > wire_s


def test_values_that_fill_a_pipeline_pass_each_hop_in_its_own_time() -> None:
    fabric = replace(cluster("dgx-h100", nodes=8), devices_per_node=4, nics=Nics(rate_bps=400e9))
    inside_s, between_s = hop_s(fabric, 2, 1), hop_s(fabric, 2, 4)
    assert between_s > 5 * inside_s
    whole_s = float(hops(fabric, 8, 1).all_s[0])  # on two nodes: one hop of seven is between them
    between_alone_s = hop_s(fabric, 8, 1)
    assert whole_s == pytest.approx(6 * inside_s + between_alone_s)
    # With two ranks a stage every other hop crosses. With four each one does.
    one_s = hop_s(fabric, 8, 2)
    assert float(hops(fabric, 8, 2).all_s[0]) == pytest.approx(4 * inside_s + 3 * one_s)
    assert float(hops(fabric, 8, 4).all_s[0]) == pytest.approx(7 * between_s)
    # Ranks 2, 5, 8 and 11 of one pipeline are on nodes 0, 1, 2 and 2.
    assert float(hops(fabric, 4, 3).all_s[0]) == pytest.approx(hop_s(fabric, 4, 3) * 2 + inside_s)


def test_values_that_fill_a_pipeline_cross_leaves_and_pods_as_often_as_these_end() -> None:
    plain = LeafSpine(nodes_per_leaf=4)
    fabric = replace(cluster("dgx-h100", nodes=32), network=plain)
    usual_s = hop_s(fabric, 4, 8)
    narrow = replace(fabric, network=replace(plain, oversubscription=64))
    assert float(hops(narrow, 16, 8).all_s[0]) == pytest.approx(
        12 * usual_s + 3 * hop_s(narrow, 16, 8)
    )
    core = replace(plain, leaves_per_pod=2, core_oversubscription=128)
    pods = replace(fabric, network=core)
    leaf_s = hop_s(pods, 8, 8)
    assert float(hops(pods, 16, 8).all_s[0]) == pytest.approx(
        12 * usual_s + 2 * leaf_s + hop_s(pods, 16, 8)
    )


def test_only_ranks_that_cross_share_the_nics_of_a_node() -> None:
    fabric = cluster("dgx-h100", nodes=4)
    one = replace(fabric, nics=replace(fabric.nics, per_node=1))
    two = replace(fabric, nics=replace(fabric.nics, per_node=2))
    alone_s = hop_s(one, 32, 1)
    for stride in (2, 4, 8, 16):
        crossing = min(stride, 8)
        assert hop_s(one, 32 // stride, stride) == pytest.approx(crossing * alone_s, rel=1e-3)
    assert hop_s(two, 8, 4) == pytest.approx(4 * alone_s, rel=1e-3)  # neighbours have one NIC
    assert hop_s(two, 4, 8) == pytest.approx(4 * alone_s, rel=1e-3)


@pytest.mark.parametrize("by_rail", [True, False])
def test_hops_through_the_spine_share_its_uplinks(by_rail: bool) -> None:
    fabric = cluster("dgx-h100", nodes=128)

    plain = LeafSpine(nodes_per_leaf=32, by_rail=by_rail)
    narrow = replace(plain, oversubscription=16)
    core = replace(plain, leaves_per_pod=2, core_oversubscription=4)

    def slower(network: LeafSpine, stages: int, stride: int) -> float:
        usual_s = hop_s(replace(fabric, network=plain), stages, stride)
        return hop_s(replace(fabric, network=network), stages, stride) / usual_s

    assert slower(narrow, 4, 256) == pytest.approx(16, rel=1e-3)
    assert slower(narrow, 8, 128) == pytest.approx(8, rel=1e-3)  # half of the nodes of a leaf
    assert slower(narrow, 16, 8) == pytest.approx(1)  # all in one leaf
    assert slower(narrow, 128, 8) == pytest.approx(1)  # only one node of each leaf
    assert slower(core, 2, 512) == pytest.approx(4, rel=1e-3)
    assert slower(core, 4, 256) == pytest.approx(2, rel=1e-3)


def test_transfers_across_pods_take_as_long_as_worked_out_by_hand() -> None:
    # Leaves of four nodes have uplinks for two of them, and pods of two leaves for two nodes.
    half = LeafSpine(
        nodes_per_leaf=4, oversubscription=2, leaves_per_pod=2, core_oversubscription=2
    )
    two_pods = replace(cluster("dgx-h100", nodes=16), network=half)
    nic_s = hop_s(replace(two_pods, network=LeafSpine(nodes_per_leaf=16)), 2, 64)
    # Nodes 0 to 2 are a stage, then 3 to 5 and 6 to 8. Out of leaf 0 send nodes 1, 2 and 3, each
    # with two thirds of its rate. Out of leaf 1 sends node 5 alone, to the other pod, at full rate.
    found = hops(two_pods, 3, 24)
    assert found.slowest_s[0] == pytest.approx(3 / 2 * nic_s, rel=1e-2)
    assert found.all_s[0] == pytest.approx((3 / 2 + 1) * nic_s, rel=1e-2)
    # Stages of eight nodes: each transfer crosses, and the core carries two nodes of eight.
    four_pods = replace(two_pods, nodes=32)
    assert hop_s(four_pods, 4, 64) == pytest.approx(4 * nic_s, rel=1e-2)
    assert hops(four_pods, 4, 64).all_s[0] == pytest.approx(3 * 4 * nic_s, rel=1e-2)
    # Stages of four nodes: every other transfer crosses pods, where four nodes share two.
    assert hops(four_pods, 8, 32).all_s[0] == pytest.approx((4 + 3) * 2 * nic_s, rel=1e-2)


@pytest.mark.parametrize("by_rail", [True, False])
def test_only_receivers_beyond_a_pod_share_its_uplinks(by_rail: bool) -> None:
    core = LeafSpine(nodes_per_leaf=4, leaves_per_pod=2, core_oversubscription=8, by_rail=by_rail)
    fabric = replace(cluster("dgx-h100", nodes=10), network=core)
    wide = replace(fabric, network=replace(core, core_oversubscription=1))
    # Three stages of 24 ranks: of the last one, ranks 64 to 71 are on a node of the second pod.
    # They receive over the uplinks of eight nodes, which are as wide as the NICs of one.
    assert hop_s(fabric, 3, 24) == pytest.approx(hop_s(wide, 3, 24), rel=1e-3)
    # Of stages of 26 ranks, 14 receive there: on rails 0 to 5 two each, on the last two rails one.
    shared = 2 if by_rail else 14 / 8
    assert hop_s(fabric, 3, 26) == pytest.approx(shared * hop_s(wide, 3, 24), rel=1e-3)


@pytest.mark.parametrize("by_rail", [True, False])
def test_collectives_through_the_core_share_its_uplinks(by_rail: bool) -> None:
    fabric, size_bytes = cluster("dgx-h100", nodes=64), 10**9
    wide = LeafSpine(nodes_per_leaf=8, leaves_per_pod=4, by_rail=by_rail)
    narrow = replace(wide, core_oversubscription=16)

    def time_s(network: LeafSpine, op: str, ranks: int, stride: int) -> float:
        groups = GroupTimes(replace(fabric, network=network))
        return float(groups.collective_s(op, ranks, stride, np.array([size_bytes]))[0])

    def slower(op: str, ranks: int, stride: int) -> float:
        return time_s(narrow, op, ranks, stride) / time_s(wide, op, ranks, stride)

    assert slower("allreduce", 2, 256) == pytest.approx(16, rel=0.01)  # each rank in its own pod
    assert slower("allgather", 4, 128) == pytest.approx(8, rel=0.01)  # one of two leaves the pod
    assert slower("allgather", 4, 64) == pytest.approx(1)  # all in one pod
    assert slower("allgather", 512, 1) == pytest.approx(1)  # a ring leaves each pod once
    assert slower("alltoall", 512, 1) > 7
    whole = fw.collective("alltoall", bytes=size_bytes, cluster=replace(fabric, network=narrow))
    assert time_s(narrow, "alltoall", 512, 1) == pytest.approx(whole.time_s, rel=1e-6)


@pytest.mark.parametrize("faster", [0.0025, 0.025, 0.25])
def test_an_interleaved_step_takes_at_least_the_time_of_the_wire(faster: float) -> None:
    plain = Layout(tp=8, pp=2, global_batch=64, sequence=8192)
    layouts = [plain, *(replace(plain, vpp=chunks) for chunks in (2, 16))]
    steps_s = priced(*layouts, model="llama3-8b", faster=faster).step_s
    each_way_bytes = plain.tokens * 4096 * 2  # from one chunk to the next, in a step
    wire_s = 8 * each_way_bytes / (8 * 400e9 * faster)
    for layout, step_s in zip(layouts, steps_s, strict=True):
        assert step_s > (2 * layout.vpp - 1) * wire_s


def test_computing_hides_most_of_the_transfers_of_interleaved_stages() -> None:
    plain = Layout(tp=8, pp=2, global_batch=2048, sequence=8192)
    usual_s, chunks_s = priced(plain, replace(plain, vpp=2), model="llama3-8b").pp_s
    assert chunks_s / usual_s == pytest.approx(0.15 * 3 / 2, rel=0.01)


def test_what_is_assumed_widens_the_interval_and_a_run_narrows_it() -> None:
    usual = interval_factor(is_moe=False)
    assert interval_factor(is_moe=False, assumed=["recomputation"]) > usual
    assert interval_factor(is_moe=False, calibrated_spread=0.08) < usual
    assert usual < interval_factor(is_moe=True)


def test_the_spread_of_a_device_that_nobody_measured_widens_the_interval() -> None:
    def factor(spread: float, **known: float) -> float:
        return interval_factor(is_moe=False, assumed=["device"], device_spread=spread, **known)

    assert factor(0.0) == interval_factor(is_moe=False, assumed=["device"])
    assert factor(0.05) < factor(0.3) < factor(0.687)
    assert factor(0.687) > math.exp(1.64 * 0.687)
    # A measured step answers most of it. Runs on a measured family told its spread already.
    assert factor(0.687, calibrated_spread=0.08) < factor(0.687)
    assert interval_factor(is_moe=False, device_spread=0.3) == interval_factor(is_moe=False)


def test_only_families_of_amd_take_what_its_libraries_cost() -> None:
    amd = {name for name in accelerator_names() if accelerator(name).title.startswith("AMD")}
    plain = habits_of("a family that nobody measured", "bf16").gemm
    names = (*accelerator_names(), "mine")  # as a device file may be called
    slower = {name for name in names if habits_of(name, "bf16").gemm > 1.4 * plain}
    assert slower == amd


def test_a_late_host_hides_the_device() -> None:
    layouts = [
        Layout(dp=8, ep=8, global_batch=8, sequence=length, precision="bf16")
        for length in (512, 32768)
    ]
    host = DOUBTED.index("host_s")
    short, long = priced(*layouts, model="qwen3-30b-a3b").shares
    assert short[host] > 0.8
    assert long[host] < 0.1
    assert max(short.sum(), long.sum()) <= 1


def test_attention_on_hopper_is_slower_where_pytorch_brings_it() -> None:
    for family, ratio in (("h100", 1.7), ("a100", 1.0)):
        own, torch_s = (habits_of(family, "bf16", name) for name in ("megatron", "fsdp"))
        assert torch_s.attention == pytest.approx(ratio * own.attention)


def test_a_measured_step_tells_more_of_plans_with_the_same_parts() -> None:
    sums, computing = np.zeros((2, len(DOUBTED)))
    sums[DOUBTED.index("sums_s")], sums[DOUBTED.index("products_s")] = 0.4, 0.6
    computing[DOUBTED.index("products_s")] = 1.0
    given = Calibration(np.log([1.5]), sums[None], ("a model",))
    asked = np.array([sums, 0.9 * sums + 0.1 * computing, computing])
    itself, near, far = given.factors(asked)
    of_itself, of_near, of_far = given.spreads(asked)
    assert of_itself < of_near
    assert of_far > of_itself
    elsewhere = given.factors(asked[:1], ("another model",))
    assert elsewhere < itself
    assert itself == pytest.approx(1.5, rel=0.01)
    assert 1 < far < near < itself


def test_a_step_that_is_far_off_tells_most_of_its_own_plan() -> None:
    step = np.full((1, len(DOUBTED)), 1 / len(DOUBTED))

    def carried(ratio: float, *, is_unlike: bool = False) -> float:
        given = Calibration(np.log([ratio]), step, is_unlike=is_unlike)
        assert given.factors(step) == pytest.approx(ratio, rel=0.05)  # the plan has its own time
        return float(np.log(given.factors(0.9 * step))[0] / np.log(ratio))

    assert carried(1.05) == pytest.approx(carried(1.1))
    assert carried(4.0) < 0.5 < carried(1.1)
    assert carried(4.0) < carried(2.0) < carried(1.3) < carried(1.1)
    # Two unequal steps of one plan are between themselves, and move others in their direction.
    both = Calibration(np.log([4.0, 1.1]), np.repeat(step, 2, axis=0))
    assert 1.1 < both.factors(step)[0] < 4.0
    assert 1.0 < both.factors(0.9 * step)[0] < both.factors(step)[0]
    # Nobody has measured such a device: all of its steps may be that far off.
    assert carried(4.0, is_unlike=True) > 1.2 * carried(4.0)


def test_the_longer_a_step_was_measured_the_longer_and_the_less_sure_others_are() -> None:
    step, other = np.zeros((2, 1, len(DOUBTED)))
    for name, share, others in (("products_s", 0.6, 0.62), ("sums_s", 0.05, 0.15)):
        step[0, DOUBTED.index(name)], other[0, DOUBTED.index(name)] = share, others

    def after(ratio: float, model: str = "a model") -> tuple[float, float]:
        given = Calibration(np.log([ratio]), step, ("a model",))
        factors, spreads = given.factors(other, (model,)), given.spreads(other, (model,))
        return float(factors[0]), float(spreads[0])

    ratios = (1.1, 1.2, 1.3, 1.5, 2.0, 3.0)
    factors, spreads = zip(*map(after, ratios), strict=True)
    assert list(factors) == sorted(factors)
    assert list(spreads) == sorted(spreads)
    assert 1.0 < factors[-1] < 2.0
    assert np.log(factors[2]) > 0.4 * np.log(1.3)
    # Another model may be on other software, so it shares nothing of what is odd.
    assert after(3.0, "another model")[0] < after(1.3, "another model")[0]


def test_a_measured_step_of_a_guessed_model_tells_of_that_model() -> None:
    step = np.full((1, len(DOUBTED)), 1 / len(DOUBTED))
    models, guessed = ("a model",), guessed_variance(["dimensions", "network"])
    known, guess = (
        Calibration(np.log([1.5]), step, models, is_moe=True, guessed=variance)
        for variance in (0.0, guessed)
    )
    other = ("another model",)
    assert 1 < guess.factors(0.9 * step, other) < known.factors(0.9 * step, other)
    assert guess.factors(step, models) > guess.factors(step, other)
    assert guess.spreads(step, other) > known.spreads(step, other)
