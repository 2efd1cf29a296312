"""What jobs report: patterns for output, `fullwire.log`, and the libraries that jobs use."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import fullwire as fw
from fullwire.errors import UsageError
from fullwire.recorder import journals
from fullwire.recorder.inside import metrics as inside
from fullwire.recorder.inside.journal import Journal, Note
from fullwire.recorder.printed import Pattern
from fullwire.recorder.reported import KINDS, Reported, read_printed
from fullwire.recorder.steps import Steps
from fullwire.report.contents import print_metrics
from fullwire.run.run import Metrics

NO_NOTES = dict.fromkeys(KINDS, np.empty((0, 3), np.int64))


def a_journal(directory: Path) -> journals.Journal:
    """Write a journal of one note, and read it."""
    journal = Journal(str(directory))
    journal.note(Note.INPUT, 0, 1, 1)
    journal.close()
    [read], _ = journals.read_journals([directory])
    return read


def steps_of(*ends_ns: int) -> Steps:
    ends = np.array(ends_ns, np.int64)
    return Steps(start_ns=np.concatenate([[0], ends[:-1]]).astype(np.int64), end_ns=ends)


def written(directory: Path, journal: Journal, steps: Steps) -> Metrics:
    """Close a journal, and return the metrics in it."""
    journal.close()
    [read], _ = journals.read_journals([directory])
    reported = Reported()
    reported.add(read, steps, NO_NOTES, 0)
    return reported.metrics([directory])


def test_each_metric_has_the_samples_that_all_workers_took_so_far(tmp_path: Path) -> None:
    """The batch grows from 8 to 24 in the third step; a value may come before its step ends."""
    journal = Journal(str(tmp_path))
    journal.define(kind="metric", number=0, name="loss")
    for step, time_ns in ((0, 5), (1, 20), (2, 95), (3, 115), (4, 205)):
        journal.note(Note.METRIC_STEP, step, time_ns, 0)
        journal.note(Note.METRIC, 0, time_ns, inside.bits_of(1.0))
    journal.close()
    [read], _ = journals.read_journals([tmp_path])
    took = [[8, 5, 1], [8, 35, 1], [24, 75, 1], [24, 105, 1]]
    passes = [[0, 10, 1], [0, 40, 1], [0, 80, 1], [0, 120, 1]]
    notes = {**NO_NOTES, Note.SAMPLES: np.array(took), Note.BACKWARD: np.array(passes)}
    reported = Reported()
    reported.add(read, steps_of(30, 70, 100, 200), notes, 0)
    table = reported.metrics([tmp_path], workers=2)
    assert table.step.tolist() == [0, 1, 2, 3, 4]
    assert table.samples.tolist() == [0, 16, 32, 80, 128]
    joined = reported.metrics([tmp_path], workers=None)  # some workers joined later
    assert np.isnan(joined.samples).all()
    # A rank that takes no steps of its own, and one that does.
    beside = Reported()
    beside.add(
        read, Steps(start_ns=np.zeros(0, np.int64), end_ns=np.zeros(0, np.int64)), NO_NOTES, 0
    )
    beside.add(read, steps_of(30, 70, 100, 200), notes, 0)
    assert len(beside.metrics([tmp_path], workers=2)) == 5


@pytest.mark.parametrize(
    ("pattern", "line", "read"),
    [
        ("loss: ([0-9.]+)", "epoch 3 loss: 0.25 lr 0.1", {"loss": 0.25}),
        (r"loss=(\S+)", "loss=1e-3", {"loss": 0.001}),
        (r"val/acc\s+([0-9.]+)", "val/acc   0.91", {"val/acc": 0.91}),
        (r"(?P<val>\d+) of (?P<step>\d+)", "7 of 12", {"val": 7, "step": 12}),
        ("loss: (.*)", "loss: nan", {"loss": float("nan")}),
        (r"loss=(\S+)", "loss=Infinity", {"loss": float("inf")}),
        (r"loss=(\S+)", "loss=-Infinity, lr=0.1", {"loss": float("-inf")}),
        (r"loss=(\S+)", "loss=+inf", {"loss": float("inf")}),
        (r"loss=(\S+)", "loss=-nan", {"loss": float("nan")}),
        (r"loss=(\S+)", "loss=nano", {}),
        ("loss: (.*)", "loss: soon", {}),
        ("loss: ([0-9.]+)", "accuracy: 0.5", {}),
        ("([0-9.]+)", "0.5", {"metric": 0.5}),
        ("loss: ([0-9.]+)", "loss: 5.5e-18", {"loss": 5.5e-18}),
        ("loss: ([0-9.]+)", "loss: 5.5 e-18 and 3each", {"loss": 5.5}),
        ("loss: ([0-9.]+)", "step 3, loss: 2.3220.", {"loss": 2.322}),
        ("loss: (.*)", "loss: 1,234.5", {"loss": 1234.5}),
        ("loss: ([0-9.]+)", "loss: 1,234.5 lr 0.1", {"loss": 1234.5}),
        ("loss: ([0-9.]+)", "loss: 2,100,3", {"loss": 2}),
        (r"step (\d+),(\d+)", "step 3,100", {"step": 3, "metric": 100}),
        ("loss: ([0-9]+([.][0-9]+)?)", "loss: 2.5", {"loss": 2.5}),
        (r"(?P<step>\S+) loss: (\S+)", "nan loss: 0.5", {"loss": 0.5}),
        (r"(?P<step>\S+) loss: (\S+)", "1e300 loss: 0.5", {"loss": 0.5}),
    ],
)
def test_a_pattern_reads_a_line(pattern: str, line: str, read: dict[str, float]) -> None:
    assert Pattern(pattern).read(line) == pytest.approx(read, nan_ok=True)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (r"\bloss\b: (\S+)", "loss"),
        (r"loss:\t(\S+)", "loss"),
        (r"loss: (?:tensor\()?([0-9.]+)", "loss"),
        (r"(?:loss|cost): (\S+)", "cost"),
        ("loss [a-z]+ ([0-9.]+)", "loss"),
        ("[Ll]oss: ([0-9.]+)", "loss"),
        (r"val\.loss\s*=\s*([0-9.]+)", "val.loss"),
        ("train/loss.*?([0-9.]+)", "train/loss"),
        ("(?i)'loss': ([0-9.]+)", "loss"),
        (r"\[epoch\] ([0-9.]+)", "epoch"),
    ],
)
def test_the_word_before_a_group_names_its_metric(pattern: str, name: str) -> None:
    line = (
        f"val.loss=1 train/loss 1 [epoch] 1 'loss': 1 loss:\t1 loss: 1 cost: 1 {name} is 1 loss 1"
    )
    assert list(Pattern(pattern).read(line)) == [name]


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("loss: [0-9.]+", "expected a group around the number"),
        ("loss: ([0-9.]+", "expected a regular expression"),
    ],
)
def test_a_pattern_that_cannot_read_is_refused(pattern: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Pattern(pattern)


def played(job: str, directory: Path, output: int, pattern: str = ".*loss: ([0-9.]+)") -> int:
    """Play a job that prints, in a process of its own, with a pattern for its losses."""
    ours = (
        "import contextlib, os, sys\n"
        "from pathlib import Path\n"
        "from fullwire.recorder.launch import run_to_its_end\n"
        "from fullwire.recorder.printed import Output, Pattern\n"
        "command, patterns = [sys.executable, '-c', sys.argv[1]], [Pattern(sys.argv[3])]\n"
        "with contextlib.closing(Output(patterns, Path(sys.argv[2]), lambda: 0)) as read:\n"
        "    status = run_to_its_end(command, os.environ, read.began)\n"
        "sys.exit(status)\n"
    )
    command = [sys.executable, "-c", ours, job, str(directory), pattern]
    with (directory / "said").open("wb") as said:
        return subprocess.run(
            command, stdout=output, stderr=said, timeout=60, check=False
        ).returncode


def test_a_job_whose_output_nobody_reads_does_not_hang(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    job = "import os\nfor _ in range(99): os.write(1, b'x' * 9999)"
    assert played(job, tmp_path, writing) == 1  # its own BrokenPipeError, as without a recorder
    os.close(writing)


def test_a_long_line_passes_whole_and_only_its_end_is_read(tmp_path: Path) -> None:
    job = "print('loss: 9 ' + 'x' * 20_000 + '\\n' + 'x' * 300_000 + ' loss: 0.5')"
    with (tmp_path / "output").open("wb") as output:
        assert played(job, tmp_path, output.fileno()) == 0
    assert (tmp_path / "output").stat().st_size == len("loss: 9 \n loss: 0.5\n") + 320_000
    found = read_printed([tmp_path], 0, lambda times_ns: times_ns * 0)
    assert found.value.tolist() == [0.5]


def test_a_process_in_the_background_keeps_the_output_and_holds_nothing_up(tmp_path: Path) -> None:
    go_on = tmp_path / "go on"
    later = f"import os, time\nwhile not os.path.exists({str(go_on)!r}): time.sleep(0.01)\nprint(2)"
    job = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {later!r}])\nprint(1)"
    reading, writing = os.pipe()
    assert played(job, tmp_path, writing) == 0
    os.close(writing)
    go_on.touch()
    with open(reading) as output:
        assert output.read() == "1\n2\n"


def test_a_pattern_that_takes_years_is_given_up_and_the_output_passes_on(tmp_path: Path) -> None:
    job = "print('a' * 40 + '!')\nfor _ in range(3): print('a' * 40 + '!')"
    with (tmp_path / "output").open("wb") as output:
        assert played(job, tmp_path, output.fileno(), "(a+)+$") == 0
    assert (tmp_path / "output").read_text() == ("a" * 40 + "!\n") * 4
    assert (tmp_path / "said").read_text() == (
        "fullwire: --metric '(a+)+$' took more than 0.5 s on a line of 41 characters: "
        "it is read no further\n"
    )


def test_a_match_without_a_number_is_told_apart_from_no_match(tmp_path: Path) -> None:
    with (tmp_path / "output").open("wb") as output:
        assert played("print('loss: soon')", tmp_path, output.fileno(), "loss: (.*)") == 0
    assert (tmp_path / "said").read_text() == (
        "fullwire: --metric 'loss: (.*)' has matched lines without a number in its group, as in "
        "'loss: soon': expected a group around the number alone\n"
    )


def test_a_printed_step_with_a_fraction_is_no_step(tmp_path: Path) -> None:
    """Of steps such as 0.001k, all but one went without a word."""
    lines = [f'{{"monotonic_ns": {at}, "step": {at / 1000}, "loss": 1}}\n' for at in (1, 2, 3000)]
    (tmp_path / "1.printed").write_text("".join(lines))
    found = read_printed([tmp_path], 0, lambda times_ns: times_ns * 7)
    assert found.step.tolist() == [7, 14, 3]


def test_a_line_that_a_full_disk_cut_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "1.printed").write_text('{"monotonic_ns": 5, "loss": 0.5}\n{"monotonic_ns": 6, "lo')
    found = read_printed([tmp_path], 0, lambda times_ns: times_ns * 0)
    assert found.value.tolist() == [0.5]


def test_a_log_outside_a_recording_does_nothing_and_refuses_what_is_no_number() -> None:
    fw.log(loss=0.5, step=3)
    with pytest.raises(UsageError, match="log: expected a number for loss, got 'low'"):
        fw.log(loss="low")


def test_values_keep_their_steps_and_others_count_ended_steps(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    taken = inside.Metrics(journal)
    taken.take({"loss": 0.1, "note": "text", "nothing": None}, 40)
    taken.take({"loss": float("nan")})
    found = written(tmp_path, journal, steps_of(1, 2, 2**62))
    assert found.name.tolist() == ["loss", "loss"]
    assert found.step.tolist() == [40, 2]
    assert found.value == pytest.approx([0.1, float("nan")], nan_ok=True)


def test_odd_values_and_steps_leave_the_recording_alone(tmp_path: Path) -> None:
    class Odd:
        def __float__(self) -> float:
            raise LookupError("no such value")

    journal = Journal(str(tmp_path))
    taken = inside.Metrics(journal)
    taken.take({"loss": 10**400}, float("nan"))
    taken.take({"loss": 0.5}, 10**30)
    taken.take({"loss": Odd()}, 1)
    taken.take({"loss": 0.25}, 7)
    found = written(tmp_path, journal, steps_of(1, 2, 2**62))
    assert found.value.tolist() == [float("inf"), 0.5, 0.25]
    assert found.step.tolist() == [2, 2, 7]
    [read], _ = journals.read_journals([tmp_path])
    [told] = read.defined("missing")  # once, and not each step
    assert told["sentence"] == (
        "a metric that it reported could not be noted "
        "(ValueError: cannot convert float NaN to integer)"
    )


def test_threads_that_report_at_once_keep_their_steps_and_names(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    taken = inside.Metrics(journal)
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def report(first: int) -> None:
        for step in range(first, first + 2000):
            taken.take({f"loss{first}": step}, step)

    threads = [threading.Thread(target=report, args=(10_000 * at,)) for at in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    sys.setswitchinterval(usual_s)
    found = written(tmp_path, journal, steps_of())
    assert len(found) == 8000
    assert found.step.tolist() == found.value.tolist()
    assert found.name.tolist() == [f"loss{step // 10_000 * 10_000}" for step in found.step]


def test_noise_of_a_worker_that_joined_belongs_to_the_steps_of_the_job(tmp_path: Path) -> None:
    """A second rank takes part from the third step on, which is its first."""
    journal = Journal(str(tmp_path))
    journal.note(Note.ZERO_GRAD, 0, 5, 0)
    journal.close()
    [read], _ = journals.read_journals([tmp_path])

    def notes(*own: tuple[int, float], mean: float) -> dict[int, np.ndarray]:
        rows = [[0, time_ns, inside.bits_of(value)] for time_ns, value in own]
        means = [[1, time_ns, inside.bits_of(mean)] for time_ns, _ in own]
        return {**NO_NOTES, Note.OWN_NOISE: np.array(rows), Note.MEAN_NOISE: np.array(means)}

    reported = Reported()
    first = notes((50, 8.0), (350, 6.0), mean=2.0)
    reported.add(read, steps_of(100, 200, 300, 400), first, 0)
    reported.add(read, steps_of(300, 400), notes((350, 4.0), mean=2.0), 0, first_step=2)
    noise = reported.noise()
    assert noise.step.tolist() == [0, 3]
    assert noise.ranks.tolist() == [1, 2]
    assert noise.ranks_squared_norm.tolist() == [8.0, 5.0]
    assert noise.mean_squared_norm.tolist() == [2.0, 2.0]


def test_a_process_that_is_forked_off_knows_the_names_of_metrics(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    taken = inside.Metrics(journal)
    taken.take({"loss": 0.5}, 1)
    journal.start_anew()  # as a child does
    taken.take({"loss": 0.25}, 2)
    journal.close()
    [read], _ = journals.read_journals([tmp_path])
    reported = Reported()
    reported.add(read, steps_of(), NO_NOTES, 0)
    assert reported.metrics([tmp_path]).name.tolist() == ["loss"]


def test_libraries_report_as_jobs_call_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The classes stand for those of the libraries, with their names and arguments."""

    class CallbackHandler:
        def on_log(self, args: object, state: object, control: object, logs: object) -> str:
            return "as ever"

    class _LoggerConnector:  # Lightning's own name
        trainer = SimpleNamespace(loggers=[object()], global_step=7)

        def log_metrics(self, metrics: object, step: int | None = None) -> None: ...

    class SummaryWriter:
        def __init__(self, log_dir: str = "runs/one") -> None:
            self.log_dir = log_dir

        def add_scalar(self, tag: str, value: float, global_step: int | None = None) -> None: ...

    def log_metric(key: str, value: float, step: int | None = None) -> None: ...

    places: dict[str, dict[str, object]] = {
        "transformers.trainer_callback": {"CallbackHandler": CallbackHandler},
        f"lightning.pytorch.{inside._LIGHTNING}": {"_LoggerConnector": _LoggerConnector},
        "torch.utils.tensorboard.writer": {"SummaryWriter": SummaryWriter},
        "mlflow.tracking.fluent": {"log_metric": log_metric},
    }
    for name, content in places.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    changes: list[Callable[[], None]] = []
    journal = Journal(str(tmp_path))
    inside.watch_metrics(
        journal, lambda name, then: changes.append(then) if name in places else None
    )
    for change in changes:
        change()
    state = SimpleNamespace(global_step=3)
    assert CallbackHandler().on_log(None, state, None, {"loss": 0.5, "epoch": "one"}) == "as ever"
    _LoggerConnector().log_metrics({"train_loss": 0.4})
    SummaryWriter().add_scalar("eval/loss", 0.3, 9)
    for number, folder in enumerate(("runs/one/train", "runs/one/held-out", "runs/one/train")):
        SummaryWriter(folder).add_scalar("error", 0.2, 20 + number)
    sys.modules["mlflow.tracking.fluent"].log_metric("accuracy", 0.9, step=11)
    found = written(tmp_path, journal, steps_of())
    assert dict(zip(found.name.tolist(), found.step.tolist(), strict=True)) == {
        "loss": 3,
        "train_loss": 7,
        "eval/loss": 9,
        "accuracy": 11,
        "train/error": 22,
        "held-out/error": 21,
    }


