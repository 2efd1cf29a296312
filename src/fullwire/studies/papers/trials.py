"""The jobs of a study: the quick set, the full set, and the name of each job.

    python -m fullwire.studies.papers.trials TRIAL.json OUTPUT.run

records one of them on a lab, in a process of its own, so that a failure there does not end the
study. Its output goes to a log beside the run.

Emulated trials train as a V100 would, under real DDP over real shaped links; their computation is
waiting. Dilated ten times, they stand for processors ten times as fast as this machine's, so that
the network decides and not the processors. Real trials compute on this machine's processors. A
trial's name holds all of its settings, so a run with that name is not recorded again.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

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
from fullwire.units import bits_per_second

Kind: TypeAlias = Literal["emulated", "real"]

V100S = ("resnet50@v100", "resnet101@v100", "vgg16@v100")
BUCKETS = "ddp:25MiB"  # for trials of compression: one size that the compression ratios divide
_BUCKET_BYTES = 25 * 2**20
_LEAST_PATIENCE_S = 90.0
_JOB = Path(__file__).with_name("small_job.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One job on a lab of this machine."""

    kind: Kind
    model: str  # a built-in workload, or for a real one mlp-WIDTH
    workers: int
    rate: str
    steps: int = 6
    dilation: int = 1
    buckets: str = "ddp"  # of the bytes sent
    compression: int = 1  # emulated: the ratio of a codec that costs no time
    half: bool = False  # real: PyTorch's float16 hook
    batch: int = 32

    @property
    def name(self) -> str:
        """The name of its run."""
        words = [self.model.replace("@", "-"), f"{self.workers}x{self.rate}"]
        words += [f"dilated-{self.dilation}"] * (self.dilation > 1)
        words += [self.buckets.replace(":", "-")] * (self.buckets != "ddp")
        words += [f"compressed-{self.compression}"] * (self.compression > 1)
        words += ["half"] * self.half
        words += [f"batch-{self.batch}"] * (self.batch != 32)
        return "_".join(words)

    @property
    def rate_bps(self) -> float:
        """The line rate of each link."""
        return bits_per_second(self.rate)

    @property
    def sent_buckets(self) -> str:
        """The buckets of a compressed job: so small that it fills as many as the other jobs."""
        if self.compression == 1:
            return self.buckets
        return f"ddp:{_BUCKET_BYTES // self.compression}B"

    @property
    def width(self) -> int:
        """The width of a real trial's layers."""
        return int(self.model.removeprefix("mlp-"))


def _emulated(model: str, workers: int, rate: str, steps: int, dilation: int = 1) -> Trial:
    return Trial(
        kind="emulated", model=model, workers=workers, rate=rate, steps=steps, dilation=dilation
    )


def _compressed(compression: int, rate: str) -> Trial:
    return Trial(
        kind="emulated",
        model="resnet50@v100",
        workers=4,
        rate=rate,
        dilation=10,
        buckets=BUCKETS,
        compression=compression,
        steps=3,
    )


def _real(
    width: int, workers: int, rate: str, *, half: bool = False, batch: int = 32, steps: int = 20
) -> Trial:
    return Trial(
        kind="real",
        model=f"mlp-{width}",
        workers=workers,
        rate=rate,
        half=half,
        batch=batch,
        steps=steps,
    )


QUICK = (
    _emulated("resnet50@v100", 1, "10Gbps", 10),
    _emulated("resnet50@v100", 2, "1Gbps", 4),
    _emulated("resnet50@v100", 4, "1Gbps", 3),
    _emulated("resnet50@v100", 2, "10Gbps", 12),
    _emulated("resnet50@v100", 4, "10Gbps", 8),
    _emulated("resnet50@v100", 2, "10Gbps", 4, 10),
    _emulated("resnet50@v100", 4, "10Gbps", 3, 10),
    _emulated("resnet50@v100", 4, "100Gbps", 4, 10),
    _emulated("vgg16@v100", 2, "10Gbps", 4),
    _compressed(2, "10Gbps"),
    _compressed(5, "10Gbps"),
    _real(1536, 1, "10Gbps"),
    _real(1536, 2, "10Gbps"),
    _real(1536, 4, "10Gbps"),
    _real(1536, 2, "10Gbps", half=True),
    _real(1536, 2, "1Gbps", steps=8),
    _real(512, 2, "1Gbps"),
    _real(512, 2, "10Gbps"),
    _real(512, 2, "10Gbps", batch=128, steps=12),
    _real(1536, 2, "1Gbps", batch=128, steps=8),
)


def planned(quick: bool) -> tuple[Trial, ...]:
    """Return the trials of a study; the quick ones are part of the full study."""
    if quick:
        return QUICK
    more = [
        _emulated("resnet50@v100", 1, "10Gbps", 10, 10),
        _emulated("resnet50@v100", 2, "100Gbps", 8, 10),
    ]
    for workers in (2, 3, 4):
        for model in V100S:
            for rate, dilation in (
                ("1Gbps", 1),
                ("5Gbps", 1),
                ("10Gbps", 1),
                ("10Gbps", 10),
                ("25Gbps", 10),
                ("100Gbps", 10),
            ):
                steps = 4 if "vgg" in model or rate == "1Gbps" else 6
                more.append(_emulated(model, workers, rate, steps, dilation))
    more += [_emulated(model, 1, "10Gbps", 10) for model in V100S]
    for rate in ("10Gbps", "100Gbps"):
        more += [_compressed(compression, rate) for compression in (1, 2, 3, 5, 10)]
    for width in (512, 1024, 1536, 2048):
        for batch in (32, 128):
            more += [_real(width, 2, rate, batch=batch, steps=12) for rate in ("1Gbps", "10Gbps")]
    more += [_real(1536, workers, "10Gbps") for workers in (1, 2, 3, 4)]
    more += [_real(1536, 2, "1Gbps", half=True), _real(1024, 4, "1Gbps")]
    wanted: dict[str, Trial] = {}
    for trial in (*QUICK, *more):  # one name is one job, with the settings of its first occurrence
        wanted.setdefault(trial.name, trial)
    return tuple(wanted.values())


def place_of(trial: Trial, directory: Path) -> Path:
    """Return where a trial's run is, or will be."""
    return directory / "trials" / f"{trial.name}.run"


def finished(trial: Trial, directory: Path) -> Run | None:
    """Return a trial's run, if it was recorded to its end before."""
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
    """Record a trial; return the error in a line, or None."""
    place = place_of(trial, directory)
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(place.with_name(f"{place.name}.recording"), ignore_errors=True)
    description = place.with_suffix(".json")
    description.write_bytes(msgspec.json.encode(trial))
    command = [
        sys.executable,
        "-m",
        "fullwire.studies.papers.trials",
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
    """Record the trial described in a file; this process ends with the study."""
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
    """Yield the command of every host, and the facts known about the job."""
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
    """Yield the workload's name, or a run of it with gradients smaller by the compression ratio."""
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
