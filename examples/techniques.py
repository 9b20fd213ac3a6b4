"""Every technique in one script: the model, the data and the loop stay as they are, and one row of the table changes.

python examples/techniques.py              each technique beside one device: the losses are the same
python examples/techniques.py pipeline 3d  these two
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep

if TYPE_CHECKING:
    from samestep.job_keys import NumericsKeys

TECHNIQUES: dict[str, tuple[str, NumericsKeys]] = {  # the layout, and what the job says of its numerics
    "ddp": ("dp=2", {}),  # each rank has all weights and half of the samples
    "zero-1": ("dp=2 zero=1", {}),  # Adam's states are divided
    "fsdp": ("dp=2 zero=3", {}),  # weights, gradients and Adam's states are divided (ZeRO-3)
    "tensor": ("tp=2", {}),  # heads, neurons and vocabulary are divided
    "pipeline": ("pp=2 microbatch=2 schedule=1f1b", {}),  # one block on each rank, micro-batches pass through both
    "3d": ("dp=2 tp=2 pp=2 microbatch=2", {}),  # eight ranks
    "context": ("dp=1 cp=2", {}),  # each rank has half of every sequence
    "experts": ("dp=2 ep=2", {}),  # each rank has two of the four experts, and tokens travel to theirs
    "recompute": ("dp=2 recompute=full", {}),  # activations within a block are computed again in the backward
    "accumulation": ("dp=2 microbatch=1", {}),  # each rank adds up the gradients of its four samples, one by one
    "mixed-precision": ("dp=2", {"precision": "bf16"}),
    "batch-norm": ("dp=2", {"batch_norm_group": 8}),  # the statistics are those of eight samples, four on each rank
    "compressed": ("dp=2", {"compression": "int8", "replicas": 2}),  # a quarter of the bytes of gradients
    "fewer-exchanges": (
        "dp=2",
        {"exchange_every": 2, "replicas": 2},
    ),  # two steps apart, then the weights' moves are averaged
}
WIDTH, WORDS, LENGTH, EXPERTS = 32, 64, 16, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """The weights of all experts in one tensor each, dimension 0 counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / WIDTH)

    def forward(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(rows)
        for expert in range(self.num_experts):
            weight = (weights * (chosen == expert)).sum(1, keepdim=True)
            result = result + weight * (F.gelu(rows @ self.up[expert]) @ self.down[expert])
        return result


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        return self.experts(rows, chosen, weights).view_as(x)


class Block(nn.Module):
    def __init__(self, feed_forward: nn.Module) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.between, self.feed_forward = nn.LayerNorm(WIDTH), feed_forward

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.feed_forward(self.between(x))


class Decoder(nn.Module):
    """Predicts the next of 64 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(self.feed_forward()) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def feed_forward(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ExpertDecoder(Decoder):
    expert_plan = ("blocks.*.feed_forward.experts",)  # the modules that `ep` may divide

    def feed_forward(self) -> nn.Module:
        return Mixture()


class NormedDecoder(Decoder):
    """With batch norm over the tokens of a group of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.BatchNorm1d(WIDTH)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.scale(self.embed(input_ids).transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


MODELS = {"experts": ExpertDecoder, "batch-norm": NormedDecoder}


class Progressions(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences that go up by 1 to 4."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (index // 4 + (index % 4 + 1) * torch.arange(LENGTH + 1)) % WORDS
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


def main(place: object, model: type[nn.Module], layout: str, numerics: NumericsKeys) -> list[float]:
    job = samestep.Job(train={"global_batch": 8, "steps": 5}, numerics=numerics)
    run = samestep.parallelize(
        model, "cross_entropy", lambda params: torch.optim.AdamW(params, 1e-2), layout=layout, job=job
    )
    return [run.step(batch).loss for batch in samestep.batches(Progressions(), job)]


if __name__ == "__main__":
    alone: dict[str, list[float]] = {}  # the losses of one device, for each model and numerics
    if unknown := [name for name in sys.argv[1:] if name not in TECHNIQUES]:
        print(f"no technique is called {unknown[0]!r}; these are: {', '.join(TECHNIQUES)}", file=sys.stderr)
        sys.exit(2)
    for name in sys.argv[1:] or TECHNIQUES:
        layout, numerics = TECHNIQUES[name]
        model = MODELS.get(name, Decoder)
        key = f"{model.__name__} {numerics}"
        if key not in alone:
            alone[key] = samestep.launch(main, (model, "dp=1", numerics), ranks=1)
        spread = samestep.launch(main, (model, layout, numerics), ranks=samestep.Layout(layout).world_size)
        apart = max(abs(one - other) for one, other in zip(alone[key], spread, strict=True))
        print(f"{name:<15} {layout:<31} loss {spread[0]:.4f} to {spread[-1]:.4f}, at most {apart:.0e} from one device")
