"""Faults on a timetable, or drawn by a seed: slow links, cut cables, killed or paused hosts.

    5s slow 2 100Mbps    host 2's link runs at this line rate, both ways
    8s cut 2             host 2's cable is pulled: the carrier is gone
    9s restore 2         host 2 is as it began: cable in, its own line rate, processes running
    10s kill 1           every process on host 1 gets SIGKILL
    10s pause 1          every process on host 1 gets SIGSTOP

Times count from the start of the job. Dilation stretches these times and slows these rates too.

Chaos is a list of faults that come by chance. One seed gives the same faults at the same times:

    kill every 20s           a host in each 20 s; its command starts again a second later
    pause 5s                 a host, for 5 s
    partition 0,1|2 3s       hosts 0 and 1 do not reach host 2, for 3 s
    slow 2 to 10Mbps 4s      host 2's link, for 4 s; without a time to the end of the job
    fill disk                the lab's disk, where temporary files go
"""

from __future__ import annotations

import heapq
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from fullwire.errors import UsageError
from fullwire.lab.description import LabDescription, check_rate, host_number
from fullwire.units import bits_per_second, seconds, show_rate, shown

FaultKind: TypeAlias = Literal["slow", "cut", "restore", "kill", "pause"]
KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
ChaosKind: TypeAlias = Literal["kill", "pause", "partition", "slow", "fill"]
# What ends a fault of chaos: a paused host goes on, all hosts reach each other, the disk has room.
EndKind: TypeAlias = Literal["resume", "heal", "empty"]
RESTARTS_S = 1.0  # from a kill to the start of the same command on that host
_ONCE_S = (5.0, 20.0)  # without `every`, a fault comes once, between these times
_LEAST_EVERY_S = 0.1
_LAB = -1  # the host of a fault that is not of one host
_HOST, _LASTS = r"(?: (?P<host>\d{1,9}))?", r" (?P<lasts>\S+)"
_FORMS: dict[ChaosKind, tuple[str, str]] = {  # as people write it, and as it is read
    "kill": ("kill [HOST]", f"kill{_HOST}"),
    "pause": ("pause [HOST] TIME", f"pause{_HOST}{_LASTS}"),
    "partition": ("partition HOSTS|HOSTS TIME", rf"partition (?P<sides>\S+){_LASTS}"),
    "slow": ("slow [HOST] to RATE [TIME]", rf"slow{_HOST} to (?P<rate>\S+)(?:{_LASTS})?"),
    "fill": ("fill disk [TIME]", f"fill disk(?:{_LASTS})?"),
}
_WHEN = r"(?: (?P<how>every|at) (?P<when>\S+))?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing done to one host; only `slow` has a rate.

    A partition is of several hosts: its `sides` do not reach each other.
    """

    at_s: float
    kind: FaultKind | ChaosKind | EndKind
    host: int = _LAB
    rate_bps: float | None = None
    sides: tuple[tuple[int, ...], ...] = ()
    lasts_s: float = 0.0  # of chaos; 0 to the end of the job
    undoes: bool = False  # a slow link of chaos gets its own rate back

    def __str__(self) -> str:
        words: list[str] = [self.kind]
        if self.sides:
            words.append("|".join(",".join(map(str, side)) for side in self.sides))
        elif self.host == _LAB:
            words.append("disk")
        else:
            words.append(str(self.host))
        if self.rate_bps is not None:
            words.append(show_rate(self.rate_bps))
        return " ".join(words)

    @property
    def is_end(self) -> bool:
        """Say whether this ends a fault of chaos, whose length is known from its beginning."""
        return self.kind in get_args(EndKind) or self.undoes

    @property
    def hosts(self) -> tuple[int, ...]:
        """Return the hosts that this happens to; none for the lab's disk."""
        if self.sides:
            return tuple(sorted(host for side in self.sides for host in side))
        return () if self.host == _LAB else (self.host,)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trouble:
    """One kind of chaos: a fault without a time, and how often it comes."""

    fault: Fault
    has_host: bool  # else one is drawn each time
    every_s: float  # infinite: once
    at_s: float | None

    def times_s(self, chosen: random.Random) -> Iterator[float]:
        """Yield when it comes: at a moment by chance in each interval."""
        if self.at_s is not None:
            yield self.at_s
        elif math.isinf(self.every_s):
            yield chosen.uniform(*_ONCE_S)
        else:
            count = 0
            while True:
                yield (count + chosen.random()) * self.every_s
                count += 1


