"""The pages that measure: their commands run in the lab, and print what the pages show."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest

from docs.making import blocks

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(scope="module")
def printed_by(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Run a command in the folder of all pages; what several of them show is measured once."""
    folder = tmp_path_factory.mktemp("pages")
    blocks.workplace(folder)
    return cache(partial(blocks.printed_by, folder=folder))


@pytest.mark.alone
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if blocks.session(page).measures],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_a_session_that_measures_goes_as_the_page_shows(
    page: Path, printed_by: Callable[[str], str], namespaces: None
) -> None:
    pytest.importorskip("torch")
    for shown in blocks.session(page).commands:
        printed = printed_by(shown.command)
        assert blocks.differences(shown, printed) == [], f"{shown.command}\n{printed}"
