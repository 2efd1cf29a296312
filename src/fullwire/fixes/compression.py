"""The fix "gradients as float16", with the cost of casting them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fullwire.compression.codec import parse_choice
from fullwire.compression.codecs.fp16 import TORCH_HOOK
from fullwire.fixes.fix import PLAIN, Fix, FixKind, Process, Risk, register
from fullwire.run.run import Run
from fullwire.simulation.forecast import Forecaster
from fullwire.timeline.account import Account
from fullwire.timeline.transfers import codes_of

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


@register
class Compression(FixKind):
    """Send gradients as float16."""

    key = "compression"
    risk: ClassVar[Risk] = "numeric"
    label = "gradients as halves"
    addresses = ("line_rate", "transport")
    example = "bf16"
    setting = "a codec with its options"

    def predict(self, run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
        """Predict the step with half the bytes, where gradients are sent uncompressed."""
        if run.facts.buckets is None or run.facts.hook is not None:
            return
        # Most of the bytes may already have 16 bits a number, or fewer.
        kinds, sizes = codes_of(run.collectives.dtype), run.collectives.bytes
        is_small = np.array([_SMALL_NUMBERS.search(name) is not None for name in kinds.names], bool)
        if not len(sizes) or 2 * int(sizes[is_small[kinds.codes]].sum()) <= int(sizes.sum()):
            cast = TORCH_HOOK.compressor(on_gpu=run.facts.backend == "nccl")
            yield SentAsHalves(forecast=job.ask(compressors=(cast,)))

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
