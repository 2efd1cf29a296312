"""Steps with codecs, predicted from a step without: python -m validation.codec_steps DIRECTORY

Each job (jobs/cell.py) is recorded in the lab with float32 gradients and with each codec, by a hook
on Gloo or packed on the wire of Fullwire's transport. The first recording and the costs that
`fullwire codecs` measured predict the others. The model was chosen by earlier recordings of the
cells of CHOSEN_BY and by the exchanges on the page; it is judged on the cells of FRESH, which are
recorded first.

Runs stay in DIRECTORY, and an existing run is not recorded again, so the script can be stopped and
started again. It repeats recordings beside which much other work ran. Run it from the root of a
checkout, with nothing else on the machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import fullwire as fw
from fullwire.answers.verification import verify
from fullwire.run.processors import share_of_others
from fullwire.units import show_time
from validation import arguments, results
from validation.cells import MUCH, TRIES, in_the_lab

HOOKS = ("bf16", "int8", "powersgd:rank=2")
WIRES = ("bf16", "int8")


class Job(NamedTuple):
    """A training: its kind and width (jobs/cell.py), backend, workers and links, and its codecs."""

    kind: str
    width: int
    backend: str
    cell: str
    codecs: tuple[str, ...] = ()  # The usual ones.

    def __str__(self) -> str:
        """Return the words of its row."""
        numbers = self.width**2 * (6.25 if self.kind == "uneven" else 6)
        return f"{self.kind}, {4 * numbers / 1e6:.0f} MB, {self.backend}"


CHOSEN_BY = (
    Job("computing", 896, "gloo", "2x1Gbps"),
    Job("one-bucket", 1152, "gloo", "2x500Mbps"),
    Job("computing", 1152, "gloo", "3x700Mbps"),
    Job("one-bucket", 896, "gloo", "4x1Gbps"),
    Job("computing", 1152, "fullwire", "2x700Mbps"),
    Job("computing", 1408, "fullwire", "2x400Mbps"),
    Job("one-bucket", 1152, "fullwire", "4x600Mbps"),
    Job("computing", 1024, "gloo", "2x800Mbps", ("bf16", "int8", "powersgd:rank=4")),
    Job("computing", 1024, "fullwire", "2x600Mbps"),
    Job("uneven", 1024, "gloo", "3x600Mbps", ("bf16", "int8", "topk:density=0.01")),
    Job("uneven", 1024, "fullwire", "3x800Mbps"),
    Job("one-bucket", 1280, "gloo", "2x600Mbps", ("fp16", "int8", "powersgd:rank=2")),
    Job("one-bucket", 1280, "fullwire", "2x1Gbps"),
    Job("uneven", 768, "gloo", "2x1500Mbps", ("fp16", "int8", "powersgd")),
    Job("computing", 1280, "fullwire", "4x600Mbps"),
    Job("one-bucket", 1024, "gloo", "4x600Mbps", ("bf16", "int8")),
    Job("uneven", 768, "fullwire", "2x1500Mbps", ("fp16", "int8")),
    Job("computing", 960, "gloo", "2x900Mbps", ("bf16", "int8", "powersgd:rank=4")),
    Job("computing", 1088, "fullwire", "2x700Mbps"),
    Job("uneven", 896, "gloo", "2x1200Mbps", ("fp16", "int8", "topk:density=0.01")),
    Job("uneven", 960, "fullwire", "3x700Mbps"),
    Job("one-bucket", 1216, "gloo", "3x800Mbps", ("bf16", "int8", "powersgd:rank=2")),
    Job("one-bucket", 1152, "fullwire", "2x1200Mbps", ("fp16", "int8")),
    Job("uneven", 1088, "gloo", "2x500Mbps", ("bf16", "int8", "powersgd")),
)
FRESH = (
    Job("computing", 928, "gloo", "2x800Mbps", ("bf16", "int8", "powersgd:rank=2")),
    Job("computing", 1184, "fullwire", "2x900Mbps"),
    Job("uneven", 832, "gloo", "2x1Gbps", ("bf16", "int8", "topk:density=0.01")),
    Job("uneven", 1088, "fullwire", "3x600Mbps"),
    Job("one-bucket", 1088, "gloo", "3x700Mbps", ("fp16", "int8", "powersgd:rank=4")),
    Job("one-bucket", 1248, "fullwire", "2x800Mbps"),
    Job("uneven", 1152, "gloo", "2x400Mbps", ("bf16", "int8", "powersgd")),
)
COLUMNS = [
    "job",
    "cell",
    "codec",
    "float32",
    "measured",
    "predicted",
    "interval",
    "error",
    "holds",
    "beside other work",
]


class Step(NamedTuple):
    """A measured step with a codec, and how far its prediction is off."""

    row: list[str]
    error: float
    holds: bool
    is_alone: bool  # Little other work ran on the machine.


def costs_here(directory: Path, codecs: Iterable[str]) -> Path:
    """Return a file with the costs of codecs on this machine, measured where it is missing."""
    costs = directory / "costs.json"
    if not costs.exists():
        asked = [sys.executable, "-m", "fullwire", "codecs", *sorted(codecs), "--json"]
        costs.write_bytes(subprocess.run(asked, capture_output=True, check=True).stdout)
    return costs


def main() -> None:
    """Record the missing runs, and print the tables."""
    taken = arguments.parser(__doc__)
    taken.add_argument("directory", type=Path)
    taken.add_argument(
        "--for", dest="longest_s", type=float, default=1e9, help="begin no recording after so long"
    )
    given = taken.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    until_s = time.monotonic() + given.longest_s
    hooks = {codec for job in (*CHOSEN_BY, *FRESH) for codec in (*HOOKS, *job.codecs)}
    costs_here(given.directory, hooks)
    tables, judged = [], {}
    for title, jobs in (("Fresh cells", FRESH), ("Cells that chose the model", CHOSEN_BY)):
        print(f"\n{title}\n\n| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
        steps = [step for job in jobs for step in of_codecs(job, given.directory, until_s)]
        tables.append(
            results.Table(title=title, columns=COLUMNS, rows=[list(step.row) for step in steps])
        )
        if steps:
            judged[title] = results.said_of(
                [step.error for step in steps], [step.holds for step in steps]
            )
            alone = [step.error for step in steps if step.is_alone]
            if alone and len(alone) < len(steps):
                told = results.said_of(alone)["summary"]
                judged[title]["summary"] += f"; {len(alone)} alone on the machine: {told}"
            print(f"\n{judged[title]}")
    if "Fresh cells" not in judged:
        return
    fresh, *chosen = judged.values()
    beside = f" (cells that chose: {chosen[0]['summary']})" if chosen else ""
    results.write(
        "codec-steps",
        claim="A step with a codec is predicted from a step without and the codec's costs.",
        anchor="Recordings in the lab with the codec, on cells that did not choose the model.",
        measure="predicted over measured step, less 1",
        tables=tables[: len(judged)],
        **fresh | {"summary": fresh["summary"] + beside},
    )


def of_codecs(job: Job, place: Path, until_s: float) -> Iterator[Step]:
    """Predict the step with each codec, and yield it beside the recording.

    Where a guard stopped the codec, the gradients traveled as float32: no prediction is about that.
    """
    plain: fw.Run | None = None
    usual = WIRES if job.backend == "fullwire" else HOOKS
    for codec in ("float32", *(job.codecs or usual)):
        name = f"{job.kind}_{job.width}_{job.backend}_{job.cell}_{codec.replace(':', '_')}.run"
        path = place / name
        by_hook, on_the_wire = (codec, "float32")[:: -1 if job.backend == "fullwire" else 1]
        os.environ.update(WIDTH=str(job.width), CODEC=by_hook, FULLWIRE_WIRE=on_the_wire)
        for _ in range(TRIES):
            if not path.exists() and time.monotonic() > until_s:
                return
            run = in_the_lab(path, job.cell, ("validation.jobs.cell", job.kind, "24"), job.backend)
            if share_of_others(run) < MUCH or time.monotonic() > until_s:
                break
            shutil.rmtree(path)
        else:
            return
        if plain is None:
            plain = run
            continue
        if run.facts.wire_stopped or run.facts.compression_stopped:
            print(f"{job}, {job.cell}: the guard stopped {codec}; not counted", flush=True)
            continue
        step = beside(plain, run, job, codec, place / "costs.json")
        print(f"| {' | '.join(step.row)} |", flush=True)
        yield step


def beside(plain: fw.Run, run: fw.Run, job: Job, codec: str, costs: Path) -> Step:
    """Hold the step of a recording against its prediction from the one without a codec."""
    measured_s = fw.explain(run).step_s
    busy = max(share_of_others(plain), share_of_others(run))
    row = [
        str(job),
        job.cell,
        codec,
        show_time(fw.explain(plain).step_s),
        show_time(measured_s),
    ]
    if job.backend == "fullwire":
        found = verify(plain, run)
        if found is None:
            raise ValueError(f"{row}: expected a prediction of a wire format, got none")
        predicted_s, low_s, high_s = found.predicted_s, found.low_s, found.high_s
    else:
        table = fw.whatif(plain, compression=codec, codec_costs=costs, transport="measured")
        low_s, high_s = (float(end[0]) for end in table.interval_s)
        predicted_s = float(table["step_s"][0])
    error, holds = predicted_s / measured_s - 1, low_s <= measured_s <= high_s
    row += [show_time(predicted_s), f"{show_time(low_s)} to {show_time(high_s)}"]
    row += [f"{error:+.1%}", "yes" if holds else "NO", f"{busy:.0%}"]
    return Step(row, error, holds, busy < MUCH)


if __name__ == "__main__":
    main()
