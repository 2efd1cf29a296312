"""Every rank sends to the servers, which are ranks, and they answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fullwire.collectives.exchanges import refuse_too_many
from fullwire.collectives.registry import Algorithm, Statement, whole_nodes
from fullwire.collectives.stages import Layout, Stated, stage
from fullwire.errors import UsageError


def _push_and_pull(_op: str, layout: Layout) -> Stated:
    workers, servers = layout.workers, layout.servers
    if not 1 <= servers <= workers:
        raise UsageError(f"servers: expected 1 to {workers}, as many as workers, got {servers}")
    refuse_too_many(2 * servers * (workers - 1), "a parameter server")
    block = np.tile(np.arange(servers), workers)
    rank = np.repeat(np.arange(workers), servers)
    server = block * workers // servers
    others = rank != server
    push = stage(rank[others], server[others], block[others], reduces=True)
    pull = replace(push, source=push.target, target=push.source, reduces=False)
    return Stated(servers, ((push, pull),))


ALGORITHM = Algorithm(
    name="parameter-server",
    label="every rank sends to the servers, which are ranks, and they answer",
    place=100,
    ops={"allreduce": Statement(states=_push_and_pull)},
    fits=whole_nodes,
    by_name_only=True,  # servers are a way to train of its own
)