def test_show_draws_a_metric(capsys: pytest.CaptureFixture[str]) -> None:
    steps = np.arange(100)
    names = np.array(["loss"] * 50 + ["broken"] * 50, object)
    values = np.where(steps < 50, 2.0 - steps / 50, np.nan)
    print_metrics(Metrics(step=steps, name=names, value=values, time_ns=steps))
    printed = capsys.readouterr().out
    assert "█" in printed
    assert "▁" in printed
    assert "no number" in printed


@pytest.mark.parametrize(
    ("taken", "rows", "of_step"),
    [
        ([8, 8, 8, 8, 64] * 8, 0, 19),  # 19.2
        ([8, 56] * 12, 0, 32),
        ([16, 16, 8] * 8, 0, 13),  # 13.3, of a data set whose last batch is small
        ([64, 0] * 12, 32, 32),  # a batch that is cut into two steps, or four
        ([64, 0, 0, 0] * 6, 16, 16),
        ([64, 0, 0] * 8, 64, 64),  # each batch is taken three times, which is no cut
        ([64, 0, 0] * 8, 0, None),  # nothing tells these two apart
        ([64, 0, 0] * 8, 512, None),  # rows that are no samples
        ([48, *[16] * 20, 0, 0], 0, 16),  # read two batches ahead
        ([160, *[128] * 18, 96], 0, 128),  # one of four ahead, up to the end of the data
        ([24, *[16] * 19], 0, 16),  # one of two ahead, and more data was left
        ([160, *[128] * 18, 80], 0, 127),  # 127.2: the last batch is small
        ([48, *[16] * 8, 4], 0, 15),  # 14.8: two batches of the first step were not used
        ([200, 100, 60, 80, 90, 50], 0, 80),  # one batch ahead, of batches that differ
        ([16 * 24, *[0] * 23], 16, None),  # all batches were read before the first step
        ([*[16] * 6, *[0] * 18], 16, None),
        ([16 * 12, *[0] * 11, 16 * 12, *[0] * 11], 16, None),
    ],
)
def test_the_samples_of_a_step_are_a_mean(
    tmp_path: Path, taken: list[int], rows: int, of_step: int | None
) -> None:
    """Steps times samples are all samples, also where the batches of a job differ."""
    journal = Journal(str(tmp_path))
    journal.note(Note.INPUT, 0, 1, 1)  # a journal without notes leaves no file
    journal.close()
    [read], _ = journals.read_journals([tmp_path])
    notes = [[samples, 10 * step + 5, 0] for step, samples in enumerate(taken) if samples]
    reported = Reported()
    steps = steps_of(*range(10, 10 * len(taken) + 10, 10))
    forward = [[rows, 10 * step + 6, 10 * step + 7] for step in range(len(taken))]
    told = {Note.SAMPLES: np.array(notes, np.int64), Note.FORWARD: np.array(forward, np.int64)}
    reported.add(read, steps, {**NO_NOTES, **told}, 0)
    assert reported.facts(1).step_samples == of_step


