"""The fix "options of FSDP": when shards are gathered, and how long they stay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
_OPTIONS = (_KEPT, _AHEAD)


@register
class Fsdp(FixKind):
    """Keep gathered parameters for the backward pass, or gather the next ones ahead."""

    key = "fsdp"
    label = "options of FSDP"
    addresses = ("line_rate", "transport", "latency")
    example = _KEPT
    setting = f"one or both of {', '.join(_OPTIONS)}; the first needs memory"

    def to_try(
        self, run: Run, account: Account, seen: Seen, job: Forecaster | None
    ) -> Iterator[Worthwhile]:
        """Yield parameters that stay, where they are gathered a second time."""
        if seen.fsdp and seen.fsdp.get("reshard_after_forward") is not False:
            most_s = sending_s(account) / 3  # one of two gathers, beside the gradients' shards
            words = "parameters that stay gathered for the backward pass"
            yield from worthwhile(self, _KEPT, words, account, 0.0, most_s)

    def checked(self, setting: str) -> str:
        """Take options, each once, in the order of this file."""
        return options_among(_OPTIONS, setting, self.key)

    def by_hand(self, setting: str) -> str:
        """Return the constructor's call."""
        return f"fully_shard(model, {as_arguments(setting)})"

    def apply(self, setting: str, process: Process) -> None:
        """Give `fully_shard` and FullyShardedDataParallel the options that each has."""
        from torch.distributed import fsdp

        asked = setting.split(",")

        def of_modules(given: Mapping[str, Any]) -> Mapping[str, Any]:
            if _KEPT not in asked:
                process.did(f"not applied: fully_shard has no {_AHEAD}")
                return {}
            process.did(f"applied: {_KEPT}")
            return {"reshard_after_forward": False}

        def of_wrappers(given: Mapping[str, Any]) -> Mapping[str, Any]:
            changed: dict[str, Any] = {}
            kept, whole = fsdp.ShardingStrategy.SHARD_GRAD_OP, fsdp.ShardingStrategy.FULL_SHARD
            if _KEPT in asked and given.get("sharding_strategy") in (None, whole):
                changed["sharding_strategy"] = kept
            if _AHEAD in asked:
                changed["forward_prefetch"] = True
            process.did(f"applied: {', '.join(changed)}" if changed else "not applied: it is so")
            return changed

        process.around(fsdp, "fully_shard", of_modules)
        process.around(fsdp.FullyShardedDataParallel, "__init__", of_wrappers)
