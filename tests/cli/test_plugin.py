"""The package in `examples/plugin` adds a format, a codec and a fix, used like those of ours."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.conftest import Cli

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PLUGIN = Path(__file__).parents[2] / "examples" / "plugin"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the files that pip leaves when it installs the package."""
    about = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    site = tmp_path / "site"
    info = site / f"{about['name'].replace('-', '_')}-{about['version']}.dist-info"
    info.mkdir(parents=True)
    for module in PLUGIN.glob("*.py"):
        shutil.copy(module, site)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n"
    )
    lines = [
        line
        for group, entries in about["entry-points"].items()
        for line in (f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", str(site))


@pytest.mark.usefixtures("installed")
def test_its_files_are_read_like_any_others(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "x.txt").write_text("# stopwatch\n0.5\n0.7\n")
    assert cli("import", tmp_path / "x.txt", "-o", tmp_path / "x.run").returncode == 0
    shown = json.loads(cli("show", tmp_path / "x.run", "--json").stdout)
    assert shown["tables"] == {"spans": 2}
    explained = json.loads(cli("explain", tmp_path / "x.run", "--json").stdout)
    assert explained["step_s"] == pytest.approx(0.6)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0.5\nhalf\n", "x.txt:3: expected the seconds of a step, got 'half'"),
        ("", "x.txt: expected the seconds of one step or more, got none"),
    ],
)
def test_it_refuses_damaged_files_in_one_line(
    tmp_path: Path, cli: Cli, text: str, problem: str
) -> None:
    (tmp_path / "x.txt").write_text(f"# stopwatch\n{text}")
    refused = cli("show", tmp_path / "x.txt")
    assert (refused.returncode, refused.stdout) == (3, "")
    assert refused.stderr.endswith(f"{problem}\n")
    assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "status", "problem"),
    [
        ("ZeroDivisionError('by zero')", 3, " cannot read it: ZeroDivisionError: by zero"),
        ("fullwire.UsageError('no step_time')", 2, ": no step_time"),
    ],
)
def test_an_error_of_its_reader_is_told_with_its_name(
    installed: None, tmp_path: Path, cli: Cli, error: str, status: int, problem: str
) -> None:
    [module] = tmp_path.glob("site/fullwire_stopwatch.py")
    raising = f"import fullwire\n    raise {error}\n    end_ns ="
    module.write_text(module.read_text().replace("end_ns =", raising, 1))
    (tmp_path / "x.txt").write_text("# stopwatch\n0.5\n")
    refused = cli("show", tmp_path / "x.txt")
    assert (refused.returncode, refused.stdout) == (status, "")
    of = "stopwatch = fullwire_stopwatch:FORMAT of fullwire-stopwatch"
    assert f"{of}{problem}\n" in refused.stderr
    assert refused.stderr.count("\n") == 1


@pytest.mark.usefixtures("installed")
def test_its_label_is_in_the_list_of_formats(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "x.txt").write_bytes(b"\0\xffnobody knows this")
    refused = cli("import", tmp_path / "x.txt", "-o", tmp_path / "x.run")
    assert refused.returncode == 3
    assert refused.stderr.endswith(", or stopwatch files\n")


@pytest.mark.usefixtures("installed")
def test_its_codec_is_predicted(cli: Cli) -> None:
    asked = ("whatif", "resnet50@v100", "--workers", "8", "--bandwidth", "1Gbps")
    plain = json.loads(cli(*asked, "--json").stdout)["rows"]
    packed = json.loads(cli(*asked, "--compression", "thirds", "--json").stdout)["rows"]
    assert packed[0]["step_s"] < plain[0]["step_s"]


@pytest.mark.usefixtures("installed")
def test_its_fix_is_listed_and_applied(cli: Cli) -> None:
    assert "arenas of malloc in each process" in " ".join(cli("fixes").stdout.split())
    job = [sys.executable, "-c", "import os; print(os.environ['MALLOC_ARENA_MAX'])"]
    done = cli("apply", "arenas:2", "--", *job)
    assert (done.returncode, done.stdout) == (0, "2\n")


def test_a_fix_with_the_key_of_ours_names_its_package(
    installed: None, tmp_path: Path, cli: Cli
) -> None:
    [entries] = tmp_path.glob("site/*.dist-info/entry_points.txt")
    entries.write_text(entries.read_text().replace("arenas = ", "buckets = "))
    refused = cli("fixes")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "of fullwire-stopwatch: fullwire has its own 'buckets'" in refused.stderr
