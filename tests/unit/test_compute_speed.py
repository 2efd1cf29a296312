"""Devices that compute faster: an axis of a what-if, and more of the step is communication."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

import fullwire as fw
from fullwire.errors import UsageError
from fullwire.run.run import Collectives
from tests.conftest import Cli
from tests.jobs_by_hand import a_trained_job as a_job_of_three
from tests.jobs_by_hand import with_data
from tests.trained_jobs import a_trained_job, a_transport


def test_one_worker_gets_as_much_faster_as_its_device() -> None:
    table = fw.whatif("vgg16@v100", workers=1, bandwidth="10Gbps", compute_speed="1,2,4")
    once, twice, four_times = table["step_s"]
    assert once == pytest.approx(2 * twice, rel=1e-6)
    assert once == pytest.approx(4 * four_times, rel=1e-6)
    assert table["compute_speed"].tolist() == [1, 2, 4]


def test_on_the_same_network_a_faster_device_scales_worse() -> None:
    table = fw.whatif("vgg16@v100", workers=8, bandwidth="10Gbps,40Gbps", compute_speed="1,1.5,2")
    for rate in (10e9, 40e9):
        steps, factors = (
            table[column][table["bandwidth_bps"] == rate] for column in ("step_s", "scaling_factor")
        )
        assert (steps[1:] < steps[:-1]).all()
        assert (factors[1:] < factors[:-1]).all()


def test_a_grid_of_speeds_equals_its_points() -> None:
    grid = fw.whatif(
        ["vgg16@v100", "resnet50@v100"], workers="2,8", bandwidth="10Gbps", compute_speed=[1, 2]
    )
    for row in grid.rows():
        [alone] = fw.whatif(
            row["run"],
            workers=row["workers"],
            bandwidth="10Gbps",
            compute_speed=row["compute_speed"],
        ).rows()
        assert alone == row


def test_without_it_nothing_is_changed_and_no_column_is_added() -> None:
    plain = fw.whatif("vgg16@v100", workers=8, bandwidth="10Gbps")
    same = fw.whatif("vgg16@v100", workers=8, bandwidth="10Gbps", compute_speed=1)
    assert plain["step_s"].tolist() == same["step_s"].tolist()
    assert "compute_speed" not in plain.columns()


def test_a_target_says_for_which_speed(cli: Cli) -> None:
    words = ("whatif", "vgg16@v100", "--workers", "8", "--bandwidth", "10Gbps", "--target", "0.9")
    said = cli(*words, "--compute-speed", "1,2").stdout
    assert "vgg16@v100, computation 1x as fast, 8 workers: a scaling factor of 0.9 needs" in said
    assert "vgg16@v100, computation 2x as fast, 8 workers: a scaling factor of 0.9 needs" in said
    rows = json.loads(cli(*words, "--compute-speed", "1,2", "--json").stdout)["rows"]
    assert [row["compute_speed"] for row in rows] == [1, 2]


def test_the_best_of_several_speeds_is_the_fastest() -> None:
    table = fw.whatif("vgg16@v100", workers=8, bandwidth="100Gbps", compute_speed="1,2")
    [best] = table.best(1)
    assert table["compute_speed"][best.row] == 2
    assert best.instead[0].change < 0
    assert 8 < best.speedup < 16  # of one worker as it was


def test_the_recorded_speed_changes_nothing() -> None:
    run = a_trained_job(a_transport())
    asked: dict[str, Any] = {"transport": "measured", "workers": [2, 4]}
    as_recorded, told = fw.whatif(run, **asked), fw.whatif(run, **asked, compute_speed=1)
    for own_s, other_s in zip(as_recorded.interval_s, told.interval_s, strict=True):
        assert other_s.tolist() == own_s.tolist()


@pytest.mark.parametrize("speed", ["0", "-1", "fast", "", "nan"])
def test_a_speed_that_cannot_be_is_refused(speed: str) -> None:
    with pytest.raises(UsageError, match="compute speed: expected"):
        fw.whatif("vgg16@v100", workers=8, bandwidth="10Gbps", compute_speed=speed)


def test_a_condition_that_nobody_knows_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"whatif: expected .*compute_speed.*, got 'colour'"):
        fw.whatif("vgg16@v100", colour="blue")  # type: ignore[call-arg]


def test_faster_computing_brings_no_data_sooner() -> None:
    """The wait for data and the host's part stay; the rest of a long step is computing."""
    job = with_data(a_job_of_three(), 20.0)
    asked: dict[str, Any] = {"bandwidth": "100Tbps", "transport": "full"}
    table = fw.whatif(job, **asked, compute_speed="1,2,1000000")
    once, twice, soonest = table["baseline_step_s"]
    account = fw.explain(job).account
    kept_s = account["input"] + account["host"]
    assert account["input"] == pytest.approx(0.02)
    assert soonest == pytest.approx(kept_s, rel=1e-4)
    assert once - twice == pytest.approx((once - kept_s) / 2, rel=1e-3)


def test_one_workers_wait_for_data_stays_too() -> None:
    job = with_data(a_job_of_three(ranks=1), 20.0)
    job = dataclasses.replace(job, collectives=Collectives.empty())
    asked: dict[str, Any] = {"workers": 1, "bandwidth": "1Gbps"}
    once, soonest = fw.whatif(job, **asked, compute_speed=[1, 1_000_000])["step_s"]
    account = fw.explain(job).account
    assert account["input"] == pytest.approx(0.02)
    assert once - soonest == pytest.approx(account["compute"], rel=1e-3)
