"""Tensors and options as torch hands them to a collective, as the engine needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from fullwire.transport import programs

Places: TypeAlias = list[tuple[int, int]]  # addresses, and their numbers of bytes


def memory_of(tensor: Any, *, dense: bool = False) -> tuple[int, int]:
    """Return the address of a tensor's bytes, and their number."""
    if (place := tensor.device).type != "cpu":
        raise ValueError(f"fullwire: expected a tensor of the processor, got one on {place}")
    if tensor.layout is not torch.strided:
        raise ValueError(f"fullwire: expected a dense tensor, got {tensor.layout}")
    if not tensor.is_contiguous() and not (dense and is_without_gaps(tensor)):
        raise ValueError("Tensors must be contiguous")  # the words of Gloo
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def landing_for(outputs: Sequence[Any]) -> tuple[list[Any], Callable[[], None] | None]:
    """Return tensors without gaps to receive in, and a function that copies them to the others."""
    dense = [each if each.is_contiguous() else each.new_empty(each.shape) for each in outputs]
    apart = [(out, one) for out, one in zip(outputs, dense, strict=True) if out is not one]

    def spread() -> None:
        for out, one in apart:
            out.copy_(one)

    return dense, spread if apart else None


def is_without_gaps(tensor: Any) -> bool:
    """Say whether a tensor is contiguous in some order of its dimensions."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def only(tensors: Any) -> Any:
    """Return the one tensor of a list."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"expected one tensor, got {len(tensors)}")
    return tensors[0]


def listed(tensors: Any) -> Sequence[Any]:
    """Return the tensors for all ranks, which torch may put in a list of one list."""
    return tensors[0] if isinstance(tensors[0], list | tuple) else tensors


def cut(whole: Any, parts: int, part: Any) -> Places:
    """Cut a tensor into places of tensors like the part; check the type, which torch has not."""
    if whole.dtype is not part.dtype:
        raise ValueError(f"expected tensors of one type, got {typed(part)} and {typed(whole)}")
    address, size = memory_of(whole)
    each = part.numel() * part.element_size()
    if size != each * parts:
        raise ValueError(f"expected {parts} times {each} bytes in one tensor, got {size}")
    return [(address + index * each, each) for index in range(parts)]


def split(memory: tuple[int, int], tensor: Any, splits: Sequence[int], parts: int) -> Places:
    """Cut a tensor along its first dimension, into equal parts unless splits are given."""
    rows = int(tensor.shape[0]) if tensor.dim() else 1
    counts = list(splits) or [rows // parts] * parts
    if len(counts) != parts or sum(counts) != rows:
        raise ValueError(f"all_to_all: expected {parts} splits of {rows} rows, got {counts}")
    row_bytes = memory[1] // rows if rows else 0
    firsts = accumulate(counts, initial=0)
    return [
        (memory[0] + first * row_bytes, count * row_bytes)
        for first, count in zip(firsts, counts, strict=False)
    ]


def called(opts: Any) -> str:
    """Return the name of the reduction that torch asks for."""
    reduction = getattr(opts, "reduceOp", opts)
    if reduction is None:
        return "SUM"
    other = str(getattr(reduction, "op", reduction)).removeprefix("RedOpType.")
    known = (name for name in programs.REDUCTIONS if reduction == getattr(dist.ReduceOp, name))
    return next(known, other)


def root_of(opts: Any, more: dict[str, Any]) -> int:
    """Return the rank that a collective starts from or ends at."""
    return opts if isinstance(opts, int) else int(more.get("root", getattr(opts, "rootRank", 0)))


def typed(tensor: Any) -> str:
    """Return the name of a tensor's type."""
    return str(tensor.dtype).removeprefix("torch.")


def described(tensor: Any) -> str:
    """Return how many numbers of which type a tensor has."""
    return f"{tensor.numel()} {typed(tensor)}"
