"""The fix "options of DistributedDataParallel": less work of its own in each step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fullwire.errors import UsageError
from fullwire.fixes.fix import Fix, FixKind, Process, register
from fullwire.run.run import Run
from fullwire.simulation.forecast import Forecaster
from fullwire.timeline.account import Account
from fullwire.units import shown

_OPTIONS = ("static_graph", "gradient_as_bucket_view")


@register
class Ddp(FixKind):
    """Switch options of DistributedDataParallel on. A trial measures them."""

    key = "ddp"
    label = "options of DDP"
    addresses = ("host", "compute")
    example = "static_graph"
    setting = "one or both of static_graph and gradient_as_bucket_view"

    def predict(self, run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
        """Predict nothing: a run without the options does not show what they save."""
        return iter(())

    def checked(self, setting: str) -> str:
        """Take options, each once, in the order of this file."""
        asked = setting.split(",")
        if unknown := [name for name in asked if name not in _OPTIONS]:
            raise UsageError(
                f"fix ddp: expected options among {', '.join(_OPTIONS)}, got {shown(unknown[0])}"
            )
        return ",".join(name for name in _OPTIONS if name in asked)

    def apply(self, setting: str, process: Process) -> None:
        """Make each DistributedDataParallel with these options."""
        from torch.nn.parallel import DistributedDataParallel

        def with_options(given: Mapping[str, Any]) -> Mapping[str, Any]:
            process.did(f"applied: {setting}")
            return dict.fromkeys(setting.split(","), True)

        process.around(DistributedDataParallel, "__init__", with_options)
