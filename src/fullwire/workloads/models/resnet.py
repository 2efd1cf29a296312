"""ResNets of bottlenecks: layers in the order in which they run forward."""

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
    max_pool,
    without_input_gradient,
)
from fullwire.workloads.recipe import CLASSES, images


def resnet(depths: tuple[int, ...]) -> Iterator[Layer]:
    """Go through a ResNet of bottlenecks; `depths` counts those of each stage."""
    yield without_input_gradient(conv("conv1", 3, 64, 112, 7, stride=2))
    yield batch_norm("bn1", 64, 112)
    yield activation("relu", 64 * 112**2)
    yield max_pool("maxpool", 64, 112, 56)
    channels, side = 64, 56
    for stage, depth in enumerate(depths):
        width = 64 * 2**stage
        for block in range(depth):
            stride = 2 if stage > 0 and block == 0 else 1
            side //= stride
            name = f"layer{stage + 1}.{block}"
            outputs = 4 * width
            yield conv(f"{name}.conv1", channels, width, side * stride, 1)
            yield batch_norm(f"{name}.bn1", width, side * stride)
            yield activation(f"{name}.relu1", width * (side * stride) ** 2)
            yield conv(f"{name}.conv2", width, width, side, 3, stride=stride)
            yield batch_norm(f"{name}.bn2", width, side)
            yield activation(f"{name}.relu2", width * side**2)
            yield conv(f"{name}.conv3", width, outputs, side, 1)
            yield batch_norm(f"{name}.bn3", outputs, side)
            if channels != outputs:  # runs after bn3, so its gradients come before those of bn3
                yield conv(
                    f"{name}.downsample.0",
                    channels,
                    outputs,
                    side,
                    1,
                    stride=stride,
                    shares_input=True,
                )
                yield batch_norm(f"{name}.downsample.1", outputs, side)
            yield add(f"{name}.add", outputs * side**2)
            yield activation(f"{name}.relu3", outputs * side**2)
            channels = outputs
    yield average_pool("avgpool", channels, side, 1)
    yield linear("fc", 1, channels, CLASSES)
    yield cross_entropy("loss", 1, CLASSES)


MODEL = (
    images("resnet50", "ResNet-50 (torchvision)", lambda: resnet((3, 4, 6, 3))),
    images("resnet101", "ResNet-101 (torchvision)", lambda: resnet((3, 4, 23, 3))),
)
