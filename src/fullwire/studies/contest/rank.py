"""One rank of a contest: python -m fullwire.studies.contest.rank CONTEST.json OUTCOME.json

This command runs on every host of a lab. Under torchrun, the command line calls `take_part` itself.
First iperf3 measures the payload that the line carries both ways at once. This is the usual
yardstick, and a transport may exceed it. Then the participants reduce in turns: our transport,
another backend of torch, or a program of OpenMPI beside each rank, which mpirun starts through the
ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from secrets import token_hex
from typing import Any, Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist

from fullwire.errors import FullwireError, UsageError
from fullwire.studies.contest import (
    BYTES_A_VALUE,
    FLOAT32,
    OURS,
    PLAIN,
    Contest,
    Measured,
    Moved,
    Outcome,
    Turn,
    check_workers,
    mpi_program,
)
from fullwire.transport.keys import ENCRYPT_VARIABLE, KEY_VARIABLE
from fullwire.transport.wire import WIRE_VARIABLE
from fullwire.units import show_bytes, show_rate

Each = TypeVar("Each")
_ERASE = "\r\x1b[K"

_STREAMS = (1, 2)  # of iperf3
_MEASURED_S = 1
_CONNECT_MS = 10_000
_PORTS_TRIED = 3  # another process may take a port between our search and the start of iperf3

_MPI_START_S = 30.0
_MPI_ANSWER_S = 120.0
_MPI_CAUGHT = 2000  # characters of mpirun's messages
_MPIRUN = [
    "mpirun",
    "--allow-run-as-root",
    "--bind-to",
    "none",
    "--mca",
    "plm_rsh_no_tree_spawn",
    "1",
    "--mca",
    "btl",
    "tcp,self",
    "--mca",
    "pml",
    "ob1",
]

_MOST_OFF = 0.01  # of a sum in a wire format: int8 has 127 steps
_RECORD_BYTES = 256 << 10  # the transport's largest record


class Turns(Protocol):
    """One participant, on this rank."""

    def check(self, size_bytes: int) -> None:
        """Check one sum, which also opens every connection."""

    def turn(self, size_bytes: int, repeats: int) -> Turn:
        """Do all-reduces in a row; all ranks begin together."""

    def close(self) -> None:
        """Leave."""


def take_part(contest: Contest) -> Outcome | None:
    """Be one rank of a contest, as the environment says; rank 0 returns the outcome."""
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo")  # for agreements; the participants have their own groups
        check_workers(dist.get_world_size())
        outcome = _Held(contest).outcome()
        dist.barrier()
        dist.destroy_process_group()
    # ValueError: the environment is incomplete
    except (RuntimeError, ValueError, MpiFailed) as error:
        raise FullwireError(f"bench transport: {' '.join(str(error).split())}") from None
    return outcome


class _Held:
    """A contest in progress, on this rank."""

    def __init__(self, contest: Contest) -> None:
        self._contest = contest
        self._workers = dist.get_world_size()
        self._notes: list[str] = []
        self._hosts = _from_all(socket.gethostname())

    def outcome(self) -> Outcome | None:
        """Measure the line with iperf3, then each participant with every size."""
        moved = self._moved()
        if self._contest.encrypts:
            self._notes.extend(_cipher_speed())
        takers = self._takers()
        measured = [
            result
            for size_bytes in self._contest.sizes_bytes
            for result in self._measured(takers, size_bytes)
        ]
        for taker in takers.values():
            taker.close()
        _show("")
        if dist.get_rank() != 0:
            return None
        return Outcome(
            contest=self._contest,
            workers=self._workers,
            measured=tuple(measured),
            moved=tuple(moved),
            notes=tuple(self._notes),
        )

    def _moved(self) -> list[Moved]:
        """Run iperf3 between rank 0 and the first rank on another host."""
        missing = "iperf3 is missing, so its rate is not shown: sudo apt install iperf3"
        if self._lacks(None if shutil.which("iperf3") else missing):
            return []
        elsewhere = [rank for rank, host in enumerate(self._hosts) if host != self._hosts[0]]
        if not elsewhere:
            self._notes.append("all ranks are on one host: iperf3 has no line to measure")
            return []
        moved = []
        for streams in _STREAMS:
            _show(f"iperf3 measures the line, streams: {streams}")
            result = moved_between(0, elsewhere[0], os.environ["MASTER_ADDR"], streams)
            rate_bps = _from_all(result)[elsewhere[0]]
            if isinstance(rate_bps, float):
                moved.append(Moved(streams, rate_bps))
            else:
                self._notes.append(str(rate_bps))
        return moved

    def _takers(self) -> dict[int, Turns]:
        """Start the participants; note those that cannot start, with the reason."""
        values = torch.zeros(max(self._contest.sizes_bytes) // BYTES_A_VALUE)
        takers: dict[int, Turns] = {}
        for who, (name, wire) in enumerate(self._contest.participants):
            if name != "mpi":
                with _protected(self._contest.encrypts and name == OURS, wire):
                    turns = TorchTurns(OURS if name == PLAIN else name, values, wire)
                takers[who] = turns
                if turns.streams > 1:
                    self._notes.append(f"{name}: {turns.streams} connections between two ranks")
            elif len(set(self._hosts)) < self._workers:
                self._notes.append("mpi: expected one rank on each host, so it is left out")
            elif mpi := self._started_mpi():
                takers[who] = mpi
        if len(takers) < 2:
            raise UsageError(f"nobody to compare with: {'; '.join(self._notes)}")
        return takers

    def _started_mpi(self) -> MpiTurns | None:
        """Start OpenMPI beside every rank; if it fails on one of them, end it on all."""
        missing = "OpenMPI is not installed: sudo apt install openmpi-bin"
        if self._lacks(None if shutil.which("mpirun") else missing):
            return None
        mpi, problem = None, None
        try:
            mpi = MpiTurns(max(self._contest.sizes_bytes), self._hosts)
        except MpiFailed as error:
            problem = str(error)
        if not self._lacks(problem):
            return mpi
        if mpi is not None:
            mpi.close()
        return None

    def _measured(self, takers: dict[int, Turns], size_bytes: int) -> list[Measured]:
        """Let the participants reduce in turns; each round begins with another participant."""
        repeats = self._contest.repeats(size_bytes, self._workers)
        for taker in takers.values():
            taker.check(size_bytes)
        order = list(takers)
        turns: dict[int, list[Turn]] = {who: [] for who in order}
        for number in range(self._contest.rounds):
            _show(f"{show_bytes(size_bytes)}: round {number + 1} of {self._contest.rounds}")
            begins = number % len(order)
            for who in order[begins:] + order[:begins]:
                turns[who].append(takers[who].turn(size_bytes, repeats))
        return [
            Measured(
                who=who,
                size_bytes=size_bytes,
                turns=tuple(
                    Turn(
                        max(turn.time_s for turn in by_rank),
                        statistics.fmean(turn.cpu_s for turn in by_rank),
                    )
                    for by_rank in zip(*_from_all(list(mine)), strict=True)
                ),
            )
            for who, mine in turns.items()
        ]

    def _lacks(self, missing: str | None) -> bool:
        """Collect from every rank a description of anything missing there, and note the first."""
        reason = next(filter(None, _from_all(missing)), None)
        if reason:
            self._notes.append(reason)
        return reason is not None


@contextlib.contextmanager
def _protected(encrypts: bool, wire: str) -> Iterator[None]:
    """Make a group within the block send in a wire format, encrypted by a key of this contest."""
    ours = {
        ENCRYPT_VARIABLE: "1" if encrypts else "0",
        KEY_VARIABLE: _from_all(token_hex(32))[0],
        WIRE_VARIABLE: wire,
    }
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _from_all(mine: Each) -> list[Each]:
    """Return the values of all ranks, on every rank."""
    given: list[Each] = [mine] * dist.get_world_size()
    dist.all_gather_object(given, mine)
    return given


def _show(line: str) -> None:
    """Show the progress on a terminal; rank 0 does it for all ranks."""
    if dist.get_rank() == 0 and sys.stderr.isatty():
        sys.stderr.write(f"{_ERASE}fullwire: {line}\r" if line else _ERASE)
        sys.stderr.flush()


class TorchTurns:
    """All-reduces by one backend of torch."""

    def __init__(self, backend: str, buffer: torch.Tensor, wire: str) -> None:
        self._backend = backend
        self._most_off = 0.0 if wire == FLOAT32 else _MOST_OFF
        self._buffer = buffer
        self._group = dist.new_group(backend=backend)

    @property
    def streams(self) -> int:
        """Return the number of connections between two ranks, as far as it is known."""
        return getattr(self._group, "streams", 1)

    def check(self, size_bytes: int) -> None:
        """Check one sum, which also opens every connection."""
        values = self._buffer[: size_bytes // BYTES_A_VALUE]
        values.fill_(dist.get_rank() + 1)
        dist.all_reduce(values, group=self._group)
        ranks = dist.get_world_size()
        expected = ranks * (ranks + 1) / 2
        wrong = int(((values - expected).abs() > self._most_off * expected).sum())
        values.zero_()
        if wrong:
            raise RuntimeError(
                f"{self._backend}: {wrong} of {len(values)} sums of {size_bytes} bytes are wrong"
            )

    def turn(self, size_bytes: int, repeats: int) -> Turn:
        """Do all-reduces in a row; all ranks begin together."""
        values = self._buffer[: size_bytes // BYTES_A_VALUE]
        dist.all_reduce(self._buffer[:1], group=self._group)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        for _ in range(repeats):
            dist.all_reduce(values, group=self._group)
        return Turn(
            (time.perf_counter() - began_s) / repeats,
            (time.process_time() - began_cpu_s) / repeats,
        )

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group(self._group)


class IperfFailed(Exception):
    """iperf3 measured nothing; the message gives the reason."""


def moved_between(server: int, client: int, address: str, streams: int) -> float | str | None:
    """Measure between two ranks; the client returns the rate or an error, other ranks wait."""
    rate_bps: float | str | None = None
    with contextlib.ExitStack() as until_measured:
        chosen: list[int | None] = [None]
        if dist.get_rank() == server:
            chosen = [until_measured.enter_context(_iperf_server())]
        dist.broadcast_object_list(chosen, server)
        if dist.get_rank() == client:
            command = ["iperf3", "-c", address, "-p", str(chosen[0]), "--bidir", "-J"]
            command += ["--connect-timeout", str(_CONNECT_MS)]
            command += ["-t", str(_MEASURED_S), "-P", str(streams)]
            if chosen[0] is None:
                rate_bps = "iperf3 measured nothing: its server ended before it listened"
            else:
                done = subprocess.run(command, capture_output=True, check=False)
                try:
                    rate_bps = both_ways_bps(json.loads(done.stdout))
                except IperfFailed as error:
                    rate_bps = str(error)
                except (ValueError, KeyError):
                    rate_bps = "iperf3 measured nothing: 3.7 or newer is needed for --bidir"
        dist.barrier()
    return rate_bps


def both_ways_bps(told: dict[str, Any]) -> float:
    """Return the mean of the rates received each way, as iperf3 reports them."""
    if "error" in told:
        raise IperfFailed(f"iperf3 measured nothing: {told['error']}")
    ends = told["end"]["sum_received"], told["end"]["sum_received_bidir_reverse"]
    return sum(float(end["bits_per_second"]) for end in ends) / len(ends)


@contextlib.contextmanager
def _iperf_server() -> Iterator[int | None]:
    """Yield the port at which iperf3 listens, or None if it fails to listen."""
    for _ in range(_PORTS_TRIED):
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        command = ["iperf3", "-s", "-p", str(port), "--forceflush"]
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdout is not None
            try:
                if any(b"Server listening" in line for line in process.stdout):
                    yield port
                    return
            finally:
                process.kill()
    yield None


class MpiFailed(Exception):
    """OpenMPI did not start, or ended; the message quotes its output."""


class MpiTurns:
    """All-reduces by OpenMPI over TCP, with the algorithms that OpenMPI chooses."""

    def __init__(self, largest_bytes: int, hosts: Sequence[str]) -> None:
        """Start the programs; every rank calls this, and `hosts` names each rank's."""
        self._place = tempfile.TemporaryDirectory(prefix="fullwire-")
        self._output = Path(self._place.name, "said").open("w+b")  # noqa: SIM115  # closed by close
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._connection = self._connected(hosts)
        except (OSError, RuntimeError):  # no connection in time, here or at the store
            problem = self._said("it did not start")
            self._clean_up(0)
            raise MpiFailed(problem) from None
        self._connection.settimeout(_MPI_ANSWER_S)
        self._lines = self._connection.makefile("r")
        self._connection.sendall(f"{largest_bytes}\n".encode())

    def check(self, size_bytes: int) -> None:
        """Check one sum, which also opens every connection."""
        if wrong := self._asked(size_bytes, 0)["wrong"]:
            raise RuntimeError(f"mpi: {wrong} sums of {size_bytes} bytes are wrong")

    def turn(self, size_bytes: int, repeats: int) -> Turn:
        """Do all-reduces in a row; all ranks begin together."""
        answer = self._asked(size_bytes, repeats)
        return Turn(answer["time_s"], answer["cpu_s"])

    def close(self) -> None:
        """End the program and mpirun, or the command of mpirun on this host."""
        self._connection.close()
        self._lines.close()
        self._clean_up(_MPI_START_S)

    def _clean_up(self, patience_s: float) -> None:
        if self._process is not None:
            try:
                self._process.wait(patience_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._output.close()
        self._place.cleanup()

    def _connected(self, hosts: Sequence[str]) -> socket.socket:
        """Start mpirun, or mpirun's command for this host, and wait until the program connects."""
        rank, chosen = dist.get_rank(), [0]
        if rank == 0:
            with socket.create_server(("", 0)) as free:
                chosen = [free.getsockname()[1]]
        dist.broadcast_object_list(chosen, 0)
        path = str(Path(self._place.name, "mpi"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            listener.settimeout(_MPI_START_S)
            self._store = dist.TCPStore(  # kept open, because mpirun's agent looks for it
                os.environ["MASTER_ADDR"],
                chosen[0],
                is_master=rank == 0,
                wait_for_workers=False,
                timeout=timedelta(seconds=_MPI_START_S),
            )
            if rank == 0:
                program = [sys.executable, str(mpi_program.__file__)]
                command = [*_MPIRUN, "--mca", "plm_rsh_agent", " ".join(program)]
                command += ["-np", str(len(hosts)), "--host", ",".join(hosts), *program]
            else:
                key = mpi_program.key(hosts[rank])
                command = ["sh", "-c", self._store.get(key).decode()]
            self._process = subprocess.Popen(
                command,
                env={
                    **os.environ,
                    mpi_program.SOCKET_VARIABLE: path,
                    mpi_program.PORT_VARIABLE: str(self._store.port),
                },
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
            )
            connection, _ = listener.accept()
        return connection

    def _asked(self, size_bytes: int, repeats: int) -> dict[str, float]:
        try:
            self._connection.sendall(f"{size_bytes} {repeats}\n".encode())
            answer: dict[str, float] = json.loads(self._lines.readline())
        except (OSError, ValueError):
            raise MpiFailed(self._said("it went away")) from None
        return answer

    def _said(self, what: str) -> str:
        self._output.seek(0)
        output = " ".join(self._output.read(_MPI_CAUGHT).decode(errors="replace").split())
        return f"OpenMPI: {what}. It said: {output or 'nothing'}"


def _cipher_speed() -> list[str]:
    """Return the AES-256-GCM rate that `openssl speed` finds in a second, if openssl is installed.

    One processor encrypts at this rate, so it is the yardstick for an encrypted transport.
    """
    program = shutil.which("openssl")
    if program is None:
        return []
    command = [program, "speed", "-seconds", "1", "-evp", "aes-256-gcm"]
    command += ["-bytes", str(_RECORD_BYTES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"^AES-256-GCM\s+([\d.]+)k$", done.stdout, re.MULTILINE | re.IGNORECASE)
    if found is None:
        return []
    rate_bps = 8000 * float(found[1])
    return [
        f"openssl speed, AES-256-GCM in pieces of 256 KiB, one processor: {show_rate(rate_bps)}"
    ]


def main() -> None:
    """Take part, and write the outcome where the lab expects it."""
    asked, written = map(Path, sys.argv[1:])
    try:
        outcome = take_part(msgspec.json.decode(asked.read_bytes(), type=Contest))
    except FullwireError as error:
        sys.exit(f"fullwire: {error}")
    if outcome is not None:
        written.write_bytes(msgspec.json.encode(outcome))


if __name__ == "__main__":
    main()
