"""The fix "a transport that fills the present line"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from fullwire.fixes.fix import FILLS_THE_LINE, PLAIN, Fix, FixKind, register
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
    """The present line is used fully."""

    template = "a transport that fills {rate_bps:rate}"
    place = "settings"

    kind: str = "transport"
    rate_bps: float


@dataclass(frozen=True, kw_only=True)
class OurTransport(FullerTransport):
    """The present line is used fully by the backend of Fullwire, in place of Gloo."""

    template = "the fullwire transport"
    place = "script"
    lines: ClassVar[Mapping[str, str]] = {
        PLAIN: """\
import torch.distributed as dist

dist.init_process_group("fullwire")
""",
        # On processors these frameworks accept gloo and mpi by name, and keep a group that exists.
        "transformers": """\
import torch.distributed as dist

dist.init_process_group("fullwire")  # before TrainingArguments(...)
""",
        "accelerate": """\
import torch.distributed as dist

dist.init_process_group("fullwire")  # before Accelerator(...)
""",
        "lightning": """\
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy

strategy = DDPStrategy(process_group_backend="fullwire")
# beside your own arguments:
trainer = Trainer(strategy=strategy)
""",
    }


@register
class Transport(FixKind):
    """Use a transport that fills the line."""

    key = "transport"
    label = "a fuller transport"
    addresses = ("transport", "latency", "contention")

    def predict(self, run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
        """Predict the step with the present line used fully."""
        if isinstance(job.grid.transports[0], FullTransport):
            return
        backend, network = run.facts.backend, run.facts.nccl_network or ""
        setting = _SETTINGS.get(str(backend), _OTHER_BACKEND)
        if backend == "nccl":
            is_rdma = network and not network.startswith("Socket")
            setting = _NCCL_BY_RDMA if is_rdma else _NCCL_BY_SOCKETS
        is_gloo = backend == "gloo"
        kind = OurTransport if is_gloo else FullerTransport
        found = (job.filling() if is_gloo else job.unhindered()).ask()
        yield kind(rate_bps=job.rate_bps, how=setting, forecast=found)
