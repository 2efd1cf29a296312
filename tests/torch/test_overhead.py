"""The two kinds of steps that `fullwire bench recorder` compares: recorded and not recorded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from docs.making.answers import printed
from fullwire.errors import UsageError
from fullwire.run.centre import centre_of, median_of
from fullwire.run.store import read_run
from fullwire.studies.recording import overhead
from fullwire.studies.recording.overhead import (
    JOBS,
    USUAL,
    Job,
    Overhead,
    Pair,
    jobs_named,
    measure_overhead,
    overhead_lines,
    overheads_object,
    unmeasured_line,
)
from tests.torch.test_record import needs_torch

SMALL = Job(name="small", ranks=2, layers=3, width=16, batch=8, steps=4, processors=1)
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
            str(overhead.SCRIPT),
            *SMALL.script_arguments(),
        ],
        input="record\n",
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    pairs = json.loads(job.stdout)
    assert len(pairs) == overhead.ROUND_PAIRS
    assert {way for pair in pairs for way in pair} == {"plain", "other"}

    run = read_run(output)
    gradients = Counter(zip(run.gradients.rank.tolist(), run.gradients.step.tolist(), strict=True))
    steps = range((1 + overhead.ROUND_PAIRS) * (1 + SMALL.steps))  # one of a turn is not counted
    assert gradients == {
        (rank, step): 2 * SMALL.layers for rank in range(SMALL.ranks) for step in steps
    }
    in_steps = run.collectives.op[run.collectives.step >= 0]
    assert (in_steps == "allreduce").sum() >= 2 * len(steps)


def result_of(job: Job, asked: int = 5) -> Overhead:
    return Overhead(job=job, pairs={"record": EACH_PAIR, "control": CONTROL}, asked=asked, load=2.5)


@needs_torch
@pytest.mark.usefixtures("uncompiled")
def test_a_job_on_few_processors_is_measured_in_whole_rounds() -> None:
    result = measure_overhead(5, job=SMALL)
    assert {len(pairs) for pairs in result.pairs.values()} == {2 * overhead.ROUND_PAIRS}
    said = "\n".join(overhead_lines(result))
    assert "small: 2 ranks on 1 processor, 3 layers of width 16, " in said
    assert "8 pairs of turns of 4 steps (5 were asked for; pairs are measured 4 at a time)" in said


def test_jobs_are_chosen_by_name() -> None:
    assert [job.name for job in jobs_named(["many-ranks", "usual"])] == ["usual", "many-ranks"]
    assert jobs_named(["all"]) == JOBS
    with pytest.raises(UsageError, match="usual, short-steps, many-ranks or all, got 'long'"):
        jobs_named(["usual", "long"])
    assert unmeasured_line([result_of(JOBS[1])]) == (
        "other jobs: fullwire bench recorder --job usual,many-ranks"
    )
    assert unmeasured_line([result_of(job) for job in JOBS]) is None


def test_one_job_is_of_eight_ranks_on_two_processors_whatever_the_machine_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {3, 5, 8, 13})
    _, _, many_ranks = JOBS
    assert (many_ranks.ranks, many_ranks.allowed()) == (8, {3, 5})
    assert USUAL.allowed() == {3, 5, 8, 13}


def test_the_json_has_an_object_for_each_job_and_the_first_ones_keys_at_the_top() -> None:
    told = overheads_object([result_of(job) for job in JOBS])
    assert [each["job"] for each in told["jobs"]] == ["usual", "short-steps", "many-ranks"]
    assert {key: value for key, value in told.items() if key != "jobs"} == told["jobs"][0]
    assert told["jobs"][1]["added_s"] == pytest.approx(0.003 * 0.085, rel=1e-2)


def test_the_command_says_each_job_and_how_to_measure_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        overhead, "measure_overhead", lambda pairs, job, tell: result_of(job, asked=pairs)
    )
    said = printed(["bench", "recorder", "--job", "usual,short-steps", "--pairs", "5"])
    assert "usual: 2 ranks, 40 layers" in said
    assert "short-steps: 2 ranks, 4 layers" in said
    assert said.endswith("other jobs: fullwire bench recorder --job many-ranks\n")


def test_the_ratio_is_told_with_its_interval_beside_a_control_and_the_load() -> None:
    result = result_of(USUAL)
    said = "\n".join(overhead_lines(result))
    assert "over without: 1.0030 (95 % sure between 1.0010 and 1.0200)" in said
    assert "between 1.0010 and 1.0200), +255 us (+85 us to +1.7 ms) a step" in said
    assert "(control): 1.0000" in said
    assert "200 us" in said
    assert "load of the machine at the end: 2.5" in said
    told = overheads_object([result])
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


STEPS_UNDER_A_PROFILER = """
import sys
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
layers = [nn.Linear(512, 512) for _ in range(30)]
model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=int(sys.argv[1]))
optimizer = torch.optim.SGD(model.parameters(), 0.0)
data = torch.randn(2, 512)
calls = 0


def count(frame, event, _):
    global calls
    name = frame.f_globals.get("__name__", "")
    # A sum may be over before its callback is left: then it is called here, not on Gloo's thread.
    is_later = frame.f_code.co_name == "_bucket_ended"
    calls += event == "call" and name.startswith("fullwire_inside") and not is_later


def step():
    global calls
    calls = 0
    optimizer.zero_grad()
    loss = model(data).sum()
    sys.setprofile(count)
    loss.backward()
    sys.setprofile(None)
    optimizer.step()
    return calls


for _ in range(4):
    step()
print(min(step() for _ in range(20)))
dist.destroy_process_group()
"""


@needs_torch
def test_a_bucket_costs_no_call_of_a_python_function(tmp_path: Path) -> None:
    """Caches are full of the job's data: a call of a function takes some 3 us."""

    def calls(bucket_mebibytes: int) -> int:
        command = [sys.executable, "-c", STEPS_UNDER_A_PROFILER, str(bucket_mebibytes)]
        whole = ["-m", "fullwire", "record", "--force", "-o", str(tmp_path / "x.run"), "--"]
        done = subprocess.run(
            [sys.executable, *whole, *command],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        return int(done.stdout.splitlines()[0])

    # 30 layers of 1 MiB are in 30 buckets, or in one or two.
    one_or_two, thirty = calls(100), calls(1)
    assert (thirty - one_or_two) / 28 < 0.2
