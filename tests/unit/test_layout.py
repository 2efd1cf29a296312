"""A parallel plan: its derived numbers, and the one line that refuses it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fullwire.errors import UsageError
from fullwire.workloads.architecture_files import architecture
from fullwire.workloads.layout import Layout, check_model, divisors, tensor_ways


def test_ranks_microbatches_and_tokens_follow_from_the_degrees() -> None:
    layout = Layout(tp=8, pp=4, dp=16, cp=2, global_batch=512, sequence=8192, microbatch=2)
    assert layout.devices == 1024
    assert layout.microbatches == 16
    assert layout.rank_tokens == 8192
    assert layout.shard_group == 32


def test_experts_use_the_ranks_of_tensor_context_and_data_parallelism() -> None:
    layout = Layout(tp=2, dp=32, ep=16, global_batch=64, sequence=4096)
    assert layout.expert_dp == 4


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"dp": 12}, "global batch: expected a multiple of dp 12 x microbatch 1, got 512. The"),
        ({"dp": 12, "global_batch": 500}, "The nearest is 504"),
        ({"dp": 8, "ep": 3}, "ep: expected a divisor of tp x cp x dp = 8 over etp 1, got 3"),
        ({"dp": 8, "shard": 3}, "shard: expected a divisor of dp x cp = 8, got 3. The nearest"),
        ({"vpp": 2}, "vpp: expected 1 without pipeline stages, got 2"),
        ({"cp": 3}, "cp: expected twice cp 3 to divide the sequence 4096. The nearest is 2"),
        ({"cp": 2, "sequence": 4097}, "to divide the sequence 4097. The nearest is 1"),
        ({"tp": 0}, "tp: expected 1 or more, got 0"),
        ({"zero": 4}, "zero: expected 0, 1, 2 or 3, got 4"),
        ({"recompute": "some"}, "recompute: expected one of none, selective, full, got 'some'"),
    ],
)
def test_an_impossible_plan_is_refused_in_one_line(given: dict[str, int], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        Layout(**{"global_batch": 512, "sequence": 4096, **given})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"tp": 3}, "tp: expected a divisor of 64 heads, got 3. The nearest is 2"),
        (
            {"tp": 4, "cp": 3, "sequence": 4098},
            "tp: expected a divisor of 1366 tokens of a sequence on a rank .sequence parallelism.",
        ),
        ({"pp": 3}, "pp: expected a divisor of 80 layers, got 3. The nearest is 2"),
        ({"pp": 4, "vpp": 3}, "vpp: expected a divisor of 20 layers a stage, got 3. The nearest"),
        ({"pp": 96}, "pp: expected at most 80 stages for 80 layers, got pp 96 x vpp 1"),
        ({"dp": 2, "ep": 2}, "ep: expected a divisor of 0 experts, got 2. The nearest is 1"),
    ],
)
def test_a_plan_that_cannot_divide_the_model_names_the_nearest(
    given: dict[str, int], line: str
) -> None:
    layout = Layout(**{"global_batch": 512, "sequence": 4096, **given})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=line):
        check_model(layout, architecture("llama3-70b"))


@pytest.mark.parametrize(
    ("sizes", "tp", "line"),
    [
        ({"kv_heads": 8}, 3, "8 heads of keys and values, or a multiple of them, got 3. The ne"),
        ({"kv_heads": 4, "heads": 96}, 6, "4 heads of keys and values, or a multiple of them"),
        ({"kv_heads": 24, "ffn": 1000}, 3, "1000 columns of an MLP, got 3. The nearest is 2"),
    ],
)
def test_tensor_parallelism_divides_all_heads_and_the_mlp(
    sizes: dict[str, int], tp: int, line: str
) -> None:
    model = replace(architecture("llama3-8b"), **{"heads": 24, **sizes})  # type: ignore[arg-type]
    layout = Layout(tp=tp, global_batch=512, sequence=12288)
    with pytest.raises(UsageError, match=f"tp: expected a divisor of {line}"):
        check_model(layout, model)


def test_tensor_parallelism_may_be_a_multiple_of_the_heads_of_keys() -> None:
    model = replace(architecture("llama3-8b"), heads=32, kv_heads=4)
    assert tensor_ways(model) == [1, 2, 4, 8, 16, 32]
    # MLA expands one latent vector for each head; its heads of keys say nothing.
    latent = architecture("deepseek-v3")
    assert 16 in tensor_ways(replace(latent, kv_heads=1))
    assert 16 in tensor_ways(replace(latent, kv_heads=latent.heads))


def test_divisors_ascend() -> None:
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]
