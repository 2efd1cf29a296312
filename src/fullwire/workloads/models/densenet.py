"""DenseNet: layers in the order in which they run forward."""

from __future__ import annotations

from collections.abc import Iterator

from fullwire.workloads.layers import (
    Layer,
    activation,
    average_pool,
    batch_norm,
    conv,
    cross_entropy,
    joined,
    linear,
    max_pool,
    without_input_gradient,
)
from fullwire.workloads.recipe import CLASSES, images


def densenet(depths: tuple[int, ...]) -> Iterator[Layer]:
    """Go through a DenseNet whose layers add 32 channels each."""
    yield without_input_gradient(conv("features.conv0", 3, 64, 112, 7, stride=2))
    yield batch_norm("features.norm0", 64, 112)
    yield activation("features.relu0", 64 * 112**2)
    yield max_pool("features.pool0", 64, 112, 56)
    channels, side = 64, 56
    for block, depth in enumerate(depths, 1):
        for layer in range(1, depth + 1):
            name = f"features.denseblock{block}.denselayer{layer}"
            yield joined(f"{name}.cat", channels * side**2)
            yield batch_norm(f"{name}.norm1", channels, side)
            yield activation(f"{name}.relu1", channels * side**2)
            yield conv(f"{name}.conv1", channels, 128, side, 1)
            yield batch_norm(f"{name}.norm2", 128, side)
            yield activation(f"{name}.relu2", 128 * side**2)
            yield conv(f"{name}.conv2", 128, 32, side, 3)
            channels += 32
        yield joined(f"features.denseblock{block}.cat", channels * side**2)
        if block < len(depths):
            name = f"features.transition{block}"
            yield batch_norm(f"{name}.norm", channels, side)
            yield activation(f"{name}.relu", channels * side**2)
            yield conv(f"{name}.conv", channels, channels // 2, side, 1)
            yield average_pool(f"{name}.pool", channels // 2, side, side // 2, shares_input=False)
            channels, side = channels // 2, side // 2
    yield batch_norm("features.norm5", channels, side)
    yield activation("relu", channels * side**2)
    yield average_pool("avgpool", channels, side, 1)
    yield linear("classifier", 1, channels, CLASSES)
    yield cross_entropy("loss", 1, CLASSES)


MODEL = images("densenet121", "DenseNet-121 (torchvision)", lambda: densenet((6, 12, 24, 16)))
