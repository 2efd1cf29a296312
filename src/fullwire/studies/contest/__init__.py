"""Time all-reduces of our transport and of others in turns: `fullwire bench transport`.

This module holds the participants, the settings, the outcome and its table. `rank.py` is one rank,
in a lab and under torchrun alike, with everything that needs torch. mpirun runs `mpi_program.py`
beside each rank.

outcome = contest_in_lab(Contest(rate_bps=10e9, against=("gloo",)), workers=2)
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fullwire.errors import FullwireError, UsageError
from fullwire.lab.description import describe
from fullwire.lab.emulated import available_bytes
from fullwire.lab.lab import Lab
from fullwire.lab.session import run_job
from fullwire.report.charts import COLOURS, check_plot_path, save, titled
from fullwire.report.terminal import print_table, say
from fullwire.run.centre import Centre, median_of
from fullwire.units import show_bytes, show_rate, show_time

if TYPE_CHECKING:
    import altair as alt

OURS = "fullwire"
# Our transport once more, in clear and float32: what encryption costs, and what a format saves.
PLAIN = "plain"
FLOAT32 = "float32"
WIRES = (FLOAT32, "bf16", "fp16", "int8", "auto")
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

_TURN_S = 0.2  # length of a turn at line rate, unless one all-reduce takes longer
_MESSAGE_S = 300e-6  # an all-reduce of a few bytes, which is all latency
_MOST_REPEATS = 200
_RANK_BYTES = 400_000_000  # A Python process with torch.
_BUFFERS = 3  # The rank's own buffer, and those of the transports.
# For smaller sizes, processor time depends on the number of messages, and hardly on bytes.
_LEAST_BYTES_FOR_CPU = MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """The settings: sizes, the peers that take turns with our transport, and the rounds."""

    rate_bps: float
    against: tuple[str, ...]
    sizes_bytes: tuple[int, ...] = USUAL_SIZES
    rounds: int = USUAL_ROUNDS
    encrypts: bool = False  # whether our transport encrypts
    wires: tuple[str, ...] = (FLOAT32,)  # our transport takes part once in each wire format

    def __post_init__(self) -> None:
        for wire in self.wires:
            if wire not in WIRES:
                raise UsageError(f"wire: expected {', '.join(WIRES)}, got {wire!r}")
        if not self.wires or len(set(self.wires)) < len(self.wires):
            raise UsageError(f"wire: expected each format once, like bf16,int8, got {self.wires}")
        for peer in self.against:
            if peer not in PEERS:
                raise UsageError(f"against: expected {' or '.join(PEERS)}, got {peer!r}")
        if not self.against or len(set(self.against)) < len(self.against):
            raise UsageError(f"against: expected each peer once, like gloo,mpi, got {self.against}")
        if PLAIN in self.against and not self.encrypts and FLOAT32 in self.wires:
            raise UsageError(
                f"against: {PLAIN} is ours in clear and float32, which needs --encrypt or --wire "
                "beside it"
            )
        for size in self.sizes_bytes:
            if size < BYTES_A_VALUE or size % BYTES_A_VALUE:
                raise UsageError(
                    f"sizes: expected multiples of {BYTES_A_VALUE} bytes (float32), got {size}"
                )
        if self.rounds < FEWEST_ROUNDS:
            raise UsageError(f"rounds: expected at least {FEWEST_ROUNDS}, got {self.rounds}")

    @property
    def participants(self) -> tuple[tuple[str, str], ...]:
        """The name and the wire format of each: ours in every format, then the peers."""
        return (
            *((OURS, wire) for wire in self.wires),
            *((peer, FLOAT32) for peer in self.against),
        )

    @property
    def limit_bps(self) -> float:
        """The payload rate that the line carries at most."""
        return self.rate_bps * PAYLOAD_SHARE

    def repeats(self, size_bytes: int, workers: int) -> int:
        """Return the number of all-reduces in a turn; every rank calculates the same number."""
        one_s = _MESSAGE_S + 8 * bus_bytes(size_bytes, workers) / self.limit_bps
        return max(1, min(_MOST_REPEATS, round(_TURN_S / one_s)))


@dataclass(frozen=True, slots=True)
class Turn:
    """One average all-reduce of a turn: time on the slowest rank, processor time over all ranks."""

    time_s: float
    cpu_s: float  # of one rank, the mean over ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The turns of one participant with one size, one turn for each round."""

    who: int  # the place among the participants of the settings
    size_bytes: int
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Moved:
    """Payload that iperf3 moved between two hosts, each way while the other way was busy too."""

    streams: int
    rate_bps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All measurements; a participant that failed to start is named with the reason."""

    contest: Contest
    workers: int
    measured: tuple[Measured, ...]
    moved: tuple[Moved, ...]
    notes: tuple[str, ...]

    def of(self, who: int, size_bytes: int) -> Sequence[Turn]:
        """Return the turns of a participant with a size, in order; empty if it took no part."""
        for result in self.measured:
            if (result.who, result.size_bytes) == (who, size_bytes):
                return result.turns
        return ()

    def pairs(self) -> Iterator[tuple[int, str, str, Sequence[Turn], Sequence[Turn]]]:
        """Yield sizes and, within them, our wire formats and peers: our turns and theirs."""
        wires = self.contest.wires
        for size_bytes, (own, wire), (peer_at, peer) in product(
            self.contest.sizes_bytes, enumerate(wires), enumerate(self.contest.against)
        ):
            if theirs := self.of(len(wires) + peer_at, size_bytes):
                yield size_bytes, wire, peer, self.of(own, size_bytes), theirs


def bus_bytes(size_bytes: int, workers: int) -> float:
    """Return the bytes that each link must carry each way, at least, for such an all-reduce."""
    return 2 * (workers - 1) / workers * size_bytes


def check_workers(workers: int) -> None:
    """Refuse a contest with fewer than two ranks."""
    if workers < 2:
        raise UsageError(f"workers: expected at least 2 to reduce over, got {workers}")


def contest_in_lab(
    contest: Contest, workers: int, introduce: Callable[[Lab], None] = lambda lab: None
) -> Outcome:
    """Make a lab and hold a contest between its hosts."""
    check_workers(workers)
    check_torch()
    needed = workers * (_RANK_BYTES + _BUFFERS * max(contest.sizes_bytes))
    available = available_bytes()
    if needed > available:
        raise UsageError(
            f"bench transport: {workers} workers with {show_bytes(max(contest.sizes_bytes))} need "
            f"some {show_bytes(needed)} of memory, and {show_bytes(available)} are available here: "
            "name smaller --sizes"
        )
    description = describe(workers=workers, rate=[f"{contest.rate_bps}bps"])
    with tempfile.TemporaryDirectory(prefix="fullwire-") as place, Lab(description) as lab:
        introduce(lab)
        asked, outcome = Path(place, "contest.json"), Path(place, "outcome.json")
        asked.write_bytes(msgspec.json.encode(contest))
        module = "fullwire.studies.contest.rank"
        status = run_job(lab, [sys.executable, "-m", module, str(asked), str(outcome)])
        if status != 0 or not outcome.exists():
            raise FullwireError(
                f"bench transport: a rank ended with exit status {status} and no result. "
                "Its output stands above"
            )
        return msgspec.json.decode(outcome.read_bytes(), type=Outcome)


def check_torch() -> None:
    """Refuse a Python environment in which torch, which every participant needs, is missing."""
    if importlib.util.find_spec("torch") is None:
        raise UsageError(
            "bench transport: expected PyTorch in the environment of fullwire, there is none: "
            "pip install torch"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """One of the two participants that a row compares, with one size."""

    time_s: Centre
    bus_bps: float
    limit_share: float
    cpu_s_per_gb: float


def print_contest(outcome: Outcome) -> None:
    """Print the settings, the table and its notes."""
    contest = outcome.contest
    say(
        f"All-reduce of float32 by {outcome.workers} workers at {show_rate(contest.rate_bps)}, "
        f"{os.cpu_count()} processors here. {contest.rounds} rounds in turns, medians."
    )
    say(f"Payload limit (rate x 1448/1514): {show_rate(contest.limit_bps)}.")
    for moved in outcome.moved:
        streams = "1 stream" if moved.streams == 1 else f"{moved.streams} streams"
        say(f"iperf3 both ways at once, {streams}: {show_rate(moved.rate_bps)} each way.")
    say("")
    rows = []
    for size_bytes, wire, peer, ours, theirs in outcome.pairs():
        our, their = _side(outcome, size_bytes, ours), _side(outcome, size_bytes, theirs)
        faster = _times_faster(ours, theirs)
        cpu = f"{our.cpu_s_per_gb:.2f} / {their.cpu_s_per_gb:.2f}"
        rows.append(
            [
                _size(size_bytes),
                peer if wire == FLOAT32 else f"{wire}, {peer}",
                show_time(our.time_s.value),
                show_time(their.time_s.value),
                f"{faster.value:.2f}x ({faster.low:.2f} to {faster.high:.2f})",
                f"{show_rate(our.bus_bps)} / {show_rate(their.bus_bps)}",
                f"{our.limit_share:.1%} / {their.limit_share:.1%}",
                cpu if size_bytes >= _LEAST_BYTES_FOR_CPU else "-",
            ]
        )
    heads = ["size", "against", OURS, "theirs", "faster (95 %)"]
    heads += ["bus bandwidth", "of the limit", "CPU s per GB"]
    print_table(heads, rows, texts={"against"})
    for note in outcome.notes:
        say(note)


def contest_object(outcome: Outcome) -> dict[str, Any]:
    """Return the outcome as a JSON object; each row is one size and one peer."""
    rows = []
    for size_bytes, wire, peer, ours, theirs in outcome.pairs():
        faster = _times_faster(ours, theirs)
        rows.append(
            {
                "bytes": size_bytes,
                "workers": outcome.workers,
                "rate_bps": outcome.contest.rate_bps,
                "against": peer,
                "wire": wire,
                **_named("ours", _side(outcome, size_bytes, ours)),
                **_named("theirs", _side(outcome, size_bytes, theirs)),
                "limit_bps": outcome.contest.limit_bps,
                "times_faster": faster.value,
                "times_faster_interval": {"low": faster.low, "high": faster.high},
            }
        )
    return {
        "workers": outcome.workers,
        "rate_bps": outcome.contest.rate_bps,
        "limit_bps": outcome.contest.limit_bps,
        "rounds": outcome.contest.rounds,
        "processors": os.cpu_count(),
        "iperf3": [
            {"streams": moved.streams, "bus_bps": moved.rate_bps} for moved in outcome.moved
        ],
        "rows": rows,
        "notes": list(outcome.notes),
    }


def _named(whose: str, side: _Side) -> dict[str, Any]:
    return {
        f"{whose}_s": side.time_s.value,
        f"{whose}_s_interval": {"low_s": side.time_s.low, "high_s": side.time_s.high},
        f"{whose}_bus_bps": side.bus_bps,
        f"{whose}_limit_share": side.limit_share,
        f"{whose}_cpu_s_per_gb": side.cpu_s_per_gb,
    }


def _side(outcome: Outcome, size_bytes: int, turns: Sequence[Turn]) -> _Side:
    time_s = median_of([turn.time_s for turn in turns])
    bus_bps = 8 * bus_bytes(size_bytes, outcome.workers) / time_s.value
    return _Side(
        time_s=time_s,
        bus_bps=bus_bps,
        limit_share=bus_bps / outcome.contest.limit_bps,
        cpu_s_per_gb=statistics.median(turn.cpu_s for turn in turns) / size_bytes * 1e9,
    )


def _times_faster(ours: Sequence[Turn], theirs: Sequence[Turn]) -> Centre:
    """Compare round by round, because a disturbance of a round affects both participants."""
    return median_of([their.time_s / our.time_s for our, their in zip(ours, theirs, strict=True)])


def _size(size_bytes: int) -> str:
    """Print a size by powers of two, as tables of collectives usually do."""
    for factor, unit in ((MIB, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= factor and size_bytes % factor == 0:
            return f"{size_bytes // factor} {unit}"
    return f"{size_bytes:,} B"


def plot_contest(outcome: Outcome, path: Path) -> None:
    """Draw bus bandwidth and time against size."""
    check_plot_path(path)
    import altair as alt

    rows = []
    names = [
        name if wire == FLOAT32 else f"{name}, {wire}"
        for name, wire in outcome.contest.participants
    ]
    for measured in outcome.measured:
        side = _side(outcome, measured.size_bytes, measured.turns)
        rows.append(
            {
                "who": names[measured.who],
                "bytes": measured.size_bytes,
                "bus_gbps": side.bus_bps * 1e-9,
                "time_us": side.time_s.value * 1e6,
            }
        )
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X(
            "bytes:Q",
            title="bytes reduced",
            scale=alt.Scale(type="log", nice=False, padding=14),
            axis=alt.Axis(format=".2~s"),
        ),
        color=alt.Color("who:N", title=None, sort=None, scale=alt.Scale(range=COLOURS)),
    )
    bandwidth = base.encode(y=alt.Y("bus_gbps:Q", title="bus bandwidth (Gbps)"))
    limit_gbps = outcome.contest.limit_bps * 1e-9
    rule = alt.Chart(alt.Data(values=[{"limit": limit_gbps}])).mark_rule(strokeDash=[5, 4])
    limit = rule.encode(y="limit:Q")
    time = base.encode(
        y=alt.Y("time_us:Q", title="time (us)", scale=alt.Scale(type="log", nice=False, padding=14))
    )
    panels = alt.hconcat(_lined(bandwidth) + limit, _lined(time), spacing=40)
    title = f"All-reduce by {outcome.workers} workers at {show_rate(outcome.contest.rate_bps)}"
    lines = [
        f"dashed: the payload limit, {show_rate(outcome.contest.limit_bps)}; medians of "
        f"{outcome.contest.rounds} rounds in turns"
    ]
    save(titled(panels, title, lines), path)


def _lined(chart: alt.Chart) -> alt.Chart:
    lines = chart.mark_line(strokeWidth=2.5) + chart.mark_point(size=45, filled=True, opacity=1)
    return lines.properties(width=380, height=290)
