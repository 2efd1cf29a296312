"""Flow records of switches become flows; the jobs of a network are told apart in them."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fullwire as fw
from fullwire.importers import read
from fullwire.importers.flow_records import looks_like
from fullwire.run.run import Flows, Provenance, Run
from tests.conftest import Cli
from tests.traffic_by_hand import ring, traffic
from validation import flow_records as made

ENDS = bytes([10, 0, 0, 1, 10, 0, 0, 2])
BOOT_S = 1_700_000_000
NFDUMP = Path(__file__).parents[1] / "data/inputs/nfdump"


def nfdump_files() -> list[bytes]:
    return [path.read_bytes() for path in sorted(NFDUMP.iterdir())]


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


@pytest.mark.parametrize("packed", ["plain", "lzo", "bz2", "lz4"])
def test_files_of_nfdump_hold_what_nfdump_itself_counts(packed: str) -> None:
    """nfcapd 1.7.1 wrote it; `nfdump -r` says 49 flows, 128022 packets, 192.0 M bytes."""
    run = read(NFDUMP / f"{packed}.nfdump")
    assert not run.gaps
    assert len(run.flows.source) == 49
    assert (run.flows.packets.sum(), run.flows.wire_bytes.sum()) == (128_022, 192_033_000)
    assert {*run.flows.source} == {"10.0.0.1", "10.0.0.2", "10.0.0.3", "fd00::1"}
    longest_ns = (run.flows.end_ns - run.flows.start_ns).max()
    assert longest_ns == 100_000_000
    assert fw.jobs_in(run)[0].step_s == pytest.approx(0.5, rel=0.01)


def test_other_files_of_nfdump_are_refused_with_the_remedy(tmp_path: Path) -> None:
    whole = bytearray((NFDUMP / "plain.nfdump").read_bytes())
    for place, value, why in ((2, 1, "`nfdump -r OLD -w NEW` of 1.7"), (17, 1, "not encrypted")):
        other = bytearray(whole)
        other[place] = value
        (tmp_path / "other").write_bytes(other)
        with pytest.raises(fw.DamagedInput, match=why):
            read(tmp_path / "other")
    (tmp_path / "cut").write_bytes(whole[:-400])
    with pytest.raises(fw.DamagedInput, match="a block is cut off"):
        read(tmp_path / "cut")


@given(
    st.sampled_from([netflow_5(), netflow_9(), ipfix(10), sflow(10), *nfdump_files()]),
    st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=6)), max_size=6),
    st.integers(0, 1200),
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
    assert not pipeline.shares
    assert not ring.shares
    assert [(group.pattern, len(group.hosts)) for group in pipeline.groups] == [("ring", 2)] * 4
    [group] = ring.groups
    assert group.pattern == "ring"
    around = {*zip(group.hosts, (*group.hosts[1:], group.hosts[0]), strict=True)}
    assert {tuple(sorted(pair)) for pair in around} == {*ring.data_parallel}


SHAPES = {
    "ring": [(rank, (rank + 1) % 8, 1.0) for rank in range(8)],
    "tree": [
        (*pair, 1.0)
        for child in range(1, 8)
        for pair in ((child, (child - 1) // 2), ((child - 1) // 2, child))
    ],
    "all-to-all": [(one, other, 0.2) for one in range(8) for other in range(8) if one != other],
    "halving-doubling": [
        (rank, rank ^ apart, 0.5 * apart) for rank in range(8) for apart in (1, 2, 4)
    ],
}


@pytest.mark.parametrize("rate", [1, 1000])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_shape_in_which_replicas_add_up_is_told(shape: str, rate: int, tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    rows = np.array(
        [
            (one + 1, other + 1, begin_s, begin_s + 0.1 * share, 400e6 * share)
            for begin_s in np.arange(40) * 0.5
            for one, other, share in SHAPES[shape]
        ]
    )
    made.write_ipfix(made.sampled(rows, rate, random), rate, tmp_path / "switch.ipfix")
    [job] = fw.jobs_in(tmp_path / "switch.ipfix")
    assert [(group.pattern, len(group.hosts)) for group in job.groups] == [(shape, 8)]
    assert job.pipeline == ()


def test_jobs_that_share_a_link_are_told_with_what_it_costs_each() -> None:
    """Two rings of 0.5 and 0.7 s a step; beside each other their bursts take twice as long."""
    rows = []
    flowing: dict[int, list[tuple[float, float]]] = {0: [], 1: []}
    for job, step_s in ((0, 0.5), (1, 0.7)):
        for step in range(60):
            begin_s = 0.013 * job + step * step_s
            flowing[job].append((begin_s, begin_s + 0.15))
    slow_s = [0.0, 0.0]
    for job in (0, 1):
        for begin_s, end_s in flowing[job]:
            met_s = sum(
                max(min(end_s, two) - max(begin_s, one), 0) for one, two in flowing[1 - job]
            )
            slow_s[job] += met_s / 60
            for rank in range(4):
                one, other = 10 * job + rank, 10 * job + (rank + 1) % 4
                rows.append((f"h{one}", f"h{other}", begin_s, end_s + met_s))
    for step in range(100):  # a third one, which goes another way
        rows += [(f"o{rank}", f"o{(rank + 1) % 3}", step * 0.31, step * 0.31 + 0.1)
                 for rank in range(3)]  # fmt: skip
    source, target, begin, end = zip(*rows, strict=True)
    run = Run(
        provenance=Provenance(origin="imported", source="made up"),
        flows=Flows(
            source=np.array(source, object),
            destination=np.array(target, object),
            start_ns=(np.array(begin) * 1e9).astype(np.int64),
            end_ns=(np.array(end) * 1e9).astype(np.int64),
            payload_bytes=np.full(len(rows), 10_000_000),
            wire_bytes=np.full(len(rows), 10_000_000),
            packets=np.full(len(rows), 7000),
            retransmits=np.zeros(len(rows), np.int64),
        ),
    )
    first, second, alone = fw.jobs_in(run)
    assert [shared.job for shared in first.shares] == [1]
    assert [shared.job for shared in second.shares] == [0]
    for found, expected in ((first, slow_s[0] / 0.5), (second, slow_s[1] / 0.7)):
        assert found.shares[0].pairs == 4
        assert 1.3 < found.shares[0].slower < 2.2
        assert found.shares[0].cost == pytest.approx(expected, rel=0.4)
    assert not alone.shares


@pytest.mark.parametrize("hosts", [2, 4])
def test_a_host_in_a_capture_is_an_address_and_no_port(hosts: int) -> None:
    """Each connection has a port of its own, also that to the store on the first host."""
    random = np.random.default_rng(3)
    sent = [
        (source, target, size, start_ms + random.uniform(0, 9), end_ms + random.uniform(0, 9))
        for source, target, size, start_ms, end_ms in ring(hosts, 30, send_ms=40, compute_ms=120)
    ]
    run = traffic([*sent, *((host, 0, 2000, 100, 110) for host in range(1, hosts))])
    ports = [
        f"{source.partition(':')[0]}:{40_000 + int(target.split('.')[3].partition(':')[0])}"
        for source, target in zip(run.flows.source, run.flows.destination, strict=True)
    ]
    flows = replace(run.flows, source=np.array(ports, object))
    [job] = fw.jobs_in(replace(run, flows=flows))
    assert job.hosts == tuple(f"10.0.0.{host + 1}" for host in range(hosts))
    assert job.step_s == pytest.approx(0.16, rel=0.02)
    assert job.step_bytes == pytest.approx(2 * (hosts - 1) * 8e6 * 1.05, rel=0.05)
    [group] = job.groups
    assert (group.pattern, len(group.hosts)) == ("ring", hosts)


@pytest.mark.parametrize(("name", "hosts"), [("r4_mlp4_tso", 4), ("r2_mlp20_tso", 2)])
def test_a_real_capture_of_one_job_holds_one_job(shared_data: Path, name: str, hosts: int) -> None:
    [job] = fw.jobs_in(shared_data / "pcap" / name)
    assert job.hosts == tuple(f"10.99.0.{host + 1}" for host in range(hosts))
    [group] = job.groups
    assert (group.pattern, len(group.hosts)) == ("ring", hosts)
    if hosts == 4:  # 15 steps, whose bytes on an edge are 1.5 times the gradient of 4.2 MB
        assert job.step_bytes == pytest.approx(4 * 1.5 * 4_239_400, rel=0.1)


def test_flows_prints_the_jobs_of_a_network(network: Path, cli: Cli) -> None:
    printed = cli("flows", "--jobs", str(network)).stdout
    assert printed.startswith("2 jobs in these flows.")
    assert "10.0.0.1 and 7 more" in printed
    assert "4 x ring of 2" in printed
    assert " ring of 6" in printed
    refused = cli("flows", "--jobs", "--hosts", "x", str(network))
    assert refused.returncode == 2
    assert "expected no --hosts" in refused.stderr
