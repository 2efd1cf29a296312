"""Who takes part in a contest and what they are asked for, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fullwire.errors import UsageError

OURS = "fullwire"
PLAIN = "plain"  # ours again, in clear: beside it stands what encryption costs
PEERS = ("gloo", "mpi", PLAIN)
KIB, MIB = 1 << 10, 1 << 20
USUAL_SIZES = (
    4,
    4 * KIB,
    64 * KIB,
    256 * KIB,
    MIB,
    4 * MIB,
    16 * MIB,
    25 * MIB,
    64 * MIB,
    256 * MIB,
)
USUAL_ROUNDS = 7
FEWEST_ROUNDS = 3
BYTES_A_VALUE = 4  # float32
PAYLOAD_SHARE = 1448 / 1514  # of a line rate, with TCP's time stamps and frames of 1500 bytes

_TURN_S = 0.2  # so long is a turn at line rate, if one all-reduce is not longer
_MESSAGE_S = 300e-6  # of an all-reduce that is all latency
_MOST_REPEATS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """All-reduces of these sizes, by ours and each peer in turns, so many rounds of each."""

    rate_bps: float
    against: tuple[str, ...]
    sizes_bytes: tuple[int, ...] = USUAL_SIZES
    rounds: int = USUAL_ROUNDS
    encrypts: bool = False  # ours is encrypted

    def __post_init__(self) -> None:
        for peer in self.against:
            if peer not in PEERS:
                raise UsageError(f"against: expected {' or '.join(PEERS)}, got {peer!r}")
        if not self.against or len(set(self.against)) < len(self.against):
            raise UsageError(f"against: expected each peer once, like gloo,mpi, got {self.against}")
        if PLAIN in self.against and not self.encrypts:
            raise UsageError(f"against: {PLAIN} is ours in clear, which needs --encrypt beside it")
        for size in self.sizes_bytes:
            if size < BYTES_A_VALUE or size % BYTES_A_VALUE:
                raise UsageError(
                    f"sizes: expected multiples of {BYTES_A_VALUE} bytes (float32), got {size}"
                )
        if self.rounds < FEWEST_ROUNDS:
            raise UsageError(f"rounds: expected at least {FEWEST_ROUNDS}, got {self.rounds}")

    @property
    def limit_bps(self) -> float:
        """The payload that fits the line."""
        return self.rate_bps * PAYLOAD_SHARE

    def repeats(self, size_bytes: int, workers: int) -> int:
        """Return how many all-reduces in a row make a turn; every rank counts the same."""
        one_s = _MESSAGE_S + 8 * bus_bytes(size_bytes, workers) / self.limit_bps
        return max(1, min(_MOST_REPEATS, round(_TURN_S / one_s)))


@dataclass(frozen=True, slots=True)
class Turn:
    """One all-reduce of a turn, on average: of the slowest rank, and of all ranks' processors."""

    time_s: float
    cpu_s: float  # of one rank, on average over ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one of those who took part did with one size, round by round."""

    who: int  # 0 is ours, then the peers in the order in which they were named
    size_bytes: int
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Moved:
    """Payload that iperf3 moved between two hosts, each way while the other was busy as well."""

    streams: int
    rate_bps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Everything that was measured; who could not take part is named with the reason."""

    contest: Contest
    workers: int
    measured: tuple[Measured, ...]
    moved: tuple[Moved, ...]
    notes: tuple[str, ...]

    def of(self, who: int, size_bytes: int) -> Sequence[Turn]:
        """Return one's turns with one size, in order; none if it did not take part."""
        for result in self.measured:
            if (result.who, result.size_bytes) == (who, size_bytes):
                return result.turns
        return ()

    def pairs(self) -> Iterator[tuple[int, str, Sequence[Turn], Sequence[Turn]]]:
        """Go through sizes and, within them, peers: our turns beside theirs."""
        for size_bytes in self.contest.sizes_bytes:
            for who, peer in enumerate(self.contest.against, start=1):
                if theirs := self.of(who, size_bytes):
                    yield size_bytes, peer, self.of(0, size_bytes), theirs


def bus_bytes(size_bytes: int, workers: int) -> float:
    """Return what every link has to carry each way at least, for an all-reduce of this size."""
    return 2 * (workers - 1) / workers * size_bytes


def check_workers(workers: int) -> None:
    """Refuse a contest of one."""
    if workers < 2:
        raise UsageError(f"workers: expected at least 2 to reduce over, got {workers}")
