"""Training found in packets: shape, iterations, gradient and slow link, or that it is hidden."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fullwire as fw
from fullwire.answers.audited import AuditedTraffic, audited
from fullwire.errors import UsageError
from fullwire.packets.flows import analyse_flows
from fullwire.packets.pattern import find_pattern
from fullwire.report.traffic_picture import _places
from fullwire.run.run import Provenance
from tests import packets as p
from tests.builders import a_run
from tests.conftest import Cli
from tests.strategies import cases
from tests.traffic_by_hand import MS, Sent, ring, traffic


def analysed(sent: Iterable[Sent]) -> AuditedTraffic:
    return audited(analyse_flows(traffic(sent)))


def count(result: AuditedTraffic) -> int:
    return 0 if result.iterations is None else result.iterations.count


TRUTH = {
    "r2_mlp20_tso": (15, 21_033_000, ["10.99.0.1", "10.99.0.2"]),
    "r4_mlp4_tso": (15, 4_239_400, ["10.99.0.1", "10.99.0.4", "10.99.0.3", "10.99.0.2"]),
}


@pytest.mark.parametrize("name", TRUTH)
def test_real_captures_say_what_is_known_of_them(shared_data: Path, name: str) -> None:
    iterations, gradient, order = TRUTH[name]
    folder = shared_data / "pcap" / name
    result = fw.flows(*sorted(folder.glob("*.pcap")))
    hosts = len(order)
    assert result.pattern.kind == "ring"
    assert list(result.order) == order
    assert count(result) == iterations
    assert result.gradient_bytes == pytest.approx(gradient, rel=1e-3)
    per_edge = 2 * (hosts - 1) / hosts * gradient
    assert result.payload_bytes_per_edge == pytest.approx(per_edge, rel=1e-3)
    assert result.slow_link is None
    assert result.ranks == hosts
    truth = json.loads((folder / "ground_truth.json").read_text())
    times = truth["per_rank"][0]["iterations"]
    period_s = (times[-1]["start_ns"] - times[0]["start_ns"]) / (iterations - 1) * 1e-9
    assert result.iterations is not None
    assert result.iterations.period_s == pytest.approx(period_s, rel=0.1)
    # Counted at the queue of each host's link, after segmentation.
    for host in range(hosts):
        sent = int((folder / f"tc{host}.txt").read_text().split("Sent ")[1].split()[0])
        assert result.matrix_wire_bytes[host].sum() == pytest.approx(sent, rel=1e-4)


@pytest.mark.parametrize("name", TRUTH)
def test_one_end_of_a_real_job_says_the_same_of_itself(shared_data: Path, name: str) -> None:
    iterations, _, order = TRUTH[name]
    both = fw.flows(*sorted((shared_data / "pcap" / name).glob("*.pcap")))
    one = fw.flows(shared_data / "pcap" / name / "rank0.pcap")
    assert count(one) == iterations
    assert (one.matrix_payload_bytes[0] == both.matrix_payload_bytes[0]).all()
    assert one.pattern.kind == ("ring" if len(order) == 2 else "none")  # it cannot see the rest


@pytest.mark.parametrize("hosts", [2, 3, 4, 8])
def test_a_ring_its_order_and_its_gradient(hosts: int) -> None:
    result = analysed(ring(hosts, 12))
    assert result.pattern.kind == "ring"
    assert result.order == tuple(f"10.0.0.{h + 1}" for h in [0, *range(hosts - 1, 0, -1)])
    assert count(result) == 12
    assert result.gradient_bytes == pytest.approx(8_000_000, rel=1e-3)
    assert result.iterations is not None
    assert result.iterations.period_s == pytest.approx(0.160, rel=0.02)
    assert result.iterations.confidence > 0.9


@pytest.mark.parametrize(
    "how",
    [
        {"buckets": (0.05, 0.55, 0.4), "bucket_gap_ms": 20},
        {"buckets": (0.5, 0.5), "bucket_gap_ms": 4},
        {"pause_every": 5},
        {"pause_every": 5, "buckets": (0.2, 0.8), "bucket_gap_ms": 10},
        {"startup": False},
        {"compute_ms": 8},
    ],
)
def test_buckets_and_pauses_leave_the_count(how: dict[str, object]) -> None:
    assert count(analysed(ring(4, 15, **how))) == 15  # type: ignore[arg-type]


def test_a_broadcast_that_touches_the_first_iteration_hides_neither() -> None:
    result = analysed([*ring(4, 10, startup=False), (0, 1, 8_000_000, 200, 301)])
    assert count(result) == 10
    assert result.gradient_bytes == pytest.approx(8_000_000, rel=1e-3)


def test_an_iteration_that_stalled_is_still_one() -> None:
    sent = ring(4, 10)
    stalled = [each for each in sent if each[3] == 300.0 + 4 * 160]
    rest = [each for each in sent if each not in stalled]
    for source, target, size, start, _ in stalled:
        rest += [(source, target, size // 4, start, start + 10)]
        rest += [(source, target, size - size // 4, start + 75, start + 95)]
    assert count(analysed(rest)) == 10


def test_a_ring_of_several_ranks_on_each_host_counts_ranks() -> None:
    result = analysed(ring(4, 10, ranks=16))
    assert result.ranks == 16
    assert result.gradient_bytes == pytest.approx(8_000_000, rel=1e-3)
    assert "by its bytes the ring has 16 ranks on 4 hosts" in result.audit


def test_traffic_without_repetition_has_no_iterations() -> None:
    rng = np.random.default_rng(3)
    sent = [
        (int(a), (int(a) + 1) % 4, int(size), start, start + 20)
        for a, size, start in zip(
            rng.integers(0, 4, 60),
            rng.integers(10**4, 10**7, 60),
            rng.uniform(0, 9000, 60),
            strict=True,
        )
    ]
    result = analysed(sent)
    assert result.iterations is None
    assert result.gradient_bytes is None


def test_a_transfer_that_its_sender_paces_is_no_training() -> None:
    paced: list[Sent] = [(0, 1, 100_000, 10 * n, 10 * n + 3) for n in range(300)]
    assert analysed(paced).iterations is None
    answers: list[Sent] = [(1, 0, 200, 10 * n, 10 * n + 3) for n in range(300)]
    assert analysed(paced + answers).iterations is None
    # Beside a training it is other traffic, and the training is still found.
    beside: list[Sent] = [(2, 3, 100_000, 10 * n, 10 * n + 3) for n in range(300)]
    assert count(analysed([*ring(2, 12), *beside])) == 12


def test_one_long_transfer_has_no_iterations() -> None:
    assert analysed([(0, 1, 10**9, 0, 5000)]).iterations is None


@pytest.mark.parametrize("slow", [0, 2])
def test_the_slow_link_is_the_one_that_is_always_busy(slow: int) -> None:
    sent: list[Sent] = []
    for iteration in range(10):
        for turn in range(6):  # in each, all wait for the slowest
            now = iteration * 320 + turn * 40.0
            sent += [
                (host, (host - 1) % 4, 10**6, now, now + (40 if host == slow else 10))
                for host in range(4)
            ]
    found = analysed(sent).slow_link
    assert found is not None
    assert found.host == f"10.0.0.{slow + 1}"
    assert found.busy_fraction > 0.9
    assert found.others_busy[1] < 0.4


def test_a_slow_link_that_never_falls_silent_leaves_count_and_pattern() -> None:
    """The slow edge sends on while the others compute: iterations run into each other."""
    sent: list[Sent] = [(0, 1, 4_000_000, 0, 40)]
    for iteration in range(12):
        now = 100 + iteration * 240.0
        for host in range(4):
            late = 30 * (iteration % 3) if host == 2 else 0
            sent.append((host, (host - 1) % 4, 6_000_000, now + late, now + late + 150))
    result = analysed(sent)
    assert result.pattern.kind == "ring"
    assert count(result) == 12
    assert result.gradient_bytes == pytest.approx(4_000_000, rel=1e-3)


def test_hosts_that_hardly_take_part_are_left_out_and_said() -> None:
    result = analysed([*ring(3, 8), (9, 10, 500, 10, 11)])
    assert result.hosts == ("10.0.0.1", "10.0.0.2", "10.0.0.3")
    assert any("500 B were sent to, from or within other hosts" in each for each in result.audit)


def shape(hosts: int, edges: dict[tuple[int, int], float]) -> str:
    sent = np.zeros((hosts, hosts))
    for (source, target), size in edges.items():
        sent[source, target] = size
    return find_pattern(sent).kind


def both_ways(edges: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    return edges | {(b, a): size for (a, b), size in edges.items()}


def test_shapes_are_told_apart() -> None:
    around = {(n, (n + 1) % 6): 1.0 for n in range(6)}
    assert shape(6, around) == "ring"
    assert shape(6, both_ways(around)) == "two-way ring"
    assert shape(6, both_ways({(0, n): 1.0 for n in range(1, 6)})) == "parameter server"
    tree = both_ways({(0, 1): 1.0, (0, 2): 1.0, (1, 3): 1.0, (1, 4): 1.0, (2, 5): 1.0})
    assert shape(6, tree) == "tree"
    doubling = {(a, a ^ 1 << k): 4.0 / 2**k for a in range(8) for k in range(3)}
    assert shape(8, doubling) == "halving-doubling"
    everyone = {(a, b): 1.0 for a in range(5) for b in range(5) if a != b}
    assert shape(5, everyone) == "all-to-all"
    two_rings = {(0, 1): 1.0, (1, 0): 1.0, (2, 3): 1.0, (3, 2): 1.0}
    assert shape(4, two_rings) == "2 separate rings"
    servers = both_ways({(s, w): 1.0 for s in (1, 4) for w in (0, 2, 3, 5)})
    assert shape(6, servers) == "parameter server"
    hypercube = {(a, a ^ 1 << k): 1.0 for a in range(8) for k in range(3)}
    assert shape(8, hypercube) == "recursive doubling"
    assert shape(6, around | {(0, 1): 2.0}) == "none"


@given(st.permutations(range(7)), st.floats(1, 1e12))
@cases(50)
def test_any_ring_is_found_in_its_order(order: list[int], size: float) -> None:
    edges = {(order[n], order[(n + 1) % 7]): size for n in range(7)}
    sent = np.zeros((7, 7))
    for (source, target), each in edges.items():
        sent[source, target] = each
    found = find_pattern(sent)
    start = order.index(0)
    assert list(found.order) == order[start:] + order[:start]
    assert found.gradient_bytes == pytest.approx(size * 7 / 12)


def test_the_mit_study_is_explained_within_a_fifth_of_a_percent(shared_data: Path) -> None:
    anchors = json.loads((shared_data / "farhat" / "anchors.json").read_text())
    assert len(anchors["models"]) == 5
    for model in anchors["models"].values():
        size = 4 * model["trainable_params"]
        sent = ring(4, 10, gradient=size, startup=False)
        edge = round(model["flow_bytes_per_iter_median"])
        rescaled = [(a, b, edge, start, end) for a, b, _, start, end in sent]
        result = analysed([(0, 1, size, 0, 80), *rescaled])
        assert result.ranks == 16
        assert result.gradient_bytes == pytest.approx(size, rel=2e-3)


def captured(path: Path) -> Path:
    """Write a capture of a ring of two, eight iterations, in segments of 1,000 bytes."""
    frames: list[p.Packet] = []
    for iteration in range(8):
        for number in range(50):
            at = 10**18 + (iteration * 100 + number) * MS
            seq = 1 + (iteration * 50 + number) * 1000
            frames += [(at, p.segment(seq, 1000)), (at + 10, p.answer(seq, seq=seq, payload=1000))]
    path.write_bytes(p.pcap(frames, snap=96))
    return path


def test_on_the_command_line_it_is_sentences_json_and_a_run(cli: Cli, tmp_path: Path) -> None:
    capture = captured(tmp_path / "x.pcap")
    done = cli("flows", capture, "-o", tmp_path / "x.run")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert said.startswith("2 hosts, a ring 10.0.0.1 -> 10.0.0.2. 8 iterations of 100")
    assert "50 kB per edge and iteration" in said
    again = json.loads(cli("flows", tmp_path / "x.run", "--json").stdout)
    assert again == json.loads(cli("flows", capture, "--json").stdout)
    assert again["hosts"] == ["10.0.0.1", "10.0.0.2"]
    assert again["matrix_payload_bytes"] == [[0, 400_000], [400_000, 0]]
    assert again["pattern"] == {"kind": "ring", "order": ["10.0.0.1", "10.0.0.2"]}
    assert again["iterations"]["count"] == 8
    assert again["iterations"]["payload_bytes_per_edge"] == again["gradient_bytes"] == 50_000
    assert again["slow_link"] is None


def test_a_capture_without_such_packets_is_a_mistake_in_one_line(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "x.pcap").write_bytes(p.pcap([(1, bytes(60))]))
    done = cli("flows", tmp_path / "x.pcap")
    assert done.returncode == 2
    assert (
        done.stderr == "fullwire: flows: this holds no TCP, UDP or RoCEv2 packets between hosts\n"
    )


def test_packets_without_payload_are_a_mistake_in_one_line(cli: Cli, tmp_path: Path) -> None:
    """For example acknowledgements alone: no host sends or receives data."""
    (tmp_path / "x.pcap").write_bytes(p.pcap([(1, p.segment(1, 0))]))
    done = cli("flows", tmp_path / "x.pcap")
    assert done.returncode == 2
    assert done.stderr.startswith("fullwire: flows: expected payload between hosts, got none")
    assert done.stderr.count("\n") == 1


def test_a_damaged_capture_is_status_3_and_a_partial_one_says_so(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "x.pcap").write_bytes(b"nothing of this kind, and longer than a header")
    assert cli("flows", tmp_path / "x.pcap").returncode == 3
    whole = captured(tmp_path / "y.pcap").read_bytes()
    (tmp_path / "y.pcap").write_bytes(whole[:-10])
    done = cli("flows", tmp_path / "y.pcap")
    assert done.returncode == 0
    assert "note: PARTIAL:" in done.stdout


def test_a_recording_without_packets_is_told_the_option_that_captures_them() -> None:
    recorded = replace(a_run(), provenance=Provenance(origin="measured", source="a job"))
    for ask in (fw.flows, fw.jobs_in):
        with pytest.raises(UsageError, match="this run was recorded without packets"):
            ask(recorded)


def test_nothing_to_read_is_refused() -> None:
    with pytest.raises(UsageError, match="expected packet captures"):
        fw.flows()


def test_a_tree_is_drawn_as_a_tree() -> None:
    above = [None, 0, 0, 1, 1, 2]
    edges = [(host, parent) for host, parent in enumerate(above) if parent is not None]
    sent: list[Sent] = [
        (a, b, 1_000_000, n * 100, n * 100 + 30)
        for n in range(5)
        for one, other in edges
        for a, b in ((one, other), (other, one))
    ]
    result = analysed(sent)
    assert result.pattern.kind == "tree"
    places = _places(result)
    assert [places[host].x for host in range(6)] == [-1, 0, 0, 1, 1, 1]
    rows = [places[host].y for host in (3, 4, 5)]
    assert rows == [1, 0, -1]
    assert places[1].y == 0.5
    assert places[2].y == places[5].y
