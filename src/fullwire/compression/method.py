"""The work of a codec on real gradients: packing, unpacking, and the mean over the ranks.

A method that only stores values in fewer bits is a `Format`. Its gradients travel by direct
exchange. Each rank owns one part of the bucket. The ranks send their packed parts to the owners, an
owner adds them in float32 and rounds the mean once, and all ranks gather the rounded parts. So the
error does not grow with the number of ranks, and all ranks hold equal bits.

Torch is imported within functions, because predictions use the same classes without it.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from fullwire.errors import UsageError
from fullwire.units import shown

Tensor: TypeAlias = Any  # torch.Tensor, which may be absent here
Shape: TypeAlias = tuple[int, ...]
FLOAT_BYTES = 4
ERROR_VARIABLE = "FULLWIRE_MAX_ERROR"  # relative squared error beyond which float32 is sent
SMALL = 1024  # Numbers: a gradient with fewer travels as float32, as a vector does.


def asked_error() -> float | None:
    """Return the largest relative squared error that the environment allows, if it says one."""
    said = os.environ.get(ERROR_VARIABLE)
    return None if said is None else error_limit(said, ERROR_VARIABLE)


def error_limit(given: float | str, what: str) -> float:
    """Read a largest relative squared error; a refusal names it as `what`."""
    try:
        number = float(given)
    except ValueError:
        number = math.nan
    if not number > 0:
        raise UsageError(f"{what}: expected a number above 0, got {shown(given)}")
    return number


def is_small(gradient: Tensor) -> bool:
    """Say whether a gradient is of a norm layer, a bias, or as small as one."""
    return bool(gradient.dim() < 2 or gradient.numel() < SMALL)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Bucket:
    """The gradients of some parameters, one after another in one flat float32 tensor."""

    values: Tensor
    gradients: Sequence[Tensor]  # Views of `values` in the shapes of their parameters.
    names: tuple[str, ...]
    error: Tensor | None  # Not sent so far, as long as `values`; None without error feedback.
    is_measured: bool = False
    direct: Any = None  # The group for exchanges and gathers, if it is not that for sums.

    def error_of(self, gradient: Tensor) -> Tensor:
        """Return the part of the error that belongs to one gradient."""
        first = gradient.storage_offset() - self.values.storage_offset()
        assert self.error is not None
        return self.error[first : first + gradient.numel()]


@dataclass(frozen=True, slots=True)
class Loss:
    """Squared sums over the values that a rank sent, and over what was lost of them."""

    lost: float
    given: float
    zeroed: int  # Values that arrive as zero and are none.
    values: int

    @classmethod
    def of(cls, given: Tensor, arrived: Tensor) -> Loss:
        """Compare values with their packed and unpacked form."""
        return cls(
            float((given - arrived).square().sum()),
            float(given.square().sum()),
            int(((arrived == 0) & (given != 0)).sum()),
            given.numel(),
        )

    def __add__(self, other: Loss) -> Loss:
        """Return the sums over the values of both."""
        return Loss(
            self.lost + other.lost,
            self.given + other.given,
            self.zeroed + other.zeroed,
            self.values + other.values,
        )


class Method(ABC):
    """Packs gradients, and leaves the mean of all ranks' gradients in a bucket."""

    keeps_error: ClassVar[bool] = False  # Adds to a gradient what earlier steps did not send.
    sends_vectors: ClassVar[bool] = False  # Sends small gradients as they are, by itself.
    widened = 0  # Messages that were sent in a wider format, because values exceeded the range.

    @abstractmethod
    def wire_bytes(self, shape: Shape) -> int:
        """Return the packed bytes of one gradient."""

    @abstractmethod
    def pack(self, gradient: Tensor) -> Tensor:
        """Return a gradient's packed bytes."""

    @abstractmethod
    def unpack(self, packed: Tensor, shape: Shape) -> Tensor:
        """Return the gradient that a receiver reads from packed bytes."""

    @abstractmethod
    def average(self, bucket: Bucket, group: Any) -> Loss | None:
        """Leave the mean over the ranks in the bucket, and the unsent rest in its error.

        Return the loss of this rank's own values, if the bucket is measured.
        """

    def forget_group(self) -> None:  # noqa: B027  # Most methods know nothing of a group.
        """Forget everything that the ranks of a group had agreed on."""

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint needs, beside the unsent error."""
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:  # noqa: B027  # Most have no state.
        """Continue with the tensors of a checkpoint."""


class Format(Method):
    """Stores each value in fewer bits; values travel by direct exchange, in rows of bytes."""

    block: ClassVar[int] = 1  # Values that share a scale: all parts but the last are whole blocks.

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    @abstractmethod
    def row_bytes(self, count: int) -> int:
        """Return the packed bytes of so many values."""

    @abstractmethod
    def pack_row(self, values: Tensor, out: Tensor) -> None:
        """Pack float32 values into the bytes of a row."""

    @abstractmethod
    def unpack_row(self, packed: Tensor, values: Tensor, *, adds: bool = False) -> None:
        """Fill `values` with those of a row, or add them."""

    def wire_bytes(self, shape: Shape) -> int:
        """Return the packed bytes of one gradient."""
        size = math.prod(shape)
        return self.row_bytes(size) if size else 0

    def pack(self, gradient: Tensor) -> Tensor:
        """Return a gradient's packed bytes."""
        packed = _new_bytes(self.wire_bytes(tuple(gradient.shape)))
        if gradient.numel():
            self.pack_row(gradient.reshape(-1), packed)
        return packed

    def unpack(self, packed: Tensor, shape: Shape) -> Tensor:
        """Return the gradient that a receiver reads from packed bytes."""
        import torch

        values = torch.empty(shape)
        if values.numel():
            self.unpack_row(packed, values.view(-1))
        return values

    def average(self, bucket: Bucket, group: Any) -> Loss | None:
        """Leave the mean over the ranks in the bucket by direct exchange.

        All work is done in the bucket's own memory: a pass over it costs more than packing does.
        """
        import torch.distributed as dist

        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        size = bucket.values.numel()
        count = -(-size // (ranks * self.block)) * self.block  # Of a part; the last may be shorter.
        row_bytes = self.row_bytes(count)
        parts = [bucket.values[first * count : (first + 1) * count] for first in range(ranks)]
        lengths = [self.row_bytes(len(part)) if len(part) else 0 for part in parts]
        own, others = parts[rank], [other for other in range(ranks) if other != rank]
        packed = self._space("packed", ranks, row_bytes)
        for other in others:
            if lengths[other]:
                self.pack_row(parts[other], packed[other, : lengths[other]])
        received = self._space("received", ranks, row_bytes)
        dist.all_to_all_single(received, packed, group=bucket.direct or group)
        if lengths[rank]:
            for other in others:
                self.unpack_row(received[other, : lengths[rank]], own, adds=True)
            own /= ranks
            self.pack_row(own, packed[rank, : lengths[rank]])
        gathered(packed[rank], ranks, bucket.direct or group, received)
        loss = self._loss(bucket, parts, packed, rank)
        for part, length, row in zip(parts, lengths, received, strict=True):
            if length:
                self.unpack_row(row[:length], part)
        return loss

    def _loss(
        self, bucket: Bucket, parts: Sequence[Tensor], packed: Tensor, rank: int
    ) -> Loss | None:
        """Compare parts with their packed form, and keep the rest where a codec keeps it."""
        if bucket.error is None and not bucket.is_measured:
            return None
        loss, first = Loss(0.0, 0.0, 0, 0), 0
        for owner, (part, row) in enumerate(zip(parts, packed, strict=True)):
            if not len(part):
                break
            arrived = self._space("arrived", 1, FLOAT_BYTES * len(part))[0].view(part.dtype)
            self.unpack_row(row[: self.row_bytes(len(part))], arrived)
            if bucket.is_measured and owner != rank:
                loss += Loss.of(part, arrived)
            if bucket.error is not None:
                # The owner of a part keeps the error of its mean, which counts for each rank.
                times = len(parts) if owner == rank else 1
                bucket.error[first : first + len(part)] = times * (part - arrived)
            first += len(part)
        return loss if bucket.is_measured else None

    def _space(self, use: str, rows: int, row_bytes: int) -> Tensor:
        """Return rows of bytes, in memory that is kept: new memory costs more than packing."""
        if use not in self._kept or self._kept[use].numel() < rows * row_bytes:
            self._kept[use] = _new_bytes(rows * row_bytes)
        return self._kept[use][: rows * row_bytes].view(rows, row_bytes)


def gathered(packed: Tensor, ranks: int, group: Any, rows: Tensor | None = None) -> Tensor:
    """Return the packed bytes of all ranks, a row each, in these rows if they are given."""
    import torch.distributed as dist

    if rows is None:
        rows = packed.new_empty((ranks, packed.numel()))
    # Torch 2.13 has a new name, and warns of the old one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(rows.view(-1), packed, group=group)
    return rows


def _new_bytes(count: int) -> Tensor:
    import torch

    return torch.zeros(count, dtype=torch.uint8)  # A part may be shorter than its row.
