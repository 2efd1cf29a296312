"""The measured cost of recording: a few lines, or an object for programs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from fullwire.run.centre import Centre, centre_of
from fullwire.studies.recording.job import LONGER_S, STEPS
from fullwire.studies.recording.overhead import RANKS, Difference, Overhead, Pair
from fullwire.units import show_time

_WORDS: dict[Difference, str] = {
    "record": "step time with the recorder over without",
    "control": "the same with no recorder in either (control)",
    "hooks": "the same with its hooks in torch alone",
    "sampler": "the same with the sampler beside the job alone",
    "longer": f"the same with nothing but {show_time(LONGER_S)} of work more in each step",
}


def overhead_lines(result: Overhead) -> Iterator[str]:
    """Yield the lines about the cost of recording."""
    recorded, control = result.pairs["record"], result.pairs["control"]
    yield (
        f"{len(recorded)} pairs of turns of {STEPS} steps, {RANKS} ranks, 40 layers, "
        f"{show_time(_step_s(recorded))} a step without the recorder"
    )
    for difference, pairs in result.pairs.items():
        ratio = _ratio(pairs)
        yield (
            f"{_WORDS[difference]}: {ratio.value:.4f} "
            f"(95 % sure between {ratio.low:.4f} and {ratio.high:.4f})"
        )
    cpu, of_control = _cpu_s(recorded), _cpu_s(control)
    yield (
        f"processor time of recording a step, per rank: {cpu.value * 1e6:.0f} us "
        f"({cpu.low * 1e6:.0f} to {cpu.high * 1e6:.0f}; control {of_control.value * 1e6:.0f})"
    )
    yield f"load of the machine at the end: {result.load:.1f}, of which some {RANKS} are the job's"
    wall = _ratio(recorded)
    if wall.high - wall.low > 0.01:
        yield "not sure to half a percent: ask for more --pairs, or a quiet moment"


def overhead_object(result: Overhead) -> dict[str, Any]:
    """Return the cost of recording as a JSON object."""
    recorded, control = result.pairs["record"], result.pairs["control"]
    return {
        "step_s": _step_s(recorded),
        **_named("step_ratio", _ratio(recorded)),
        **_named("control_step_ratio", _ratio(control)),
        **_named("cpu_s", _cpu_s(recorded)),
        **_named("control_cpu_s", _cpu_s(control)),
        "step_ratios": [pair.step_ratio for pair in recorded],
        "control_step_ratios": [pair.step_ratio for pair in control],
        "load": result.load,
    }


def _step_s(pairs: Sequence[Pair]) -> float:
    return centre_of([pair.step_s for pair in pairs]).value


def _ratio(pairs: Sequence[Pair]) -> Centre:
    # Of logarithms: a ratio and its inverse are equally far from 1.
    centre = centre_of([math.log(pair.step_ratio) for pair in pairs])
    return Centre(math.exp(centre.value), math.exp(centre.low), math.exp(centre.high))


def _cpu_s(pairs: Sequence[Pair]) -> Centre:
    return centre_of([pair.cpu_s for pair in pairs])


def _named(name: str, centre: Centre) -> dict[str, Any]:
    return {name: centre.value, f"{name}_interval": {"low": centre.low, "high": centre.high}}
