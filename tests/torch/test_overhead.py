"""The two kinds of steps that `fullwire bench recorder` compares: recorded and not recorded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import fullwire.studies.recording.job as overhead_job
from fullwire.run.centre import centre_of, median_of
from fullwire.run.store import read_run
from fullwire.studies.recording import overhead
from fullwire.studies.recording.overhead import Overhead, Pair, overhead_lines, overhead_object
from tests.torch.test_record import needs_torch

EACH_PAIR = [Pair(0.085, ratio, 200e-6) for ratio in (1.001, 1.002, 1.003, 1.004, 1.02)]
CONTROL = [Pair(0.085, ratio, 10e-6) for ratio in (0.99, 0.999, 1.0, 1.001, 1.01)]


@needs_torch
@pytest.mark.usefixtures("uncompiled")
def test_of_two_models_in_turns_one_is_recorded_and_the_other_is_not(tmp_path: Path) -> None:
    output = tmp_path / "x.run"
    job = subprocess.run(
        [
            sys.executable,
            "-m",
            "fullwire",
            "record",
            "-o",
            str(output),
            "--",
            sys.executable,
            str(overhead.JOB),
            str(overhead.RANKS),
            "16",
            str(overhead.STEPS),
            "0",
        ],
        input="record\n",
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    pairs = json.loads(job.stdout)
    assert len(pairs) == overhead_job.PAIRS
    assert {way for pair in pairs for way in pair} == {"plain", "other"}

    run = read_run(output)
    gradients = Counter(zip(run.gradients.rank.tolist(), run.gradients.step.tolist(), strict=True))
    steps = range((1 + overhead_job.PAIRS) * overhead.STEPS)
    assert gradients == {
        (rank, step): 2 * overhead_job.LAYERS for rank in range(overhead.RANKS) for step in steps
    }
    in_steps = run.collectives.op[run.collectives.step >= 0]
    assert (in_steps == "allreduce").sum() >= 2 * len(steps)


def test_the_ratio_is_told_with_its_interval_beside_a_control_and_the_load() -> None:
    result = Overhead(pairs={"record": EACH_PAIR, "control": CONTROL}, load=2.5)
    said = "\n".join(overhead_lines(result))
    assert "over without: 1.0030 (95 % sure between 1.0010 and 1.0200)" in said
    assert "(control): 1.0000" in said
    assert "200 us" in said
    assert "load of the machine at the end: 2.5" in said
    told = overhead_object(result)
    assert told["step_ratio"] == pytest.approx(1.003, abs=1e-4)
    assert told["control_step_ratio"] == pytest.approx(1.0, abs=1e-4)
    assert told["step_ratio_interval"] == pytest.approx({"low": 1.001, "high": 1.02})


def test_what_is_longer_by_a_known_share_is_told_in_spite_of_some_far_off() -> None:
    scatter = np.random.default_rng(7).normal(1.01, 0.03, 400)
    scatter[::20] *= 3  # another process had the processor
    few, many = centre_of(scatter[:40].tolist()), centre_of(scatter.tolist())
    assert many.low < 1.01 < many.high
    assert many.high - many.low < 0.01 < few.high - few.low


def test_the_interval_of_a_median_narrows_with_more_values() -> None:
    few, many = median_of(range(9)), median_of(range(900))
    assert few.value == 4
    assert (few.high - few.low) / 9 > (many.high - many.low) / 900
