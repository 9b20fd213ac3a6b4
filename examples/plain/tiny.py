"""The tiny language model that all files of this folder train, its data, and the same training by samestep.

python examples/plain/data_parallel.py      runs a file: its ranks, then samestep in the layout of the file
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.multiprocessing.spawn as spawn
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from samestep.job_keys import NumericsKeys

VOCABULARY, WIDTH, HEADS, TOKENS, SAMPLES, STEPS = 32, 32, 4, 16, 8, 3
LEARNING_RATE = 1e-2
Train = Callable[[int, int], list[float]]  # of the rank and the number of ranks


class Block(nn.Module):
    """Attention and an MLP, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        q, k, v = (split_heads(layer(normed)) for layer in (self.q, self.k, self.v))
        x = x + self.o(merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def split_heads(x: Tensor) -> Tensor:
    """[samples, tokens, width] -> [samples, heads, tokens, width of a head]."""
    return x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """The inverse of `split_heads`."""
    return x.transpose(1, 2).flatten(2)


class Tiny(nn.Module):
    """A decoder with two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(dtype: torch.dtype = torch.float64) -> Tiny:
    """The model, with the same initial weights on every rank."""
    torch.manual_seed(0)
    return Tiny().to(dtype)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step: tokens and the labels after them, [samples, tokens]."""
    data = torch.randint(VOCABULARY, (SAMPLES, TOKENS + 1), generator=torch.Generator().manual_seed(step))
    return data[:, :-1], data[:, 1:]


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum of the losses of all tokens; the count of the global batch divides it."""
    return F.cross_entropy(
        logits.flatten(0, 1).float() if logits.dtype.itemsize == 2 else logits.flatten(0, 1),
        labels.flatten(),
        reduction="sum",
    )


def optimizer(params: Iterable[Tensor]) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=LEARNING_RATE)


def by_samestep(layout: str, numerics: NumericsKeys) -> list[float]:
    """The losses of the same training by samestep in a layout; every rank calls it."""
    import samestep  # noqa: PLC0415 - what comes before needs torch alone

    job = samestep.Job(train={"global_batch": SAMPLES, "steps": STEPS}, numerics={"precision": "float64", **numerics})
    model = build(torch.float64 if job.numerics.precision == "float64" else torch.float32)
    run = samestep.parallelize(model, "cross_entropy", optimizer(model.parameters()), layout=layout, job=job)
    return [run.step(batch(step)).loss for step in range(STEPS)]


def main(train: Train, layout: str, ranks: int = 2, **numerics: Any) -> None:
    """Print the losses of a file's `train(rank, world)` beside the losses of samestep in the same ranks."""
    with tempfile.TemporaryDirectory() as folder:
        spawn.start_processes(_rank, (train, layout, ranks, numerics, folder), nprocs=ranks, start_method="fork")


def _rank(rank: int, train: Train, layout: str, ranks: int, numerics: Any, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    plain = train(rank, ranks)
    same = by_samestep(layout, numerics)
    if rank == 0:
        print(f"{Path(sys.argv[0]).stem:26} loss " + " ".join(f"{loss:.12f}" for loss in plain))
        print(f"{layout:26} loss " + " ".join(f"{loss:.12f}" for loss in same))
    dist.destroy_process_group()
