"""Accelerators as large models see them: peaks, memory, and the share that operations reach.

`accelerator("H100-96GB-HBM2e-500W")` recognises a device as people and logs write it: its family,
its memory, and a power limit below the usual one. Memory that no such device has is ignored.
`accelerators.toml` holds the figures with their sources. A device that nobody measured takes the
shares of its nearest family, with a wider spread.
A file that `fullwire bench device` wrote is opened by its path.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, cast

from fullwire.errors import UsageError
from fullwire.files import opened
from fullwire.units import nearest_name, shown
from fullwire.workloads.layout import Precision

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # the same, before Python had it

AcceleratorLike: TypeAlias = "str | Path | Accelerator"
MOST_BYTES = 64 * 1024
# A device of 80 GB has 79.6 to 80 GiB: makers count its chips in binary units, and keep a little.
_GIB_OF_GB = 0.993 * 2**30
_TABLE = Path(__file__).parent / "accelerators.toml"
TYPES = ("fp4", "fp8", "bf16", "fp16", "fp32")  # the narrowest first
# A slice of a device, as CUDA names it: "A100 MIG 3g.20gb". "MIG off" is a whole device.
SLICE = re.compile(
    r"(?<!\d)\dg\.\d+gb"
    r"|(?<![a-z])(?<!no )(?<!no-)(?<!non-)(?<!not )(?<!without )mig(?![a-z])"
    r"(?!\W*(?:mode\W*)?(?:is )?(?:off|disabled|no|none|not|false|0)\b)",
    re.IGNORECASE,
)
_TILE_SHARES = 4  # the classes of tiles, see operations.py


@dataclass(frozen=True, slots=True)
class _Bounds:
    """What a field may hold: beyond, it is no device, and its times may not be numbers."""

    least: float
    most: float
    is_whole: bool = False

    def check(self, value: object, place: str) -> None:
        """Refuse what is no number between both; `nan` is none."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_within = is_number and self.least <= cast(float, value) <= self.most
        if not is_within or (self.is_whole and cast(float, value) % 1):
            kind = "a whole number" if self.is_whole else "a number"
            raise UsageError(
                f"{place}: expected {kind} from {self.least:g} to {self.most:g}, got {shown(value)}"
            )


