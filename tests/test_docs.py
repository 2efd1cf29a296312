"""The documentation runs: what the README shows is what the commands print."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fullwire.cli.app import app
from tests.conftest import Cli

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("block", blocks("console"))
def test_a_console_block_shows_how_the_commands_output_begins(
    cli: Cli, block: str, tmp_path: Path
) -> None:
    command, shown = block.removeprefix("$ fullwire ").split("\n", 1)
    done = cli(*shlex.split(command), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(shown)


def test_the_pythons_of_the_readme_run(tmp_path: Path) -> None:
    first, second = blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", first], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert 0.99 < float(done.stdout) <= 1
    assert "read_parquet" in second  # pandas is not ours to install; the store's tests read Parquet


def test_every_command_of_the_readme_exists_with_its_options(cli: Cli) -> None:
    commands = {command.name for command in app.registered_commands}
    groups = {group.name for group in app.registered_groups}
    for line in re.findall(r"`fullwire ([^`]+)`", README):
        name, *words = line.split()
        if name.startswith("-"):
            continue
        assert name in commands | groups
        path = [name, words.pop(0)] if name in groups else [name]
        shown = cli(*path, "--help").stdout
        words = words[: words.index("--")] if "--" in words else words
        for option in (word for word in words if word.startswith("--")):
            assert option in shown, line


def test_the_pictures_of_the_readme_are_here() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    assert pictures
    assert all((ROOT / picture).is_file() for picture in pictures)
