"""Which parts of Fullwire work on this machine, and how to get the others: `fullwire doctor`.

Each check below gives a row or two. A check tries its part, if that is harmless. The checks make a
lab and take it down, open a packet socket, and load torch in a separate process. They leave the
machine unchanged, and send nothing.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeAlias

from fullwire.errors import FullwireError, UsageError
from fullwire.lab.description import describe
from fullwire.lab.emulated import available_bytes
from fullwire.lab.lab import Lab
from fullwire.recorder.launch import check_capturing
from fullwire.units import show_bytes, show_rate, show_time
from fullwire.version import __version__

State: TypeAlias = Literal["ok", "limited", "missing"]

_ROOT = Path("/")  # The root of /proc and /sys; tests use another place.
_TORCH_S = 120.0
_FEW_DESCRIPTORS, _FEW_THREADS = 1024, 512
_LITTLE_SPACE, _LITTLE_SHARED = 2**30, 2**27  # Docker gives /dev/shm 64 MiB
_LITTLE_MEMORY = 2**31
_FAST_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv")  # Read without the kernel.
_UNSYNCHRONIZED = 0x40  # STA_UNSYNC of adjtimex
_ALL_USERS = "4294967295"  # In the map of the machine's own user namespace.
_DIAGNOSE_SOCKETS = 4  # NETLINK_SOCK_DIAG
_CAPABILITIES = {12: "CAP_NET_ADMIN", 13: "CAP_NET_RAW", 19: "CAP_SYS_PTRACE", 21: "CAP_SYS_ADMIN"}
_ASK_TORCH = """
import json, torch, torch.distributed as dist
told = {"version": torch.__version__, "cuda": torch.version.cuda, "backends": [], "gpus": 0}
if dist.is_available():
    names = ("gloo", "nccl", "mpi", "ucc", "xccl", "fullwire")
    told["backends"] = [name for name in names if dist.is_backend_available(name)]
