"""The command line with a mistake in the arguments, or a problem at the place of the answer."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fullwire.run.store import write
from tests.conftest import Cli
from tests.jobs_by_hand import a_trained_job

COLLECTIVE = (
    "collective",
    "allreduce",
    "--bytes",
    "1MiB",
    "--workers",
    "4",
    "--bandwidth",
    "1Gbps",
)
FULLWIRE = f"{sys.executable} -m fullwire"


def in_a_shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nonsense",), "No such command 'nonsense'"),
        (("\x1b[2J",), r"No such command '\x1b[2J'"),
        (("whatif",), "Missing argument 'RUN...'. See fullwire whatif -h"),
        (("lab", "up"), "No such command 'up'. See fullwire lab -h"),
        (("watch", "train.py"), "process, got 'train.py'; --job finds a job by the words"),
        (("whatif", "vgg16@v100", "--bandwith", "1Gbps"), "No such option: --bandwith"),
        (("collective", "allreduce", "--chunks", "many"), "Invalid value for '--chunks'"),
        (("show", "\x1b[2J"), r"\x1b[2J: there is no such file"),
        (("show", "a --num-layers 2"), "fullwire: a --num-layers 2: there is no such file"),
        (
            ("watch", "--recording", ".", "--hosts", "gpu1"),
            "watch --recording: expected no --hosts; its folder has all of them",
        ),
        (("watch", "--recording", ".", "--once"), "watch --recording: expected no --once"),
    ],
)
def test_what_is_mistyped_gives_one_line_without_escapes(
    cli: Cli, arguments: tuple[str, ...], message: str
) -> None:
    done = cli(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("fullwire: ")
    assert message in done.stderr
    assert done.stderr.removesuffix("\n").isprintable()


def test_no_command_at_all_prints_the_help_and_is_a_mistake(cli: Cli) -> None:
    done = cli()
    assert done.returncode == 2
    assert "Commands:" in done.stderr


def test_a_full_disk_under_the_answer_is_one_line() -> None:
    done = in_a_shell(f"{FULLWIRE} workloads > /dev/full")
    assert done.returncode == 2
    assert done.stderr == "fullwire: standard output: No space left on device\n"


def test_a_closed_output_is_one_line() -> None:
    done = in_a_shell(f"{FULLWIRE} workloads >&-")
    assert done.returncode == 2
    assert done.stderr == "fullwire: standard output is closed\n"


def test_a_closed_or_full_error_output_leaves_the_status() -> None:
    mistaken = f"{FULLWIRE} whatif vgg16@v100 --workers none"
    assert in_a_shell(f"{mistaken} 2>&-").returncode == 2
    assert in_a_shell(f"{mistaken} 2>/dev/full").returncode == 2


def test_ctrl_c_while_it_is_still_being_loaded_leaves_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import fullwire.cli as c; c.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_a_reader_that_has_seen_enough_leaves_status_0() -> None:
    sizes = ",".join(map(str, range(2, 2000)))
    whatif = f"{FULLWIRE} whatif vgg16@v100 --workers {sizes} --format csv"
    done = in_a_shell(f"{whatif} | head -n 1 > /dev/null; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_without_these_letters_gets_them_escaped(cli: Cli) -> None:
    done = cli("workloads", env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert r"\u2500" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("whatif", "vgg16@v100", "--calibrate", "x.run"), "expected --transport measured with it"),
        ((*COLLECTIVE, "--servers", "0"), "servers: expected a whole number from 1"),
        (
            (*COLLECTIVE, "--servers", "2", "--algorithm", "ring"),
            "expected algorithm param",
        ),
        (
            ("run", "--workers", "2", "--strict", "--", "true"),
            "expected --workers without --recipe, --follow, --export and --strict",
        ),
        (
            ("run", "-r", "x.toml", "--min", "2", "--", "true"),
            "expected --min without --recipe, --follow, --export and --strict",
        ),
        (
            ("run", "-r", "x.toml", "--detect", "1s", "--", "true"),
            "expected --detect without --recipe, --follow, --export and --strict",
        ),
    ],
)
def test_what_would_be_ignored_is_refused(
    cli: Cli, arguments: tuple[str, ...], message: str
) -> None:
    done = cli(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_ctrl_c_that_a_library_turns_into_another_error_leaves_without_a_word(
    tmp_path: Path,
) -> None:
    (tmp_path / "typer.py").write_text(
        "import os, signal\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "except KeyboardInterrupt:\n    raise ImportError('numpy.core failed') from None\n"
    )
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import fullwire.cli as c; c.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_json_holds_nothing_that_a_terminal_obeys(cli: Cli, tmp_path: Path) -> None:
    run = a_trained_job()
    odd = dataclasses.replace(run.provenance, source="a\u202eb\x9bc")
    write(dataclasses.replace(run, provenance=odd), tmp_path / "x.run")
    done = cli("show", tmp_path / "x.run", "--json")
    assert done.stdout.removesuffix("\n").isprintable()
    assert json.loads(done.stdout)["source"] == odd.source


def test_where_something_was_written_is_said_without_escapes(cli: Cli, tmp_path: Path) -> None:
    write(a_trained_job(), tmp_path / "x.run")
    done = cli("export", "x.run", "-o", "\x1b[2J.json", cwd=tmp_path)
    assert done.stderr == "written: \\x1b[2J.json\n"


def test_a_command_that_cannot_begin_is_named_without_escapes(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "\x1b[2J\u202e.py").write_text("#!/nothing/there\n")
    (tmp_path / "\x1b[2J\u202e.py").chmod(0o755)
    done = cli("record", "-o", "x.run", "--", "./\x1b[2J\u202e.py", cwd=tmp_path)
    assert "./\\x1b[2J\\u202e.py: cannot be run: No such file" in done.stderr
    assert done.stderr.replace("\n", "").isprintable()


def test_a_job_that_deletes_the_folder_of_the_command_is_told_so(cli: Cli, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    job = f"import shutil; shutil.rmtree({str(gone)!r})"
    done = cli("record", "-o", "x.run", "--", sys.executable, "-c", job, cwd=gone)
    assert done.returncode == 2
    assert done.stderr.endswith("fullwire: the current folder: No such file or directory\n")
