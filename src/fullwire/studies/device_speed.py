"""The speed of this machine's own device, as a file that prices operations like the built-in ones.

Memory is measured by copies, matrix products by a grid of shapes, and attention by two lengths. The
products are fitted as those of data centres are (`workloads/operations.py`). Each fourth shape is
left out of the fit and judges it: its error is the device's spread. It runs on a GPU in bf16 where
torch has one, otherwise on the processors in fp32.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from fullwire.errors import UsageError
from fullwire.outputs import refuse_existing, written
from fullwire.workloads.accelerators import Accelerator, Attention, Products
from fullwire.workloads.operations import Seconds, fitted_products, product_errors

ROWS, OUTPUTS, INNER = (512, 2048, 8192), (512, 1024, 1408, 4096), (512, 1024, 4096)
LENGTHS = (1024, 2048)
HEADS, HEAD_DIM = 8, 128
LEAST_SPREAD = 0.02
_REPEATS = 5
_LEAST_S = 0.005  # a shorter timing repeats the operation within itself
_COPIED_VALUES = 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A measured device, and the error of its fit."""

    device: Accelerator
    precision: str
    shapes: int
    judged: int
    median_error: float
    took_s: float


def device_object(found: Measured, path: Path) -> dict[str, Any]:
    """Return a measured device as a JSON object."""
    return {
        "file": str(path),
        "device": found.device.title,
        "precision": found.precision,
        "peak_flops_per_s": found.device.peak_flops_per_s(found.precision),
        "memory_bytes_per_s": found.device.memory_bytes_per_s,
        "shapes": found.shapes,
        "judged": found.judged,
        "median_error": found.median_error,
        "took_s": found.took_s,
    }


