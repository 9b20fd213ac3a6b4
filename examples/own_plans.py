"""A module of your own that says itself how it is cut: `tensor_plan` and `expert_plan`, as docs/own-modules.md explains.

python examples/own_plans.py                       four layouts: the losses are those of one device
python examples/own_plans.py "dp=2 tp=2 ep=2"      another one
samestep inspect --set model.source=examples.own_plans:Decoder     what is cut, and why not the rest
samestep verify --set model.source=examples.own_plans:Decoder --layout "tp=2"
"""

from __future__ import annotations

import sys
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep

WIDTH, HEADS, NEURONS, EXPERTS, WORDS, LENGTH = 32, 4, 64, 4, 256, 16
LAYOUTS = ("tp=2", "tp=2 sequence_parallel", "dp=2 ep=2", "pp=2 microbatch=4")


class Attention(nn.Module):
    """q, k and v in one weight, an angle for each head, and a gate on what the heads have found."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gate, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        found = F.scaled_dot_product_attention(F.normalize(q, dim=-1), k, v, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2) * torch.sigmoid(self.gate(x)))


class Experts(nn.Module):
    """The weights of all experts along dimension 0; called with rows, two experts for each row, and their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, NEURONS) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, NEURONS, WIDTH) / NEURONS**0.5)

    def forward(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        found = torch.zeros_like(rows)
        for expert in range(len(self.up)):  # not EXPERTS: a rank of ep holds fewer
            weight = (weights * (chosen == expert)).sum(-1, keepdim=True)  # of the same shape whatever was chosen
            found = found + weight * (F.gelu(rows @ self.up[expert]) @ self.down[expert])
        return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.router, self.experts = Attention(), nn.Linear(WIDTH, EXPERTS), Experts()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        rows = self.second(x).flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        return x + self.experts(rows, chosen, weights).view_as(x)


class Decoder(nn.Module):
    tensor_plan: ClassVar[dict[str, str]] = {
        "words": "vocab",
        "blocks.*.attention.qkv": "qkv",  # each third by columns: a rank has the q, k and v of its heads
        "blocks.*.attention.gate": "column",  # the gates of the same features
        "blocks.*.attention.out": "row",  # a summand on each rank
        "head": "vocab",  # its logits stay cut, and the loss is computed from them
    }
    expert_plan: ClassVar[list[str]] = ["blocks.*.experts"]

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Sums(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences in which each word is the sum of the two before it."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = [index % 7, index % 5]
        while len(words) <= LENGTH:
            words.append((words[-1] + words[-2]) % WORDS)
        return {"input_ids": torch.tensor(words[:-1]), "labels": torch.tensor(words[1:])}


def losses(place: object, layout: str) -> list[float]:
    job = samestep.Job(
        train={"global_batch": 8, "steps": 5, "watch_every": 0},
        numerics={"precision": "float64"},
        run={"device": "cpu"},
    )
    run = samestep.parallelize(
        Decoder, "cross_entropy", lambda params: torch.optim.AdamW(params, lr=1e-2), layout=layout, job=job
    )
    return [run.step(batch).loss for batch in samestep.batches(Sums(), job)]


if __name__ == "__main__":
    ranks = {layout: samestep.Layout(layout).world_size for layout in ("dp=1", *(sys.argv[1:] or LAYOUTS))}
    found = {layout: samestep.launch(losses, (layout,), ranks=world) for layout, world in ranks.items()}
    for layout, ours in found.items():
        apart = max(abs(a - b) for a, b in zip(ours, found["dp=1"], strict=True))
        print(f"{layout:26} loss {ours[0]:.4f} to {ours[-1]:.4f}, at most {apart:.0e} from one device")
