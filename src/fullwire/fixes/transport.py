"""The fix "a transport that fills the present line"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fullwire.compression.compressor import Compressor
from fullwire.errors import UsageError
from fullwire.fixes.fix import (
    FILLS_THE_LINE,
    PLAIN,
    TIMES_ON_THE_WIRE,
    Fix,
    FixKind,
    Process,
    Risk,
    Seen,
    Worthwhile,
    register,
    sending_s,
    waiting_s,
    worthwhile,
)
from fullwire.fixes.placement import shared_line_s
from fullwire.units import shown

if TYPE_CHECKING:
    from fullwire.run.run import Run
    from fullwire.simulation.forecast import Forecaster
    from fullwire.timeline.account import Account

_SETTINGS = {
    "gloo": f'init_process_group("{FILLS_THE_LINE}"): no setting of Gloo\'s does it',
    FILLS_THE_LINE: (
        "larger buckets and more processors fill more of it; no setting of the backend's does"
    ),
}
_WIRES = ("bf16", "fp16", "int8")
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
    applied = FILLS_THE_LINE
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
    tries_each = True
    addresses = ("transport", "latency", "contention")
    example = FILLS_THE_LINE
    setting = "the backend in place of Gloo; fullwire+bf16 rounds sums on the wire"

    def predict(self, run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
        """Predict the step with the present line used fully."""
        from fullwire.simulation.transport import FullTransport

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

    def to_try(
        self, run: Run, account: Account, seen: Seen, job: Forecaster | None
    ) -> Iterator[Worthwhile]:
        """Yield our backend, and formats on the wire.

        Where the line rate is known, the bytes take as long on any transport.
        """
        sent_s, line_s = sending_s(account), shared_line_s(run, account)
        most_s = sent_s
        if line_s:
            most_s += account.crowded_s - line_s
            most_s += waiting_s(account) if seen.local_ranks > 1 else 0.0
        backends = (run.facts.backend, seen.backend)
        if "gloo" in backends:
            words = "the fullwire transport"
            yield from worthwhile(self, FILLS_THE_LINE, words, account, 0.0, most_s)
        if run.facts.hook or run.facts.wire or not {"gloo", FILLS_THE_LINE} & set(backends):
            return
        for wire, times in TIMES_ON_THE_WIRE.items():
            if wire == "fp16":  # as fast as bf16, with less range
                continue
            setting, words = f"{FILLS_THE_LINE}+{wire}", f"sums on the fullwire transport as {wire}"
            if job is None:
                yield from worthwhile(self, setting, words, account, 0.0, sent_s * (1 - 1 / times))
                continue
            own = job if FILLS_THE_LINE in backends else job.filling()
            found = own.ask(compressors=(Compressor(ratio=times),))
            if found.step_s < account.step_s:
                yield Worthwhile(
                    kind=self.key,
                    risk="numeric",
                    setting=setting,
                    words=words,
                    forecast=found,
                )

    def checked(self, setting: str) -> str:
        """Take the name of our backend, and a format on the wire."""
        backend, plus, wire = setting.partition("+")
        if backend != FILLS_THE_LINE or (plus and wire not in _WIRES):
            wires = ", ".join(f"{FILLS_THE_LINE}+{name}" for name in _WIRES)
            raise UsageError(
                f"fix transport: expected {FILLS_THE_LINE} or {wires}, got {shown(setting)}"
            )
        return setting

    def risk_of(self, setting: str) -> Risk:
        """Return numeric where numbers are rounded on the wire."""
        return "numeric" if "+" in setting else "exact"

    def environment(self, setting: str) -> Mapping[str, str]:
        """Return the format on the wire."""
        wire = setting.partition("+")[2]
        return {"FULLWIRE_WIRE": wire} if wire else {}

    def by_hand(self, setting: str) -> str:
        """Return the call, and the import that makes the backend known."""
        return f'import fullwire.transport\ndist.init_process_group("{FILLS_THE_LINE}")'

    def apply(self, setting: str, process: Process) -> None:
        """Make process groups of our backend where the job asks for Gloo."""
        import torch
        import torch.distributed as dist

        from fullwire.transport import register as make_known

        make_known()

        def of_ours(given: Mapping[str, Any]) -> Mapping[str, Any]:
            backend = given.get("backend")
            if backend is None and torch.cuda.is_available():
                backend = "nccl beside gloo"
            if str(backend or "gloo").lower() != "gloo":
                process.did(f"not applied: the job uses {backend}, and only Gloo can be replaced")
                return {}
            process.did(f'applied: init_process_group("{FILLS_THE_LINE}")')
            return {"backend": FILLS_THE_LINE}

        # A second attempt would find the names of the first in torch's store.
        process.around(dist, "init_process_group", of_ours, may_repeat=False)
