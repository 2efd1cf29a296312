"""Jobs with one known flaw each: does `tune` cure them, and were its predictions right?

    .venv/bin/python -m validation.tune [--flaws loader,unused] [--budget 4min] [--steps N]
        [--kept FOLDER]

Each job trains on two ranks: of this machine, or of a lab where its flaw is about the network. Two
labs have two hosts of two ranks. `tune` works with the flawed job and knows nothing of it. Then the
job as somebody sets it by hand is recorded twice. A job is cured if its step takes at most 1.1
times as long as that, and worse if it takes longer than before by more than noise. The job with
float32 gradients is tuned with `--allow numeric`.

With --kept, each job's result is kept in a folder, and jobs whose result is there are not run
again: the whole can be measured in parts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from fullwire.answers.compare import held_against
from fullwire.run.store import read_run
from validation import arguments, results
from validation.jobs.flawed import FLAWS

JOB = str(Path(__file__).parent / "jobs/flawed.py")
RATES = {
    "tiny-buckets": "1Gbps",
    "small-sums": "1Gbps",
    "item": "1Gbps",
    "gloo": "5Gbps",
    "float32": "500Mbps",
    "accumulation": "500Mbps",
    "interface": "1Gbps",
    "placement": "500Mbps",
}
NICS = {"interface": 2, "placement": 1}  # of each host, where it has two ranks
CLUSTER = """
name = "two hosts of two"
nodes = 2
devices_per_node = 2

[inside]
kind = "switch"
rate = "40Gbps"
latency = "20us"

[nics]
per_node = {nics}
rate = "{rate}"
latency = "20us"

[network]
kind = "switch"
"""
ALLOWED = {"float32": "numeric"}
CURED = 1.1
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
FULLWIRE = [sys.executable, "-m", "fullwire"]


def main() -> None:
    """Tune each job, and write what came of it."""
    taken = arguments.parser(__doc__)
    taken.add_argument("--flaws", default=",".join(FLAWS))
    taken.add_argument("--budget", default="4min")
    taken.add_argument("--steps", default=None)
    taken.add_argument("--kept", type=Path)
    asked = taken.parse_args()
    rows: list[list[results.Cell]] = []
    errors, holds, all_hold, is_worse = [], [], [], 0
    for flaw in asked.flaws.split(","):
        found, hand_s = known_or_tuned(flaw, asked.kept, asked.budget, asked.steps)
        kept = [trial for trial in found["trials"] if trial["kept"]]
        for trial in found["trials"]:
            if None not in (trial["interval"], trial["measured_s"]):
                all_hold.append(is_inside(trial))
        for trial in kept:
            errors.append(trial["predicted_s"] / trial["measured_s"] - 1)
            if trial["interval"] is not None:
                holds.append(is_inside(trial))
        is_cured = found["after_s"] <= CURED * hand_s
        fixes = ", ".join(f"{trial['fix']}:{trial['setting']}" for trial in kept) or "none"
        rows.append(
            [
                flaw,
                f"{found['before_s'] * 1e3:.1f} ms",
                f"{found['after_s'] * 1e3:.1f} ms",
                f"{hand_s * 1e3:.1f} ms",
                fixes,
                ", ".join(f"{100 * each:+.0f} %" for each in errors[len(errors) - len(kept) :]),
                "yes" if is_cured else "no",
                f"{found['took_s'] / 60:.1f} min",
            ]
        )
        print(" | ".join(map(str, rows[-1])), flush=True)
        is_worse += found["after_s"] > found["before_s"]
    cured = sum(row[6] == "yes" for row in rows)
    minutes = median(float(str(row[7]).split()[0]) for row in rows)
    spread: dict[str, Any] = results.spread(errors) if errors else {}
    results.write(
        "tune",
        claim="`tune` cures jobs with a known flaw, and nobody edits their scripts.",
        anchor="the same jobs with the best setting by hand, recorded beside",
        summary=(
            f"{cured} of {len(rows)} cured, {is_worse} made worse, "
            f"in {minutes:.1f} minutes (median); of all {len(all_hold)} trials, in vain or not, "
            f"{sum(all_hold)} are inside their intervals"
        ),
        measure="error of a kept fix's predicted step",
        cases=len(rows),
        coverage=sum(holds) / len(holds) if holds else None,
        tables=[
            results.Table(
                columns=[
                    "flaw",
                    "before",
                    "tuned",
                    "by hand",
                    "kept",
                    "predicted / measured - 1",
                    "cured",
                    "took",
                ],
                rows=rows,
            )
        ],
        **spread,
    )


def is_inside(trial: dict[str, Any]) -> bool:
    """Say whether the measured step of a trial lies in its interval."""
    return bool(trial["interval"]["low_s"] <= trial["measured_s"] <= trial["interval"]["high_s"])


def known_or_tuned(
    flaw: str, kept: Path | None, budget: str, steps: str | None
) -> tuple[dict[str, Any], float]:
    """Return the result of a job, from the folder of those kept or by tuning it."""
    path = None if kept is None else kept / f"{flaw}.json"
    if path is not None and path.exists():
        known = json.loads(path.read_text())
        return known["found"], known["hand_s"]
    with tempfile.TemporaryDirectory() as folder:
        found, hand_s = tuned(flaw, Path(folder), budget, steps)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"found": found, "hand_s": hand_s}))
    return found, hand_s


def tuned(flaw: str, folder: Path, budget: str, steps: str | None) -> tuple[dict[str, Any], float]:
    """Tune one job; return what `tune` found, and the step with the setting by hand."""
    rate = RATES.get(flaw)
    lab = ["--workers", "2", "--rate", rate] if rate else []
    if flaw in NICS:
        (folder / "hosts.toml").write_text(CLUSTER.format(nics=NICS[flaw], rate=rate))
        lab = ["--cluster", str(folder / "hosts.toml")]
    job = [sys.executable, JOB, flaw] if rate else [*LAUNCHER, JOB, flaw]
    options = ["--budget", budget, "--json", "-o", str(folder / "tuned")]
    options += ["--steps", steps] if steps else []
    options += ["--allow", ALLOWED.get(flaw, "exact"), *(["--lab"] if rate else []), *lab]
    done = subprocess.run(
        [*FULLWIRE, "tune", *options, "--", *job], stdout=subprocess.PIPE, text=True, check=True
    )
    runs = []
    for number in range(2):
        path = str(folder / f"hand-{number}.run")
        record = ["lab", "run", *lab] if rate else ["record"]
        command = [*FULLWIRE, "apply", "none", "--steps", steps or "30", "--", *job, "--cured"]
        subprocess.run(
            [*FULLWIRE, *record, "-o", path, "--", *command],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        runs.append(read_run(Path(path)))
    return json.loads(done.stdout), held_against(runs, runs).before_s


if __name__ == "__main__":
    main()
