"""The notes of the recorder: its classes in C++ do what those in Python do."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullwire import _hooks
from fullwire.recorder.inside.journal import Journal, Note
from fullwire.recorder.inside.notes import Notes
from fullwire.recorder.inside.processors import Processors, ran_and_waited_ns

NEEDS_TIMES = pytest.mark.skipif(
    not os.path.exists("/proc/self/task"), reason="this kernel does not count run delay"
)
NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.integers(-(2**31), 2**31 - 1)
ROWS = st.tuples(st.integers(0, 255), *[st.integers(0, 2**62) | st.integers(0, 2**31 - 1)] * 3)
CALLS = st.one_of(
    st.tuples(st.just("add"), ROWS),
    st.tuples(st.just("add_interval"), ROWS),
    st.tuples(st.just("add_all"), st.lists(ROWS, max_size=3).map(lambda rows: (rows,))),
    st.tuples(
        st.just("add_pass"),
        st.tuples(
            st.integers(0, 2**32 - 1),
            st.integers(0, 2**62),
            st.integers(0, 2**62),
            st.lists(st.integers(0, 2**40), max_size=5),
        ),
    ),
    st.tuples(st.sampled_from(["take", "open", "close"]), st.just(())),
)


@given(st.lists(CALLS, max_size=40), st.integers(0, 12), st.integers(0, 4))
def test_notes_in_cpp_are_packed_to_the_same_bytes(
    calls: list[tuple[str, tuple[Any, ...]]], most: int, most_passes: int
) -> None:
    ours, theirs = Notes(most, most_passes), _hooks.Notes(most, most_passes)
    for name, arguments in [*calls, ("take", ())]:
        assert getattr(ours, name)(*arguments) == getattr(theirs, name)(*arguments)
        for each in ("waiting", "passes", "takes"):
            assert getattr(ours, each) == getattr(theirs, each)
        assert ours.rows() == theirs.rows()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("add", (1, 2**63, 3, 4)),
        ("add_interval", (1, 2, -(2**63) - 1, 4)),
        ("add_all", ([(1, 2, 3, -(2**63) - 1)],)),
        ("add_pass", (0, 1, 0, [5, 2**64])),
    ],
)
def test_a_number_too_large_for_the_file_is_missed_and_the_job_goes_on(
    name: str, arguments: tuple[Any, ...]
) -> None:
    notes = _hooks.Notes(8, 8)
    getattr(notes, name)(*arguments)
    assert notes.take() == (0, b"", b"", 1)


@pytest.mark.parametrize("kind", [Notes, _hooks.Notes])
def test_wrong_arguments_are_errors(kind: Any) -> None:
    notes = kind(8, 8)
    with pytest.raises(TypeError):
        notes.add(1, 2, 3)
    with pytest.raises(TypeError):
        notes.add_pass(1, 2, 3)
    with pytest.raises(TypeError):
        kind(8)
    assert not notes.waiting


@pytest.mark.parametrize("kind", [Notes, _hooks.Notes])
def test_the_count_of_work_is_of_processor_time_and_counts_what_lies_within_once(kind: Any) -> None:
    notes = kind(8, 8)
    before_ns = time.thread_time_ns()
    outer, inner = notes.starts_work(), notes.starts_work()
    sum(range(100_000))
    notes.ends_work(inner)
    time.sleep(0.05)
    notes.ends_work(outer)
    assert 0 < notes.spent_ns <= time.thread_time_ns() - before_ns
    notes.open()
    assert notes.spent_ns == 0


@pytest.mark.parametrize("kind", [Notes, _hooks.Notes])
def test_threads_add_notes_and_none_is_lost(kind: Any) -> None:
    notes, counts = kind(10**6, 8), []

    def adds() -> None:
        for number in range(20_000):
            notes.add(1, number, number, 0)

    threads = [threading.Thread(target=adds) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        counts.append(notes.take()[0])
    assert sum(counts) + notes.take()[0] == 80_000


@NEEDS_TIMES
def test_the_short_way_notes_what_the_kernel_counts(tmp_path: Path) -> None:
    notes, thread = _hooks.Notes(100, 8), threading.get_native_id()
    short = _hooks.ShortDelay(notes)
    assert not short.note()  # no file yet
    file = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY)
    before = ran_and_waited_ns(thread)
    short.use(file, *before)
    assert short.note()
    assert not notes.waiting  # within a millisecond
    ends_ns = time.thread_time_ns() + 30_000_000
    while time.thread_time_ns() < ends_ns:
        pass
    assert short.note()
    after = ran_and_waited_ns(thread)
    [(kind, delay_ns, _, run_ns)] = notes.rows()
    assert kind == Note.DELAY
    assert 25_000_000 < run_ns <= after[0] - before[0]
    assert 0 <= delay_ns <= after[1] - before[1]
    assert short.stop() == (before[0] + run_ns, before[1] + delay_ns)
    assert short.stop() is None
    assert not short.note()
    os.close(file)


@NEEDS_TIMES
@pytest.mark.parametrize(
    "content", [b"", b"no times", b"1 2", b"1 2 3", b"-1 2 3\n", b"1 2 x\n", b"9" * 200]
)
def test_the_short_way_leaves_a_file_that_is_not_ours(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "of the job").write_bytes(content)
    notes = _hooks.Notes(100, 8)
    short = _hooks.ShortDelay(notes)
    file = os.open(tmp_path / "of the job", os.O_RDONLY)
    short.use(file, 0, 0)
    time.sleep(0.002)
    assert not short.note()
    assert not notes.waiting
    os.close(file)
    time.sleep(0.002)
    assert not short.note()


@NEEDS_TIMES
def test_the_short_way_is_of_the_thread_that_began_it() -> None:
    notes = _hooks.Notes(100, 8)
    short = _hooks.ShortDelay(notes)
    file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
    short.use(file, 0, 0)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(short.note()))
    thread.start()
    thread.join()
    assert answers == [False]
    os.close(file)


@NEEDS_TIMES
def test_delays_go_on_where_the_short_way_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread computes as much from some step on, and is read beside the one that steps."""
    monkeypatch.setattr("fullwire.recorder.inside.processors.native_hooks", lambda: _hooks)
    journal = Journal(str(tmp_path))
    journal.notes = _hooks.Notes(100, 8)
    processors = Processors(journal)
    began_ns, _ = ran_and_waited_ns(threading.get_native_id())

    def step() -> None:
        ends_ns = time.thread_time_ns() + 5_000_000
        while time.thread_time_ns() < ends_ns:
            pass
        if not processors.short.note():
            processors.note_delay()

    for _ in range(3):
        step()
    assert processors.short.note()
    processors._computing = [threading.get_native_id()]  # any thread will do
    assert processors.short.stop() is not None
    processors.short.use(processors._own.file, *processors._own.read())
    for _ in range(2):
        step()
    run_ns = [rest for kind, _, _, rest in journal.notes.rows() if kind == Note.DELAY]
    assert all(0 < each < 50_000_000 for each in run_ns)
    assert sum(run_ns) <= ran_and_waited_ns(threading.get_native_id())[0] - began_ns


