"""Captures become flows: every format, exact bytes, and no harm from any capture."""

from __future__ import annotations

import gzip
import io
import lzma
import random
import resource
import struct
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fullwire as fw
from fullwire._native import PacketScan
from fullwire.errors import DamagedInput, FullwireError, UsageError
from fullwire.importers import read
from fullwire.packets.flows import analyse_flows
from fullwire.packets.pcap import read_captures
from fullwire.run.run import Run
from tests import packets as p
from tests.strategies import cases, damaged

MILLISECOND = 10**6


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    return tmp_path / "x.pcap"


def read_bytes(path: Path, content: bytes) -> Run:
    path.write_bytes(content)
    return read_captures([path])


def a_stream(*segments: tuple[int, int], step_ns: int = 10 * MILLISECOND) -> list[p.Packet]:
    """Return segments (sequence, bytes) with 10 ms between."""
    return [(10**18 + n * step_ns, p.segment(*each)) for n, each in enumerate(segments)]


def payload(run: Run) -> int:
    return int(run.flows.payload_bytes.sum())


def wire(run: Run) -> int:
    return int(run.flows.wire_bytes.sum())


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("nano", [True, False])
def test_pcap_of_both_byte_orders_and_clocks(capture: Path, order: str, nano: bool) -> None:
    packets = a_stream((1, 100), (101, 50))
    run = read_bytes(capture, p.pcap(packets, order=order, nano=nano))
    assert run.complete
    assert set(run.flows.source) == {"10.0.0.1:1000"}
    assert set(run.flows.destination) == {"10.0.0.2:2000"}
    assert payload(run) == 150
    assert wire(run) == 150 + 2 * 54
    assert run.flows.start_ns[0] <= 10**18 < run.flows.end_ns[0]


@pytest.mark.parametrize("order", ["<", ">"])
def test_pcapng_of_both_byte_orders(capture: Path, order: str) -> None:
    run = read_bytes(capture, p.pcapng(a_stream((1, 100), (101, 50)), order=order))
    assert run.complete
    assert payload(run) == 150
    assert run.flows.start_ns[0] <= 10**18 < run.flows.end_ns[0]


@pytest.mark.parametrize(
    ("resolution", "ticks"),
    [
        (None, 10**15),
        (9, 10**18),
        (6, 10**15),
        (3, 10**12),
        (12, 10**19),
        (0, 10**9),
        (0x80 | 10, 10**9 << 10),
        (0x80 | 30, 10**9 << 30),
    ],
)
def test_clocks_of_pcapng_tick_as_they_say(
    capture: Path, resolution: int | None, ticks: int
) -> None:
    head = p.section() + p.interface(resolution=resolution)
    run = read_bytes(capture, head + p.enhanced(ticks, p.segment(1, 10)))
    expected = 10**18 if resolution != 12 else 10**16
    assert run.flows.start_ns[0] <= expected < run.flows.end_ns[0]


def test_an_offset_of_the_clock_is_added(capture: Path) -> None:
    head = p.section() + p.interface(more=p.option(14, struct.pack("<q", 1_000_000_000)))
    run = read_bytes(capture, head + p.enhanced(5, p.segment(1, 10)))
    assert run.flows.start_ns[0] <= 10**18 < run.flows.end_ns[0]


SEGMENT = p.ip(p.tcp(1, 100))
SEGMENT6 = p.ip(p.tcp(1, 100), "fe80::1", "fe80::2")


