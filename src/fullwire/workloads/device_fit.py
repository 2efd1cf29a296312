"""Fit the numbers of a device to measured operations: matrix products, and fused attention.

The fit turns one number at a time, and takes whatever lowers the mean error of the logarithm of the
times. Seven numbers have clear meanings and bounds, so this is enough, and it needs numpy alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fullwire.workloads.accelerators import Accelerator, Products
from fullwire.workloads.operations import product_s

Floats = NDArray[np.float64]

# Share of the peak, three shares of smaller tiles, ramp, start in us, memory share, tail, and the
# share of the memory rate in casts to 8 bits.
_LOW = np.log([0.3, 0.4, 0.4, 0.4, 1, 1, 0.3, 0.01, 0.02])
_HIGH = np.log([1.2, 1, 1, 1, 3000, 300, 1, 1, 1])
_START = np.log([0.75, 0.9, 0.85, 0.8, 200, 3, 0.8, 0.6, 0.4])
_TURNS = 60


def product_errors(
    device: Accelerator, sizes: Floats, time_s: Floats, precision: str, *, with_cast: bool
) -> Floats:
    """Return the logarithm of predicted over measured times.

    - `sizes`: rows of rows, outputs and inner lengths.
    - `with_cast`: whether the times hold the cast of the rows to 8 bits.
    """
    rows, outputs, inner = sizes
    predicted = product_s(device, rows, outputs, inner, precision=precision)
    if with_cast:
        share = device.products_of(precision).cast_share
        predicted = predicted + 3 * rows * inner / (device.memory_bytes_per_s * share)
    return np.asarray(np.log(predicted / time_s))


def fitted_products(
    device: Accelerator, sizes: Floats, time_s: Floats, precision: str, *, with_cast: bool = False
) -> Products:
    """Return the numbers with which a device's products take the measured times."""

    def loss(logs: Floats) -> float:
        made = _products(logs)
        tried = replace(device, products=(("bf16", made), ("fp8", made)))
        errors = product_errors(tried, sizes, time_s, precision, with_cast=with_cast)
        return float(np.abs(errors).mean())

    return _products(_descended(loss))


def _descended(loss: Callable[[Floats], float]) -> Floats:
    best, steps = _START.copy(), np.full(len(_START), 0.3)
    least = loss(best)
    for turn in range(_TURNS * len(best)):
        index = turn % len(best)
        for sign in (1, -1):
            tried = best.copy()
            tried[index] = np.clip(tried[index] + sign * steps[index], _LOW[index], _HIGH[index])
            if (found := loss(tried)) < least:
                least, best = found, tried
                steps[index] *= 1.3
                break
        else:
            steps[index] = max(0.6 * steps[index], 0.004)
    return best


def _products(logs: Floats) -> Products:
    peak, first, second, third, ramp, start, memory, tail, cast = np.exp(logs).tolist()
    return Products(
        peak_share=peak,
        tile_shares=(1.0, first, first * second, first * second * third),
        ramp=ramp,
        start_us=start,
        memory_share=memory,
        tail=tail,
        cast_share=cast,
    )
