"""The page for everyone: screen readers, keyboard, links, saved copies, light and dark."""

from __future__ import annotations

import os
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from numpy.typing import NDArray

import fullwire as fw
from fullwire.run.run import Run
from fullwire.words import sentence
from tests.browser import Browser, pixels, png
from tests.jobs_by_hand import a_trained_job

SCREENS = {"phone": (360, 740), "print": (794, 1123)}  # A4 at 96 points an inch
PICTURES = Path(__file__).parents[1] / "data/pictures"
# axe-core is another project's program, so this repository does not hold it. CONTRIBUTING.md says
# how to get it.
AXE = Path(__file__).parents[2] / "build/axe/node_modules/axe-core/axe.min.js"
STEP = "document.querySelector('.tools select').selectedOptions[0].innerText"
ASKED = "document.querySelector('.rankname.asked')?.textContent"
CONTROLS = "button:not(:disabled), select, summary, input[type=range], [tabindex='0']"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def job() -> Run:
    return a_trained_job(ranks=8, late_ms=60)


@pytest.fixture
def page(job: Run, tmp_path: Path) -> Path:
    return fw.write_page(job, tmp_path / "report.html")


def colours(chromium: Browser, *, of: str) -> NDArray[np.uint8]:
    """Return the drawing in an element without its text: letters differ between machines."""
    chromium.run(
        "(() => { const sheet = new CSSStyleSheet(); sheet.replaceSync("
        "'* { color: transparent !important; caret-color: transparent } svg text { display: none }'"
        "); document.adoptedStyleSheets = [sheet]; })()"
    )
    picture = pixels(chromium.picture(of))
    chromium.run("document.adoptedStyleSheets = []")
    return picture


def test_the_top_says_the_verdict_how_sure_and_what_to_do(
    chromium: Browser, page: Path, job: Run
) -> None:
    chromium.open(page)
    found = fw.explain(job)
    top = chromium.run("document.querySelector('.answer').innerText").replace("\u202f", " ")
    best = f"{found.fixes[0].step_s * 1e3:.4g} ms"
    assert re.search(rf"What to do\s+.*: a step of {best}, \d+ % shorter\.", top, re.DOTALL)
    assert found.verdict.sureness is not None
    assert re.search(rf"How sure\s+{re.escape(sentence(found.verdict.sureness))}", top)
    place = "document.querySelector('.answer').getBoundingClientRect().bottom"
    assert chromium.run(place) < 500


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1100])
def test_axe_reports_nothing(chromium: Browser, page: Path, width: int, dark: bool) -> None:
    if not AXE.exists():
        pytest.skip(f"axe-core is not here: npm install --prefix {AXE.parents[2]} axe-core")
    chromium.screen(width, 900, dark=dark)
    chromium.open(page)
    chromium.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    chromium.run(AXE.read_text() + "; null")
    found = chromium.run(
        "axe.run(document).then(({ violations }) => violations.flatMap(({ id, nodes }) =>"
        " nodes.slice(0, 3).map((each) => `${id}: ${each.target} ${each.failureSummary}`)))"
    )
    assert found == []


def test_every_control_is_reached_by_tab_and_says_what_it_is(chromium: Browser, page: Path) -> None:
    chromium.open(page)
    chromium.run(f"window.controls = [...document.querySelectorAll({CONTROLS!r})]")
    wanted = chromium.run("controls.filter((each) => each.checkVisibility()).length")
    names = []
    for _ in range(wanted + 12):  # a group of choices is one stop
        chromium.press("Tab")
        names.append(
            chromium.run(
                "(() => { const on = document.activeElement; on.seen = true; return on.ariaLabel"
                " || on.innerText || on.labels?.[0]?.innerText || on.outerHTML; })()"
            )
        )
    assert not [name for name in names if not name.strip() or name.startswith("<")]
    left_out = "controls.filter((each) => each.checkVisibility() && !each.seen).length"
    assert chromium.run(left_out) == 0


def test_an_address_leads_to_a_step_and_a_rank(chromium: Browser, page: Path) -> None:
    chromium.open(page, "#run0-step2-rank7")
    assert chromium.run(STEP).startswith("step 2")
    assert chromium.run(ASKED) == "rank 7"
    top = "document.querySelector('.stage').closest('section').getBoundingClientRect().top"
    assert abs(chromium.run(top)) < 200
    chromium.run("location.hash = '#run0-step4'")
    chromium.run("new Promise((done) => setTimeout(done, 100))")
    assert chromium.run(STEP).startswith("step 4")
    chromium.open(page, "#run0-step999-rank1")
    assert "this is the nearest" in chromium.run("document.querySelector('.said').innerText")
    for odd in ("#run9-step1", "#run0-step<b>", "#run0-step" + "9" * 400, "#%00"):
        chromium.open(page, odd)
        assert chromium.run("document.querySelectorAll('.stage svg').length") == 1
    assert chromium.complaints() == []