@pytest.mark.parametrize(
    ("link", "frame", "header_bytes"),
    [
        (1, p.ethernet(SEGMENT), 54),
        (1, p.ethernet(SEGMENT, vlans=1), 58),
        (1, p.ethernet(SEGMENT, vlans=2), 62),
        (1, p.ethernet(SEGMENT6), 74),
        (1, p.ethernet(SEGMENT) + bytes(20), 74),  # padding is on the wire and no payload
        (113, p.cooked(SEGMENT), 54),  # it stands for Ethernet
        (276, p.cooked2(SEGMENT), 54),
        (276, p.cooked2(SEGMENT6), 74),
        (101, SEGMENT, 40),
        (228, SEGMENT, 40),
        (229, SEGMENT6, 60),
        (0, b"\x02\0\0\0" + SEGMENT, 40),
        (1, p.vxlan(p.ethernet(SEGMENT)), 104),
        (1, p.vxlan(p.ethernet(SEGMENT), port=8472), 104),
        (1, p.mpls(SEGMENT), 58),
        (1, p.mpls(SEGMENT6, labels=3), 86),
        (1, p.pppoe(SEGMENT), 62),
        (1, p.pppoe(SEGMENT6) + bytes(6), 88),
        (1, p.vxlan_gpe(SEGMENT, 1), 90),
        (1, p.vxlan_gpe(SEGMENT6, 2), 110),
        (1, p.vxlan_gpe(p.ethernet(SEGMENT), 3), 104),
        (1, p.geneve(p.ethernet(SEGMENT)), 104),
        (1, p.geneve(SEGMENT6, 0x86DD, bytes(8)), 118),
        (1, p.tunnel(SEGMENT, 4), 74),
        (1, p.tunnel(SEGMENT6, 41), 94),
        (1, p.gre(SEGMENT, 0x0800), 78),
        (1, p.gre(p.ethernet(SEGMENT), 0x6558, flags=0x2000, more=bytes(4)), 96),
        # Mirrored packets were on their wire without the mirror's headers: ERSPAN I, II, III.
        (1, p.gre(p.ethernet(SEGMENT), 0x88BE), 54),
        (1, p.gre(p.ethernet(SEGMENT), 0x88BE, flags=0x1000, more=bytes(12)), 54),
        (1, p.gre(p.ethernet(SEGMENT), 0x22EB, flags=0x1000, more=bytes(16)), 54),
        (1, p.gre(p.ethernet(SEGMENT), 0x22EB, more=bytes(11) + b"\1" + bytes(8)), 54),
        (1, p.ethernet(p.ip(p.tcp(1, 100), claimed=0)), 54),  # as offload leaves it
        (1, p.ethernet(p.ip(p.tcp(1, 100), "fe80::1", "fe80::2", claimed=0)), 74),
    ],
)
def test_links_tags_and_tunnels(capture: Path, link: int, frame: bytes, header_bytes: int) -> None:
    run = read_bytes(capture, p.pcap([(10**18, frame)], link=link))
    assert run.complete
    assert payload(run) == 100
    assert wire(run) == 100 + header_bytes
    assert run.flows.source[0] in ("10.0.0.1:1000", "[fe80::1]:1000")


def extended(body: bytes, *kinds: int) -> bytes:
    """Put IPv6 extension headers of 8 and 16 bytes before a TCP body."""
    extensions = b""
    for place, _ in enumerate(kinds):
        following = kinds[place + 1] if place + 1 < len(kinds) else 6
        extensions += bytes([following, place % 2]) + bytes(6 + 8 * (place % 2))
    return p.ip(extensions + body, "fe80::1", "fe80::2", protocol=kinds[0])


def test_extension_headers_of_ip6_are_stepped_over(capture: Path) -> None:
    frame = p.ethernet(extended(p.tcp(1, 100), 0, 60, 43))
    run = read_bytes(capture, p.pcap([(1, frame)]))
    assert run.complete
    assert (payload(run), wire(run)) == (100, len(frame))


@pytest.mark.parametrize("ends", [("10.0.0.1", "10.0.0.2"), ("fe80::1", "fe80::2")])
@pytest.mark.parametrize("order", [1, -1])
def test_fragments_belong_to_the_flow_of_the_first_one(
    capture: Path, ends: tuple[str, str], order: int
) -> None:
    datagrams = [
        p.ip(p.udp(bytes(4000)), *ends, protocol=17),
        p.ip(p.tcp(2**32 - 500, 3000), *ends),
        p.ip(p.tcp(2500, 500), *ends),
    ]
    frames = []
    for number, datagram in enumerate(datagrams):
        first, *others = map(p.ethernet, p.fragments(datagram, 1480, number))
        frames += [first, *others[::order]]
    run = read_bytes(capture, p.pcap([(n, frame) for n, frame in enumerate(frames)], snap=96))
    assert run.complete
    assert payload(run) == 4000 + 3000 + 500
    assert wire(run) == sum(map(len, frames))
    assert run.facts.retransmitted_bytes == run.facts.lost_bytes == 0


