"""fullwire lab: a cluster inside this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from typer.core import TyperCommand

from fullwire.cli.leaving import signals_end_it
from fullwire.cli.options import ClusterOption, Force, Metric, Noise, Packets, with_options
from fullwire.cli.telling import introduce, say, tell
from fullwire.errors import UsageError

if TYPE_CHECKING:
    from fullwire.answers.emulation import EmulatedJob
    from fullwire.lab.description import LabDescription
    from fullwire.lab.faults import Chaos, Fault

app = typer.Typer(
    help="Make a cluster inside this machine, without root.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Workers: TypeAlias = Annotated[int | None, typer.Option(min=1, help="How many hosts")]
Nodes: TypeAlias = Annotated[int | None, typer.Option(min=1, help="Nodes of the cluster: 4")]
Rate: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(help="Line rate, headers included: 1Gbps, or 2:300Mbps for host 2 alone (from 0)"),
]
Mtu: TypeAlias = Annotated[int, typer.Option(help="Largest IP packet in bytes")]
Congestion: TypeAlias = Annotated[
    str | None, typer.Option(help="TCP congestion control: cubic, bbr, ... [default: machine's]")
]
Cpus: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(help="Processors of every host's job: 0,2-3, or 1:0-1 for host 1 alone"),
]
Latency: TypeAlias = Annotated[str, typer.Option(help="Added one way: 1ms (needs netem)")]
Loss: TypeAlias = Annotated[str, typer.Option(help="Share of frames dropped: 0.1% (needs netem)")]
Command: TypeAlias = Annotated[
    list[str] | None, typer.Argument(metavar="-- COMMAND...", help="Command of each host")
]
Workload: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="RUN",
        help="Instead of a command: train as this workload or run does, on emulated accelerators "
        "that wait as long and send as much",
    ),
]
Steps: TypeAlias = Annotated[
    int | None, typer.Option(min=1, help="With --workload: how many steps  [default: 10]")
]
Dilate: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="TIMES",
        help="With --workload: compute and links this many times slower, so that this machine "
        "keeps up. Printed and written times are undilated.",
    ),
]
Buckets: TypeAlias = Annotated[
    str | None,
    typer.Option(help="With --workload: ddp or ddp:50MiB  [default: as recorded, else ddp]"),
]
Backend: TypeAlias = Annotated[
    str | None,
    typer.Option(help="With --workload: the backend, gloo or fullwire  [default: gloo]"),
]
Faults: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TIME slow|cut|restore|kill|pause HOST [RATE]",
        help="A fault, counted from the job's start: 5s slow 2 100Mbps",
    ),
]
ChaosOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="FAULTS",
        help="Faults by chance: 'kill every 20s; pause 5s; partition 0,1|2 3s; slow 2 to 10Mbps; "
        "fill disk'. A killed host starts its command again.",
    ),
]
Seed: TypeAlias = Annotated[
    int, typer.Option(help="With --chaos: the same seed gives the same faults")
]
Probe: TypeAlias = Annotated[
    bool,
    typer.Option(
        help="With -o: in a few steps sums wait for computing, and ranks for their turn to "
        "compute. Results stay the same."
    ),
]
Output: TypeAlias = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="X.run", help="Record the job, and write this run"),
]


class _CommandWithFaults(TyperCommand):
    """Takes `--at 5s slow 2 100Mbps` as people write it: its words vary in number by kind."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Join the words of each fault into one before the options are read."""
        from fullwire.lab.faults import words_of

        joined: list[str] = []
        left = list(args)
        while left and left[0] != "--":
            word = left.pop(0)
            joined.append(word)
            if word == "--at" and left and " " not in left[0]:  # a quoted one is whole already
                most = left[: words_of(left[1]) if len(left) > 1 else 1]
                words = list(takewhile(lambda word: not word.startswith("--"), most))
                joined.append(" ".join(words))
                del left[: len(words)]
        return super().parse_args(ctx, joined + left)


class Hosts:
    """The options of a lab's hosts."""

    workers: Workers = None
    rate: Rate = None
    cluster: ClusterOption = None
    nodes: Nodes = None
    latency: Latency = "0s"
    loss: Loss = "0%"
    mtu: Mtu = 1500
    congestion: Congestion = None
    cpus: Cpus = None


