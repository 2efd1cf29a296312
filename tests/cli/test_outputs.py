"""The output files of commands: existing files are kept, and a new file appears whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fullwire.errors import UsageError
from fullwire.outputs import written
from fullwire.run.store import write
from tests.conftest import Cli
from tests.jobs_by_hand import a_trained_job

WHATIF = ("whatif", "vgg16@v100", "--workers", "2,4", "--bandwidth", "10Gbps", "--plot")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write(a_trained_job(), tmp_path / "job.run")


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("export", "job.run", "-o"), "x.json"),
        (("report", "job.run", "-o"), "x.html"),
        (WHATIF, "x.html"),
        (("cluster", "show", "dgx-h100", "--plot"), "x.html"),
    ],
)
def test_a_file_that_exists_is_replaced_only_when_asked(
    cli: Cli, job: Path, command: tuple[str, ...], name: str
) -> None:
    place = job.parent / name
    place.write_text("mine")
    refused = cli(*command, name, cwd=job.parent)
    assert refused.returncode == 2
    assert f"{name} exists: name another, or ask for --force" in refused.stderr
    assert place.read_text() == "mine"
    done = cli(*command, name, "--force", cwd=job.parent)
    assert done.returncode == 0, done.stderr
    assert len(place.read_text()) > 100
    assert sorted(each.name for each in job.parent.iterdir()) == ["job.run", name]


def test_a_file_of_a_run_is_never_replaced(cli: Cli, job: Path) -> None:
    before = (job / "run.json").read_bytes()
    for name in ("run.json", "another.json"):
        refused = cli("export", job, "-o", job / name, "--force")
        assert refused.returncode == 2
        assert "is a run: expected a place outside of it" in refused.stderr
    assert (job / "run.json").read_bytes() == before


def test_what_is_no_plain_file_is_not_replaced(cli: Cli, job: Path) -> None:
    os.mkfifo(job.parent / "pipe.json")
    refused = cli("export", job, "-o", job.parent / "pipe.json", "--force")
    assert refused.returncode == 2
    assert "expected a plain file to replace" in refused.stderr


def test_what_was_there_stays_where_writing_fails(tmp_path: Path) -> None:
    place = tmp_path / "x.svg"
    place.write_text("mine")

    def write_half() -> None:
        with written(place) as beside:
            beside.write_text("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(UsageError, match="cannot be written: No space left on device"):
        write_half()
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("x.svg", "mine")]


def test_an_export_names_what_it_lacks(cli: Cli, job: Path) -> None:
    (job / "spans.parquet").write_bytes(b"damaged")
    done = cli("export", job, "-o", job.parent / "x.json")
    assert done.returncode == 0
    assert "missing: spans.parquet: damaged, not read" in done.stderr


def test_an_export_does_not_wait_for_a_pipe_in_a_run(cli: Cli, job: Path) -> None:
    (job / "spans.parquet").unlink()
    os.mkfifo(job / "spans.parquet")
    done = cli("export", job, "-o", job.parent / "x.json")
    assert "missing: spans.parquet: damaged, not read (it is no file)" in done.stderr


@pytest.mark.parametrize("format_", ["nonsense", "csv"])
def test_a_format_beside_json_is_not_ignored(cli: Cli, format_: str) -> None:
    done = cli("whatif", "vgg16@v100", "--format", format_, "--json")
    assert done.returncode == 2
    assert done.stdout == ""