def measure_device(
    path: Path, *, seconds: float = 120, replace_file: bool = False, quick: bool = False
) -> Measured:
    """Measure this machine's device and write it to a TOML file.

    - `seconds`: shapes that would take longer than this altogether are left out.
    - `quick`: small shapes only, for a first look.
    """
    if path.suffix != ".toml":
        raise UsageError(f"output: expected a file that ends in .toml, got {path}")
    refuse_existing(path, replace_file)
    begun = time.perf_counter()
    bench = _Bench()
    rate = bench.copy_bytes_per_s(_COPIED_VALUES // (16 if quick else 1))
    sizes, time_s = bench.products(begun + 0.6 * seconds, quick=quick)
    peak = float((2 * sizes.prod(axis=0) / time_s).max())
    forward, backward = bench.attention_flops_per_s((256,) if quick else LENGTHS) / peak
    device = Accelerator(
        name=path.stem,
        title=bench.title,
        family=path.stem,
        memory_bytes=bench.memory_bytes,
        is_memory_stated=True,
        memory_bytes_per_s=rate,
        processors=bench.processors,
        power_share=1.0,
        peaks=((bench.precision, peak),),
        products=(),
        attention=Attention(
            forward=forward,
            backward=backward,
            wide_forward=forward,
            wide_backward=backward,
            forward_ns=0.0,
            backward_ns=0.0,
        ),
        memory_share=1.0,
        spread=LEAST_SPREAD,
        is_measured=True,
    )
    is_judged = np.arange(len(time_s)) % 4 == 2
    seen, unseen = ~is_judged, is_judged
    found = fitted_products(device, sizes[:, seen], time_s[seen], bench.precision)
    device = replace(device, products=(("bf16", found),))
    errors = product_errors(
        device, sizes[:, unseen], time_s[unseen], bench.precision, with_cast=False
    )
    median_error = float(np.median(np.abs(errors)))
    # The median of a normal error is 0.67 of its spread.
    device = replace(device, spread=max(LEAST_SPREAD, median_error / 0.67))
    with written(path) as beside:
        beside.write_text(_as_toml(device, found), encoding="utf-8")
    return Measured(
        device=device,
        precision=bench.precision,
        shapes=len(time_s),
        judged=int(is_judged.sum()),
        median_error=median_error,
        took_s=time.perf_counter() - begun,
    )


class _Bench:
    """Torch on this machine's device: a GPU if there is one, otherwise the processors."""

    def __init__(self) -> None:
        try:
            import torch
        except ImportError:
            raise UsageError(
                "bench device: expected torch, which the extra fullwire[torch] installs"
            ) from None
        self._torch = torch
        self._has_gpu = torch.cuda.is_available()
        self.precision = "bf16" if self._has_gpu else "fp32"
        kind = torch.bfloat16 if self._has_gpu else torch.float32
        self._of = {"device": "cuda" if self._has_gpu else "cpu", "dtype": kind}
        if self._has_gpu:
            gpu = torch.cuda.get_device_properties(0)
            self.title, self.memory_bytes = str(gpu.name), int(gpu.total_memory)
            self.processors = int(gpu.multi_processor_count)
        else:
            self.title = f"{platform.machine()}, {torch.get_num_threads()} threads"
            self.memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            self.processors = 1

    def copy_bytes_per_s(self, values: int) -> float:
        """Return the rate at which a copy reads and writes."""
        source = self._torch.ones(values, **self._of)
        target = self._torch.empty_like(source)
        moved = 2 * values * int(source.element_size())
        return moved / self._median_s(lambda: target.copy_(source))

    def products(self, until: float, *, quick: bool) -> tuple[Seconds, Seconds]:
        """Return the sizes of matrix products, small ones first, and their times."""
        shapes, times = list[tuple[int, int, int]](), list[float]()
        for rows, outputs, inner in sorted(product(ROWS, OUTPUTS, INNER), key=np.prod):
            size = rows * outputs * inner
            # The last one's time tells this one's: each is timed seven times.
            ahead_s = 7 * times[-1] * size / np.prod(shapes[-1]) if times else 0.0
            if len(times) > 3 and time.perf_counter() + ahead_s > until:
                break
            if quick and size > 2**28:
                break
            left = self._torch.randn(rows, inner, **self._of)
            right = self._torch.randn(outputs, inner, **self._of)
            shapes.append((rows, outputs, inner))
            times.append(self._median_s(partial(self._torch.matmul, left, right.T)))
        return np.array(shapes, float).T, np.array(times)

    def attention_flops_per_s(self, lengths: tuple[int, ...]) -> Seconds:
        """Return the rates of fused attention forward and backward, with each key counted."""
        attend = self._torch.nn.functional.scaled_dot_product_attention
        rates = list[tuple[float, float]]()
        for length in lengths:
            states = [
                self._torch.randn(1, HEADS, length, HEAD_DIM, requires_grad=True, **self._of)
                for _ in range(3)
            ]
            forward = partial(attend, *states, is_causal=True)
            forward_s = self._median_s(forward)

            def both(forward: Callable[[], Any] = forward) -> None:
                forward().sum().backward()

            both_s = self._median_s(both)
            flops = 4 * HEADS * HEAD_DIM * length**2
            # On a busy machine the difference may be nothing. It is twice the operations.
            backward_s = max(both_s - forward_s, forward_s)
            rates.append((flops / forward_s, 2 * flops / backward_s))
        return np.asarray(np.median(rates, axis=0))

    def _median_s(self, run: Callable[[], Any]) -> float:
        """Return the median time of one call, after one that warms up."""

        def timed(times: int) -> float:
            started = time.perf_counter()
            for _ in range(times):
                run()
            if self._has_gpu:
                self._torch.cuda.synchronize()
            return (time.perf_counter() - started) / times

        timed(1)
        times = max(1, round(_LEAST_S / max(timed(1), 1e-6)))
        return float(np.median([timed(times) for _ in range(_REPEATS)]))


def _as_toml(device: Accelerator, found: Products) -> str:
    def table(values: dict[str, Any]) -> str:
        """Write numbers and lists in one line; JSON's spelling of them is TOML's too."""
        return (
            "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in values.items()) + " }"
        )

    return "\n".join(
        (
            "# Measured by `fullwire bench device`; rates in FLOP/s and bytes a second.",
            "[device]",
            f"name = {json.dumps(device.name)}",
            f"title = {json.dumps(device.title)}",
            f"memory_bytes = {device.memory_bytes}",
            f"memory_bytes_per_s = {device.memory_bytes_per_s}",
            f"processors = {device.processors}",
            f"peaks = {table(dict(device.peaks))}",
            "",
            "[measured]",
            f"products = {table(asdict(found))}",
            f"attention = {table(asdict(device.attention))}",
            f"memory_share = {device.memory_share}",
            f"spread = {device.spread}",
            "",
        )
    )
