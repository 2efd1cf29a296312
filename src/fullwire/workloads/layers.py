"""Layers of networks: their arithmetic, traffic, parameters and memory, counted from shapes.

Everything is counted for one sample, an image or a sequence. Only weights are read and written
once however many samples there are. A number before `values` counts how often a pass reads or
writes the tensor. As a rule, a layer keeps its input for its backward pass. A tensor that two
layers keep is counted with one of them. An activation that works in place keeps nothing of its own,
since the layer after it keeps the same tensor.
"""

from __future__ import annotations

from typing import NamedTuple

FP32_BYTES = 4
_INDEX_BYTES = 8


# These are tuples, which cost a fraction of a frozen dataclass to define and to make. A model has
# hundreds of them, and a command that names a workload should start at once.
class Parameter(NamedTuple):
    """One trained tensor, named as in the model's state_dict."""

    name: str
    size: int  # elements


class Work(NamedTuple):
    """The work of one pass through a layer on any device; values are read or written."""

    matrix_flops: int  # a multiplication and an addition are two
    activation_values: int  # as wide as the device's precision
    fp32_values: int = 0  # those that autocast leaves in fp32
    weight_values: int = 0  # parameters and gradients, in fp32, once for all samples
    winograd: bool = False  # a 3 x 3 convolution with stride 1


class Layer(NamedTuple):
    """One operation of a model. Its gradients are all ready when its backward ends."""

    name: str
    forward: Work
    backward: Work
    parameters: tuple[Parameter, ...] = ()  # bias before weight, PyTorch's order of gradients
    kept_values: int = 0  # until the backward pass, as wide as the device's precision
    kept_bytes: int = 0  # likewise, independent of the precision


def conv(
    name: str,
    inputs: int,
    outputs: int,
    side: int,
    kernel: int | tuple[int, int],
    *,
    stride: int = 1,
    bias: int = 0,
    groups: int = 1,
    input_side: int | None = None,
    shares_input: bool = False,
) -> Layer:
    """Make a convolution; `side` is the side of its output."""
    high, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
    weights = inputs // groups * outputs * high * wide
    taken = inputs * (side * stride if input_side is None else input_side) ** 2
    is_winograd = (high, wide, stride, groups) == (3, 3, 1, 1)
    forward = Work(
        2 * side**2 * weights,
        taken + outputs * side**2,
        weight_values=weights,
        winograd=is_winograd,
    )
    kept = 0 if shares_input else taken
    return Layer(name, forward, _twice(forward), bias_and_weight(name, bias, weights), kept)


def without_input_gradient(layer: Layer) -> Layer:
    """Make a model's first layer: its backward is the weight gradient, as much as its forward."""
    return layer._replace(backward=layer.forward)


def linear(name: str, rows: int, inputs: int, outputs: int, *, bias: bool = True) -> Layer:
    """Make a product with a matrix. Autocast casts the input of each one, even where it is one."""
    weights = inputs * outputs
    forward = Work(2 * rows * weights, rows * (inputs + outputs), weight_values=weights)
    parameters = bias_and_weight(name, outputs if bias else 0, weights)
    return Layer(name, forward, _twice(forward), parameters, rows * inputs)


def _twice(work: Work) -> Work:
    """Double a matrix product for the backward: input and weight gradient, each like forward."""
    flops, activations, fp32, weights, is_winograd = work
    return Work(2 * flops, 2 * activations, 2 * fp32, 2 * weights, is_winograd)


def attention(
    name: str, tokens: int, width: int, keys_per_query: int, *, shared_heads: int = 1
) -> Layer:
    """Make fused attention; keys and values have `shared_heads` times fewer heads."""
    product_flops = 2 * tokens * keys_per_query * width
    queries, others = tokens * width, tokens * width // shared_heads
    # There are two matrix products forward, and five backward: the scores are recomputed.
    # Forward moves q, k, v and the output. Backward moves these, the output's gradient, and three
    # gradients that it writes.
    forward = Work(2 * product_flops, 2 * queries + 2 * others)
    backward = Work(5 * product_flops, 4 * queries + 4 * others)
    # The next layer keeps the output.
    return Layer(name, forward, backward, kept_values=queries + 2 * others)