class _Codec:
    is_in_use = False


class _Journal:
    def __init__(self, notes: Any) -> None:
        self.notes = notes

    def give_up(self, error: Exception) -> None:
        raise KeyboardInterrupt


def _buckets(journal: Any) -> Any:
    def fails(*arguments: Any) -> Any:
        raise OSError

    return _hooks.Buckets(
        journal,
        _Codec(),
        None,
        lambda *given: "work",
        str,
        fails,
        fails,
        fails,
        itertools.count(),
        False,
    )


@pytest.mark.parametrize("read", ["take", "rows"])
def test_notes_that_a_finalizer_adds_while_others_are_taken_are_kept(read: str) -> None:
    """CPython up to 3.11 may collect garbage while it makes a tuple."""
    program = f"""
import gc, struct
from fullwire import _hooks
notes = _hooks.Notes(32768, 100_000)
class Loader:
    def __init__(self):
        self.own = self
    def __del__(self):
        for number in range(3000):
            notes.add(2, number, number, number)
        for _ in range(300):
            notes.add_pass(7, 1, 0, list(range(3000)))
for number in range(1000):
    notes.add(1, number, number, number)
for _ in range(3):
    notes.add_pass(5, 1, 0, list(range(1000)))
gc.disable()
kept = [tuple([number] * 4) for number in range(5000)]  # no tuple is left to be used again
gc.collect()
Loader()
gc.set_threshold(1)
gc.enable()
taken = notes.{read}()
gc.disable()
if "{read}" == "rows":
    assert taken[:1000] == [(1, number, number, number) for number in range(1000)]
    taken = notes.take()
gc.collect()
for begun_ns, first, count in [struct.unpack_from("<qII", taken[2])]:
    assert (begun_ns, first, count) == (1, 5, 1000)
later = notes.take()
assert taken[0] + later[0] == 4000 and taken[3] + later[3] == 0, (taken[0], later[0])
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONMALLOC": "malloc", "MALLOC_PERTURB_": "165"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_the_classes_in_cpp_take_only_notes_of_their_own_module() -> None:
    made: Any
    for made in (_hooks.ShortDelay, _hooks.BeforeForward):
        with pytest.raises(TypeError, match="expected the notes of this module"):
            made([])
    with pytest.raises(TypeError, match="expected the notes of this module"):
        _buckets(_Journal(Notes(8, 8)))


def test_python_cannot_make_an_empty_allreduce() -> None:
    class Group:
        name = true = "group"

    bound = _buckets(_Journal(_hooks.Notes(8, 8))).__get__(Group(), Group)
    with pytest.raises(TypeError, match="cannot create"):
        type(bound)()


def test_an_interruption_while_the_recording_gives_up_is_the_jobs() -> None:
    class Group:
        name = true = "group"

    buckets = _buckets(_Journal(_hooks.Notes(8, 8)))
    with pytest.raises(KeyboardInterrupt):
        buckets(Group(), [object()])
