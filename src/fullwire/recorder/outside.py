"""Look at a running job from outside, through the kernel's counters of its ranks.

Nothing enters the job. `/proc` tells how long each thread of a rank ran, and how long it was ready
and had no processor. The kernel tells what each TCP connection of a rank sent and when. Where
connections may not be asked for, the counters of the interfaces serve.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import json
import math
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fullwire.recorder.jobs_here import JobHere, inode_of, opened_by
from fullwire.recorder.sampler import rdma_ports
from fullwire.units import visible

_SPY_S, _MOST_OF_A_LINE = 5.0, 120
_OWN = re.escape(os.path.dirname(os.path.dirname(__file__)))  # the recorder's hooks in a job
_LIBRARY = re.compile(rf"site-packages|/lib(64)?/python|^<|^{_OWN}/")
_SYNCHRONIZES = re.compile(r"/torch/(distributed|autograd)/")
_LOADS = re.compile(r"/torch/utils/data/")
LEAST_S, MOST_S = 0.0025, 0.1  # between looks
SHARE_OF_A_PROCESSOR = 0.01  # that looking may take
_AGAIN_S = 1.0  # between looks for new threads and connections
_MOST_THREADS = 64  # of a rank
_COUNTS = 13  # of a minute, where a window comes each 5 s
_MOST_TURNS = 600  # whose work of processors is kept
_GPU_LOOKS, _MOST_RANKS_OF_A_GPU = 60, 128
_SM_UTILIZATION, _MOST_METRICS = 2, 512  # NVML_GPM_METRIC_SM_UTIL, and more than it has
_KEPT_BYTES = 64 << 20  # of looks; older ones are forgotten
_COMMUNICATE = re.compile(r"gloo|nccl|fullwire|ucx|mpi|ibv|rdma", re.ASCII)

_DIAG = 4  # NETLINK_SOCK_DIAG
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_FLAGS_OF, _ADDRESS_OF = 0x8913, 0x8915  # SIOCGIFFLAGS, SIOCGIFADDR
_UP_AND_RUNNING = 0x41  # IFF_UP, IFF_RUNNING
_libc = ctypes.CDLL(None, use_errno=True)


# What a look notes of a rank, as native/sampling/rank_counters.hpp has it: nanoseconds and bytes.
TIME, COMPUTED, DELAYED, COMMUNICATED, SENT, RECEIVED, RETRANSMITS, QUIET_S = range(8)
# SENDING: the time in which connections had bytes not yet acknowledged, added up. ROUND_TRIPS:
# the smoothed time of a round trip, for each byte that was acknowledged.
SENDING, LIMITED_BY_RECEIVER, LIMITED_BY_BUFFER, ROUND_TRIPS = range(8, 12)
# ELSEWHERE: the time in which the main thread slept and waited for no other rank. Until the kernel
# tells, it is not a number. UNCLEAR: the time in which it may have waited for another rank.
ELSEWHERE, UNCLEAR, COLUMNS = range(12, 15)


@dataclass(frozen=True, slots=True)
class Waits:
    """The state of a process's main thread, as the kernel tells it."""

    state: str  # R runs, S sleeps, D waits for a device, T was stopped, Z ended
    place: str  # the function of the kernel in which it waits; empty if that is closed to us
    line: str = ""  # of the script, "dataset.py:88 (load)"; empty without py-spy
    is_in_collective: bool = False  # the stack shows torch.distributed or a backward pass
    link_down: str = ""  # the interface of its connections, if that is down
    is_loading: bool = False  # the stack shows PyTorch's loader of data

    @property
    def for_other_threads(self) -> bool:
        """Return whether it waits for a lock, as a rank does that waits for a collective."""
        return self.state == "S" and "futex" in self.place

    def __str__(self) -> str:
        """Say it in a few words."""
        what = {
            "R": "its main thread runs",
            "D": "its main thread waits for a disk or another device",
            "T": "it was stopped by a signal or a debugger",
            "Z": "it has ended",
        }.get(self.state, "its main thread sleeps")
        what += f" (kernel: {self.place})" if self.place else ""
        what += f" at {self.line}" if self.line else ""
        return what + (f", and its interface {self.link_down} is down" if self.link_down else "")


