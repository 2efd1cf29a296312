"""The rows of `fullwire doctor` about this machine, a restricted one, and made-up ones."""

from __future__ import annotations

import errno
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

import fullwire as fw
import fullwire.answers.doctor as checks
from fullwire.errors import UsageError
from fullwire.findings import machine
from tests.conftest import Cli
from tests.lab.test_lab import finished, needs_namespaces

Look = Callable[[], Iterator[machine.Part]]
STATES = {"ok", "limited", "missing"}
# The job's Python has torch; Fullwire's own Python lacks torch and the packages for pictures.
WITHOUT = (
    "import sys; sys.modules['torch'] = sys.modules['vl_convert'] = None; "
    "sys.argv = ['fullwire', 'doctor', '--json']; from fullwire.cli import main; main()"
)


def checkup(*looks: Look) -> fw.Checkup:
    parts = tuple(part for look in looks for part in look())
    return fw.Checkup(
        fullwire="0", python="3", kernel="Linux", processors=1, memory_bytes=1, parts=parts
    )


@needs_namespaces
def test_each_row_says_what_is_here_what_it_means_and_what_to_do(cli: Cli) -> None:
    done = cli("doctor", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    rows = {row["name"]: row for row in told["checks"]}
    assert len(rows) == len(told["checks"])
    assert {"lab", "packets", "clock", "network cards", "RDMA", "GPUs", "torch", "Ray"} <= set(rows)
    assert all(row["seen"] and row["means"] and row["state"] in STATES for row in rows.values())
    assert all(bool(row["do"]) == (row["state"] != "ok") for row in rows.values())
    assert rows["native module"]["state"] == "ok"
    # "limited" if netem is missing: the lab then adds no latency
    assert rows["lab"]["state"] in ("ok", "limited")
    assert told["fullwire"] == fw.__version__
    assert told["processors"] >= 1


def test_where_namespaces_rights_and_packages_are_missing_it_says_so_and_how_to_get_them() -> None:
    if shutil.which("unshare") is None or finished(["unshare", "-r", "true"]).returncode:
        pytest.skip("closing namespaces for a test needs unshare and user namespaces")
    close = 'echo 0 > /proc/sys/user/max_net_namespaces && ulimit -n 256 && exec "$@"'
    done = finished(["unshare", "-r", "sh", "-c", close, "sh", sys.executable, "-c", WITHOUT])
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["checks"]}
    assert rows["lab"]["state"] == "missing"
    assert "user.max_net_namespaces=0 forbids" in rows["lab"]["seen"]
    assert "sysctl -w user.max_net_namespaces=10000" in rows["lab"]["do"]
    assert rows["packets"]["state"] == "missing"
    assert "setcap cap_net_raw+ep" in rows["packets"]["do"]
    assert rows["file descriptors"]["state"] == "limited"
    assert rows["file descriptors"]["seen"].startswith("256, ")
    assert "root of a user namespace" in rows["privileges"]["seen"]
    assert rows["torch"]["state"] == "missing"
    assert "pip install 'fullwire[torch]'" in rows["torch"]["do"]


