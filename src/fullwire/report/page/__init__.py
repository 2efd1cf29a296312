"""A job, or several, as one HTML page that asks for nothing outside itself.

`page.html`, `page.css` and `page.js` are the page. Python fills in the data as JSON and writes the
sentence for browsers without scripts. Data cannot become markup or code, for three reasons. As JSON
it holds no "<". The script puts it on the page as text only. The page's own policy allows one style
sheet and one script, its own, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fullwire.answers.compare import compare
from fullwire.answers.conditions import rate
from fullwire.answers.explain import Explanation, explain
from fullwire.answers.opening import Opened, RunLike, many, name_of_run, opened, with_line_rate
from fullwire.answers.search import explorer
from fullwire.answers.trials import Tuning
from fullwire.answers.verification import verify
from fullwire.display import shortened
from fullwire.errors import FullwireError, UsageError
from fullwire.findings.notes import NoFixesPredicted, NothingToPredictFrom
from fullwire.findings.verdicts import drawn_parts
from fullwire.outputs import refuse_existing, written
from fullwire.report.as_data import explanation_object, tuning_object, verification_object
from fullwire.report.contents import fact_rows
from fullwire.report.explanation import blamed, of_which_steps, part_labels
from fullwire.run.run import Run
from fullwire.simulation.transport import FullTransport
from fullwire.timeline.lanes import Drawing, drawing, lanes_of
from fullwire.timeline.timeline import Doing
from fullwire.timeline.transfers import is_world_told, world
from fullwire.timeline.utilization import UsageOverTime, usage_over_time
from fullwire.units import show_bytes, show_rate, shown
from fullwire.version import __version__
from fullwire.words import sentence, sentences

MOST_RUNS = 6
MOST_EVENTS = 2_000  # of an elastic job
MOST_BARS = 20_000  # of a run's timeline, some 20 bytes each
_STARTS = 1  # The column of a lane that always is a list.
NAME_LENGTH = 160  # A name in a trace may be of any length. A shortened name ends with a mark.
SENTENCE_LENGTH = 600
_NOTHING_COMPUTED = (
    "it tells nothing of computing. A recording of the job does (fullwire record), or a "
    "profiler's trace of it."
)


def write_page(
    runs: RunLike | Sequence[RunLike],
    path: str | Path,
    *,
    baseline: RunLike | None = None,
    bandwidth: str | float | None = None,
    calibrate: RunLike | Sequence[RunLike] = (),
    replace: bool = False,
    tuning: Tuning | None = None,
) -> Path:
    """Explain runs on a page, each in a section and the later ones compared with the first.

    - `runs`: a run or its path, or up to six of them.
    - `path`: the page, an `.html` file.
    - `baseline`, `bandwidth`, `calibrate`: those of `explain`, for all of the runs.
    - `replace`: a file that exists is replaced.
    - `tuning`: a result of `tune`. Its trials stand before its recordings.

        fw.write_page(["before.run", "after.run"], "report.html")
    """
    place = Path(path)
    asked = many(runs)
    if not 1 <= len(asked) <= MOST_RUNS:
        raise UsageError(f"report: expected one run to {MOST_RUNS} on a page, got {len(asked)}")
    check_page_path(place, replace)
    content = contents(asked, baseline=baseline, bandwidth=bandwidth, calibrate=calibrate)
    if tuning is not None:
        if not isinstance(tuning, Tuning):
            raise UsageError(f"report: expected the result of tune as tuning, got {shown(tuning)}")
        content["tuning"] = _texts(tuning_object(tuning), SENTENCE_LENGTH)
    with written(place) as beside:
        beside.write_text(page(content), encoding="utf-8")
    return place


def check_page_path(path: Path, replace: bool) -> None:
    """Refuse a path where no page can be written, before the work starts."""
    if path.suffix.lower() != ".html":
        raise UsageError(f"report: expected a file ending in .html, got {path}")
    refuse_existing(path, replace, "report")


def page(content: dict[str, Any]) -> str:
    """Fill the page's data in."""
    # The colours of an account's parts, as the style sheet names them.
    drawn = {part: kind.colour for part, kind in drawn_parts().items() if kind.colour is not None}
    light = " ".join(f"--{part}: {colour.light};" for part, colour in drawn.items())
    dark = " ".join(f"--{part}: {colour.dark};" for part, colour in drawn.items())
    colours = f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
    style, script = colours + _file("page.css"), _file("page.js")
    parts = {
        "policy": f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'",
        "title": html.escape(content["title"]),
        "sentences": "".join(f"<p>{html.escape(run['sentence'])}</p>" for run in content["runs"]),
        "style": style,
        "script": script,
        # "</script>" or "<!--" in a name would end the data early, so every "<" is escaped.
        "data": msgspec.json.encode(content).decode().replace("<", "\\u003c"),
    }
    # All places are filled in one pass, so inserted text is never searched for places.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _file("page.html"))