def waits_of(pid: int) -> Waits:
    """Look at what the main thread of a process waits for; py-spy tells its line, if it is here."""
    state = ""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        state = file.read().rpartition(")")[2].split()[0]
    place, frames = _sleeps_in(pid), _python_frames(pid)
    if _sleeps_in(pid) != place:
        frames = []  # the stack is of another moment
    own = [frame for frame in frames if not _LIBRARY.search(frame["filename"])]
    line = f"{own[0]['short_filename']}:{own[0]['line']} ({own[0]['name']})" if own else ""
    state = {"t": "T", "I": "S", "X": "Z"}.get(state, state or "Z")
    synchronizes = any(_SYNCHRONIZES.search(frame["filename"]) for frame in frames)
    loads = any(_LOADS.search(frame["filename"]) for frame in frames)
    line = visible(line[:_MOST_OF_A_LINE])
    return Waits(state, place, line, synchronizes, _interface_down(pid), loads)


def _sleeps_in(pid: int) -> str:
    """Return the function of the kernel in which a main thread sleeps; empty if none is told."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan") as file:
        return file.read().partition(".")[0].strip("0")
    return ""


def _interface_down(pid: int) -> str:
    """Return the interface of a process's connections that is down or has no carrier, or ""."""
    own = {inode_of(target) for _, target in opened_by(pid) if target.startswith("socket:")}
    addresses = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/net/{name}") as file:
            for words in map(str.split, list(file)[1:]):
                if int(words[9]) in own:  # of an address of IPv6 the last word, where IPv4 stands
                    addresses.add(bytes.fromhex(words[1].partition(":")[0])[-4:][::-1])
    found: list[str] = []

    def look() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            for _, name in socket.if_nameindex():
                request = struct.pack("16s24x", name.encode())
                with contextlib.suppress(OSError):  # it has no address of IPv4
                    address = fcntl.ioctl(asking, _ADDRESS_OF, request)[20:24]
                    [flags] = struct.unpack("16xH", fcntl.ioctl(asking, _FLAGS_OF, request)[:18])
                    if address in addresses and flags & _UP_AND_RUNNING != _UP_AND_RUNNING:
                        found.append(name)

    _in_network_of(pid, look)
    return visible(found[0]) if found else ""


def _in_network_of(pid: int, do: Callable[[], None]) -> None:
    """Do something in the network of a process, unless that is closed to us."""

    def enter() -> None:
        with contextlib.suppress(OSError):
            there = os.readlink(f"/proc/{pid}/ns/net")
            if there != os.readlink("/proc/thread-self/ns/net"):
                with open(f"/proc/{pid}/ns/net") as network:
                    if _libc.setns(network.fileno(), _NEW_NETWORK):
                        return
            do()

    thread = threading.Thread(target=enter)  # it alone enters the network, and ends there
    thread.start()
    thread.join()


