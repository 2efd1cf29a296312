"""The largest values of a gradient with their places; the rest is kept for the next gradient.

Each rank chooses other places, so the ranks gather the chosen values of all and add them up. Bytes
and unpacking grow with the number of ranks.
"""

from __future__ import annotations

import math
from typing import Any

from fullwire.compression.codec import Codec, Cost, Option
from fullwire.compression.compressor import MoreSteps
from fullwire.compression.method import Bucket, Loss, Method, Shape, Tensor, gathered

_PAIR_BYTES = 8  # A place (int32) and a value (float32).
# Of so many values, one decides where to look for the largest. It is a prime number: rows of a
# gradient have multiples of 64, and some columns are much larger than others.
_SAMPLED = 67
_WORTH_SAMPLING = 2**18  # Values: below, a sample is too small to save time.


class TopK(Method):
    """Sends a share of the values, the largest."""

    keeps_error = True

    def __init__(self, density: float = 0.01) -> None:
        self._density = density

    def wire_bytes(self, shape: Shape) -> int:
        """Return the packed bytes of one gradient."""
        return _PAIR_BYTES * self._chosen(math.prod(shape))

    def pack(self, gradient: Tensor) -> Tensor:
        """Return the places and values of the largest values, as bytes."""
        import torch

        values = gradient.reshape(-1)
        places = _largest(values, self._chosen(values.numel()))
        pairs = torch.stack([places.to(torch.int32), values[places].view(torch.int32)])
        return pairs.view(torch.uint8).reshape(-1)

    def unpack(self, packed: Tensor, shape: Shape) -> Tensor:
        """Return a gradient with the sent values, and zeros elsewhere."""
        import torch

        values = torch.zeros(math.prod(shape), device=packed.device)
        _add_pairs(values, packed)
        return values.view(shape)

    def average(self, bucket: Bucket, group: Any) -> Loss | None:
        """Gather the chosen values of all ranks, and add them in the order of ranks."""
        import torch.distributed as dist

        ranks, values = dist.get_world_size(group), bucket.values
        packed = self.pack(values)
        of_all = gathered(packed, ranks, bucket.direct or group)
        sent = self.unpack(packed, tuple(values.shape))
        loss = Loss.of(values, sent) if bucket.is_measured else None
        if bucket.error is not None:
            bucket.error.copy_(values - sent)
        values.zero_()
        for row in of_all:
            _add_pairs(values, row)
        values /= ranks
        return loss

    def _chosen(self, count: int) -> int:
        return min(count, max(1, round(self._density * count)))


def _largest(values: Tensor, count: int) -> Tensor:
    """Return the places of the largest values; NaN counts as the largest of all."""
    sizes = values.abs()
    if values.numel() >= _WORTH_SAMPLING:
        sample = sizes[::_SAMPLED]
        wanted = min(sample.numel(), math.ceil(1.25 * count / _SAMPLED) + 8)
        least = sample.topk(wanted).values[-1]
        candidates = (~(sizes < least)).nonzero().view(-1)
        if count <= candidates.numel() <= values.numel() // 2:
            return candidates[sizes[candidates].topk(count, sorted=False).indices]
    return sizes.topk(count, sorted=False).indices


def _add_pairs(values: Tensor, packed: Tensor) -> None:
    import torch

    places, chosen = packed.view(torch.int32).view(2, -1)
    values.index_add_(0, places, chosen.view(torch.float32))


def _density(text: str) -> float:
    share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 < share <= 1:
        raise ValueError(text)
    return share


CODEC = Codec(
    key="topk",
    label="the largest values of gradients",
    ratio=50,
    combining="gather",
    on_processor=Cost(
        encode_bps=8 * 1.1e9,
        decode_bps=8 * 8.8e9,
        source="measured: torch 2.13, 25 MiB on one core with AVX-512",
    ),
    words="The largest values and their places are sent. The rest is added to the next gradient. "
    "Each rank receives the values of all others.",
    options=(
        Option(
            name="density",
            usual=0.01,
            expected="a share above 0, up to 1, such as 0.01 or 1%",
            read=_density,
            meaning="the share of values that is sent",
        ),
    ),
    method=TopK,
    steps={"density=0.1": MoreSteps(1.03, 0.98, 1.11)},
)
