"""Pictures: every format, offline, and true to the values between the points.

Vega draws them, and takes one to three seconds to start in each process.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import fullwire as fw
from fullwire.errors import UsageError
from fullwire.report.charts import (
    _Axis,
    _front_chart,
    _scaling_chart,
    check_pictures,
    check_plot_path,
    plot_whatif,
)
from fullwire.report.plans import plot_plans
from tests.browser import Browser
from tests.builders import a_run
from tests.conftest import Cli
from tests.unit.test_flows import captured
from tests.unit.test_time_to_target import GOAL, a_job

HOSTILE = "</script><script>alert(1)</script>"


def test_the_curve_goes_through_what_lies_between_the_points() -> None:
    result = fw.whatif("vgg16@v100", workers=64, bandwidth="10Gbps", compression="1,100")
    marks = json.loads(_scaling_chart(result).to_json())["data"]["values"]
    assert [mark["asked"] for mark in marks].count(True) == 2
    at_ten = [mark["scaling"] for mark in marks if 9 < mark["compression"] < 11]
    assert min(at_ten) > 0.9  # a straight line would pass at 0.25


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the page of a what-if on runs with a hostile name; it takes a second to write."""
    place = tmp_path_factory.mktemp("page") / "x.html"
    result = fw.whatif([a_run(source=HOSTILE), a_run(source="b")], workers=8, bandwidth="1Gbps")
    plot_whatif(result, place)
    return place.read_text()


@pytest.mark.parametrize(("ending", "beginning"), [("png", b"\x89PNG"), ("svg", b"<svg")])
def test_each_format_is_written(tmp_path: Path, ending: str, beginning: bytes) -> None:
    place = tmp_path / f"x.{ending}"
    plot_whatif(fw.whatif("resnet50@v100", workers="8,64"), place)
    assert place.read_bytes().lstrip().startswith(beginning)


def test_without_the_extra_a_picture_is_refused_before_the_work_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    line = r"vl_convert is not installed: pip install 'fullwire\[pictures\]'"
    with pytest.raises(UsageError, match=f"--plot: .*{line}"):
        check_plot_path(tmp_path / "x.png")
    with pytest.raises(UsageError, match=line):
        plot_whatif(fw.whatif("resnet50@v100", workers=8), tmp_path / "x.svg")
    with pytest.raises(UsageError, match=f"study: .*{line}"):
        check_pictures("study")


def test_the_page_asks_nothing_of_the_network(page: str) -> None:
    assert page.lstrip().startswith("<!DOCTYPE html>")
    assert not re.search(r"<(script|link|img)[^>]+(src|href)\s*=\s*[\"']?(https?:)?//", page)


def test_names_from_traces_are_escaped_on_a_page(page: str) -> None:
    assert "alert(1)" in page
    assert "<script>alert" not in page


def test_more_conditions_than_a_picture_shows_are_refused() -> None:
    result = fw.whatif(
        ["vgg16@v100", "resnet50@v100"],
        workers="8,64",
        bandwidth="1Gbps,10Gbps",
        compression="1,2",
        buckets="ddp,none",
    )
    with pytest.raises(UsageError, match="4 conditions that vary"):
        _scaling_chart(result)


def test_compressors_with_a_cost_are_names_not_ratios() -> None:
    result = fw.whatif(
        a_run(), workers=8, bandwidth="1Gbps", compression=2, codec="4,1GB/s,1GB/s,sum"
    )
    drawn = json.loads(_scaling_chart(result).to_json())
    assert {mark["codec"] for mark in drawn["data"]["values"]} == {
        "2x compression",
        "4,1GB/s,1GB/s,sum",
    }


def test_labels_of_a_front_stay_apart_and_its_times_have_a_fitting_unit() -> None:
    """Points that are nearly one share a label, and the settings stand above the picture."""
    result = fw.whatif(
        a_job(32),
        target=GOAL,
        critical_batch=200,
        workers=[2, 60, 61, 62, 63, 64],
        bandwidth=["10Gbps", "100Gbps"],
    )
    assert result.to_target is not None
    drawn = json.loads(_front_chart(result, result.to_target).to_json())
    *_, labels = drawn["layer"]
    shown = labels["data"]["values"]
    count = len(result.to_target.front())
    assert len(shown) < count
    told = [number for each in shown for number in each["numbers"].split("-")]
    assert (told[0], told[-1]) == ("1", str(count))
    up = drawn["layer"][0]["encoding"]["y"]
    assert up["title"] == f"seconds to {GOAL}"
    assert all(each["time"] >= 1 for each in drawn["data"]["values"])
    _, first, *_ = drawn["title"]["subtitle"]
    assert first.startswith("1: ")
    across = _Axis.of([1.0, 100.0], 200)
    assert across.is_log
    assert across.place(10.0) == pytest.approx(100)


def test_a_capture_is_drawn(cli: Cli, tmp_path: Path) -> None:
    done = cli("flows", captured(tmp_path / "x.pcap"), "--plot", tmp_path / "x.svg")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x.svg").read_text().startswith("<svg")


def test_the_collectives_of_a_real_job_are_drawn(
    shared_data: Path, cli: Cli, tmp_path: Path
) -> None:
    captures = sorted((shared_data / "pcap" / "r4_mlp4_tso").glob("*.pcap"))
    done = cli("flows", *captures, "--plot", tmp_path / "x.png")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_plans_are_drawn(tmp_path: Path) -> None:
    result = fw.plan("llama3-8b", cluster="dgx-h100", nodes=2, global_batch=64)
    plot_plans(result, tmp_path / "plans.html")
    assert "best step" in (tmp_path / "plans.html").read_text()


@pytest.mark.parametrize("width", [420, 1100])
def test_a_chart_fits_its_window_and_its_labels_lie_beside_its_axis(
    chromium: Browser, tmp_path: Path, width: int
) -> None:
    found = fw.plan(
        "llama3-8b", cluster="dgx-h100", nodes=1, global_batch=64, bandwidth="25Gbps,100Gbps"
    )
    plot_plans(found, tmp_path / "plans.html")
    chromium.screen(width, 800)
    chromium.open(tmp_path / "plans.html")
    chromium.run(
        "new Promise((done) => { const look = () => document.querySelector('#chart svg') ? "
        "setTimeout(done, 1000) : setTimeout(look, 50); look(); })"
    )
    drawn, place = chromium.run(
        "(() => { const place = document.querySelector('#chart'), svg = place.querySelector('svg');"
        " return [svg.width.baseVal.value, place.clientWidth]; })()"
    )
    assert drawn <= place  # it was drawn for this window, and not made smaller as a whole
    first, legend, axis = chromium.run(
        "(() => { const texts = [...document.querySelectorAll('#chart text')], at = (words) =>"
        " texts.find((each) => each.textContent.startsWith(words)).getBoundingClientRect();"
        " const line = document.querySelector('.mark-line path').getBoundingClientRect();"
        " return [at('dp 8').left, at('dgx-h100,').right, line.left]; })()"
    )
    assert first > axis
    assert legend <= width
