"""The fix "a variable of the environment", such as a setting of NCCL or Gloo."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from fullwire.errors import UsageError
from fullwire.fixes.fix import Fix, FixKind, Process, register
from fullwire.run.run import Run
from fullwire.simulation.forecast import Forecaster
from fullwire.timeline.account import Account
from fullwire.units import shown

_PAIR = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=[^\0]*")
# Launchers write these for each rank, and Python reads some before any fix.
_OF_LAUNCHERS = re.compile(r"(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|PYTHON.*)=")


@register
class Environment(FixKind):
    """Set a variable of the job's environment. A trial measures it: no run predicts it."""

    key = "environment"
    label = "a variable"
    addresses = ("transport", "latency")
    example = "NCCL_ALGO=Tree"
    setting = "NAME=VALUE"

    def predict(self, run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
        """Predict nothing: a run does not show what a variable would change."""
        return iter(())

    def checked(self, setting: str) -> str:
        """Take a variable with its value."""
        if _PAIR.fullmatch(setting) is None:
            raise UsageError(f"fix environment: expected NAME=VALUE, got {shown(setting)}")
        if taken := _OF_LAUNCHERS.match(setting):
            raise UsageError(
                f"fix environment: expected a variable that no launcher sets, got {taken[1]}"
            )
        return setting

    def environment(self, setting: str) -> Mapping[str, str]:
        """Return the variable."""
        name, _, value = setting.partition("=")
        return {name: value}

    def apply(self, setting: str, process: Process) -> None:
        """Note that the variable was there when the process loaded torch."""
        process.did(f"applied: {setting}")
