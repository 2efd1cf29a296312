"""Answers in a terminal: no line is wider, the first screen is enough, commands can be pasted."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from inspect import Parameter, signature
from pathlib import Path
from unittest.mock import patch

import pytest
import typer

import fullwire as fw
from docs.making import answers as made
from fullwire.cli.app import app_of
from fullwire.errors import FullwireError
from fullwire.fixes import Fix, fix_kinds
from fullwire.report.cluster import print_cluster, print_cluster_fit
from fullwire.report.explanation import print_watched
from fullwire.report.fixing import print_tuning
from fullwire.report.recording import recording_lines
from fullwire.report.terminal import print_codecs, print_jobs, print_table, say_command
from fullwire.studies.contest import print_contest
from fullwire.studies.papers.view import print_study
from fullwire.words import lines_to_paste
from tests.conftest import Cli
from tests.old_answers import DATA, old_runs, questions
from tests.trained_jobs import a_trained_job, a_transport

HIGH, WIDE = 24, 80
RUNS = [str(place) for place in old_runs() if "simulated-cluster" not in place.name]
ASKED = [
    *("doctor", "fixes", "workloads", "workloads llama3-70b", "explain --glossary"),
    *("cluster show dgx-h100 --nodes 4", "cluster list"),
    "whatif vgg16@v100 --workers 8,64 --bandwidth 1Gbps,10Gbps --compression 1,4 --best 2",
    "collective allreduce --bytes 64MiB --cluster dgx-h100 --algorithm auto",
    "plan llama3-8b --cluster dgx-h100 --nodes 1 --global-batch 64 --top 3 --why",
] + [
    question
    for name, question in questions().items()
    if name.endswith(".txt") and "-v" not in question  # with -v, answers have lines of code
]

# Answers that need a running job, a lab or minutes: printed from made results.
MEASURED: dict[str, Callable[[], None]] = {
    "flows --jobs": lambda: print_jobs([made.network_job()] * 2),
    "watch": lambda: print_watched(made.watched(), is_full=True),
    "tune": lambda: print_tuning(made.tuned()),
    "codecs": lambda: print_codecs(made.codecs()),
    "cluster fit": lambda: print_cluster_fit(made.fitted()),
    "study": lambda: print_study(made.study(), [Path("study/claims.csv")]),
    "bench transport": lambda: print_contest(made.a_contest()),
}


def printed(question: str, wide: int = WIDE) -> list[str]:
    """Ask in a terminal of some width, in this process."""
    told = io.StringIO()
    before = Path.cwd()
    os.chdir(DATA)
    try:
        with patch.dict(os.environ, COLUMNS=str(wide)), contextlib.redirect_stdout(told):
            app_of()(shlex.split(question), standalone_mode=False)
    finally:
        os.chdir(before)
    return told.getvalue().splitlines()


@pytest.mark.parametrize("question", ASKED)
@pytest.mark.parametrize("wide", [40, 80, 120])
def test_no_line_of_an_answer_is_wider_than_the_terminal(question: str, wide: int) -> None:
    assert max(map(len, printed(question, wide))) <= wide


@pytest.mark.parametrize("wide", [40, 80, 120])
@pytest.mark.parametrize("command", MEASURED)
def test_no_line_of_a_measured_answer_is_wider_than_the_terminal(
    command: str, wide: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with patch.dict(os.environ, COLUMNS=str(wide)):
        MEASURED[command]()
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert max(map(len, lines)) <= wide


@pytest.mark.parametrize("run", RUNS)
def test_the_first_screen_holds_the_answer_and_the_next_command(run: str) -> None:
    lines = printed(f"explain {run}")
    partial = sum("run is partial" in line for line in lines)
    assert len(lines) <= HIGH + 2 * partial
    assert max(map(len, lines)) <= WIDE
    assert any(line.startswith("Next: fullwire ") for line in lines)
    assert max(map(len, printed(f"explain {run} -v"))) <= WIDE


def commands(lines: list[str]) -> Iterator[list[str]]:
    """Yield the commands below an answer, as a shell would read them."""
    text = "\n".join(lines).replace("\\\n", " ")
    for line in text.splitlines():
        mark, _, command = line.partition(" ")
        if mark in ("Next:", "and:"):
            yield shlex.split(command)


@pytest.mark.parametrize("run", RUNS)
def test_the_next_command_can_be_pasted(run: str) -> None:
    group = typer.main.get_command(app_of())
    for option in ("", " -v"):
        found = list(commands(printed(f"explain {run}{option}")))
        assert found
        for name, *words in found:
            assert name == "fullwire"
            if "--" in words:
                words = [*words[: words.index("--")], "--", "true"]
            command = group.commands[words[0]]  # type: ignore[attr-defined]
            command.make_context(words[0], words[1:])


@pytest.mark.parametrize("run", ["lab-gloo", "lab-late", "emulated-gloo", "recorded"])
def test_a_next_command_that_only_reads_answers(run: str) -> None:
    for option in ("", " -v"):
        for _, *words in commands(printed(f"explain format-1/{run}.run{option}")):
            if words[0] in ("explain", "whatif", "show"):
                assert printed(shlex.join(words))


def test_a_recording_ends_with_the_next_command(tmp_path: Path) -> None:
    place = fw.write(a_trained_job(a_transport()), tmp_path / "a job.run")
    *lines, last = recording_lines(place)
    assert last == f"Next: fullwire explain '{place}'"
    assert max(map(len, lines)) <= WIDE


def test_a_recording_of_one_step_names_no_mean(tmp_path: Path) -> None:
    one, two = (
        next(
            recording_lines(
                fw.write(a_trained_job(a_transport(), steps=steps), tmp_path / f"{steps}.run")
            )
        )
        for steps in (1, 2)
    )
    assert re.fullmatch(r"fullwire: \d+ ranks?, 1 step of [\d.]+ .?s", one)
    assert one.count("mean") < two.count("mean") == 1


def test_a_long_command_goes_on_after_a_backslash(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["echo", *(f"--option-{number}=value" for number in range(30))]
    with patch.dict(os.environ, COLUMNS="60"):
        say_command(shlex.join(words))
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 60
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.split() == words[1:]


def test_columns_that_find_no_room_follow_below(capsys: pytest.CaptureFixture[str]) -> None:
    heads = ["host", *(f"column{number}" for number in range(12))]
    with patch.dict(os.environ, COLUMNS="60"):
        print_table(heads, [[f"value{number}" for number in range(13)]], texts={"host"})
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    assert sum(line.startswith("host") for line in lines) == sum(
        line.startswith("value0") for line in lines
    )
    assert {word for line in lines for word in line.split()} >= {*heads, "value12"}


def test_a_long_first_column_leaves_room_for_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    heads = ["run", *(f"column{number}" for number in range(6))]
    with patch.dict(os.environ, COLUMNS="80"):
        print_table(heads, [["x" * 90, *(f"{number}.123456" for number in range(6))]], texts=set())
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "5.123456" in printed


@pytest.mark.parametrize("wide", [80, 100])
def test_a_drawn_cluster_is_as_wide_as_the_terminal_allows(
    wide: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with patch.dict(os.environ, COLUMNS=str(wide)):
        print_cluster(fw.cluster("dgx-h100", nodes=512))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= wide
    [top] = [line for line in lines if "╔" in line]
    assert "╗" in top
    [leaves] = [line for line in lines if "leaves" in line and "leaf0" in line]
    assert leaves.count("[leaf") == (3 if wide == 80 else 4)
    assert "leaf15" in leaves


# ---- the lines of a fix --------------------------------------------------------------------------


def fixes() -> list[type[Fix]]:
    fix_kinds()

    def below(kind: type[Fix]) -> Iterator[type[Fix]]:
        for each in kind.__subclasses__():
            yield each
            yield from below(each)

    return [kind for kind in below(Fix) if kind.lines]


CODE = [
    pytest.param(kind, framework, id=f"{kind.__name__}-{framework}")
    for kind in fixes()
    for framework in kind.lines
]


def filled_lines(kind: type[Fix], framework: str) -> str:
    class Filled:
        lines, cap_mib, codec = kind.lines, 25, "powersgd:rank=2"
        every, times, passes = 4, 2, 4

    return lines_to_paste(Filled(), framework)


@pytest.mark.parametrize(("kind", "framework"), CODE)
def test_the_lines_of_a_fix_are_whole(kind: type[Fix], framework: str) -> None:
    lines = filled_lines(kind, framework)
    assert max(map(len, lines.splitlines())) <= WIDE - 4
    if framework == "deepspeed":
        assert isinstance(ast.literal_eval(lines), dict)
    elif framework == "torchtitan":
        assert lines.startswith("--")
    else:
        assert "import " in lines
        ast.parse(lines)


@pytest.mark.parametrize(("kind", "framework"), CODE)
def test_a_framework_knows_the_settings_of_a_fix(kind: type[Fix], framework: str) -> None:
    """If the framework is installed, its functions take the names that the lines give them."""
    pytest.importorskip(framework, reason=f"needs {framework}: pip install {framework}")
    if framework in ("deepspeed", "torchtitan"):
        pytest.skip("its settings stand in a file, or on its command line")
    tree, named = ast.parse(filled_lines(kind, framework)), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                named[alias.name] = getattr(importlib.import_module(node.module or ""), alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in named:
            taken = signature(named[node.func.id]).parameters.values()
            if not any(each.kind is Parameter.VAR_KEYWORD for each in taken):
                assert {each.arg for each in node.keywords} <= {each.name for each in taken}


def test_explain_speaks_the_words_of_the_framework_of_the_job(cli: Cli, tmp_path: Path) -> None:
    job = a_trained_job(a_transport())
    facts = job.facts | type(job.facts)(framework="transformers")
    place = fw.write(type(job)(**{**vars(job), "facts": facts}), tmp_path / "job.run")
    shown = cli("explain", place, "-v").stdout
    assert "TrainingArguments(gradient_accumulation_steps=4)" in shown
    assert "no_sync" not in shown


def test_a_mistake_stays_one_line() -> None:
    with pytest.raises(FullwireError, match=r"^[^\n]*$"):
        printed("explain no-such.run")
