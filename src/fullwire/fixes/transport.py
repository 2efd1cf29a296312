"""A transport that fills the line there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fullwire.fixes.fix import Fix, FixKind, register
from fullwire.run.run import Run
from fullwire.simulation.forecast import Forecaster
from fullwire.simulation.transport import FullTransport
from fullwire.timeline.account import Account

FILLS_THE_LINE = "fullwire"  # the backend that a full wire is predicted for
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


def _predict(run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
    if isinstance(job.grid.transports[0], FullTransport):
        return
    is_gloo = run.facts.backend == "gloo"
    found = (job.filling() if is_gloo else job.unhindered()).ask()
    yield FullerTransport(rate_bps=job.rate_bps, how=_setting(run), forecast=found)


def _setting(run: Run) -> str:
    backend, network = run.facts.backend, run.facts.nccl_network or ""
    if backend != "nccl":
        return _SETTINGS.get(str(backend), _OTHER_BACKEND)
    is_rdma = network and not network.startswith("Socket")
    return _NCCL_BY_RDMA if is_rdma else _NCCL_BY_SOCKETS


register(FixKind(key="transport", risk="exact", label="a fuller transport", predict=_predict))
