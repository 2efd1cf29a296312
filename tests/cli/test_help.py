"""Help is enough: strangers' questions, every command, completion, the man page, the glossary."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from docs.making import manual
from docs.making.reference import walk
from fullwire.cli.app import app_for, app_of
from fullwire.findings.verdicts import drawn_parts, verdict_kinds
from fullwire.fixes import Risk
from fullwire.words.glossary import glossary_lines, meanings
from tests.conftest import Cli

COMMANDS = [path[1:] for path, _ in walk(typer.main.get_command(app_of()), ("fullwire",))]
QUESTIONS = {
    "How do I record a job that torchrun starts?": (
        "record",
        ["fullwire record -o job.run -- torchrun", "fullwire explain job.run"],
    ),
    "How do I record a Slurm job?": (
        "record",
        ["Slurm", "srun fullwire record --part -o job.run --", "fullwire join job.run.recording"],
    ),
    "The job and its recorder were killed. Where is my run?": (
        "join",
        ["killed", "fullwire join job.run.recording -o job.run"],
    ),
    "The answer lacks the line rate. How do I give it?": ("explain", ["--line-rate", "10Gbps"]),
    "What do the words of the answer mean?": ("explain", ["--glossary", "meaning of each word"]),
    "How fast is the job on another network, with more workers?": (
        "whatif",
        ["fullwire whatif job.run --bandwidth 10Gbps,25Gbps --workers 8,64"],
    ),
    "I have no job yet. What can I predict?": (
        "whatif",
        ["fullwire whatif vgg16@v100", "fullwire workloads"],
    ),
    "A colleague sent profiler traces. What now?": (
        "import",
        ["Profiler traces", "fullwire import traces/ nccl-logs/ -o job.run"],
    ),
    "I have packets. How do I capture them, and what do they tell?": (
        "flows",
        ["tcpdump", "fullwire flows rank0.pcap"],
    ),
    "Did my change help, or is it noise?": (
        "compare",
        ["noise", "fullwire compare before*.run -- after*.run"],
    ),
    "How do I try a slow network on one machine?": (
        "lab run",
        ["fullwire lab run --workers 4 --rate 1Gbps -o job.run -- python train.py"],
    ),
    "How do I describe my own cluster?": ("cluster show", ["--toml > ours.toml"]),
    "How do I show the answer to others?": ("report", ["HTML page", "-o report.html"]),
    "How do I compare two runs in CI?": (
        "compare",
        ["fullwire compare main*.run -- pr*.run --fail-if-slower 5%", "Exit status 1"],
    ),
    "I have the trace of one rank. What does it tell?": (
        "import",
        ["One rank is", "fullwire import rank0.json -o job.run"],
    ),
    "How do I record an FSDP job?": ("record", ["DDP, FSDP", "fullwire record -o job.run --"]),
    "How do I try bf16 gradients?": ("apply", ["fullwire apply compression:bf16 -- torchrun"]),
    "What would bf16 gradients gain?": ("whatif", ["--compression", "bf16"]),
    "How do I apply a fix?": ("apply", ["buckets:50", "fullwire fixes", "what became of each fix"]),
    "How do I apply all fixes that help?": (
        "tune",
        ["-o tuned", "fullwire run -r tuned/recipe.toml"],
    ),
    "How long until my loss is 0.3?": ("whatif", ["--target 'loss<=0.3'", "time until a metric"]),
    "Which plan is best for 64 nodes?": (
        "plan",
        ["fullwire plan llama3-70b --cluster dgx-h100 --nodes 64 --global-batch 512"],
    ),
    "I have nccl-tests logs of my cluster. How do they help?": (
        "cluster fit",
        ["fullwire cluster fit nccl_8.log nccl_16.log", "Output of nccl-tests"],
    ),
    "How does Tab complete commands?": ("", ["--install-completion"]),
}


@pytest.mark.parametrize("line", [["--help"], ["-h"], ["--version"], [], ["explian"]])
def test_where_no_command_is_asked_for_all_are_listed_and_none_is_built(line: list[str]) -> None:
    listed, whole = typer.main.get_command(app_for(line)), typer.main.get_command(app_of())
    assert listed.get_help(typer.Context(listed)) == whole.get_help(typer.Context(whole))
    assert not any(len(each.params) > 1 for each in listed.commands.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("question", QUESTIONS)
def test_help_alone_answers_a_strangers_question(cli: Cli, question: str) -> None:
    command, answers = QUESTIONS[question]
    shown = cli(*command.split(), "--help").stdout
    for answer in answers:
        assert answer in shown, question


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_short_option_shows_the_help_too(cli: Cli, command: tuple[str, ...]) -> None:
    done = cli(*command, "-h")
    assert (done.returncode, done.stdout) == (0, cli(*command, "--help").stdout)
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_the_list_of_commands_cuts_no_sentence(cli: Cli) -> None:
    for group in ([], ["lab"], ["cluster"], ["bench"]):
        assert "..." not in cli(*group, "--help").stdout.partition("Commands:")[2]


def completed(words: str) -> list[str]:
    """Return the offers of the shell after these words."""
    asked = {"_FULLWIRE_COMPLETE": "complete_bash", "COMP_WORDS": words}
    done = subprocess.run(
        ["fullwire"],
        env=os.environ | asked | {"COMP_CWORD": str(len(words.split()) - 1)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("fullwire") is None, reason="fullwire is not on the PATH")
def test_a_shell_completes_commands_and_options() -> None:
    assert completed("fullwire ex") == ["explain", "export"]
    assert completed("fullwire lab run --wor") == ["--workers", "--workload"]


def test_the_completion_of_a_shell_is_shown_and_installed(tmp_path: Path, cli: Cli) -> None:
    home = os.environ | {"HOME": str(tmp_path)}
    command = f"fullwire() {{ :; }}; {sys.executable} -m fullwire --show-completion; true"
    shown = subprocess.run(
        ["bash", "-c", command], env=home, capture_output=True, text=True, check=False
    )
    assert "complete -o default -F _fullwire_completion fullwire" in shown.stdout
    subprocess.run(
        ["bash", "-c", f"{sys.executable} -m fullwire --install-completion; true"],
        env=home,
        check=True,
        capture_output=True,
    )
    assert (tmp_path / ".bash_completions/fullwire.sh").exists()


def test_every_part_kind_and_risk_is_in_the_glossary() -> None:
    known = meanings()
    for key in (*drawn_parts(), *verdict_kinds(), *Risk.__args__):  # type: ignore[attr-defined]
        assert known.get(key.replace("_", " ")), key


def test_explain_prints_the_glossary_within_the_terminal(cli: Cli) -> None:
    done = cli("explain", "--glossary", env=os.environ | {"COLUMNS": "60"})
    assert done.stdout.splitlines() == list(glossary_lines(60))
    assert max(map(len, done.stdout.splitlines())) <= 60


def test_the_glossary_is_the_same_whatever_was_imported_first() -> None:
    asked = (
        "from fullwire.words.glossary import glossary_lines; print(*glossary_lines(60), sep='\\n')"
    )
    first = "import fullwire.findings.verdicts.unknown"
    lines = [
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout
        for code in (asked, f"{first}; {asked}")
    ]
    assert lines[0] == lines[1]


def test_the_man_page_is_what_the_help_says() -> None:
    assert manual.PAGE.read_text() == manual.manual(), "run: python -m docs.making.manual"


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_the_man_page_is_sound() -> None:
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", manual.PAGE],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert "fullwire lab run" in done.stdout
