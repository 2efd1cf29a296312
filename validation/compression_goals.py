"""Each number that compression was built for, beside what was measured, from the results files.

    python -m validation.compression_goals

It measures nothing. Each row names the result that its figure comes from, and its commit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from validation import arguments, results

LEAST_TIMES = {"bf16": 1.8, "fp16": 1.8, "int8": 3.3}  # four workers, 25 MiB, 1 Gbps
MOST_ERROR = {"bf16": 2.4e-3, "fp16": 3.6e-4, "int8": 1.05e-2}  # of a mean, 2 to 32 workers
MOST_AUTO = 1.05  # of float32's time at 10 Gbps
LEAST_INT8_BPS = 4e9  # bytes a second in one thread
MOST_STEP_ERROR = 0.05  # the median over cells that were not fitted
LEAST_STEP_TIMES = 2.0  # of a step at 1 Gbps with one variable set


def main() -> None:
    """Read the results, and write the table."""
    arguments.parser(__doc__).parse_args()
    rows = [*of_formats(), *of_steps(), *of_trainings()]
    met = [row[3] == "yes" for row in rows if row[3]]
    results.write(
        "compression-goals",
        claim="Compression keeps the numbers that it was built for.",
        anchor="The goals that were set before it was built.",
        summary=f"{sum(met)} of {len(met)} goals met",
        cases=len(met),
        tables=[
            results.Table(columns=["goal", "bar", "measured", "met", "result, commit"], rows=rows)
        ],
    )
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")


def of_formats() -> Iterator[list[results.Cell]]:
    """Yield the goals of wire formats: time, error, packing and `auto`."""
    found = results.read("wire-formats")
    trials, errors, packing = found.tables
    by_name = {str(row["format"]): row for row in named(trials) if row["format"] != "auto"}
    for name, least in LEAST_TIMES.items():
        times = float(by_name[name]["times"])
        yield row_of(f"{name}, 25 MiB, 4 workers, 1 Gbps", f">= {least}x", times, least, found)
    for format_name, *of_workers in errors.rows:
        worst, most = max(float(str(each)) for each in of_workers), MOST_ERROR[str(format_name)]
        goal = f"error of a mean, {format_name}, 2 to 32 workers"
        yield row_of(goal, f"<= {most:.2e}", worst, most, found, is_most=True, form=".2e")
    autos = [1 / float(row["times"]) for row in named(trials) if row["format"] == "auto"]
    goal = f"`auto` at 10 Gbps, worst of {len(autos)} sizes"
    yield row_of(goal, f"<= {MOST_AUTO}x", max(autos), MOST_AUTO, found, is_most=True)
    packs = {str(row[0]): float(str(row[1])) for row in packing.rows}
    goal = "bf16 packs in one thread, GB/s (the bar is a copy)"
    yield row_of(goal, f">= {packs['a copy']}", packs["bf16"], packs["a copy"], found, form=".1f")
    goal = "int8 packs in one thread, GB/s"
    least = LEAST_INT8_BPS / 1e9
    yield row_of(goal, f">= {least:g}", packs["int8"], least, found, form=".1f")


def of_steps() -> Iterator[list[results.Cell]]:
    """Yield the goals of predicted steps, and of the walk with one variable."""
    found = results.read("codec-steps")
    fresh = found.tables[0]
    for backend in ("gloo", "fullwire"):
        off = [
            abs(float(str(row["error"]).rstrip("%"))) / 100
            for row in named(fresh)
            if str(row["job"]).endswith(backend)
        ]
        if off:
            goal = f"step with a codec predicted, {backend}, median of {len(off)} fresh cells"
            bar = f"<= {MOST_STEP_ERROR:.0%}"
            yield row_of(goal, bar, median(off), MOST_STEP_ERROR, found, is_most=True, form=".1%")
    walk = results.read("wire-walk")
    for row in named(walk.tables[0])[1:]:
        goal = f"FULLWIRE_WIRE={row['FULLWIRE_WIRE']} at 1 Gbps: the step"
        bar = f">= {LEAST_STEP_TIMES}x"
        yield row_of(goal, bar, float(row["times faster"]), LEAST_STEP_TIMES, walk)
    goal = "... and its prediction, made before, inside the interval"
    share = walk.coverage or 0.0
    yield row_of(goal, "all", share, 1.0, walk, form=".0%")


def of_trainings() -> Iterator[list[results.Cell]]:
    """Yield the goal of steps to a target, and torch's hooks beside ours."""
    found = results.read("compression")
    worst = found.worst or 0.0
    goal = "steps to a target with formats, apart from 1 + q"
    yield row_of(goal, "<= 2%", worst, 0.02, found, is_most=True, form=".1%")
    hooks = results.read("torch-hooks")
    [table] = hooks.tables
    both = [row for row in table.rows if isinstance(row[6], float)]
    for form in dict.fromkeys(str(row[2]) for row in both):
        times = min(float(str(row[6])) for row in both if row[2] == form)
        goal = f"torch's time over ours on Gloo, {form}, worst"
        yield [goal, "none set", f"{times:.2f}x", "", f"torch-hooks, {hooks.commit}"]


def named(table: results.Table) -> Sequence[Mapping[str, Any]]:
    """Return the rows of a table by the names of its columns."""
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def row_of(
    goal: str,
    bar: str,
    value: float,
    limit: float,
    found: results.Result,
    *,
    is_most: bool = False,
    form: str = "",
) -> list[results.Cell]:
    """Return a row: the goal, its bar, the figure, whether it is met, and where it comes from."""
    is_met = value <= limit if is_most else value >= limit
    shown = f"{value:{form}}" if form else f"{value:.2f}x"
    name = found.command.rpartition("validation.")[2].split()[0].replace("_", "-")
    return [goal, bar, shown, "yes" if is_met else "no", f"{name}, {found.commit}"]


if __name__ == "__main__":
    main()
