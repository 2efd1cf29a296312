"""The fix "options of DistributedDataParallel": less work of its own in each step."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fullwire.fixes.fix import (
    FixKind,
    Process,
    Risk,
    Seen,
    Worthwhile,
    as_arguments,
    options_among,
    register,
    worthwhile,
)

if TYPE_CHECKING:
    from fullwire.run.run import Run
    from fullwire.simulation.forecast import Forecaster
    from fullwire.timeline.account import Account

_ALL_USED = "find_unused_parameters=False"
_UNFINISHED = "Expected to have finished reduction"  # in DDP's error
_OPTIONS = ("static_graph", "gradient_as_bucket_view", _ALL_USED)
_COPIES_PER_S = 3e9  # bytes that a processor copies in a second, beside other work


@register
class Ddp(FixKind):
    """Switch options of DistributedDataParallel. A trial measures them."""

    key = "ddp"
    label = "options of DDP"
    addresses = ("host", "compute", "latency")
    example = "gradient_as_bucket_view"
    setting = f"one or more of {', '.join(_OPTIONS)}"

    def to_try(
        self, run: Run, account: Account, seen: Seen, job: Forecaster | None
    ) -> Iterator[Worthwhile]:
        """Yield the search for unused parameters switched off, and gradients without copies."""
        from fullwire.timeline.account import Part

        options, parts_s = seen.ddp or {}, account.parts_s
        if options.get("find_unused_parameters") and not options.get("static_graph"):
            # The search walks the graph, and sums one bitmap after the last bucket.
            own_s = parts_s[Part.LATENCY.key] + parts_s[Part.TRANSPORT.key]
            most_s = own_s + 0.15 * parts_s[Part.COMPUTE.key]
            words = "no search for unused parameters"
            yield from worthwhile(self, _ALL_USED, words, account, 0.0, most_s)
        elif options and not options.get("gradient_as_bucket_view"):
            sent_bytes = int(run.collectives.bytes.sum()) / max(len(account.steps), 1)
            copied_s = sent_bytes / max(len(account.ranks), 1) / _COPIES_PER_S
            words = "gradients that lie in their buckets"
            yield from worthwhile(self, _OPTIONS[1], words, account, 0.0, copied_s)

    def by_hand(self, setting: str) -> str:
        """Return the constructor's call."""
        return f"model = DistributedDataParallel(model, {as_arguments(setting)})"

    def risk_of(self, setting: str) -> Risk:
        """Return semantic for what ends a job whose later steps differ from those of a trial."""
        ends_it = {_ALL_USED, "static_graph"} & set(setting.split(","))
        return "semantic" if ends_it else "exact"

    def checked(self, setting: str) -> str:
        """Take options, each once, in the order of this file."""
        return options_among(_OPTIONS, setting, self.key)

    def apply(self, setting: str, process: Process) -> None:
        """Make each DistributedDataParallel with these options.

        Where a parameter is unused after all, DDP itself ends the job in its next pass. The
        gradients of that pass were not summed, so the job cannot go on as it would have.
        """
        from torch.nn.parallel import DistributedDataParallel

        chosen = {
            name.partition("=")[0]: not name.endswith("=False") for name in setting.split(",")
        }

        def with_options(given: Mapping[str, Any]) -> Mapping[str, Any]:
            process.did(f"applied: {setting}")
            return chosen

        forward = DistributedDataParallel.forward

        @functools.wraps(forward)
        def ran(model: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return forward(model, *args, **kwargs)
            except RuntimeError as error:
                if _UNFINISHED in str(error):
                    process.did(f"undone: a pass left a parameter out; run without ddp:{setting}")
                raise

        process.around(DistributedDataParallel, "__init__", with_options)
        if _ALL_USED in setting:
            DistributedDataParallel.forward = ran
