"""The process that holds a lab: it enters the namespaces, makes the network, and serves the handle.

It is two processes. The outer one enters new namespaces and waits. The inner one is the first of a
pid namespace. When the inner one ends, the kernel kills every process of the lab. It removes the
networks with their last user. The inner one ends when the handle closes the socket or dies in any
way, and the kernel kills it when the outer one dies.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING

from fullwire.errors import UsageError
from fullwire.lab import namespaces
from fullwire.lab.description import LabDescription
from fullwire.lab.faults import Fault
from fullwire.lab.messages import Ended, Ready, Refused, Signal, Start
from fullwire.lab.terminal import take_terminal
from fullwire.units import visible

if TYPE_CHECKING:  # pyroute2, which it loads, is large, and namespaces want no threads
    from fullwire.lab.links import Host

_NOT_STARTED = 127  # the exit status in a shell for a command that could not be started


def main(channel: int) -> None:
    """Hold a lab for the handle at the other end of this socket."""
    os.setpgid(0, 0)  # a Ctrl-C reaches the handle alone, which ends the lab in order
    os.set_inheritable(channel, False)  # a job must not inherit the lab's own socket
    connection = Connection(channel)
    try:
        namespaces.enter_own_namespaces()
    except UsageError as error:
        connection.send(Refused(str(error)))
        return
    inner = os.fork()
    if inner == 0:
        namespaces.die_with_parent()
        with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
            _make_and_serve(connection)
        os._exit(0)
    connection.close()
    os.waitpid(inner, 0)


def _make_and_serve(connection: Connection) -> None:
    description: LabDescription = connection.recv()
    try:
        lab = _Inside(description)
    except UsageError as error:
        connection.send(Refused(str(error)))
        return
    connection.send(lab.ready)
    lab.serve(connection)


class _Inside:
    """The lab in the inner process."""

    def __init__(self, description: LabDescription) -> None:
        # Loaded here: entering namespaces wants a process without threads, and pyroute2 is large.
        from fullwire.lab.links import Network
        from fullwire.lab.rates import (
            capacity_warning,
            in_host_bps,
            measured_links,
            measured_uplinks,
        )

        namespaces.mount_own_proc()
        self._description = description
        self._network = Network(description)
        if description.disk:
            namespaces.mount_disk(description.disk)
        namespaces.name_hosts({host.name: host.address for host in self._network.hosts})
        warning = capacity_warning(self._network, description)
        self._network.shape()
        links = measured_links(self._network, description)
        uplinks = measured_uplinks(self._network, description)
        self._network.add_netem()  # after measuring: delay and loss would lower the rate
        self._processes = Processes()
        self._cuts: list[tuple[tuple[int, ...], ...]] = []  # the sides of each partition
        self._sent_before: dict[int, int] = {}  # by host: the bytes sent before its present job
        self.ready = Ready(
            links=links,
            uplinks=uplinks,
            in_host_bps=in_host_bps(self._network, description),
            addresses=tuple(host.address for host in self._network.hosts),
            host_names=tuple(host.name for host in self._network.hosts),
            congestion=self._network.congestion,
            warnings=(warning,) if warning else (),
        )

    def serve(self, connection: Connection) -> None:
        """Carry out the handle's requests and report each command's end, until the handle ends."""
        with _children_wake_us() as child_ended:
            while True:
                for source in wait([connection, child_ended]):
                    if source is connection:
                        self._do(connection.recv())
                    else:
                        child_ended.recv(4096)
                for ended in self._processes.reaped():
                    host = self._network.hosts[self._description.host_of(ended.rank)]
                    sent_bytes = self._network.sent_bytes(host) - self._sent_before[host.number]
                    connection.send(replace(ended, sent_bytes=sent_bytes))

    def _do(self, request: Start | Fault | Signal) -> None:
        if isinstance(request, Start):
            cpus = self._description.cpus
            host = self._network.hosts[self._description.host_of(request.rank)]
            if host not in self._processes.hosts:
                self._sent_before[host.number] = self._network.sent_bytes(host)
            self._processes.start(host, request, cpus[host.number] if cpus else frozenset())
        elif isinstance(request, Signal):
            self._processes.signal_groups(request.number)
        elif request.kind in ("partition", "heal"):
            self._cuts.append(request.sides) if request.kind == "partition" else self._cuts.remove(
                request.sides
            )
            self._network.set_apart({pair for sides in self._cuts for pair in _across(sides)})
        elif request.kind in ("fill", "empty"):
            namespaces.set_disk(self._description.disk, is_full=request.kind == "fill")
        else:
            host = self._network.hosts[request.host]
            if request.kind == "slow":
                assert request.rate_bps is not None
                self._network.set_rate(host, request.rate_bps / self._description.dilation)
            elif request.kind == "cut":
                self._network.cut(host)
            elif request.kind == "kill":
                # Stopped first: no process of a dead host may see another one end, and act on it.
                self._processes.signal_host(host, signal.SIGSTOP)
                self._processes.signal_host(host, signal.SIGKILL)
            elif request.kind == "pause":
                self._processes.signal_host(host, signal.SIGSTOP)
            elif request.kind == "resume":
                self._processes.signal_host(host, signal.SIGCONT)
            else:
                self._network.plug_in(host)
                self._network.set_rate(host, self._description.rates_bps[host.number])
                self._processes.signal_host(host, signal.SIGCONT)


def _across(sides: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of hosts on different sides of a partition."""
    for one, other in itertools.combinations(sides, 2):
        for pair in itertools.product(one, other):
            yield min(pair), max(pair)


