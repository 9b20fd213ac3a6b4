"""Attentions as people write them: one block a spelling, each with a model of two blocks."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models import VOCABULARY

LENGTH = 12
WIDTH, HEADS = 16, 4


class Spelled(nn.Module):
    """A block whose attention is one function of queries, keys, values [B, T, A, D] and the module."""

    def __init__(self, spelling: Callable[..., Tensor], dropout: float, kv_heads: int) -> None:
        super().__init__()
        self.spelling, self.kv_heads, self.p = spelling, kv_heads, dropout
        size = WIDTH // HEADS
        self.norm, self.query = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        # A bias of the keys would have no gradient but that of roundings: weights of a softmax do not change with it.
        self.key, self.value = nn.Linear(WIDTH, kv_heads * size, bias=False), nn.Linear(WIDTH, kv_heads * size)
        self.out, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)
        self.ff = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.register_buffer("tril", torch.tril(torch.ones(LENGTH, LENGTH)))
        self.register_buffer(
            "bias", torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool))[None, None], persistent=False
        )
        self.sinks = nn.Parameter(torch.zeros(HEADS))
        self.relative = nn.Parameter(torch.randn(HEADS, 1, 1))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.norm(x)
        q = self.query(h).unflatten(-1, (-1, WIDTH // HEADS))
        k, v = (one(h).unflatten(-1, (-1, WIDTH // HEADS)) for one in (self.key, self.value))
        x = x + self.out(self.spelling(self, q, k, v, mask).flatten(2))
        return x + self.ff(x)


class Written(nn.Module):
    def __init__(
        self, spelling: Callable[..., Tensor], dropout: float = 0.0, kv_heads: int = HEADS, blocks: int = 2
    ) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Spelled(spelling, dropout, kv_heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.given = getattr(spelling, "given", None)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        mask = None if self.given is None else self.given(input_ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def given(make: Callable[[Tensor], Tensor]) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Let the model make a mask of its whole sequence and give it to each block."""

    def with_mask(spelling: Callable[..., Tensor]) -> Callable[..., Tensor]:
        spelling.given = make  # type: ignore[attr-defined]
        return spelling

    return with_mask


def padded(input_ids: Tensor) -> Tensor:
    length = input_ids.shape[1]
    tokens = torch.arange(length, device=input_ids.device)
    return (tokens[:, None] >= tokens) & (input_ids != 3)[:, None, None]


def lowest(input_ids: Tensor) -> Tensor:
    return torch.zeros(()).masked_fill(~padded(input_ids), torch.finfo(torch.float32).min)


def slopes(input_ids: Tensor) -> Tensor:
    tokens = torch.arange(input_ids.shape[1], device=input_ids.device).double()
    rates = 0.5 ** torch.arange(1, HEADS + 1, device=input_ids.device)
    return (rates[:, None, None] * tokens).repeat(input_ids.shape[0], 1, 1)


def by_heads(*tensors: Tensor) -> list[Tensor]:
    return [one.transpose(1, 2) for one in tensors]


