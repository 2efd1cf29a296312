"""Run a job unchanged and write its run: the whole of `fullwire record`.

While a job runs, one line on a terminal shows its progress, from the tail of a rank's journal. The
line ends with a carriage return in place of a new line, so the job's own output overwrites it. The
line appears only if standard error is a terminal.

A job may be recorded in parts, by one `fullwire record --part` for each task that a launcher
starts. The parts write into one directory if they share a file system, else each host into its own.
Each file there belongs to one process, so parts never wait for each other. Every part also leaves a
note of its exit status. The note names the job if the launcher does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fullwire.errors import DamagedInput, UsageError
from fullwire.files import planted
from fullwire.recorder.assemble import Known, assemble
from fullwire.recorder.captured import put_captures
from fullwire.recorder.command_line import without_secrets
from fullwire.recorder.inside import DIRECTORY_VARIABLE, LINES_VARIABLE, TRIAL_VARIABLE
from fullwire.recorder.inside.journal import BLOCK, HEADER_BYTES, NOTES, RUNNING, Note
from fullwire.recorder.inside.journal import SUFFIX as JOURNALS
from fullwire.recorder.journals import (
    DAMAGED,
    Header,
    blocks_in,
    files_in,
    read_header,
    refuse_planted,
    unpacked,
)
from fullwire.recorder.launch import (
    check_capturing,
    recorded_environment,
    run_to_its_end,
    sampled_command,
    wait_for_captures,
    wait_for_samplers,
)
from fullwire.recorder.printed import Output, Pattern
from fullwire.recorder.sampler import SUFFIX as SAMPLES
from fullwire.run.facts import Facts
from fullwire.run.run import Run
from fullwire.run.store import PRIVATE, RunWriter, new_place, read_run, refuse_taken
from fullwire.units import show_time

_INTERRUPTED = 128 + signal.SIGINT  # the status that a shell gives
_NOTE = "recorder.json"  # among the journals: which process makes the run of them
_LOOK_S = 0.1
_SAY_AFTER_S = 0.5
_YOUNG_S = 2.0  # Python needs less until it loads torch
_LONGEST_IMPORT_S = 60.0  # of torch, from a slow file system
_KNOWN = "job.json"  # among the journals: other facts of the job
PART_SUFFIX = ".part"
# Launchers that start tasks, each with the variable that holds the number of tasks. A Slurm batch
# script is no task: it has SLURM_NTASKS but lacks this variable.
_LAUNCHERS = (
    ("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPI", "PMI_RANK", "PMI_SIZE"),
    ("torch.distributed", "RANK", "WORLD_SIZE"),
)
# Variables that differ between two jobs, or two job steps, that write to the same place.
_JOB_VARIABLES = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
_LINE_EVERY_S = 1.0
_RECENT = 20  # number of steps whose usual length is shown
_ERASE = "\r\x1b[K"


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Recording:
    """A recorded job: the path of its run, and its exit status."""

    path: Path
    exit_status: int

    @property
    def run(self) -> Run:
        """The run of the job, read from its path."""
        return read_run(self.path)


def record(
    command: Sequence[str],
    output: str | Path,
    *,
    packets: bool = False,
    probe: bool = False,
    noise: bool = False,
    metric: str | Sequence[str] = (),
    replace: bool = False,
    private: bool = False,
    live: Callable[[Path], contextlib.AbstractContextManager[None]] | None = None,
    source: Sequence[str] = (),
) -> Recording:
    """Run a command, record its processes, and write the run.

    - `command`: the words of the command.
    - `output`: the path of the run.
    - `packets`: capture the headers of all packets on this host's interfaces meanwhile. The run
      then has its flows, and the captures themselves.
    - `probe`: a few steps keep communication apart from computing. They show the time of computing
      by itself, and are left out of step times.
    - `noise`: note gradient noise in one step of ten, for the time to a target.
    - `metric`: patterns for metrics in the job's output, such as `"loss: ([0-9.]+)"`.
    - `replace`: replace a run that exists.
    - `private`: only this user may read the run and its recording, under any umask.
    - `live`: is given the recording's directory, and entered while the job runs, to show it.
    - `source`: the words of the command that the run names, if another program starts it.

        done = fw.record(["torchrun", "--nproc-per-node=2", "train.py"], "job.run")
        done.exit_status
        fw.explain(done.path)
    """
    _check_command(command)
    refuse_one_of_many(Path(output), os.environ)
    if packets:
        check_capturing()
    patterns = [Pattern(text) for text in ([metric] if isinstance(metric, str) else metric)]

    def play(directory: Path) -> int:
        environment = recorded_environment(directory, os.environ, probe=probe, noise=noise)
        sampled = sampled_command(directory, command, packets=packets)
        if not patterns:
            return run_to_its_end(sampled, environment)
        printed = Output(patterns, directory, Progress(directory).steps)
        passed_on.enter_context(contextlib.closing(printed))
        return run_to_its_end(sampled, environment | {LINES_VARIABLE: "1"}, printed.began)

    passed_on = contextlib.ExitStack()
    known = Known(source=without_secrets(source or command))
    return keep(play, output, known, replace=replace, private=private, beside=passed_on, live=live)


def keep(
    play: Callable[[Path], int],
    output: str | Path,
    known: Known,
    *,
    replace: bool = False,
    private: bool = False,
    beside: contextlib.AbstractContextManager[Any] | None = None,
    live: Callable[[Path], contextlib.AbstractContextManager[None]] | None = None,
) -> Recording:
    """Play a job whose processes record themselves into a directory, and write it as a run.

    `beside` ends after the job's last process, and before the run is made.
    The directory lies beside the run. If all processes are killed it stays, and `join` makes the
    run of it. If the user interrupts the job, its recording goes up to that moment.
    """
    place = new_place(output)
    refuse_taken(place, replace)
    directory = directory_of(place)
    _begin(directory, known, private)
    try:
        with (live or live_line)(directory), beside or contextlib.nullcontext():
            status = play(directory)
            # Samplers end with the command, and not with processes that outlive it.
            if longer_s := follow(directory):
                sentence = (
                    f"the command ended {longer_s:.1f} s before its processes: links, connections "
                    "and processors were sampled until then"
                )
                known = dataclasses.replace(known, missing=(*known.missing, sentence))
    except UsageError:  # the job never began
        shutil.rmtree(directory)
        raise
    except KeyboardInterrupt:
        status = _INTERRUPTED
    except SystemExit as asked_to_end:
        status = int(asked_to_end.code or 0)
    left = f"the recording is in {directory}: `fullwire join {directory} -o NAME.run`"
    ended = dataclasses.replace(known, facts=known.facts | Facts(exit_status=status))
    try:
        wait_for_samplers(directory, lambda header: True)
        wait_for_captures(directory)
        with RunWriter(place, replace=replace, private=private) as writer:
            path = assemble([directory], writer, ended)
        put_captures(directory, path)
    except UsageError as error:  # for example on a full disk: the recording is kept
        raise _after_the_job(f"{error}; {left}", status or UsageError.exit_status) from None
    except KeyboardInterrupt:
        raise _after_the_job(f"interrupted before a run was made; {left}", _INTERRUPTED) from None
    # The new name keeps a late sampler from beginning a file in the directory.
    leaving = directory.with_name(f".{directory.name}.removing-{os.urandom(4).hex()}")
    with contextlib.suppress(OSError):  # the run is there, so leftover files do no harm
        directory = directory.rename(leaving)
    shutil.rmtree(directory, ignore_errors=True)
    return Recording(path=path, exit_status=status)


def record_part(
    command: Sequence[str],
    output: str | Path,
    *,
    packets: bool = False,
    probe: bool = False,
    noise: bool = False,
    private: bool = False,
) -> int:
    """Run a command that is one task of a job among several; return its exit status.

    The recording of the part stays beside the run's path. `join` makes one run of all parts.
    """
    _check_command(command)
    place = new_place(output)
    refuse_taken(place, False)
    if packets:
        check_capturing()
    directory = directory_of(place)
    refuse_live(directory)
    sampled = sampled_command(directory, command, packets=packets)
    note = begin_part(directory, command, os.environ, private)
    environment = recorded_environment(directory, os.environ, probe=probe, noise=noise)
    status = run_to_its_end(sampled, environment)
    wait_for_samplers(directory, _has_lost_its_job)
    wait_for_captures(directory, f"{socket.gethostname()}-")
    try:
        end_part(note, status)
    except OSError as error:
        problem = f"{note}: how this part ended cannot be noted: {error.strerror}"
        raise _after_the_job(problem, status) from None
    return status


def join(
    directories: Sequence[str | Path], output: str | Path, *, replace: bool = False
) -> Recording:
    """Make one run of a job recorded in parts, or of a job that lost its recorder.

    - `directories`: the directories of its recordings, from one host or from several.
    - `output`: the path of the run.
    - `replace`: replace a run that exists.

        fw.join(["host0.recording", "host1.recording"], "job.run").path
    """
    if isinstance(directories, str):
        raise UsageError(f"join: expected a list of directories, got {directories!r}")
    places = [Path(directory) for directory in directories]
    for place in places:
        # Refuse a directory without a recording: its run would be empty, but look like a real one.
        if not place.is_dir():
            raise UsageError(f"{place}: expected the directory of a recording, and there is none")
        written = (JOURNALS, SAMPLES, PART_SUFFIX)
        if not any(file.name == _KNOWN or file.suffix in written for file in place.iterdir()):
            raise UsageError(f"{place}: nothing was recorded here: expected journals or {_KNOWN}")
        refuse_planted(place)
    for place in places:  # the job may have ended just now, with a process still about to exit
        wait_for_samplers(place, _is_of_this_host)
    known = known_of(places)
    private = any(stat.S_IMODE(place.stat().st_mode) == PRIVATE for place in places)
    with RunWriter(output, replace=replace, private=private) as writer:
        try:
            path = assemble(places, writer, known)
        except DAMAGED as error:
            problem = f"its files do not hold together ({type(error).__name__}: {error})"
            raise DamagedInput(places[0], problem) from None
        except UsageError as error:
            if isinstance(error.__cause__, OSError):  # the run cannot be written
                raise
            raise DamagedInput(places[0], f"its files do not hold together: {error}") from None
    return Recording(path=path, exit_status=0)


def known_of(places: Sequence[Path]) -> Known:
    """Read what is known of a job besides its journals.

    This comes from the file written when the job began, else from the notes of its parts. A job in
    parts, or a directory with just journals, lacks that file.
    """
    described = next((place / _KNOWN for place in places if (place / _KNOWN).is_file()), None)
    if described is not None:
        try:
            return msgspec.json.decode(described.read_bytes(), type=Known)
        except (OSError, msgspec.MsgspecError, UsageError) as error:
            raise DamagedInput(described, str(error)) from None
    parts = parts_in(places)
    facts, missing = told_by(parts)
    source = parts[0].command if parts else shlex.join(map(str, places))
    return Known(source=source, facts=facts, missing=tuple(missing))


def _after_the_job(problem: str, exit_status: int) -> UsageError:
    """Refuse with the job's exit status, which the program that started the job waits for."""
    refused = UsageError(problem)
    refused.exit_status = exit_status
    return refused


