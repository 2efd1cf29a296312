"""Recording what jobs report: gradient noise, metrics by `fullwire.log`, and printed ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fullwire.answers.samples_to_goal import global_batch
from fullwire.convergence.curves import curve_of
from fullwire.recorder.inside.journal import ENDED, Note
from fullwire.recorder.inside.metrics import value_of
from fullwire.recorder.journals import read_journals
from fullwire.recorder.printed import TOLD_BY
from fullwire.run.run import Noise, Run
from fullwire.run.store import read_run
from tests.torch.test_record import UNCOMPILED, needs_torch, together

pytestmark = needs_torch
PATTERN = "step (?P<step>[0-9]+) loss: ([0-9.]+)"


def recorded(place: Path, way: str, *options: str, job: str = "noisy.py") -> tuple[Run, str]:
    command = [sys.executable, "-m", "fullwire", "record", "-o", str(place / "job.run"), *options]
    done = subprocess.run(
        [*command, "--", *together(2, job, way)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return read_run(place / "job.run"), done.stderr


@pytest.mark.parametrize(
    ("way", "of_pass", "of_step"),
    [
        ("passes", 8, 64),
        ("cut", 8, 64),
        ("uneven", 11, 64),
        ("ahead", 32, 64),
        ("split", 32, 64),
        ("sent", 32, 64),
        ("kept", None, None),
        ("made", None, None),
    ],
)
def test_the_samples_of_a_step_are_those_that_all_ranks_took_from_their_loaders(
    tmp_path: Path, way: str, of_pass: int | None, of_step: int | None
) -> None:
    """Neither the passes of a step nor the loader's own batch size tell them."""
    run, _ = recorded(tmp_path, way, job="loaders.py")
    assert (run.facts.pass_samples, run.facts.step_samples) == (of_pass, of_step)
    if of_step is not None:
        assert global_batch("job.run", run) == of_step


def logged(run: Run, name: str) -> dict[int, float]:
    rows = run.metrics.rows(run.metrics.name == name)
    return dict(zip(rows.step.tolist(), rows.value.tolist(), strict=True))


@pytest.mark.parametrize("way", ["none", "summing"])
def test_noise_is_that_of_the_ranks_own_gradients(tmp_path: Path, way: str) -> None:
    """Although the job accumulates, scales its loss, and clips to almost nothing."""
    options = ["--noise"]
    if way == "none":
        options += ["--metric", PATTERN]
    elif way == "summing":
        options += ["--metric", "accuracy: ([0-9.]+)", "--metric", "loss: ([0-9.]+)"]
    run, said = recorded(tmp_path, way, *options)
    noise = run.noise
    assert noise.step.tolist() == [10, 20]
    assert noise.samples.tolist() == [8, 8]
    assert noise.ranks.tolist() == [2, 2]
    own, mean = logged(run, "own"), logged(run, "mean")
    assert noise.ranks_squared_norm == pytest.approx([own[11], own[21]], rel=1e-4)
    assert noise.mean_squared_norm == pytest.approx([mean[11], mean[21]], rel=1e-4)
    assert run.facts.pass_samples == 4
    if way == "none":
        assert logged(run, "loss") == pytest.approx(
            {step: 1 / step for step in range(1, 25)}, abs=1e-6
        )
        assert "matched none" not in said
    if way == "summing":
        assert "--metric 'accuracy: ([0-9.]+)' has matched none" in said
        assert "none of 0 lines" not in said
        # The job flushes nothing, and yet its lines come while its steps run.
        assert len(set(logged(run, "loss"))) > 6
    assert np.isfinite(run.metrics.value).all()
    assert TOLD_BY < 20


def test_noise_is_not_told_where_each_pass_of_a_step_is_averaged(tmp_path: Path) -> None:
    """The second pass adds its gradients to a mean, so a rank's own sum is nowhere."""
    run, _ = recorded(tmp_path, "averaging", "--noise")
    assert not len(run.noise)
    assert any("`no_sync` in all passes but the last keeps it" in each for each in run.missing)


def noise_as_logged(run: Run) -> Noise:
    """Return a run's noise, which has the norms that the job found by itself."""
    noise = run.noise
    assert noise.step.tolist() == [10, 20]
    own, mean = logged(run, "own"), logged(run, "mean")
    assert noise.ranks_squared_norm == pytest.approx([own[10], own[20]], rel=1e-4)
    assert noise.mean_squared_norm == pytest.approx([mean[10], mean[20]], rel=1e-4)
    return noise


