"""Strategies of generated tests: any run, netx logs, quantities, and damage to any of them.

FULLWIRE_FUZZ multiplies the number of cases: `make quick` makes a fifth of them, and
`validation/generated.py` makes more.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar, get_args

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from fullwire.clusters.cluster import (
    Cluster,
    Inside,
    LeafSpine,
    Network,
    Nics,
    OneSwitch,
    OtherHost,
    Torus,
)
from fullwire.run.facts import REGISTRY, Fact, named
from fullwire.run.gaps import Gap
from fullwire.run.run import (
    TABLES,
    AnyTable,
    Basis,
    Collectives,
    ColumnKind,
    Gradients,
    Hosts,
    Links,
    Origin,
    Provenance,
    Run,
    Sockets,
    Spans,
    Table,
)

Test = TypeVar("Test", bound=Callable[..., None])
FUZZ = float(os.environ.get("FULLWIRE_FUZZ", "1"))
LEAST_CASES = 10
MOST_ROWS = 5

# Text that has broken readers before: escapes, other directions, empty text, text like markup.
ODD_TEXT = (
    "",
    "\0",
    "\x1b[2J",
    "\u202e",
    "null",
    "a,b\r\n",
    "\ufeff",
    "\u0663",
    "\u00e9" * 300,
    "[red]",
)
# Pieces of text files that have broken parsers before.
ODD_TOKENS = (
    b"",
    b"\0",
    b",",
    b"\n",
    b"\r",
    b"-1",
    b"-0",
    b"nan",
    b"inf",
    b"1e400",
    b"1e-400",
    b"1_0",
    b"0x10",
    b"\xd9\xa3",
    b"\xff",
    b"\xef\xbb\xbf",
    b"9" * 45,
    b"9" * 2000,
    b"1000000000",
    b"1e9",
    b"4000.5",
    b"\x1b[31m",
    b" ",
    b"\t",
    b"\x0c",
    b"+",
    b".",
    b"first line is for",
)

texts = st.text(max_size=12) | st.sampled_from(ODD_TEXT)
whole_numbers = st.integers(-(2**63), 2**63 - 1)
real_numbers = st.floats()
finite = st.floats(allow_nan=False, allow_infinity=False)
_VALUES = {np.int64: whole_numbers, np.float64: real_numbers, np.object_: texts}


def scaled(count: int) -> int:
    """Return how many cases to generate where a test asks for so many."""
    return max(LEAST_CASES, round(count * FUZZ))


def cases(count: int) -> Callable[[Test], Test]:
    """Set the number of generated cases, times FULLWIRE_FUZZ; cases may share fixtures."""
    return settings(
        max_examples=scaled(count),
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@st.composite
def tables(draw: st.DrawFn, kind: type[AnyTable]) -> AnyTable:
    """Make a table of any values that its columns may hold."""
    rows = draw(st.integers(0, MOST_ROWS))
    columns: dict[str, Any] = {}
    for name, each in kind.column_kinds().items():
        values = draw(st.lists(_column_values(each), min_size=rows, max_size=rows))
        columns[name] = np.array(values, each.dtype)
    for name in kind.ADDED_UP:
        columns[name] //= MOST_ROWS + 1
    for begin, end in kind.INTERVALS:
        columns[begin], columns[end] = np.sort([columns[begin], columns[end]], axis=0)
    return kind(**columns)


def _column_values(kind: ColumnKind) -> st.SearchStrategy[Any]:
    if kind.least is None:
        return _VALUES[kind.dtype]
    if kind.dtype is np.int64:
        return st.integers(int(kind.least), 2**63 - 1)
    return st.floats(kind.least, allow_infinity=False)


@st.composite
def fabrics(draw: st.DrawFn) -> Cluster:
    """Make a small described cluster of any kind."""
    network, nodes = draw(_networks())
    devices = draw(st.integers(1, 4))
    nics = 4 if isinstance(network, Torus) else draw(st.integers(1, devices))
    named = st.tuples(*[st.integers(0, nics - 1)] * devices)
    even = st.just(()) if isinstance(network, Torus) or devices % nics == 0 else named
    rates, latencies = st.floats(1e6, 1e13), st.floats(0, 1)
    shares = st.floats(0.1, 1)
    other = st.builds(OtherHost, node=st.integers(0, nodes - 1), nic_rate_bps=rates)
    inside = st.builds(
        Inside,
        kind=st.sampled_from(["switch", "pcie"]),
        rate_bps=rates,
        latency_s=latencies,
        payload_share=shares,
    )
    return Cluster(
        name=draw(texts),
        nodes=nodes,
        devices_per_node=devices,
        inside=draw(inside if devices > 1 else st.none() | inside),
        nics=Nics(
            rate_bps=draw(rates),
            per_node=nics,
            latency_s=draw(latencies),
            payload_share=draw(shares),
            of_device=draw(even if isinstance(network, Torus) else even | named),
        ),
        network=network,
        other_hosts=tuple(draw(st.lists(other, max_size=2, unique_by=lambda each: each.node))),
        startup_s=draw(st.sampled_from([0.0, 3e-5])),
        device=draw(st.sampled_from(["", "h100", "NVIDIA A100"])),
        rests_on=draw(texts),
    )


@st.composite
def _networks(draw: st.DrawFn) -> tuple[Network, int]:
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    leaves = st.builds(
        LeafSpine,
        nodes_per_leaf=st.integers(1, 5),
        oversubscription=st.floats(0.25, 16),
        by_rail=st.booleans(),
        latency_s=st.floats(0, 1),
    )
    pods = st.builds(
        LeafSpine,
        nodes_per_leaf=st.integers(1, 3),
        oversubscription=st.floats(0.25, 16),
        by_rail=st.booleans(),
        latency_s=st.floats(0, 1),
        leaves_per_pod=st.integers(1, 3),
        core_oversubscription=st.floats(0.25, 16),
    )
    torus = st.just(Torus(rows=rows, columns=columns))
    return draw(st.just(OneSwitch()) | leaves | pods | torus), rows * columns


@st.composite
def facts(draw: st.DrawFn) -> dict[str, Any]:
    """Generate any valid facts, odd ones among them."""
    names = draw(st.sets(st.sampled_from(sorted(REGISTRY)), max_size=4))
    return {name: draw(_fact_values(REGISTRY[name])) for name in sorted(names)}


def _fact_values(fact: Fact) -> st.SearchStrategy[Any]:
    """Generate any value that a fact may have."""
    if fact.kind is str:
        return texts
    least, most = fact.measure.least, fact.measure.most
    if fact.kind is int:
        return st.integers(int(least), int(most))
    numbers = st.floats(least, most) | st.sampled_from([float(least), float(most)])
    if fact.kind is float:
        return numbers
    pairs = st.dictionaries(st.integers(0, 2**53), numbers, max_size=4)
    return pairs.map(lambda each: tuple((float(a), b) for a, b in sorted(each.items())))


def _gaps() -> st.SearchStrategy[Gap]:
    tables_ = st.none() | st.sampled_from(sorted(TABLES))
    return st.builds(Gap, reason=texts, table=tables_, rank=st.none() | st.integers(0, 2**31))


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Generate any run at all."""
    chosen = draw(st.sets(st.sampled_from(sorted(TABLES)), max_size=3))
    parts: dict[str, Any] = {name: draw(tables(TABLES[name])) for name in sorted(chosen)}
    return Run(
        provenance=Provenance(
            origin=draw(st.sampled_from(get_args(Origin))),
            source=draw(texts),
            basis=draw(st.sampled_from(get_args(Basis))),
        ),
        facts=named(draw(facts())),
        gaps=tuple(draw(st.lists(_gaps(), max_size=2))),
        **parts,
    )


