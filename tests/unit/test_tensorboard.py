"""TensorBoard's event files, as torch's SummaryWriter wrote one with TensorBoard 2.21."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fullwire as fw
from fullwire.convergence.curves import curve_of
from fullwire.errors import DamagedInput, UsageError
from fullwire.importers import tensorboard
from fullwire.importers._encodings import BrokenMessageError
from fullwire.importers._format import MetricRow
from fullwire.importers.tensorboard import masked_crc32c, masked_crc32c_of

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


def record(event: bytes) -> bytes:
    head = struct.pack("<Q", len(event))
    sums = (struct.pack("<I", masked_crc32c(part)) for part in (head, event))
    return head + next(sums) + event + next(sums)


def field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2, len(content)]) + content


def an_event_file(path: Path, name: str, *values: float) -> Path:
    """Write the values of one scalar, as TensorBoard's writer does."""
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


@given(st.lists(st.binary(max_size=80), max_size=20), st.binary(min_size=1000, max_size=1100))
def test_many_checksums_at_once_are_those_of_each(texts: list[bytes], long: bytes) -> None:
    texts.insert(len(texts) // 2, long)
    assert masked_crc32c_of(texts).tolist() == [masked_crc32c(text) for text in texts]


def an_event(name: bytes, step: bytes, number: bytes) -> bytes:
    scalar = field(1, name) + b"\x15" + number
    return b"\x09" + struct.pack("<d", 1e9) + step + field(5, field(1, scalar))


def rows_or_damage(read: Callable[[bytes], Iterable[MetricRow]], event: bytes) -> str:
    """Return what an event has, as text, because NaN is not equal to itself."""
    try:
        return repr(list(read(event)))
    except BrokenMessageError as error:
        return str(error)


@given(
    st.binary(max_size=110),
    st.sampled_from([b"", b"\x10\x07", b"\x10\x80\x01", b"\x10" + b"\xff" * 9 + b"\x01"]),
    st.binary(min_size=4, max_size=4),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=3),
)
def test_the_quick_way_for_usual_events_reads_what_the_general_one_does(
    name: bytes, step: bytes, number: bytes, changes: list[tuple[int, int]]
) -> None:
    """Also where bytes of the event are changed, so that its lengths and kinds may not fit."""
    event = bytearray(an_event(name, step, number))
    for place, byte in changes:
        event[place % len(event)] = byte
    quick, general = tensorboard._scalars, tensorboard._scalars_by_fields
    assert rows_or_damage(quick, bytes(event)) == rows_or_damage(general, bytes(event))


def test_events_are_read_up_to_the_damaged_one_wherever_it_is(tmp_path: Path) -> None:
    """Checksums are compared for many events at once."""
    whole = an_event_file(tmp_path / "events.out.tfevents.1", "loss", *range(100)).read_bytes()
    head = len(record(b"\x09" + struct.pack("<d", 1e9) + field(3, b"brain.Event:2")))
    each = (len(whole) - head) // 100
    for number in (1, 50, 99):
        place = head + number * each + 20
        changed = whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :]
        (tmp_path / EVENTS.name).write_bytes(changed)
        run = fw.read(tmp_path / EVENTS.name)
        assert run.metrics.value.tolist() == list(range(number))
        assert "another checksum" in run.missing[0]


def test_usual_events_are_decoded_without_a_look_at_each_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300,000 scalars took 4.4 seconds."""
    file = an_event_file(tmp_path / "events.out.tfevents.1", "loss", *range(100))
    looked_at: list[bytes] = []

    def general(event: bytes) -> list[MetricRow]:
        looked_at.append(event)
        return []

    monkeypatch.setattr(tensorboard, "_scalars_by_fields", general)
    assert len(fw.read(file).metrics) == 100
    assert len(looked_at) == 1  # the version
