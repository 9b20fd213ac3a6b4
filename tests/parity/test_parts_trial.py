"""A loss that cannot be divided along its tensors is tried by forwards on parts that are read as such: equal, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samestep
from samestep.errors import UnprovenError
from samestep.job import Job
from tests.plain import assert_as_on_one_device
from tests.pool import pool

JOB = Job(train={"global_batch": 8, "steps": 2, "seed": 3}, numerics={"precision": "float64"}, run={"device": "cpu"})


class Boxes(torch.utils.data.Dataset[Any]):
    """Images with one to three boxes."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(index)
        return torch.randn(4, generator=drawn), torch.rand(1 + index % 3, 2, generator=drawn)


def together(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """Boxes of all images in one tensor, behind the number of their image."""
    images, boxes = zip(*samples, strict=True)
    rows = [torch.cat([torch.full((len(one), 1), float(i)), one], 1) for i, one in enumerate(boxes)]
    return torch.stack(images), torch.cat(rows)


def errors(outputs: Tensor, batch: Any) -> Tensor:
    return outputs[batch[1][:, 0].long()] - batch[1][:, 1:]


def squares(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    found = errors(outputs, batch).square()
    return found.sum(), found.numel()


def spread(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    """No sum over samples: the errors are compared with the mean of the batch."""
    found = errors(outputs, batch)
    return (found - found.mean(0)).square().sum(), found.numel()


class Curve(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.requires_grad_()
        return self.net(x), x


def slopes(outputs: tuple[Tensor, Tensor], batch: Any) -> Tensor:
    return torch.autograd.grad(outputs[0].sum(), outputs[1], create_graph=True)[0] + outputs[0]


def residual(outputs: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
    found = slopes(outputs, batch).square()
    return found.sum(), found.numel()


def coupled(outputs: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
    found = slopes(outputs, batch)
    return (found - found.mean(0)).square().sum(), found.numel()


def points() -> list[dict[str, Tensor]]:
    return [{"x": one} for one in torch.randn(16, 2, generator=torch.Generator().manual_seed(1)).double()]


def boxes() -> Any:
    return torch.utils.data.DataLoader(Boxes(), 8, collate_fn=together)


TABLE = torch.linspace(0, 1, 8).view(4, 2)
"""Centres of four classes: as many as a rank of two has samples."""


def with_table(samples: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
    images, boxes = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor([len(one) for one in boxes]), TABLE


def to_centres(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (outputs - batch[2].double()[batch[1]]).square().sum(), len(outputs)


KINDS: dict[str, Any] = {
    "table": (
        lambda: nn.Linear(4, 2),
        lambda: torch.utils.data.DataLoader(Boxes(), 8, collate_fn=with_table),
        to_centres,
    ),
    "boxes": (lambda: nn.Linear(4, 2), boxes, squares),
    "slopes": (Curve, points, residual),
    "coupled boxes": (lambda: nn.Linear(4, 2), boxes, spread),
    "coupled slopes": (Curve, points, coupled),
}


def trained(rank: int, world: int, layout: str, kind: str) -> Any:
    build, data, loss = KINDS[kind]
    torch.manual_seed(0)
    run = samestep.parallelize(build(), loss, lambda params: torch.optim.SGD(params, lr=0.1), layout=layout, job=JOB)
    try:
        losses = [run.step(batch).loss for batch in samestep.batches(data(), JOB)]
    except UnprovenError as error:
        return str(error)
    return losses, run.state_dict(on_every_rank=True)


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("dp=2", "table"),
        ("dp=2", "boxes"),
        ("dp=2 zero=3", "boxes"),
        ("dp=2 zero=1 microbatch=2", "slopes"),
        ("dp=2", "slopes"),
    ],
)
def test_what_adds_up_is_equal(layout: str, kind: str) -> None:
    assert_as_on_one_device(trained, layout, kind, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["coupled boxes", "coupled slopes"])
def test_what_does_not_is_refused(kind: str) -> None:
    for found in pool(2).run(trained, "dp=2", kind):
        assert "the loss" in found
        assert ". Use " in found


def test_gradients_through_the_model_need_whole_weights() -> None:
    for found in pool(2).run(trained, "dp=2 zero=3", "slopes"):
        assert "and zero=1" in found
