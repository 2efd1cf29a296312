"""Codecs by name, such as `fp16` or `powersgd:rank=2`: their bytes, their costs, their work.

A codec is described once. Predictions ask it for bytes and costs, and a job asks it for the method
that packs real gradients.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

from fullwire.compression.compressor import Combining, Compressor, MoreSteps
from fullwire.compression.method import FLOAT_BYTES, Method, Shape
from fullwire.errors import DamagedInput, UsageError
from fullwire.files import opened
from fullwire.registry import Registry
from fullwire.units import shown

# About 200 calls of torch for a bucket, the small sum in float32, and the wake-ups between threads
# (validation/codec_steps.py; the cells that chose it).
HOOK_S = 1.4e-3
_HOOK = "fullwire.compress("
_USUAL_VALUES = 2560**2  # In a bucket of 25 MiB.
_LARGEST_VECTOR = 4096  # Values: biases and norms of usual models have fewer.


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """How fast one kind of device packs and unpacks, in bits of the uncompressed side a second."""

    encode_bps: float
    decode_bps: float
    source: str  # "measured on ..." or "assumed, not measured: ..."
    is_measured: bool = True
    work_per_byte: float = 1.0  # of sending and adding a compressed byte, relative to a float32's


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A setting of a codec, as `rank` in `powersgd:rank=2`."""

    name: str
    usual: Any
    expected: str  # "a whole number from 1 to 64"
    read: Callable[[str], Any]  # Raises ValueError for text that it does not expect.
    meaning: str


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Codec:
    """A compressor that people name; an unknown cost is None, and predictions say so."""

    key: str
    label: str  # "gradients as float16"
    ratio: float  # With the usual options, and for large gradients.
    combining: Combining = "sum"
    on_processor: Cost | None = None
    on_gpu: Cost | None = None
    words: str = ""  # How it sends, and what it loses.
    options: tuple[Option, ...] = ()
    method: Callable[..., Method] | None = None  # By the options; None for predictions only.
    bucket_s: float = HOOK_S  # Of its hook on processors, beside packing: for each bucket.
    by_shape: bool = False  # Its ratio depends on the shapes of gradients.
    most_error: float | None = None  # The guard's limit, where nobody gives one.
    # By settings, as "rank=2": the least and most of small trainings (validation/compression.py,
    # and for PowerSGD validation/settings_to_target.py as well).
    steps: Mapping[str, MoreSteps] = field(default_factory=dict)

    def compressor(
        self,
        *,
        on_gpu: bool,
        name: str | None = None,
        ratio: float | None = None,
        cost: Cost | None = None,
    ) -> Compressor:
        """Return the figures for gradients that are packed on a processor or on a GPU.

        With other settings, it has another `name` and `ratio`. `cost` was measured by the caller.
        """
        where = "a GPU" if on_gpu else "a processor"
        settings = (name or "").partition(":")[2]
        cost = cost or (self.on_gpu if on_gpu else self.on_processor)
        known = Compressor(
            ratio=self.ratio if ratio is None else ratio,
            combining=self.combining,
            name=name or self.key,
            unmeasured_on=where,
            bucket_s=0.0 if on_gpu or self.method is None else self.bucket_s,
            steps=self.steps.get(settings),
        )
        if cost is None:
            return known
        return replace(
            known,
            encode_bps=cost.encode_bps,
            decode_bps=cost.decode_bps,
            work_per_byte=cost.work_per_byte,
            unmeasured_on="" if cost.is_measured else where,
            cost_source=cost.source,
        )


CODECS = Registry(Codec, "fullwire.compression.codecs", name="CODEC", group="fullwire.compressors")


