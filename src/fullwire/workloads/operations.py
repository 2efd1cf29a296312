"""How long a device takes for one operation of a transformer, by its shape.

A matrix product is cut into tiles. All processors of the device work on one tile each, so tiles
come in waves, and the last wave is rarely full. The device chooses the tile for which the waves
take least. A product that reads and writes more than it multiplies takes its memory's time. Seven
numbers for each family and type say the rest (accelerators.toml); on shapes that were left out of
the fit they miss the measured times by 2 to 5 % in the median (docs/validation/operations.md).

All functions but the last two take numbers or numpy arrays and return seconds. `fitted_products`
finds the numbers of a device from measured products. It turns one number at a time, and takes
whatever lowers the mean error of the logarithm of the times. Each number has a clear meaning and
bounds, so this is enough, and it needs numpy alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fullwire.workloads.accelerators import Accelerator, Products

Seconds: TypeAlias = NDArray[np.float64]
Kind: TypeAlias = Literal["forward", "input", "weight"]

_TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))
_TILE_CLASS = (0, 0, 1, 2, 2, 2, 2, 3)
# Time of a backward product against a forward one of the same size (SimuMax, A100 and B200): the
# gradient of a weight is added to 32-bit numbers.
_KIND_FACTOR = {"forward": 1.0, "input": 1.0, "weight": 1.06}
_GROUPED_FACTOR = {"forward": 1.08, "input": 1.12, "weight": 1.35}
# Products keep the tensor cores busy, and their clock falls with the power: an A100 with 300 W
# takes 1.16 times the time of one with 400 W, in each of three layouts (SimuMax).
_POWER_EXPONENT = 0.5
ADAM_BYTES = 30  # of a parameter: weight, gradient, both moments read and written, copy in 16 bits
MISALIGNED = 3.0  # a side that is no multiple of 8, fitted to BLOOM's first runs
_KERNEL_S = 2e-6  # between kernels that the host has queued
# Share of the peak, three shares of smaller tiles, ramp, start in us, memory share, tail, and the
# share of the memory rate in casts to 8 bits.
_LOW = np.log([0.3, 0.4, 0.4, 0.4, 1, 1, 0.3, 0.01, 0.02])
_HIGH = np.log([1.2, 1, 1, 1, 3000, 300, 1, 1, 1])
_START = np.log([0.75, 0.9, 0.85, 0.8, 200, 3, 0.8, 0.6, 0.4])
_TURNS = 60


def product_s(
    device: Accelerator,
    rows: ArrayLike,
    outputs: ArrayLike,
    inner: ArrayLike,
    *,
    precision: str = "bf16",
    kind: Kind = "forward",
    groups: ArrayLike = 1,
) -> Seconds:
    """Return the time of `rows` x `inner` times `inner` x `outputs`.

    - `kind`: forward, or the gradient of the input or of the weight. Sizes are those of the
      product itself.
    - `groups`: products of this size in one kernel, as of experts.
    """
    m, n, k, count = (np.asarray(value, float) for value in (rows, outputs, inner, groups))
    fit = device.products_of(precision)
    arithmetic = device.arithmetic(precision)
    rate = device.peak_flops_per_s(precision) * device.power_share**_POWER_EXPONENT
    wide = 1 if arithmetic in ("fp8", "fp4") else 4 if arithmetic == "fp32" else 2
    best: Seconds | None = None
    for (tile_m, tile_n), index in zip(_TILES, _TILE_CLASS, strict=True):
        waves = count * np.ceil(m / tile_m) * np.ceil(n / tile_n) / device.processors
        waves = waves + fit.tail * (np.ceil(waves) - waves)
        share = fit.peak_share * fit.tile_shares[index]
        each = 2 * tile_m * tile_n * device.processors / (rate * share)
        seconds = waves * each * (k + fit.ramp)
        best = seconds if best is None else np.minimum(best, seconds)
    assert best is not None
    moved = count * (wide * (m * k + n * k) + 2 * m * n)
    memory = moved / (device.memory_bytes_per_s * fit.memory_share)
    factor = np.where(count > 1, _GROUPED_FACTOR[kind], _KIND_FACTOR[kind])
    slowdown = misalignment(n) * misalignment(k)
    result: Seconds = fit.start_us * 1e-6 + factor * np.maximum(best * slowdown, memory)
    return result


def misalignment(size: ArrayLike) -> Seconds:
    """Return how many times longer a product takes whose side is no multiple of 64.

    Tensor cores read 16 bytes at once, and a side that is no multiple of 8 halves their rate at
    least. The runs before BLOOM show it: heads of 108 and 150 dimensions took 30 % longer steps
    than heads of 96, 128, 144 and 216, with the same sides elsewhere.
    """
    whole = np.asarray(size, np.int64)
    lowest = whole & -whole  # the largest power of two that divides it
    slowdown: Seconds = np.select(
        [lowest >= 64, lowest >= 32, lowest >= 16, lowest >= 8], [1.0, 1.01, 1.02, 1.04], MISALIGNED
    )
    return slowdown


def cast_s(device: Accelerator, values: ArrayLike, *, precision: str = "fp8") -> Seconds:
    """Return the time in which values of 16 bits become 8 bits wide."""
    share = device.products_of(precision).cast_share
    seconds: Seconds = 3 * np.asarray(values, float) / (device.memory_bytes_per_s * share)
    return seconds


def attention_s(
    device: Accelerator,
    *,
    queries: ArrayLike,
    keys: ArrayLike,
    heads: ArrayLike,
    head_dim: ArrayLike,
    value_dim: ArrayLike | None = None,
    batch: ArrayLike = 1,
    backward: bool = False,
    is_fused: bool = True,
) -> Seconds:
    """Return the time of scores, softmax and values.

    - `keys`: those that a query sees on average: half of the sequence with a causal mask.
    - `is_fused`: False writes the scores to memory, as before FlashAttention.
    """
    wide = np.asarray(head_dim, float)
    both = wide + (wide if value_dim is None else np.asarray(value_dim, float))
    q, seen, h, b = (np.asarray(value, float) for value in (queries, keys, heads, batch))
    flops = 2 * b * h * q * seen * both
    peak = device.peak_flops_per_s("bf16")
    fit = device.attention
    if is_fused:
        narrow, broad = (
            (fit.backward, fit.wide_backward) if backward else (fit.forward, fit.wide_forward)
        )
        # Heads of 64 fill half of a tile; shares count all keys, of which the mask leaves half.
        share = np.where(wide > 128, broad, narrow) / 2 * np.where(wide <= 64, 0.75, 1.0)
        row_ns = fit.backward_ns if backward else fit.forward_ns
        result: Seconds = (
            (1 + backward) * flops / (peak * share)
            + 2 * seen * row_ns * 1e-9
            + (1 + backward) * _KERNEL_S
        )
        return result
    # Unfused: no mask saves work. Scores are written, scaled, masked, made a softmax and read.
    passes = 10 if backward else 6
    moved = passes * 2 * b * h * q * 2 * seen
    products: Seconds = (1 + backward) * 2 * flops / (peak * 0.45) * misalignment(wide) ** 2
    return products + memory_bound_s(device, moved, kernels=4 * (1 + backward))


def memory_bound_s(device: Accelerator, moved: ArrayLike, *, kernels: ArrayLike = 1) -> Seconds:
    """Return the time of kernels that read and write so many bytes: norms, sums, activations."""
    rate = device.memory_bytes_per_s * device.memory_share
    return np.asarray(moved, float) / rate + np.asarray(kernels, float) * _KERNEL_S


def permutation_s(
    device: Accelerator, tokens: ArrayLike, hidden: ArrayLike, top_k: ArrayLike
) -> Seconds:
    """Return the time in which tokens are sorted by expert, in 16 bits; the way back takes it too.

    Rows are gathered from everywhere, which takes about 1.5 times as long as a copy.
    """
    values = np.asarray(tokens, float) * np.asarray(hidden, float) * (1 + np.asarray(top_k, float))
    return memory_bound_s(device, 1.5 * 2 * values, kernels=3)


def cross_entropy_s(device: Accelerator, rows: ArrayLike, vocab: ArrayLike) -> Seconds:
    """Return the time of the loss and its gradient, in 32 bits from scores of 16 bits."""
    values = np.asarray(rows, float) * np.asarray(vocab, float)
    return memory_bound_s(device, 20 * values, kernels=5)


def optimizer_s(device: Accelerator, parameters: ArrayLike) -> Seconds:
    """Return the time of AdamW for parameters that this device updates."""
    return memory_bound_s(device, ADAM_BYTES * np.asarray(parameters, float), kernels=20)


def product_errors(
    device: Accelerator, sizes: Seconds, time_s: Seconds, precision: str, *, with_cast: bool
) -> Seconds:
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
    device: Accelerator, sizes: Seconds, time_s: Seconds, precision: str, *, with_cast: bool = False
) -> Products:
    """Return the numbers with which a device's products take the measured times."""

    def loss(logs: Seconds) -> float:
        made = _products(logs)
        tried = replace(device, products=(("bf16", made), ("fp8", made)))
        errors = product_errors(tried, sizes, time_s, precision, with_cast=with_cast)
        return float(np.abs(errors).mean())

    return _products(_descended(loss))


def _descended(loss: Callable[[Seconds], float]) -> Seconds:
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


def _products(logs: Seconds) -> Products:
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