if torch.cuda.is_available():
    told["gpus"] = torch.cuda.device_count()
    if "nccl" in told["backends"]:
        told["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
from fullwire.transport.congestion import congestion_control
told["congestion"] = str(congestion_control())
print(json.dumps(told))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One row: the state of one part, its meaning, and a remedy if it is not ok."""

    name: str
    state: State
    seen: str
    means: str
    do: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """The machine in a line, and every check."""

    fullwire: str
    python: str
    kernel: str
    processors: int
    memory_bytes: int
    checks: tuple[Check, ...]

    def __getitem__(self, name: str) -> Check:
        """Return the check of this name."""
        for check in self.checks:
            if check.name == name:
                return check
        names = ", ".join(check.name for check in self.checks)
        raise UsageError(f"doctor: expected one of {names}, got {name!r}")


_CHECKS: list[Callable[[], Iterator[Check]]] = []


def doctor() -> Checkup:
    """Check this machine; each row is about one part that Fullwire can use.

    A row has its `state` (ok, limited, missing), the value `seen`, its meaning, and an action to
    `do`.

        fw.doctor()["lab"].state
        [check.name for check in fw.doctor().checks if check.state != "ok"]
    """
    return Checkup(
        fullwire=__version__,
        python=platform.python_version(),
        kernel=f"{platform.system()} {platform.release()} {platform.machine()}",
        processors=len(os.sched_getaffinity(0)),
        memory_bytes=1024 * int((_line("proc/meminfo", "MemTotal") or "0").split()[0]),
        checks=tuple(check for look in _CHECKS for check in look()),
    )


def _look(check: Callable[[], Iterator[Check]]) -> Callable[[], Iterator[Check]]:
    """Register a check; rows come in the order of this file."""
    _CHECKS.append(check)
    return check


def _check(
    name: str, *, is_ok: object, seen: str, means: str, do: str, otherwise: State = "limited"
) -> Check:
    """Return a row; a remedy stands only where the part is not ok."""
    if is_ok:
        return Check(name=name, state="ok", seen=seen, means=means)
    return Check(name=name, state=otherwise, seen=seen, means=means, do=do)


@_look
def _native() -> Iterator[Check]:
    seen, why = "", ""
    try:
        seen = Path(importlib.import_module("fullwire._native").__file__ or "").name
    except ImportError as error:
        why = str(error)
    yield _check(
        name="native module",
        is_ok=not why,
        seen=why or seen,
        means="captures, replays on described clusters and the transport need it",
        do="install a wheel for this Python and this processor: pip install --force-reinstall "
        "fullwire",
        otherwise="missing",
    )


@_look
def _privileges() -> Iterator[Check]:
    names = _capabilities()
    who = "root" if os.geteuid() == 0 else f"user {os.geteuid()}"
    if _text("proc/self/uid_map").split()[2:] not in ([], [_ALL_USERS]):
        who += " of a user namespace"
    yield Check(
        name="privileges",
        state="ok",
        seen=f"{who}, {', '.join(names)}" if names else f"{who}, no capability of a network",
        means="no command needs root; the rows below say what a right would add",
    )


@_look
def _lab() -> Iterator[Check]:
    means = "fullwire lab, study and bench transport make a cluster inside this machine"
    try:
        with Lab(describe(workers=2, rate=["1Gbps"], latency="1ms")):
            pass
    except FullwireError as error:
        try:
            with Lab(describe(workers=2, rate=["1Gbps"])):
                pass
        except FullwireError:
            reason, _, remedy = str(error).partition(": ")
            yield Check(name="lab", state="missing", seen=reason, means=means, do=remedy)
        else:
            yield Check(
                name="lab",
                state="limited",
                seen=f"namespaces, veth, tbf; {str(error).partition(':')[0]}",
                means=means,
                do="modprobe sch_netem, if the kernel has it; else do without latency and loss",
            )
        return
    yield Check(name="lab", state="ok", seen="namespaces, veth, tbf, netem", means=means)


@_look
def _packets() -> Iterator[Check]:
    seen, do = "packet sockets open", ""
    try:
        check_capturing()
    except UsageError as error:
        seen, do = "no right to capture (CAP_NET_RAW)", str(error).partition("has not: ")[2]
    except OSError as error:
        seen, do = f"no packet sockets: {error.strerror}", "use a kernel with CONFIG_PACKET"
    yield _check(
        name="packets",
        is_ok=not do,
        seen=seen,
        means="record --packets keeps the headers of what the job sends",
        do=do,
        otherwise="missing",
    )


@_look
def _counters() -> Iterator[Check]:
    """Check the files and sockets that the sampler reads beside a job."""
    missing = [name for name in ("proc/stat", "proc/meminfo") if not _text(name)]
    try:
        socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _DIAGNOSE_SOCKETS).close()
    except OSError:
        missing.append("sock_diag")
    yield _check(
        name="samples",
        is_ok=not missing,
        seen=f"not here: {', '.join(missing)}"
        if missing
        else "processors, memory, TCP connections",
        means="a recording tells how busy the host was, and what each connection did",
        do="use a kernel of its own: some sandboxes (gVisor) leave these out",
    )
    has_delay = len(_text("proc/self/schedstat").split()) == 3
    yield _check(
        name="run delay",
        is_ok=has_delay,
        seen="/proc/self/schedstat" if has_delay else "no /proc/self/schedstat",
        means="tells a rank that waits for a processor from one that computes",
        do="use a kernel with CONFIG_SCHED_INFO",
        otherwise="missing",
    )


@_look
def _looking_into() -> Iterator[Check]:
    scope = _text("proc/sys/kernel/yama/ptrace_scope") or "0"
    is_open = scope == "0" or "CAP_SYS_PTRACE" in _capabilities()
    yield _check(
        name="other processes",
        is_ok=is_open,
        seen=f"kernel.yama.ptrace_scope={scope}",
        means="whether a debugger or a profiler may look into a job that runs already",
        do="sysctl -w kernel.yama.ptrace_scope=0, or be root",
    )
    paranoid = _text("proc/sys/kernel/perf_event_paranoid")
    is_allowed = paranoid != "" and (int(paranoid) <= 2 or "CAP_SYS_ADMIN" in _capabilities())
    yield _check(
        name="perf_event",
        is_ok=is_allowed,
        seen=f"kernel.perf_event_paranoid={paranoid}" if paranoid else "not in this kernel",
        means="for perf beside a job; Fullwire itself counts no such events",
        do="sysctl -w kernel.perf_event_paranoid=2" if paranoid else "nothing, without perf",
        otherwise="limited" if paranoid else "missing",
    )


@_look
def _clocks() -> Iterator[Check]:
    source = _text("sys/devices/system/clocksource/clocksource0/current_clocksource")
    is_fast = source.startswith(_FAST_CLOCKS)
    yield _check(
        name="clock",
        is_ok=is_fast,
        seen=source or "the kernel does not tell its clock source",
        means="every recorded event reads the clock; a slow one adds to what recording costs",
        do="boot with clocksource=tsc, if the processor's is stable",
    )
    # adjtimex(2): modes 0 asks and changes nothing. Its structure begins with 4 longs and an int.
    timex = (ctypes.c_long * 64)()
    status = ctypes.CDLL(None).adjtimex(ctypes.byref(timex))
    is_synchronized = status != -1 and not timex[5] & _UNSYNCHRONIZED
    yield _check(
        name="time of day",
        is_ok=is_synchronized,
        seen=f"synchronized, off by at most {show_time(timex[3] * 1e-6)}"
        if is_synchronized
        else "nothing synchronizes it",
        means="hosts are brought to one clock by their collectives; without any, by this",
        do="run chrony or systemd-timesyncd on every host",
    )


@_look
def _network() -> Iterator[Check]:
    rates = {}
    for device in sorted(_below("sys/class/net")):
        if (device / "device").exists() and _read(device / "operstate") in ("up", "unknown"):
            megabits = _read(device / "speed")
            rates[device.name] = int(megabits) * 1e6 if megabits.isdecimal() else 0.0
    shown = [f"{name} {show_rate(rate) if rate else '?'}" for name, rate in rates.items()]
    yield _check(
        name="network cards",
        is_ok=rates and all(rates.values()),
        seen=", ".join(shown) or "none; only virtual interfaces",
        means="explain compares what was sent with the line rate of the card",
        do="name the rate: explain --line-rate 10Gbps",
    )
    ports = {
        f"{adapter.name}/{port.name}": _read(port / "rate").partition(" (")[0]
        for adapter in sorted(_below("sys/class/infiniband"))
        for port in sorted((adapter / "ports").iterdir())
    }
    yield _check(
        name="RDMA",
        is_ok=ports,
        seen=", ".join(f"{name} {rate}" for name, rate in ports.items()) or "no adapter",
        means="record counts what RDMA ports send",
        do="nothing, if there is no such card; else load its driver, as mlx5_ib",
        otherwise="missing",
    )


@_look
def _limits() -> Iterator[Check]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_low = 0 <= soft < _FEW_DESCRIPTORS
    yield _check(
        name="file descriptors",
        is_ok=not is_low,
        seen=f"{_count(soft)}, at most {_count(hard)}",
        means="a rank of the transport needs up to 8 for each other rank",
        do=f"ulimit -n {_count(hard) if soft < hard else 65536}",
    )
    # The folder of this process's control group, if it is known (version 2).
    group = Path("sys/fs/cgroup", _text("proc/self/cgroup").rpartition("::")[2].strip("/"))
    most = {
        "the user's limit": resource.getrlimit(resource.RLIMIT_NPROC)[0],
        "kernel.threads-max": _number("proc/sys/kernel/threads-max"),
        "kernel.pid_max": _number("proc/sys/kernel/pid_max"),
        "pids.max of the container": _number(group / "pids.max"),
    }
    what, threads = min(
        ((name, count) for name, count in most.items() if count >= 0),
        key=lambda pair: pair[1],
        default=("", -1),
    )
    is_low = 0 <= threads < _FEW_THREADS
    yield _check(
        name="threads",
        is_ok=not is_low,
        seen=f"{threads:,} ({what})" if what else "no limit",
        means="torch starts dozens of threads a rank",
        do=f"raise {what}: ulimit -u, docker run --pids-limit or sysctl",
    )


@_look
def _memory() -> Iterator[Check]:
    available = available_bytes(_ROOT)
    yield _check(
        name="memory",
        is_ok=available >= _LITTLE_MEMORY,
        seen=f"{show_bytes(available)} available",
        means="a rank of torch takes 0.4 GB before its model",
        do="end other programs, or use fewer --workers",
    )
    seen, do, is_there = "", "mount -t tmpfs tmpfs /dev/shm", True
    try:
        shared = shutil.disk_usage("/dev/shm")
    except OSError as error:
        seen, is_there = error.strerror or "", False
    else:
        seen = f"{show_bytes(shared.free)} free of {show_bytes(shared.total)}"
        do = "docker run --shm-size=8g, or --ipc=host" if shared.free < _LITTLE_SHARED else ""
    yield _check(
        name="/dev/shm",
        is_ok=not do,
        seen=seen,
        means="data loaders and NCCL exchange data through it",
        do=do,
        otherwise="limited" if is_there else "missing",
    )
    place = Path.cwd()
    free = shutil.disk_usage(place).free
    is_writable = os.access(place, os.W_OK)
    yield _check(
        name="free space",
        is_ok=is_writable and free >= _LITTLE_SPACE,
        seen=f"{show_bytes(free)} in {place}{'' if is_writable else ', which is read-only'}",
        means="record writes its run there, some 10 MB for 1,000 steps of a rank",
        do="name another place: record -o",
        otherwise="limited" if is_writable else "missing",
    )


@_look
def _torch() -> Iterator[Check]:
    """Check torch in a separate process: unfit libraries of a GPU can end it."""
    told, seen, do = None, "", "make `python -c 'import torch'` work first"
    is_installed = find_spec("torch") is not None
    if not is_installed:
        seen = "not in Fullwire's Python"
        do = "pip install 'fullwire[torch]', or install Fullwire into the job's environment"
    else:
        command = [sys.executable, "-c", _ASK_TORCH]
        try:
            asked = subprocess.run(
                command, capture_output=True, text=True, timeout=_TORCH_S, check=False
            )
        except subprocess.TimeoutExpired:
            seen = f"it did not load within {_TORCH_S:.0f} s"
        else:
            seen = (asked.stderr.strip().splitlines() or ["it ended without a word"])[-1]
            told = json.loads(asked.stdout) if asked.returncode == 0 else None
    if told is not None:
        backends = told["backends"]
        seen = f"{told['version']}, backends {', '.join(backends) or 'none'}"
        is_whole = {"gloo", "fullwire"} <= set(backends)
        do = "" if is_whole else "install torch 2.6 or newer with torch.distributed"
    yield _check(
        name="torch",
        is_ok=not do,
        seen=seen,
        means="recorded jobs bring their own; study, bench and the transport use this one",
        do=do,
        otherwise="limited" if is_installed else "missing",
    )
    control = told["congestion"] if told else _text("proc/sys/net/ipv4/tcp_congestion_control")
    is_paced = control.startswith("bbr")
    yield _check(
        name="congestion control",
        is_ok=not is_paced,
        seen=control or "the kernel does not tell it",
        means="the transport sends with it; BBR costs it processor time on fast links",
        do="sysctl -w net.ipv4.tcp_allowed_congestion_control='reno cubic'",
    )
    names = _gpu_names()
    do = ""
    if not names:
        do = "nothing, if there is none: jobs on processors are recorded"
    elif told is None:
        do = "install torch to train on them"
    elif told["gpus"] < len(names):
        do = f"torch sees {told['gpus']}: take one built for this driver; see CUDA_VISIBLE_DEVICES"
    yield _check(
        name="GPUs",
        is_ok=not do,
        seen=", ".join(names) or "no NVIDIA driver, or no GPU",
        means="their use and memory are sampled beside a job",
        do=do,
        otherwise="limited" if names else "missing",
    )
    nccl = told.get("nccl") if told else None
    yield _check(
        name="NCCL",
        is_ok=nccl,
        seen=nccl or "torch has none that it can use here",
        means="collectives between GPUs; --packets and NCCL logs tell more of them",
        do="nothing, without GPUs; else a torch that was built for CUDA",
        otherwise="missing",
    )


@_look
def _extras() -> Iterator[Check]:
    for name, packages, means, extra in (
        (
            "pictures",
            ("altair", "vl-convert-python"),
            "--plot and study draw with them",
            "pictures",
        ),
        ("Ray", ("ray",), "--on ray shares imports and searches among machines", "ray"),
    ):
        do = ""
        try:
            seen = ", ".join(f"{package} {version(package)}" for package in packages)
        except PackageNotFoundError as error:
            seen, do = f"{error.name} is not installed", f"pip install 'fullwire[{extra}]'"
        yield _check(name=name, is_ok=not do, seen=seen, means=means, do=do, otherwise="missing")
    do = ""
    try:
        ctypes.CDLL("libcrypto.so.3")
    except OSError:
        do = "sudo apt install libssl3"
    yield _check(
        name="encryption",
        is_ok=not do,
        seen="no libcrypto.so.3" if do else "OpenSSL 3",
        means="FULLWIRE_ENCRYPT=1 encrypts what ranks send each other",
        do=do,
        otherwise="missing",
    )


def _gpu_names() -> list[str]:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if library.nvmlInit_v2() != 0:
        return []
    try:
        count, names = ctypes.c_uint(), []
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for number in range(count.value):
            device, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
            library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device))
            library.nvmlDeviceGetName(device, name, len(name))
            names.append(name.value.decode(errors="replace"))
        return names
    finally:
        library.nvmlShutdown()


def _capabilities() -> list[str]:
    held = int(_line("proc/self/status", "CapEff") or "0", 16)
    return [name for bit, name in _CAPABILITIES.items() if held >> bit & 1]


def _line(path: str, name: str) -> str:
    """Return the text of a file after NAME: at the beginning of a line."""
    for line in _text(path).splitlines():
        if line.startswith(f"{name}:"):
            return line.partition(":")[2].strip()
    return ""


def _number(path: str | Path) -> int:
    """Return the number in a file; -1 for a missing number or limit."""
    text = _text(path)
    return int(text) if text.isdecimal() else -1


def _count(limit: int) -> str:
    return "no limit" if limit == resource.RLIM_INFINITY else f"{limit}"


def _below(path: str) -> Iterator[Path]:
    place = _ROOT / path
    return place.iterdir() if place.is_dir() else iter(())


def _text(path: str | Path) -> str:
    return _read(_ROOT / path)


def _read(path: Path) -> str:
    """Return a file's text, without the space around it; "" for an unreadable file."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
