"""The time of operations: laws that hold for all shapes, and figures that others measured."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from fullwire import UsageError
from fullwire.workloads import accelerators
from fullwire.workloads.accelerators import accelerator, accelerator_names
from fullwire.workloads.operations import (
    attention_s,
    cross_entropy_s,
    memory_bound_s,
    misalignment,
    optimizer_s,
    permutation_s,
    product_s,
)

H100 = accelerator("h100")


@pytest.mark.parametrize(
    ("written", "family", "memory_gb", "power_share"),
    [
        ("H100-96GB-HBM2e-500W", "h100", 96, 5 / 7),
        ("GB200/B200 184GB", "gb200", 184, 1),
        ("A100-80GB(Ampere)", "a100", 80, 1),
        ("A100-SXM-40GB", "a100", 40, 1),
        ("A100-PCIe-80GB", "a100", 80, 0.75),
        ("NVIDIA H100 80GB HBM3", "h100", 80, 1),
        ("TPU7x Ironwood", "tpu7x", 192, 1),
        ("TPU v5p", "tpu-v5p", 95, 1),
        ("Gaudi2", "gaudi2", 96, 1),
        ("MI355X", "mi355x", 288, 1),
        ("8xH100", "h100", 80, 1),
        ("dgx-h100", "h100", 80, 1),
        ("hpg.dgxb200x8.n16", "b200", 180, 1),
        ("1xXE9680Lx8B200-SXM-180GB", "b200", 180, 1),
        ("gb200nvl72", "gb200", 186, 1),
        ("72 GB200", "gb200", 186, 1),
        ("NVIDIA A100-SXM4-80GB", "a100", 80, 1),
        ("a100pcie40gb", "a100", 40, 0.75),
        ("NVIDIA GH200 480GB", "gh200", 96, 1),  # CUDA's name of the device of 96 GB
        ("GH200 120GB", "gh200", 96, 1),
        ("GH200 144GB HBM3e", "gh200", 144, 1),
        ("H100 NVL 188GB", "h100", 94, 400 / 700),  # of two devices
        ("A100-20GB", "a100", 20, 1),  # a part of a device
        ("NVIDIA GeForce RTX 4090", "rtx-4090", 24, 1),
        ("RTX A6000", "rtx-a6000", 48, 1),
        ("A6000", "rtx-a6000", 48, 1),
        ("NVIDIA A40", "a40", 48, 1),
        ("NVIDIA A10", "a10", 24, 1),
        ("A10G", "a10g", 24, 1),
        ("NVIDIA L4", "l4", 24, 1),
        ("L40S", "l40s", 48, 1),
        ("Tesla T4", "t4", 16, 1),
        ("MI250", "mi250", 64, 1),
        ("AMD Instinct MI250X", "mi250x", 64, 1),
        ("MI300A", "mi300a", 128, 1),
        ("MI 300X", "mi300x", 192, 1),
        ("TPUv4", "tpu-v4", 32, 1),
        ("v4-128", "tpu-v4", 32, 1),
        ("v5e-256", "tpu-v5e", 16, 1),
        ("v5litepod-16", "tpu-v5e", 16, 1),
        ("TPU v5 lite", "tpu-v5e", 16, 1),
        ("v5p-128", "tpu-v5p", 95, 1),
        ("v6e-8", "tpu-v6e", 32, 1),
    ],
)
def test_a_device_is_recognised_as_its_source_wrote_it(
    written: str, family: str, memory_gb: int, power_share: float
) -> None:
    device = accelerator(written)
    assert device.family == family
    assert device.memory_bytes / 2**30 == pytest.approx(memory_gb, rel=0.01)
    assert device.power_share == pytest.approx(power_share)


@pytest.mark.parametrize(
    "text", ["lab-200g", "alpha-100g", "cloud-100g-tcp", "site-v4-2", "v4", "RTX 6000 Ada", "L40"]
)
def test_a_name_that_only_looks_like_a_device_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="device: expected one of"):
        accelerator(text)


def test_memory_that_no_such_device_has_is_told() -> None:
    assert accelerator("NVIDIA GH200 480GB").other_memory_gb == 480
    assert accelerator("H100 NVL 188GB").other_memory_gb == 188
    assert accelerator("GH200 144GB").other_memory_gb is None
    assert not accelerator("NVIDIA GH200 480GB").is_memory_stated


def test_memory_that_is_not_stated_is_marked() -> None:
    assert not accelerator("H100").is_memory_stated
    assert accelerator("H100-SXM-80GB").is_memory_stated
    assert accelerator("H200").is_memory_stated  # it comes with one size


@pytest.mark.parametrize(
    ("written", "memory_gb", "terabytes_per_s"),
    [
        ("A100-40G", 40, 1.555),
        ("A100-PCIE-40GB", 40, 1.555),
        ("NVIDIA GH200 144G HBM3e", 144, 4.9),
        ("GH200 144GB", 144, 4.9),
        ("NVIDIA GH200 480GB", 96, 4.0),
        ("NVIDIA H100 NVL", 94, 3.9),
        ("H20-3e", 141, 4.8),
        ("H20 141GB", 141, 4.8),
        ("H100/80GB", 80, 3.35),
    ],
)
def test_memory_and_its_rate_are_those_of_the_named_form(
    written: str, memory_gb: int, terabytes_per_s: float
) -> None:
    device = accelerator(written)
    assert device.memory_bytes / 2**30 == pytest.approx(memory_gb, rel=0.01)
    assert device.memory_bytes_per_s == pytest.approx(terabytes_per_s * 1e12)


@pytest.mark.parametrize("written", ["A100 40/80GB", "A100 40 or 80 GB", "a100-100g"])
def test_a_choice_of_memories_and_a_rate_state_no_memory(written: str) -> None:
    device = accelerator(written)
    assert not device.is_memory_stated
    assert device.other_memory_gb is None


@pytest.mark.parametrize(
    "text",
    [
        *("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "A100 1g.10gb", "a100_3g.20gb", "A100 MIG1g.5gb"),
        *("mig_3g.20gb A100", "A100 MIG", "A100 (MIG mode: enabled)", "A100 MIG 1c.3g.20gb"),
    ],
)
def test_a_part_of_a_device_is_no_whole_one(text: str) -> None:
    with pytest.raises(UsageError, match=r"expected a whole device, or a file of `fullwire bench"):
        accelerator(text)


@pytest.mark.parametrize(
    "text", ["A100 (MIG off)", "A100 mig disabled", "A100, MIG mode: Disabled", "A100 without MIG"]
)
def test_a_device_that_is_not_divided_is_a_whole_one(text: str) -> None:
    assert accelerator(text).family == "a100"


def test_an_unknown_device_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UsageError, match=r"expected one of v100, a100, .* got 'abacus'"):
        accelerator("abacus")


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        ("memories_gb = [16, 32]\n", "v100: these fields are missing: memories_gb"),
        ('name = "v100"\n', "number 1: these fields are missing: name"),
        ('like = "a100"\n', "v100: expected like = one of a100, h100, .* family = 'v100'"),
    ],
)
def test_an_entry_without_a_field_is_refused_by_name(
    left_out: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "accelerators.toml"
    whole = Path(accelerators.__file__).with_suffix(".toml").read_text()
    assert left_out in whole
    table.write_text(whole.replace(left_out, "", 1))
    monkeypatch.setattr(accelerators, "_TABLE", table)
    accelerators._document.cache_clear()
    with pytest.raises(UsageError, match=rf"accelerators.toml: \[\[device\]\] {said}"):
        accelerator("h100")
    accelerators._document.cache_clear()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('name = "x9"\n', "x9.toml: these fields are missing: device, measured"),
        (
            '[device]\nname = "x9"\n[measured]\n',
            r"x9.toml: \[device\]: .*: title, memory_bytes, .*, peaks$",
        ),
    ],
)
def test_a_file_without_a_field_is_refused_by_name(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "x9.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        accelerator(path)


WRITTEN = """[device]
name = "x9"
title = "x86_64, 2 threads"
memory_bytes = 25276502016
memory_bytes_per_s = 2343912026.7
processors = 1
peaks = { fp32 = 7599902257.2 }

