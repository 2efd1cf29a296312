"""`.ci/fresh` hides leftovers of earlier builds, and nothing that a build needs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

FRESH = Path(__file__).resolve().parents[2] / ".ci/fresh"
LOOKS = """
import json, os, pathlib, sys
home = pathlib.Path.home()
print(json.dumps({
    "home": sorted(os.listdir(home)), "shm": os.listdir("/dev/shm"), "tmp": os.listdir("/tmp"),
    "here": sorted(os.listdir()), "shared": pathlib.Path("../shared/answer").read_text(),
    "pip": [(home / ".config/pip/pip.conf").read_text(), open(os.environ["PIP_CERT"]).read()],
}))
pathlib.Path("made").touch()
(home / "made").touch()
sys.exit(7)
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Make a home with leftovers, and in it a checkout with `shared` beside it."""
    home = tmp_path / "home"
    (home / "work/checkout/.ci").mkdir(parents=True)
    shutil.copy(FRESH, home / "work/checkout/.ci")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/answer").write_text("42")
    (home / "work/shared").symlink_to(tmp_path / "elsewhere")
    (home / ".config/pip").mkdir(parents=True)
    (home / ".config/pip/pip.conf").write_text(f"[global]\nfind-links = file://{home}/wheels\n")
    (home / "wheels").mkdir()
    (home / "certificates.pem").write_text("certificates")
    (home / "left-over").touch()
    return home


def fresh(home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [home / "work/checkout/.ci/fresh", sys.executable, "-c", LOOKS],
        env={
            **os.environ,
            "HOME": str(home),
            "PYTHON": sys.executable,
            "CI": "true",
            "PIP_CERT": str(home / "certificates.pem"),
            **environment,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def test_what_is_left_over_is_hidden_and_what_a_build_needs_is_not(machine: Path) -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm"), tempfile.NamedTemporaryFile(dir="/tmp"):
        done = fresh(machine)
    if "stay as they are" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert (done.returncode, done.stderr) == (7, "")
    seen: dict[str, Any] = json.loads(done.stdout)
    assert seen["home"] == [".config", "certificates.pem", "wheels", "work"]
    assert seen["shm"] == []
    below_tmp = {
        Path(path).resolve().parts[2]
        for path in (machine, sys.prefix)
        if Path(path).resolve().is_relative_to("/tmp")
    }
    assert set(seen["tmp"]) <= below_tmp
    assert seen["here"] == [".ci", "build"]
    assert seen["shared"] == "42"
    assert seen["pip"] == [(machine / ".config/pip/pip.conf").read_text(), "certificates"]
    checkout = machine / "work/checkout"
    assert sorted(path.name for path in checkout.iterdir()) == [".ci", "build", "made"]
    assert list((checkout / "build").iterdir()) == []
    assert not (machine / "made").exists()


def test_without_a_mount_namespace_the_command_runs_and_a_line_says_so(
    machine: Path, tmp_path: Path
) -> None:
    commands = tmp_path / "commands"
    commands.mkdir()
    (commands / "unshare").write_text("#!/bin/sh\necho 'unshare: not permitted' >&2; exit 1\n")
    (commands / "unshare").chmod(0o755)
    done = fresh(machine, PATH=f"{commands}:{os.environ['PATH']}")
    assert done.returncode == 7
    assert done.stderr == ("ci: /tmp, /dev/shm and home stay as they are: unshare: not permitted\n")
    assert "left-over" in json.loads(done.stdout)["home"]
