"""A hook on a gradient is linear if its operations are, whatever sizes a trial would draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import samestep
from samestep.independence.linear_hooks import is_linear
from samestep.job import Job

MASK = torch.arange(6) % 2
LOGGED: list[float] = []


def checked(gradient: Tensor) -> None:
    if not gradient.isfinite().all():
        raise ValueError("not finite")


LINEAR: list[Callable[[Tensor], Any]] = [
    lambda g: 0.5 * g / 2,
    lambda g: g * MASK,
    lambda g: g.masked_fill(MASK.bool(), 0.0),
    lambda g: torch.where(MASK.bool(), g, torch.zeros_like(g)),
    lambda g: g.nan_to_num(),
    lambda g: torch.where(torch.isfinite(g), g, 0.0),
    lambda g: torch.where(torch.isnan(g), torch.zeros_like(g), g),
    lambda g: g - g.mean(0, keepdim=True),
    lambda g: g @ torch.eye(6, dtype=g.dtype),
    lambda g: torch.cat([g[:2], torch.zeros_like(g[2:])]),
    lambda g: g.clone().mul_(2.0),
    lambda g: torch.zeros_like(g),
    lambda g: -g.flip(0),
    lambda g: LOGGED.append(g.norm().item()),
    checked,
    lambda g: LOGGED.extend(g.flatten().tolist()),
]
OTHERS: list[Callable[[Tensor], Any]] = [
    lambda g: g + 1e-3,
    lambda g: g - torch.ones_like(g),
    lambda g: g.masked_fill(MASK.bool(), 0.5),
    lambda g: torch.where(MASK.bool(), g, torch.full_like(g, 2.0)),
    lambda g: g * (g.norm() < 50),
    lambda g: torch.where(g.abs() > 50, 0, g),
    lambda g: g if g.norm() < 60 else 0 * g,
    lambda g: g if abs(g.numpy()).max() < 50 else 0 * g,
    lambda g: g if max(g.flatten().tolist()) < 50 else 0 * g,
    lambda g: g.clamp(-20, 20),
    lambda g: g * (100 / g.norm()).clamp(max=1.0),
    lambda g: g * torch.sigmoid(60 - g.norm()),
    lambda g: g.minimum(torch.full_like(g, 50.0)),
    lambda g: torch.nn.functional.hardtanh(g, -50.0, 50.0),
    lambda g: g.masked_fill(g > 50, 0.0),
    lambda g: g * g,
    lambda g: 1 / g,
    lambda g: g / g.abs().amax(),
    lambda g: g.long().to(g.dtype),
    lambda g: torch.nn.functional.softshrink(g, 1e-9),
    lambda g: g.cpu() * (g.norm().item() < 50),
    lambda g: None if g.norm().item() < 1e6 else 0 * g,
    lambda g: g.zero_() if float(g.abs().max()) > 3e5 else None,
    lambda g: checked(g) or (0 * g if g.norm().item() > 1e7 else None),
    lambda g: 2 * g if 40 < g.norm().item() < 60 else None,
    lambda g: torch.zeros_like(g) if g.isnan().any() else None,
]


@pytest.mark.parametrize("hook", LINEAR)
def test_factors_masks_and_sums_are_linear(hook: Callable[[Tensor], Any]) -> None:
    assert is_linear(hook, [torch.zeros(4, 6)])


@pytest.mark.parametrize("hook", OTHERS)
def test_what_compares_limits_or_looks_is_not(hook: Callable[[Tensor], Any]) -> None:
    assert not is_linear(hook, [torch.zeros(4, 6)])


def test_a_hook_has_the_state_of_one_call_a_step_if_the_number_of_labels_varies() -> None:
    """The backward divides by the count of the step, which may turn out to be another: it is run again, from the state of the hooks before."""
    seen: list[float] = []
    layer = torch.nn.Linear(3, 2)
    layer.weight.register_hook(lambda gradient: seen.append(float(gradient.norm())))
    job = Job(train={"global_batch": 4, "watch_every": 0})
    run = samestep.parallelize(
        layer, "cross_entropy", torch.optim.SGD(layer.parameters(), lr=0.1), layout="dp=1", job=job
    )
    for number in (4, 2, 3):
        labels = torch.tensor([0, 1, 0, 1]).masked_fill(torch.arange(4) >= number, -100)
        run.step((torch.randn(4, 3), labels))
    assert len(seen) == 3
