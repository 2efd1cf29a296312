"""Matrix products and attention on GPUs against measured tables, shapes that the fit never saw.

    .venv/bin/python -m validation.operations ../shared/data/llm [--fit]

The tables are those of ai-dynamo/aiconfigurator (products) and MooreThreads/SimuMax (attention).
A quarter of the weights' shapes is left out of the fit and judged here. With --fit the script fits
again and prints the lines of accelerators.toml. Products with fewer than 512 rows belong to
inference, and are left out.
"""

from __future__ import annotations

import csv
import lzma
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fullwire.workloads.accelerators import Accelerator, accelerator
from fullwire.workloads.operations import attention_s, fitted_products, product_errors
from validation import arguments, results

LEAST_ROWS = 512
FAMILIES = {
    "a100_sxm": "a100",
    "h100_sxm": "h100",
    "h200_sxm": "h200",
    "b200_sxm": "b200",
    "gb200": "gb200",
}
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The products of one device in one type."""

    device: Accelerator
    precision: str
    sizes: Array  # rows, outputs, inner
    time_s: Array

    def errors(self, which: NDArray[np.bool_]) -> Array:
        """Return the logarithm of predicted over measured time; the tables cast to 8 bits too."""
        return product_errors(
            self.device,
            self.sizes[:, which],
            self.time_s[which],
            self.precision,
            with_cast=self.precision == "fp8",
        )

    @property
    def is_held_out(self) -> NDArray[np.bool_]:
        """Return which products have a weight whose shape the fit did not see."""
        return np.array([hash((int(n), int(k))) % 4 == 0 for _, n, k in self.sizes.T])


def tables(data: Path) -> list[Table]:
    """Read all products."""
    held: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    with lzma.open(data / "gemm.csv.xz", "rt") as file:
        for row in csv.DictReader(file):
            if int(row["m"]) >= LEAST_ROWS:
                key = FAMILIES[row["gpu"]], "fp8" if row["dtype"] == "fp8" else "bf16"
                values = (row["m"], row["n"], row["k"], row["latency_ms"])
                held.setdefault(key, []).append(tuple(map(float, values)))
    return [
        Table(
            device=accelerator(family),
            precision=precision,
            sizes=np.array(rows).T[:3],
            time_s=np.array(rows).T[3] * 1e-3,
        )
        for (family, precision), rows in held.items()
    ]


def attention_errors(data: Path) -> dict[tuple[str, str], list[float]]:
    """Return predicted over measured times of fused attention, by device and pass."""
    errors: dict[tuple[str, str], list[float]] = {}
    with (data / "op_efficiency.csv").open() as file:
        for row in csv.DictReader(file):
            if not row["op"].startswith("sdp"):
                continue
            size = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", row["shape"])}
            device = accelerator(row["gpu"])
            backward = row["op"] == "sdp_bwd"
            both = size["qk_head_dim"] + size["v_head_dim"]
            flops = 2 * size["batch"] * size["head_num"] * size["seq_len"] ** 2 * both
            # They count all keys, twice in the backward pass.
            measured = (1 + backward) * flops / float(row["peak_tflops"]) / 1e12
            measured /= float(row["efficiency"])
            predicted = attention_s(
                device,
                queries=size["seq_len"],
                keys=size["seq_len"] / 2,
                heads=size["head_num"],
                head_dim=size["qk_head_dim"],
                value_dim=size["v_head_dim"],
                batch=size["batch"],
                backward=backward,
            )
            name = "backward" if backward else "forward"
            errors.setdefault((device.family, name), []).append(float(np.log(predicted / measured)))
    return errors


def main() -> None:
    """Print and write the errors; with --fit print new lines for the table."""
    taken = arguments.parser(__doc__)
    taken.add_argument("data", type=Path)
    taken.add_argument("--fit", action="store_true")
    given = taken.parse_args()
    rows: list[list[results.Cell]] = []
    judged: list[float] = []
    for table in tables(given.data):
        if given.fit:
            seen = ~table.is_held_out
            found = fitted_products(
                table.device,
                table.sizes[:, seen],
                table.time_s[seen],
                table.precision,
                with_cast=table.precision == "fp8",
            )
            print(table.device.family, table.precision, found)
            continue
        held = table.is_held_out
        size = np.abs(table.errors(held))
        judged += size.tolist()
        rows.append(
            [
                f"{table.device.title}, {table.precision}",
                int((~held).sum()),
                int(held.sum()),
                f"{np.median(np.abs(table.errors(~held))):.1%}",
                f"{np.median(size):.1%}",
                f"{np.quantile(size, 0.9):.1%}",
            ]
        )
    if given.fit:
        return
    passes: list[list[results.Cell]] = []
    for (family, name), errors in attention_errors(given.data).items():
        size = np.abs(errors)
        passes.append(
            [family, name, len(errors), f"{np.median(size):.1%}", f"{np.quantile(size, 0.9):.1%}"]
        )
    for row in rows + passes:
        print(*row, sep="  ")
    spread = results.spread(judged)
    results.write(
        "operations",
        given.data,
        "llm",
        claim="The time of a matrix product follows from its shape, its type and the device.",
        anchor="tables of ai-dynamo/aiconfigurator, shapes that were left out of the fit",
        summary=f"median error {spread['median']:.1%}, nine of ten below {spread['p90']:.1%}",
        measure="relative error of the time",
        cases=len(judged),
        **spread,
        tables=[
            results.Table(
                title="Matrix products with 512 rows or more",
                columns=[
                    "device",
                    "fitted",
                    "judged",
                    "fitted median",
                    "judged median",
                    "judged p90",
                ],
                rows=rows,
            ),
            results.Table(
                title="Fused attention (SimuMax), all of it fitted",
                columns=["device", "pass", "shapes", "median", "p90"],
                rows=passes,
            ),
        ],
    )


if __name__ == "__main__":
    main()
