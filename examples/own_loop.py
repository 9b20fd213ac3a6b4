"""Your own module, data and loop, in any layout: the five lines are marked.

python examples/own_loop.py                      two workers on this machine, weights replicated
python examples/own_loop.py "dp=4 zero=3"        four workers, everything sharded: the same losses
torchrun --nproc-per-node 2 examples/own_loop.py
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


def loss(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Sum over samples, and how many there are: samestep divides by the count of the whole step."""
    _, labels = batch
    return F.cross_entropy(outputs, labels, reduction="sum"), len(labels)


class Spirals(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Two spirals that no straight line parts."""

    def __init__(self, num_samples: int = 1000) -> None:
        turn = torch.linspace(0.5, 10.0, num_samples)
        self.labels = torch.arange(num_samples) % 2
        angle = turn + torch.pi * self.labels
        self.points = torch.stack([angle.cos(), angle.sin()], dim=1) * turn[:, None] / 10

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.labels[index]


def main(place: object = None, layout: str = "dp=2") -> None:
    dataset = Spirals()
    job = samestep.Job(train={"global_batch": 100, "steps": 300, "seed": 0})  # 1: what is computed
    run = samestep.parallelize(  # 2: where
        build, loss, lambda params: torch.optim.AdamW(params, lr=1e-2), layout=layout, job=job
    )
    for batch in samestep.batches(
        dataset, job
    ):  # 3: the same samples in every layout; Ctrl-C and SIGTERM end it behind a step
        report = run.step(batch)  # 4: forward, backward, reduction, update
        if report.step % 50 == 0 and run.place.rank == 0:
            print(f"step {report.step}: loss {report.loss:.6f}, gradient norm {report.grad_norm:.4f}")


if __name__ == "__main__":
    words = sys.argv[1] if len(sys.argv) > 1 else "dp=2"
    samestep.launch(main, (words,), ranks=samestep.Layout(words).world_size)  # 5: start the workers
