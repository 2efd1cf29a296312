"""Jobs of the lab whose accelerators are emulated, recorded once and then kept."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import fullwire as fw


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A model, its number of workers, the rate of their links, and a sufficient number of steps."""

    model: str = "resnet50@v100"
    workers: int = 2
    rate: str = "1Gbps"
    buckets: str = "ddp"
    backend: str = "gloo"
    steps: int = 25

    def __str__(self) -> str:
        return f"{self.model}, {self.workers} x {self.rate}, {self.buckets}"

    @property
    def name(self) -> str:
        """Return the name of its run."""
        backend = () if self.backend == "gloo" else (self.backend,)
        words = (self.model.replace("@", "-"), f"{self.workers}x{self.rate}", self.buckets)
        return "_".join((*words, *backend)).replace(":", "-")


def recorded(job: Job, place: Path) -> fw.Run:
    """Open a job's run; record the job in the lab first if the run is missing."""
    path = place / f"{job.name}.run"
    if not path.exists():
        command = [
            sys.executable,
            "-m",
            "fullwire",
            "lab",
            "run",
            "--workload",
            job.model,
            "--workers",
            str(job.workers),
            "--rate",
            job.rate,
            "--buckets",
            job.buckets,
            "--backend",
            job.backend,
            "--steps",
            str(job.steps),
            "-o",
            str(path),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{job}, {job.backend}: {done.stderr}")
    return fw.read(path)
