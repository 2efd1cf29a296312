"""The fix "a variable of the environment", such as a setting of NCCL or Gloo."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
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
_INTERFACE_OF = {
    "gloo": "GLOO_SOCKET_IFNAME",
    "nccl": "NCCL_SOCKET_IFNAME",
    "fullwire": "FULLWIRE_INTERFACE",
}
_MOST_INTERFACES = 3
_OF_SOCKETS = (
    ("NCCL_SOCKET_NTHREADS=4", "four threads of NCCL for each connection"),
    ("NCCL_NSOCKS_PERTHREAD=4", "four sockets for each thread of NCCL"),
)
_OF_RDMA = (
    ("NCCL_IB_QPS_PER_CONNECTION=4", "four queue pairs for each connection of NCCL"),
    ("NCCL_MIN_NCHANNELS=8", "eight channels of NCCL or more"),
)
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of linux/sockios.h
_READ_BY_GROUPS = ("GLOO_", "NCCL_", "FULLWIRE_", "TORCH_NCCL_", "TP_", "UCX_")


@register
class Environment(FixKind):
    """Set a variable of the job's environment. A trial measures it: no run predicts it."""

    key = "environment"
    label = "a variable"
    tries_each = True
    addresses = ("transport", "latency")
    example = "NCCL_ALGO=Tree"
    setting = "NAME=VALUE"

    def to_try(
        self, run: Run, account: Account, seen: Seen, job: Forecaster | None
    ) -> Iterator[Worthwhile]:
        """Yield other interfaces, where the job names one that is not known to be the fastest.

        For NCCL between hosts, yield more threads and connections, or more channels.
        """
        yield from self._of_nccl(run, account)
        name, chosen = _INTERFACE_OF.get(run.facts.backend or "", ""), seen.interface
        speeds = seen.interfaces
        if chosen not in speeds or len(set((run.facts.hosts or "").split(","))) < 2:
            return
        for other in sorted(speeds, key=lambda one: (-speeds[one], one))[:_MOST_INTERFACES]:
            # An interface may be slower than its speed says: its cable, its switch, other users.
            share_left = speeds[chosen] / speeds[other] if speeds[other] else 1.0
            if other != chosen and share_left <= 1:
                most_s = sending_s(account) * (1 - share_left if share_left < 1 else 1.0)
                words = f"interface {other} in place of {chosen}"
                yield from worthwhile(self, f"{name}={other}", words, account, 0.0, most_s)

    def _of_nccl(self, run: Run, account: Account) -> Iterator[Worthwhile]:
        from fullwire.timeline.account import Part

        network = run.facts.nccl_network
        if run.facts.backend != "nccl" or not network:
            return
        parts_s = account.parts_s
        most_s = parts_s[Part.TRANSPORT.key]
        for setting, words in _OF_SOCKETS if network.startswith("Socket") else _OF_RDMA:
            yield from worthwhile(self, setting, words, account, 0.0, most_s)
        words = "NCCL's tree in place of its choice"
        yield from worthwhile(
            self, "NCCL_ALGO=Tree", words, account, 0.0, parts_s[Part.LATENCY.key] / 2
        )

    def look(self, backend: str) -> Mapping[str, Any]:
        """Return the interfaces of this process's host, and the one that the job names."""
        named = os.environ.get(_INTERFACE_OF.get(backend, ""), "")
        if backend == "fullwire":  # our transport reads Gloo's variable too
            named = named or os.environ.get(_INTERFACE_OF["gloo"], "")
        return {"interface": named, "interfaces": speeds_mbps()}

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


def speeds_mbps(folder: Path = _INTERFACES) -> dict[str, float]:
    """Return the interfaces that are up and have an address, with their speed; 0 if unknown."""
    speeds = {}
    for interface in folder.glob("*"):
        try:
            is_up = (interface / "operstate").read_text().strip() == "up"
            is_virtual = (interface / "bridge").exists() or (interface / "tun_flags").exists()
        except OSError:  # it has gone
            continue
        if not is_up or is_virtual or not has_address(interface.name):
            continue
        try:
            speeds[interface.name] = max(float((interface / "speed").read_text()), 0.0)
        except (OSError, ValueError):  # a driver may tell none
            speeds[interface.name] = 0.0
    return speeds


def has_address(interface: str) -> bool:
    """Say whether an interface has an IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            fcntl.ioctl(any_socket, _ADDRESS_OF_INTERFACE, struct.pack("256s", interface.encode()))
        except OSError:
            return False
    return True
