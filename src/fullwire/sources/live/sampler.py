"""The process that samples a host while a job runs on it; the loop itself is native.

    python sampler.py DIRECTORY COMMAND...    becomes the command, with a sampler beside it

It is run by its place and loads nothing but the standard library and the native part, so the job
waits for it some 30 ms. It listens on no network, and ends with the command. One samples each host,
however many are started: the others stand by, in case the first one's command ends before theirs.

Its file is like a journal (inside/journal.py): a header, then definitions, and samples as
native/sample_file.hpp tells.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

SUFFIX = ".samples"
MOST_INTERFACES = 16
_HEADER_BYTES = 512  # this and the three states as in inside/journal.py
_RUNNING, _ENDED, _FAILED = "running", "ended", "failed"
_DIRECTORY_VARIABLE = "FULLWIRE_RECORD_INTO"  # as in inside/__init__.py
_STAND_BY_S = 0.1
_NOT_STARTED = 127  # as a shell says that a command could not be started


def main(directory: str, *command: str) -> None:
    """Become the command, and leave a sampler beside it."""
    here = os.getpid()
    if _is_the_one_beside():
        _sample_beside(here, directory)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"fullwire: {command[0]}: cannot be run: {error.strerror}\n")
        sys.exit(_NOT_STARTED)


def _is_the_one_beside() -> bool:
    """Split in two; the command must not find a child that it did not start, so a grandchild."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return False
    os.setsid()
    if os.fork():
        os._exit(0)
    return True


def _sample_beside(watched: int, directory: str) -> None:
    """Sample as long as a process runs, and hold nothing open that others might wait for."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    os.chdir("/")
    try:
        with _the_only_one(watched, directory) as is_ours:
            if is_ours:
                _sample(watched, directory)
    finally:
        os._exit(0)


@contextlib.contextmanager
def _the_only_one(watched: int, directory: str) -> Iterator[bool]:
    """Wait until no other process samples this host, or until there is nothing to sample for.

    Who holds a certain name samples. Names without a file are the network namespace's own, vanish
    with their holder, and need no locks, which file systems of clusters often lack.
    """
    name = f"\0fullwire-sampler-{hashlib.sha256(directory.encode()).hexdigest()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as holder:
        while _runs(watched):
            with contextlib.suppress(OSError):
                holder.bind(name)
                yield True
                return
            time.sleep(_STAND_BY_S)
        yield False


def _runs(process: int) -> bool:
    """Say whether a process runs; one that has ended may stay for long where nobody reaps it."""
    state = _content(f"/proc/{process}/stat").rpartition(")")[2].split()[:1]
    return state not in ([], ["Z"], ["X"])


def _sample(watched: int, directory: str) -> None:
    from fullwire._native import sample

    interfaces, ports = _interfaces(), _rdma_ports()
    began = {
        "watched": watched, "monotonic_ns": time.monotonic_ns(), "unix_ns": time.time_ns()
    }  # fmt: skip
    name = f"{socket.gethostname()}-{os.getpid()}-{began['monotonic_ns']}{SUFFIX}"
    path = os.path.join(directory, name)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    links = [{"name": name, "speed_bps": _speed_bps(name)} for name in interfaces]
    links += [{"name": name, "speed_bps": _rdma_speed_bps(path)} for name, path in ports.items()]
    os.write(file, _header(_RUNNING, began))
    try:
        sample(
            file, links=json.dumps({"kind": "links", "links": links}),
            mark=f"{_DIRECTORY_VARIABLE}={directory}",
            interfaces=list(interfaces.values()),
            rdma_directories=[os.path.join(path, "counters") for path in ports.values()],
            watched=watched,
        )  # fmt: skip
        status, reason = _ENDED, ""
    except (OSError, RuntimeError) as error:  # a full disk
        status, reason = _FAILED, str(error)
    os.pwrite(file, _header(status, began, reason), 0)


def _header(status: str, began: dict[str, int], reason: str = "") -> bytes:
    header: dict[str, Any] = {
        "format": 1, "status": status, "host": socket.gethostname()[:64], "machine": _machine(),
        **began, "reason": reason[:100],
    }  # fmt: skip
    return json.dumps(header).encode().ljust(_HEADER_BYTES)


def _machine() -> str:
    """Name the running kernel, as inside/journal.py does."""
    return _content("/proc/sys/kernel/random/boot_id") or socket.gethostname()[:64]


def _interfaces() -> dict[str, int]:
    """Return the index of each interface to sample: the network adapters that are in use.

    Inside a container or a namespace there is none, only the end of a virtual cable. Loopback is
    no link.
    """
    found = {
        name: index
        for index, name in socket.if_nameindex()
        if _content(f"/sys/class/net/{name}/type") != "772" and _is_up(name)
    }
    adapters = {name: index for name, index in found.items() if _is_adapter(name)}
    return dict(list((adapters or found).items())[:MOST_INTERFACES])


def _is_up(name: str) -> bool:
    return _content(f"/sys/class/net/{name}/operstate") in ("up", "unknown")


def _is_adapter(name: str) -> bool:
    return os.path.exists(f"/sys/class/net/{name}/device")


def _speed_bps(name: str) -> float:
    """Return an adapter's line rate, zero where it is not known; virtual cables claim some."""
    megabits = _content(f"/sys/class/net/{name}/speed") if _is_adapter(name) else ""
    return float(megabits) * 1e6 if megabits.isdigit() else 0.0


def _rdma_ports() -> dict[str, str]:
    """Return where each RDMA port that counts is described, by adapter and number."""
    ports: dict[str, str] = {}
    root = "/sys/class/infiniband"
    for adapter in sorted(os.listdir(root)) if os.path.isdir(root) else []:
        for port in sorted(os.listdir(os.path.join(root, adapter, "ports"))):
            path = os.path.join(root, adapter, "ports", port)
            if os.path.isdir(os.path.join(path, "counters")):
                ports[f"{adapter}/{port}"] = path
    return dict(list(ports.items())[:MOST_INTERFACES])


def _rdma_speed_bps(path: str) -> float:
    """Return a port's line rate, which the kernel words like 400 Gb/sec (4X NDR)."""
    gigabits, _, unit = _content(os.path.join(path, "rate")).partition(" ")
    is_known = unit.startswith("Gb/sec") and gigabits.replace(".", "", 1).isdigit()
    return float(gigabits) * 1e9 if is_known else 0.0


def _content(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
