"""What does `fullwire run --recipe` cost a job without a network? Start and step; medians.

    .venv/bin/python benchmarks/recipe.py [PAIRS]

The job is one process that trains without a group. The recipe has fixes that change nothing there,
so what is left is their cost. Each pair starts the job alone and with the recipe, in turns.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS = 200
FIXES = ("buckets:25", "transport:fullwire", "joining:1MiB", "accumulation:4")
JOB = f"""
import json, time, torch
from torch import nn
began = time.time()
torch.set_num_threads(1)
model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
optimizer = torch.optim.SGD(model.parameters(), 0.01)
images, took = torch.ones(64, 512), []
for _ in range({STEPS}):
    start = time.perf_counter()
    model(images).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    took.append(time.perf_counter() - start)
print(json.dumps([began, sorted(took)[len(took) // 4]]))
"""


def main() -> None:
    """Measure pairs, and print the medians of their differences."""
    pairs = int(sys.argv[1]) if sys.argv[1:] else 7
    starts_s, ratios = [], []
    with tempfile.TemporaryDirectory() as folder:
        job, recipe = Path(folder) / "job.py", Path(folder) / "recipe.toml"
        job.write_text(JOB)
        tables = [
            f'[[fixes]]\nfix = "{key}"\nsetting = "{setting}"'
            for key, _, setting in (each.partition(":") for each in FIXES)
        ]
        recipe.write_text("\n".join(["format = 1", *tables]))
        plain = [sys.executable, str(job)]
        fixed = [sys.executable, "-m", "fullwire", "run", "-r", str(recipe), "--", *plain]
        for number in range(pairs):
            order = (plain, fixed) if number % 2 else (fixed, plain)
            told = {id(command): played(command) for command in order}
            starts_s.append(told[id(fixed)][0] - told[id(plain)][0])
            ratios.append(told[id(fixed)][1] / told[id(plain)][1])
    print(f"start {statistics.median(starts_s):+.3f} s, worst {max(starts_s):+.3f} s")
    print(f"step {statistics.median(ratios):.4f} of the job alone, worst {max(ratios):.4f}")


def played(command: list[str]) -> tuple[float, float]:
    """Run the job; return the seconds until torch is there, and those of a quick step."""
    began_s = time.time()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    there_s, step_s = json.loads(done.stdout)
    return there_s - began_s, step_s


if __name__ == "__main__":
    main()
