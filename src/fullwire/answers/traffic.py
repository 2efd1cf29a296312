"""What trains here, how does it communicate, and is the network what slows it? From packets."""

from __future__ import annotations

from pathlib import Path

from fullwire.analysis.flows import Traffic, analyse_flows
from fullwire.errors import UsageError
from fullwire.model.run import Run
from fullwire.sources.files import path_of


def flows(*captures: str | Path | Run) -> Traffic:
    """Say what packets say: of captures of one job, or of a run that was made of them.

    fw.flows("rank0.pcap", "rank1.pcap").pattern.kind
    """
    return analyse_flows(traffic_run(*captures))


def traffic_run(*captures: str | Path | Run) -> Run:
    """Read captures of one job as a run, or take the one that is given."""
    if not captures:
        raise UsageError("flows: expected packet captures, or a run made of them")
    if len(captures) == 1:
        if isinstance(captures[0], Run):
            return captures[0]
        place = path_of(captures[0], "flows")
        if place.is_dir():
            from fullwire.store import read_run

            return read_run(place)
    from fullwire.sources.pcap import read_captures

    return read_captures([path_of(each, "flows") for each in captures])