@pytest.mark.parametrize("read_ahead", [0, 2])
def test_the_first_step_has_the_batch_that_was_taken_before_it(
    tmp_path: Path, read_ahead: int
) -> None:
    """An elastic job hands out its first batch before the step begins, and the next ones within.

    A program may read other batches too by then. These are samples of later steps.
    """
    journal = Journal(str(tmp_path))
    journal.define(kind="metric", number=0, name="loss")
    for step in range(1, 21):
        journal.note(Note.METRIC_STEP, step, 100 * step + 10, 0)
        journal.note(Note.METRIC, 0, 100 * step + 10, inside.bits_of(1.0))
    journal.close()
    [read], _ = journals.read_journals([tmp_path])
    within = [100 * step + 5 for step in range(1, 20)]
    taken = [[32, at_ns, 0] for at_ns in (*range(10, 11 + read_ahead), *within)]
    ends = np.arange(100, 2100, 100)
    steps = Steps(start_ns=np.append(50, ends[:-1]), end_ns=ends)
    reported = Reported()
    reported.add(read, steps, {**NO_NOTES, Note.SAMPLES: np.array(taken)}, 0)
    assert reported.metrics([tmp_path], workers=2).samples.tolist() == [*range(64, 1281, 64)]
    assert reported.facts(2).step_samples == 64