def _python_frames(pid: int) -> list[dict[str, Any]]:
    """Return the stack of a process's main thread, innermost first; empty if nothing tells it."""
    places = (os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath))
    spy = shutil.which("py-spy", path=os.pathsep.join(places)) or "py-spy"
    command = [spy, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    try:
        threads = json.loads(subprocess.run(command, capture_output=True, timeout=_SPY_S).stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return []  # there is no py-spy, the process has ended, or we may not read its memory
    main = _main_thread(pid)
    return next((thread["frames"] for thread in threads if thread["os_thread_id"] == main), [])


def _work_of_processors() -> list[float]:
    """Return the time in ns, and for how many seconds each processor of this host has worked."""
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    row = [float(time.time_ns())]
    with open("/proc/stat") as file:
        for line in file:
            if line.startswith("cpu") and line[3].isdigit():
                user, nice, system, _, _, *others = map(int, line.split()[1:9])
                row.append((user + nice + system + sum(others)) * tick_s)
    return row


def _main_thread(pid: int) -> int:
    """Return the number of a process in its own container, which py-spy gives its main thread."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return pid


class _NvmlProcess(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("memory_bytes", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class _NvmlUse(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _NvmlMetric(ctypes.Structure):
    _fields_ = [
        ("number", ctypes.c_uint),
        ("status", ctypes.c_int),
        ("value", ctypes.c_double),
        ("words", ctypes.c_void_p * 3),
    ]


class _NvmlMetrics(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint),
        ("count", ctypes.c_uint),
        ("before", ctypes.c_void_p),
        ("now", ctypes.c_void_p),
        ("metrics", _NvmlMetric * _MOST_METRICS),
    ]


class _NvmlSupport(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint), ("is_supported", ctypes.c_uint)]


@dataclass(frozen=True, slots=True)
class GpuUse:
    """What NVML tells of the GPUs of a process."""

    busy: float  # share of the time in which a kernel ran
    pcie_bps: float  # both ways
    sm_active: float | None = None  # mean share of the processors that worked; since Hopper


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What the kernel counts of a process beside its threads and connections."""

    memory_bytes: float  # in use now
    read_bytes_s: float  # from disks, a second
    faults_s: float  # pages that had to come from a disk, a second


class _ProcessCounts:
    """Reads these counts of some processes now and then, and keeps the latest ones."""

    def __init__(self, pids: Collection[int]) -> None:
        self._read = {pid: deque[tuple[float, int, int, int]](maxlen=_COUNTS) for pid in pids}

    def look(self) -> None:
        """Read the counts of each process that still runs and may be read."""
        for pid, rows in self._read.items():
            with contextlib.suppress(OSError):
                with open(f"/proc/{pid}/stat") as file:
                    stat = file.read().rpartition(")")[2].split()
                with open(f"/proc/{pid}/io") as file:
                    told = dict(line.split(": ") for line in file)
                memory_bytes = int(stat[21]) * os.sysconf("SC_PAGE_SIZE")
                read = int(told["read_bytes"]), int(stat[9])
                rows.append((time.monotonic(), *read, memory_bytes))

    def uses(self) -> dict[int, ProcessUse]:
        """Return what each process used since the first look that is kept."""
        found = {}
        for pid, rows in self._read.items():
            if len(rows) > 1:
                first_s, first_bytes, first_faults, _ = rows[0]
                last_s, last_bytes, last_faults, memory_bytes = rows[-1]
                lasted_s = last_s - first_s
                found[pid] = ProcessUse(
                    float(memory_bytes),
                    (last_bytes - first_bytes) / lasted_s,
                    (last_faults - first_faults) / lasted_s,
                )
        return found


class Gpus:
    """Asks the driver's library about the GPUs of some processes, once a second, beside the looks.

    This was written without a GPU: NVML's own page of each call is its source.
    """

    def __init__(self, pids: Collection[int]) -> None:
        self._pids = set(pids)
        self._seen: dict[int, deque[GpuUse]] = {pid: deque(maxlen=_GPU_LOOKS) for pid in pids}
        self._ended = threading.Event()
        # Two samples of each device, the latest one first; none where it does not take them.
        self._samples: dict[int, tuple[ctypes.c_void_p, ctypes.c_void_p] | None] = {}
        self._library: Any = None
        if not pids:
            return
        with contextlib.suppress(OSError):
            self._library = ctypes.CDLL("libnvidia-ml.so.1")
        if self._library is not None and self._library.nvmlInit_v2() == 0:
            threading.Thread(target=self._look_on, daemon=True).start()

    def _look_on(self) -> None:
        while not self._ended.wait(_AGAIN_S):
            self.look()
        for sample in itertools.chain.from_iterable(filter(None, self._samples.values())):
            self._library.nvmlGpmSampleFree(sample)
        self._library.nvmlShutdown()

    def look(self) -> None:
        """Ask once. Reading PCIe takes the driver 20 ms a direction."""
        nvml, count = self._library, ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        found: dict[int, list[GpuUse]] = {}
        for number in range(count.value):
            device, use = ctypes.c_void_p(), _NvmlUse()
            processes, length = (_NvmlProcess * _MOST_RANKS_OF_A_GPU)(), ctypes.c_uint()
            length.value = len(processes)
            nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device))
            told = nvml.nvmlDeviceGetComputeRunningProcesses_v3(
                device, ctypes.byref(length), processes
            )
            own = {each.pid for each in processes[: length.value]} & self._pids if not told else ()
            if not own or nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(use)):
                continue
            kilobytes_s = 0
            for direction in (0, 1):
                value = ctypes.c_uint()
                if nvml.nvmlDeviceGetPcieThroughput(device, direction, ctypes.byref(value)) == 0:
                    kilobytes_s += value.value
            active = self._sm_active(number, device)
            for pid in own:
                found.setdefault(pid, []).append(GpuUse(use.gpu / 100, kilobytes_s * 8e3, active))
        for pid, uses in found.items():
            self._seen[pid].append(_mean_use(uses))

    def _sm_active(self, number: int, device: ctypes.c_void_p) -> float | None:
        """Return the mean share of a device's processors that worked since the last question."""
        nvml = self._library
        if number not in self._samples:
            new, support = (ctypes.c_void_p(), ctypes.c_void_p()), _NvmlSupport(1)
            takes = (
                hasattr(nvml, "nvmlGpmMetricsGet")  # older drivers have no such call
                and nvml.nvmlGpmQueryDeviceSupport(device, ctypes.byref(support)) == 0
                and support.is_supported
                and not any(nvml.nvmlGpmSampleAlloc(ctypes.byref(each)) for each in new)
                and nvml.nvmlGpmSampleGet(device, new[0]) == 0
            )
            self._samples[number] = new if takes else None
            return None
        samples = self._samples[number]
        if samples is None or nvml.nvmlGpmSampleGet(device, samples[1]):
            return None
        before, now = samples
        self._samples[number] = now, before
        asked = _NvmlMetrics(1, 1, before, now)
        asked.metrics[0].number = _SM_UTILIZATION
        told, metric = nvml.nvmlGpmMetricsGet(ctypes.byref(asked)), asked.metrics[0]
        if told or metric.status or not math.isfinite(metric.value):
            return None
        return float(metric.value) / 100

    def uses(self) -> Mapping[int, GpuUse]:
        """Return the mean of the latest looks, by process; empty where NVML tells nothing."""
        return {pid: _mean_use([*uses]) for pid, uses in self._seen.items() if uses}

    def close(self) -> None:
        """Look no more."""
        self._ended.set()


