"""The documentation runs: blocks, options, links, figures and the site itself."""

from __future__ import annotations

import functools
import json
import os
import re
import resource
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from docs.making import blocks, figures, notebook, validation
from fullwire.cli.app import app_of
from fullwire.run.store import write
from tests.conftest import Cli
from tests.jobs_by_hand import a_trained_job
from validation import results

ROOT = Path(__file__).resolve().parents[2]
AT_THE_ROOT = [
    ROOT / name
    for name in (
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "CODE_OF_CONDUCT.md",
        "CHANGELOG.md",
        "validation/README.md",
    )
]
PAGES = [*AT_THE_ROOT, *sorted((ROOT / "docs").rglob("*.md"))]
SITE_LIMIT_S = 60.0


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def code(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def computed(page: Path) -> list[blocks.Shown]:
    """The commands whose output is the same everywhere; tests/lab runs the measuring ones."""
    return [each for each in blocks.session(page).commands if not each.measures]


@pytest.mark.parametrize("page", [page for page in PAGES if computed(page)], ids=name_of)
def test_a_console_block_shows_the_output_of_its_command(page: Path, tmp_path: Path) -> None:
    blocks.workplace(tmp_path)
    for shown in computed(page):
        printed = blocks.printed_by(shown.command, tmp_path)
        assert blocks.differences(shown, printed) == [], f"{shown.command}\n{printed}"


def test_measured_numbers_may_differ_and_words_may_not() -> None:
    shown = blocks.Shown(
        command="fullwire explain x.run", output="12.5 ms of 20 ms (62%)\n...\n2 ranks\n", page=ROOT
    )
    assert blocks.differences(shown, "13 ms of 1.2 s (9%)\nmore\n2 ranks\n") == []
    assert blocks.differences(shown, "13 ms of 1.2 s (9%)\nmore\n3 ranks\n") == ["2 ranks"]


def test_a_range_may_end_at_a_whole_number() -> None:
    row = "links of 2.5 Gbps  115.9 ms (103.4-127.5)  8.9x\n"
    shown = blocks.Shown(command="fullwire explain x.run", output=row, page=ROOT)
    for ends in ("103.8-128", "104-127.5", "104-128"):
        assert blocks.differences(shown, row.replace("103.4-127.5", ends)) == []
    ranks = blocks.Shown(command="fullwire explain x.run", output="ranks (0-3)\n", page=ROOT)
    assert blocks.differences(ranks, "ranks (0-7)\n") == ["ranks (0-3)"]


def test_computed_numbers_may_not_differ() -> None:
    shown = blocks.Shown(command="fullwire whatif vgg16@v100", output="12.5 ms\n", page=ROOT)
    assert blocks.differences(shown, "12.6 ms\n") == ["12.5 ms"]


def test_the_readme_is_a_front_door() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) <= 150


def test_the_figures_of_the_readme_are_those_of_the_results() -> None:
    readme = (ROOT / "README.md").read_text()
    assert figures.with_figures(readme) == readme, "run: python -m docs.making.figures"


def test_the_notebook_shows_what_its_cells_show_today() -> None:
    pytest.importorskip("pandas", reason="the notebook makes data frames: pip install pandas")
    kept = [cell for cell in notebook.cells() if cell["cell_type"] == "code"]
    ran = 0
    for cell, (code, shown) in zip(kept, notebook.outputs(), strict=True):
        assert [set(output.get("data", ())) for output in shown] == [
            set(output.get("data", ())) for output in cell["outputs"]
        ]
        if notebook.OF_OTHERS not in code:
            assert shown == cell["outputs"], "run: python -m docs.making.notebook"
        ran += 1
    assert ran > 5


