"""A run is read as it was written, or with its gaps; a half-written run never looks complete."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fullwire as fw
from fullwire.errors import DamagedInput, FullwireError, UsageError
from fullwire.importers import read
from fullwire.run.run import Provenance, Run
from fullwire.run.store import read_run, write
from tests.builders import a_run
from tests.conftest import Cli
from tests.jobs_by_hand import a_trained_job
from tests.strategies import cases, damaged, runs, same_run, same_table

RUN = a_run(facts={"workers": 1, "line_rate_bps": 25e9, "reduce_cost": ((40.0, 1e-5),)})
FILES = ("run.json", "spans.parquet", "gradients.parquet")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return write(RUN, tmp_path / "x.run")


def edit(place: Path, change: Callable[[dict[str, Any]], object], *, sealed: bool = False) -> None:
    """Change run.json by hand; without its CRCs, unless it stays sealed."""
    shown = json.loads((place / "run.json").read_text())
    if not sealed:
        del shown["crc32"]
    change(shown)
    (place / "run.json").write_text(json.dumps(shown))


def columns(**changed: Any) -> pa.Table:
    """Return the spans as a Parquet table; None leaves a column out."""
    shown = {name: pa.array(values.tolist()) for name, values in RUN.spans.columns().items()}
    return pa.table({n: values for n, values in (shown | changed).items() if values is not None})


def in_pieces(place: Path) -> Path:
    """Cut the gradients into a file per row, as a recorder of many ranks writes them."""
    edit(place, lambda _: None)
    whole = pq.read_table(place / "gradients.parquet")
    (place / "gradients.parquet").unlink()
    (place / "gradients").mkdir()
    for row in range(len(whole)):
        pq.write_table(whole.slice(row, 1), place / "gradients" / f"{row}.parquet")
    return place / "gradients"


def beside(place: Path) -> list[str]:
    return sorted(path.name for path in place.parent.iterdir() if path != place)


@given(runs())
@cases(60)
def test_any_run_comes_back_as_it_was_written(tmp_path: Path, run: Run) -> None:
    again = read_run(write(run, tmp_path / "x.run", replace=(tmp_path / "x.run").exists()))
    assert same_run(run, again)


def test_an_empty_run_comes_back(tmp_path: Path) -> None:
    empty = Run(provenance=Provenance(origin="measured", source=""))
    assert same_run(read_run(write(empty, tmp_path / "x.run")), empty)


def test_other_tools_read_the_tables_as_they_are(place: Path) -> None:
    table = pq.read_table(place / "gradients.parquet")
    assert table.column("bytes").to_pylist() == [25_000_000, 25_000_000]
    assert pq.read_table(place / "spans.parquet").column("name").to_pylist()[0] == "step"


def test_equal_texts_are_one_object_when_read(tmp_path: Path) -> None:
    names = read_run(write(steps(1000), tmp_path / "x.run")).spans.name
    assert len({id(name) for name in names}) == 1


def steps(count: int) -> Run:
    none = np.zeros(count, np.int64)
    spans = type(RUN.spans)(
        rank=none,
        step=none,
        lane=np.full(count, "host", object),
        name=np.full(count, "step", object),
        start_ns=none,
        end_ns=none,
    )
    return Run(provenance=Provenance(origin="measured", source="a test"), spans=spans)


# Damage


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_anywhere_is_noticed(place: Path, name: str) -> None:
    whole = (place / name).read_bytes()
    for end in range(0, len(whole), 7):
        (place / name).write_bytes(whole[:end])
        assert not opens_whole(place)


@given(st.sampled_from(FILES), st.data())
@cases(250)
def test_a_run_with_any_damage_is_whole_only_if_nothing_changed(
    tmp_path: Path, name: str, data: st.DataObject
) -> None:
    place = tmp_path / "x.run"
    if not place.exists():
        write(RUN, place)
    whole = (place / name).read_bytes()
    try:
        (place / name).write_bytes(data.draw(damaged(whole)))
        assert not opens_whole(place) or same_run(read_run(place), RUN)
    finally:
        (place / name).write_bytes(whole)


def opens_whole(place: Path) -> bool:
    """Say whether a run opens and claims to be complete; a refusal is one sentence."""
    try:
        return read_run(place).complete
    except FullwireError as refusal:
        assert "\n" not in str(refusal)  # noqa: PT017  # not every case is refused
        return False


@pytest.mark.parametrize("name", ["spans", "gradients"])
def test_a_damaged_table_is_left_out_and_the_others_are_read(place: Path, name: str) -> None:
    (place / f"{name}.parquet").write_bytes(b"PAR1 and then something else")
    run = read_run(place)
    assert run.missing == (f"{name}.parquet: damaged, not read (it is not as it was written)",)
    assert len(getattr(run, name)) == 0
    [other] = {"spans", "gradients"} - {name}
    assert same_table(getattr(run, other), getattr(RUN, other))


def test_a_table_that_is_gone_is_named_with_its_rows(place: Path) -> None:
    (place / "gradients.parquet").unlink()
    assert read_run(place).missing == ("gradients: 2 rows were written, the file is gone",)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"rank": None}, "expected one column rank, got 0"),
        ({"start_ns": pa.array([0, None, 1])}, "start_ns: 1 values are missing"),
        ({"start_ns": pa.array([0.0, 0.0, 1.0])}, "start_ns: expected int64, got double"),
        ({"start_ns": pa.array(["0", "0", "1"])}, "start_ns: expected int64, got string"),
        ({"start_ns": pa.array([True, True, False])}, "start_ns: expected int64, got bool"),
        ({"start_ns": pa.array([0, 0, 1], pa.timestamp("ns"))}, "expected int64, got timestamp"),
        ({"start_ns": pa.array([0, 0, 2**63], pa.uint64())}, "not in range"),
        ({"name": pa.array([1, 2, 3])}, "name: expected text, got int64"),
        ({"name": pa.array([b"a", b"\xff", b"c"])}, "name: expected text, got binary"),
        ({"name": pa.array(["a", None, "c"])}, "name: 1 values are missing"),
        ({"name": pa.array([{"a": 1}] * 3)}, "name: expected text, got struct"),
    ],
)
def test_a_table_of_another_shape_is_left_out(
    place: Path, changed: dict[str, Any], reason: str
) -> None:
    edit(place, lambda _: None)
    pq.write_table(columns(**changed), place / "spans.parquet")
    [sentence] = read_run(place).missing
    assert sentence.startswith("spans.parquet: damaged, not read (")
    assert reason in sentence


def test_narrower_numbers_plain_text_and_more_columns_are_taken(place: Path) -> None:
    edit(place, lambda _: None)
    rank = pa.array([0, 0, 0], pa.int8())
    name = pa.array(RUN.spans.name.tolist(), pa.large_string())
    pq.write_table(columns(rank=rank, name=name, more=rank), place / "spans.parquet")
    assert same_run(read_run(place), RUN)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (9, "spans: 9 rows were written, 3 can be read"),
        (2, "spans.parquet: damaged, not read (3 rows, expected at most 2)"),
        (10**18, "spans: 1000000000000000000 rows were written, 3 can be read"),
    ],
)
def test_another_number_of_rows_is_noticed(place: Path, rows: int, sentence: str) -> None:
    edit(place, lambda shown: shown["rows"].update(spans=rows))
    assert read_run(place).missing == (sentence,)


def test_more_rows_than_memory_should_hold_are_not_read(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fullwire.run.store.MOST_ROWS", 2)
    assert read_run(place).missing == (
        "spans.parquet: damaged, not read (3 rows, expected at most 2)",
    )
    with pytest.raises(UsageError, match="spans: 3 rows, expected at most 2"):
        write(RUN, place.with_name("y.run"))


def test_an_unknown_table_is_named(place: Path) -> None:
    edit(place, lambda shown: shown["rows"].update({"\x1b[2J": 7}))
    [sentence] = read_run(place).missing
    assert sentence == r"'\x1b[2J': 7 rows of a table that this version does not know"


def test_a_table_in_pieces_is_read_in_the_order_of_their_names(place: Path) -> None:
    in_pieces(place)
    assert same_run(read_run(place), RUN)


def test_a_damaged_piece_leaves_the_others(place: Path) -> None:
    (in_pieces(place) / "0.parquet").write_bytes(b"PAR1")
    run = read_run(place)
    assert run.gradients.ready_ns.tolist() == RUN.gradients.ready_ns[1:].tolist()
    assert len(run.missing) == 2
    assert run.missing[0].startswith("gradients/0.parquet: damaged, not read (")
    assert run.missing[1] == "gradients: 2 rows were written, 1 can be read"


def test_a_table_that_is_there_twice_is_read_once(place: Path) -> None:
    (place / "spans").mkdir()
    shutil.copy(place / "spans.parquet", place / "spans" / "again.parquet")
    run = read_run(place)
    assert same_table(run.spans, RUN.spans)
    assert not run.complete


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_a_table_that_is_no_file_is_not_waited_for(
    place: Path, make: Callable[[Path], None]
) -> None:
    (place / "spans.parquet").unlink()
    make(place / "spans.parquet")
    [missing] = read_run(place).missing
    assert missing.startswith("spans.parquet: damaged, not read (it is ")


# The description


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda d: d.update(format=3, written_by="9.1"),
            "expected 1 to 2, which Fullwire 0.1.0 reads; Fullwire 9.1 wrote and reads it",
        ),
        (lambda d: d.update(format=3, written_by="\x1b[2J"), "Fullwire '\\x1b[2J' wrote and reads"),
        (lambda d: d.update(format=3, written_by=""), "; a newer version wrote and reads it"),
        (lambda d: d.update(format=10**30), "so the number was changed since"),
        (lambda d: d.update(format=1), "unknown field `written_by`"),
        (
            lambda d: d.update(more=1, written_by="9.1"),
            "`more`; Fullwire 9.1 wrote it",
        ),
        (lambda d: d.update(format=0), "there is no format 0"),
        (lambda d: d.update(format="1"), "Expected `int`, got `str`"),
        (lambda d: d.pop("format"), "missing required field `format`"),
        (lambda d: d.pop("rows"), "missing required field `rows`"),
        (lambda d: d.pop("provenance"), "missing required field `provenance`"),
        (lambda d: d.update(more=1), "unknown field `more`"),
        (lambda d: d.update(gaps="all"), "Expected `array`, got `str` - at `$.gaps`"),
        (lambda d: d["gaps"].append({"table": "spans"}), "missing required field `reason`"),
        (lambda d: d["rows"].update(spans=-1), "Expected `int` >= 0 - at `$.rows[spans]`"),
        (lambda d: d["rows"].update({"\x1b[2J": "2"}), "got `str` - at `$.rows['\\x1b[2J']`"),
        (lambda d: d.update(crc32={"spans.parquet": None}), "at `$.crc32[spans.parquet]`"),
        (lambda d: d["provenance"].update(origin="guessed"), "Invalid enum value 'guessed'"),
        (lambda d: d["provenance"].update(source="\ud800"), "not the description of a run"),
        (lambda d: d["facts"].update(wrokers=8), "unknown field `wrokers` - at `$.facts`"),
        (
            lambda d: d["facts"].update(workers="8"),
            "got `str` - at `$.facts.workers`",
        ),
        (lambda d: d["facts"].update(workers=0), "fact 'workers': expected 1 or more, got 0"),
        (lambda d: d["facts"].update(machines=0), "fact 'machines': expected 1 or more, got 0"),
        (
            lambda d: d["facts"].update(line_rate_bps=1e19),
            "fact 'line_rate_bps': expected at most 1e+18 bit/s, got 1e+19",
        ),
        (lambda d: d["facts"].update(workers=True), "got `bool`"),
        (lambda d: d["facts"].update(workers=10**30), "Expected `int` <= 9223372036854775807"),
        (lambda d: d["facts"].update(line_rate_bps=float("nan")), "after `line_rate_bps`"),
    ],
)
def test_a_description_that_cannot_be_believed_is_refused(
    place: Path, change: Callable[[dict[str, Any]], object], problem: str
) -> None:
    edit(place, change)
    with pytest.raises(DamagedInput) as refusal:
        read_run(place)
    assert str(refusal.value).startswith(f"{place}/run.json: ")
    assert problem in str(refusal.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"  ",
        b"null",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\xff\xfe{\0}\0",
        b'\xef\xbb\xbf{"format": 1}',
        b'{"format": 1e400}',
        b'{"format": 1}' * 2,
        b"\0" * 4096,
    ],
    ids=lambda content: repr(content[:12]),
)
def test_what_is_no_description_is_refused(place: Path, content: bytes) -> None:
    (place / "run.json").write_bytes(content)
    with pytest.raises(DamagedInput, match=r"run\.json: not the description of a run: "):
        read_run(place)


@pytest.mark.parametrize(
    ("damage", "field"),
    [
        (lambda text: text[: text.index('"basis"')], "source"),
        (lambda text: text[: text.index('"rows"') + 9], "rows"),
        (lambda text: text.replace('"workers": 1', '"workers": \x00'), "workers"),
    ],
)
def test_a_description_that_is_cut_or_broken_names_the_field(
    place: Path, damage: Callable[[str], str], field: str
) -> None:
    edit(place, lambda _: None)
    path = place / "run.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(DamagedInput, match=f"at or after `{field}`"):
        read_run(place)


@pytest.mark.parametrize(
    ("once", "twice"),
    [('"format": 2', '"format": 2, "format": 2'), ('"workers": 1', '"workers": 1, "workers": 2')],
)
def test_a_key_that_is_given_twice_is_refused(place: Path, once: str, twice: str) -> None:
    edit(place, lambda _: None)
    content = (place / "run.json").read_text()
    (place / "run.json").write_text(content.replace(once, twice))
    with pytest.raises(DamagedInput, match="is given 2 times"):
        read_run(place)


def test_a_description_edited_by_hand_opens_and_says_so(place: Path) -> None:
    edit(place, lambda shown: shown["facts"].update(workers=2), sealed=True)
    run = read_run(place)
    assert run.facts.workers == 2
    assert run.missing == ("run.json: it was changed after it was written",)


def test_a_description_printed_in_another_way_is_the_same(place: Path) -> None:
    edit(place, lambda _: None, sealed=True)
    assert same_run(read_run(place), RUN)


def test_an_endless_description_costs_no_memory(place: Path) -> None:
    os.truncate(place / "run.json", 2**31)
    with pytest.raises(DamagedInput, match="larger than 16777216 bytes"):
        read_run(place)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_a_description_that_is_no_file_is_not_waited_for(
    place: Path, make: Callable[[Path], None]
) -> None:
    (place / "run.json").unlink()
    make(place / "run.json")
    with pytest.raises(DamagedInput, match=r"no run\.json in it: expected a finished run"):
        read_run(place)


# Writing


@pytest.mark.parametrize("path", ["", ".", "..", "/", None, 5, b"x.run", "a\0b"])
def test_a_place_without_a_name_is_refused(
    tmp_path: Path, path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write(RUN, tmp_path / "x.run"))
    with pytest.raises(UsageError, match="write: expected "):
        write(RUN, path, replace=True)
    assert same_run(read_run(tmp_path / "x.run"), RUN)


@pytest.mark.parametrize("run", [None, "x.run", {}, RUN.spans])
def test_what_is_no_run_is_not_written(tmp_path: Path, run: Any) -> None:
    with pytest.raises(UsageError, match="write: expected a Run, got "):
        write(run, tmp_path / "x.run")


def test_an_existing_run_is_replaced_only_when_asked(place: Path) -> None:
    with pytest.raises(UsageError, match="exists: name another, or ask for --force"):
        write(a_run(source="another"), place)
    with pytest.raises(UsageError, match="replace: expected True or False, got 'no'"):
        write(a_run(source="another"), place, replace="no")  # type: ignore[arg-type]
    assert same_run(read_run(place), RUN)
    write(a_run(source="another"), place, replace=True)
    assert read_run(place).provenance.source == "another"
    assert beside(place) == []


@pytest.mark.parametrize("kind", ["file", "directory", "link to a run", "link to nothing"])
def test_what_is_no_run_is_never_replaced(place: Path, kind: str) -> None:
    taken = place.with_name("taken")
    make: dict[str, Callable[[], object]] = {
        "file": taken.touch,
        "directory": taken.mkdir,
        "link to a run": lambda: taken.symlink_to(place),
        "link to nothing": lambda: taken.symlink_to("nowhere"),
    }
    make[kind]()
    with pytest.raises(UsageError, match="exists: expected a run to replace"):
        write(RUN, taken, replace=True)
    assert os.path.lexists(taken)


def test_a_directory_that_holds_anything_else_is_never_replaced(place: Path) -> None:
    (place / "thesis.tex").write_text("three years of work")
    with pytest.raises(UsageError, match=r"holds thesis\.tex: expected only files of a run"):
        write(RUN, place, replace=True)
    assert (place / "thesis.tex").read_text() == "three years of work"


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("file/x.run", "cannot be written: .*Not a directory"),
        ("n" * 300, "the name of a run may be 227 bytes long, got one of 300"),
        ("n" * 250, "the name of a run may be 227 bytes long, got one of 250"),
    ],
)
def test_an_unwritable_place_is_refused(tmp_path: Path, path: str, problem: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=problem):
        write(RUN, tmp_path / path)
    assert os.listdir(tmp_path) == ["file"]


def test_missing_parents_are_made(tmp_path: Path) -> None:
    assert same_run(read_run(write(RUN, tmp_path / "a" / "b" / "x.run")), RUN)


@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("step", range(1, 6))
def test_a_full_disk_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, replace: bool
) -> None:
    place = tmp_path / "x.run"
    if replace:
        write(RUN, place)
    real, calls = os.fsync, iter(range(1, 100))

    def full(handle: int) -> None:
        if next(calls) == step:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match="cannot be written: No space left on device"):
        write(a_run(source="new"), place, replace=replace)
    monkeypatch.undo()
    if step < 5:  # the fifth comes after the new run is in its place
        assert place.exists() == replace
        assert not replace or same_run(read_run(place), RUN)
        assert beside(place) == []
    else:
        assert read_run(place).provenance.source == "new"


@pytest.mark.parametrize(
    "facts",
    [
        {"line_rate_bps": float("nan")},
        {"reduce_cost": ((1.0, float("inf")),)},
        {"workers": 10**30},
        {"reduce_cost": (("a", "b"),)},
    ],
)
def test_facts_that_could_not_be_read_again_are_not_written(
    tmp_path: Path, facts: dict[str, Any]
) -> None:
    with pytest.raises(UsageError):
        write(a_run(facts=facts), tmp_path / "x.run")
    assert os.listdir(tmp_path) == []


def test_a_description_too_large_to_be_read_again_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="they take 17,"):
        write(a_run(source="x" * 17_000_000), tmp_path / "x.run")
    assert os.listdir(tmp_path) == []


# Crashes. An audit hook sees every file operation of a writer. It ends the process there as a power
# cut would: by SIGKILL, without any clean-up.
CRASHING_WRITER = """
    import os, shutil, signal, sys
    from pathlib import Path
    from fullwire.run.store import write
    from tests.builders import a_run

    def crash_at(step):
        seen = 0
        def hook(event, arguments):
            nonlocal seen
            is_of_files = event == "open" or event.startswith(("os.", "shutil."))
            if is_of_files and event != "os.kill":
                seen += 1
                if seen == step:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)

    top, old = Path(sys.argv[1]), a_run(source="old")
    write(old, top / "warm" / "x.run")  # loads everything
    for step in range(1, 200):
        place = top / f"{step:03}" / "x.run"
        shutil.copytree(top / "warm", place.parent)
        child = os.fork()
        if not child:
            crash_at(step)
            write(a_run(source="new"), place, replace=True)
            os._exit(0)
        if os.waitpid(child, 0)[1] == 0:
            sys.exit(0)
    sys.exit("the writer never came to its end")
