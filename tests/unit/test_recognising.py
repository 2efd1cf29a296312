"""Files are recognised by their content, at once or late, and not by their name."""

from __future__ import annotations

import json
import lzma
import time
from pathlib import Path

import pytest

from fullwire.errors import DamagedInput, FullwireError
from fullwire.files import MOST_SNIFFED_BYTES
from fullwire.importers import FORMATS, read
from fullwire.importers._recognise import kinds_of

EVENT = {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "pid": 1, "tid": 1, "ts": 1, "dur": 5}


def kinds(path: Path, content: str | bytes) -> list[str]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return kinds_of(FORMATS, path)


@pytest.mark.parametrize("metadata_bytes", [25_000, 300_000])
def test_a_profile_may_begin_with_metadata(tmp_path: Path, metadata_bytes: int) -> None:
    trace = {"metadata": {"notes": "x" * metadata_bytes}, "traceEvents": [EVENT]}
    assert kinds(tmp_path / "trace.json", json.dumps(trace)) == ["kineto"]


def test_a_timeline_may_begin_with_cycles(tmp_path: Path) -> None:
    cycle = '{"name": "CYCLE_START", "ph": "i", "pid": 0, "ts": 1, "s": "g"},\n'
    assert kinds(tmp_path / "timeline.json", "[\n" + 300 * cycle) == ["horovod"]


def test_lines_of_nccl_may_begin_late_in_the_log_of_a_job(tmp_path: Path) -> None:
    log = "epoch 0: loss 2.3, nothing of NCCL yet\n" * 13_000
    assert 400_000 < len(log) < MOST_SNIFFED_BYTES
    line = "n1:7:8 [0] NCCL INFO comm 0x1 rank 0 nranks 8 cudaDev 0 - Init START\n"
    assert kinds(tmp_path / "job.log", log + line) == ["nccl-log"]
    (tmp_path / "other.json").write_text(json.dumps({"traceEvents": [EVENT]}))
    assert kinds_of(FORMATS, tmp_path) == ["kineto", "nccl-log"]


def test_a_table_of_many_ranks_begins_late(tmp_path: Path) -> None:
    rank = "#  Rank {0:6d} Group  0 Pid  {0:6d} on  node{0:04d} device  0 [0x0f] NVIDIA H100\n"
    text = "# a launcher\n" + "".join("noise of the launcher " * 5 + "\n" for _ in range(2_048))
    text += "# Using devices\n" + "".join(rank.format(each) for each in range(2_048))
    text += "#       size         count      type   redop    root     time   algbw   busbw\n"
    assert len(text) > 300_000
    assert kinds(tmp_path / "out.txt", text) == ["nccl-tests"]


@pytest.mark.parametrize("key", [key for key in FORMATS if FORMATS[key].is_of_many])
def test_a_folder_that_holds_none_of_a_format_is_refused_in_words(tmp_path: Path, key: str) -> None:
    (tmp_path / "notes.txt").write_text("nothing of the kind")
    with pytest.raises(DamagedInput, match=r"a folder without|no profiler trace is in it"):
        read(tmp_path, format=key)


@pytest.mark.parametrize("key", FORMATS)
def test_an_empty_folder_is_refused_whatever_is_asked_for(tmp_path: Path, key: str) -> None:
    with pytest.raises(FullwireError):
        read(tmp_path, format=key, **({"step_time": "1s"} if key == "netx" else {}))


