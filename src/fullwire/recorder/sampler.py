"""The process that samples a host while a job runs on it; the loop itself is native.

    python sampler.py DIRECTORY [--packets] COMMAND...

This process becomes the command, with a sampler beside it. With --packets, a second process
captures the headers of all packets. The file is run by its path. It loads only the standard library
and the native part, so the job waits for it some 30 ms. The sampler listens on no network, and ends
with the command. If several samplers are started on a host, one samples. The others stand by, in
case the first one's command ends before theirs. With --packets, the job begins only once packets
are being captured.

The sampler's file is like a journal (inside/journal.py): a header, then definitions, and samples in
the format of native/sampling/sample_file.hpp. A capture is a pcapng file, and its name shows
whether it is still being written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

SUFFIX = ".samples"
CAPTURE_SUFFIX, CAPTURING_SUFFIX = ".pcapng", ".capturing"
SOCKET_VARIABLE = "FULLWIRE_PACKET_SOCKET"  # open packet sockets, from a parent that may open them
MOST_INTERFACES = 16
_ADAPTERS = "/sys/class/infiniband"
_HEADER_BYTES = 512  # this and the three states are those of inside/journal.py
_RUNNING, _ENDED, _FAILED = "running", "ended", "failed"
_DIRECTORY_VARIABLE = "FULLWIRE_RECORD_INTO"  # The same as in inside/__init__.py.
_ENTERED = "entered"  # The same as there.
_SECRET = "secret"
_STAND_BY_S = 0.1
_NOT_STARTED = 127  # a shell's status for a command that could not be started
_READY = b"ready"
_GONE: tuple[list[str], ...] = (
    [],
    ["Z"],
    ["X"],
)  # state of a process that has ended, and may wait for its parent to reap it


def main(directory: str, *command: str) -> None:
    """Become the command, and leave a sampler beside it."""
    here = os.getpid()
    if command[0] == "--packets":
        command = command[1:]
        _begin_capture(here, directory)
    try:
        if _is_the_one_beside():
            _work_beside(here, directory, "sampler", _sample)
    except OSError as error:  # the process limit is reached: the command runs without a sampler
        sys.stderr.write(f"fullwire: this host is not sampled: {error.strerror}\n")
    try:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(directory, _ENTERED))  # we made it, before any Python of the job
        os.execvp(command[0], command)
    except OSError as error:
        named = repr(command[0])[1:-1]  # no terminal obeys it
        sys.stderr.write(f"fullwire: {named}: cannot be run: {error.strerror}\n")
        sys.exit(_NOT_STARTED)


def _is_the_one_beside() -> bool:
    """Split in two, and return whether this one is the sampler, as a grandchild of the command.

    The command must find only the children that it started.
    """
    child = os.fork()
    if child:
        if os.waitpid(child, 0)[1]:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return False
    os.setsid()
    try:
        grandchild = os.fork()
    except OSError:
        os._exit(1)  # the command must not run in this process
    if grandchild:
        os._exit(0)
    return True


def _work_beside(
    watched: int,
    directory: str,
    role: str,
    work: Callable[[int, str], None],
    on_stand_by: Callable[[], None] = lambda: None,
) -> None:
    """Work as long as a process runs; close all files that others might wait for."""
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nothing, standard)
        os.chdir("/")
        with _the_only_one(watched, directory, role, on_stand_by) as is_ours:
            if is_ours:
                work(watched, directory)
    finally:
        os._exit(0)


@contextlib.contextmanager
def _the_only_one(
    watched: int, directory: str, role: str, on_stand_by: Callable[[], None]
) -> Iterator[bool]:
    """Wait until no other process does this work on this host, or the watched process has ended.

    The process that has the lock of a file in the folder of the recording does the work. The kernel
    frees the lock when that process ends. No other user can take it, as the file belongs to this
    user alone.

    File systems of clusters often lack locks. There the process that holds a certain socket name
    does the work. Names without a file belong to the network namespace and vanish with their
    holder. Any user may hold a name that is free. So the name is made of a secret that only this
    user can read.
    """
    known = f"{directory}\n{_secret(directory)}"
    name = f"\0fullwire-{role}-{hashlib.sha256(known.encode()).hexdigest()}"
    file = _own_file(os.path.join(directory, f"{role}-{network_key()}.lock"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as holder:
        while _content(f"/proc/{watched}/stat").rpartition(")")[2].split()[:1] not in _GONE:
            try:
                if file < 0:
                    holder.bind(name)
                else:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pass  # another process has the lock
            except OSError as error:
                if file >= 0 and error.errno != errno.EINTR:  # a file system without locks
                    file = -1
                    continue
            else:
                yield True
                return
            on_stand_by()
            time.sleep(_STAND_BY_S)
        yield False


def _own_file(path: str) -> int:
    """Open a file that is this user's alone, or return -1: another user may have put it there."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return -1
    about = os.fstat(file)
    if stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid():
        return file
    os.close(file)
    return -1


