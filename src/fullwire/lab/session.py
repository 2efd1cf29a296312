"""One job on a lab: ranks on their hosts, faults on a timetable, and the job's exit status.

Under chaos, a killed host's command starts again a second later, as a pod does. The job is elastic
if its ranks meet in the folder of `ElasticJob`: then it ends well once one rank has completed it,
however many were lost. The ranks of another job end 10 s after one of them has failed.

The lab starts every rank itself, with the variables that frameworks read. A command may also be a
launcher, which starts ranks of its own. torchrun takes the other hosts from variables or from
options (torch/distributed/argparse_util.py). On processors accelerate starts the script once, with
the variables that it has; for several processes it sets another address of the first rank
(accelerate/utils/launch.py). Other launchers take the hosts from options only, and accelerate too
where it starts them. A host that sent nothing ran a job of its own.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from fullwire.errors import UsageError
from fullwire.files import opened
from fullwire.lab import TORCHRUN
from fullwire.lab.description import interface_of
from fullwire.lab.faults import RESTARTS_S, Chaos, Fault
from fullwire.lab.lab import Lab
from fullwire.lab.terminal import take_terminal
from fullwire.units import show_rate, show_time

MASTER_PORT = 29500  # torch's own default; it is free in the lab's own network
GRACE_S = 10.0  # for the other ranks, once one has failed
_LAST_WORDS_S = 0.5  # for the news of an end that is on its way
_LONGEST_WAIT_S = 3600.0  # in one call: the kernel counts milliseconds in 31 bits
_POLITE_S = 3.0  # between asking a job to end and ending it

_TALK_BYTES = 1000  # a host that sends less runs a job of its own
_LONG_JOB_S = 2.0  # a shorter command may be a job of one host
_OTHER_LAUNCHERS = ("deepspeed", "horovodrun", "mpiexec", "mpirun")
_ACCELERATE = "accelerate"
_APART = re.compile(
    r"--standalone|--nnodes[= ]1(:1)?(?=\s|$)|--rdzv[-_]endpoint[= ](localhost|127\.0\.0\.1)\S*"
)
# Options of accelerate: those behind the script, or the module, are its own.
_OPTIONS = r"accelerate launch(?: (?!\S+\.py(?:\s|$)|-m\s|--module\s)\S+)*? "
_STARTS_ANOTHER = re.compile(_OPTIONS + r"--(multi[-_]gpu|use[-_]\w+)")
_SETS_FIRST_RANK = re.compile(_OPTIONS + r"(--num[-_]processes[= ](?!0*1(\s|$))\d+)")
_CONFIG_OF_ACCELERATE = ("accelerate", "default_config.yaml")
_TO_ANOTHER_HOST = re.compile(_OPTIONS + r"--main[-_]process[-_]ip[= ](?!localhost|127\.)")
# The hosts share one machine's processors. With all of them as threads, each rank would slow the
# others. torchrun sets this where it starts several ranks (torch/distributed/run.py). A lab of one
# rank has it too: it is the baseline of the others. A value of the user's own wins.
_THREADS = {"OMP_NUM_THREADS": "1"}
_SCRIPT_BYTES = 1 << 16  # read from a shell script, which may start a launcher
_FIRST_LINE_BYTES = 256  # as much as the kernel reads of it
_SHELL = re.compile(rb"#![ \t]*(?:\S*/env\s+(?:-\S+\s+)*)?\S*sh\s")

Say = Callable[[str], None]
Note = Callable[[Fault, int], None]  # a fault, and its time on the monotonic clock


class ElasticJob(Protocol):
    """The workers of an elastic job: the lab starts them, and they meet by themselves."""

    def variables(self, rank: int) -> Mapping[str, str]:
        """Return the variables for the next worker at a rank's place."""

    def lost(self, rank: int) -> None:
        """Tell the others that a rank's worker has ended."""

    def complete(self) -> None:
        """Tell those who would join that the job is complete."""

    @property
    def has_met(self) -> bool:
        """Say whether the ranks of this job are workers that may be lost."""