@pytest.mark.parametrize(
    "text",
    [b"a", b"{", b"[", b"# ", b" ", b"NCCL INFO", b'{"version": ', b"12:", b"#  size ", b"\n"],
)
def test_a_look_is_short_whatever_a_file_holds(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes((text * MOST_SNIFFED_BYTES)[: 2 * MOST_SNIFFED_BYTES])
    beginning = path.read_bytes()[:MOST_SNIFFED_BYTES]
    [each.looks_like(b"") for each in FORMATS.values()]  # loaded
    start = time.process_time()
    for each in FORMATS.values():
        each.looks_like(beginning)
    assert time.process_time() - start < 0.05


PROCESS = '{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "NAME"}}'


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("x.json", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git lfs pull"),
        (
            "host.xplane.pb",
            b"\x0a\x20\x12\x09/host:CPU",
            r"profile of JAX or .*: not read; export it",
        ),
        ("x.json", PROCESS.replace("NAME", "/job:localhost/replica:0"), "timeline of JAX or Tens"),
        ("x.json", PROCESS.replace("NAME", "/device:TPU:0"), "timeline of JAX or Tensor.*nothing"),
        ("x.sqlite", b"SQLite format 3\0", "an SQLite database, such as Nsight .*: not read"),
        ("job.nsys-rep", b"\x01\x02\x03", "a report of Nsight: not read"),
        (
            "topo.xml",
            b'<system version="1">',
            "a topology of NCCL .*: not read; it describes hosts",
        ),
        (
            "graph.xml",
            b'<graphs version="1">',
            "a dump of NCCL's rings and trees .*: not read; NCCL_TOPO_DUMP_FILE",
        ),
        ("x.svg", b'<?xml version="1.0"?><svg ', "a picture: not read"),
        ("out.txt", "# nThread 1".encode("utf-16"), "text in UTF-16.*: not read; `iconv -f"),
        ("train.sh", b"#!/bin/sh\n", "a script: not read"),
        ("job.sqlite.nsys-rep", b"\0", "a report of Nsight: not read; record the job"),
        ("perf.data", b"PERFILE2\x68\0", r"a profile of perf \(perf.data\): not read"),
        ("boot.etl", b"\0\1", r"a trace of Windows \(.etl\): not read"),
        ("cpu.pb.gz", b"\x0a\x04", "a profile of pprof: not read"),
        ("model.safetensors", b"\x58\0\0\0\0\0\0\0{}", "a checkpoint: not read"),
        ("arrays.npz", b"NUMPY", "arrays of NumPy: not read"),
        ("look.ipynb", b'{"cells": []}', "a notebook: not read"),
        ("loss.csv", b"step,loss\n1,2\n", r"a table \(CSV\): not read; those of rccl-tests are"),
        ("job.log", b"hello\n", "a text without lines of a known tool: not read; --pattern"),
        (
            "topo.txt",
            b"\t\x1b[4mGPU0\tGPU1\tCPU Affinity\x1b[0m\n",
            "output of nvidia-smi topo: not",
        ),
        ("ib.txt", b"CA 'mlx5_0'\n\tCA type: MT4123\n", "the output of ibstat: not read"),
        ("nic.txt", b"NIC statistics:\n     rx_packets: 1\n", "the output of ethtool -S: not read"),
        ("out.json", b'{"rocprofiler-sdk-tool": []}', r"a trace of rocprofv3 \(JSON\): not read"),
        ("LICENSE", "Ünder terms\n".encode(), "a text without lines of a known tool: not read"),
        ("a.json", b'{"loss": [1, 2]}', "JSON that is no known trace: not read"),
        ("t.csv.xz", lzma.compress(b"step,loss\n1,2\n"), r"a table \(CSV\): not read"),
    ],
)
def test_what_is_not_read_is_refused_under_its_own_name(
    tmp_path: Path, name: str, content: str | bytes, reason: str
) -> None:
    path = tmp_path / name
    whole = content if isinstance(content, bytes) else f'{{"traceEvents": [{content}]}}'.encode()
    path.write_bytes(whole)
    with pytest.raises(DamagedInput, match=reason) as refused:
        read(path)
    assert "none of the formats" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('[{"ph": "X", "name": "a", "ts": 1, "dur": 2}]', "resembles Horovod timelines, but lacks"),
        (
            '{"events": [{"ph": "X"}]}',
            "resembles profiler traces, but lacks the list",
        ),
    ],
)
def test_a_near_miss_says_what_is_missing(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "x").write_text(content)
    with pytest.raises(DamagedInput, match=reason):
        read(tmp_path / "x")
