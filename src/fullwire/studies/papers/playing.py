"""Playing a trial: in a process of its own, so that what fails there ends nothing here.

    python -m fullwire.studies.papers.playing TRIAL.json OUTPUT.run

records one job on a lab. Its words go to a log beside the run.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from fullwire.answers.emulation import emulated_job
from fullwire.answers.laboratory import record_in_lab
from fullwire.errors import FullwireError, UsageError
from fullwire.importers import read
from fullwire.lab.description import describe
from fullwire.lab.emulated import check_possible, trainer_command
from fullwire.lab.lab import Lab
from fullwire.lab.namespaces import die_with_parent
from fullwire.recorder.assemble import Known
from fullwire.run.emulation import BYTES_A_VALUE
from fullwire.run.facts import Facts
from fullwire.run.run import Gradients, Run
from fullwire.run.store import read_run, write
from fullwire.studies.papers.trials import Trial

_LEAST_PATIENCE_S = 90.0
_JOB = Path(__file__).with_name("small_job.py")


def place_of(trial: Trial, directory: Path) -> Path:
    """Return where a trial's run is, or will be."""
    return directory / "trials" / f"{trial.name}.run"


def finished(trial: Trial, directory: Path) -> Run | None:
    """Return a trial's run, if it was played to its end before."""
    place = place_of(trial, directory)
    if not place.exists():
        return None
    try:
        run = read_run(place)
    except FullwireError:  # damaged since
        return None
    return run if run.facts.exit_status == 0 else None


def check_machine() -> None:
    """Refuse a machine that cannot play any trial, before the first of many fails."""
    if importlib.util.find_spec("torch") is None:
        raise UsageError(
            "a study trains with PyTorch, which Fullwire's own Python has not: pip install torch"
        )
    with Lab(describe(workers=1, rate=["1Gbps"])):
        pass


def play(trial: Trial, directory: Path, expected_s: float) -> str | None:
    """Record a trial; return what went wrong, in a line, or None."""
    place = place_of(trial, directory)
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(place.with_name(f"{place.name}.recording"), ignore_errors=True)
    description = place.with_suffix(".json")
    description.write_bytes(msgspec.json.encode(trial))
    command = [
        sys.executable,
        "-m",
        "fullwire.studies.papers.playing",
        str(description),
        str(place),
    ]
    patience_s = max(_LEAST_PATIENCE_S, 5 * expected_s)
    log = place.with_suffix(".log")
    with log.open("wb") as file:
        try:
            status = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                timeout=patience_s,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return f"did not end within {patience_s:.0f} s ({log})"
    if status == 0 and finished(trial, directory) is not None:
        return None
    lines = log.read_text(errors="replace").strip().splitlines()
    last_line = lines[-1].removeprefix("fullwire: ") if lines else "said nothing"
    return f"{last_line} ({log})"


def main(arguments: Sequence[str]) -> int:
    """Record the trial described in a file; nobody goes on with it once the study is gone."""
    die_with_parent()
    trial = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=Trial)
    output = Path(arguments[1])
    description = describe(workers=trial.workers, rate=[trial.rate], dilation=trial.dilation)
    try:
        with _job(trial) as (command, known):
            recording = record_in_lab(description, command, output, known=known, replace=True)
    except FullwireError as error:
        sys.stderr.write(f"fullwire: {error}\n")
        return error.exit_status
    return recording.exit_status


@contextmanager
def _job(trial: Trial) -> Iterator[tuple[list[str], Known]]:
    """Give the command of every host, and what is known of it."""
    if trial.kind == "real":
        words = [str(trial.width), str(trial.batch), str(trial.steps), *["half"] * trial.half]
        facts = Facts(model=trial.model, device="a processor", batch=f"{trial.batch} digits")
        yield [sys.executable, str(_JOB), *words], Known(source=trial.name, facts=facts)
        return
    with _profile(trial) as workload:
        job = emulated_job(
            workload, steps=trial.steps, dilate=str(trial.dilation), buckets=trial.sent_buckets
        )
        check_possible(job.emulation, trial.workers)
        with trainer_command(job.emulation) as command:
            yield command, dataclasses.replace(job.known, source=trial.name)


@contextmanager
def _profile(trial: Trial) -> Iterator[str]:
    """Give the workload's name, or a run of it whose gradients are so many times smaller."""
    if trial.compression == 1:
        yield trial.model
        return
    run = read(trial.model)
    columns = run.gradients.columns()
    values = columns["bytes"] // (BYTES_A_VALUE * trial.compression)
    columns["bytes"] = BYTES_A_VALUE * values.clip(min=1)
    smaller = dataclasses.replace(run, gradients=Gradients(**columns))
    with tempfile.TemporaryDirectory(prefix="fullwire-") as directory:
        yield str(write(smaller, Path(directory) / "profile.run"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