@app.command("run", cls=_CommandWithFaults)
@with_options(Hosts)
def run(
    command: Command = None,
    *,
    workload: Workload = None,
    steps: Steps = None,
    dilate: Dilate = None,
    buckets: Buckets = None,
    backend: Backend = None,
    at: Faults = None,
    chaos: ChaosOption = None,
    seed: Seed = 0,
    output: Output = None,
    packets: Packets = False,
    probe: Probe = True,
    noise: Noise = False,
    metric: Metric = None,
    force: Force = False,
    **hosts: Any,
) -> None:
    """Run a command on every host of a lab.

    -o records it. On a described cluster a host runs the command once for each device:

    fullwire lab run --workers 4 --rate 1Gbps -o job.run -- python train.py
    fullwire lab run --workers 4 --rate 10Gbps --workload vgg16@v100 --dilate 10
    fullwire lab run --cluster ours.toml -- python train.py
    fullwire lab run --cluster ours.toml --chaos 'pause 5s' -- python train.py
    """
    from fullwire.lab.faults import parse_chaos, parse_faults

    if output is None:
        _refuse_without_a_run(force=force, packets=packets, noise=noise, metric=bool(metric))
    job = _emulated(command, workload, steps=steps, dilate=dilate, buckets=buckets, backend=backend)
    description = _lab_of(1.0 if job is None else job.emulation.dilation, **hosts)
    faults = parse_faults(at or (), description)
    troubles = None if chaos is None else parse_chaos(chaos, seed, description)
    if seed and troubles is None:
        raise UsageError("--seed: expected --chaos with it")
    if job is not None and troubles is not None and troubles.kills:
        raise UsageError("--chaos: kill: expected a command, got --workload, which cannot go on")
    with signals_end_it(), _what_to_run(command, job, description) as words:
        if output is None:
            status = _unrecorded(description, words, faults, troubles)
        else:
            from fullwire.answers.laboratory import record_in_lab
            from fullwire.report.recording import recording_lines

            recording = record_in_lab(
                description,
                words,
                output,
                faults=faults,
                packets=packets,
                probe=probe
                and job is None,  # what emulated accelerators compute slows down by nothing
                noise=noise,
                metric=metric or (),
                replace=force,
                known=None if job is None else job.known,
                chaos=troubles,
                introduce=introduce,
                say=say,
            )
            for line in recording_lines(recording.path):
                tell(line)
            status = recording.exit_status
    raise typer.Exit(status)


def _refuse_without_a_run(**options: bool) -> None:
    """Refuse the options of a recording where there is none."""
    what = {
        "force": "replaces the run",
        "packets": "captures into the run",
        "noise": "notes gradient noise in the run",
        "metric": "reads the job's output for the run",
    }
    for name, is_given in options.items():
        if is_given:
            raise UsageError(f"--{name} {what[name]} that -o names: expected -o X.run with it")


def _unrecorded(
    description: LabDescription,
    words: Sequence[str],
    faults: Sequence[Fault],
    chaos: Chaos | None,
) -> int:
    """Run a command on a lab, and return its status. Without chaos no part of a recording loads."""
    from fullwire.lab.lab import Lab
    from fullwire.lab.session import run_job

    environment: Mapping[str, str] = os.environ
    elastic = None
    with contextlib.ExitStack() as made:
        if chaos is not None:
            from fullwire.answers.laboratory import surroundings

            whole = surroundings(description, chaos)
            description, (environment, elastic) = made.enter_context(whole)
        lab = made.enter_context(Lab(description))
        introduce(lab)
        return run_job(
            lab, words, faults, environment=environment, say=say, chaos=chaos, elastic=elastic
        )


def _lab_of(
    dilation: float = 1.0,
    *,
    cluster: str | None,
    nodes: int | None,
    rate: list[str] | None,
    cpus: list[str] | None,
    **more: Any,
) -> LabDescription:
    """Read the options of a lab's hosts, and the described cluster, if one was asked for."""
    from fullwire.lab.description import describe

    found = None
    if cluster is not None:
        from fullwire.clusters import cluster as described

        found = described(cluster, nodes)
    elif nodes is not None:
        raise UsageError("--nodes: expected a described cluster with them: --cluster FILE|NAME")
    return describe(cluster=found, rate=rate or (), cpus=cpus or (), dilation=dilation, **more)


def _emulated(
    command: Sequence[str] | None, workload: str | None, **conditions: Any
) -> EmulatedJob | None:
    """Return the job of emulated accelerators, if it is one that was asked for."""
    if workload is None:
        for name, value in conditions.items():
            if value is not None:
                raise UsageError(
                    f"--{name}: expected --workload with it, got a command, which has its own"
                )
        if not command:
            raise UsageError("expected --workload, or a command after --, like: -- python train.py")
        return None
    if command:
        raise UsageError(f"expected --workload or a command, got both: {command[0]}")
    from fullwire.answers.emulation import emulated_job

    return emulated_job(workload, **conditions)


@contextlib.contextmanager
def _what_to_run(
    command: Sequence[str] | None, job: EmulatedJob | None, description: LabDescription
) -> Iterator[Sequence[str]]:
    if job is None:
        assert command
        if which(command[0]) is None:
            raise UsageError(f"{command[0]}: expected a command that exists and may be executed")
        yield command
        return
    from fullwire.lab.emulated import check_possible, trainer_command

    check_possible(job.emulation, description.ranks)
    for warning in job.warnings:
        say(f"warning: {warning}")
    with trainer_command(job.emulation) as words:
        yield words


@app.command("shell")
@with_options(Hosts)
def shell(
    *,
    host: Annotated[int, typer.Option(help="The host to be on, from 0")] = 0,
    **hosts: Any,
) -> None:
    """Open a prompt on one host of a lab.

    fullwire lab shell --workers 2 --rate 1Gbps --host 1
    """
    from fullwire.lab.lab import Lab
    from fullwire.lab.session import run_shell

    description = _lab_of(**hosts)
    description.check_host(host, "host")
    with signals_end_it(), Lab(description) as lab:
        introduce(lab)
        say(f"this is host {host}, {lab.addresses[host]}; exit leaves the lab")
        status = run_shell(lab, host)
    raise typer.Exit(status)
