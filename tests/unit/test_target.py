"""The least bandwidth and the least compression for a scaling factor."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fullwire as fw
from fullwire.errors import UsageError
from fullwire.run.facts import FactValue
from fullwire.words import sentences
from tests.builders import a_run
from tests.strategies import cases


def test_the_least_bandwidth_reaches_the_target_and_a_little_less_does_not() -> None:
    result = fw.whatif("resnet50@v100", workers="8,64", bandwidth="10Gbps", target=0.95)
    assert result.targets is not None
    for case in result.targets.least_bandwidth:
        assert case.bandwidth_bps is not None
        for rate, reaches in ((case.bandwidth_bps, True), (case.bandwidth_bps * 0.9999, False)):
            again = fw.whatif("resnet50@v100", workers=case.workers, bandwidth=rate)
            assert (again["scaling_factor"][0] >= 0.95) == reaches


def test_the_least_compression_reaches_the_target_and_a_little_less_does_not() -> None:
    result = fw.whatif("vgg16@v100", workers=64, bandwidth="10Gbps", target="0.95")
    assert result.targets is not None
    [case] = result.targets.least_compression
    assert case.compression is not None
    for ratio, reaches in ((case.compression, True), (case.compression * 0.9999, False)):
        again = fw.whatif("vgg16@v100", workers=64, bandwidth="10Gbps", compression=ratio)
        assert (again["scaling_factor"][0] >= 0.95) == reaches


def test_where_nothing_is_needed_the_answer_is_no_compression() -> None:
    result = fw.whatif("resnet50@v100", workers=64, bandwidth="100Gbps", target=0.95)
    assert result.targets is not None
    assert result.targets.least_compression[0].compression == 1
    assert "no compression at 100 Gbps" in sentences(result.reaching)[0]


def test_what_cannot_be_reached_says_so_and_how_far_one_gets() -> None:
    facts: dict[str, FactValue] = {"workers": 1, "reduce_cost": ((1.0, 0.1), (1e9, 0.1))}
    result = fw.whatif(a_run(facts=facts), workers=8, bandwidth="10Gbps", target=0.95)
    assert result.targets is not None
    [case] = result.targets.least_bandwidth
    assert case.bandwidth_bps is None
    assert not case.is_reachable
    assert 0 < case.best_scaling_factor < 0.95
    assert "more than bandwidth can reach" in sentences(result.reaching)[0]
    assert "needs more than compression can reach (0." in sentences(result.reaching)[0]


def test_one_worker_needs_next_to_nothing() -> None:
    result = fw.whatif("vgg16@v100", workers=1, bandwidth="10Gbps", target=0.99)
    assert "next to no bandwidth" in sentences(result.reaching)[0]


def test_a_codec_is_searched_by_bandwidth_only() -> None:
    result = fw.whatif(
        a_run(), workers=8, bandwidth="10Gbps", codec="4,90GB/s,90GB/s,sum", target=0.9
    )
    assert result.targets is not None
    assert result.targets.least_compression == ()
    assert result.targets.least_bandwidth[0].codec == "4,90GB/s,90GB/s,sum"


def test_with_priority_there_is_no_least_bandwidth() -> None:
    with pytest.raises(UsageError, match="expected a fifo lane"):
        fw.whatif(a_run(), workers=8, bandwidth="10Gbps", lane="priority", target=0.9)


@cases(30)
@given(st.integers(2, 500), st.floats(0.05, 0.99), st.sampled_from(["ring", "tree"]))
def test_what_is_returned_always_reaches_the_target(workers: int, wanted: float, kind: str) -> None:
    result = fw.whatif(
        a_run(), workers=workers, bandwidth="1Gbps", algorithm=kind, target=wanted, buckets="none"
    )
    assert result.targets is not None
    rate = result.targets.least_bandwidth[0].bandwidth_bps
    again = fw.whatif(a_run(), workers=workers, bandwidth=rate, algorithm=kind, buckets="none")
    assert again["scaling_factor"][0] >= wanted


def test_several_runs_are_drawn_together_in_one_sentence() -> None:
    result = fw.whatif(
        ["vgg16@v100", "resnet50@v100"],
        workers=64,
        bandwidth="10Gbps,100Gbps",
        target=0.95,
        buckets="paper",
    )
    said = sentences(result.reaching)
    assert said[-2].startswith("64 workers at 10 Gbps: from 2.6")
    assert said[-1] == "64 workers at 100 Gbps: no compression for any of these runs."
    ratios = [case.compression for case in result.targets.least_compression]  # type: ignore[union-attr]
    assert np.array(ratios)[[1, 3]].tolist() == [1.0, 1.0]
