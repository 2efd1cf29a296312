"""A run keeps its promises: typed columns of one length, known facts, text that can be stored."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullwire.errors import UsageError
from fullwire.run.facts import Facts, named
from fullwire.run.gaps import Gap
from fullwire.run.run import TABLES, Flows, Gradients, Hosts, Provenance, Run, Spans, Table
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
        ({"facts": {"workers": 8}}, "facts: expected Facts, got {'workers': 8}"),
        ({"facts": None}, "facts: expected Facts, got None"),
        ({"gaps": "all of it"}, "gaps: expected a tuple of Gap, got 'all of it'"),
        ({"gaps": ("all",)}, "gaps: expected a tuple of Gap, got ('all',)"),
        ({"gaps": (Gap("\udcff"),)}, "gaps: expected text that a file can hold"),
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


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"wrokers": 8}, "unknown fact 'wrokers': known are"),
        ({"workers": "8"}, "fact 'workers': expected int, got str '8'"),
        ({"workers": True}, "fact 'workers': expected int"),
        ({"workers": 0}, "fact 'workers': expected 1 or more, got 0"),
        ({"model": "\udcff"}, "fact 'model': expected text that a file can hold"),
        ({"line_rate_bps": 0.0}, "fact 'line_rate_bps': expected 1 or more bit/s, got 0"),
        ({"line_rate_bps": 5e-324}, "fact 'line_rate_bps': expected 1 or more bit/s, got 5e-324"),
        ({"line_rate_bps": math.nan}, "fact 'line_rate_bps': expected 1 or more bit/s, got nan"),
        ({"line_rate_bps": math.inf}, "'line_rate_bps': expected at most 1e+18 bit/s, got inf"),
        ({"payload_share": 0.0}, "fact 'payload_share': expected a number from 0.001 to 1, got 0"),
        (
            {"payload_share": 1.5},
            "expected a number from 0.001 to 1, got 1.5",
        ),
        ({"lost_bytes": -1}, "fact 'lost_bytes': expected 0 or more B, got -1"),
        ({"processor_s": ((0.0, -1.0),)}, "expected 0 or more s, got -1.0 for rank 0"),
        ({"processor_s": ((1.0, 1.0), (0.0, 1.0))}, "'processor_s': expected rank ascending"),
        ({"processor_s": ((-1.0, 1.0),)}, "fact 'processor_s': expected rank 0 or more, got -1"),
        ({"processor_s": (1.0,)}, "fact 'processor_s': expected pairs of numbers, got (1.0,)"),
    ],
)
def test_unknown_and_impossible_facts_are_refused(facts: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=re.escape(problem)):
        named(facts)


def test_bytes_that_no_sum_can_hold_are_refused() -> None:
    columns: dict[str, Any] = {name: np.zeros(2, np.int64) for name in Flows.empty().columns()}
    columns |= {name: np.array(["a", "b"], object) for name in ("source", "destination")}
    columns["wire_bytes"] = np.array([2**62, 2**62])
    problem = "Flows.wire_bytes: expected less than 2^63 B in all rows, got 9.223e+18"
    with pytest.raises(UsageError, match=re.escape(problem)):
        Flows(**columns)


def test_facts_cannot_be_written() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        a_run().facts.workers = 9  # type: ignore[misc]


def test_of_the_facts_of_two_the_later_are_believed() -> None:
    both = Facts(workers=2, backend="gloo") | Facts(workers=4, latency_s=1)
    assert both.known() == {"workers": 4, "latency_s": 1.0, "backend": "gloo"}
    assert both.only(["workers"]) == both.without(["latency_s", "backend"]) == Facts(workers=4)


def test_a_run_is_complete_until_something_is_missing() -> None:
    assert a_run().complete
    assert not a_run(missing=("rank 3 is not there",)).complete
