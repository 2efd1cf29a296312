"""Which parts of Fullwire work on this machine, and how to get the others: `fullwire doctor`.

Each look below yields a part or two. A look tries its part, if that is harmless. The looks make a
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
from typing import Any

from fullwire.errors import FullwireError, UsageError
from fullwire.findings import machine
from fullwire.findings.machine import Part, State
from fullwire.lab.description import describe
from fullwire.lab.emulated import available_bytes
from fullwire.lab.lab import Lab
from fullwire.recorder.launch import check_capturing
from fullwire.version import __version__
from fullwire.words import sentence, setting

_ROOT = Path("/")  # The root of /proc and /sys; tests use another place.
_TORCH_S = 120.0
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
    """The machine in a line, and every part of it that Fullwire can use."""

    fullwire: str
    python: str
    kernel: str
    processors: int
    memory_bytes: int
    parts: tuple[Part, ...]

    @property
    def checks(self) -> tuple[Check, ...]:
        """Return the rows: the parts in words."""
        return tuple(
            Check(
                name=part.name,
                state=part.state,
                seen=sentence(part),
                means=part.means,
                do="" if part.is_ok else setting(part),
            )
            for part in self.parts
        )

    def __getitem__(self, name: str) -> Check:
        """Return the check of this name."""
        for check in self.checks:
            if check.name == name:
                return check
        names = ", ".join(part.name for part in self.parts)
        raise UsageError(f"doctor: expected one of {names}, got {name!r}")


_LOOKS: list[Callable[[], Iterator[Part]]] = []


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
        parts=tuple(part for look in _LOOKS for part in look()),
    )


def _look(look: Callable[[], Iterator[Part]]) -> Callable[[], Iterator[Part]]:
    """Register a look at some parts; rows come in the order of this file."""
    _LOOKS.append(look)
    return look


@_look
def _native() -> Iterator[Part]:
    try:
        module = importlib.import_module("fullwire._native")
    except ImportError as error:
        yield machine.NoNativeModule(why=str(error))
    else:
        yield machine.NativeModule(file=Path(module.__file__ or "").name)


@_look
def _privileges() -> Iterator[Part]:
    yield machine.Privileges(
        user=os.geteuid(),
        is_root=os.geteuid() == 0,
        is_mapped=_text("proc/self/uid_map").split()[2:] not in ([], [_ALL_USERS]),
        capabilities=tuple(_capabilities()),
    )


@_look
def _lab() -> Iterator[Part]:
    try:
        with Lab(describe(workers=2, rate=["1Gbps"], latency="1ms")):
            pass
    except FullwireError as error:
        why, _, remedy = str(error).partition(": ")
        try:
            with Lab(describe(workers=2, rate=["1Gbps"])):
                pass
        except FullwireError as other:
            why, _, remedy = str(other).partition(": ")
            yield machine.NoLab(why=why, remedy=remedy)
        else:
            yield machine.LabWithoutLatency(why=why)
    else:
        yield machine.LabWorks()


@_look
def _packets() -> Iterator[Part]:
    try:
        check_capturing()
    except UsageError as error:
        yield machine.NoRightToCapture(remedy=str(error).partition("has not: ")[2])
    except OSError as error:
        yield machine.NoPacketSockets(why=error.strerror or str(error))
    else:
        yield machine.Captures()


@_look
def _counters() -> Iterator[Part]:
    """Check the files and sockets that the sampler reads beside a job."""
    missing = [name for name in ("proc/stat", "proc/meminfo") if not _text(name)]
    try:
        socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _DIAGNOSE_SOCKETS).close()
    except OSError:
        missing.append("sock_diag")
    yield machine.Counters(missing=tuple(missing))
    yield machine.RunDelay(is_here=len(_text("proc/self/schedstat").split()) == 3)


@_look
def _looking_into() -> Iterator[Part]:
    held = _capabilities()
    yield machine.OtherProcesses(
        scope=_text("proc/sys/kernel/yama/ptrace_scope") or "0", may_trace="CAP_SYS_PTRACE" in held
    )
    paranoid = _text("proc/sys/kernel/perf_event_paranoid")
    if paranoid:
        yield machine.PerfEvents(paranoid=int(paranoid), is_admin="CAP_SYS_ADMIN" in held)
    else:
        yield machine.NoPerfEvents()


@_look
def _clocks() -> Iterator[Part]:
    yield machine.ClockSource(
        source=_text("sys/devices/system/clocksource/clocksource0/current_clocksource")
    )
    # adjtimex(2): modes 0 asks and changes nothing. Its structure begins with 4 longs and an int.
    timex = (ctypes.c_long * 64)()
    status = ctypes.CDLL(None).adjtimex(ctypes.byref(timex))
    is_synchronized = status != -1 and not timex[5] & _UNSYNCHRONIZED
    yield machine.TimeOfDay(off_s=timex[3] * 1e-6 if is_synchronized else None)


@_look
def _network() -> Iterator[Part]:
    cards = []
    for device in sorted(_below("sys/class/net")):
        if (device / "device").exists() and _read(device / "operstate") in ("up", "unknown"):
            megabits = _read(device / "speed")  # 0 or -1 where nobody tells it
            rate_bps = int(megabits) * 1e6 if megabits.isdecimal() else 0.0
            cards.append(machine.Card(device=device.name, rate_bps=rate_bps or None))
    yield machine.NetworkCards(cards=tuple(cards))
    ports = (
        machine.RdmaPort(
            port=f"{adapter.name}/{port.name}", rate=_read(port / "rate").partition(" (")[0]
        )
        for adapter in sorted(_below("sys/class/infiniband"))
        for port in sorted((adapter / "ports").iterdir())
    )
    yield machine.RdmaPorts(ports=tuple(ports))


@_look
def _limits() -> Iterator[Part]:
    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    yield machine.OpenFiles(soft=soft, hard=hard)
    # The folder of this process's control group, if it is known (version 2).
    group = Path("sys/fs/cgroup", _text("proc/self/cgroup").rpartition("::")[2].strip("/"))
    most = {
        "the user's limit": resource.getrlimit(resource.RLIMIT_NPROC)[0],
        "kernel.threads-max": _number("proc/sys/kernel/threads-max"),
        "kernel.pid_max": _number("proc/sys/kernel/pid_max"),
        "pids.max of the container": _number(group / "pids.max"),
    }
    limits = [machine.Threads(most=count, limit=name) for name, count in most.items() if count >= 0]
    yield min(limits, key=lambda limit: limit.most, default=machine.ThreadsWithoutLimit())


@_look
def _memory() -> Iterator[Part]:
    yield machine.Memory(available_bytes=available_bytes(_ROOT))
    try:
        shared = shutil.disk_usage("/dev/shm")
    except OSError as error:
        yield machine.NoSharedMemory(why=error.strerror or str(error))
    else:
        yield machine.SharedMemory(free_bytes=shared.free, total_bytes=shared.total)
    place = Path.cwd()
    kind = machine.FreeSpace if os.access(place, os.W_OK) else machine.ReadOnlySpace
    yield kind(free_bytes=shutil.disk_usage(place).free, folder=str(place))


@_look
def _torch() -> Iterator[Part]:
    """Check torch in a separate process: unfit libraries of a GPU can end it."""
    told: dict[str, Any] | None = None
    if find_spec("torch") is None:
        yield machine.NoTorch()
    else:
        command = [sys.executable, "-c", _ASK_TORCH]
        try:
            asked = subprocess.run(
                command, capture_output=True, text=True, timeout=_TORCH_S, check=False
            )
        except subprocess.TimeoutExpired:
            yield machine.TorchIsSlow(limit_s=_TORCH_S)
        else:
            if asked.returncode == 0:
                told = json.loads(asked.stdout)
                yield machine.Torch(version=told["version"], backends=tuple(told["backends"]))
            else:
                yield machine.TorchFails(last_line=(asked.stderr.strip().splitlines() or [""])[-1])
    told = told or {}
    yield machine.Congestion(
        control=told.get("congestion") or _text("proc/sys/net/ipv4/tcp_congestion_control")
    )
    gpus = tuple(_gpu_names())
    if not gpus:
        yield machine.NoGpus()
    elif told:
        yield machine.Gpus(gpus=gpus, usable=told["gpus"])
    else:
        yield machine.GpusWithoutTorch(gpus=gpus)
    yield machine.Nccl(version=told["nccl"]) if told.get("nccl") else machine.NoNccl()


@_look
def _extras() -> Iterator[Part]:
    for kind in (machine.Pictures, machine.Ray):
        packages, absent = [], ""
        for package in kind.needs:
            try:
                packages.append(machine.Package(package=package, version=version(package)))
            except PackageNotFoundError:
                absent = absent or package
        yield kind(packages=tuple(packages), absent=absent)
    try:
        ctypes.CDLL("libcrypto.so.3")
    except OSError:
        yield machine.Encryption(is_here=False)
    else:
        yield machine.Encryption(is_here=True)


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
