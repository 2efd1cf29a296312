"""TensorBoard's event files, as torch's SummaryWriter wrote one with TensorBoard 2.21."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

import fullwire as fw
from fullwire.convergence.curves import curve_of
from fullwire.errors import DamagedInput, UsageError
from fullwire.importers.tensorboard import masked_crc32c

EVENTS = Path(__file__).parents[1] / "data" / "inputs" / "events.out.tfevents.small"


def test_scalars_of_both_kinds_become_metrics() -> None:
    metrics = fw.read(EVENTS).metrics
    loss = metrics.rows(metrics.name == "loss")
    assert loss.step.tolist() == list(range(0, 50, 5))
    assert loss.value == pytest.approx([1 / (step + 1) for step in range(0, 50, 5)])
    accuracy = metrics.rows(metrics.name == "accuracy")  # a tensor
    assert accuracy.value == pytest.approx([step / 50 for step in range(0, 50, 5)])
    assert set(metrics.name) == {"loss", "accuracy"}
    assert metrics.time_ns.min() == 0


def test_a_folder_of_them_is_a_run(tmp_path: Path) -> None:
    (tmp_path / EVENTS.name).write_bytes(EVENTS.read_bytes())
    assert len(fw.read(tmp_path).metrics) == 20


def an_event_file(path: Path, name: str, *values: float) -> Path:
    """Write the values of one scalar, as TensorBoard's writer does."""

    def record(event: bytes) -> bytes:
        head = struct.pack("<Q", len(event))
        sums = (struct.pack("<I", masked_crc32c(part)) for part in (head, event))
        return head + next(sums) + event + next(sums)

    def field(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2, len(content)]) + content

    path.parent.mkdir(parents=True, exist_ok=True)
    written = record(b"\x09" + struct.pack("<d", 1e9) + field(3, b"brain.Event:2"))
    for step, value in enumerate(values):
        scalar = field(1, name.encode()) + b"\x15" + struct.pack("<f", value)
        time = b"\x09" + struct.pack("<d", 1e9 + step)
        written += record(time + bytes([0x10, step]) + field(5, field(1, scalar)))
    path.write_bytes(written)
    return path


def test_each_folder_of_a_metric_has_a_curve_of_its_own(tmp_path: Path) -> None:
    file = "events.out.tfevents.1"
    an_event_file(tmp_path / "train" / file, "loss", 3, 1)
    an_event_file(tmp_path / "validation" / file, "loss", 4, 2)
    an_event_file(tmp_path / "validation" / f"{file}.accuracy", "accuracy", 0.5)
    metrics = fw.read(tmp_path).metrics
    curves = {name: metrics.value[metrics.name == name].tolist() for name in set(metrics.name)}
    assert curves == {"train/loss": [3, 1], "validation/loss": [4, 2], "accuracy": [0.5]}
    single_files = [tmp_path / "train" / file, tmp_path / "validation" / file]
    assert set(fw.read(*single_files).metrics.name) == {"train/loss", "validation/loss"}
    with pytest.raises(UsageError, match="'loss', it has accuracy, train/loss, validation/loss"):
        curve_of(metrics, "loss", "runs")


def test_the_folder_around_others_is_named_as_tensorboard_names_it(tmp_path: Path) -> None:
    an_event_file(tmp_path / "events.out.tfevents.1", "loss", 3)
    an_event_file(tmp_path / "deep" / "er" / "events.out.tfevents.1", "loss", 4)
    assert set(fw.read(tmp_path).metrics.name) == {"./loss", "deep/er/loss"}


def test_files_of_a_restarted_job_stay_one_curve(tmp_path: Path) -> None:
    an_event_file(tmp_path / "train" / "events.out.tfevents.1", "loss", 3, 2)
    an_event_file(tmp_path / "train" / "events.out.tfevents.2", "loss", 1)
    assert set(fw.read(tmp_path).metrics.name) == {"loss"}


def test_two_metrics_that_would_share_a_name_are_refused(tmp_path: Path) -> None:
    an_event_file(tmp_path / "events.out.tfevents.1", "train/loss", 3)
    an_event_file(tmp_path / "train" / "events.out.tfevents.1", "loss", 2)
    an_event_file(tmp_path / "validation" / "events.out.tfevents.1", "loss", 4)
    with pytest.raises(UsageError, match="expected a name for each metric, got 'train/loss' from"):
        fw.read(tmp_path)


def test_a_cut_or_changed_file_is_read_up_to_there(tmp_path: Path) -> None:
    whole = EVENTS.read_bytes()
    cut, changed = tmp_path / "cut", tmp_path / "changed"
    cut.write_bytes(whole[:500])
    changed.write_bytes(whole[:500] + bytes([whole[500] ^ 1]) + whole[501:])
    for path in (cut, changed):
        run = fw.read(path)
        assert 0 < len(run.metrics) < 20
        assert "read up to a damaged event" in run.missing[0]
    cut.write_bytes(whole[:80])
    with pytest.raises(DamagedInput, match="expected scalars"):
        fw.read(cut)


@pytest.mark.parametrize(
    ("hostile", "said"),
    [
        (b"\x2a\x0e\x0a\x0c\x0a\x01a\x11" + b"\xff" * 8, "more than four bytes"),
        (
            b"\x09" + struct.pack("<d", 9.5e9) + b"\x2a\x0a\x0a\x08\x0a\x01a\x15" + bytes(4),
            "a time",
        ),
    ],
)
def test_an_event_with_numbers_that_do_not_fit_is_damage(
    tmp_path: Path, hostile: bytes, said: str
) -> None:
    head = struct.pack("<Q", len(hostile))
    record = head + struct.pack("<I", masked_crc32c(head))
    record += hostile + struct.pack("<I", masked_crc32c(hostile))
    (tmp_path / EVENTS.name).write_bytes(EVENTS.read_bytes() + record)
    run = fw.read(tmp_path / EVENTS.name)
    assert len(run.metrics) == 20
    assert said in run.missing[0]


def test_the_checksum_is_castagnolis() -> None:
    """The check value of CRC-32C is E3069283."""
    crc = 0xE3069283
    masked = (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
    assert masked_crc32c(b"123456789") == masked
