"""The sum of a gradient over ranks is a tensor of its own: what else holds the gradient stays as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.runtime.axes.rank_crossings import moved
from tests.pool import pool

KEPT: list[Tensor] = []


def one_product(copied: Tensor, weight: Tensor, other: Tensor) -> Tensor:
    return copied @ weight


def three_products(copied: Tensor, weight: Tensor, other: Tensor) -> Tensor:
    return copied @ weight + copied @ weight.T + copied @ weight


def a_hook_keeps_it(copied: Tensor, weight: Tensor, other: Tensor) -> Tensor:
    copied.register_hook(KEPT.append)
    return copied @ weight


def a_hook_keeps_a_view(copied: Tensor, weight: Tensor, other: Tensor) -> Tensor:
    copied.register_hook(lambda gradient: KEPT.append(gradient.view(-1)))
    return copied @ weight


def another_sum_shares_it(copied: Tensor, weight: Tensor, other: Tensor) -> Tensor:
    return (copied + other) @ weight


def it_is_kept_as_a_gradient(copied: Tensor, weight: Tensor, other: Tensor) -> Tensor:
    copied.retain_grad()
    KEPT.append(copied)
    return copied @ weight


Use = Callable[[Tensor, Tensor, Tensor], Tensor]
USES: list[Use] = [
    one_product, three_products, a_hook_keeps_it, a_hook_keeps_a_view, another_sum_shares_it, it_is_kept_as_a_gradient
]  # fmt: skip


def gradients(rank: int, world: int, use: Use) -> list[Tensor]:
    """Return the gradients that are left, those that were kept among them."""
    KEPT.clear()
    generator = torch.Generator().manual_seed(0)
    draw = lambda: nn.Parameter(torch.randn(3, 3, generator=generator, dtype=torch.float64))  # noqa: E731
    x, other, weight = draw(), draw(), draw()
    later = other * 1.0  # whose backward comes after that of the copy
    group = dist.group.WORLD
    assert group is not None
    use(moved(x * 1.0, group, "tried", "keep", "sum"), weight, later).square().sum().backward()
    kept = [one.grad if one.requires_grad else one for one in KEPT]
    return [tensor.clone() for tensor in (x.grad, other.grad, weight.grad, *kept) if tensor is not None]


@pytest.mark.parametrize("use", USES, ids=lambda value: value.__name__)
def test_the_sum_of_a_gradient_changes_no_tensor_that_something_holds(use: Use) -> None:
    expected, *_ = pool(1).run(gradients, use)
    for summed, *rest in pool(2).run(gradients, use):
        assert torch.equal(summed, 2 * expected[0])
        for one, other in zip(rest, expected[1:], strict=True):
            assert torch.equal(one.view(other.shape), other)
