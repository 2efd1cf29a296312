"""Codecs by name: the bytes of each on the wire, its cost, and codecs with unknown cost."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fullwire as fw
from fullwire.compression.codec import CODECS, HOOK_S, Codec, costs_in, parse_choice
from fullwire.compression.compressor import parse_codec
from fullwire.errors import UsageError
from tests.builders import a_run


@pytest.mark.parametrize("key", CODECS)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_codec_has_a_cost_with_its_source_or_says_that_it_has_none(
    key: str, on_gpu: bool
) -> None:
    codec = CODECS[key]
    compressor = codec.compressor(on_gpu=on_gpu)
    cost = codec.on_gpu if on_gpu else codec.on_processor
    assert compressor.label == codec.key
    assert not compressor.is_free
    if cost is None:
        assert compressor.unmeasured_on
        assert not compressor.cost_source
    else:
        assert cost.source
        assert compressor.cost_source == cost.source
        assert bool(compressor.unmeasured_on) is not cost.is_measured
        again = parse_codec(str(compressor))
        assert again.ratio == pytest.approx(compressor.ratio, rel=1e-9)
        assert again.encode_bps == compressor.encode_bps
        assert again.bucket_s == compressor.bucket_s


@pytest.mark.parametrize("key", CODECS)
def test_a_codec_is_a_condition_beside_ratios(key: str) -> None:
    table = fw.whatif(
        "vgg16@v100", workers=8, bandwidth="10Gbps", compression=f"1,{key},{CODECS[key].ratio}"
    )
    none, codec, ideal = table["step_s"]
    assert table["codec"].tolist() == [None, key, None]
    first, ratio, last = table["compression"].tolist()
    assert (first, last) == (1, CODECS[key].ratio)
    assert ratio == last or CODECS[key].by_shape
    assert codec < none
    assert ideal <= codec or CODECS[key].by_shape  # It may have more than the usual ratio.
    compressor = CODECS[key].compressor(on_gpu=True)
    said = [line for line in table.warnings if line.startswith(f"{key}: its cost on a GPU is ")]
    source = compressor.cost_source or "unknown and counts as nothing"
    expected = [f"{key}: its cost on a GPU is {source}."] if compressor.unmeasured_on else []
    assert said == expected


def test_a_cost_that_nobody_knows_counts_as_nothing_and_is_said() -> None:
    unknown = Codec(key="new", label="gradients as something new", ratio=2).compressor(on_gpu=True)
    assert unknown.codec_s_per_byte(8) == 0
    assert (unknown.unmeasured_on, unknown.cost_source) == ("a GPU", "")
    assert not unknown.is_free


def test_a_codec_that_nobody_knows_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(
        UsageError, match=r"ratio such as 4, none, or a codec among .*fp16.*, got 'zip'"
    ):
        fw.whatif("vgg16@v100", workers=8, bandwidth="10Gbps", compression="zip")


def test_bfloat16_halves_the_bytes_and_its_cost_on_a_gpu_is_unknown() -> None:
    table = fw.whatif("vgg16@v100", workers=8, bandwidth="10Gbps", compression="1,bf16")
    none, codec = table["communication_s"]
    assert codec == pytest.approx(none / 2, rel=0.02)
    on_processor = CODECS["bf16"].compressor(on_gpu=False)
    assert on_processor.codec_s_per_byte(8) == pytest.approx(1 / 14e9 + (2 - 1 / 8) / 12e9)
    assert CODECS["bf16"].compressor(on_gpu=True).unmeasured_on == "a GPU"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("powersdg", r"expected a codec among bf16, .*, got 'powersdg'; did you mean powersgd\?"),
        ("powersgd:rnk=2", r"powersgd: expected NAME=VALUE, once, with rank, got 'rnk=2'"),
        ("powersgd:rank=0", r"rank: expected a whole number from 1 to 1024, got '0'"),
        ("powersgd:rank=1:rank=2", r"NAME=VALUE, once, with rank, got 'rank=2'"),
        ("topk:density=0", r"density: expected a share above 0, up to 1, .*, got '0'"),
        ("topk:density=nan", r"density: expected a share above 0, up to 1, .*, got 'nan'"),
        ("bf16:rank=2", r"bf16: expected no options, got 'rank=2'"),
    ],
)
def test_a_mistake_in_a_codec_is_refused_with_what_was_expected(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        parse_choice(text)


def test_a_codec_with_settings_reads_as_it_is_written() -> None:
    assert str(parse_choice("powersgd:rank=2")) == "powersgd:rank=2"
    assert str(parse_choice("topk:density=1%")) == "topk:density=0.01"
    assert str(parse_choice("bf16")) == "bf16"


def test_bytes_follow_shapes_and_settings() -> None:
    square = [(2560, 2560)]
    assert parse_choice("powersgd").ratio(square) == CODECS["powersgd"].ratio == 1280
    assert parse_choice("powersgd:rank=2").ratio(square) == 640
    assert parse_choice("powersgd").ratio([(1000,)]) == 1
    for key in ("bf16", "int8", "onebit", "topk"):
        assert parse_choice(key).ratio(square) == pytest.approx(CODECS[key].ratio, rel=1e-3)
    assert parse_choice("topk:density=10%").ratio(square) == pytest.approx(5, rel=1e-3)


def test_the_ratio_of_thin_factors_follows_the_gradients_of_the_run() -> None:
    asked: dict[str, Any] = {
        "workers": 4,
        "bandwidth": "1Gbps",
        "compression": "powersgd,powersgd:rank=4",
    }
    wide, narrow = (
        fw.whatif(run, **asked)["compression"] for run in ("vgg16@v100", "resnet50@v100")
    )
    assert wide[0] > narrow[0] > narrow[1] > 1
    with pytest.raises(UsageError, match="expected one run, or runs with the same gradients"):
        fw.whatif(["vgg16@v100", "resnet50@v100"], **asked)


def test_an_exchange_sends_the_bytes_of_a_ring_and_unpacks_about_twice() -> None:
    [exchange] = {codec.combining for codec in (CODECS["bf16"], CODECS["int8"], CODECS["onebit"])}
    assert exchange == "exchange"
    codec = parse_codec("2,8GB/s,8GB/s,exchange")
    assert codec.codec_s_per_byte(4) == pytest.approx((1 + 1.75) / 8e9)
    slow: dict[str, Any] = {"workers": 4, "bandwidth": "1Gbps", "latency": "0us"}
    one = fw.whatif("vgg16@v100", codec="2,1000GB/s,1000GB/s,exchange", **slow)
    ideal = fw.whatif("vgg16@v100", compression=2, **slow)
    assert one["communication_s"] == pytest.approx(ideal["communication_s"], rel=1e-2)
    with pytest.raises(UsageError, match=r"sum\|exchange\|gather"):
        parse_codec("2,8GB/s,8GB/s,ring")


def test_a_hook_takes_its_time_for_each_bucket_and_none_for_one_worker() -> None:
    assert CODECS["bf16"].compressor(on_gpu=False).bucket_s == HOOK_S
    assert CODECS["bf16"].compressor(on_gpu=True).bucket_s == 0
    assert parse_codec("2,8GB/s,8GB/s,exchange,1400us").bucket_s == pytest.approx(1.4e-3)
    asked: dict[str, Any] = {
        "workers": (1, 4),
        "bandwidth": "1Gbps",
        "buckets": ("ddp", "ddp:256MiB"),
    }
    codecs = [f"2,8GB/s,8GB/s,exchange{each}" for each in ("", ",10ms")]
    longer_s = [fw.whatif("vgg16@v100", codec=each, **asked)["communication_s"] for each in codecs]
    alone, many, _, few = np.subtract(*longer_s[::-1])
    assert alone == 0
    assert many > few > 0
    assert many / 10e-3 == pytest.approx(round(many / 10e-3)), "so many buckets"
    with pytest.raises(UsageError, match=r"codec time for a bucket: expected .* got 'fast'"):
        parse_codec("2,8GB/s,8GB/s,exchange,fast")


def test_on_gloo_an_exchange_fills_less_of_the_link_than_a_sum() -> None:
    asked: dict[str, Any] = {"workers": 4, "bandwidth": "500Mbps", "latency": "0us"}

    def communication_s(backend: str, codec: str) -> Any:
        run = a_run(facts={"workers": 1, "backend": backend})
        return fw.whatif(run, codec=codec, **asked)["communication_s"]

    ours = communication_s("fullwire", "2,1000GB/s,1000GB/s,exchange")
    # Two of three senders meet a first one at each receiver.
    assert communication_s("gloo", "2,1000GB/s,1000GB/s,exchange") == pytest.approx(
        (1.03 + 0.13 * 2 / 3) * ours, rel=1e-2
    )
    summed = communication_s("fullwire", "2,1000GB/s,1000GB/s,sum")
    assert communication_s("gloo", "2,1000GB/s,1000GB/s,sum") == pytest.approx(summed)


def test_a_pipe_in_place_of_costs_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "costs.json")
    with pytest.raises(UsageError, match="expected a file, got a pipe"):
        costs_in(tmp_path / "costs.json")


@pytest.mark.parametrize(
    ("facts", "how"),
    [
        ({"wire": "bf16"}, "bf16 on the wire"),
        ({"hook": "fullwire.compress(int8)"}, "fullwire.compress(int8)"),
        ({}, None),
    ],
)
def test_a_codec_on_top_of_packed_gradients_is_said_to_be_one(
    facts: dict[str, str], how: str | None
) -> None:
    run = a_run(facts={"workers": 2, "line_rate_bps": 1e9, **facts})
    for compression in ("1", "1,bf16"):
        warnings = fw.whatif(run, bandwidth="1Gbps", compression=compression).warnings
        told = [line for line in warnings if "its gradients traveled packed" in line]
        is_told = how is not None and compression != "1"
        assert len(told) == is_told
        assert not is_told or f"({how})" in told[0]


def test_one_worker_sends_nothing_that_a_codec_could_pack() -> None:
    pytest.importorskip("torch", reason="torch is not here")
    with pytest.raises(UsageError, match="workers: expected a whole number from 2"):
        fw.codecs("bf16", workers=1)