_SHARE, _PROCESSORS = _Bounds(1e-6, 1), _Bounds(1, 1e6, is_whole=True)
_SPREAD = _Bounds(0, 10)
# What [device] of a file states, with FLOP/s and bytes a second, and [[device]] of the table.
_DEVICE = {
    "memory_bytes": _Bounds(1, 1e15, is_whole=True),
    "memory_bytes_per_s": _Bounds(1, 1e18),
    "processors": _PROCESSORS,
}
_ENTRY = {
    "memory_gb": _Bounds(1, 1e6),
    "memory_tb_per_s": _Bounds(1e-6, 1e6),
    "processors": _PROCESSORS,
    "power_w": _Bounds(1, 1e6),
}
_PEAK_FLOPS_PER_S, _PEAK_TFLOPS_PER_S = _Bounds(1, 1e21), _Bounds(1e-6, 1e9)
_MORE = {"more_spread": _SPREAD, "more_clock": _Bounds(0.1, 10)}  # that an entry may state
_MEASURED = {"memory_share": _SHARE, "spread": _SPREAD}
_PRODUCTS = {
    # A device may be somewhat quicker than the shape that told its peak.
    "peak_share": _Bounds(1e-6, 1.5),
    "ramp": _Bounds(0, 1e6),
    "start_us": _Bounds(0, 1e9),
    "memory_share": _SHARE,
    "tail": _Bounds(0, 1),
    "cast_share": _SHARE,
}
_ATTENTION = {
    # Twice the peak is usual, as keys that a mask hides are counted.
    **dict.fromkeys(("forward", "backward", "wide_forward", "wide_backward"), _Bounds(1e-6, 10)),
    **dict.fromkeys(("forward_ns", "backward_ns"), _Bounds(0, 1e9)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """How much of a device's peak matrix products reach; operations.py says how it is used."""

    peak_share: float  # of tiles of 256 x 128
    tile_shares: tuple[float, ...]  # of smaller tiles, relative to that
    ramp: float  # inner products that a tile's start costs
    start_us: float
    memory_share: float
    tail: float  # 1: a wave that is not full takes as long as a full one; 0: it does not
    cast_share: float = 0.35  # of the memory rate, in casting to 8 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Fused attention: shares of the peak with each key counted, and the time of one long row."""

    forward: float
    backward: float
    wide_forward: float  # heads that are wider than 128
    wide_backward: float
    forward_ns: float  # for each key of a row
    backward_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """A device with its memory and its power limit."""

    name: str
    title: str
    family: str
    memory_bytes: int
    is_memory_stated: bool
    other_memory_gb: int | None = None  # that the name states, and no such device has
    memories_gb: tuple[int, ...] = ()  # that devices of the family come with
    memory_bytes_per_s: float
    processors: int
    power_share: float  # of the usual power; below 1 where a limit is stated
    peaks: tuple[tuple[str, float], ...]  # FLOP/s by type
    products: tuple[tuple[str, Products], ...]
    attention: Attention
    memory_share: float
    spread: float  # of the logarithm of an operation's time
    is_measured: bool  # this family itself, not its nearest one

    @property
    def memory_differs(self) -> bool:
        """Return whether devices of the family have unlike memories, not one that is told twice."""
        return len(self.memories_gb) > 1 and max(self.memories_gb) > 1.1 * min(self.memories_gb)

    def peak_flops_per_s(self, precision: str) -> float:
        """Return the dense peak of a type; a type that the device lacks runs in the next wider."""
        peaks = dict(self.peaks)
        return peaks[self.arithmetic(precision)]

    def arithmetic(self, precision: str) -> str:
        """Return the type in which matrix products of a plan's precision run."""
        peaks = dict(self.peaks)
        wanted = {"mxfp8": "fp8", "nvfp4": "fp4"}.get(precision, precision)
        if wanted not in TYPES:
            raise UsageError(f"precision: expected one of {', '.join(TYPES)}, got {precision!r}")
        if wanted == "fp16" and "bf16" in peaks and "fp16" not in peaks:
            return "bf16"
        for kind in TYPES[TYPES.index(wanted) :]:
            if kind in peaks:
                return kind
        raise UsageError(f"device {self.name}: expected {' or '.join(peaks)}, got {precision!r}")

    def runs_as(self, precision: Precision) -> Precision:
        """Return the precision that stands for one that the device lacks.

        Formats with a scale for each block came with products in 4 bits.
        """
        has_blocks = "fp4" in dict(self.peaks)
        kind = self.arithmetic(precision)
        if kind == "fp4" or (kind == "fp8" and precision == "mxfp8" and has_blocks):
            return precision
        return cast(Precision, kind)

    def products_of(self, precision: str) -> Products:
        """Return the fit for a type, or for the measured type that is nearest to it."""
        fits = dict(self.products)
        is_narrow = self.arithmetic(precision) in ("fp8", "fp4")
        return fits.get("fp8" if is_narrow else "bf16", fits["bf16"])


def accelerator(given: AcceleratorLike) -> Accelerator:
    """Take an accelerator by its name, or from a file of `fullwire bench device`.

    - `given`: a name such as `h100`, `A100-SXM-40GB` or `H100-96GB-HBM2e-500W`, or a path.
    """
    if isinstance(given, Accelerator):
        return given
    text = str(given)
    if text.endswith(".toml"):
        return _from_file(Path(text))
    if SLICE.search(text):
        raise UsageError(
            "device: expected a whole device, or a file of `fullwire bench device` for a part of "
            f"one, got {shown(text)}"
        )
    found = _family(text)
    if found is None:
        raise UsageError(
            f"device: expected one of {', '.join(accelerator_names())}, or a file of `fullwire "
            f"bench device`, got {shown(text)}{nearest_name(text, accelerator_names())}"
        )
    return _recognised(found, text)


def family_in(text: str) -> str:
    """Return the family whose name a text holds, such as `H100`; "" if it holds none."""
    found = _family(text)
    return "" if found is None else str(found["name"]).upper()


def accelerator_names() -> tuple[str, ...]:
    """List the known families."""
    return tuple(_document()["devices"])


def _recognised(device: Mapping[str, Any], text: str) -> Accelerator:
    made, plain = _made(device), text.lower()
    power = re.search(r"(\d{3,4})\s*w\b", plain)
    stated = _memory_in(plain, device["memories_gb"])
    other = None
    # CUDA names a GH200 after the memory of its processor: "NVIDIA GH200 480GB" has 96 GB of HBM.
    if stated in device.get("host_memories_gb", ()) or (
        stated is not None and stated > 1.1 * max(device["memories_gb"])
    ):
        other, stated = stated, None
    figures: dict[str, Any] = {}
    for form in device.get("forms", ()):
        memory_gb = stated or figures.get("memory_gb")
        if form["pattern"] in plain if "pattern" in form else form["of_memory_gb"] == memory_gb:
            figures |= form
    stated = stated or figures.get("memory_gb")
    power_w = float(power[1]) if power else figures.get("power_w", device["power_w"])
    peak_share = figures.get("peak_share", 1.0)
    return replace(
        made,
        name=text,
        memory_bytes=int((stated or device["memory_gb"]) * _GIB_OF_GB),
        is_memory_stated=stated is not None or len(device["memories_gb"]) == 1,
        other_memory_gb=other,
        memory_bytes_per_s=1e12 * figures.get("memory_tb_per_s", device["memory_tb_per_s"]),
        power_share=min(1.0, power_w / device["power_w"]),
        peaks=tuple((kind, peak_share * rate) for kind, rate in made.peaks),
    )


# "40/80GB" and "40 or 80 GB" leave the memory open, "H100/80GB" states it.
_EITHER = re.compile(r"(?<![a-z0-9])\d{2,3}\s*(?:gi?b?)?\s*(?:/|or\b)\s*\d{2,3}\s*gi?b")


def _memory_in(plain: str, known_gb: Sequence[int]) -> int | None:
    """Return the memory that a name states; "40G" is one where such a device has it."""
    if _EITHER.search(plain):
        return None
    memory = re.search(r"(\d{2,3})\s*gi?b(?!\d)", plain)  # "72 GB200" are 72 devices
    if memory is not None:
        return int(memory[1])
    short = [int(size) for size in re.findall(r"(\d{2,3})\s*g(?![a-z0-9])", plain)]
    return next((size for size in short if size in known_gb), None)


def _made(device: Mapping[str, Any]) -> Accelerator:
    measured = _document()["measured"]
    fit = measured[device.get("like", device["name"])]
    products = tuple(
        (kind, Products(**{**fit[kind], "tile_shares": tuple(fit[kind]["tile_shares"])}))
        for kind in ("bf16", "fp8")
        if kind in fit
    )
    clock = device.get("more_clock", 1.0)
    products = tuple(
        (kind, replace(reached, peak_share=clock * reached.peak_share))
        for kind, reached in products
    )
    return Accelerator(
        name=device["name"],
        title=device["title"],
        family=device["name"],
        memory_bytes=int(device["memory_gb"] * _GIB_OF_GB),
        is_memory_stated=len(device["memories_gb"]) == 1,
        memories_gb=tuple(device["memories_gb"]),
        memory_bytes_per_s=device["memory_tb_per_s"] * 1e12,
        processors=device["processors"],
        power_share=1.0,
        peaks=tuple((kind, rate * 1e12) for kind, rate in device["peaks"].items()),
        products=products,
        attention=Attention(**fit["attention"]),
        memory_share=fit["memory_share"],
        spread=fit["spread"] + device.get("more_spread", 0.0),
        is_measured="like" not in device,
    )


@cache
def _document() -> Mapping[str, Mapping[str, Any]]:
    document = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
    for number, fit in enumerate(document["measured"], 1):
        _check_fit(fit, number)
    measured = {fit["family"]: fit for fit in document["measured"]}
    for number, device in enumerate(document["device"], 1):
        _check_entry(device, number)
        fit = device.get("like", device["name"])
        if fit not in measured:
            raise UsageError(
                f"{_TABLE}: [[device]] {device['name']}: expected like = one of "
                f"{', '.join(measured)}, or [[measured]] with family = {shown(fit)}"
            )
    return {
        "measured": measured,
        "devices": {device["name"]: device for device in document["device"]},
    }


def _check_states(table: Mapping[str, Any], names: Iterable[str], place: str) -> None:
    """Refuse a table that lacks fields, and name all of them."""
    if not isinstance(table, Mapping):
        raise UsageError(f"{place}: expected a table of fields, got {shown(table)}")
    missing = [name for name in names if name not in table]
    if missing:
        raise UsageError(f"{place}: these fields are missing: {', '.join(missing)}")


def _check_fields(
    table: Mapping[str, Any],
    numbers: Mapping[str, _Bounds],
    place: str,
    *,
    texts: Sequence[str] = (),
    others: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> None:
    """Refuse a table that lacks a field, holds an unknown one, or a number that cannot be."""
    known = (*texts, *numbers, *others)
    _check_states(table, [name for name in known if name not in optional], place)
    for name, value in table.items():
        if name not in known:
            near = get_close_matches(name, known, n=1)
            meant = f"is {near[0]} meant?" if near else f"expected {', '.join(known)}"
            raise UsageError(f"{place}: {shown(name)[1:-1]}: no such field, {meant}")
        if name in numbers:
            numbers[name].check(value, f"{place}: {name}")
        elif name in texts and not (
            isinstance(value, str) and value.isprintable() and value.strip()
        ):
            raise UsageError(f"{place}: {name}: expected a line of text, got {shown(value)}")


def _check_peaks(peaks: Mapping[str, Any], bounds: _Bounds, place: str) -> None:
    _check_fields(peaks, dict.fromkeys(TYPES, bounds), place, optional=TYPES)
    if not peaks:
        raise UsageError(f"{place}: expected one of {', '.join(TYPES)}, got none")


def _check_products(fit: Mapping[str, Any], place: str) -> None:
    _check_fields(fit, _PRODUCTS, place, others=("tile_shares",), optional=("cast_share",))
    shares = fit["tile_shares"]
    if not isinstance(shares, list) or len(shares) != _TILE_SHARES:
        raise UsageError(
            f"{place}: tile_shares: expected a list of {_TILE_SHARES} numbers, got {shown(shares)}"
        )
    for share in shares:
        _SHARE.check(share, f"{place}: tile_shares")


def _check_file(held: Mapping[str, Any], path: Path) -> None:
    """Refuse a measured device's file with a field that is missing, unknown or cannot be."""
    _check_fields(held, {}, str(path), others=("device", "measured"))
    place = f"{path}: [device]"
    _check_fields(held["device"], _DEVICE, place, texts=("name", "title"), others=("peaks",))
    _check_peaks(held["device"]["peaks"], _PEAK_FLOPS_PER_S, f"{place}: peaks")
    fit, place = held["measured"], f"{path}: [measured"
    _check_fields(fit, _MEASURED, f"{place}]", others=("products", "attention"))
    _check_products(fit["products"], f"{place}.products]")
    _check_fields(fit["attention"], _ATTENTION, f"{place}.attention]")


def _check_fit(fit: Mapping[str, Any], number: int) -> None:
    """Refuse a [[measured]] of the built-in table as a file is refused."""
    place = f"{_TABLE}: [[measured]] {fit.get('family', f'number {number}')}"
    others = ("bf16", "fp8", "attention")
    _check_fields(fit, _MEASURED, place, texts=("family",), others=others, optional=("fp8",))
    for kind in ("bf16", "fp8"):
        if kind in fit:
            _check_products(fit[kind], f"{place}: {kind}")
    _check_fields(fit["attention"], _ATTENTION, f"{place}: attention")


def _check_entry(device: Mapping[str, Any], number: int) -> None:
    """Refuse a [[device]] of the built-in table as a file is refused."""
    place = f"{_TABLE}: [[device]] {device.get('name', f'number {number}')}"
    may = ("like", "aliases", "forms", "host_memories_gb", "slices")
    _check_fields(
        device,
        {**_ENTRY, **_MORE},
        place,
        texts=("name", "title"),
        others=("memories_gb", "peaks", *may),
        optional=(*may, *_MORE),
    )
    _check_peaks(device["peaks"], _PEAK_TFLOPS_PER_S, f"{place}: peaks")
    by = ("pattern", "of_memory_gb")
    stated = {**_ENTRY, "peak_share": _SHARE}
    for form in device.get("forms", ()):
        _check_fields(form, stated, f"{place}: forms", others=by, optional=(*by, *stated))


# Before and behind the name of a family. It is a word, so `lab-200g` holds no B200. It may follow a
# count or a machine (`8xh100`, `dgxb200x8`), and a form may follow it (`a100sxm4`, `gb200nvl72`).
_BEFORE = r"(?:^|[^a-z0-9]|\d+x|x\d+|dgx|hgx)"
_BEHIND = r"(?=s?(?:$|[^a-z0-9])|sxm|pcie|nvl|hbm|x\d)"


def _family(text: str) -> Mapping[str, Any] | None:
    """Find the family whose name a text holds; of "GB200/B200" the first and longest."""
    best: tuple[int, int, Mapping[str, Any]] | None = None
    for device in _document()["devices"].values():
        # A hyphen of the table may be another mark in the text, or none.
        patterns = [
            f"{_BEFORE}({re.escape(spelling)}){_BEHIND}".replace(r"\-", "[^a-z0-9]?")
            for spelling in (device["name"], *device.get("aliases", ()))
        ]
        if "slices" in device:  # `v4-128` is a slice of TPUs, `site-v4-128` is not
            patterns.append(rf"^({device['slices']})-\d+$")
        for pattern in patterns:
            found = re.search(pattern, text.lower())
            if found is None:
                continue
            place, length = found.start(1), len(found[1])
            if best is None or (place, -length) < best[:2]:
                best = (place, -length, device)
    return None if best is None else best[2]


def _from_file(path: Path) -> Accelerator:
    with opened(path) as file:
        content = file.read(MOST_BYTES + 1)
    try:
        held = tomllib.loads(content[:MOST_BYTES].decode())
        _check_file(held, path)
        device, fit = held["device"], held["measured"]
        return Accelerator(
            name=device["name"],
            title=device["title"],
            family=device["name"],
            memory_bytes=int(device["memory_bytes"]),
            is_memory_stated=True,
            memory_bytes_per_s=float(device["memory_bytes_per_s"]),
            processors=int(device["processors"]),
            power_share=1.0,
            peaks=tuple((kind, float(rate)) for kind, rate in device["peaks"].items()),
            products=(
                (
                    "bf16",
                    Products(
                        **{**fit["products"], "tile_shares": tuple(fit["products"]["tile_shares"])}
                    ),
                ),
            ),
            attention=Attention(**fit["attention"]),
            memory_share=float(fit["memory_share"]),
            spread=float(fit["spread"]),
            is_measured=True,
        )
    except (ValueError, RecursionError) as error:  # no text, or no TOML
        raise UsageError(
            f"{path}: expected a device as `fullwire bench device` writes it: {error!r}"
        ) from None
