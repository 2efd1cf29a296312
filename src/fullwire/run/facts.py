"""The facts about a run besides its tables; each fact is declared once, as a field.

A declaration gives a fact its type, the range of its numbers and a sentence. It also says whether
two runs must agree on the fact before they may be compared. An unknown fact or an impossible value
is refused when the run is made. So a misspelt fact cannot hide, and each line rate that an answer
uses is above 0 bit/s.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, cast

from fullwire.errors import UsageError
from fullwire.units import show_rate, show_time, shown

Pairs: TypeAlias = tuple[tuple[float, float], ...]
FactValue: TypeAlias = int | float | str | Pairs

_INT64 = 2**63


@dataclass(frozen=True, slots=True)
class Measure:
    """The unit of a fact's numbers, and the limits between which they must lie."""

    unit: str = ""
    least: float = 0
    most: float = math.inf

    def __contains__(self, value: float) -> bool:
        """Say whether a number is within the limits; NaN is not."""
        return self.least <= value <= self.most

    def __str__(self) -> str:
        """Say which numbers are expected, with their unit."""
        range_ = f"{self.least:g} or more"
        if self.most < _LARGEST:
            range_ = f"a number from {self.least:g} to {self.most:g}"
        return f"{range_} {self.unit}".rstrip()

    def instead_of(self, value: float) -> str:
        """Say what is expected in place of a number that is not within the limits."""
        if value > self.most >= _LARGEST:
            return f"at most {self.most:g} {self.unit}".rstrip()
        return str(self)


_LARGEST = 1e15  # this limit only keeps numbers finite, so messages leave it out
_COUNT = Measure(most=_INT64 - 1)
_AT_LEAST_ONE = Measure(least=1, most=_INT64 - 1)
_BYTES = Measure("B", most=_INT64 - 1)
_BYTES_EACH = Measure("B", most=1e18)
_RATE = Measure("bit/s", least=1, most=1e18)
_DELIVERED = Measure("bit/s", most=1e18)
_TIME = Measure("s", most=1e15)
_OFFSET = Measure("s", least=-1e15, most=1e15)
_STATUS = Measure(least=-_INT64, most=_INT64 - 1)
_PAYLOAD = Measure(least=0.001, most=1)  # a packet of one byte has some 80 bytes of headers
_SHARE = Measure(most=1)
_PROCESSORS = Measure(most=1e6)
_FACTOR_OR_0 = Measure(most=1e9)
_FACTOR = Measure(least=1e-9, most=1e9)


class Declared(NamedTuple):
    """The declaration of a fact, besides its name and type."""

    meaning: str
    measure: Measure
    must_match: bool
    each: str
    may_be_none: bool


def fact(
    meaning: str,
    measure: Measure = _COUNT,
    *,
    must_match: bool = False,
    each: str = "rank",
    may_be_none: bool = False,
) -> Any:
    """Declare a fact; for a fact of pairs, `each` names the first number of a pair.

    `may_be_none` says that a run of Fullwire's own without the fact has none of it. An imported run
    does not tell.
    """
    declared = Declared(meaning, measure, must_match, each, may_be_none)
    return dataclasses.field(default=None, metadata={"fact": declared})