def run_job(
    lab: Lab,
    command: Sequence[str],
    faults: Sequence[Fault] = (),
    *,
    environment: Mapping[str, str] = os.environ,
    packet_socket: str | None = None,
    say: Say = lambda sentence: None,
    chaos: Chaos | None = None,
    elastic: ElasticJob | None = None,
    note: Note = lambda fault, time_ns: None,
) -> int:
    """Run a command as every rank; return the exit status of the first rank to fail, or 0."""
    words, file = words_of(command), None
    launchers = (*TORCHRUN, _ACCELERATE, *_OTHER_LAUNCHERS)
    launcher = next((word for word in words if word in launchers), None)
    given = " ".join(words)
    if launcher == _ACCELERATE:
        whole = words_of(command, keeps_folders=True)
        given, file = _with_config_of_accelerate(given, whole, environment)
    apart = _APART.search(given)  # such an option keeps a launcher on one host
    is_alone = launcher in _OTHER_LAUNCHERS or (launcher and apart) or _STARTS_ANOTHER.search(given)
    meets = _TO_ANOTHER_HOST.search(given)
    if lab.description.ranks == 1:
        pass
    elif is_alone:
        cause = apart[0] if apart else f"{launcher} reads no variable that names the others"
        say(
            f"warning: each host runs a job of its own ({cause}): expected `-- python SCRIPT`, "
            "for the lab starts every rank, or torchrun with its own defaults"
        )
    elif not meets and (several := _SETS_FIRST_RANK.search(given)):
        first = rank_environment(lab, 0)["MASTER_ADDR"]
        is_from_file = _SETS_FIRST_RANK.search(" ".join(words)) is None
        cure = "add --num_processes 1" if is_from_file else "leave this option of accelerate out"
        say(
            "warning: each rank looks for rank 0 on its own host "
            f"({several[1]}{f' from {file}' if is_from_file else ''}): {cure}, or "
            f"{'' if is_from_file else 'add '}--main_process_ip {first}"
        )

    def start(rank: int) -> None:
        variables = {**_THREADS, **environment, **rank_environment(lab, rank)}
        if not apart:
            variables |= _torchrun_environment(lab, rank)
        if elastic is not None:
            variables |= elastic.variables(rank)
        lab.start(rank, command, variables, packet_socket=packet_socket)

    for rank in range(lab.description.ranks):
        start(rank)
    job = _Job(lab, faults, say, chaos, elastic, start, note)
    try:
        status = job.finish()
    except KeyboardInterrupt:
        job.end(signal.SIGINT)
        raise
    except BaseException:
        job.end(signal.SIGTERM)
        raise
    if status == 0:
        job.tell_who_never_met(is_sure=launcher is not None)
    return status


def run_shell(lab: Lab, host: int) -> int:
    """Run the user's shell on one host as its first rank, in the foreground of the terminal."""
    shell = os.environ.get("SHELL", "/bin/sh")
    rank = host * lab.description.ranks_per_host
    environment = {**_THREADS, **os.environ, **rank_environment(lab, rank)}
    lab.start(rank, [shell], environment, in_foreground=True)
    try:
        while (ended := lab.next_end(None)) is None:
            pass
    finally:
        take_terminal()  # back from the shell, or printing would stop us
    return ended.status


