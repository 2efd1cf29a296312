"""How the float32 numbers of a group travel: as they are, or packed in a wire format.

A rank rounds what it sends to the rank that adds up a block. That rank adds in float32, rounds the
sum once, and sends it to all; it keeps the rounded sum itself. So the error does not grow with the
number of workers, and ranks end with the same bits. `native/transport/packing.cpp` does the work;
this module chooses. Every rank chooses by the same rules from the same settings and measurements.
The description of each collective names its format, so ranks that disagree find out before a number
is used.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fullwire.compression.method import ERROR_VARIABLE, asked_error, error_limit
from fullwire.errors import TransportError, UsageError
from fullwire.transport import programs
from fullwire.transport.programs import Links
from fullwire.units import size_bytes

FORMATS = {"float32": 0, "bf16": 1, "fp16": 2, "int8": 3}  # the engine's numbers for them
AUTO = "auto"
WIRE_VARIABLE = "FULLWIRE_WIRE"  # a format, or auto
# Rounding to nearest stays below a third of these limits in normal numbers: 4e-6, 2.4e-7, 1.3e-3.
# Beyond them numbers are lost: fp16 of gradients below 1e-6, bf16 of subnormal ones.
MOST_ERROR = {"float32": math.inf, "bf16": 1e-4, "fp16": 1e-3, "int8": 1e-2}
BYTES_OF_NUMBER = {"float32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1 + 4 / 256}
LEAST_BYTES = 65536  # norm layers and biases that travel alone are smaller
_MESSAGE_S = 10e-6  # of processor time, to send a message and to receive one
# The choice of `auto`: it has the range of float32, and its error costs no steps.
_AUTOMATIC = "bf16"
_TRIED_BYTES = (2**18, 2**20, 2**22)
_GAIN = 0.95  # of the time of float32, at most: so noise of a trial makes no job slower


class Packing(NamedTuple):
    """The format of one collective."""

    name: str
    most_error: float

    @property
    def words(self) -> str:
        """Return what the description of the collective says, which all ranks compare."""
        return f" as {self.name}"


@dataclass
class Wire:
    """The choice of a group: the same on every rank."""

    workers: int
    links: Links
    name: str = "float32"
    least_bytes: int = LEAST_BYTES
    most_error: float | None = None
    by_numbers: dict[int, str] = field(default_factory=dict)  # of tensors with so many
    automatic_from: float | None = None  # bytes from which `auto` packs, once it has tried
    tells: bool = True  # one rank tells which tensors travel unchanged
    packs_small: bool = False  # norm layers and biases in DDP's buckets too
    _unchanged: set[str] = field(default_factory=set)

    def packing(self, kind: str, numbers: int, tensor_bytes: int, reduction: str) -> Packing | None:
        """Return the format for a tensor of these numbers, None if it travels as it is."""
        name = self.by_numbers.get(numbers, self.name)
        if name == "float32" or self.workers == 1:
            return None
        if name == AUTO:
            if self.automatic_from is None or tensor_bytes < self.automatic_from:
                return None
            name = _AUTOMATIC
        if tensor_bytes < self.least_bytes:
            return None
        if kind != "float32" or reduction not in ("SUM", "AVG", ""):
            self._name_once(kind if kind != "float32" else f"{reduction} of float32", name)
            return None
        if not pays(self.workers, tensor_bytes, name, self.links):
            return None
        return Packing(name, self.most_error or MOST_ERROR[name])

    @property
    def is_on(self) -> bool:
        """Say whether some tensors may be packed."""
        if self.workers == 1:
            return False
        return self.name != "float32" or any(n != "float32" for n in self.by_numbers.values())

    def _name_once(self, what: str, name: str) -> None:
        if self.tells and what not in self._unchanged:
            self._unchanged.add(what)
            sys.stderr.write(
                f"fullwire: {what} travels unchanged. Sums and gathers of float32 go as {name}\n"
            )


def pays(workers: int, tensor_bytes: int, name: str, links: Links) -> bool:
    """Say whether packing saves more time than the messages of a direct exchange take.

    A rank exchanges 2 (N - 1) messages with all others. Up to 1 MiB float32 needs some 2 log2 N of
    them, by doubling; beyond, a ring has 2 (N - 1) too.
    """
    if tensor_bytes > programs.LARGEST_UNPIPELINED_BYTES:
        return True
    share = 1 - BYTES_OF_NUMBER[name] / BYTES_OF_NUMBER["float32"]
    wire_s = 2 * (workers - 1) / workers * 8 * tensor_bytes / links.rate_bps
    messages = 2 * (workers - 1) - 2 * (workers - 1).bit_length()
    return share * wire_s > messages * _MESSAGE_S


def say_fall_back(group: str, after: str, packing: Packing) -> None:
    """Say that a group sends float32 from now on, and why."""
    sys.stderr.write(
        f"fullwire: group {group} sends float32 from now on: {after} lost more than "
        f"{packing.most_error:g} of its squared sum ({ERROR_VARIABLE})\n"
    )


def agreed(trials: Any, workers: int, links: Links) -> Wire:
    """Return the choice that the environment asks for; fail if ranks differ."""
    name = os.environ.get(WIRE_VARIABLE) or "float32"
    codes = {**FORMATS, AUTO: len(FORMATS)}
    if name not in codes:
        raise TransportError(f"{WIRE_VARIABLE}: expected {_listed(codes)}, got {name!r}")
    try:
        most_error = asked_error()
    except UsageError as error:
        raise TransportError(str(error)) from None
    code, limit = float(codes[name]), most_error or 0.0
    most, least, most_limit, least_limit = trials.most(code, -code, limit, -limit)
    if most != -least:
        raise TransportError(
            f"{WIRE_VARIABLE}: expected the same on every rank, got "
            f"{_name_of(-least, codes)} and {_name_of(most, codes)}"
        )
    if most_limit != -least_limit:
        raise TransportError(
            f"{ERROR_VARIABLE}: expected the same on every rank, got "
            f"{-least_limit:g} and {most_limit:g}"
        )
    chosen = Wire(workers, links, name, most_error=most_error)
    if name == AUTO and workers > 1:
        chosen.automatic_from = measured(trials)
    return chosen


def measured(trials: Any) -> float:
    """Return the bytes from which packing is faster on these links, by trying it."""
    faster_from = math.inf
    for tensor_bytes in reversed(_TRIED_BYTES):
        plain_s, packed_s = trials.most(
            trials.allreduce_s(tensor_bytes, None),
            trials.allreduce_s(tensor_bytes, FORMATS[_AUTOMATIC]),
        )
        if packed_s > _GAIN * plain_s:
            break
        faster_from = tensor_bytes
    return faster_from


@contextmanager
def _restoring(group: Any, before: Wire) -> Iterator[None]:
    try:
        yield
    finally:
        group.wire = before


def wire(
    name: str,
    *,
    group: Any = None,
    parameters: Iterable[Any] | None = None,
    least: str | int | None = None,
    max_error: float | None = None,
    packs_small: bool = False,
) -> Any:
    """Choose how a group's float32 tensors travel from now on; every rank has to call it.

    `name` is float32, bf16, fp16, int8 or auto, and `group` the default group unless given. With
    `parameters`, the choice holds for tensors with as many numbers as one of them. Smaller tensors
    than `least` (64 KiB) travel as float32. The group falls back to float32 if a relative squared
    error is above `max_error`. In DDP's buckets norm layers, biases and gradients with fewer than
    1024 numbers travel as float32, unless `packs_small`. In a `with` statement the choice ends with
    the block.

        with fw.wire("bf16", parameters=model.parameters()):
            loss.backward()
    """
    from torch.distributed import group as groups

    from fullwire.transport.small_gradients import read_buckets

    codes = {**FORMATS, AUTO: len(FORMATS)}
    if name not in codes:
        raise UsageError(f"wire: expected {_listed(codes)}, got {name!r}")
    group = groups.WORLD if group is None else group
    before = getattr(group, "wire", None)
    if not isinstance(before, Wire):
        raise UsageError('wire: expected a group of the backend "fullwire", which is not this one')
    after = replace(
        before,
        least_bytes=before.least_bytes if least is None else int(size_bytes(least, "least")),
        most_error=before.most_error if max_error is None else error_limit(max_error, "max_error"),
        packs_small=packs_small,
    )
    if parameters is None:
        after.name = name
    else:
        after.by_numbers = before.by_numbers | {parameter.numel(): name for parameter in parameters}
    if name == AUTO and after.automatic_from is None and after.workers > 1:
        # Kept with the group's choice before, so that the next block need not try again.
        before.automatic_from = after.automatic_from = measured(group.trials)
    group.wire = after
    read_buckets(group)
    return _restoring(group, before)


def _name_of(code: float, codes: dict[str, int]) -> str:
    known = {number: name for name, number in codes.items()}
    return known.get(int(code), f"a format that rank's version alone knows ({code:g})")


def _listed(codes: Iterable[str]) -> str:
    *names, last = codes
    return f"{', '.join(names)} or {last}"
