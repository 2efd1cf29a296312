"""Steps to a target of three small models that are trained here, predicted from two batches.

    .venv/bin/python -m validation.time_to_target RUNS.jsonl

The models are a language model of characters (the sources of Python's own library), a network of
convolutions (drawn digits, shifted and noisy), and a regression (a teacher network). Each trains
with Adam to a loss on held-out data, at batches from 32 to 2,048, with three seeds. The learning
rate grows with the root of the batch. Two batches are the recordings. They predict the samples of
the others, each by itself.

A second part draws the gradients of four ranks at the start of two of the models. It compares the
noise scale with the one of per-sample gradients.

RUNS.jsonl keeps finished runs, so that an interrupted script goes on where it was. Link rates,
several workers, PowerSGD and local steps are not trained here: those are times of a step, which
other scripts check, and codecs whose steps are unknown.
"""

from __future__ import annotations

import json
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import nn

from fullwire.convergence.batches import Point, fit_batches, noise_scale
from fullwire.run.run import Noise
from validation import arguments, results

BATCHES = (32, 64, 128, 256, 512, 1024, 2048)
RECORDED = (64, 256)
SEEDS = (0, 1, 2)
MOST_SAMPLES = 2_000_000
LOOKS = 250  # at the held-out loss, until MOST_SAMPLES
HELD_OUT = 1024
CONTEXT, LETTERS = 16, 64
RANKS, RANK_SAMPLES, DRAWS = 4, 16, 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A model, its data, and the held-out loss that it is to reach."""

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator, int], tuple[torch.Tensor, torch.Tensor]]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    target: float
    rate: float  # of learning, at batch 256


def trainings() -> Iterator[Training]:
    """Yield the three models."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:60])
    letters = torch.tensor(np.frombuffer(text, np.uint8) % LETTERS, dtype=torch.long)

    def characters(random: torch.Generator, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.randint(0, len(letters) - CONTEXT - 1, (count,), generator=random)
        return letters[at[:, None] + torch.arange(CONTEXT)], letters[at + CONTEXT]

    yield Training(
        name="characters",
        build=lambda: nn.Sequential(
            nn.Embedding(LETTERS, 24),
            nn.Flatten(),
            nn.Linear(24 * CONTEXT, 128),
            nn.ReLU(),
            nn.Linear(128, LETTERS),
        ),
        draw=characters,
        loss=nn.functional.cross_entropy,
        target=2.2,
        rate=2e-3,
    )
    shapes = torch.randint(0, 2, (10, 5, 5), generator=torch.Generator().manual_seed(5)).float()

    def digits(random: torch.Generator, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        which = torch.randint(0, 10, (count,), generator=random)
        at = torch.randint(0, 8, (count, 2), generator=random)
        images = 0.8 * torch.randn((count, 1, 12, 12), generator=random)
        rows = at[:, 0, None, None] + torch.arange(5)[:, None]
        columns = at[:, 1, None, None] + torch.arange(5)[None, :]
        images[torch.arange(count)[:, None, None], 0, rows, columns] += 1.5 * shapes[which]
        return images, which

    yield Training(
        name="digits",
        build=lambda: nn.Sequential(
            nn.Conv2d(1, 12, 5),
            nn.ReLU(),
            nn.Conv2d(12, 16, 3),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64, 10),
        ),
        draw=digits,
        loss=nn.functional.cross_entropy,
        target=1.6,
        rate=3e-3,
    )
    torch.manual_seed(9)
    teacher = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 1))
    for weights in teacher.parameters():
        weights.requires_grad_(False).mul_(2)

    def taught(random: torch.Generator, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn((count, 20), generator=random)
        return inputs, teacher(inputs) + 0.3 * torch.randn((count, 1), generator=random)

    yield Training(
        name="regression",
        build=lambda: nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1)),
        draw=taught,
        loss=nn.functional.mse_loss,
        target=0.13,
        rate=2e-3,
    )


def samples_needed(training: Training, batch: int, seed: int) -> float | None:
    """Train until the held-out loss is at the target; None if it is never there."""
    torch.manual_seed(seed)
    random, apart = torch.Generator().manual_seed(100 + seed), torch.Generator().manual_seed(1)
    held_out = training.draw(apart, HELD_OUT)
    model = training.build()
    rate = training.rate * (batch / 256) ** 0.5
    optimizer = torch.optim.Adam(model.parameters(), rate)
    samples, looked, last, before = 0, 0, float("inf"), 0
    while samples < MOST_SAMPLES:
        inputs, wanted = training.draw(random, batch)
        optimizer.zero_grad()
        training.loss(model(inputs), wanted).backward()
        optimizer.step()
        samples += batch
        if samples >= looked + MOST_SAMPLES / LOOKS / 4:
            looked = samples
            with torch.no_grad():
                now = float(training.loss(model(held_out[0]), held_out[1]))
            if now <= training.target:
                share = (last - training.target) / (last - now) if last < float("inf") else 1.0
                return before + share * (samples - before)
            last, before = now, samples
    return None


