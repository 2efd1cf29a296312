"""Packets beyond their bytes: Gloo's messages, round trips, clocks, a host's addresses."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from fullwire.packets.pcap import read_captures
from fullwire.run.run import Run
from tests import packets as p

US, MS = 1_000, 1_000_000
SEND, ASK, OFFER = 1, 3, 2
START = 10**18


def preamble(payload: int, opcode: int = SEND, *, collective: int = 4, tag: int = 9) -> bytes:
    return struct.pack("<6Q", 48 + payload, opcode, collective << 56 | tag << 24, 0, payload, 0)


def sent(seq: int, content: bytes, more: int = 0) -> bytes:
    """Return a frame of a segment with this content, and `more` bytes after it."""
    return p.ethernet(p.ip(p.tcp(seq, 0)[:20] + content + bytes(more)))


def read(tmp_path: Path, *captures: bytes) -> Run:
    paths = [tmp_path / f"{number}.pcap" for number in range(len(captures))]
    for path, content in zip(paths, captures, strict=True):
        path.write_bytes(content)
    return read_captures(paths)


def at_96(*frames: bytes) -> bytes:
    return p.pcap([(START + n * MS, frame) for n, frame in enumerate(frames)], snap=96)


def test_messages_of_gloo_are_read_from_their_beginnings(tmp_path: Path) -> None:
    run = read(
        tmp_path,
        at_96(
            sent(1, preamble(0, OFFER)),
            sent(49, preamble(5000), 1000),
            sent(49 + 1048, b"\x7f" * 4000),
            sent(49 + 5048, preamble(300, tag=10), 300),
        ),
    )
    rows = run.messages
    assert rows.op.tolist() == ["allreduce", "allreduce"]
    assert rows.sequence.tolist() == [9, 10]
    assert rows.payload_bytes.tolist() == [5000, 300]
    assert rows.messages.tolist() == [1, 1]
    assert rows.unread_bytes.tolist() == [0, 0]
    assert rows.begin_ns.tolist() == [START, START + 3 * MS]
    assert rows.first_ns.tolist() == [START + MS, START + 3 * MS]
    assert rows.last_ns.tolist() == [START + 2 * MS, START + 3 * MS]


def test_a_message_that_begins_within_a_packet_leaves_bytes_unread_until_the_next(
    tmp_path: Path,
) -> None:
    inside = bytes(100) + preamble(700) + bytes(700)
    run = read(
        tmp_path,
        at_96(sent(1, preamble(100), 0), sent(49, inside), sent(49 + 848, preamble(50), 50)),
    )
    assert run.messages.payload_bytes.tolist() == [150]
    assert run.messages.unread_bytes.tolist() == [748]
    assert run.messages.messages.tolist() == [2]


@pytest.mark.parametrize("content", [bytes(600), b"\xff" * 600, preamble(5, collective=0)])
def test_what_is_not_gloo_has_no_messages(tmp_path: Path, content: bytes) -> None:
    assert not len(read(tmp_path, at_96(sent(1, content))).messages)


def test_round_trips_are_timed_from_acknowledgements(tmp_path: Path) -> None:
    frames, seq = [], 1
    for number in range(100):
        at = START + number * 10 * MS
        frames += [(at, p.segment(seq, 1000)), (at + 250 * US, p.answer(seq + 1000))]
        seq += 1000
    run = read(tmp_path, p.pcap(frames))
    there = run.connections.source == "10.0.0.1:1000"
    row = {name: column[there][0] for name, column in run.connections.columns().items()}
    assert row["rtt_samples"] == 100
    assert row["rtt_least_ns"] == 250 * US
    assert row["rtt_median_ns"] == pytest.approx(250 * US, rel=0.13)
    assert row["payload_bytes"] == 100_000
    assert run.connections.rtt_samples[~there].tolist() == [0]


def test_what_was_sent_again_is_not_timed(tmp_path: Path) -> None:
    frames = [
        (START, p.segment(1, 1000)),
        (START + MS, p.segment(1, 1000)),
        (START + 2 * MS, p.answer(1001)),
    ]
    assert read(tmp_path, p.pcap(frames)).connections.rtt_samples.tolist() == [0, 0]


def two_ends(ahead_ns: int) -> tuple[bytes, bytes]:
    """Capture a connection at both ends; one clock is ahead, a packet takes 40 us or more."""
    here, there, seq = [], [], 1
    for number in range(200):
        at, took = START + number * MS, 40 * US + number % 7 * 30 * US
        data, answer = p.segment(seq, 20_000), p.answer(seq + 20_000)
        here += [(at, data), (at + took + 45 * US, answer)]
        there += [(at + took + ahead_ns, data), (at + took + 5 * US + ahead_ns, answer)]
        seq += 20_000
    # Two more connections, so that it can be told on which host each capture was made.
    here.append((START, p.ethernet(p.ip(p.tcp(1, 10), "10.0.0.1", "10.0.0.8"))))
    there.append((START + ahead_ns, p.ethernet(p.ip(p.tcp(1, 10), "10.0.0.2", "10.0.0.9"))))
    return p.pcap(sorted(here)), p.pcap(sorted(there))


def test_clocks_of_two_captures_are_compared_and_set_right(tmp_path: Path) -> None:
    run = read(tmp_path, *two_ends(7 * MS))
    assert run.facts.capture_clocks == "1.pcap +7000 us (+- 40 us)"
    answers = run.flows.source == "10.0.0.2:2000"
    # The answers' own end is the second capture; its times are converted to the first one's clock.
    assert run.flows.start_ns[answers].min() == pytest.approx(START + 85 * US, abs=300 * US)


def test_clocks_that_may_agree_are_left_as_they_are(tmp_path: Path) -> None:
    run = read(tmp_path, *two_ends(10 * US))
    assert run.facts.capture_clocks == "1.pcap +10 us (+- 40 us, so unchanged)"


def test_an_interface_of_a_pcapng_tells_the_addresses_of_its_host(tmp_path: Path) -> None:
    path = tmp_path / "gpu1.pcapng"
    told = p.option(4, bytes([10, 0, 0, 1, 255, 255, 255, 0]))
    told += p.option(4, bytes([10, 0, 1, 1, 255, 255, 255, 0]))
    told += p.option(5, bytes.fromhex("20010db8" + "00" * 11 + "01") + b"\x40")
    told += p.option(4, b"cut")  # no address
    packets = p.section() + p.interface(more=told) + p.enhanced(10**18, p.segment(1, 100))
    path.write_bytes(packets)
    of_host = "10.0.0.1+10.0.1.1+2001:db8::1"
    assert read_captures([path]).facts.addresses == f"10.0.0.1={of_host}"
    assert read_captures([path], ["gpu1"]).facts.addresses == f"gpu1={of_host}"


def test_a_cooked_capture_says_which_addresses_are_its_hosts_own(tmp_path: Path) -> None:
    def frame(kind: int, source: str, target: str) -> bytes:
        return struct.pack(">H", kind) + p.cooked(p.ip(p.tcp(1, 10), source, target))[2:]

    run = read(
        tmp_path,
        p.pcap(
            [
                (START, frame(4, "10.0.0.1", "10.0.0.2")),
                (START + 1, frame(4, "10.0.1.1", "10.0.1.2")),
                (START + 2, frame(0, "10.0.0.3", "10.0.0.1")),
            ],
            link=113,
        ),
    )
    assert run.facts.addresses == "10.0.0.1=10.0.0.1+10.0.1.1"
