"""Described clusters in the lab: hosts on leaves, and uplinks that are as narrow as described."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fullwire.answers.laboratory import lab_facts
from fullwire.answers.whatif import whatif
from fullwire.clusters import cluster
from fullwire.clusters.cluster import Cluster, Inside, LeafSpine, Nics, OtherHost, Torus
from fullwire.clusters.description import as_toml
from fullwire.errors import UsageError
from fullwire.importers import read
from fullwire.lab.description import describe
from fullwire.lab.lab import Lab
from fullwire.lab.session import run_job, summary
from fullwire.run.facts import Facts
from fullwire.simulation.subject import recorded_cluster
from tests.conftest import Cli

TWO_LEAVES = Cluster(
    name="two leaves",
    nodes=4,
    nics=Nics(rate_bps=200e6),
    network=LeafSpine(nodes_per_leaf=2, oversubscription=2),
)
RAILS = Cluster(
    name="rails",
    nodes=2,
    devices_per_node=4,
    inside=Inside(kind="switch", rate_bps=1e12),
    nics=Nics(rate_bps=100e6, per_node=2, latency_s=4e-6),
    network=LeafSpine(nodes_per_leaf=2, by_rail=True),
)
SENT_BYTES = 4_000_000

# Hosts 0 and 1 send to hosts 2 and 3 at once, then to each other within the leaf. The receiver
# prints three things: which of the two transfers it was, its size, and its begin and end.
ACROSS_AND_WITHIN = """
import os, socket, sys, time
rank, size = int(os.environ["RANK"]), int(sys.argv[1])

def receive(where, port):
    with socket.create_server(("", port)) as listener:
        peer, _ = listener.accept()
    with peer:
        began, left = time.monotonic(), size
        while left:
            left -= len(peer.recv(min(left, 1 << 20)))
        print(where, size - left, began, time.monotonic(), flush=True)

def send(target, port):
    for attempt in range(2000):
        try:
            peer = socket.create_connection((f"host{target}", port))
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    with peer:
        peer.sendall(bytes(size))
        peer.shutdown(socket.SHUT_WR)
        peer.recv(1)

if rank < 2:
    send(rank + 2, 5000)
else:
    receive("across", 5000)
if rank % 2:
    receive("within", 5001)
else:
    send(rank + 1, 5001)
"""

# Each rank sends to its counterpart on the other host, over the interface that it is told to use.
# Then it sends to its neighbour on its own host, and prints its own number.
OVER_OWN_NICS = """
import fcntl, os, socket, struct, sys, threading, time
e, size = os.environ, int(sys.argv[1])
rank, place, of = int(e["RANK"]), int(e["LOCAL_RANK"]), int(e["LOCAL_WORLD_SIZE"])
nic = e["GLOO_SOCKET_IFNAME"]
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
    ours = socket.inet_ntoa(fcntl.ioctl(asked, 0x8915, struct.pack("256s", nic.encode()))[20:24])

def receive():
    for _ in range(2):
        peer, _ = listener.accept()
        with peer:
            while peer.recv(1 << 20):
                pass

def send(address, port):
    for attempt in range(2000):
        try:
            with socket.create_connection((address, port)) as peer:
                return peer.sendall(bytes(size))
        except ConnectionRefusedError:
            time.sleep(0.02)

listener = socket.create_server((ours, 5000 + place))
at_work = threading.Thread(target=receive)
at_work.start()
network, _, number = ours.rpartition(".")
send(f"{network}.{3 - int(number)}", 5000 + place)
neighbour = place ^ 1
send(ours, 5000 + neighbour)
at_work.join()
print(rank, place, of, e["WORLD_SIZE"], nic, ours, socket.gethostname(), flush=True)
"""
LEFT_BY_NICS = """
import os
left = [open(f"/sys/class/net/eth{n}/statistics/tx_bytes").read().strip() for n in (0, 1)]
if os.environ["LOCAL_RANK"] == "0":
    print(os.environ["RANK"], *left, flush=True)
"""

# A rank of each host measures all interfaces of its job, which names the first.
INTERFACES_AS_SEEN = """
import json, os, sys
from fullwire.fixes.fix import fix_kind
import torch.distributed as dist

os.environ |= {"GLOO_SOCKET_IFNAME": sys.argv[1], "FULLWIRE_TRIAL": "2"}
if not sys.argv[1]:
    del os.environ["GLOO_SOCKET_IFNAME"]