@dataclass(frozen=True, slots=True)
class Chaos:
    """Faults that come by chance, the same ones for the same seed."""

    text: str
    seed: int
    troubles: tuple[_Trouble, ...]

    @property
    def kills(self) -> bool:
        """Say whether hosts are killed."""
        return any(trouble.fault.kind == "kill" for trouble in self.troubles)

    @property
    def fills_disk(self) -> bool:
        """Say whether the lab needs a disk of its own."""
        return any(trouble.fault.kind == "fill" for trouble in self.troubles)

    def faults(self, description: LabDescription) -> Iterator[Fault]:
        """Yield the faults in order of time, without end if one of them comes again and again."""
        order = 0
        waiting: list[tuple[float, int, Fault, int]] = []
        chances = [random.Random(f"{self.seed} {place}") for place in range(len(self.troubles))]
        times_s = [
            trouble.times_s(chance) for trouble, chance in zip(self.troubles, chances, strict=True)
        ]

        def add(place: int, fault: Fault) -> None:
            nonlocal order
            order += 1
            heapq.heappush(waiting, (fault.at_s, order, fault, place))

        def add_next(place: int) -> None:
            trouble = self.troubles[place]
            if (at_s := next(times_s[place], None)) is not None:
                fault = replace(trouble.fault, at_s=at_s)
                if not trouble.has_host:
                    fault = replace(fault, host=chances[place].randrange(description.cluster.nodes))
                add(place, fault)

        for place in range(len(self.troubles)):
            add_next(place)
        while waiting:
            _, _, fault, place = heapq.heappop(waiting)
            yield fault
            if fault.is_end:
                continue
            if (end := _end_of(fault, description)) is not None:
                add(place, end)
            add_next(place)


def _end_of(fault: Fault, description: LabDescription) -> Fault | None:
    """Return what undoes a fault of chaos."""
    if not fault.lasts_s:
        return None
    at_s = fault.at_s + fault.lasts_s
    if fault.kind == "slow":
        own_bps = description.cluster.node_rate_bps(fault.host)
        return replace(fault, at_s=at_s, rate_bps=own_bps, undoes=True)
    ends: dict[str, EndKind] = {"pause": "resume", "partition": "heal", "fill": "empty"}
    return replace(fault, at_s=at_s, kind=ends[fault.kind])


def parse_chaos(text: str, seed: int, description: LabDescription) -> Chaos:
    """Read chaos for a lab, or refuse it with the form that was expected."""
    troubles = [_trouble(part.strip(), description) for part in text.split(";") if part.strip()]
    if not troubles:
        raise UsageError(f"chaos: expected faults like 'kill every 20s', got {shown(text)}")
    return Chaos(" ".join(text.split()), seed, tuple(troubles))


def _trouble(text: str, description: LabDescription) -> _Trouble:
    kind = next((known for known in _FORMS if text.split()[0] == known), None)
    if kind is None:
        raise UsageError(f"chaos: expected {', '.join(_FORMS)} at the beginning, got {shown(text)}")
    form, pattern = _FORMS[kind]
    found = re.fullmatch(pattern + _WHEN, " ".join(text.split()), re.ASCII)
    if found is None:
        raise UsageError(f"chaos: expected {form} [every TIME | at TIME], got {shown(text)}")
    said = found.groupdict()
    lasts_s = 0.0 if said.get("lasts") is None else seconds(said["lasts"], "chaos")
    every_s = seconds(said["when"], "chaos") if said["how"] == "every" else math.inf
    if every_s < _LEAST_EVERY_S or (said.get("lasts") and lasts_s <= 0):
        raise UsageError(
            f"chaos: expected times above 0 s, and {_LEAST_EVERY_S:g} s between two faults, got "
            f"{shown(text)}"
        )
    host, rate_bps = _LAB, None
    if said.get("host") is not None:
        host = host_number(said["host"], "chaos")
        description.check_host(host, "chaos")
    if said.get("rate") is not None:
        rate_bps = bits_per_second(said["rate"], "chaos")
        check_rate(rate_bps, description.dilation)
    sides = _sides(said["sides"], description) if "sides" in said else ()
    return _Trouble(
        fault=Fault(
            at_s=0.0, kind=kind, host=host, rate_bps=rate_bps, sides=sides, lasts_s=lasts_s
        ),
        has_host=host != _LAB or "host" not in said,
        every_s=every_s,
        at_s=seconds(said["when"], "chaos") if said["how"] == "at" else None,
    )


def _sides(text: str, description: LabDescription) -> tuple[tuple[int, ...], ...]:
    """Read the sides of a partition: 0,1|2."""
    if not re.fullmatch(r"\d+(,\d+)*(\|\d+(,\d+)*)+", text, re.ASCII):
        raise UsageError(f"chaos: partition: expected hosts like 0,1|2, got {shown(text)}")
    sides = tuple(
        tuple(host_number(host, "chaos") for host in side.split(",")) for side in text.split("|")
    )
    hosts = [host for side in sides for host in side]
    for host in hosts:
        description.check_host(host, "chaos")
    if len(set(hosts)) < len(hosts):
        raise UsageError(f"chaos: partition: expected each host once, got {shown(text)}")
    return sides
