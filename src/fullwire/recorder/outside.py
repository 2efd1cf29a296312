"""Look at a running job from outside, through the kernel's counters of its ranks.

Nothing enters the job. `/proc` tells how long each thread of a rank ran, and how long it was ready
and had no processor. The kernel tells what each TCP connection of a rank sent and when. Where
connections may not be asked for, the counters of the interfaces serve.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fullwire.recorder.jobs_here import JobHere, RankHere, inode_of, opened_by
from fullwire.units import visible

_SPY_S, _MOST_OF_A_LINE = 5.0, 120
_LIBRARY = re.compile(r"site-packages|/lib(64)?/python|^<")
_SYNCHRONIZES = re.compile(r"/torch/(distributed|autograd)/")
LEAST_S, MOST_S = 0.005, 0.1  # between looks
SHARE_OF_A_PROCESSOR = 0.01  # that looking may take
_STAYS_BUSY = 5  # of those looks, after the last time that a thread ran or a connection carried
_AGAIN_S = 1.0  # between looks for new threads and connections
_MOST_THREADS = 64  # of a rank, the busiest
_COMMUNICATE = re.compile(r"gloo|nccl|fullwire|ucx|mpi|ibv|rdma", re.ASCII)

_DIAG, _DUMP, _REQUEST, _BY_FAMILY, _DONE, _ERROR = 4, 0x300, 0x1, 20, 3, 2
_OPEN = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 8  # established, or closing on one side
_INFO = 2  # INET_DIAG_INFO
_DIAG_BYTES, _INODE_AT = 72, 68  # of inet_diag_msg
_OF_SEVERAL = 2  # NLM_F_MULTI
_HEADER, _INODE, _ATTRIBUTE = struct.Struct("=IHH"), struct.Struct("=I"), struct.Struct("=HH")
_QUIET, _QUIET_AT = struct.Struct("=I4xI"), 44  # tcpi_last_data_sent, tcpi_last_data_recv
_TOTALS, _TOTALS_AT = struct.Struct("=I16xQQ"), 100  # retransmits, bytes acked and received
_INFO_BYTES = 136  # up to there
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class Counted:
    """The kernel's counters of a rank since the first look, in nanoseconds and bytes."""

    time_ns: int = 0
    computed_ns: int = 0  # by threads that do not communicate
    delayed_ns: int = 0  # how long those were ready and had no processor
    communicated_ns: int = 0  # by the others
    sent_bytes: int = 0
    received_bytes: int = 0
    retransmits: int = 0
    quiet_s: float = math.inf  # since a connection last sent or received

    def __iter__(self) -> Iterator[float]:
        return (getattr(self, name) for name in self.__slots__)


@dataclass(frozen=True, slots=True)
class Waits:
    """The state of a process's main thread, as the kernel tells it."""

    state: str  # R runs, S sleeps, D waits for a device, T was stopped, Z ended
    place: str  # the function of the kernel in which it waits; empty if that is closed to us
    line: str = ""  # of the script, "dataset.py:88 (load)"; empty without py-spy
    is_in_collective: bool = False  # the stack shows torch.distributed or a backward pass

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
        return what + (f" at {self.line}" if self.line else "")


def waits_of(pid: int) -> Waits:
    """Look at what the main thread of a process waits for; py-spy tells its line, if it is here."""
    state = place = ""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        state = file.read().rpartition(")")[2].split()[0]
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan") as file:
        place = file.read().partition(".")[0].strip("0")
    frames = _python_frames(pid)
    own = [frame for frame in frames if not _LIBRARY.search(frame["filename"])]
    line = f"{own[0]['short_filename']}:{own[0]['line']} ({own[0]['name']})" if own else ""
    state = {"t": "T", "I": "S", "X": "Z"}.get(state, state or "Z")
    synchronizes = any(_SYNCHRONIZES.search(frame["filename"]) for frame in frames)
    return Waits(state, place, visible(line[:_MOST_OF_A_LINE]), synchronizes)


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


