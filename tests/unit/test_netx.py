"""A netx log becomes a run, or is refused at its line; no file makes a reader hang or swell."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullwire.errors import DamagedInput, FullwireError, UsageError
from fullwire.importers import netx, read
from fullwire.importers.netx import read_reduce_cost
from fullwire.run.run import Run
from tests.conftest import Cli
from tests.strategies import cases, damaged, netx_logs, same_run

HEADER = "first line is for explaination; ..."
STEP_TIMES = {"vgg16": 0.19452352295080985, "resnet50": 0.12808580219559176}  # its README
GIB = 2**30


def a_log(
    *lines: str, head: tuple[str, ...] = (HEADER, "1"), count: int | str | None = None
) -> str:
    announced = str(len(lines) if count is None else count)
    return "\n".join((*head, announced, *lines, ""))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "x.log"


def read_log(path: Path, content: str | bytes, *, step_time: str | float = "10s") -> Run:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read(path, format="netx", step_time=step_time)


@contextmanager
def refused(path: Path, line: int | None, problem: str) -> Iterator[None]:
    """Expect a refusal that names this line."""
    with pytest.raises(DamagedInput) as refusal:
        yield
    assert refusal.value.line == line
    assert str(refusal.value).startswith(f"{path}:{line}: " if line else f"{path}: ")
    assert problem in str(refusal.value)


def test_a_log_becomes_one_step_of_one_worker(log: Path) -> None:
    run = read_log(log, a_log("483.5,4000", "0,16384"), step_time="2ms")
    assert run.complete
    assert run.provenance.origin == "imported"
    assert run.facts.workers == 1
    assert run.gradients.bytes.tolist() == [4000, 16384]
    assert run.gradients.ready_ns.tolist() == [2_000_000, 2_000_000]
    assert run.spans.name.tolist() == ["step", "forward", "backward"]
    assert run.spans.start_ns.tolist() == [0, 0, 1_516_500]


@pytest.mark.parametrize("model", ["vgg16", "resnet50"])
def test_the_real_logs_are_read_to_the_last_line(shared_data: Path, model: str) -> None:
    path = shared_data / "netx" / f"{model}.bk.log"
    run = read(path, step_time=STEP_TIMES[model], reduce_cost=path.with_name("cuda_vec_add.log"))
    rows = [line.split(",") for line in path.read_text().splitlines()[3:]]
    assert run.complete
    assert run.gradients.bytes.tolist() == [int(size) for _, size in rows]
    waits_us = np.diff(run.gradients.ready_ns, prepend=run.spans.start_ns[2]) / 1e3
    assert waits_us == pytest.approx([float(wait) for wait, _ in rows], abs=1e-3)
    assert run.facts.reduce_cost == read_reduce_cost(path.with_name("cuda_vec_add.log")).points


def test_other_line_ends_blank_lines_at_the_end_and_a_mark_before_change_nothing(
    log: Path,
) -> None:
    plain = a_log("1.5,4000", "3,8")
    known = read_log(log, plain)
    for text in (plain.replace("\n", "\r\n"), plain + "\n \n", "\ufeff" + plain):
        assert same_run(known, read_log(log, text))


@pytest.mark.parametrize(
    ("content", "line", "problem"),
    [
        ("", None, "the file is empty"),
        ("1\n1\n5,4\n", 1, "expected a line beginning 'first line is for'"),
        (HEADER, 2, "expected the number of batches, and the file ends"),
        (a_log("5,4", head=(HEADER, "2")), 2, "expected 1 batch"),
        (a_log("5,4", head=(HEADER, "one")), 2, "expected the number of batches"),
        (f"{HEADER}\n1\n", 3, "expected the number of gradients, and the file ends"),
        (a_log("5,4", count=0), 3, "from 1 to 1000000, got '0'"),
        (a_log("5,4", count=10**9), 3, "from 1 to 1000000, got '1000000000'"),
        (a_log("5,4", count="1_0"), 3, "got '1_0'"),
        (a_log("5,4", count="\u0661"), 3, "expected plain text"),
        (a_log("5,4", "6,8", count=3), 6, "announces 3 gradients, the file ends after 2"),
        (a_log("5,4", "6,8", count=1), 5, "announces 1 gradients, here is one more"),
        (a_log("5,4", "", "6,8"), 5, "expected microseconds,bytes, two numbers, got ''"),
        (a_log("5,4", "-6,8"), 5, "expected nothing negative, got '-6,8'"),
        (a_log("five,4"), 4, "two numbers, got 'five,4'"),
        (a_log("5,4,6"), 4, "two numbers, got '5,4,6'"),
        (a_log("5;4"), 4, "two numbers"),
        (a_log("nan,4"), 4, "two numbers"),
        (a_log("5,inf"), 4, "two numbers"),
        (a_log("1e400,4"), 4, "two numbers"),
        (a_log("1_0,4"), 4, "two numbers"),
        (a_log("5\0,4"), 4, r"got '5\x00,4'"),
        (a_log("\x1b[31m5,4"), 4, r"got '\x1b[31m5,4'"),
        (a_log("\u0665,4"), 4, "expected plain text"),
        (a_log("5,4.5"), 4, "expected whole bytes above 0, got 4.5"),
        (a_log("5,0"), 4, "expected whole bytes above 0, got 0"),
        (a_log("5,1e15"), 4, "expected whole bytes above 0"),
        (a_log("4e9,4"), 4, "is over an hour"),
        (a_log("5," + "4" * 2000), 4, "longer than 1000 bytes"),
        (a_log("5,4").replace("\n", "\r"), 2, "expected the number of batches, and the file ends"),
    ],
)
def test_damage_is_refused_at_its_line(
    log: Path, content: str, line: int | None, problem: str
) -> None:
    with refused(log, line, problem):
        read_log(log, content)


def test_a_log_cut_within_its_last_number_is_partial_or_refused(log: Path) -> None:
    whole = a_log("1.5,4000", "3,8192").encode()
    for end in range(len(whole)):
        try:
            run = read_log(log, whole[:end])
        except DamagedInput:
            continue
        assert run.missing == (f"{log}: its last line has no end, so it may have been cut",)
    assert read_log(log, whole).complete


@pytest.mark.parametrize(
    ("step_time", "problem"),
    [
        (None, "a netx log holds no step time: give it, like --step-time"),
        ("1us", "is shorter than the backward pass, which takes 5e-06 s"),
        ("25h", "expected at most a day"),
        ("5", "expected a time with its unit"),
        ("-5s", "expected a time of 0 or more"),
    ],
)
def test_a_step_time_that_cannot_be_is_refused(
    log: Path, step_time: str | None, problem: str
) -> None:
    log.write_text(a_log("5,4"))
    with pytest.raises(UsageError, match=re.escape(problem)):
        read(log, step_time=step_time)


@pytest.mark.parametrize(
    ("content", "line", "problem"),
    [
        ("", None, "expected lines of bytes,seconds and found none"),
        ("\n\n", None, "expected lines of bytes,seconds and found none"),
        ("80,1e-5\n40,1e-5\n", 2, "expected sizes in ascending order, got 40"),
        ("40,1e-5\n40,1e-5\n", 2, "expected sizes in ascending order, got 40"),
        ("40,1e-5\n80,-1\n", 2, "expected nothing negative"),
        ("bytes,seconds\n40,1e-5\n", 1, "two numbers, got 'bytes,seconds'"),
        ("40,1e300\n", 1, "is over an hour"),
        ("40,nan\n", 1, "two numbers"),
        ("".join(f"{size},0\n" for size in range(100_001)), 100_001, "more than 100000 sizes"),
    ],
)
def test_a_damaged_table_of_additions_is_refused_at_its_line(
    log: Path, content: str, line: int | None, problem: str
) -> None:
    log.write_text(content)
    with refused(log, line, problem):
        read_reduce_cost(log)


def test_a_table_of_additions_may_have_blank_lines(log: Path) -> None:
    log.write_text("\n40,1e-5\r\n\n80,2e-5")
    assert read_reduce_cost(log).points == ((40, 1e-5), (80, 2e-5))


def test_two_gigabytes_without_a_newline_cost_neither_memory_nor_time(log: Path) -> None:
    log.write_text(HEADER)
    os.truncate(log, 2 * GIB)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with refused(log, 1, "longer than 1000 bytes"):
        read(log, step_time="1s")
    with refused(log, 1, "longer than 1000 bytes"):
        read_reduce_cost(log)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 20_000


def test_lines_without_number_have_an_end(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netx, "_MOST_LINES", 1000)
    log.write_bytes(b"\n" * 1001)
    with refused(log, None, "more than 1000 lines"):
        read_reduce_cost(log)


@pytest.mark.parametrize("format", [None, "netx"])
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("pipe", "expected a file, got a pipe, a socket or a device"),
        ("/dev/zero", "expected a file, got a pipe, a socket or a device"),
        ("n" * 300, "cannot be read: File name too long"),
        ("", "expected a path, got ''"),
        ("a\0b", r"expected a path, got 'a\x00b'"),
    ],
)
def test_what_is_no_file_is_refused_and_not_waited_for(
    tmp_path: Path, name: str, problem: str, format: str | None
) -> None:
    os.mkfifo(tmp_path / "pipe")
    path = str(tmp_path / name) if name in ("pipe", "n" * 300) else name
    with pytest.raises(UsageError, match=re.escape(problem)):
        read(path, format=format, step_time="1s")


@pytest.mark.parametrize("name", ["absent", "link to itself", "x.log/below"])
def test_what_is_not_there_is_said_to_be_absent(tmp_path: Path, log: Path, name: str) -> None:
    log.write_text(a_log("5,4"))
    (tmp_path / "link to itself").symlink_to(tmp_path / "link to itself")
    with pytest.raises(UsageError, match="there is no such file or built-in workload"):
        read(tmp_path / name)


@pytest.mark.parametrize("path", [None, 5, 5.0, b"x.log", ["x.log"], True, object])
def test_what_is_no_path_is_refused(path: object) -> None:
    with pytest.raises(UsageError, match="read: expected a path, got "):
        read(path)  # type: ignore[arg-type]


@pytest.mark.parametrize("format", ["", "pcap", 0, False, [], "netx,run"])
def test_an_unknown_format_is_refused(log: Path, format: object) -> None:
    log.write_text(a_log("5,4"))
    with pytest.raises(UsageError, match="format: expected one of run, workload, capture, "):
        read(log, format=format)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "the file is empty"),
        (b"PAR1", "a table in Parquet: not read"),
        (b"\0\xff", "none of the form"),
        (b"hello\n", "a text of an unknown tool"),
    ],
)
def test_an_unknown_file_is_refused(log: Path, content: bytes, problem: str) -> None:
    log.write_bytes(content)
    with refused(log, None, problem):
        read(log)


def test_step_time_belongs_to_logs_only() -> None:
    with pytest.raises(UsageError, match="belong to netx logs, not to a workload"):
        read("vgg16@v100", step_time="1s")


def test_a_file_name_that_is_no_text_is_kept_readable(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.log"))
    run = read_log(path, a_log("5,4"))
    assert run.provenance.source == rf"{tmp_path}/\xff.log"


@given(netx_logs())
@cases(50)
def test_any_log_as_it_should_be_is_read(tmp_path: Path, content: bytes) -> None:
    run = read_log(tmp_path / "x.log", content)
    assert run.complete
    lines = content.decode().split()
    assert run.gradients.bytes.tolist() == [
        int(line.split(",")[1]) for line in lines[-len(run.gradients) :]
    ]
    assert (np.diff(run.gradients.ready_ns) >= 0).all()
    assert run.gradients.ready_ns[-1] == run.spans.end_ns[0]


@given(netx_logs().flatmap(damaged))
@cases(250)
def test_a_damaged_log_is_read_or_refused_and_nothing_else(tmp_path: Path, content: bytes) -> None:
    with one_sentence():
        run = read_log(tmp_path / "x.log", content)
        assert (run.gradients.bytes > 0).all()
        assert (run.spans.start_ns <= run.spans.end_ns).all()


@given(netx_logs().map(lambda log: log.partition(b"\n")[2]).flatmap(damaged) | st.binary())
@cases(100)
def test_a_damaged_table_of_additions_is_read_or_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.log").write_bytes(content)
    with one_sentence():
        points = read_reduce_cost(tmp_path / "x.log").points
        assert sorted(set(points)) == list(points)


@contextmanager
def one_sentence() -> Iterator[None]:
    """Accept a refusal in one short sentence."""
    try:
        yield
    except FullwireError as refusal:
        assert "\n" not in str(refusal)  # noqa: PT017  # not every case is refused
        assert len(str(refusal)) < 400  # noqa: PT017


def test_on_the_command_line_damage_is_one_line_and_status_3(cli: Cli, log: Path) -> None:
    log.write_text(a_log("5,4", "-6,8"))
    done = cli("import", log, "--step-time", "1s", "-o", log.with_suffix(".run"))
    assert done.returncode == 3
    assert done.stderr == f"fullwire: {log}:5: expected nothing negative, got '-6,8'\n"
    assert not log.with_suffix(".run").exists()


def test_a_file_name_cannot_move_the_cursor(cli: Cli, tmp_path: Path) -> None:
    done = cli("import", tmp_path / "\x1b[2J", "--step-time", "1s", "-o", tmp_path / "x.run")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert r"\x1b[2J: there is no such file" in done.stderr
