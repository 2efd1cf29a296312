"""`fullwire codecs`: speeds, errors, the bandwidth that pays, and costs handed to a prediction."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fullwire as fw
from fullwire.answers.codecs import _crossing, codecs
from fullwire.compression.codec import costs_in, parse_choice
from fullwire.errors import DamagedInput, UsageError
from fullwire.report.charts import plot_codecs
from fullwire.report.terminal import print_codecs
from tests.conftest import Cli
from tests.torch.test_record import needs_torch
from tests.unit.test_display import NEEDS_TORCH, check_docstring

pytestmark = needs_torch


@pytest.fixture(autouse=True)
def small_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fullwire.compression.measured.SIDE", 256)
    monkeypatch.setattr("fullwire.compression.measured.BUCKET_BYTES", 4 * 256**2)


def test_the_table_has_bytes_speeds_errors_and_where_a_codec_pays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[tuple[int, int]] = []
    found = codecs("bf16,powersgd:rank=2", quick=True, progress=lambda *done: told.append(done))
    halves, thin = found.codecs
    assert told == [(1, 2), (2, 2)]
    assert (halves.ratio, halves.packed_bytes) == (2, 2 * 256**2)
    assert thin.ratio == pytest.approx(256**2 / (2 * 512))
    assert halves.gaussian_error < 1e-5 < 0.5 < thin.gaussian_error < 1
    assert thin.gradient_error < thin.gaussian_error  # Real gradients have large directions.
    for row in found.codecs:
        assert row.pays_below_bps is None or row.pays_below_bps > 1e7
        assert all(speed["pack_bps"] > 0 and speed["unpack_bps"] > 0 for speed in row.speeds)
    print_codecs(found)
    printed = capsys.readouterr().out
    assert "powersgd:rank=2" in printed
    assert "vgg16@v100 on 4 workers takes a shorter step" in printed
    plot_codecs(found, tmp_path / "codecs.svg")
    assert "powersgd:rank=2" in (tmp_path / "codecs.svg").read_text()


def test_the_crossing_lies_between_the_rates_around_it() -> None:
    rates = [1.0, 10.0, 100.0]
    assert _crossing(rates, [4, 2, 1], [2, 2.5, 2]) == pytest.approx(10**0.756, rel=0.01)
    assert _crossing(rates, [4, 2, 1], [3, 1, 0.5]) == math.inf
    assert _crossing(rates, [4, 2, 1], [5, 3, 2]) is None


def test_gradients_come_from_a_file(tmp_path: Path) -> None:
    np.save(tmp_path / "zeros.npy", np.zeros((64, 64), np.float32))
    found = codecs("topk", quick=True, gradients=tmp_path / "zeros.npy")
    assert found.codecs[0].gradient_error == 0
    (tmp_path / "bad.npz").write_bytes(b"no archive")
    (tmp_path / "none.npy").write_bytes(b"")
    np.save(tmp_path / "empty.npy", np.zeros(0, np.float32))
    with pytest.raises(DamagedInput, match="cannot be read as gradients"):
        codecs("bf16", quick=True, gradients=tmp_path / "bad.npz")
    with pytest.raises(DamagedInput, match="cannot be read as gradients"):
        codecs("bf16", quick=True, gradients=tmp_path / "none.npy")
    with pytest.raises(UsageError, match="expected gradients with values, got none"):
        codecs("bf16", quick=True, gradients=tmp_path / "empty.npy")
    with pytest.raises(UsageError, match=r"expected a file \.pt, \.npy or \.npz, got job\.run"):
        codecs("bf16", quick=True, gradients="job.run")
    with pytest.raises(UsageError, match="No such file"):
        codecs("bf16", quick=True, gradients="missing.npy")


def test_the_json_of_a_machine_gives_a_prediction_its_costs(cli: Cli, tmp_path: Path) -> None:
    done = cli("codecs", "bf16", "--quick", "--json")
    assert done.returncode == 0, done.stderr
    place = tmp_path / "codecs.json"
    place.write_text(done.stdout)
    speeds = json.loads(done.stdout)["codecs"][0]["speeds"][0]
    cost = costs_in(place)["bf16"]
    assert (cost.encode_bps, cost.decode_bps) == (speeds["pack_bps"], speeds["unpack_bps"])
    asked: dict[str, Any] = {"workers": 4, "bandwidth": "10Gbps", "codec_costs": place}
    table = fw.whatif("vgg16@v100", compression="1,2,bf16", **asked)
    _, ideal, costly = table["step_s"]
    assert costly > ideal
    with pytest.raises(UsageError, match="codec costs: expected those of int8, got those of bf16"):
        fw.whatif("vgg16@v100", compression="int8", **asked)
    place.write_text("{}")
    with pytest.raises(DamagedInput, match="expected the output of fullwire codecs --json"):
        fw.whatif("vgg16@v100", compression="bf16", **asked)


@pytest.mark.parametrize("name", [name for name in NEEDS_TORCH if name.islower()])
def test_a_docstring_names_every_parameter_and_its_example_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch  # the file also loads where torch is not installed

    model = torch.nn.Linear(4, 2)
    check_docstring(
        name,
        tmp_path,
        monkeypatch,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        criterion=torch.nn.functional.cross_entropy,
        dataset=[(torch.randn(4), number % 2) for number in range(96)],
    )


def test_a_job_is_the_class_that_elastic_returns() -> None:
    assert inspect.signature(fw.elastic, eval_str=True).return_annotation is fw.Job


def test_columns_that_carry_little_do_not_make_topk_search_all_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    gradient = torch.randn((1024, 1024), generator=torch.Generator().manual_seed(0))
    gradient[:, ::64] = 0  # A layer behind ReLU has columns of zeros.
    searched: list[int] = []
    usual = torch.Tensor.topk

    def counted(values: Any, *given: Any, **more: Any) -> Any:
        searched.append(values.numel())
        return usual(values, *given, **more)

    monkeypatch.setattr(torch.Tensor, "topk", counted)
    packed = parse_choice("topk:density=0.01").method().pack(gradient)
    places = packed.view(torch.int32).view(2, -1)[0].long()
    assert max(searched) < gradient.numel() / 20
    largest = usual(gradient.abs().reshape(-1), places.numel()).indices
    assert set(places.tolist()) == set(largest.tolist())
