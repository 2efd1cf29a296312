"""Conditions as people type them, read as values: one or many, text with units or numbers."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from fullwire.clusters.cluster import Cluster
from fullwire.compression.compressor import Compressor, parse_codec
from fullwire.compression.method import FLOAT_BYTES
from fullwire.errors import UsageError
from fullwire.simulation.conditions import CHANGES, Changes
from fullwire.units import NO_NUMBER, NUMBER, bits_per_second, count, ratio, seconds, shown, whole

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from fullwire.answers.opening import RunLike
    from fullwire.compression.codec import Cost

Value = TypeVar("Value")
Record = TypeVar("Record", bound="DataclassInstance")
Question = TypeVar("Question", bound=Callable[..., Any])
OneOrMany: TypeAlias = Any  # a scalar, text with commas between values, a sequence, an array

UNCOMPRESSED = "none"
PLACEMENTS = ("packed", "scattered")
MOST_VALUES = 1_000_000  # of one condition: a generator may never end
# A sign, or a word in any script that is no number.
_LIKE_A_METRIC = re.compile(rf"[<>=\u2264\u2265]|^(?!\s*{NO_NUMBER}\s*$)\s*[^\W\d]")
_PRICE = re.compile(
    rf"\s*([A-Za-z]{{3}}|[$€£¥])?\s*({NUMBER})\s*([A-Za-z]{{3}}|[$€£¥])?/device-hour\s*"
)


@dataclass(frozen=True, slots=True)
class Price:
    """The cost of a device in an hour, in the user's currency."""

    amount: float
    currency: str = ""

    def show(self, device_hours: float) -> str:
        """Return the cost of some device-hours in words."""
        cost = self.amount * device_hours
        return f"{cost:{',.2f' if cost >= 1 else '.3g'}} {self.currency}".strip()


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Asked:
    """A question about a target: a metric with its value, or else a scaling factor."""

    target: str | float | None = None
    global_batch: OneOrMany = None
    curve: RunLike | Sequence[RunLike] = ()
    recorded_batch: OneOrMany = None
    critical_batch: float | None = None
    price: str | float | None = None

    def __post_init__(self) -> None:
        if self.is_metric:
            return
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        target = values.pop("target")
        given = [
            name.replace("_", " ")
            for name, value in values.items()
            if not (value is None or (isinstance(value, tuple | list) and not value))
        ]
        if given:
            got = "" if target is None else f", got {shown(target)}"
            raise UsageError(
                f"{', '.join(given)}: expected a metric as the target with "
                f"{'it' if len(given) == 1 else 'them'}, like --target 'loss<=0.3'{got}"
            )

    @property
    def is_metric(self) -> bool:
        """Whether the target is a metric with its value, or was meant as one."""
        return isinstance(self.target, str) and _LIKE_A_METRIC.search(self.target) is not None


def arguments_of(*records: type[DataclassInstance]) -> Callable[[Question], Question]:
    """Show the fields of these records as arguments of a question, which takes them by any name.

    So a condition stands in one place, and `help()`, notebooks and the documentation still list it.
    """

    def give(question: Question) -> Question:
        signature = inspect.signature(question)
        *own, others = signature.parameters.values()
        keyword = inspect.Parameter.KEYWORD_ONLY
        named = [
            inspect.Parameter(field.name, keyword, default=field.default, annotation=field.type)
            for record in records
            for field in fields(record)
        ]
        whole = signature.replace(parameters=[*own, *named, others])
        question.__signature__ = whole  # type: ignore[attr-defined]  # read by inspect
        return question

    return give


def taken(record: type[Record], given: dict[str, OneOrMany]) -> Record:
    """Take the arguments that make a record out of those that were given."""
    names = [field.name for field in fields(record) if field.name in given]
    return record(**{name: given.pop(name) for name in names})


def several(given: OneOrMany, read: Callable[[Any], Value]) -> tuple[Value, ...]:
    """Read one value or many; text may hold many, with commas between them."""
    return tuple(read(value) for value in _each(given))


def worker_count(value: Any) -> int:
    """Read a number of workers."""
    return count(value, "workers")


def is_scattered(cluster: Cluster | None, placement: str) -> bool:
    """Read the placement of ranks: packed node by node, or scattered over the leaves."""
    if placement not in PLACEMENTS:
        raise UsageError(f"placement: expected {' or '.join(PLACEMENTS)}, got {placement!r}")
    if placement == "scattered" and (cluster is None or not cluster.leaves):
        raise UsageError("placement: ranks are scattered over leaves, expected a cluster with some")
    return placement == "scattered"


def device_order(given: OneOrMany) -> tuple[int, ...]:
    """Read the device of each rank."""
    devices = []
    for value in _each(given):
        number = whole(value)
        if number is None or number < 0:
            raise UsageError(f"order: expected devices, counted from 0, got {shown(value)}")
        devices.append(number)
    return tuple(devices)


