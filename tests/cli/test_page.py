"""The page of a job: its content, in a real browser if one is installed."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fullwire as fw
from fullwire.answers.search import explorer
from fullwire.answers.trials import Trial, Tuning
from fullwire.errors import UsageError
from fullwire.findings.tuning import Faster
from fullwire.findings.verdicts import drawn_parts
from fullwire.fixes.fix import HostWork
from fullwire.report.page import contents, page, write_page
from fullwire.report.recording import recording_lines
from fullwire.run.facts import Facts
from fullwire.run.gaps import Gap
from fullwire.run.run import Provenance, Run, Spans
from fullwire.timeline.lanes import drawing
from fullwire.timeline.timeline import Doing
from tests.browser import Browser
from tests.conftest import Cli
from tests.jobs_by_hand import Rank, a_job, a_trained_job
from tests.trained_jobs import a_trained_job as a_job_of_known_transport
from tests.trained_jobs import a_transport, with_long_steps
from tests.unit.test_observed_goodput import in_a_course

EVIL = (
    "</script><script>window.broken=1</script><!-- <img src=http://127.0.0.1:9/x onerror=broken=2>"
    "\"'`{{data}} \u202e\u05e9\u05dc\u05d5\u05dd \x1b[31m " + "A" * 10_000
)
SCALING = r"scaling factor (\d\.\d+)"


def test_each_part_and_each_activity_has_a_colour_on_screen_and_on_paper_and_words() -> None:
    place = Path(fw.__file__).parent / "report" / "page"
    style, script = (place / "page.css").read_text(), (place / "page.js").read_text()
    words = re.search(r"DOING_WORDS = {(.*?)}", script, re.DOTALL)
    assert words is not None
    for doing in Doing:
        assert re.search(rf"\b{doing.name.lower()}: ", words[1]), doing
        assert f"svg .{doing.name.lower()}" in style, doing
    on_paper = style.partition("@media print")[2]
    for part in drawn_parts():
        assert f"--{part}: #" in on_paper, part


@pytest.fixture
def job() -> Run:
    return a_trained_job(late_ms=60)


def written(run: Run | list[Run], place: Path) -> Path:
    return write_page(run, place / "report.html", replace=True)


def hostile(run: Run) -> Run:
    names = np.array([n if n in ("step", "backward") else EVIL for n in run.spans.name], object)
    return dataclasses.replace(
        run,
        provenance=Provenance(origin="measured", source=EVIL),
        facts=run.facts | Facts(model=EVIL, warnings=EVIL),
        gaps=(Gap(EVIL),),
        spans=dataclasses.replace(run.spans, name=names),
    )


def test_the_page_is_drawn_without_a_complaint_or_a_request(
    chromium: Browser, job: Run, tmp_path: Path
) -> None:
    place = written(job, tmp_path)
    chromium.open(place)
    assert chromium.run("document.querySelector('h1').innerText") == (
        fw.explain(job).verdict.sentence
    )
    assert chromium.run("document.querySelectorAll('svg .transfer').length") > 0
    assert chromium.run("document.querySelectorAll('svg .hatchback').length") > 0
    assert chromium.complaints() == []
    assert chromium.requests() == [place.as_uri()]


def test_the_waterfall_is_the_account(chromium: Browser, job: Run, tmp_path: Path) -> None:
    chromium.open(written(job, tmp_path))
    pieces = chromium.run(
        "[...document.querySelectorAll('.fall li:not(.sum) i')]"
        ".map((each) => [parseFloat(each.style.left), parseFloat(each.style.width)])"
    )
    found = fw.explain(job)
    shares = [100 * s / found.step_s for s in found.account.values() if s > 0]
    assert [width for _, width in pieces] == pytest.approx(shares, rel=1e-4)
    assert [left for left, _ in pieces] == pytest.approx(np.cumsum([0, *shares[:-1]]), abs=1e-3)
    blamed = chromium.run("document.querySelector('.fall .blamed .name').innerText")
    assert blamed.startswith("straggler")


def test_what_would_help_is_held_against_the_step_that_it_is_predicted_from(
    chromium: Browser, tmp_path: Path
) -> None:
    even = a_job_of_known_transport(a_transport(), steps=20)
    figures = "document.querySelector('dl.answer').innerText"
    for job in (even, with_long_steps(even, every=5, longer_ms=300)):
        chromium.open(written(job, tmp_path))
        assert "that are replayed" not in chromium.run(figures)
        assert "mean of the middle half" in chromium.run("document.body.innerText")
    assert chromium.complaints() == []


def test_sliders_move_the_curve_to_what_is_predicted(
    chromium: Browser, job: Run, tmp_path: Path
) -> None:
    chromium.open(written(job, tmp_path))
    before = chromium.run("document.querySelector('.curve').getAttribute('d')")
    chromium.run("document.querySelector('[data-axis=workers]').focus()")
    chromium.press("End")
    after = chromium.run("document.querySelector('.curve').getAttribute('d')")
    assert before != after
    chromium.run("document.querySelector('[data-axis=bandwidth]').focus()")
    chromium.press("ArrowRight", "ArrowRight")
    chromium.run("document.querySelector('[data-axis=compression]').focus()")
    chromium.press("ArrowRight")
    shown = chromium.run("document.querySelector('.readout').innerText")
    assert "2 Gbps" in shown.replace("\u202f", " ")
    assert "1,024 workers, 2x compression which costs nothing" in shown
    asked = fw.whatif(job, workers=1024, bandwidth="2Gbps", compression=2, transport="measured")
    predicted = fw.explain(job).predicted_from_s / asked["step_s"][0]
    [printed] = re.findall(SCALING, shown)
    assert float(printed) == pytest.approx(predicted, abs=6e-4)
    assert chromium.complaints() == []


def test_the_curve_can_be_drawn_along_workers_and_for_another_transport(
    chromium: Browser, job: Run, tmp_path: Path
) -> None:
    chromium.open(written(job, tmp_path))
    labels: list[str] = []
    for group, number in ((2, 1), (1, 2)):
        chromium.run(
            f"document.querySelectorAll('fieldset')[{group}].querySelectorAll('input')[{number}]"
            ".click()"
        )
        labels.append(chromium.run("document.querySelector('.explorer').ariaLabel"))
    assert "against workers" in labels[0]
    assert labels[0] != labels[1]
    assert "every bit of the line rate" in chromium.run(
        "document.querySelector('.readout').innerText"
    )


def test_packing_costs_what_it_is_said_to_cost(chromium: Browser, job: Run, tmp_path: Path) -> None:
    chromium.open(written(job, tmp_path))
    chromium.run("document.querySelector('[data-axis=compression]').focus()")
    chromium.press("ArrowRight")
    shown = []
    for number in (0, 2):
        chromium.run(
            f"document.querySelectorAll('fieldset')[0].querySelectorAll('input')[{number}].click()"
        )
        shown.append(chromium.run("document.querySelector('.readout').innerText"))
    factors = [float(re.findall(SCALING, each)[0]) for each in shown]
    assert factors[1] < factors[0]
    assert "packed at 1 GB/s, unpacked at 1 GB/s" in shown[1].replace("\u202f", " ")


def test_going_from_bar_to_bar_moves_the_view_along(
    chromium: Browser, job: Run, tmp_path: Path
) -> None:
    chromium.open(written(job, tmp_path))
    frame = "new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)))"
    chromium.run("document.querySelector('.stage').focus()")
    chromium.press(*"++++++", "p", *"nnn")  # close to the middle, then to bars elsewhere
    chromium.run(frame)
    chosen = chromium.run(
        "(() => { const [bar, all] = ['.stage .chosen', '.stage svg'].map((each) =>"
        " document.querySelector(each).getBoundingClientRect());"
        " return [bar.right > all.left, bar.left < all.right]; })()"
    )
    assert chosen == [True, True]
    first = chromium.run("document.querySelector('.said').innerText")
    chromium.press("n")
    assert chromium.run("document.querySelector('.said').innerText") != first


def test_on_paper_charts_are_drawn_for_the_width_of_paper(
    chromium: Browser, job: Run, tmp_path: Path
) -> None:
    chromium.open(written(job, tmp_path))
    size = "document.querySelector('svg.explorer').getAttribute('viewBox')"
    before = chromium.run(size)
    chromium.run("dispatchEvent(new Event('beforeprint'))")
    assert chromium.run(size) == "0 0 680 240"
    chromium.run("dispatchEvent(new Event('afterprint'))")
    assert chromium.run(size) == before


def test_the_timeline_is_zoomed_and_read_by_keyboard(
    chromium: Browser, job: Run, tmp_path: Path
) -> None:
    chromium.open(written(job, tmp_path))
    frame = "new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)))"
    widest = "Math.max(...[...document.querySelectorAll('.stage .compute')].map((e) => +e.getAttribute('width')))"  # noqa: E501
    chromium.run("document.querySelector('.stage').focus()")
    before = chromium.run(widest)
    chromium.press("+", "ArrowLeft")
    chromium.run(frame)
    assert chromium.run(widest) == pytest.approx(1.6 * before, rel=0.05)
    chromium.press("0")
    chromium.run(frame)
    assert chromium.run(widest) == pytest.approx(before)
    chromium.press("n")
    assert chromium.run("document.querySelector('.said').innerText").startswith("forward · rank 0")
    chromium.run("document.querySelector('[aria-label=\"next step\"]').click()")
    number = chromium.run("document.querySelector('.tools select').selectedOptions[0].innerText")
    assert number.startswith("step 2")


def test_the_workers_of_an_elastic_job_are_drawn_over_time(
    chromium: Browser, job: Run, tmp_path: Path
) -> None:
    chromium.open(written(job, tmp_path))
    assert "Workers over time" not in chromium.run("document.body.innerText")
    chromium.open(written(dataclasses.replace(job, events=in_a_course()), tmp_path))
    assert "Workers over time" in chromium.run("document.body.innerText")
    for kind, count in (("member", 5), ("fault", 1), ("kept", 1)):
        assert chromium.run(f"document.querySelectorAll('svg .{kind}').length") == count
    titles = chromium.run(
        "[...document.querySelectorAll('svg .member title')].map((e) => e.textContent)"
    )
    assert titles[1].endswith("2\u202fs to 21\u202fs")
    assert chromium.complaints() == []


def test_names_from_hostile_traces_are_text(chromium: Browser, job: Run, tmp_path: Path) -> None:
    place = written(hostile(job), tmp_path)
    chromium.open(place)
    assert chromium.run("window.broken") is None
    assert chromium.run("[document.scripts.length, document.images.length]") == [2, 0]
    assert chromium.run("document.querySelector('.names').innerText").startswith(
        "</script><script>"
    )
    assert "\\u202e" in chromium.run("document.body.innerText")
    assert chromium.run("document.documentElement.scrollWidth <= innerWidth")
    assert chromium.complaints() == []
    assert chromium.requests() == [place.as_uri()]


def test_the_pages_policy_runs_no_other_script_and_asks_for_nothing(
    chromium: Browser, job: Run, tmp_path: Path
) -> None:
    place = written(job, tmp_path)
    chromium.open(place)
    chromium.run(
        "(() => { const other = document.createElement('script');"
        "other.textContent = 'window.broken = 1'; document.body.append(other); })()"
    )
    assert chromium.run("window.broken") is None
    asked = "fetch('http://127.0.0.1:9/').then(() => 'asked', () => 'refused')"
    assert chromium.run(asked) == "refused"
    assert any("Content Security Policy" in each for each in chromium.complaints())


@pytest.mark.parametrize("width", [360, 700, 1100])
def test_the_page_fits_its_screen(chromium: Browser, job: Run, tmp_path: Path, width: int) -> None:
    chromium.screen(width, 740)
    chromium.open(written(job, tmp_path))
    assert chromium.run("[document.documentElement.scrollWidth, innerWidth]") == [width, width]


@pytest.mark.parametrize("width", [360, 420, 500, 1100])
def test_shares_and_steps_are_shown_to_their_end(
    chromium: Browser, tmp_path: Path, width: int
) -> None:
    chromium.screen(width, 740)
    chromium.open(
        written(with_long_steps(a_trained_job(late_ms=60), every=5, longer_ms=400), tmp_path)
    )
    beyond = "Math.max(...[...document.querySelectorAll('.fall .number')].map(each => %s))"
    assert chromium.run(beyond % "each.scrollWidth - each.clientWidth") <= 0
    # The list of steps is as wide as its widest choice needs to be.
    assert chromium.run(
        "(() => { const list = document.querySelector('.tools select');"
        " const copy = list.cloneNode(true);"
        " copy.style.cssText = 'position: absolute; max-width: none; flex: none';"
        " list.parentNode.append(copy); const wide = copy.offsetWidth; copy.remove();"
        " return list.offsetWidth >= wide; })()"
    )


@pytest.mark.parametrize(("late_ms", "said"), [(60, "mean of the middle half of"), (0, "mean of")])
def test_the_page_says_of_which_steps_a_step_is_the_mean_as_the_command_does(
    tmp_path: Path, cli: Cli, late_ms: float, said: str
) -> None:
    run = a_trained_job(late_ms=late_ms)
    if not late_ms:  # of three steps, none is unusual
        spans = run.spans
        run = dataclasses.replace(run, spans=spans.rows(spans.step < spans.step.min() + 3))
    (found,) = contents([run])["runs"]
    assert found["of_which_steps"].startswith(said)
    fw.write(run, tmp_path / "a.run")
    printed = " ".join(cli("explain", tmp_path / "a.run").stdout.split())
    assert f"({found['of_which_steps']})" in printed
    # The summary at the end of a recording has the same rule.
    is_of_all = "mean of all" in found["of_which_steps"]
    summary = " ".join(recording_lines(tmp_path / "a.run"))
    assert ("(mean of all" if is_of_all else "(mean of the middle half") in summary


def test_the_page_is_dark_where_that_is_wanted_and_light_on_paper(
    chromium: Browser, job: Run, tmp_path: Path
) -> None:
    place = written(job, tmp_path)
    colour = "getComputedStyle(document.body).backgroundColor"
    chromium.screen(1100, 900, dark=True)
    chromium.open(place)
    assert chromium.run(colour) == "rgb(20, 23, 26)"
    chromium.ask("Emulation.setEmulatedMedia", media="print")
    assert chromium.run(colour) == "rgb(255, 255, 255)"
    controls = "getComputedStyle(document.querySelector('.controls')).display"
    assert chromium.run(controls) == "none"
    chromium.ask("Emulation.setEmulatedMedia", media="")
    chromium.run("dispatchEvent(new Event('beforeprint'))")
    assert chromium.run("document.querySelectorAll('details:not([open])').length") == 0
    chromium.run("dispatchEvent(new Event('afterprint'))")
    assert chromium.run("document.querySelectorAll('details[open]').length") == 0


def test_several_runs_have_a_section_each_and_a_comparison(
    chromium: Browser, job: Run, tmp_path: Path
) -> None:
    chromium.open(written([job, a_trained_job()], tmp_path))
    assert chromium.run("document.querySelectorAll('article').length") == 2
    assert "1.41x faster" in chromium.run("document.body.innerText")
    assert chromium.complaints() == []


def test_a_tuning_stands_before_its_recordings(chromium: Browser, job: Run, tmp_path: Path) -> None:
    tuning = Tuning(
        before_s=0.1,
        before_interval=(0.09, 0.11),
        after_s=0.081,
        after_interval=None,
        is_significant=True,
        trials=(
            Trial(
                fix="buckets",
                setting="25",
                risk="exact",
                words=EVIL[:100],
                from_s=0.1,
                predicted_s=0.08,
                low_s=0.07,
                high_s=0.09,
                measured_s=0.081,
                kept=True,
                outcome=Faster(times=1.23),
                loss_difference=None,
            ),
        ),
        riskier=None,
        host_work=(HostWork(call=".item()", place="train.py:8", step_s=0.01),),
        wrote=(),
        recipe=Path("tuned/recipe.toml"),
        recordings=(),
        command="python train.py",
        took_s=60.0,
    )
    chromium.open(write_page([job, job], tmp_path / "report.html", tuning=tuning))
    told = chromium.run("document.querySelector('section.part').innerText")
    told = told.replace("\u202f", " ")
    assert "100 ms a step before (90 ms to 110 ms), 81 ms after: 1.23x, with 1 of 1 fix" in told
    assert "kept: 1.23x" in told
    assert ".item() takes 10 ms of each step, at train.py:8" in told
    assert chromium.run("window.broken") is None
    assert chromium.complaints() == []


def test_a_job_that_cannot_be_predicted_says_why_in_that_place() -> None:
    no_gradients = a_job(Rank(10, [("compute", "work", 0, 9)], [(1000, 9, 10)]), workers=2)
    [shown] = contents([no_gradients])["runs"]
    assert "backward" in shown["explorer"]["missing"]


def test_one_worker_can_be_explored_without_a_point_as_recorded() -> None:
    [shown] = contents(["resnet50@v100"])["runs"]
    assert shown["explorer"]["recorded"] is None
    assert [each["name"] for each in shown["explorer"]["transports"]] == ["headers", "full"]


def test_the_explorer_is_what_whatif_says(job: Run) -> None:
    found = explorer(job, fw.explain(job).predictor, 0.1)
    asked = fw.whatif(
        job,
        workers=found.workers,
        bandwidth=found.bandwidth_bps,
        compression=found.ratios,
        transport="measured",
    )
    free = found.step_s[0, :, :, 0], found.half_s[0, :, :, 0]
    assert free[0].reshape(-1) == pytest.approx(asked["step_s"], rel=1e-12)
    low_s, high_s = asked.interval_s
    assert free[1].reshape(-1) == pytest.approx((high_s - low_s) / 2, rel=1e-9)
    costly = fw.whatif(
        job, workers=8, bandwidth="1Gbps", codec="10,1GB/s,10GB/s,gather", transport="measured"
    )
    place = (0, found.workers.index(8), found.bandwidth_bps.index(1e9), 3, found.ratios.index(10))
    assert found.step_s[place] == pytest.approx(costly["step_s"][0], rel=1e-12)


def test_the_data_holds_nothing_that_could_be_markup(job: Run) -> None:
    text = page(contents([hostile(job)]))
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert "<" not in data
    assert json.loads(data)["runs"][0]["subtitle"][0].startswith("</script>")
    assert "<script>window" not in text.replace(data, "")


def test_a_long_job_is_a_small_page_soon(tmp_path: Path) -> None:
    run = a_trained_job(ranks=8, steps=1000, buckets=20)
    began_s = time.process_time()
    place = written(run, tmp_path)
    assert time.process_time() - began_s < 5
    assert place.stat().st_size < 0.6e6


def test_the_page_of_eight_profiled_ranks_is_below_1_mb(tmp_path: Path) -> None:
    run, kernels = a_trained_job(ranks=8, steps=100, buckets=300), 300
    marks = run.spans.rows(run.spans.lane == "host")
    number = np.arange(kernels * len(marks))
    begin_ns = np.repeat(marks.start_ns, kernels) + number % kernels * 300_017
    many = Spans(  # as a profiler tells them, no two of one length
        rank=np.repeat(marks.rank, kernels),
        step=np.repeat(marks.step, kernels),
        lane=np.full(len(number), "compute", object),
        name=np.array([f"kernel {each % 97}" for each in number], object),
        start_ns=begin_ns,
        end_ns=begin_ns + 100_003 + number * 7919 % 190_001,
    )
    run = dataclasses.replace(run, spans=Spans.joined([run.spans, many]))
    assert written(run, tmp_path).stat().st_size < 1e6
    [shown] = contents([run])["runs"]
    words = [step["word"] for step in shown["timeline"]["steps"]]
    assert {"typical", "first", "slowest"} <= set(", ".join(words).split(", "))
    assert shown["timeline"]["steps_left_out"] == 100 - len(words)


def test_the_timeline_on_the_page_is_that_of_the_run(
    chromium: Browser, job: Run, tmp_path: Path
) -> None:
    chromium.open(written(job, tmp_path))
    drawn = drawing(job, fw.explain(job).detail)
    typical = next(step for step in drawn.steps if "typical" in step.word)
    bars = typical.ranks[0].lanes["communication"]
    said = []
    for _ in range(3 + len(bars)):  # three of compute come first
        chromium.run("document.querySelector('.stage').focus()")
        chromium.press("n")
        said.append(chromium.run("document.querySelector('.said').innerText"))
    shown = [text.replace("\u202f", " ") for text in said if "network" in text]
    for text, start_ns, end_ns in zip(
        shown, bars.start_ns.tolist(), bars.end_ns.tolist(), strict=True
    ):
        assert f"from {start_ns / 1e6:.4g} ms to {end_ns / 1e6:.4g} ms" in text


def test_the_command_writes_the_page_and_refuses_in_one_line(
    cli: Cli, job: Run, tmp_path: Path
) -> None:
    run = fw.write(job, tmp_path / "job.run")
    done = cli("report", run, "-o", tmp_path / "report.html")
    assert (done.returncode, done.stdout) == (0, "")
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")
    for arguments, words in (
        ((run, "-o", tmp_path / "report.pdf"), "ending in .html"),
        ((run, "-o", tmp_path / "no" / "report.html"), "there is no directory"),
        ((*[run] * 7, "-o", tmp_path / "report.html"), "one run to 6 on a page, got 7"),
    ):
        refused = cli("report", *arguments)
        assert refused.returncode == 2
        assert words in refused.stderr
        assert refused.stderr.count("\n") == 1


def test_a_page_that_cannot_be_written_leaves_nothing(job: Run, tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(UsageError, match="is a directory"):
        written(job, tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]


def test_the_prediction_without_a_straggler_is_as_sure_as_the_others(job: Run) -> None:
    fixes: dict[str, Any] = {fix.kind: fix for fix in fw.explain(job).fixes}
    assert fixes["straggler"].low_s > 0.9 * fixes["straggler"].step_s
