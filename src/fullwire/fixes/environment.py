"""The fix "a variable of the environment", such as a setting of NCCL or Gloo."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fullwire.errors import UsageError
from fullwire.fixes.fix import (
    WORTH_A_TRIAL,
    FixKind,
    Process,
    Seen,
    Worthwhile,
    register,
    sending_s,
    waiting_s,
    worthwhile,
)
from fullwire.fixes.placement import shared_line_s
from fullwire.recorder.inside import TRIAL_VARIABLE
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

_INTERFACE_OF = {
    "gloo": "GLOO_SOCKET_IFNAME",
    "nccl": "NCCL_SOCKET_IFNAME",
    "fullwire": "FULLWIRE_INTERFACE",
}
_MOST_INTERFACES = 3
_MEASURED_IN = "2"  # recording
_AS_FAST = 0.95  # times the rate: moments differ by so much
_OF_SOCKETS = (
    ("NCCL_SOCKET_NTHREADS=4", "four threads of NCCL for each connection"),
    ("NCCL_NSOCKS_PERTHREAD=4", "four sockets for each thread of NCCL"),
)
_OF_RDMA = (
    ("NCCL_IB_QPS_PER_CONNECTION=4", "four queue pairs for each connection of NCCL"),
    ("NCCL_MIN_NCHANNELS=8", "eight channels of NCCL or more"),
)
_READ_BY_GROUPS = ("GLOO_", "NCCL_", "FULLWIRE_", "TORCH_NCCL_", "TP_", "UCX_")


@register
class Environment(FixKind):
    """Set a variable of the job's environment. A trial measures it: no run predicts it."""

    key = "environment"
    label = "a variable"
    tries_each = True
    variables_suffice = True
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
        speeds, rates = seen.interfaces, seen.interface_bps
        is_alone = len(set((run.facts.hosts or "").split(","))) < 2
        over_rdma = "Socket" not in (run.facts.nccl_network or "Socket")
        if chosen not in speeds or is_alone or over_rdma:
            return
        for other in _fastest(speeds):
            is_slow = chosen in rates and rates[chosen] >= _AS_FAST * rates.get(other, math.inf)
            if other == chosen or is_slow:
                continue
            setting, words = f"{name}={other}", f"interface {other} in place of {chosen}"
            if rates.get(chosen) and other in rates:
                own_bps, other_bps = rates[chosen], rates[other]
                yield from self._at_rate(run, account, setting, words, own_bps, other_bps)
                continue
            # An interface may be slower than its speed says: its cable, its switch, other users.
            share_left = speeds[chosen] / speeds[other] if speeds[other] else 1.0
            if share_left <= 1:
                most_s = sending_s(account) * (1 - share_left if share_left < 1 else 1.0)
                yield from worthwhile(self, setting, words, account, 0.0, most_s)

    def _at_rate(
        self, run: Run, account: Account, setting: str, words: str, own_bps: float, other_bps: float
    ) -> Iterator[Worthwhile]:
        """Yield an interface that carries payload at another rate than the job's own."""
        from fullwire.simulation.calibrate import PAYLOAD_SHARE
        from fullwire.simulation.forecast import forecaster
        from fullwire.timeline import account as timeline_account

        line_bps, facts, job = own_bps / PAYLOAD_SHARE, run.facts, None
        if len(set((facts.hosts or "").split(","))) == facts.workers:
            line = replace(facts, line_rate_bps=line_bps, other_line_rates_bps=None, cluster=None)
            job = forecaster(replace(run, facts=line))
        if job is not None:
            forecast = job.ask(bandwidth_bps=(other_bps / PAYLOAD_SHARE,))
            if forecast.step_s <= (1 - WORTH_A_TRIAL) * account.step_s:
                yield Worthwhile(kind=self.key, setting=setting, words=words, forecast=forecast)
            return
        # Ranks of a host share its line, and wait for a neighbour's transfer. Both become shorter.
        # The transport may still need its own time, which is beyond that of its bytes at this rate.
        every_rank = dict.fromkeys(range(facts.workers or 0), line_bps)
        gone = 1 - own_bps / other_bps
        gone_s = shared_line_s(run, timeline_account.account(run, every_rank)) * gone
        waited_s = waiting_s(account) * gone
        most_s = sending_s(account) * gone + waited_s
        yield from worthwhile(self, setting, words, account, gone_s, most_s, gone_s + waited_s)

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
        """Return the interfaces of this process's host, and the one that the job names.

        Of a job of several hosts, measure the interface that it uses, and others if it names one.
        The second recording has it, for the first one tells how long the job takes to start.
        """
        from fullwire.fixes._interfaces import rates_bps, speeds_mbps

        named = os.environ.get(_INTERFACE_OF.get(backend, ""), "")
        if backend == "fullwire":  # our transport reads Gloo's variable too
            named = named or os.environ.get(_INTERFACE_OF["gloo"], "")
        speeds = speeds_mbps()
        seen = {"interface": named, "interfaces": speeds}
        names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK")
        told = [os.environ.get(each, "") for each in names]
        used = named if named or len(speeds) > 1 else next(iter(speeds), "")
        if used not in speeds or not all(map(str.isdecimal, told)):
            return seen
        world, local, place = map(int, told)
        hosts = world // max(local, 1)
        measures = os.environ.get(TRIAL_VARIABLE) == _MEASURED_IN
        if measures and hosts > 1 and hosts * local == world and not place:
            from torch.distributed.distributed_c10d import _get_default_store

            asked = dict.fromkeys([used, *_fastest(speeds)])
            seen["interface_bps"] = rates_bps(asked, _get_default_store(), hosts)
        return seen

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


def _fastest(speeds_mbps: Mapping[str, float]) -> list[str]:
    """Return the interfaces that are worth a trial, the fastest first."""
    return sorted(speeds_mbps, key=lambda one: (-speeds_mbps[one], one))[:_MOST_INTERFACES]
