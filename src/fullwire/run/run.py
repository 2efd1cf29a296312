"""The one type in the middle: a Run is what happened, or would happen, in a training job.

A recorded job, an imported trace, a capture and a simulation all end here; every analysis and every
view starts here. A run is built whole and then only read: its columns are read-only arrays, and
trimming or aligning makes a new run. Times are whole nanoseconds on one clock, sizes bytes, rates
bits per second.

What a run holds can be written and read again: a column is of its type to the last value, and text
is text that a file can hold. Whatever is not is refused here, before an hour of recording is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from fullwire.errors import UsageError
from fullwire.run.facts import NO_FACTS, Facts
from fullwire.units import shown

Whole: TypeAlias = NDArray[np.int64]
Real: TypeAlias = NDArray[np.float64]
Text: TypeAlias = NDArray[np.object_]
Lane: TypeAlias = Literal["compute", "communication", "input", "host"]
Origin: TypeAlias = Literal["measured", "imported", "modelled", "simulated"]
Basis: TypeAlias = Literal["measured", "modelled"]
AnyTable = TypeVar("AnyTable", bound="Table")

SIZE_UNKNOWN = "unknown"  # the dtype of a collective whose bytes (then 0) a trace does not tell

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
            place = f"{type(self).__name__}.{name}"
            object.__setattr__(self, name, _read_only(place, getattr(self, name), kind))
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

    @classmethod
    def joined(cls: type[AnyTable], parts: Sequence[AnyTable]) -> AnyTable:
        """Return the rows of several tables, one after the other."""
        if len(parts) < 2:
            return parts[0] if parts else cls.empty()
        columns = [part.columns() for part in parts]
        return cls(
            **{
                name: np.concatenate([each[name] for each in columns])
                for name in cls.column_types()
            }
        )

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return the columns by name, in order."""
        return {column.name: getattr(self, column.name) for column in fields(self)}

    def rows(self: AnyTable, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> AnyTable:
        """Return a new table with the chosen rows: a mask, or row numbers in the order wanted.

        What is chosen from checked columns is not checked again.
        """
        table = object.__new__(type(self))
        for name, column in self.columns().items():
            kept = column[chosen]
            kept.flags.writeable = False
            object.__setattr__(table, name, kept)
        return table


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
class Carried(Table):
    """What a transport itself tells of a collective, one row per rank as in `collectives`.

    It took it up at `begun_ns`, had the first bytes of another rank at `heard_ns` and everything
    at `end_ns`; `reducing_ns` of that it added up.
    """

    rank: Whole
    step: Whole
    sequence: Whole
    group: Text
    begun_ns: Whole
    heard_ns: Whole
    end_ns: Whole
    reducing_ns: Whole
    sent_bytes: Whole


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
    """Samples of a TCP connection: totals since it opened, and its state at that moment.

    A flow is `local>remote`. A delivery rate is what the network carried, or, where
    `application_limited` is 1, no more than the program gave to send.
    """

    host: Text
    flow: Text
    time_ns: Whole
    bytes_acked: Whole
    retransmits: Whole
    rtt_ns: Whole
    cwnd_packets: Whole
    delivery_rate_bps: Real
    application_limited: Whole
    busy_ns: Whole
    receiver_window_limited_ns: Whole
    send_buffer_limited_ns: Whole


@dataclass(frozen=True, eq=False, kw_only=True)
class Hosts(Table):
    """Samples of a host: one row per device with its share in use, since its last row for `cpu3`.

    Memory is that of `gpu0` or of the host, whose device is `memory`; a processor has none: 0.
    """

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


@dataclass(frozen=True, eq=False, kw_only=True)
class Connections(Table):
    """What packets say of each direction of a connection: totals, and round trips.

    A round trip is from where it was captured to the receiver and back; 0 where none was timed.
    `rtt_long_ns` is one that 95 % do not exceed.
    """

    source: Text
    destination: Text
    start_ns: Whole
    end_ns: Whole
    payload_bytes: Whole
    wire_bytes: Whole
    packets: Whole
    retransmitted_bytes: Whole
    rtt_samples: Whole
    rtt_least_ns: Whole
    rtt_median_ns: Whole
    rtt_long_ns: Whole


UNREAD = "unread"


@dataclass(frozen=True, eq=False, kw_only=True)
class Messages(Table):
    """What a connection's direction carried of one collective, as a library's headers say.

    It began with a packet that asked for data or announced it; data followed from `first_ns` to
    `last_ns`, both 0 where there was none. `unread_bytes` came where no header could be read. Where
    there are no headers at all, a row is one message, which ended with a packet that was not full:
    its operation is UNREAD.
    """

    source: Text
    destination: Text
    op: Text
    sequence: Whole
    begin_ns: Whole
    first_ns: Whole
    last_ns: Whole
    payload_bytes: Whole
    unread_bytes: Whole
    messages: Whole


TABLES: Mapping[str, type[Table]] = {
    "spans": Spans,
    "gradients": Gradients,
    "collectives": Collectives,
    "carried": Carried,
    "links": Links,
    "sockets": Sockets,
    "hosts": Hosts,
    "flows": Flows,
    "connections": Connections,
    "messages": Messages,
}


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a run comes from. `basis` is what its numbers rest on in the end."""

    origin: Origin
    source: str
    basis: Basis = "measured"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("origin", self.origin, get_args(Origin)),
            ("basis", self.basis, get_args(Basis)),
        ):
            if not isinstance(value, str) or value not in known:
                raise UsageError(f"{name}: expected {' or '.join(known)}, got {shown(value)}")
        _refuse_other_than_text("source", [self.source])


@dataclass(frozen=True, eq=False, kw_only=True)
class Run:
    """A training job as tables and facts; `missing` says, in sentences, what is not there."""

    provenance: Provenance
    facts: Facts = NO_FACTS
    missing: tuple[str, ...] = ()
    spans: Spans = field(default_factory=Spans.empty)
    gradients: Gradients = field(default_factory=Gradients.empty)
    collectives: Collectives = field(default_factory=Collectives.empty)
    carried: Carried = field(default_factory=Carried.empty)
    links: Links = field(default_factory=Links.empty)
    sockets: Sockets = field(default_factory=Sockets.empty)
    hosts: Hosts = field(default_factory=Hosts.empty)
    flows: Flows = field(default_factory=Flows.empty)
    connections: Connections = field(default_factory=Connections.empty)
    messages: Messages = field(default_factory=Messages.empty)

    def __post_init__(self) -> None:
        if not isinstance(self.provenance, Provenance):
            raise UsageError(f"run: expected a Provenance, got {shown(self.provenance)}")
        if not isinstance(self.facts, Facts):
            raise UsageError(f"facts: expected Facts, got {shown(self.facts)}")
        if not isinstance(self.missing, tuple):
            raise UsageError(f"missing: expected a tuple of sentences, got {shown(self.missing)}")
        for name, table in self.tables():
            if not isinstance(table, TABLES[name]):
                raise UsageError(f"{name}: expected {TABLES[name].__name__}, got {shown(table)}")
        _refuse_other_than_text("missing", self.missing)

    @property
    def complete(self) -> bool:
        """Whether nothing is known to be missing."""
        return not self.missing

    def tables(self) -> Iterator[tuple[str, Table]]:
        """Go through all tables with their names, the empty ones too."""
        return ((name, getattr(self, name)) for name in TABLES)


def _read_only(place: str, column: Any, kind: type[np.generic]) -> NDArray[Any]:
    array = _of_kind(place, _one_dimension(place, column, kind), kind)
    # A view, so that the caller's own array stays as writable as it was.
    view = array.view()
    view.flags.writeable = False
    return view


def _one_dimension(place: str, column: Any, kind: type[np.generic]) -> NDArray[Any]:
    is_list_of_text = kind is np.object_ and not isinstance(column, np.ndarray)
    try:  # as objects, because numpy alone would turn the numbers among texts into text
        array = np.asarray(column, np.object_ if is_list_of_text else None)
    except ValueError:
        raise UsageError(f"{place}: expected a column, got rows of several lengths") from None
    if array.ndim != 1:
        raise UsageError(f"{place}: expected one dimension, got {array.ndim}")
    return array


def _of_kind(place: str, array: NDArray[Any], kind: type[np.generic]) -> NDArray[Any]:
    if not array.size:
        return array.astype(kind)
    if array.dtype.kind not in _TAKEN[kind]:
        raise UsageError(f"{place}: expected {_CALLED[kind]}, got a column of {array.dtype}")
    if kind is np.int64 and array.dtype.kind == "u" and array.max() > np.iinfo(np.int64).max:
        raise UsageError(f"{place}: expected whole numbers below 2^63, got {array.max()}")
    if kind is np.object_:
        _refuse_other_than_text(place, array.tolist())
    return array.astype(kind, copy=False)


_TAKEN: Mapping[type[np.generic], str] = {np.int64: "iu", np.float64: "fiu", np.object_: "OU"}
_CALLED: Mapping[type[np.generic], str] = {
    np.int64: "whole numbers",
    np.float64: "numbers",
    np.object_: "text",
}


def _refuse_other_than_text(place: str, values: Iterable[object]) -> None:
    try:
        "".join(set(values)).encode()  # type: ignore[arg-type]  # which is what this finds out
    except TypeError:
        raise UsageError(f"{place}: expected text and nothing else") from None
    except UnicodeEncodeError as error:
        problem = shown(error.object[error.start])
        raise UsageError(f"{place}: expected text that a file can hold, got {problem}") from None
