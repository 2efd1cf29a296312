"""Offline runs of wandb and MLflow: a small file of wandb 0.31, and lines as MLflow 3 writes."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

import fullwire as fw
from fullwire.errors import DamagedInput, UsageError

RUN = Path(__file__).parents[1] / "data" / "inputs" / "run-small.wandb"


def piece(data: bytes, kind: int = 1) -> bytes:
    """Return a piece of a LevelDB log."""
    return struct.pack("<IHB", zlib.crc32(bytes([kind]) + data), len(data), kind) + data


def item(name: bytes, json: bytes) -> bytes:
    """Return one column of a row, as a field of the history."""
    inner = b"\x0a" + bytes([len(name)]) + name + b"\x82\x01" + bytes([len(json)]) + json
    return b"\x0a" + bytes([len(inner)]) + inner


def row(*items: bytes) -> bytes:
    """Return a record with one row of the history."""
    joined = b"".join(items)
    assert len(joined) < 128
    return b"\x12" + bytes([len(joined)]) + joined


def a_wandb(path: Path, *records: bytes) -> Path:
    log = b":W&B\xe1\xbe\x00"
    for record in records:
        room = 32 * 1024 - len(log) % (32 * 1024) - 7
        if room < 0:
            log, room = log + bytes(room + 7), 32 * 1024 - 7
        fits = len(record) <= room
        log += piece(record) if fits else piece(record[:room], 2) + piece(record[room:], 4)
    path.write_bytes(log)
    return path


def test_the_history_of_wandb_becomes_metrics() -> None:
    metrics = fw.read(RUN).metrics
    loss = metrics.rows(metrics.name == "loss")
    assert loss.step.tolist() == list(range(30))
    true = [math.nan if step == 20 else 2 * math.exp(-step / 10) for step in range(30)]
    assert loss.value == pytest.approx(true, nan_ok=True)
    nested = metrics.rows(metrics.name == "eval.accuracy")
    assert nested.step.tolist() == [0, 10, 20]
    assert set(metrics.name) == {"loss", "eval.accuracy"}
    assert metrics.time_ns.min() == 0


def test_a_cut_or_changed_file_of_wandb_is_read_up_to_there(tmp_path: Path) -> None:
    whole = RUN.read_bytes()
    cut, changed = tmp_path / "cut.wandb", tmp_path / "changed.wandb"
    cut.write_bytes(whole[:5000])
    changed.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    for path in (cut, changed):
        run = fw.read(path)
        assert 0 < len(run.metrics) < 33
        assert "read up to a damaged record" in run.missing[0]
    cut.write_bytes(whole[:80])
    with pytest.raises(DamagedInput, match="expected metrics"):
        fw.read(cut)


def test_a_record_of_wandb_may_go_over_blocks(tmp_path: Path) -> None:
    text = b'"' + b"x" * 60_000 + b'"'
    loss = item(b"loss", b"0.25")
    long = b"\x0a\x04text\x82\x01" + b"\xe2\xd4\x03" + text
    long = b"\x0a" + b"\xed\xd4\x03" + long
    record = loss + long
    record = (
        b"\x12"
        + bytes([len(record) & 127 | 128, len(record) >> 7 & 127 | 128])
        + (bytes([len(record) >> 14]) + record)
    )
    room = 32 * 1024 - 7 - 7
    parts = [record[:room], record[room : room + 32 * 1024 - 7], record[room + 32 * 1024 - 7 :]]
    file = tmp_path / "long.wandb"
    kinds = (2, 4) if not parts[2] else (2, 3, 4)
    pieces = [piece(part, kind) for part, kind in zip(parts, kinds, strict=False)]
    file.write_bytes(b":W&B\xe1\xbe\x00" + b"".join(pieces))
    metrics = fw.read(file).metrics
    assert (metrics.name.tolist(), metrics.value.tolist()) == (["loss"], [0.25])


@pytest.mark.parametrize(
    ("hostile", "said"),
    [
        (row(item(b"_step", b"1.5"), item(b"a", b"1")), "step is no whole number"),
        (row(item(b"_step", b"99999999999999999999"), item(b"a", b"1")), "step is no whole"),
        (row(item(b"_timestamp", b"1e300"), item(b"a", b"1")), "no number of seconds"),
        (row(item(b"_timestamp", b'"x"'), item(b"a", b"1")), "no number of seconds"),
        (b"\x12\x7f\x0a", "longer than its message"),
    ],
)
def test_hostile_rows_of_wandb_are_damage(tmp_path: Path, hostile: bytes, said: str) -> None:
    file = a_wandb(tmp_path / "a.wandb", row(item(b"a", b"1")), hostile)
    run = fw.read(file)
    assert run.metrics.value.tolist() == [1.0]
    assert said in run.missing[0]


def test_the_trainings_own_step_counts_before_the_calls_of_log(tmp_path: Path) -> None:
    file = a_wandb(
        tmp_path / "a.wandb",
        row(item(b"_step", b"1"), item(b"trainer/global_step", b"10"), item(b"a", b"1")),
        row(item(b"_step", b"2"), item(b"train.global_step", b"20.0"), item(b"a", b"2")),
        row(item(b"_step", b"3"), item(b"global_step", b'"NaN"'), item(b"a", b"3")),
    )
    metrics = fw.read(file).metrics
    assert metrics.name.tolist() == ["a", "a", "a"]
    assert metrics.step.tolist() == [10, 20, 3]


def logged(column: bytes, values: list[float], first: bytes = b"") -> list[bytes]:
    """Return rows of wandb in which a column stands beside a loss, a call of log each."""
    rows = [
        row(
            item(b"_step", b"%d" % number),
            item(column, b"%g" % value),
            item(b"loss", b"%g" % (1 / (number + 1))),
        )
        for number, value in enumerate(values)
    ]
    return [first, *rows] if first else rows


def steps_of(path: Path, *rows: dict[str, float], first: tuple[bytes, ...] = ()) -> dict[str, Any]:
    """Return the steps of each metric; a row of wandb has its place as `_step` if it has none."""
    records = [
        row(
            *(
                item(name.encode(), b"%g" % value)
                for name, value in ({"_step": place} | own).items()
            )
        )
        for place, own in enumerate(rows)
    ]
    metrics = fw.read(a_wandb(path / "a.wandb", *first, *records)).metrics
    return {name: metrics.rows(metrics.name == name).step.tolist() for name in set(metrics.name)}


def defined(name: bytes, step: bytes) -> bytes:
    """Return a record of wandb's define_metric(name, step_metric=step)."""
    inner = (b"\x12" if name.endswith(b"*") else b"\x0a") + bytes([len(name)]) + name
    inner += b"\x22" + bytes([len(step)]) + step
    return b"\x62" + bytes([len(inner)]) + inner


