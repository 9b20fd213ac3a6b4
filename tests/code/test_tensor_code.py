"""Tensor parallelism of code that people write: equal to one device in float64 to 1e-9, or refused by name.

Each way below is one small decoder: the code between a column cut and a row cut, of an attention, behind the head, or
between the cut parts of a block. `LEGAL` must run and be equal, with the ledger; `REFUSED` must not start.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.errors import LayoutError
from samestep.layout import Layout
from tests.laboratory import clipped, program_traced_in, prove, source_of
from tests.models import MODELS

WIDTH, HEADS, NEURONS, WORDS = 16, 4, 32, 64
Code = Callable[[Any, Tensor, Tensor], Tensor]
"""From the module, its hidden neurons and its input to other neurons."""


class Decoder(nn.Module):
    """Embedding, two blocks, head, and a plan; `behind` is the code behind the head."""

    def __init__(self, block: Callable[[], nn.Module], plan: dict[str, str], behind: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.tensor_plan = {f"blocks.*.{path}": style for path, style in plan.items()} | {"head": "vocab"}
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.behind = behind

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.behind(self.head(x))


class Recurrent(Decoder):
    """The blocks run twice, with the same weights."""

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embed(input_ids)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.behind(self.head(x))


def as_it_is(logits: Tensor) -> Any:
    return logits


class Mlp(nn.Module):
    """x + down(code(up(x))), with weights of its own and other modules that the code may use."""

    def __init__(self, code: Code, fused: int, linears: dict[str, tuple[int, int]], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, fused * NEURONS), nn.Linear(NEURONS, WIDTH)
        self.code = code
        for name, sizes in linears.items():
            self.add_module(name, nn.Linear(*sizes))
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.code(self, self.up(x), x))


class Rescaled(nn.Module):
    """An MLP whose result is divided by its own size, found without gradients from the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, NEURONS), nn.Linear(NEURONS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            size = self.down(F.gelu(self.up(x))).square().mean(-1, keepdim=True)
        return x + self.down(F.gelu(self.up(x))) * (1 + size).rsqrt()


class Gained(nn.Linear):
    """A linear layer with a gain of its own, one number or one for each output."""

    def __init__(self, inputs: int, outputs: int, *shape: int) -> None:
        super().__init__(inputs, outputs)
        self.gain = nn.Parameter(torch.full(shape, 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * F.linear(x, self.weight) + self.bias


def _normed(inputs: int, outputs: int) -> nn.Module:
    """A layer whose gain is the norm of its whole weight, as an old hook of torch has it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(nn.Linear(inputs, outputs), dim=None)  # type: ignore[arg-type]


GAINED: dict[str, Callable[[int, int], nn.Module]] = {
    "one number": Gained,
    "one for each output": lambda inputs, outputs: Gained(inputs, outputs, outputs),
    "the norm": _normed,
}


class OfGained(nn.Module):
    """An MLP whose last layer has a gain, or its first one too."""

    def __init__(self, kind: str, is_twice: bool = False) -> None:
        super().__init__()
        self.up = (GAINED[kind] if is_twice else nn.Linear)(WIDTH, NEURONS)
        self.down = GAINED[kind](NEURONS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


MLP_PLAN = {"up": "column", "down": "row"}


def mlp(code: Code, fused: int = 1, plan: dict[str, str] | None = None, **given: Any) -> Callable[[], nn.Module]:
    linears = {name: given.pop(name) for name in ("gate", "low", "high") if name in given}
    block = functools.partial(Mlp, code, fused, linears, **given)
    return functools.partial(Decoder, block, MLP_PLAN | (plan or {}), as_it_is)


class Heads(nn.Module):
    """An attention that keeps its number of heads in an attribute of any name."""

    def __init__(self, count: str = "heads", shape: str = "unflatten", by_hand: bool = False) -> None:
        super().__init__()
        setattr(self, count, HEADS)
        self.count, self.shape, self.by_hand = count, shape, by_hand
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in "qkvo")

    def split(self, x: Tensor) -> Tensor:
        heads = getattr(self, self.count)
        if self.shape == "unflatten":
            return x.unflatten(-1, (heads, -1)).transpose(1, 2)
        if self.shape == "view":
            return x.view(x.shape[0], x.shape[1], heads, x.shape[2] // heads).transpose(1, 2)
        return x.view(*x.shape[:-1], -1, WIDTH // HEADS).transpose(1, 2)

    def change(self, scores: Tensor) -> Tensor:
        return scores

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.by_hand:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = self.change(q @ k.mT / k.shape[-1] ** 0.5)
        mask = torch.ones(q.shape[-2], q.shape[-2], device=q.device, dtype=torch.bool).triu(1)
        return scores.masked_fill(mask, -1e9).softmax(-1) @ v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(part(x)) for part in (self.q, self.k, self.v))
        return x + self.o(self.mix(q, k, v).transpose(1, 2).contiguous().view(*x.shape[:-1], -1))


class Tempered(Heads):
    """A temperature of each head, as a bare parameter."""

    def __init__(self) -> None:
        super().__init__(by_hand=True)
        self.temperature = nn.Parameter(torch.ones(HEADS, 1, 1))

    def change(self, scores: Tensor) -> Tensor:
        return scores * self.temperature.exp()


class Distances(Heads):
    """A bias of each head for each distance, which is looked up in a table, as in T5, or indexed, as in Swin."""

    def __init__(self, is_indexed: bool) -> None:
        super().__init__(by_hand=True)
        self.is_indexed, self.biases = is_indexed, nn.Embedding(2 * HEADS, HEADS)

    def change(self, scores: Tensor) -> Tensor:
        tokens = torch.arange(scores.shape[-1], device=scores.device)
        between = (tokens[:, None] - tokens).clamp(0, 2 * HEADS - 1)
        found = self.biases.weight[between] if self.is_indexed else self.biases(between)
        return scores + (found.permute(2, 0, 1)[None] - 0.1 * between)


class Alibi(Heads):
    """Slopes of heads that the code counts itself."""

    def change(self, scores: Tensor) -> Tensor:
        slopes = 2.0 ** -torch.arange(1, getattr(self, self.count) + 1, device=scores.device, dtype=scores.dtype)
        tokens = torch.arange(scores.shape[-1], device=scores.device, dtype=scores.dtype)
        return scores + slopes[:, None, None] * tokens


class NormedHeads(Heads):
    """A norm over the features of all heads at once, before they are split."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(part) for part in (self.norm(self.q(x)), self.k(x), self.v(x)))
        return x + self.o(self.mix(q, k, v).transpose(1, 2).flatten(2))


class TalkingHeads(Heads):
    """Scores of each head are sums over those of all."""

    def __init__(self) -> None:
        super().__init__(by_hand=True)
        self.talk = nn.Parameter(torch.eye(HEADS) + 0.1)

    def change(self, scores: Tensor) -> Tensor:
        return torch.einsum("bhqk,hg->bgqk", scores, self.talk)


class Shared(Decoder):
    """A weight of the model itself, used on whole tensors and, by the blocks' code, on cut ones."""

    def __init__(self) -> None:
        super().__init__(functools.partial(Mlp, lambda m, h, x: h * m.scale[0], 1, {}), MLP_PLAN, as_it_is)
        self.scale = nn.Parameter(torch.ones(1))
        for block in self.blocks:
            block.scale = self.scale

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embed(input_ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Clipped(torch.autograd.Function):
    """Its forward takes each neuron by itself, its backward all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient / (1 + gradient.norm(dim=-1, keepdim=True))


class Scaled(torch.autograd.Function):
    """A product with a weight for each neuron."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).sum((0, 1))


def _operation(name: str, forward: Callable[[Tensor], Tensor], slope: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Define an operation of a library with its gradient, of which samestep has no rule."""
    made = torch.library.custom_op(f"samestep_cut::{name}", forward, mutates_args=(), schema="(Tensor x) -> Tensor")
    made.register_fake(torch.empty_like)
    keep = lambda ctx, inputs, output: ctx.save_for_backward(inputs[0])  # noqa: E731
    made.register_autograd(lambda ctx, gradient: slope(gradient, *ctx.saved_tensors), setup_context=keep)


def _centred(x: Tensor, groups: int) -> Tensor:
    parts = x.unflatten(-1, (groups, -1))
    return (parts - parts.mean(-1, keepdim=True)).flatten(-2)


_operation("sine", torch.sin, lambda gradient, x: gradient * x.cos())
_operation("centred", lambda x: _centred(x, 1), lambda gradient, x: _centred(gradient, 1))
_operation("grouped", lambda x: _centred(x, x.shape[-1] // 4), lambda gradient, x: _centred(gradient, x.shape[-1] // 4))


class Latent(nn.Module):
    """Multi-head latent attention: a rotary key, the same for all heads, beside keys and values of each."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.a = nn.Linear(WIDTH, HEADS * 6), nn.Linear(WIDTH, 8 + 2)
        self.norm, self.b, self.o = nn.LayerNorm(8), nn.Linear(8, HEADS * 8), nn.Linear(HEADS * 4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, 6)).transpose(1, 2)
        latent, rotary = self.a(x).split([8, 2], dim=-1)
        k, v = self.b(self.norm(latent)).unflatten(-1, (-1, 8)).transpose(1, 2).chunk(2, dim=-1)
        k = torch.cat([k, rotary[:, None].expand(-1, k.shape[1], -1, -1)], dim=-1)
        return x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FusedHeads(nn.Module):
    """q, k and v side by side in one weight, planned as a plain column cut."""

    def __init__(self, split: bool) -> None:
        super().__init__()
        self.heads, self.size, self.is_split = HEADS, WIDTH, split
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).split(self.size, dim=-1) if self.is_split else self.qkv(x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        return x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


ATTENTION_PLAN = {"q": "column", "k": "column", "v": "column", "o": "row"}


def heads(kind: Callable[..., nn.Module] = Heads, **given: Any) -> Callable[[], nn.Module]:
    return functools.partial(Decoder, functools.partial(kind, **given), ATTENTION_PLAN, as_it_is)


def behind(code: Callable[[Tensor], Any]) -> Callable[[], nn.Module]:
    return functools.partial(Decoder, functools.partial(Mlp, lambda m, h, x: h.relu(), 1, {}), MLP_PLAN, code)


def halves(h: Tensor) -> Tensor:
    a, b = h.chunk(2, dim=-1)
    return F.silu(a) * b


def cleared(h: Tensor, where: Tensor) -> Tensor:
    h = h.clone()
    h[where] = 0.5
    return h


LEGAL: dict[str, Callable[[], nn.Module]] = {
    "glu": mlp(lambda m, h, x: halves(h), 2),
    "a scale of each neuron": mlp(lambda m, h, x: h.relu() * m.scale + m.shift, scale=(NEURONS,), shift=(1, NEURONS)),
    "the number of inputs of a module": mlp(lambda m, h, x: h.relu() / m.down.in_features),
    "a sum over tokens": mlp(lambda m, h, x: h.cumsum(1) / 8),
    "a gate of the whole input": mlp(lambda m, h, x: h * m.gate(x).sigmoid(), gate=(WIDTH, 1)),
    "a low-rank sum that is cut alike": mlp(lambda m, h, x: h + m.high(m.low(x)), plan={"high": "column"}, low=(WIDTH, 4), high=(4, NEURONS)),
    "nothing beside groups of neurons": mlp(lambda m, h, x: torch.cat([(y := h.unflatten(-1, (-1, 4))), y[..., 4:]], -1).flatten(2)),
    "tokens written by a mask": mlp(lambda m, h, x: cleared(h, x.mean(-1) > 0)),
    "neurons in groups": mlp(lambda m, h, x: h.unflatten(-1, (-1, 4)).softmax(-1).flatten(2)),
    "any other name": heads(count="viewpoints", shape="view"),
    "a temperature of each head": heads(Tempered),
    "a table of distances": heads(functools.partial(Distances, False)),
    "an indexed table of distances": heads(functools.partial(Distances, True)),
    "one rotary key": functools.partial(
        Decoder, Latent, {"q": "column", "b": "column", "o": "row"}, as_it_is
    ),
    "fused by split": functools.partial(
        Decoder, functools.partial(FusedHeads, True), {"qkv": "column", "o": "row"}, as_it_is
    ),
    "a first pass without gradients": functools.partial(Decoder, Rescaled, MLP_PLAN, as_it_is),
    "log-probabilities": behind(lambda logits: logits.log_softmax(-1)),
    "standardised logits": behind(lambda logits: (logits - logits.mean(-1, keepdim=True)) / logits.std(-1, keepdim=True)),
    "classes before tokens": behind(lambda logits: logits.transpose(1, 2)),
}  # fmt: skip

GATHERED: dict[str, Callable[[], nn.Module]] = {
    "the number of neurons": mlp(lambda m, h, x: h.relu() / h.shape[-1]),
    "the whole input": mlp(lambda m, h, x: h * x.mean(-1, keepdim=True)),
    "neurons written by a whole mask": mlp(lambda m, h, x: cleared(h, (x > 0).repeat(1, 1, 2))),
    "a mean by an operation without a rule": mlp(lambda m, h, x: h * torch.ops.samestep_cut.centred(h)),
    "a gradient of all neurons": mlp(lambda m, h, x: Clipped.apply(h)),
    "alibi": heads(Alibi, by_hand=True),
    "a norm of all heads": heads(NormedHeads),
    "talking heads": heads(TalkingHeads),
}  # fmt: skip
"""Code that computes with more than a rank's part: the outputs of the modules that it reads are gathered."""
EVERY_NIGHT = {"the number of neurons", "a gradient of all neurons", "talking heads"}
BLOCK = functools.partial(Mlp, lambda m, h, x: h.relu(), 1, {})
LEGAL |= {
    "blocks that run twice": functools.partial(Recurrent, BLOCK, MLP_PLAN, as_it_is),
    **{
        f"a gain, {kind}": functools.partial(Decoder, functools.partial(OfGained, kind, is_twice), MLP_PLAN, as_it_is)
        for kind, is_twice in (("one number", False), ("one for each output", True), ("the norm", True))
    },
    "an operation without a rule": mlp(lambda m, h, x: torch.ops.samestep_cut.sine(h)),
    "an operation on groups of neurons": mlp(lambda m, h, x: torch.ops.samestep_cut.grouped(h)),
    "a backward of its own": mlp(lambda m, h, x: Scaled.apply(h, m.scale), scale=(NEURONS,)),
}


class Between(nn.Module):
    """A block with code between two parts that tp cuts."""

    def __init__(self, code: Callable[[nn.Module, Tensor], Tensor], **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.first, self.second = (nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in "12")
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        x = self.code(self, x + self.first(x))
        return x + self.second(x)


class Normed(nn.Module):
    """An attention and an MLP, with norms, in this order or at once."""

    def __init__(self, order: str, attention: Callable[[], nn.Module], *last: nn.Module) -> None:
        super().__init__()
        self.order, self.norms = order, nn.ModuleList(nn.LayerNorm(WIDTH) for _ in "12")
        self.attention, self.mlp = attention(), nn.Sequential(*_feed_forward(), *last)

    def forward(self, x: Tensor) -> Tensor:
        if self.order == "at once":
            x = self.norms[0](x)
            return x + self.attention(x) + self.mlp(x)
        parts = [self.attention, self.mlp]
        for norm, part in zip(self.norms, reversed(parts) if self.order == "MLP first" else parts, strict=True):
            x = x + part(norm(x))
        return x


def _feed_forward() -> list[nn.Module]:
    return [nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)]


def normed(order: str, attention: Callable[[], nn.Module], *last: nn.Module, **plan: str) -> Callable[[], nn.Module]:
    cuts = {f"attention.{path}": style for path, style in plan.items()} | {"mlp.0": "column", "mlp.2": "row"}
    return functools.partial(Decoder, functools.partial(Normed, order, attention, *last), cuts, as_it_is)


class Apart(nn.Module):
    """Each cut of an MLP is in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, _, self.down = (nn.Sequential(one) for one in _feed_forward())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


FUSED = functools.partial(FusedHeads, True)
LATENT_PLAN = {"q": "column", "b": "column", "o": "row"}


class LinearAttention(nn.Linear):
    """It mixes no tokens, whatever its name says."""


class Gelu(nn.Module):
    """It mixes tokens, whatever its name says."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x.cumsum(1))


BETWEEN_PLAN = {f"{part}.{at}": cut for part in ("first", "second") for at, cut in ((0, "column"), (2, "row"))}


IDLE_PLAN = {"idle.0": "column", "idle.1": "row"}


def between(code: Callable[[Any, Tensor], Tensor], **modules: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def built() -> nn.Module:
        block = lambda: Between(code, **{name: module() for name, module in modules.items()})  # noqa: E731
        return Decoder(block, BETWEEN_PLAN | (IDLE_PLAN if "idle" in modules else {}), as_it_is)

    return built


def shifted(x: Tensor) -> Tensor:
    return 0.5 * x + 0.5 * F.pad(x, (0, 0, 1, -1))


TOKENWISE: dict[str, Callable[[], nn.Module]] = {
    "a norm by hand": between(lambda m, x: x * x.square().mean(-1, keepdim=True).rsqrt() * m.scale),
    "a gate by hand": between(lambda m, x: x * torch.sigmoid(x @ torch.eye(WIDTH, device=x.device, dtype=x.dtype))),
    "an odd name": between(lambda m, x: m.mix(x), mix=functools.partial(LinearAttention, WIDTH, WIDTH)),
    "a part that never runs": between(lambda m, x: x, idle=lambda: nn.Sequential(nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH))),
    "a fused projection that is gathered": normed("", FUSED, qkv="gather", o="row"),
    "latent attention behind the MLP": normed("MLP first", Latent, **LATENT_PLAN),
    "two parts of one input": normed("at once", Latent, **LATENT_PLAN),
    "a norm behind a cut": normed("", Heads, nn.LayerNorm(WIDTH), **ATTENTION_PLAN),
    "a convolution of single tokens": between(lambda m, x: m.mix(x.mT).mT, mix=functools.partial(nn.Conv1d, WIDTH, WIDTH, 1)),
}  # fmt: skip
MIXING: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "short convolution": (
        between(lambda m, x: m.mix(F.pad(x.mT, (2, 0))).mT, mix=functools.partial(nn.Conv1d, WIDTH, WIDTH, 3)),
        "blocks.0.mix mixes tokens by convolution",
    ),
    "token shift": (between(lambda m, x: shifted(x)), "blocks.0 mixes tokens"),
    "an innocent name": (between(lambda m, x: m.mix(x), mix=Gelu), "blocks.0.mix mixes tokens by cumsum"),
    "positions": (
        between(lambda m, x: x + torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[:, None]),
        "blocks.0 counts the tokens",
    ),
    "the length": (between(lambda m, x: x / x.shape[1]), "blocks.0 computes differently, or with other numbers"),
    "a gradient of all tokens": (
        between(lambda m, x: Clipped.apply(x.mT).mT),
        "by the gradient of Clipped mixes tokens",
    ),
    "an attention": (
        between(lambda m, x: F.scaled_dot_product_attention(*[x[:, None]] * 3)[:, 0]),
        "the attention in blocks.0 stands outside",
    ),
}


class Part(nn.Module):
    """A part that tp cuts, with code and modules of its own."""

    def __init__(self, code: Callable[[Any, Tensor], Any], modules: dict[str, Callable[[], nn.Module]]) -> None:
        super().__init__()
        self.up, self.down, self.code = nn.Linear(WIDTH, NEURONS), nn.Linear(NEURONS, WIDTH), code
        for name, module in modules.items():
            self.add_module(name, module())

    def forward(self, x: Tensor, *others: Any) -> Any:
        return self.code(self, x, *others)


class OfParts(nn.Module):
    """A block of two parts, one with code and modules of its own, and of code around them."""

    def __init__(self, code: Any, around: Any, modules: dict[str, Callable[[], nn.Module]]) -> None:
        super().__init__()
        self.norm, self.part, self.around = nn.LayerNorm(WIDTH), Part(code, modules), around
        self.second = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.around(self, x)


def in_turn(block: Any, x: Tensor) -> Tensor:
    x = x + block.part(block.norm(x))
    return x + block.second(x)


def side_by_side(block: Any, x: Tensor) -> Tensor:
    normed = block.norm(x)
    return x + block.second(normed) + block.part(normed)


def with_its_mean(block: Any, x: Tensor) -> Tensor:
    y, mean = block.part(x)
    return block.second(x + y * mean)


def with_what_it_kept(block: Any, x: Tensor) -> Tensor:
    y = block.part(x)
    return block.second(x + y * KEPT[0])


def returning_its_mean(m: Any, x: Tensor) -> Any:
    h = m.up(x)
    return m.down(F.gelu(h)), m.gate(x).mean((1, 2), keepdim=True)


def lending(block: Any, x: Tensor) -> Tensor:
    return block.second(x + block.part(x, block.norm.weight) * block.norm.weight)


def borrowing(block: Any, x: Tensor) -> Tensor:
    return block.second(x * block.part.gate.weight[0] + block.part(x))


KEPT: list[Tensor] = []


def keeping_its_mean(m: Any, x: Tensor) -> Tensor:
    KEPT[:] = [m.gate(x).mean(1, keepdim=True)]
    return m.down(F.gelu(m.up(x)))


def parts(code: Any, around: Any = in_turn, **modules: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    plan = {"part.up": "column", "part.down": "row", "second.0": "column", "second.2": "row"}
    return functools.partial(Decoder, lambda: OfParts(code, around, modules), plan, as_it_is)


class Mixer(nn.Module):
    """A convolution and an attention whose features are not cut."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.qkv = nn.Conv1d(WIDTH, WIDTH, 3), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.mix(F.pad(x.mT, (2, 0))).mT)[:, None].chunk(3, dim=-1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]


class InDict(nn.Module):
    """An MLP whose modules stand in a dict, which has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), nn.ModuleDict()
        self.mlp["up"], self.mlp["down"] = nn.Linear(WIDTH, NEURONS), nn.Linear(NEURONS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp["down"](F.gelu(self.mlp["up"](self.norm(x))))


class InTwo(nn.Module):
    """A block whose columns are in one module and whose rows are in another, with the sum that follows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, NEURONS), nn.GELU())
        self.outer = Part(lambda m, h, x: m.norm(m.down(h) + x), {"norm": lambda: nn.LayerNorm(WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x), x)


WHOLE = functools.partial(nn.Linear, WIDTH, WIDTH)
PARTS: dict[str, Callable[[], nn.Module]] = {
    "a whole gate": parts(lambda m, x: m.down(F.gelu(m.up(x))) * torch.sigmoid(m.gate(x)), gate=WHOLE),
    "a mean over tokens": parts(lambda m, x: m.down(F.gelu(m.up(m.low(x - x.mean(1, keepdim=True))))), low=WHOLE),
    "beside another": parts(lambda m, x: m.down(F.gelu(m.up(m.low(x)))), side_by_side, low=WHOLE),
    "the block's own code": mlp(lambda m, h, x: F.gelu(h) * m.scale, scale=(NEURONS,)),
    "an attention that is not cut": between(lambda m, x: x + m.mix(x), mix=Mixer),
    "each cut in a module of its own": functools.partial(Decoder, Apart, {"up.0": "column", "down.0": "row"}, as_it_is),
    "modules in a dict": functools.partial(Decoder, InDict, {"mlp.up": "column", "mlp.down": "row"}, as_it_is),
    "two modules": functools.partial(Decoder, InTwo, {"inner.0": "column", "outer.down": "row"}, as_it_is),
}  # fmt: skip
"""Parts that compute whole sequences, and parts that are no module."""
MIXING |= {
    "tokens mixed behind the rows of a part": (
        parts(lambda m, x: m.down(F.gelu(m.up(x))).cumsum(1)), "blocks.0.part mixes tokens by cumsum",
    ),
    "what a part returns besides": (
        parts(returning_its_mean, with_its_mean, gate=WHOLE), "blocks.0 uses a result that a sharded part",
    ),
    "what a part keeps": (
        parts(keeping_its_mean, with_what_it_kept, gate=WHOLE), "blocks.0 uses a result that a sharded part",
    ),
    "the length of a slice within a part": (
        mlp(lambda m, h, x: h * h[:, : x.shape[1]].mean(1, keepdim=True)), "computes differently, or with other numbers",
    ),
    "a weight of the block in a part": (
        parts(lambda m, x, w: m.down(F.gelu(m.up(x * w))), lending, weight=functools.partial(nn.LayerNorm, WIDTH)),
        "blocks.0.part uses a weight that is used between",
    ),
    "a weight of a part in the block": (
        parts(lambda m, x: m.down(F.gelu(m.up(x))) * m.gate(x), borrowing, gate=WHOLE),
        "blocks.0 uses a tensor that takes a gradient",
    ),
    "own tokens within a part": (
        mlp(lambda m, h, x: h * x.detach().mean().sigmoid()), "uses a rank's own tokens",
    ),
}  # fmt: skip


for kind, builds in {"legal": LEGAL, "gathered": GATHERED, "between": TOKENWISE, "part": PARTS}.items():
    MODELS |= {f"{kind}: {name}": build for name, build in builds.items()}
MODELS |= {f"mixing: {name}": build for name, (build, _) in MIXING.items()}
MODELS["mixing: a weight of several modules"] = Shared


SLICED = "tp=2 sequence_parallel"
EVERY_TURN = {("blocks that run twice", "tp=2"), ("latent attention behind the MLP", f"{SLICED} recompute=full")}


def _rows(kind: str, names: Iterable[str], layout: str, *, is_nightly: bool = False) -> list[Any]:
    """Return rows that name their layout and model, which is traced before ranks are forked."""
    return [
        pytest.param(
            layout,
            f"{kind}: {name}",
            id=f"{name}-{layout}",
            marks=pytest.mark.nightly if is_nightly else pytest.mark.every_turn if (name, layout) in EVERY_TURN else (),
        )
        for name in names
    ]


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        *_rows("legal", LEGAL, "tp=2"),
        *_rows("part", PARTS, SLICED),
        *_rows("part", ["two modules"], f"{SLICED} recompute=full"),
        *_rows("part", ["beside another"], f"{SLICED} recompute=selective microbatch=4"),
        *_rows("part", ["a whole gate"], f"dp=2 zero=3 {SLICED} recompute=full", is_nightly=True),
        *_rows("part", ["two modules"], f"pp=2 {SLICED} recompute=full microbatch=2", is_nightly=True),
        *_rows("part", ["beside another"], f"pp=2 {SLICED} schedule=zero-bubble microbatch=2", is_nightly=True),
        *_rows("between", TOKENWISE, SLICED),
        *_rows("between", ["latent attention behind the MLP"], f"{SLICED} recompute=full"),
        *(
            row
            for recompute in ("full", "selective")
            for row in _rows(
                "between",
                ("a fused projection that is gathered", "two parts of one input"),
                f"{SLICED} recompute={recompute}",
                is_nightly=True,
            )
        ),
        *(
            row
            for layout in ("tp=2 recompute=full", "tp=2 recompute=selective", "pp=2 tp=2 microbatch=2", "dp_shard=2 tp=2", "tp=4")
            for row in _rows("gathered", ["alibi"], layout, is_nightly=True)
        ),
    ],
)  # fmt: skip
def test_legal_code_is_equal(layout: str, model: str) -> None:
    prove(layout, model)


def test_what_is_kept_behind_the_last_sum_of_a_whole_part_is_not_repeated() -> None:
    with pytest.raises(LayoutError, match="keeps something for its backward after its last sum"):
        program_traced_in(f"{SLICED} recompute=full", "between: a norm behind a cut")


@pytest.mark.parametrize("name", [*MIXING, pytest.param("a weight of several modules", marks=pytest.mark.every_turn)])
def test_code_that_mixes_what_is_cut_or_tokens_is_refused(name: str) -> None:
    _, text = MIXING.get(name, (None, "by another module|only some of them|tensor that it leaves whole"))
    with pytest.raises(LayoutError, match=text):
        program_traced_in(SLICED if name in MIXING else "tp=2", f"mixing: {name}")


def test_a_table_is_cut_by_heads() -> None:
    found = source_of("legal: a table of distances", Layout("tp=2"), clipped()).prepared
    assert found is not None
    cuts = {param.name: param.cut for param in found.spec.params}
    table, query = cuts["blocks.0.biases.weight"], cuts["blocks.0.q.weight"]
    assert table is not None
    assert query is not None
    assert (table.dim, table.groups, query.style) == (1, HEADS, "column")


@pytest.mark.parametrize(
    ("layout", "model"),
    [row for name in GATHERED for row in _rows("gathered", [name], "tp=2", is_nightly=name in EVERY_NIGHT)],
)
def test_what_code_needs_whole_is_gathered(layout: str, model: str) -> None:
    prove(layout, model)
    found = source_of(model, Layout(layout), clipped()).prepared
    assert found is not None
    styles = found.analysis.cut_styles
    assert {style for path, style in styles.items() if path != "head"} == {"gather"}
