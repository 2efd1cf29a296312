"""Logs of NCCL and RCCL: real ones with known answers, forms of many versions, broken ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fullwire
from fullwire.errors import DamagedInput, UsageError
from fullwire.findings.evidence.nccl import nccl_evidence
from fullwire.importers import read
from fullwire.importers.nccl_log import log_facts
from fullwire.run.facts import Facts
from fullwire.run.run import Provenance, Run
from fullwire.words import sentence
from tests.conftest import Cli
from tests.strategies import cases

TWO_NODES = ("comm 0x5 rank 1 nRanks 16 nNodes 2 localRanks 8 localRank 1 MNNVL 0",)


def a_log(where: Path, *messages: str, host: str = "n1", name: str = "nccl.log") -> Path:
    """Write messages as one process of a host logs them."""
    lines = "".join(f"{host}:7:8 [0] NCCL INFO {message}\n" for message in messages)
    (where / name).write_text(lines)
    return where / name


def facts_of(*paths: Path) -> Facts:
    return log_facts(paths)[0]


def said_of(*paths: Path) -> dict[str, str]:
    run = Run(provenance=Provenance(origin="imported", source="a test"), facts=facts_of(*paths))
    return {each.key: sentence(each) for each in nccl_evidence(run)}


def test_docker_and_colours_around_a_line_do_not_matter(tmp_path: Path) -> None:
    lines = a_log(tmp_path, "Using network Socket", "comm 0x5 rank 0 nranks 2 x").read_text()
    coloured = "".join(f"\x1b[32m{line}\x1b[0m\n" for line in lines.splitlines())
    wrapped = "".join(
        '{"log":' + json.dumps(f"{line}\n") + ',"stream":"stdout"}\n'
        for line in coloured.splitlines()
    )
    assert wrapped.startswith('{"log":"\\u001b[32mn1:7:8')
    path = tmp_path / "docker.log"
    path.write_text(wrapped + '{"log":"n1:7:8 [0] NCCL INFO cut')
    assert facts_of(path).nccl_network == "Socket"
    assert facts_of(path).workers == 2


@pytest.mark.parametrize(
    ("name", "channels", "layout_bps"),
    [("healthy_24_channels", 24, 1.92e12), ("fault_2_channels", 2, 0.16e12)],
)
def test_real_logs_tell_network_channels_rings_and_trees(
    shared_data: Path, name: str, channels: int, layout_bps: float
) -> None:
    facts = facts_of(shared_data / f"nccl/info/{name}.log")
    assert facts.nccl_version == "NCCL 2.27.7+cuda13.0"
    assert facts.nccl_network == "IB"
    assert facts.nccl_adapters == "mlx5_0:1/RoCE, mlx5_1:1/RoCE"
    assert (facts.nccl_channels, facts.nccl_trees) == (channels, channels)
    assert facts.nccl_rings == f"{channels} x 0 1"
    assert facts.nccl_paths == f"{2 * channels} x P2P/direct pointer/read"
    assert (facts.workers, facts.nccl_nodes) == (2, 1)
    assert (facts.nccl_reach_bps, facts.nccl_layout_bps) == (1.92e12, layout_bps)


def test_few_channels_are_named_with_the_reason_for_what_is_usual(shared_data: Path) -> None:
    said = said_of(shared_data / "nccl/info/fault_2_channels.log")
    assert "2 channels where 24 are usual" in said["nccl_few_channels"]
    assert "Its rings take 20 of the 240 GB/s" in said["nccl_few_channels"]
    assert "GPU/0-65000 to GPU/0-17000 20 GB/s, back 240 GB/s" in said["nccl_few_channels"]
    healthy = said_of(shared_data / "nccl/info/healthy_24_channels.log")
    assert healthy == {"nccl_channels": "NCCL uses 24 channels."}


def test_explain_names_the_fallback_of_a_log_alone_and_of_a_table(
    shared_data: Path, tmp_path: Path, cli: Cli
) -> None:
    whole = shared_data / "nccl/info/fault_2_channels.log"
    lines = [line for line in whole.read_text().splitlines(True) if "NCCL INFO" in line]
    (tmp_path / "only.log").write_text("".join(lines))
    for log in (whole, tmp_path / "only.log"):
        run = tmp_path / "x.run"
        assert cli("import", log, "-o", run, "--force").returncode == 0
        done = cli("explain", run, "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["verdict"]["kind"] == "unknown"
        assert "2 channels where 24 are usual" in found["verdict"]["sentence"]
    assert found["scaling_factor"] is None
    assert cli("explain", run).returncode == 0
    reported = cli("report", run, "-o", tmp_path / "r.html")
    assert "expected a run with times to draw" in reported.stderr


def test_sockets_on_a_host_with_infiniband_are_a_fallback(tmp_path: Path) -> None:
    log = a_log(
        tmp_path,
        "NET/IB : No device found.",
        "NET/Socket : Using [0]ib0:192.168.1.10<0>",
        "Using network Socket",
        *TWO_NODES,
        "Channel 00/02 :    0   1",
        "Channel 00/0 : 0[0] -> 8[0] [receive] via NET/Socket/0",
    )
    fallback = said_of(log)["nccl_socket_fallback"]
    assert "NET/Socket on a host with RDMA" in fallback
    assert "ib0 is InfiniBand" in fallback


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ("NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB ; OOB eth0:10.0.0.1<0>", "mlx5_0:1/IB"),
        ("NET/OFI Selected Provider is efa (found 4 nics)", "efa x4"),
        ("NET/Socket : Using [0]hsn0:10.0.0.1<0>", "hsn0 is Slingshot"),
    ],
)
def test_what_shows_that_a_host_has_rdma_is_said(tmp_path: Path, message: str, why: str) -> None:
    log = a_log(
        tmp_path,
        message,
        "NET/Socket : Using [0]eth0:10.0.0.1<0>",
        "Using network Socket",
        *TWO_NODES,
    )
    assert why in said_of(log)["nccl_socket_fallback"]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ("NCCL_IB_DISABLE set by environment to 1.", "NCCL_IB_DISABLE turns RDMA off"),
        ("NCCL_NET set by environment to Socket.", "NCCL_NET asks for sockets"),
        ("Failed to open libibverbs.so[.1]", "libibverbs could not be opened"),
        ("P2P plugin IBext_v8", "the plugin IBext_v8 was loaded, and not used"),
    ],
)
def test_what_is_no_sign_of_rdma_is_a_reason_and_no_fallback(
    tmp_path: Path, message: str, why: str
) -> None:
    log = a_log(tmp_path, message, "Using network Socket", *TWO_NODES)
    said = said_of(log)
    assert why in said["nccl_sockets"]
    assert "nccl_socket_fallback" not in said


def test_plugins_that_do_ib_or_sockets_by_another_name_are_told(tmp_path: Path) -> None:
    using = "NET/IBext : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB ; OOB eth0:10.0.0.3<0>"
    facts = facts_of(a_log(tmp_path, using, "Using network IBext"))
    assert (facts.nccl_adapters, facts.nccl_network) == ("mlx5_0:1/IB, mlx5_1:1/IB", "IBext")
    using = "NET/FastSocket : Using [0]eth1:10.0.0.3<0>"
    facts = facts_of(a_log(tmp_path, using, "Assigned NET plugin FastSocket to comm"))
    assert (facts.nccl_interfaces, facts.nccl_network) == ("eth1", "FastSocket")


def test_colours_of_a_terminal_do_not_matter(tmp_path: Path) -> None:
    plain = a_log(tmp_path, *TWO_NODES, "Using network Socket", "4 coll channels, 4 p2p channels")
    coloured = tmp_path / "coloured.log"
    lines = plain.read_text().splitlines()
    coloured.write_text("".join(f"\x1b[1;32m{line}\x1b[0m\n" for line in lines))
    assert facts_of(coloured) == facts_of(plain)
    assert facts_of(plain).nccl_network == "Socket"


def test_lines_without_their_beginning_are_read(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_text(
        "NCCL INFO Using network FastSocket\nNCCL INFO 12 coll channels, 0 nvls channels\n"
        "NCCL INFO comm 0x1 rank 0 nRanks 24 nNodes 3 localRanks 8 localRank 0 MNNVL 0\n"
    )
    facts = read(tmp_path / "x.log").facts
    assert (facts.nccl_channels, facts.workers) == (12, 24)
    assert said_of(tmp_path / "x.log")["nccl_network"] == "NCCL sends over FastSocket."


def test_a_communicator_of_one_rank_has_no_usual_channels(tmp_path: Path) -> None:
    said = said_of(
        a_log(
            tmp_path,
            "=== System : maxBw 5000.0 totalBw 0.0 ===",
            "Pattern 4, crossNic 0, nChannels 16, bw 40.0/40.0, type LOC/PIX, sameChannels 1",
            "32 coll channels, 0 nvls",
            "comm 0x1 rank 0 nranks 1 cudaDev 0 - Init COMPLETE",
        )
    )
    assert said == {}


def test_sockets_without_a_sign_of_rdma_are_no_fallback(tmp_path: Path) -> None:
    log = a_log(
        tmp_path,
        "NCCL_IB_DISABLE set by environment to 0.",
        "NET/IB : No device found.",
        "NET/Socket : Using [0]eth0:10.0.0.1<0>",
        "Using network Socket",
        *TWO_NODES,
    )
    said = said_of(log)
    assert "nccl_socket_fallback" not in said
    assert "TCP sockets over eth0" in said["nccl_sockets"]
    assert "found no adapter" in said["nccl_sockets"]


def test_on_one_host_the_network_does_not_matter(tmp_path: Path) -> None:
    log = a_log(
        tmp_path,
        "NET/Socket : Using [0]ib0:10.0.0.1<0>",
        "Using network Socket",
        "Channel 00/0 : 0[0] -> 1[1] via P2P/IPC",
        "comm 0x5 rank 0 nranks 2 cudaDev 0 busId 30 - Init COMPLETE",
    )
    assert "nccl_socket_fallback" not in said_of(log)


def test_version_2_4_names_no_network_and_numbers_rings_otherwise(tmp_path: Path) -> None:
    log = tmp_path / "old.log"
    log.write_text(
        "NCCL version 2.4.8+cuda10.1\n"
        "a:9:12 [0] NCCL INFO NET/Socket : Using [0]ib0:192.168.11.1<0>\n"
        "a:9:12 [0] NCCL INFO NET/Plugin : No plugin found (libnccl-net.so).\n"
        "a:9:12 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB ; OOB ib0:192.168.11.1<0>\n"
        "a:9:15 [0] NCCL INFO Channel 00 :    0   1   2   3\n"
        "a:9:15 [0] NCCL INFO Channel 01 :    0   3   2   1\n"
        "a:9:15 [0] NCCL INFO Ring 00 : 3 -> 0 [receive] via NET/IB/0\n"
        "a:9:15 [0] NCCL INFO Trees [0] 1->0->2/-1/-1 [1] -1->0->3/-1/-1\n"
        "a:9:15 [0] NCCL INFO comm 0x7f rank 0 nranks 4 cudaDev 0 nvmlDev 0 - Init COMPLETE\n"
    )
    facts = facts_of(log)
    assert facts.nccl_version == "NCCL 2.4.8+cuda10.1"
    assert facts.nccl_network == "IB"
    assert (facts.nccl_channels, facts.nccl_trees, facts.workers) == (2, 2, 4)
    assert facts.nccl_rings == "1 x 0 1 2 3, 1 x 0 3 2 1"
    assert "No path uses GPU Direct RDMA" in said_of(log)["nccl_without_gdr"]


def test_rccl_says_the_communicator_after_a_path(tmp_path: Path) -> None:
    log = tmp_path / "rccl.log"
    log.write_text(
        "RCCL version 2.18.3+hip5.7 HEAD:1234abc+\n"
        "g1:11:44 [0] NCCL INFO Using network IB\n"
        "g1:11:44 [0] NCCL INFO Channel 02/0 : 1[c6000] -> 4[c1000] [receive] via NET/IB/1/GDRDMA "
        "comm 0x95 nRanks 08\n"
        "g1:11:44 [0] NCCL INFO 16 coll channels, 0 nvls channels, 16 p2p channels\n"
        "g1:11:44 [0] NCCL INFO comm 0x95 rank 0 nranks 8 cudaDev 0 busId c1000 - Init COMPLETE\n"
    )
    facts = facts_of(log)
    assert facts.nccl_version == "RCCL 2.18.3+hip5.7"
    assert facts.nccl_paths == "1 x NET/IB/1/GDRDMA"
    assert (facts.nccl_channels, facts.workers) == (16, 8)


def test_launchers_words_and_ranks_within_a_line_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "all.log").write_text(
        "[1,26]<stdout>:ip-1:8716:9558 [2] NCCL INFO Using network AWS Libfabric\n"
        "n3:5:7 [1] NCCL INFO NCCL_DEBUG set by environment to INFO.\n"
        "3: n2:5:6 [0] NCCL INFO Using network AWS Libfabricn3:5:7 [1] NCCL INFO "
        "NCCL_MAX_NCHANNELS set by environment to 2.\n"
        "step 7 loss 0.1 n3:5:7 [1] NCCL INFO 2 coll channels, 0 nvls channels, 2 p2p channels\n"
        "[2026-11-21 10:00:00] n3:5:7 [1] NCCL INFO comm 0x1 rank 3 nranks 32 cudaDev 1 - "
        "Init COMPLETE\n"
    )
    facts = facts_of(tmp_path / "all.log")
    assert facts.nccl_network == "AWS Libfabric"
    assert (facts.nccl_channels, facts.workers, facts.nccl_nodes) == (2, 32, 3)
    assert "limited by NCCL_MAX_NCHANNELS=2" in said_of(tmp_path / "all.log")["nccl_few_channels"]


def test_a_limit_that_is_not_reached_limits_nothing(tmp_path: Path) -> None:
    said = said_of(
        a_log(
            tmp_path,
            "NCCL_MAX_NCHANNELS set by environment to 32.",
            "24 coll channels, 0 nvls",
            "comm 0x1 rank 0 nranks 8 cudaDev 0 - Init COMPLETE",
        )
    )
    assert set(said) == {"nccl_channels"}


def test_of_several_communicators_the_largest_is_the_jobs(tmp_path: Path) -> None:
    log = a_log(
        tmp_path,
        "2 coll channels, 0 nvls channels",
        "comm 0x1 rank 0 nranks 2 cudaDev 0 - Init COMPLETE",
        "16 coll channels, 0 nvls channels",
        "comm 0x2 rank 0 nranks 8 cudaDev 0 - Init COMPLETE",
    )
    assert (facts_of(log).nccl_channels, facts_of(log).workers) == (16, 8)


def test_each_communicator_has_widths_of_its_own(tmp_path: Path) -> None:
    wide = (
        "Pattern 4, crossNic 0, nChannels {}, bw 20.000000/20.000000, type {}/PIX, sameChannels 1"
    )
    small = (
        "=== System : maxBw 240.0 totalBw 240.0 ===",
        wide.format(12, "NVL"),
        "24 coll channels, 0 nvls",
        "comm 0x1 rank 0 nranks 8 cudaDev 0 - Init COMPLETE",
    )
    large = (
        "=== System : maxBw 20.0 totalBw 240.0 ===",
        wide.format(1, "NVL"),
        "2 coll channels, 0 nvls",
        "comm 0x2 rank 0 nranks 64 cudaDev 0 - Init COMPLETE",
    )
    for messages in ((*small, *large), (*large, *small)):
        said = said_of(a_log(tmp_path, "Using network IB", *messages))
        assert said["nccl_channels"] == "NCCL uses 2 channels."
    rings = (wide.format(1, "PHB") if "Pattern" in each else each for each in small)
    said = said_of(a_log(tmp_path, *rings))
    assert "by PHB and take 20 GB/s, where the widest path" in said["nccl_rings_leave_nvlink"]


def test_libfabric_over_tcp_is_sockets(tmp_path: Path) -> None:
    log = a_log(
        tmp_path,
        "NET/OFI Selected Provider is tcp (found 1 nics)",
        "Using network Libfabric",
        *TWO_NODES,
    )
    assert facts_of(log).nccl_network == "Socket (libfabric's tcp)"
    assert "libfabric was loaded, and chose TCP" in said_of(log)["nccl_socket_fallback"]


def test_ranks_that_differ_are_named(tmp_path: Path) -> None:
    one = a_log(tmp_path, "NCCL version 2.20.5+cuda12.4", "Using network IB", name="a")
    other = a_log(tmp_path, "NCCL version 2.18.1+cuda12.1", "Using network Socket", host="n2")
    said = said_of(one, other)
    assert "some ranks use NET/Socket" in said["nccl_socket_fallback"]
    assert "2.20.5" in said["nccl_versions"]
    assert "2.18.1" in said["nccl_versions"]


def test_devices_that_meet_in_shared_memory_are_named(tmp_path: Path) -> None:
    log = a_log(
        tmp_path,
        "NCCL_P2P_DISABLE set by environment to 1.",
        "Channel 00 : 0[17000] -> 1[65000] via SHM/direct/direct",
        "comm 0x5 rank 0 nranks 2 cudaDev 0 busId 30 - Init COMPLETE",
    )
    assert "as NCCL_P2P_DISABLE=1 asks" in said_of(log)["nccl_shared_memory"]


def test_logs_are_added_to_the_traces_of_the_job(shared_data: Path, tmp_path: Path) -> None:
    trace = shared_data / "kineto/nccl_data_rank0_of_2.json.gz"
    (tmp_path / "logs").mkdir()
    a_log(tmp_path / "logs", "NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB e:1<0>", name="h1.42")
    a_log(tmp_path / "logs", "Using network Socket", *TWO_NODES, host="n2", name="h2.42")
    run = read(trace, tmp_path / "logs")
    alone = read(trace)
    assert len(run.spans) == len(alone.spans)
    assert run.facts.workers == alone.facts.workers
    assert run.facts.nccl_network == "Socket"
    [fallback] = [each for each in fullwire.explain(run).evidence if "fallback" in each.key]
    assert "NET/Socket on a host with RDMA: it found mlx5_0:1/RoCE" in sentence(fallback)


def test_files_of_two_formats_do_not_make_one_run(shared_data: Path) -> None:
    with pytest.raises(UsageError, match=r"profiler traces \(.*\) and tables of nccl-tests \("):
        read(
            shared_data / "kineto/nccl_data_rank0_of_2.json.gz",
            shared_data / "nccl/nccl_reduce.log",
        )


def test_each_folder_of_real_logs_opens_with_one_command(shared_data: Path) -> None:
    run = read(shared_data / "nccl")
    assert set(run.collectives.op.tolist()) == {
        "allreduce",
        "allgather",
        "reducescatter",
        "alltoall",
        "broadcast",
        "reduce",
    }
    assert run.facts.workers == 8
    assert run.facts.nccl_channels == 2  # the fewest of the two jobs in it
    assert fullwire.explain(run).verdict.kind == "unknown"


def test_a_log_that_ends_while_a_communicator_is_set_up_says_so(tmp_path: Path) -> None:
    log = a_log(tmp_path, "comm 0x1 rank 3 nranks 32 cudaDev 1 - Init START", "Channel 00/08 : 0 1")
    facts, problems = log_facts([log])
    assert (facts.workers, facts.nccl_channels) == (32, 8)
    assert problems == ("NCCL's log ends while 1 of its communicators were being set up",)


def test_a_log_without_a_whole_line_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_text("n1:7:8 [0] NCC")
    with pytest.raises(DamagedInput, match="a text of an unknown tool: not read"):
        read(tmp_path / "x.log")
    with pytest.raises(DamagedInput, match="none is whole"):
        read(tmp_path / "x.log", format="nccl-log")


MESSAGES = st.sampled_from(
    [
        "Using network ",
        "NET/IB : Using [0]mlx5_0:1/IB",
        "Channel 00/24 :  0  1",
        "Trees [0] 1->0->-1",
        "24 coll channels, ",
        "comm 0x1 rank 0 nranks 2 - Init COMPLETE",
        "NCCL_X set by environment ",
        "Pattern 4, crossNic 0, nChannels 1, bw 20.0/20.0, type",
        "=== System : maxBw 240.0 totalBw ",
        "GPU/0-1 :GPU/0-2 (1/240.0/NVL) ",
        "Channel 00 : 0[1] -> 1[2] via ",
        "NCCL version 2.4.8",
        "\n",
        "n1:7:8 [0] NCCL INFO ",
        "n1:7:9 [1] x.cc:4 NCCL WARN ",
        ", ",
        "=",
        "\udcff",
        "\x00",
    ]
)


@given(st.lists(MESSAGES | st.text(max_size=8), max_size=40))
@cases(60)
def test_any_mixture_of_words_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str]
) -> None:
    path = tmp_path_factory.mktemp("log") / "x.log"
    path.write_bytes("".join(parts).encode(errors="surrogatepass"))
    facts, _ = log_facts([path])
    run = Run(provenance=Provenance(origin="imported", source="x"), facts=facts)
    for each in nccl_evidence(run):
        assert sentence(each).endswith(".")
