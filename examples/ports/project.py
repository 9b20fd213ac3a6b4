"""A model, data and a language model that all scripts of this folder import, before and after the port."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig


class Net(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))


class Spirals(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Two spirals that no straight line parts."""

    def __init__(self, num_samples: int = 512) -> None:
        turn = torch.linspace(0.5, 10.0, num_samples)[
            torch.randperm(num_samples, generator=torch.Generator().manual_seed(0))
        ]
        self.labels = torch.arange(num_samples) % 2
        angle = turn + torch.pi * self.labels
        self.points = torch.stack([angle.cos(), angle.sin()], dim=1) * turn[:, None] / 10

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.labels[index]


class Text(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of tokens with themselves as labels; short rows end with labels that do not count."""

    def __init__(self, num_rows: int = 64, length: int = 16) -> None:
        drawn = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(64, (num_rows, 1), generator=drawn) + torch.arange(length) * 3
        self.tokens %= 64
        counts = torch.randint(4, length + 1, (num_rows, 1), generator=drawn)
        self.labels = self.tokens.masked_fill(torch.arange(length) >= counts, -100)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (
            one.view(b, t, self.heads, c // self.heads).transpose(1, 2) for one in self.c_attn(self.ln_1(x)).split(c, 2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """The model of nanoGPT (Karpathy 2022), shorter: its forward takes idx and targets, and returns logits and the loss."""

    def __init__(
        self, vocab_size: int = 64, block_size: int = 16, n_layer: int = 2, n_head: int = 2, n_embd: int = 32
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(Block(n_embd, n_head) for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        nn.init.normal_(self.wte.weight, std=1 / math.sqrt(n_embd))

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

    def configure_optimizers(
        self, weight_decay: float, learning_rate: float, betas: tuple[float, float]
    ) -> torch.optim.Optimizer:
        params = list(self.parameters())
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas)


def small_llama() -> LlamaConfig:
    return LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
