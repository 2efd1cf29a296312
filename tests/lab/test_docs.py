"""The pages that measure: their commands run in the lab, and print what the pages show."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.making import blocks

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if blocks.session(page).measures],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_a_session_that_measures_goes_as_the_page_shows(
    page: Path, tmp_path: Path, namespaces: None
) -> None:
    pytest.importorskip("torch")
    blocks.workplace(tmp_path)
    for shown in blocks.session(page).commands:
        printed = blocks.printed_by(shown.command, tmp_path)
        assert blocks.differences(shown, printed) == [], f"{shown.command}\n{printed}"
