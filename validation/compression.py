"""Steps to a target with each codec: python -m validation.compression DIRECTORY [--rate 10Mbps]

Three small models train on two ranks over Gloo until their loss reaches a target: generated
pictures (a network of two layers), source text of the standard library (a transformer of one
layer), and entries of a matrix (a factorization). Steps are held beside float32's, and beside the
law 1 + q for a codec with the relative squared error q. A finished training stays in
DIRECTORY/trained.jsonl and is not repeated, so the script can be stopped and started again. Torch's
own hooks run in the same job.

With --rate the ranks are two hosts of a lab with such links, and the time to the target is what
counts: a codec saves time in each step, and may need more steps. These links are slow because the
models are small.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.ports import held_port
from validation import arguments, results

JOB = Path(__file__).parent / "jobs" / "compressing.py"
MODELS = ("pictures", "text", "ratings")
FORMATS = ("bf16", "fp16", "int8")
WITH_FEEDBACK = ("onebit", "topk:density=0.1", "powersgd:rank=2")
TORCH = ("torch-fp16", "torch-powersgd")
CODECS = ("float32", *FORMATS, *WITH_FEEDBACK, *TORCH)
RANKS = 2
LONGEST_S = 500.0
SLOW = ["model", "codec", "seeds", "steps", "ms a step", "s to the target", "times faster"]
COLUMNS = ["model", "codec", "q", "seeds", "steps", "times float32", "95 %", "1 + q", "ms a step"]


def main() -> None:
    """Train what is missing, and print the table of what is there."""
    taken = arguments.parser(__doc__)
    taken.add_argument("directory", type=Path)
    taken.add_argument("--seeds", type=int, default=5)
    taken.add_argument("--only", choices=MODELS, help="train this model alone")
    taken.add_argument("--rate", help="train over links of this rate, in a lab")
    given = taken.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    place = given.directory / "trained.jsonl"
    asked = [
        f"{model}/{codec}/{seed}"
        for model in ([given.only] if given.only else MODELS)
        for seed in range(given.seeds)
        for codec in CODECS
    ]
    missing = [cell for cell in asked if cell not in trained_in(place)]
    if missing and given.rate:
        in_lab = [*(sys.executable, "-m", "fullwire", "lab", "run"), "--workers", str(RANKS)]
        rank = [sys.executable, str(JOB), str(place.resolve()), *missing]
        subprocess.run([*in_lab, "--rate", given.rate, "--", *rank], check=True, timeout=LONGEST_S)
    elif missing:
        train(place, missing)
    if given.rate:
        write_slow(trained_in(place), given.rate)
        return
    rows = list(table_of(trained_in(place)))
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")
    write(rows, len(trained_in(place)))


def trained_in(place: Path) -> Mapping[str, dict[str, Any]]:
    """Return the finished trainings by their cell."""
    lines = place.read_text().splitlines() if place.exists() else []
    return {found["cell"]: found for found in map(json.loads, lines)}


def train(place: Path, cells: Sequence[str]) -> None:
    """Train these cells on two ranks; each finished one adds a line."""
    with held_port() as port:
        ranks = [
            subprocess.Popen(
                [sys.executable, str(JOB), str(place), *cells],
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(RANKS),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": "1",
                },
            )
            for rank in range(RANKS)
        ]
        try:
            for process in ranks:
                process.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            print(f"stopped after {LONGEST_S:g} s: start again for the rest", file=sys.stderr)
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def table_of(trained: Mapping[str, dict[str, Any]]) -> Iterator[list[results.Cell]]:
    """Yield a row for each model and codec, over the seeds that float32 has too."""
    for model in MODELS:
        plain = {
            cell.split("/")[2]: found["steps"]
            for cell, found in trained.items()
            if cell.startswith(f"{model}/float32/") and found["steps"]
        }
        for codec in CODECS:
            mine = {
                cell.split("/")[2]: found
                for cell, found in trained.items()
                if cell.rpartition("/")[0] == f"{model}/{codec}" and cell.split("/")[2] in plain
            }
            if not mine:
                continue
            reached = {seed: found["steps"] for seed, found in mine.items() if found["steps"]}
            ratios = [steps / plain[seed] for seed, steps in reached.items()]
            errors = [found["squared_error"] for found in mine.values()]
            error = None if None in errors else float(np.mean(errors))
            step_ms = 1e3 * float(np.median([found["step_s"] for found in mine.values()]))
            yield [
                model,
                codec,
                "" if error is None else f"{error:.2g}",
                f"{len(reached)} of {len(mine)}",
                f"{np.mean(list(reached.values())):.0f}" if reached else "",
                f"{np.mean(ratios):.3f}" if reached else "",
                _interval(ratios),
                f"{1 + error:.3f}" if error is not None and codec in FORMATS else "",
                f"{step_ms:.2f}",
            ]


def write_slow(trained: Mapping[str, dict[str, Any]], rate: str) -> None:
    """Print and write the times to the target, over the seeds that float32 has too."""
    rows: list[list[results.Cell]] = []
    best: dict[str, str] = {}
    for model in MODELS:
        of_plain = _reached(trained, model, "float32")
        most = 0.0
        for codec in CODECS:
            mine = _reached(trained, model, codec)
            both = sorted(mine.keys() & of_plain.keys())
            asked = sum(cell.rpartition("/")[0] == f"{model}/{codec}" for cell in trained)
            if not asked:
                continue
            row: list[results.Cell] = [model, codec, f"{len(both)} of {asked}"]
            if both:
                steps, step_s = (
                    float(np.mean([mine[seed][name] for seed in both]))
                    for name in ("steps", "step_s")
                )
                times_s = [
                    [of[seed]["steps"] * of[seed]["step_s"] for seed in both]
                    for of in (of_plain, mine)
                ]
                faster = float(np.exp(np.mean(np.log(times_s[0]) - np.log(times_s[1]))))
                row += [f"{steps:.0f}", f"{1e3 * step_s:.1f}"]
                row += [f"{np.mean(times_s[1]):.2f}", f"{faster:.2f}"]
                if codec not in ("float32", *TORCH) and faster > most:
                    most, best[model] = faster, f"{model} {faster:.2f}x ({codec})"
            rows.append([*row, *[""] * (len(SLOW) - len(row))])
    print(f"| {' | '.join(SLOW)} |\n{'|---' * len(SLOW)}|")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")
    results.write(
        "compression-slow-links",
        claim=f"On links of {rate}, codecs reach a target loss sooner where gradients are large.",
        anchor="float32 on the same links, from the same seeds.",
        summary=f"the best codec reaches it sooner: {', '.join(best.values())}",
        cases=len(trained),
        tables=[results.Table(columns=SLOW, rows=rows)],
    )


def _reached(
    trained: Mapping[str, dict[str, Any]], model: str, codec: str
) -> dict[str, dict[str, Any]]:
    """Return the trainings that reached their target, by seed."""
    return {
        cell.split("/")[2]: found
        for cell, found in trained.items()
        if cell.rpartition("/")[0] == f"{model}/{codec}" and found["steps"]
    }


def _interval(ratios: Sequence[float]) -> str:
    """Return the 95 % interval of the mean, by the bootstrap."""
    if len(ratios) < 2:
        return ""
    random = np.random.default_rng(0)
    means = random.choice(np.array(ratios), (4000, len(ratios))).mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return f"{low:.3f} to {high:.3f}"


def write(rows: Sequence[Sequence[results.Cell]], cases: int) -> None:
    """Write the table, and how far the formats are from the law."""
    held = [row for row in rows if row[1] in FORMATS and row[5]]
    off = [float(str(row[5])) - float(str(row[7])) for row in held]
    results.write(
        "compression",
        claim="Formats need as many steps to a target as float32; error feedback is measured.",
        anchor="The law 1 + q for an unbiased codec with the relative squared error q.",
        summary=(
            f"formats: {max(map(abs, off), default=0):.1%} from the law at most; {cases} trainings"
        ),
        measure="steps of a format over float32's, less 1 + q",
        cases=cases,
        **(results.spread(off) if off else {}),
        tables=[results.Table(columns=COLUMNS, rows=[list(row) for row in rows])],
    )


if __name__ == "__main__":
    main()