def test_fragments_without_the_first_one_are_said(capture: Path) -> None:
    _, *others = p.fragments(p.ip(p.udp(bytes(4000)), protocol=17), 1480)
    run = read_bytes(capture, p.pcap([(n, p.ethernet(each)) for n, each in enumerate(others)]))
    assert run.missing[0].endswith("2 fragments of IP packets belong to no flow that could be told")


def test_sections_and_interfaces_have_their_own_order_clock_and_link(capture: Path) -> None:
    """Two sections of other byte orders, three interfaces, packets of all of them interleaved."""
    parts = [p.section(), p.interface(1, resolution=9), p.interface(113, resolution=6)]
    for n in range(0, 400, 2):
        parts += [
            p.enhanced(10**18 + n * MILLISECOND, p.segment(1 + 50 * n, 50), number=0),
            p.enhanced(10**15 + (n + 1) * 1000, p.cooked(p.ip(p.tcp(51 + 50 * n, 50))), number=1),
        ]
    parts += [p.section(">"), p.interface(101, resolution=3, order=">")]
    parts += [
        p.enhanced(10**12 + n, p.ip(p.tcp(1 + 50 * n, 50, ports=(7, 8))), order=">")
        for n in range(400, 500)
    ]
    run = read_bytes(capture, b"".join(parts))
    assert run.complete
    assert run.flows.start_ns.min() <= 10**18
    assert 10**18 + 499 * MILLISECOND < run.flows.end_ns.max() < 10**18 + 501 * MILLISECOND
    sent = {source: run.flows.rows(run.flows.source == source) for source in run.flows.source}
    assert int(sent["10.0.0.1:7"].payload_bytes.sum()) == 100 * 50
    # Each interface saw every other segment of one connection: two places, of which one counts.
    assert int(sent["10.0.0.1:1000"].payload_bytes.sum()) == 200 * 50


def test_old_packet_blocks_are_read_and_untimed_ones_are_said(capture: Path) -> None:
    frame = p.segment(1, 100)
    old = struct.pack("<HHIIII", 0, 0, 10**18 >> 32, 10**18 % 2**32, len(frame), len(frame))
    content = p.section() + p.interface() + p.block(2, old + frame)
    run = read_bytes(capture, content + p.block(3, struct.pack("<I", len(frame)) + frame))
    assert payload(run) == 100
    assert run.missing == (f"{capture}: 1 packets have no time",)


def test_udp_counts_what_it_carries(capture: Path) -> None:
    frame = p.ethernet(p.ip(p.udp(bytes(300)), protocol=17))
    assert payload(read_bytes(capture, p.pcap([(1, frame), (2, frame)]))) == 600


def test_roce_counts_each_packet_once_across_the_wrap(capture: Path) -> None:
    numbers = [2**24 - 2, 2**24 - 1, 0, 1, 0, 2]
    frames = [p.ethernet(p.ip(p.roce(psn, 1024), protocol=17)) for psn in numbers]
    run = read_bytes(capture, p.pcap([(n * 10**7, frame) for n, frame in enumerate(frames)]))
    assert run.flows.destination[0] == "10.0.0.2#7"
    assert payload(run) == 5 * 1024
    assert run.facts.retransmitted_bytes == 1024


