"""What a page shows, as plain values: the only thing that its script ever sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import fullwire
from fullwire.answers.compare import Comparison, compare
from fullwire.answers.explain import Explanation, explain
from fullwire.answers.explorer import Explorer, explorer
from fullwire.answers.opening import Opened, RunLike, opened
from fullwire.answers.verification import verify
from fullwire.compression.compressor import Compressor
from fullwire.errors import FullwireError, UsageError
from fullwire.files import name_of
from fullwire.findings.finding import Finding
from fullwire.findings.notes import NoFixesPredicted, NothingToPredictFrom
from fullwire.findings.verdicts import drawn_parts
from fullwire.report.as_data import explanation_object, verification_object
from fullwire.report.explanation import blamed, part_labels
from fullwire.report.terminal import fact_rows
from fullwire.run.run import Run
from fullwire.simulation.transport import FullTransport, Transport
from fullwire.timeline.lanes import Bars, Drawing, drawing, lanes_of
from fullwire.timeline.timeline import Doing
from fullwire.timeline.transfers import world
from fullwire.timeline.utilization import UsageOverTime, usage_over_time
from fullwire.units import show_bytes, show_rate, visible
from fullwire.words import sentence as sentence_of
from fullwire.words import sentences

NAME_LENGTH = 160  # a name in a trace may be of any length; what is cut says so
SENTENCE_LENGTH = 600
_NOTHING_COMPUTED = (
    "it tells nothing of what was computed. A recording of the job does (fullwire record), or a "
    "profiler's trace of it."
)


def contents(
    runs: Sequence[RunLike],
    *,
    baseline: RunLike | None = None,
    bandwidth: str | float | None = None,
    calibrate: Sequence[RunLike] = (),
) -> dict[str, Any]:
    """Return all that a page of these runs shows."""
    asked = []
    for given in runs:
        run = opened(given)
        name = name_of(given) if isinstance(given, str | Path) else run.run.provenance.source
        asked.append((_name(name), run))
    found = [
        explain(job, baseline=baseline, bandwidth=bandwidth, calibrate=calibrate)
        for _, job in asked
    ]
    for (name, _), each in zip(asked, found, strict=True):
        if not each.step_s:
            raise UsageError(f"{name}: it holds no times, so there is nothing to draw")
    return {
        "title": f"{asked[0][0]}: is the network the bottleneck?",
        "version": fullwire.__version__,
        "parts": part_labels(),
        "headings": {part: kind.heading for part, kind in drawn_parts().items() if kind.heading},
        "doings": [each.name.lower() for each in Doing],
        "comparisons": list(_comparisons([(name, job.run) for name, job in asked])),
        "runs": [
            _section(name, job, result) for (name, job), result in zip(asked, found, strict=True)
        ],
    }


def _section(name: str, job: Opened, result: Explanation) -> dict[str, Any]:
    run = job.run
    sentence = _sentence(result.verdict.sentence)
    return {
        "name": name,
        "sentence": sentence,
        "subtitle": [_name(each) for each in _subtitle(run)],
        "workers": world(run),
        "explanation": _texts(explanation_object(result), SENTENCE_LENGTH),
        "blamed": blamed(result),
        "no_fixes": next(map(_sentence, sentences(_why_no_fixes(result))), None),
        "ranks": [
            {"rank": rank, "parts": parts}
            for rank, parts in zip(result.detail.ranks, result.detail.rank_parts_s(), strict=True)
        ],
        "facts": [[_name(cell) for cell in row] for row in fact_rows(run)],
        "timeline": _timeline(drawing(run, result.detail, job.parts())),
        "usage": _usage(usage_over_time(run, result.line_rates_bps)),
        "explorer": _explorer(run, result),
    }


def _why_no_fixes(result: Explanation) -> tuple[Finding, ...]:
    kinds = (NoFixesPredicted, NothingToPredictFrom)
    return tuple(note for note in result.notes if isinstance(note, kinds))


def _subtitle(run: Run) -> Iterator[str]:
    """Say in a few words what kind of job this is."""
    facts = run.facts
    if facts.model is not None:
        yield facts.model + ("" if facts.device is None else f" on {facts.device}")
    count = world(run)
    yield f"{count:,} worker" + ("s" if count > 1 else "")
    if facts.line_rate_bps is not None:
        yield show_rate(facts.line_rate_bps)
    for fact, words in (
        (facts.backend, "{}"),
        (facts.buckets, "buckets {}"),
        (facts.hook, "hook {}"),
    ):
        if fact is not None:
            yield words.format(fact)
    size = run.gradients
    if len(size):
        one = (size.rank == size.rank[0]) & (size.step == size.step[len(size) // 2])
        yield f"{show_bytes(int(size.bytes[one].sum()))} of gradients"
    yield run.provenance.origin


def _comparisons(asked: Sequence[tuple[str, Run]]) -> Iterator[dict[str, Any]]:
    """Compare each later run with the first, or say why it cannot be."""
    (first_name, first), *others = asked
    for name, run in others:
        shown: dict[str, Any] = {"before": first_name, "after": name}
        try:
            result = compare(first, run)
        except FullwireError as error:
            yield {**shown, "sentence": _sentence(f"Not compared: {error}.")}
            continue
        yield {**shown, **_compared(result), **_verified(first, run)}


def _compared(result: Comparison) -> dict[str, Any]:
    return {
        "sentence": " ".join(sentences(result.findings)),
        "warnings": [_sentence(warning) for warning in result.warnings],
        "before_s": result.before_s,
        "after_s": result.after_s,
        "differs": [[_name(cell) for cell in row] for row in result.differing_facts],
    }


def _verified(before: Run, after: Run) -> dict[str, Any]:
    found = verify(before, after)
    if found is None:
        return {}
    sentence = _sentence(sentence_of(found.finding))
    return {"prediction": {**(verification_object(found) or {}), "sentence": sentence}}


def _timeline(found: Drawing) -> dict[str, Any]:
    names: dict[str, int] = {}
    steps = [
        {
            "number": step.number,
            "word": step.word,
            "length_ns": step.length_ns,
            "ranks": [
                {
                    "rank": rank.rank,
                    "span": [rank.start_ns, rank.end_ns],
                    "doing": [
                        rank.doing_start_ns.tolist(),
                        rank.doing_end_ns.tolist(),
                        rank.doing.tolist(),
                    ],
                    "lanes": {lane: _bars(bars, names) for lane, bars in rank.lanes.items()},
                }
                for rank in step.ranks
            ],
        }
        for step in found.steps
    ]
    return {
        "lanes": list(lanes_of(found)),
        "steps": steps,
        "names": list(names),
        "ranks_left_out": found.ranks_left_out,
        "steps_left_out": found.steps_left_out,
        "joined": found.joined,
    }


def _bars(bars: Bars, names: dict[str, int]) -> list[list[int]]:
    """Return bars as rows of whole numbers: name, start, end, count; of collectives also more."""
    columns = [
        [names.setdefault(_name(name), len(names)) for name in bars.name.tolist()],
        bars.start_ns.tolist(),
        bars.end_ns.tolist(),
        bars.count.tolist(),
    ]
    if (bars.bytes >= 0).any():
        columns += [bars.issue_ns.tolist(), bars.ready_ns.tolist(), bars.bytes.tolist()]
    return [list(row) for row in zip(*columns, strict=True)]


def _usage(found: UsageOverTime | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "edges_s": [round(each, 4) for each in found.edges_s.tolist()],
        "pictures": [
            {
                "title": picture.title,
                "unit": picture.unit,
                "left_out": picture.left_out,
                "lines": [
                    {"name": _name(line.name), "values": _rounded(line.values)}
                    for line in picture.lines
                ],
            }
            for picture in found.pictures
        ],
    }


def _explorer(run: Run, result: Explanation) -> dict[str, Any]:
    """Return the grid of predictions, or why there is none."""
    if result.scaling_factor is None:
        return {"missing": _NOTHING_COMPUTED}
    try:
        return _explorer_object(explorer(run, result.predictor, result.predicted_from_s))
    except FullwireError as error:
        return {"missing": _sentence(str(error))}


def _explorer_object(found: Explorer) -> dict[str, Any]:
    """Return steps as four digits, the last axis changing fastest, and intervals as per mille."""
    has_interval = bool(np.isfinite(found.half_s).any())
    return {
        "transports": [_transport(transport) for transport in found.transports],
        "workers": list(found.workers),
        "bandwidth_bps": list(found.bandwidth_bps),
        "packings": [_packing(packing) for packing in found.packings],
        "ratios": list(found.ratios),
        "baseline_s": found.baseline_s,
        "step_us": _rounded(found.step_s * 1e6),
        "half_permille": _rounded(found.half_s / found.step_s * 1e3, 2) if has_interval else None,
        "recorded": None
        if found.measured_s is None
        else {
            "workers": found.recorded_workers,
            "bandwidth_bps": found.recorded_bps,
            "measured_s": found.measured_s,
        },
        "shares_processors": found.shares_processors,
    }


def _packing(packing: Compressor) -> dict[str, str]:
    """Name what a compressor costs, shortly and in words."""
    if packing.is_free:
        return {"name": "free", "words": "which costs nothing"}
    speeds = f"packed at {_bytes_rate(packing.encode_bps)}, unpacked at "
    speeds += _bytes_rate(packing.decode_bps)
    if packing.combining == "sum":
        return {"name": _bytes_rate(packing.encode_bps), "words": speeds}
    return {"name": "gathered", "words": f"{speeds}, of every worker by every worker"}


def _bytes_rate(rate_bps: float) -> str:
    return f"{show_bytes(round(rate_bps / 8))}/s"


def _transport(transport: Transport) -> dict[str, Any]:
    if not isinstance(transport, FullTransport):
        return {"name": "measured", "words": "transport as measured in this job"}
    if transport.share == 1:
        return {"name": "full", "words": "every bit of the line rate carries payload"}
    return {
        "name": "headers",
        "words": f"the line is filled; headers leave {transport.share:.1%} of it",
    }


def _rounded(values: NDArray[np.float64], digits: int = 4) -> list[float | int | None]:
    """Return numbers with so many digits, whole where that says as much; None for not a number."""
    return [_digits(each, digits) for each in np.asarray(values).reshape(-1).tolist()]


def _digits(value: float, digits: int) -> float | int | None:
    if not isfinite(value):
        return None
    number = float(f"{value:.{digits}g}")
    return int(number) if number.is_integer() else number


def _name(text: object) -> str:
    return _cut(visible(str(text)), NAME_LENGTH)


def _sentence(text: str) -> str:
    return _cut(visible(text), SENTENCE_LENGTH)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _texts(value: Any, length: int) -> Any:
    """Return plain values with every text in them made visible and not too long."""
    if isinstance(value, str):
        return _cut(visible(value), length)
    if isinstance(value, dict):
        return {key: _texts(each, length) for key, each in value.items()}
    return [_texts(each, length) for each in value] if isinstance(value, list | tuple) else value