def test_the_address_follows_what_is_looked_at(chromium: Browser, page: Path) -> None:
    chromium.open(page)
    assert chromium.run("location.hash") == ""
    chromium.run("document.querySelector('[aria-label=\"next step\"]').click()")
    step = re.search(r"\d+", chromium.run(STEP))
    assert step is not None
    assert chromium.run("location.hash") == f"#run0-step{step[0]}"
    chromium.run("document.querySelector('[aria-label=\"next ranks\"]').click()")
    assert chromium.run("location.hash") == f"#run0-step{step[0]}-rank6"
    chromium.open(page, chromium.run("location.hash"))
    assert chromium.run(ASKED) == "rank 6"


def test_a_figure_is_taken_along_as_svg_that_stands_alone(
    chromium: Browser, page: Path, job: Run
) -> None:
    chromium.open(page)
    names = chromium.run(
        "[...document.querySelectorAll('.takeaway button:first-child')].map((e) => e.ariaLabel)"
    )
    assert {"Save SVG: account", "Save SVG: what if", "Save SVG: timeline"} <= set(names)
    chromium.run(
        "(() => { window.saved = []; HTMLAnchorElement.prototype.click = function () {"
        " saved.push([this.download, decodeURIComponent(this.href.split(',')[1])]); }; })()"
    )
    chromium.run(
        "document.querySelectorAll('.takeaway button:first-child').forEach((e) => e.click())"
    )
    saved = dict(chromium.run("saved"))
    assert len(saved) == len(names)
    for text in saved.values():
        picture = ElementTree.fromstring(text)
        assert picture.tag == f"{SVG}svg"
        assert "var(" not in text
        assert not {"class", "style"} & {name for part in picture.iter() for name in part.attrib}
    parts = [time_s for time_s in fw.explain(job).account.values() if time_s > 0]
    _, *bars = ElementTree.fromstring(saved["account.svg"]).iter(f"{SVG}rect")  # after the paper
    assert len(bars) == len(parts)
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert widths == pytest.approx([360 * s / sum(parts) for s in parts], abs=0.6)
    assert len({bar.attrib["fill"] for bar in bars}) == len(bars)


def test_dark_and_light_show_the_same(chromium: Browser, page: Path) -> None:
    """Compare pictures of one machine, so that letters are the same: drawn and empty points."""
    shown = []
    for dark in (False, True):
        chromium.screen(1100, 900, dark=dark)
        chromium.open(page)
        picture = pixels(chromium.picture()).astype(int)
        shown.append(np.abs(picture - picture[2, 2]).sum(axis=2) > 60)
    light, dark_ = shown
    assert light.shape == dark_.shape
    assert (light != dark_).mean() < 0.05
    assert 0.02 < light.mean() < 0.6


@pytest.mark.parametrize("way", ["light", "dark", "phone", "phone-dark", "print"])
@pytest.mark.parametrize(("name", "place"), [("account", ".fall"), ("timeline", ".stage")])
def test_a_picture_is_the_one_that_was_looked_at(
    chromium: Browser, tmp_path: Path, name: str, place: str, way: str
) -> None:
    """Compare with stored pictures, in blocks and without text, which depends on fonts."""
    width, height = SCREENS.get(way.removesuffix("-dark"), (1100, 900))
    chromium.screen(width, height, dark=way.endswith("dark"))
    chromium.open(fw.write_page(a_trained_job(late_ms=60), tmp_path / "report.html"))
    if way == "print":
        chromium.ask("Emulation.setEmulatedMedia", media="print")
        chromium.settle()
    blocks = in_blocks(colours(chromium, of=place))
    chromium.ask("Emulation.setEmulatedMedia", media="")
    kept = PICTURES / f"page-{name}-{way}.png"
    if os.environ.get("KEEP_PICTURES"):  # look at the pictures before you commit them
        kept.write_bytes(png(blocks))
    wanted = pixels(kept.read_bytes())
    assert blocks.shape == wanted.shape
    off = np.abs(blocks.astype(int) - wanted.astype(int))
    assert off.mean() < 4
    assert (off.max(axis=2) > 60).mean() < 0.03


def in_blocks(picture: NDArray[np.uint8], wide: int = 96, high: int = 32) -> NDArray[np.uint8]:
    """Return a small picture: each of its points is the mean of a block, so thin lines count."""
    rows = np.linspace(0, len(picture), high + 1).astype(int)
    columns = np.linspace(0, picture.shape[1], wide + 1).astype(int)
    sums = np.add.reduceat(picture.astype(float), rows[:-1], axis=0)
    sums = np.add.reduceat(sums, columns[:-1], axis=1)
    area = np.outer(np.diff(rows), np.diff(columns))[..., None]
    blocks: NDArray[np.uint8] = (sums / area).round().astype(np.uint8)
    return blocks
