"""Flight Recorder dumps: real ones of PyTorch, the published form, and hostile pickles."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fullwire
from fullwire.errors import DamagedInput, FullwireError
from fullwire.importers import read
from fullwire.importers._encodings import read_pickle
from fullwire.run.run import SIZE_UNKNOWN
from tests.strategies import cases


def an_entry(sequence: int, **others: object) -> dict[str, object]:
    return {
        "frames": [],
        "record_id": sequence,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "op_id": sequence,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": 10**18 + sequence * 10**6,
        "input_sizes": [[3, 4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[3, 4]],
        "output_dtypes": ["Float"],
        "state": "completed",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": 10**18 + 5 * 10**8,
        "retired": True,
        "timeout_ms": 600000,
        "is_p2p": False,
        **others,
    }


def a_dump(*entries: Mapping[str, object]) -> dict[str, object]:
    return {
        "version": "2.10",
        "comm_lib_version": "2.27.3",
        "pg_status": {},
        "pg_config": {
            "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"},
            "1": {"name": "1", "desc": "tp", "ranks": "[1]"},
        },
        "entries": list(entries),
    }


def written(where: Path, rank: int, dump: object, *, protocol: int = 2) -> Path:
    path = where / f"nccl_trace_rank_{rank}"
    path.write_bytes(pickle.dumps(dump, protocol))
    return path


@pytest.mark.parametrize("form", ["pickled", "json"])
def test_real_dumps_tell_the_schedule_of_both_ranks(real_dumps: Path, form: str) -> None:
    run = read(real_dumps / form)
    table = run.collectives
    assert run.complete
    assert run.facts.workers == 2
    assert run.facts.backend == "gloo"
    for rank in range(2):
        mine = table.rows(table.rank == rank)
        reduced = mine.rows(mine.op == "allreduce")
        assert reduced.bytes.tolist() == [4 * (64 * 32 + 32)] * 3
        gathered = mine.rows((mine.op == "allgather") & (mine.dtype == "float32"))
        assert gathered.bytes.tolist() == [80]  # of both ranks
        assert (mine.issue_ns[1:] >= mine.issue_ns[:-1]).all()
    assert "how long" in (run.facts.remarks or "")


def test_a_real_dump_reads_as_the_pickle_that_it_is(real_dumps: Path) -> None:
    content = (real_dumps / "pickled/fr_rank_0").read_bytes()
    found = read_pickle(real_dumps, io.BytesIO(content))
    assert found.value == pickle.loads(content)  # our own dump, so the pickle is safe


def test_a_schedule_without_times_is_explained_as_one(real_dumps: Path) -> None:
    found = fullwire.explain(read(real_dumps / "pickled"))
    assert found.verdict.kind == "unknown"
    assert found.verdict.missing == ("times: profiler traces of the job, or a recording",)
    assert found.scaling_factor is None


def test_durations_last_and_stand_where_the_program_asked(tmp_path: Path) -> None:
    run = read(written(tmp_path, 0, a_dump(an_entry(1), an_entry(2, duration_ms=1.5))))
    assert run.collectives.issue_ns.tolist() == [0, 1_000_000]
    assert run.collectives.end_ns.tolist() == [0, 2_500_000]
    assert "1 of 2 took" in (run.facts.remarks or "")
    assert run.missing == ("1 of 2 ranks are here",)


def test_a_name_that_ends_in_a_date_tells_no_rank(tmp_path: Path) -> None:
    written(tmp_path, 1, a_dump(an_entry(1))).rename(tmp_path / "dump_20241121")
    run = read(tmp_path / "dump_20241121")
    assert run.facts.workers == 2
    assert "its name tells no rank, so it is taken for 0" in run.missing[0]


def test_the_rank_that_others_wait_for_is_named(tmp_path: Path) -> None:
    written(tmp_path, 0, a_dump(an_entry(1), an_entry(2, state="started", retired=False)))
    written(tmp_path, 1, a_dump(an_entry(1)))
    remarks = str(read(tmp_path).facts.remarks)
    assert "1 had not been seen to end" in remarks
    assert "rank 1 asked for 1 collectives of default_pg, others for 2" in remarks


def test_groups_and_transfers_between_two_ranks_are_told_apart(tmp_path: Path) -> None:
    run = read(
        written(
            tmp_path,
            1,
            a_dump(
                an_entry(1, process_group=("1", "tp")),
                an_entry(0, profiling_name="nccl:recv 1<-0", is_p2p=True, p2p_seq_id=4),
                an_entry(
                    2,
                    profiling_name="nccl:coalesced",
                    input_sizes=[],
                    output_sizes=[],
                    input_dtypes=[],
                    output_dtypes=[],
                ),
            ),
        )
    )
    table = run.collectives
    assert table.group.tolist() == ["tp 1", "default_pg 0>1", "default_pg"]
    assert table.op.tolist() == ["allreduce", "sendrecv", "coalesced"]
    assert table.sequence.tolist() == [1, 4, 2]
    assert table.dtype.tolist() == ["float32", "float32", SIZE_UNKNOWN]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_python_writes_again_is_read_alike(tmp_path: Path, protocol: int) -> None:
    dump = a_dump(*(an_entry(number) for number in range(1500)))
    run = read(written(tmp_path, 0, dump, protocol=protocol))
    assert run.collectives.sequence.tolist() == list(range(1500))


class _Calls:
    """Pickles to a call of any function."""

    def __init__(self, function: Any, *arguments: object) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Any, tuple[object, ...]]:
        return self._call


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_nothing_that_a_pickle_names_is_called(tmp_path: Path, protocol: int) -> None:
    bait = tmp_path / "called"
    dump = a_dump(an_entry(1, frames=_Calls(os.mkdir, str(bait))))
    with pytest.raises(DamagedInput, match=r"the name 'posix.mkdir', and nothing is imported"):
        read(written(tmp_path, 0, dump, protocol=protocol))
    assert not bait.exists()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"\x80\x02](K\x01e" + b"h\x05" + b"profiling_name", "which there is not"),
        (b"\x80\x02" + b"N" * 5_000_000 + b"profiling_name", "no dump has so many"),
        (b"\x80\x02" + b"(" * 5_000_000 + b"profiling_name", "more nested"),
        (b"\x80\x02\x8b\xff\xff\xff\x7fprofiling_name", "a number of 2,147,483,647 bytes"),
        (b"\x80\x02}K\x01K\x02sprofiling_name.", "a key that is no text"),
        (b"\x80\x02]r\x00\x00\x00\x00]q\x01Rprofiling_name.", "nothing is called"),
        (b"\x80\x02eprofiling_name", "an end without a beginning"),
        (b"\x80\x02Pprofiling_name", "which plain values do not need"),
    ],
)
def test_hostile_pickles_are_refused_in_one_line(
    tmp_path: Path, content: bytes, problem: str
) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(DamagedInput, match=problem):
        read(tmp_path / "x", format="flight-recorder")


def test_lists_that_look_larger_than_their_file_cost_no_more_than_it(tmp_path: Path) -> None:
    shape = [1] * 64
    sizes = [shape] * 10_000
    entry = an_entry(1, input_sizes=sizes, input_dtypes=["Float"] * 10_000)
    run = read(written(tmp_path, 0, a_dump(*[entry] * 10_000)))
    assert len(run.collectives) == 10_000


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 0.999])
def test_a_dump_that_is_cut_gives_what_came_before(tmp_path: Path, share: float) -> None:
    entries = [an_entry(number) for number in range(3000)]
    for name, content in (
        ("rank_0", pickle.dumps(a_dump(*entries), 2)),
        ("rank_1.json", json.dumps(a_dump(*entries)).encode()),
    ):
        (tmp_path / name).write_bytes(content[: int(len(content) * share)])
        run = read(tmp_path / name)
        assert len(run.collectives) == pytest.approx(3000 * share, abs=60)
        assert "the entries before are read" in run.missing[0]


_PIECES = st.sampled_from(
    [
        b"}",
        b"]",
        b"(",
        b"t",
        b"u",
        b"e",
        b"a",
        b"s",
        b"q\x00",
        b"h\x00",
        b"N",
        b"X\x07\x00\x00\x00entries",
        b"\x8c\x0eprofiling_name\x94",
        b"K\x07",
        b"\x94",
        b"R",
        b".",
        b"0",
        b"\x85",
        b"\x8a\x09",
        b"ctorch.jit._pickle\nbuild_intlist\n",
        b"J\xff\xff\xff\xff",
        b"1",
        b"l",
    ]
)


@given(st.lists(_PIECES | st.binary(max_size=3), max_size=40))
@cases(300)
def test_any_pickle_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any_rank_0"
    path.write_bytes(b"\x80\x02" + b"".join(pieces))
    with contextlib.suppress(FullwireError):
        read(path, format="flight-recorder")


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(sorted(an_entry(1))), _VALUES, max_size=4))
@cases(200)
def test_an_entry_may_hold_anything(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, object]
) -> None:
    where = tmp_path_factory.getbasetemp()
    run = read(written(where, 0, a_dump(an_entry(1), an_entry(2, **changes))))
    assert 1 <= len(run.collectives) <= 2
    fullwire.explain(run)


def test_chakra_traces_of_pytorchs_own_observer(real_dumps: Path) -> None:
    run = read(real_dumps / "chakra")
    assert run.facts.workers == 2
    for rank in range(2):
        mine = run.collectives.rows(run.collectives.rank == rank)
        assert mine.op.tolist().count("barrier") == 1
        assert mine.rows(mine.op == "allreduce").bytes.tolist() == [4 * (64 * 32 + 32)] * 3
        assert mine.rows(mine.op == "allgather").bytes.tolist() == [80]