def test_noise_under_fsdp_is_put_together_from_shards(tmp_path: Path) -> None:
    run, _ = recorded(tmp_path, "fsdp", "--noise")
    noise = noise_as_logged(run)
    assert noise.ranks.tolist() == [2, 2]


def test_noise_of_an_elastic_job_is_that_of_its_workers(tmp_path: Path) -> None:
    """Although its sums weight gradients in place, where these are views of the sums."""
    run, _ = recorded(tmp_path, "elastic", "--noise")
    noise = noise_as_logged(run)
    assert (noise.samples.tolist(), noise.ranks.tolist()) == ([4, 4], [2, 2])
    assert not run.missing


def test_noise_that_rounds_do_not_show_leaves_the_rest_of_a_recording_whole(tmp_path: Path) -> None:
    run, _ = recorded(tmp_path, "rounds", "--noise")
    assert not len(run.noise)
    assert {gap.table for gap in run.gaps} == {"noise"}
    assert "fullwire.elastic without local steps show" in run.missing[0]


def test_noise_that_cannot_be_seen_is_a_gap(tmp_path: Path) -> None:
    job = (
        "import torch\n"
        "weight = torch.nn.Parameter(torch.ones(3))\n"
        "optimizer = torch.optim.SGD([weight], 0.1)\n"
        "for _ in range(12):\n"
        "    weight.square().sum().backward(); optimizer.step()\n"
    )
    command = [sys.executable, "-m", "fullwire", "record", "-o", str(tmp_path / "job.run")]
    whole = [*command, "--noise", "--", sys.executable, UNCOMPILED, "-c", job]
    subprocess.run(whole, capture_output=True, timeout=120, check=True)
    run = read_run(tmp_path / "job.run")
    assert not len(run.noise)
    assert any("gradient noise was not seen" in each for each in run.missing)


OPENS_A_JOURNAL = """
import sys, torch
from fullwire.recorder.inside.journal import Journal, Note
from fullwire.recorder.inside.noise import EVERY, GradientNoise
journal = Journal(sys.argv[1])
noise = GradientNoise(journal)
"""


