"""What is known of the hosts of a job's ranks: their machines, clocks, links and samplers.

Hosts of one machine read one clock. Between machines there is the wall clock, which may be a
millisecond off, or a minute. The job itself tells: no rank's part of an all-reduce can end before
every rank has begun its own. So each collective bounds the offset of two machines from both sides,
as a round trip does; all of them together leave an interval, whose middle is taken.
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

# Where every rank waits for every other; in a broadcast only the root is waited for.
MUTUAL = ("allreduce", "allgather", "reducescatter", "alltoall", "barrier")


@dataclass(frozen=True, slots=True)
class Clock:
    """What brings a machine's times to the run's zero, and what of that its collectives told."""

    shift_ns: int
    offset: Offset


Clocks = Mapping[str, Clock]  # by machine


def machine_of(journal: Journal) -> str:
    """Name the running kernel, whose clock its hosts share."""
    return str(journal.header["machine"])


def wall_beyond_monotonic_ns(header: Mapping[str, int]) -> int:
    """Return what the wall clock showed beyond the monotonic one."""
    return int(header["unix_ns"]) - int(header["monotonic_ns"])


def wall_zero_ns(
    journals: Sequence[Journal], clocks: Clocks, samples: Sequence[HostSamples]
) -> int:
    """Return what the wall clock showed at the zero of the ranks, without any of the samplers."""
    for first in journals[:1]:
        return wall_beyond_monotonic_ns(first.header) - clocks[machine_of(first)].shift_ns
    return min((int(sampler.header["unix_ns"]) for sampler in samples), default=0)


def sample_shifts(
    journals: Sequence[Journal], clocks: Clocks, samples: Sequence[HostSamples]
) -> Shift:
    """Return what brings each sampler's times to the zero of the ranks.

    On a machine without ranks that is its wall clock against the first rank's.
    """
    zero_ns = wall_zero_ns(journals, clocks, samples)

    def shift_ns(host: HostSamples) -> int:
        clock = clocks.get(str(host.header["machine"]))
        return wall_beyond_monotonic_ns(host.header) - zero_ns if clock is None else clock.shift_ns

    return shift_ns


def what_is_not_sampled(
    journals: Sequence[Journal], clocks: Clocks, samples: Sequence[HostSamples]
) -> list[str]:
    """Say of which hosts there are no samples, no sure clock, or not all samples."""
    there = {sampler.host for sampler in samples}
    machines = {_host(journal): machine_of(journal) for journal in journals}
    sentences = [
        f"host {host}: its links, connections and processors were not sampled: no sampler began "
        "there (was it killed, or the job over before?)"
        for host in machines
        if host not in there
    ]
    sentences += [
        f"host {host}: its clock is believed as it is; no collective shows how far it is off"
        for host, machine in machines.items()
        if clocks[machine].offset.uncertainty_ns is None
    ]
    return sentences + sampler_defects(samples)


def host_facts(
    journals: Sequence[Journal], workers: int, clocks: Clocks, samples: Sequence[HostSamples]
) -> Facts:
    """Return what journals and samples tell of the hosts of the ranks."""
    machines = len({machine_of(journal) for journal in journals})
    facts = Facts(machines=machines, sampler_share=sampler_share(samples))
    if not journals:
        return facts
    hosts = {journal.rank: _host(journal) for journal in journals}
    # Name the commonest line rate of the ranks, and the ranks with another; all must be known.
    # Ranks of one host do not communicate over its links, so there the job has no line rate.
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
        # Nothing stands for a rank that left no journal, and the others keep their places.
        hosts=",".join(hosts.get(rank, "") for rank in range(workers)),
    )


def _host(journal: Journal) -> str:
    return str(journal.header["host"])


@dataclass(frozen=True, slots=True)
class Offset:
    """What to add to a machine's times, and how far it may still be off; None if nobody knows."""

    offset_ns: int
    uncertainty_ns: int | None


SAME = Offset(0, 0)
UNKNOWN = Offset(0, None)


_NEVER_ISSUED, _NEVER_ENDED = -(2**61), 2**61  # far from all times, and their difference fits


def offsets(collectives: Collectives, machine_of: Mapping[int, str]) -> dict[str, Offset]:
    """Return the offset of each machine against that of the first rank."""
    names = list(dict.fromkeys(machine_of[rank] for rank in sorted(machine_of)))
    if len(names) < 2:
        return dict.fromkeys(names, SAME)
    mutual = np.array([op.startswith(MUTUAL) for op in collectives.op.tolist()], bool)
    table = collectives.rows(mutual)
    # For each collective and machine, when the last was issued and the first ended. The bounds are
    # put so that a machine without a part in a collective says nothing.
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
        if least > most:  # they drifted, or ends are not what they seem: believe the wall clocks
            found[name] = Offset(0, max(abs(least), abs(most)))
        else:
            found[name] = Offset((least + most) // 2, (most - least + 1) // 2)
    return found