[measured]
memory_share = 1.0
spread = 0.687

[measured.products]
peak_share = 1.2
tile_shares = [1.0, 0.9, 0.765, 0.612]
ramp = 461.3
start_us = 26.6
memory_share = 0.8
tail = 0.6
cast_share = 0.4

[measured.attention]
forward = 1.06
backward = 0.27
wide_forward = 1.06
wide_backward = 0.27
forward_ns = 0.0
backward_ns = 0.0
"""


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("memory_bytes", "0", r"\[device\]: memory_bytes: expected a whole number from 1 "),
        ("memory_bytes", "-5", r"\[device\]: memory_bytes: "),
        ("memory_bytes_per_s", "0", r"\[device\]: memory_bytes_per_s: expected a number from 1 "),
        ("memory_bytes_per_s", "nan", r"memory_bytes_per_s: .*, got nan"),
        ("memory_bytes_per_s", '"1"', r"memory_bytes_per_s: .*, got '1'"),
        ("processors", "0", "processors: expected a whole number"),
        ("processors", "1.5", "processors: expected a whole number"),
        ("processors", "true", "processors: expected a whole number"),
        ("name", "5", "name: expected a line of text, got 5"),
        ("title", r'"a\nb"', "title: expected a line of text"),
        ("peaks", "{ fp32 = -1.0 }", r"\[device\]: peaks: fp32: expected a number"),
        ("peaks", "{ fp32 = 0 }", "peaks: fp32: expected a number"),
        ("peaks", "{ fp23 = 1e12 }", "peaks: fp23: no such field, is fp32 meant"),
        ("peaks", "{ }", "peaks: expected one of fp4, .*, fp32, got none"),
        ("peaks", "5", "peaks: expected a table of fields, got 5"),
        ("spread", "-1", r"\[measured\]: spread: expected a number from 0 to 10, got -1"),
        ("spread", "inf", "spread: expected a number from 0 to 10, got inf"),
        ("peak_share", "0", r"\[measured.products\]: peak_share: "),
        ("peak_share", "-1", "peak_share: "),
        ("tile_shares", "[]", "tile_shares: expected a list of 4 numbers"),
        ("tile_shares", "[0, 0, 0, 0]", "tile_shares: expected a number"),
        ("ramp", "-1000", "ramp: "),
        ("start_us", "-1e5", "start_us: "),
        ("tail", "-1", "tail: "),
        ("forward", "0", r"\[measured.attention\]: forward: "),
        ("forward_ns", "-5e6", "forward_ns: "),
        ("processors", "1\ncolour = 1", r"\[device\]: colour: no such field, expected name, "),
    ],
)
def test_a_file_with_a_field_that_no_device_has_is_refused_by_name(
    field: str, value: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "x9.toml"
    path.write_text(WRITTEN)
    assert accelerator(path).spread == 0.687
    wrong, count = re.subn(rf"(?m)^{field} = .*$", lambda _: f"{field} = {value}", WRITTEN, count=1)
    assert count == 1
    path.write_text(wrong)
    with pytest.raises(UsageError, match=rf"x9.toml: .*{said}"):
        accelerator(path)


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("memory_tb_per_s = 0.9\n", "memory_tb_per_s = nan\n", "v100: memory_tb_per_s: "),
        ("fp32 = 15.7", "fp32 = -1", "v100: peaks: fp32: expected a number"),
        ("more_spread = 0.15\n", "mor_spread = 0.15\n", "is more_spread meant"),
        ("ramp = 171.6", "ramp = -1", r"\[\[measured\]\] a100: bf16: ramp: expected"),
        ("forward_ns = 28", "forward_ns = '28'", "a100: attention: forward_ns: expected"),
        ("{ of_memory_gb = 40, memory_tb_per_s = 1.555 }", "{ power_w = 0 }", "forms: power_w"),
    ],
)
def test_the_built_in_table_is_checked_as_files_are(
    right: str, wrong: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "accelerators.toml"
    whole = Path(accelerators.__file__).with_suffix(".toml").read_text()
    assert right in whole
    table.write_text(whole.replace(right, wrong, 1))
    monkeypatch.setattr(accelerators, "_TABLE", table)
    accelerators._document.cache_clear()
    with pytest.raises(UsageError, match=said):
        accelerator("h100")
    accelerators._document.cache_clear()


def test_a_device_that_nobody_measured_has_a_wider_spread() -> None:
    newer, measured = accelerator("gb300"), accelerator("gb200")
    assert newer.spread > measured.spread
    # The same chip with 1400 W instead of 1200 W has a higher clock.
    ratio = newer.products_of("fp8").peak_share / measured.products_of("fp8").peak_share
    assert ratio == pytest.approx((1400 / 1200) ** 0.5, rel=0.01)
    assert not accelerator("mi300x").is_measured


@pytest.mark.parametrize("name", accelerator_names())
def test_no_product_beats_the_peak_of_its_device(name: str) -> None:
    device = accelerator(name)
    for precision in ("bf16", "fp16", "fp8", "nvfp4"):
        time_s = product_s(device, 8192, 8192, 8192, precision=precision)
        assert 2 * 8192**3 / time_s < device.peak_flops_per_s(precision)


def test_products_take_arrays_and_equal_their_points() -> None:
    rows = np.array([512, 4096, 8192])
    together = product_s(H100, rows, 4096, 1024)
    assert together.tolist() == [float(product_s(H100, size, 4096, 1024)) for size in rows]


def test_a_wave_that_is_not_full_takes_longer_for_each_output() -> None:
    """A tile more than fills a wave costs more than its share."""
    full, more = (float(product_s(H100, 256 * 132 // 4, side, 8192)) for side in (512, 640))
    assert more / full > 640 / 512


def test_measured_products_are_met() -> None:
    """Medians of ai-dynamo/aiconfigurator for 8192 x 65536 x 4096 on A100."""
    assert float(product_s(accelerator("a100"), 8192, 65536, 4096)) == pytest.approx(
        16.7e-3, rel=0.05
    )


def test_eight_bits_pay_in_large_products_only() -> None:
    def gain(rows: int) -> float:
        wide = product_s(H100, rows, 8192, 8192)
        return float(wide / product_s(H100, rows, 8192, 8192, precision="fp8"))

    assert gain(8192) > 1.6
    assert gain(64) < gain(8192)


def test_a_type_that_the_device_lacks_runs_in_the_next_wider() -> None:
    a100 = accelerator("a100")
    assert product_s(a100, 4096, 4096, 4096, precision="fp8") == product_s(a100, 4096, 4096, 4096)


def test_sides_that_are_no_multiple_of_eight_are_slow() -> None:
    """Heads of 108 dimensions made BLOOM's first runs 30 % slower than heads of 144."""
    assert misalignment([64, 1792, 1800, 108]).tolist() == [1.0, 1.0, 1.04, 3.0]
    a100 = accelerator("a100")

    def layer_s(heads: int) -> float:
        hidden, tokens = 13824, 8192
        products = sum(
            3 * product_s(a100, tokens, outputs / 8, inner)
            for outputs, inner in (
                (3 * hidden, hidden),
                (8 * hidden, hidden / 8),
                (4 * hidden, hidden),
                (8 * hidden, hidden / 2),
            )
        )
        passes = (
            attention_s(
                a100,
                queries=2048,
                keys=1024,
                heads=heads / 8,
                head_dim=hidden // heads,
                batch=4,
                backward=backward,
                is_fused=False,
            )
            for backward in (False, True)
        )
        return float(products + sum(passes))

    assert layer_s(128) / layer_s(96) == pytest.approx(1.33, abs=0.08)


def test_backward_attention_takes_longer_and_unfused_attention_longest() -> None:
    def time_s(*, backward: bool = False, is_fused: bool = True) -> float:
        time = attention_s(
            H100,
            queries=8192,
            keys=4096,
            heads=32,
            head_dim=128,
            backward=backward,
            is_fused=is_fused,
        )
        return float(time)

    assert time_s(backward=True) > 2 * time_s()
    assert time_s(is_fused=False) > 3 * time_s()


def test_memory_bound_operations_follow_their_bytes() -> None:
    assert memory_bound_s(H100, 2e9) > 2e9 / H100.memory_bytes_per_s
    assert optimizer_s(H100, 1e9) == pytest.approx(30e9 / 3.35e12 / 0.8, rel=0.01)
    assert permutation_s(H100, 8192, 4096, 8) > 4 * permutation_s(H100, 8192, 4096, 1)
    assert cross_entropy_s(H100, 8192, 128256) > cross_entropy_s(H100, 8192, 32000)


def test_experts_in_one_kernel_take_longer_than_one_product_of_their_size() -> None:
    one = product_s(H100, 64 * 256, 4096, 2048)
    assert product_s(H100, 256, 4096, 2048, groups=64) > one
