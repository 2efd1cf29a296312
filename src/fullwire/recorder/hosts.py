"""The hosts of a job's ranks: their machines, clocks, links and samplers.

Hosts of one machine read one clock. Machines share only the wall clock, which may be a millisecond
off, or a minute. The job itself gives a better estimate. A rank's part of an all-reduce can end
only after every rank has begun its own. So each collective bounds the offset of two machines from
both sides, as a round trip does. All collectives together leave an interval, and the offset is its
middle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fullwire.recorder.journals import Journal
from fullwire.recorder.samples import (
    HostSamples,
    Shift,
    line_rates_bps,
    sampler_defects,
    sampler_share,
)
from fullwire.run.facts import Facts
from fullwire.run.run import Collectives

# Operations in which every rank waits for every other. In a broadcast, ranks wait only for the
# root.
MUTUAL = ("allreduce", "allgather", "reducescatter", "alltoall", "barrier")


@dataclass(frozen=True, slots=True)
class Clock:
    """The shift of a machine's times to the run's zero, and the collectives' part of it."""

    shift_ns: int
    offset: Offset


Clocks = Mapping[str, Clock]  # by machine


def machine_of(journal: Journal) -> str:
    """Return the id of the running kernel; hosts with one kernel share its clock."""
    return str(journal.header["machine"])


def wall_beyond_monotonic_ns(header: Mapping[str, int]) -> int:
    """Return the wall clock's time less the monotonic clock's."""
    return int(header["unix_ns"]) - int(header["monotonic_ns"])


def wall_zero_ns(
    journals: Sequence[Journal], clocks: Clocks, samples: Sequence[HostSamples]
) -> int:
    """Return the wall clock's time at the zero of the ranks, or else of the samplers."""
    for first in journals[:1]:
        return wall_beyond_monotonic_ns(first.header) - clocks[machine_of(first)].shift_ns
    return min((int(sampler.header["unix_ns"]) for sampler in samples), default=0)


def sample_shifts(
    journals: Sequence[Journal], clocks: Clocks, samples: Sequence[HostSamples]
) -> Shift:
    """Return the shift of each sampler's times to the zero of the ranks.

    On a machine without ranks, the shift is its wall clock against the first rank's.
    """
    zero_ns = wall_zero_ns(journals, clocks, samples)

    def shift_ns(host: HostSamples) -> int:
        clock = clocks.get(str(host.header["machine"]))
        return wall_beyond_monotonic_ns(host.header) - zero_ns if clock is None else clock.shift_ns

    return shift_ns


def what_is_not_sampled(
    journals: Sequence[Journal], clocks: Clocks, samples: Sequence[HostSamples]
) -> list[str]:
    """Name the hosts that lack samples, a sure clock, or some of their samples."""
    there = {sampler.host for sampler in samples}
    machines = {_host(journal): machine_of(journal) for journal in journals}
    sentences = [
        f"host {host}: its links, connections and processors were not sampled. Its sampler did not "
        "begin (was it killed, the job over before, or its name held by another user?)"
        for host in machines
        if host not in there
    ]
    sentences += [
        f"host {host}: its clock is believed as it is, as no collective shows how far it is off"
        for host, machine in machines.items()
        if clocks[machine].offset.uncertainty_ns is None
    ]
    return sentences + sampler_defects(samples)


def host_facts(
    journals: Sequence[Journal], workers: int, clocks: Clocks, samples: Sequence[HostSamples]
) -> Facts:
    """Return the facts of the ranks' hosts from journals and samples."""
    machines = len({machine_of(journal) for journal in journals})
    facts = Facts(machines=machines or None, sampler_share=sampler_share(samples))
    if not journals:
        return facts
    hosts = {journal.rank: _host(journal) for journal in journals}
    # Name the commonest line rate of the ranks, and the ranks with another; all must be known. If
    # all ranks are on one host, they do not use its links, so the job lacks a line rate.
    rates_bps, names = line_rates_bps(samples), set(hosts.values())
    if len(names) > 1 and names <= set(rates_bps):
        by_rank = [(float(rank), rates_bps[host]) for rank, host in hosts.items()]
        [(common_bps, _)] = Counter(rate_bps for _, rate_bps in by_rank).most_common(1)
        others = tuple((rank, rate_bps) for rank, rate_bps in by_rank if rate_bps != common_bps)
        facts |= Facts(line_rate_bps=common_bps, other_line_rates_bps=others or None)
    offsets_by_rank = {journal.rank: clocks[machine_of(journal)].offset for journal in journals}
    return facts | Facts(
        clock_offset_s=tuple(
            (float(rank), offset.offset_ns * 1e-9) for rank, offset in offsets_by_rank.items()
        ),
        clock_uncertainty_s=tuple(
            (float(rank), offset.uncertainty_ns * 1e-9)
            for rank, offset in offsets_by_rank.items()
            if offset.uncertainty_ns is not None
        ),
        processors=min(int(journal.header["processors"]) for journal in journals),
        # A rank that left no journal has an empty name, so that the others keep their places.
        hosts=",".join(hosts.get(rank, "") for rank in range(workers)),
    )


def _host(journal: Journal) -> str:
    return str(journal.header["host"])


@dataclass(frozen=True, slots=True)
class Offset:
    """The number to add to a machine's times, and its uncertainty, or None if that is unknown."""

    offset_ns: int
    uncertainty_ns: int | None


SAME = Offset(0, 0)
UNKNOWN = Offset(0, None)


_NEVER_ISSUED, _NEVER_ENDED = -(2**61), 2**61  # far from all times; their difference fits 64 bits


def offsets(collectives: Collectives, machine_of: Mapping[int, str]) -> dict[str, Offset]:
    """Return the offset of each machine's clock from that of the first rank's machine."""
    names = list(dict.fromkeys(machine_of[rank] for rank in sorted(machine_of)))
    if len(names) < 2:
        return dict.fromkeys(names, SAME)
    mutual = np.array([op.startswith(MUTUAL) for op in collectives.op.tolist()], bool)
    table = collectives.rows(mutual)
    # For each collective and machine, take the last issue and the first end. The initial values
    # lie so far apart that a machine outside a collective sets no bound.
    tags = zip(table.group, table.sequence.tolist(), table.op, table.bytes.tolist(), strict=True)
    numbers: dict[tuple[object, ...], int] = {}
    collective = np.array([numbers.setdefault(tag, len(numbers)) for tag in tags], np.int64)
    place = {name: at for at, name in enumerate(names)}
    machine = np.array([place[machine_of[rank]] for rank in table.rank.tolist()], np.int64)
    issued = np.full((len(numbers), len(names)), _NEVER_ISSUED, np.int64)
    ended = np.full((len(numbers), len(names)), _NEVER_ENDED, np.int64)
    np.maximum.at(issued, (collective, machine), table.issue_ns)
    np.minimum.at(ended, (collective, machine), table.end_ns)
    found = dict.fromkeys(names, SAME)
    for at, name in enumerate(names[1:], start=1):
        is_shared = (issued[:, [0, at]] != _NEVER_ISSUED) & (ended[:, [0, at]] != _NEVER_ENDED)
        rows = is_shared.all(axis=1)
        if not rows.any():
            found[name] = UNKNOWN
            continue
        most = int((ended[rows, 0] - issued[rows, at]).min())
        least = int((issued[rows, 0] - ended[rows, at]).max())
        if least > most:  # clocks drifted, or ends are unreliable: believe the wall clocks
            found[name] = Offset(0, max(abs(least), abs(most)))
        else:
            found[name] = Offset((least + most) // 2, (most - least + 1) // 2)
    return found
