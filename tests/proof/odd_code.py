"""Models, losses, optimizers and data as people write them: the code of the cases in `reproductions.py`."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from tests.parts import Words

# -- data ------------------------------------------------------------------------------------------


class Tokens:
    """Sequences of 16 tokens with the next token as label."""

    def __init__(self) -> None:
        self.ids = torch.randint(0, 64, (64, 17), generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": self.ids[index, :-1], "labels": self.ids[index, 1:]}


class Vectors(Tokens):
    """Vectors of six numbers in three classes."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(64, 6, generator=generator)
        self.y = torch.randint(0, 3, (64,), generator=generator)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


class ShuffledStream(torch.utils.data.IterableDataset[Any]):
    """Vectors that are shuffled within a buffer, which the state of the stream lacks."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        buffer: list[Any] = []
        while self.at < 64:
            buffer.append(Vectors()[self.at])
            self.at += 1
            if len(buffer) == 6:
                yield buffer.pop(self.at % 6)
        yield from buffer

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class MaskedTokens(Tokens):
    def __getitem__(self, index: int) -> Any:
        return {**super().__getitem__(index), "attention_mask": (self.ids[index, :-1] % 3 > 0).float()}


class Triples(Vectors):
    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index], self.x[-index] * 2


class Augmented(Vectors):
    def __getitem__(self, index: int) -> Any:
        return self.x[index] + 0.1 * torch.randn(6), self.y[index]


class Lengths(Tokens):
    """Samples of two lengths; a batch has that of its first one."""

    def read(self, indices: Any) -> Any:
        rows = torch.randint(0, 64, (64, 65), generator=torch.Generator().manual_seed(5))[torch.as_tensor(indices)]
        rows = rows[:, : (2 if int(indices[0]) % 2 else 64) + 1]
        return {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}


# -- losses ----------------------------------------------------------------------------------------


def contrastive(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    """Every sample against all others of the batch."""
    z = F.normalize(outputs, dim=-1)
    return F.cross_entropy(z @ z.T / 0.5, torch.arange(len(z)), reduction="sum"), len(z)


def weighted_loss(outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    weights = 1 + batch[0][:, 0].abs()
    return (F.cross_entropy(outputs, batch[1], reduction="none") * weights).sum(), weights.sum()


# -- optimizers ------------------------------------------------------------------------------------


def sgd(params: list[Tensor]) -> Any:
    return torch.optim.SGD(params, lr=0.5)


def fast_sgd(params: list[Tensor]) -> Any:
    return torch.optim.SGD(params, lr=5.0)


def adamw(params: list[Tensor]) -> Any:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, eps=1e-3)


class Lars(torch.optim.Optimizer):
    """A trust ratio for what has two dimensions, none for norms and biases."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in _params(self):
            p.add_(p.grad * (0.01 * p.norm() / p.grad.norm() if p.ndim > 1 else 1.0), alpha=-1.0)


class LateRule(Lars):
    """Elementwise for five steps, as Shampoo's start_preconditioning_step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in _params(self):
            self.state[p]["step"] = step = self.state[p].get("step", 0) + 1
            p.add_(p.grad / (p.grad.norm() if step > 5 else 1.0), alpha=-0.1)


class Noisy(Lars):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in _params(self):
            p.add_(p.grad + 0.1 * torch.randn_like(p), alpha=-0.1)


class ScheduleFree(Lars):
    """Counts its steps in the groups."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        torch.optim.Optimizer.__init__(self, params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / group["k"])


def _params(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    return (p for group in optimizer.param_groups for p in group["params"])


def by_size(params: list[Tensor]) -> Any:
    large, small = [p for p in params if p.numel() > 700], [p for p in params if p.numel() <= 700]
    return torch.optim.SGD([{"params": large, "lr": 0.5}, {"params": small, "lr": 0.01}], lr=0.1)


def by_tag(params: list[Tensor]) -> Any:
    tagged = [p for p in params if getattr(p, "_no_weight_decay", False)]
    others = [p for p in params if not getattr(p, "_no_weight_decay", False)]
    return torch.optim.SGD([{"params": tagged, "lr": 5.0}, {"params": others}], lr=0.5)


def over_others(params: list[Tensor]) -> Any:
    return torch.optim.SGD(nn.Linear(6, 3).parameters(), lr=0.5)


# -- models of vectors -----------------------------------------------------------------------------


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))


def hooked() -> nn.Module:
    model = net()
    for index in (0, 2):
        model[index].weight.register_hook(lambda gradient: 0.25 * gradient)
    return model


