"""A past version's run opens as it did then; a column that it lacks loses no table."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

import fullwire as fw
from fullwire.errors import DamagedInput
from fullwire.run.gaps import Gap
from fullwire.run.run import TABLES, Events, Metrics, Noise, Run
from fullwire.run.store import read_run, write
from tests.jobs_by_hand import a_trained_job

SENTENCES = [
    "rank 7: its process was killed",
    "spans/000003.parquet: damaged, not read (it is no file)",
    "links.parquet: damaged, not read (Permission denied)",
    "hosts: 9 rows were written, 8 can be read",
    "of 20 of 20 collectives the size is not told",
]


def as_format_1(place: Path, missing: list[str], **facts: Any) -> Path:
    """Write run.json anew as the first version did, with its CRC."""
    shown = json.loads((place / "run.json").read_text())
    crc32 = {name: crc for name, crc in shown["crc32"].items() if name != "run.json"}
    old = {
        "format": 1,
        "provenance": shown["provenance"],
        "facts": shown["facts"] | facts,
        "missing": missing,
        "rows": shown["rows"],
        "crc32": crc32,
    }
    crc32 |= {"run.json": zlib.crc32(msgspec.json.encode(old))}
    (place / "run.json").write_bytes(msgspec.json.format(msgspec.json.encode(old), indent=1))
    return place


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return write(a_trained_job(), tmp_path / "x.run")


def test_a_run_of_format_1_opens_with_the_same_answers(place: Path) -> None:
    before = fw.explain(place)
    old = read_run(as_format_1(place, SENTENCES))
    assert old.facts == a_trained_job().facts
    assert old.missing == tuple(SENTENCES)
    assert fw.explain(Run(**{**vars(old), "gaps": ()})).account == before.account


def test_sentences_of_format_1_become_gaps_of_tables_and_ranks(place: Path) -> None:
    told = [(gap.table, gap.rank) for gap in read_run(as_format_1(place, SENTENCES)).gaps]
    assert told == [(None, 7), ("spans", None), ("links", None), ("hosts", None), (None, None)]


def test_a_run_of_format_1_that_was_edited_says_so(place: Path) -> None:
    as_format_1(place, [])
    assert read_run(place).complete
    path = place / "run.json"
    path.write_text(path.read_text().replace('"workers": 3', '"workers": 4'))
    assert read_run(place).gaps == (Gap("run.json: it was changed after it was written"),)


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"workers": 0}, "fact 'workers': expected 1 or more, got 0"),
        ({"line_rate_bps": 5e-324}, "fact 'line_rate_bps': expected 1 or more bit/s, got 5e-324"),
        ({"wrokers": 1}, "unknown field `wrokers` - at `$.facts`"),
        ({"workers": "4"}, "Expected `int`, got `str` - at `$.facts.workers`"),
    ],
)
def test_facts_of_format_1_that_cannot_be_are_named(
    place: Path, facts: dict[str, Any], problem: str
) -> None:
    with pytest.raises(DamagedInput) as refusal:
        read_run(as_format_1(place, [], **facts))
    assert problem in str(refusal.value)


def test_a_fact_declared_between_others_does_not_make_old_runs_look_edited(place: Path) -> None:
    path = place / "run.json"
    shown = json.loads(path.read_text())
    shown["facts"] = dict(reversed(shown["facts"].items()))
    path.write_text(json.dumps(shown))
    assert read_run(place).complete


def test_new_tables_are_there_and_empty(place: Path) -> None:
    run = read_run(place)
    assert (len(run.noise), len(run.metrics), len(run.events)) == (0, 0, 0)
    assert [TABLES[name] for name in ("noise", "metrics", "events")] == [Noise, Metrics, Events]
