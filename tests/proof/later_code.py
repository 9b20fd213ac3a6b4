"""More models, losses and optimizers as people write them, for the cases of `reproductions.py`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.proof.odd_code import Blocks, Embedded, Lars


class Uncertain(Blocks):
    """Returns learned weights of its tasks beside its outputs (Kendall et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variances, self.parity = nn.Parameter(torch.zeros(2)), nn.Linear(16, 1)

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x), self.parity(x).squeeze(-1), self.log_variances


def of_two_tasks(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    logits, parity, s = outputs
    labels = batch["labels"]
    first = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    second = (parity - labels % 2).square().sum()
    return torch.exp(-s[0]) * first + torch.exp(-s[1]) * second + labels.numel() * s.sum(), labels.numel()


class Layered(Embedded):
    """Two layers of a GRU whose batch comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(16, 16, 2, batch_first=True)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.gru(self.embed(input_ids))[0])


class Packed(Embedded):
    """A tagger that runs on the tokens that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 8, batch_first=True, bidirectional=True)

    def forward(self, input_ids: Tensor) -> Tensor:
        lengths = (4 + input_ids[:, 0] % 12).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(input_ids), lengths, batch_first=True, enforce_sorted=False
        )
        found, _ = nn.utils.rnn.pad_packed_sequence(
            self.lstm(packed)[0], batch_first=True, total_length=input_ids.shape[1]
        )
        return self.head(found)


class RotatedBlock(nn.Module):
    """Rotates as many features of each head as it is told; the rest, which is empty here, follows as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in "qkvo")

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (2, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        size = cos.shape[-1]
        q, k = (torch.cat((_turned(one[..., :size], cos, sin), one[..., size:]), -1) for one in (q, k))
        return x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Rotated(nn.Module):
    """Tables as long as the longest sequence, and outputs as nanoGPT returns them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.blocks = nn.ModuleList(RotatedBlock() for _ in range(2))
        angles = torch.outer(torch.arange(32.0), 0.1 ** torch.arange(4.0)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, input_ids: Tensor) -> Any:
        x, length = self.embed(input_ids), input_ids.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        return self.head(x), None


def by_classes(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    """Weights by how often a class is in the batch."""
    counts = torch.bincount(batch[1], minlength=3).clamp(min=1).to(outputs.dtype)
    return F.cross_entropy(outputs, batch[1], weight=len(outputs) / counts, reduction="sum"), len(outputs)


def eager(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    total = F.cross_entropy(outputs, batch[1], reduction="sum")
    (total / len(outputs)).backward(retain_graph=True)
    return total, len(outputs)


class Running:
    """Counts what is worse than a running mean of all losses before."""

    def __init__(self) -> None:
        self.mean: Tensor | None = None

    def __call__(self, outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
        each = F.cross_entropy(outputs, batch[1], reduction="none")
        mean = each.detach().mean()
        self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean
        return (each * (each.detach() > self.mean)).sum(), len(outputs)


class Sharpness(Lars):
    """Says in its code, and not in its arguments, that it evaluates the loss twice (Foret et al. 2021)."""

    def step(self, closure: Any = None) -> None:
        assert closure is not None, "sharpness-aware minimization requires a closure"
        closure()
        super().step()
