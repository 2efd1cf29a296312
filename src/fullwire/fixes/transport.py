"""A transport that fills the line there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fullwire.fixes.fix import FILLS_THE_LINE, Fix, FixKind, register
from fullwire.run.run import Run
from fullwire.simulation.forecast import Forecaster
from fullwire.simulation.transport import FullTransport
from fullwire.timeline.account import Account

_SETTINGS = {
    "gloo": f'init_process_group("{FILLS_THE_LINE}"): no setting of Gloo\'s does it',
    FILLS_THE_LINE: (
        "larger buckets and more processors fill more of it; no setting of the backend's does"
    ),
}
_OTHER_BACKEND = "another backend, or more connections and threads where it has a setting for them"
_NCCL_BY_RDMA = (
    "NCCL_IB_QPS_PER_CONNECTION=4 NCCL_MIN_NCHANNELS=8; NCCL_DEBUG=INFO says what it uses"
)
_NCCL_BY_SOCKETS = (
    "NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4 on sockets; NCCL_DEBUG=INFO says which"
)


@dataclass(frozen=True, kw_only=True)
class FullerTransport(Fix):
    """The line that there is, used to the full."""

    template = "a transport that fills the {rate_bps:rate} there are"

    kind: str = "transport"
    rate_bps: float


@register
class Transport(FixKind):
    """A transport that fills the line."""

    key = "transport"
    label = "a fuller transport"
    addresses = ("transport", "latency", "contention")

    def predict(self, run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
        """Try the line that there is, used to the full."""
        if isinstance(job.grid.transports[0], FullTransport):
            return
        backend, network = run.facts.backend, run.facts.nccl_network or ""
        setting = _SETTINGS.get(str(backend), _OTHER_BACKEND)
        if backend == "nccl":
            is_rdma = network and not network.startswith("Socket")
            setting = _NCCL_BY_RDMA if is_rdma else _NCCL_BY_SOCKETS
        found = (job.filling() if backend == "gloo" else job.unhindered()).ask()
        yield FullerTransport(rate_bps=job.rate_bps, how=setting, forecast=found)