@st.composite
def netx_logs(draw: st.DrawFn) -> bytes:
    """Generate the text of a valid netx backward log."""
    wait_us = st.floats(0, 1e6).map(repr) | st.integers(0, 10**6).map(str)
    gradient = st.tuples(wait_us, st.integers(1, 2**40).map(str)).map(",".join)
    gradients = draw(st.lists(gradient, min_size=1, max_size=6))
    lines = ["first line is for explaination; ...", "1", str(len(gradients)), *gradients, ""]
    return "\n".join(lines).encode()


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Cut, flip, overwrite or repeat parts of some bytes."""
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(content)))
        rest = min(draw(st.integers(0, 8)), len(content) - place)
        change = draw(st.sampled_from(("cut", "flip", "overwrite", "insert", "repeat")))
        content = _changed(draw, content, place, place + rest, change)
    return content


def _changed(draw: st.DrawFn, content: bytes, start: int, end: int, change: str) -> bytes:
    if change == "cut":
        return content[:start]
    if change == "flip" and start < len(content):
        flipped = content[start] ^ (1 << draw(st.integers(0, 7)))
        return content[:start] + bytes([flipped]) + content[start + 1 :]
    if change == "repeat":
        return content[:end] + content[start:]
    token = draw(st.sampled_from(ODD_TOKENS) | st.binary(max_size=4))
    return content[:start] + token + content[end if change == "overwrite" else start :]


def same_run(one: Run, other: Run) -> bool:
    """Say whether two runs are equal to the last bit; NaN counts as equal to itself here."""
    return (
        (one.provenance, one.gaps) == (other.provenance, other.gaps)
        and _same_facts(one, other)
        and all(same_table(table, getattr(other, name)) for name, table in one.tables())
    )


def same_table(one: Table, other: Table) -> bool:
    """Say whether two tables hold the same columns."""
    return all(
        np.array_equal(column, getattr(other, name), equal_nan=column.dtype == np.float64)
        for name, column in one.columns().items()
    )


def _same_facts(one: Run, other: Run) -> bool:
    return one.facts == other.facts


_ODD_LENGTHS_NS = st.sampled_from([0, 1, 2, 1_000, 10**6, 10**8, 10**12, 10**15])
_ODD_SIZES = st.sampled_from([0, 1, 4, 10**3, 25 * 2**20, 2**40, 2**62])
_ODD_RATES = st.sampled_from([1.0, 1e3, 1e9, 4e11, 1e18])


@st.composite
def odd_jobs(draw: st.DrawFn) -> Run:
    """Generate a complete, legal training job, with parts that take no time or very long."""
    ranks, steps, sums = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(0, 3))
    spans: list[tuple[Any, ...]] = []
    gradients: list[tuple[Any, ...]] = []
    collectives: list[tuple[Any, ...]] = []
    for rank in range(ranks):
        begin = 0
        for step in range(steps):
            forward, backward, rest = (begin + each for each in _rising(draw, 3))
            end = max(rest, begin + draw(_ODD_LENGTHS_NS))
            spans += [
                (rank, step, "host", "step", begin, end),
                (rank, step, "compute", "forward", begin, forward),
                (rank, step, "compute", "backward", forward, backward),
                (rank, step, "compute", "optimizer", backward, rest),
            ]
            for order in range(sums):
                size = draw(_ODD_SIZES)
                gradients.append(
                    (rank, step, order, size, draw(st.sampled_from([forward, backward])))
                )
                issue, start, done = (forward + each for each in _rising(draw, 3))
                sequence = step * sums + order
                row = (rank, step, sequence, "0", "allreduce", "float32", size, issue, start, done)
                collectives.append(row)
            begin = end
    known = {
        "workers": ranks,
        "line_rate_bps": draw(_ODD_RATES),
        "buckets": "ddp",
        "backend": "gloo",
    }
    told = draw(st.sets(st.sampled_from(sorted(known))))
    odd = draw(facts().filter(lambda each: "workers" not in each))
    return Run(
        provenance=Provenance(origin="measured", source="odd"),
        facts=named({name: known[name] for name in told} | _numbers_only(odd)),
        spans=_table(Spans, spans),
        gradients=_table(Gradients, gradients),
        collectives=_table(Collectives, collectives),
        links=draw(tables(Links)),
        sockets=draw(tables(Sockets)),
        hosts=draw(tables(Hosts)),
    )


def _rising(draw: st.DrawFn, count: int) -> list[int]:
    return sorted(draw(st.lists(_ODD_LENGTHS_NS, min_size=count, max_size=count)))


def _numbers_only(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if not isinstance(value, str)}


def _table(kind: type[AnyTable], rows: list[tuple[Any, ...]]) -> AnyTable:
    types = kind.column_types()
    columns = zip(*rows, strict=True) if rows else ([] for _ in types)
    return kind(
        **{
            name: np.array(list(values), dtype)
            for (name, dtype), values in zip(types.items(), columns, strict=True)
        }
    )
