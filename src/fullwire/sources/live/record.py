"""Run a job unchanged and keep what it did: the whole of `fullwire record`."""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fullwire.errors import DamagedInput, UsageError
from fullwire.model.run import Run
from fullwire.sources.live.assemble import Known, assemble
from fullwire.sources.live.launch import recorded_environment, run_to_its_end
from fullwire.store import RunWriter, read_run, refuse_taken

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


def record(command: Sequence[str], output: str | Path, *, replace: bool = False) -> Recording:
    """Run a command and write what its processes did as a run."""
    if not command:
        raise UsageError("record: expected a command after --, like: -- torchrun train.py")

    def play(directory: Path) -> int:
        return run_to_its_end(command, recorded_environment(directory, os.environ))

    return keep(play, output, Known(source=shlex.join(command)), replace=replace)


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
    place = Path(output)
    refuse_taken(place, replace)
    directory = place.with_name(f"{place.name}.recording")
    _make(directory)
    (directory / _KNOWN).write_bytes(msgspec.json.encode(known))  # for `join`
    try:
        status = play(directory)
    except UsageError:  # it never began
        shutil.rmtree(directory)
        raise
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except SystemExit as asked_to_end:
        status = int(asked_to_end.code or 0)
    ended = dataclasses.replace(known, facts={**known.facts, "exit_status": status})
    try:
        with RunWriter(place, replace=replace) as writer:
            path = assemble(directory, writer, ended)
    except UsageError as error:  # as on a full disk: what was recorded is not given up
        raise UsageError(
            f"{error}; what was recorded is in {directory}: `fullwire join {directory} -o NAME.run`"
        ) from None
    shutil.rmtree(directory)
    return Recording(path=path, exit_status=status)


def join(directory: str | Path, output: str | Path, *, replace: bool = False) -> Recording:
    """Make the run of a recording whose end nobody was left to see."""
    with RunWriter(output, replace=replace) as writer:
        path = assemble(Path(directory), writer, _known(Path(directory)))
    return Recording(path=path, exit_status=0)


def _known(directory: Path) -> Known:
    """Return what was known when the job began."""
    try:
        return msgspec.json.decode((directory / _KNOWN).read_bytes(), type=Known)
    except OSError:  # only its journals were brought here
        return Known(source=str(directory))
    except msgspec.MsgspecError as error:
        raise DamagedInput(directory / _KNOWN, str(error)) from None


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        raise UsageError(
            f"{directory} is left of a recording that was interrupted: make a run of it with "
            f"`fullwire join {directory} -o NAME.run`, or remove it"
        ) from None
    except OSError as error:
        raise UsageError(f"{directory}: cannot be made: {error.strerror}") from None