def batch_norm(name: str, channels: int, side: int) -> Layer:
    """Make a batch norm of a picture."""
    values = channels * side**2
    # Forward: statistics, then read and write. Backward: two sums over x and dy, then dx from both.
    parameters = bias_and_weight(name, channels, channels)
    return Layer(name, Work(0, 3 * values), Work(0, 5 * values), parameters, values)


def layer_norm(name: str, tokens: int, width: int, *, shifts: bool = True) -> Layer:
    """Make a layer norm; without shifts an RMS norm."""
    values = tokens * width
    # A row stays in cache: read, write. Backward: dx from x and dy, and both again for the weight.
    parameters = bias_and_weight(name, width if shifts else 0, width)
    forward, backward = Work(0, 0, 2 * values), Work(0, 0, 5 * values)
    return Layer(name, forward, backward, parameters, kept_bytes=FP32_BYTES * values)


def activation(name: str, values: int, *, in_place: bool = True) -> Layer:
    """Make a ReLU, or a GELU, which keeps its input."""
    return Layer(
        name, Work(0, 2 * values), Work(0, 3 * values), kept_values=0 if in_place else values
    )


def gate(name: str, values: int) -> Layer:
    """Make a SwiGLU's product: SiLU of one half, times the other half."""
    # backward: both halves and the gradient are read, two gradients written
    return Layer(name, Work(0, 3 * values), Work(0, 5 * values), kept_values=3 * values)


def rotation(name: str, values: int) -> Layer:
    """Make a rotary position embedding of queries and keys: its tables are all that it keeps."""
    return Layer(name, Work(0, 2 * values), Work(0, 2 * values))


def add(name: str, values: int) -> Layer:
    """Make a residual sum; backward adds the two gradients that meet at the fork."""
    return Layer(name, Work(0, 3 * values), Work(0, 3 * values))


def fp32_add(name: str, values: int) -> Layer:
    """Make a residual sum of a transformer; autocast leaves its stream in fp32."""
    return Layer(name, Work(0, 0, 3 * values), Work(0, 0, 3 * values))


def joined(name: str, values: int, *, kept_values: int = 0) -> Layer:
    """Make a concatenation, a copy; activations that worked in place keep the copied values."""
    # Backward adds a slice to the gradients that other layers have for the same input.
    return Layer(name, Work(0, 2 * values), Work(0, 3 * values), kept_values=kept_values)


def max_pool(
    name: str, channels: int, side: int, pooled_side: int, *, shares_input: bool = False
) -> Layer:
    """Make a maximum pool: it keeps where the maxima were, as 64-bit numbers."""
    taken, given = channels * side**2, channels * pooled_side**2
    work, kept = Work(0, taken + given), 0 if shares_input else taken
    return Layer(name, work, work, kept_values=kept, kept_bytes=_INDEX_BYTES * given)


def average_pool(
    name: str, channels: int, side: int, pooled_side: int, *, shares_input: bool = True
) -> Layer:
    """Make an average pool; one over a whole picture keeps nothing."""
    taken, given = channels * side**2, channels * pooled_side**2
    work = Work(0, taken + given)
    return Layer(name, work, work, kept_values=0 if shares_input else taken)


def embedding(name: str, tokens: int, entries: int, width: int, *, uses: int = 1) -> Layer:
    """Make a table lookup; a table that is the head's weight too adds both gradients here."""
    table, values = entries * width, tokens * width
    # backward: clear a table, then read a row of gradient, read and write a row of the table
    backward = Work(0, 0, 3 * values, table + 3 * table * (uses - 1))
    weight = bias_and_weight(name, 0, table)
    return Layer(name, Work(0, 0, 2 * values), backward, weight, kept_bytes=_INDEX_BYTES * tokens)


def cross_entropy(name: str, rows: int, classes: int) -> Layer:
    """Make the loss, which is computed in fp32: it keeps the logarithms of its probabilities."""
    values = rows * classes
    # Forward: log-softmax. Backward: the loss's gradient is written dense, then read with output.
    forward, backward = Work(0, 0, 2 * values), Work(0, 0, 4 * values)
    return Layer(name, forward, backward, kept_bytes=FP32_BYTES * values)


def bias_and_weight(name: str, biases: int, weights: int) -> tuple[Parameter, ...]:
    """Name the tensors that a layer has."""
    both = (Parameter(f"{name}.bias", biases), Parameter(f"{name}.weight", weights))
    return tuple(tensor for tensor in both if tensor.size)
