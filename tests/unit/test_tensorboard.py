"""TensorBoard's event files, as torch's SummaryWriter wrote one with TensorBoard 2.21."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

import fullwire as fw
from fullwire.errors import DamagedInput
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
