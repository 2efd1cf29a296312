"""Watch the ranks of a job on several hosts: an agent on each, started over the user's own ssh.

An agent looks at the ranks of its host, and writes what it saw to its standard output, twice a
second. It opens no port and leaves no process behind: it ends with its standard input, or when
nobody has asked it for a minute. Clocks are compared over the same pipe, so hosts need no common
clock.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from fullwire.errors import UsageError
from fullwire.recorder.jobs_here import MOST_RANKS, JobHere, RankHere, job_named, job_of
from fullwire.recorder.outside import (
    COLUMNS,
    TIME,
    GpuUse,
    Looks,
    ProcessUse,
    Waits,
    WatchedHost,
    Watcher,
    waits_of,
)
from fullwire.units import shown, visible
from fullwire.version import __version__

MOST_HOSTS = 1024
START_S = 30.0  # within which an agent has found its ranks
_CONNECT_S = 10
_TURN_S = 0.5  # between two lines of an agent
_ASKED_S, _SILENT_S = 1.0, 60.0  # between questions; after so long without one an agent ends
_STALLED_S = 10.0  # after so long without a word the others are judged alone
_WAITS_S = 10.0  # for the stacks of all ranks
_KEPT_CLOCKS = 120
_MOST_LINE, _MOST_NOISE = 32 << 20, 200  # bytes; lines that a login shell may print before
_MOST_PROBLEM = 200
_KEPT_BYTES = 256 << 20  # of looks of all hosts
_NAME = re.compile(r"(?!-)[\w.@:%+-]+", re.ASCII)
Told = TypeVar("Told", RankHere, Waits)
_RANGE = re.compile(r"(\d+)-(\d+)", re.ASCII)


def host_names(text: str) -> tuple[str, ...]:
    """Expand `gpu[1-3,7],user@login`, as Slurm writes lists of hosts."""
    names = list(
        itertools.islice(
            (name for word in re.split(r",(?![^\[]*\])", text) for name in _expanded(word, text)),
            MOST_HOSTS + 1,
        )
    )
    for name in names:
        if not _NAME.fullmatch(name):
            raise UsageError(f"--hosts: expected names as gpu[1-8] or a,b, got {shown(text)}")
    if len(names) > MOST_HOSTS:
        raise UsageError(f"--hosts: expected {MOST_HOSTS:,} hosts at most, got {shown(text)}")
    return tuple(dict.fromkeys(names))


def _expanded(word: str, text: str) -> list[str]:
    before, bracket, rest = word.strip().partition("[")
    inside, end, after = rest.partition("]")
    if not bracket:
        return [before]
    found = []
    for part in inside.split(",") if end else []:
        range_ = _RANGE.fullmatch(part) or _RANGE.fullmatch(f"{part}-{part}")
        if range_ is None or not 0 <= int(range_[2]) - int(range_[1]) <= MOST_HOSTS:
            raise UsageError(f"--hosts: expected ranges as gpu[1-8], got {shown(text)}")
        first, last = int(range_[1]), int(range_[2])
        found += [f"{number:0{len(range_[1])}}" for number in range(first, last + 1)]
    if not found:
        raise UsageError(f"--hosts: expected ranges as gpu[1-8], got {shown(text)}")
    return [f"{before}{number}{more}" for number in found for more in _expanded(after, text)]


def is_here(name: str) -> bool:
    """Return whether this host has the name."""
    return name.partition(".")[0] == socket.gethostname().partition(".")[0]


def command_on(name: str, words: Sequence[str]) -> list[str]:
    """Return the command that runs `fullwire WORDS` on a host: with this Python where it has it."""
    if is_here(name):
        return [sys.executable, "-m", "fullwire", *words]
    python = shlex.quote(sys.executable)
    script = (
        f"if {python} -c 'import fullwire' 2>/dev/null; "
        f"then exec {python} -m fullwire {shlex.join(words)}; "
        f"else exec fullwire {shlex.join(words)}; fi"
    )
    # No question on the terminal; an end of the connection shows within 15 s.
    options = ("BatchMode=yes", f"ConnectTimeout={_CONNECT_S}", "ServerAliveInterval=5")
    settings = [word for option in options for word in ("-o", option)]
    return ["ssh", "-T", *settings, name, f"exec sh -c {shlex.quote(script)}"]


class _Said(msgspec.Struct, omit_defaults=True):
    """A line of an agent."""

    version: str = ""
    machine: str = ""  # the same for two names of one host
    job: JobHere | None = None
    without_connections: tuple[int, ...] = ()
    problem: str = ""
    clock: int = -1  # the question that `now_ns` answers
    now_ns: int = 0
    rows: bytes = b""  # packed; rank after rank, look after look
    gpus: dict[int, GpuUse] = {}
    uses: dict[int, ProcessUse] = {}
    took_s: float = 0.0
    waits: tuple[Waits, ...] | None = None  # of the ranks that were asked, in their order
    ended: bool = False


def serve(pid: int | None, name: str | None) -> None:
    """Look at the ranks of this host until standard input ends; say what is seen."""
    out, lock = sys.stdout.buffer, threading.Lock()

    def say(said: _Said) -> None:
        try:
            with lock:
                out.write(msgspec.json.encode(said) + b"\n")
                out.flush()
        except OSError:
            os._exit(0)  # nobody reads any more

    try:
        job = job_of(pid) if pid is not None else job_named(name or "")
    except UsageError as error:
        say(_Said(version=__version__, problem=str(error)))
        return
    watcher = Watcher(job, keeps_s=10 * _TURN_S)
    say(
        _Said(
            version=__version__,
            machine=_machine(),
            job=job,
            without_connections=watcher.looks.without_connections,
        )
    )
    heard_s = [time.monotonic()]

    def listen() -> None:
        for line in sys.stdin.buffer:
            heard_s[0] = time.monotonic()
            word, _, number = line.strip().partition(b" ")
            if word == b"clock" and number.isdigit():
                say(_Said(clock=int(number), now_ns=time.time_ns()))
            elif word == b"waits":
                asked = [each.pid for each in _asked(job, number.decode(errors="replace"))]
                with ThreadPoolExecutor(8) as pool:
                    say(_Said(waits=tuple(pool.map(waits_of, asked))))
        heard_s[0] = float("-inf")

    threading.Thread(target=listen, daemon=True).start()
    runs, last_ns = True, 0.0
    while runs and time.monotonic() - heard_s[0] < _SILENT_S:
        runs = watcher.watch(_TURN_S)
        looks = watcher.looks
        rows = np.array([rows[rows[:, TIME] > last_ns] for rows in looks.by_rank.values()])
        if rows.shape[1]:
            last_ns = rows[0, -1, TIME]
            packed = zlib.compress(rows.tobytes(), 1)
            gpus, uses = dict(looks.gpus), dict(looks.uses)
            say(_Said(rows=packed, took_s=looks.took_s, gpus=gpus, uses=uses))
    if not runs:  # else nobody asks any more, and the ranks go on
        say(_Said(ended=True))


def _asked(job: JobHere, numbers: str) -> list[RankHere]:
    """Return the ranks whose numbers are listed with commas; without any, all."""
    listed = numbers.split(",") if numbers else ()
    return [each for each in job.ranks if not listed or str(each.rank) in listed]


def jobs_on(hosts: Sequence[str]) -> Iterator[tuple[str, Sequence[Mapping[str, Any]], str]]:
    """Yield for each host the jobs that `fullwire watch` lists there, or why it lists none."""

    def ask(host: str) -> tuple[str, Sequence[Mapping[str, Any]], str]:
        try:
            done = subprocess.run(
                command_on(host, ("watch", "--json")),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=START_S,
            )
            jobs = msgspec.json.decode(done.stdout.splitlines()[-1])["jobs"]
            return host, msgspec.convert(jobs, list[dict[str, Any]]), ""
        except subprocess.TimeoutExpired:
            return host, (), f"it did not answer within {START_S:.0f} s"
        except (OSError, IndexError, KeyError, TypeError, msgspec.MsgspecError) as error:
            told = (
                []
                if isinstance(error, OSError)
                else done.stderr.decode(errors="replace").strip().splitlines()
            )
            return host, (), visible((told or [str(error)])[-1][:_MOST_PROBLEM])

    with ThreadPoolExecutor(32) as pool:
        yield from pool.map(ask, hosts)


@functools.cache
def _machine() -> str:
    """Return a name of this machine, or of this container, whose processes others do not see."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def _in_plain_text(told: Told) -> Told:
    """Return what a host told with texts that no terminal obeys."""
    values = {field.name: getattr(told, field.name) for field in fields(told)}
    texts: dict[str, Any] = {
        name: visible(value) for name, value in values.items() if isinstance(value, str)
    }
    return replace(told, **texts)