def _main_thread(pid: int) -> int:
    """Return the number of a process in its own container, which py-spy gives its main thread."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return pid


class Watcher:
    """Looks at the counters of ranks again and again, within a share of a processor."""

    def __init__(self, job: JobHere) -> None:
        self.job = job
        self.looks: dict[int, list[tuple[float, ...]]] = {rank.rank: [] for rank in job.ranks}
        self.took_s = 0.0  # processor time of looking
        self._threads = {rank.rank: _Threads(rank.pid) for rank in job.ranks}
        together: dict[int, list[RankHere]] = {}
        for rank in job.ranks:
            together.setdefault(rank.network, []).append(rank)
        self._networks = [_network_of(ranks) for ranks in together.values()]
        self._counted = {rank.rank: Counted() for rank in job.ranks}
        self._look_again_s = 0.0
        self._usual_s = 0.0  # processor time of a look

    @property
    def without_connections(self) -> tuple[int, ...]:
        """Return the ranks whose bytes are those of all interfaces that they see."""
        return tuple(
            rank.rank
            for network in self._networks
            if isinstance(network, _Interfaces)
            for rank in network.ranks
        )

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *_: object) -> None:
        for threads in self._threads.values():
            threads.close()
        for network in self._networks:
            network.close()

    def watch(self, seconds: float) -> bool:
        """Look for some seconds; return whether every rank still runs."""
        end_s = time.monotonic() + seconds
        while (now_s := time.monotonic()) < end_s:
            before_s = time.thread_time()
            is_new = now_s >= self._look_again_s
            if is_new:
                self._look_again_s = now_s + _AGAIN_S
            for network in self._networks:
                network.count(self._counted, is_new=is_new)
            for rank, threads in self._threads.items():
                if not threads.count(self._counted[rank], is_new=is_new):
                    return False
                self.looks[rank].append(tuple(self._counted[rank]))
            took_s = time.thread_time() - before_s
            self.took_s += took_s
            if not is_new:  # the cost of new connections comes once a second
                self._usual_s += (took_s - self._usual_s) / 8 if self._usual_s else took_s
            between_s = min(max(self._usual_s / SHARE_OF_A_PROCESSOR, LEAST_S), MOST_S)
            time.sleep(max(0.0, min(now_s + between_s, end_s) - time.monotonic()))
        return True


class _Threads:
    """The threads of a process, with the time that each ran and waited for a processor."""

    def __init__(self, pid: int) -> None:
        self._folder = f"/proc/{pid}/task"
        self._files: dict[str, tuple[int, bool]] = {}
        self._last: dict[str, tuple[int, int]] = {}
        self._then_ns: dict[str, int] = {}  # at the last look at all of them
        self._busy: dict[str, int] = {}  # what ran since: for how many more looks at all

    def close(self) -> None:
        for file, _ in self._files.values():
            os.close(file)
        self._files.clear()

    def count(self, counted: Counted, *, is_new: bool) -> bool:
        """Add what threads did since the last look; return whether any is left."""
        if is_new:
            self._find()
        read = self._files if is_new else self._busy
        counted.time_ns = time.time_ns()
        for thread in list(read):
            file, communicates = self._files[thread]
            try:
                run, delay, _ = os.pread(file, 64, 0).split()
            except (OSError, ValueError):  # it ended
                os.close(self._files.pop(thread)[0])
                self._busy.pop(thread, None)
                continue
            ran_ns, delayed_ns = int(run), int(delay)
            before = self._last.get(thread, (ran_ns, delayed_ns))
            self._last[thread] = ran_ns, delayed_ns
            if is_new:
                if ran_ns > self._then_ns.get(thread, ran_ns):
                    self._busy[thread] = _STAYS_BUSY
                self._then_ns[thread] = ran_ns
            if communicates:
                counted.communicated_ns += ran_ns - before[0]
            else:
                counted.computed_ns += ran_ns - before[0]
                counted.delayed_ns += delayed_ns - before[1]
        if is_new:
            self._busy = {thread: left - 1 for thread, left in self._busy.items() if left > 1}
        return bool(self._files)

    def _find(self) -> None:
        """Open the threads that are new."""
        try:
            names = os.listdir(self._folder)
        except OSError:
            names = []
        for name in names:
            if name in self._files or len(self._files) >= _MOST_THREADS:
                continue
            with contextlib.suppress(OSError):
                with open(f"{self._folder}/{name}/comm") as file:
                    communicates = _COMMUNICATE.search(file.read()) is not None
                opened = os.open(f"{self._folder}/{name}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
                self._files[name] = opened, communicates


class _Connections:
    """The TCP connections of ranks that share a network, as the kernel tells of them.

    The kernel looks through all places of a large table for a list of connections (some ms). So
    only those that carried something are asked for in between, each by its name.
    """

    def __init__(self, ranks: Sequence[RankHere], asked: socket.socket) -> None:
        self.ranks = ranks
        self._asked = asked
        self._owners: dict[int, int] = {}  # rank, by the inode of a socket
        self._names: dict[int, bytes] = {}  # what to ask for
        self._last: dict[int, tuple[int, int, int]] = {}
        self._quiet_s: dict[int, float] = {}
        self._then: dict[int, int] = {}  # bytes at the last look at all of them
        self._busy: dict[int, int] = {}  # what carried bytes since, as for threads

    def close(self) -> None:
        self._asked.close()

    def count(self, counted: dict[int, Counted], *, is_new: bool) -> None:
        """Add what connections carried since the last look."""
        if is_new:
            self._owners = {
                inode_of(target): rank.rank
                for rank in self.ranks
                for _, target in opened_by(rank.pid)
                if target.startswith("socket:")
            }
            requests = [
                _request(family, bytes(48), _REQUEST | _DUMP)
                for family in (socket.AF_INET, socket.AF_INET6)
            ]
        else:
            asked = b"".join(self._names[inode] for inode in self._busy)
            requests = [asked] if asked else []
        for inode, info in self._told(requests, 1 if is_new else len(self._busy)):
            rank = self._owners.get(inode)
            if rank is None:
                continue
            sent_ms, received_ms = _QUIET.unpack_from(info, _QUIET_AT)
            again, sent, received = _TOTALS.unpack_from(info, _TOTALS_AT)
            before = self._last.get(inode)
            self._last[inode] = again, sent, received
            if sent or received:
                self._quiet_s[inode] = min(sent_ms, received_ms) / 1000
            if before is None:
                continue
            of_rank = counted[rank]
            of_rank.retransmits += again - before[0]
            of_rank.sent_bytes += sent - before[1]
            of_rank.received_bytes += received - before[2]
            if is_new:
                if sent + received > self._then.get(inode, 0):
                    self._busy[inode] = _STAYS_BUSY
                self._then[inode] = sent + received
        if is_new:
            self._busy = {inode: left - 1 for inode, left in self._busy.items() if left > 1}
        quiet_s = {rank.rank: math.inf for rank in self.ranks}
        for inode, since_s in self._quiet_s.items():
            if (rank := self._owners.get(inode)) is not None:
                quiet_s[rank] = min(quiet_s[rank], since_s)
        for rank, since_s in quiet_s.items():
            counted[rank].quiet_s = since_s

    def _told(self, requests: Sequence[bytes], answers: int) -> Iterator[tuple[int, memoryview]]:
        """Ask; yield the inode and the `tcp_info` of each connection that the kernel tells of."""
        for request in requests:
            self._asked.send(request)
            left = answers  # a list ends with a word of its own; a connection that is gone, too
            while left:
                answer = memoryview(self._asked.recv(1 << 17))
                while len(answer) >= 16:
                    length, kind, flags = _HEADER.unpack_from(answer)
                    if kind in (_DONE, _ERROR) or length < 16:
                        left -= 1
                        break
                    left -= not flags & _OF_SEVERAL
                    inode = _INODE.unpack_from(answer, 16 + _INODE_AT)[0]
                    self._names[inode] = _request(answer[16], bytes(answer[20:68]), _REQUEST)
                    at = 16 + _DIAG_BYTES
                    while at + 4 <= length:
                        size, attribute = _ATTRIBUTE.unpack_from(answer, at)
                        if attribute == _INFO and size >= 4 + _INFO_BYTES:
                            yield inode, answer[at + 4 : at + size]
                        at += max(size + 3 & ~3, 4)
                    answer = answer[length + 3 & ~3 :]


def _request(family: int, name: bytes, flags: int) -> bytes:
    """Ask for one connection by its name in the kernel, or for all."""
    body = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, _OPEN) + name
    return struct.pack("=IHHII", 16 + len(body), _BY_FAMILY, flags, 0, 0) + body


class _Interfaces:
    """The counters of the interfaces that ranks see, where their connections are closed to us."""

    def __init__(self, ranks: Sequence[RankHere]) -> None:
        self.ranks = ranks
        self._last: tuple[int, int] | None = None

    def close(self) -> None:
        pass

    def count(self, counted: dict[int, Counted], *, is_new: bool) -> None:
        """Add what the interfaces carried since the last look, to each rank an equal share."""
        del is_new
        sent = received = 0
        with contextlib.suppress(OSError), open(f"/proc/{self.ranks[0].pid}/net/dev") as file:
            for line in file.readlines()[2:]:
                name, _, numbers = line.partition(":")
                fields = numbers.split()
                if name.strip() != "lo" or len(self.ranks) > 1:
                    received += int(fields[0])
                    sent += int(fields[8])
        before = self._last or (sent, received)
        self._last = sent, received
        for rank in self.ranks:
            counted[rank.rank].sent_bytes += (sent - before[0]) // len(self.ranks)
            counted[rank.rank].received_bytes += (received - before[1]) // len(self.ranks)


def _network_of(ranks: Sequence[RankHere]) -> _Connections | _Interfaces:
    """Ask for connections in the ranks' network, or read its interfaces where that is closed."""
    opened: list[socket.socket] = []

    def open_there() -> None:
        with contextlib.suppress(OSError):
            if ranks[0].network != inode_of(os.readlink("/proc/thread-self/ns/net")):
                with open(f"/proc/{ranks[0].pid}/ns/net") as network:
                    if _libc.setns(network.fileno(), _NEW_NETWORK):
                        return
            asked = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _DIAG)
            asked.settimeout(1)
            opened.append(asked)

    thread = threading.Thread(target=open_there)  # it alone enters the network, and ends there
    thread.start()
    thread.join()
    return _Connections(ranks, opened[0]) if opened else _Interfaces(ranks)
