"""Commands with spoiled values end in an answer or in one clear line (validation/commands.py)."""

from __future__ import annotations

import pytest

from validation.commands import BASES, Ended, Folder, cases, prepared, wrong

COUNT = len(BASES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    whole = tmp_path_factory.mktemp("hostile") / "whole"
    whole.mkdir()
    prepared(whole)
    return Folder(whole.with_name("folder"), whole)


@pytest.mark.parametrize("part", range(4))
def test_spoiled_commands_answer_or_refuse_in_one_line(folder: Folder, part: int) -> None:
    ended = [folder.play(command) for command in list(cases(COUNT, seed=7))[part::4]]
    assert [(why, each.command, each.err) for each in ended if (why := wrong(each))] == []


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"err": "Traceback (most recent call last):"}, "a traceback"),
        ({"status": -9}, "status -9"),
        ({"status": 2, "err": "expected a run"}, "a refusal without a line that says why"),
        ({"err": "fullwire: \u202eevil", "status": 2}, "a raw control character, '\\u202e'"),
        ({"out": '{"step_s": NaN}'}, "JSON with NaN"),
        ({"out": '{"rows": [{"step_s": -1}]}'}, ".rows[0].step_s is -1"),
        ({"out": '{"scaling_factor": 1.2}'}, ".scaling_factor is 1.2"),
        ({"changed": "a.run/run.json"}, "changed a.run/run.json"),
        ({"took_s": 1e3}, "no end within 40 s"),
        ({"out": '{"step_s": 1}'}, ""),
    ],
)
def test_a_bad_end_is_seen(changed: dict[str, object], why: str) -> None:
    usual = {"command": ["explain", "--json"], "status": 0, "took_s": 1.0, "out": "{}", "err": ""}
    assert wrong(Ended(**usual | changed)) == why  # type: ignore[arg-type]


def test_a_file_that_a_command_changed_is_named(folder: Folder) -> None:
    forced = folder.play(["export", "lab-gloo.run", "-o", "kept.json", "--force"])
    refused = folder.play(["export", "lab-gloo.run", "-o", "kept.json"])
    assert (forced.status, forced.changed) == (0, "")  # asked for
    assert (refused.status, refused.changed, wrong(refused)) == (2, "", "")


def test_the_commands_work_unless_they_are_spoiled(folder: Folder) -> None:
    ended = {" ".join(base): folder.play(list(base)) for base in BASES if base[0] in QUICK}
    assert {command: each.err for command, each in ended.items() if each.status} == {}


QUICK = ("explain", "whatif", "show", "collective", "plan", "export", "import", "cluster", "fixes")
