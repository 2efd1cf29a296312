"""Damage of every kind gives a run or one line; `validation/fuzz.py` tries 100,000 cases."""

from __future__ import annotations

import gzip
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import fullwire
from fullwire.errors import DamagedInput, FullwireError
from fullwire.importers import FORMATS, read
from tests.conftest import Cli
from tests.strategies import scaled
from tests.unit.test_kineto import GEMM, Job
from validation import fuzz, fuzz_formats


@pytest.mark.parametrize("reader", fuzz.SEEDS)
def test_damage_of_every_kind_gives_a_run_or_one_line(reader: str) -> None:
    count = scaled(300)
    counts = fuzz.outcomes(reader, count, seed=7)
    assert counts["refused"] > count / 15
    assert counts["partial"] > count / 3


@pytest.mark.parametrize("reader", fuzz.SEEDS)
def test_what_is_damaged_was_whole_and_tells_something(tmp_path: Path, reader: str) -> None:
    for content in fuzz.SEEDS[reader]():
        path = tmp_path / "trace.json"
        path.write_bytes(content)
        assert len(read(path).collectives) >= 4
        assert fuzz.outcome(content, reader, path) in ("whole", "partial")


def one_key_repeated(place: str, size: int) -> Iterator[bytes]:
    """Give a trace that is one key, over and over, in its header, in an event or in arguments."""
    yield {
        "header": b'{"schemaVersion": 1',
        "event": b'{"traceEvents": [{"ph": "X"',
        "arguments": b'{"traceEvents": [{"ph": "X", "args": {"a": 1',
        "events": b'{"traceEvents": [{"ph": "X"}',
    }[place]
    piece = b', {"ph": "X"}' if place == "events" else b', "stream": 7'
    chunk = piece * (2**20 // len(piece))
    for _ in range(size // len(chunk)):
        yield chunk


@pytest.mark.parametrize("place", ["header", "event", "arguments", "events"])
def test_one_key_without_end_takes_no_memory(tmp_path: Path, place: str) -> None:
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from fullwire.errors import DamagedInput\n"
        "from fullwire.importers.kineto.scan import scanned\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n"
        "    print(scanned(Path(sys.argv[1])).problems)\n"
        "except DamagedInput as error:\n"
        "    print(error)\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)\n"
    )
    path = tmp_path / "repeated.json"
    with path.open("wb") as file:
        file.writelines(one_key_repeated(place, 120 * 2**20))
    done = subprocess.run(
        [sys.executable, "-c", code, path], check=True, capture_output=True, text=True
    )
    said, grown_mib = done.stdout.splitlines()
    path.unlink()
    is_endless_value = place in ("event", "arguments")
    assert ("a value of over" if is_endless_value else "ends") in said
    assert int(grown_mib) < (200 if is_endless_value else 40)  # a value may have 64 MiB


def test_a_bomb_among_ranks_is_one_line_and_the_others_are_read(tmp_path: Path, cli: Cli) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    Job(0, world=2).kernel(GEMM, 0, 10).write(folder / "a.json")
    packer = zlib.compressobj(9, wbits=31)
    with (folder / "b.json.gz").open("wb") as file:
        file.write(packer.compress(b'{"schemaVersion": 1'))
        for _ in range(100):
            file.write(packer.compress(b', "key": 1' * 100_000))
        file.write(packer.flush())
    done = cli("import", folder, "-o", tmp_path / "job.run")
    assert done.returncode == 0
    run = read(tmp_path / "job.run")
    assert set(run.spans.rank) == {0}
    assert any("b.json.gz: it unpacks to over 300 times" in sentence for sentence in run.missing)
    alone = cli("import", folder / "b.json.gz", "-o", tmp_path / "bomb.run")
    assert (alone.returncode, len(alone.stderr.splitlines())) == (3, 1)


def test_members_of_a_compressed_file_follow_each_other(tmp_path: Path) -> None:
    text = Job(0, world=2).kernel(GEMM, 0, 10).kernel(GEMM, 20, 30).text().encode()
    halves = [gzip.compress(text[:200]), gzip.compress(text[200:])]
    (tmp_path / "a.json.gz").write_bytes(b"".join(halves))
    assert len(read(tmp_path / "a.json.gz").spans) == 2


def test_names_that_look_like_paths_or_pages_stay_names(tmp_path: Path, cli: Cli) -> None:
    name = "../../../etc/passwd\0<script>alert(1)</script>"
    job = Job(0, world=2, host_name=name).step(0, 0, 50).step(1, 50, 100).step(2, 100, 150)
    for start in (0, 50, 100):
        job.kernel(name, start, start + 30, launch=start + 1)
        job.kernel(
            "ncclKernel",
            start + 30,
            start + 45,
            launch=start + 2,
            stream=9,
            **{"Process Group Name": name, "Collective name": "allreduce"},
        )
    path = job.write(tmp_path / "rank-0<b>.json")
    assert cli("import", path, "-o", tmp_path / "job.run").returncode == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["job.run", path.name]
    assert cli("report", tmp_path / "job.run", "-o", tmp_path / "page.html").returncode == 0
    assert b"<script>alert" not in (tmp_path / "page.html").read_bytes()
    assert fullwire.explain(tmp_path / "job.run").verdict.kind == "unknown"


def test_a_link_to_itself_or_to_nothing_in_a_folder_is_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    Job(0, world=1).kernel(GEMM, 0, 10).write(folder / "a.json")
    (folder / "again").symlink_to(folder)
    (folder / "gone.json").symlink_to(folder / "nothing")
    (folder / "self.json").symlink_to(folder / "self.json")
    assert len(read(folder).spans) == 1
    (folder / "a.json").unlink()
    with pytest.raises(DamagedInput, match="no profiler trace is in it"):
        read(folder, format="kineto")


def test_the_readers_that_are_fuzzed_are_all_of_the_registry() -> None:
    known = fuzz_formats.readers()
    assert {each.format for each in known.values()} == {*FORMATS}


@pytest.mark.parametrize("name", fuzz_formats.readers())
def test_what_is_fuzzed_is_whole_before_its_damage(tmp_path: Path, name: str) -> None:
    """Otherwise every damaged case would be refused at its first byte."""
    reader, refused = fuzz_formats.readers()[name], []
    for content in reader.inputs:
        path = tmp_path / "rank_0.json"
        path.write_bytes(content)
        try:
            read(path, format=reader.format, **reader.options)
        except FullwireError as error:
            refused.append(str(error))
    assert not [problem for problem in refused if "after 0 packets" not in problem]


@pytest.mark.parametrize("name", fuzz_formats.readers())
def test_damaged_files_of_any_format_give_a_run_or_one_line(tmp_path: Path, name: str) -> None:
    row = fuzz_formats.fuzzed(name, fuzz_formats.readers()[name], 40, 7, tmp_path)
    assert row[4] == 0