def summary(lab: Lab) -> str:
    """Say what the links deliver, in one sentence."""
    least = min(lab.links, key=lambda link: link.delivered_share)
    below = ""
    if lab.uplinks:
        slowest = min(lab.uplinks, key=lambda link: link.delivered_bps)
        below = (
            f"; {len(lab.uplinks)} leaves below a spine, uplinks deliver at least "
            f"{show_rate(slowest.delivered_bps)} of {show_rate(slowest.payload_limit_bps)}"
        )
    count, ranks, nics = lab.description.cluster.nodes, lab.description.ranks_per_host, ""
    if lab.description.nics_per_host > 1:
        nics = f" and {lab.description.nics_per_host} NICs"
    of_ranks = f" of {ranks} ranks{nics}" if ranks > 1 else ""
    hosts = f"{count} host{'s' if count > 1 else ''}{of_ranks}"
    # The parts of a described cluster that this machine has in its own way.
    words = ""
    if lab.in_host_bps is not None:
        words += (
            f". Ranks of a host are joined by this machine's memory, {show_rate(lab.in_host_bps)} "
            "over TCP, unshaped"
        )
    if lab.description.left_out_s:
        words += (
            f". {show_time(lab.description.left_out_s)} of latency are not added, since a small "
            "message takes as long here anyway"
        )
    if not _THREADS.keys() & os.environ.keys():
        words += ". Each rank has OMP_NUM_THREADS=1, since OMP_NUM_THREADS is not set here"
    return (
        f"{hosts} up; links deliver at least {least.delivered_share:.1%} of the "
        f"payload that their line rates allow (host {least.host}: "
        f"{show_rate(least.delivered_bps)} of {show_rate(least.payload_limit_bps)})"
        f"{below}{words}"
    )


def rank_environment(lab: Lab, rank: int) -> dict[str, str]:
    """Return the variables that torch.distributed and the frameworks on it read in a rank."""
    description = lab.description
    interface = interface_of(description.nic_of(rank))
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(description.ranks),
        "LOCAL_RANK": str(description.place_of(rank)),
        "LOCAL_WORLD_SIZE": str(description.ranks_per_host),
        "NODE_RANK": str(description.host_of(rank)),  # Lightning's
        "OMPI_COMM_WORLD_RANK": str(rank),  # Open MPI's, which many scripts read
        "OMPI_COMM_WORLD_SIZE": str(description.ranks),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(description.place_of(rank)),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(description.ranks_per_host),
        "OMPI_COMM_WORLD_NODE_RANK": str(description.place_of(rank)),
        "MASTER_ADDR": lab.addresses[0],
        "MASTER_PORT": str(MASTER_PORT),
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
    }


def _torchrun_environment(lab: Lab, rank: int) -> dict[str, str]:
    """Return the variables that join a torchrun in each rank's place; its options still win."""
    return {
        "PET_NNODES": str(lab.description.ranks),
        "PET_NODE_RANK": str(rank),
        "PET_MASTER_ADDR": lab.addresses[0],
        "PET_MASTER_PORT": str(MASTER_PORT),
        "PET_RDZV_ENDPOINT": f"{lab.addresses[0]}:{MASTER_PORT}",
    }


def words_of(command: Sequence[str], *, keeps_folders: bool = False) -> list[str]:
    """Return the words of a command and of the shell scripts that it names."""
    words = " ".join(command).split()
    for word in command:
        with contextlib.suppress(UsageError, ValueError), opened(Path(word)) as file:
            text = file.read(_FIRST_LINE_BYTES)
            if _SHELL.match(text) or word.endswith(".sh"):
                words += (text + file.read(_SCRIPT_BYTES)).decode(errors="replace").split()
    if keeps_folders:
        return words
    return [word if word.startswith("-") else word.rpartition("/")[2] for word in words]


