"""All-reduce by our transport beside others': a table, an object for programs, a picture."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullwire.report.charts import COLOURS, save, titled
from fullwire.run.centre import Centre, median_of
from fullwire.studies.contest.description import MIB, OURS, Outcome, Turn, bus_bytes
from fullwire.units import show_rate, show_time

if TYPE_CHECKING:
    import altair as alt

_LEAST_BYTES_FOR_CPU = MIB  # below, processor time is a matter of messages and not of bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """One of the two that are compared, with one size."""

    time_s: Centre
    bus_bps: float
    limit_share: float
    cpu_s_per_gb: float


def contest_lines(outcome: Outcome) -> Iterator[str]:
    """Go through the lines of the table, and what has to be said beside it."""
    contest = outcome.contest
    yield (
        f"all-reduce of float32 by {outcome.workers} workers at {show_rate(contest.rate_bps)}, "
        f"{os.cpu_count()} processors here; {contest.rounds} rounds in turns, medians"
    )
    yield f"payload limit (rate x 1448/1514): {show_rate(contest.limit_bps)}"
    for moved in outcome.moved:
        streams = "1 stream" if moved.streams == 1 else f"{moved.streams} streams"
        yield f"iperf3 both ways at once, {streams}: {show_rate(moved.rate_bps)} each way"
    yield ""
    yield (
        f"{'size':>9}  {'':<5}{OURS:>10}{'theirs':>10}  {'faster (95 % sure)':<24}"
        f"{'bus bandwidth':>22}{'of the limit':>15}{'CPU s per GB':>14}"
    )
    for size_bytes, peer, ours, theirs in outcome.pairs():
        our, their = _side(outcome, size_bytes, ours), _side(outcome, size_bytes, theirs)
        faster = _times_faster(ours, theirs)
        cpu = f"{our.cpu_s_per_gb:.2f} / {their.cpu_s_per_gb:.2f}"
        bus = f"{show_rate(our.bus_bps)} / {show_rate(their.bus_bps)}"
        yield (
            f"{_size(size_bytes):>9}  {peer:<5}{show_time(our.time_s.value):>10}"
            f"{show_time(their.time_s.value):>10}  "
            f"{f'{faster.value:.2f}x ({faster.low:.2f} to {faster.high:.2f})':<24}{bus:>22}"
            f"{f'{our.limit_share:.1%} / {their.limit_share:.1%}':>15}"
            f"{cpu if size_bytes >= _LEAST_BYTES_FOR_CPU else '-':>14}"
        )
    yield from outcome.notes


def contest_object(outcome: Outcome) -> dict[str, Any]:
    """Return the outcome as JSON takes it; a row is a size beside one peer."""
    return {
        "workers": outcome.workers,
        "rate_bps": outcome.contest.rate_bps,
        "limit_bps": outcome.contest.limit_bps,
        "rounds": outcome.contest.rounds,
        "processors": os.cpu_count(),
        "iperf3": [
            {"streams": moved.streams, "bus_bps": moved.rate_bps} for moved in outcome.moved
        ],
        "rows": [_row(outcome, *pair) for pair in outcome.pairs()],
        "notes": list(outcome.notes),
    }


def _row(
    outcome: Outcome, size_bytes: int, peer: str, ours: Sequence[Turn], theirs: Sequence[Turn]
) -> dict[str, Any]:
    faster = _times_faster(ours, theirs)
    return {
        "bytes": size_bytes,
        "workers": outcome.workers,
        "rate_bps": outcome.contest.rate_bps,
        "against": peer,
        **_named("ours", _side(outcome, size_bytes, ours)),
        **_named("theirs", _side(outcome, size_bytes, theirs)),
        "limit_bps": outcome.contest.limit_bps,
        "times_faster": faster.value,
        "times_faster_interval": {"low": faster.low, "high": faster.high},
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
    """Compare round by round, since what disturbs a round disturbs both."""
    return median_of([their.time_s / our.time_s for our, their in zip(ours, theirs, strict=True)])


def _size(size_bytes: int) -> str:
    """Print a size by powers of two, as such tables name them."""
    for factor, unit in ((MIB, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= factor and size_bytes % factor == 0:
            return f"{size_bytes // factor} {unit}"
    return f"{size_bytes:,} B"


def plot_contest(outcome: Outcome, path: Path) -> None:
    """Draw bus bandwidth and time against size."""
    import altair as alt

    names, rows = (OURS, *outcome.contest.against), []
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