@pytest.mark.parametrize("hooked", [True, False])
def test_gradients_whose_noise_cannot_be_read_leave_the_job_alone(
    tmp_path: Path, hooked: bool
) -> None:
    """Norms of sparse gradients are not in torch; the own ones are read first, then the mean's."""
    job = OPENS_A_JOURNAL + (
        "layer = torch.nn.Embedding(4, 3, sparse=True)\n"
        "noise.watch(layer.parameters())\n"
        "if sys.argv[2] == 'False': noise._read_own = lambda parameter: None\n"
        "optimizer = torch.optim.SGD(layer.parameters(), 0.1)\n"
        "for _ in range(2 * EVERY + 1):\n"
        "    layer(torch.tensor([1])).sum().backward(); noise.pass_ended(); optimizer.step()\n"
        "    journal.note(Note.INPUT, 0, 1, 1)\n"
        "noise.close(); journal.close()\n"
    )
    command = [sys.executable, UNCOMPILED, "-c", job, str(tmp_path), str(hooked)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr == ""
    [journal], _ = read_journals([tmp_path])
    assert journal.header["status"] == ENDED  # only the noise is missing
    assert journal.counts[Note.INPUT] == 21
    [missing] = journal.defined("missing")
    assert missing["sentence"].startswith("its gradient noise ended, as a norm could not be read (")


def test_gradients_in_double_precision_have_noise(tmp_path: Path) -> None:
    job = OPENS_A_JOURNAL + (
        "weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))\n"
        "noise.watch([weight])\n"
        "optimizer = torch.optim.SGD([weight], 0.1)\n"
        "for _ in range(EVERY + 1):\n"
        "    weight.sum().backward(); noise.pass_ended(); optimizer.step(); weight.grad = None\n"
        "noise.close(); journal.close()\n"
    )
    subprocess.run([sys.executable, UNCOMPILED, "-c", job, str(tmp_path)], timeout=120, check=True)
    [journal], _ = read_journals([tmp_path])
    assert not [*journal.defined("missing")]
    assert journal.counts[Note.OWN_NOISE] == journal.counts[Note.MEAN_NOISE] == 1


def test_metrics_of_a_job_that_was_started_again_go_on_from_those_before(tmp_path: Path) -> None:
    """Steps 6 and 7 were lost with the first attempt, and trained once more."""
    script = tmp_path / "job.py"
    script.write_text(
        "import os, torch, fullwire\n"
        "is_first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
        "weight = torch.nn.Parameter(torch.ones(3))\n"
        "optimizer = torch.optim.SGD([weight], 0.1)\n"
        "for step in range(1, 8) if is_first else range(6, 12):\n"
        "    weight.square().sum().backward(); optimizer.step()\n"
        "    fullwire.log(loss=step + 0.5 * is_first, step=step)\n"
        "    fullwire.log(stepless=1.0)\n"
        "assert not is_first\n"
    )
    launched = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=1", "--standalone"]
    command = [sys.executable, "-m", "fullwire", "record", "-o", str(tmp_path / "job.run"), "--"]
    whole = [*command, *launched, str(script)]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    run = read_run(tmp_path / "job.run")
    curve = curve_of(run.metrics, "loss", "job")
    assert curve.steps.tolist() == [*range(1, 12)]
    assert curve.values.tolist() == [1.5, 2.5, 3.5, 4.5, 5.5, *range(6, 12)]
    assert curve.repeated == 2
    assert (np.diff(curve.times_ns) > 0).all()
    assert len(logged(run, "stepless")) == 6  # where the second attempt went on, nobody tells


def test_an_elastic_job_tells_its_batch_and_how_rarely_it_adds_up(tmp_path: Path) -> None:
    job = (
        "import torch, fullwire\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "job = fullwire.elastic(model, optimizer, sync_every=4, fragments=2)\n"
        "data = torch.utils.data.TensorDataset(torch.randn(96, 4))\n"
        "for (inputs,) in job.batches(data, batch_size=8):\n"
        "    with job.step():\n"
        "        loss = job.model(inputs).square().mean()\n"
        "        optimizer.zero_grad(); loss.backward(); optimizer.step()\n"
    )
    command = [sys.executable, "-m", "fullwire", "record", "-o", str(tmp_path / "job.run")]
    whole = [*command, "--", sys.executable, UNCOMPILED, "-c", job]
    subprocess.run(whole, capture_output=True, timeout=120, check=True)
    facts = read_run(tmp_path / "job.run").facts
    assert (facts.local_steps, facts.fragments, facts.step_samples) == (4, 2, 8)


@pytest.mark.parametrize("scaler", ["disabled", "sharded", "later"])
def test_the_scale_of_any_gradient_scaler_is_divided_out(tmp_path: Path, scaler: str) -> None:
    """A disabled scaler has no scale. Some classes have a `scale` of their own."""
    job = OPENS_A_JOURNAL + (
        "kind = torch.amp.GradScaler\n"
        "if sys.argv[2] == 'sharded':\n"
        "    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as kind\n"
        "if sys.argv[2] == 'later':\n"
        "    class kind(torch.amp.GradScaler):\n"
        "        def scale(self, loss):\n"
        "            self._scale = torch.full((), self._init_scale)\n"
        "            return loss * self._scale\n"
        "scaler = kind('cpu', init_scale=64.0, enabled=sys.argv[2] != 'disabled')\n"
        "weight = torch.nn.Parameter(torch.ones(4))\n"
        "noise.watch([weight])\n"
        "optimizer = torch.optim.SGD([weight], 0.1)\n"
        "for _ in range(EVERY + 1):\n"
        "    scaler.scale(weight.sum()).backward(); noise.pass_ended(); optimizer.step()\n"
        "    weight.grad = None\n"
        "noise.close(); journal.close()\n"
    )
    command = [sys.executable, UNCOMPILED, "-c", job, str(tmp_path), scaler]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr == ""
    [journal], _ = read_journals([tmp_path])
    assert not [*journal.defined("missing")]
    rows = np.concatenate([block.rows for block in journal.blocks()])
    for kind in (Note.OWN_NOISE, Note.MEAN_NOISE):
        [bits] = rows[rows[:, 0] == kind, 3].tolist()
        assert value_of(bits) == pytest.approx(4.0)
