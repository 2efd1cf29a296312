"""Run a job unchanged and keep what it did: the whole of `fullwire record`."""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fullwire.errors import DamagedInput, UsageError
from fullwire.recorder import parts
from fullwire.recorder.assemble import Known, assemble
from fullwire.recorder.captured import put_captures
from fullwire.recorder.command_line import without_secrets
from fullwire.recorder.inside.journal import SUFFIX as JOURNALS
from fullwire.recorder.journals import Header
from fullwire.recorder.launch import (
    check_capturing,
    recorded_environment,
    run_to_its_end,
    sampled_command,
    wait_for_captures,
    wait_for_samplers,
)
from fullwire.recorder.living import follow, note_maker, refuse_live
from fullwire.recorder.progress import live_line
from fullwire.recorder.sampler import SUFFIX as SAMPLES
from fullwire.run.facts import Facts
from fullwire.run.run import Run
from fullwire.run.store import RunWriter, new_place, read_run, refuse_taken

_INTERRUPTED = 128 + signal.SIGINT  # as a shell says it
_KNOWN = "job.json"  # among the journals: what is known of the job besides


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Recording:
    """A recorded job: where what it did was written, and how it ended."""

    path: Path
    exit_status: int

    @property
    def run(self) -> Run:
        """What the job did, read from where it was written."""
        return read_run(self.path)


def record(
    command: Sequence[str], output: str | Path, *, packets: bool = False, replace: bool = False
) -> Recording:
    """Run a command and write what its processes did as a run.

    With `packets`, headers of what this host's interfaces carry meanwhile are captured: the run has
    its flows, and the captures themselves.
    """
    _check_command(command)
    parts.refuse_one_of_many(Path(output), os.environ)
    if packets:
        check_capturing()

    def play(directory: Path) -> int:
        environment = recorded_environment(directory, os.environ)
        return run_to_its_end(sampled_command(directory, command, packets=packets), environment)

    return keep(play, output, Known(source=without_secrets(command)), replace=replace)


def keep(
    play: Callable[[Path], int],
    output: str | Path,
    known: Known,
    *,
    replace: bool = False,
) -> Recording:
    """Play a job whose processes record themselves into a directory, and write it as a run.

    The directory lies beside the run. If everything is killed it stays, and `join` makes the run of
    it. A job that a person interrupts has been recorded as far as it went.
    """
    place = new_place(output)
    refuse_taken(place, replace)
    directory = directory_of(place)
    _begin(directory, known)
    try:
        with live_line(directory):
            status = play(directory)
            known = _followed(directory, known)
    except UsageError:  # it never began
        shutil.rmtree(directory)
        raise
    except KeyboardInterrupt:
        status = _INTERRUPTED
    except SystemExit as asked_to_end:
        status = int(asked_to_end.code or 0)
    left = f"what was recorded is in {directory}: `fullwire join {directory} -o NAME.run`"
    ended = dataclasses.replace(known, facts=known.facts | Facts(exit_status=status))
    try:
        wait_for_samplers(directory, lambda header: True)
        wait_for_captures(directory)
        with RunWriter(place, replace=replace) as writer:
            path = assemble([directory], writer, ended)
        put_captures(directory, path)
    except UsageError as error:  # as on a full disk: what was recorded is not given up
        raise _after_the_job(f"{error}; {left}", status or UsageError.exit_status) from None
    except KeyboardInterrupt:
        raise _after_the_job(f"interrupted before a run was made; {left}", _INTERRUPTED) from None
    _remove(directory)
    return Recording(path=path, exit_status=status)


def record_part(command: Sequence[str], output: str | Path, *, packets: bool = False) -> int:
    """Run a command that is one task of a job among several; return its exit status.

    What it did is left beside the place of the run, for `join` to make one run of all parts.
    """
    _check_command(command)
    place = new_place(output)
    refuse_taken(place, False)
    if packets:
        check_capturing()
    directory = directory_of(place)
    refuse_live(directory)
    sampled = sampled_command(directory, command, packets=packets)
    note = parts.begin(directory, command, os.environ)
    status = run_to_its_end(sampled, recorded_environment(directory, os.environ))
    wait_for_samplers(directory, _has_lost_its_job)
    wait_for_captures(directory, f"{socket.gethostname()}-")
    try:
        parts.end(note, status)
    except OSError as error:
        problem = f"{note}: how this part ended cannot be noted: {error.strerror}"
        raise _after_the_job(problem, status) from None
    return status


