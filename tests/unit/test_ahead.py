"""Host time before a step computes: the finding, and the work of the program's thread."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

import fullwire as fw
from fullwire import _hooks
from fullwire.recorder.inside.journal import Journal, Note
from fullwire.recorder.inside.processors import BeforeForward, _OwnTimes
from fullwire.report.as_data import explanation_object
from fullwire.run.facts import FactValue
from fullwire.run.run import Run, Spans
from fullwire.timeline.ahead import usual_ahead_s
from fullwire.words import sentence, setting
from tests.jobs_by_hand import MS, Rank, a_job, a_trained_job

READS_ITS_OWN = "where a script that reads its own batches does so"


def reading(ms: float, *, loader: bool = False) -> Rank:
    spans = [("compute", "backward", ms, ms + 40), ("input", "wait", 0.0, 1.0)]
    return Rank(ms + 45, spans[: 1 + loader], [(8, ms + 40, ms + 41)])


def thread(used_s: float, read_bytes: float = 0.0) -> dict[str, tuple[tuple[float, float], ...]]:
    return {
        "before_forward_processor_s": ((0.0, used_s), (1.0, used_s)),
        "before_forward_read_bytes": ((0.0, read_bytes), (1.0, read_bytes)),
    }


def said(run: Run) -> dict[str, str]:
    return {each.key: sentence(each) for each in fw.explain(run).evidence}


def test_a_script_that_reads_its_own_batches_is_told_where_its_time_goes() -> None:
    run = a_job(reading(60), reading(60))
    assert fw.explain(run).verdict.kind == "host"
    assert f"60 ms of that is before the first computation, {READS_ITS_OWN}." in (
        fw.explain(run).verdict.sentence
    )
    assert said(run)["host_ahead"].startswith("60 ms of a step is the host's before")
    assert "host_ahead_processor" not in said(run)


@pytest.mark.parametrize(
    ("used_s", "words"),
    [
        (0.003, "5% of the time and read 38.5 MB from disks: it waits"),
        (0.058, "97% of the time and read 38.5 MB from disks: it works"),
        (0.03, "50% of the time and read 38.5 MB from disks: it works and waits"),
    ],
)
def test_whether_the_thread_worked_or_waited_is_evidence(used_s: float, words: str) -> None:
    facts: dict[str, FactValue] = {"line_rate_bps": 1e9, **thread(used_s, 38_500_000)}
    assert words in said(a_job(reading(60), reading(60), facts=facts))["host_ahead_processor"]


def test_beside_a_data_loader_it_is_something_else() -> None:
    run = a_job(reading(60, loader=True), reading(60, loader=True))
    assert "beside what it waits for its DataLoader" in fw.explain(run).verdict.sentence


def test_a_rank_that_reads_longer_than_the_others_is_named() -> None:
    late = Rank(105, [("compute", "backward", 60.0, 100.0)], [(8, 100, 101)])
    early = Rank(105, [("compute", "backward", 0.0, 40.0)], [(8, 40, 101)])
    run = a_job(early, late, early)
    assert fw.explain(run).verdict.kind == "straggler"
    assert said(run)["host_ahead"].startswith("On rank 1, 60 ms of a step is the host's before")


def test_what_the_thread_of_a_late_rank_does_is_told_to_programs_too() -> None:
    late = Rank(105, [("compute", "backward", 60.0, 100.0)], [(8, 100, 101)])
    early = Rank(105, [("compute", "backward", 0.0, 40.0)], [(8, 40, 101)])
    found = fw.explain(a_job(early, late, facts={"line_rate_bps": 1e9, **thread(0.003)}))
    [told] = [each for each in found.evidence if each.key == "host_ahead_processor"]
    assert told.value == pytest.approx(0.05)
    assert msgspec.json.encode(explanation_object(found))


def test_a_little_time_before_computing_is_not_mentioned() -> None:
    assert "host_ahead" not in said(a_job(reading(1), reading(1)))


def test_many_gaps_between_computations_are_a_program_that_does_not_keep_up() -> None:
    kernels = [("compute", "kernel", 2.0 * n, 2.0 * n + 0.5) for n in range(60)]
    rank = Rank(121, kernels, [(8, 118.5, 119)])
    found = fw.explain(a_job(rank, rank))
    assert found.verdict.kind == "host"
    assert "59 gaps between computations, in which devices wait" in found.verdict.sentence
    assert "host_gaps" not in said(a_job(reading(60), reading(60)))


def test_gaps_between_collectives_are_no_program_that_does_not_keep_up() -> None:
    passes = [("compute", "backward", 0.0, 40.0), ("compute", "optimizer", 190.0, 195.0)]
    rank = Rank(200, passes, [(8, 41.0 + 2 * n, 42.0 + 2 * n) for n in range(70)])
    found = fw.explain(a_job(rank, rank))
    assert "host_gaps" not in {each.key for each in found.evidence}
    assert "torch.compile" not in found.verdict.sentence


def test_what_reading_ahead_would_give_is_predicted() -> None:
    job = a_trained_job()
    later = np.where(job.spans.name == "forward", 30 * MS, 0)
    spans: Spans = dataclasses.replace(job.spans, start_ns=job.spans.start_ns + later)
    [fix] = [
        each
        for each in fw.explain(dataclasses.replace(job, spans=spans)).fixes
        if each.kind == "host"
    ]
    assert fix.step_s == pytest.approx(0.146 - 0.031)
    assert "DataLoader(num_workers" in setting(fix)
    assert not [each for each in fw.explain(job).fixes if each.kind == "host"]


def before_forward(journal: Journal, form: str) -> BeforeForward | _hooks.BeforeForward:
    """Make the one in C++, or that in Python."""
    if form == "python":
        return BeforeForward(journal)
    journal.notes = _hooks.Notes(100, 8)
    return _hooks.BeforeForward(journal.notes)


def noted(directory: Path, form: str, work: str) -> np.ndarray:
    """Return the notes of a thread that works, or sleeps, before a forward pass."""
    journal = Journal(str(directory))
    before = before_forward(journal, form)
    before.begins()
    if work == "sleeps":
        time.sleep(0.01)
    began_ns = time.thread_time_ns()
    while work == "works" and time.thread_time_ns() - began_ns < 10 * MS:
        pass
    before.ends()
    before.ends()  # a second forward of the step adds no note
    return np.array([each for each in journal.notes.rows() if each[0] == Note.BEFORE_FORWARD])


@pytest.mark.parametrize("form", ["native", "python"])
def test_processor_time_before_a_forward_is_noted_once(tmp_path: Path, form: str) -> None:
    [[_, worked_ns, _, _]] = noted(tmp_path, form, "works")
    [[_, slept_ns, _, _]] = noted(tmp_path, form, "sleeps")
    assert worked_ns >= 10 * MS > slept_ns


@pytest.mark.parametrize("form", ["native", "python"])
def test_a_short_moment_before_a_forward_is_not_worth_a_note(tmp_path: Path, form: str) -> None:
    journal = Journal(str(tmp_path))
    before = before_forward(journal, form)
    before.ends()
    before.begins()
    before.ends()
    before.begins()
    thread = threading.Thread(target=before.ends)  # which did not begin
    time.sleep(0.002)
    thread.start()
    thread.join()
    assert not journal.notes.waiting


@pytest.mark.skipif(
    not os.path.exists("/proc/self/task"), reason="this kernel does not count run delay"
)
def test_a_thread_knows_its_times_after_its_job_closed_a_file_of_ours(tmp_path: Path) -> None:
    times = _OwnTimes()
    before = times.read()
    assert before[0] > 0
    other = tmp_path / "of the job"
    other.write_text("no times")
    number = times._file
    os.close(number)
    file = os.open(other, os.O_RDONLY)
    assert file == number  # the job's file has the number of ours
    assert times.read() >= before
    assert os.read(number, 100) == b"no times"  # and it stays open
    os.close(file)


@pytest.mark.skipif(
    not os.path.exists("/proc/self/task"), reason="this kernel does not count run delay"
)
def test_a_process_that_was_forked_off_reads_the_times_of_its_own_thread() -> None:
    times = _OwnTimes()
    ends = time.thread_time_ns() + 50 * MS
    while time.thread_time_ns() < ends:
        pass
    assert times.read()[0] >= 50 * MS
    child = os.fork()
    if child == 0:
        status = 2  # if the child raises an error, it must not go on with the other tests
        try:
            status = int(times.read()[0] >= 50 * MS)  # the child has run for less
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(("is_over_all", "ahead_s"), [(False, 0.064), (True, 0.004)])
def test_an_evaluation_before_one_step_lets_no_other_begin_later(
    is_over_all: bool, ahead_s: float
) -> None:
    """An account of all steps holds it in the mean; a fix of the host moves the usual step."""
    ahead_ns = np.full((2, 5), 4_000_000)
    ahead_ns[:, 2] = 304_000_000
    account: Any = SimpleNamespace(
        ahead_ns=ahead_ns, is_typical=np.ones(5, bool), is_over_all=is_over_all
    )
    assert usual_ahead_s(account) == pytest.approx(ahead_s)
