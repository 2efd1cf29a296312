"""A browser for the tests of the page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.browser import Browser, browser


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    programs = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, programs)), None)
    if found is None:
        pytest.skip(f"no browser is here: expected {', '.join(programs)} on the PATH")
    with browser(found, tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def chromium(shared: Browser) -> Browser:
    # The last test's page may still complain, so it has to go before its events do.
    shared.leave()
    shared.events.clear()
    shared.screen(1100, 900)
    return shared
