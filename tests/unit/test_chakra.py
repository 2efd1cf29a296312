"""Chakra execution traces: protobuf by hand, its JSON, real ones of PyTorch, and broken ones."""

from __future__ import annotations

import contextlib
import io
import json
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fullwire
from fullwire.errors import DamagedInput, FullwireError
from fullwire.importers import read
from fullwire.importers._encodings import BrokenMessageError, fields, messages, signed
from fullwire.run.run import SIZE_UNKNOWN
from fullwire.words import sentence
from tests.strategies import cases

COMPUTES, SENDS, COLLECTIVE = 4, 5, 7


def varint(value: int) -> bytes:
    """Write a whole number as protocol buffers do; the formula is the specification's."""
    value &= 2**64 - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def text(field: int, value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return varint(field << 3 | 2) + varint(len(data)) + data


def attribute(name: str, value: int | str) -> bytes:
    told = text(29, value) if isinstance(value, str) else number(9, value)
    return text(10, text(1, name) + told)


def a_node(
    id: int, type: int, *attributes: bytes, name: str = "n", start_us: int = 0, length_us: int = 0
) -> bytes:
    times = number(6, start_us) + number(7, length_us)
    return number(1, id) + text(2, name) + number(3, type) + times + b"".join(attributes)


def a_trace(path: Path, *nodes: bytes) -> Path:
    parts = (text(1, "0.0.4"), *nodes)
    path.write_bytes(b"".join(varint(len(part)) + part for part in parts))
    return path


def test_a_trace_without_times_is_a_schedule(tmp_path: Path) -> None:
    for rank in range(2):
        a_trace(
            tmp_path / f"et.{rank}.et",
            a_node(1, COMPUTES, length_us=70),
            a_node(2, COLLECTIVE, attribute("comm_type", 0), attribute("comm_size", 1 << 20)),
            a_node(
                3,
                COLLECTIVE,
                attribute("comm_type", 2),
                attribute("comm_size", 64),
                attribute("pg_name", "3"),
            ),
            a_node(4, COLLECTIVE, attribute("comm_type", 9)),
            a_node(5, COLLECTIVE, attribute("comm_type", 0)),
        )
    run = read(tmp_path)
    mine = run.collectives.rows(run.collectives.rank == 1)
    assert mine.op.tolist() == ["allreduce", "allgather", "barrier", "allreduce"]
    assert mine.bytes.tolist() == [1 << 20, 64, 0, 0]
    assert mine.dtype.tolist() == ["", "", "", SIZE_UNKNOWN]
    assert mine.group.tolist() == ["default_pg", "group 3", "default_pg", "default_pg"]
    assert mine.sequence.tolist() == [0, 0, 0, 1]
    assert not len(run.spans)
    assert "when 8 of 8 collectives were, it does not hold" in (run.facts.remarks or "")
    found = fullwire.explain(run)
    assert found.verdict.kind == "unknown"
    [schedule] = [sentence(each) for each in found.evidence if each.key == "schedule"]
    assert schedule == (
        "A rank has 4 collectives: allreduce 2 with 1.049 MB, some sizes unknown; allgather 1 with "
        "64 B; barrier 1."
    )


def test_times_are_taken_where_they_are(tmp_path: Path) -> None:
    run = read(
        a_trace(
            tmp_path / "x.et",
            a_node(1, COMPUTES, name="matmul", start_us=1000, length_us=70),
            a_node(2, COMPUTES, attribute("is_cpu_op", 1), start_us=900, length_us=500),
            a_node(
                3,
                COLLECTIVE,
                attribute("comm_type", 7),
                attribute("comm_size", 8),
                start_us=1070,
                length_us=30,
            ),
        )
    )
    assert (run.spans.name.tolist(), run.spans.lane.tolist()) == (["matmul"], ["compute"])
    assert run.spans.end_ns.tolist() == [70_000]
    assert run.collectives.op.tolist() == ["reducescatter"]
    assert run.collectives.issue_ns.tolist() == [70_000]
    assert run.collectives.end_ns.tolist() == [100_000]
    assert fullwire.explain(run).account["compute"] == pytest.approx(70e-6)


def test_transfers_between_two_ranks_name_them(tmp_path: Path) -> None:
    peers = attribute("comm_src", 0), attribute("comm_dst", 1), attribute("comm_size", 12)
    run = read(a_trace(tmp_path / "x.et", a_node(1, SENDS, *peers)))
    assert run.collectives.group.tolist() == ["default_pg 0>1"]
    assert run.collectives.op.tolist() == ["sendrecv"]


def test_its_json_says_the_same(tmp_path: Path) -> None:
    nodes = [
        {"version": "0.0.4"},
        {
            "id": "1",
            "name": "all",
            "type": "COMM_COLL_NODE",
            "startTimeMicros": "5",
            "durationMicros": "7",
            "attr": [
                {"name": "comm_type", "int64Val": "0"},
                {"name": "comm_size", "int64Val": "4096"},
                {"name": "pg_name", "stringVal": "0"},
            ],
        },
    ]
    (tmp_path / "x.json").write_text("\n".join(json.dumps(each, indent=2) for each in nodes))
    run = read(tmp_path / "x.json")
    assert run.collectives.bytes.tolist() == [4096]
    assert run.collectives.group.tolist() == ["group 0"]
    assert run.collectives.end_ns.tolist() == [7000]


def test_marks_of_nccl_are_not_counted_beside_the_calls_around_them(tmp_path: Path) -> None:
    told = {
        "collective_name": "allreduce",
        "dtype": "BFloat16",
        "in_msg_nelems": 100,
        "out_msg_nelems": 100,
        "group_size": 64,
        "pg_name": "0",
    }
    nodes = [
        {"id": 3, "name": "c10d::allreduce_", "inputs": {}, "outputs": {}, "attrs": []},
        {
            "id": 4,
            "name": "record_param_comms",
            "inputs": {},
            "outputs": {},
            "attrs": [{"name": name, "type": "t", "value": value} for name, value in told.items()],
        },
    ]
    (tmp_path / "et.json").write_text(json.dumps({"schema": "1.1.1-chakra.0.0.4", "nodes": nodes}))
    run = read(tmp_path / "et.json")
    assert run.collectives.bytes.tolist() == [200]
    assert run.collectives.dtype.tolist() == ["bfloat16"]
    assert run.facts.workers == 64


def test_a_trace_that_is_cut_gives_what_came_before(tmp_path: Path) -> None:
    node = a_node(1, COLLECTIVE, attribute("comm_type", 0), attribute("comm_size", 8))
    whole = a_trace(tmp_path / "x.et", *[node] * 100).read_bytes()
    for cut in (len(whole) - 1, len(whole) // 2, len(whole) // 2 + 1):
        (tmp_path / "x.et").write_bytes(whole[:cut])
        run = read(tmp_path / "x.et")
        assert 48 <= len(run.collectives) < 100
        assert "nodes before are read" in run.missing[0]


@pytest.mark.parametrize(
    "content",
    [
        b"\x07\x0a\x050.0.4" + b"\xff" * 12,
        b"\x07\x0a\x050.0.4" + b"\xff\xff\xff\xff\x7f",
        b"\x07\x0a\x050.0.4\x03\x0b\x0b\x0b",
        b"\x07\x0a\x050.0.4",
        b'{"schema": "1.1.1-chakra.0.0.4", "nodes": [{"id": 3, "na',
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.et").write_bytes(content)
    with pytest.raises(DamagedInput):
        read(tmp_path / "x.et")


@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(-(2**63), 2**63 - 1) | st.binary())))
def test_the_wire_format_is_read_as_it_is_written(told: list[tuple[int, int | bytes]]) -> None:
    message = b"".join(
        number(field, value) if isinstance(value, int) else text(field, value)
        for field, value in told
    )
    [read_back] = messages(io.BytesIO(varint(len(message)) + message), 10**9)
    found = [
        (field, signed(value) if isinstance(value, int) else value)
        for field, value in fields(read_back)
    ]
    assert found == told


def test_numbers_of_fixed_width_are_read(tmp_path: Path) -> None:
    message = varint(3 << 3 | 1) + struct.pack("<d", 1.5) + varint(5 << 3 | 5) + b"\1\0\0\0"
    assert [field for field, _ in fields(message)] == [3, 5]
    with pytest.raises(BrokenMessageError, match="longer than its message"):
        list(fields(message[:-1]))


@given(st.binary(max_size=60), st.integers(0, 120), st.integers(0, 6))
@cases(300)
def test_any_damage_gives_a_run_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, damage: bytes, place: int, cut: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.0.et"
    node = a_node(1, COLLECTIVE, attribute("comm_type", 0), attribute("pg_name", "a"), start_us=9)
    whole = a_trace(path, node, node, node).read_bytes()
    path.write_bytes(whole[:place] + damage + whole[place + cut :])
    with contextlib.suppress(FullwireError):
        fullwire.explain(read(path, format="chakra"))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["name", "type", "attr", "attrs", "inputs", "values", "types", "int64Val"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@given(_JSON, st.sampled_from(["c10d::allreduce_", "record_param_comms", "x"]))
@cases(200)
def test_a_node_may_hold_anything(
    tmp_path_factory: pytest.TempPathFactory, inner: object, name: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.0.json"
    node = {"name": name, "inputs": inner, "attrs": inner, "startTimeMicros": inner}
    good = {"name": "g", "type": "COMM_COLL_NODE"}
    path.write_text(json.dumps({"schema": "1-chakra.0.0.4", "nodes": [node, inner, good]}))
    with contextlib.suppress(FullwireError):
        read(path, format="chakra")


@pytest.mark.parametrize(
    "metadata",
    [
        text(1, "0.0.4") + attribute("schema", "1.1.1-chakra.0.0.4") + attribute("x", "y" * 300),
        text(2, text(1, "schema") + text(29, "1.0.2-chakra.0.0.4")),
        text(2, text(1, "description") + text(29, "z" * 200)),
    ],
    ids=["longer than a byte counts", "attributes alone", "long attributes alone"],
)
def test_metadata_may_be_long_or_attributes_alone(tmp_path: Path, metadata: bytes) -> None:
    node = a_node(1, COLLECTIVE, attribute("comm_type", 0), attribute("comm_size", 64))
    parts = metadata, node
    (tmp_path / "x.et").write_bytes(b"".join(varint(len(part)) + part for part in parts))
    assert read(tmp_path / "x.et").collectives.bytes.tolist() == [64]


def a_torch_trace(schema: str, *nodes: dict[str, object]) -> str:
    return json.dumps(
        {"schema": schema, "pid": 1, "time": "2026-11-22", "start_ts": 5, "nodes": list(nodes)}
    )


def test_process_groups_say_how_many_ranks_there_are(tmp_path: Path) -> None:
    # As torch 2.13 writes them, for a job of two ranks of which the trace of one is here.
    stated = '[{"pg_name": "0", "pg_desc": "default_pg", "ranks": [], "group_size": 2}]'
    groups = {"id": 3, "name": "## process_group:init ##", "inputs": {"values": [stated]}}
    call = {"id": 4, "name": "c10d::allreduce_", "inputs": {"values": [], "types": []}}
    (tmp_path / "trace.json").write_text(a_torch_trace("1.1.1-chakra.0.0.4", groups, call))
    run = read(tmp_path / "trace.json")
    assert run.facts.workers == 2
    assert run.missing == ("1 of 2 ranks are here",)


def test_the_schema_before_chakras_names_is_read(tmp_path: Path) -> None:
    # As torch/csrc/profiler/standalone/execution_graph_observer.cpp wrote it.
    call = {
        "name": "c10d::allreduce_",
        "id": 7,
        "rf_id": 2,
        "parent": 2,
        "op_schema": "",
        "inputs": [[[8, 9, 0, 100, 4, "cuda:0"]], "<Undefined>", 0],
        "input_shapes": [[[100]], [], []],
        "input_types": ["GenericList[Tensor(float)]", "Undefined", "Int"],
    }
    root = {"name": "[pytorch|profiler|execution_graph|process]", "id": 1, "inputs": []}
    (tmp_path / "graph.json").write_text(a_torch_trace("1.0.1", call, root))
    run = read(tmp_path / "graph.json")
    assert run.collectives.op.tolist() == ["allreduce"]
    assert run.collectives.bytes.tolist() == [400]
    assert run.collectives.dtype.tolist() == ["float32"]


@pytest.mark.parametrize(
    ("name", "workers", "missing"),
    [
        ("resnet_1.0.2-chakra.0.0.4.json", 1, ()),
        ("llama.6.et", 7, ("1 of at least 7 ranks are here",)),
        ("job_rank7.json", 8, ("1 of at least 8 ranks are here",)),
        ("et_3.json", 4, ("1 of at least 4 ranks are here",)),
    ],
)
def test_a_lone_rank_says_the_least_that_there_are(
    tmp_path: Path, name: str, workers: int, missing: tuple[str, ...]
) -> None:
    call = {"id": 4, "name": "c10d::allreduce_", "inputs": {"values": [], "types": []}}
    (tmp_path / name).write_text(a_torch_trace("1.0.2-chakra.0.0.4", call))
    run = read(tmp_path / name)
    assert (run.facts.workers, run.missing) == (workers, missing)
