"""The speed of this machine's own device: measured into a file that prices operations."""

from __future__ import annotations

from pathlib import Path

import pytest

from fullwire import UsageError
from fullwire.studies.device_speed import measure_device
from fullwire.workloads.accelerators import accelerator
from fullwire.workloads.operations import attention_s, product_s


def test_a_measured_device_is_read_back_and_prices_operations(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    found = measure_device(path, seconds=4, quick=True)
    device = accelerator(path)
    assert device == found.device
    assert device.memory_bytes > 2**28
    assert 2 * 512**3 / product_s(device, 512, 512, 512) < 2 * device.peak_flops_per_s("bf16")
    assert attention_s(device, queries=1024, keys=512, heads=8, head_dim=128) > 0
    with pytest.raises(UsageError, match="exists: name another, or ask for --force"):
        measure_device(path)


def test_a_file_of_another_kind_is_refused_before_measuring(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected a file that ends in \.toml, got .*mine.json"):
        measure_device(tmp_path / "mine.json")


def test_a_damaged_device_file_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[device]\nname = 1\n")
    with pytest.raises(UsageError, match=r"mine\.toml: these fields are missing: measured"):
        accelerator(path)
    with pytest.raises(UsageError, match=r"none\.toml: cannot be read: No such file"):
        accelerator(tmp_path / "none.toml")
