"""The one type in the middle: a Run is the record or the simulation of a training job.

A recorded job, an imported trace, a capture and a simulation all end here; every analysis and every
view starts here. A run is built whole and then only read: its columns are read-only arrays, and
trimming or aligning makes a new run. Times are whole nanoseconds on one clock, sizes bytes, rates
bits per second.

Every run can be written and read again. Each value of a column has the column's type, and each text
is text that a file can hold. Other values are refused here, before an hour of recording is lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from fullwire.display import Result, html_table
from fullwire.errors import UsageError
from fullwire.run.facts import NO_FACTS, Facts
from fullwire.run.gaps import Gap
from fullwire.units import shown

Whole: TypeAlias = NDArray[np.int64]
Real: TypeAlias = NDArray[np.float64]
Text: TypeAlias = NDArray[np.object_]
Time: TypeAlias = Whole  # on the run's clock
Duration: TypeAlias = Whole
Bytes: TypeAlias = Whole
Count: TypeAlias = Whole
Rate: TypeAlias = Real
Share: TypeAlias = Real
Lane: TypeAlias = Literal["compute", "communication", "input", "host"]
Origin: TypeAlias = Literal["measured", "imported", "modelled", "simulated"]
Basis: TypeAlias = Literal["measured", "modelled"]
AnyTable = TypeVar("AnyTable", bound="Table")

_INT64 = 2.0**63
SIZE_UNKNOWN = "unknown"  # the dtype of a collective whose size a trace lacks; `bytes` is then 0


@dataclass(frozen=True, slots=True)
class ColumnKind:
    """The type of a column's values, their unit, and their least value."""

    dtype: type[np.generic]
    unit: str = ""
    least: float | None = None  # if given, NaN is refused as well


COLUMN_KINDS: Mapping[str, ColumnKind] = {
    "Whole": ColumnKind(np.int64),
    "Real": ColumnKind(np.float64),
    "Text": ColumnKind(np.object_),
    "Time": ColumnKind(np.int64, "ns"),
    "Duration": ColumnKind(np.int64, "ns", 0),
    "Bytes": ColumnKind(np.int64, "B", 0),
    "Count": ColumnKind(np.int64, "", 0),
    "Rate": ColumnKind(np.float64, "bit/s", 0),
    "Share": ColumnKind(np.float64, "", 0),
}


@dataclass(frozen=True, slots=True)
class _Default:
    """Stands for a column that was not given: every row has this value."""

    value: int | float | str


