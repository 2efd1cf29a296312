"""The fix "a transport that fills the present line"."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
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
    has_buckets,
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

_IN_PLACE_OF_GLOO = f'init_process_group("{FILLS_THE_LINE}"): no setting of Gloo\'s does it'
_OF_OURS = "more of it; no setting of the backend's does"
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
        setting = _OTHER_BACKEND
        if backend == "gloo":
            setting = _IN_PLACE_OF_GLOO
        elif backend == FILLS_THE_LINE:
            fill = "larger buckets and more processors fill"
            setting = f"{fill if has_buckets(run) else 'more processors fill'} {_OF_OURS}"
        elif backend == "nccl":
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
        import torch.distributed as dist

        from fullwire.transport import register as make_known

        make_known()
        start, meet = dist.init_process_group, dist.monitored_barrier
        signature = inspect.signature(start)

        @functools.wraps(start)
        def started(*args: Any, **kwargs: Any) -> Any:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError:  # torch refuses these arguments
                return start(*args, **kwargs)
            if other := _other_than_gloo(given.get("backend")):
                process.did(f"not applied: {other}")
                return start(*args, **kwargs)
            process.did(f'applied: init_process_group("{FILLS_THE_LINE}")')
            try:
                return start(**(given | {"backend": FILLS_THE_LINE}))
            except Exception as error:
                process.did(f"undone: {type(error).__name__}: {error}")
                if (again := _for_another_start(given)) is None:
                    raise
            if dist.is_initialized():
                dist.destroy_process_group()
            return start(**again)

        @functools.wraps(meet)
        def met(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
            is_member = group is not dist.GroupMember.NON_GROUP_MEMBER
            if is_member and dist.get_backend(group) == FILLS_THE_LINE:
                limit = timedelta(seconds=timeout) if isinstance(timeout, float) else timeout
                dist.barrier(group, async_op=True).wait(*[limit] * (limit is not None))
            else:
                meet(group, timeout, wait_all_ranks)

        dist.init_process_group, dist.monitored_barrier = started, met


def _other_than_gloo(backend: Any) -> str:
    """Say why a group does not send tensors of processors by Gloo alone; "" if it does."""
    import torch

    name = str(backend or "gloo").lower()
    if name == "cpu:gloo" or (name == "gloo" and not torch.cuda.is_available()):
        return ""
    if name == "gloo" and backend:
        return 'Gloo may carry tensors of GPUs here; init_process_group("cpu:gloo") says no'
    used = backend or "nccl beside gloo"
    return f"the job uses {used}, and only Gloo can be replaced"


def _for_another_start(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of a second start in a store that outlives the first; None without one.

    The second start has names of its own there, as it would find those of the first.
    """
    import torch.distributed as dist

    store: Any = given.get("store")
    place: dict[str, int] = {}
    by_environment = given.get("init_method") in (None, "env://")
    if (
        store is None
        and by_environment
        and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    ):
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False)
        place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    if store is None:
        return None
    rest = {name: value for name, value in given.items() if name != "init_method"}
    return {**rest, **place, "store": dist.PrefixStore("in place of fullwire", store)}
