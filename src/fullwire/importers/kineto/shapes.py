"""Operations with their shapes, which the text of a trace tells as it passes by.

The native scanner keeps no shapes. Few operations tell a plan, so only these are decoded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from fullwire.run.intervals import union, without
from fullwire.run.run import Whole


class _Operator(msgspec.Struct, gc=False):
    name: str
    tid: int | str
    ts: float
    dur: float = 0.0
    args: dict[str, Any] = {}


# Operations by which a transformer's plan is recognised, with those that wait or wrap others.
_OPERATOR = re.compile(
    rb'"name"\s*:\s*"(?:aten::(?:mm|addmm|bmm|baddbmm|_scaled_mm|_grouped_mm|embedding'
    rb"|nll_loss_forward|_scaled_dot_product_\w+|_flash_attention_\w+|_efficient_attention_\w+"
    rb"|_foreach_copy_|split_with_sizes_copy|_chunk_cat)"
    rb"|torch::autograd::AccumulateGrad|flash_attn::\w+|fsdp::\w+"
    rb'|(?:_c10d_functional|c10d)::\w+|PythonSubclass|(?:Nested)?Redistribute\w*|_(?:To|From)TorchTensor\w*|FSDP::[^"]*|Optimizer\.step#[^"]*)"'
)
_KERNEL = re.compile(
    rb'"cat"\s*:\s*"kernel"(?:(?!"ph").)*?"dur"\s*:\s*(\d+(?:\.\d+)?)(?:(?!"ph").)*?'
    rb'"External id"\s*:\s*(\d{1,18})\b',
    re.DOTALL,
)
MOST_US = 2.0e15  # 64 years, as for the scanner; a longer time is damage
_TELLS_SHAPES = b'"Input Dims"'
_HAS_NO_DEVICE = re.compile(rb'"deviceProperties"\s*:\s*\[\s*\]')
_BLOCK_BYTES = 2**20
WAIT = "_c10d_functional::wait_tensor"
DISPATCH = "dispatch"  # a wrapper, without the operations within it
HANDOVER = "handover"  # of a collective to its group, without the operations within it
_GATHERS = "c10d::_allgather_base_"
_SUMS = "c10d::allreduce_"
_MAKES_GRADIENT = "torch::autograd::AccumulateGrad"
_MOST_DIMENSIONS, _MOST_ELEMENTS = 64, 2**61  # torch has at most 64 dimensions


@dataclass(frozen=True, slots=True)
class Shaped:
    """An operation whose shapes a trace tells, and the time that it took itself."""

    name: str
    shapes: str
    dtype: str
    start_ns: int
    busy_ns: int
    operation: int  # its External id, which its kernels bear too; -1 where it is unknown


@dataclass(slots=True)
class Shapes:
    """Collects operations with their shapes from the text of a trace as it passes by."""

    operators: list[_Operator] = field(default_factory=list)
    kernels_us: dict[int, float] = field(default_factory=dict)  # by the operator behind them
    gradients: set[int] = field(default_factory=set)  # their elements
    _waiting: bytearray = field(default_factory=bytearray)
    _before: bytes = b""  # the last chunk without shapes: an event may begin in it
    _tells: bool = False
    _collects: bool = False

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes; none is the end. The last event waits for the next ones."""
        if not self._tells:  # most traces lack shapes, and cost only this search
            self._tells = _TELLS_SHAPES in chunk
            # On a processor operations wait, with or without shapes.
            self._collects |= self._tells or _HAS_NO_DEVICE.search(chunk) is not None
            if not self._collects:
                self._before = chunk
                return
            self._waiting += self._before
        waiting = self._waiting
        waiting += chunk
        if chunk and len(waiting) < _BLOCK_BYTES:
            return
        last = waiting.rfind(b'"ph"')
        end = max(0, waiting.rfind(b"{", 0, max(last, 0))) if chunk else len(waiting)
        block = bytes(waiting[:end])
        del waiting[: max(end, len(waiting) - _BLOCK_BYTES)]
        for match in _OPERATOR.finditer(block):
            start, end = block.rfind(b"{", 0, match.start()), block.find(b"}", match.end())
            end = block.find(b"}", end + 1)
            try:
                operator = msgspec.json.decode(block[start : end + 1], type=_Operator)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue  # the scanner tells of damage; a name with a bracket is no loss
            if operator.name == _MAKES_GRADIENT:
                self.gradients |= {_elements(size) for size in _tensors(operator)}
            elif abs(operator.ts) <= MOST_US and 0 <= operator.dur <= MOST_US:
                self.operators.append(operator)
        for match in _KERNEL.finditer(block):
            number, duration_us = int(match[2]), float(match[1])
            if duration_us <= MOST_US:
                self.kernels_us[number] = self.kernels_us.get(number, 0.0) + duration_us

    def gathered(self) -> dict[int, int]:
        """Return the elements of a whole gathering by those of a rank's part.

        Gloo marks a gathering with the part alone. Parts of one size in groups of several sizes
        are left out.
        """
        wholes: dict[int, set[int]] = {}
        for operator in self.operators:
            if operator.name == _GATHERS:
                whole, part = map(_elements, [*_tensors(operator), 0, 0][:2])
                if whole and part:
                    wholes.setdefault(part, set()).add(whole)
        return {part: min(found) for part, found in wholes.items() if len(found) == 1}

    def unlike_gradients(self) -> frozenset[int]:
        """Return the elements of summed tensors with several dimensions that no gradient has.

        Those of a flat sum are left out: it may hold several gradients.
        """
        summed: dict[bool, set[int]] = {True: set(), False: set()}  # by whether they are flat
        for operator in self.operators:
            if operator.name == _SUMS:
                for size in next(iter(_tensors(operator)), []):
                    if isinstance(size, list):
                        summed[len(size) < 2].add(_elements(size))
        return frozenset(summed[False] - summed[True] - self.gradients if self.gradients else ())

    def called(self) -> dict[int, Whole]:
        """Return when sums of so many elements were called, by their elements."""
        times_ns: dict[int, list[int]] = {}
        for operator in self.operators:
            if operator.name == _SUMS:
                sizes: list[Any] = next(iter(_tensors(operator)), [])
                if len(sizes) == 1 and (elements := _elements(sizes[0])):
                    times_ns.setdefault(elements, []).append(round(operator.ts * 1000))
        return {elements: np.sort(times) for elements, times in times_ns.items()}

    def waits_ns(self) -> tuple[Whole, Whole]:
        """Return when threads waited for tensors: each thread's waits, without those in others."""
        waits = [each for each in self.operators if each.name == WAIT]
        found = [
            _covered(each for each in waits if each.tid == thread)
            for thread in dict.fromkeys(each.tid for each in waits)
        ]
        none = np.zeros(0, np.int64)
        start_ns, end_ns = zip((none, none), *found, strict=True)
        return np.concatenate(start_ns), np.concatenate(end_ns)

    def hooks_wait_ns(self) -> tuple[Whole, Whole]:
        """Return when FSDP's hooks waited for collectives: they ran none of the operations here.

        Casts and sums in a hook are not among these, and count as waiting. They are short.
        """
        hooks_ns = _covered(each for each in self.operators if _is_hook(each))
        if not len(hooks_ns[0]):
            return hooks_ns
        return without(hooks_ns, _covered(each for each in self.operators if not _is_hook(each)))

    def shaped(self) -> Iterator[Shaped]:
        """Yield the operations. A wrapper is `dispatch`; an optimizer's step is one operation."""
        if not self._tells:
            return
        order = sorted(
            (operator for operator in self.operators if not _is_hook(operator)),
            key=lambda operator: (str(operator.tid), operator.ts, -operator.dur),
        )
        inside_us = [0.0] * len(order)
        is_within = [False] * len(order)  # of an optimizer
        around: list[int] = []
        for place, operator in enumerate(order):
            while around and not (
                order[around[-1]].tid == operator.tid
                and operator.ts < order[around[-1]].ts + order[around[-1]].dur
            ):
                around.pop()
            if around:
                inside_us[around[-1]] += operator.dur
                is_within[place] = is_within[around[-1]] or _is_optimizer(order[around[-1]])
            around.append(place)
        for operator, within_us, is_inner in zip(order, inside_us, is_within, strict=True):
            if is_inner:
                continue
            # A wrapper only hands others on: to a tensor's class, or to a group.
            is_wrapper = (
                not operator.name.startswith(("aten::", "flash_attn::", "Optimizer."))
                and operator.name != WAIT
            ) or (within_us > 0 and not _is_optimizer(operator))
            told = operator.args.get("External id")
            number = told if isinstance(told, int) else -1
            launched_us = self.kernels_us.get(number, 0.0)
            own_us = (
                max(operator.dur - within_us, 0.0) if is_wrapper else launched_us or operator.dur
            )
            types = operator.args.get("Input type", [])
            wrapper = HANDOVER if operator.name.startswith(("c10d::", "fsdp::")) else DISPATCH
            yield Shaped(
                wrapper if is_wrapper else operator.name.partition("#")[0],
                "" if is_wrapper else _sizes(operator.args.get("Input Dims", [])),
                "" if is_wrapper or not isinstance(types, list) else text_of((types or [""])[0]),
                round(operator.ts * 1000),
                round(own_us * 1000),
                number,
            )


