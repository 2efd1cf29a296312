"""fullwire record runs and records a job; fullwire join makes a run of its parts."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import typer

from fullwire.cli.options import Force, Metric, Noise, Packets, with_options
from fullwire.cli.telling import tell
from fullwire.errors import UsageError

Output = Annotated[Path, typer.Option("--output", "-o", metavar="X.run", help="The run to write")]


class Noted:
    """Options of every recording, of a whole job and of a part."""

    packets: Packets = False
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="In a few steps sums wait for computing, and ranks for their turn to compute. "
            "Results stay the same.",
        ),
    ] = False
    noise: Noise = False
    private: Annotated[
        bool, typer.Option("--private", help="Nobody else may read the run [default: by umask]")
    ] = False


@with_options(Noted)
def record(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="torchrun, python, mpirun, ...")
    ],
    output: Output,
    force: Force = False,
    part: Annotated[
        bool,
        typer.Option("--part", help="One task of several hosts: leave files for fullwire join"),
    ] = False,
    *,
    metric: Metric = None,
    live: Annotated[
        bool, typer.Option("--live", help="Show the verdict and each rank while the job runs")
    ] = False,
    **noted: Any,
) -> None:
    """Run a training job unchanged, and record it.

    Put it before the command that you run anyway. DDP, FSDP and sums by hand need no option.
    Recording needs no root and costs about one percent of a step. Output and exit status are the
    job's:

    fullwire record -o job.run -- torchrun --nproc-per-node=2 train.py
    fullwire record -o job.run -- accelerate launch train.py
    fullwire explain job.run

    On several hosts every task records a part, and join makes one run of them. In a Slurm script,
    with one task on each host and a folder that all of them see:

    srun fullwire record --part -o job.run -- torchrun --nnodes=4 ... train.py
    fullwire join job.run.recording -o job.run

    mpirun and Kubernetes work the same way: --part in every task, then join.

    --live shows the verdict, the step and each rank on standard error, from the recording so far.
    """
    from fullwire.recorder.record import record as run_and_keep
    from fullwire.recorder.record import record_part
    from fullwire.report.recording import recording_lines

    if part:
        if live:
            raise UsageError(
                "--live shows the whole job: expected none with --part. "
                "fullwire watch --recording shows the recording of a host"
            )
        if force:
            raise UsageError("--force replaces a run: a part writes none, fullwire join does")
        if metric:
            raise UsageError(
                "--metric reads the output of the whole job: expected none with --part. "
                "fullwire.log works in every task"
            )
        status = record_part(command, output, **noted)
        raise typer.Exit(status)
    recording = run_and_keep(
        command,
        output,
        metric=metric or (),
        replace=force,
        live=_shown if live else None,
        **noted,
    )
    for line in recording_lines(recording.path):
        tell(line)  # standard output belongs to the job
    raise typer.Exit(recording.exit_status)


def _shown(directory: Path) -> AbstractContextManager[None]:
    from fullwire.cli.live import recording_shown  # here, as plain recordings need not wait for it

    return recording_shown(directory)


def join(
    directories: Annotated[
        list[Path], typer.Argument(metavar="PART...", help="X.run.recording, or runs of watch")
    ],
    output: Output,
    force: Force = False,
) -> None:
    """Make a run of parts, or of a killed recording.

    After a job on several hosts, or when `fullwire record` was killed together with its job:

    fullwire join job.run.recording -o job.run
    fullwire join host*/job.run.recording -o job.run

    Runs that `fullwire watch -o` wrote on each host at the same time become one run, too:

    fullwire join gpu1.run gpu2.run -o job.run
    """
    from fullwire.answers.joining import join as joined
    from fullwire.report.recording import recording_lines

    recording = joined(directories, output, replace=force)
    for line in recording_lines(recording.path):
        tell(line)
