"""The memory of large models: its laws, logged peaks, and the words about a plan too large."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fullwire.workloads.architecture import Architecture
from fullwire.workloads.architecture_files import architecture
from fullwire.workloads.layout import Layout
from fullwire.workloads.stage_memory import (
    GIB,
    MOST_RESERVED,
    Held,
    layers_of_stages,
    peaks,
    stages,
    verdict,
)

LLAMA = architecture("llama3-70b")
PLAN = Layout(tp=8, pp=4, dp=2, microbatch=1, global_batch=64, sequence=8192)
DEVICE_BYTES = 79 * GIB


def gpt(**given: object) -> Architecture:
    """Return the model of Megatron's functional tests."""
    values = {
        "name": "test", "layers": 12, "hidden": 512, "heads": 8, "kv_heads": 8, "head_dim": 64,
        "ffn": 2048, "vocab": 50304, "sequence": 1024, "is_gated": False, "is_tied": True,
        "biases": "all", "norm": "layer",
    }  # fmt: skip
    return Architecture(**{**values, **given})  # type: ignore[arg-type]


def peak_gib(held: Held) -> float:
    return float(held.peak_allocated_bytes[-1]) / GIB


def test_dualpipe_holds_two_stages_and_zero_divides_their_optimizer() -> None:
    plain = replace(PLAN, zero=0)
    for zero, copies in ((0, 2), (1, 1)):
        usual, dual = (
            stages(LLAMA, replace(plain, zero=zero, schedule=schedule))
            for schedule in ("1f1b", "dualpipe")
        )
        assert dual.params_bytes == pytest.approx(2 * usual.params_bytes)
        assert dual.gradients_bytes == pytest.approx(2 * usual.gradients_bytes)
        assert dual.optimizer_bytes == pytest.approx(copies * usual.optimizer_bytes)


@pytest.mark.parametrize(
    ("plan", "logged_gib"),
    [
        ({"tp": 1, "pp": 1, "dp": 8}, 2.5255),
        ({"tp": 1, "pp": 4, "dp": 2, "zero": 0}, 2.0444),
        ({"tp": 1, "pp": 4, "dp": 2, "zero": 0, "flash_attention": False}, 2.5011),
        ({"tp": 1, "pp": 4, "vpp": 3, "dp": 2, "zero": 0, "schedule": "interleaved"}, 2.4696),
        ({"tp": 2, "pp": 2, "dp": 2, "zero": 0, "flash_attention": False}, 1.7697),
        ({"tp": 4, "pp": 1, "dp": 2}, 0.9646),
    ],
)
def test_peaks_that_megatron_logged_are_met(plan: dict[str, object], logged_gib: float) -> None:
    """Logged on A100 by the last rank: NVIDIA/Megatron-LM@d98e8a64ddf3, functional tests."""
    values = {"microbatch": 4, "global_batch": 32, "sequence": 1024, "sequence_parallel": False}
    layout = Layout(**{**values, **plan})  # type: ignore[arg-type]
    held = stages(gpt(), layout, has_dropout=True)
    assert peak_gib(held) == pytest.approx(logged_gib, rel=0.03)


def test_a_model_of_7b_meets_its_logged_peak() -> None:
    model = gpt(layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=16384)
    layout = Layout(
        tp=4, dp=2, microbatch=2, global_batch=8, sequence=8192, sequence_parallel=False
    )
    assert peak_gib(stages(model, layout, has_dropout=True)) == pytest.approx(54.19, rel=0.06)


def test_the_states_of_all_ranks_add_up_to_all_parameters() -> None:
    held = stages(LLAMA, replace(PLAN, zero=0))
    parameters = float(held.params_bytes.sum()) * PLAN.tp / 2
    assert parameters == pytest.approx(LLAMA.parameters, rel=1e-3)


def test_the_states_of_experts_add_up_too() -> None:
    model = architecture("mixtral-8x7b")
    layout = Layout(tp=2, pp=4, dp=8, ep=8, zero=0, global_batch=256, sequence=4096)
    held = stages(model, layout)
    experts = 8 * model.moe_layers * model.expert_parameters
    others = model.parameters - experts
    on_all = 2 * (experts / 8 + others / layout.tp)
    assert float(held.params_bytes.sum()) == pytest.approx(on_all, rel=0.01)