@pytest.mark.parametrize(
    ("opcode", "between"),
    [
        (0xA7, 4),  # write middle: the queue that it is for
        (0xA6, 4 + 16),  # write first: and where to
        (0xA4, 4),  # send only
        (0xAE, 0),  # answer to a read, middle
        (0xAD, 4),  # answer to a read, first
    ],
)
def test_extended_reliable_packets_are_counted_without_their_headers(
    capture: Path, opcode: int, between: int
) -> None:
    """XRC: InfiniBand's opcodes from 0xA0, with a header of 4 bytes more in all but answers."""
    frames = [
        p.ethernet(p.ip(p.roce(psn, between + 1024, opcode=opcode), protocol=17))
        for psn in (1, 2, 3, 4, 3, 5)
    ]
    run = read_bytes(capture, p.pcap([(n * 10**7, frame) for n, frame in enumerate(frames)]))
    assert payload(run) == 5 * 1024
    assert run.facts.retransmitted_bytes == 1024


@pytest.mark.parametrize(("opcode", "missed", "lost"), [(1, 2048, 0), (33, 0, 2048)])
def test_what_roce_did_not_send_again_was_not_lost(
    capture: Path, opcode: int, missed: int, lost: int
) -> None:
    # Reliable: a gap that is never filled is the capture's. Unreliable (its send middle is 33): the
    # cause of a gap is unknown.
    frames = [
        (psn * 1000, p.ethernet(p.ip(p.roce(psn, 1024, opcode=opcode), protocol=17)))
        for psn in range(1, 21)
        if psn not in (7, 8)
    ]
    run = read_bytes(capture, p.pcap(frames))
    assert (run.facts.missed_bytes, run.facts.lost_bytes) == (missed, lost)
    assert run.facts.retransmitted_bytes == 0
    assert payload(run) == 18 * 1024 + missed


@pytest.mark.parametrize("snap", [54, 60, 96, 200])
def test_any_snap_length_from_54_gives_the_same_payload(capture: Path, snap: int) -> None:
    run = read_bytes(capture, p.pcap(a_stream((1, 1000), (1001, 1000)), snap=snap))
    assert run.complete
    assert payload(run) == 2000


def test_packets_of_a_link_layer_that_is_not_read_are_said(capture: Path) -> None:
    frame = p.segment(1, 1000)
    content = p.section() + p.interface(105) + p.interface(1)
    content += p.enhanced(1, frame) + p.enhanced(2, frame, number=1) + p.enhanced(3, frame)
    run = read_bytes(capture, content)
    assert payload(run) == 1000
    said = "2 packets are of link type 105, and not of Ethernet, Linux cooked or raw IP"
    assert run.missing == (f"{capture}: {said}",)
    capture.write_bytes(p.pcap([(1, frame)], link=105))
    with pytest.raises(UsageError, match=r"holds no TCP.*; .*1 packets are of link type 105"):
        fw.flows(capture)


def test_a_shorter_snap_length_is_said(capture: Path) -> None:
    run = read_bytes(capture, p.pcap(a_stream((1, 1000), (1001, 1000)), snap=40))
    assert run.missing[0].endswith(
        "2 packets were cut before the end of their headers; 96 bytes are enough"
    )


@pytest.mark.parametrize(
    "pack", [gzip.compress, lzma.compress, lambda raw: pa.compress(raw, "zstd", asbytes=True)]
)
def test_packed_captures_are_read_like_plain_ones(capture: Path, pack: object) -> None:
    plain = p.pcap(a_stream(*((1 + 1000 * n, 1000) for n in range(500))))
    assert payload(read_bytes(capture, pack(plain))) == 500_000  # type: ignore[operator]


