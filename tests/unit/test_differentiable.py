"""A gradient is summed over ranks in its own place only where nothing else holds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.runtime.axes import tensor
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
USES: list[tuple[Use, bool]] = [
    (one_product, True),
    (three_products, True),
    (a_hook_keeps_it, False),
    (a_hook_keeps_a_view, False),
    (another_sum_shares_it, False),
    (it_is_kept_as_a_gradient, True),
]
"""Each with whether nothing else holds the gradient: torch itself copies the gradient that `retain_grad` keeps."""


def gradients(rank: int, world: int, use: Use) -> tuple[bool, list[Tensor]]:
    """Return whether the sum was made in place, and the gradients that are left, those that were kept among them."""
    KEPT.clear()
    generator = torch.Generator().manual_seed(0)
    draw = lambda: nn.Parameter(torch.randn(3, 3, generator=generator, dtype=torch.float64))  # noqa: E731
    x, other, weight = draw(), draw(), draw()
    in_place: list[bool] = []
    summing = tensor._summing

    def noting(x: Tensor, group: Any, owner: str, is_alone: bool) -> Any:
        in_place.append(is_alone)
        return summing(x, group, owner, is_alone)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor, "_summing", noting)
        later = other * 1.0  # whose backward comes after that of the copy
        group = dist.group.WORLD
        assert group is not None
        use(tensor.copy(x * 1.0, group, "tried"), weight, later).square().sum().backward()
    kept = [one.grad if one.requires_grad else one for one in KEPT]
    found = [one for one in (x.grad, other.grad, weight.grad, *kept) if one is not None]
    return in_place == [True], [one.clone() for one in found]


@pytest.mark.parametrize(("use", "is_alone"), USES, ids=lambda value: getattr(value, "__name__", ""))
def test_only_a_gradient_that_nothing_holds_is_summed_in_its_place(use: Use, is_alone: bool) -> None:
    (alone, expected), *_ = pool(1).run(gradients, use)
    for in_place, found in pool(2).run(gradients, use):
        assert in_place is alone is is_alone
        summed, *rest = found
        assert torch.equal(summed, 2 * expected[0])
        for one, other in zip(rest, expected[1:], strict=True):
            assert torch.equal(one.view(other.shape), other)
