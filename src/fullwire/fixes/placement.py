"""The fix "neighbours on one host": ranks are numbered so that fewer transfers leave a host."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fullwire.errors import UsageError
from fullwire.fixes.fix import (
    FixKind,
    Process,
    Seen,
    Worthwhile,
    register,
    sending_s,
    worthwhile,
)
from fullwire.units import shown

if TYPE_CHECKING:
    from fullwire.run.run import Run
    from fullwire.simulation.forecast import Forecaster
    from fullwire.timeline.account import Account

_MOST = 100_000


@register
class Placement(FixKind):
    """Number the ranks in another order. Rank 0 stays, for it may hold the job's store."""

    key = "placement"
    label = "ranks in another order"
    addresses = ("line_rate", "transport", "latency")
    example = "0,2,1,3"
    setting = "the new number of each rank, rank 0 first"

    def to_try(
        self, run: Run, account: Account, seen: Seen, job: Forecaster | None
    ) -> Iterator[Worthwhile]:
        """Yield the order by hosts, where neighbours in the ring are on different hosts."""
        from fullwire.timeline.account import Part

        hosts = (run.facts.hosts or "").split(",")
        order = by_host(hosts)
        leaving = most_leaving(hosts)
        if order == list(range(len(hosts))) or not leaving:
            return
        sorted_hosts = [host for _, host in sorted(zip(order, hosts, strict=True))]
        share_left, sent_s = most_leaving(sorted_hosts) / leaving, sending_s(account)
        # Bytes that leave a host become fewer. Losses in a queue that they share may end wholly.
        stay_s = account.parts_s[Part.LINE_RATE.key] + account.parts_s[Part.LATENCY.key]
        most_s, usual_s = sent_s - stay_s * share_left, sent_s * (1 - share_left)
        words = "neighbours in the ring on one host"
        setting = ",".join(map(str, order))
        yield from worthwhile(self, setting, words, account, 0.0, most_s, usual_s)

    def checked(self, setting: str) -> str:
        """Take an order: each rank once, rank 0 at its place."""
        words = setting.split(",")
        is_whole = all(word.isascii() and word.isdigit() and int(word) < _MOST for word in words)
        order = [int(word) for word in words] if is_whole else []
        if not order or order[0] != 0 or sorted(order) != list(range(len(order))):
            raise UsageError(
                f"fix placement: expected each rank once, and 0 first, got {shown(setting)}"
            )
        return ",".join(map(str, order))

    def by_hand(self, setting: str) -> str:
        """Return the line, before the group is made."""
        return f'os.environ["RANK"] = "{setting}".split(",")[int(os.environ["RANK"])]'

    def apply(self, setting: str, process: Process) -> None:
        """Give this process its new number, which torch and the script read from RANK."""
        import torch.distributed as dist

        order, rank = setting.split(","), os.environ.get("RANK")
        if rank is None:  # a launcher, or a process that the script numbers later

            def numbered(given: Mapping[str, Any]) -> Mapping[str, Any]:
                process.did(
                    "not applied: the script numbers its ranks itself, and uses the numbers"
                )
                return {}

            process.around(dist, "init_process_group", numbered, may_repeat=False)
            return
        if os.environ.get("WORLD_SIZE") != str(len(order)):
            process.did(f"not applied: it is for {len(order)} ranks")
            return
        os.environ["RANK"] = order[int(rank)]
        process.did("applied: RANK in another order")


def by_host(hosts: list[str]) -> list[int]:
    """Return the new number of each rank, for which ranks of a host are neighbours."""
    first = {host: hosts.index(host) for host in hosts}
    old = sorted(range(len(hosts)), key=lambda rank: (first[hosts[rank]], rank))
    order = [0] * len(hosts)
    for new, rank in enumerate(old):
        order[rank] = new
    return order


def shared_line_s(run: Run, account: Account) -> float:
    """Return the time of bytes at line rate, where ranks of a host share its line."""
    from fullwire.timeline.account import Part

    leaving = most_leaving((run.facts.hosts or "").split(","))
    return min(account.parts_s[Part.LINE_RATE.key] * max(leaving, 1), sending_s(account))


def most_leaving(hosts: list[str]) -> int:
    """Return how many ranks of one host have their next neighbour in the ring on another host."""
    pairs = zip(hosts, [*hosts[1:], hosts[0]], strict=True)
    return max(Counter(a for a, b in pairs if a != b).values(), default=0)
