"""The fix "processors of its own": each rank of a host computes on its share of the processors."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullwire.errors import UsageError
from fullwire.fixes.fix import FixKind, Process, Seen, Worthwhile, register, worthwhile
from fullwire.units import shown

if TYPE_CHECKING:
    from fullwire.run.run import Run
    from fullwire.simulation.forecast import Forecaster
    from fullwire.timeline.account import Account

_OWN = "own"
_APART = "own+communication"
_PATIENCE = timedelta(seconds=10)  # with ranks that have not said where they are
_NODES = Path("/sys/devices/system/node")


@register
class Processors(FixKind):
    """Bind each rank to its share of the host's processors, within a NUMA node where it fits."""

    key = "processors"
    label = "processors of its own"
    tries_each = True
    addresses = ("contention", "straggler")
    example = _OWN
    setting = f"{_OWN}, or {_APART}: the last of them for communication alone"

    def to_try(
        self, run: Run, account: Account, seen: Seen, job: Forecaster | None
    ) -> Iterator[Worthwhile]:
        """Yield shares where ranks of a host disturb each other."""
        from fullwire.timeline.account import Part

        if seen.local_ranks > 1 and seen.processors >= seen.local_ranks:
            parts_s = account.parts_s
            most_s = parts_s[Part.CONTENTION.key] + parts_s[Part.STRAGGLER.key] / 2
            words = "processors of its own for each rank"
            yield from worthwhile(self, _OWN, words, account, 0.0, most_s)
            if seen.processors >= 2 * seen.local_ranks:
                words += ", one of them for communication"
                most_s = parts_s[Part.CONTENTION.key]
                yield from worthwhile(self, _APART, words, account, 0.0, most_s)

    def checked(self, setting: str) -> str:
        """Take one of the two ways."""
        if setting not in (_OWN, _APART):
            raise UsageError(f"fix processors: expected {_OWN} or {_APART}, got {shown(setting)}")
        return setting

    def by_hand(self, setting: str) -> str:
        """Return the lines, before threads begin."""
        lines = [
            "share = sorted(os.sched_getaffinity(0))",
            'each = len(share) // int(os.environ["LOCAL_WORLD_SIZE"])',
            'share = share[int(os.environ["LOCAL_RANK"]) * each :][:each]',
        ]
        if setting == _APART:
            lines.append("os.sched_setaffinity(0, share[-1:])  # before init_process_group")
            lines.append("os.sched_setaffinity(0, share[:-1])  # after it")
        else:
            lines.append("os.sched_setaffinity(0, share)")
        return "\n".join(lines)

    def apply(self, setting: str, process: Process) -> None:
        """Bind this process; its threads and loading processes inherit it."""
        import torch.distributed as dist

        rank, ranks = os.environ.get("LOCAL_RANK"), os.environ.get("LOCAL_WORLD_SIZE")
        inner = dist.init_process_group
        if rank is None or ranks is None:  # a launcher, or a process that the script numbers later

            @functools.wraps(inner)
            def then_bound(*args: Any, **kwargs: Any) -> None:
                before = _threads()
                inner(*args, **kwargs)
                place = _place_on_host()
                if place is None:
                    process.did("not applied: the ranks of this host are not known")
                elif share := self._share(setting, *place, process):
                    _bind(before, share[:-1] if setting == _APART else share)
                    _bind(_threads() - before, share[-1:] if setting == _APART else share)

            dist.init_process_group = then_bound
            return
        if not (share := self._share(setting, int(rank), int(ranks), process)):
            return
        computing = share[:-1] if setting == _APART else share
        os.sched_setaffinity(0, computing)
        if setting == _OWN:
            return

        @functools.wraps(inner)
        def with_threads_apart(*args: Any, **kwargs: Any) -> Any:
            os.sched_setaffinity(0, share[-1:])  # the group's threads inherit it
            try:
                return inner(*args, **kwargs)
            finally:
                os.sched_setaffinity(0, computing)

        dist.init_process_group = with_threads_apart

    def _share(self, setting: str, rank: int, ranks: int, process: Process) -> list[int]:
        """Return the processors of a rank of this host, and note them; none if they are too few."""
        share = share_of_rank(by_node(os.sched_getaffinity(0)), rank, ranks)
        if len(share) < (2 if setting == _APART else 1) or ranks < 2:
            process.did("not applied: too few processors, or one rank on its host")
            return []
        process.did(f"applied: processors {','.join(map(str, share))}")
        return share


def _threads() -> set[int]:
    """Return the threads of this process."""
    return set(map(int, os.listdir("/proc/self/task")))


def _bind(threads: set[int], processors: Sequence[int]) -> None:
    for thread in threads:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(thread, processors)


def _place_on_host() -> tuple[int, int] | None:
    """Return this rank's place among those of its host, and their number; None if some are silent.

    The ranks tell each other through the store of their group.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    rank, store = dist.get_rank(), _get_default_store()
    keys = [f"fullwire/host/{other}" for other in range(dist.get_world_size())]
    store.set(keys[rank], socket.gethostname())
    try:
        store.wait(keys, _PATIENCE)
    except RuntimeError:  # ranks of another host may lack the fix
        return None
    hosts = [store.get(key) for key in keys]
    return hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])


def by_node(allowed: set[int]) -> list[int]:
    """Return processors in the order of their NUMA nodes."""
    order: dict[int, int] = {}
    for node in sorted(_NODES.glob("node[0-9]*")):
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", (node / "cpulist").read_text()):
            for processor in range(int(first), int(last or first) + 1):
                order[processor] = int(node.name.removeprefix("node"))
    return sorted(allowed, key=lambda processor: (order.get(processor, 0), processor))


def share_of_rank(processors: Sequence[int], rank: int, ranks: int) -> list[int]:
    """Return the processors of one rank of a host: neighbours, and as many as each other's."""
    each = len(processors) // ranks
    return list(processors[rank * each : (rank + 1) * each])
