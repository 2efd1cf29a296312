"""The state of a training as one row of bytes: a worker that joins gets it, a checkpoint holds it.

Tensors lie one after the other. The rest (numbers, names, shapes) is a short description of them.
So several ranks, which hold the same state, can each hand over a part of the row.
"""

from __future__ import annotations

import hashlib
import io
from typing import Any

import torch

_ALIGNED_BYTES = 64


class State:
    """A state that refers to the job's own tensors: copy what is needed before they change."""

    def __init__(self, parts: dict[str, Any]) -> None:
        self._tensors: list[Any] = []
        self.size_bytes = 0
        kept = io.BytesIO()
        torch.save(self._described(parts), kept)
        self.description = kept.getvalue()

    def _described(self, value: Any) -> Any:
        if _is_plain(value):
            self._tensors.append(value.detach())
            self.size_bytes += _room_bytes(value)
            return torch.empty_like(value, device="meta")
        if isinstance(value, dict):
            return {key: self._described(part) for key, part in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._described(part) for part in value)
        return value

    @property
    def form(self) -> str:
        """Return a digest of shapes and types: ranks with equal ones have the same row."""
        forms = [(str(tensor.dtype), tuple(tensor.shape)) for tensor in self._tensors]
        return hashlib.sha256(repr(forms).encode()).hexdigest()[:16]

    def piece(self, first: int, last: int, zeros: Any = None) -> Any:
        """Return a copy of these bytes of the row, in the given zeros or in new memory."""
        copy = torch.zeros(last - first, dtype=torch.uint8) if zeros is None else zeros
        begin = 0
        for tensor in self._tensors:
            low, high = max(begin, first), min(begin + tensor.numel() * tensor.element_size(), last)
            if low < high:
                row = tensor.contiguous().reshape(-1).view(torch.uint8)
                copy[low - first : high - first] = row[low - begin : high - begin]
            begin += _room_bytes(tensor)
        return copy


def parts_of(description: bytes, row: Any) -> dict[str, Any]:
    """Return the parts of a state; their tensors lie in the row."""
    begin = 0

    def filled(value: Any) -> Any:
        nonlocal begin
        if isinstance(value, torch.Tensor) and value.device.type == "meta":
            size_bytes = value.numel() * value.element_size()
            tensor = row[begin : begin + size_bytes].view(value.dtype).view(value.shape)
            begin += _room_bytes(value)
            return tensor
        if isinstance(value, dict):
            return {key: filled(part) for key, part in value.items()}
        if type(value) in (list, tuple):
            return type(value)(filled(part) for part in value)
        return value

    parts: dict[str, Any] = filled(torch.load(io.BytesIO(description), weights_only=True))
    return parts


def _is_plain(value: Any) -> bool:
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not value.is_quantized
    )


def _room_bytes(tensor: Any) -> int:
    size_bytes: int = tensor.numel() * tensor.element_size()
    return -(-size_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