def test_a_made_up_host_with_fast_cards_and_a_slow_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = "sys/devices/system/clocksource/clocksource0/current_clocksource"
    files = {
        "sys/class/net/eth0/device/vendor": "",
        "sys/class/net/eth0/operstate": "up",
        "sys/class/net/eth0/speed": "25000",
        "sys/class/net/veth1/operstate": "up",
        "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
        "proc/sys/kernel/yama/ptrace_scope": "1",
        "proc/self/status": "Name:\tpython\nCapEff:\t0000000000000000",
        "proc/self/cgroup": "0::/job",
        "sys/fs/cgroup/job/pids.max": "100",
        "proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB",
        "sys/fs/cgroup/job/memory.max": "max",  # the group around it has a limit
        "sys/fs/cgroup/memory.max": "3000000000",
        "sys/fs/cgroup/memory.current": "2000000000",
        sources: "hpet",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(checks, "_ROOT", tmp_path)
    looks = (checks._network, checks._clocks, checks._looking_into, checks._limits, checks._memory)
    rows = {row.name: row for row in checkup(*looks).checks}
    assert (rows["network cards"].state, rows["network cards"].seen) == ("ok", "eth0 25 Gbps")
    assert (rows["RDMA"].state, rows["RDMA"].seen) == ("ok", "mlx5_0/1 400 Gb/sec")
    assert (rows["clock"].state, rows["clock"].seen) == ("limited", "hpet")
    assert (rows["memory"].state, rows["memory"].seen) == ("limited", "1 GB available")
    assert rows["other processes"].state == "limited"
    assert rows["perf_event"].state == "missing"
    assert rows["threads"].seen == "100 (pids.max of the container)"
    assert "--pids-limit" in rows["threads"].do
    assert all(bool(row.do) == (row.state != "ok") for row in rows.values())


def test_a_kernel_without_packet_sockets_is_said_to_have_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(family: int, *_: int) -> NoReturn:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr("fullwire.recorder.launch.socket.socket", refuse)
    [packets] = checkup(checks._packets).checks
    assert packets.state == "missing"
    assert packets.seen == "no packet sockets: Address family not supported by protocol"
    assert packets.do


def test_a_torch_that_does_not_load_is_told_with_its_last_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "_ASK_TORCH", "raise OSError('libcudart.so.13: cannot open')")
    monkeypatch.setattr(checks, "find_spec", lambda name: name)
    torch, _, gpus, nccl = checkup(checks._torch).checks
    assert (torch.state, torch.seen) == ("limited", "OSError: libcudart.so.13: cannot open")
    assert nccl.state == "missing"
    assert gpus.means


def test_a_row_is_found_by_its_name() -> None:
    found = checkup(lambda: iter([machine.ClockSource(source="tsc")]))
    assert (found["clock"].state, found["clock"].seen, found["clock"].do) == ("ok", "tsc", "")
    with pytest.raises(UsageError, match="expected one of clock, got 'clocks'"):
        found["clocks"]


@pytest.mark.parametrize(
    ("part", "state", "seen"),
    [
        (
            machine.Privileges(
                user=0, is_root=True, is_mapped=False, capabilities=("CAP_NET_RAW",)
            ),
            "ok",
            "root, CAP_NET_RAW",
        ),
        (
            machine.Privileges(user=1000, is_root=False, is_mapped=True, capabilities=()),
            "ok",
            "user 1000 of a user namespace, no capability of a network",
        ),
        (machine.LabWithoutLatency(why="no netem"), "limited", "namespaces, veth, tbf; no netem"),
        (machine.Counters(missing=("sock_diag",)), "limited", "not here: sock_diag"),
        (machine.RunDelay(is_here=False), "missing", "no /proc/self/schedstat"),
        (machine.PerfEvents(paranoid=4, is_admin=True), "ok", "kernel.perf_event_paranoid=4"),
        (machine.TimeOfDay(off_s=None), "limited", "nothing synchronizes it"),
        (
            machine.NetworkCards(cards=(machine.Card(device="eth0", rate_bps=None),)),
            "limited",
            "eth0 ?",
        ),
        (machine.RdmaPorts(ports=()), "missing", "no adapter"),
        (
            machine.OpenFiles(soft=None, hard=None),
            "ok",
            "no limit, at most no limit",
        ),
        (machine.Torch(version="2.6", backends=()), "limited", "2.6, backends none"),
        (machine.TorchFails(last_line=""), "limited", "it ended without a word"),
        (machine.Gpus(gpus=("H100", "H100"), usable=1), "limited", "H100, H100"),
        (machine.Ray(packages=(), absent="ray"), "missing", "ray is not installed"),
    ],
    ids=lambda value: value.key if isinstance(value, machine.Part) else "",
)
def test_a_part_has_its_state_and_its_words(part: machine.Part, state: str, seen: str) -> None:
    [check] = checkup(lambda: iter([part])).checks
    assert (check.state, check.seen) == (state, seen)
    assert check.means
    assert bool(check.do) == (state != "ok")


def test_a_remedy_names_its_figures() -> None:
    low = machine.OpenFiles(soft=256, hard=4096)
    gpus = machine.Gpus(gpus=("H100", "H100"), usable=1)
    few = machine.Threads(most=100, limit="pids.max of the container")
    remedies = [check.do for check in checkup(lambda: iter([low, gpus, few])).checks]
    assert remedies[0] == "ulimit -n 4096"
    assert remedies[1].startswith("torch sees 1: ")
    assert remedies[2].startswith("raise pids.max of the container: ")
