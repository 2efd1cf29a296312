"""The documentation runs: what the README shows is what the commands print."""

from __future__ import annotations

import functools
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from fullwire.cli.app import app
from fullwire.run.store import write
from tests.conftest import Cli
from tests.jobs_by_hand import a_trained_job

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("block", blocks("console"))
def test_a_console_block_shows_how_the_commands_output_begins(
    cli: Cli, block: str, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    command, shown = block.removeprefix("$ fullwire ").split("\n", 1)
    done = cli(*shlex.split(command), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(shown)


def test_the_pythons_of_the_readme_run(tmp_path: Path) -> None:
    first, *others = blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", first], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert 0.99 < float(done.stdout) <= 1
    # pandas and DuckDB are not ours to install; that they name what a run holds is checked here.
    assert ["pandas" in each or "duckdb" in each for each in others] == [True, True]
    write(a_trained_job(), tmp_path / "job.run")
    for each in others:
        [table] = re.findall(r"\.run/(\w+)\.parquet", each)
        columns = pq.read_schema(tmp_path / f"job.run/{table}.parquet").names
        named = re.findall(r"SELECT (\w+)|sum\((\w+)\)|\)\.(\w+)\.", each)
        assert named
        assert {name for names in named for name in names if name} <= set(columns)


def test_every_command_of_the_readme_exists_with_its_options(cli: Cli) -> None:
    commands = {command.name for command in app.registered_commands}
    groups = {group.name for group in app.registered_groups}
    help_of = functools.cache(lambda *path: cli(*path, "--help").stdout)
    for line in re.findall(r"`fullwire ([^`]+)`", README):
        name, *words = line.split()
        if name.startswith("-"):
            continue
        assert name in commands | groups
        path = [name, words.pop(0)] if name in groups else [name]
        shown = help_of(*path)
        words = words[: words.index("--")] if "--" in words else words
        for option in (word for word in words if word.startswith("--")):
            assert option in shown, line


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "CHANGELOG.md"])
def test_no_long_line_stands_twice_as_where_two_changes_were_put_together(name: str) -> None:
    lines = [line for line in (ROOT / name).read_text().splitlines() if len(line) > 60]
    assert [line for line, count in Counter(lines).items() if count > 1] == []


def test_the_pictures_of_the_readme_are_here() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    assert pictures
    assert all((ROOT / picture).is_file() for picture in pictures)
