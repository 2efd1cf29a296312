"""Time to a loss under other settings, predicted from two recordings: DIRECTORY

    .venv/bin/python -m validation.settings_to_target DIRECTORY [--minutes 20]

Three small models train in the lab until their held-out loss is at a target. Two trainings are
recorded for each model: 2 workers on links of 1 Gbps, a global batch of 64 and one of 256. From
these `whatif --target` predicts the time to the target at other batches, link rates, codecs and
numbers of workers. Each setting is then trained with three seeds, and its time is held against the
prediction. The last question is the user's: which setting is there first?

The models are those of `validation.time_to_target`, made wide enough for the links to matter.
Finished trainings stay in DIRECTORY, and the script goes on where it was. It runs in a lab, so all
workers share the processors of one machine, and the predictions are told so. They take the costs of
codecs that `fullwire codecs` measures here. Local steps are not among the settings: see `rounds`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from torch import nn

import fullwire as fw
from fullwire.report.as_data import whatif_object
from fullwire.run.processors import share_of_others
from validation import arguments, results
from validation.cells import MUCH, TRIES
from validation.codec_steps import costs_here
from validation.time_to_target import CONTEXT, LETTERS, Training, trainings

RECORDED_RATE, RECORDED = "1Gbps", (64, 256)
SEEDS = (0, 1, 2)
RATES = ("200Mbps", "2Gbps")
CODECS = ("none", "bf16", "powersgd:rank=2")
BATCHES = (128, 512, 1024)
OF_FOUR = (256, 1024)  # batches of four workers, without a codec
LONGEST_S = 900.0
COLUMNS = ["model", "workers", "batch", "rate", "codec", "steps", "s", "predicted", "90 %", "error"]


class Setting(NamedTuple):
    """How a model is trained."""

    model: str
    workers: int
    batch: int
    rate: str
    codec: str

    def cell(self, seed: int) -> str:
        """Name one training of it, as the job does."""
        return f"{self.model}/{self.batch}/{self.codec}/{seed}"


def wide() -> Iterator[Training]:
    """Yield the three models with 0.6 to 1.2 MB of parameters, and a target for each."""
    characters, digits, regression = trainings()
    yield replace(
        characters,
        build=lambda: nn.Sequential(
            nn.Embedding(LETTERS, 24),
            nn.Flatten(),
            nn.Linear(24 * CONTEXT, 512),
            nn.ReLU(),
            nn.Linear(512, LETTERS),
        ),
        rate=1.5e-3,
    )
    yield replace(
        digits,
        build=lambda: nn.Sequential(
            nn.Flatten(),
            nn.Linear(144, 768),
            nn.ReLU(),
            nn.Linear(768, 256),
            nn.ReLU(),
            nn.Linear(256, 10),
        ),
        target=1.9,
        rate=1e-3,
    )
    yield replace(
        regression,
        build=lambda: nn.Sequential(
            nn.Linear(20, 512), nn.Tanh(), nn.Linear(512, 256), nn.Tanh(), nn.Linear(256, 1)
        ),
        rate=1e-3,
    )


def settings(model: str) -> Iterator[Setting]:
    """Yield the settings of a model that are predicted and trained."""
    for rate in RATES:
        for batch in BATCHES:
            for codec in CODECS:
                yield Setting(model, 2, batch, rate, codec)
        for batch in OF_FOUR:
            yield Setting(model, 4, batch, rate, "none")


def main() -> None:
    """Record, train, predict, and print each setting."""
    taken = arguments.parser(__doc__)
    taken.add_argument("directory", type=Path)
    taken.add_argument("--minutes", type=float, default=120.0, help="train for so long, then judge")
    asked = taken.parse_args()
    asked.directory.mkdir(parents=True, exist_ok=True)
    until_s = time.monotonic() + 60 * asked.minutes
    models = {training.name: training for training in wide()}
    for model in models:
        for batch in RECORDED:
            record(asked.directory, model, batch)
    train(asked.directory, [one for model in models for one in settings(model)], until_s)
    done = trained_in(asked.directory)
    rows: list[list[results.Cell]] = []
    errors: list[float] = []
    holds: list[bool] = []
    choices: list[list[results.Cell]] = []
    for training in models.values():
        measured: dict[Setting, float] = {}
        predicted: dict[Setting, float] = {}
        for setting in settings(training.name):
            of_seeds = [
                one for seed in SEEDS if (one := done.get((setting, seed))) and one["steps"]
            ]
            if not of_seeds:
                continue
            found = predict(asked.directory, training, setting)
            low_s, high_s = (found["time_to_target_interval"][end] for end in ("low_s", "high_s"))
            measured[setting] = mean(one["time_s"] for one in of_seeds)
            predicted[setting] = found["time_to_target_s"]
            errors.append(predicted[setting] / measured[setting] - 1)
            holds += [low_s <= one["time_s"] <= high_s for one in of_seeds]
            steps = mean(one["steps"] for one in of_seeds)
            rows.append(
                [
                    *setting,
                    f"{steps:.0f}",
                    f"{measured[setting]:.2f}",
                    f"{predicted[setting]:.2f}",
                    f"{low_s:.2f} - {high_s:.2f}",
                    f"{errors[-1]:+.0%}",
                ]
            )
            print("  ".join(map(str, rows[-1])), flush=True)
        if measured:
            chosen = min(predicted, key=lambda one: predicted[one])
            best = min(measured, key=lambda one: measured[one])
            slower = measured[chosen] / measured[best] - 1
            names = [" ".join(map(str, one[1:])) for one in (chosen, best)]
            choices.append([training.name, len(measured), *names, f"{slower:.1%}"])
            print("chosen", *choices[-1])
    write(rows, errors, holds, choices)


def record(place: Path, model: str, batch: int) -> None:
    """Record one training to its target."""
    path = recording(place, model, batch)
    for _ in range(TRIES):
        if not path.exists():
            cell = f"{model}/{batch}/none/{SEEDS[0]}"
            lab(2, RECORDED_RATE, "-", [cell], "-o", str(path))
        if share_of_others(fw.read(str(path))) < MUCH:
            return
        shutil.rmtree(path)
    sys.exit(f"{path.name}: other work took too much of the processors in {TRIES} recordings")


def recording(place: Path, model: str, batch: int) -> Path:
    """Return the path of a recorded training."""
    return place / f"{model}-{batch}.run"


def lab(workers: int, rate: str, file: str, cells: Sequence[str], *options: str) -> None:
    """Train these cells in a lab."""
    subprocess.run(
        [
            *(sys.executable, "-m", "fullwire", "lab", "run", "--workers", str(workers)),
            *("--rate", rate, *options, "--"),
            *(sys.executable, "-m", "validation.jobs.reaching", file, *cells),
        ],
        check=True,
        timeout=LONGEST_S,
    )


def train(place: Path, asked: Sequence[Setting], until_s: float) -> None:
    """Train each setting with each seed, a lab for each rate and number of workers."""
    for seed in SEEDS:  # all settings with one seed come before the next
        of_labs: dict[tuple[str, int, str], list[Setting]] = defaultdict(list)
        done = trained_in(place)
        for setting in asked:
            if (setting, seed) not in done:
                of_labs[setting.model, setting.workers, setting.rate].append(setting)
        for (_, workers, rate), found in of_labs.items():
            if time.monotonic() > until_s:
                return
            file = (place / f"trained-{workers}-{rate}.jsonl").resolve()
            lab(workers, rate, str(file), [setting.cell(seed) for setting in found])


def trained_in(place: Path) -> dict[tuple[Setting, int], dict[str, Any]]:
    """Return the finished trainings."""
    found = {}
    for path in sorted(place.glob("trained-*.jsonl")):
        rate = path.stem.rpartition("-")[2]
        for row in map(json.loads, path.read_text().splitlines()):
            model, batch, codec, seed = row["cell"].split("/")
            found[Setting(model, row["ranks"], int(batch), rate, codec), int(seed)] = row
    return found


def predict(place: Path, training: Training, setting: Setting) -> dict[str, Any]:
    """Return the row of `whatif --target` for one setting."""
    first, *more = (str(recording(place, training.name, batch)) for batch in RECORDED)
    table = fw.whatif(
        first,
        curve=more,
        recorded_batch=",".join(map(str, RECORDED)),
        target=f"loss<={training.target}",
        transport="measured",
        workers=setting.workers,
        ranks_per_host=setting.workers,
        bandwidth=setting.rate,
        global_batch=setting.batch,
        compression="1" if setting.codec == "none" else setting.codec,
        codec_costs=costs_here(place, CODECS[1:]),
    )
    row: dict[str, Any] = whatif_object(table)["rows"][0]
    return row


def write(
    rows: list[list[results.Cell]],
    errors: Sequence[float],
    holds: Sequence[bool],
    choices: list[list[results.Cell]],
) -> None:
    """Write what was found."""
    results.write(
        "settings-to-target",
        claim="Two recordings predict the time to a loss under other batches, links and codecs.",
        anchor="trainings of three small models in the lab, three seeds each",
        measure="relative error of the time to the target",
        **results.said_of(errors, holds),
        tables=[
            results.Table(columns=COLUMNS, rows=rows),
            results.Table(
                title="The setting that looks first, beside the one that was first",
                columns=["model", "settings", "chosen", "first", "slower"],
                rows=choices,
            ),
        ],
    )


if __name__ == "__main__":
    main()
