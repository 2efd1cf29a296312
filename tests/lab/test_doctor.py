"""The rows of `fullwire doctor` about this machine, a restricted one, and made-up ones."""

from __future__ import annotations

import errno
import json
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import pytest

import fullwire as fw
import fullwire.answers.doctor as checks
from fullwire.errors import UsageError
from tests.conftest import Cli
from tests.lab.test_lab import finished, needs_namespaces

STATES = {"ok", "limited", "missing"}
# The job's Python has torch; Fullwire's own Python lacks torch and the packages for pictures.
WITHOUT = (
    "import sys; sys.modules['torch'] = sys.modules['vl_convert'] = None; "
    "sys.argv = ['fullwire', 'doctor', '--json']; from fullwire.cli import main; main()"
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
    rows = {row.name: row for look in looks for row in look()}
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
    [packets] = checks._packets()
    assert packets.state == "missing"
    assert packets.seen == "no packet sockets: Address family not supported by protocol"
    assert packets.do


def test_a_torch_that_does_not_load_is_told_with_its_last_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "_ASK_TORCH", "raise OSError('libcudart.so.13: cannot open')")
    monkeypatch.setattr(checks, "find_spec", lambda name: name)
    torch, _, gpus, nccl = checks._torch()
    assert (torch.state, torch.seen) == ("limited", "OSError: libcudart.so.13: cannot open")
    assert nccl.state == "missing"
    assert gpus.means


def test_a_row_is_found_by_its_name() -> None:
    row = checks.Check(name="clock", state="ok", seen="tsc", means="fast")
    found = checks.Checkup(
        fullwire="0", python="3", kernel="Linux", processors=1, memory_bytes=1, checks=(row,)
    )
    assert found["clock"] is row
    with pytest.raises(UsageError, match="expected one of clock, got 'clocks'"):
        found["clocks"]
