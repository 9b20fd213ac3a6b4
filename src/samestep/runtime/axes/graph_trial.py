"""The first run of a compiled graph: forward and backward on copies, before anything depends on it.

Compilers refuse some code only when its graph runs, or when its backward is compiled, which is after modules behind it have
run, and other ranks have been sent something. So each new graph runs once before its first call, on copies of what that is given:

    copies of the inputs ─► forward ─► gradients of zeros ─► backward          what fails here runs uncompiled

Nothing outside sees it: its masks drop nothing, its crossings send nothing, and the buffers that it writes are copies. What
it keeps is freed at its end; at most this is what the first backward of the step needs at once, and a copy of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from samestep.building.torch_seams import disable_current_modes
from samestep.randomness import graph_draws
from samestep.randomness.mask_source import MaskSource
from samestep.runtime.axes import rank_crossings
from samestep.trees import tensors_in


def run_once(graph: Callable[..., Any], inputs: Sequence[Any]) -> None:
    """Run a graph forward and backward on copies of the inputs of its first call.

    Raises:
        Exception: what the graph, or the compiler of its backward, raises.
    """
    # Within a checkpointed block the hooks outside would repeat that block in this backward.
    alone = saved_tensors_hooks(lambda kept: kept, lambda kept: kept)
    with torch.enable_grad(), disable_current_modes(), alone, graph_draws.running("", _DropsNothing()):
        results = [
            one
            for one in tensors_in(graph(*[_copy_of(one) if isinstance(one, Tensor) else one for one in inputs]))
            if one.requires_grad
        ]
        if results:
            torch.autograd.backward(results, [torch.zeros_like(one) for one in results])


def _copy_of(given: Tensor) -> Tensor:
    """Return a tensor with separate memory, which has the values, the strides and the place in a graph of another."""
    if (place := rank_crossings.trial_place(given)) is not None:
        return place
    values = given.detach()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(given.shape, given.stride(), strict=True))
    if not given.numel() or values.layout is not torch.strided:
        return values.clone().requires_grad_(given.requires_grad)
    flat = values.as_strided((extent,), (1,), given.storage_offset()).clone()
    copy = flat.as_strided(given.shape, given.stride())
    copy.requires_grad_(given.requires_grad)
    if given.is_leaf:
        return copy
    passed: Tensor = _Passed.apply(copy)  # what is no leaf may be written in place
    return passed


class _Passed(torch.autograd.Function):
    """The identity, whose result is no view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _DropsNothing(MaskSource):
    """Masks of the first run of a graph."""

    def drop_in_graph(
        self, x: Tensor, shape: torch.Size, p: float, what: str, mask: tuple[str, int, int], entries: dict[str, int]
    ) -> Tensor:
        """Return a mask that drops nothing."""
        return x.new_zeros(shape, dtype=torch.bool)