@dataclass(frozen=True, kw_only=True, repr=False)
class Facts:
    """All known facts about a run besides its tables; None stands for an unknown fact."""

    # The job: its model, its settings, and how it ended.
    workers: int | None = fact("ranks in the job", _AT_LEAST_ONE)
    model: str | None = fact("the network being trained", must_match=True)
    device: str | None = fact("the device that computes", must_match=True)
    batch: str | None = fact("work of one worker in one step", must_match=True)
    pass_samples: int | None = fact("samples of one worker in one pass, as a mean", _AT_LEAST_ONE)
    marked_passes: int | None = fact(
        "passes whose gradients a step adds up, by a trace's marks of autograd", _AT_LEAST_ONE
    )
    gradient_sets: int | None = fact(
        "sets of gradients that the passes of a step make; 1 where all add up", _AT_LEAST_ONE
    )
    stages: int | None = fact(
        "ranks of the pipeline that a predicted step holds",
        _AT_LEAST_ONE,
        may_be_none=True,
    )
    step_samples: int | None = fact("samples of all workers in one step", _AT_LEAST_ONE)
    local_steps: int | None = fact(
        "steps of a worker of its own to each sum", _AT_LEAST_ONE, may_be_none=True
    )
    fragments: int | None = fact(
        "parts of the parameters that are summed apart", _AT_LEAST_ONE, may_be_none=True
    )
    precision: str | None = fact(
        "arithmetic of the model; gradients are sent as float32", must_match=True
    )
    efficiency: str | None = fact("share of the device's peak that the model assumes")
    buckets: str | None = fact("how gradients are grouped into messages", may_be_none=True)
    gradient_unit: str | None = fact(
        "what each gradient of the run is: a bucket, where parameters are not known"
    )
    hook: str | None = fact("the communication hook that the script gave DDP", may_be_none=True)
    torch: str | None = fact("version of PyTorch in the job")
    framework: str | None = fact("the library whose trainer runs the job", may_be_none=True)
    pipelining: str | None = fact("the library of the job for pipelines of stages")
    dilation: float | None = fact(
        "how many times slower the job ran than times here say", _FACTOR, may_be_none=True
    )
    faults: str | None = fact("the faults that the lab made while the job ran", may_be_none=True)
    exit_status: int | None = fact("how the job ended, as a shell says it", _STATUS)
    warnings: str | None = fact("doubts about the place of the recording", may_be_none=True)
    remarks: str | None = fact("assumptions of the reader of foreign traces", may_be_none=True)

    # The hosts: which rank ran where, and its use of processors and disks.
    hosts: str | None = fact("the host of each rank, in their order, with commas between")
    addresses: str | None = fact("addresses of hosts: name=address+address, commas between")
    machines: int | None = fact(
        "kernels that the ranks ran on; hosts of a lab share one", _AT_LEAST_ONE
    )
    processors: int | None = fact("processors that each rank was allowed to use", _AT_LEAST_ONE)
    threads: int | None = fact("threads that an operation of a rank computes with", _AT_LEAST_ONE)
    processor_s: Pairs | None = fact("processor time of each rank in a step", _TIME)
    communication_processor_s: Pairs | None = fact("of it in the threads that communicate", _TIME)
    children_processor_s: Pairs | None = fact(
        "processor time of each rank's child processes in a step, such as loaders of data", _TIME
    )
    run_delay_s: Pairs | None = fact(
        "how long a computing thread of each rank was ready in a step and had no processor", _TIME
    )
    run_s: Pairs | None = fact("how long that thread ran in a step", _TIME)
    probe_run_delay_s: Pairs | None = fact(
        "the same delay in a probe step, while the thread computed", _TIME
    )
    probe_compute_s: Pairs | None = fact(
        "processor time of a computing thread of each rank in a probe step, without its sums", _TIME
    )
    turns_lack_s: Pairs | None = fact(
        "how much longer a computing thread takes to issue a step's sums than its turns show",
        _OFFSET,
    )
    before_forward_processor_s: Pairs | None = fact(
        "of it in the program's thread from a step, or from a batch, to the forward pass", _TIME
    )
    before_forward_read_bytes: Pairs | None = fact(
        "bytes that the program's thread read from disks meanwhile", _BYTES_EACH
    )
    kernels_slowed_share: Pairs | None = fact(
        "of the time of a rank's kernels beside communication, what they would not need alone",
        _SHARE,
    )
    kernels_compared_share: Pairs | None = fact(
        "of that time, the share of kernels that also ran alone", _SHARE
    )
    clock_offset_s: Pairs | None = fact(
        "time added to the wall clock of each rank's machine, as its collectives show", _OFFSET
    )
    clock_uncertainty_s: Pairs | None = fact(
        "how far each rank's clock may still be from rank 0's", _TIME
    )
    clock_scatter_s: Pairs | None = fact("uncertainty of each clock", _TIME)

    # The network between the ranks.
    line_rate_bps: float | None = fact("line rate of each worker's link, headers included", _RATE)
    other_line_rates_bps: Pairs | None = fact("line rates of ranks whose differ", _RATE)
    delivered_out_bps: Pairs | None = fact(
        "payload that each rank's link sent before the job, alone and one way", _DELIVERED
    )
    delivered_in_bps: Pairs | None = fact(
        "payload that each rank's link received before the job, alone and one way", _DELIVERED
    )
    in_host_bps: float | None = fact(
        "rate at which a rank sent to another on its host before the job", _DELIVERED
    )
    payload_share: float | None = fact("share of the line rate that headers leave", _PAYLOAD)
    latency_s: float | None = fact("time of an empty message from one worker to another", _TIME)
    congestion: str | None = fact("TCP's congestion control on the way between hosts")
    cluster: str | None = fact("the described cluster that the job ran on, as TOML")

    # The communication library and its settings: measured, reported by NCCL, or emulated.
    backend: str | None = fact("the library that torch.distributed sends with")
    groups: str | None = fact("process groups by description or name, with their ranks: dp 2")
    group_names: str | None = fact("names of process groups by description: mesh_tp: 1 2")
    transport_congestion: str | None = fact(
        "congestion control of the connections of Fullwire's transport, and why"
    )
    transport: str | None = fact("how much of the line rate carries payload")
    algorithm: str | None = fact("how the workers add their gradients up")
    compression: str | None = fact(
        "the codec or hook that shrinks the gradients on the wire", may_be_none=True
    )
    compression_error: float | None = fact(
        "squared error of compressed gradients, relative to them, when last measured",
        _FACTOR_OR_0,
        may_be_none=True,
    )
    compression_zeroed_share: float | None = fact(
        "share of gradients' values that then arrived as zero and were none",
        _FACTOR_OR_0,
        may_be_none=True,
    )
    compression_unsent_norm: float | None = fact(
        "size of the rest that error feedback then kept, relative to the gradients",
        _FACTOR_OR_0,
        may_be_none=True,
    )
    compression_widened: int | None = fact(
        "messages of gradients that exceeded the range of their format and had a wider one",
        may_be_none=True,
    )
    compression_stopped: int | None = fact(
        "steps with compressed gradients, after which the guard went back to float32",
        may_be_none=True,
    )
    wire: str | None = fact(
        "the wire format in which Fullwire's transport sent float32", may_be_none=True
    )
    wire_error: float | None = fact(
        "largest squared error of a packed message, relative to it, on any rank",
        _FACTOR_OR_0,
        may_be_none=True,
    )
    wire_messages: int | None = fact(
        "messages that were packed, on the rank with the most", may_be_none=True
    )
    wire_widened: int | None = fact(
        "of them, those that exceeded the range of their format and had a wider one",
        may_be_none=True,
    )
    wire_stopped: str | None = fact(
        "the collective whose error was above the limit: afterwards all travelled as float32",
        may_be_none=True,
    )
    lane: str | None = fact("the order in which messages are sent")
    alone_less_share: float | None = fact(
        "by how much a simulated job's step of one worker may be shorter, as a share of it", _SHARE
    )
    alone_more_share: float | None = fact(
        "by how much that step may be longer, as a share of it", _FACTOR_OR_0
    )
    reduce_cost: Pairs | None = fact("measured times of one vector addition", _TIME, each="bytes")
    nccl_version: str | None = fact("versions of NCCL or RCCL in the job")
    nccl_network: str | None = fact("the network that NCCL uses between hosts")
    nccl_adapters: str | None = fact("RDMA adapters that NCCL found")
    nccl_interfaces: str | None = fact("interfaces that NCCL's sockets would use")
    nccl_settings: str | None = fact(
        "environment variables that NCCL says it follows", may_be_none=True
    )
    nccl_paths: str | None = fact("connections that NCCL opened, by kind")
    nccl_said: str | None = fact(
        "warnings of NCCL, and why networks were not used", may_be_none=True
    )
    nccl_uneven_links: str | None = fact(
        "links between devices that differ by direction", may_be_none=True
    )
    nccl_rings: str | None = fact("orders in which rings go through the ranks")
    nccl_trees: int | None = fact("trees of the largest communicator")
    nccl_channels: int | None = fact("channels of the largest communicator")
    nccl_nodes: int | None = fact("hosts of the largest communicator")
    nccl_plugins: str | None = fact("network plugins that NCCL loaded", may_be_none=True)
    nccl_ring_type: str | None = fact("the farthest path that a ring takes within a host")
    nccl_reach_bps: float | None = fact("the widest path from a device that NCCL saw", _DELIVERED)
    nccl_layout_bps: float | None = fact("the rate that NCCL laid its rings out for", _DELIVERED)

    # The cost of recording, and the extent of captures.
    recorder_s: float | None = fact(
        "CPU time of the recorder in a step, on its costliest rank", _TIME
    )
    sampler_share: float | None = fact(
        "of one processor, used by the sampler beside the job on its costliest host", _PROCESSORS
    )
    late_ends: int | None = fact(
        "collectives whose end is when the program had waited for it", may_be_none=True
    )
    captured_packets: int | None = fact("packets in the captures, both ends of a flow counted")
    dropped_packets: int | None = fact("packets that the captures missed, as they say")
    captured_bytes: int | None = fact("bytes of captured packets, before segmentation", _BYTES)
    captured_wire_bytes: int | None = fact("the same with the headers of all segments", _BYTES)
    retransmitted_bytes: int | None = fact("payload that was sent again", _BYTES)
    reordered_bytes: int | None = fact("payload that came late, but within a round trip", _BYTES)
    lost_bytes: int | None = fact("payload that was lost: it was not seen or acknowledged", _BYTES)
    missed_bytes: int | None = fact("payload that was sent, but not captured", _BYTES)
    mirrored_bytes: int | None = fact("captured more than once, on the wire", _BYTES)
    supposed_packets: int | None = fact(
        "packets on the wire of larger ones in the capture, at a segment size that was supposed"
    )
    capture_clocks: str | None = fact(
        "how the clocks of captures differ, as connections captured at both ends show"
    )

    def __post_init__(self) -> None:
        for name, value in self._given():
            object.__setattr__(self, name, _checked(REGISTRY[name], value))

    def __repr__(self) -> str:
        return f"Facts({', '.join(f'{name}={value!r}' for name, value in self._given())})"

    def _given(self) -> Iterator[tuple[str, Any]]:
        """Yield the known facts, those other than None."""
        return ((name, value) for name in REGISTRY if (value := getattr(self, name)) is not None)

    def known(self) -> dict[str, FactValue]:
        """Return the known facts, by name."""
        return dict(self._given())

    def only(self, names: Collection[str]) -> Facts:
        """Return some of the facts."""
        return named({name: value for name, value in self._given() if name in names})

    def without(self, names: Collection[str]) -> Facts:
        """Return the facts except those named."""
        return named({name: value for name, value in self._given() if name not in names})

    def __or__(self, other: Facts) -> Facts:
        """Return the facts of both; where both know a fact, return the other's."""
        return named(self.known() | other.known())


