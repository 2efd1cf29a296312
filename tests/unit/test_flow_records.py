"""Flow records of switches become flows; the jobs of a network are told apart in them."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fullwire as fw
from fullwire.importers import read
from fullwire.importers.flow_records import looks_like
from tests.conftest import Cli
from validation import flow_records as made

ENDS = bytes([10, 0, 0, 1, 10, 0, 0, 2])
BOOT_S = 1_700_000_000


def netflow_5(sampling: int = 1) -> bytes:
    header = struct.pack(">HHIIIIBBH", 5, 2, 0, BOOT_S, 0, 1, 0, 1, 1 << 14 | sampling)
    row = ENDS + bytes(8) + struct.pack(">IIII", 10, 15_000, 1000, 2000) + bytes(16)
    return header + 2 * row


def netflow_9() -> bytes:
    template = struct.pack(">HH14H", 256, 6, 8, 4, 12, 4, 22, 4, 21, 4, 1, 4, 2, 4, 0, 0)[:28]
    row = ENDS + struct.pack(">IIII", 1000, 2000, 15_000, 10)
    header = struct.pack(">HHIIII", 9, 3, 0, BOOT_S, 1, 7)
    return b"".join(
        [
            header,
            struct.pack(">HH", 0, 4 + len(template)) + template,
            struct.pack(">HH", 256, 4 + 2 * len(row)) + 2 * row,
        ]
    )


def ipfix(sampling: int = 1) -> bytes:
    records = np.zeros(2, made.RECORD)
    records["source"], records["target"] = 0x0A000001, 0x0A000002
    records["begin_ms"], records["end_ms"] = BOOT_S * 1000 + 1000, BOOT_S * 1000 + 2000
    records["bytes"], records["packets"] = 15_000, 10

    def message(number: int, body: bytes) -> bytes:
        head = struct.pack(">HHIII", 10, 20 + len(body), BOOT_S, 0, 1)
        return head + struct.pack(">HH", number, 4 + len(body)) + body

    rate = message(3, made.OPTIONS) + message(257, struct.pack(">II", 1, sampling))
    return message(2, made.TEMPLATE) + rate + message(256, records.tobytes())


def sflow(sampling: int = 1) -> bytes:
    packet = bytes(12) + b"\x08\x00" + b"\x45" + bytes(11) + ENDS + bytes(22)
    header = struct.pack(">IIII", 1, 1514, 4, len(packet)) + packet
    sample = struct.pack(">IIIIIIII", 1, 2, sampling, 0, 0, 1, 2, 1)
    sample += struct.pack(">II", 1, len(header)) + header
    return struct.pack(">II4sIIII", 5, 1, b"\x0a\0\0\x09", 0, 1, 5000, 1) + (
        struct.pack(">II", 1, len(sample)) + sample
    )


@pytest.mark.parametrize(
    ("written", "wire_bytes", "packets"),
    [
        (netflow_5(), 30_000, 20),
        (netflow_5(100), 3_000_000, 2000),
        (netflow_9(), 30_000, 20),
        (ipfix(), 30_000, 20),
        (ipfix(1000), 30_000_000, 20_000),
        (2 * sflow(400), 1_200_000, 800),
    ],
)
def test_records_become_flows_with_sampling_undone(
    tmp_path: Path, written: bytes, wire_bytes: int, packets: int
) -> None:
    path = tmp_path / "switch"
    path.write_bytes(written)
    run = read(path)
    assert not run.gaps
    assert {*run.flows.source} == {"10.0.0.1"}
    assert {*run.flows.destination} == {"10.0.0.2"}
    assert run.flows.wire_bytes.sum() == wire_bytes
    assert run.flows.packets.sum() == packets
    if written[:2] != b"\0\0":  # a packet of sFlow has no length in time
        assert {*(run.flows.end_ns - run.flows.start_ns)} == {10**9}


def test_the_same_flow_seen_by_two_switches_counts_once(tmp_path: Path) -> None:
    other = bytearray(netflow_9())
    other[16:20] = struct.pack(">I", 8)  # another domain
    (tmp_path / "switch").write_bytes(netflow_9() + other)
    assert read(tmp_path / "switch").flows.wire_bytes.sum() == 30_000


def test_records_without_their_template_or_with_impossible_numbers_are_told(
    tmp_path: Path,
) -> None:
    whole = netflow_9()
    (tmp_path / "switch").write_bytes(whole[:20] + whole[52:] + netflow_5())
    run = read(tmp_path / "switch")
    assert "1 sets of records came before their template" in str(run.gaps)
    (tmp_path / "switch").write_bytes(netflow_5() + netflow_5()[:50])
    assert "read up to byte 120" in str(read(tmp_path / "switch").gaps)


@given(
    st.sampled_from([netflow_5(), netflow_9(), ipfix(10), sflow(10)]),
    st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=6)), max_size=6),
    st.integers(0, 400),
)
def test_damaged_records_are_a_run_or_a_refusal(
    tmp_path_factory: pytest.TempPathFactory,
    whole: bytes,
    changes: list[tuple[int, bytes]],
    kept: int,
) -> None:
    damaged = bytearray(whole)
    for place, other in changes:
        damaged[place : place + len(other)] = other
    path = tmp_path_factory.mktemp("fuzz") / "switch"
    path.write_bytes(damaged[: max(kept, 30)])
    looks_like(bytes(damaged))
    try:
        flows = read(path, format="flow-records").flows
    except fw.DamagedInput:
        return
    assert (flows.end_ns > flows.start_ns).all()
    assert (flows.payload_bytes >= 0).all()


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random = np.random.default_rng(11)
    jobs = [
        made.bursts(made.Made(4, 2, 1.0, 400e6, 30e6), 1, random),
        made.bursts(made.Made(1, 6, 0.5, 300e6, 0), 20, random),
    ]
    path = tmp_path_factory.mktemp("network") / "switch.ipfix"
    made.write_ipfix(made.sampled(np.concatenate(jobs), 1, random), 1, path)
    return path


def test_jobs_of_a_network_are_told_apart_with_step_and_neighbours(network: Path) -> None:
    pipeline, ring = fw.jobs_in(network)
    assert (len(pipeline.hosts), len(ring.hosts)) == (8, 6)
    assert pipeline.step_s == pytest.approx(1.0, rel=0.02)
    assert ring.step_s == pytest.approx(0.5, rel=0.02)
    assert len(pipeline.pipeline) == 6
    assert len(pipeline.data_parallel) == 4
    assert ("10.0.0.1", "10.0.0.2") in pipeline.data_parallel
    assert (len(ring.data_parallel), ring.pipeline) == (6, ())


def test_flows_prints_the_jobs_of_a_network(network: Path, cli: Cli) -> None:
    printed = cli("flows", "--jobs", str(network)).stdout
    assert printed.startswith("2 jobs in these flows.")
    assert "10.0.0.1 and 7 more" in printed
    refused = cli("flows", "--jobs", "--hosts", "x", str(network))
    assert refused.returncode == 2
    assert "expected no --hosts" in refused.stderr