def join(
    directories: Sequence[str | Path], output: str | Path, *, replace: bool = False
) -> Recording:
    """Make one run of a job that was recorded in parts, or whose end nobody was left to see."""
    if isinstance(directories, str):
        raise UsageError(f"join: expected a list of directories, got {directories!r}")
    places = [Path(each) for each in directories]
    for place in places:
        _refuse_other_than_recorded(place)
    for place in places:  # a job may have ended just now, and its process still be on its way out
        wait_for_samplers(place, _is_of_this_host)
    with RunWriter(output, replace=replace) as writer:
        path = assemble(places, writer, _known(places))
    return Recording(path=path, exit_status=0)


def _refuse_other_than_recorded(place: Path) -> None:
    """Refuse a directory that nobody recorded into: its run would be empty, and look like one."""
    if not place.is_dir():
        raise UsageError(f"{place}: expected the directory of a recording, and there is none")
    written = (JOURNALS, SAMPLES, parts.SUFFIX)
    if not any(each.name == _KNOWN or each.suffix in written for each in place.iterdir()):
        raise UsageError(f"{place}: nothing was recorded here: expected journals or {_KNOWN}")


def _after_the_job(problem: str, exit_status: int) -> UsageError:
    """Refuse with a status other than usual: whoever started the job waits for how it ended."""
    refused = UsageError(problem)
    refused.exit_status = exit_status
    return refused


def _known(places: Sequence[Path]) -> Known:
    """Return what was known when the job began, and what its parts miss, if it had any."""
    for place in places:
        try:
            return msgspec.json.decode((place / _KNOWN).read_bytes(), type=Known)
        except OSError:  # parts, or only journals were brought here
            continue
        except (msgspec.MsgspecError, UsageError) as error:
            raise DamagedInput(place / _KNOWN, str(error)) from None
    try:
        found = parts.parts_in(places)
    except (OSError, ValueError, TypeError) as error:
        raise DamagedInput(places[0], f"expected readable notes of its parts: {error}") from None
    facts, missing = parts.told_by(found)
    source = found[0].command if found else shlex.join(map(str, places))
    return Known(source=source, facts=facts, missing=tuple(missing))


def directory_of(run: Path) -> Path:
    """Return where a job is recorded that becomes a run."""
    return run.with_name(f"{run.name}.recording")


def _followed(directory: Path, known: Known) -> Known:
    """Wait for processes that outlive the command; samplers ended with it, which is noted."""
    longer_s = follow(directory)
    if not longer_s:
        return known
    return dataclasses.replace(
        known,
        missing=(
            *known.missing,
            f"the command ended {longer_s:.1f} s before its processes: links, connections and "
            "processors were sampled until then",
        ),
    )


def _remove(directory: Path) -> None:
    """Remove what became a run; a sampler that is late finds no place to begin a file in."""
    leaving = directory.with_name(f".{directory.name}.removing-{os.urandom(4).hex()}")
    directory.rename(leaving)
    shutil.rmtree(leaving, ignore_errors=True)


def _has_lost_its_job(header: Header) -> bool:
    """Say whether a sampler is of this host and about to end."""
    return _is_of_this_host(header) and not _lives(header["watched"])


def _is_of_this_host(header: Header) -> bool:
    return bool(header["host"] == socket.gethostname()[:64])


def _lives(process: int) -> bool:
    """Say whether a process is there, and is not one that nobody has reaped yet."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2]
    except OSError:
        return False
    return not state.startswith(("Z", "X"))


def _check_command(command: Sequence[str]) -> None:
    if not command:
        raise UsageError("record: expected a command after --, like: -- torchrun train.py")


def _begin(directory: Path, known: Known) -> None:
    """Make the directory, and leave in it what `join` could not know."""
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        refuse_live(directory)
        raise UsageError(
            f"{directory} is left of a recording that was interrupted: make a run of it with "
            f"`fullwire join {directory} -o NAME.run`, or remove it; several tasks of one job "
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
