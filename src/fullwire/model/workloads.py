"""Built-in models: one worker's step, for whoever has neither a trace nor a GPU at hand.

`workload("vgg16@v100")` holds the exact size of every gradient in backward order, when each is
ready, and how long forward, backward and optimizer take. Sizes, names and order are facts about
the models of torchvision and Hugging Face; the times are modelled. A gradient has 4 bytes per
element on every device, also where autocast computes in bf16.

A layer's pass takes as long as the slower of its arithmetic and its memory traffic (a roofline),
both counted from its shapes, each at one share of the device's peak. Convolutions and linear
layers do twice the forward's operations in the backward: input gradient and weight gradient.
Attention is fused, as PyTorch's scaled_dot_product_attention. Left out: launching kernels, dropout,
bias additions, casts, the input pipeline. So expect real steps to be longer, most of all with small
layers on fast devices, where the host cannot launch kernels quickly enough.

How far to believe it. Zhang et al. (NetAI 2020) measured a V100 with 32 images in fp32; "+bn" is
our vgg16 with the batch norms that theirs has. In ms, modelled against measured:

                      backward                   step
    vgg16         106.8   111.6    -4 %     165.4   194.5   -15 %
    vgg16 +bn     117.2   111.6    +5 %     182.1   194.5    -6 %
    resnet50       61.5    64.8    -5 %      96.2   128.1   -25 %

Totals hide where the time goes. Every gradient of resnet50 is ready within 4 ms of the measured
moment; those of vgg16 +bn are up to 28 ms late, because its deep convolutions ran faster than
modelled and its first ones slower. And the measured steps hold more than we model: 63 ms of
resnet50's are not backward, twice a forward pass. NVIDIA publishes 367 images/s for this device
and model (DeepLearningExamples, larger batch), we have 333, they had 250.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fullwire.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An accelerator, as the time of a layer sees it."""

    name: str
    title: str
    precision: str  # of arithmetic and activations
    matrix_flops_per_s: float
    memory_bytes_per_s: float
    matrix_efficiency: float  # share of the peak that matrix work reaches
    memory_efficiency: float  # share of the bandwidth that memory-bound work reaches


# The next three are tuples: they cost a fraction of a frozen dataclass to define and to make, a
# model has hundreds of them, and a command that names a workload should start at once.
class Parameter(NamedTuple):
    """One trained tensor, named as in the model's state_dict."""

    name: str
    size: int  # elements


class Work(NamedTuple):
    """What one pass through a layer asks of any device; values are read or written."""

    matrix_flops: int  # a multiplication and an addition are two
    activation_values: int  # as wide as the device's precision
    fp32_values: int = 0  # parameters, gradients, and what autocast leaves in fp32
    winograd: bool = False  # a 3 x 3 convolution with stride 1


