"""Topologies that NCCL dumps become clusters.

The form is that of a real dump of an A100 host, as published notes on ncclTopoGetSystemFromXml show
it. It also follows NVIDIA/nccl (src/graph/xml.cc, topo.h).
"""

from __future__ import annotations

from pathlib import Path

import pytest

import fullwire
from fullwire.clusters import cluster
from fullwire.clusters.description import as_toml, described
from fullwire.errors import UsageError
from tests.conftest import Cli

LINKS = "".join(f'<nvlink target="0000:e{n}:00.0" count="2" tclass="0x068000"/>' for n in range(6))


def gpu(dev: int, links: str = LINKS, speed: str = "16 GT/s") -> str:
    return (
        f'<pci busid="0000:{dev + 16:x}:00.0" class="0x030200" link_speed="{speed}" '
        f'link_width="16"><gpu dev="{dev}" sm="80" rank="{dev}" gdr="1">{links}</gpu></pci>'
    )


def nic(dev: int, speed: int = 200_000) -> str:
    return (
        f'<pci busid="0000:c{dev}:00.0" class="0x020000" link_speed="16 GT/s" link_width="16">'
        f'<nic><net name="mlx5_{dev}" dev="{dev}" speed="{speed}" port="1" guid="0x{dev}" '
        'maxconn="262144" gdr="1"/></nic></pci>'
    )


def topology(*switches: str) -> str:
    """Return a host whose processors have a PCIe switch each."""
    cpus = "".join(
        f'<cpu numaid="{n}" affinity="0000ffff" arch="x86_64" vendor="AuthenticAMD">'
        f'<pci busid="0000:{n}1:00.0" class="0x060400" link_speed="8 GT/s" link_width="16">'
        f"{switch}</pci></cpu>"
        for n, switch in enumerate(switches)
    )
    return f'<system version="1">\n{cpus}\n</system>\n'


def written(where: Path, text: str) -> Path:
    (where / "topo.xml").write_text(text)
    return where / "topo.xml"


def test_devices_links_and_adapters_are_those_of_the_host(tmp_path: Path) -> None:
    text = topology(gpu(0) + nic(0) + gpu(1), gpu(2) + nic(1) + gpu(3))
    host = cluster(written(tmp_path, text), nodes=8)
    assert (host.nodes, host.devices_per_node) == (8, 4)
    assert host.inside is not None
    assert (host.inside.kind, host.inside.rate_bps) == ("switch", 8 * 12 * 25e9)
    assert (host.nics.per_node, host.nics.rate_bps) == (2, 200e9)
    assert host.nics.of_device == (0, 0, 1, 1)  # each uses the adapter on its own switch
    assert described(as_toml(host), "again") == host


def test_a_host_without_nvlink_is_joined_by_pcie(tmp_path: Path) -> None:
    host = cluster(written(tmp_path, topology(gpu(0, "") + nic(0) + gpu(1, ""))))
    assert host.inside is not None
    assert host.inside.kind == "pcie"
    assert host.inside.rate_bps == pytest.approx(8e9 * 16 * 128 / 130)  # the switch's own link


def test_equally_near_adapters_share_the_devices(tmp_path: Path) -> None:
    host = cluster(written(tmp_path, topology(nic(0) + nic(1, 100_000), gpu(0) + gpu(1))))
    assert host.nics.of_device == (0, 1)
    assert host.nics.rate_bps == 100e9
    assert host.rests_on == (
        "a topology of NCCL (topo.xml): its adapters differ, and the slowest counts; 12 NVLinks "
        "of 25 GB/s a device, as of sm 80, of which NCCL takes 0.8. It tells nothing of other "
        "hosts: two on one switch and all latencies are assumed."
    )


def test_commands_take_it_as_a_cluster(tmp_path: Path, cli: Cli) -> None:
    path = written(tmp_path, topology(gpu(0) + nic(0) + gpu(1)))
    answer = fullwire.collective("allreduce", bytes="64MiB", cluster=str(path))
    assert answer.time_s > 0
    assert 'name = "topo"' in cli("cluster", "show", str(path), "--toml").stdout


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("<system", "expected a topology of NCCL"),
        ("<graphs version='1'/>", "got a dump of its rings and trees"),
        (topology(nic(0)), "with the GPUs of a host"),
        (topology(gpu(0)), "it names no adapter"),
        ('<!DOCTYPE x [<!ENTITY a "b">]><system/>', "which declares nothing"),
        (topology(gpu(0) + nic(0)).replace('"200000"', '"fast"'), "a whole number as speed"),
        (topology(gpu(0, "") + nic(0) + gpu(1, "")).replace("GT/s", ""), "expected link_speed"),
    ],
)
def test_what_is_no_topology_is_refused_in_one_line(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why) as refused:
        cluster(written(tmp_path, text))
    assert "\n" not in str(refused.value)


