"""However code uses the length of a sequence, a slice of it must not change what is computed for a token.

Each case runs in a block between the embedding and the attention of one model, which is traced once; what a block does with its
length is then found by the forwards on the whole sequence and on a slice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.building.loss import cross_entropy
from samestep.datasets import Batch
from samestep.examination.examine import Source, examine
from samestep.independence import sequence_proof, token_slices
from samestep.layout import Layout
from tests.laboratory import job_of
from tests.models import AttentiveBlock, Tokens
from tests.parts import Words

EXAMPLE = Batch(0, [0], Tokens()).samples([0])  # type: ignore[arg-type]
TABLE = torch.linspace(1, 2, 64)
BY_LENGTH = {n: torch.full((16,), float(n)) for n in range(64)}


class Odd(nn.Module):
    """What a case finds at hand; `code` is replaced for each."""

    code: Callable[[Odd, Tensor], Tensor] = staticmethod(lambda m, x: m.lin(x) + m.w[0] * m.e.weight[1] * m.keyed["6"])

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.e = nn.Linear(16, 16), nn.Embedding(64, 16)
        self.w = nn.Parameter(torch.ones(64))
        self.keyed = nn.ParameterDict({f"{n}": nn.Parameter(torch.ones(16)) for n in (6, 12)})
        self.register_buffer("table", torch.linspace(0, 1, 64))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.odd, self.inner, self.up, self.down = Odd(), AttentiveBlock(16, 4), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.odd(x))


class CutBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.odd(x)
        return x + self.down(self.up(x).relu())


class Model(Words):
    tensor_plan = {"blocks.*.up": "column", "blocks.*.down": "row"}  # noqa: RUF012

    def __init__(self, block: type[Block]) -> None:
        more = [functools.partial(AttentiveBlock, 16, 4)] if block is Block else []
        super().__init__(block, *more, width=16, entries=64)


@functools.cache
def _traced(block: type[Block]) -> Any:
    source = Source(lambda: Model(block), cross_entropy, lambda named: torch.optim.SGD([t for _, t in named], lr=0.1))
    layout = "dp=1 cp=2" if block is Block else "dp=1 tp=2 sequence_parallel"
    return examine(source, job_of(), EXAMPLE, Layout(layout))


def refusal(code: Callable[[Any, Tensor], Tensor], block: type[Block] = Block) -> str:
    """Return why slices are refused with this code in the first block, or all tokens are gathered for it."""
    traced = _traced(block)
    spec, analysis = traced.spec, traced.analysis
    assert (spec.slice_refusal if block is Block else spec.sequence_refusal) == ""
    value_of = functools.partial(traced.blueprint.materialize, device=torch.device("cpu"))
    traced.module.blocks[0].odd.code = functools.partial(code)
    if block is CutBlock:
        return sequence_proof.refuse_slices(traced.module, EXAMPLE, analysis, 2, value_of)[0]
    found = token_slices.prove(traced.module, EXAMPLE, spec, value_of, analysis.experts, 2)
    return found.slice_refusal or "; ".join(part.reason for layer in found.layers for part in layer.gathered_parts)


class Divided(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:  # type: ignore[override]
        ctx.by = by
        return x.clone()

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return above / ctx.by, None


def with_hook(factor: float, x: Tensor) -> Tensor:
    x = x * 1
    x.register_hook(lambda gradient: gradient * factor)
    return x


def added_often(m: Odd, x: Tensor) -> Tensor:
    x = x.clone()
    for _ in range(x.shape[1]):
        x.add_(0.1)
    return x


def sum_of_turns(m: Odd, x: Tensor) -> Tensor:
    total = torch.zeros((), device=x.device)
    for _ in range(x.shape[1]):
        total = total + 0.1
    return x * total


def sometimes_without_gradient(m: Odd, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(x.shape[1] > 8):
        return x.detach() + m.lin(x)


def one_marked(m: Odd, x: Tensor) -> Tensor:
    mark = x.new_zeros(x.shape[1], 1)
    mark[0] = 1
    return x + mark


def counting(m: Odd, x: Tensor) -> Tensor:
    m.count += x.shape[1]
    return x


def attended(scale: float, x: Tensor) -> Tensor:
    q = x.unflatten(-1, (4, 4)).transpose(1, 2)
    return x + F.scaled_dot_product_attention(q, q, q, scale=scale).transpose(1, 2).flatten(2)


USES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "index of a weight": lambda m, x: x * m.w[x.shape[1]],
    "index of a constant": lambda m, x: x * TABLE[len(x[0])],
    "key of an embedding": lambda m, x: x + m.e(torch.tensor(x.shape[1], device=x.device)),
    "dict of tensors": lambda m, x: x * BY_LENGTH[x.shape[1]].to(x.device),
    "format": lambda m, x: x * m.keyed[f"{x.shape[1]}"],
    "tensor": lambda m, x: x * torch.tensor(float(x.shape[1]), device=x.device),
    "new_full": lambda m, x: x * x.new_full((1, 1, 16), x.shape[1]),
    "last position": lambda m, x: x * torch.arange(x.shape[1], device=x.device)[-1],
    "sum of ones": lambda m, x: x * torch.ones_like(x).sum(),
    "sum in a product": lambda m, x: torch.einsum("btd,s->btd", x, torch.ones(x.shape[1], device=x.device)),
    "sum of an expanded tensor": lambda m, x: x[:, :, None].expand(-1, -1, x.shape[1], -1).sum(2),
    "power": lambda m, x: x * x.shape[1] ** -0.5,
    "branch": lambda m, x: x.tanh() if x.shape[1] > 8 else x.sin(),
    "where": lambda m, x: torch.where(torch.tensor(x.shape[1] > 8, device=x.device), x, 2 * x),
    "turns of a loop in place": added_often,
    "turns of a loop without tokens": sum_of_turns,
    "turns over weights": lambda m, x: x + sum(m.w[i] for i in range(x.shape[1])),
    "part of a weight": lambda m, x: x + m.w[: x.shape[1]].mean(),
    "number of features": lambda m, x: x + x[..., : x.shape[1]].sum(-1, keepdim=True),
    "limit": lambda m, x: x.clamp(max=x.shape[1] / 10),
    "scale of an attention": lambda m, x: attended(1 / x.shape[1], x),
    "dtype": lambda m, x: x.to(torch.float32 if x.shape[1] > 8 else torch.float64).to(x.dtype),
    "seed": lambda m, x: x * torch.rand(16, generator=torch.Generator().manual_seed(x.shape[1])).to(x.device),
    "numbers of chunks": lambda m, x: torch.cat([i * part for i, part in enumerate(x.split(3, 1))], 1),
    "resized weight": lambda m, x: x * F.interpolate(m.w[None, None], size=x.shape[1])[0, 0, 1],
    "backward of a Function": lambda m, x: Divided.apply(x, x.shape[1]),
    "hook on a gradient": lambda m, x: with_hook(1 / x.shape[1], x),
    "no gradient": sometimes_without_gradient,
    "mark of one token": one_marked,
    "count in a buffer": counting,
}  # fmt: skip
LEGAL: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "views": lambda m, x: x.view(1, x.shape[1], 4, 4).transpose(1, 2).transpose(1, 2).reshape(1, x.shape[1], 16),
    "flat rows": lambda m, x: m.lin(x.view(-1, 16)).softmax(-1).view(1, x.shape[1], 16),
    "tokens before samples": lambda m, x: m.lin(x.transpose(0, 1)).transpose(0, 1),
    "an expanded weight": lambda m, x: x + m.e.weight[0].expand(1, x.shape[1], -1),
    "zeros for each token": lambda m, x: x + torch.zeros(x.shape[1], 16, device=x.device),
    "zeros beside": lambda m, x: torch.cat([x, x.new_zeros(1, x.shape[1], 4)], -1)[..., 2:18],
    "norm of groups": lambda m, x: F.group_norm(x.reshape(-1, 16), 4).view(x.shape),
    "places that nothing uses": lambda m, x: (torch.arange(x.shape[1], device=x.device).sum(), x)[1],
    "places that only count": lambda m, x: x[:, torch.arange(x.shape[1], device=x.device)],
    "tokens one by one": lambda m, x: torch.stack([m.lin(x[:, t]) for t in range(x.shape[1])], 1),
    "chunks": lambda m, x: torch.cat([m.lin(part).softmax(-1) for part in x.split(3, 1)], 1),
    "chunks of one token": lambda m, x: torch.cat([m.lin(part).softmax(-1) for part in x.chunk(6, 1)], 1),
    "product by letters": lambda m, x: torch.einsum("btd,de->bte", x, m.lin.weight),
    "convolution of points": lambda m, x: F.conv1d(x.mT, m.lin.weight[..., None]).mT,
    "scale of its own": lambda m, x: attended(0.3, x),
    "experts of each token": lambda m, x: x * torch.zeros_like(x).scatter(-1, x.topk(2, -1).indices, 1.0),
    "Function": lambda m, x: Divided.apply(x, 3.0),
    "hook": lambda m, x: with_hook(0.5, x),
    "a limit that holds": lambda m, x: x if x.shape[1] <= 64 else 1 / 0,
    "a count of calls": lambda m, x: (m.count.add_(1), x)[1],
}  # fmt: skip


BETWEEN_LEGAL = ("views", "an expanded weight", "zeros beside", "experts of each token", "hook")
EXPECTED = ("computes differently, or with other numbers", "counts the tokens of a slice", "some tokens of a slice")


@pytest.mark.parametrize("name", USES)
def test_a_length_is_refused_however_it_is_used(name: str) -> None:
    assert any(words in refusal(USES[name]) for words in EXPECTED)


def after_each_other(m: Odd, x: Tensor, names: Iterable[str]) -> Tensor:
    for name in names:
        x = LEGAL[name](m, x)
    return x


@pytest.mark.parametrize("block", [Block, CutBlock])
def test_code_that_only_gives_shapes_by_its_length_is_not_refused(block: type[Block]) -> None:
    """All of it at once; if it is refused, the cases by themselves say which of them is."""
    names = LEGAL if block is Block else BETWEEN_LEGAL
    if refusal(functools.partial(after_each_other, names=names), block):
        assert {name: refusal(LEGAL[name], block) for name in names} == dict.fromkeys(names, "")
        pytest.fail("all of it together is refused")


BETWEEN = ("index of a weight", "sum of ones", "turns of a loop without tokens", "no gradient", "branch")


@pytest.mark.parametrize("name", BETWEEN)
def test_a_length_between_the_parts_that_tp_cuts_is_refused(name: str) -> None:
    assert "computes differently, or with other numbers, on a part of the tokens" in refusal(USES[name], CutBlock)