class Layer(NamedTuple):
    """One operation of a model. Its gradients are all ready when its backward ends."""

    name: str
    forward: Work
    backward: Work
    parameters: tuple[Parameter, ...] = ()  # bias before weight, as PyTorch reports gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A network and its batch, as layers in forward order."""

    name: str
    title: str
    batch: str
    layers: tuple[Layer, ...]

    @property
    def parameter_count(self) -> int:
        """Trained values; a tensor used twice counts once."""
        return sum(parameter.size for layer in self.layers for parameter in layer.parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model on a device: what one worker's step looks like when nobody else is there."""

    name: str
    model: Model
    device: Device
    gradient_names: tuple[str, ...]  # in backward order
    gradient_bytes: NDArray[np.int64]
    gradient_ready_ns: NDArray[np.int64]  # after the backward pass begins, never decreasing
    forward_ns: int
    backward_ns: int
    optimizer_ns: int

    @property
    def step_ns(self) -> int:
        """Forward, backward and optimizer, one after the other."""
        return self.forward_ns + self.backward_ns + self.optimizer_ns


# Peaks are NVIDIA's data sheets, without sparsity. The efficiencies belong to a device, never to a
# model: with one per model any table can be met, and the next model is still unknown.
DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device(
            name="v100",
            title="NVIDIA V100 SXM2 16 GB",  # 32 GB runs at the same rates
            precision="fp32",
            matrix_flops_per_s=15.7e12,
            memory_bytes_per_s=900e9,
            # The one fitted number: with it the modelled backward passes of vgg16 +bn and
            # resnet50 miss the measured ones by the same share, one above, one below.
            matrix_efficiency=0.57,
            # Measured with the logs: adding vectors of 640 MiB moves 827 GB/s.
            memory_efficiency=0.92,
        ),
        Device(
            name="a100",
            title="NVIDIA A100 SXM4 80 GB",
            precision="bf16",
            matrix_flops_per_s=312e12,
            memory_bytes_per_s=2039e9,
            # Assumed: 0.7 of the best matmul found, 0.87 (stas00/ml-engineering, accelerators).
            # It gives gpt2 166,000 tokens/s. On 8 of these PyTorch has been seen at 138,000 each,
            # llm.c at 231,000 (10 billion tokens in 90 minutes).
            matrix_efficiency=0.6,
            # Assumed: calculon-ai/calculon (systems/) has 0.75 for 10 MB and 0.9 for 100 MB.
            memory_efficiency=0.85,
        ),
        Device(
            name="h100",
            title="NVIDIA H100 SXM5 80 GB",
            precision="bf16",
            matrix_flops_per_s=989e12,
            memory_bytes_per_s=3350e9,
            # Assumed: 0.6 of the best matmul found, 0.80 (same source): faster units are harder
            # to feed. It gives gpt2 372,000 tokens/s; nanoGPT has been seen at 380,000 (its pull
            # request 464), llm.c on 8 at 463,000 each (10 billion tokens in 45 minutes).
            matrix_efficiency=0.5,
            memory_efficiency=0.85,  # as a100
        ),
    )
}

_FP32_BYTES = 4
_ACTIVATION_BYTES = {"fp32": 4, "bf16": 2}

# Winograd's F(2 x 2, 3 x 3): 16 multiplications where the definition has 36 (Lavin and Gray, CVPR
# 2016). cuDNN's fp32 convolutions work so, tensor cores do not. Without it vgg16 was measured
# above the V100's peak.
_WINOGRAD_SAVING = {"fp32": 36 / 16, "bf16": 1.0}

# SGD with momentum reads weight, gradient and momentum, and writes weight and momentum.
_OPTIMIZER_VALUES_PER_PARAMETER = 5

_IMAGES = 32  # per worker, as in the paper


def names() -> tuple[str, ...]:
    """Every "model@device" there is."""
    return tuple(f"{model}@{device}" for model in MODELS for device in DEVICES)


def workload(name: str) -> Workload:
    """One worker's step, asked for as "model@device"."""
    model_name, _, device_name = name.partition("@")
    if model_name not in MODELS or device_name not in DEVICES:
        raise UsageError(
            f"expected a workload as MODEL@DEVICE, got {name!r}: "
            f"models are {', '.join(MODELS)}; devices are {', '.join(DEVICES)}"
        )
    return _on_device(MODELS[model_name], DEVICES[device_name])


def _on_device(model: Model, device: Device) -> Workload:
    ready: list[tuple[Parameter, int]] = []
    backward_ns = 0
    for layer in reversed(model.layers):
        backward_ns += _duration_ns(layer.backward, device)
        ready.extend((parameter, backward_ns) for parameter in layer.parameters)
    return Workload(
        name=f"{model.name}@{device.name}",
        model=model,
        device=device,
        gradient_names=tuple(parameter.name for parameter, _ in ready),
        gradient_bytes=_column([_FP32_BYTES * parameter.size for parameter, _ in ready]),
        gradient_ready_ns=_column([ready_ns for _, ready_ns in ready]),
        forward_ns=sum(_duration_ns(layer.forward, device) for layer in model.layers),
        backward_ns=backward_ns,
        optimizer_ns=_duration_ns(_optimizer_work(model), device),
    )


def _duration_ns(work: Work, device: Device) -> int:
    saving = _WINOGRAD_SAVING[device.precision] if work.winograd else 1.0
    arithmetic_s = work.matrix_flops / (
        saving * device.matrix_flops_per_s * device.matrix_efficiency
    )
    activation_bytes = _ACTIVATION_BYTES[device.precision] * work.activation_values
    memory_s = (activation_bytes + _FP32_BYTES * work.fp32_values) / (
        device.memory_bytes_per_s * device.memory_efficiency
    )
    return round(1e9 * max(arithmetic_s, memory_s))