def tagged() -> nn.Module:
    model = net()
    model[0].weight._no_weight_decay = True
    return model


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(torch.tanh(self.first(x))))


class Capacity(TwoLayers):
    """A quarter of the batch's rows goes through a path of its own."""

    def between(self, x: Tensor) -> Tensor:
        chosen = x.sum(-1).topk(max(1, len(x) // 4)).indices
        return x.index_add(0, chosen, x[chosen] ** 2)


class Sorted(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return super().forward(x[order])[order.argsort()]


class Dropout(TwoLayers):
    rate = 0.3

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(self.rate)

    def between(self, x: Tensor) -> Tensor:
        return self.drop(x)


class DropoutOnTwoViews(Dropout):
    def forward(self, x: Tensor) -> Tensor:
        a, b = super().forward(torch.cat([x, -x])).chunk(2)
        return a - b


class NumpyNoise(TwoLayers):
    def between(self, x: Tensor) -> Tensor:
        return x * float(1 + np.random.rand())


class Unread(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(16))

    def between(self, x: Tensor) -> Tensor:
        before = self.queue.clone()
        self.queue.copy_(x.detach()[0])
        return x + before


class Count(nn.Linear):
    """Anneals by its calls."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.k = 0

    def forward(self, x: Tensor) -> Tensor:
        self.k += 1
        return torch.tanh(super().forward(x)) * (1 + 0.1 * self.k)


class Forced(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.copy_(F.normalize(self.weight, dim=1))
        return F.linear(x, 1.5 * F.normalize(self.weight, dim=1), self.bias)


def forced() -> nn.Module:
    return nn.Sequential(Forced(6, 16), nn.Tanh(), Forced(16, 3))


class Teacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 3), nn.Linear(6, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x) + 0.5 * self.teacher(x)


@torch.no_grad()
def follow_student(run: Any) -> None:
    for mine, theirs in zip(run.model.teacher.parameters(), run.model.student.parameters(), strict=True):
        mine.lerp_(theirs, 0.5)


def lower_rate(run: Any) -> None:
    for group in run.updater.optimizer.param_groups:
        group["lr"] *= 0.7


class ThirdPart(TwoLayers):
    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        return super().forward(x if other is None else x + other)


# -- models of tokens ------------------------------------------------------------------------------


def plain_block() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh())


class Blocks(Words):
    """Four blocks, or others."""

    def __init__(self, kind: Callable[[], nn.Module] | None = None, number: int = 4) -> None:
        super().__init__(*[kind or plain_block] * number, width=16, entries=64)


def of(kind: Callable[..., nn.Module], *args: Any) -> Callable[[], nn.Module]:
    """Return the build function of a model with blocks of a kind."""
    return functools.partial(Blocks, functools.partial(kind, *args))


class SumOfStates(Blocks):
    def through(self, x: Tensor) -> Tensor:
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1]))
        return torch.stack(states).sum(0)


class Stream(nn.Module):
    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.a, self.dtype = nn.Linear(16, 16), dtype

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(self.a.weight.dtype)
        return (y + torch.tanh(self.a(y))).to(self.dtype) if self.dtype else x + torch.tanh(self.a(y)).float()


class Streamed(Blocks):
    """A residual stream in a dtype of its own."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__(functools.partial(Stream, dtype))

    def through(self, x: Tensor) -> Tensor:
        return super().through(x).to(self.head.weight.dtype)


class TwoUsesBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.up = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(F.gelu(self.mix(x) + F.linear(torch.tanh(x), self.mix.weight)))


class KeywordBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.a(input=x))


class AutocastBlock(KeywordBlock):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x + torch.tanh(self.a(x))


class Spare(Blocks):
    def __init__(self) -> None:
        super().__init__(number=2)
        self.spare = nn.Linear(16, 16)


def pruned() -> nn.Module:
    """Blocks that compute their weights from others in a hook before each forward."""
    made = Blocks()
    for block in made.blocks:
        for part in block.modules():
            if isinstance(part, nn.Linear):
                prune.l1_unstructured(part, "weight", 0.5)
    return made


class SpareBesideRoot(Spare):
    """A weight of the root's own stands beside the unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.ones(16, 16))

    def through(self, x: Tensor) -> Tensor:
        x = x + self.positions
        for block in self.blocks:
            x = x + block(x)
        return x


def checkpointing_gpt2() -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "gpt2", vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    config.use_cache = False
    model = AutoModelForCausalLM.from_config(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer versions call it activation_checkpointing_enable
        model.gradient_checkpointing_enable()
    return model


class Reentrant(Blocks):
    reentrant = True

    def __init__(self) -> None:
        super().__init__(number=1)
        self.drop = nn.Dropout(0.3)

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.drop(self.blocks[0](x)))

    def through(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Embedded(nn.Module):
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 16, **self.options), nn.Linear(16, 64)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embed(input_ids))


class Blockless(Embedded):
    """More classes than tokens, so that the loss knows which dimension of the logits has the classes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 80)


class KeywordBatch(Blocks):
    def forward(self, **batch: Tensor) -> Tensor:
        x = self.embed(batch["input_ids"])
        if "attention_mask" in batch:
            x = x * batch["attention_mask"][..., None].to(x.dtype)
        return self.head(self.blocks[0](x))


class CountBlock(Count):
    def __init__(self) -> None:
        super().__init__()
        del self.k
        self.register_buffer("k", torch.zeros(1))


# -- code between tokens and between features ------------------------------------------------------


class Planned(Blocks):
    """Two blocks around a part, with a plan of how to cut it."""

    tensor_plan: ClassVar[dict[str, str]] = {"blocks.*.ffn.up": "column", "blocks.*.ffn.down": "row"}

    def __init__(self, inner: Callable[[], nn.Module], block: type[TokenBlock] | None = None) -> None:
        super().__init__(lambda: (block or TokenBlock)(inner()), 2)


def planned(inner: Callable[[], nn.Module], *block: type[TokenBlock]) -> Callable[[], nn.Module]:
    return functools.partial(Planned, inner, *block)


class FeedForward(nn.Module):
    width = 32

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(self.width, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class TokenBlock(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.ffn = inner

    def tokens(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        return x + self.ffn(x)


class ConvolutionBlock(TokenBlock):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.conv = nn.Conv1d(16, 16, 3, groups=16)

    def tokens(self, x: Tensor) -> Tensor:
        return x + self.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)


class LengthBlock(TokenBlock):
    def tokens(self, x: Tensor) -> Tensor:
        return x * (1.5 if x.shape[1] > 8 else 0.5)


class NormalisedFeedForward(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.normalize(self.up(x).relu(), dim=-1))


class OwnAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in "qkvo")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class LogProbabilities(Planned):
    tensor_plan: ClassVar[dict[str, str]] = {"head": "vocab"}

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.log_softmax(super().forward(input_ids), -1)


class OwnHeads(Planned):
    tensor_plan: ClassVar[dict[str, str]] = {
        **{f"blocks.*.ffn.{name}": "column" for name in "qkv"},
        "blocks.*.ffn.o": "row",
    }


# -- experts ---------------------------------------------------------------------------------------


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.w = nn.Parameter(torch.randn(4, 16, 16) * 0.3)

    def made(self, rows: Tensor, expert: int) -> Tensor:
        return F.gelu(rows @ self.w[expert])

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(self.num_experts):
            row, slot = (chosen == expert).nonzero(as_tuple=True)
            out = out.index_add(0, row, self.made(x[row], expert) * weights[row, slot, None])
        return out


class WeighingExperts(Experts):
    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, chosen, weights / weights.sum(-1, keepdim=True))


class DividingExperts(Experts):
    def made(self, rows: Tensor, expert: int) -> Tensor:
        h = rows @ self.w[expert]
        return h / h.norm(dim=-1, keepdim=True)


class LoopedExperts(nn.Module):
    expert_plan: ClassVar[list[str]] = ["experts"]
    kind: ClassVar[type[Experts]] = Experts
    chosen_from = 4

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router, self.head = nn.Embedding(64, 16), nn.Linear(16, 4), nn.Linear(16, 64)
        self.experts = self.kind()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        rows = x.flatten(0, 1)
        scores = self.router(rows).softmax(-1) * (torch.arange(4, device=x.device) < self.chosen_from)
        weights, chosen = scores.topk(2)
        return self.head(x + self.combined(rows, chosen, weights).view_as(x))

    def combined(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return self.experts(rows, chosen, weights)


class OwnWeighing(LoopedExperts):
    kind = WeighingExperts


class NoRows(LoopedExperts):
    kind = DividingExperts
    chosen_from = 2


class OtherOrder(LoopedExperts):
    def combined(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return self.experts(weights=weights, x=rows, chosen=chosen)


# -- tasks, lengths and closures -------------------------------------------------------------------


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