def _with_config_of_accelerate(
    given: str, words: Sequence[str], environment: Mapping[str, str]
) -> tuple[str, Path | None]:
    """Return a command with the options that accelerate takes from its file, and that file.

    `words` are those of the command and its shell scripts, with folders. Its own options win. It
    reads the usual file if none is given and computing on processors is not asked for
    (accelerate/commands/launch.py).
    """
    named = re.search(_OPTIONS + r"--config[-_]file[= ][\"']?([^\s\"']+)", " ".join(words))
    if named is None and re.search(_OPTIONS + r"--cpu(\s|$)", given):
        return given, None
    cache = environment.get("XDG_CACHE_HOME", "~/.cache")
    usual = Path(environment.get("HF_HOME", f"{cache}/huggingface"), *_CONFIG_OF_ACCELERATE)
    file = (usual if named is None else Path(named[1])).expanduser()
    text = ""
    with contextlib.suppress(UsageError, ValueError), opened(file) as config:
        text = config.read(_SCRIPT_BYTES).decode(errors="replace")
    try:
        of_json = json.loads(text)
        values = {name: str(value) for name, value in of_json.items() if value is not None}
    except (ValueError, AttributeError):  # YAML
        pattern = r"""^[ "']*(\w+)["']?\s*:\s*["']?([\w.]+)"""
        values = dict(re.findall(pattern, text, re.MULTILINE))
    # An option of the same name on the command line wins.
    kind = values.get("distributed_type", "").rpartition(".")[2]
    starts = {"DEEPSPEED": "--use_deepspeed", "FSDP": "--use_fsdp"}
    if kind.startswith("MULTI_") and kind != "MULTI_CPU":
        starts[kind] = "--multi_gpu"
    more = [starts[kind]] if kind in starts else []
    for name in ("num_processes", "main_process_ip"):
        is_given = re.search(_OPTIONS + "--" + name.replace("_", "[-_]"), given)
        if name in values and values[name] != "null" and not is_given:
            more.append(f"--{name} {values[name]}")
    begin = f"{_ACCELERATE} launch "
    return given.replace(begin, f"{begin}{' '.join(more)} ", 1) if more else given, file


