"""The GitHub Action that compares step times: its script, run as a runner would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from fullwire.run.store import write
from tests.builders import steps_run
from tests.unit.test_compare import noisy

ACTION = Path(__file__).resolve().parents[2] / ".github/actions/compare/action.yml"


def script() -> str:
    [found] = re.findall(r"^      run: \|\n((?:        .*\n?|\n)+)", ACTION.read_text(), re.M)
    return textwrap.dedent(found)


@pytest.mark.parametrize(("after_ms", "status"), [(110, 1), (100, 0)])
def test_the_action_writes_the_summary_and_fails_on_a_slowdown(
    tmp_path: Path, after_ms: float, status: int
) -> None:
    for number in (1, 2):
        write(steps_run(noisy(100, number)), tmp_path / f"main-{number}.run")
        write(steps_run(noisy(after_ms, number + 10)), tmp_path / f"pr-{number}.run")
    commands = tmp_path / "commands"
    commands.mkdir()
    for name, line in (
        ("fullwire", f'exec {sys.executable} -m fullwire.cli "$@"'),
        ("gh", f'echo "$@" >> {tmp_path}/asked'),
    ):
        (commands / name).write_text(f"#!/bin/sh\n{line}\n")
        (commands / name).chmod(0o755)
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script()],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": f"{commands}:{os.environ['PATH']}",
            "BEFORE": "main-*.run",
            "AFTER": "pr-*.run",
            "LIMIT": "5%",
            "LINE_RATE": "",
            "COMMENT": "true",
            "PULL_REQUEST": "7",
            "GITHUB_REPOSITORY": "them/training",
            "RUNNER_TEMP": str(tmp_path),
            "GITHUB_OUTPUT": str(tmp_path / "output"),
            "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (status, "")
    summary = (tmp_path / "summary.md").read_text()
    assert summary.startswith("### Too slow: " if status else "### Within the limit of 5.0%: ")
    assert (tmp_path / "output").read_text() == f"report={tmp_path}/fullwire-compare.md\n"
    assert (tmp_path / "asked").read_text().startswith("pr comment 7 --repo them/training ")