def test_the_first_stage_holds_the_most_microbatches() -> None:
    held = stages(LLAMA, PLAN)
    assert held.layers_bytes.tolist() == sorted(held.layers_bytes.tolist(), reverse=True)
    assert held.logits_bytes[:-1].tolist() == [0, 0, 0]
    assert held.logits_bytes[-1] > 0


@pytest.mark.parametrize(
    ("better", "component"),
    [
        ({"recompute": "full"}, "layers_bytes"),
        ({"recompute": "selective"}, "layers_bytes"),
        ({"zero": 2}, "gradients_bytes"),
        ({"zero": 3}, "params_bytes"),
        ({"cp": 2, "dp": 1}, "layers_bytes"),
    ],
)
def test_each_saving_lowers_its_component(better: dict[str, object], component: str) -> None:
    before, after = stages(LLAMA, PLAN), stages(LLAMA, replace(PLAN, **better))  # type: ignore[arg-type]
    assert (getattr(after, component) < getattr(before, component)).all()


def test_sequence_parallelism_divides_norms_among_the_ranks() -> None:
    without = stages(LLAMA, replace(PLAN, sequence_parallel=False))
    assert (without.layers_bytes > 1.5 * stages(LLAMA, PLAN).layers_bytes).all()


def test_layers_with_experts_are_counted_by_stage() -> None:
    dense, experts = layers_of_stages(architecture("deepseek-v3"), 4, 1)
    assert dense.tolist() == [3, 0, 0, 0]
    # As the price counts: with the layer that predicts a further token, the ends have 15 of 62.
    assert experts.tolist() == [12, 16, 16, 15]


def test_many_plans_equal_their_single_ones() -> None:
    plans = [
        PLAN,
        replace(PLAN, tp=4, dp=4),
        replace(PLAN, zero=3, pp=1, dp=8),
        replace(PLAN, vpp=2, schedule="interleaved", recompute="full"),
    ]

    class Columns:
        """The same plans as columns."""

    columns = Columns()
    for name in (
        "tp",
        "pp",
        "vpp",
        "dp",
        "cp",
        "ep",
        "etp",
        "zero",
        "microbatch",
        "global_batch",
        "sequence",
        "sequence_parallel",
        "gradient_bytes",
        "flash_attention",
    ):
        setattr(columns, name, np.array([getattr(plan, name) for plan in plans]))
    columns.shard = np.array([plan.shard_group for plan in plans])  # type: ignore[attr-defined]
    columns.recompute = np.array([0, 0, 0, 2])  # type: ignore[attr-defined]
    columns.recomputed = np.ones(4)  # type: ignore[attr-defined]
    columns.schedule = np.array([0, 0, 0, 1])  # type: ignore[attr-defined]
    together = peaks(LLAMA, columns).peak_allocated_bytes  # type: ignore[arg-type]
    alone = [float(stages(LLAMA, plan).peak_allocated_bytes.max()) for plan in plans]
    assert together.tolist() == pytest.approx(alone)


def test_a_plan_that_fits_says_how_much_it_needs() -> None:
    found = verdict(LLAMA, PLAN, DEVICE_BYTES)
    assert found.fits
    assert (found.stage, found.change) == (0, None)
    assert found.needed_bytes <= DEVICE_BYTES


def test_a_plan_that_is_too_large_names_component_stage_and_the_cheapest_change() -> None:
    found = verdict(LLAMA, replace(PLAN, microbatch=4), DEVICE_BYTES)
    assert not found.fits
    assert (found.stage, found.component) == (0, "activations")
    assert found.change_name == "microbatch 2"
    assert found.change is not None
    assert verdict(LLAMA, found.change, DEVICE_BYTES).fits


def test_a_plan_that_nothing_saves_says_so() -> None:
    layout = Layout(global_batch=1, sequence=8192)
    found = verdict(LLAMA, layout, DEVICE_BYTES)
    assert (found.fits, found.change, found.change_name) == (False, None, "")


def test_fitting_counts_with_the_most_that_allocators_reserve() -> None:
    held = stages(LLAMA, PLAN)
    peak = float(held.peak_allocated_bytes.max())
    assert not held.fits(peak * MOST_RESERVED).all()
    assert held.fits(peak * MOST_RESERVED + 2 * GIB).all()


