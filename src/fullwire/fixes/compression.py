"""Gradients sent as halves, with what casting them costs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fullwire.compression.compressor import Compressor
from fullwire.fixes.fix import Fix, FixKind, Risk, register
from fullwire.run.run import Run
from fullwire.simulation.forecast import Forecaster
from fullwire.timeline.account import Account
from fullwire.timeline.transfers import codes_of

_SMALL_NUMBERS = re.compile(r"16|half|8", re.IGNORECASE)  # in the names of types
# Casting float32 to float16 and back ran at 13 and 19 GB/s on one 2.5 GHz core; a hook does a
# little more than that. A GPU casts at the speed of its memory: assumed.
_CASTING_HOOKS = ("fp16_compress_hook", "bf16_compress_hook")
_CAST_BYTES_PER_S = {True: 10e9, False: 400e9}  # on a processor, on a GPU
# Gloo's threads took as long for float16 as for float32, of which they handle twice the bytes.
_WORK_WITH_HALVES = {True: 2.0, False: 1.0}


@dataclass(frozen=True, kw_only=True)
class SentAsHalves(Fix):
    """Half the bytes, and half the digits."""

    template = "gradients sent as float16 (overflows beyond 65,504)"

    kind: str = "compression"
    risk: Risk = "numeric"
    how: str = "model.register_comm_hook(None, default_hooks.fp16_compress_hook)"


def casting(run: Run) -> Compressor | None:
    """Return the compressor that a run's communication hook is, if it is one that casts."""
    return _cast(run) if run.facts.get("hook") in _CASTING_HOOKS else None


def _predict(run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
    if "buckets" not in run.facts or "hook" in run.facts or _sends_halves(run):
        return
    yield SentAsHalves(forecast=job.ask(compressors=(_cast(run),)))


def _sends_halves(run: Run) -> bool:
    """Say whether most of what is sent has 16 bits a number already, or fewer."""
    kinds, sizes = codes_of(run.collectives.dtype), run.collectives.bytes
    is_small = np.array([_SMALL_NUMBERS.search(name) is not None for name in kinds.names], bool)
    return bool(len(sizes)) and 2 * int(sizes[is_small[kinds.codes]].sum()) > int(sizes.sum())


def _cast(run: Run) -> Compressor:
    on_processor = run.facts.get("backend") != "nccl"
    rate = _CAST_BYTES_PER_S[on_processor]
    return Compressor(
        ratio=2,
        encode_bps=8 * rate,
        decode_bps=8 * rate,
        work_per_byte=_WORK_WITH_HALVES[on_processor],
    )


register(FixKind(key="compression", risk="numeric", label="gradients as halves", predict=_predict))