def named(facts: Mapping[str, Any]) -> Facts:
    """Make facts of the names and values that a file or a program gives; refuse an unknown name."""
    for name in facts:
        if name not in REGISTRY:
            raise UsageError(f"unknown fact {name!r}: known are {', '.join(sorted(REGISTRY))}")
    return Facts(**facts)


@dataclass(frozen=True, slots=True)
class Fact:
    """The declaration of one fact, for code that shows or checks facts."""

    name: str
    kind: type
    meaning: str
    measure: Measure
    must_match: bool
    each: str
    may_be_none: bool

    @property
    def unit(self) -> str:
        """The unit; for pairs, with the meaning of the first number."""
        return f"({self.each}, {self.measure.unit})" if self.kind is tuple else self.measure.unit


_KINDS: Mapping[str, type] = {
    "int | None": int,
    "float | None": float,
    "str | None": str,
    "Pairs | None": tuple,
}


REGISTRY: Mapping[str, Fact] = MappingProxyType(
    {
        # Annotations are text here (from __future__ import annotations).
        field.name: Fact(field.name, _KINDS[str(field.type)], *field.metadata["fact"])
        for field in dataclasses.fields(Facts)
    }
)
NO_FACTS = Facts()
NONE, UNKNOWN = "none", "unknown"  # in place of a fact that a run lacks


