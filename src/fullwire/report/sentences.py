"""Answers as the sentences that people repeat in a meeting."""

from __future__ import annotations

import math
from itertools import groupby

from fullwire.answers.whatif import WhatIf
from fullwire.simulation.target import LEAST_BPS, Reached
from fullwire.units import show_rate


def target_sentences(result: WhatIf) -> tuple[str, ...]:
    """Say what reaches the target: one sentence per run and other conditions."""
    targets = result.targets
    if targets is None:
        return ()
    varying = {axis for axis, values in result.predictions.axes.items() if len(values) > 1}
    sentences = []
    for label, cases in groupby(targets.least_bandwidth, key=lambda each: _label(each, varying)):
        clauses = "; ".join(_bandwidth_clause(case) for case in cases)
        sentences.append(f"{label}: {targets.scaling_factor:g} needs {clauses}.")
    for label, cases in groupby(targets.least_compression, key=lambda each: _label(each, varying)):
        clauses = "; ".join(_ratio_clause(case) for case in cases)
        sentences.append(f"{label}: {targets.scaling_factor:g} needs {clauses}.")
    return tuple(sentences)


def _label(case: Reached, varying: set[str]) -> str:
    parts = [case.run, f"{case.workers} worker" + ("s" if case.workers > 1 else "")]
    parts += [str(getattr(case, axis)) for axis in ("buckets", "algorithm") if axis in varying]
    if "transport" in varying:
        parts.append(f"transport {case.transport}")
    if "latency_s" in varying:
        parts.append(f"latency {case.latency_s:g} s")
    return ", ".join(parts)


def _bandwidth_clause(case: Reached) -> str:
    how = _with_compression(case)
    if case.bandwidth_bps is None:
        return f"more than any bandwidth {how} (best {case.best_scaling_factor:.4f})"
    if case.bandwidth_bps <= LEAST_BPS:
        return f"no bandwidth worth the name {how}"
    return f"{show_rate(_rounded_up(case.bandwidth_bps))} {how}"


def _with_compression(case: Reached) -> str:
    if case.codec is not None:
        return f"with codec {case.codec}"
    return (
        "without compression"
        if case.compression == 1
        else f"with {case.compression:g}x compression"
    )


def _ratio_clause(case: Reached) -> str:
    at = f"at {show_rate(case.bandwidth_bps or 0.0)}"
    if case.compression is None:
        return f"{at} more than any compression (best {case.best_scaling_factor:.4f})"
    if case.compression == 1:
        return f"{at} no compression"
    return f"{at} {_rounded_up(case.compression):.4g}x compression"


def _rounded_up(number: float) -> float:
    """Round to three digits, upwards: what is printed still reaches the target."""
    digit = 10.0 ** (math.floor(math.log10(number)) - 2)
    return math.ceil(number / digit - 1e-9) * digit
