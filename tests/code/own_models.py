"""Decoders as people write them, with no plan of tensor parallelism and no names that would tell one."""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import VOCABULARY

Form = Literal["apart", "chunked", "split", "shared", "interleaved", "torch", "written", "sized"]
"""How an attention makes its queries, keys and values."""


class Attention(nn.Module):
    """Four heads of four features; "shared" has two heads of keys and values."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form, self.times, self.size = form, 4, 4
        self.few = 2 if form == "shared" else 4
        width, narrow = self.times * self.size, self.few * self.size
        if form in ("chunked", "split", "interleaved"):
            self.a = nn.Linear(width, 3 * width, bias=form != "split")
        elif form == "torch":
            self.a = nn.MultiheadAttention(width, self.times, batch_first=True)  # type: ignore[assignment]
        else:
            self.a, self.b, self.c = nn.Linear(width, width), nn.Linear(width, narrow), nn.Linear(width, narrow)
        if form != "torch":
            self.z = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        if self.form == "torch":
            mask = nn.Transformer.generate_square_subsequent_mask(T, dtype=x.dtype)
            return self.a(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
        if self.form == "chunked":
            q, k, v = self.a(x).chunk(3, dim=-1)
        elif self.form == "split":
            q, k, v = self.a(x).split(D, dim=-1)
        elif self.form == "interleaved":
            q, k, v = self.a(x).view(B, T, 3, D).unbind(2)
        else:
            q, k, v = self.a(x), self.b(x), self.c(x)
        if self.form == "sized":
            q, k, v = (one.reshape(B, T, -1, self.size).transpose(1, 2) for one in (q, k, v))
        else:
            q = q.view(B, T, self.times, D // self.times if self.form == "chunked" else self.size).transpose(1, 2)
            k, v = (one.reshape(B, T, self.few, self.size).transpose(1, 2) for one in (k, v))
        if self.form == "interleaved":
            q, k = turned(q), turned(k)
        if self.form == "shared":
            k, v = (one.repeat_interleave(self.times // self.few, dim=1) for one in (k, v))
        if self.form == "written":
            scores = q @ k.transpose(-1, -2) / self.size**0.5
            past = torch.ones(T, T, dtype=torch.bool).tril()
            y = scores.masked_fill(~past, float("-inf")).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.z(y.transpose(1, 2).reshape(B, T, -1))


def turned(x: Tensor) -> Tensor:
    """Rotary positions of interleaved pairs of features."""
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * 10.0 ** -torch.arange(x.shape[-1] // 2, dtype=x.dtype)
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack(
        [even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()], -1
    ).flatten(-2)


class Casting(nn.Linear):
    """Whisper's: the weights in the dtype of the input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class Adding(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class Scaling(nn.Linear):
    """One whose bias is no summand of its output."""

    def forward(self, x: Tensor) -> Tensor:
        return 1.5 * F.linear(x, self.weight, self.bias)


class Gated(nn.Module):
    """A gate and a value in one layer, or in two; or three layers in a row; or in linear layers of the user's own."""

    def __init__(self, form: Literal["packed", "apart", "deep", "casting", "adding", "scaling"]) -> None:
        super().__init__()
        self.form = form
        linear = {"casting": Casting, "adding": Adding, "scaling": Scaling}.get(form, nn.Linear)
        self.r = linear(16, 64 if form == "packed" else 32)
        self.s = linear(32, 32) if form == "deep" else linear(16, 32)
        self.t = linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "packed":
            gate, value = self.r(x).chunk(2, -1)
            return self.t(F.silu(gate) * value)
        if self.form != "deep":
            return self.t(F.silu(self.r(x)) * self.s(x))
        return self.t(F.gelu(self.s(F.gelu(self.r(x)))))


class Layer(nn.Module):
    def __init__(self, attention: Form, mlp: Any, parallel: bool, after: bool) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(16), nn.RMSNorm(16)
        self.m, self.n = Attention(attention), Gated(mlp)
        self.parallel, self.after = parallel, after

    def forward(self, x: Tensor) -> Tensor:
        if self.parallel:
            return x + self.m(y := self.one(x)) + self.n(y)
        if self.after:
            x = self.one(x + self.m(x))
            return self.two(x + self.n(x))
        x = x + self.m(self.one(x))
        return x + self.n(self.two(x))


class Decoder(nn.Module):
    """A causal language model in a user's own words."""

    def __init__(
        self, attention: Form = "apart", mlp: str = "apart", parallel: bool = False, after: bool = False,
        tied: bool = False, cap: float = 0.0, vocabulary: int = VOCABULARY + 3,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, 16), nn.Embedding(32, 16)
        self.trunk = nn.ModuleList(Layer(attention, mlp, parallel, after) for _ in range(2))
        self.last, self.out = nn.LayerNorm(16), nn.Linear(16, vocabulary, bias=False)
        self.cap = cap
        if tied:
            self.out.weight = self.tokens.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        for layer in self.trunk:
            x = layer(x)
        logits = self.out(self.last(x))
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits


OWN = {
    "own shared": functools.partial(Decoder, "shared", "casting"),
    "own written": functools.partial(Decoder, "written", "adding"),
    "own after": functools.partial(Decoder, "sized", after=True),
    "own split": functools.partial(Decoder, "split", "packed"),
    "own interleaved": functools.partial(Decoder, "interleaved", "deep"),
    "own torch": functools.partial(Decoder, "torch"),
    "own scaling": functools.partial(Decoder, mlp="scaling"),
    "own tied": functools.partial(Decoder, "chunked", "packed", parallel=True, tied=True, cap=5.0),
}
"""Each has an attention and an MLP of forms that no other one has together: what is found of the one is found beside any other."""
