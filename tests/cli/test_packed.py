"""Packed files, and files among others, are read by their content, or refused."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import fullwire as fw
from fullwire.errors import DamagedInput, UsageError
from fullwire.importers import import_run, read
from tests import packets as p
from tests.conftest import Cli
from tests.foreign_jobs import Do, Writing, play, write
from tests.torch.test_flight_recorder import a_dump, an_entry
from tests.unit.test_chakra import COLLECTIVE, a_node, a_trace, attribute
from tests.unit.test_flows import captured
from tests.unit.test_horovod import a_job
from tests.unit.test_nccl_tests import a_log

_ROW = "  1024  256  float  sum  -1  9.50  0.11  0.11  0  9.1  0.1  0.1  0\n"
_SAID = "h:1:2 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>\n"


def _dump(path: Path) -> None:
    path.write_bytes(pickle.dumps(a_dump(an_entry(1), an_entry(2)), protocol=2))


def _timeline(path: Path) -> None:
    a_job().write(path)


def _schedule(path: Path) -> None:
    a_trace(path, a_node(1, COLLECTIVE, attribute("comm_type", 0), attribute("comm_size", 64)))


def _table(path: Path) -> None:
    a_log(path.parent, _ROW, path.name)


def _set_up(path: Path) -> None:
    path.write_text(_SAID)


def _packets(path: Path) -> None:
    captured(path)


_PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "xz": lzma.compress,
    "zst": lambda content: pa.compress(content, codec="zstd", asbytes=True),
}


@pytest.mark.parametrize("packer", _PACKERS)
@pytest.mark.parametrize("make", [_dump, _timeline, _schedule, _table, _set_up, _packets])
def test_what_is_packed_is_read_as_if_it_were_not(
    tmp_path: Path, make: Callable[[Path], None], packer: str
) -> None:
    plain = tmp_path / "all_reduce_rank_0"
    make(plain)
    packed = tmp_path / "traces" / f"all_reduce_rank_0.{packer}"
    packed.parent.mkdir()
    packed.write_bytes(_PACKERS[packer](plain.read_bytes()))
    known, found = read(plain), read(packed)
    assert found.facts == known.facts
    for (name, one), (_, other) in zip(known.tables(), found.tables(), strict=True):
        assert {n: c.tolist() for n, c in one.columns().items()} == {
            n: c.tolist() for n, c in other.columns().items()
        }, name
    assert len(read(packed.parent).collectives) == len(known.collectives)


def test_what_was_cut_while_packed_is_refused_and_a_bomb_too(tmp_path: Path) -> None:
    _timeline(tmp_path / "x.json")
    packed = gzip.compress((tmp_path / "x.json").read_bytes())
    (tmp_path / "cut.json.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DamagedInput, match="cannot be unpacked to its end"):
        read(tmp_path / "cut.json.gz")
    bomb = b"# nThread 1 nGpus 2\n" + bytes(70 << 20)
    (tmp_path / "bomb.log.gz").write_bytes(gzip.compress(bomb))
    with pytest.raises(DamagedInput, match="over 300 times its size"):
        read(tmp_path / "bomb.log.gz")


def test_of_a_cut_capture_all_before_the_cut_is_read(tmp_path: Path) -> None:
    frames = [(number, p.segment(1 + number, 1)) for number in range(3_000)]
    content = gzip.compress(p.pcap(frames))
    (tmp_path / "x.pcap.gz").write_bytes(content[: len(content) * 9 // 10])
    run = read(tmp_path / "x.pcap.gz")
    assert 2_500 < int(run.flows.packets.sum()) < 3_000
    assert "cannot be unpacked to its end" in run.missing[0]


def test_a_folder_of_captures_is_one_argument(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "captures/rank0").mkdir(parents=True)
    captured(tmp_path / "captures/rank0/x.pcap")
    (tmp_path / "captures/notes.txt").write_text("from the switch")
    found = fw.flows(tmp_path / "captures")
    assert found.iterations is not None
    assert found.iterations.count == 8
    (tmp_path / "empty").mkdir()
    done = cli("flows", tmp_path / "empty")
    assert (done.returncode, done.stderr) == (
        3,
        f"fullwire: {tmp_path}/empty: expected a run, or a folder of packet captures\n",
    )


def test_who_explains_packets_is_told_what_finds_their_steps(tmp_path: Path, cli: Cli) -> None:
    capture = captured(tmp_path / "x.pcap")
    done = cli("explain", capture)
    assert done.returncode == 2
    assert "the run that `fullwire flows CAPTURE... -o x.run` writes" in done.stderr


def test_a_pipe_as_file_of_hosts_is_refused(tmp_path: Path, cli: Cli) -> None:
    os.mkfifo(tmp_path / "hosts")
    done = cli("flows", captured(tmp_path / "x.pcap"), "--hosts", tmp_path / "hosts")
    assert (done.returncode, done.stdout) == (2, "")
    assert "expected a file, got a pipe" in done.stderr


def test_traces_of_a_folder_need_no_ending_if_none_has_one(tmp_path: Path) -> None:
    played = play([Do(what="compute", us=100)], ranks=2, steps=4)
    where = write(played, tmp_path / "traces", Writing(name=lambda rank: f"rank{rank}.json"))
    for path in where.iterdir():
        path.rename(path.with_suffix(".trace"))
    (where / "notes.txt").write_text("of two ranks")
    run = read(where)
    assert run.complete
    assert sorted(set(run.spans.rank.tolist())) == [0, 1]


def test_who_imports_is_told_what_is_missing(tmp_path: Path, cli: Cli) -> None:
    played = play([Do(what="compute", us=100)], ranks=2, steps=4)
    where = write(played, tmp_path / "traces", Writing(name=lambda rank: f"rank{rank}.json"))
    for number in range(7):
        (where / f"{number}.json").write_text("{")
    done = cli("import", where, "-o", tmp_path / "x.run")
    assert done.returncode == 0
    first, *others = done.stderr.splitlines()
    assert first == f"written: {tmp_path}/x.run"
    assert len(others) == 6
    assert others[0].startswith(f"note: PARTIAL: {where}/0.json: not a profiler trace")
    assert others[-1] == "note: PARTIAL: 2 more, which `fullwire show` names"


def test_a_damaged_trace_is_named_once(tmp_path: Path, cli: Cli) -> None:
    trace = {"schemaVersion": 1, "traceEvents": []}
    (tmp_path / "x.json").write_text(json.dumps(trace))
    done = cli("import", tmp_path / "x.json", "-o", tmp_path / "x.run")
    assert done.returncode == 3
    assert done.stderr.count(str(tmp_path)) == 1


def _trace(path: Path) -> None:
    played = play([Do(what="compute", us=100)], ranks=1, steps=4)
    where = write(played, path.parent / "one", Writing(name=lambda rank: f"rank{rank}.json"))
    (where / "rank0.json").rename(path)


@pytest.mark.parametrize("make", [_timeline, _schedule, _table, _set_up, _trace])
def test_a_mark_before_text_says_nothing(tmp_path: Path, make: Callable[[Path], None]) -> None:
    plain = tmp_path / "all_reduce_rank_0"
    make(plain)
    (tmp_path / "marked").mkdir()
    marked = tmp_path / "marked" / plain.name
    marked.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())
    known, found = read(plain), read(marked)
    assert found.facts == known.facts
    assert len(found.missing) == len(known.missing)
    assert [len(table) for _, table in found.tables()] == [len(t) for _, t in known.tables()]


@pytest.mark.parametrize("packer", _PACKERS)
def test_traces_are_read_packed_whole_or_cut(tmp_path: Path, packer: str) -> None:
    played = play([Do(what="compute", us=100)], ranks=2, steps=400)
    plain = write(played, tmp_path / "plain", Writing(name=lambda rank: f"rank{rank}.json"))
    known = read(plain)
    where = tmp_path / "packed"
    where.mkdir()
    for path in plain.iterdir():
        (where / f"{path.name}.{packer}").write_bytes(_PACKERS[packer](path.read_bytes()))
    found = read(where)
    assert found.complete
    assert found.spans.start_ns.tolist() == known.spans.start_ns.tolist()
    cut = where / f"rank1.json.{packer}"
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    partial = read(where)
    assert any("in the middle" in each or "damaged" in each for each in partial.missing)
    assert sum(partial.spans.rank == 0) > 0
    bomb = b'{"schemaVersion": 1, "traceEvents": [' + b" " * (70 << 20)
    (tmp_path / "bomb").write_bytes(_PACKERS[packer](bomb))
    with pytest.raises(DamagedInput, match="over 300 times its size"):
        read(tmp_path / "bomb")


def test_archives_are_refused_with_what_to_do(tmp_path: Path) -> None:
    _set_up(tmp_path / "nccl.log")
    kinds = {"tar": "xf", "gztar": "xf", "xztar": "xf", "zip": "unzip"}
    for packing, word in kinds.items():
        where = tmp_path / packing
        where.mkdir()
        archive = shutil.make_archive(str(where / "logs"), packing, tmp_path, "nccl.log")
        with pytest.raises(
            DamagedInput, match=rf"archive: unpack it first \(.*{word}\)"
        ) as refused:
            read(archive)
        assert archive in str(refused.value)
        with pytest.raises(DamagedInput, match="unpack it first"):
            read(where)  # a folder of archives
        with pytest.raises(DamagedInput, match="unpack it first"):
            fw.flows(archive)


def test_what_a_folder_holds_besides_is_said(tmp_path: Path) -> None:
    played = play([Do(what="compute", us=100)], ranks=2, steps=4)
    where = write(played, tmp_path / "traces", Writing())
    _dump(where / "rank0.dump")
    _packets(where / "rank0.pcap")
    _set_up(where / "nccl.log")
    shutil.make_archive(str(where / "more"), "zip", tmp_path, "traces/nccl.log")
    for run in (read(where), read(import_run(tmp_path / "x.run", where))):
        assert run.facts.nccl_network == "Socket"
        assert run.missing == (
            f"{where}: its other files are left out (archives, capture, flight-recorder): "
            "a run is made of one kind, here kineto",
        )


def test_a_run_may_lie_beside_its_traces(tmp_path: Path) -> None:
    played = play([Do(what="compute", us=100)], ranks=2, steps=4)
    where = write(played, tmp_path / "traces", Writing())
    run = import_run(where / "job.run", where)
    assert read(where).complete
    with pytest.raises(UsageError, match=r"part of a run: name the folder, .*job.run"):
        read(run / "run.json")


def test_a_folder_of_everything_is_not_searched_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fullwire.files._MOST_BELOW", 20)
    for number in range(21):
        (tmp_path / str(number)).mkdir()
    with pytest.raises(UsageError, match="over 20 files and folders are below it: name the folder"):
        read(tmp_path)


def test_a_test_that_hung_tells_how_nccl_was_set_up(tmp_path: Path) -> None:
    path = tmp_path / "all_reduce.log"
    path.write_text("# nThread 1 nGpus 2 minBytes 8 maxBytes 2048\n" + _SAID)
    run = read(path)
    assert run.facts.nccl_network == "Socket"
    assert "no whole row" in run.missing[-1]