def matrix(adapters: int, nearest: tuple[int, ...], pair: str = "NV18") -> str:
    """Return a matrix in the form of a published one of eight H200, with a coloured head."""
    gpus = [f"GPU{n}" for n in range(len(nearest))]
    nics = [f"NIC{n}" for n in range(adapters)]
    lines = ["\t\x1b[4m" + "\t".join([*gpus, *nics]) + "\tCPU Affinity\tNUMA Affinity\x1b[0m"]
    for at, gpu in enumerate(gpus):
        pairs = [" X " if at == other else pair for other in range(len(gpus))]
        ways = ["PXB" if nearest[at] == nic else "NODE" for nic in range(adapters)]
        lines.append("\t".join([gpu, *pairs, *ways, "0-55,112-167", "0"]))
    legend = [f"  NIC{n}: mlx5_{n}" for n in range(adapters)]
    return "\n".join([*lines, "", "Legend:", "", "  X    = Self", "NIC Legend:", *legend, ""])


def ibstat(*rates: int) -> str:
    """Return what ibstat prints; an adapter without a rate is down."""
    return "".join(
        f"CA 'mlx5_{n}'\n\tCA type: MT4129\n\tNumber of ports: 1\n\tPort 1:\n"
        f"\t\tState: {'Active' if rate else 'Down'}\n\t\tPhysical state: LinkUp\n"
        f"\t\tRate: {rate or 40}\n\t\tBase lid: 176\n\t\tLink layer: InfiniBand\n"
        for n, rate in enumerate(rates)
    )


def test_the_matrix_of_nvidia_smi_and_ibstat_are_a_host(tmp_path: Path) -> None:
    path = tmp_path / "h200.txt"
    nearest = (0, 3, 4, 5, 6, 9, 10, 11)  # the others are for management
    path.write_text(matrix(12, nearest) + ibstat(400, 100, 0, *[400] * 9))
    host = cluster(path, nodes=4)
    assert (host.nodes, host.devices_per_node) == (4, 8)
    assert (host.nics.per_node, host.nics.rate_bps) == (8, 400e9)
    assert host.nics.of_device == tuple(range(8))
    assert host.rests_on == (
        "nvidia-smi topo -m and ibstat (h200.txt): 18 NVLinks a device, taken as 25 GB/s each "
        "(V100 to H200), of which NCCL takes 0.8. Those of Blackwell have 50. 8 adapters of 12 are "
        "next to a device, and the slowest counts. It tells nothing of other hosts: two on one "
        "switch and all latencies are assumed."
    )
    assert host.inside is not None
    assert host.inside.rate_bps == 8 * 18 * 25e9
    assert described(as_toml(host), "h200.toml").nics == host.nics


def test_links_between_pairs_add_up_without_a_switch(tmp_path: Path) -> None:
    path = tmp_path / "a100.txt"
    path.write_text(matrix(1, (0, 0, 0, 0), "NV4") + ibstat(200))
    host = cluster(path)
    assert host.inside is not None
    assert host.inside.rate_bps == 8 * 12 * 25e9
    assert host.nics.of_device == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (matrix(1, (0, 0)), "expected the rates of its adapters too"),
        (matrix(1, (0, 0)) + ibstat(0), "expected the rates of its adapters too"),
        (
            matrix(1, (0, 0), "PHB") + ibstat(200),
            "expected the speed of PCIe, since a GPU has no NVLink",
        ),
        (matrix(1, (0, 0))[:60] + ibstat(200), "expected a row of 3 connections for GPU"),
        (matrix(1, (0, 0), "NVX") + ibstat(200), "expected a row of 3 connections for GPU0"),
    ],
)
def test_a_matrix_that_tells_too_little_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "host.txt"
    path.write_text(text)
    with pytest.raises(UsageError, match=problem):
        cluster(path)