def _optimizer_work(model: Model) -> Work:
    return Work(0, 0, _OPTIMIZER_VALUES_PER_PARAMETER * model.parameter_count)


def _column(values: list[int]) -> NDArray[np.int64]:
    column = np.array(values, dtype=np.int64)
    column.flags.writeable = False
    return column


# ---- layers: a number before `values` counts how often a pass reads or writes the tensor


def _conv(
    name: str, inputs: int, outputs: int, side: int, kernel: int, *, stride: int = 1, bias: int = 0
) -> Layer:
    """A convolution from `inputs` to `outputs` channels; `side` is that of what it writes."""
    weights = inputs * outputs * kernel**2
    flops = 2 * _IMAGES * side**2 * weights
    moved = _IMAGES * (inputs * (side * stride) ** 2 + outputs * side**2)
    forward = Work(flops, moved, weights, winograd=kernel == 3 and stride == 1)
    return Layer(name, forward, _twice(forward), _bias_and_weight(name, bias, weights))


def _without_input_gradient(layer: Layer) -> Layer:
    """The model's first layer: its backward is the weight gradient, as much work as forward."""
    return layer._replace(backward=layer.forward)


def _linear(name: str, rows: int, inputs: int, outputs: int) -> Layer:
    weights = inputs * outputs
    forward = Work(2 * rows * weights, rows * (inputs + outputs), weights)
    return Layer(name, forward, _twice(forward), _bias_and_weight(name, outputs, weights))


def _twice(work: Work) -> Work:
    """The backward of a matrix product: input gradient and weight gradient, each like forward."""
    return Work(
        2 * work.matrix_flops, 2 * work.activation_values, 2 * work.fp32_values, work.winograd
    )


def _attention(name: str, tokens: int, width: int, keys_per_query: int) -> Layer:
    """Fused attention: two matrix products forward; five backward, the scores are recomputed."""
    product_flops = 2 * tokens * keys_per_query * width
    values = tokens * width
    # forward: q, k, v, output; backward: those, the output's gradient, and three to write
    return Layer(name, Work(2 * product_flops, 4 * values), Work(5 * product_flops, 8 * values))


def _batch_norm(name: str, channels: int, side: int) -> Layer:
    values = _IMAGES * channels * side**2
    # forward: statistics, then read and write; backward: two sums over x and dy, then dx from both
    parameters = _bias_and_weight(name, channels, channels)
    return Layer(name, Work(0, 3 * values), Work(0, 5 * values), parameters)


def _layer_norm(name: str, tokens: int, width: int) -> Layer:
    values = tokens * width
    # a row stays in cache: read, write; backward: dx from x and dy, and both again for the weight
    parameters = _bias_and_weight(name, width, width)
    return Layer(name, Work(0, 0, 2 * values), Work(0, 0, 5 * values), parameters)


def _activation(name: str, values: int) -> Layer:
    """ReLU or GELU."""
    return Layer(name, Work(0, 2 * values), Work(0, 3 * values))


def _add(name: str, values: int) -> Layer:
    """A residual sum; backward adds the two gradients that meet at the fork."""
    return Layer(name, Work(0, 3 * values), Work(0, 3 * values))


def _fp32_add(name: str, values: int) -> Layer:
    """A residual sum of a transformer, whose stream autocast leaves in fp32."""
    return Layer(name, Work(0, 0, 3 * values), Work(0, 0, 3 * values))


def _pool(name: str, channels: int, side: int, pooled_side: int) -> Layer:
    values = _IMAGES * channels * (side**2 + pooled_side**2)
    return Layer(name, Work(0, values), Work(0, values))


def _embedding(name: str, tokens: int, entries: int, width: int, *, uses: int = 1) -> Layer:
    """A table lookup; one that is also the head's weight (two uses) adds both gradients here."""
    table, values = entries * width, tokens * width
    # backward: clear a table, then read a row of gradient, read and write a row of the table
    backward = table + 3 * values + 3 * table * (uses - 1)
    weight = _bias_and_weight(name, 0, table)
    return Layer(name, Work(0, 0, 2 * values), Work(0, 0, backward), weight)


def _cross_entropy(name: str, rows: int, classes: int) -> Layer:
    values = rows * classes
    # log-softmax forward; backward: the loss's gradient is written dense, then read with the output
    return Layer(name, Work(0, 0, 2 * values), Work(0, 0, 4 * values))