def shown_text(name: str, text: str) -> str:
    """Return a fact's text as people read it: a number with its unit."""
    if REGISTRY[name].kind is not float or text in (NONE, UNKNOWN):
        return text
    show = {"bit/s": show_rate, "s": show_time}.get(REGISTRY[name].unit, "{:.4g}".format)
    return show(float(text))


def _checked(fact: Fact, value: Any) -> FactValue:
    if fact.kind is float and type(value) is int and abs(value) < _INT64:
        value = float(value)
    if type(value) is not fact.kind:
        raise UsageError(
            f"fact {fact.name!r}: expected {fact.kind.__name__}, "
            f"got {type(value).__name__} {shown(value)}"
        )
    if isinstance(value, tuple):
        return _checked_pairs(fact, value)
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            problem = shown(error.object[error.start])
            raise UsageError(
                f"fact {fact.name!r}: expected text that a file can hold, got {problem}"
            ) from None
        return value
    number = cast("int | float", value)
    if number not in fact.measure:
        raise UsageError(
            f"fact {fact.name!r}: expected {fact.measure.instead_of(number)}, got {shown(number)}"
        )
    return number


def _checked_pairs(fact: Fact, pairs: tuple[Any, ...]) -> Pairs:
    try:
        numbers = tuple((float(first), float(second)) for first, second in pairs)
    except (TypeError, ValueError, OverflowError):
        problem = "pairs of numbers"
        raise UsageError(f"fact {fact.name!r}: expected {problem}, got {shown(pairs)}") from None
    for first, second in numbers:
        if not 0 <= first < math.inf:
            raise UsageError(f"fact {fact.name!r}: expected {fact.each} 0 or more, got {first:g}")
        if second not in fact.measure:
            raise UsageError(
                f"fact {fact.name!r}: expected {fact.measure.instead_of(second)}, "
                f"got {second!r} for {fact.each} {first:g}"
            )
    if any(later <= earlier for (earlier, _), (later, _) in itertools.pairwise(numbers)):
        raise UsageError(f"fact {fact.name!r}: expected {fact.each} ascending, got {shown(pairs)}")
    return numbers