def directory_of(run: Path) -> Path:
    """Return the directory of the recording that becomes a run."""
    return run.with_name(f"{run.name}.recording")


def _has_lost_its_job(header: Header) -> bool:
    """Say whether a sampler runs on this host and is about to end."""
    if not _is_of_this_host(header):
        return False
    try:
        state = Path(f"/proc/{header['watched']}/stat").read_text().rpartition(") ")[2]
    except OSError:
        return True
    return state.startswith(("Z", "X"))  # it has ended, and its parent has yet to reap it


def _is_of_this_host(header: Header) -> bool:
    return bool(header["host"] == socket.gethostname()[:64])


def _check_command(command: Sequence[str]) -> None:
    if not command:
        raise UsageError("record: expected a command after --, like: -- torchrun train.py")


def _begin(directory: Path, known: Known, private: bool) -> None:
    """Make the directory, and write into it the facts that `join` could not find out later."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(PRIVATE if private else 0o777)
    except FileExistsError:
        refuse_live(directory)
        raise UsageError(
            f"{directory} is left of a recording that was interrupted: make a run of it with "
            f"`fullwire join {directory} -o NAME.run`, or remove it. Several tasks of one job "
            "record with --part"
        ) from None
    except OSError as error:
        raise UsageError(f"{directory}: cannot be made: {error.strerror}") from None
    try:
        note_maker(directory)
        (directory / _KNOWN).write_bytes(msgspec.json.encode(known))
    except OSError as error:
        shutil.rmtree(directory)
        raise UsageError(f"{directory}: cannot be recorded into: {error.strerror}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One task of a job: its command, and its exit status, which is None until it ends."""

    job: str
    host: str
    command: str
    exit_status: int | None


