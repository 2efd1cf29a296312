"""Answers as the sentences that people repeat in a meeting."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from fullwire.answers.suspects import Suspect, Suspicion
from fullwire.answers.whatif import WhatIf
from fullwire.simulation.conditions import CONDITIONS
from fullwire.simulation.target import LEAST_BPS, Reached, Targets
from fullwire.units import show_rate, show_time

_SEARCHED = ("bandwidth_bps", "compression", "codec")  # of which the least is found


def target_sentences(result: WhatIf) -> tuple[str, ...]:
    """Say what reaches the target: a sentence per case, and one for all runs together."""
    targets = result.targets
    if targets is None:
        return ()
    varying = {axis for axis, values in result.predictions.axes.items() if len(values) > 1}
    ratios = _by_label(targets.least_compression, varying)
    rates = _by_label(targets.least_bandwidth, varying)
    cases = [_case_sentence(label, ratios.get(label, []), rates[label], targets) for label in rates]
    return (*cases, *_summary(targets, varying))


def suspicion_sentences(result: WhatIf) -> tuple[str, ...]:
    """Say which links of a described cluster hold each job back, and what wider ones would give."""
    return tuple(_suspicion_sentence(each) for each in result.suspicions)


def _suspicion_sentence(found: Suspicion) -> str:
    clauses = [_verdict_clause(found)]
    spine = found.of("spine uplinks")
    if spine is not None and found.worst not in (None, spine):
        clauses.append(_spine_clause(found, spine))
    return f"{_where(found)}: {'; '.join(clauses)}."


def _where(found: Suspicion) -> str:
    placed = ", scattered over the leaves" if found.is_scattered else ""
    return f"{found.run}, {found.workers} workers of {found.cluster}{placed}"


def _verdict_clause(found: Suspicion) -> str:
    worst = found.worst
    if worst is None:
        spine = (
            f", the {found.oversubscription:g}:1 spine included" if found.oversubscription else ""
        )
        return f"no link holds it back{spine}: a step takes {show_time(found.step_s)}"
    shorter = 1 - worst.step_s / found.step_s
    return (
        f"{_blamed(found, worst)} hold it back: with {worst.change} a step would take "
        f"{show_time(worst.step_s)} instead of {show_time(found.step_s)} ({shorter:.1%} less)"
    )


def _blamed(found: Suspicion, worst: Suspect) -> str:
    if worst.links == "spine uplinks":
        return f"the uplinks of the {found.oversubscription:g}:1 spine"
    return f"the {worst.links}"


def _spine_clause(found: Suspicion, spine: Suspect) -> str:
    named = f"the {found.oversubscription:g}:1 spine"
    if not found.is_to_blame(spine):
        return f"{named} does not, {spine.change} would change nothing that matters"
    return f"{spine.change} alone would give {show_time(spine.step_s)}"


def _by_label(reached: Sequence[Reached], varying: set[str]) -> dict[str, list[Reached]]:
    return {
        label: list(cases) for label, cases in groupby(reached, lambda each: _label(each, varying))
    }


def _label(case: Reached, varying: set[str]) -> str:
    parts = [case.run, f"{case.workers} worker" + ("s" if case.workers > 1 else "")]
    others = [each for each in CONDITIONS if each in varying - {"run", "workers", *_SEARCHED}]
    parts += [
        CONDITIONS[axis].worded(getattr(case, axis)) for axis in others if hasattr(case, axis)
    ]
    return ", ".join(parts)


def _case_sentence(
    label: str, ratios: list[Reached], rates: list[Reached], targets: Targets
) -> str:
    clauses = [_ratio_clause(case) for case in ratios]
    clauses += [_bandwidth_clause(case) for case in _worth_saying(rates)]
    return f"{label}: a scaling factor of {targets.scaling_factor:g} needs {'; '.join(clauses)}."


def _worth_saying(rates: list[Reached]) -> list[Reached]:
    """Keep codecs and the least compression; the ratios between are in the JSON."""
    free = [case for case in rates if case.codec is None]
    return free[:1] + [case for case in rates if case.codec is not None]


def _ratio_clause(case: Reached) -> str:
    return f"{_needed(case)} at {show_rate(case.bandwidth_bps or 0.0)}"


def _needed(case: Reached) -> str:
    if case.compression is None:
        return f"more than any compression (best {case.best_scaling_factor:.4f})"
    if case.compression == 1:
        return "no compression"
    return f"{_rounded_up(case.compression):.4g}x compression"


def _bandwidth_clause(case: Reached) -> str:
    how = _with_compression(case)
    if case.bandwidth_bps is None:
        return f"more than any bandwidth {how} (best {case.best_scaling_factor:.4f})"
    if case.bandwidth_bps <= LEAST_BPS:
        return f"next to no bandwidth {how}"
    return f"{show_rate(_rounded_up(case.bandwidth_bps))} {how}"


def _with_compression(case: Reached) -> str:
    if case.codec is not None:
        return f"with codec {case.codec}"
    if case.compression == 1:
        return "without compression"
    return f"with {case.compression:g}x compression"


def _summary(targets: Targets, varying: set[str]) -> Iterator[str]:
    """Draw several runs together, bandwidth by bandwidth, where nothing else varies."""
    if "run" not in varying or varying - {"run", "workers", "bandwidth_bps", "codec"}:
        return
    ordered = sorted(targets.least_compression, key=_place)
    for (workers, rate_bps), cases in groupby(ordered, key=_place):
        least, *_, most = sorted(cases, key=_difficulty)
        if _needed(least) == _needed(most):
            needed = f"{_needed(least)} for any of these runs"
        else:
            needed = f"from {_needed(least)} ({least.run}) to {_needed(most)} ({most.run})"
        yield f"{workers} workers at {show_rate(rate_bps)}: {needed}."


def _place(case: Reached) -> tuple[int, float]:
    return case.workers, case.bandwidth_bps or 0.0


def _difficulty(case: Reached) -> float:
    return math.inf if case.compression is None else case.compression


def _rounded_up(number: float) -> float:
    """Round to three digits, upwards: what is printed still reaches the target."""
    digit = 10.0 ** (math.floor(math.log10(number)) - 2)
    return math.ceil(number / digit - 1e-9) * digit
