"""The results of validation/ hold commands that a reader can type, and no path of one machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from validation import results


def test_a_command_has_no_path_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = Path(results.FOLDER).parents[1]
    monkeypatch.chdir(checkout)
    beside = checkout.parent / "shared" / "data" / "netx"
    monkeypatch.setattr(
        "sys.argv", ["faults.py", "--journal", str(checkout.parent / "rounds.jsonl"), str(beside)]
    )
    assert results.command() == (
        ".venv/bin/python -m validation.faults --journal DIRECTORY ../shared/data/netx"
    )


@pytest.mark.parametrize("name", results.names())
def test_a_published_command_has_no_path_of_a_machine(name: str) -> None:
    words = results.read(name).command.split()
    assert [word for word in words if word.startswith("/") or "../../" in word] == []
