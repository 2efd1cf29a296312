"""What recording costs, as measured: a few lines, or an object for programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fullwire.sources.live.overhead import STEPS_A_PAIR, Overhead, median_of
from fullwire.units import show_time


def overhead_lines(result: Overhead) -> Iterator[str]:
    """Go through the lines that say what recording costs."""
    pairs = len(result.wall_ratios)
    yield (
        f"{pairs} pairs of {STEPS_A_PAIR} steps in turns, 2 ranks, 40 layers, "
        f"{show_time(result.step_s)} a step without the recorder"
    )
    for name, ratios in (("step time", result.wall_ratios), ("CPU time", result.cpu_ratios)):
        middle = median_of(ratios)
        yield (
            f"{name} with the recorder over without: {middle.value:.4f} "
            f"(median; 95 % sure between {middle.low:.4f} and {middle.high:.4f})"
        )
    if median_of(result.wall_ratios).high - median_of(result.wall_ratios).low > 0.02:
        yield "the machine was busy with something else: ask for more --pairs, or a quiet moment"


def overhead_object(result: Overhead) -> dict[str, Any]:
    """Return what recording costs as JSON takes it."""
    wall, cpu = median_of(result.wall_ratios), median_of(result.cpu_ratios)
    return {
        "step_s": result.step_s,
        "step_ratio": wall.value,
        "step_ratio_interval": {"low": wall.low, "high": wall.high},
        "cpu_ratio": cpu.value,
        "cpu_ratio_interval": {"low": cpu.low, "high": cpu.high},
        "step_ratios": list(result.wall_ratios),
    }