def column(*, default: int | float | str) -> Any:
    """Declare a column that is missing from runs written before the declaration."""
    return _Default(default)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Table(Result):
    """Columns of one length. A subclass names them; the names in `COLUMN_KINDS` type them."""

    # pairs of columns; the second is never before the first
    INTERVALS: ClassVar[tuple[tuple[str, str], ...]] = ()
    # columns that analyses add up; each sum must fit into the column's own type
    ADDED_UP: ClassVar[tuple[str, ...]] = ()
    _EMPTY: ClassVar[Any]

    def __post_init__(self) -> None:
        for name, column in self.columns().items():
            if isinstance(column, _Default):  # the column was not given
                filled = np.full(len(self), column.value, self.column_types()[name])
                object.__setattr__(self, name, filled)
        for name, kind in self.column_kinds().items():
            place = f"{type(self).__name__}.{name}"
            array = _read_only(place, getattr(self, name), kind.dtype)
            if kind.least is not None and len(array):
                least, most = array.min(), array.max()  # nan if one of the values is nan
                if not (least >= kind.least and most < np.inf):
                    raise UsageError(
                        f"{place}: expected {kind.least:g} or more {kind.unit}".rstrip()
                        + f", got {least if not least >= kind.least else most}"
                    )
            object.__setattr__(self, name, array)
        lengths = {name: len(column) for name, column in self.columns().items()}
        if len(set(lengths.values())) > 1:
            raise UsageError(f"{type(self).__name__}: columns differ in length: {lengths}")
        for name in self.ADDED_UP:
            total = getattr(self, name).sum(dtype=np.float64)
            if total >= _INT64:
                raise UsageError(
                    f"{type(self).__name__}.{name}: expected less than 2^63 "
                    f"{self.column_kinds()[name].unit}".rstrip()
                    + f" in all rows, got {total:.4g}"
                )
        for begin, end in self.INTERVALS:
            wrong = np.flatnonzero(getattr(self, end) < getattr(self, begin))
            if len(wrong):
                row = int(wrong[0])
                raise UsageError(
                    f"{type(self).__name__}.{end}: expected {begin} {getattr(self, begin)[row]} "
                    f"or later, got {getattr(self, end)[row]} in row {row}"
                )

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def _in_short(self) -> Iterator[str]:
        yield f"{len(self):,} rows of {', '.join(self.column_types())}"

    def _tables(self) -> Mapping[str, Mapping[str, Any]]:
        return {"rows": self.columns()}

    def _picture(self) -> str:
        return html_table(self.columns())

    @classmethod
    def column_kinds(cls) -> dict[str, ColumnKind]:
        """Return the kind of each column, in order."""
        # Annotations are text here (from __future__ import annotations): the alias's own name.
        return {column.name: COLUMN_KINDS[str(column.type)] for column in fields(cls)}

    @classmethod
    def column_types(cls) -> dict[str, type[np.generic]]:
        """Return the array type of each column, in order."""
        return {name: kind.dtype for name, kind in cls.column_kinds().items()}

    @classmethod
    def defaults(cls) -> Collection[str]:
        """Name the columns that an old run may lack."""
        return {column.name for column in fields(cls) if isinstance(column.default, _Default)}

    @classmethod
    def empty(cls: type[AnyTable]) -> AnyTable:
        """Return the table without rows: one for all runs, since a table is only read."""
        if "_EMPTY" not in cls.__dict__:
            cls._EMPTY = cls(
                **{name: np.empty(0, kind) for name, kind in cls.column_types().items()}
            )
        empty: AnyTable = cls._EMPTY
        return empty

    @classmethod
    def joined(cls: type[AnyTable], parts: Sequence[AnyTable]) -> AnyTable:
        """Return the rows of several tables, one after the other."""
        if len(parts) < 2:
            return parts[0] if parts else cls.empty()
        columns = [part.columns() for part in parts]
        return cls(
            **{
                name: np.concatenate([part[name] for part in columns])
                for name in cls.column_types()
            }
        )

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return the columns by name, in order."""
        return {column.name: getattr(self, column.name) for column in fields(self)}

    def rows(self: AnyTable, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> AnyTable:
        """Return a new table with the chosen rows: a mask, or row numbers in the order wanted.

        The columns were checked before, so the chosen rows are not checked again.
        """
        table = object.__new__(type(self))
        for name, column in self.columns().items():
            kept = column[chosen]
            kept.flags.writeable = False
            object.__setattr__(table, name, kept)
        return table


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Spans(Table):
    """Intervals of work. A host span named "step" marks the wall time of each step."""

    INTERVALS = (("start_ns", "end_ns"),)

    rank: Whole
    step: Whole
    lane: Text
    name: Text
    start_ns: Time
    end_ns: Time


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Gradients(Table):
    """Gradients becoming ready, or whole buckets, where only those are known."""

    rank: Whole
    step: Whole
    order: Whole
    bytes: Bytes
    ready_ns: Time


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Collectives(Table):
    """Collectives, one row per rank; `bytes` is the payload of one rank before compression."""

    rank: Whole
    step: Whole
    sequence: Whole
    group: Text
    op: Text
    dtype: Text
    bytes: Bytes
    issue_ns: Time
    start_ns: Time
    end_ns: Time


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Operations(Table):
    """Time of the processor or device for operations of one name and shape in one step.

    A shape is `128x512 512x2048`: the tensors that came in. Time that a wrapper around other
    operations took itself bears the name `dispatch`.
    """

    rank: Whole
    step: Whole
    name: Text
    shapes: Text
    dtype: Text
    calls: Count
    busy_ns: Duration


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Carried(Table):
    """A transport's own account of a collective, one row per rank as in `collectives`.

    The transport began it at `begun_ns`, had the first bytes of another rank at `heard_ns` and all
    bytes at `end_ns`. It spent `reducing_ns` of that time on adding.
    """

    rank: Whole
    step: Whole
    sequence: Whole
    group: Text
    begun_ns: Time
    heard_ns: Time
    end_ns: Time
    reducing_ns: Duration
    sent_bytes: Bytes


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Links(Table):
    """Samples of a network interface's counters."""

    host: Text
    interface: Text
    time_ns: Time
    tx_bytes: Bytes
    rx_bytes: Bytes
    tx_packets: Count
    rx_packets: Count
    drops: Count
    speed_bps: Rate = column(default=0.0)  # as the adapter reports it; 0 if it does not


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Sockets(Table):
    """Samples of a TCP connection: totals since it opened, and its state at that moment.

    A flow is `local>remote`. A delivery rate is the rate that the network carried. Where
    `application_limited` is 1, the program gave too little to send, and the network may carry more.
    """

    host: Text
    flow: Text
    time_ns: Time
    bytes_acked: Bytes
    retransmits: Count
    rtt_ns: Duration
    cwnd_packets: Count
    delivery_rate_bps: Rate
    application_limited: Whole
    busy_ns: Duration
    receiver_window_limited_ns: Duration
    send_buffer_limited_ns: Duration


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Hosts(Table):
    """Samples of a host: one row per device with its share in use, since its last row for `cpu3`.

    Rows of `gpu0` have that GPU's memory, and rows of the device `memory` the host's. Rows of a
    processor have 0.
    """

    host: Text
    device: Text
    time_ns: Time
    utilization: Share
    memory_bytes: Bytes


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Flows(Table):
    """Traffic in captured packets, from a source to a destination in one time bin."""

    INTERVALS = (("start_ns", "end_ns"),)
    ADDED_UP = ("payload_bytes", "wire_bytes", "packets", "retransmits")

    source: Text
    destination: Text
    start_ns: Time
    end_ns: Time
    payload_bytes: Bytes
    wire_bytes: Bytes
    packets: Count
    retransmits: Count


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Connections(Table):
    """Each direction of a connection in captured packets: totals, and round trips.

    A round trip is from the place of the capture to the receiver and back; it is 0 if none was
    timed. 95 % of the round trips are no longer than `rtt_long_ns`.
    """

    INTERVALS = (("start_ns", "end_ns"),)
    ADDED_UP = ("payload_bytes", "wire_bytes", "packets", "retransmitted_bytes")

    source: Text
    destination: Text
    start_ns: Time
    end_ns: Time
    payload_bytes: Bytes
    wire_bytes: Bytes
    packets: Count
    retransmitted_bytes: Bytes
    rtt_samples: Count
    rtt_least_ns: Duration
    rtt_median_ns: Duration
    rtt_long_ns: Duration


