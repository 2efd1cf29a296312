"""The goodput of an elastic job, from the events that its workers told."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import fullwire
from fullwire.findings.goodput import about_goodput
from fullwire.recorder.reported import Reported
from fullwire.run.run import Events
from fullwire.simulation.goodput import membership, observed, with_failures
from fullwire.words import sentence


def told(*rows: tuple[float, str, float]) -> Events:
    return Events(
        time_ns=np.array([int(time_s * 1e9) for time_s, _, _ in rows], np.int64),
        kind=np.array([kind for _, kind, _ in rows], object),
        ranks=np.array(["1" for _ in rows], object),
        duration_ns=np.array([int(lasted_s * 1e9) for _, _, lasted_s in rows], np.int64),
    )


def test_losses_have_names_and_add_up_with_the_work() -> None:
    events = told(
        (100, "start", 10), (120, "checkpoint", 1), (150, "repeated work", 2),
        (152, "recovery", 3), (170, "join", 1), (200, "end", 0),
    )  # fmt: skip
    course = observed(events)
    assert course is not None
    losses = course.start_s, course.checkpoint_s, course.repeated_s, course.recovery_s
    assert losses == pytest.approx((10, 1, 2, 4))
    assert (course.wall_s, course.work_s) == pytest.approx((100, 83))
    assert course.interruptions == 1
    [finding] = about_goodput(events)
    assert sentence(finding) == (
        "Goodput 83.0% of 100 s: start 10 s, checkpoints 1 s, repeated work 2 s, recovery 4 s "
        "after 1 loss of workers."
    )


def test_a_second_start_repeats_the_work_since_the_last_checkpoint() -> None:
    course = observed(
        told((0, "start", 10), (30, "checkpoint", 2), (50, "start", 5), (100, "end", 0))
    )
    assert course is not None
    assert course.repeated_s == pytest.approx(18)
    assert (course.start_s, course.recovery_s, course.interruptions) == (10, 5, 1)
    assert course.work_s == pytest.approx(100 - 10 - 2 - 18 - 5)


def test_work_before_a_restart_is_repeated_once_however_many_follow() -> None:
    course = observed(told((0, "start", 10), (50, "start", 5), (80, "start", 5), (100, "end", 0)))
    assert course is not None
    assert course.repeated_s == pytest.approx(40 + 25)
    assert (course.recovery_s, course.interruptions) == (10, 2)
    assert course.work_s == pytest.approx(15)


def test_the_planned_length_of_a_fault_is_no_time_of_the_job() -> None:
    rows = ((0, "start", 10), (50, "recovery", 1), (100, "end", 0))
    faults = ((-5, "fault: pause 0", 1), (95, "fault: slow 1 to 10Mbps", 60))
    assert observed(told(*rows, *faults)) == observed(told(*rows))


def test_a_job_without_events_has_no_goodput() -> None:
    assert observed(Events.empty()) is None
    assert not [*about_goodput(Events.empty())]


def test_the_recorder_reads_events_of_workers_that_were_killed(tmp_path: Path) -> None:
    (tmp_path / "7.events").write_text(json.dumps([5, "start", [0, 1], 3]) + "\n[9, 'torn")
    (tmp_path / "8.events").write_text(json.dumps([2, "recovery", [1], 1]) + "\n")
    events = Reported().events([tmp_path])
    assert events.time_ns.tolist() == [2, 5]
    assert events.ranks.tolist() == ["1", "0,1"]


def in_a_course() -> Events:
    """Return a job of workers 0 to 2: 1 is lost, 3 comes, 2 is lost as 4 comes."""
    rows = [
        (10, "start", "0,1,2", 2), (20, "checkpoint", "0,1,2", 1), (30, "fault: kill 1", "1", 0),
        (30.5, "repeated work", "0,2", 0.5), (31, "recovery", "1", 1), (40, "join", "3", 0.5),
        (50, "repeated work", "0,3", 0.5), (50.5, "recovery", "2", 2), (52.5, "join", "4", 0),
        (110, "end", "0", 0),
    ]  # fmt: skip
    return dataclasses.replace(
        told(*((time_s, kind, lasted_s) for time_s, kind, _, lasted_s in rows)),
        ranks=np.array([ranks for _, _, ranks, _ in rows], object),
    )


def test_the_workers_of_a_job_are_told_over_time() -> None:
    found = membership(in_a_course())
    assert found is not None
    assert found.length_s == pytest.approx(100)
    told_s = {
        worker: [round(at_s, 6) for span in spans for at_s in span]
        for worker, spans in found.present_s.items()
    }
    assert told_s == {0: [2, 100], 1: [2, 21], 2: [2, 40.5], 3: [30.5, 100], 4: [42.5, 100]}
    assert [each.kind for each in found.events][2] == "fault: kill 1"
    assert membership(Events.empty()) is None


def test_another_rate_of_failures_has_another_goodput() -> None:
    events = in_a_course()
    found = with_failures(events, 20.0)
    assert found is not None
    # Two losses cost 1.5 and 2.5 s, and letting worker 3 in costs 0.25 s of each.
    assert found.lost_s == pytest.approx(2.25)
    assert found.failures == 2
    course = observed(events)
    assert course is not None
    assert found.goodput == pytest.approx((1 - 2.25 / 20) / (1 + 1 / course.work_s))
    assert found.low < found.goodput < found.high <= 1
    rare = with_failures(events, 2000.0)
    assert rare is not None
    assert found.goodput < rare.goodput < 1
    assert with_failures(told((0, "start", 1), (9, "end", 0)), 20.0) is None


def test_a_plain_run_has_no_failures_to_predict_from() -> None:
    with pytest.raises(fullwire.UsageError, match="expected a run of an elastic job"):
        fullwire.whatif("vgg16@v100", failures="20s", bandwidth="10Gbps", workers=2)
