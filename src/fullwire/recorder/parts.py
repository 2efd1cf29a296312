"""A job recorded in parts: by one `fullwire record --part` for each task that a launcher starts.

The parts write into one directory where they share a file system, or each host into its own; each
file there is one process's, so nobody waits for anybody. Besides what is recorded, every part
leaves a note of how it ended, and of the job that it belongs to where the launcher tells.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fullwire.errors import UsageError
from fullwire.recorder.command_line import without_secrets
from fullwire.recorder.journals import files_in
from fullwire.run.facts import Facts

SUFFIX = ".part"
# Who starts tasks, and where it tells each of them how many there are. A Slurm batch script is no
# task: it has SLURM_NTASKS but not this.
_LAUNCHERS = (
    ("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPI", "PMI_RANK", "PMI_SIZE"),
    ("torch.distributed", "RANK", "WORLD_SIZE"),
)
# What tells one job, or one step of it, from the next that writes to the same place.
_JOB_VARIABLES = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One task of a job: what it ran and how that ended, None as long as it has not."""

    job: str
    host: str
    command: str
    exit_status: int | None


def refuse_one_of_many(output: Path, environment: Mapping[str, str]) -> None:
    """Refuse to make a whole run of one task among several: they would all write the same."""
    for launcher, rank, count in _LAUNCHERS:
        of = environment.get(count, "")
        if rank in environment and of.isdecimal() and int(of) > 1:
            raise UsageError(
                f"this is one of {of} tasks ({launcher}): expected --part, with which each records "
                f"its own into {output}.recording; `fullwire join` then makes one run of all"
            )


def begin(directory: Path, command: Sequence[str], environment: Mapping[str, str]) -> Path:
    """Note that a part has begun, unless the directory is another job's; return the note's file."""
    job = "/".join(environment[name] for name in _JOB_VARIABLES if name in environment)
    try:
        directory.mkdir(parents=True, exist_ok=True)  # others do the same just now
        others = {part.job for part in parts_in([directory])}
    except (OSError, ValueError) as error:
        raise UsageError(f"{directory}: cannot be recorded into: {error}") from None
    if others - {job}:
        raise UsageError(
            f"{directory} holds the parts of another job ({', '.join(sorted(others - {job}))}): "
            f"make a run of it with `fullwire join {directory} -o NAME.run`, and remove it"
        )
    place = directory / f"{socket.gethostname()}-{os.getpid()}-{time.monotonic_ns()}{SUFFIX}"
    _write(
        place,
        Part(
            job=job, host=socket.gethostname(), command=without_secrets(command), exit_status=None
        ),
    )
    return place


def end(place: Path, exit_status: int) -> None:
    """Note how a part ended."""
    _write(place, Part(**{**json.loads(place.read_text()), "exit_status": exit_status}))


def parts_in(directories: Sequence[Path]) -> list[Part]:
    """Read the notes of all parts."""
    return [Part(**json.loads(path.read_text())) for path in files_in(directories, SUFFIX)]


def told_by(parts: Sequence[Part]) -> tuple[Facts, list[str]]:
    """Return what parts tell of the whole job: how it ended, and what is missing."""
    missing = [
        f"host {part.host}: a part has not ended, or nobody saw its end ({part.command})"
        for part in parts
        if part.exit_status is None
    ]
    ends = [part.exit_status for part in parts if part.exit_status is not None]
    if missing or not ends:
        return Facts(), missing
    return Facts(exit_status=next((status for status in ends if status), 0)), missing


def _write(place: Path, part: Part) -> None:
    """Write a note so that whoever reads it meanwhile finds the old one or the new one."""
    building = place.with_suffix(".writing")
    building.write_text(json.dumps(asdict(part)))
    building.replace(place)
