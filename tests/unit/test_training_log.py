"""Logs of training scripts: the lines of known ones, and any by a pattern.

The known lines are those of three scripts:

- karpathy/nanoGPT (train.py);
- NVIDIA/Megatron-LM (training_log, as in bigscience's published logs);
- pytorch/examples (imagenet/main.py, as in the guides of dusty-nv/jetson-inference,
  docs/pytorch-plants.md).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import fullwire
from fullwire.answers.until import until
from fullwire.convergence.curves import curve_of, read_goal
from fullwire.convergence.reaching import reach
from fullwire.errors import DamagedInput, UsageError
from fullwire.importers import read
from fullwire.run.run import Spans
from fullwire.run.usual import begun_ns, gaps_between_steps_s, marks_of_steps
from fullwire.words import sentence
from tests.conftest import Cli

NANOGPT = """step 0: train loss 2.6743, val loss 2.4028
iter 0: loss 2.8581, time 113655.37ms, mfu -100.00%
iter 1: loss 2.4210, time 20114.44ms, mfu -100.00%
iter 2: loss 2.7040, time 20462.91ms, mfu -100.00%
"""
MEGATRON = (
    "\n".join(
        f" [2025-04-13 23:41:{n}] iteration {n:8d}/    1000 | consumed samples:          160 | "
        f"elapsed time per iteration (ms): {ms} | learning rate: 0.000000E+00 | "
        f"global batch size:    16 | lm loss: 7.399415E+00 | loss scale: 16384.0 |"
        for n, ms in ((10, 1147.6), (20, 430.0), (30, 431.5))
    )
    + "\n"
)
IMAGENET = """=> using pre-trained model 'resnet18'
Epoch: [0][   0/1307]\tTime 49.345 (49.345)\tData  0.561 ( 0.561)\tLoss 3.2172e+00 (3.2172e+00)
Epoch: [0][  10/1307]\tTime  0.779 ( 5.211)\tData  0.000 ( 0.060)\tLoss 2.3915e+01 (1.5221e+01)
Epoch: [1][   0/1307]\tTime  0.765 ( 0.765)\tData  0.500 ( 0.500)\tLoss 3.6293e+01 (6.3377e+01)
"""


def written(where: Path, text: str) -> Path:
    (where / "train.log").write_text(text)
    return where / "train.log"


@pytest.mark.parametrize(
    ("text", "numbers", "lengths_ms", "loss"),
    [
        (NANOGPT, [0, 1, 2], [113655.37, 20114.44, 20462.91], 2.8581),
        (MEGATRON, [10, 20, 30], [1147.6, 430.0, 431.5], 7.399415),
        (IMAGENET, [0, 10, 1307], [49345.0, 779.0, 765.0], 3.2172),
    ],
)
def test_steps_of_known_scripts_are_read(
    tmp_path: Path, text: str, numbers: list[int], lengths_ms: list[float], loss: float
) -> None:
    run = read(written(tmp_path, text))
    steps = run.spans.rows(run.spans.name == "step")
    assert steps.step.tolist() == numbers
    assert ((steps.end_ns - steps.start_ns) * 1e-6).tolist() == pytest.approx(lengths_ms)
    assert (run.metrics.name[0], run.metrics.value[0]) == ("loss", loss)
    assert "how long steps took, and nothing else" in (run.facts.remarks or "")


@pytest.mark.parametrize(("every", "first"), [(1, 1), (10, 10), (10, 0)])
def test_a_line_stands_for_the_steps_since_the_line_before(
    tmp_path: Path, every: int, first: int
) -> None:
    """Every tenth line of a training seemed to be one that was ten times as quick."""
    lines = [f"iter {n}: loss {n}.0, time 100.0ms, mfu 1%" for n in range(first, 301, every)]
    metrics = read(written(tmp_path, "\n".join(lines))).metrics
    taken_s = (metrics.value + (first == 0)) * 0.1
    assert (metrics.time_ns * 1e-9).tolist() == pytest.approx(taken_s.tolist())


def test_a_probe_step_takes_a_number_and_is_no_step_without_a_line() -> None:
    names = ["step", "step", "probe", "step", "step"]
    marks = Spans(
        rank=np.zeros(5, np.int64),
        step=np.array([0, 1, -1, 3, 4]),
        lane=np.full(5, "host", object),
        name=np.array(names, object),
        start_ns=np.array([0, 10, 20, 35, 50]),  # 5 between steps from the probe on
        end_ns=np.array([10, 20, 30, 45, 60]),
    )
    assert begun_ns(marks).tolist() == marks.start_ns.tolist()


@pytest.mark.parametrize(
    ("numbers", "is_numbered"),
    [
        (range(10, 301, 10), True),
        (range(0, 301, 10), True),
        ([*range(10, 161, 10), *range(110, 301, 10)], True),  # started again from step 100
        (range(10, 301, 10), False),
    ],
)
def test_a_metric_has_the_time_at_which_its_step_ended(
    tmp_path: Path, numbers: Sequence[int], is_numbered: bool
) -> None:
    """The steps had a clock of their own, that counted the steps with a line only."""
    lines = "".join(
        f"{f'step {n} ' if is_numbered else ''}loss {1 + 10 / n if n else 11}, took 100 ms\n"
        for n in numbers
    )
    pattern = r"(?:step (?P<step>\d+) )?loss (?P<loss>\S+), took (?P<ms>\d+) ms"
    run = read(written(tmp_path, lines), pattern=pattern)
    marks = marks_of_steps(run)
    assert marks.end_ns.tolist() == run.metrics.time_ns.tolist()
    assert (marks.end_ns - marks.start_ns).tolist() == [100_000_000] * len(numbers)
    assert begun_ns(marks).min() == 0
    # The steps without a line are no pauses.
    assert gaps_between_steps_s(run.spans).tolist() == pytest.approx([0] * (len(numbers) - 1))
    notes = " ".join(sentence(note) for note in fullwire.explain(run).notes)
    assert "between steps" not in notes


def test_a_log_of_few_lines_tells_when_it_reached_a_value(tmp_path: Path) -> None:
    """Five lines of 500 steps: the values seemed to be of another clock."""
    lines = [f"iter {n}: loss {600 - n}.0, time 100.0ms, mfu 1%" for n in range(100, 501, 100)]
    run = read(written(tmp_path, "\n".join(lines)))
    [reached] = until(run, run, "loss<=250").before
    assert reached.time_s == pytest.approx(0.1 * reached.steps)


def test_waiting_for_data_is_input(tmp_path: Path) -> None:
    run = read(written(tmp_path, IMAGENET))
    waits = run.spans.rows(run.spans.lane == "input")
    assert waits.step.tolist() == [0, 1307]
    assert (waits.end_ns - waits.start_ns).tolist() == [561_000_000, 500_000_000]


@pytest.mark.parametrize(
    ("pattern", "seconds"),
    [
        (r"took (?P<s>[\d.]+) s", [0.5, 0.25]),
        (r"took .* \((?P<per_s>[\d.]+) it/s, accuracy (?P<accuracy>[\d.]+)\)", [0.5, 0.25]),
    ],
)
def test_a_pattern_finds_the_steps_of_any_script(
    tmp_path: Path, pattern: str, seconds: list[float]
) -> None:
    text = "took 0.5 s (2.0 it/s, accuracy 0.1)\nnoise\ntook 0.25 s (4.0 it/s, accuracy 0.2)\n"
    run = read(written(tmp_path, text), pattern=pattern)
    assert ((run.spans.end_ns - run.spans.start_ns) * 1e-9).tolist() == pytest.approx(seconds)
    assert run.metrics.value.tolist() == ([0.1, 0.2] if "accuracy" in pattern else [])


def test_each_state_of_a_progress_bar_is_a_line(tmp_path: Path) -> None:
    bar = "\r".join(f" 10%|#   | {n}/90 [00:01<00:09,  {n}.00it/s]" for n in (2, 4, 5))
    path = tmp_path / "job.log"
    path.write_bytes(f"{bar}\r\nthe end\n".encode())
    run = read(path, pattern=r"(?P<step>\d+)/90 .*?(?P<per_s>[\d.]+)it/s")
    assert run.spans.step.tolist() == [2, 4, 5]
    assert (run.spans.end_ns - run.spans.start_ns).tolist() == [
        500_000_000,
        250_000_000,
        200_000_000,
    ]


@pytest.mark.parametrize("lines", [1, 5_000])
def test_steps_and_lines_of_nccl_in_one_log_are_both_read(tmp_path: Path, lines: int) -> None:
    line = "n1:7:8 [0] NCCL INFO Using network Socket\n"
    written(tmp_path, lines * line + NANOGPT)
    for place in (tmp_path / "train.log", tmp_path):
        run = read(place)
        assert run.facts.nccl_network == "Socket"
        assert len(run.spans) == 3


def test_beside_a_trace_the_lines_of_nccl_in_a_log_count(tmp_path: Path) -> None:
    line = "n1:7:8 [0] NCCL INFO Using network Socket\n"
    log = written(tmp_path, line + NANOGPT)
    event = {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "pid": 1, "tid": 1, "ts": 1, "dur": 5}
    trace = tmp_path / "rank0.json"
    trace.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [event]}))
    run = read(trace, log)
    assert run.facts.nccl_network == "Socket"
    assert [gap for gap in run.missing if "its other files are left out (training-log)" in gap]
    log.write_text(NANOGPT)
    with pytest.raises(UsageError, match=r"profiler traces \(.*\) and logs of training scripts \("):
        read(trace, log)


def test_a_log_is_explained_as_far_as_it_goes(tmp_path: Path) -> None:
    explanation = fullwire.explain(read(written(tmp_path, NANOGPT)))
    assert explanation.verdict.kind in ("unknown", "host")


def test_a_log_is_not_told_that_its_job_had_one_worker(tmp_path: Path) -> None:
    """A log of a thousand ranks has the lines of one: neither their number nor what they did."""
    run = read(written(tmp_path, MEGATRON))
    assert run.facts.workers is None
    verdict = fullwire.explain(run).verdict
    assert verdict.kind == "unknown"
    assert "one worker" not in verdict.sentence
    assert "Missing: computation" in verdict.sentence
    page = fullwire.write_page(run, tmp_path / "log.html").read_text()
    assert "1 worker" not in page


def test_the_command_takes_a_pattern(tmp_path: Path, cli: Cli) -> None:
    place = written(tmp_path, "batch done in 12 ms\nbatch done in 14 ms\n")
    out = tmp_path / "log.run"
    cli("import", str(place), "--pattern", r"done in (?P<ms>\d+) ms", "-o", str(out))
    assert len(read(out).spans) == 2


@pytest.mark.parametrize("pattern", ["(", r"(\d+)", r"(?P<s>\d)(?P<ms>\d)"])
def test_a_pattern_that_tells_no_length_is_refused(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(UsageError, match="pattern: expected"):
        read(written(tmp_path, NANOGPT), pattern=pattern)


def test_a_log_without_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DamagedInput, match="no line tells the length of a step"):
        read(written(tmp_path, NANOGPT), pattern=r"never (?P<s>\d+)")
    (tmp_path / "x.json").write_text('{"traceEvents": [], "schemaVersion": 1}')
    with pytest.raises(UsageError, match="--pattern belongs to logs of training scripts"):
        read(tmp_path / "x.json", pattern="(?P<s>1)", format="kineto")


def nanogpt(path: Path, steps: list[int], losses: list[float]) -> Path:
    path.write_text(
        "".join(
            f"iter {n}: loss {loss:.4f}, time 100.00ms, mfu 1.0%\n"
            for n, loss in zip(steps, losses, strict=True)
        )
    )
    return path


@pytest.mark.parametrize("goes_back_to", [0, 1000])
@pytest.mark.parametrize(
    "pattern", [None, r"iter (?P<step>\d+).*loss (?P<loss>\S+), .* (?P<ms>\S+)ms"]
)
def test_a_job_that_was_started_again_takes_its_steps_once(
    tmp_path: Path, goes_back_to: int, pattern: str | None
) -> None:
    """The steps of both attempts were added up: 2,499 and 3,499 steps to a goal of 2,000."""
    steps = [*range(1, 1501), *range(goes_back_to + 1, 3001)]
    losses = [0.1 + 0.2 * (n / 2000) ** -0.5 for n in steps]
    run = read(nanogpt(tmp_path / "train.log", steps, losses), pattern=pattern)
    curve = curve_of(run.metrics, "loss", "a")
    assert curve.steps.tolist() == list(range(1, 3001))
    assert curve.repeated == 1500 - goes_back_to
    assert reach(curve, read_goal("loss<=0.3"), "a").steps == pytest.approx(2000, abs=1)
    assert len(np.unique(run.spans.step)) == len(steps)  # the job took all of them


def test_epochs_of_one_length_are_counted_on_though_their_values_scatter(tmp_path: Path) -> None:
    steps = [*range(1000)] * 3
    losses = (0.5 + 0.1 * np.random.default_rng(1).normal(size=3000)).tolist()
    run = read(nanogpt(tmp_path / "train.log", steps, losses))
    curve = curve_of(run.metrics, "loss", "a")
    assert curve.steps.tolist() == list(range(3000))
    assert curve.repeated == 0


@pytest.mark.parametrize("script", ["nanogpt", "megatron", "pattern"])
@pytest.mark.parametrize("word", ["nan", "NaN", "-nan", "NAN", "inf", "-Infinity"])
def test_a_training_that_lost_its_numbers_is_read_to_its_end(
    tmp_path: Path, script: str, word: str
) -> None:
    """The lines without numbers were passed over, and the curve went on to its goal."""
    losses = [f"{0.1 + 2 * n**-0.5:.4f}" for n in range(1, 301)] + [word] * 100
    line, pattern = {
        "nanogpt": ("iter {n}: loss {loss}, time 100.00ms, mfu 1.0%", None),
        "megatron": (
            " iteration {n:8d}/ 5000 | elapsed time per iteration (ms): 100.0 | lm loss: {loss} |",
            None,
        ),
        "pattern": (
            "{n} loss={loss}, took 0.1",
            r"^(?P<step>\d+) loss=(?P<loss>\S+) .* (?P<s>\S+)",
        ),
    }[script]
    text = "\n".join(line.format(n=n, loss=loss) for n, loss in enumerate(losses, 1))
    run = read(written(tmp_path, text + "\n"), pattern=pattern)
    assert len(run.spans) == 400
    curve = curve_of(run.metrics, "loss", "a")
    assert (curve.lost_at, curve.not_numbers) == (301, 100)
    with pytest.raises(UsageError, match="loss is not a number from step 301 on"):
        reach(curve, read_goal("loss<=0.15"), "a")


def test_a_log_whose_loss_is_never_a_number_is_one_of_a_training(tmp_path: Path) -> None:
    run = read(nanogpt(tmp_path / "train.log", [1, 2, 3], [np.nan] * 3))
    with pytest.raises(UsageError, match="expected values of loss that are numbers, got none"):
        curve_of(run.metrics, "loss", "a")


def test_if_a_line_tells_no_step_the_lines_are_counted(tmp_path: Path) -> None:
    text = "".join(f"{'' if n == 30 else f'step {n} '}took 100 ms\n" for n in range(1, 61))
    run = read(written(tmp_path, text), pattern=r"(?:step (?P<step>\d+) )?took (?P<ms>\d+) ms")
    assert run.spans.step.tolist() == list(range(60))
