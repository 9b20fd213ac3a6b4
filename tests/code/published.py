"""Models with the structure of widely used published code, as our own small ones: language models that return their loss."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.building.model_loss import model_loss
from samestep.building.over_samples import whole_batch
from samestep.errors import JobError, UnprovenError
from tests.code.rows import Equal, Refused, entered, equal
from tests.code.vectors import VECTORS, sgd
from tests.code.vectors import loss as classes
from tests.laboratory import Code, job_of

VOCABULARY, LENGTH, WIDTH = 12, 8, 16
JOB = job_of(steps=3, train={"watch_every": 100})


class Words:
    """Tokens and the next ones under other names than `input_ids` and `labels`, with a number for each sample beside them."""

    def __init__(self, *names: str) -> None:
        draw = torch.Generator().manual_seed(3)
        self.tokens, self.names = torch.randint(VOCABULARY, (24, LENGTH + 1), generator=draw), names

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        one = self.tokens[index]
        values = {"idx": one[:-1], "targets": one[1:], "weight": one[0] / 10.0}
        return {name: values[name] for name in self.names}


def heads_of(x: Tensor, times: int = 4) -> Tensor:
    return x.unflatten(-1, (times, -1)).transpose(1, 2)


def scaled(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], -1)


# -- language models ---------------------------------------------------------------------------------


class DroppingBlock(nn.Module):
    """Queries, keys and values in one product; dropout of attention and of both residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH), nn.Dropout(0.2))
        self.resid_dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_of(one) for one in self.c_attn(self.ln_1(x)).split(WIDTH, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2 if self.training else 0, is_causal=True)
        x = x + self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view_as(x)))
        return x + self.mlp(self.ln_2(x))


class DroppingGPT(nn.Module):
    """Learned positions, a head that is tied to the embedding, and an optimizer that it configures itself; as in nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(LENGTH, WIDTH),
                "drop": nn.Dropout(0.1),
                "h": nn.ModuleList(DroppingBlock() for _ in range(2)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        place = torch.arange(idx.size(1), device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(place))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def by_dimensions(named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    decayed = [param for _, param in named if param.dim() >= 2]
    others = [param for _, param in named if param.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-3)


class RotaryBlock(nn.Module):
    """Norms without weights of queries and keys too, values of the tokens beside those of the features, and squared units."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate = nn.Linear(4, 4, bias=False) if index % 2 else None
        self.up, self.down = nn.Linear(WIDTH, 32, bias=False), nn.Linear(32, WIDTH, bias=False)

    def forward(self, x: Tensor, values: Tensor | None, turns: tuple[Tensor, Tensor]) -> Tensor:
        h = scaled(x)
        q, k, v = heads_of(self.q(h)), heads_of(self.k(h)), heads_of(self.v(h))
        if values is not None and self.gate is not None:
            v = v + 2 * self.gate(h[..., :4]).sigmoid().transpose(1, 2).unsqueeze(-1) * heads_of(values)
        y = F.scaled_dot_product_attention(scaled(turned(q, *turns)), scaled(turned(k, *turns)), v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(scaled(x))).square())


class RotaryGPT(nn.Module):
    """Rotary positions, numbers that weigh the residual and the first features of each block, and capped logits; as in nanochat."""

    def __init__(self, *, returns_loss: bool = True, returns_mean: bool = False) -> None:
        super().__init__()
        self.returns_loss, self.returns_mean = returns_loss, returns_mean
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.h = nn.ModuleList(RotaryBlock(index) for index in range(2))
        self.value_embeds = nn.ModuleDict({"1": nn.Embedding(VOCABULARY, WIDTH)})
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.resid_lambdas, self.x0_lambdas = nn.Parameter(torch.ones(2)), nn.Parameter(torch.full((2,), 0.1))
        angles = torch.outer(torch.arange(LENGTH, dtype=torch.float64), torch.tensor([1.0, 0.1], dtype=torch.float64))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        x = first = scaled(self.wte(idx))
        for index, block in enumerate(self.h):
            x = self.resid_lambdas[index] * x + self.x0_lambdas[index] * first
            key = str(index)
            values = self.value_embeds[key](idx) if key in self.value_embeds else None
            x = block(x, values, (self.cos[: idx.size(1)].to(x), self.sin[: idx.size(1)].to(x)))
        logits = 15 * torch.tanh(self.lm_head(scaled(x)) / 15)
        if targets is None or not self.returns_loss:
            return {"scores": logits, **({"mean": logits.square().mean()} if self.returns_mean else {})}
        loss = F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1), ignore_index=-1)
        return loss + 1e-3 * logits.square().mean() if self.returns_mean else loss


