"""The fix "another algorithm for sums": within hosts first, or by a tree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fullwire.fixes.fix import Fix, FixKind, register
from fullwire.run.placement import host_of_rank
from fullwire.run.run import Run
from fullwire.simulation.forecast import Forecaster
from fullwire.timeline.account import Account

_NCCL_TREE = "NCCL_ALGO=Tree"
_BY_A_HOOK = "a communication hook over init_device_mesh(...) of hosts by ranks"


@dataclass(frozen=True, kw_only=True)
class SumsWithinHosts(Fix):
    """Only one sum of each host goes over the network."""

    template = "sums within each of {hosts} hosts first"

    kind: str = "algorithm"
    hosts: int


@dataclass(frozen=True, kw_only=True)
class SumsByTree(Fix):
    """The sums go by a tree."""

    template = "all-reduce by tree"
    place = "settings"

    kind: str = "algorithm"
    how: str = _NCCL_TREE


@register
class Algorithm(FixKind):
    """Sum over hosts in two levels, or by a tree."""

    key = "algorithm"
    label = "another algorithm"
    addresses = ("line_rate", "transport", "latency")
    needs = "a variable: environment:NCCL_ALGO=Tree"

    def predict(self, run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
        """Predict sums within hosts first, or the tree of NCCL where each host has one rank."""
        hosts, is_nccl = len(set(host_of_rank(run).values())), run.facts.backend == "nccl"
        if 1 < hosts < job.workers:
            setting = _NCCL_TREE if is_nccl else _BY_A_HOOK
            yield SumsWithinHosts(hosts=hosts, how=setting, forecast=job.ask(workers=(hosts,)))
        elif is_nccl:  # Gloo offers its ring only.
            yield SumsByTree(forecast=job.ask(algorithms=("tree",)))
