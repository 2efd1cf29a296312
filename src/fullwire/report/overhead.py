"""What recording costs, as measured: a few lines, or an object for programs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from fullwire.sources.live.overhead import RANKS, Median, Overhead, Pair, median_of
from fullwire.units import show_time


def overhead_lines(result: Overhead) -> Iterator[str]:
    """Go through the lines that say what recording costs."""
    yield (
        f"{len(result.recorded)} pairs in turns of one step, {RANKS} ranks, 40 layers, "
        f"{show_time(_step_s(result))} a step without the recorder"
    )
    wall = _ratio(result.recorded)
    yield f"step time with the recorder over without: {_shown(wall)}"
    yield f"the same with no recorder in either (control): {_shown(_ratio(result.control))}"
    cpu, control = _cpu_s(result.recorded), _cpu_s(result.control)
    yield (
        f"processor time of recording a step, per rank: {cpu.value * 1e6:.0f} us "
        f"({cpu.low * 1e6:.0f} to {cpu.high * 1e6:.0f}; control {control.value * 1e6:.0f})"
    )
    yield f"load of the machine at the end: {result.load:.1f}, of which some {RANKS} are the job's"
    if wall.high - wall.low > 0.02:
        yield "the machine was busy with something else: ask for more --pairs, or a quiet moment"


def overhead_object(result: Overhead) -> dict[str, Any]:
    """Return what recording costs as JSON takes it."""
    return {
        "step_s": _step_s(result),
        **_named("step_ratio", _ratio(result.recorded)),
        **_named("control_step_ratio", _ratio(result.control)),
        **_named("cpu_s", _cpu_s(result.recorded)),
        **_named("control_cpu_s", _cpu_s(result.control)),
        "step_ratios": [pair.step_ratio for pair in result.recorded],
        "control_step_ratios": [pair.step_ratio for pair in result.control],
        "load": result.load,
    }


def _step_s(result: Overhead) -> float:
    return statistics.median(pair.step_s for pair in result.recorded)


def _ratio(pairs: Sequence[Pair]) -> Median:
    return median_of([pair.step_ratio for pair in pairs])


def _cpu_s(pairs: Sequence[Pair]) -> Median:
    return median_of([pair.cpu_s for pair in pairs])


def _shown(ratio: Median) -> str:
    return f"{ratio.value:.4f} (median; 95 % sure between {ratio.low:.4f} and {ratio.high:.4f})"


def _named(name: str, median: Median) -> dict[str, Any]:
    return {name: median.value, f"{name}_interval": {"low": median.low, "high": median.high}}
