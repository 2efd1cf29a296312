"""A job, or several, as one HTML page that asks for nothing outside itself.

`page.html`, `page.css` and `page.js` are the page; Python fills in the data as JSON and writes the
sentence where scripts are not run. Nothing in the data can become markup or code: as JSON it holds
no "<", the script puts it on the page as text only, and the page's own policy allows its one style
sheet and its one script and nothing else, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from fullwire.answers.opening import RunLike
from fullwire.errors import UsageError
from fullwire.findings.verdicts import drawn_parts
from fullwire.outputs import refuse_existing, written
from fullwire.report.page.contents import contents

MOST_RUNS = 6


def write_page(
    runs: RunLike | Sequence[RunLike],
    path: str | Path,
    *,
    baseline: RunLike | None = None,
    bandwidth: str | float | None = None,
    calibrate: Sequence[RunLike] = (),
    replace: bool = False,
) -> Path:
    """Explain runs on a page, each in a section and the later ones compared with the first.

    A file that exists is replaced only if `replace` is given.
    `baseline`, `bandwidth` and `calibrate` are those of `explain`, for all of the runs.
    """
    place = Path(path)
    many = [runs] if isinstance(runs, RunLike) else list(runs)
    if not 1 <= len(many) <= MOST_RUNS:
        raise UsageError(f"report: expected one run to {MOST_RUNS} on a page, got {len(many)}")
    check_page_path(place, replace)
    shown = contents(many, baseline=baseline, bandwidth=bandwidth, calibrate=calibrate)
    with written(place) as beside:
        beside.write_text(page(shown), encoding="utf-8")
    return place


def check_page_path(path: Path, replace: bool) -> None:
    """Refuse a page that cannot be written, before the work and not after it."""
    if path.suffix.lower() != ".html":
        raise UsageError(f"report: expected a file ending in .html, got {path}")
    refuse_existing(path, replace, "report")


def page(shown: dict[str, Any]) -> str:
    """Fill the page's data in."""
    style, script = _part_colours() + _file("page.css"), _file("page.js")
    sentences = "".join(f"<p>{html.escape(run['sentence'])}</p>" for run in shown["runs"])
    parts = {
        "policy": f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'",
        "title": html.escape(shown["title"]),
        "sentences": sentences,
        "style": style,
        "script": script,
        # "</script>" or "<!--" in a name would end the data early, so no "<" stays as it is.
        "data": msgspec.json.encode(shown).decode().replace("<", "\\u003c"),
    }
    # In one pass: what is filled in is never looked at for places to fill in.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _file("page.html"))


def _part_colours() -> str:
    """Return the colours of an account's parts as the style sheet names them."""
    drawn = {part: kind.colour for part, kind in drawn_parts().items() if kind.colour is not None}
    light = " ".join(f"--{part}: {colour.light};" for part, colour in drawn.items())
    dark = " ".join(f"--{part}: {colour.dark};" for part, colour in drawn.items())
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"


def _file(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