def test_the_samples_of_an_evaluation_are_no_training(tmp_path: Path) -> None:
    """Each step is followed by two batches of a loader that no backward pass follows."""
    read = a_journal(tmp_path)
    taken, backward = [], []
    for step in range(12):
        start_ns = 100 * step
        taken += [[16, start_ns + 5, 0], [16, start_ns + 10, 0]]  # one pass of two batches
        backward.append([0, start_ns + 20, 5])
        taken += [[64, start_ns + at_ns, step + 1] for at_ns in (60, 70)]
    reported = Reported()
    notes = {Note.SAMPLES: np.array(taken), Note.BACKWARD: np.array(backward)}
    reported.add(read, steps_of(*range(50, 1250, 100)), {**NO_NOTES, **notes}, 0)
    assert reported.facts(1).step_samples == 32


@pytest.mark.parametrize("has_backward", [True, False])
def test_batches_of_evaluations_between_steps_are_no_training(
    tmp_path: Path, has_backward: bool
) -> None:
    """All evaluations share one endless loader, or gradients come from `torch.autograd.grad`."""
    read = a_journal(tmp_path)
    starts = np.array([100 * step + (30 if step % 5 == 0 else 0) for step in range(20)])
    steps = Steps(start_ns=starts, end_ns=np.arange(100, 2100, 100))
    taken = [[16, 100 * step + 40, 0] for step in range(20)]
    taken += [[64, 100 * step + at_ns, 1] for step in range(5, 20, 5) for at_ns in (5, 10, 15)]
    backward = [[0, 100 * step + 50, 5] for step in range(20)]
    notes = {**NO_NOTES, Note.SAMPLES: np.array(taken)}
    if has_backward:
        notes[Note.BACKWARD] = np.array(backward)
    reported = Reported()
    reported.add(read, steps, notes, 0)
    assert reported.facts(1).step_samples == 16


