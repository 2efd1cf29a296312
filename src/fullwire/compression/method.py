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
    """Stores each value in fewer bits, in blocks of equal size; values travel by exchange."""

    block: ClassVar[int] = 1

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    @abstractmethod
    def row_bytes(self, count: int) -> int:
        """Return the packed bytes of one row of whole blocks."""

    @abstractmethod
    def pack_rows(self, rows: Tensor, out: Tensor) -> None:
        """Pack each row of float32 values into a row of bytes."""

    @abstractmethod
    def unpack_rows(self, packed: Tensor, out: Tensor) -> Tensor:
        """Return the values of each row: `out` filled with them, or the packed ones as they are."""

    def wire_bytes(self, shape: Shape) -> int:
        """Return the packed bytes of one gradient."""
        size = math.prod(shape)
        return self.row_bytes(self._whole_blocks(size)) if size else 0

    def pack(self, gradient: Tensor) -> Tensor:
        """Return a gradient's packed bytes."""
        if not gradient.numel():
            return _bytes_like(gradient, 1, 0)[0]
        rows = self._in_rows(gradient.reshape(-1), 1, self._whole_blocks(gradient.numel()))
        packed = _bytes_like(rows, 1, self.row_bytes(rows.shape[1]))
        self.pack_rows(rows, packed)
        return packed[0]

    def unpack(self, packed: Tensor, shape: Shape) -> Tensor:
        """Return the gradient that a receiver reads from packed bytes."""
        size = math.prod(shape)
        if not size:
            return packed.float().reshape(shape)
        import torch

        out = torch.empty((1, self._whole_blocks(size)), device=packed.device)
        return self.unpack_rows(packed[None], out)[0, :size].float().reshape(shape)

    def average(self, bucket: Bucket, group: Any) -> Loss | None:
        """Leave the mean over the ranks in the bucket by direct exchange."""
        import torch.distributed as dist

        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        values, size = bucket.values, bucket.values.numel()
        count = self._whole_blocks(-(-size // ranks))
        rows = self._in_rows(values, ranks, count)
        row_bytes = self.row_bytes(count)
        packed = self._space("packed", values, ranks, row_bytes)
        for sent in (slice(0, rank), slice(rank + 1, ranks)):  # The own part stays float32.
            if sent.start < sent.stop:
                self.pack_rows(rows[sent], packed[sent])
        received = self._space("received", values, ranks, row_bytes)
        dist.all_to_all_single(received, packed, group=bucket.direct or group)
        total, theirs = self._numbers("sums", values, 2, count).split(1)
        total.copy_(rows[rank])
        for other in range(ranks):
            if other != rank:
                total += self.unpack_rows(received[other : other + 1], theirs)
        total /= ranks
        rounded = self._space("rounded", values, 1, row_bytes)
        self.pack_rows(total, rounded)
        received = gathered(rounded[0], ranks, bucket.direct or group, received)
        loss = None
        if bucket.error is not None or bucket.is_measured:
            arrived = self.unpack_rows(packed, rows.new_empty(rows.shape)).float()
            if bucket.is_measured:
                others = [other for other in range(ranks) if other != rank]
                loss = Loss.of(rows[others], arrived[others])
            if bucket.error is not None:
                lost = rows - arrived
                # An owner keeps the error of the mean, which counts once for each rank.
                lost[rank] = ranks * (total - self.unpack_rows(rounded, theirs))[0]
                bucket.error.copy_(lost.view(-1)[:size])
        found = self.unpack_rows(received, rows).reshape(-1)[:size]
        if found.data_ptr() != values.data_ptr():
            values.copy_(found)
        return loss

    def _in_rows(self, values: Tensor, rows: int, count: int) -> Tensor:
        """Return values as rows of so many, with zeros at the end."""
        if values.numel() == rows * count:
            return values.view(rows, count)
        padded = self._numbers("padded", values, rows, count)
        padded.view(-1)[: values.numel()] = values
        padded.view(-1)[values.numel() :] = 0
        return padded

    def _numbers(self, use: str, like: Tensor, rows: int, count: int) -> Tensor:
        """Return rows of float32 in memory that is kept."""
        import torch

        return self._space(use, like, rows, FLOAT_BYTES * count).view(torch.float32)

    def _space(self, use: str, like: Tensor, rows: int, row_bytes: int) -> Tensor:
        """Return rows of bytes, in memory that is kept: new memory costs more than packing."""
        if use not in self._kept or self._kept[use].numel() < rows * row_bytes:
            self._kept[use] = _bytes_like(like, 1, rows * row_bytes)[0]
        return self._kept[use][: rows * row_bytes].view(rows, row_bytes)

    def _whole_blocks(self, count: int) -> int:
        return -(-count // self.block) * self.block


def gathered(packed: Tensor, ranks: int, group: Any, rows: Tensor | None = None) -> Tensor:
    """Return the packed bytes of all ranks, a row each, in these rows if they are given."""
    import torch.distributed as dist

    if rows is None:
        rows = packed.new_empty((ranks, packed.numel()))
    # Torch 2.13 has a new name, and warns of the old one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(rows.view(-1), packed, group=group)
    return rows


def _bytes_like(values: Tensor, rows: int, count: int) -> Tensor:
    import torch

    return torch.empty((rows, count), dtype=torch.uint8, device=values.device)