@dataclass(frozen=True, slots=True)
class Choice:
    """A codec with its settings, as people write it: `powersgd:rank=2`."""

    codec: Codec
    settings: Mapping[str, Any] = field(default_factory=dict)  # Those that were given.

    def __str__(self) -> str:
        return ":".join(
            [self.codec.key, *(f"{name}={value:g}" for name, value in self.settings.items())]
        )

    def method(self) -> Method:
        """Return the work on real gradients, with state of its own."""
        if self.codec.method is None:
            raise UsageError(
                f"compression: {self.codec.key} has figures for predictions only, and no method "
                "that packs gradients"
            )
        usual = {option.name: option.usual for option in self.codec.options}
        return self.codec.method(**(usual | dict(self.settings)))

    def compressor(
        self, *, on_gpu: bool, sizes: Sequence[int] = (), cost: Cost | None = None
    ) -> Compressor:
        """Return the figures for gradients with so many values each.

        No run knows the shapes of its gradients. Large ones count as square matrices.
        """
        ratio = None
        if self.codec.method is not None and (sizes or self.settings):
            sizes = sizes or (_USUAL_VALUES,)
            ratio = self.ratio(square(size) for size in sizes)
        return self.codec.compressor(on_gpu=on_gpu, name=str(self), ratio=ratio, cost=cost)

    def ratio(self, shapes: Iterable[Shape]) -> float:
        """Return how many times fewer bytes the gradients of these shapes have when packed."""
        method, whole, packed = self.method(), 0, 0
        for shape in shapes:
            whole += FLOAT_BYTES * math.prod(shape)
            packed += method.wire_bytes(shape)
        return max(whole / packed, 1.0) if packed else 1.0


def square(size: int) -> Shape:
    """Return the shape that stands for a gradient with so many values."""
    side = math.isqrt(size)
    return (side, size // side) if size > _LARGEST_VECTOR else (size,)


def hook_of(choice: Choice) -> str:
    """Return the name of the DDP hook that sends with a codec."""
    return f"{_HOOK}{choice})"


def named_in(hook: str | None) -> str | None:
    """Return the codec in the name of a recorded hook; None if it is no hook of ours."""
    is_ours = hook is not None and hook.startswith(_HOOK)
    return hook[len(_HOOK) : -1] if hook is not None and is_ours else None


def parse_choice(text: str) -> Choice:
    """Read a codec's name, and its settings after colons."""
    key, *parts = text.strip().split(":")
    if key not in CODECS:
        known = ", ".join(CODECS)
        near = difflib.get_close_matches(key, list(CODECS), 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"compression: expected a codec among {known}, got {shown(key)}{meant}")
    codec = CODECS[key]
    by_name = {option.name: option for option in codec.options}
    settings: dict[str, Any] = {}
    for part in parts:
        name, _, value = part.partition("=")
        if name not in by_name or name in settings:
            known = "no options" if not by_name else f"NAME=VALUE, once, with {', '.join(by_name)}"
            raise UsageError(f"compression: {key}: expected {known}, got {shown(part)}")
        try:
            settings[name] = by_name[name].read(value)
        except ValueError:
            raise UsageError(
                f"compression: {key}: {name}: expected {by_name[name].expected}, got {shown(value)}"
            ) from None
    return Choice(codec, settings)


class _PrintedSpeeds(TypedDict):
    pack_bps: float
    unpack_bps: float


class _PrintedCodec(TypedDict):
    codec: str
    speeds: list[_PrintedSpeeds]


class _Printed(TypedDict):
    machine: str
    codecs: list[_PrintedCodec]


def costs_in(path: Path) -> dict[str, Cost]:
    """Read the costs of codecs from what `fullwire codecs --json` printed."""
    import msgspec  # here: few questions bring such a file

    try:
        with opened(path) as file:
            found = msgspec.json.decode(file.read(), type=_Printed)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedInput(
            str(path), f"expected the output of fullwire codecs --json: {error}"
        ) from None
    return {
        entry["codec"]: Cost(
            encode_bps=speeds["pack_bps"],
            decode_bps=speeds["unpack_bps"],
            source=f"measured on {found['machine']}",
        )
        for entry in found["codecs"]
        for speeds in entry["speeds"][:1]
        if min(speeds["pack_bps"], speeds["unpack_bps"]) > 0
    }
