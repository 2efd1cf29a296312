"""Predictions compared with unseen jobs: python -m validation.predictions DIRECTORY

One run is recorded in the lab, of two workers at 1 Gbps. From it alone, steps are predicted on
other links, with more workers, other buckets and other models. Then each of these jobs is recorded
too, and each run of the same model predicts all others. The accelerators are emulated: they wait as
long as a V100 would compute. So workers on one machine do not slow each other's computation down.
The transport is real. Runs stay in DIRECTORY, and an existing run is not recorded again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

import fullwire as fw
from fullwire.run.run import Run
from fullwire.simulation.typical import typical_step
from fullwire.units import show_time
from validation import arguments, results
from validation.emulated_jobs import Job, recorded

SHOWN = Job()
JOBS = (
    SHOWN,
    Job(rate="500Mbps", steps=12),
    Job(rate="2Gbps"),
    Job(rate="5Gbps", steps=40),
    Job(rate="10Gbps", steps=40),
    Job(workers=3),
    Job(workers=4),
    Job(workers=3, rate="2Gbps"),
    Job(workers=4, rate="2Gbps"),
    Job(workers=3, rate="5Gbps", steps=40),
    Job(workers=3, rate="10Gbps", steps=40),
    Job(workers=4, rate="10Gbps", steps=40),
    Job(buckets="ddp:5MiB"),
    Job(buckets="ddp:100MiB"),
    Job(rate="10Gbps", buckets="ddp:1MiB", steps=40),
    Job(rate="5Gbps", buckets="ddp:5MiB", steps=40),
    Job(workers=4, rate="10Gbps", buckets="ddp:1MiB", steps=40),
    Job(model="resnet101@v100"),
    Job(model="resnet101@v100", rate="10Gbps", steps=40),
    Job(model="resnet101@v100", workers=4, rate="5Gbps"),
    Job(model="vgg16@v100", steps=6),
    Job(model="vgg16@v100", rate="10Gbps", steps=20),
    Job(model="vgg16@v100", workers=3, rate="5Gbps", steps=10),
    Job(model="bert-large@v100", rate="10Gbps", steps=8),
    # These were not used when the model's constants were chosen:
    Job(rate="700Mbps", steps=15),
    Job(rate="3Gbps"),
    Job(rate="8Gbps", buckets="ddp:10MiB", steps=40),
    Job(workers=3, rate="4Gbps"),
    Job(workers=4, rate="500Mbps", steps=10),
    Job(workers=3, buckets="ddp:2MiB"),
    Job(model="resnet101@v100", workers=3, rate="2Gbps", steps=15),
    Job(model="resnet101@v100", workers=3, rate="10Gbps", buckets="ddp:50MiB", steps=30),
    Job(model="vgg16@v100", workers=2, rate="2Gbps", steps=8),
    Job(model="gpt2@v100", workers=2, rate="5Gbps", steps=8),
)


class Held(NamedTuple):
    """A prediction and its measurement."""

    error: float
    holds: bool
    half_width: float  # of the interval, as a share of the prediction
    line: str


def main() -> None:
    """Record the missing runs, predict, and print the tables."""
    taken = arguments.parser(__doc__)
    taken.add_argument("directory", type=Path)
    place = taken.parse_args().directory
    place.mkdir(parents=True, exist_ok=True)
    runs = {job: recorded(job, place) for job in JOBS}
    columns = ["job", "measured", "predicted", "interval", "error", "holds"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    found = []
    for job, truth in runs.items():
        found.append(held(job, runs[SHOWN], truth))
        print(found[-1].line, flush=True)
    # The first is the job that was shown.
    told = results.said_of([one.error for one in found[1:]], [one.holds for one in found[1:]])
    print(f"\n{told['cases']} jobs that were not shown: {told['summary']}")
    table = results.Table(columns=columns, rows=results.rows([one.line for one in found]))
    results.renew("predictions", tables=[table], **told)
    _each_shown(runs)


def _each_shown(runs: Mapping[Job, Run]) -> None:
    """Show each run of the shown model in turn, and predict all others."""
    rows: list[list[results.Cell]] = []
    every: list[Held] = []
    for shown, run in runs.items():
        if shown.model != SHOWN.model:
            continue
        found = [held(job, run, truth) for job, truth in runs.items() if job != shown]
        every += found
        figures = results.spread([one.error for one in found])
        shares = [figures["median"], figures["p90"], figures["worst"]]
        shares.append(float(np.median([one.half_width for one in found])))
        inside = f"{sum(one.holds for one in found)} of {len(found)}"
        rows.append([str(shown), *(f"{share:.1%}" for share in shares), inside])
        print(" | ".join(map(str, rows[-1])), flush=True)
    columns = ["shown", "median", "p90", "worst", "half width, median", "in their interval"]
    told = results.said_of([one.error for one in every], [one.holds for one in every])
    print(f"\n{told['cases']} predictions: {told['summary']}")
    results.write(
        "predictions-each-shown",
        claim="The interval holds nine truths of ten, whichever run is shown.",
        anchor="the same 34 jobs, each of 23 shown in turn",
        measure="relative error of the step",
        tables=[results.Table(columns=columns, rows=rows)],
        **told,
    )


def held(job: Job, shown: Run, truth: Run) -> Held:
    """Predict a job from the run that is shown, and hold it against its measurement."""
    subject = shown if job.model == SHOWN.model else job.model
    found = fw.whatif(
        subject,
        workers=job.workers,
        ranks_per_host=job.workers,  # all on this machine, as the lab has them
        bandwidth=job.rate,
        buckets=job.buckets,
        transport="measured",
        calibrate=shown,
    )
    [low_s], [high_s] = found.interval_s
    predicted_s, measured_ns = float(found["step_s"][0]), typical_step(truth).measured_ns
    assert measured_ns is not None
    measured_s = measured_ns * 1e-9
    error, holds = predicted_s / measured_s - 1, bool(low_s <= measured_s <= high_s)
    line = (
        f"| {job} | {show_time(measured_s)} | "
        f"{show_time(predicted_s)} | {show_time(low_s)} to {show_time(high_s)} | {error:+.1%} | "
        f"{'yes' if holds else 'NO'} |"
    )
    return Held(error, holds, float(high_s - low_s) / 2 / predicted_s, line)


if __name__ == "__main__":
    main()