@pytest.mark.parametrize("column", [b"iter", b"train/step", b"Iteration", b"train.iters"])
def test_a_column_that_counts_steps_counts_before_the_calls_of_log(
    tmp_path: Path, column: bytes
) -> None:
    """A loss that was logged once in 500 steps seemed to fall 500 times as soon."""
    file = a_wandb(tmp_path / "a.wandb", *logged(column, [0, 500, 1000, 1500, 1500, 2000]))
    metrics = fw.read(file).metrics
    assert set(metrics.name) == {"loss"}
    assert metrics.step.tolist() == [0, 500, 1000, 1500, 1500, 2000]


@pytest.mark.parametrize(
    ("column", "values"),
    [
        (b"time/step", [3, 5, 2, 4, 3, 6]),  # lengths fall as often as they rise
        (b"warmup_steps", [100] * 6),
        (b"step", [0.5, 1, 1.5, 2, 2.5, 3]),  # these are no steps
        (b"my_step", [0, 30, 60, 90, 120, 150]),  # only the script can say that these are steps
        (b"tokens", [0, 512, 1024, 1536, 2048, 2560]),
    ],
)
def test_another_column_counts_no_steps(tmp_path: Path, column: bytes, values: list[float]) -> None:
    metrics = fw.read(a_wandb(tmp_path / "a.wandb", *logged(column, values))).metrics
    assert metrics.rows(metrics.name == "loss").step.tolist() == list(range(6))
    assert column.decode() in set(metrics.name)