def _mean_use(uses: Sequence[GpuUse]) -> GpuUse:
    count = len(uses)
    active = [each.sm_active for each in uses if each.sm_active is not None]
    return GpuUse(
        sum(each.busy for each in uses) / count,
        sum(each.pcie_bps for each in uses) / count,
        sum(active) / len(active) if active else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedHost:
    """A host that was asked for ranks of a job, and why it is not watched."""

    host: str
    ranks: tuple[int, ...] = ()
    problem: str = ""  # a sentence without its stop; empty where it is watched
    clock_offset_s: float = 0.0  # ahead of the watcher's clock; its times are already put right
    clock_uncertainty_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """The looks at each rank of a job, a row each, with the columns above."""

    job: JobHere
    by_rank: Mapping[int, NDArray[np.float64]]
    took_s: float  # processor time of looking
    seconds: float  # from the first to now
    hosts: tuple[WatchedHost, ...] = ()  # empty: this one alone
    without_connections: tuple[int, ...] = ()  # their bytes are those of all interfaces they see
    gpus: Mapping[int, GpuUse] = field(default_factory=dict)  # by rank
    uses: Mapping[int, ProcessUse] = field(default_factory=dict)  # by rank
    # Rows of the time in ns and how long each processor of this host had worked; none of others.
    processors: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 1)))
    # What ranks of other hosts wait for: some ranks, or all.
    ask: Callable[[Collection[int] | None], Mapping[int, Waits]] | None = None

    def waits(self, ranks: Collection[int] | None = None) -> Mapping[int, Waits]:
        """Look at what each rank waits for, now, or some ranks; a lost host tells of none."""
        if self.ask is not None:
            return self.ask(ranks)
        asked = (each for each in self.job.ranks if ranks is None or each.rank in ranks)
        return {each.rank: waits_of(each.pid) for each in asked}

    def latest(self, seconds: float) -> Looks:
        """Return those of the last seconds."""
        if seconds >= self.seconds:
            return self
        kept = {
            rank: rows[rows[:, TIME] >= rows[-1, TIME] - seconds * 1e9] if len(rows) else rows
            for rank, rows in self.by_rank.items()
        }
        took_s, worked = self.took_s * seconds / self.seconds, self.processors
        if len(worked):
            worked = worked[worked[:, TIME] >= worked[-1, TIME] - seconds * 1e9]
        return replace(self, by_rank=kept, took_s=took_s, seconds=seconds, processors=worked)


