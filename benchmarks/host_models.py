"""Models whose arithmetic is negligible and whose operations are as many as those of real ones, for `host.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 32
TOKENS = 8


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return queries or keys [B, H, T, W] with rotary positions."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class LlamaBlock(nn.Module):
    """A block of Llama: RMS norms, rotary positions, gated MLP."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(hidden, 2 * hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (-1, cos.shape[-1])).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A Llama of 16 blocks and 16 features."""

    def __init__(self, hidden: int = 16, layers: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, hidden)
        self.blocks = nn.ModuleList(LlamaBlock(hidden) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, CLASSES, bias=False)
        width = hidden // heads
        angles = torch.arange(TOKENS)[:, None] * 10000.0 ** (-torch.arange(0, width, 2).repeat(2) / width)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


class GptBlock(nn.Module):
    """A block of GPT-2: layer norms, dropout in attention, after attention and after the MLP."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.o = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.drop1, self.drop2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        rate = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=rate)
        x = x + self.drop1(self.o(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop2(self.down(F.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    """A GPT-2 of 16 blocks and 16 features."""

    def __init__(self, hidden: int = 16, layers: int = 16, heads: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(CLASSES, hidden), nn.Embedding(TOKENS, hidden)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(GptBlock(hidden, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, CLASSES, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.tokens(ids) + self.positions.weight[: ids.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Bottleneck(nn.Module):
    """A block of ResNet-50."""

    def __init__(self, given: int, middle: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(given, middle, 1, bias=False), nn.BatchNorm2d(middle)
        self.conv2, self.norm2 = nn.Conv2d(middle, middle, 3, stride, 1, bias=False), nn.BatchNorm2d(middle)
        self.conv3, self.norm3 = nn.Conv2d(middle, 4 * middle, 1, bias=False), nn.BatchNorm2d(4 * middle)
        short = [nn.Conv2d(given, 4 * middle, 1, stride, bias=False), nn.BatchNorm2d(4 * middle)]
        self.short = nn.Sequential(*short) if stride != 1 or given != 4 * middle else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))
        return F.relu(self.norm3(self.conv3(y)) + self.short(x))


class ResNet(nn.Module):
    """The 53 convolutions and norms of ResNet-50, with four features at the first."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        blocks, given = [], width
        for middle, number, stride in ((width, 3, 1), (2 * width, 4, 2), (4 * width, 6, 2), (8 * width, 3, 2)):
            for index in range(number):
                blocks.append(Bottleneck(given, middle, stride if index == 0 else 1))
                given = 4 * middle
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(given, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(images))), 3, 2, 1)
        return self.head(self.blocks(x).mean((2, 3)))


MODELS: dict[str, Callable[..., nn.Module]] = {"llama": Llama, "gpt": Gpt, "resnet": ResNet}


def build(name: str, **options: Any) -> nn.Module:
    """Return a model with the same first weights at every call."""
    torch.manual_seed(0)
    return MODELS[name](**options)


class Samples:
    """256 samples that are made beforehand, so that reading one is an index into a list."""

    def __init__(self, model: str) -> None:
        draws = torch.Generator().manual_seed(0)
        ids = torch.randint(0, CLASSES, (256, TOKENS + 1), generator=draws)
        images = torch.randn(256, 3, 16, 16, generator=draws)
        if model == "resnet":
            self._items = [(image, row[0]) for image, row in zip(images, ids, strict=True)]
        else:
            self._items = [(row[:-1], row[1:]) for row in ids]

    def __len__(self) -> int:
        return 1 << 18

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._items[index % 256]


def loss_sum(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Return the cross entropy summed over labels, and their number."""
    labels = batch[1]
    return F.cross_entropy(outputs.flatten(0, -2).float(), labels.flatten(), reduction="sum"), labels.numel()


def loss_mean(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy over labels."""
    return F.cross_entropy(outputs.flatten(0, -2).float(), labels.flatten())