def test_the_step_metric_that_a_script_defines_counts_steps_and_no_epochs(tmp_path: Path) -> None:
    for column, steps in ((b"my_step", [0, 30, 60, 90, 120]), (b"epoch", [0, 1, 2, 3, 4])):
        rows = logged(column, [0, 30, 60, 90, 120], first=defined(b"*", column))
        metrics = fw.read(a_wandb(tmp_path / "a.wandb", *rows)).metrics
        assert metrics.rows(metrics.name == "loss").step.tolist() == steps


def test_a_place_in_the_epoch_is_no_step(tmp_path: Path) -> None:
    """All validation losses were at step 99, the last batch of each epoch."""
    rows: list[dict[str, float]] = []
    for _ in range(12):
        rows += [{"step": place, "loss": 1} for place in range(0, 100, 10)]
        rows.append({"step": 99, "val_loss": 1})
    steps = steps_of(tmp_path, *rows)
    assert steps["val_loss"] == list(range(10, 132, 11))
    assert len(steps["loss"]) == len(set(steps["loss"])) == 120


def test_the_step_that_a_script_gives_counts_before_a_plain_column(tmp_path: Path) -> None:
    rows = [{"_step": 50 * place, "iter": place, "loss": 1.0} for place in range(6)]
    assert steps_of(tmp_path, *rows)["loss"] == [0, 50, 100, 150, 200, 250]