UNREAD = "unread"


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Messages(Table):
    """Data of one collective in one direction of a connection, as a library's headers say.

    A row begins with a packet that asked for data or announced it. Data followed from `first_ns` to
    `last_ns`; both are 0 if none followed. `unread_bytes` is the data whose headers could not be
    read. A library without headers gives one row for each message. Such a message ends with a
    packet that is not full, and its operation is UNREAD.
    """

    source: Text
    destination: Text
    op: Text
    sequence: Whole
    begin_ns: Time
    first_ns: Time
    last_ns: Time
    payload_bytes: Bytes
    unread_bytes: Bytes
    messages: Count

    @property
    def has_data(self) -> NDArray[np.bool_]:
        """Say for each row whether data followed; a time of it may lie before the run's zero."""
        return np.asarray((self.payload_bytes > 0) | (self.unread_bytes > 0), bool)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Noise(Table):
    """Gradient noise of a step, which shows how much a larger batch would help."""

    step: Whole
    ranks_squared_norm: Real  # the mean over ranks of the squared norms of their gradients
    mean_squared_norm: Real  # the squared norm of the mean of the ranks' gradients
    samples: Count  # in the batch of one rank
    ranks: Count = column(default=0)  # whose gradients were compared; 0 for all workers


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Metrics(Table):
    """Values that the job reported: loss, accuracy, samples seen."""

    step: Whole
    name: Text
    value: Real
    time_ns: Time
    # that all workers took in the recorded steps up to this one; nan where unknown
    samples: Real = column(default=float("nan"))


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Events(Table):
    """Changes of the job: members come and go, failures, checkpoints, restarts."""

    time_ns: Time
    kind: Text
    ranks: Text  # numbers with commas between
    duration_ns: Duration


