"""Files are recognised by their content, at once or late, and not by their name."""

from __future__ import annotations

import gzip
import json
import lzma
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest

from fullwire import files
from fullwire.errors import DamagedInput, FullwireError, UsageError
from fullwire.files import MOST_SNIFFED_BYTES, SNIFFED_BYTES
from fullwire.importers import FORMATS, read
from fullwire.importers._recognise import kinds_of, unread

EVENT = {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "pid": 1, "tid": 1, "ts": 1, "dur": 5}


def kinds(path: Path, content: str | bytes) -> list[str]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return kinds_of(FORMATS, path)


@pytest.mark.parametrize("metadata_bytes", [25_000, 300_000])
def test_a_profile_may_begin_with_metadata(tmp_path: Path, metadata_bytes: int) -> None:
    trace = {"metadata": {"notes": "x" * metadata_bytes}, "traceEvents": [EVENT]}
    assert kinds(tmp_path / "trace.json", json.dumps(trace)) == ["kineto"]


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_a_packed_profile_may_begin_with_metadata(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    trace = {"metadata": {"notes": "x" * 300_000}, "traceEvents": [EVENT]}
    packed = pack(json.dumps(trace).encode())
    assert len(packed) < SNIFFED_BYTES < 300_000 < MOST_SNIFFED_BYTES
    assert kinds(tmp_path / "trace.json", packed) == ["kineto"]


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


def test_files_of_which_one_makes_a_run_are_named_as_people_name_them(tmp_path: Path) -> None:
    line = '{"name": "CYCLE_START", "ph": "i", "pid": 0, "ts": 1, "s": "g"},\n'
    places = [tmp_path / folder / "timeline.json" for folder in ("a", "b/c")]
    for place in places:
        place.parent.mkdir(parents=True)
        place.write_text("[\n" + line)
    several = "one file makes a run, and here are 2 Horovod timelines: "
    with pytest.raises(UsageError) as found:
        read(tmp_path)
    assert str(found.value) == f"{tmp_path}: {several}a/timeline.json, b/c/timeline.json"
    with pytest.raises(UsageError) as found:
        read(*places)
    expected = f"expected one path, got 2: {places[0]}, {places[1]}"
    assert str(found.value) == f"read: Horovod timelines: {expected}"
    with pytest.raises(UsageError) as found:
        read(places[0], "vgg16@v100")
    of_two = f"Horovod timelines ({places[0]}) and a workload (vgg16@v100)"
    assert str(found.value) == f"read: expected files of one kind, got {of_two}"
    log = tmp_path / "nccl.log"  # which goes with any kind, and so is not at fault
    log.write_text("h:1:2 [0] NCCL INFO NCCL version 2.27.7+cuda13.0\n")
    with pytest.raises(UsageError) as found:
        read(log, places[0], "vgg16@v100")
    assert str(found.value) == f"read: expected files of one kind, got {of_two}"


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
    unread(path, b"")  # its expressions are compiled
    start = time.process_time()
    unread(path, beginning)
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
        (
            "mlflow.db",
            b"SQLite format 3\0",
            "a database of MLflow: not read; `fullwire record`",
        ),
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
        ("zeros", bytes(4096), "none of the formats that are read"),
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
        ("nccl.xlsx", b"PK\x03\x04[Content_Types].xml", "a spreadsheet: not read; save it as CSV"),
        ("loss.csv", b"step,loss\n1,2\n", r"a table \(CSV\): not read; those of rccl-tests are"),
        ("job.log", b"hello\n", "a text of an unknown tool: not read. --pattern"),
        (
            "topo.txt",
            b"\t\x1b[4mGPU0\tGPU1\tCPU Affinity\x1b[0m\n",
            "output of nvidia-smi topo: not",
        ),
        ("ib.txt", b"CA 'mlx5_0'\n\tCA type: MT4123\n", "the output of ibstat: not read"),
        ("nic.txt", b"NIC statistics:\n     rx_packets: 1\n", "the output of ethtool -S: not read"),
        ("out.json", b'{"rocprofiler-sdk-tool": []}', r"a trace of rocprofv3 \(JSON\): not read"),
        ("LICENSE", "Ünder terms\n".encode(), "a text of an unknown tool: not read"),
        ("a.json", b'{"loss": [1, 2]}', "JSON of an unknown kind: not read"),
        ("model.pt", b"PK\x03\x04" + bytes(26) + b"model/data.pkl", "a checkpoint: not read"),
        ("m.pth", b"PK\x03\x04", "a checkpoint: not read"),
        ("x.zip", b"PK\x03\x04", "a zip archive: unpack it first"),
        (
            "p.json",
            b'[\n{"name": "Group", "cat": "GROUP", "ph": "b", "id": 0}',
            "the events of NCCL's profiler plugin: not read",
        ),
        (
            "h-pid1.log",
            b'{"header":{"id":"0x7f","rank":0},"metadata":{"inspector_output_format_version":"v4"',
            "the output of NCCL's Inspector plugin: not read",
        ),
        ("bw.txt", b"RDMA_Write BW Test\n #bytes     #iterations  BW", "a report of perftest"),
        ("imb.txt", b"#---\n#    Intel(R) MPI Benchmarks 2021.3\n", "Intel MPI Benchmarks: not"),
        ("i.json", b'{"start":{"connected":[],"version":"iperf 3.9"}}', "a report of iperf: not"),
        ("i.txt", b"-" * 60 + b"\nClient connecting to 10.0.0.1, TCP", "a report of iperf: not"),
        ("nvbw.txt", b"nvbandwidth Version: v0.4\n", "a report of nvbandwidth: not read"),
        ("smi.txt", b"==== ROCm System Management Interface ====\n", "the output of rocm-smi"),
        ("t.txt", b"12:00:00.000000 IP 10.0.0.1.1 > 10.0.0.2.2: Flags", "packets as text"),
        ("s.txt", b'execve("/bin/ls", ["ls"], 0x7f) = 0\n', "a log of strace: not read"),
        ("f.txt", b"# tracer: nop\n#\n", r"a trace of the kernel \(ftrace\): not read"),
        ("sar.txt", b"Linux 5.4.0 (host) \t05/01/2024 \t_x86_64_\t(8 CPU)\n", "sysstat"),
        ("hlo.txt", b"HloModule jit_f\n", r"a program of XLA \(HLO\): not read"),
        ("x.arrow", b"ARROW1\0\0", "a table in Arrow or Feather: not read"),
        ("x.yaml", b"a: 1\n", "settings: not read"),
        ("x.toml", b"[a]\nb = 1\n", "settings: not read"),
        ("x.py", b"import torch\n", "source code: not read"),
        ("x.dot", b"digraph G {}\n", r"a graph \(DOT\): not read"),
        ("x.onnx", b"\x08\x07\x12\x07pytorch", "a model: not read"),
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
    assert ("none of the formats" in str(refused.value)) == (name == "zeros")


NEAR_MISSES = {
    "capture": (b"snoop\0\0\0\0\0\0\2", "the mark of pcap"),
    "chakra": (b'{"nodes": [{"name": "aten::mm", "op_schema": ""}]}', 'its "schema"'),
    "chrome": (b'{\n  "fullwire": 1,\n  "traceEvents": []\n}', "another program wrote it anew"),
    "flight-recorder": (b'{"entries": [], "pg_status": {}}', "entries with their profiling_name"),
    "horovod": (b'[{"ph": "X", "name": "a", "ts": 1, "dur": 2}]', "its events NEGOTIATE_"),
    "kineto": (b'{"events": [{"ph": "X"}]}', 'the list "traceEvents"'),
    "mlflow": (b"1795409435913 2.0\n1795409435914 3.0\n", "the step behind each time"),
    "nccl-log": (b"NCCL version 2.27.7+cuda13.0\nhello\n", "without NCCL_DEBUG=INFO"),
    "nccl-tests": (b"size, time, algbw and busbw follow\n", "whole rows: size, count"),
    "netx": (b"1\n3\n483.5,4000\n12.25,64\n", "its first line"),
    "osu": (b"# Size       Avg Latency(us)\n4    10.05\n", "a title such as"),
    "tensorboard": (b"\0" * 100 + b"brain.Event:2", "its version at the beginning"),
    "training-log": (b"step 12: loss 2.31\nstep 13: loss 2.30\n", "the length of a step"),
    "wandb": (b"\0\0:W&B\0\0", "its mark in the first bytes"),
    "xla": (b'{"events": [{"args": {"hlo_op": "fusion.1"}}]}', "/device:GPU:0"),
}


@pytest.mark.parametrize("key", NEAR_MISSES)
def test_a_near_miss_says_what_is_missing(tmp_path: Path, key: str) -> None:
    content, lacks = NEAR_MISSES[key]
    (tmp_path / "x").write_bytes(content)
    label = FORMATS[key].label
    with pytest.raises(DamagedInput) as refused:
        read(tmp_path / "x")
    assert f"it resembles {label}, but lacks " in str(refused.value)
    assert lacks in str(refused.value)


@pytest.mark.parametrize("text", [b"a line of a log\n", b'{"a": 1,\n', b"NCCL version 2.2\n"])
def test_a_look_reads_one_mebibyte_at_most(
    tmp_path: Path, text: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, farthest = tmp_path / "large.log", [0]
    path.write_bytes(text * (8 * MOST_SNIFFED_BYTES // len(text)))
    opened = files.opened

    @contextmanager
    def watched(path: Path) -> Iterator[BinaryIO]:
        with opened(path) as file:
            yield file
            farthest.append(file.tell())

    monkeypatch.setattr(files, "opened", watched)
    with pytest.raises(DamagedInput):
        kinds_of(FORMATS, path)
    assert SNIFFED_BYTES < max(farthest) <= MOST_SNIFFED_BYTES
    assert len(farthest) == 3  # the start, a first look and a longer one
