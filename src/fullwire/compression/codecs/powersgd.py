"""PowerSGD: a matrix of gradients as the product of two thin ones (Vogels et al., NeurIPS 2019).

The first factor is the gradient times the second factor of the step before, summed over the ranks
and made orthonormal. The second factor is the gradient's transpose times the first, summed as well.
Both sums are all-reduces, one after the other. Vectors and small matrices travel as float32 with
the first. The unsent rest is kept and added to the next gradient.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

from fullwire.compression.codec import Codec, Cost, Option
from fullwire.compression.compressor import MoreSteps
from fullwire.compression.method import FLOAT_BYTES, SMALL, Bucket, Loss, Method, Shape, Tensor

_MOST_RANK = 1024


class PowerSgd(Method):
    """Sends two thin factors; keeps the second one of each parameter for the next step."""

    keeps_error = True
    sends_vectors = True

    def __init__(self, rank: int = 1) -> None:
        self._rank = rank
        self._right: dict[str, Tensor] = {}  # The second factors, by parameter.
        self._agreed: set[tuple[str, ...]] = set()  # Buckets whose factors are equal on all ranks.

    def wire_bytes(self, shape: Shape) -> int:
        """Return the bytes of both factors, or of a gradient that is sent whole."""
        high, wide = _sides(shape)
        count = self._rank * (high + wide) if self._is_split(shape) else math.prod(shape)
        return FLOAT_BYTES * count

    def pack(self, gradient: Tensor) -> Tensor:
        """Return both factors of one gradient, as bytes."""
        import torch

        shape = tuple(gradient.shape)
        if not self._is_split(shape):
            return gradient.reshape(-1).view(torch.uint8)
        matrix = gradient.reshape(_sides(shape))
        left = torch.linalg.qr(matrix @ self._factor("", matrix)).Q
        return torch.cat([left.reshape(-1), (left.T @ matrix).reshape(-1)]).view(torch.uint8)

    def unpack(self, packed: Tensor, shape: Shape) -> Tensor:
        """Return the product of both factors."""
        import torch

        values = packed.view(torch.float32)
        if not self._is_split(shape):
            return values.view(shape)
        high, wide = _sides(shape)
        left = values[: high * self._rank].view(high, self._rank)
        right = values[high * self._rank :].view(self._rank, wide)
        return (left @ right).view(shape)

    def average(self, bucket: Bucket, group: Any) -> Loss | None:
        """Sum both factors over the ranks, and leave their product in the bucket."""
        import torch
        import torch.distributed as dist

        ranks = dist.get_world_size(group)
        named = list(zip(bucket.names, bucket.gradients, strict=True))
        split = [
            (name, gradient.view(_sides(tuple(gradient.shape))))
            for name, gradient in named
            if self._is_split(tuple(gradient.shape))
        ]
        whole = [each for _, each in named if not self._is_split(tuple(each.shape))]
        factors = [self._factor(name, matrix) for name, matrix in split]
        if bucket.names not in self._agreed:
            self._agree(factors, group)
            self._agreed.add(bucket.names)
        lefts = [matrix @ right for (_, matrix), right in zip(split, factors, strict=True)]
        summed = _summed([*lefts, *whole], ranks, group)
        # LAPACK takes no inf and no NaN; what was lost is seen in the sums themselves.
        finite = [factor.nan_to_num(0.0, 0.0, 0.0) for factor in summed[: len(split)]]
        lefts = [torch.linalg.qr(factor).Q for factor in finite]
        # The other way around, `matrix.T @ left` takes torch 14 times as long on processors.
        rights = [left.T @ matrix for (_, matrix), left in zip(split, lefts, strict=True)]
        loss = _loss(bucket, split, rights) if bucket.is_measured else None
        rights = _summed(rights, ranks, group) if split else []
        if bucket.error is not None:
            bucket.error.copy_(bucket.values)
        for gradient, mean in zip(whole, summed[len(split) :], strict=True):
            if bucket.error is not None:
                bucket.error_of(gradient).zero_()
            gradient.copy_(mean.view(gradient.shape))
        # All ranks hold the same sums, so all find the same problem.
        is_usable = all(
            bool(factor.isfinite().all()) for factor in (*summed[: len(split)], *rights)
        )
        for (name, matrix), left, right in zip(split, lefts, rights, strict=True):
            if is_usable:
                torch.mm(left, right, out=matrix)
                self._right[name] = right.T
            else:
                matrix.fill_(torch.nan)
            if bucket.error is not None:
                bucket.error_of(matrix).sub_(matrix.reshape(-1))
        return loss

    def forget_group(self) -> None:
        """Let the ranks agree on factors again."""
        self._agreed.clear()

    def state(self) -> dict[str, Tensor]:
        """Return the second factors."""
        return dict(self._right)

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue with the second factors of a checkpoint."""
        self._right = {name: factor.clone() for name, factor in state.items()}
        self.forget_group()

    def _is_split(self, shape: Shape) -> bool:
        high, wide = _sides(shape)
        return self._rank * (high + wide) < high * wide and high * wide >= SMALL

    def _factor(self, name: str, matrix: Tensor) -> Tensor:
        """Return the second factor of the last step, or random numbers that ranks share."""
        import torch

        right = self._right.get(name)
        if right is None or right.shape != (matrix.shape[1], self._rank):
            same = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            right = torch.randn((matrix.shape[1], self._rank), generator=same).to(matrix.device)
            self._right[name] = right
        if right.stride(0) != 1:  # Its columns lie in one piece: torch multiplies twice as fast.
            right = self._right[name] = right.T.contiguous().T
        return right

    def _agree(self, factors: list[Tensor], group: Any) -> None:
        """Copy the factors of the group's first rank: a rank may be new, or loaded a checkpoint."""
        import torch
        import torch.distributed as dist

        if factors:
            together = torch.cat([factor.reshape(-1) for factor in factors])
            dist.broadcast(together, group=group, group_src=0)
            agreed = together.split([factor.numel() for factor in factors])
            for factor, same in zip(factors, agreed, strict=True):
                factor.copy_(same.view(factor.shape))


