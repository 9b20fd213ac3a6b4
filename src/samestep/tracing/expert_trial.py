"""A trial of a user's own module of experts: it must compute the sum of weight x expert(row), and nothing else.

Expert parallelism calls the module with one choice of weight 1 for each row, and adds up the weighted results itself. So
what a module does beyond that sum would be lost or come twice: weights that it normalises, a factor of the slot, a
residual, a norm of the sum, rows that influence each other.

    module(x, chosen, weights) == sum over slots k of weights[:, k] * module(x, chosen[:, k], 1)        on a few rows
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from samestep.building.families import FamilyFacts
from samestep.building.named_tensors import copied
from samestep.errors import LayoutError
from samestep.tracing.experts import call_again, called_with

_ROWS = 12
_LARGEST = 2**28
"""Elements of the largest experts that are tried."""


def check_experts(
    path: str, module: nn.Module, facts: FamilyFacts, call: tuple[Any, Any], value_of: Callable[[str], Tensor]
) -> None:
    """Refuse a module of experts, on the meta device, that does not compute the sum; `call` is how the model calls it.

    Raises:
        LayoutError: it computes something else, or cannot be run on a part of its experts.
    """
    args, named = call
    rows, chosen, _ = called_with(args, named)
    count = facts.experts_in(module)
    some = min(count, max(3, chosen.shape[1]))
    if some * sum(param.numel() for param in module.parameters()) // count > _LARGEST:
        return
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    x = drawn(_ROWS, rows.shape[1])
    order = torch.stack([torch.randperm(some, generator=generator) for _ in range(_ROWS)])
    picks = order[:, : chosen.shape[1]].to(chosen.dtype)
    picks[: _ROWS // 2] = picks[0]  # several rows of one expert: a limit on their number would show
    factors = drawn(_ROWS, chosen.shape[1]).abs() + 0.1
    works = "ep=1 works, and so does a module that adds weight x expert(row) and leaves the rest to the model around it"
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            tried = _real(path, module, facts, count, some, value_of, drawn)
            forward = tried.forward
            at_once = call_again(forward, args, named, x, picks, factors)
            slots = [
                call_again(forward, args, named, x, picks[:, k : k + 1], torch.ones_like(factors[:, :1]))
                for k in range(picks.shape[1])
            ]
            single = call_again(forward, args, named, x[-1:], picks[-1:, :1], torch.ones_like(factors[:1, :1]))
            expected = torch.stack([factors[:, k, None] * slot for k, slot in enumerate(slots)]).sum(0)
    except Exception as error:
        raise LayoutError(
            f"expert_plan: {path} cannot be run on {some} of its experts with one choice a row "
            f"({type(error).__name__}: {str(error).strip().partition(chr(10))[0]}), as expert parallelism runs it: {works}"
        ) from error
    if at_once.shape != expected.shape or not torch.allclose(
        at_once, expected, rtol=1e-6, atol=1e-9 * float(expected.abs().max())
    ):
        raise LayoutError(
            f"expert_plan: {path} does not compute the sum of weight x expert(row) from what it is given, so rows that are "
            f"sent to the ranks of their experts would come back as something else: {works}"
        )
    if not torch.allclose(single, slots[0][-1:], rtol=1e-6, atol=1e-9 * float(expected.abs().max())):
        raise LayoutError(
            f"expert_plan: the rows of {path} influence each other, and other rows come together on the ranks of their "
            f"experts: {works}"
        )


def _real(
    path: str,
    module: nn.Module,
    facts: FamilyFacts,
    count: int,
    some: int,
    value_of: Callable[[str], Tensor],
    drawn: Callable[..., Tensor],
) -> nn.Module:
    """Return a copy of a module on the meta device that holds a few experts, with values drawn."""
    made = copied(module).eval()
    facts.set_experts(made, some)
    for name, param in list(made.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        shape = (some, *param.shape[1:])
        value = drawn(*shape) / math.sqrt(max(1, shape[-1]))
        setattr(made.get_submodule(owner), leaf, nn.Parameter(value))
    for name, buffer in list(made.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        value = value_of(f"{path}.{name}" if path else name)
        if value.is_floating_point():
            value = value.double()
        if buffer.dim() and buffer.shape[0] == count:
            value = value[:some]
        setattr(made.get_submodule(owner), leaf, value)
    return made
