"""Built-in models: one worker's step, for users without a trace or a GPU at hand.

`workload("vgg16@v100")` holds the exact size of every gradient in backward order, the moment at
which each is ready, and the times of forward, backward and optimizer. Sizes, names and order are
facts about the models of torchvision and Hugging Face. The times are modelled. A gradient has 4
bytes per element on every device, also where autocast computes in 16 bits. A batch other than the
usual one is part of the name: "resnet50@v100:64". Each file of `models/` is a network, or a family
of them. `devices.py` counts the device memory that a step needs.

A layer's pass takes as long as the slower of its arithmetic and its memory traffic (a roofline).
Both are counted from its shapes, each at one share of the device's peak. Convolutions and linear
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
moment. Those of vgg16 +bn are up to 28 ms late, because its deep convolutions ran faster than
modelled and its first ones slower. The measured steps also hold more than the model does: 63 ms of
resnet50's step are outside the backward pass, which is twice a forward pass. For this device and
model NVIDIA publishes 367 images/s (DeepLearningExamples, larger batch). The model gives 333, and
Zhang et al. measured 250.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fullwire.display import Result, html_table
from fullwire.errors import UsageError
from fullwire.registry import Registry
from fullwire.run.facts import Facts
from fullwire.run.run import Gradients, Provenance, Run, Spans
from fullwire.units import show_time, shown
from fullwire.workloads.devices import DEVICES, Device, Memory, memory
from fullwire.workloads.layers import (
    FP32_BYTES,
    Layer,
    Parameter,
    Work,
    activation,
    attention,
    cross_entropy,
    embedding,
    fp32_add,
    gate,
    layer_norm,
    linear,
)
from fullwire.workloads.optimizers import ADAM, Optimizer
from fullwire.workloads.recipe import Recipe

if TYPE_CHECKING:
    from fullwire.workloads.architecture import Architecture

MOST_SAMPLES = 1_000_000
RECIPES = Registry(Recipe, "fullwire.workloads.models", name="MODEL")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A network, as layers in forward order, each counted for one sample."""

    name: str
    title: str
    sample: str  # such as "image of 224 x 224"
    samples: int  # of one worker in one step, usually
    optimizer: Optimizer
    layers: tuple[Layer, ...]

    @property
    def parameter_count(self) -> int:
        """Return the number of trained values; a tensor used twice counts once."""
        return sum(parameter.size for layer in self.layers for parameter in layer.parameters)


@dataclass(frozen=True, eq=False, slots=True, repr=False, kw_only=True)
class Workload(Result):
    """A model on a device: the step of one worker that is alone."""

    name: str
    model: Model
    device: Device
    samples: int
    gradient_names: tuple[str, ...]  # in backward order
    gradient_bytes: NDArray[np.int64]
    gradient_ready_ns: NDArray[np.int64]  # after the backward pass began, in ascending order
    forward_ns: int
    backward_ns: int
    optimizer_ns: int
    memory: Memory

    @property
    def step_ns(self) -> int:
        """Return the time of forward, backward and optimizer, one after the other."""
        return self.forward_ns + self.backward_ns + self.optimizer_ns

    def _in_short(self) -> Iterator[str]:
        yield f"{self.name}, {self.model.title} with {self.model.parameter_count:,} parameters"
        device = f"{self.device.title} in {self.device.precision}"
        yield f"a step of {self.batch} takes {show_time(self.step_ns * 1e-9)} on {device}"

    def _tables(self) -> Mapping[str, Mapping[str, Any]]:
        return {
            "gradients": {
                "name": self.gradient_names,
                "bytes": self.gradient_bytes,
                "ready_ns": self.gradient_ready_ns,
            }
        }

    def _picture(self) -> str:
        return html_table(self._tables()["gradients"])

    @property
    def batch(self) -> str:
        """Return the batch in words, such as "32 images of 224 x 224"."""
        kind, _, rest = self.model.sample.partition(" ")
        return f"{self.samples:,} {kind}{'s' if self.samples > 1 else ''} {rest}"


def names() -> tuple[str, ...]:
    """List every "model@device"."""
    return tuple(f"{model}@{device}" for model in MODELS for device in DEVICES)


