"""Faults on a timetable: a slow link, a cut cable, a killed or paused host.

    5s slow 2 100Mbps    host 2's link runs at this line rate, both ways
    8s cut 2             host 2's cable is pulled: the carrier is gone
    9s restore 2         host 2 is as it began: cable in, its own line rate, processes running
    10s kill 1           every process on host 1 gets SIGKILL
    10s pause 1          every process on host 1 gets SIGSTOP

Times count from the start of the job. Dilation stretches these times and slows these rates too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from fullwire.errors import UsageError
from fullwire.lab.description import LabDescription, check_rate, host_number
from fullwire.units import bits_per_second, seconds, show_rate

FaultKind: TypeAlias = Literal["slow", "cut", "restore", "kill", "pause"]
KINDS: tuple[FaultKind, ...] = get_args(FaultKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing done to one host; only `slow` has a rate."""

    at_s: float
    kind: FaultKind
    host: int
    rate_bps: float | None = None

    def __str__(self) -> str:
        rate = "" if self.rate_bps is None else f" {show_rate(self.rate_bps)}"
        return f"{self.kind} {self.host}{rate}"


def parse_faults(texts: Sequence[str], description: LabDescription) -> tuple[Fault, ...]:
    """Read a timetable for a lab, and put it in order of time."""
    faults = [_parsed(text) for text in texts]
    for fault in faults:
        description.check_host(fault.host, "at")
        if fault.rate_bps is not None:
            check_rate(fault.rate_bps, description.dilation)
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _parsed(text: str) -> Fault:
    words = text.split()
    kind = next((known for known in KINDS if words[1:2] == [known]), None)
    if kind is None or len(words) != words_of(kind):
        raise UsageError(
            "at: expected TIME slow HOST RATE, or TIME cut|restore|kill|pause HOST, "
            f"like 5s slow 2 100Mbps, got {text!r}"
        )
    return Fault(
        at_s=seconds(words[0], "at"),
        kind=kind,
        host=host_number(words[2], "at"),
        rate_bps=bits_per_second(words[3], "at") if kind == "slow" else None,
    )


def words_of(kind: str) -> int:
    """Return how many words a line of the timetable has, its time and kind included."""
    return 4 if kind == "slow" else 3
