"""The results of validation/ hold commands that a reader can type, and no path of one machine."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import ModuleType

import pytest

from validation import memory, nccl, netx, operations, replicas, results
from validation import tables as published


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


PLACES = {  # the scripts that others can give tables of their own, by the place of ours
    netx: "netx",
    nccl: "nccl",
    operations: "llm",
    memory: "llm/memory_goldens.csv",
    replicas: "accuracy",
}


@pytest.mark.parametrize("script", PLACES, ids=lambda script: str(script.__name__))
@pytest.mark.parametrize("is_ours", [False, True])
def test_only_published_tables_renew_a_result(
    script: ModuleType,
    is_ours: bool,
    shared_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ours are those in the place that a script knows: elsewhere they are a stranger's."""
    given = (shared_data / PLACES[script]).resolve()
    monkeypatch.setattr(published, "PUBLISHED", shared_data.resolve() if is_ours else Path("/"))
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr("sys.argv", ["script.py", str(given)])
    with contextlib.suppress(SystemExit):  # some tell by their status how close they are
        script.main()
    assert bool(list(tmp_path.iterdir())) == is_ours