def refuse_one_of_many(output: Path, environment: Mapping[str, str]) -> None:
    """Refuse to make a whole run of one task among several: all would write the same run."""
    for launcher, rank, count in _LAUNCHERS:
        of = environment.get(count, "")
        if rank in environment and of.isdecimal() and int(of) > 1:
            if TRIAL_VARIABLE in environment:  # other tasks follow the trials of the first one
                if environment[rank] == "0":
                    return
                raise UsageError(
                    f"this is task {environment[rank]} of {of} ({launcher}): expected `fullwire "
                    "run --follow` in all tasks but 0"
                )
            raise UsageError(
                f"this is one of {of} tasks ({launcher}): expected --part. Each task then records "
                f"into {output}.recording, and `fullwire join` makes one run of all"
            )


def begin_part(
    directory: Path, command: Sequence[str], environment: Mapping[str, str], private: bool = False
) -> Path:
    """Note that a part has begun, unless the directory is another job's; return the note's file."""
    job = "/".join(environment[name] for name in _JOB_VARIABLES if name in environment)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(PRIVATE if private else 0o777, exist_ok=True)  # other parts do so just now
        if private:  # a part without --private may have made it
            directory.chmod(PRIVATE)
        refuse_planted(directory)
        others = {part.job for part in parts_in([directory])}
    except OSError as error:
        raise UsageError(f"{directory}: cannot be recorded into: {error}") from None
    if others - {job}:
        raise UsageError(
            f"{directory} holds the parts of another job ({', '.join(sorted(others - {job}))}): "
            f"make a run of it with `fullwire join {directory} -o NAME.run`, and remove it"
        )
    place = directory / f"{socket.gethostname()}-{os.getpid()}-{time.monotonic_ns()}{PART_SUFFIX}"
    _write_note(
        place,
        Part(
            job=job, host=socket.gethostname(), command=without_secrets(command), exit_status=None
        ),
    )
    return place