def _sides(shape: Shape) -> tuple[int, int]:
    """Return a gradient's sides as a matrix; a vector is one row."""
    return (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))


def _summed(tensors: list[Tensor], ranks: int, group: Any) -> list[Tensor]:
    """Return the means over the ranks, by one all-reduce."""
    import torch
    import torch.distributed as dist

    together = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(together, group=group)
    together /= ranks
    parts = together.split([tensor.numel() for tensor in tensors])
    return [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)]


def _loss(bucket: Bucket, split: list[tuple[str, Tensor]], rights: list[Tensor]) -> Loss:
    """Return how much of this rank's gradients lies outside of the space that the ranks share."""
    given = float(bucket.values.square().sum())
    of_split = sum(float(matrix.square().sum()) for _, matrix in split)
    kept = sum(float(right.square().sum()) for right in rights)
    return Loss(max(of_split - kept, 0.0), given, 0, bucket.values.numel())


def _rank(text: str) -> int:
    rank = int(text)
    if not 1 <= rank <= _MOST_RANK:
        raise ValueError(text)
    return rank


CODEC = Codec(
    key="powersgd",
    label="gradients as thin factors",
    # Of a square matrix with 25 MiB.
    ratio=2560 / 2,
    on_processor=Cost(
        encode_bps=8 * 7.4e9,
        decode_bps=8 * 15e9,
        source="measured: torch 2.13, 25 MiB on one core with AVX-512",
    ),
    words="A matrix of gradients is sent as two thin factors, in two all-reduces. The unsent rest "
    "is added to the next gradient.",
    options=(
        Option(
            name="rank",
            usual=1,
            expected=f"a whole number from 1 to {_MOST_RANK}",
            read=_rank,
            meaning="the columns of a factor",
        ),
    ),
    method=PowerSgd,
    by_shape=True,
    # Of six models. Three of them, at three batches each, needed as many steps more at each batch.
    steps={"rank=2": MoreSteps(late=(1.1, 0.2, 2.3))},
)
