"""Gradients sent as halves, with what casting them costs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fullwire.compression.codec import CODECS
from fullwire.compression.compressor import Compressor
from fullwire.fixes.fix import Fix, FixKind, Risk, register
from fullwire.run.run import Run
from fullwire.simulation.forecast import Forecaster
from fullwire.timeline.account import Account
from fullwire.timeline.transfers import codes_of

_SMALL_NUMBERS = re.compile(r"16|half|8", re.IGNORECASE)  # in the names of types
_CASTING_HOOKS = ("fp16_compress_hook", "bf16_compress_hook")


@dataclass(frozen=True, kw_only=True)
class SentAsHalves(Fix):
    """Half the bytes, and half the digits."""

    template = "gradients sent as float16 (overflows beyond 65,504)"

    kind: str = "compression"
    risk: Risk = "numeric"
    how: str = "model.register_comm_hook(None, default_hooks.fp16_compress_hook)"


def casting(run: Run) -> Compressor | None:
    """Return the compressor that a run's communication hook is, if it is one that casts."""
    return _cast(run) if run.facts.hook in _CASTING_HOOKS else None


def _predict(run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
    if run.facts.buckets is None or run.facts.hook is not None or _sends_halves(run):
        return
    yield SentAsHalves(forecast=job.ask(compressors=(_cast(run),)))


def _sends_halves(run: Run) -> bool:
    """Say whether most of what is sent has 16 bits a number already, or fewer."""
    kinds, sizes = codes_of(run.collectives.dtype), run.collectives.bytes
    is_small = np.array([_SMALL_NUMBERS.search(name) is not None for name in kinds.names], bool)
    return bool(len(sizes)) and 2 * int(sizes[is_small[kinds.codes]].sum()) > int(sizes.sum())


def _cast(run: Run) -> Compressor:
    return CODECS["fp16"].compressor(on_gpu=run.facts.backend == "nccl")


register(FixKind(key="compression", risk="numeric", label="gradients as halves", predict=_predict))