def noise_of(training: Training) -> tuple[float, float]:
    """Return the noise scale of drawn ranks, and that of per-sample gradients."""
    torch.manual_seed(0)
    model, random = training.build(), torch.Generator().manual_seed(3)
    parameters = list(model.parameters())

    def gradient(count: int) -> torch.Tensor:
        inputs, wanted = training.draw(random, count)
        found = torch.autograd.grad(training.loss(model(inputs), wanted), parameters)
        return torch.cat([each.reshape(-1) for each in found])

    each, whole = [], []
    for _ in range(DRAWS):
        own = torch.stack([gradient(RANK_SAMPLES) for _ in range(RANKS)])
        each.append(float(own.square().sum(1).mean()))
        whole.append(float(own.mean(0).square().sum()))
    noise = Noise(
        step=np.arange(DRAWS),
        ranks_squared_norm=np.array(each),
        mean_squared_norm=np.array(whole),
        samples=np.full(DRAWS, RANK_SAMPLES),
        ranks=np.full(DRAWS, RANKS),
    )
    alone = torch.stack([gradient(1) for _ in range(4000)]).double()
    middle = alone.mean(0)
    variance = float(alone.var(0).sum())
    signal = float(middle.square().sum()) - variance / len(alone)
    return noise_scale(noise, None, training.name).batch, variance / signal


def trained(path: Path, most_s: float) -> dict[tuple[str, int, int], float | None]:
    """Return all runs, those of the file and those that are still to be made."""
    done: dict[tuple[str, int, int], float | None] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            row: dict[str, Any] = json.loads(line)
            done[row["model"], row["batch"], row["seed"]] = row["samples"]
    began_s = time.monotonic()
    with path.open("a") as file:
        for training in trainings():
            for batch in BATCHES:
                for seed in SEEDS:
                    if (training.name, batch, seed) in done:
                        continue
                    if time.monotonic() - began_s > most_s:
                        return done
                    samples = samples_needed(training, batch, seed)
                    done[training.name, batch, seed] = samples
                    row = {"model": training.name, "batch": batch, "seed": seed}
                    file.write(json.dumps({**row, "samples": samples}) + "\n")
                    file.flush()
    return done


def main() -> None:
    """Train, predict, and print each batch beside its prediction."""
    taken = arguments.parser(__doc__)
    taken.add_argument("runs", type=Path)
    taken.add_argument("--most-s", type=float, default=7200.0, help="train for so many seconds")
    asked = taken.parse_args()
    torch.set_num_threads(1)
    done = trained(asked.runs, asked.most_s)
    errors: list[float] = []
    holds: list[bool] = []
    rows: list[list[results.Cell]] = []
    for name in dict.fromkeys(model for model, _, _ in done):
        by_batch = {
            batch: [value for seed in SEEDS if (value := done.get((name, batch, seed)))]
            for batch in BATCHES
        }
        points = [
            Point(batch=batch, samples=value) for batch in RECORDED for value in by_batch[batch]
        ]
        law = fit_batches(points)
        for batch in BATCHES:
            if batch in RECORDED or not by_batch[batch]:
                continue
            middle, low, high = (float(end[0]) for end in law.samples(np.array([float(batch)])))
            for true in by_batch[batch]:
                holds.append(low <= true <= high)
            error = middle / mean(by_batch[batch]) - 1
            errors.append(error)
            between = f"{low:,.0f} - {high:,.0f}"
            row: list[results.Cell] = [
                name,
                batch,
                f"{mean(by_batch[batch]):,.0f}",
                f"{middle:,.0f}",
                between,
            ]
            rows.append([*row, f"{error:+.0%}"])
            print("  ".join(map(str, rows[-1])))
    noises: list[list[results.Cell]] = []
    for training in trainings():
        if training.name != "digits":
            mine, truth = noise_of(training)
            noises.append(
                [training.name, f"{truth:.1f}", f"{mine:.1f}", f"{mine / truth - 1:+.1%}"]
            )
            print("noise scale", *noises[-1])
    columns = ["model", "batch", "samples", "predicted", "90 %", "error"]
    results.write(
        "time-to-target",
        claim="Runs at two batches predict the samples to a target at others.",
        anchor=f"three models trained here, recorded at batches {RECORDED[0]} and {RECORDED[1]}",
        measure="relative error of the samples to the target",
        **results.said_of(errors, holds),
        tables=[
            results.Table(columns=columns, rows=rows),
            results.Table(
                title="Noise scale of four drawn ranks, against per-sample gradients",
                columns=["model", "per sample", "estimated", "error"],
                rows=noises,
            ),
        ],
    )


if __name__ == "__main__":
    main()
