"""Runs of past formats, recorded when these were new, answer as they did then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fullwire.run.facts import Facts
from fullwire.run.store import read_run
from tests.old_answers import ANSWERS, DATA, answer, differences, old_runs, questions

QUESTIONS = questions()
IN_NUMBERS = sorted(name for name in QUESTIONS if name.endswith(".json"))
IN_WORDS = sorted(name for name in QUESTIONS if name.endswith(".txt"))
TRACES = {
    "chakra": "chakra",
    "chrome": "chrome.json.gz",
    "flight-recorder": "flight-recorder",
    "horovod": "horovod.json",
    "kineto-cpu": "kineto-cpu",
    "kineto-late": "kineto-late",
    "kineto-made": "kineto-made",
    "nccl-log": "nccl.log",
    "nccl-tests": "all_reduce.log",
    "netx": "netx.log --step-time 80ms --reduce-cost inputs/additions.log",
}


@pytest.mark.parametrize("place", old_runs(), ids=str)
def test_an_old_run_opens_with_all_its_rows(place: Path) -> None:
    stored = json.loads((DATA / place / "run.json").read_text())
    run = read_run(DATA / place)
    assert run.missing == tuple(stored["missing"])
    assert {name: len(table) for name, table in run.tables() if len(table)} == stored["rows"]


@pytest.mark.parametrize("name", IN_NUMBERS)
def test_the_answer_is_what_it_was(name: str) -> None:
    expected = json.loads((ANSWERS / name).read_text())
    changed = list(differences(expected, json.loads(answer(QUESTIONS[name]))))
    assert not changed, "\n".join([f"fullwire {QUESTIONS[name]}", *changed[:20]])


@pytest.mark.parametrize("name", IN_WORDS)
def test_the_words_are_what_they_were(name: str) -> None:
    """After a deliberate change of words, write them anew: see `tests/old_answers.py`."""
    assert answer(QUESTIONS[name]) == (ANSWERS / name).read_text()


def test_every_answer_that_is_kept_is_asked_for() -> None:
    assert sorted(path.name for path in ANSWERS.iterdir()) == sorted(QUESTIONS)


@pytest.mark.parametrize("name", sorted(TRACES))
def test_a_trace_becomes_the_run_that_it_became(name: str, tmp_path: Path) -> None:
    place = tmp_path / "again.run"
    answer(f"import inputs/{TRACES[name]} -o {place}")
    before, now = read_run(DATA / "format-1" / f"{name}.run"), read_run(place)
    assert (now.provenance, now.missing) == (before.provenance, before.missing)
    assert not list(differences(as_read(before.facts), as_read(now.facts)))
    for table, rows in before.tables():
        for column, values in rows.columns().items():
            np.testing.assert_array_equal(getattr(getattr(now, table), column), values)


def as_read(facts: Facts) -> Any:
    return json.loads(json.dumps(facts.known()))


@pytest.mark.parametrize(
    ("expected", "got", "said"),
    [
        ({"a_s": 1.0}, {"a_s": 1.0 + 1e-8}, [".a_s: was 1.0, and is 1.00000001"]),
        ({"a_s": 1.0}, {"a_s": 1.0 + 1e-10, "new": 1}, []),
        ({"a_s": 0.0}, {"a_s": 1e-15}, []),
        ({"a_s": None}, {"a_s": 0.0}, [".a_s: was None, and is 0.0"]),
        ({"fits": True}, {"fits": 1}, [".fits: was True, and is 1"]),
        ({"a_s": 1.0}, {}, [".a_s: is gone, it was 1.0"]),
        ({"kind": "codec"}, {"kind": "host"}, [".kind: was 'codec', and is 'host'"]),
        ({"kind": "host"}, {"kind": None}, [".kind: was 'host', and is None"]),
        ({"sentence": "Yes."}, {"sentence": "No."}, []),
        ({"sentence": "Yes."}, {"sentence": None}, [".sentence: was 'Yes.', and is None"]),
        ({"warnings": ["a", "b"]}, {"warnings": ["c", "d"]}, []),
        ({"warnings": ["a"]}, {"warnings": []}, [".warnings: was ['a'], and is []"]),
        ([{"a": 1}], [{"a": 2}], ["[0].a: was 1, and is 2"]),
        ({"clusters": [{"name": "b"}]}, {"clusters": [{"name": "a"}, {"name": "b"}]}, []),
        ([1], [1, 2], [": was 1 long, and is 2: [1], [1, 2]"]),
    ],
)
def test_what_counts_as_a_difference(expected: Any, got: Any, said: list[str]) -> None:
    assert list(differences(expected, got)) == said
