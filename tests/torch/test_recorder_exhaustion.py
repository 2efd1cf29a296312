"""A recorder that runs out of a resource harms no job: the short form of its validation."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.torch.test_record import needs_torch
from validation import recorder_exhaustion

# Forked from here, a process would inherit threads of other tests; so each has its own parent.
ROUNDS = """
import json, sys
from pathlib import Path
from validation import recorder_exhaustion
recorder_exhaustion.load_once()
place, for_good = Path(sys.argv[1]), sys.argv[2] == "True"
counted = {}
for kind in recorder_exhaustion.KINDS:
    (place / kind).mkdir()
    counted[kind] = recorder_exhaustion.rounds_of(kind, 3, place / kind, for_good=for_good)
print("\\n" + json.dumps(counted))
"""
# The sampler's start, where the n-th fork fails.
FORKS = """
import itertools, os, sys
from fullwire.recorder import sampler
true, calls, failing = os.fork, itertools.count(1), int(sys.argv[1])
def fork():
    if next(calls) == failing:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return true()
os.fork = fork
sampler.main(sys.argv[2], "sh", "-c", "echo done; exit 7")
"""


@needs_torch
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("for_good", [False, True])
def test_no_fault_of_the_recorder_reaches_the_job(tmp_path: Path, for_good: bool) -> None:
    """Formerly, when memory was short for good, the recorder raised into the job."""
    done = subprocess.run(
        [sys.executable, "-c", ROUNDS, str(tmp_path), str(for_good)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=Path(recorder_exhaustion.__file__).parents[1],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert set(told) == set(recorder_exhaustion.KINDS)
    for kind, counts in told.items():
        assert counts["rounds"] > 0, kind
        assert not recorder_exhaustion.is_bad(Counter(counts)), f"{kind}\n{done.stdout}"


def test_a_run_that_does_not_fit_on_the_disk_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    recording = tmp_path / "whole"
    recorder_exhaustion._played(recording, "memory", 0, False)
    counted = recorder_exhaustion.store_rounds(recording, tmp_path, 6)
    assert counted["rounds"] == 6
    assert counted["refused"] > 0
    assert not recorder_exhaustion.is_bad(counted)


@pytest.mark.parametrize("failing", [1, 2])
def test_a_command_runs_once_where_no_sampler_can_be_started(tmp_path: Path, failing: int) -> None:
    """Formerly the command did not run if a new process was refused."""
    done = subprocess.run(
        [sys.executable, "-c", FORKS, str(failing), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (7, "done\n")
    assert done.stderr == ("fullwire: this host is not sampled: Resource temporarily unavailable\n")


def test_a_sampler_that_lacks_room_or_descriptors_harms_no_command(tmp_path: Path) -> None:
    counted = recorder_exhaustion.sampler_rounds(tmp_path, 6)
    assert not recorder_exhaustion.is_bad(counted)
