"""Chaos in a lab: hosts that are killed, paused or apart, and a full disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fullwire
from tests.lab.test_lab import needs_namespaces
from tests.torch.test_record import needs_torch
from tests.transport.test_elastic import TRAINING, check_steps

LAB = [sys.executable, "-m", "fullwire", "lab", "run", "--rate", "1Gbps"]

# Two hosts send each other packets and write to the lab's disk. Each notes how often it sent
# without an answer, how long it stood still, and how often the disk was full.
TALK = """
import json, os, pathlib, socket, sys, time
folder, rank = pathlib.Path(sys.argv[1]), int(os.environ["RANK"]) % 2
own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
own.bind((f"10.77.0.{rank + 1}", 999 + 1000))
own.setblocking(False)
began = last = time.monotonic()
unheard = most_unheard = full = written = 0
still_s = 0.0
while time.monotonic() < began + 8:
    now = time.monotonic()
    still_s, last, unheard = max(still_s, now - last), now, unheard + 1
    try:
        own.sendto(b"here", (f"10.77.0.{2 - rank}", 1999))
        while own.recv(10):
            unheard = 0
    except OSError:
        pass
    most_unheard = max(most_unheard, unheard if now > began + 2 else 0)
    try:
        with open(pathlib.Path(os.environ["FULLWIRE_LAB_DISK"], f"file {rank}"), "ab") as file:
            file.write(bytes(8192))
        written += 1
    except OSError as error:
        full += "No space left" in str(error)
    time.sleep(0.02)
said = {"unheard": most_unheard, "still_s": still_s, "full": full, "written": written}
said["tmp"] = os.environ["TMPDIR"] == os.environ["FULLWIRE_LAB_DISK"]
(folder / f"worker {os.environ['RANK']}").write_text(json.dumps(said))
"""


@needs_namespaces
def test_hosts_are_killed_paused_and_apart_and_the_disk_is_full(tmp_path: Path) -> None:
    chaos = (
        "kill 1 at 0.1s; pause 0 0.8s at 6s; partition 0|1 1.5s at 4s; fill disk 2s at 1.5s; "
        "slow 1 to 10Mbps at 0.2s"
    )
    job = subprocess.run(
        [*LAB, "--workers", "2", "--chaos", chaos, "--", sys.executable, "-c", TALK, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert job.returncode == 0, job.stderr
    for said in ("kill 1", "host 1 starts again", "partition 0|1", "heal 0|1", "slow 1 10 Mbps"):
        assert f": {said}" in job.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["worker 0", "worker 3"]
    notes = [json.loads(path.read_text()) for path in sorted(tmp_path.iterdir())]
    assert notes[0]["still_s"] > 0.5, "it was not paused"
    for note in notes:
        assert note["unheard"] > 5, "the hosts reached each other"
        assert note["full"] > 2, "the disk had room"
        assert note["written"] > 10
        assert note["tmp"]


@pytest.mark.alone  # it holds the ends of steps on two hosts against each other
@needs_torch
@needs_namespaces
def test_an_elastic_job_goes_on_through_chaos_and_the_run_has_its_faults(tmp_path: Path) -> None:
    notes, run = tmp_path / "notes", tmp_path / "job.run"
    notes.mkdir()
    options = ["--chaos", "kill 1 at 4s; pause 0 0.5s at 7s", "-o", str(run), "--no-probe"]
    job = subprocess.run(
        [
            *LAB,
            "--workers",
            "2",
            *options,
            "--",
            *TRAINING,
            str(notes),
            "60",
            "-",
        ],
        env=os.environ | {"PAUSE_S": "0.02"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert job.returncode == 0, job.stderr
    sizes = check_steps(notes, epochs=60)
    assert set(sizes.values()) == {1, 2}
    assert sizes[600] == 2, "the killed host did not come back"
    recorded = fullwire.read(run)
    # The worker that came back numbers its steps as the job does.
    marks = recorded.spans.rows(recorded.spans.name == "step")
    first, last = marks.rows(marks.rank == 0), marks.rows(marks.rank == marks.rank.max())
    begins = [int(path.read_text().split(maxsplit=1)[0]) for path in notes.glob("steps of *")]
    assert last.step.min() == max(begins) - 1
    assert last.step.min() > 100
    at = np.searchsorted(first.step, last.step[-20:])
    assert (first.step[at] == last.step[-20:]).all()
    assert (abs(first.end_ns[at] - last.end_ns[-20:]) < 10_000_000).all()
    assert recorded.facts.workers == 2
    predicted = fullwire.whatif(recorded, bandwidth="1Gbps", workers=2)
    assert float(predicted["step_s"][0]) < 3 * fullwire.explain(recorded).step_s
    events = recorded.events
    told = dict(zip(events.kind.tolist(), events.ranks.tolist(), strict=True))
    assert (told["fault: kill 1"], told["fault: pause 0"]) == ("1", "0")
    assert "start" in told


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--chaos", "explode"], "chaos: expected kill, pause"),
        (["--seed", "3"], "--seed: expected --chaos"),
    ],
)
def test_chaos_that_nobody_knows_is_refused_before_anything_starts(
    options: list[str], problem: str
) -> None:
    job = subprocess.run(
        [*LAB, "--workers", "2", *options, "--", "true"], capture_output=True, text=True, timeout=60
    )
    assert job.returncode == 2
    assert problem in job.stderr
    assert job.stderr.count("\n") == 1
