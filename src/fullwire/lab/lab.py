"""The handle of a lab: make it, start commands on its hosts, disturb it, end it."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from types import TracebackType

from fullwire.errors import FullwireError, UsageError
from fullwire.lab.description import LabDescription
from fullwire.lab.faults import Fault
from fullwire.lab.messages import Ended, LinkRate, Ready, Refused, Signal, Start

_END_S = 10.0


class Lab:
    """A described cluster made of namespaces, for as long as the `with` block runs.

    `output` holds open files for the output of commands in the background, in place of this
    process's standard output and error.
    """

    def __init__(self, description: LabDescription, output: tuple[int, int] | None = None) -> None:
        self.description = description
        self._output = output
        self.links: tuple[LinkRate, ...] = ()
        self.uplinks: tuple[LinkRate, ...] = ()
        self.in_host_bps: float | None = None
        self.addresses: tuple[str, ...] = ()
        self.host_names: tuple[str, ...] = ()
        self.congestion = ""
        self.warnings: tuple[str, ...] = ()

    def __enter__(self) -> Lab:
        ours, theirs = socket.socketpair()
        with theirs:
            # The supervisor finds our modules in the same places, in any working directory.
            program = (
                f"import sys; sys.path[:] = {sys.path!r}\n"
                "from fullwire.lab.supervisor import main\n"
                f"main({theirs.fileno()})"
            )
            self._supervisor = subprocess.Popen(
                [sys.executable, "-c", program],
                pass_fds=[theirs.fileno(), *(self._output or ())],
            )
        self._connection = Connection(ours.detach())
        try:
            self._tell(self.description)
            self._take(self._hear())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def start(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        in_foreground: bool = False,
        packet_socket: str | None = None,
    ) -> None:
        """Start a rank's command on its host; in the foreground it has this process's output."""
        self._tell(
            Start(
                rank=rank,
                command=tuple(command),
                environment=dict(environment),
                in_foreground=in_foreground,
                packet_socket=packet_socket,
                output=None if in_foreground else self._output,
            )
        )

    def disturb(self, fault: Fault) -> None:
        """Apply a fault to its host now."""
        self._tell(fault)

    def signal(self, number: int) -> None:
        """Send a signal to every running command."""
        self._tell(Signal(number))

    def next_end(self, timeout_s: float | None) -> Ended | None:
        """Wait for a command to end; None when the time is over first."""
        if not self._connection.poll(timeout_s):
            return None
        ended = self._hear()
        assert isinstance(ended, Ended)
        return ended

    def _take(self, answer: Ready | Refused | Ended) -> None:
        if isinstance(answer, Refused):
            raise UsageError(answer.sentence)
        assert isinstance(answer, Ready)
        self.links, self.uplinks = answer.links, answer.uplinks
        self.in_host_bps = answer.in_host_bps
        self.addresses = answer.addresses
        self.host_names, self.congestion = answer.host_names, answer.congestion
        self.warnings = answer.warnings

    def _tell(self, message: LabDescription | Start | Fault | Signal) -> None:
        with contextlib.suppress(BrokenPipeError):  # the next answer tells the reason
            self._connection.send(message)

    def _hear(self) -> Ready | Refused | Ended:
        try:
            answer: Ready | Refused | Ended = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise FullwireError("the lab has ended: its supervisor was killed or failed") from None
        return answer

    def _end(self) -> None:
        """Close the socket: the supervisor then ends, and everything in the lab with it."""
        self._connection.close()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._supervisor.wait(_END_S)
        finally:  # the supervisor hangs, or the user interrupts the wait
            self._supervisor.kill()
            self._supervisor.wait()