def read_price(given: str | float | None) -> Price | None:
    """Read '2.10/device-hour' or '2.10 EUR/device-hour'; a number has no currency."""
    if given is None:
        return None
    if not isinstance(given, str):
        return Price(ratio(given, "price"))
    match = _PRICE.fullmatch(given)
    if match is None or not 0 < float(match[2]) < math.inf or (match[1] and match[3]):
        raise UsageError(
            "price: expected an amount with its unit, like 2.10/device-hour or "
            f"'2.10 EUR/device-hour', got {shown(given)}"
        )
    return Price(float(match[2]), match[1] or match[3] or "")


def asked_changes(
    where: str, given: Mapping[str, OneOrMany], *records: type[DataclassInstance]
) -> Changes:
    """Read the conditions that change a step, by the names of their options.

    The fields of `records` were read before; a refusal names them too.
    """
    for name in given:
        if name not in CHANGES:
            known = [field.name for record in records for field in fields(record)]
            raise UsageError(
                f"{where}: expected conditions among {', '.join([*known, *CHANGES])}, got {name!r}"
            )
    asked = {
        change.axis: several(given[name], change.read)
        for name, change in CHANGES.items()
        if given.get(name) is not None
    }
    for axis, values in asked.items():
        if not values:
            raise UsageError(f"{axis}: expected at least one value")
    return asked


def rate(value: Any) -> float:
    """Read a bandwidth."""
    return bits_per_second(value, "bandwidth")


def looking_s(given: str | float, most_s: float = math.inf, *, what: str = "seconds") -> float:
    """Read how long to look: "30s" or a number of seconds, without an end where that may be."""
    is_endless = not isinstance(given, str) and given == math.inf
    time_s = math.inf if is_endless else seconds(given, f"watch: {what}")
    if not 0 < time_s <= most_s:
        most = f", {most_s:g} at most" if most_s < math.inf else ""
        raise UsageError(f"watch: expected {what} above 0{most}, got {shown(given)}")
    return time_s


def latency(value: Any) -> float:
    """Read a latency."""
    return seconds(value, "latency")


def compressors(
    compression: OneOrMany | None,
    codec: OneOrMany | None,
    *,
    on_gpu: bool = False,
    models: Sequence[Sequence[int]] = (),
    costs: Mapping[str, Cost] | None = None,
) -> tuple[Compressor, ...]:
    """Read free ratios and names of codecs, then codecs by their figures.

    With `none`, and without any of them, the gradients are sent uncompressed. `models` has the
    bytes of each run's gradients, `costs` those that were measured for codecs by name.
    """
    from fullwire.compression.codec import CODECS, parse_choice  # here: collectives have none

    def read(value: Any) -> Compressor:
        if value == UNCOMPRESSED:
            return Compressor(ratio=1)
        if not (isinstance(value, str) and value[:1].isalpha()):
            return Compressor(ratio=ratio(value, "compression"))
        if value.partition(":")[0] not in CODECS:
            known = ", ".join(CODECS)
            raise UsageError(
                f"compression: expected a ratio such as 4, {UNCOMPRESSED}, or a codec among "
                f"{known}, got {shown(value)}"
            )
        choice = parse_choice(value)
        if costs and str(choice) not in costs:
            raise UsageError(
                f"codec costs: expected those of {choice}, got those of {', '.join(costs)}"
            )
        cost = (costs or {}).get(str(choice))
        ratios = {
            choice.compressor(on_gpu=on_gpu, sizes=[size // FLOAT_BYTES for size in sizes]).ratio
            for sizes in models
        }
        if choice.codec.by_shape and len(ratios) > 1:
            raise UsageError(
                f"compression: the bytes of {choice} depend on the gradients: expected one run, or "
                f"runs with the same gradients, got {len(models)} runs"
            )
        found = choice.compressor(on_gpu=on_gpu, cost=cost)
        return replace(found, ratio=ratios.pop()) if choice.codec.by_shape and ratios else found

    named = () if compression is None else several(compression, read)
    if compression is not None and not named:
        raise UsageError("compression: expected at least one value")
    is_one = codec is None or isinstance(codec, str | Compressor)
    codecs = [] if codec is None else [codec] if is_one else _each(codec)
    costly = tuple(
        asked if isinstance(asked, Compressor) else parse_codec(str(asked)) for asked in codecs
    )
    return named + costly or (Compressor(ratio=1),)


def _each(given: OneOrMany) -> Iterable[Any]:
    if isinstance(given, str):
        return [part.strip() for part in given.split(",")]
    if isinstance(given, bytes | bytearray | memoryview):  # they are text, and hold no numbers
        return [given]
    if hasattr(given, "tolist"):  # an array, or one number of one
        given = given.tolist()
    # The reader of one value refuses a mapping, whose keys would pass for values.
    if not isinstance(given, Iterable) or isinstance(given, Mapping):
        return [given]
    values = list(islice(given, MOST_VALUES + 1))
    if len(values) > MOST_VALUES:
        raise UsageError(f"expected at most {MOST_VALUES:,} values of one condition")
    return values


def spread(values: Sequence[float], points: int) -> tuple[float, ...]:
    """Return values between the least and the largest, with equal ratios between neighbours."""
    return tuple(np.geomspace(min(values), max(values), points).tolist())
