"""The fix "buckets of another size"."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fullwire.errors import UsageError
from fullwire.fixes.fix import (
    PLAIN,
    Fix,
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

_MIB = 2**20
_CAPS_MIB = (1, 5, 10, 25, 50, 100, 200, 500)
_MOST_MIB = 100_000
_USUAL_MIB = 25  # DDP's own
_NUMBER = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")


@dataclass(frozen=True, kw_only=True)
class OtherBuckets(Fix):
    """The buckets have the best of the sizes that were tried."""

    template = "buckets of {cap_mib} MiB"
    applied = "{cap_mib}"
    lines: ClassVar[Mapping[str, str]] = {
        PLAIN: """\
from torch.nn.parallel import DistributedDataParallel

model = DistributedDataParallel(model, bucket_cap_mb={cap_mib})
""",
        "transformers": """\
from transformers import TrainingArguments

# beside your own arguments:
args = TrainingArguments(ddp_bucket_cap_mb={cap_mib})
""",
        "accelerate": """\
from accelerate import Accelerator, DistributedDataParallelKwargs

of_ddp = DistributedDataParallelKwargs(bucket_cap_mb={cap_mib})
accelerator = Accelerator(kwargs_handlers=[of_ddp])
""",
        "lightning": """\
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy

# beside your own arguments:
trainer = Trainer(strategy=DDPStrategy(bucket_cap_mb={cap_mib}))
""",
    }

    kind: str = "buckets"
    how: str = "DistributedDataParallel(model, bucket_cap_mb={cap_mib})"
    cap_mib: int


@register
class Buckets(FixKind):
    """Use buckets of another size."""

    key = "buckets"
    label = "other buckets"
    addresses = ("overlap", "transport", "latency")
    begins_sooner = True
    example = "50"
    setting = "the MiB of a bucket"

    def predict(self, run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
        """Predict several bucket sizes, and yield the best."""
        from fullwire.simulation.buckets import DdpBuckets

        if run.facts.buckets is None:
            return
        tried = [(cap, job.ask(buckets=(DdpBuckets(cap * _MIB, cap * _MIB),))) for cap in _CAPS_MIB]
        cap, found = min(tried, key=lambda each: each[1].step_s)
        yield OtherBuckets(cap_mib=cap, forecast=found)

    def to_try(
        self, run: Run, account: Account, seen: Seen, job: Forecaster | None
    ) -> Iterator[Worthwhile]:
        """Yield PyTorch's usual size, where the script chose smaller buckets.

        The bytes take as long in any buckets.
        """
        from fullwire.timeline.account import Part

        cap_mib = (seen.ddp or {}).get("bucket_cap_mb")
        if cap_mib is not None and 0 < cap_mib < _USUAL_MIB:
            words = f"buckets of {_USUAL_MIB} MiB in place of {cap_mib:g} MiB"
            most_s = sending_s(account) - account.parts_s[Part.LINE_RATE.key]
            yield from worthwhile(self, str(_USUAL_MIB), words, account, 0.0, most_s)

    def by_hand(self, setting: str) -> str:
        """Return the constructor's call."""
        return f"model = DistributedDataParallel(model, bucket_cap_mb={setting})"

    def checked(self, setting: str) -> str:
        """Take the size of a bucket in MiB."""
        size_mib = float(setting) if _NUMBER.fullmatch(setting) else 0.0
        if not 0 < size_mib <= _MOST_MIB:
            raise UsageError(
                f"fix buckets: expected MiB of a bucket, above 0 and up to {_MOST_MIB}, got "
                f"{shown(setting)}"
            )
        return f"{size_mib:g}"

    def apply(self, setting: str, process: Process) -> None:
        """Give each DistributedDataParallel buckets of this size."""
        from torch.nn.parallel import DistributedDataParallel

        def of_this_size(given: Mapping[str, Any]) -> Mapping[str, Any]:
            before = given.get("bucket_cap_mb")
            process.did(f"applied: bucket_cap_mb {before or 'unset'} -> {setting}")
            return {"bucket_cap_mb": float(setting)}

        process.around(DistributedDataParallel, "__init__", of_this_size)