def summed(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    """Return the sum of a loss over the outputs of a model that is given `targets` and returns `scores`."""
    targets = batch["targets"]
    return F.cross_entropy(outputs["scores"].flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def times_mean(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    """Return the same sum times a mean over the samples and tokens that the model was given."""
    total, count = summed(outputs, batch)
    return total * outputs["mean"], count


def by_text(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    """Return a sum over texts, of which none is one over tokens."""
    each = F.cross_entropy(outputs["scores"].transpose(1, 2), batch["targets"], reduction="none")
    return each.mean(1).square().sum(), len(each)


class Waves(nn.Module):
    """Sines of steep products with weights in a list or by name, which amplify roundings; as in SIREN."""

    def __init__(self, *, by_name: bool) -> None:
        super().__init__()
        weights = [
            (torch.rand(16, 6) * 2 - 1) / 6,
            (torch.rand(16, 16) * 2 - 1) * 0.02,
            (torch.rand(3, 16) * 2 - 1) * 0.05,
        ]
        self.weights = (
            nn.ParameterDict(dict(zip("abc", weights, strict=True))) if by_name else nn.ParameterList(weights)
        )

    def forward(self, x: Tensor) -> Tensor:
        first, second, last = self.weights.values() if isinstance(self.weights, nn.ParameterDict) else self.weights
        return F.linear(torch.sin(90 * (torch.sin(90 * F.linear(x, first)) @ second.T)), last)


# -- rows --------------------------------------------------------------------------------------------


def adamw(named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for _, param in named], lr=0.01, eps=1e-3)


_TEXTS = functools.partial(Words, "idx", "targets")
_MODELS = {
    "nanoGPT": Code(DroppingGPT, data=_TEXTS, loss=model_loss(), optimizer=by_dimensions, job=JOB),
    "nanochat": Code(RotaryGPT, data=_TEXTS, loss=model_loss(), optimizer=adamw, job=JOB),
}
LIKE = {name: entered(f"like {name}", code) for name, code in _MODELS.items()}


def _scored(name: str, loss: Any, **returned: bool) -> str:
    model = functools.partial(RotaryGPT, returns_loss=loss is None, **returned)
    data = functools.partial(Words, "idx", "targets", "weight")
    return entered(
        f"words by other names, {name}", Code(model, data=data, loss=loss or model_loss(), optimizer=adamw, job=JOB)
    )


class PenalisedGPT(DroppingGPT):
    """Adds to its loss what is no sum over tokens that count."""

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits, loss = super().forward(idx, targets)
        return logits, None if loss is None else loss + 1e-3 * logits.square().mean()


PENALISED = entered(
    "words with a penalty", Code(PenalisedGPT, data=_TEXTS, loss=model_loss(), optimizer=adamw, job=JOB)
)
SCORES = _scored("a loss over the batch", whole_batch(summed))
_LAYOUTS = ("tp=2", "dp=2 zero=3", "pp=2 microbatch=2", "dp=2")

EQUAL = [
    *(
        Equal(layout, name, is_nightly=turn != index % 4)
        for index, name in enumerate(LIKE.values())
        for turn, layout in enumerate(_LAYOUTS)
    ),
    *(
        row
        for name, by_name in (("Waves by name", True), ("Waves of a list", False))
        for row in equal(
            entered(
                name,
                Code(
                    functools.partial(Waves, by_name=by_name),
                    data=VECTORS,
                    loss=classes,
                    optimizer=sgd,
                    job=job_of(steps=1),
                ),
            ),
            "dp=1 microbatch=2",
        )
    ),
    Equal("cp=2", SCORES),
    Equal("cp=2 exchange=ring", SCORES, is_nightly=True),
    *(Equal("cp=2", LIKE[name]) for name in ("nanoGPT", "nanochat")),
    Equal("cp=2 exchange=ring", _scored("a sum over tokens", summed)),
    Equal("cp=2 pp=2 microbatch=2", LIKE["nanochat"], is_nightly=True),
]
REFUSED = [
    Refused(
        "cp=2",
        _scored("a loss with more than the entropy", None, returns_mean=True),
        "a forward that returns the logits, and samestep.whole_batch",
    ),
    Refused("cp=2", PENALISED, "the mean of F.cross_entropy .* Use a forward that returns the logits", JobError),
    Refused(
        "cp=2",
        _scored("a mean of a slice", times_mean, returns_mean=True),
        "not a sum over the tokens .* computed from a rank's slice",
        UnprovenError,
        "loss",
    ),
    Refused(
        "cp=2",
        _scored("a mean of a slice over the batch", whole_batch(times_mean), returns_mean=True),
        "no dimension of samples and differs between parts",
        JobError,
    ),
    Refused("cp=2", _scored("a sum over texts", by_text), "not a sum over the tokens", UnprovenError, "loss"),
]
