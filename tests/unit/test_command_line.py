"""The part of the recorded command that a run keeps."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from fullwire.recorder.command_line import without_secrets
from fullwire.recorder.record import join, record, record_part


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        (["env", "WANDB_API_KEY=abc", "python", "t.py"], "env 'WANDB_API_KEY=***' python t.py"),
        (["python", "t.py", "--api-key", "abc"], "python t.py --api-key ***"),
        (["python", "--hfToken=abc", "t.py"], "python '--hfToken=***' t.py"),
        (["sh", "-c", "AWS_SECRET='a b' python t.py --password x"], None),
        (["git", "clone", "https://me:abc@host/x"], "git clone 'https://me:***@host/x'"),
        (
            ["python", "--tokenizer", "gpt2", "--max_tokens=5"],
            "python --tokenizer gpt2 --max_tokens=5",
        ),
        (["python", "t.py", "--token", "--lr", "0.1"], "python t.py --token --lr 0.1"),
    ],
)
def test_values_of_what_is_named_a_secret_are_masked(command: list[str], kept: str | None) -> None:
    expected = kept or "sh -c 'AWS_SECRET=*** python t.py --password ***'"
    assert without_secrets(command) == expected


@pytest.mark.parametrize(
    "command",
    [
        ["env", "API_KEY=x hunter2"],
        ["env", "PGPASSWORD=hunter2"],
        ["env", "SSHPASS=hunter2"],
        ["env", "DB_PASS=hunter2"],
        ["p", "--password=it's hunter2"],
        ["p", "--MYSECRETKEY=hunter2"],
        ["p", "--auth", "me:hunter2"],
        ["p", '{"api_key": "hunter2"}'],
        ["p", "api_key: hunter2"],
        ["srun", "--export=ALL,HF_TOKEN=hunter2,LR=3", "p"],
        ["docker", "run", "-eHF_TOKEN=hunter2"],
        ["curl", "-H", "Authorization: Bearer hunter2"],
        ["curl", "-u", "me:hunter2", "http://host"],
        ["curl", "http://host/?a=1&access_token=hunter2&b=2"],
        ["sh", "-c", "curl -H 'X-Api-Key: hunter2' http://host; python t.py"],
        ["sh", "-c", "API_KEY='a'\"hunter2\" python t.py"],
        ["sh", "-c", "API_KEY=a\\ hunter2 python t.py"],
        ["sh", "-c", "API_KEY=$(echo hunter2) python t.py"],
        ["git", "clone", "postgres://me:a@hunter2@host/x"],
        ["huggingface-cli", "login", "hf_hunter2AbcdefghijklmnopqrstuvwX"],
        ["git", "clone", "https://ghp_hunter2Abcdefghijklmnopqrstuvwx@github.com/x"],
        ["p", "sk-proj-hunter2-Abcdefghijklmnopqr"],
        ["p", "-----BEGIN RSA PRIVATE KEY-----\nhunter2"],
    ],
)
def test_a_secret_is_masked_wherever_it_stands(command: list[str]) -> None:
    assert "hunter2" not in without_secrets(command)
    assert "***" in without_secrets(command)


def test_a_command_without_secrets_stays_as_it_is() -> None:
    command = (
        "torchrun --nproc-per-node=2 --rdzv-endpoint=host:29500 t.py --tokens 512 author=me "
        "--data s3://b/c --passes=3 --bypass --monkey 3 --user me"
    )
    assert without_secrets(command.split()) == command


@pytest.mark.parametrize("mask", [0o077, 0o022, 0o002])
def test_a_run_has_the_mode_that_the_umask_says_and_no_secret(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        record(["env", "MY_TOKEN=hidden", "true"], tmp_path / "job.run")
    finally:
        os.umask(before)
    for path in (tmp_path / "job.run", *(tmp_path / "job.run").rglob("*")):
        most = 0o777 if path.is_dir() else 0o666
        assert stat.S_IMODE(path.stat().st_mode) == most & ~mask
    assert "hidden" not in (tmp_path / "job.run" / "run.json").read_text()


def test_a_private_run_and_its_recording_are_for_its_user_alone(tmp_path: Path) -> None:
    place, made = tmp_path / "job.run", tmp_path / "mode"
    directory = tmp_path / "job.run.recording"
    recorded = record(["sh", "-c", f"stat -c %a {directory} > {made}; umask"], place, private=True)
    assert recorded.exit_status == 0
    assert made.read_text() == "700\n"
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    record_part(["true"], tmp_path / "whole.run")
    record_part(["true"], tmp_path / "whole.run", private=True)
    assert stat.S_IMODE((tmp_path / "whole.run.recording").stat().st_mode) == 0o700
    whole = join([tmp_path / "whole.run.recording"], tmp_path / "whole.run")
    assert stat.S_IMODE(whole.path.stat().st_mode) == 0o700
