"""A process that runs out of a resource ends its groups: all ranks learn rank and resource."""

from __future__ import annotations

import shutil
import subprocess
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

from tests import exhausted_ranks as ranks
from tests.transport.test_transport import in_processes
from validation import exhaustion

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="session")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exhaustion.build(tmp_path_factory.mktemp("faults"), "-O1")


@needs_compiler
@pytest.mark.parametrize("lasting", ["", "for-good"])
@pytest.mark.parametrize("kind", exhaustion.KINDS)
def test_a_call_that_fails_ends_the_group_and_not_the_process(
    faults: Path, kind: str, lasting: str
) -> None:
    counts = exhaustion.rounds(faults, kind, 1, 12, [lasting] if lasting else [])
    assert (counts.wrong, counts.hangs, counts.aborts) == (0, 0, 0), counts.said
    if (kind, lasting) != ("send", "for-good"):  # there no rank can send its cause
        assert counts.unnamed == 0


@needs_compiler
@pytest.mark.parametrize("first", [1, 60])  # before a rank can encrypt, and afterwards
def test_encrypted_groups_end_so_too(faults: Path, first: int) -> None:
    counts = exhaustion.rounds(faults, "memory", first, 24, ["encrypted"])
    assert (counts.wrong, counts.hangs, counts.aborts) == (0, 0, 0), counts.said
    assert (counts.told, counts.unnamed) == (24, 0)


@needs_compiler
def test_a_note_that_cannot_be_encrypted_for_want_of_memory_is_not_sent_in_clear(
    faults: Path,
) -> None:
    """Ranks that disagree send each other long notes; each allocation meanwhile fails once."""
    counts = exhaustion.rounds(faults, "memory", 200, 200, ["encrypted", "disagree"])
    assert (counts.wrong, counts.hangs, counts.aborts) == (0, 0, 0), counts.said
    assert counts.told


@pytest.mark.parametrize("free", [0, 1, 3])  # for a listener, for a selector, for a connecting rank
def test_without_descriptors_every_rank_is_told_whose_they_were_and_nobody_spins(free: int) -> None:
    for said, processor_s, wall_s in in_processes(partial(ranks.without_descriptors, free), 3):
        assert "rank 1: too many open files" in said
        assert processor_s < 2
        assert wall_s < 20  # and not at the end of the time-out


def test_without_a_thread_for_futures_every_rank_is_told_whose_it_was() -> None:
    for said in in_processes(ranks.without_threads, 3):
        assert "rank 1: no new thread, for Futures" in said


def test_without_a_thread_for_the_engine_no_rank_gets_a_group() -> None:
    for said in in_processes(ranks.without_engine_threads, 3):
        assert "rank 1: no new thread" in said


def test_without_memory_for_scratch_every_rank_is_told_whose_it_was() -> None:
    for said in in_processes(ranks.without_memory, 3):
        assert "rank 1: out of memory, in reduce_scatter" in said


def test_what_fails_for_a_while_is_forgotten_when_the_job_begins_anew() -> None:
    """The store still has the old messages, and new ranks ignore them."""
    assert in_processes(ranks.begun_anew, 2) == [2.0, 2.0]


def test_a_completer_without_threads_completes_futures_itself() -> None:
    from fullwire.transport.work import Completer

    class Engine:
        said = ""

        def give_up(self, problem: str) -> None:
            self.said = problem

        def wait(self, task: Any, timeout_s: float) -> bool:
            return True

    class Given:
        tasks = (None,)
        done = False

        def is_completed(self) -> bool:
            return True

        def complete(self) -> None:
            self.done = True

    engine, work = Engine(), Given()
    completer = Completer(engine, "rank 7")
    started = threading.Thread.start
    threading.Thread.start = partial(_refused)  # type: ignore[method-assign]
    try:
        completer.add(work)  # type: ignore[arg-type]
    finally:
        threading.Thread.start = started  # type: ignore[method-assign]
    assert work.done
    assert engine.said == "rank 7: no new thread, for Futures"
    completer.close()


def _refused(*_: Any) -> None:
    raise RuntimeError("can't start new thread")


def test_the_counts_of_a_hung_and_of_a_dead_program_are_told(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nkill -SEGV $$\n")
    program.chmod(0o700)
    assert exhaustion.rounds(program, "memory", 1, 1, []).aborts == 1
    program.write_text("#!/bin/sh\nkill -ALRM $$\n")
    assert exhaustion.rounds(program, "memory", 1, 1, []).hangs == 1
    assert subprocess.run([program], check=False).returncode