def workload(name: str) -> Workload:
    """Return one worker's step, by its name "model@device" or "model@device:batch"."""
    usual, colon, batch = name.partition(":")
    model_name, _, device_name = usual.rpartition("@")
    try:
        model = MODELS[model_name] if model_name in MODELS else _transformer(model_name)
        device = DEVICES[device_name] if device_name in DEVICES else _accelerator(device_name)
    except UsageError:
        raise UsageError(
            f"expected a workload as MODEL@DEVICE or MODEL@DEVICE:BATCH, got {shown(name)}. Models "
            f"are {', '.join(MODELS)}, and those of `fullwire plan` such as llama3-70b. Devices "
            f"are {', '.join(DEVICES)}, and those of `fullwire plan` such as b200"
        ) from None
    samples = model.samples
    if colon:
        samples = int(batch) if batch.isascii() and batch.isdigit() and len(batch) < 10 else 0
    if not 1 <= samples <= MOST_SAMPLES:
        raise UsageError(
            f"batch: expected a whole number of samples from 1 to {MOST_SAMPLES:,} after the "
            f"colon, got {name!r}"
        )
    return _on_device(model, device, samples)


def _on_device(model: Model, device: Device, samples: int) -> Workload:
    ready: list[tuple[Parameter, int]] = []
    backward_ns = 0
    for layer in reversed(model.layers):
        backward_ns += _duration_ns(layer.backward, device, samples)
        ready.extend((parameter, backward_ns) for parameter in layer.parameters)
    is_usual = samples == model.samples
    update = Work(0, 0, weight_values=model.optimizer.moved_values * model.parameter_count)
    return Workload(
        name=f"{model.name}@{device.name}" + ("" if is_usual else f":{samples}"),
        model=model,
        device=device,
        samples=samples,
        gradient_names=tuple(parameter.name for parameter, _ in ready),
        gradient_bytes=_column([FP32_BYTES * parameter.size for parameter, _ in ready]),
        gradient_ready_ns=_column([ready_ns for _, ready_ns in ready]),
        forward_ns=sum(_duration_ns(layer.forward, device, samples) for layer in model.layers),
        backward_ns=backward_ns,
        optimizer_ns=_duration_ns(update, device, samples),
        memory=memory(model.layers, model.parameter_count, model.optimizer, device, samples),
    )


def modelled_run(workload: Workload) -> Run:
    """Return a workload as a run of one step from time 0: forward, backward, optimizer."""
    device = workload.device
    backward_end_ns = workload.forward_ns + workload.backward_ns
    count = len(workload.gradient_bytes)
    return Run(
        provenance=Provenance(origin="modelled", source=workload.name, basis="modelled"),
        facts=Facts(
            workers=1,
            model=workload.model.title,
            device=device.title,
            batch=workload.batch,
            precision=device.precision,
            efficiency=f"matrix work {device.matrix_efficiency:.0%}, "
            f"memory-bound work {device.memory_efficiency:.0%} of the peak",
        ),
        spans=Spans(
            rank=np.zeros(4, np.int64),
            step=np.zeros(4, np.int64),
            lane=np.array(["host", "compute", "compute", "compute"], object),
            name=np.array(["step", "forward", "backward", "optimizer"], object),
            start_ns=np.array([0, 0, workload.forward_ns, backward_end_ns]),
            end_ns=np.array(
                [workload.step_ns, workload.forward_ns, backward_end_ns, workload.step_ns]
            ),
        ),
        gradients=Gradients(
            rank=np.zeros(count, np.int64),
            step=np.zeros(count, np.int64),
            order=np.arange(count),
            bytes=workload.gradient_bytes,
            ready_ns=workload.forward_ns + workload.gradient_ready_ns,
        ),
    )


def _duration_ns(work: Work, device: Device, samples: int) -> int:
    saving = device.winograd_saving if work.winograd else 1.0
    arithmetic_s = (
        samples
        * work.matrix_flops
        / (saving * device.matrix_flops_per_s * device.matrix_efficiency)
    )
    activation_bytes = device.activation_bytes * samples * work.activation_values
    fp32_bytes = FP32_BYTES * (samples * work.fp32_values + work.weight_values)
    memory_s = (activation_bytes + fp32_bytes) / (
        device.memory_bytes_per_s * device.memory_efficiency
    )
    return round(1e9 * max(arithmetic_s, memory_s))


def _column(values: list[int]) -> NDArray[np.int64]:
    column = np.array(values, dtype=np.int64)
    column.flags.writeable = False
    return column


