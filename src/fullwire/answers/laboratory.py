"""A job on a lab, recorded: the lab's data about its links becomes facts of the run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from fullwire.clusters.description import as_toml
from fullwire.lab.description import LabDescription
from fullwire.lab.faults import Chaos, Fault
from fullwire.lab.lab import Lab
from fullwire.lab.messages import LinkRate
from fullwire.lab.session import ElasticJob, Say, run_job
from fullwire.recorder.assemble import Known
from fullwire.recorder.command_line import without_secrets
from fullwire.recorder.inside import LINES_VARIABLE
from fullwire.recorder.inside.metrics import EVENTS_SUFFIX
from fullwire.recorder.launch import recorded_environment, sampled_command
from fullwire.recorder.printed import Output, Pattern
from fullwire.recorder.record import Progress, Recording, keep
from fullwire.recorder.sampler import SOCKET_VARIABLE
from fullwire.run.facts import Facts
from fullwire.run.store import refuse_taken
from fullwire.units import show_time

DISK_VARIABLE = "FULLWIRE_LAB_DISK"  # the folder of the disk that chaos fills


def record_in_lab(
    description: LabDescription,
    command: Sequence[str],
    output: str | Path,
    *,
    faults: Sequence[Fault] = (),
    packets: bool = False,
    probe: bool = True,
    noise: bool = False,
    metric: Sequence[str] = (),
    replace: bool = False,
    known: Known | None = None,
    chaos: Chaos | None = None,
    introduce: Callable[[Lab], None] = lambda lab: None,
    say: Say = lambda sentence: None,
) -> Recording:
    """Run a command on every host of a lab made for it, and write the recordings as one run.

    Known facts of the job go into the run, beside its command and the lab's facts. With `packets`,
    the headers of each host's packets are captured, in both directions. With `probe`, a few steps
    keep communication apart from computing. With `noise`, gradient noise is noted. Patterns in
    `metric` read the output of all hosts. Faults become events of the run.
    """
    refuse_taken(Path(output), replace)
    patterns = [Pattern(text) for text in metric]
    with (
        surroundings(description, chaos) as (whole_description, more),
        contextlib.ExitStack() as made,
    ):
        pipes = made.enter_context(_pipes()) if patterns else None
        lab = made.enter_context(Lab(whole_description, None if pipes is None else pipes.into))
        introduce(lab)
        passed_on = contextlib.ExitStack()

        def play(directory: Path) -> int:
            environment = recorded_environment(
                directory, more.environment, probe=probe, noise=noise
            )
            if pipes is not None:
                printed = Output(patterns, directory, Progress(directory).steps)
                passed_on.enter_context(contextlib.closing(printed))
                printed.pass_on(*pipes.out_of)
                environment |= {LINES_VARIABLE: "1"}
            sampled = sampled_command(directory, command, packets=packets)

            def note(fault: Fault, time_ns: int) -> None:
                if fault.is_end:
                    return
                ranks = [
                    rank
                    for rank in range(description.ranks)
                    if description.host_of(rank) in fault.hosts
                ]
                lasts_ns = round(fault.lasts_s * description.dilation * 1e9)
                with (directory / f"lab{EVENTS_SUFFIX}").open("a") as file:
                    word = f"fault: {fault}"
                    file.write(json.dumps([time_ns, word, ranks, lasts_ns]) + "\n")

            return run_job(
                lab,
                sampled,
                faults,
                environment=environment,
                say=say,
                packet_socket=SOCKET_VARIABLE if packets else None,
                chaos=chaos,
                elastic=more.elastic,
                note=note,
            )

        job = known or Known(source=without_secrets(command))
        whole = dataclasses.replace(job, facts=job.facts | lab_facts(lab, faults, chaos))
        return keep(play, output, whole, replace=replace, beside=passed_on)


class _Pipes(NamedTuple):
    """The ends of two pipes, for standard output and standard error."""

    into: tuple[int, int]
    out_of: tuple[IO[bytes], IO[bytes]]


@contextlib.contextmanager
def _pipes() -> Iterator[_Pipes]:
    """Make two pipes through which the output of all hosts is read."""
    with contextlib.ExitStack() as made:
        into, out_of = [], []
        for _ in range(2):
            read_end, write_end = os.pipe()
            made.callback(os.close, write_end)
            into.append(write_end)
            out_of.append(made.enter_context(open(read_end, "rb", buffering=0)))
        yield _Pipes((into[0], into[1]), (out_of[0], out_of[1]))


class Surroundings(NamedTuple):
    """What chaos needs beside a lab: the job's variables, and the folder where workers meet."""

    environment: Mapping[str, str]
    elastic: ElasticJob | None


@contextlib.contextmanager
def surroundings(
    description: LabDescription, chaos: Chaos | None
) -> Iterator[tuple[LabDescription, Surroundings]]:
    """Make what chaos needs on this machine, and remove it at the end."""
    if chaos is None:
        yield description, Surroundings(os.environ, None)
        return
    environment = dict(os.environ)
    with contextlib.ExitStack() as made:
        if chaos.fills_disk:
            disk = made.enter_context(tempfile.TemporaryDirectory(prefix="fullwire-disk-"))
            description = dataclasses.replace(description, disk=disk)
            environment |= {DISK_VARIABLE: disk, "TMPDIR": disk}
        elastic: ElasticJob | None = None
        with contextlib.suppress(ImportError):  # without torch no job is elastic
            from fullwire.resilience.place import Gathering

            folder = made.enter_context(tempfile.TemporaryDirectory(prefix="fullwire-job-"))
            elastic = Gathering(Path(folder), description.ranks)
        yield description, Surroundings(environment, elastic)


def lab_facts(lab: Lab, faults: Sequence[Fault] = (), chaos: Chaos | None = None) -> Facts:
    """Return the facts of a job's network that the lab knows because it made it, undilated."""
    cluster, dilation = lab.description.cluster, lab.description.dilation
    others = sorted((other.node, other.nic_rate_bps) for other in cluster.other_hosts)
    in_host_bps = lab.in_host_bps
    return Facts(
        line_rate_bps=cluster.nics.rate_bps,
        payload_share=lab.description.payload_share,
        delivered_out_bps=_by_host(lab, lambda link: link.sent_bps),
        delivered_in_bps=_by_host(lab, lambda link: link.received_bps),
        hosts=",".join(lab.host_names),
        congestion=lab.congestion,
        other_line_rates_bps=tuple((float(rank), bps) for rank, bps in others) or None,
        latency_s=cluster.nics.latency_s or None,
        in_host_bps=None if in_host_bps is None else in_host_bps * dilation,
        cluster=as_toml(cluster) if lab.description.is_described else None,
        warnings="; ".join(lab.warnings) or None,
        faults="; ".join(
            [f"{show_time(fault.at_s)} {fault}" for fault in faults]
            + ([] if chaos is None else [f"chaos, seed {chaos.seed}: {chaos.text}"])
        )
        or None,
    )


def _by_host(lab: Lab, rate_bps: Callable[[LinkRate], float]) -> tuple[tuple[float, float], ...]:
    """Return for each host the rate that the slowest of its NICs delivered, undilated."""
    slowest: dict[int, float] = {}
    for link in lab.links:
        slowest[link.host] = min(rate_bps(link), slowest.get(link.host, math.inf))
    dilation = lab.description.dilation
    return tuple((float(host), each_bps * dilation) for host, each_bps in slowest.items())
