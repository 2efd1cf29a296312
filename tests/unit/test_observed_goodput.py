"""The goodput of an elastic job, from the events that its workers told."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fullwire.findings.plans import about_goodput
from fullwire.recorder.reported import Reported
from fullwire.run.run import Events
from fullwire.simulation.goodput import observed
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


def test_a_job_without_events_has_no_goodput() -> None:
    assert observed(Events.empty()) is None
    assert not [*about_goodput(Events.empty())]


def test_the_recorder_reads_events_of_workers_that_were_killed(tmp_path: Path) -> None:
    (tmp_path / "7.events").write_text(json.dumps([5, "start", [0, 1], 3]) + "\n[9, 'torn")
    (tmp_path / "8.events").write_text(json.dumps([2, "recovery", [1], 1]) + "\n")
    events = Reported().events([tmp_path])
    assert events.time_ns.tolist() == [2, 5]
    assert events.ranks.tolist() == ["1", "0,1"]