def test_captures_packed_in_several_pieces_are_read_to_their_end(capture: Path) -> None:
    plain = p.pcap(a_stream(*((1 + 1000 * n, 1000) for n in range(50))))
    halves = plain[: len(plain) // 2], plain[len(plain) // 2 :]
    for pack in (gzip.compress, lzma.compress, lambda raw: pa.compress(raw, "zstd", asbytes=True)):
        assert payload(read_bytes(capture, b"".join(map(pack, halves)))) == 50_000


def test_a_packed_capture_that_was_cut_is_partial(capture: Path) -> None:
    random.seed(1)
    noise = [(n, p.segment(1 + 100 * n, 0) + random.randbytes(600)) for n in range(2000)]
    run = read_bytes(capture, gzip.compress(p.pcap(noise))[:-50_000])
    assert not run.complete
    assert "cannot be unpacked to its end" in run.missing[0]


# The bytes of one direction: (sequence, bytes) in order of arrival, 10 ms apart.
WRAP = 2**32 - 150


@pytest.mark.parametrize(
    ("segments", "fresh", "again", "lost"),
    [
        ([(1, 100), (101, 100), (201, 100)], 300, 0, 0),
        ([(1, 100), (101, 100), (101, 100)], 200, 100, 0),  # sent again
        ([(1, 100), (201, 100), (101, 100)], 300, 100, 0),  # lost before us, and sent again
        ([(1, 100), (201, 100)], 200, 0, 100),  # lost
        ([(1, 100), (51, 100)], 150, 50, 0),  # half of it again
        ([(1, 100), (201, 100), (51, 300)], 350, 50 + 100 + 100, 0),  # and around what was ahead
        ([(WRAP, 100), (WRAP + 100, 100), (50, 100)], 300, 0, 0),  # the numbers wrap
        ([(WRAP, 100), (50, 100), (WRAP + 100, 100)], 300, 100, 0),
        ([(1, 100), (301, 100), (201, 100), (101, 100)], 400, 200, 0),
        ([(1, 100), (100, 1), (101, 100)], 200, 0, 0),  # a keep-alive is no retransmission
    ],
)
def test_bytes_are_told_apart_by_their_sequence(
    capture: Path, segments: list[tuple[int, int]], fresh: int, again: int, lost: int
) -> None:
    run = read_bytes(capture, p.pcap(a_stream(*segments)))
    assert payload(run) == fresh
    assert run.facts.retransmitted_bytes == again
    assert run.facts.lost_bytes == lost


def test_what_comes_late_but_soon_is_reordered(capture: Path) -> None:
    run = read_bytes(capture, p.pcap(a_stream((1, 100), (201, 100), (101, 100), step_ns=1000)))
    assert (run.facts.reordered_bytes, run.facts.retransmitted_bytes) == (100, 0)


def test_what_was_acknowledged_and_not_seen_was_missed_by_the_capture(capture: Path) -> None:
    frames = [*a_stream((1, 100), (201, 100)), (10**18 + 1, p.answer(301))]
    run = read_bytes(capture, p.pcap(frames))
    assert (run.facts.missed_bytes, run.facts.lost_bytes) == (100, 0)


def test_a_new_connection_between_the_same_ports_begins_anew(capture: Path) -> None:
    frames = [
        (n * 10**7, frame)
        for n, frame in enumerate(
            [
                p.segment(0, 0, flags=p.SYN),
                p.segment(1, 500),
                p.segment(0, 0, flags=p.SYN),
                p.segment(1, 100),  # SYN sent again: the same
                p.segment(90, 0, flags=p.SYN),
                p.segment(91, 500),
            ]
        )
    ]
    run = read_bytes(capture, p.pcap(frames))
    assert payload(run) == 1000
    assert run.facts.retransmitted_bytes == 100


MSS = b"\x02\x04\x05\xb4"  # 1460
STAMPS = b"\x01\x01\x08\x0a" + bytes(8)


def test_segmentation_offload_is_undone_at_the_agreed_size(capture: Path) -> None:
    frames = [
        (1, p.segment(0, 0, flags=p.SYN, options=MSS)),
        (2, p.segment(1, 10 * 1448 + 7, options=STAMPS)),
    ]
    run = read_bytes(capture, p.pcap(frames, snap=96))
    assert wire(run) == 58 + 10 * 1448 + 7 + 11 * 66
    assert int(run.flows.packets.sum()) == 12
    assert run.facts.supposed_packets == 0


def test_the_smaller_of_both_ends_sizes_counts(capture: Path) -> None:
    small = b"\x02\x04\x02\x18"  # 536
    opened = p.ethernet(
        p.ip(p.tcp(0, 0, ports=(2000, 1000), flags=p.SYN, options=small), "10.0.0.2", "10.0.0.1")
    )
    frames = [(1, p.segment(0, 0, flags=p.SYN, options=MSS)), (2, opened), (3, p.segment(1, 5360))]
    assert int(read_bytes(capture, p.pcap(frames)).flows.packets.sum()) == 12


@pytest.mark.parametrize(
    ("payload_bytes", "packets"), [(1448 * 40, 40), (8948 * 7, 7), (8948, 1), (1448, 1)]
)
def test_without_an_opening_the_size_is_supposed_and_that_is_said(
    capture: Path, payload_bytes: int, packets: int
) -> None:
    run = read_bytes(capture, p.pcap([(1, p.segment(1, payload_bytes, options=STAMPS))], snap=96))
    assert int(run.flows.packets.sum()) == packets
    assert run.facts.supposed_packets == (packets if packets > 1 else 0)


@pytest.mark.parametrize(
    ("begin", "payload_bytes", "again"),
    [(1, 10 * 1448, 10), (1, 1448, 1), (17 * 1448 + 1, 20_000, 3)],
)
def test_a_large_frame_that_passes_again_counts_each_packet_that_it_repeats(
    capture: Path, begin: int, payload_bytes: int, again: int
) -> None:
    frames = [
        (1, p.segment(1, 10 * 1448, options=STAMPS)),
        (2, p.segment(10 * 1448 + 1, 10 * 1448, options=STAMPS)),
        (3, p.segment(begin, payload_bytes, options=STAMPS)),
    ]
    run = read_bytes(capture, p.pcap(frames, snap=96))
    assert int(run.flows.retransmits.sum()) == again


def test_a_flow_captured_at_both_ends_counts_once_where_more_was_seen(tmp_path: Path) -> None:
    whole = a_stream((1, 100), (101, 100), (201, 100))
    (tmp_path / "a.pcap").write_bytes(p.pcap(whole))
    (tmp_path / "b.pcap").write_bytes(p.pcap(whole[:1] + whole[2:]))
    for order in (["a.pcap", "b.pcap"], ["b.pcap", "a.pcap"]):
        run = read_captures([tmp_path / name for name in order])
        assert payload(run) == 300
        assert run.facts.lost_bytes == 0


def test_captures_that_follow_each_other_are_one(tmp_path: Path) -> None:
    whole = a_stream((1, 100), (101, 100), (201, 100))
    (tmp_path / "a.pcap").write_bytes(p.pcap(whole[:1]))
    (tmp_path / "b.pcap").write_bytes(p.pcap(whole[1:]))
    assert payload(read_captures([tmp_path / "b.pcap", tmp_path / "a.pcap"])) == 300


def test_drops_of_the_capture_are_said(capture: Path) -> None:
    statistics = p.block(5, struct.pack("<III", 0, 0, 0) + p.option(5, struct.pack("<Q", 17)))
    run = read_bytes(capture, p.pcapng(a_stream((1, 100))) + statistics)
    assert run.missing == (f"{capture}: 17 packets were dropped by the capture",)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "the file is empty"),
        (b"\xd4\xc3", "not a capture"),
        (bytes(100), "not a capture: expected pcap or pcapng"),
        (p.section()[:8] + b"abcd" + bytes(16), "a section of unknown byte order"),
        (p.pcap([])[:20], "not a capture"),
        (p.pcap([]) + struct.pack("<IIII", 0, 0, 2**31, 10), "a packet claims 2147483648 bytes"),
        (p.section() + p.block(1, b""), "an interface without a link type"),
        (p.section() + p.interface(resolution=127), "an interface whose clock is finer than any"),
        (p.section() + p.enhanced(1, b""), "a packet of an interface that is not described"),
        (p.section() + struct.pack("<II", 1, 7), "the file ends within a packet"),
        (p.section() + struct.pack("<III", 1, 7, 0), "a block claims 7 bytes"),
        (p.section() + struct.pack("<III", 6, 2**31, 0), "a block claims 2147483648 bytes"),
        (gzip.compress(b"", mtime=0)[:9], "it cannot be unpacked to its end"),
    ],
)
def test_what_is_no_capture_is_refused_in_one_sentence(
    capture: Path, content: bytes, problem: str
) -> None:
    with pytest.raises(DamagedInput) as refusal:
        read_bytes(capture, content)
    assert problem in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_capture_that_was_cut_is_partial_with_its_count(capture: Path) -> None:
    content = p.pcap(a_stream((1, 100), (101, 100)))
    run = read_bytes(capture, content[:-5])
    assert payload(run) == 100
    [sentence] = run.missing
    assert sentence.startswith(f"{capture}: the file ends within a packet, after 1 packets")


