"""MobileNet v1, as Keras has it, and MobileNetV2: layers in the order in which they run forward."""

from __future__ import annotations

from collections.abc import Iterator

from fullwire.workloads.layers import (
    Layer,
    activation,
    add,
    average_pool,
    batch_norm,
    conv,
    cross_entropy,
    linear,
    without_input_gradient,
)
from fullwire.workloads.recipe import CLASSES, images


def mobilenet() -> Iterator[Layer]:
    """Go through MobileNet v1: thirteen separable convolutions."""
    yield from _normed("conv1", "conv1_bn", 3, 32, 112, 3, stride=2)
    channels, side = 32, 112
    strides = (1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1)
    widths = (64, 128, 128, 256, 256, *[512] * 6, 1024, 1024)
    for number, (width, stride) in enumerate(zip(widths, strides, strict=True), 1):
        side //= stride
        depth, point = f"conv_dw_{number}", f"conv_pw_{number}"
        yield from _normed(
            depth, f"{depth}_bn", channels, channels, side, 3, stride=stride, groups=channels
        )
        yield from _normed(point, f"{point}_bn", channels, width, side, 1)
        channels = width
    yield average_pool("global_average_pooling2d", channels, side, 1)
    yield linear("conv_preds", 1, channels, CLASSES)
    yield cross_entropy("loss", 1, CLASSES)


def mobilenet_v2() -> Iterator[Layer]:
    """Go through MobileNetV2: seventeen inverted residuals.

    PyTorch's ReLU6 copies its input before it works in place.
    """
    yield from _normed("features.0.0", "features.0.1", 3, 32, 112, 3, stride=2, in_place=False)
    channels, side, index = 32, 112, 1
    for wider, width, count, first_stride in (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):
        for number in range(count):
            stride = first_stride if number == 0 else 1
            side //= stride
            name = f"features.{index}.conv"
            yield from _inverted_residual(name, channels, wider * channels, width, side, stride)
            channels, index = width, index + 1
    yield from _normed("features.18.0", "features.18.1", channels, 1280, side, 1, in_place=False)
    yield average_pool("avgpool", 1280, side, 1)
    yield linear("classifier.1", 1, 1280, CLASSES)
    yield cross_entropy("loss", 1, CLASSES)


def _inverted_residual(
    name: str, inputs: int, hidden: int, outputs: int, side: int, stride: int
) -> Iterator[Layer]:
    place = 0
    if hidden != inputs:
        yield from _normed(
            f"{name}.0.0", f"{name}.0.1", inputs, hidden, side * stride, 1, in_place=False
        )
        place = 1
    deep = f"{name}.{place}"
    yield from _normed(
        f"{deep}.0",
        f"{deep}.1",
        hidden,
        hidden,
        side,
        3,
        stride=stride,
        groups=hidden,
        in_place=False,
    )
    yield conv(f"{name}.{place + 1}", hidden, outputs, side, 1)
    yield batch_norm(f"{name}.{place + 2}", outputs, side)
    if stride == 1 and inputs == outputs:
        yield add(f"{name}.add", outputs * side**2)


def _normed(
    name: str,
    norm: str,
    inputs: int,
    outputs: int,
    side: int,
    kernel: int,
    *,
    stride: int = 1,
    groups: int = 1,
    in_place: bool = True,
) -> Iterator[Layer]:
    """Go through a convolution, its batch norm and its activation."""
    layer = conv(name, inputs, outputs, side, kernel, stride=stride, groups=groups)
    yield without_input_gradient(layer) if inputs == 3 else layer
    yield batch_norm(norm, outputs, side)
    yield activation(f"{norm}.relu", outputs * side**2, in_place=in_place)


MODEL = (
    images("mobilenet", "MobileNet v1 (Keras)", mobilenet),
    images("mobilenetv2", "MobileNetV2 (torchvision)", mobilenet_v2),
)
