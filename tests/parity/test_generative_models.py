"""Whole models that draw random numbers in training: each layout gives one device's losses, gradients and weights.

A variational autoencoder, a diffusion transformer with guidance, a masked autoencoder, and a network with stochastic depth,
as their papers' code is written: times, noise, masks and dropped paths are drawn in the forward.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.code.vectors import code
from tests.covering import daily
from tests.laboratory import combinations, prove

CLASSES, STEPS, WIDTH, PATCHES = 5, 100, 16, 16


class Images:
    """Images of 8 x 8 pixels, and their classes."""

    def __init__(self) -> None:
        drawn = torch.Generator().manual_seed(3)
        self.x = torch.randn(24, 3, 8, 8, generator=drawn, dtype=torch.float64)
        self.y = torch.arange(24) % CLASSES

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


def patches(images: Tensor) -> Tensor:
    """Return patches of 2 x 2 pixels [B, 16, 12] of images [B, 3, 8, 8]."""
    return images.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)


class VariationalAutoencoder(nn.Module):
    """Kingma and Welling 2013, with convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.Flatten())
        self.mean, self.log_variance, self.up = nn.Linear(32, 4), nn.Linear(32, 4), nn.Linear(4, 32)
        self.decoder = nn.Sequential(nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encoder(x)
        mean, log_variance = self.mean(h), self.log_variance(h)
        latent = mean
        if self.training:
            latent = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.decoder(self.up(latent).view(-1, 8, 2, 2)), mean, log_variance

    @staticmethod
    def loss(outputs: Any, batch: Any) -> Any:
        decoded, mean, log_variance = outputs
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
        return F.mse_loss(decoded, batch[0], reduction="sum") + divergence, len(batch[0])


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016): the path of a sample is dropped as a whole."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = x.new_empty((len(x),) + (1,) * (x.ndim - 1)).bernoulli_(1 - self.rate)
        return x * kept.div_(1 - self.rate)


class Conditioned(nn.Module):
    """A block of a diffusion transformer, scaled and shifted by its condition."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.after = (nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))
        self.drop = DropPath(0.2)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift, gate, scale_2, shift_2, gate_2 = self.modulation(condition)[:, None].chunk(6, dim=-1)
        y = self.norm(x) * (1 + scale) + shift
        q, k, v = self.qkv(y).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        x = x + self.drop(gate * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        return x + gate_2 * self.mlp(self.after(x) * (1 + scale_2) + shift_2)


class DiffusionTransformer(nn.Module):
    """Peebles and Xie 2022, with classes that are dropped at random for guidance."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.place = nn.Linear(12, WIDTH), nn.Parameter(torch.zeros(1, PATCHES, WIDTH))
        self.time = nn.Sequential(nn.Linear(16, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.classes = nn.Embedding(CLASSES + 1, WIDTH)
        self.blocks = nn.ModuleList(Conditioned() for _ in range(2))
        self.out = nn.Linear(WIDTH, 12)
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-4, 0.02, STEPS), 0))

    def forward(self, images: Tensor) -> Tensor:
        time = torch.randint(0, STEPS, (len(images),), device=images.device)
        noise = torch.randn_like(images)
        kept = self.kept[time][:, None, None, None]
        noisy = patches(kept.sqrt() * images + (1 - kept).sqrt() * noise)
        angles = time[:, None] * torch.exp(-math.log(1e4) * torch.arange(8, device=time.device) / 8)
        label = torch.randint(0, CLASSES, (len(images),), device=time.device)
        label = torch.where(torch.rand(len(images), device=time.device) < 0.1, CLASSES, label)
        condition = self.time(torch.cat([angles.cos(), angles.sin()], -1).to(noisy.dtype)) + self.classes(label)
        x = self.patch(noisy) + self.place
        for block in self.blocks:
            x = block(x, condition)
        return (self.out(x) - patches(noise)).square().mean((1, 2))

    @staticmethod
    def loss(outputs: Any, batch: Any) -> Any:
        return outputs.sum(), len(outputs)


class MaskedAutoencoder(nn.Module):
    """He et al. 2021: encode the patches that a random order leaves, decode all."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.place = nn.Linear(12, WIDTH), nn.Parameter(torch.randn(1, PATCHES, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(self._layer() for _ in range(2))
        self.decoder, self.out = self._layer(), nn.Linear(WIDTH, 12)
        self.hidden = nn.Parameter(torch.zeros(1, 1, WIDTH))

    @staticmethod
    def _layer() -> nn.Module:
        return nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True, norm_first=True)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(patches(images)) + self.place
        order = torch.rand(len(x), PATCHES, device=x.device).argsort(dim=1)
        back = order.argsort(dim=1)
        x = x.gather(1, order[:, :4, None].expand(-1, -1, WIDTH))
        for block in self.blocks:
            x = block(x)
        x = torch.cat([x, self.hidden.repeat(len(x), PATCHES - 4, 1)], 1)
        x = self.decoder(x.gather(1, back[..., None].expand(-1, -1, WIDTH)) + self.place)
        is_hidden = (back >= 4).to(x.dtype)
        return ((self.out(x) - patches(images)).square().mean(-1) * is_hidden).sum(1) / is_hidden.sum(1)

    loss = DiffusionTransformer.loss


class Convolutional(nn.Module):
    """A block of ConvNeXt (Liu et al. 2022), whose path is dropped at random."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.norm = nn.Conv2d(width, width, 3, padding=1, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gain, self.drop = nn.Parameter(0.1 * torch.ones(width)), DropPath(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.gain * self.down(F.gelu(self.up(self.norm(self.mix(x).permute(0, 2, 3, 1)))))
        return x + self.drop(y.permute(0, 3, 1, 2))


class StochasticDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 2, 2), nn.Linear(8, CLASSES)
        self.blocks = nn.Sequential(*(Convolutional(8) for _ in range(4)))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))

    @staticmethod
    def loss(outputs: Any, batch: Any) -> Any:
        return F.cross_entropy(outputs, batch[1], reduction="sum"), len(outputs)


NAMES = [
    code(model, "of images", data=Images, loss=model.loss)
    for model in (VariationalAutoencoder, DiffusionTransformer, MaskedAutoencoder, StochasticDepth)
]
LAYOUTS = [
    "dp=1 microbatch=2",
    "dp=2 zero=3 microbatch=2 recompute=full",
    "dp=1 pp=2 microbatch=4",
    "dp=1 tp=2",
    "dp=2 pp=2 zero=1 microbatch=2",
]


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize(
    ("layout", "name"),
    [
        one
        for one in daily(combinations(LAYOUTS, NAMES), beside_products=True)
        if one.values != ("dp=1 tp=2", NAMES[0])  # without linear layers that feed one another
    ],
)
def test_models_that_draw_are_those_of_one_device(layout: str, name: str) -> None:
    prove(layout, name)