def network_key() -> str:
    """Name the network namespace of this process, apart from those of all other hosts."""
    known = f"{socket.gethostname()}\n{_content('/proc/sys/kernel/random/boot_id')}"
    with contextlib.suppress(OSError):
        known += f"\n{os.stat('/proc/self/ns/net').st_ino}"
    return hashlib.sha256(known.encode()).hexdigest()[:16]


def _secret(directory: str) -> str:
    """Return the secret that all samplers of a recording share, and only their user can read."""
    path = os.path.join(directory, _SECRET)
    beside = f"{path}-{socket.gethostname()}-{os.getpid()}"
    with contextlib.suppress(OSError):  # another sampler has just made it
        file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(file, os.urandom(16).hex().encode())
        os.close(file)
        os.link(beside, path)  # puts the whole file there, only if none exists
    with contextlib.suppress(OSError):
        os.unlink(beside)
    return _content(path)


def rdma_ports() -> dict[str, str]:
    """Return the folders of this host's RDMA ports with counters, by adapter and number."""
    ports = {}
    for adapter in sorted(os.listdir(_ADAPTERS)) if os.path.isdir(_ADAPTERS) else []:
        for number in sorted(os.listdir(os.path.join(_ADAPTERS, adapter, "ports"))):
            port = os.path.join(_ADAPTERS, adapter, "ports", number)
            if os.path.isdir(os.path.join(port, "counters")):
                ports[f"{adapter}/{number}"] = port
    return ports


def _sample(watched: int, directory: str) -> None:
    from fullwire._native import sample

    interfaces = _interfaces()
    ports = dict(list(rdma_ports().items())[:MOST_INTERFACES])
    links = []
    for name in interfaces:  # an unknown speed is zero; virtual cables claim a false one
        megabits = _content(f"/sys/class/net/{name}/speed") if _is_adapter(name) else ""
        speed_bps = float(megabits) * 1e6 if megabits.isdigit() else 0.0
        links.append({"name": name, "speed_bps": speed_bps})
    for name, port in ports.items():  # the kernel writes it as in 400 Gb/sec (4X NDR)
        gigabits, _, unit = _content(os.path.join(port, "rate")).partition(" ")
        is_known = unit.startswith("Gb/sec") and gigabits.replace(".", "", 1).isdigit()
        links.append({"name": name, "speed_bps": float(gigabits) * 1e9 if is_known else 0.0})
    began = {"watched": watched, "monotonic_ns": time.monotonic_ns(), "unix_ns": time.time_ns()}
    path = os.path.join(directory, _name(began["monotonic_ns"]) + SUFFIX)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    os.write(file, _header(_RUNNING, began))
    try:
        sample(
            file,
            links=json.dumps({"kind": "links", "links": links}),
            mark=f"{_DIRECTORY_VARIABLE}={directory}",
            interfaces=list(interfaces.values()),
            rdma_directories=[os.path.join(path, "counters") for path in ports.values()],
            watched=watched,
        )
        status, reason = _ENDED, ""
    except (OSError, RuntimeError) as error:  # a full disk
        status, reason = _FAILED, str(error)
    os.pwrite(file, _header(status, began, reason), 0)


