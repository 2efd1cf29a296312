"""The fix "compression": gradients in fewer bytes, with the cost of packing them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fullwire.compression.codec import CODECS, parse_choice
from fullwire.compression.codecs.fp16 import TORCH_HOOK
from fullwire.fixes.fix import PLAIN, Fix, FixKind, Process, Risk, register

if TYPE_CHECKING:
    from fullwire.run.run import Run
    from fullwire.simulation.forecast import Forecaster
    from fullwire.timeline.account import Account

_FORMATS = ("bf16", "fp16", "int8")  # They round, and need no more steps to a target.
_SMALL_NUMBERS = re.compile(r"16|half|8", re.IGNORECASE)  # in the names of types


@dataclass(frozen=True, kw_only=True)
class SentAsHalves(Fix):
    """Gradients have half the bytes, and half the digits."""

    template = "gradients sent as float16"
    applied = "fp16"
    lines: ClassVar[Mapping[str, str]] = {
        PLAIN: """\
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

# model is the DistributedDataParallel. Values beyond 65,504 overflow.
model.register_comm_hook(None, default_hooks.fp16_compress_hook)
""",
        "transformers": """\
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from transformers import TrainerCallback


class SendHalves(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        hook = default_hooks.fp16_compress_hook
        trainer.model_wrapped.register_comm_hook(None, hook)


trainer.add_callback(SendHalves())  # before trainer.train()
""",
        "accelerate": """\
from accelerate import Accelerator, DDPCommunicationHookType
from accelerate import DistributedDataParallelKwargs

hook = DDPCommunicationHookType.FP16
of_ddp = DistributedDataParallelKwargs(comm_hook=hook)
accelerator = Accelerator(kwargs_handlers=[of_ddp])
""",
        "lightning": """\
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

# Lightning registers the hook on GPUs only.
strategy = DDPStrategy(ddp_comm_hook=default_hooks.fp16_compress_hook)
# beside your own arguments:
trainer = Trainer(strategy=strategy)
""",
        "deepspeed": """\
{{
  "communication_data_type": "fp16"
}}
""",
    }

    kind: str = "compression"
    risk: Risk = "numeric"
    how: str = "model.register_comm_hook(None, default_hooks.fp16_compress_hook)"


@dataclass(frozen=True, kw_only=True)
class SentPacked(Fix):
    """Gradients have fewer bytes, and are added in float32."""

    template = "gradients sent as {codec}"
    applied = "{codec}"
    lines: ClassVar[Mapping[str, str]] = {
        PLAIN: """\
import fullwire

# model is the DistributedDataParallel.
fullwire.compress(model, "{codec}")
""",
        "transformers": """\
import fullwire
from transformers import TrainerCallback


class SendPacked(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        fullwire.compress(trainer.model_wrapped, "{codec}")


trainer.add_callback(SendPacked())  # before trainer.train()
""",
    }

    kind: str = "compression"
    risk: Risk = "numeric"
    how: str = 'fullwire.compress(model, "{codec}")'
    codec: str


@register
class Compression(FixKind):
    """Send gradients in fewer bytes."""

    key = "compression"
    risk: ClassVar[Risk] = "numeric"
    label = "compressed gradients"
    addresses = ("line_rate", "transport")
    example = "bf16"
    setting = "a codec with its options"

    def predict(self, run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
        """Predict the step with the best format, where gradients are sent uncompressed.

        A format is proposed if its whole interval lies below today's step.
        """
        from fullwire.timeline.transfers import codes_of

        # The measured transport then has the times of packed messages.
        if run.facts.buckets is None or run.facts.hook is not None or run.facts.wire is not None:
            return
        # Most of the bytes may already have 16 bits a number, or fewer.
        kinds, sizes = codes_of(run.collectives.dtype), run.collectives.bytes
        is_small = np.array([_SMALL_NUMBERS.search(name) is not None for name in kinds.names], bool)
        if len(sizes) and 2 * int(sizes[is_small[kinds.codes]].sum()) > int(sizes.sum()):
            return
        found: list[Fix] = []
        # Every device of the built-in workloads is a GPU, and our hook packs on processors.
        if run.facts.backend == "nccl" or run.provenance.basis == "modelled":
            cast = TORCH_HOOK.compressor(on_gpu=True)
            found.append(SentAsHalves(forecast=job.ask(compressors=(cast,))))
        else:
            for key in _FORMATS:
                packed = CODECS[key].compressor(on_gpu=False)
                found.append(SentPacked(codec=key, forecast=job.ask(compressors=(packed,))))
        # Without an interval, nothing speaks against the prediction.
        better = [fix for fix in found if not fix.high_s >= job.measured_s]
        yield from sorted(better, key=lambda fix: fix.step_s)[:1]

    def by_hand(self, setting: str) -> str:
        """Return the call."""
        return f'fullwire.compress(model, "{setting}")'

    def checked(self, setting: str) -> str:
        """Take a codec with its settings."""
        return str(parse_choice(setting))

    def apply(self, setting: str, process: Process) -> None:
        """Compress the gradients of each DistributedDataParallel that has no hook of its own."""
        import weakref

        from torch.nn.parallel import DistributedDataParallel

        from fullwire.compression.hook import compress

        known: weakref.WeakSet[Any] = weakref.WeakSet()

        def with_codec(given: Mapping[str, Any]) -> Mapping[str, Any]:
            model = given["self"]  # By its first pass the script has registered its own hook.
            if model not in known:
                known.add(model)
                compress(model, setting)
                process.did(f"applied: {setting}")
            return {}

        process.around(DistributedDataParallel, "forward", with_codec, may_repeat=False)