def _file(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def contents(
    runs: Sequence[RunLike],
    *,
    baseline: RunLike | None = None,
    bandwidth: str | float | None = None,
    calibrate: RunLike | Sequence[RunLike] = (),
) -> dict[str, Any]:
    """Return all that a page of these runs shows, as plain values: its script sees nothing else."""
    asked = []
    for given in runs:
        run = opened(given)
        asked.append((_name(name_of_run(given, run.run)), run))
    explanations = [
        explain(job, baseline=baseline, bandwidth=bandwidth, calibrate=calibrate)
        for _, job in asked
    ]
    for (name, _), explanation in zip(asked, explanations, strict=True):
        if not explanation.step_s:
            raise UsageError(f"{name}: expected a run with times to draw, got none")
    recorded = [(name, job.run) for name, job in asked]
    if bandwidth is not None:
        recorded = [(name, with_line_rate(run, rate(bandwidth))) for name, run in recorded]
    return {
        "title": f"{asked[0][0]}: is the network the bottleneck?",
        "version": __version__,
        "parts": part_labels(),
        "headings": {part: kind.heading for part, kind in drawn_parts().items() if kind.heading},
        "doings": [doing.name.lower() for doing in Doing],
        "comparisons": list(_comparisons(recorded)),
        "runs": [
            _section(name, job, result)
            for (name, job), result in zip(asked, explanations, strict=True)
        ],
    }


def _section(name: str, job: Opened, result: Explanation) -> dict[str, Any]:
    run = job.run
    explained = _texts(explanation_object(result), SENTENCE_LENGTH)
    if explained["membership"] is not None:
        del explained["membership"]["events"][MOST_EVENTS:]
    kinds = (NoFixesPredicted, NothingToPredictFrom)
    why_no_fixes = [_sentence(sentence(note)) for note in result.notes if isinstance(note, kinds)]
    return {
        "name": name,
        "sentence": _sentence(result.verdict.sentence),
        "subtitle": [_name(part) for part in _subtitle(run)],
        "workers": world(run) if is_world_told(run) else None,
        "explanation": explained,
        "of_which_steps": _sentence(of_which_steps(result)),
        "blamed": blamed(result),
        "no_fixes": why_no_fixes[0] if why_no_fixes else None,
        "ranks": [
            {"rank": rank, "parts": parts}
            for rank, parts in zip(result.detail.ranks, result.detail.rank_parts_s(), strict=True)
        ],
        "facts": [[_name(cell) for cell in row] for row in fact_rows(run)],
        "timeline": _timeline(drawing(run, result.detail, job.parts())),
        "usage": _usage(usage_over_time(run, result.line_rates_bps)),
        "explorer": _explorer(run, result),
    }


def _subtitle(run: Run) -> Iterator[str]:
    """Yield a few words about the kind of job."""
    facts = run.facts
    if facts.model is not None:
        yield facts.model + ("" if facts.device is None else f" on {facts.device}")
    if is_world_told(run):
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
    """Compare each later run with the first, or say why they cannot be compared."""
    (first_name, first), *others = asked
    for name, run in others:
        compared: dict[str, Any] = {"before": first_name, "after": name}
        try:
            result = compare(first, run)
        except FullwireError as error:
            yield {**compared, "sentence": _sentence(f"Not compared: {error}.")}
            continue
        compared |= {
            "sentence": " ".join(sentences(result.findings)),
            "warnings": [_sentence(warning) for warning in result.warnings],
            "before_s": result.before_s,
            "after_s": result.after_s,
            "differs": [[_name(cell) for cell in row] for row in result.differing_facts],
        }
        verified = verify(first, run)
        if verified is not None:
            told = _sentence(sentence(verified.finding))
            compared["prediction"] = {**(verification_object(verified) or {}), "sentence": told}
        yield compared


def _timeline(picture: Drawing) -> dict[str, Any]:
    """Return steps in the page's format; leave out the unnamed ones if there are too many bars.

    A lane is a list of columns: names, starts as differences, lengths and counts. Lanes of
    collectives have three more: the time in the queue, the time until the last rank came, and
    bytes.
    """
    names: dict[str, int] = {}
    steps = list(picture.steps)
    while unnamed := [step for step in steps if not step.word]:
        lanes_drawn = (
            lane for step in steps for rank in step.ranks for lane in rank.lanes.values()
        )
        if sum(map(len, lanes_drawn)) <= MOST_BARS:
            break
        steps.remove(unnamed[len(unnamed) // 2])
    drawn = []
    for step in steps:
        ranks = []
        for rank in step.ranks:
            lanes = {}
            for lane, bars in rank.lanes.items():
                numbers = [names.setdefault(_name(name), len(names)) for name in bars.name.tolist()]
                starts_ns = np.diff(bars.start_ns, prepend=0).tolist()
                columns = [numbers, starts_ns, bars.end_ns - bars.start_ns, bars.count]
                if (bars.bytes >= 0).any():
                    until_ns = (bars.ready_ns - bars.start_ns).tolist()
                    ready = [
                        None if is_unknown else time_ns
                        for is_unknown, time_ns in zip(bars.ready_ns < 0, until_ns, strict=True)
                    ]
                    columns += [bars.start_ns - bars.issue_ns, ready, bars.bytes]
                lanes[lane] = [
                    column if place == _STARTS else _shortened(column)
                    for place, column in enumerate(columns)
                ]
            lengths_ns = (rank.doing_end_ns - rank.doing_start_ns).tolist()
            ranks.append(
                {
                    "rank": rank.rank,
                    "span": [rank.start_ns, rank.end_ns],
                    "doing": [lengths_ns, rank.doing.tolist()],
                    "lanes": lanes,
                }
            )
        drawn.append(
            {"number": step.number, "word": step.word, "length_ns": step.length_ns, "ranks": ranks}
        )
    return {
        "lanes": list(lanes_of(picture)),
        "steps": drawn,
        "names": list(names),
        "ranks_left_out": picture.ranks_left_out,
        "steps_left_out": picture.steps_left_out + len(picture.steps) - len(steps),
        "joined": picture.joined,
    }


def _shortened(column: Any) -> Any:
    """Return a column as a list, or as one value if all its values are equal."""
    values = np.asarray(column).tolist() if isinstance(column, np.ndarray) else column
    return values[0] if values.count(values[0]) == len(values) else values


def _usage(usage: UsageOverTime | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    return {
        "edges_s": [round(edge_s, 4) for edge_s in usage.edges_s.tolist()],
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
            for picture in usage.pictures
        ],
    }


def _explorer(run: Run, result: Explanation) -> dict[str, Any]:
    """Return the grid of predictions, or the reason why there is none.

    Steps have four digits, the last axis changes fastest, and intervals are per mille.
    """
    if result.scaling_factor is None:
        return {"missing": _NOTHING_COMPUTED}
    try:
        explored = explorer(run, result.predictor, result.predicted_from_s)
    except FullwireError as error:
        return {"missing": _sentence(str(error))}
    has_interval = bool(np.isfinite(explored.half_s).any())
    transports = []
    for transport in explored.transports:
        name, words = "measured", "transport as measured in this job"
        if isinstance(transport, FullTransport):
            name, words = "full", "every bit of the line rate carries payload"
            if transport.share != 1:
                name = "headers"
                words = f"the line is filled; headers leave {transport.share:.1%} of it"
        transports.append({"name": name, "words": words})
    packings = []
    for packing in explored.packings:  # the cost of a compressor, shortly and in words
        name, words = "free", "which costs nothing"
        if not packing.is_free:
            packed, unpacked = _bytes_rate(packing.encode_bps), _bytes_rate(packing.decode_bps)
            name, words = packed, f"packed at {packed}, unpacked at {unpacked}"
            if packing.combining != "sum":
                name, words = "gathered", f"{words}, of every worker by every worker"
        packings.append({"name": name, "words": words})
    return {
        "transports": transports,
        "workers": list(explored.workers),
        "bandwidth_bps": list(explored.bandwidth_bps),
        "packings": packings,
        "ratios": list(explored.ratios),
        "baseline_s": explored.baseline_s,
        "step_us": _rounded(explored.step_s * 1e6),
        "half_permille": _rounded(explored.half_s / explored.step_s * 1e3, 2)
        if has_interval
        else None,
        "recorded": None
        if explored.measured_s is None
        else {
            "workers": explored.recorded_workers,
            "bandwidth_bps": explored.recorded_bps,
            "measured_s": explored.measured_s,
        },
        "shares_processors": explored.shares_processors,
    }


def _bytes_rate(rate_bps: float) -> str:
    return f"{show_bytes(round(rate_bps / 8))}/s"


def _rounded(values: NDArray[np.float64], digits: int = 4) -> list[float | int | None]:
    """Return numbers rounded to `digits`, as integers if they are whole, and None for NaN."""
    numbers = [float(f"{value:.{digits}g}") for value in np.asarray(values).reshape(-1).tolist()]
    return [
        None if not isfinite(number) else int(number) if number.is_integer() else number
        for number in numbers
    ]


def _name(text: object) -> str:
    return shortened(str(text), NAME_LENGTH)


def _sentence(text: str) -> str:
    return shortened(text, SENTENCE_LENGTH)


def _texts(value: Any, length: int) -> Any:
    """Return plain values; in their texts, make every character visible and cut long texts."""
    if isinstance(value, str):
        return shortened(value, length)
    if isinstance(value, dict):
        return {key: _texts(each, length) for key, each in value.items()}
    return [_texts(part, length) for part in value] if isinstance(value, list | tuple) else value
