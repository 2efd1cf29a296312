"""The fix "options of FSDP": when shards are gathered, and how long they stay."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from fullwire.fixes.fix import (
    FixKind,
    Process,
    Seen,
    Worthwhile,
    as_arguments,
    options_among,
    register,
    sending_s,
    worthwhile,
)

if TYPE_CHECKING:
    from fullwire.run.run import Run
    from fullwire.simulation.forecast import Forecaster
    from fullwire.timeline.account import Account

_KEPT = "reshard_after_forward=False"
_AHEAD = "forward_prefetch"
_INSIDE = "shard_inside_hosts"
_OPTIONS = (_KEPT, _AHEAD, _INSIDE)


@register
class Fsdp(FixKind):
    """Keep gathered parameters, gather the next ones ahead, or shard inside each host."""

    key = "fsdp"
    label = "options of FSDP"
    tries_each = True
    addresses = ("line_rate", "transport", "latency")
    adds_up = True
    example = _KEPT
    setting = f"one or more of {', '.join(_OPTIONS)}; the first and the last need memory"

    def to_try(
        self, run: Run, account: Account, seen: Seen, job: Forecaster | None
    ) -> Iterator[Worthwhile]:
        """Yield parameters that stay, earlier gathers, and shards that stay inside each host."""
        if not seen.fsdp:
            return
        sent_s = sending_s(account)
        if seen.fsdp.get("reshard_after_forward") is not False:
            words = "parameters that stay gathered for the backward pass"
            # One of two gathers goes; the gradients' shards stay.
            yield from worthwhile(self, _KEPT, words, account, 0.0, sent_s / 3)
        if not seen.fsdp.get("forward_prefetch"):
            words = "the next parameters gathered ahead"
            yield from worthwhile(self, _AHEAD, words, account, 0.0, sent_s / 3)
        hosts = len(set((run.facts.hosts or "").split(",")))
        if seen.fsdp.get("is_whole") and hosts > 1 and seen.local_ranks > 1:
            words = "parameters sharded inside each host"
            # No gather leaves a host. The sum over hosts is one shard's.
            yield from worthwhile(self, _INSIDE, words, account, 0.0, sent_s * 2 / 3)

    def checked(self, setting: str) -> str:
        """Take options, each once, in the order of this file."""
        return options_among(_OPTIONS, setting, self.key)

    def by_hand(self, setting: str) -> str:
        """Return the constructor's call."""
        options = [as_arguments(option) for option in setting.split(",") if option != _INSIDE]
        if _INSIDE in setting:
            options.append("mesh=init_device_mesh(device, (hosts, ranks_of_host))")
        return f"fully_shard(model, {', '.join(options)})"

    def apply(self, setting: str, process: Process) -> None:
        """Give `fully_shard` and FullyShardedDataParallel the options that each has."""
        import torch
        import torch.distributed as dist
        from torch.distributed import fsdp

        asked = setting.split(",")

        @cache
        def in_hosts(kind: str) -> Any:
            """Return the mesh of all ranks whose second dimension is a host; None if it is one."""
            from torch.distributed.device_mesh import init_device_mesh

            ranks, each = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            if each < 2 or each == ranks or ranks % each:
                return None
            names = ("replicate", "shard")
            return init_device_mesh(kind, (ranks // each, each), mesh_dim_names=names)

        def of_modules(given: Mapping[str, Any]) -> Mapping[str, Any]:
            changed: dict[str, Any] = {}
            if _KEPT in asked:
                changed["reshard_after_forward"] = False
            mesh = given.get("mesh")
            if _INSIDE in asked and (mesh is None or mesh.ndim == 1):
                found = torch.accelerator.current_accelerator()
                kind = mesh.device_type if mesh is not None else found.type if found else "cpu"
                if (whole := in_hosts(kind)) is not None:
                    changed["mesh"] = whole
                else:
                    process.did(f"not applied: {_INSIDE} needs several hosts of several ranks")
            if changed:
                process.did(f"applied: {', '.join(changed)}")
            return changed

        def of_wrappers(given: Mapping[str, Any]) -> Mapping[str, Any]:
            changed: dict[str, Any] = {}
            strategies = fsdp.ShardingStrategy
            is_whole = given.get("sharding_strategy") in (None, strategies.FULL_SHARD)
            if _INSIDE in asked and is_whole and given.get("process_group") is None:
                kept = _KEPT in asked
                changed["sharding_strategy"] = (
                    strategies._HYBRID_SHARD_ZERO2 if kept else strategies.HYBRID_SHARD
                )
            elif _KEPT in asked and is_whole:
                changed["sharding_strategy"] = strategies.SHARD_GRAD_OP
            if _AHEAD in asked:
                changed["forward_prefetch"] = True
            process.did(f"applied: {', '.join(changed)}" if changed else "not applied: it is so")
            return changed

        process.around(fsdp, "fully_shard", of_modules)
        process.around(fsdp.FullyShardedDataParallel, "__init__", of_wrappers)
        if _AHEAD in asked:
            _gather_ahead(fsdp, process)


def _gather_ahead(fsdp: Any, process: Process) -> None:
    """Let each module gather the parameters of the one that was wrapped after it."""
    shard, last = fsdp.fully_shard, list[Any]()

    @functools.wraps(shard)
    def sharded(module: Any, *args: Any, **kwargs: Any) -> Any:
        wrapped = shard(module, *args, **kwargs)
        # A whole model is wrapped after its parts, and gathers its own parameters before them.
        if last and not isinstance(module, list) and last[0] not in set(module.modules()):
            last[0].set_modules_to_forward_prefetch([wrapped])
            process.did(f"applied: {_AHEAD}")
        last[:] = [] if isinstance(module, list) else [wrapped]
        return wrapped

    fsdp.fully_shard = sharded
