"""The fix "a variable of the environment", such as a setting of NCCL or Gloo."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
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

_PAIR = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=[^\0]*")
# Launchers write these for each rank, and Python reads some before any fix.
_OF_LAUNCHERS = re.compile(r"(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|PYTHON.*)=")
# A recipe may be a stranger's. So it sets only what tunes libraries, and nothing that makes them
# load code, open or write files, run a program, listen, or look for the group elsewhere.
_TUNES = re.compile(
    r"(GLOO|NCCL|RCCL|TORCH_NCCL|OMP|MKL|KMP)_\w+|FULLWIRE_(WIRE|STREAMS|INTERFACE)"
)
_REACHES_OUT = re.compile(r"PLUGIN|FILE|PATH|DIR|LIB|CONF|TOOL|ADDR|COMM_ID|RAS_")

_INTERFACES = Path("/sys/class/net")
_OF_BACKENDS = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}
_READ_BY_GROUPS = ("GLOO_", "NCCL_", "FULLWIRE_", "TORCH_NCCL_", "TP_", "UCX_")


@register
class Environment(FixKind):
    """Set a variable of the job's environment. A trial measures it: no run predicts it."""

    key = "environment"
    label = "a variable"
    addresses = ("transport", "latency")
    example = "NCCL_ALGO=Tree"
    setting = "NAME=VALUE"

    def to_try(
        self, run: Run, account: Account, seen: Seen, job: Forecaster | None
    ) -> Iterator[Worthwhile]:
        """Yield the fastest interface, where the job names a slower one."""
        name = _OF_BACKENDS.get(run.facts.backend or "", "")
        chosen, speeds = os.environ.get(name, ""), speeds_mbps(_INTERFACES)
        fastest = max(speeds, key=speeds.__getitem__, default="")
        if chosen in speeds and speeds[fastest] > speeds[chosen]:
            most_s = sending_s(account) * (1 - speeds[chosen] / speeds[fastest])
            words = f"interface {fastest} in place of {chosen}"
            yield from worthwhile(self, f"{name}={fastest}", words, account, 0.0, most_s)

    def by_hand(self, setting: str) -> str:
        """Return the line, before the group is made."""
        variable, _, value = setting.partition("=")
        return f"os.environ[{variable!r}] = {value!r}"

    def checked(self, setting: str) -> str:
        """Take a variable with its value."""
        if _PAIR.fullmatch(setting) is None:
            raise UsageError(f"fix environment: expected NAME=VALUE, got {shown(setting)}")
        if taken := _OF_LAUNCHERS.match(setting):
            raise UsageError(
                f"fix environment: expected a variable that no launcher sets, got {taken[1]}"
            )
        return setting

    def checked_in_recipe(self, setting: str) -> str:
        """Take a variable that tunes a library; refuse one that could run a stranger's code."""
        name, _, value = self.checked(setting).partition("=")
        is_plain = value.isprintable() and "/" not in value
        if not _TUNES.fullmatch(name) or _REACHES_OUT.search(name) or not is_plain:
            raise UsageError(
                "fix environment: expected a variable that tunes NCCL, Gloo or threads, got "
                f"{shown(setting)}: a recipe sets no others, give them in the command"
            )
        return setting

    def environment(self, setting: str) -> Mapping[str, str]:
        """Return the variable."""
        name, _, value = setting.partition("=")
        return {name: value}

    def apply(self, setting: str, process: Process) -> None:
        """Note that the variable is there, and keep a script from giving it another value."""
        import torch.distributed as dist

        name, _, value = setting.partition("=")
        process.did(f"applied: {setting}")
        if name.startswith(_READ_BY_GROUPS):

            def with_variable(given: Mapping[str, Any]) -> Mapping[str, Any]:
                os.environ[name] = value
                return {}

            process.around(dist, "init_process_group", with_variable, may_repeat=False)


def speeds_mbps(folder: Path) -> dict[str, float]:
    """Return the speed of each interface of this host that is up and has one."""
    speeds = {}
    for interface in folder.glob("*"):
        try:
            speed = float((interface / "speed").read_text())
            is_up = (interface / "operstate").read_text().strip() == "up"
        except (OSError, ValueError):  # a loopback or a bridge has no speed
            continue
        if is_up and speed > 0:
            speeds[interface.name] = speed
    return speeds
