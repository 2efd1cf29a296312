"""InceptionV3: layers in the order in which they run forward."""

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


def inception(*, with_auxiliary: bool) -> Iterator[Layer]:
    """Go through InceptionV3, with or without the second classifier, which trains beside it."""
    yield from _basic("Conv2d_1a_3x3", 3, 32, 149, 3, input_side=299)
    yield from _basic("Conv2d_2a_3x3", 32, 32, 147, 3, input_side=149)
    yield from _basic("Conv2d_2b_3x3", 32, 64, 147, 3)
    yield max_pool("maxpool1", 64, 147, 73)
    yield from _basic("Conv2d_3b_1x1", 64, 80, 73, 1)
    yield from _basic("Conv2d_4a_3x3", 80, 192, 71, 3, input_side=73)
    yield max_pool("maxpool2", 192, 71, 35)
    for name, inputs, pooled in (("5b", 192, 32), ("5c", 256, 64), ("5d", 288, 64)):
        yield from _inception_a(f"Mixed_{name}", inputs, pooled)
    yield from _basic("Mixed_6a.branch3x3", 288, 384, 17, 3, stride=2, input_side=35)
    yield from _basic("Mixed_6a.branch3x3dbl_1", 288, 64, 35, 1, shares_input=True)
    yield from _basic("Mixed_6a.branch3x3dbl_2", 64, 96, 35, 3)
    yield from _basic("Mixed_6a.branch3x3dbl_3", 96, 96, 17, 3, stride=2, input_side=35)
    yield max_pool("Mixed_6a.pool", 288, 35, 17, shares_input=True)
    yield _branches("Mixed_6a", 384 + 96, 17, 288)
    for name, middle in (("6b", 128), ("6c", 160), ("6d", 160), ("6e", 192)):
        yield from _inception_c(f"Mixed_{name}", middle)
    if with_auxiliary:
        yield average_pool("AuxLogits.pool", 768, 17, 5)
        yield from _basic("AuxLogits.conv0", 768, 128, 5, 1)
        yield from _basic("AuxLogits.conv1", 128, 768, 1, 5, input_side=5)
        yield linear("AuxLogits.fc", 1, 768, CLASSES)
        yield cross_entropy("AuxLogits.loss", 1, CLASSES)
    yield from _basic("Mixed_7a.branch3x3_1", 768, 192, 17, 1)
    yield from _basic("Mixed_7a.branch3x3_2", 192, 320, 8, 3, stride=2, input_side=17)
    yield from _basic("Mixed_7a.branch7x7x3_1", 768, 192, 17, 1, shares_input=True)
    yield from _basic("Mixed_7a.branch7x7x3_2", 192, 192, 17, (1, 7))
    yield from _basic("Mixed_7a.branch7x7x3_3", 192, 192, 17, (7, 1))
    yield from _basic("Mixed_7a.branch7x7x3_4", 192, 192, 8, 3, stride=2, input_side=17)
    yield max_pool("Mixed_7a.pool", 768, 17, 8, shares_input=True)
    yield _branches("Mixed_7a", 320 + 192, 8, 768)
    yield from _inception_e("Mixed_7b", 1280)
    yield from _inception_e("Mixed_7c", 2048)
    yield average_pool("avgpool", 2048, 8, 1)
    yield linear("fc", 1, 2048, CLASSES)
    yield cross_entropy("loss", 1, CLASSES)


def _basic(
    name: str,
    inputs: int,
    outputs: int,
    side: int,
    kernel: int | tuple[int, int],
    *,
    stride: int = 1,
    input_side: int | None = None,
    shares_input: bool = False,
) -> Iterator[Layer]:
    """Go through a convolution of Inception's, its batch norm and its ReLU."""
    layer = conv(
        f"{name}.conv",
        inputs,
        outputs,
        side,
        kernel,
        stride=stride,
        input_side=input_side,
        shares_input=shares_input,
    )
    yield without_input_gradient(layer) if inputs == 3 else layer
    yield batch_norm(f"{name}.bn", outputs, side)
    yield activation(f"{name}.relu", outputs * side**2)