@contextlib.contextmanager
def _children_wake_us() -> Iterator[socket.socket]:
    """Yield a socket that becomes readable whenever a child has ended."""
    ours, kernels = socket.socketpair()
    with ours, kernels:
        for end in (ours, kernels):
            end.setblocking(False)
        signal.set_wakeup_fd(kernels.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the wake-up needs some handler
        try:
            yield ours
        finally:
            signal.set_wakeup_fd(-1)  # later children would write to a closed socket


class Processes:
    """The commands of a lab, by the process ids that the first of a pid namespace sees."""

    def __init__(self) -> None:
        self._started: dict[int, tuple[int, Host]] = {}  # rank and host of each

    @property
    def hosts(self) -> set[Host]:
        """The hosts with a running command."""
        return {host for _, host in self._started.values()}

    def start(self, host: Host, request: Start, processors: frozenset[int]) -> None:
        """Start a rank's command on its host."""
        # In a child Python drops signals that wait for a handler. So a Ctrl-C is held back by the
        # kernel until it may end the child.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        pid = os.fork()
        if pid == 0:
            _become_command(host, request, processors)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        with contextlib.suppress(OSError):  # parent and child both ask, the first one makes it
            os.setpgid(pid, pid)
        self._started[pid] = request.rank, host

    def reaped(self) -> Iterator[Ended]:
        """Reap every process that has ended, orphans too; yield the ends of the commands only."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, wait_status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid in self._started:
                    rank, _ = self._started.pop(pid)
                    code = os.waitstatus_to_exitcode(wait_status)
                    yield Ended(rank, code if code >= 0 else 128 - code)  # as a shell shows it

    def signal_groups(self, number: int) -> None:
        """Signal the process groups of the commands."""
        for pid in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)

    def signal_host(self, host: Host, number: int) -> None:
        """Signal every process on a host, also those that left their group or their parent."""
        signalled: set[int] = set()
        while pids := self._on(host) - signalled:  # until no new process has started meanwhile
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            signalled |= pids

    def _on(self, host: Host) -> set[int]:
        """Find a host's processes, also those that were just started and are on their way there."""
        pids = {pid for pid, (_, goal) in self._started.items() if goal is host}
        network = os.fstat(host.network)
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # it has ended since
                if entry.name.isdecimal() and os.path.samestat(os.stat(entry / "ns/net"), network):
                    pids.add(int(entry.name))
        return pids


def _become_command(host: Host, request: Start, processors: frozenset[int]) -> None:
    """Turn this fresh child into the command; none of our code runs in it afterwards."""
    try:
        # Take a group of our own, so that a Ctrl-C reaches the lab first, or the shell alone.
        os.setpgid(0, 0)
        if request.in_foreground:
            take_terminal()
        else:
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
        if request.output is not None:
            for ours, its in zip(request.output, (1, 2), strict=True):
                os.dup2(ours, its)
                os.close(ours)
        namespaces.become_host(host.network, host.name)
        if processors:
            os.sched_setaffinity(0, processors)
        # Undo what Python and the supervisor ignore or handle; ignored signals outlive an exec.
        signal.set_wakeup_fd(-1)
        for number in (
            signal.SIGCHLD,
            signal.SIGINT,
            signal.SIGTERM,
            signal.SIGPIPE,
            signal.SIGXFSZ,
        ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        environment = dict(request.environment)
        if request.packet_socket is not None:
            sockets = [str(namespaces.packet_socket()) for _ in host.nics]
            environment[request.packet_socket] = ",".join(sockets)
        os.execvpe(request.command[0], request.command, environment)
    except OSError as error:
        named = visible(request.command[0])
        sys.stderr.write(f"fullwire: host {host.number}: {named}: {error.strerror}\n")
        sys.stderr.flush()
    finally:
        os._exit(_NOT_STARTED)