def end_part(place: Path, exit_status: int) -> None:
    """Note the exit status of a part."""
    _write_note(place, Part(**{**json.loads(place.read_text()), "exit_status": exit_status}))


def parts_in(directories: Sequence[Path]) -> list[Part]:
    """Read the notes of all parts."""
    parts = []
    for path in files_in(directories, PART_SUFFIX):
        try:
            parts.append(msgspec.json.decode(path.read_bytes(), type=Part))
        except (OSError, msgspec.MsgspecError, RecursionError) as error:
            problem = f"expected the note of a part of a job: {error}"
            raise DamagedInput(path, problem) from None
    return parts


def told_by(parts: Sequence[Part]) -> tuple[Facts, list[str]]:
    """Return the facts of the whole job from its parts (such as its exit status), and the gaps."""
    missing = [
        f"host {part.host}: the end of a part was not seen ({part.command})"
        for part in parts
        if part.exit_status is None
    ]
    ends = [part.exit_status for part in parts if part.exit_status is not None]
    if missing or not ends:
        return Facts(), missing
    return Facts(exit_status=next((status for status in ends if status), 0)), missing


def _write_note(place: Path, part: Part) -> None:
    """Write a note in one move, so that a reader finds either the old note or the new one."""
    building = place.with_suffix(".writing")
    building.write_text(json.dumps(asdict(part)))
    building.replace(place)


@contextmanager
def live_line(directory: Path) -> Iterator[None]:
    """Show the progress of the job that records itself into a directory, while the block runs."""
    if not sys.stderr.isatty():
        yield
        return
    progress, ended = Progress(directory), threading.Event()

    def tell() -> None:
        while not ended.wait(_LINE_EVERY_S):
            try:
                line = progress.line()
            except (OSError, ValueError):  # a file that is being removed or written
                continue
            if line:
                sys.stderr.write(f"{_ERASE}{line}\r")
                sys.stderr.flush()

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()
        sys.stderr.write(_ERASE)
        sys.stderr.flush()