def _covered(operators: Iterable[_Operator]) -> tuple[Whole, Whole]:
    """Return the stretches in which one of these operations ran."""
    times_us = np.array([(each.ts, each.dur) for each in operators]).reshape(-1, 2)
    start_ns, lasted_ns = np.round(times_us.T * 1000).astype(np.int64)
    return union(start_ns, start_ns + lasted_ns)


def _is_hook(operator: _Operator) -> bool:
    return operator.name.startswith("FSDP::")


def _is_optimizer(operator: _Operator) -> bool:
    return operator.name.startswith("Optimizer.step#")


def _tensors(operator: _Operator) -> list[Any]:
    """Return the sizes of an operator's tensors; a list of tensors is a list of sizes."""
    told = operator.args.get("Input Dims")
    return [each for each in told if isinstance(each, list)] if isinstance(told, list) else []


def _elements(tensor: object) -> int:
    """Return the elements of a tensor of these sizes; 0 if they are not those of a tensor."""
    if not isinstance(tensor, list) or not 0 < len(tensor) <= _MOST_DIMENSIONS:
        return 0
    elements = math.prod(whole_number(size, _MOST_ELEMENTS) or 0 for size in tensor)
    return elements if elements <= _MOST_ELEMENTS else 0


def _sizes(given: object) -> str:
    """Return tensors' sizes as text: 128x512 512x2048."""
    if not isinstance(given, list):
        return ""
    tensors = [tensor for tensor in given if isinstance(tensor, list) and tensor]
    return " ".join(
        "x".join(str(size) for size in tensor) for tensor in tensors if isinstance(tensor[0], int)
    )


def whole_number(value: object, most: int) -> int | None:
    """Return a number of a trace; None for any other value, and for one above the most."""
    is_usable = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most
    return value if is_usable else None  # type: ignore[return-value]  # an int, by the line above


def text_of(value: object) -> str:
    """Return a text of a trace, cut where it is too long; "" for any other value."""
    return fit_for_files(value)[:200] if isinstance(value, str) else ""


def fit_for_files(text: str) -> str:
    """Return a text without halves of characters, which no file can hold."""
    return text.encode(errors="backslashreplace").decode()
