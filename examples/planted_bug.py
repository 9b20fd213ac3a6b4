"""A user's own loss with a bug that no loss curve shows; `samestep.verify` finds it.

The loss is a mean over the tokens that count, as most are written. Ranks whose samples count different numbers of tokens
then weigh the same, though their tokens do not: the mean of means that most trainers had in their gradient accumulation
until 2024. A loss that gives its sum and its count is divided once, by the count of the whole step.

    python examples/planted_bug.py            proves that it differs, and says where and why; exits 1
    python examples/planted_bug.py --mended   proves that it is the same; exits 0
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

import samestep

WIDTH, VOCABULARY, LENGTH, IGNORED = 32, 64, 16, -100


class Model(nn.Module):
    """Predicts a token from the running mean of those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        x = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)[:, None]
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Answers(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Prompts with answers of different lengths; what belongs to a prompt counts nothing."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, VOCABULARY, (64, LENGTH + 1), generator=generator)
        self.prompts = torch.randint(1, LENGTH, (64,), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.tokens[index, 1:].clone()
        labels[: self.prompts[index]] = IGNORED
        return {"input_ids": self.tokens[index, :-1], "labels": labels}


def mean_loss(logits: Tensor, batch: dict[str, Any]) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()), 1


def summed_loss(logits: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    labels = batch["labels"]
    total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total, (labels != IGNORED).sum()


def main() -> int:
    verdict = samestep.verify(
        samestep.Job(train={"global_batch": 8}),
        model=Model,
        loss=summed_loss if "--mended" in sys.argv else mean_loss,
        dataset=Answers(),
        layout="dp=2",
    )
    print(verdict.to_text())
    return 0 if verdict.proven else 1


if __name__ == "__main__":
    sys.exit(main())