OF_A_PLAN = "plan of "  # begins the source of a plan's step
SLOWED = "slowed by communication"  # names this computing in a step that was simulated
# The marks of steps in the host's lane. Step times leave out those in which the recorder kept
# communication apart from computing. In turns, the ranks of a machine also computed one by one.
PROBES = ("probe", "turns", "broken turns")
MARKS = ("step", *PROBES)


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a run comes from. `basis` is the kind of evidence behind its numbers."""

    origin: Origin
    source: str
    basis: Basis = "measured"

    @property
    def is_plan(self) -> bool:
        """Whether the run is the step of a plan; it holds no communication that computing hides."""
        return self.origin == "simulated" and self.source.startswith(OF_A_PLAN)

    @property
    def is_computed(self) -> bool:
        """Whether the run's times are a model's: nobody measured them."""
        return self.origin in ("modelled", "simulated")

    def __post_init__(self) -> None:
        for name, value, known in (
            ("origin", self.origin, get_args(Origin)),
            ("basis", self.basis, get_args(Basis)),
        ):
            if not isinstance(value, str) or value not in known:
                raise UsageError(f"{name}: expected {' or '.join(known)}, got {shown(value)}")
        _refuse_other_than_text("source", [self.source])


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Run(Result):
    """A training job as tables and facts; `gaps` lists everything that is missing."""

    provenance: Provenance
    facts: Facts = NO_FACTS
    gaps: tuple[Gap, ...] = ()
    spans: Spans = field(default_factory=Spans.empty)
    gradients: Gradients = field(default_factory=Gradients.empty)
    collectives: Collectives = field(default_factory=Collectives.empty)
    operations: Operations = field(default_factory=Operations.empty)
    carried: Carried = field(default_factory=Carried.empty)
    links: Links = field(default_factory=Links.empty)
    sockets: Sockets = field(default_factory=Sockets.empty)
    hosts: Hosts = field(default_factory=Hosts.empty)
    flows: Flows = field(default_factory=Flows.empty)
    connections: Connections = field(default_factory=Connections.empty)
    messages: Messages = field(default_factory=Messages.empty)
    noise: Noise = field(default_factory=Noise.empty)
    metrics: Metrics = field(default_factory=Metrics.empty)
    events: Events = field(default_factory=Events.empty)
    read_from: str = ""  # the folder that it was read from; it is not written

    def __post_init__(self) -> None:
        if not isinstance(self.provenance, Provenance):
            raise UsageError(f"run: expected a Provenance, got {shown(self.provenance)}")
        if not isinstance(self.facts, Facts):
            raise UsageError(f"facts: expected Facts, got {shown(self.facts)}")
        if not isinstance(self.gaps, tuple) or not all(isinstance(g, Gap) for g in self.gaps):
            raise UsageError(f"gaps: expected a tuple of Gap, got {shown(self.gaps)}")
        for name, table in self.tables():
            if not isinstance(table, TABLES[name]):
                raise UsageError(f"{name}: expected {TABLES[name].__name__}, got {shown(table)}")
        _refuse_other_than_text("gaps", self.missing)

    @property
    def place(self) -> str:
        """Where a user finds the run: its folder, or else what made it."""
        return self.read_from or self.provenance.source

    @property
    def missing(self) -> tuple[str, ...]:
        """The gaps, as sentences."""
        return tuple(gap.reason for gap in self.gaps)

    @property
    def complete(self) -> bool:
        """Whether the run has no known gap."""
        return not self.gaps

    def tables(self) -> Iterator[tuple[str, Table]]:
        """Yield all tables with their names, the empty ones too."""
        return ((name, getattr(self, name)) for name in TABLES)

    def _in_short(self) -> Iterator[str]:
        steps = self.spans.step[(self.spans.lane == "host") & (self.spans.name == "step")]
        count = len(np.unique(steps))
        known = f"{count:,} step{'' if count == 1 else 's'}; " if count else ""
        state = "complete" if self.complete else f"PARTIAL: {self.missing[0]}"
        yield f"{self.provenance.origin} from {self.provenance.source}; {known}{state}"
        rows = [f"{name} {len(table):,}" for name, table in self.tables() if len(table)]
        yield f"rows: {', '.join(rows) or 'none'}"

    def _tables(self) -> Mapping[str, Mapping[str, Any]]:
        return {name: table.columns() for name, table in self.tables() if len(table)}

    def _picture(self) -> str:
        facts = self.facts.known()
        return html_table({"fact": list(facts), "value": list(facts.values())})


TABLES: Mapping[str, type[Table]] = {
    declared.name: kind
    for declared in fields(Run)
    if isinstance(kind := getattr(declared.default_factory, "__self__", None), type)
    and issubclass(kind, Table)
}
TABLE_NAMES: Mapping[type[Table], str] = {kind: name for name, kind in TABLES.items()}


def _read_only(place: str, column: Any, kind: type[np.generic]) -> NDArray[Any]:
    is_list_of_text = kind is np.object_ and not isinstance(column, np.ndarray)
    try:  # as objects, because numpy alone would turn the numbers among texts into text
        array = np.asarray(column, np.object_ if is_list_of_text else None)
    except ValueError:
        raise UsageError(f"{place}: expected a column, got rows of several lengths") from None
    if array.ndim != 1:
        raise UsageError(f"{place}: expected one dimension, got {array.ndim}")
    if array.size:
        if array.dtype.kind not in _TAKEN[kind]:
            raise UsageError(f"{place}: expected {_CALLED[kind]}, got a column of {array.dtype}")
        if kind is np.int64 and array.dtype.kind == "u" and array.max() > np.iinfo(np.int64).max:
            raise UsageError(f"{place}: expected whole numbers below 2^63, got {array.max()}")
        if kind is np.object_:
            _refuse_other_than_text(place, array.tolist())
    # A view, so that the caller's own array stays as writable as it was.
    view = array.astype(kind, copy=False).view()
    view.flags.writeable = False
    return view


_TAKEN: Mapping[type[np.generic], str] = {np.int64: "iu", np.float64: "fiu", np.object_: "OU"}
_CALLED: Mapping[type[np.generic], str] = {
    np.int64: "whole numbers",
    np.float64: "numbers",
    np.object_: "text",
}


def _refuse_other_than_text(place: str, values: Iterable[object]) -> None:
    try:
        "".join(set(values)).encode()  # type: ignore[arg-type]  # this line finds other types
    except TypeError:
        raise UsageError(f"{place}: expected text and nothing else") from None
    except UnicodeEncodeError as error:
        problem = shown(error.object[error.start])
        raise UsageError(f"{place}: expected text that a file can hold, got {problem}") from None