@pytest.mark.parametrize("column", ["solver/iterations", "skipped/steps", "warmup/step", "step"])
def test_a_slow_counter_counts_no_steps(tmp_path: Path, column: str) -> None:
    """A solver's iterations, 5 to 9 in 50 calls, counted as steps: 45 values were lost."""
    is_warmup = column == "warmup/step"
    rows = [
        {column: min(place, 5) if is_warmup else 5 + place // 10, "loss": 1.0}
        for place in range(50)
    ]
    steps = steps_of(tmp_path, *rows)
    assert steps["loss"] == list(range(50))
    assert column in steps


def test_a_step_metric_counts_for_the_metrics_that_it_was_defined_for(tmp_path: Path) -> None:
    rows = [
        {"train_loss": 1.0, "my_step": place**2, "val/a": 1.0, "val/b": 1.0, "val_step": 7 * place}
        for place in range(5)
    ]
    first = (
        defined(b"val*", b"my_step"),
        defined(b"val/*", b"val_step"),
        defined(b"val/b", b"my_step"),
    )
    steps = steps_of(tmp_path, *rows, first=first)
    assert steps["train_loss"] == [0, 1, 2, 3, 4]
    assert steps["val/a"] == [0, 7, 14, 21, 28]  # the longer beginning, and no beginning, win
    assert steps["val/b"] == [0, 1, 4, 9, 16]


def test_a_column_of_the_metrics_own_folder_counts_first_and_step_before_iter(
    tmp_path: Path,
) -> None:
    rows = [
        {"val/step": place, "train/step": 50 * place, "train/loss": 1.0, "val/loss": 1.0}
        for place in range(5)
    ]
    steps = steps_of(tmp_path, *rows)
    assert steps["train/loss"] == [0, 50, 100, 150, 200]
    assert steps["val/loss"] == [0, 1, 2, 3, 4]
    rows = [{"iter": 8 * place, "step": 2 * place, "loss": 1.0} for place in range(5)]
    assert steps_of(tmp_path, *rows)["loss"] == [0, 2, 4, 6, 8]


def test_rows_without_the_column_have_its_last_value(tmp_path: Path) -> None:
    """A loss of the validation was at calls of log, and one of the training at steps."""
    rows: list[dict[str, float]] = [{"val/loss": 1}]  # before the first step
    for place in range(1, 21):
        rows.append({"train/step": 50 * place, "train/loss": 1})
        rows += [{"val/loss": 1}] if place % 5 == 0 else []
    steps = steps_of(tmp_path, *rows)
    assert steps["train/loss"] == list(range(50, 1001, 50))
    assert steps["val/loss"] == [50, 250, 500, 750, 1000]
    rows = [{"loss": 1.0} | ({"iter": place} if place % 10 == 0 else {}) for place in range(50)]
    assert steps_of(tmp_path, *rows)["loss"] == list(range(50))  # no step is that of 10 values


def test_a_column_may_begin_late(tmp_path: Path) -> None:
    rows = [{"warm": 1.0}] * 1100 + [{"loss": 1.0, "iter": 50 * place} for place in range(4)]
    assert steps_of(tmp_path, *rows)["loss"] == [0, 50, 100, 150]


def test_numbers_that_are_none_stay_out(tmp_path: Path) -> None:
    file = a_wandb(
        tmp_path / "a.wandb",
        row(item(b"a", b"1"), item(b"b", b"true"), item(b"c", b"[1]"), item(b"d", b"{")),
        row(item(b"a", b"1" + b"0" * 60)),
    )
    metrics = fw.read(file).metrics
    assert metrics.name.tolist() == ["a", "a"]
    assert metrics.value.tolist() == [1.0, 1e60]


def test_a_folder_of_mlflow_becomes_metrics(tmp_path: Path) -> None:
    folder = tmp_path / "mlruns" / "5" / "1a" / "metrics"
    (folder / "eval").mkdir(parents=True)
    (folder / "loss").write_text("1795409435913 2.0 0\n1795409435914 nan 1\n1795409435915 1.5 2\n")
    (folder / "eval" / "acc").write_text("1795409435920 0.5 2 data 1f\nno line\n")
    (tmp_path / "mlruns" / "5" / "1a" / "meta.yaml").write_text("name: run\n")
    run = fw.read(tmp_path / "mlruns" / "5" / "1a")
    loss = run.metrics.rows(run.metrics.name == "loss")
    assert loss.step.tolist() == [0, 1, 2]
    assert loss.value == pytest.approx([2.0, math.nan, 1.5], nan_ok=True)
    assert loss.time_ns.tolist() == [0, 10**6, 2 * 10**6]
    assert set(run.metrics.name) == {"loss", "eval/acc"}
    assert "eval/acc: 1 lines are no value" in run.missing[0]


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "+inf", "NAN"])
def test_a_value_that_is_no_number_has_many_spellings(tmp_path: Path, word: str) -> None:
    """Lines of Java's clients of MLflow were left out, and the curve seemed to go on."""
    folder = tmp_path / "run" / "metrics"
    folder.mkdir(parents=True)
    (folder / "loss").write_text(f"1795409435913 2.0 0\n1795409435914 {word} 1\n")
    rows = (row(item(b"loss", b"2.0")), row(item(b"loss", word.encode())))
    for run in (fw.read(tmp_path / "run"), fw.read(a_wandb(tmp_path / "run-a.wandb", *rows))):
        assert run.metrics.value.tolist() == pytest.approx([2.0, float(word)], nan_ok=True)
        assert not run.missing


def test_several_runs_of_mlflow_are_refused(tmp_path: Path) -> None:
    for name in ("1a", "2b"):
        folder = tmp_path / name / "metrics"
        folder.mkdir(parents=True)
        (folder / "loss").write_text("1795409435913 2.0 0\n")
    with pytest.raises(UsageError, match="expected one run of MLflow, got 2"):
        fw.read(tmp_path)


def test_a_metric_of_mlflow_may_be_called_metrics(tmp_path: Path) -> None:
    folder = tmp_path / "1a" / "metrics"
    for name in ("metrics/mAP50B", "train/box_loss", "loss"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("1795409435913 2.0 0\n")
    run = fw.read(tmp_path / "1a")
    assert set(run.metrics.name) == {"metrics/mAP50B", "train/box_loss", "loss"}


def test_packed_files_of_wandb_and_tensorboard_are_read(tmp_path: Path) -> None:
    for file in (RUN, RUN.with_name("events.out.tfevents.small")):
        packed = tmp_path / f"{file.name}.gz"
        packed.write_bytes(gzip.compress(file.read_bytes()))
        assert fw.read(packed).metrics.value.tolist() == pytest.approx(
            fw.read(file).metrics.value.tolist(), nan_ok=True
        )