"""


def test_a_writer_killed_at_any_step_leaves_the_old_run_or_the_new(tmp_path: Path) -> None:
    code = textwrap.dedent(CRASHING_WRITER)
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    places = sorted(path / "x.run" for path in tmp_path.iterdir() if path.name != "warm")
    sources = [source_after_crash(place) for place in places]
    assert len(sources) > 12
    assert sources == sorted(sources, key=["old", "aside", "new"].index)
    assert {sources[0], sources[-1]} == {"old", "new"}


def source_after_crash(place: Path) -> str:
    """Return which run is in its place; between two renames the old one stands aside, whole."""
    for hidden in place.parent.glob(".x.run.writing-*"):
        assert not opens_whole(hidden) or read_run(hidden).provenance.source == "new"
    if place.exists():
        run = read_run(place)
        assert run.complete
        return run.provenance.source
    [aside] = place.parent.glob(".x.run.replaced-*")
    run = read_run(aside)
    assert (run.complete, run.provenance.source) == (True, "old")
    return "aside"


# On the command line


def test_show_prints_a_damaged_run_and_says_what_is_gone(cli: Cli, place: Path) -> None:
    (place / "spans.parquet").write_bytes(b"")
    done = cli("show", place)
    assert done.returncode == 0
    assert "PARTIAL:\n  spans.parquet: damaged, not read" in done.stdout


def test_show_sends_no_escapes_from_a_run_to_the_terminal(cli: Cli, tmp_path: Path) -> None:
    hostile = a_run(source="\x1b]0;owned\x07", missing=("\x1b[2J\n",), facts={"model": "\x9b31m"})
    done = cli("show", write(hostile, tmp_path / "x.run"))
    assert done.returncode == 0
    assert all(line.isprintable() for line in done.stdout.split("\n"))


def test_a_newer_format_is_one_sentence_and_status_3(cli: Cli, place: Path) -> None:
    edit(place, lambda shown: shown.update(format=99))
    done = cli("show", place)
    assert done.returncode == 3
    assert re.fullmatch(r"fullwire: .*run\.json: format 99: expected 1 to 2, .*\n", done.stderr)


def test_a_run_at_a_place_whose_name_is_no_text_opens(tmp_path: Path) -> None:
    place = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.run"))
    assert same_run(read(write(RUN, place)), RUN)


def test_a_fact_that_is_written_no_more_is_read_and_left_out(place: Path) -> None:
    edit(place, lambda shown: shown["facts"].update(probe_run_s=[[0, 0.05]]))
    run = read_run(place)
    assert run.facts == RUN.facts
    assert run.complete


@pytest.mark.parametrize(("origin", "told"), [("simulated", None), ("imported", "1")])
def test_only_a_simulation_without_compression_said_a_ratio_of_1(
    place: Path, origin: str, told: str | None
) -> None:
    edit(
        place,
        lambda shown: (
            shown["provenance"].update(origin=origin),
            shown["facts"].update(compression="1"),
        ),
    )
    run = read_run(place)
    assert run.facts == dataclasses.replace(RUN.facts, compression=told)
    assert run.complete


def test_no_run_is_made_within_a_run(tmp_path: Path) -> None:
    inner = write(a_run(), tmp_path / "a.run") / "b.run"
    with pytest.raises(UsageError, match=r"a.run is a run: expected a place outside of it"):
        write(a_run(), inner)
    assert not inner.exists()


def test_a_refusal_names_the_run_that_was_read_and_not_its_source(tmp_path: Path) -> None:
    job = a_trained_job()
    still = dataclasses.replace(job.spans, end_ns=job.spans.start_ns)
    path = fw.write(dataclasses.replace(job, spans=still), tmp_path / "still.run")
    with pytest.raises(FullwireError, match=re.escape(f"{path}: expected steps that take time")):
        fw.compare(job, path)