@cache
def _transformer(name: str) -> Model:
    """Return a model of `fullwire plan` as the layers of one sequence."""
    from fullwire.workloads.architecture_files import architecture

    model = architecture(name)
    return Model(
        name=name,
        title=model.name,
        sample=f"sequence of {model.sequence}",
        samples=1,
        optimizer=ADAM,
        layers=tuple(_layers(model)),
    )


def _layers(model: Architecture) -> Iterator[Layer]:
    """Go through a transformer as it is described; its parameters are those of `plan`."""
    length, width = model.sequence, model.hidden

    def norm(name: str) -> Layer:
        one = layer_norm(name, length, width, shifts=model.norm == "layer")
        return one if model.norm_parameters else one._replace(parameters=())

    rows = model.embedding_parameters // width
    yield embedding("embedding", length, rows, width, uses=2 if model.is_tied else 1)
    for index in range(model.layers):
        name, moe = f"layers.{index}", model.moe if model.has_experts(index) else None
        yield norm(f"{name}.attention_norm")
        own = model.attention_parameters
        for matrix in model.attention_matrices:
            yield linear(
                f"{name}.{matrix.name}", length, matrix.inputs, matrix.outputs, bias=matrix.has_bias
            )
            own -= matrix.parameters
        scores = attention(
            f"{name}.attention",
            length,
            model.score_dims // 2,
            round(model.keys(index, length)),
            shared_heads=model.heads // model.kv_heads,
        )
        inside = (Parameter(f"{name}.attention.norms", own),) if own else ()
        yield scores._replace(parameters=inside)
        if model.layer_norms > 2:
            yield norm(f"{name}.after_attention_norm")
        yield fp32_add(f"{name}.attention_add", length * width)
        if model.layer_norms > 1:  # else attention and MLP share one
            yield norm(f"{name}.mlp_norm")
        matrices = model.dense_matrices if moe is None else model.shared_matrices
        for matrix in matrices:
            yield linear(
                f"{name}.{matrix.name}", length, matrix.inputs, matrix.outputs, bias=matrix.has_bias
            )
        values = length * (model.ffn if moe is None else moe.shared_ffn)
        if moe is not None:  # each token goes to some experts; all of them have gradients
            for matrix in model.expert_matrices:
                one = linear(
                    f"{name}.{matrix.name}", length * moe.top_k, matrix.inputs, matrix.outputs
                )
                every = Parameter(f"{name}.{matrix.name}s.weight", moe.experts * matrix.parameters)
                yield one._replace(parameters=(every,))
            values += length * moe.top_k * moe.ffn
        yield (gate if model.is_gated else activation)(f"{name}.activation", values)
        if model.layer_norms > 2:
            yield norm(f"{name}.after_mlp_norm")
        yield fp32_add(f"{name}.mlp_add", length * width)
    yield norm("norm")
    head = linear("head", length, width, model.vocab, bias=model.has_head_bias)
    yield head._replace(parameters=head.parameters[:-1]) if model.is_tied else head  # its bias
    yield cross_entropy("loss", length, model.vocab)


def _accelerator(name: str) -> Device:
    """Return a device of `fullwire plan`, with the share of its peak that h100 and a100 reach."""
    from fullwire.workloads.accelerators import accelerator

    device = accelerator(name)
    return Device(
        name=name,
        title=device.title,
        precision=device.arithmetic("bf16"),
        matrix_flops_per_s=device.peak_flops_per_s("bf16"),
        memory_bytes_per_s=device.memory_bytes_per_s,
        memory_bytes=device.memory_bytes,
        matrix_efficiency=0.63 * device.products_of("bf16").peak_share,
        memory_efficiency=device.memory_share,
    )


class _Models(Mapping[str, Model]):
    """Models by name, each built when first asked for: importing this module stays cheap."""

    def __getitem__(self, name: str) -> Model:
        return _model(name)

    def __iter__(self) -> Iterator[str]:
        return iter(RECIPES)

    def __len__(self) -> int:
        return len(RECIPES)


@cache
def _model(name: str) -> Model:
    recipe = RECIPES[name]
    return Model(
        name=recipe.key,
        title=recipe.title,
        sample=recipe.sample,
        samples=recipe.samples,
        optimizer=recipe.optimizer,
        layers=tuple(recipe.layers()),
    )


MODELS: Mapping[str, Model] = _Models()
