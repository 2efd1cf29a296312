"""What trains here, how does it communicate, and is the network what slows it? From packets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from fullwire.errors import UsageError
from fullwire.sources.files import path_of

if TYPE_CHECKING:
    from fullwire.analysis.flows import Traffic
    from fullwire.model.run import Run


def flows(*captures: str | Path | Run) -> Traffic:
    """Say what packets say: of captures of one job, or of a run that was made of them.

    fw.flows("rank0.pcap", "rank1.pcap").pattern.kind
    """
    run = traffic_run(*captures)
    from fullwire.analysis.flows import analyse_flows  # which begins when captures have been read

    return analyse_flows(run)


def traffic_run(*captures: str | Path | Run) -> Run:
    """Read captures of one job as a run, or take the one that is given."""
    if not captures:
        raise UsageError("flows: expected packet captures, or a run made of them")
    if len(captures) == 1:
        if not isinstance(captures[0], str | os.PathLike):
            return _given_run(captures[0])
        place = path_of(captures[0], "flows")
        if place.is_dir():
            from fullwire.store import read_run

            return read_run(place)
    from fullwire.sources.pcap import read_captures

    return read_captures([path_of(each, "flows") for each in captures])


def _given_run(given: object) -> Run:
    from fullwire.model.run import Run
    from fullwire.units import shown

    if not isinstance(given, Run):
        raise UsageError(f"flows: expected a path or a run, got {shown(given)}")
    return given
