"""The transport of messages: the paper's full utilization, or a transport as it was measured.

A measured transport has two resources that work side by side, and a message takes as long as the
busier one, a little more where both are busy:

    line         the bytes on the wire, at the share of the line rate that payload gets
    processors   the work of sending, receiving and adding: so much for each byte on the wire and
                 so much for each message in a row, on the processors that ranks have to share

Some of the work is done while the line is idle. At the end of each piece a sum has to be complete
before the rest can go on. This work comes on top of the line's time.

So a transport that fills 1 Gbps may leave half of 25 Gbps idle, and eight ranks on two processors
are slower than two. `calibrate.py` finds the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from fullwire.collectives.cost import Floats
from fullwire.errors import UsageError
from fullwire.units import ratio, shown

# How sharply the busier resource decides: times add up as their sixth powers do. Two equally busy
# ones take 12 % longer than either. validation/README.md has the measurements behind it.
_SHARPNESS = 6
# A rank that has a processor alone leaves it idle for moments, as between two parts of a message.
# The other ranks of its processor use them, so that much less time for a byte is left to add.
_USED_BY_OTHERS = 0.1


@dataclass(frozen=True, slots=True)
class FullTransport:
    """The paper's full utilization: this share of the line rate carries payload, all the time."""

    share: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UsageError(f"transport share: expected above 0, up to 1, got {self.share:g}")

    def __str__(self) -> str:
        return "full" if self.share == 1 else f"full:{self.share:.12g}"

    def message_s(self, line_s: Floats, sent_bytes: Floats, hops: Floats, crowd: Floats) -> Floats:
        """Return the time of a message that takes so long at line rate: that time."""
        del sent_bytes, hops, crowd
        return line_s


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTransport:
    """A transport with its fitted figures."""

    share: float | Floats  # arrays in a stack only
    processor_s_per_byte: float | Floats
    processor_s_per_hop: float | Floats
    apart: float | Floats  # share of the work for bytes that is done while the line is idle
    # A thread that a message wakes waits for a processor while other programs have them all. That
    # comes on top, and is no work.
    wait_s_per_hop: float | Floats = 0.0
    # Gloo gathers in halves of a rank's part. Of two ranks the one that comes later answers with
    # data, and its word that it is ready for the other's half stands in line behind them. So the
    # line carries half a part less at a time, in this share of such gathers. In others, ranks come
    # together. Among more ranks this word goes to another rank than the data.
    gathers_late: float = 0.0

    def __str__(self) -> str:
        return "measured"

    @classmethod
    def stacked(cls, several: Sequence[MeasuredTransport]) -> MeasuredTransport:
        """Return several as one, along a first axis before the points'."""
        figures: dict[str, Any] = {
            name: np.array([getattr(one, name) for one in several]).reshape(-1, 1, 1, 1)
            for name in (
                "share",
                "processor_s_per_byte",
                "processor_s_per_hop",
                "apart",
                "wait_s_per_hop",
            )
        }
        return replace(several[0], **figures)

    def message_s(self, line_s: Floats, sent_bytes: Floats, hops: Floats, crowd: Floats) -> Floats:
        """Return the time of a message that takes so long on the line alone."""
        line_s = line_s + sent_bytes * self.processor_s_per_byte * self.apart
        work_s = self.work_s(sent_bytes, hops, crowd)
        longer_s, shorter_s = np.maximum(line_s, work_s), np.minimum(line_s, work_s)
        both = shorter_s / np.maximum(longer_s, np.finfo(float).tiny)
        in_turn_s = longer_s * (1 + both**_SHARPNESS) ** (1 / _SHARPNESS)
        return np.asarray(in_turn_s + hops * self.wait_s_per_hop)

    def work_s(self, sent_bytes: Floats, hops: Floats, crowd: Floats) -> Floats:
        """Return how long a message keeps the processors that so many ranks share busy."""
        # Waking up for a message finds a processor free: a sleeping rank leaves its own.
        return np.asarray(
            sent_bytes * self.processor_s_per_byte * _times_as_long(crowd)
            + hops * self.processor_s_per_hop
        )

    def line_limits_up_to_bps(self, crowd: float) -> float:
        """Return the line rate from which on processors are busier than the line."""
        return float(8 / (self.share * self.processor_s_per_byte * _times_as_long(crowd)))


def _times_as_long(crowd: Floats | float) -> Floats:
    """Return how often the time of a lone rank's byte passes where so many share a processor."""
    return np.asarray(crowd * (1 - _USED_BY_OTHERS * np.clip(np.asarray(crowd) - 1, 0, 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TableTransport:
    """A transport by a table of times: seconds for the bytes that a rank sends, ascending.

    Between sizes it is a straight line. Below the smallest size it is that size's time, and beyond
    the largest it goes on at that size's rate. A larger message is never faster than a smaller one.
    The line rate still holds: the asked rate may be slower than the timed one.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    share: float = 1.0

    def __str__(self) -> str:
        return self.name

    def message_s(self, line_s: Floats, sent_bytes: Floats, hops: Floats, crowd: Floats) -> Floats:
        """Return the time of a message: as timed for so many bytes, or the line's."""
        del hops, crowd  # they are those of the timed ranks
        sent, time_s = np.array(self.points, np.float64).T
        time_s = np.maximum.accumulate(time_s)
        within_s = np.interp(sent_bytes, sent, time_s)
        beyond_s = time_s[-1] * np.asarray(sent_bytes) / max(sent[-1], 1.0)
        return np.asarray(np.maximum(line_s, np.maximum(within_s, beyond_s)))


Transport: TypeAlias = FullTransport | MeasuredTransport | TableTransport


def full_transport(text: str) -> FullTransport:
    """Read "full", or "full:0.956" which leaves room for packet headers (1448/1514)."""
    kind, colon, share = text.partition(":")
    if kind != "full" or bool(colon) != bool(share):
        raise UsageError(
            "transport: expected full, full:SHARE such as full:0.956, measured, or a file that "
            f"nccl-tests printed, got {shown(text)}"
        )
    number = ratio(share, "transport share") if share else 1.0
    return FullTransport(number)
