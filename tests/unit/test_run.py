"""A run holds what it says: typed columns of one length, known facts, text that can be stored."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullwire.errors import UsageError
from fullwire.run.run import TABLES, Gradients, Hosts, Provenance, Run, Spans, Table
from tests.builders import a_run
from tests.strategies import cases, tables

ANY_TABLE = st.sampled_from(sorted(TABLES)).flatmap(lambda name: tables(TABLES[name]))


def some_spans(**columns: Any) -> Spans:
    usual: dict[str, Any] = {
        "rank": [0, 0],
        "step": [0, 0],
        "lane": ["host", "compute"],
        "name": ["step", "forward"],
        "start_ns": [0, 0],
        "end_ns": [9, 5],
    }
    return Spans(**(usual | columns))


def some_hosts(**columns: Any) -> Hosts:
    usual: dict[str, Any] = {
        "host": ["a"],
        "device": ["gpu0"],
        "time_ns": [0],
        "utilization": [0.5],
        "memory_bytes": [1],
    }
    return Hosts(**(usual | columns))


def measured(**parts: Any) -> Run:
    return Run(provenance=Provenance(origin="measured", source="a test"), **parts)


@pytest.mark.parametrize("kind", TABLES.values())
def test_every_table_has_an_empty_form(kind: type[Table]) -> None:
    empty = kind.empty()
    assert len(empty) == 0
    assert list(empty.columns()) == [column.name for column in fields(kind)]


def test_columns_are_taken_from_lists_and_arrays_of_other_widths() -> None:
    spans = some_spans(rank=np.array([1, 2], np.uint8), lane=np.array(["host", "input"]))
    assert spans.rank.dtype == np.int64
    assert spans.lane.tolist() == ["host", "input"]
    assert some_hosts(utilization=[1]).utilization.dtype == np.float64


def test_a_column_cannot_be_written_but_the_callers_array_can() -> None:
    mine = np.array([3, 4])
    spans = some_spans(rank=mine)
    with pytest.raises(ValueError, match="read-only"):
        spans.rank[0] = 7
    mine[0] = 5


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"rank": [0]}, "columns differ in length"),
        ({"rank": [[0, 0]]}, "Spans.rank: expected one dimension, got 2"),
        ({"rank": 0}, "Spans.rank: expected one dimension, got 0"),
        ({"rank": [[0], [1, 2]]}, "Spans.rank: expected a column, got rows of several lengths"),
        ({"rank": [0.5, 1.0]}, "Spans.rank: expected whole numbers, got a column of float64"),
        ({"rank": ["0", "1"]}, "Spans.rank: expected whole numbers"),
        ({"rank": [True, False]}, "Spans.rank: expected whole numbers, got a column of bool"),
        ({"rank": [0, None]}, "Spans.rank: expected whole numbers, got a column of object"),
        ({"rank": np.array([0, 2**63], np.uint64)}, "Spans.rank: expected whole numbers below"),
        ({"rank": [0, 2**70]}, "Spans.rank: expected whole numbers"),
        ({"start_ns": np.array([0, 1], "datetime64[ns]")}, "Spans.start_ns: expected whole numb"),
        ({"name": ["step", 7]}, "Spans.name: expected text and nothing else"),
        ({"name": ["step", None]}, "Spans.name: expected text and nothing else"),
        ({"name": ["step", ["x"]]}, "Spans.name: expected text and nothing else"),
        ({"name": np.array([1, 2])}, "Spans.name: expected text, got a column of int64"),
        ({"name": [b"step", b"x"]}, "Spans.name: expected text and nothing else"),
        ({"name": ["step", "\udcff"]}, r"Spans.name: expected text that a file can hold, got '\ud"),
    ],
)
def test_a_column_of_another_kind_is_refused_by_its_name(
    columns: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(problem)):
        some_spans(**columns)


@pytest.mark.parametrize("values", [["0.5"], [True], [None], [1j]])
def test_a_column_of_numbers_takes_numbers_only(values: list[Any]) -> None:
    with pytest.raises(UsageError, match=r"Hosts\.utilization: expected numbers"):
        some_hosts(utilization=values)


@given(ANY_TABLE, st.data())
@cases(50)
def test_rows_are_chosen_by_mask_or_by_number(table: Table, data: st.DataObject) -> None:
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(table), max_size=len(table))))
    chosen = table.rows(mask.astype(bool))
    assert len(chosen) == mask.sum()
    again = table.rows(np.flatnonzero(mask))
    for name, column in chosen.columns().items():
        assert np.array_equal(column, again.columns()[name], equal_nan=column.dtype == np.float64)


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"facts": {"wrokers": 8}}, "unknown fact 'wrokers': known are"),
        ({"facts": {"workers": "8"}}, "fact 'workers': expected int"),
        ({"facts": {"workers": True}}, "fact 'workers': expected int"),
        ({"facts": {"model": "\udcff"}}, "facts: expected text that a file can hold"),
        ({"facts": None}, "facts: expected them by name, got None"),
        ({"missing": "all of it"}, "missing: expected a tuple of sentences, got 'all of it'"),
        ({"missing": (1,)}, "missing: expected text"),
        ({"spans": Gradients.empty()}, "spans: expected Spans"),
        ({"spans": None}, "spans: expected Spans, got None"),
    ],
)
def test_a_run_of_other_parts_is_refused(parts: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=re.escape(problem)):
        measured(**parts)


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"origin": "guessed"}, "origin: expected measured or imported or modelled or simulated"),
        ({"origin": ["measured"]}, "origin: expected"),
        ({"basis": "simulated"}, "basis: expected measured or modelled, got 'simulated'"),
        ({"source": None}, "source: expected text"),
        ({"source": "\udcff.log"}, "source: expected text that a file can hold"),
    ],
)
def test_a_provenance_of_other_words_is_refused(said: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=re.escape(problem)):
        Provenance(**({"origin": "measured", "source": "a test"} | said))


def test_facts_cannot_be_written() -> None:
    with pytest.raises(TypeError):
        a_run().facts["workers"] = 9  # type: ignore[index]


def test_a_run_is_complete_until_something_is_missing() -> None:
    assert a_run().complete
    assert not a_run(missing=("rank 3 is not there",)).complete