def test_the_same_capture_twice_or_none_is_refused(capture: Path) -> None:
    capture.write_bytes(p.pcap([]))
    with pytest.raises(UsageError, match="the same capture is given twice"):
        read_captures([capture, capture])
    with pytest.raises(UsageError, match="expected 1 to 10000 captures, got 0"):
        read_captures([])


def test_a_bomb_is_refused_and_does_not_swell(
    capture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fullwire.packets.pcap._BOMB_BYTES", 1 << 20)
    monkeypatch.setattr("fullwire.packets.pcap._MOST_EXPANSION", 100)
    packed = io.BytesIO()
    with gzip.open(packed, "wb") as file:
        file.write(p.pcap([]) + struct.pack("<IIII", 1, 0, 0, 0) * 2_000_000)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DamagedInput, match="unpacks to more than 100 times its size"):
        read_bytes(capture, packed.getvalue())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 40_000


def test_who_interrupts_the_reading_need_not_wait(capture: Path) -> None:
    """A file that is no capture is refused at once, even if the others would take long."""
    frames = p.pcap(a_stream(*((1 + 100 * n, 100) for n in range(2_000))))[24:]
    packed = io.BytesIO()
    with gzip.open(packed, "wb", compresslevel=1) as file:
        file.write(p.pcap([]))
        for _ in range(500):  # takes a while to unpack
            file.write(frames)
    capture.write_bytes(packed.getvalue())
    other = capture.with_name("other.pcap")
    other.write_bytes(b"no capture")
    before_s = time.process_time()
    read_captures([capture])
    began_s = time.process_time()
    with pytest.raises(DamagedInput, match="not a capture"):
        read_captures([other, capture])
    assert time.process_time() - began_s < (began_s - before_s) / 3


