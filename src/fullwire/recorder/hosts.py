"""What is known of the hosts of a job's ranks: their machines, clocks, links and samplers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fullwire.recorder.clocks import Offset
from fullwire.recorder.journals import Journal
from fullwire.recorder.sampled import Shift, line_rates_bps, sampler_defects, sampler_share
from fullwire.recorder.samples import HostSamples
from fullwire.run.facts import Facts


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
    return min((int(each.header["unix_ns"]) for each in samples), default=0)


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
    there = {each.host for each in samples}
    machines = {_host(each): machine_of(each) for each in journals}
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
    machines = len({machine_of(each) for each in journals})
    facts = Facts(machines=machines, sampler_share=sampler_share(samples))
    facts |= _line_rate_facts(journals, line_rates_bps(samples))
    if not journals:
        return facts
    hosts = {each.rank: _host(each) for each in journals}
    clock_facts = _clock_facts({each.rank: clocks[machine_of(each)].offset for each in journals})
    return (
        facts
        | clock_facts
        | Facts(
            processors=min(int(each.header["processors"]) for each in journals),
            # Nothing stands for a rank that left no journal, and the others keep their places.
            hosts=",".join(hosts.get(rank, "") for rank in range(workers)),
        )
    )


def _host(journal: Journal) -> str:
    return str(journal.header["host"])


def _clock_facts(offsets: Mapping[int, Offset]) -> Facts:
    return Facts(
        clock_offset_s=tuple(
            (float(rank), each.offset_ns * 1e-9) for rank, each in offsets.items()
        ),
        clock_uncertainty_s=tuple(
            (float(rank), each.uncertainty_ns * 1e-9)
            for rank, each in offsets.items()
            if each.uncertainty_ns is not None
        ),
    )


def _line_rate_facts(journals: Sequence[Journal], rates_bps: Mapping[str, float]) -> Facts:
    """Name the commonest line rate of the ranks, and the ranks with another; all must be known.

    Ranks of one host do not communicate over its links, so there the job has no line rate.
    """
    hosts = {each.rank: _host(each) for each in journals}
    if len(set(hosts.values())) < 2 or not set(hosts.values()) <= set(rates_bps):
        return Facts()
    by_rank = [(float(rank), rates_bps[host]) for rank, host in hosts.items()]
    [(common_bps, _)] = Counter(rate_bps for _, rate_bps in by_rank).most_common(1)
    others = tuple(each for each in by_rank if each[1] != common_bps)
    return Facts(line_rate_bps=common_bps, other_line_rates_bps=others or None)
