"""What trains here, how does it communicate, and does the network slow it? From packets."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fullwire.errors import DamagedInput, UsageError
from fullwire.files import beginning_of, files_like, is_directory, path_of, refuse_packed
from fullwire.packets.captures import is_capture
from fullwire.units import size_bytes

if TYPE_CHECKING:
    from fullwire.answers.audited import AuditedTraffic
    from fullwire.packets.jobs import NetworkJob
    from fullwire.run.run import Run


def flows(
    *captures: str | Path | Run,
    hosts: str | Path | None = None,
    gradient: str | float | None = None,
) -> AuditedTraffic:
    """Describe a training from packets: from captures of one job, or from a run made of them.

    - `captures`: files with packets, plain or packed, or one run that was made of them.
    - `hosts`: a file of lines such as `node0 10.0.0.1 10.0.1.1 ranks=0-7`.
    - `gradient`: the size of the model's gradients, `"102MB"` or bytes, to compare bytes with.

        fw.flows("rank0.pcap", "rank1.pcap").pattern.kind
    """
    return flows_and_run(*captures, hosts=hosts, gradient=gradient)[0]


def jobs_in(*records: str | Path | Run) -> tuple[NetworkJob, ...]:
    """Tell the training jobs apart in the flow records of switches, or in captures of a network.

    - `records`: files of NetFlow, IPFIX or sFlow, packet captures, or one run made of them.

        [job.step_s for job in fw.jobs_in("switch.ipfix")]
    """
    from fullwire.packets.flows import refuse_without_packets
    from fullwire.packets.jobs import jobs_of

    run = _traffic_run(*records)
    refuse_without_packets(run)
    return jobs_of(run)


def flows_and_run(
    *captures: str | Path | Run,
    hosts: str | Path | None = None,
    gradient: str | float | None = None,
) -> tuple[AuditedTraffic, Run]:
    """Return the answer of `flows` and its run, which has the iterations as its steps."""
    model_bytes = None if gradient is None else float(size_bytes(gradient, "gradient"))
    if model_bytes is not None and model_bytes <= 0:
        raise UsageError("gradient: expected a size above 0")
    run = _traffic_run(*captures)
    if hosts is not None:
        from fullwire.packets.edges import read_hosts

        run = replace(run, facts=run.facts | read_hosts(path_of(hosts, "hosts")))
    from fullwire.answers.audited import audited  # after captures have been read
    from fullwire.packets.flows import analyse_flows
    from fullwire.packets.wire_steps import with_steps

    found = analyse_flows(run, model_bytes=model_bytes)
    return audited(found), with_steps(run, found)


def _traffic_run(*captures: str | Path | Run) -> Run:
    """Read captures of one job as a run, or return the given run."""
    if not captures:
        raise UsageError("flows: expected packet captures, or a run made of them")
    if len(captures) == 1:
        if not isinstance(captures[0], str | os.PathLike):
            from fullwire.run.run import Run
            from fullwire.units import shown

            if not isinstance(captures[0], Run):
                raise UsageError(f"flows: expected a path or a run, got {shown(captures[0])}")
            return captures[0]
        place = path_of(captures[0], "flows")
        if place.is_dir():
            from fullwire.run.store import is_run, read_run

            if is_run(place):
                return read_run(place)
    from fullwire.importers import FORMATS
    from fullwire.importers._format import Options
    from fullwire.packets.pcap import read_captures

    # Take the given files, and the captures of the given directories.
    places = [path_of(capture, "flows") for capture in captures]
    refuse_packed([place for place in places if not is_directory(place)])
    records = FORMATS["flow-records"]
    is_records = [
        not is_directory(place) and records.looks_like(beginning_of(place)).score > 0
        for place in places
    ]
    if all(is_records):
        return records.read(places, Options())
    found = files_like(places, lambda path: is_capture(beginning_of(path)))
    if not found:
        raise DamagedInput(places[0], "expected a run, or a folder of packet captures")
    return read_captures(found)
