"""Networks for pictures, as layers in the order in which they run forward.

Names, sizes and order are torchvision's; of MobileNet v1, which it has not, they are Keras's.
"""

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
    joined,
    linear,
    max_pool,
    without_input_gradient,
)

_CLASSES = 1000


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
    yield linear("classifier.6", 1, 4096, _CLASSES)
    yield cross_entropy("loss", 1, _CLASSES)


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
            yield from _bottleneck(f"layer{stage + 1}.{block}", channels, width, side, stride)
            channels = 4 * width
    yield average_pool("avgpool", channels, side, 1)
    yield linear("fc", 1, channels, _CLASSES)
    yield cross_entropy("loss", 1, _CLASSES)


def _bottleneck(name: str, inputs: int, width: int, side: int, stride: int) -> Iterator[Layer]:
    outputs = 4 * width
    yield conv(f"{name}.conv1", inputs, width, side * stride, 1)
    yield batch_norm(f"{name}.bn1", width, side * stride)
    yield activation(f"{name}.relu1", width * (side * stride) ** 2)
    yield conv(f"{name}.conv2", width, width, side, 3, stride=stride)
    yield batch_norm(f"{name}.bn2", width, side)
    yield activation(f"{name}.relu2", width * side**2)
    yield conv(f"{name}.conv3", width, outputs, side, 1)
    yield batch_norm(f"{name}.bn3", outputs, side)
    if inputs != outputs:  # runs after bn3, so its gradients come before those of bn3
        yield conv(
            f"{name}.downsample.0", inputs, outputs, side, 1, stride=stride, shares_input=True
        )
        yield batch_norm(f"{name}.downsample.1", outputs, side)
    yield add(f"{name}.add", outputs * side**2)
    yield activation(f"{name}.relu3", outputs * side**2)


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
            yield from _dense_layer(name, channels, side)
            channels += 32
        yield joined(f"features.denseblock{block}.cat", channels * side**2)
        if block < len(depths):
            yield from _transition(f"features.transition{block}", channels, side)
            channels, side = channels // 2, side // 2
    yield batch_norm("features.norm5", channels, side)
    yield activation("relu", channels * side**2)
    yield average_pool("avgpool", channels, side, 1)
    yield linear("classifier", 1, channels, _CLASSES)
    yield cross_entropy("loss", 1, _CLASSES)


def _dense_layer(name: str, inputs: int, side: int) -> Iterator[Layer]:
    yield joined(f"{name}.cat", inputs * side**2)
    yield batch_norm(f"{name}.norm1", inputs, side)
    yield activation(f"{name}.relu1", inputs * side**2)
    yield conv(f"{name}.conv1", inputs, 128, side, 1)
    yield batch_norm(f"{name}.norm2", 128, side)
    yield activation(f"{name}.relu2", 128 * side**2)
    yield conv(f"{name}.conv2", 128, 32, side, 3)


def _transition(name: str, inputs: int, side: int) -> Iterator[Layer]:
    yield batch_norm(f"{name}.norm", inputs, side)
    yield activation(f"{name}.relu", inputs * side**2)
    yield conv(f"{name}.conv", inputs, inputs // 2, side, 1)
    yield average_pool(f"{name}.pool", inputs // 2, side, side // 2, shares_input=False)


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
    yield linear("conv_preds", 1, channels, _CLASSES)
    yield cross_entropy("loss", 1, _CLASSES)


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
    yield linear("classifier.1", 1, 1280, _CLASSES)
    yield cross_entropy("loss", 1, _CLASSES)


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
    yield from _inception_b("Mixed_6a", 288)
    for name, middle in (("6b", 128), ("6c", 160), ("6d", 160), ("6e", 192)):
        yield from _inception_c(f"Mixed_{name}", middle)
    if with_auxiliary:
        yield from _auxiliary("AuxLogits")
    yield from _inception_d("Mixed_7a", 768)
    yield from _inception_e("Mixed_7b", 1280)
    yield from _inception_e("Mixed_7c", 2048)
    yield average_pool("avgpool", 2048, 8, 1)
    yield linear("fc", 1, 2048, _CLASSES)
    yield cross_entropy("loss", 1, _CLASSES)


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


def _inception_b(name: str, inputs: int) -> Iterator[Layer]:
    side, halved = 35, 17
    yield from _basic(f"{name}.branch3x3", inputs, 384, halved, 3, stride=2, input_side=side)
    yield from _basic(f"{name}.branch3x3dbl_1", inputs, 64, side, 1, shares_input=True)
    yield from _basic(f"{name}.branch3x3dbl_2", 64, 96, side, 3)
    yield from _basic(f"{name}.branch3x3dbl_3", 96, 96, halved, 3, stride=2, input_side=side)
    yield max_pool(f"{name}.pool", inputs, side, halved, shares_input=True)
    yield _branches(name, 384 + 96, halved, inputs)


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


def _auxiliary(name: str) -> Iterator[Layer]:
    yield average_pool(f"{name}.pool", 768, 17, 5)
    yield from _basic(f"{name}.conv0", 768, 128, 5, 1)
    yield from _basic(f"{name}.conv1", 128, 768, 1, 5, input_side=5)
    yield linear(f"{name}.fc", 1, 768, _CLASSES)
    yield cross_entropy(f"{name}.loss", 1, _CLASSES)


def _inception_d(name: str, inputs: int) -> Iterator[Layer]:
    side, halved = 17, 8
    yield from _basic(f"{name}.branch3x3_1", inputs, 192, side, 1)
    yield from _basic(f"{name}.branch3x3_2", 192, 320, halved, 3, stride=2, input_side=side)
    yield from _basic(f"{name}.branch7x7x3_1", inputs, 192, side, 1, shares_input=True)
    yield from _basic(f"{name}.branch7x7x3_2", 192, 192, side, (1, 7))
    yield from _basic(f"{name}.branch7x7x3_3", 192, 192, side, (7, 1))
    yield from _basic(f"{name}.branch7x7x3_4", 192, 192, halved, 3, stride=2, input_side=side)
    yield max_pool(f"{name}.pool", inputs, side, halved, shares_input=True)
    yield _branches(name, 320 + 192, halved, inputs)


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
