"""Residual networks of convolutions with batch norm (He et al. 2016, arXiv:1512.03385), to train from images.

    stem      convolution, norm, relu, and for large images a maximum over 3 x 3 pixels
    blocks    y = relu(x' + f(x)), f of two 3x3 convolutions, or of 1x1, 3x3, 1x1 (a bottleneck, four times wider);
              the first block of each stage but the first halves the image and doubles the width; x' is x, or where shapes
              change a 1x1 convolution of it
    head      the mean of the image, and a linear layer

`resnet()` is ResNet-50 with strides in the 3x3 convolutions, as torchvision has them; `model.source =
"samestep.building.resnet:resnet"` with fields of `model.config` gives smaller ones. Names are those of `preset:resnet50`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

# Shapes: N images, C channels, H x W pixels, K classes.


class Stem(nn.Module):
    """The first convolution: 7 x 7 pixels at half the size, or for small images 3 x 3 at the same size."""

    def __init__(self, channels: int, width: int, kernel: int) -> None:
        super().__init__()
        self.is_large = kernel > 3
        stride = 2 if self.is_large else 1
        self.conv = nn.Conv2d(channels, width, kernel, stride, kernel // 2, bias=False)
        self.conv_norm = nn.BatchNorm2d(width)

    def forward(self, images: Tensor) -> Tensor:
        """Return the features of images [N, C, H, W]."""
        x = torch.relu(self.conv_norm(self.conv(images)))
        return nn.functional.max_pool2d(x, 3, 2, 1) if self.is_large else x


class Block(nn.Module):
    """A residual block."""

    def __init__(self, given: int, width: int, made: int, stride: int) -> None:
        super().__init__()
        self.is_bottleneck = made != width
        if self.is_bottleneck:
            self.conv1 = nn.Conv2d(given, width, 1, bias=False)
            self.conv1_norm = nn.BatchNorm2d(width)
            self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
            self.conv2_norm = nn.BatchNorm2d(width)
            self.conv3 = nn.Conv2d(width, made, 1, bias=False)
            self.conv3_norm = nn.BatchNorm2d(made)
        else:
            self.conv1 = nn.Conv2d(given, width, 3, stride, 1, bias=False)
            self.conv1_norm = nn.BatchNorm2d(width)
            self.conv2 = nn.Conv2d(width, made, 3, 1, 1, bias=False)
            self.conv2_norm = nn.BatchNorm2d(made)
        self.is_plain = stride == 1 and given == made
        if not self.is_plain:
            self.downsample = nn.Conv2d(given, made, 1, stride, bias=False)
            self.downsample_norm = nn.BatchNorm2d(made)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output features of the block."""
        y = torch.relu(self.conv1_norm(self.conv1(x)))
        y = self.conv2_norm(self.conv2(y))
        if self.is_bottleneck:
            y = self.conv3_norm(self.conv3(torch.relu(y)))
        return torch.relu(y + (x if self.is_plain else self.downsample_norm(self.downsample(x))))


class ResNet(nn.Module):
    """A residual network: images [N, C, H, W] to logits [N, K]."""

    def __init__(
        self, blocks: Sequence[int], width: int, bottleneck: bool, channels: int, classes: int, stem: int
    ) -> None:
        super().__init__()
        self.conv1 = Stem(channels, width, stem)
        self.num_stages, c_in = len(blocks), width
        for stage, count in enumerate(blocks):
            inner = width * 2**stage
            c_out = inner * (4 if bottleneck else 1)
            strides = [2 if stage else 1, *[1] * (count - 1)]
            stage_blocks = [Block(c_in if index == 0 else c_out, inner, c_out, s) for index, s in enumerate(strides)]
            setattr(self, f"layer{stage + 1}", nn.Sequential(*stage_blocks))
            c_in = c_out
        self.fc = nn.Linear(c_in, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of images."""
        x = self.conv1(images)
        for stage in range(self.num_stages):
            x = getattr(self, f"layer{stage + 1}")(x)
        return self.fc(x.mean((2, 3)))


def resnet(
    blocks: Sequence[int] = (3, 4, 6, 3),
    width: int = 64,
    bottleneck: bool = True,
    channels: int = 3,
    classes: int = 1000,
    stem: int = 7,
) -> ResNet:
    """Build a residual network: `blocks` in each stage, `width` channels after the stem, whose kernel has `stem`
    pixels."""
    return ResNet(blocks, width, bottleneck, channels, classes, stem)