class _Job:
    """The running ranks, the faults that are still to come, and the first failure."""

    def __init__(
        self,
        lab: Lab,
        faults: Sequence[Fault],
        say: Say,
        chaos: Chaos | None,
        elastic: ElasticJob | None,
        start: Callable[[int], None],
        note: Note,
    ) -> None:
        self._lab = lab
        self._running = set(range(lab.description.ranks))
        self._paused: set[int] = set()  # the numbers of paused hosts
        self._listed = list(faults)  # on the timetable, and still to come
        by_chance = () if chaos is None else chaos.faults(lab.description)
        self._to_come = heapq.merge(faults, by_chance, key=lambda fault: fault.at_s)
        self._next = next(self._to_come, None)
        self._elastic, self._start, self._note = elastic, start, note
        self._killed: dict[int, float] = {}  # by host: when its commands start again
        self._is_complete = False
        self._say = say
        self._began_s = time.monotonic()
        self._ends_at_s: float | None = None
        self._status = 0
        self._sent_bytes: dict[int, int] = {}  # by host, once a rank has ended there

    def finish(self) -> int:
        """Wait for the last rank, while the timetable runs."""
        while self._running or self._killed:
            # End soon if every host that is left is paused for good.
            if self._ends_at_s is None and self._is_at_a_standstill():
                self._ends_at_s = time.monotonic() + _LAST_WORDS_S
                self._say("only paused hosts are left, and nothing restores them: they are killed")
            ended = self._lab.next_end(self._time_to_next_s())
            if ended is not None:
                host = self._lab.description.host_of(ended.rank)
                self._sent_bytes[host] = ended.sent_bytes
                self._note_end(ended.rank, ended.status)
            elif self._ends_at_s is not None and time.monotonic() >= self._ends_at_s:
                if not self._is_complete:
                    self._status = self._status or 128 + signal.SIGKILL
                self.end(signal.SIGTERM)
                break
            else:
                self._disturb()
        return 0 if self._is_complete else self._status

    def tell_who_never_met(self, *, is_sure: bool) -> None:
        """Warn of hosts that sent nothing: their ranks were alone."""
        silent = [host for host, sent in sorted(self._sent_bytes.items()) if sent < _TALK_BYTES]
        is_long = time.monotonic() - self._began_s >= _LONG_JOB_S
        if self._lab.description.cluster.nodes > 1 and silent and (is_sure or is_long):
            hosts = "host" if len(silent) == 1 else "hosts"
            self._say(
                f"warning: {hosts} {', '.join(map(str, silent))} sent nothing to another host: "
                "ranks there met only each other"
            )

    def _is_at_a_standstill(self) -> bool:
        left = {self._lab.description.host_of(rank) for rank in self._running}
        left |= self._killed.keys()
        awaited = {fault.host for fault in self._listed if fault.kind in ("restore", "kill")}
        return left <= self._paused - awaited

    def end(self, number: int) -> None:
        """Ask the ranks to end, and wait a little; the lab ends those that remain."""
        self._lab.signal(number)
        until_s = time.monotonic() + (0 if self._is_at_a_standstill() else _POLITE_S)
        while self._running and (left_s := until_s - time.monotonic()) > 0:
            if (ended := self._lab.next_end(left_s)) is not None:
                self._running.remove(ended.rank)

    def _time_to_next_s(self) -> float | None:
        moments_s = list(self._killed.values())
        if self._next is not None:
            moments_s.append(self._began_s + self._after_s(self._next))
        if self._ends_at_s is not None:
            moments_s.append(self._ends_at_s)
        if not moments_s:
            return None
        return min(max(0.0, min(moments_s) - time.monotonic()), _LONGEST_WAIT_S)

    def _note_end(self, rank: int, status: int) -> None:
        self._running.remove(rank)
        if self._elastic is not None:
            self._elastic.lost(rank)
            if status == 0 and self._elastic.has_met and not self._is_complete:
                self._is_complete = True
                self._killed.clear()
                self._elastic.complete()
                self._end_soon()
        if status == 0 or self._lab.description.host_of(rank) in self._killed:
            return
        goes_on = self._elastic is not None and self._elastic.has_met
        if self._status != 0 and not goes_on:
            return
        self._status = self._status or status
        if not self._is_complete:
            self._say(f"rank {rank} failed with exit status {status}")
            if not goes_on:
                self._end_soon()

    def _end_soon(self) -> None:
        if self._running:
            self._ends_at_s = time.monotonic() + GRACE_S
            if not self._is_complete:
                self._say(f"the other ranks have {show_time(GRACE_S)} to end")

    def _disturb(self) -> None:
        now_s = time.monotonic()
        for host in [host for host, at_s in self._killed.items() if at_s <= now_s]:
            each = self._lab.description.ranks_per_host
            ranks = set(range(host * each, (host + 1) * each))
            if ranks & self._running:  # the news of an end is on its way
                self._killed[host] = now_s + _LAST_WORDS_S
                continue
            del self._killed[host]
            self._say(f"{show_time(now_s - self._began_s)}: host {host} starts again")
            for rank in sorted(ranks):
                self._running.add(rank)
                self._start(rank)
        while self._next is not None and self._began_s + self._after_s(self._next) <= now_s:
            fault, self._next = self._next, next(self._to_come, None)
            is_by_chance = fault not in self._listed
            if not is_by_chance:
                self._listed.remove(fault)
            elif fault.kind == "kill":
                host_of = self._lab.description.host_of
                runs = any(host_of(rank) == fault.host for rank in self._running)
                if self._ends_at_s is not None or not runs:
                    continue
                self._killed[fault.host] = now_s + RESTARTS_S
            self._note(fault, time.monotonic_ns())
            self._lab.disturb(fault)
            if fault.kind == "pause" and not is_by_chance:
                self._paused.add(fault.host)
            elif fault.kind == "restore":
                self._paused.discard(fault.host)
            self._say(f"{show_time(fault.at_s)}: {fault}")

    def _after_s(self, fault: Fault) -> float:
        return fault.at_s * self._lab.description.dilation