def test_runs_that_ran_out_of_memory_do_not_fit() -> None:
    """BLOOM's first runs (bigscience, chronicles-prequel): DeepSpeed holds gradients twice."""
    model = gpt(
        layers=100, hidden=12288, heads=64, kv_heads=64, head_dim=192, ffn=49152, vocab=250880
    )
    layout = Layout(
        tp=4,
        pp=6,
        dp=16,
        microbatch=2,
        global_batch=2048,
        sequence=2048,
        recompute="full",
        sequence_parallel=False,
        gradient_bytes=6,
        flash_attention=False,
    )
    assert not verdict(model, layout, DEVICE_BYTES).fits


def test_sharded_parameters_have_copies_in_8_bits_of_gathered_layers_only() -> None:
    sharded = Layout(
        dp=256, zero=3, shard=256, microbatch=2, global_batch=512, sequence=8192, recompute="full"
    )
    wide, narrow = (stages(LLAMA, replace(sharded, precision=kind)) for kind in ("bf16", "fp8"))
    assert narrow.params_bytes == wide.params_bytes
    more = float(narrow.gathered_bytes[0] - wide.gathered_bytes[0])
    assert more == pytest.approx(2 * 2 * LLAMA.layer_parameters(0), rel=1e-3)
    whole = replace(sharded, zero=1, shard=None, precision="fp8")
    assert stages(LLAMA, whole).params_bytes[0] > 1.9 * wide.params_bytes[0] * 256


def test_tensor_parallelism_leaves_latent_matrices_routers_and_norms_whole() -> None:
    model = architecture("deepseek-v3")
    plan = Layout(tp=8, pp=16, dp=8, ep=64, zero=0, global_batch=1024, sequence=4096)
    heads = 7168 // 8 * 128 * 128 + (1536 * 192 + 512 * 256) * 128 // 8
    latent = 7168 * (1536 + 576) + 1536 + 512
    experts = 7168 * 256 + 256 + 3 * 7168 * 2048 // 8 + 256 // 64 * 3 * 7168 * 2048
    of_layer = heads + latent + experts + 2 * 7168
    assert stages(model, plan).params_bytes[5] == 2 * 4 * of_layer
    # The bias of a sum over ranks is whole too.
    wide, plain = gpt(biases="all"), gpt(biases="none")
    plan = Layout(tp=8, dp=1, zero=0, global_batch=8, sequence=1024)
    divided, whole = (3 * 512 + 2048) / 8, 2 * 512
    extra = stages(wide, plan).params_bytes - stages(plain, plan).params_bytes
    assert extra == pytest.approx([2 * 12 * (divided + whole)])


@pytest.mark.parametrize(("kv_heads", "tp"), [(8, 8), (8, 16), (2, 8), (2, 16)])
def test_more_ranks_than_heads_of_keys_hold_copies_of_these(kv_heads: int, tp: int) -> None:
    model = replace(architecture("llama3-8b"), kv_heads=kv_heads)  # 32 heads of 128 values
    layout = Layout(tp=tp, dp=2, zero=0, global_batch=64, sequence=8192)
    held = stages(model, layout)
    a_layer = (
        2 * 4096 * 32 * 128 // tp  # queries and outputs
        + 2 * 4096 * 128 * max(1, kv_heads // tp)  # keys and values
        + 3 * 4096 * 14336 // tp
        + 2 * 4096  # norms
    )
    parameters = 32 * a_layer + 2 * 128256 * 4096 // tp + 4096
    assert held.params_bytes == pytest.approx([2 * parameters])
    assert held.gradients_bytes == pytest.approx([4 * parameters])
    assert held.optimizer_bytes == pytest.approx([12 * parameters])
    # Each rank has one head of keys, as with as many heads as ranks.
    layout = replace(layout, cp=2, dp=1)  # which also sends them
    held, other = (stages(one, layout) for one in (model, replace(model, kv_heads=tp)))
    assert held.layers_bytes == pytest.approx(other.layers_bytes)
    assert held.buffers_bytes == pytest.approx(other.buffers_bytes)