def test_memory_has_a_limit_whatever_flows_and_times_there_are(capture: Path) -> None:
    rng = np.random.default_rng(1)
    times = rng.integers(0, 2**62, 1_000)
    frame = bytearray(p.segment(1, 10))
    scan = PacketScan()
    scan.feed(np.frombuffer(p.pcapng([]), np.uint8))
    head = bytearray(p.enhanced(0, bytes(frame)))
    for number in range(70_000):
        head[28 + 34 : 28 + 36] = number.to_bytes(3, "big")[1:]
        head[28 + 26 : 28 + 30] = (number * 7).to_bytes(4, "big")
        time_ns = int(times[number % 1000])
        head[12:20] = struct.pack("<II", time_ns >> 32, time_ns % 2**32)
        scan.feed(np.frombuffer(bytes(head), np.uint8))
    scan.finish()
    assert len(scan.endpoints()) == 65_536
    assert scan.counts()["crowded_packets"] == 70_000 - 65_536


def test_a_stream_full_of_holes_is_counted_in_bounded_memory(capture: Path) -> None:
    holes = [(1 + 20 * number, 10) for number in range(500)]
    run = read_bytes(capture, p.pcap(a_stream(*holes)))
    assert payload(run) == 5_000
    assert run.facts.lost_bytes == 4_990