class _Agent:
    """An agent that was started on a host, and what it has said so far."""

    def __init__(self, host: str, words: Sequence[str], changed: threading.Condition) -> None:
        self.host = host
        self.problem = ""
        self.job: JobHere | None = None
        self.machine = ""
        self.without_connections: tuple[int, ...] = ()
        self.took_s = 0.0
        self.gpus: Mapping[int, GpuUse] = {}
        self.uses: Mapping[int, ProcessUse] = {}
        self.has_ended = False  # its ranks did
        self.waits: tuple[Waits, ...] | None = None
        self.rows: list[NDArray[np.float64]] = []
        self._changed = changed
        self._clocks: deque[tuple[int, int]] = deque(maxlen=_KEPT_CLOCKS)
        self._asked_ns: dict[int, int] = {}
        self._numbers = itertools.count()
        self._told_s = time.monotonic()  # when it last told of its ranks
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the agent
        try:
            # In a session of its own: Ctrl-C ends the watch, and then the agents.
            self._process = subprocess.Popen(
                command_on(host, words),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,
            )
        except FileNotFoundError:
            raise UsageError(
                "--hosts: expected the program ssh, and there is none on PATH"
            ) from None
        self._reader = threading.Thread(target=self.read, daemon=True)
        self._reader.start()

    @property
    def is_watched(self) -> bool:
        """Return whether it has found ranks and still tells of them."""
        return self.job is not None and not self.doubt

    @property
    def doubt(self) -> str:
        """Return why it is not watched now."""
        silent_s = time.monotonic() - self._told_s
        if self.problem or self.has_ended or silent_s < _STALLED_S:
            return self.problem
        return f"it has told nothing for {silent_s:.0f} s"

    @property
    def clock(self) -> tuple[int, int]:
        """Return how far its clock is ahead of ours, and how sure that is, in ns."""
        return min(self._clocks, key=lambda each: each[1], default=(0, 0))

    def ask(self, word: str) -> None:
        """Ask for the clock or for what ranks wait for."""
        if word == "clock":
            number = next(self._numbers)
            self._asked_ns = {**self._asked_ns, number: time.time_ns()}
            self._asked_ns.pop(number - _KEPT_CLOCKS, None)
            word = f"clock {number}"
        with contextlib.suppress(OSError):  # it has gone: its reader tells why
            assert self._process.stdin is not None
            self._process.stdin.write(f"{word}\n".encode())
            self._process.stdin.flush()

    def read(self) -> None:
        """Take the lines of the agent until it ends."""
        noise, problem = 0, ""
        assert self._process.stdout is not None
        while not problem and (line := self._process.stdout.readline(_MOST_LINE)):
            try:
                said = msgspec.json.decode(line, type=_Said)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                noise += 1
                if self.job is None and noise <= _MOST_NOISE:
                    continue  # of the login shell
                problem = "expected lines of an agent, got others"
            else:
                with self._changed:
                    problem = self.take(said)
                    if said.job is not None or said.waits is not None or said.ended:
                        self._changed.notify_all()
        if not problem and not self.has_ended:
            problem = self.why_ended()
        with self._changed:
            self.problem = self.problem or visible(problem[:_MOST_PROBLEM])
            self._changed.notify_all()

    def take(self, said: _Said) -> str:
        """Keep what an agent said; return what is wrong with it."""
        now_ns = time.time_ns()
        if said.version and said.version != __version__:
            return f"it has fullwire {said.version}, and this is {__version__}"
        if said.problem:
            return said.problem
        if said.job is not None:
            numbers = [each.rank for each in said.job.ranks]
            if not 0 < len({*numbers}) == len(numbers) <= MOST_RANKS:
                return "expected ranks that differ"
            ranks = [_in_plain_text(each) for each in said.job.ranks]
            self.job, self.machine = replace(said.job, ranks=tuple(ranks)), said.machine
            self.without_connections = said.without_connections
            self._told_s = time.monotonic()
        if said.clock in self._asked_ns:
            asked_ns = self._asked_ns[said.clock]
            self._asked_ns = {}
            middle_ns, half_ns = (now_ns + asked_ns) // 2, (now_ns - asked_ns) // 2
            is_ours = self.machine == _machine()
            self._clocks.append((0, 0) if is_ours else (said.now_ns - middle_ns, half_ns))
        if said.rows and self.job is not None:
            shape = len(self.job.ranks), -1, COLUMNS
            try:
                unpacked = zlib.decompressobj().decompress(said.rows, _MOST_LINE)
                self.rows.append(np.frombuffer(unpacked).reshape(shape))
            except (zlib.error, ValueError):
                return "expected looks at its ranks, got other bytes"
            self.gpus, self.uses = said.gpus, said.uses
            self.took_s, self._told_s = said.took_s, time.monotonic()
        if said.waits is not None:
            self.waits = tuple(_in_plain_text(each) for each in said.waits)
        self.has_ended = self.has_ended or said.ended
        return ""

    def why_ended(self) -> str:
        """Return the last line of ssh or of the agent, or how it ended."""
        status = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read(1 << 16).decode(errors="replace").strip().splitlines()
        if status == 127:
            return "no fullwire was found there: install it, or put it on the PATH of ssh's shell"
        return lines[-1] if lines else f"the connection ended (status {status})"

    def end_input(self) -> None:
        """Tell the agent to end."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()

    def close(self) -> None:
        """Wait for the end of the agent; what is left of it on this host is killed."""
        try:
            self._process.wait(3)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(1)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()


class HostsWatcher:
    """Looks at the ranks of a job on several hosts, as a Watcher does on one."""

    def __init__(self, hosts: Mapping[str, Sequence[str]], keeps_s: float = float("inf")) -> None:
        """Start an agent on each host with the given words, and wait until they found ranks."""
        self._keeps_s = keeps_s
        self._changed = threading.Condition()
        self._agents: list[_Agent] = []
        try:
            for host, words in hosts.items():
                self._agents.append(_Agent(host, ("watch", "--agent", *words), self._changed))
            with self._changed:
                self._changed.wait_for(
                    lambda: all(each.job or each.problem for each in self._agents), START_S
                )
                self.job = self._agree()
                for each in self._agents:
                    each.rows.clear()  # those of the first hosts, before the last had begun
        except BaseException:
            self.close()
            raise
        self._begun_s = time.monotonic()

    def _agree(self) -> JobHere:
        """Make one job of what the hosts found; leave out the hosts that do not fit."""
        first: _Agent | None = None
        hosts: dict[str, str] = {}
        taken: dict[int, str] = {}
        guessed = 0
        for agent in self._agents:
            if agent.job is None:
                agent.problem = agent.problem or f"it did not answer within {START_S:.0f} s"
            if agent.problem or agent.job is None:
                continue
            job = agent.job
            if first is not None and job.is_guessed:  # no environment told the ranks
                ranks = [replace(each, rank=each.rank + guessed) for each in job.ranks]
                job = replace(job, ranks=tuple(ranks))
            twice = [each.rank for each in job.ranks if each.rank in taken]
            if agent.machine in hosts:
                agent.problem = f"it is the host {hosts[agent.machine]}, which is watched already"
            elif (
                first is not None
                and first.job is not None
                and not job.is_guessed
                and (job.workers != first.job.workers)
            ):
                agent.problem = (
                    f"its job has {job.workers:,} ranks, that of {first.host} has "
                    f"{first.job.workers:,}: another job of this name"
                )
            elif twice:
                agent.problem = (
                    f"it has rank {twice[0]} as {taken[twice[0]]} has: another job of this name"
                )
            if agent.problem:
                continue
            first = first or agent
            agent.job = job
            hosts[agent.machine] = agent.host
            taken |= {each.rank: agent.host for each in job.ranks}
            guessed += len(job.ranks)
        if first is None or first.job is None:
            why = "; ".join(f"{each.host}: {each.problem}" for each in self._agents)
            raise UsageError(f"watch --hosts: no host can be watched: {why}")
        found = [each for agent in self._watched() if agent.job for each in agent.job.ranks]
        return replace(
            first.job,
            ranks=tuple(sorted(found, key=lambda each: each.rank)),
            workers=len(found) if first.job.is_guessed else first.job.workers,
        )

    def _watched(self) -> list[_Agent]:
        return [agent for agent in self._agents if agent.is_watched]

    def watch(self, seconds: float) -> bool:
        """Wait some seconds for looks; return whether every rank still runs."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            for agent in self._agents:
                agent.ask("clock")
            with self._changed:
                is_over = self._changed.wait_for(
                    lambda: (
                        all(each.problem for each in self._agents)
                        or any(each.has_ended and not each.problem for each in self._agents)
                    ),
                    min(left_s, _ASKED_S),
                )
            if is_over:
                return False
        return True

    @property
    def seconds(self) -> float:
        """Return how long it has watched."""
        return time.monotonic() - self._begun_s

    @property
    def looks(self) -> Looks:
        """Return the looks at the hosts that still tell, by our clock."""
        by_rank: dict[int, NDArray[np.float64]] = {}
        hosts: list[WatchedHost] = []
        with self._changed:
            # Where the last host is lost, its looks are the answer.
            watched = self._watched() or [each for each in self._agents if each.rows]
            most = _KEPT_BYTES // (8 * COLUMNS * max(len(self.job.ranks), 1))
            for agent in self._agents:
                if agent not in watched or agent.job is None:
                    hosts.append(WatchedHost(host=agent.host, problem=agent.doubt))
                    continue
                ahead_ns, unsure_ns = agent.clock
                ranks = tuple(each.rank for each in agent.job.ranks)
                hosts.append(
                    WatchedHost(
                        host=agent.host,
                        ranks=ranks,
                        problem=agent.doubt,
                        clock_offset_s=ahead_ns / 1e9,
                        clock_uncertainty_s=unsure_ns / 1e9,
                    )
                )
                rows = (
                    np.concatenate(agent.rows, axis=1)[:, -most:]
                    if agent.rows
                    else np.zeros((len(ranks), 0, COLUMNS))
                )
                if rows.shape[1] and np.isfinite(self._keeps_s):
                    rows = rows[:, rows[0, :, TIME] >= rows[0, -1, TIME] - self._keeps_s * 1e9]
                agent.rows = [rows]
                for rank, own in zip(ranks, rows.copy(), strict=True):
                    own[:, TIME] -= ahead_ns
                    by_rank[rank] = own
        told = {rank for agent in watched for rank in agent.without_connections}
        return Looks(
            job=replace(
                self.job, ranks=tuple(each for each in self.job.ranks if each.rank in by_rank)
            ),
            by_rank=dict(sorted(by_rank.items())),
            took_s=max((agent.took_s for agent in watched), default=0.0),
            seconds=self.seconds,
            hosts=tuple(hosts),
            without_connections=tuple(sorted(told & by_rank.keys())),
            gpus={rank: use for agent in watched for rank, use in agent.gpus.items()},
            uses={rank: use for agent in watched for rank, use in agent.uses.items()},
            ask=self._ask_waits,
        )

    def _ask_waits(self, ranks: Collection[int] | None = None) -> Mapping[int, Waits]:
        """Ask hosts what their ranks wait for; a rank that nobody tells of sleeps."""
        numbers = ",".join(map(str, ranks or ()))
        asked = {each: _asked(each.job, numbers) for each in self._watched() if each.job}
        asked = {agent: of_agent for agent, of_agent in asked.items() if of_agent}
        for agent in asked:
            agent.waits = None
            agent.ask(f"waits {numbers}")
        with self._changed:
            self._changed.wait_for(
                lambda: all(each.waits is not None or each.problem for each in asked), _WAITS_S
            )
        found: dict[int, Waits] = {}
        for agent, of_agent in asked.items():
            told = agent.waits or (Waits("S", ""),) * len(of_agent)
            found |= {each.rank: waits for each, waits in zip(of_agent, told, strict=False)}
        return found

    def close(self) -> None:
        """End all agents."""
        for agent in self._agents:
            agent.end_input()
        for agent in self._agents:
            agent.close()
