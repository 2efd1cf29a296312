"""What a transport itself tells of the collectives that it carried: waiting, transfer, adding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fullwire.findings.finding import Evidence
from fullwire.run.run import Run
from fullwire.timeline.carried import carried

_TOLD = (
    "The transport itself tells: in a step a rank waited {waited_s:time} for the first bytes of "
    "others and transferred for {moved_s:time}, {added_s:time} of it adding"
)


class TransportUtilization(Evidence):
    """How collectives spent their time, and how much of the line they used."""

    template = f"{_TOLD}; meanwhile it used {{value:.0%}} of the line rate."

    waited_s: float
    moved_s: float
    added_s: float


class TransportTime(Evidence):
    """How collectives spent their time, where no line rate tells how full the line was."""

    template = f"{_TOLD}."

    waited_s: float
    moved_s: float
    added_s: float


def carried_evidence(run: Run, rate_bps: Mapping[int, float]) -> Iterator[Evidence]:
    """Say how a rank's steps spent the time of their collectives, and how full its link was."""
    found = carried(run, rate_bps)
    if found is None:
        return
    times = {"waited_s": found.waited_s, "moved_s": found.moved_s, "added_s": found.added_s}
    if found.used is None:
        yield TransportTime(value=found.moved_s, **times)
    else:
        yield TransportUtilization(value=found.used, **times)
