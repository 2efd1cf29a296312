"""VGG: layers in the order in which they run forward."""

from __future__ import annotations

from collections.abc import Iterator

from fullwire.workloads.layers import (
    Layer,
    activation,
    conv,
    cross_entropy,
    linear,
    max_pool,
    without_input_gradient,
)
from fullwire.workloads.recipe import CLASSES, images


def vgg(depths: tuple[int, ...]) -> Iterator[Layer]:
    """Go through VGG without batch norms; `depths` counts the convolutions of each stage."""
    index, channels, side = 0, 3, 224
    for width, depth in zip((64, 128, 256, 512, 512), depths, strict=True):
        for _ in range(depth):
            layer = conv(f"features.{index}", channels, width, side, 3, bias=width)
            yield layer if index else without_input_gradient(layer)
            yield activation(f"features.{index + 1}", width * side**2)
            index, channels = index + 2, width
        yield max_pool(f"features.{index}", channels, side, side // 2)
        index, side = index + 1, side // 2
    yield linear("classifier.0", 1, channels * side**2, 4096)
    yield activation("classifier.1", 4096)
    yield linear("classifier.3", 1, 4096, 4096)
    yield activation("classifier.4", 4096)
    yield linear("classifier.6", 1, 4096, CLASSES)
    yield cross_entropy("loss", 1, CLASSES)


MODEL = (
    images("vgg16", "VGG16 (torchvision)", lambda: vgg((2, 2, 3, 3, 3))),
    images("vgg19", "VGG19 (torchvision)", lambda: vgg((2, 2, 4, 4, 4))),
)