def _bias_and_weight(name: str, biases: int, weights: int) -> tuple[Parameter, ...]:
    weight = Parameter(f"{name}.weight", weights)
    return (Parameter(f"{name}.bias", biases), weight) if biases else (weight,)


# ---- models: layers in forward order


def _vgg16() -> Iterator[Layer]:
    index, channels, side = 0, 3, 224
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            conv = _conv(f"features.{index}", channels, width, side, 3, bias=width)
            yield conv if index else _without_input_gradient(conv)
            yield _activation(f"features.{index + 1}", _IMAGES * width * side**2)
            index, channels = index + 2, width
        yield _pool(f"features.{index}", channels, side, side // 2)
        index, side = index + 1, side // 2
    yield _linear("classifier.0", _IMAGES, channels * side**2, 4096)
    yield _activation("classifier.1", _IMAGES * 4096)
    yield _linear("classifier.3", _IMAGES, 4096, 4096)
    yield _activation("classifier.4", _IMAGES * 4096)
    yield _linear("classifier.6", _IMAGES, 4096, 1000)
    yield _cross_entropy("loss", _IMAGES, 1000)


def _resnet(depths: tuple[int, ...]) -> Iterator[Layer]:
    yield _without_input_gradient(_conv("conv1", 3, 64, 112, 7, stride=2))
    yield _batch_norm("bn1", 64, 112)
    yield _activation("relu", _IMAGES * 64 * 112**2)
    yield _pool("maxpool", 64, 112, 56)
    channels, side = 64, 56
    for stage, depth in enumerate(depths):
        width = 64 * 2**stage
        for block in range(depth):
            stride = 2 if stage > 0 and block == 0 else 1
            side //= stride
            yield from _bottleneck(f"layer{stage + 1}.{block}", channels, width, side, stride)
            channels = 4 * width
    yield _pool("avgpool", channels, side, 1)
    yield _linear("fc", _IMAGES, channels, 1000)
    yield _cross_entropy("loss", _IMAGES, 1000)


def _bottleneck(name: str, inputs: int, width: int, side: int, stride: int) -> Iterator[Layer]:
    outputs = 4 * width
    yield _conv(f"{name}.conv1", inputs, width, side * stride, 1)
    yield _batch_norm(f"{name}.bn1", width, side * stride)
    yield _activation(f"{name}.relu1", _IMAGES * width * (side * stride) ** 2)
    yield _conv(f"{name}.conv2", width, width, side, 3, stride=stride)
    yield _batch_norm(f"{name}.bn2", width, side)
    yield _activation(f"{name}.relu2", _IMAGES * width * side**2)
    yield _conv(f"{name}.conv3", width, outputs, side, 1)
    yield _batch_norm(f"{name}.bn3", outputs, side)
    if inputs != outputs:  # runs after bn3, so its gradients come before those of bn3
        yield _conv(f"{name}.downsample.0", inputs, outputs, side, 1, stride=stride)
        yield _batch_norm(f"{name}.downsample.1", outputs, side)
    yield _add(f"{name}.add", _IMAGES * outputs * side**2)
    yield _activation(f"{name}.relu3", _IMAGES * outputs * side**2)


def _bert_large() -> Iterator[Layer]:
    sequences, length, width, vocabulary = 8, 512, 1024, 30522
    tokens = sequences * length
    yield _embedding("bert.embeddings.word_embeddings", tokens, vocabulary, width, uses=2)
    yield _embedding("bert.embeddings.token_type_embeddings", tokens, 2, width)
    yield _fp32_add("bert.embeddings.add1", tokens * width)
    yield _embedding("bert.embeddings.position_embeddings", tokens, length, width)
    yield _fp32_add("bert.embeddings.add2", tokens * width)
    yield _layer_norm("bert.embeddings.LayerNorm", tokens, width)
    for index in range(24):
        yield from _bert_layer(f"bert.encoder.layer.{index}", tokens, width, length)
    yield _linear("bert.pooler.dense", sequences, width, width)
    yield _linear("cls.predictions.transform.dense", tokens, width, width)
    yield _activation("cls.predictions.transform.gelu", tokens * width)
    yield _layer_norm("cls.predictions.transform.LayerNorm", tokens, width)
    decoder = _linear("cls.predictions.decoder", tokens, width, vocabulary)
    # the decoder's weight is the word embeddings', ready only with them; its bias is its own
    yield decoder._replace(parameters=(Parameter("cls.predictions.bias", vocabulary),))
    yield _linear("cls.seq_relationship", sequences, width, 2)
    yield _cross_entropy("loss", tokens, vocabulary)


def _bert_layer(name: str, tokens: int, width: int, length: int) -> Iterator[Layer]:
    for projection in ("query", "key", "value"):
        yield _linear(f"{name}.attention.self.{projection}", tokens, width, width)
    yield _attention(f"{name}.attention.self", tokens, width, keys_per_query=length)
    yield _linear(f"{name}.attention.output.dense", tokens, width, width)
    yield _fp32_add(f"{name}.attention.output.add", tokens * width)
    yield _layer_norm(f"{name}.attention.output.LayerNorm", tokens, width)
    yield _linear(f"{name}.intermediate.dense", tokens, width, 4 * width)
    yield _activation(f"{name}.intermediate.gelu", tokens * 4 * width)
    yield _linear(f"{name}.output.dense", tokens, 4 * width, width)
    yield _fp32_add(f"{name}.output.add", tokens * width)
    yield _layer_norm(f"{name}.output.LayerNorm", tokens, width)


def _gpt2() -> Iterator[Layer]:
    sequences, length, width, vocabulary = 8, 1024, 768, 50257
    tokens = sequences * length
    yield _embedding("transformer.wte", tokens, vocabulary, width, uses=2)
    yield _embedding("transformer.wpe", tokens, length, width)
    yield _fp32_add("transformer.add", tokens * width)
    for index in range(12):
        yield from _gpt2_block(f"transformer.h.{index}", tokens, width, length)
    yield _layer_norm("transformer.ln_f", tokens, width)
    # the head's weight is wte's, ready only with it
    yield _linear("lm_head", tokens, width, vocabulary)._replace(parameters=())
    yield _cross_entropy("loss", tokens, vocabulary)


def _gpt2_block(name: str, tokens: int, width: int, length: int) -> Iterator[Layer]:
    yield _layer_norm(f"{name}.ln_1", tokens, width)
    yield _linear(f"{name}.attn.c_attn", tokens, width, 3 * width)
    # causal: a token looks at those before it, half of the sequence on average
    yield _attention(f"{name}.attn", tokens, width, keys_per_query=length // 2)
    yield _linear(f"{name}.attn.c_proj", tokens, width, width)
    yield _fp32_add(f"{name}.attn.add", tokens * width)
    yield _layer_norm(f"{name}.ln_2", tokens, width)
    yield _linear(f"{name}.mlp.c_fc", tokens, width, 4 * width)
    yield _activation(f"{name}.mlp.gelu", tokens * 4 * width)
    yield _linear(f"{name}.mlp.c_proj", tokens, 4 * width, width)
    yield _fp32_add(f"{name}.mlp.add", tokens * width)


class _Recipe(NamedTuple):
    title: str
    batch: str
    layers: Callable[[], Iterator[Layer]]


_PICTURES = f"{_IMAGES} images of 224 x 224"

_RECIPES = {
    "vgg16": _Recipe("VGG16 (torchvision)", _PICTURES, _vgg16),
    "resnet50": _Recipe("ResNet-50 (torchvision)", _PICTURES, lambda: _resnet((3, 4, 6, 3))),
    "resnet101": _Recipe("ResNet-101 (torchvision)", _PICTURES, lambda: _resnet((3, 4, 23, 3))),
    "bert-large": _Recipe(
        "BERT-large, uncased, pre-training (Hugging Face)", "8 sequences of 512", _bert_large
    ),
    "gpt2": _Recipe("GPT-2 124M (Hugging Face)", "8 sequences of 1024", _gpt2),
}


class _Models(Mapping[str, Model]):
    """Models by name, each built when first asked for: importing this module stays cheap."""

    def __getitem__(self, name: str) -> Model:
        return _model(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_RECIPES)

    def __len__(self) -> int:
        return len(_RECIPES)


@cache
def _model(name: str) -> Model:
    recipe = _RECIPES[name]
    return Model(name=name, title=recipe.title, batch=recipe.batch, layers=tuple(recipe.layers()))


MODELS: Mapping[str, Model] = _Models()