def test_all_samples_are_those_of_all_steps_where_each_epoch_begins_with_several_batches(
    tmp_path: Path,
) -> None:
    """Seven batches an epoch, the last of 4 samples: the script reads two of them ahead."""
    read = a_journal(tmp_path)
    batches = [16] * 6 + [4]
    in_step = [0, 0, 0, 1, 2, 3, 4]
    taken = [
        [batch, 70 * epoch + 10 * step + 2, epoch]
        for epoch in range(6)
        for batch, step in zip(batches, in_step, strict=True)
    ]
    forward = [[batch, 10 * step + 5, 10 * step + 6] for step, batch in enumerate(batches * 6)]
    notes = {Note.SAMPLES: np.array(taken), Note.FORWARD: np.array(forward)}
    reported = Reported()
    reported.add(read, steps_of(*range(10, 430, 10)), {**NO_NOTES, **notes}, 0)
    assert reported.facts(2).step_samples == 29  # 28.6


def test_a_batch_that_is_taken_between_two_steps_is_of_the_later_one(tmp_path: Path) -> None:
    """After an evaluation, Hugging Face's Trainer takes the next batches before the step begins."""
    read = a_journal(tmp_path)
    starts = np.array([100 * step + (50 if step % 8 == 0 else 0) for step in range(20)])
    steps = Steps(start_ns=starts, end_ns=np.arange(100, 2100, 100))
    taken, backward = [], []
    for step in range(20):
        # Behind a pause, both batches of the step are taken before it.
        taken += [[8, 100 * step + at_ns, 0] for at_ns in (10, 20)]
        backward += [[0, 100 * step + at_ns, 5] for at_ns in (60, 80)]
    reported = Reported()
    notes = {Note.SAMPLES: np.array(taken), Note.BACKWARD: np.array(backward)}
    reported.add(read, steps, {**NO_NOTES, **notes}, 0)
    facts = reported.facts(2)
    assert (facts.pass_samples, facts.step_samples) == (8, 32)


def test_the_curve_of_a_metric_is_over_its_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """Values at every step and later at every 100th had as many characters for each value."""
    steps = np.append(np.arange(100), np.arange(100, 3300, 100))
    values = 1 - steps / 3200
    names = np.array(["loss"] * len(steps), object)
    print_metrics(Metrics(step=steps, name=names, value=values, time_ns=steps))
    curve = [character for character in capsys.readouterr().out if character in "▁▂▃▄▅▆▇█"]
    assert len(curve) == 32
    levels = ["▁▂▃▄▅▆▇█".index(character) for character in curve]
    assert max(abs(level - 7 * (31 - place) / 31) for place, level in enumerate(levels)) <= 0.6