def _inception_a(name: str, inputs: int, pooled: int) -> Iterator[Layer]:
    side = 35
    yield from _basic(f"{name}.branch1x1", inputs, 64, side, 1)
    yield from _basic(f"{name}.branch5x5_1", inputs, 48, side, 1, shares_input=True)
    yield from _basic(f"{name}.branch5x5_2", 48, 64, side, 5)
    yield from _basic(f"{name}.branch3x3dbl_1", inputs, 64, side, 1, shares_input=True)
    yield from _basic(f"{name}.branch3x3dbl_2", 64, 96, side, 3)
    yield from _basic(f"{name}.branch3x3dbl_3", 96, 96, side, 3)
    yield average_pool(f"{name}.pool", inputs, side, side)
    yield from _basic(f"{name}.branch_pool", inputs, pooled, side, 1)
    yield _branches(name, 64 + 64 + 96 + pooled, side)


def _inception_c(name: str, middle: int) -> Iterator[Layer]:
    inputs, side = 768, 17
    across, down = (1, 7), (7, 1)
    yield from _basic(f"{name}.branch1x1", inputs, 192, side, 1)
    yield from _basic(f"{name}.branch7x7_1", inputs, middle, side, 1, shares_input=True)
    yield from _basic(f"{name}.branch7x7_2", middle, middle, side, across)
    yield from _basic(f"{name}.branch7x7_3", middle, 192, side, down)
    yield from _basic(f"{name}.branch7x7dbl_1", inputs, middle, side, 1, shares_input=True)
    yield from _basic(f"{name}.branch7x7dbl_2", middle, middle, side, down)
    yield from _basic(f"{name}.branch7x7dbl_3", middle, middle, side, across)
    yield from _basic(f"{name}.branch7x7dbl_4", middle, middle, side, down)
    yield from _basic(f"{name}.branch7x7dbl_5", middle, 192, side, across)
    yield average_pool(f"{name}.pool", inputs, side, side)
    yield from _basic(f"{name}.branch_pool", inputs, 192, side, 1)
    yield _branches(name, 4 * 192, side)


def _inception_e(name: str, inputs: int) -> Iterator[Layer]:
    side = 8
    yield from _basic(f"{name}.branch1x1", inputs, 320, side, 1)
    yield from _basic(f"{name}.branch3x3_1", inputs, 384, side, 1, shares_input=True)
    yield from _basic(f"{name}.branch3x3_2a", 384, 384, side, (1, 3))
    yield from _basic(f"{name}.branch3x3_2b", 384, 384, side, (3, 1), shares_input=True)
    yield from _basic(f"{name}.branch3x3dbl_1", inputs, 448, side, 1, shares_input=True)
    yield from _basic(f"{name}.branch3x3dbl_2", 448, 384, side, 3)
    yield from _basic(f"{name}.branch3x3dbl_3a", 384, 384, side, (1, 3))
    yield from _basic(f"{name}.branch3x3dbl_3b", 384, 384, side, (3, 1), shares_input=True)
    yield average_pool(f"{name}.pool", inputs, side, side)
    yield from _basic(f"{name}.branch_pool", inputs, 192, side, 1)
    yield _branches(name, 320 + 4 * 384 + 192, side)


def _branches(name: str, activated: int, side: int, pooled: int = 0) -> Layer:
    """Join branches: those that end in a ReLU are kept by it, a pool's output is not."""
    return joined(f"{name}.cat", (activated + pooled) * side**2, kept_values=activated * side**2)


MODEL = (
    images(
        "inceptionv3",
        "InceptionV3 without its auxiliary classifier (torchvision)",
        lambda: inception(with_auxiliary=False),
        side=299,
    ),
    images(
        "inceptionv3-aux",
        "InceptionV3 with its auxiliary classifier (torchvision)",
        lambda: inception(with_auxiliary=True),
        side=299,
    ),
)