@given(st.integers(1, 300), st.integers(0, 2**32 - 1))
@cases(30)
def test_pieces_of_any_size_give_the_same(piece: int, first: int) -> None:
    content = p.pcapng(a_stream(*((first + 50 * n, 50) for n in range(10))))
    content += p.block(0xABC, bytes(500)) + p.enhanced(1, p.segment(first + 500, 30))
    scan = PacketScan()
    whole = np.frombuffer(content, np.uint8)
    for start in range(0, len(whole), piece):
        scan.feed(whole[start : start + piece])
    scan.finish()
    assert scan.damage() == ""
    assert scan.totals()["payload_bytes"].tolist() == [530]


def test_threads_make_no_difference(capture: Path) -> None:
    """Use lost, repeated and reordered segments of many flows, which threads take in batches."""
    rng = random.Random(1)
    frames, sent = [], [0] * 300
    for number in range(40_000):
        port = rng.randrange(300)
        sequence = 1 + sent[port] - 500 * rng.randrange(3) * rng.randrange(2)
        sent[port] += 500 * rng.randrange(3)
        frames.append((10**18 + number * 10_000, p.segment(sequence, 500, ports=(1000 + port, 80))))
    capture.write_bytes(p.pcap(frames, snap=96))
    whole = PacketScan()
    whole.feed(np.fromfile(capture, np.uint8))
    whole.finish()
    with capture.open("rb") as file:
        by_threads = PacketScan()
        while by_threads.read(file.fileno(), 4, 1_000_000):
            pass
        by_threads.finish()
    assert by_threads.endpoints() == whole.endpoints()
    for ours, theirs in ((by_threads.totals(), whole.totals()), (by_threads.bins(), whole.bins())):
        assert {name: each.tolist() for name, each in ours.items()} == {
            name: each.tolist() for name, each in theirs.items()
        }


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), max_size=40), st.booleans())
@cases(200)
def test_payload_is_the_union_of_what_was_sent(
    segments: list[tuple[int, int]], wraps: bool
) -> None:
    """In any order, with any overlap and repetition, each byte counts once."""
    first = 2**32 - 60 if wraps else 1000
    frames = a_stream((first, 1), *((first + 1 + seq, size) for seq, size in segments))
    scan = PacketScan()
    scan.feed(np.frombuffer(p.pcap(frames), np.uint8))
    scan.finish()
    bytes_seen = {0}.union(*(range(1 + seq, 1 + seq + size) for seq, size in segments))
    totals = scan.totals()
    assert totals["payload_bytes"].sum() == len(bytes_seen)
    assert totals["lost_bytes"].sum() == max(bytes_seen) + 1 - len(bytes_seen)


ALL_KINDS = [
    p.pcap(a_stream((1, 100), (201, 50), (101, 100))),
    p.pcap([(1, p.vxlan(p.ethernet(SEGMENT6))), (2, p.ethernet(SEGMENT, vlans=2))], order=">"),
    p.pcap([(1, p.cooked2(SEGMENT))], link=276),
    p.pcapng(
        [(1, p.ethernet(p.ip(p.roce(5, 64), protocol=17))), (2, p.segment(1, 9, options=MSS))]
    ),
]
PACKED = [
    pack(kind)
    for kind in ALL_KINDS
    for pack in (gzip.compress, lzma.compress, lambda raw: pa.compress(raw, "zstd", asbytes=True))
]


@given(st.sampled_from(ALL_KINDS + PACKED).flatmap(damaged))
@cases(400)
def test_a_damaged_capture_is_read_or_refused_and_nothing_else(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "x.pcap"
    path.write_bytes(content)
    try:
        run = read_captures([path])
        analyse_flows(run)
    except FullwireError as refusal:
        assert len(str(refusal)) < 400  # noqa: PT017  # not every case is refused
        return
    assert (run.flows.payload_bytes >= 0).all()
    assert (run.flows.wire_bytes >= 0).all()
    assert all("\n" not in sentence for sentence in run.missing)


def test_a_capture_is_recognised_and_read_as_a_run(capture: Path) -> None:
    capture.write_bytes(p.pcap(a_stream((1, 100))))
    assert payload(read(capture)) == 100