def nano(self: Spelled, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """nanoGPT: a buffer of ones, cut to the tokens at hand."""
    T = q.shape[1]
    q, k, v = by_heads(q, k, v)
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = att.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
    att = self.dropout(F.softmax(att, dim=-1))
    return (att @ v).transpose(1, 2).contiguous()


def one_head(self: Spelled, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """A list of heads, each with tensors of three dimensions."""
    T, outputs = q.shape[1], []
    for head in range(HEADS):
        wei = q[:, :, head] @ k[:, :, head].transpose(-2, -1) * k.shape[-1] ** -0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        outputs.append(self.dropout(F.softmax(wei, dim=-1)) @ v[:, :, head])
    return torch.stack(outputs, 2)


def flattened(self: Spelled, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """As fairseq and OPT: samples and heads in one dimension, a mask that is added."""
    B, T = q.shape[:2]
    q, k, v = (one.transpose(1, 2).reshape(B * HEADS, T, -1) for one in (q, k, v))
    weights = torch.bmm(q * k.shape[-1] ** -0.5, k.transpose(1, 2))
    hidden = torch.triu(torch.full((T, T), float("-inf"), dtype=weights.dtype, device=weights.device), diagonal=1)
    weights = weights.view(B, HEADS, T, T) + hidden[None, None]
    weights = F.softmax(weights.view(B * HEADS, T, T), dim=-1)
    return torch.bmm(F.dropout(weights, self.p, self.training), v).view(B, HEADS, T, -1).transpose(1, 2)


def einsums(self: Spelled, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Comparison of positions, and a finite number in the place of hidden scores."""
    T = q.shape[1]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    tokens = torch.arange(T, device=q.device)
    scores = scores.masked_fill(
        tokens[None, None, None, :] > tokens[None, None, :, None], torch.finfo(scores.dtype).min
    )
    weights = self.dropout(scores.softmax(dim=-1, dtype=torch.float32).to(v.dtype))
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def heads_first(self: Spelled, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Heads in front of samples: no row of SPELLINGS, since dropout of such weights is refused where heads are exchanged."""
    T = q.shape[1]
    scores = torch.einsum("bqhd,bkhd->hbqk", q, k) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
    return torch.einsum("hbqk,bkhd->bqhd", self.dropout(scores.softmax(-1)), v)


def grouped(self: Spelled, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Heads of queries that share heads of keys, by five dimensions."""
    B, T = q.shape[:2]
    q = q.view(B, T, self.kv_heads, -1, q.shape[-1])
    scores = torch.einsum("bqkgd,bskd->bkgqs", q, k) * 0.3
    scores = torch.where(self.bias[0, 0, :T, :T], scores, torch.finfo(scores.dtype).min)
    return torch.einsum("bkgqs,bskd->bqkgd", torch.softmax(scores, -1), v).reshape(B, T, HEADS, -1)


def repeated(self: Spelled, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Repeated heads of keys, capped scores, a window."""
    T = q.shape[1]
    k, v = (one.repeat_interleave(HEADS // self.kv_heads, dim=2) for one in (k, v))
    q, k, v = by_heads(q, k, v)
    scores = torch.matmul(q, k.mT) / 2.0
    scores = torch.tanh(scores / 5.0) * 5.0
    distance = torch.arange(T)[:, None] - torch.arange(T)
    scores = scores.masked_fill((distance < 0) | (distance >= 3), float("-inf"))
    return self.dropout(nn.Softmax(-1)(scores)).matmul(v).transpose(1, 2)


@given(lowest)
def added(self: Spelled, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """As transformers: a mask of the whole sequence that is added, with padded keys."""
    q, k, v = by_heads(q, k, v)
    weights = torch.matmul(q, k.transpose(2, 3)) * 0.5 + mask
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(F.dropout(weights, p=self.p, training=self.training), v).transpose(1, 2).contiguous()


@given(padded)
def sunk(self: Spelled, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """As gpt-oss: a sink for each head, and scores without their largest."""
    q, k, v = by_heads(q, k, v)
    scores = (q @ k.transpose(-1, -2) * 0.4).masked_fill(~mask, float("-inf"))
    sinks = self.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    joined = torch.cat([scores, sinks], dim=-1)
    joined = joined - joined.max(dim=-1, keepdim=True).values
    weights = F.softmax(joined, dim=-1, dtype=joined.dtype)[..., :-1]
    return (F.dropout(weights, self.p, self.training) @ v).transpose(1, 2)


@given(slopes)
def summed(self: Spelled, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """As BLOOM: slopes of positions for each head and key, added by baddbmm."""
    B, T = q.shape[:2]
    q, k, v = (one.transpose(1, 2).reshape(B * HEADS, T, -1) for one in (q, k, v))
    scores = mask.to(q.dtype).baddbmm(batch1=q, batch2=k.transpose(1, 2), beta=1.0, alpha=0.5)
    scores = scores.view(B, HEADS, T, T) + torch.full((T, T), torch.finfo(q.dtype).min, dtype=q.dtype).triu(1)
    weights = self.dropout(scores.softmax(-1)).view(B * HEADS, T, T)
    return torch.bmm(weights, v).view(B, HEADS, T, -1).transpose(1, 2)


def by_hand(self: Spelled, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """A softmax that is written out, a factor for each head, a mask in place, products of transposed tensors."""
    T = q.shape[1]
    q, k, v = by_heads(q, k, v)
    scores = torch.matmul(q, k.transpose(-1, -2))
    scores = scores * self.relative.exp()
    if scores.requires_grad:
        scores = scores * 0.9
    scores.masked_fill_(torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf"))
    scores = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    return (scores / scores.sum(dim=-1, keepdim=True) @ v).transpose(1, 2)


@given(lambda input_ids: input_ids != 3)
def keys_masked(self: Spelled, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """As BERT: which tokens are there is given to each block."""
    q, k, v = by_heads(q, k, v)
    scores = (q @ k.transpose(-1, -2)) / 2
    scores = scores.masked_fill(mask[:, None, None, :] == 0, -1e9)
    return (self.dropout(scores.softmax(-1)) @ v).transpose(1, 2)


def everything(self: Spelled, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """No mask at all, and a softmax over the rows of transposed scores."""
    q, k, v = by_heads(q, k, v)
    weights = torch.softmax(k @ q.transpose(-1, -2) * 0.5, dim=-2)
    return (weights.transpose(-1, -2) @ v).transpose(1, 2)


SPELLINGS: dict[str, Callable[..., Tensor]] = {
    one.__name__: one
    for one in (
        nano,
        one_head,
        flattened,
        einsums,
        grouped,
        repeated,
        added,
        sunk,
        summed,
        by_hand,
        keys_masked,
        everything,
    )
}
