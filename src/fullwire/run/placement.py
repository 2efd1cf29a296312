"""The host of each rank, and the line rate of each host, where the run knows them.

Ranks that share a host have no line between them. The host's processors carry out their sums, if
the backend works there. (NCCL's devices have links inside a host as well.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fullwire.run.run import Run

INSIDE_A_NODE = " inside a node"  # ends the names of such groups in the step of a plan
_SUMS_ON_PROCESSORS = ("gloo", "fullwire", "mpi")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The ranks of a job, the machines that they were on, and the processors of each machine."""

    ranks: int = 1
    machines: int = 1
    processors: int | None = None  # of each machine; else each rank is taken to have its own
    fullest: int | None = None  # ranks of the machine that had most of them, where that is told
    has_links: bool = False  # between ranks of a machine, as hosts of a lab have

    @property
    def ranks_of_each(self) -> float:
        """Return how many ranks the fullest machine had, or the mean where no machine is told.

        All ranks wait for those of the fullest machine, which share its processors with most.
        """
        return self.ranks / self.machines if self.fullest is None else self.fullest

    @property
    def are_means(self) -> bool:
        """Say whether machines must have had unequal numbers of ranks, which nothing tells."""
        return self.fullest is None and self.ranks % self.machines != 0

    @property
    def are_unequal(self) -> bool:
        """Say whether the fullest machine is known to have had more ranks than others."""
        return self.fullest is not None and self.fullest * self.machines > self.ranks

    @property
    def shares_processors(self) -> bool:
        """Say whether all ranks are known to share the processors of one machine."""
        return self.machines == 1 and self.processors is not None

    def ranks_per_processor(
        self, ranks: Sequence[int], per_host: int | None = None
    ) -> NDArray[np.float64]:
        """Return how many of so many ranks there are for each processor; it may be less than one.

        More ranks are more hosts like the recorded ones, each with the ranks that it had, or with
        so many. Hosts that had unequal numbers of ranks count like the fullest one. The hosts of a
        lab share a machine, and count as one.
        """
        if self.processors is None:
            return np.ones(len(ranks))
        if per_host is None and self.machines > 1:
            fullest = np.minimum(ranks, self.ranks_of_each)
            return np.maximum(fullest, self.ranks / self.machines) / self.processors
        most = self.ranks if per_host is None else per_host
        return np.minimum(ranks, most) / self.processors


UNKNOWN_PLACEMENT = Placement()


def placement_of(run: Run) -> Placement | None:
    """Return where the ranks of a job were, if it had several and anything tells it."""
    ranks, processors = run.facts.workers or 1, processors_of_machine(run)
    hosts = hosts_of(run)
    machines = run.facts.machines
    if ranks < 2 or (processors is None and hosts is None and machines is None):
        return None
    of_hosts = () if hosts is None else hosts.ranks
    machines = machines or len(of_hosts) or ranks
    # Several hosts of a lab are on one machine, so their ranks are not those of a machine.
    fullest = max(of_hosts) if len(of_hosts) == machines else None
    return Placement(
        ranks=ranks,
        machines=machines,
        processors=processors,
        fullest=fullest,
        has_links=has_links_in_a_machine(run),
    )


def host_of_rank(run: Run) -> dict[int, str]:
    """Return the host of each rank, where it is known."""
    hosts = (run.facts.hosts or "").split(",")
    return {rank: host for rank, host in enumerate(hosts) if host}


@dataclass(frozen=True, slots=True)
class Hosts:
    """How many ranks each host of a job had, in the order of their first ranks."""

    ranks: tuple[int, ...]
    are_in_row: bool  # the ranks of each host follow each other


def hosts_of(run: Run) -> Hosts | None:
    """Return how many ranks each host had; None unless the run tells the host of every rank."""
    hosts = host_of_rank(run)
    if not hosts or len(hosts) != (run.facts.workers or 0):
        return None
    names = list(hosts.values())
    ranks = Counter(names)
    changes = sum(before != after for before, after in pairwise(names))
    return Hosts(tuple(ranks.values()), are_in_row=changes == len(ranks) - 1)


def host_line_rates_bps(run: Run) -> dict[str, float]:
    """Return the line rate of each host, where the run knows it."""
    common = run.facts.line_rate_bps
    if common is None:
        return {}
    own = {int(rank): rate_bps for rank, rate_bps in run.facts.other_line_rates_bps or ()}
    return {host: own.get(rank, common) for rank, host in host_of_rank(run).items()}


def is_inside_a_node(run: Run, group: str) -> bool:
    """Say whether a group of a plan's step uses the links of a node only, and no NIC."""
    return run.provenance.is_plan and group.endswith(INSIDE_A_NODE)


def most_on_one_host(run: Run) -> int:
    """Return the ranks on the host that has most of them; 0 where the run does not say."""
    return max(Counter(host_of_rank(run).values()).values(), default=0)


def shares_one_host(run: Run) -> bool:
    """Say whether all ranks of the job are on the processors of one host."""
    workers, hosts = run.facts.workers or 0, host_of_rank(run)
    is_known = workers > 1 and len(hosts) == workers
    return is_known and sums_on_processors(run) and len(set(hosts.values())) == 1


def has_links_in_a_machine(run: Run) -> bool:
    """Say whether ranks share a machine and have links between them, as the hosts of a lab.

    Several ranks of such a host have no link between them.
    """
    workers, machines = run.facts.workers or 0, run.facts.machines
    hosts = len(set(host_of_rank(run).values())) or workers
    are_linked = run.facts.line_rate_bps is not None and hosts == workers
    return are_linked and machines is not None and hosts > machines


def sums_on_processors(run: Run) -> bool:
    """Say whether processors carry out the job's collectives, which depends on its backend."""
    return run.facts.backend in _SUMS_ON_PROCESSORS


def processors_of_machine(run: Run) -> int | None:
    """Return how many processors the ranks of a machine share, where the run knows it.

    A rank may be bound to some of a machine's processors, and each rank to others. Then samples
    tell how many these are together.
    """
    facts = run.facts
    if not facts.processors or facts.machines != 1:
        return facts.processors
    sampled = sum(str(name).startswith("cpu") for name in set(run.hosts.device.tolist()))
    return min(max(sampled, facts.processors), facts.processors * (facts.workers or 1))


def ranks_per_processor(run: Run) -> float:
    """Return how many ranks a machine has for each of its processors, 0 where that is unknown."""
    facts, processors = run.facts, processors_of_machine(run)
    if not facts.machines or not processors:
        return 0.0
    return (facts.workers or 0) / (facts.machines * processors)