def _name(began_ns: int) -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{began_ns}"


def _begin_capture(watched: int, directory: str) -> None:
    """Start the capture of packets, and return once it runs; if it cannot, end the job."""
    hear, tell = os.pipe()
    try:
        is_beside = _is_the_one_beside()
    except OSError as error:
        sys.stderr.write(f"fullwire: packets cannot be captured: {error.strerror}\n")
        sys.exit(_NOT_STARTED)
    if is_beside:
        os.close(hear)
        told = _TellOnce(tell)
        _work_beside(
            watched,
            directory,
            "capture",
            lambda watched, directory: _capture(watched, directory, told),
            told.ready,
        )
    os.close(tell)
    answer = b"".join(iter(lambda: os.read(hear, 1024), b""))
    os.close(hear)
    for given in _given_sockets():
        os.close(given)  # the job needs no packet sockets
    os.environ.pop(SOCKET_VARIABLE, None)
    if answer != _READY:
        sys.stderr.write(f"fullwire: packets cannot be captured: {answer.decode() or 'killed'}\n")
        sys.exit(_NOT_STARTED)


class _TellOnce:
    """The writing end of a pipe that carries one message only: the first."""

    def __init__(self, file: int) -> None:
        self._file = file

    def ready(self) -> None:
        self.say(_READY)

    def say(self, word: bytes) -> None:
        if self._file >= 0:
            os.write(self._file, word)
            os.close(self._file)
        self._file = -1


def _capture(watched: int, directory: str, told: _TellOnce) -> None:
    from fullwire._native import PacketCapture

    path = os.path.join(directory, _name(time.monotonic_ns()))
    try:
        names = list(_interfaces())
        # A socket for each interface, which receives packets once it is bound.
        if given := _given_sockets():
            sockets = dict(zip(names, given, strict=False))
        else:
            sockets = {
                name: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).detach() for name in names
            }
        file = os.open(
            path + CAPTURING_SUFFIX, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
        )
        capture = PacketCapture(file, list(sockets.items()))
    except (OSError, RuntimeError) as error:
        told.say(str(error).encode())
        return
    told.ready()
    with contextlib.suppress(OSError, RuntimeError):  # a full disk: the name shows the early end
        capture.run(watched)
        os.rename(path + CAPTURING_SUFFIX, path + CAPTURE_SUFFIX)


def _given_sockets() -> list[int]:
    given = os.environ.get(SOCKET_VARIABLE, "")
    return [int(number) for number in given.split(",") if number]


def _header(status: str, began: dict[str, int], reason: str = "") -> bytes:
    header: dict[str, Any] = {
        "format": 1,
        "status": status,
        "host": socket.gethostname()[:64],
        "machine": _content("/proc/sys/kernel/random/boot_id") or socket.gethostname()[:64],
        **began,
        "reason": reason[:100],
    }
    return json.dumps(header).encode().ljust(_HEADER_BYTES)


def _interfaces() -> dict[str, int]:
    """Return the index of each interface to sample: the network adapters that are in use.

    A container or a namespace has only the end of a virtual cable, which is sampled instead.
    Loopback is no link.
    """
    in_use = {
        name: index
        for index, name in socket.if_nameindex()
        if _content(f"/sys/class/net/{name}/type") != "772"
        and _content(f"/sys/class/net/{name}/operstate") in ("up", "unknown")
    }
    adapters = {name: index for name, index in in_use.items() if _is_adapter(name)}
    return dict(list((adapters or in_use).items())[:MOST_INTERFACES])


def _is_adapter(name: str) -> bool:
    return os.path.exists(f"/sys/class/net/{name}/device")


def _content(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
