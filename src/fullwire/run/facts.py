"""What is known about a run besides its tables: each fact registered once.

A fact has a type, a unit, a sentence, and says whether two runs must agree on it before they may be
compared. An unknown fact is refused when a run is made, so a misspelt one cannot hide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np

from fullwire.errors import UsageError
from fullwire.units import shown

FactValue: TypeAlias = int | float | str | tuple[tuple[float, float], ...]


class Fact(NamedTuple):
    """The registration of one fact."""

    name: str
    kind: type
    unit: str
    must_match: bool
    meaning: str
    may_be_negative: bool = False  # of pairs, the second


_REGISTERED = (
    Fact("model", str, "", True, "the network being trained"),
    Fact("device", str, "", True, "what computes"),
    Fact("batch", str, "", True, "work of one worker in one step"),
    Fact("precision", str, "", True, "arithmetic of the model; gradients are sent as float32"),
    Fact("workers", int, "", False, "ranks in the job"),
    Fact(
        "line_rate_bps", float, "bit/s", False, "line rate of each worker's link, headers included"
    ),
    Fact("other_line_rates_bps", tuple, "(rank, bit/s)", False, "line rates of ranks whose differ"),
    Fact(
        "delivered_out_bps",
        tuple,
        "(rank, bit/s)",
        False,
        "payload that each rank's link sent before the job, alone and one way",
    ),
    Fact(
        "delivered_in_bps",
        tuple,
        "(rank, bit/s)",
        False,
        "payload that each rank's link received before the job, alone and one way",
    ),
    Fact(
        "in_host_bps", float, "bit/s", False, "what a rank sent another on its host before the job"
    ),
    Fact("payload_share", float, "", False, "share of the line rate that headers leave"),
    Fact("congestion", str, "", False, "TCP's congestion control on the way between hosts"),
    Fact(
        "transport_congestion",
        str,
        "",
        False,
        "congestion control of the connections of Fullwire's transport, and why",
    ),
    Fact("hosts", str, "", False, "the host of each rank, in their order, with commas between"),
    Fact("addresses", str, "", False, "addresses of hosts: name=address+address, commas between"),
    Fact("warnings", str, "", False, "what to bear in mind about where this was recorded"),
    Fact("remarks", str, "", False, "what whoever read foreign traces had to take for granted"),
    Fact("clock_scatter_s", tuple, "(rank, s)", False, "how sure it is what each clock showed"),
    Fact("faults", str, "", False, "what was done to the hosts while the job ran"),
    Fact("latency_s", float, "s", False, "time of an empty message from one worker to another"),
    Fact("dilation", float, "", False, "how many times slower the job ran than times here say"),
    Fact("transport", str, "", False, "how much of the line rate carries payload"),
    Fact("buckets", str, "", False, "how gradients are grouped into messages"),
    Fact("algorithm", str, "", False, "how the workers add their gradients up"),
    Fact("compression", str, "", False, "what shrinks the gradients on the wire"),
    Fact("lane", str, "", False, "the order in which messages are sent"),
    Fact("reduce_cost", tuple, "(bytes, s)", False, "measured times of one vector addition"),
    Fact("machines", int, "", False, "kernels that the ranks ran on; hosts of a lab share one"),
    Fact("processors", int, "", False, "processors that each rank was allowed to use"),
    Fact("processor_s", tuple, "(rank, s)", False, "processor time of each rank in a step"),
    Fact(
        "communication_processor_s",
        tuple,
        "(rank, s)",
        False,
        "of it in the threads that communicate",
    ),
    Fact(
        "before_forward_processor_s",
        tuple,
        "(rank, s)",
        False,
        "of it in the program's thread from a step, or from a batch, to the forward pass",
    ),
    Fact(
        "before_forward_read_bytes",
        tuple,
        "(rank, B)",
        False,
        "what the program's thread read from disks meanwhile",
    ),
    Fact("backend", str, "", False, "what torch.distributed sends with"),
    Fact("nccl_version", str, "", False, "versions of NCCL or RCCL in the job"),
    Fact("nccl_network", str, "", False, "what NCCL sends over between hosts"),
    Fact("nccl_adapters", str, "", False, "RDMA adapters that NCCL found"),
    Fact("nccl_interfaces", str, "", False, "interfaces that NCCL's sockets would use"),
    Fact("nccl_settings", str, "", False, "environment variables that NCCL says it follows"),
    Fact("nccl_paths", str, "", False, "connections that NCCL opened, by kind"),
    Fact("nccl_said", str, "", False, "warnings of NCCL, and why networks were not used"),
    Fact("nccl_uneven_links", str, "", False, "links between devices that differ by direction"),
    Fact("nccl_rings", str, "", False, "orders in which rings go through the ranks"),
    Fact("nccl_trees", int, "", False, "trees of the largest communicator"),
    Fact("nccl_channels", int, "", False, "channels of the largest communicator"),
    Fact("nccl_nodes", int, "", False, "hosts of the largest communicator"),
    Fact("nccl_plugins", str, "", False, "network plugins that NCCL loaded"),
    Fact("nccl_ring_type", str, "", False, "the farthest path that a ring takes within a host"),
    Fact("nccl_reach_bps", float, "bit/s", False, "the widest path from a device that NCCL saw"),
    Fact("nccl_layout_bps", float, "bit/s", False, "what NCCL laid its rings out for"),
    Fact("torch", str, "", False, "version of PyTorch in the job"),
    Fact("hook", str, "", False, "the communication hook that the script gave DDP"),
    Fact(
        "recorder_s", float, "s", False, "CPU time of the recorder in a step, on its costliest rank"
    ),
    Fact(
        "sampler_share",
        float,
        "",
        False,
        "of one processor, used by the sampler beside the job on its costliest host",
    ),
    Fact(
        "clock_offset_s",
        tuple,
        "(rank, s)",
        False,
        "what was added to the wall clock of each rank's machine, as its collectives show",
        may_be_negative=True,
    ),
    Fact(
        "clock_uncertainty_s",
        tuple,
        "(rank, s)",
        False,
        "how far each rank's clock may still be from rank 0's",
    ),
    Fact(
        "late_ends", int, "", False, "collectives whose end is when the program had waited for it"
    ),
    Fact(
        "captured_packets", int, "", False, "packets in the captures, both ends of a flow counted"
    ),
    Fact("dropped_packets", int, "", False, "packets that the captures missed, as they say"),
    Fact("captured_bytes", int, "B", False, "bytes of captured packets, before segmentation"),
    Fact("captured_wire_bytes", int, "B", False, "the same with the headers of all segments"),
    Fact("retransmitted_bytes", int, "B", False, "payload that was sent again"),
    Fact("reordered_bytes", int, "B", False, "payload that came late, but within a round trip"),
    Fact("lost_bytes", int, "B", False, "payload that was never seen and never acknowledged"),
    Fact("missed_bytes", int, "B", False, "payload that was sent, but not captured"),
    Fact("mirrored_bytes", int, "B", False, "captured more than once, on the wire"),
    Fact(
        "supposed_packets",
        int,
        "",
        False,
        "packets on the wire of larger ones in the capture, at a segment size that was supposed",
    ),
    Fact(
        "capture_clocks",
        str,
        "",
        False,
        "how the clocks of captures differ, as connections captured at both ends show",
    ),
    Fact("cluster", str, "", False, "the described cluster that the job ran on, as TOML"),
    Fact("exit_status", int, "", False, "how the job ended, as a shell says it"),
    Fact("efficiency", str, "", False, "share of the device's peak that the model assumes"),
)
REGISTRY: Mapping[str, Fact] = MappingProxyType({fact.name: fact for fact in _REGISTERED})


def checked_facts(facts: Mapping[str, FactValue]) -> Mapping[str, FactValue]:
    """Return the facts, read-only, or refuse one that is unknown or of the wrong type."""
    return MappingProxyType({name: _checked(name, value) for name, value in facts.items()})


def _checked(name: str, value: FactValue) -> FactValue:
    if name not in REGISTRY:
        raise UsageError(f"unknown fact {name!r}: known are {', '.join(sorted(REGISTRY))}")
    kind = REGISTRY[name].kind
    if kind is float and type(value) is int and abs(value) < 2**63:
        return float(value)
    if type(value) is not kind:
        raise UsageError(
            f"fact {name!r}: expected {kind.__name__}, got {type(value).__name__} {shown(value)}"
        )
    if kind is float and not math.isfinite(value):  # type: ignore[arg-type]  # it is a float here
        raise UsageError(f"fact {name!r}: expected a number, got {value!r}")
    return _checked_points(name, value) if isinstance(value, tuple) else value


def _checked_points(name: str, points: tuple[tuple[float, float], ...]) -> FactValue:
    try:
        numbers = np.array(points, np.float64).reshape(-1, 2)
    except (TypeError, ValueError):
        raise UsageError(f"fact {name!r}: expected pairs of numbers, got {shown(points)}") from None
    seconds = numbers[:, 1:] if not REGISTRY[name].may_be_negative else np.abs(numbers[:, 1:])
    is_usable = np.isfinite(numbers).all() and (numbers[:, 0] >= 0).all() and (seconds >= 0).all()
    if not is_usable or (np.diff(numbers[:, 0]) <= 0).any():
        raise UsageError(
            f"fact {name!r}: expected numbers of 0 or more, sizes ascending, got {shown(points)}"
        )
    return tuple((first, second) for first, second in numbers.tolist())
