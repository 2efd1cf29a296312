"""Real jobs with TP, PP and FSDP2 over Gloo, traced by PyTorch: their plans are recognised."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

import fullwire as fw
from fullwire.run.run import Run
from fullwire.simulation.recognised_plan import Recognised, recognised
from validation.jobs.planned import BATCH, MODELS
from validation.plan_pairs import MICROBATCH, Job, recorded

SIZES = MODELS["small"]
JOBS = [Job("small", 2, 1, 1, 0), Job("small", 1, 2, 1, 0), Job("small", 1, 1, 2, 3)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Job, tuple[Run, Recognised]]:
    place = tmp_path_factory.mktemp("jobs")
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda job: recorded(job, place / job.name), JOBS))
    runs = {job: fw.read(place / job.name) for job in JOBS}
    return {job: (run, recognised(run)) for job, run in runs.items()}


def test_the_plan_and_the_model_of_a_real_job_are_recognised(
    found: dict[Job, tuple[Run, Recognised]],
) -> None:
    for job, (_, seen) in found.items():
        layout, model = seen.layout, seen.model
        assert (layout.tp, layout.pp, layout.dp, layout.zero) == job[1:], job
        assert (layout.microbatch, layout.global_batch) == (MICROBATCH, BATCH)
        assert (model.layers, model.hidden, model.ffn) == (SIZES.layers, SIZES.hidden, SIZES.inner)
        assert (model.heads, model.vocab) == (SIZES.heads, SIZES.words)


def test_what_fsdp_gathers_and_copies_is_no_computing(
    found: dict[Job, tuple[Run, Recognised]],
) -> None:
    """Gloo marks a gathering with a rank's part alone, and copies in the thread that sends."""
    run, seen = found[JOBS[2]]
    gathers = [size for op, size, _ in seen.messages["dp"] if op == "allgather"]
    passes = BATCH // 2 // MICROBATCH
    matrices = 4 * SIZES.hidden**2 + 3 * SIZES.hidden * SIZES.inner
    layer_bytes = 4 * (matrices + 2 * SIZES.hidden)
    of_layers = [size for size in gathers if size == layer_bytes]
    # Forward and backward; the last layer may keep its parameters in between.
    each_step = len(of_layers) / seen.steps / passes
    assert 2 * SIZES.layers - 1 <= each_step <= 2 * SIZES.layers
    assert seen.busy_s["shards"] > 0
    plain = found[JOBS[1]][1].busy_s
    assert seen.busy_s["rest"] < 3 * plain["rest"] + 0.2 * seen.step_s
    rows = run.collectives.op == "allgather"
    assert set(run.collectives.dtype[rows].tolist()) == {"float32"}
