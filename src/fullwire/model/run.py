"""The one type in the middle: a Run is what happened, or would happen, in a training job.

A recorded job, an imported trace, a capture and a simulation all end here; every analysis and every
view starts here. A run is built whole and then only read: its columns are read-only arrays, and
trimming or aligning makes a new run. Times are whole nanoseconds on one clock, sizes bytes, rates
bits per second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from fullwire.errors import UsageError
from fullwire.model.facts import FactValue, checked_facts

Whole: TypeAlias = NDArray[np.int64]
Real: TypeAlias = NDArray[np.float64]
Text: TypeAlias = NDArray[np.object_]
Lane: TypeAlias = Literal["compute", "communication", "input", "host"]
Origin: TypeAlias = Literal["measured", "imported", "modelled", "simulated"]
Basis: TypeAlias = Literal["measured", "modelled"]
AnyTable = TypeVar("AnyTable", bound="Table")

COLUMN_TYPES: Mapping[str, type[np.generic]] = {
    "Whole": np.int64,
    "Real": np.float64,
    "Text": np.object_,
}


@dataclass(frozen=True, eq=False, kw_only=True)
class Table:
    """Columns of one length. A subclass names them; `Whole`, `Real` and `Text` type them."""

    def __post_init__(self) -> None:
        for name, kind in self.column_types().items():
            object.__setattr__(self, name, _read_only(getattr(self, name), kind))
        lengths = {name: len(column) for name, column in self.columns().items()}
        if len(set(lengths.values())) > 1:
            raise UsageError(f"{type(self).__name__}: columns differ in length: {lengths}")

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    @classmethod
    def column_types(cls) -> dict[str, type[np.generic]]:
        """Return the array type of each column, in order."""
        # Annotations are text here (from __future__ import annotations): the alias's own name.
        return {column.name: COLUMN_TYPES[str(column.type)] for column in fields(cls)}

    @classmethod
    def empty(cls: type[AnyTable]) -> AnyTable:
        """Make a table without rows."""
        return cls(**{name: np.empty(0, kind) for name, kind in cls.column_types().items()})

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return the columns by name, in order."""
        return {column.name: getattr(self, column.name) for column in fields(self)}

    def rows(self: AnyTable, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> AnyTable:
        """Return a new table with the chosen rows: a mask, or row numbers in the order wanted."""
        return type(self)(**{name: column[chosen] for name, column in self.columns().items()})


@dataclass(frozen=True, eq=False, kw_only=True)
class Spans(Table):
    """Intervals of work. A host span named "step" marks the wall time of each step."""

    rank: Whole
    step: Whole
    lane: Text
    name: Text
    start_ns: Whole
    end_ns: Whole


@dataclass(frozen=True, eq=False, kw_only=True)
class Gradients(Table):
    """Gradients (or whole buckets, where only those are known) becoming ready."""

    rank: Whole
    step: Whole
    order: Whole
    bytes: Whole
    ready_ns: Whole


@dataclass(frozen=True, eq=False, kw_only=True)
class Collectives(Table):
    """Collectives, one row per rank; `bytes` is the payload of one rank before compression."""

    rank: Whole
    step: Whole
    sequence: Whole
    group: Text
    op: Text
    dtype: Text
    bytes: Whole
    issue_ns: Whole
    start_ns: Whole
    end_ns: Whole


@dataclass(frozen=True, eq=False, kw_only=True)
class Links(Table):
    """Samples of a network interface's counters."""

    host: Text
    interface: Text
    time_ns: Whole
    tx_bytes: Whole
    rx_bytes: Whole
    tx_packets: Whole
    rx_packets: Whole
    drops: Whole


@dataclass(frozen=True, eq=False, kw_only=True)
class Sockets(Table):
    """Samples of a TCP connection: totals since it opened, and its state at that moment."""

    host: Text
    flow: Text
    time_ns: Whole
    bytes_acked: Whole
    retransmits: Whole
    rtt_ns: Whole
    cwnd_packets: Whole
    delivery_rate_bps: Real
    busy_ns: Whole
    receiver_window_limited_ns: Whole
    send_buffer_limited_ns: Whole


@dataclass(frozen=True, eq=False, kw_only=True)
class Hosts(Table):
    """Samples of a host: one row per device (`cpu3`, `gpu0`) with its share in use and memory."""

    host: Text
    device: Text
    time_ns: Whole
    utilization: Real
    memory_bytes: Whole


@dataclass(frozen=True, eq=False, kw_only=True)
class Flows(Table):
    """What packets say: traffic from a source to a destination in one time bin."""

    source: Text
    destination: Text
    start_ns: Whole
    end_ns: Whole
    payload_bytes: Whole
    wire_bytes: Whole
    packets: Whole
    retransmits: Whole


TABLES: Mapping[str, type[Table]] = {
    "spans": Spans,
    "gradients": Gradients,
    "collectives": Collectives,
    "links": Links,
    "sockets": Sockets,
    "hosts": Hosts,
    "flows": Flows,
}


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a run comes from. `basis` is what its numbers rest on in the end."""

    origin: Origin
    source: str
    basis: Basis = "measured"


@dataclass(frozen=True, eq=False, kw_only=True)
class Run:
    """A training job as tables and facts; `missing` says, in sentences, what is not there."""

    provenance: Provenance
    facts: Mapping[str, FactValue] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    spans: Spans = field(default_factory=Spans.empty)
    gradients: Gradients = field(default_factory=Gradients.empty)
    collectives: Collectives = field(default_factory=Collectives.empty)
    links: Links = field(default_factory=Links.empty)
    sockets: Sockets = field(default_factory=Sockets.empty)
    hosts: Hosts = field(default_factory=Hosts.empty)
    flows: Flows = field(default_factory=Flows.empty)

    def __post_init__(self) -> None:
        object.__setattr__(self, "facts", checked_facts(self.facts))

    @property
    def complete(self) -> bool:
        """Whether nothing is known to be missing."""
        return not self.missing

    def tables(self) -> Iterator[tuple[str, Table]]:
        """Go through all tables with their names, the empty ones too."""
        return ((name, getattr(self, name)) for name in TABLES)


def _read_only(column: Any, kind: type[np.generic]) -> NDArray[Any]:
    array = np.asarray(column)
    if array.ndim != 1:
        raise UsageError(f"a column has one dimension, got {array.ndim}")
    if array.dtype != kind:
        if kind is np.int64 and array.size and array.dtype.kind not in "iu":
            raise UsageError(f"a column of whole numbers cannot hold {array.dtype}")
        array = array.astype(kind)
    # A view, so that the caller's own array stays as writable as it was.
    view = array.view()
    view.flags.writeable = False
    return view
