"""The process that holds a lab: it enters the namespaces, makes what is in them, and serves.

It is two processes. The outer one enters new namespaces and waits. The inner one is the first of a
pid namespace: when it ends, the kernel kills every process of the lab and removes the networks with
their last user. It ends when the handle closes the socket or dies in any way, and it is killed when
the outer one is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait

from fullwire.errors import UsageError
from fullwire.lab import namespaces
from fullwire.lab.description import LabDescription
from fullwire.lab.faults import Fault
from fullwire.lab.messages import Ready, Refused, Signal, Start


def main(channel: int) -> None:
    """Hold a lab for whoever has the other end of this socket."""
    os.setpgid(0, 0)  # a Ctrl-C is for the handle, which ends the lab in order
    os.set_inheritable(channel, False)  # no job may hold the lab's own socket
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
    """The lab as the inner process holds it."""

    def __init__(self, description: LabDescription) -> None:
        # Loaded here: entering namespaces wants a process without threads, and pyroute2 is large.
        from fullwire.lab.capacity import capacity_warning, in_host_bps
        from fullwire.lab.links import Network
        from fullwire.lab.processes import Processes
        from fullwire.lab.rates import measured_links, measured_uplinks

        namespaces.mount_own_proc()
        self._description = description
        self._network = Network(description)
        namespaces.name_hosts({host.name: host.address for host in self._network.hosts})
        warning = capacity_warning(self._network, description)
        self._network.shape()
        links = measured_links(self._network, description)
        uplinks = measured_uplinks(self._network, description)
        self._network.add_netem()  # after measuring: delay and loss are no matter of the rate
        self._processes = Processes()
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
        """Do what the handle asks, and tell it of every end, until it has gone."""
        with _children_wake_us() as child_ended:
            while True:
                for source in wait([connection, child_ended]):
                    if source is connection:
                        self._do(connection.recv())
                    else:
                        child_ended.recv(4096)
                for ended in self._processes.reaped():
                    connection.send(ended)

    def _do(self, request: Start | Fault | Signal) -> None:
        if isinstance(request, Start):
            cpus = self._description.cpus
            host = self._network.hosts[self._description.host_of(request.rank)]
            self._processes.start(host, request, cpus[host.number] if cpus else frozenset())
        elif isinstance(request, Signal):
            self._processes.signal_groups(request.number)
        else:
            self._disturb(request)

    def _disturb(self, fault: Fault) -> None:
        host = self._network.hosts[fault.host]
        if fault.kind == "slow":
            assert fault.rate_bps is not None
            self._network.set_rate(host, fault.rate_bps / self._description.dilation)
        elif fault.kind == "cut":
            self._network.cut(host)
        elif fault.kind == "kill":
            self._processes.signal_host(host, signal.SIGKILL)
        elif fault.kind == "pause":
            self._processes.signal_host(host, signal.SIGSTOP)
        else:
            self._network.plug_in(host)
            self._network.set_rate(host, self._description.rates_bps[host.number])
            self._processes.signal_host(host, signal.SIGCONT)


@contextlib.contextmanager
def _children_wake_us() -> Iterator[socket.socket]:
    """Give a socket that becomes readable whenever a child has ended."""
    ours, kernels = socket.socketpair()
    with ours, kernels:
        for each in (ours, kernels):
            each.setblocking(False)
        signal.set_wakeup_fd(kernels.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the wake-up needs a handler to be there
        try:
            yield ours
        finally:
            signal.set_wakeup_fd(-1)  # children end after this, too, and the socket is closed then
