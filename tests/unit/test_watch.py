"""Steps from counters that this file makes up, and who is waited for in a stuck job."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import fullwire as fw
from fullwire.answers.watch import _judged, job_named
from fullwire.answers.watched import waited_for
from fullwire.recorder.jobs_here import JobHere, RankHere
from fullwire.recorder.outside import Waits, Watcher, waits_of
from fullwire.report.as_data import watched_object
from fullwire.report.explanation import print_watched

LOOK_S = 0.01


def a_watcher(looks: dict[int, list[tuple[float, ...]]], workers: int = 2) -> Watcher:
    ranks = tuple(
        RankHere(pid=os.getpid(), rank=rank, user="me", command="train", network=1, uses_gpu=False)
        for rank in looks
    )
    with Watcher(JobHere(ranks=ranks, workers=workers, is_guessed=False)) as watcher:
        watcher.looks = looks
    return watcher


def a_job(
    compute_s: float, send_s: float, idle_s: float = 0.0, *, steps: int = 40, ends_s: float = 0.0
) -> dict[int, list[tuple[float, ...]]]:
    """Return the looks at two ranks that compute, send at 1 Gbps and rest, step for step."""
    step_s = compute_s + send_s + idle_s
    at_s = np.arange(0, steps * step_s + ends_s, LOOK_S)
    whole, within = np.divmod(np.minimum(at_s, steps * step_s - 1e-9), step_s)
    computed = whole * compute_s + np.minimum(within, compute_s)
    sent = whole * send_s + np.clip(within - compute_s, 0, send_s)
    looks = {}
    for rank in (0, 1):
        rows = np.zeros((len(at_s), 8))
        rows[:, 0], rows[:, 1] = 1e18 + at_s * 1e9, computed * 1e9
        rows[:, 4] = rows[:, 5] = sent * 1e9 / 8
        looks[rank] = [tuple(row) for row in rows]
    return looks


def test_the_step_its_bytes_and_the_verdict_are_found_in_counters() -> None:
    found = _judged(a_watcher(a_job(0.1, 0.2)), 1e9, 12.0, has_ended=False)
    assert found.explanation is not None
    assert found.run is not None
    assert found.explanation.step_s == pytest.approx(0.3, rel=0.01)
    own = found.run.collectives.rows(found.run.collectives.rank == 0)
    assert own.bytes.sum() / len(np.unique(own.step)) == pytest.approx(25e6, rel=0.03)
    assert found.kind == "line_rate"
    for part, (low_s, high_s) in found.ranges.items():
        assert 0 <= low_s <= found.explanation.account[part] <= high_s


def test_rest_of_all_ranks_is_not_called_input_or_host() -> None:
    found = _judged(a_watcher(a_job(0.1, 0.05, 0.2)), 1e9, 14.0, has_ended=False)
    assert found.kind == "unknown"
    assert "Cannot tell" in found.sentence
    assert {"input", "host"} <= set(found.possible)
    data = watched_object(found)
    assert data["source"] == "outside"
    assert data["verdict"]["kind"] == "unknown"
    assert data["ranges"]["input"][0] == 0
    assert data["stuck"] is None


def test_a_job_that_mostly_computes_is_told_its_transfer_alone() -> None:
    found = _judged(a_watcher(a_job(0.4, 0.02)), 1e9, 17.0, has_ended=False)
    assert found.kind == "unknown"
    assert "contention" in found.possible
    assert found.sentence.startswith("Transfer that nothing hides is ")


def test_counters_that_do_not_repeat_give_no_step(capsys: pytest.CaptureFixture[str]) -> None:
    random = np.random.default_rng(0)
    looks: dict[int, list[tuple[float, ...]]] = {
        rank: [
            (1e18 + at * 1e7, 0.0, 0.0, 0.0, float(sent), float(sent), 0.0, 0.0)
            for at, sent in enumerate(total)
        ]
        for rank, total in enumerate(np.cumsum(random.exponential(1e5, (2, 2000)), axis=1))
    }
    found = _judged(a_watcher(looks), 1e9, 20.0, has_ended=False)
    assert found.explanation is None
    assert watched_object(found)["step_s"] is None
    print_watched(found)
    assert capsys.readouterr().out.startswith("No step repeated 8 times within 19.98 s")


def test_a_job_that_sends_nothing_any_more_is_stuck() -> None:
    looks = a_job(0.1, 0.2, ends_s=15.0)
    found = _judged(a_watcher(looks), 1e9, 27.0, has_ended=False)
    assert found.stuck is not None
    assert found.stuck.since_s == pytest.approx(15, abs=0.1)
    assert found.sentence.startswith("Stuck for 14.99 s. Nothing tells")
    assert watched_object(found)["stuck"]["waiting"] == sorted(looks)


LOCK, READ = Waits("S", "futex_wait_queue"), Waits("S", "pipe_read")


@pytest.mark.parametrize(
    ("waits", "busy", "late"),
    [
        ([LOCK, Waits("T", "do_signal_stop"), LOCK], [0, 0, 0], 1),
        ([LOCK, LOCK, LOCK], [0, 0, 1.0], 2),
        ([Waits("D", "io_schedule"), LOCK, LOCK], [0, 0, 0], 0),
        ([LOCK, READ, LOCK], [0, 0, 0], 1),
        ([LOCK, LOCK, LOCK], [0, 0, 0], None),
        ([READ, READ, LOCK], [0, 0, 0], None),
    ],
)
def test_the_rank_that_differs_iswaited_for(
    waits: list[Waits], busy: list[float], late: int | None
) -> None:
    assert waited_for(dict(enumerate(waits)), dict(enumerate(busy))) == late


def test_the_stack_names_the_rank_that_is_in_no_collective() -> None:
    alike = Waits("S", "futex_wait_queue", "train.py:40 (step)", is_in_collective=True)
    late = Waits("S", "futex_wait_queue", "dataset.py:88 (load)")
    assert waited_for({0: alike, 1: late, 2: alike}, dict.fromkeys(range(3), 0.0)) == 1
    assert str(late).endswith("at dataset.py:88 (load)")
    assert waited_for({0: alike, 1: alike}, dict.fromkeys(range(2), 0.0)) is None


def test_a_process_that_waits_is_shown_with_its_line(tmp_path: Path) -> None:
    if not shutil.which("py-spy", path=str(Path(sys.executable).parent)):
        pytest.skip("py-spy is not here: pip install 'fullwire[watch]'")
    script = tmp_path / "dataset.py"
    script.write_text("def load():\n    print(flush=True)\n    input()\nload()\n")
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        waits = [waits_of(other.pid)]
        until_s = time.monotonic() + 10
        while waits[-1].line != "dataset.py:3 (load)" and time.monotonic() < until_s:
            waits.append(waits_of(other.pid))
        assert waits[-1].line == "dataset.py:3 (load)"
        assert not waits[-1].is_in_collective
        other.kill()


def test_a_process_that_is_no_training_is_refused_with_its_command() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        with pytest.raises(fw.UsageError, match="expected a training process or its launcher"):
            fw.watch(other.pid)
        other.kill()
    with pytest.raises(fw.UsageError, match="expected the id of a running process"):
        fw.watch(other.pid)
    with pytest.raises(fw.UsageError, match="expected words of a training job's command"):
        job_named("no such job anywhere")
