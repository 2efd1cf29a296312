"""Turn the iterations and collectives in packets into the steps and collectives of a run.

A step goes from the first bytes of an iteration to those of the next, the same on every host.
Packets do not show its computation. A collective begins on a host with the first packet that asks
for data or offers it. It lasts as long as its data come and go.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fullwire.packets.edges import ranks_by_host
from fullwire.packets.flows import Traffic
from fullwire.packets.iterations import Iterations
from fullwire.packets.messages import SeenCollectives
from fullwire.run.facts import Facts
from fullwire.run.run import SIZE_UNKNOWN, Collectives, Run, Spans, Whole

FROM_PACKETS = (  # a run's remark
    "its steps are iterations that packets show, from the first bytes of one to the first of the "
    "next; what was computed in them is not known"
)


def with_steps(run: Run, traffic: Traffic) -> Run:
    """Return a run of packets with their iterations as its steps, or any other run unchanged."""
    found = traffic.iterations
    if len(run.spans) or found is None or len(found.begins_ns) < 2:
        return run
    # Each host is one rank: the first rank known to run there, or the host's number.
    known = ranks_by_host(run, traffic.hosts)
    ranks = np.arange(len(traffic.hosts))
    if known is not None:
        ranks = np.array([known[host][0] for host in traffic.hosts])
    collectives = Collectives.empty()
    if traffic.collectives is not None and found.basis == "messages":
        collectives = _collectives(traffic.collectives, found, ranks)
    # If collectives are unknown, all the traffic of a step is one span.
    begins_ns, ends_ns = found.begins_ns[:-1], found.begins_ns[1:]
    steps = len(begins_ns)
    kinds = [("host", "step", ends_ns)]
    if not len(collectives):
        kinds.append(("communication", "traffic", np.minimum(found.ends_ns[:-1], ends_ns)))
    spans = [
        Spans(
            rank=np.full(steps, rank),
            step=np.arange(steps),
            lane=np.full(steps, lane, object),
            name=np.full(steps, name, object),
            start_ns=begins_ns,
            end_ns=until_ns,
        )
        for rank in ranks.tolist()
        for lane, name, until_ns in kinds
    ]
    return replace(
        run,
        facts=run.facts | Facts(remarks=FROM_PACKETS, workers=traffic.ranks),
        spans=Spans.joined(spans),
        collectives=collectives,
    )


def _collectives(seen: SeenCollectives, found: Iterations, ranks: Whole) -> Collectives:
    """Make a row for each host that takes part in a collective of a step."""
    hosts, count = len(ranks), len(seen)
    cell = seen.part * hosts
    never = np.iinfo(np.int64).max
    issue_ns, first_ns = np.full(count * hosts, never), np.full(count * hosts, never)
    end_ns = np.full(count * hosts, -never)
    has_data = seen.part_has_data
    np.minimum.at(issue_ns, cell + seen.source, seen.part_begin_ns)
    for end in (seen.source, seen.target):
        np.minimum.at(first_ns, (cell + end)[has_data], seen.part_first_ns[has_data])
        np.maximum.at(end_ns, (cell + end)[has_data], seen.part_last_ns[has_data])
    step = np.searchsorted(found.begins_ns, seen.first_ns, "right") - 1
    inside = (step >= 0) & (step < len(found.begins_ns) - 1)
    chosen = np.flatnonzero((end_ns > -never) & np.repeat(inside, hosts))
    of = chosen // hosts
    begin_ns = np.minimum(issue_ns[chosen], first_ns[chosen])
    return Collectives(
        rank=ranks[chosen % hosts],
        step=step[of],
        sequence=seen.sequence[of],
        group=np.full(len(chosen), "gloo", object),
        op=seen.op[of],
        dtype=np.where(seen.is_sure[of], "bytes", SIZE_UNKNOWN).astype(object),
        bytes=np.rint(seen.bytes[of]).astype(np.int64),
        issue_ns=begin_ns,
        start_ns=np.maximum(first_ns[chosen], begin_ns),
        end_ns=np.maximum(end_ns[chosen], begin_ns),
    )
