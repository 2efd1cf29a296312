"""The mkdocs hook: generated pages, tables of results, and pages that lie outside docs/."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from mkdocs.config.defaults import MkDocsConfig  # noqa: E402  # the hook makes its own path
from mkdocs.structure.files import File, Files  # noqa: E402

from docs.making import diagrams, notebook, reference, validation  # noqa: E402

OUTSIDE = {  # pages of the site that lie at the root of the repository
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "conduct.md": "CODE_OF_CONDUCT.md",
    "changelog.md": "CHANGELOG.md",
    "design/architecture.md": "ARCHITECTURE.md",
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Show the design records in the folder as pages of their part of the site."""
    for entry in config.nav or []:
        if isinstance(entry, dict) and "Design" in entry:
            entry["Design"] = [
                "design/architecture.md",
                *(f"design/{page.name}" for page in sorted((ROOT / "docs/design").glob("*.md"))),
            ]
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    made = {
        **reference.pages(),
        "notebook.md": notebook.page(),
        **{name: moved(source, name) for name, source in OUTSIDE.items()},
    }
    for name, content in made.items():
        if written := files.get_file_from_path(name):  # a page that the code completes
            files.remove(written)
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put results and pictures into the places that a page marks."""
    markdown = validation.with_results(markdown)
    for mark, picture in PICTURES.items():
        if mark in markdown:
            markdown = markdown.replace(mark, picture())
    return markdown


def rooms() -> str:
    """Draw the rooms of the package by the table of the structure test."""
    from tests.unit.test_structure import LEVELS

    return diagrams.rooms(LEVELS)


def account() -> str:
    """Draw the parts of the account with their names."""
    from fullwire.report.explanation import part_labels

    return diagrams.account(list(part_labels().items()))


PICTURES = {"<!-- picture of rooms -->": rooms, "<!-- picture of the account -->": account}


def moved(source: str, name: str) -> str:
    """Return a page of the root, its links changed to its place on the site."""
    up = "../" * name.count("/")

    def relink(match: re.Match[str]) -> str:
        mark, words, target = match.groups()
        path, hash_, anchor = target.partition("#")
        placed = {outside: page for page, outside in OUTSIDE.items()}.get(path)
        if path.startswith("docs/"):
            placed = path.removeprefix("docs/")
        if placed is None and path == "validation/README.md":
            placed = "validation/index.md"
        if placed is None:  # a file of the repository that is not on the site
            return words
        return f"{mark}[{words}]({up}{placed}{hash_}{anchor})"

    return _LINK.sub(relink, (ROOT / source).read_text())