class Progress:
    """The progress of a job by the journal of one rank."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._journal: Path | None = None
        self._place = HEADER_BYTES
        self._steps = 0
        self._ends_ns: list[int] = []

    def steps(self) -> int:
        """Read the notes since the last time, and return the number of steps so far."""
        self._journal = self._journal or min(self._directory.glob(f"*{JOURNALS}"), default=None)
        if self._journal is None:
            return 0
        length = self._journal.stat().st_size
        for kind, payload in blocks_in(self._journal, length, self._place):
            self._place += BLOCK.size + len(payload)
            if kind == NOTES:
                ends_ns = unpacked(payload).of(Note.OPTIMIZER)[:, 2].tolist()
                self._steps += len(ends_ns)
                self._ends_ns = [*self._ends_ns, *ends_ns][-_RECENT - 1 :]
        return self._steps

    def line(self) -> str:
        """Sum up the notes so far; return "" before the first step."""
        if not self.steps():
            return ""
        text = f"fullwire: {self._steps:,} step{'' if self._steps == 1 else 's'}"
        if len(self._ends_ns) > 1:
            usual_s = float(np.median(np.diff(self._ends_ns))) * 1e-9
            text += f", lately {show_time(usual_s)} each"
        return text


def note_maker(directory: Path) -> None:
    """Note in a recording which process makes its run."""
    made_by = {"host": socket.gethostname(), "process": os.getpid(), "began": _began(os.getpid())}
    (directory / _NOTE).write_text(json.dumps(made_by))


def refuse_live(directory: Path) -> None:
    """Refuse a recording that a process is still making; removing it would lose everything."""
    try:
        refuse_planted(directory)
        made_by = json.loads((directory / _NOTE).read_text())
        host, process, began = made_by["host"], int(made_by["process"]), made_by["began"]
    except (OSError, *DAMAGED):  # another program's, or only just begun
        return
    if host == socket.gethostname() and began == _began(process):
        raise UsageError(
            f"{directory} is being recorded into by process {process}: leave it alone, and give "
            "this recording another name"
        )


def follow(directory: Path) -> float:
    """Wait for the processes that still record, and return the seconds of waiting.

    The launched command may end before the processes that it started. Ctrl-C ends the waiting.
    """
    began_s, is_said = time.monotonic(), False
    try:
        while recording := _recording(directory) | _about_to_record(directory):
            if not is_said and time.monotonic() - began_s > _SAY_AFTER_S:
                numbers = ", ".join(map(str, sorted(recording)))
                sys.stderr.write(
                    f"fullwire: the command has ended. {len(recording)} of its processes still "
                    f"record ({numbers}), and are followed to their end\n"
                )
                is_said = True
            time.sleep(_LOOK_S)
    except KeyboardInterrupt:
        sys.stderr.write("fullwire: followed no further\n")
    return time.monotonic() - began_s if is_said else 0.0


def _recording(directory: Path) -> set[int]:
    """Return the running processes of this host whose journals are open."""
    found, mark = set(), f"{DIRECTORY_VARIABLE}={directory.resolve()}".encode()
    for path in directory.glob(f"*{JOURNALS}"):
        with contextlib.suppress(OSError, *DAMAGED):
            header = read_header(path, ("pid",)) if not planted(path, directory) else None
            if header is None or header["status"] != RUNNING:
                continue
            # The kernel reuses process numbers: a process of this recording carries its mark.
            process = int(header["pid"])
            environment = Path(f"/proc/{process}/environ")  # empty for a zombie
            if _is_of_this_host(header) and mark in environment.read_bytes().split(b"\0"):
                found.add(process)
    return found


def _about_to_record(directory: Path) -> set[int]:
    """Return the processes of a job that load torch, or are so young that they may do so soon."""
    found, mark = set(), f"{DIRECTORY_VARIABLE}={directory.resolve()}".encode()
    noted = {path.name.split("-")[-2] for path in directory.glob(f"*{JOURNALS}")}
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if place.name in noted or mark not in (place / "environ").read_bytes().split(b"\0"):
                continue
            state, *about = (place / "stat").read_text().rpartition(") ")[2].split()
            age_s = now_s - int(about[18]) / os.sysconf("SC_CLK_TCK")
            loads = b"libtorch" in (place / "maps").read_bytes() and age_s < _LONGEST_IMPORT_S
            is_python = b"python" in (place / "comm").read_bytes()
            if state not in "ZX" and is_python and (loads or age_s < _YOUNG_S):
                found.add(int(place.name))
    return found


def _began(process: int) -> str:
    """Return when a process of this host began, or "" if there is no such process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        about = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return ""
    return "" if about[0] in ("Z", "X") else f"{boot} {about[19]}"