dist.init_process_group("gloo")
print(os.environ["RANK"], json.dumps(fix_kind("environment").look("gloo")), flush=True)
"""

needs_namespaces = pytest.mark.usefixtures("namespaces")


def test_a_described_cluster_says_which_hosts_and_links_there_are() -> None:
    slow = replace(TWO_LEAVES, other_hosts=(OtherHost(node=3, nic_rate_bps=50e6),))
    description = describe(cluster=slow, dilation=2)
    assert description.rates_bps == [100e6, 100e6, 100e6, 25e6]
    assert [description.leaf_of(host, 0) for host in range(4)] == [0, 0, 1, 1]
    assert description.uplink_rate_bps == 100e6
    assert describe(cluster=replace(TWO_LEAVES, nodes=2)).leaves == 0


def test_a_host_of_several_devices_has_a_rank_for_each_and_each_its_nic() -> None:
    description = describe(cluster=RAILS)
    assert (description.ranks, description.ranks_per_host, description.nics_per_host) == (8, 4, 2)
    assert [description.host_of(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [description.nic_of(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    four = replace(RAILS, nodes=4, network=LeafSpine(nodes_per_leaf=2, by_rail=True))
    many = describe(cluster=four)
    assert [many.leaf_of(host, nic) for host in (0, 3) for nic in (0, 1)] == [0, 1, 2, 3]


def test_a_described_latency_is_added_where_a_lab_would_not_have_it_anyway() -> None:
    near, far = (
        describe(cluster=replace(TWO_LEAVES, nics=Nics(rate_bps=200e6, latency_s=each)))
        for each in (20e-6, 1e-3)
    )
    assert (near.latency_s, near.left_out_s) == (0.0, 20e-6)
    assert (far.latency_s, far.left_out_s) == (1e-3, 0.0)
    assert describe(workers=2, rate=["1Gbps"], latency="20us").latency_s == 20e-6


@pytest.mark.parametrize(
    ("fabric", "sentence"),
    [
        (
            Cluster(
                name="torus",
                nodes=4,
                nics=Nics(rate_bps=1e9, per_node=4),
                network=Torus(rows=2, columns=2),
            ),
            "torus: expected a switch or a fat tree, got a torus",
        ),
        (
            replace(RAILS, nodes=64),
            "devices: expected at most 128 ranks in one machine, got 64 hosts of 4",
        ),
        (replace(TWO_LEAVES, nodes=256), "expected at most 128 hosts in one machine, got 256"),
        (replace(TWO_LEAVES, nics=Nics(rate_bps=400e9)), "expected 1 Mbps to 34.36 Gbps"),
        (
            replace(TWO_LEAVES, network=LeafSpine(nodes_per_leaf=2, oversubscription=1000)),
            "the range of the kernel's token bucket, got 400 kbps",
        ),
    ],
)
def test_what_a_lab_cannot_make_is_refused_with_the_reason(fabric: Cluster, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        describe(cluster=fabric)


def test_a_cluster_and_hosts_besides_are_refused(cli: Cli) -> None:
    with pytest.raises(UsageError, match="has its own hosts, rates and latency"):
        describe(cluster=TWO_LEAVES, workers=2, rate=["1Gbps"])
    none = cli("lab", "run", "--", "true")
    assert "expected workers and their rate, or a cluster" in none.stderr
    nodes = cli("lab", "run", "--nodes", "2", "--workers", "2", "--rate", "1Gbps", "--", "true")
    assert "--nodes: expected a described cluster with them" in nodes.stderr
    fast = cli("lab", "run", "--cluster", "p3dn", "--", "true")
    assert fast.returncode == 2
    assert "the range of the kernel's token bucket, got 100 Gbps" in fast.stderr


@needs_namespaces
def test_real_bytes_between_leaves_take_as_long_as_the_spine_lets_them(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Lab(describe(cluster=TWO_LEAVES)) as lab:
        assert [link.line_rate_bps for link in lab.uplinks] == [200e6, 200e6]
        assert "2 leaves below a spine, uplinks deliver at least" in summary(lab)
        capfd.readouterr()
        program = [sys.executable, "-c", ACROSS_AND_WITHIN, str(SENT_BYTES)]
        assert run_job(lab, program) == 0
        facts = lab_facts(lab)
    came = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert sorted(where for where, *_ in came) == ["across", "across", "within", "within"]
    assert {int(size) for _, size, *_ in came} == {SENT_BYTES}
    begins, ends = zip(*((float(b), float(e)) for w, _, b, e in came if w == "across"), strict=True)
    # Without the narrow uplink, two hosts at 200 Mbps would need half of this.
    at_uplink_rate_s = 8 * 2 * SENT_BYTES / TWO_LEAVES.uplink_rate_bps
    assert max(ends) - min(begins) > 0.9 * at_uplink_rate_s
    run = replace(read("resnet50@v100"), facts=facts | Facts(workers=4))
    assert recorded_cluster(run) == TWO_LEAVES
    assert whatif(run).suspicions[0].cluster == "two leaves"


def printed_by(
    capfd: pytest.CaptureFixture[str], lab: Lab, program: str, *words: str
) -> list[list[str]]:
    capfd.readouterr()
    assert run_job(lab, [sys.executable, "-c", program, *words]) == 0
    return [line.split() for line in capfd.readouterr().out.splitlines()]


@needs_namespaces
def test_each_rank_has_its_place_its_nic_and_no_other_way_out(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Lab(describe(cluster=RAILS)) as lab:
        assert [(link.host, link.nic) for link in lab.links] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert {link.line_rate_bps for link in lab.links} == {100e6}
        said = summary(lab)
        before = printed_by(capfd, lab, LEFT_BY_NICS)
        ranks = sorted(printed_by(capfd, lab, OVER_OWN_NICS, "500000"))
        after = printed_by(capfd, lab, LEFT_BY_NICS)
        facts = lab_facts(lab)
    assert said.startswith("2 hosts of 4 ranks and 2 NICs up; links deliver at least")
    assert "this machine's memory" in said
    assert "4 us of latency are not added" in said
    assert facts.in_host_bps == lab.in_host_bps
    assert ranks == [
        [
            str(rank),
            str(rank % 4),
            "4",
            "8",
            f"eth{rank % 4 // 2}",
            f"10.{77 + rank % 4 // 2}.0.{1 + rank // 4}",
            f"host{rank // 4}",
        ]
        for rank in range(8)
    ]
    for (_, *earlier), (_, *later) in zip(sorted(before), sorted(after), strict=True):
        for one, other in zip(earlier, later, strict=True):
            # Two ranks' bytes by each NIC. The bytes to a neighbour on the host used no NIC.
            assert 1_000_000 < int(other) - int(one) < 1_300_000


@needs_namespaces
@pytest.mark.parametrize(("named", "interfaces"), [("eth0", {"eth0", "eth1"}), ("", {"eth0"})])
def test_a_rank_of_each_host_measures_the_rate_between_hosts_over_each_interface(
    capfd: pytest.CaptureFixture[str], named: str, interfaces: set[str]
) -> None:
    """Of a host with one interface, that one is measured though the job does not name it."""
    pytest.importorskip("torch")
    nics = replace(RAILS.nics, per_node=len(interfaces))
    with Lab(describe(cluster=replace(RAILS, devices_per_node=2, nics=nics))) as lab:
        capfd.readouterr()
        assert run_job(lab, [sys.executable, "-c", INTERFACES_AS_SEEN, named]) == 0
        lines = [line.split(maxsplit=1) for line in capfd.readouterr().out.splitlines()]
    of_rank = {int(rank): json.loads(seen) for rank, seen in lines}
    assert set(of_rank[0]["interfaces"]) == interfaces
    assert of_rank[0]["interface_bps"] == of_rank[2]["interface_bps"]
    assert of_rank[0]["interface_bps"].keys() == interfaces
    # Data and acknowledgements of both directions share a queue.
    assert all(50e6 < rate_bps < 101e6 for rate_bps in of_rank[0]["interface_bps"].values())
    assert "interface_bps" not in of_rank[1]  # its neighbour did


def test_a_run_that_was_recorded_on_a_cluster_is_asked_about_on_it(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(as_toml(TWO_LEAVES))
    run = read("resnet50@v100")
    recorded = replace(run, facts=run.facts | Facts(workers=4, cluster=path.read_text()))
    asked, said = whatif(recorded), whatif(run, cluster=cluster(path))
    assert asked["step_s"].tolist() == said["step_s"].tolist()
