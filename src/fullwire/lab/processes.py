"""Processes on hosts: started there, told apart by their rank, reaped when they end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from fullwire.lab import namespaces
from fullwire.lab.links import Host
from fullwire.lab.messages import Ended, Start
from fullwire.lab.terminal import take_terminal

_NOT_STARTED = 127  # as a shell says that a command could not be started


class Processes:
    """The commands of a lab, by the process ids that the first of a pid namespace sees."""

    def __init__(self) -> None:
        self._started: dict[int, tuple[int, Host]] = {}  # rank and host of each

    def start(self, host: Host, request: Start, processors: frozenset[int]) -> None:
        """Start a rank's command on its host."""
        # Python forgets in a child what it has not handled: a Ctrl-C waits until it may end it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        pid = os.fork()
        if pid == 0:
            _become_command(host, request, processors)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        with contextlib.suppress(OSError):  # whoever of us both comes first: it is to be a group
            os.setpgid(pid, pid)
        self._started[pid] = request.rank, host

    def reaped(self) -> Iterator[Ended]:
        """Take leave of every process that has ended; orphans come to us and go unmentioned."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, wait_status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid in self._started:
                    rank, _ = self._started.pop(pid)
                    yield Ended(rank, _shell_status(wait_status))

    def signal_groups(self, number: int) -> None:
        """Signal the commands and whatever is in their process groups."""
        for pid in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)

    def signal_host(self, host: Host, number: int) -> None:
        """Signal every process on a host, also those that left their group or their parent."""
        signalled: set[int] = set()
        while found := self._on(host) - signalled:  # until no new one was born meanwhile
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            signalled |= found

    def _on(self, host: Host) -> set[int]:
        """Find a host's processes, also those that were just started and are on their way there."""
        coming = {pid for pid, (_, goal) in self._started.items() if goal is host}
        return coming | set(_processes_on(host))


def _processes_on(host: Host) -> Iterator[int]:
    network = os.fstat(host.network)
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended since
            if entry.name.isdecimal() and os.path.samestat(os.stat(entry / "ns/net"), network):
                yield int(entry.name)


def _shell_status(wait_status: int) -> int:
    code = os.waitstatus_to_exitcode(wait_status)
    return code if code >= 0 else 128 - code


def _become_command(host: Host, request: Start, processors: frozenset[int]) -> None:
    """Turn this fresh child into the command; nothing of ours may run in it afterwards."""
    try:
        _leave_our_group(request.in_foreground)
        namespaces.become_host(host.network, host.name)
        if processors:
            os.sched_setaffinity(0, processors)
        _reset_signals()
        environment = dict(request.environment)
        if request.packet_socket is not None:
            sockets = [str(namespaces.packet_socket()) for _ in host.nics]
            environment[request.packet_socket] = ",".join(sockets)
        os.execvpe(request.command[0], request.command, environment)
    except OSError as error:
        sys.stderr.write(f"fullwire: host {host.number}: {request.command[0]}: {error.strerror}\n")
        sys.stderr.flush()
    finally:
        os._exit(_NOT_STARTED)


def _leave_our_group(in_foreground: bool) -> None:
    """Take a group of our own, so that a Ctrl-C reaches the lab first, or the shell alone."""
    os.setpgid(0, 0)
    if in_foreground:
        take_terminal()
    else:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)


def _reset_signals() -> None:
    """Undo what Python and the supervisor ignore or handle; ignored signals outlive an exec."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
