"""A user's own model with a bug that no loss curve shows; `samestep.verify` finds it.

The model is cut over two ranks by a plan of its own. The plan forgets that the norm of each head is used on half of the
heads by each rank: its weight stays whole, so its gradient has to be summed, as `"blocks.*.head_norm": "sum"` would say.
The loss of the first step is right to the last digit.

    python examples/planted_bug.py            proves that it differs, and says where and why; exits 1
    python examples/planted_bug.py --mended   proves that it is the same; exits 0
"""

from __future__ import annotations

import functools
import sys

import torch
from torch import Tensor, nn

import samestep

WIDTH, HEADS, VOCABULARY = 32, 4, 64

PLAN = {
    "embed": "vocab",
    "blocks.*.q": "column",
    "blocks.*.k": "column",
    "blocks.*.v": "column",
    "blocks.*.out": "row",
    "head": "vocab",
}
MENDED = {**PLAN, "blocks.*.head_norm": "sum"}


class Decoder(nn.Module):
    def __init__(self, plan: dict[str, str]) -> None:
        super().__init__()
        self.tensor_plan = plan
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head_norm = nn.LayerNorm(WIDTH // HEADS)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (
            part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.q(normed), self.k(normed), self.v(normed))
        )
        mixed = nn.functional.scaled_dot_product_attention(self.head_norm(q), k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self.tokens = torch.randint(0, VOCABULARY, (64, 17), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index, :-1], "labels": self.tokens[index, 1:]}


def main() -> int:
    verdict = samestep.verify(
        samestep.Job(train={"global_batch": 8}),
        model=functools.partial(Decoder, MENDED if "--mended" in sys.argv else PLAN),
        dataset=Tokens(),
        layout="tp=2",
    )
    print(verdict.to_text())
    return 0 if verdict.proven else 1


if __name__ == "__main__":
    sys.exit(main())