class Watcher:
    """Looks at the counters of ranks again and again, within a share of a processor."""

    def __init__(self, job: JobHere, keeps_s: float = math.inf) -> None:
        from fullwire._native import RankCounters

        self.job = job
        self._counters = RankCounters(len(job.ranks))
        self._begun_s = time.monotonic()
        self._keeps_s = keeps_s  # older looks are forgotten
        self._looks = {each.rank: np.zeros((0, COLUMNS)) for each in job.ranks}
        self._threads: list[set[str]] = [set() for _ in job.ranks]
        self._opened: list[tuple[int, int]] = [(0, 0) for _ in job.ranks]
        self._processors: deque[list[float]] = deque(maxlen=_MOST_TURNS)
        self._networks: list[list[int]] = []  # places of ranks whose connections may be asked for
        self._without_connections: list[int] = []
        self._gpus = Gpus([each.pid for each in job.ranks if each.uses_gpu])
        self._counts = _ProcessCounts([each.pid for each in job.ranks])
        self._counts.look()
        together: dict[int, list[int]] = {}
        for place, each in enumerate(job.ranks):
            together.setdefault(each.network, []).append(place)
        for places in together.values():
            self._enter_network(places)
        # Gloo and NCCL have threads of their own for that.
        polls = job.backend not in ("gloo", "nccl")
        for place, each in enumerate(job.ranks):
            with contextlib.suppress(OSError):
                file = os.open(f"/proc/{each.pid}/wchan", os.O_RDONLY | os.O_CLOEXEC)
                self._counters.add_main_thread(place, file, polls)
        self._open_ports([place for place, each in enumerate(job.ranks) if each.uses_rdma])

    @property
    def seconds(self) -> float:
        """Return how long it has watched."""
        return time.monotonic() - self._begun_s

    @property
    def looks(self) -> Looks:
        """Return the looks so far; the oldest are forgotten where they are too many."""
        gpus, uses = self._gpus.uses(), self._counts.uses()
        return Looks(
            job=self.job,
            by_rank=dict(self._looks),
            took_s=self._counters.took_s,
            seconds=self.seconds,
            without_connections=tuple(
                self.job.ranks[place].rank for place in self._without_connections
            ),
            processors=np.array(self._processors),
            gpus={rank.rank: gpus[rank.pid] for rank in self.job.ranks if rank.pid in gpus},
            uses={rank.rank: uses[rank.pid] for rank in self.job.ranks if rank.pid in uses},
        )

    def close(self) -> None:
        """Ask the GPUs no more. Files close with it."""
        self._gpus.close()

    def watch(self, seconds: float) -> bool:
        """Look for some seconds; return whether every rank still runs."""
        end_s = time.monotonic() + seconds
        try:
            while (left_s := end_s - time.monotonic()) > 0:
                if not self._find():
                    return False
                worked = _work_of_processors()
                if self._processors and len(worked) != len(self._processors[-1]):
                    self._processors.clear()  # a processor was switched on or off
                self._processors.append(worked)
                turn_s = min(left_s, _AGAIN_S)
                if self._counters.watch(turn_s, SHARE_OF_A_PROCESSOR, LEAST_S, MOST_S) >= 0:
                    return False
            return True
        finally:
            self._counts.look()
            new = self._counters.take().reshape(-1, len(self.job.ranks), COLUMNS)
            most = _KEPT_BYTES // (8 * COLUMNS * len(self.job.ranks))
            for place, rank in enumerate(self._looks):
                rows = np.concatenate([self._looks[rank], new[:, place]])[-most:]
                if len(rows) and np.isfinite(self._keeps_s):
                    rows = rows[rows[:, TIME] >= rows[-1, TIME] - self._keeps_s * 1e9]
                self._looks[rank] = rows

    def _find(self) -> bool:
        """Find threads and connections that are new; return whether every rank has a thread."""
        changed = False
        for place, each in enumerate(self.job.ranks):
            folder = f"/proc/{each.pid}/task"
            try:
                # The kernel counts threads in the links of one folder, open files in the size of
                # the other (since 6.2). So most looks need not go through them.
                threads, files = os.stat(folder).st_nlink, os.stat(f"/proc/{each.pid}/fd").st_size
            except OSError:
                return False
            before = self._opened[place]
            self._opened[place] = threads, files
            if threads != before[0]:
                self._find_threads(place, folder)
            changed |= files != before[1] or not files
        if changed:
            for number, places in enumerate(self._networks):
                owners = [
                    (inode_of(target), place)
                    for place in places
                    for _, target in opened_by(self.job.ranks[place].pid)
                    if target.startswith("socket:")
                ]
                self._counters.set_owners(number, owners)
        return True

    def _find_threads(self, place: int, folder: str) -> None:
        names = set(os.listdir(folder))
        known = self._threads[place] & names
        for name in sorted(names - known, key=int)[: _MOST_THREADS - len(known)]:
            with contextlib.suppress(OSError):
                with open(f"{folder}/{name}/comm") as file:
                    communicates = _COMMUNICATE.search(file.read()) is not None
                opened = os.open(f"{folder}/{name}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
                self._counters.add_thread(place, opened, communicates)
                known.add(name)
        self._threads[place] = known

    def _enter_network(self, places: list[int]) -> None:
        """Ask for connections in the ranks' network, or read its interfaces where it is closed."""
        rank = self.job.ranks[places[0]]
        opened: list[int] = []

        def open_there() -> None:
            kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
            opened.append(socket.socket(socket.AF_NETLINK, kind, _DIAG).detach())

        _in_network_of(rank.pid, open_there)
        if opened:
            self._counters.add_network(opened[0])
            self._networks.append(places)
            return
        self._without_connections += places
        with contextlib.suppress(OSError):
            file = os.open(f"/proc/{rank.pid}/net/dev", os.O_RDONLY | os.O_CLOEXEC)
            self._counters.add_interfaces(file, places, len(places) > 1)

    def _open_ports(self, places: list[int]) -> None:
        """Read the adapters of this host for ranks that use RDMA: no counter is a process's own."""
        files = []
        for port in rdma_ports().values() if places else ():
            with contextlib.suppress(OSError):
                sent = os.open(f"{port}/counters/port_xmit_data", os.O_RDONLY | os.O_CLOEXEC)
                received = os.open(f"{port}/counters/port_rcv_data", os.O_RDONLY | os.O_CLOEXEC)
                files.append((sent, received))
        if files:
            self._counters.add_ports(files, places)