@pytest.mark.parametrize("name", ["README.md", "docs/guides/predict.md"])
def test_a_python_block_runs(name: str, tmp_path: Path) -> None:
    [block] = code(ROOT / name, "python")
    done = subprocess.run(
        [sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert 0.99 < float(done.stdout) <= 1


@pytest.mark.parametrize(
    "name", ["docs/explanation/plan-memory.md", "docs/explanation/operations.md"]
)
def test_a_python_block_prints_what_its_comments_say(name: str, tmp_path: Path) -> None:
    [block] = code(ROOT / name, "python")
    done = subprocess.run(
        [sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == re.findall(r"^print.*  # (.*)$", block, re.MULTILINE)


def test_other_tools_are_told_columns_that_a_run_has(tmp_path: Path) -> None:
    # pandas and DuckDB are not installed here; the names that the blocks use are checked instead.
    write(a_trained_job(), tmp_path / "job.run")
    foreign = code(ROOT / "docs/guides/record.md", "python")
    assert ["pandas" in block or "duckdb" in block for block in foreign] == [True, True]
    for block in foreign:
        [table] = re.findall(r"\.run/(\w+)\.parquet", block)
        columns = pq.read_schema(tmp_path / f"job.run/{table}.parquet").names
        named = re.findall(r"SELECT (\w+)|sum\((\w+)\)|\)\.(\w+)\.", block)
        assert named
        assert {name for names in named for name in names if name} <= set(columns)


def test_every_command_of_the_pages_exists_with_its_options(cli: Cli) -> None:
    commands = {command.name for command in app_of().registered_commands}
    groups = {group.name for group in app_of().registered_groups}
    help_of = functools.cache(lambda *path: cli(*path, "--help").stdout)
    for page in PAGES:
        text = page.read_text()
        lines = re.findall(r"`fullwire ([^`\n]+)`", text)
        lines += [shown.command[9:] for shown in blocks.session(page).commands]
        for block in code(page, "sh"):
            joined = block.replace("\\\n", " ")
            lines += re.findall(r"(?:^|-- |&& |exec )fullwire (.+)", joined, re.MULTILINE)
        for line in lines:
            name, *words = line.split("#")[0].split()
            if name.startswith("-") or name.isupper():
                continue
            assert name in commands | groups, f"{name_of(page)}: {line}"
            path = [name, words.pop(0)] if name in groups else [name]
            words = words[: words.index("--")] if "--" in words else words
            for option in (word for word in words if word.startswith("--")):
                assert option in help_of(*path), f"{name_of(page)}: {line}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    made = {
        "commands",
        "python",
        "run-format",
        "json",
        "glossary",
        "settings",
        "codecs",
        "built-in",
    }
    for target in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        place = page.parent / path if path else page
        if place.parent.name == "reference" and place.stem in made:
            continue  # made at build time: the strict build checks these
        if place.name == "architecture.md":
            place = ROOT / "ARCHITECTURE.md"
        assert place.exists(), f"{name_of(page)}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", place.read_text(), re.MULTILINE)
            assert anchor in map(slug, headings), f"{name_of(page)}: {target}"


def test_the_reference_says_which_pages_the_repository_does_not_hold() -> None:
    page = ROOT / "docs/reference/index.md"
    here, _, made = page.read_text().partition("`make docs` writes them")
    links = [re.findall(r"\]\((\S+\.md)\)", part) for part in (here, made)]
    assert [[(page.parent / link).exists() for link in part] for part in links] == [
        [True] * 2,
        [False] * 8,
    ]


def slug(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_long_line_stands_twice_as_after_a_careless_merge(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    lines = [line for line in prose.splitlines() if len(line) > 60]
    assert [line for line, count in Counter(lines).items() if count > 1] == []


@pytest.mark.parametrize("name", results.names())
def test_a_result_is_whole(name: str) -> None:
    result = results.read(name)
    assert result.claim.endswith(".")
    assert result.anchor
    assert result.summary
    assert result.machine
    assert result.command
    figures = [result.median, result.p90, result.worst]
    assert bool(result.measure) == any(figure is not None for figure in figures)
    known = [figure for figure in figures if figure is not None]
    assert known == sorted(known), "median, p90 and worst do not ascend"
    assert json.loads((results.FOLDER / f"{name}.json").read_text())["cases"] >= 1


def test_every_result_has_its_page() -> None:
    shown = [name for names in validation.PAGES.values() for name in names]
    assert sorted(shown) == results.names()
    for page, names in validation.PAGES.items():
        text = (ROOT / f"docs/validation/{page}.md").read_text()
        for name in names:
            if name != "papers":  # its table is on the page of the papers
                assert f"<!-- results: {name} -->" in text, name


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    if find_spec("material") is None:
        pytest.skip("the site needs mkdocs-material: pip install '.[docs]'")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # other measures would include waiting on a busy machine
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < SITE_LIMIT_S
    built = tmp_path / "site"
    assert (built / "index.html").is_file()
    assert (built / "reference/commands.html").is_file()
    assert list((built / "search").glob("search_index.json"))
    assert "<!-- results" not in (built / "validation/predictions.html").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=name_of)
def test_files_for_the_forge_are_read_by_a_parser(path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="mkdocs-material brings the parser: '.[docs]'")
    assert yaml.safe_load(path.read_text())
