"""How far roundings may go, wherever two computations of the same numbers are compared.

| what is computed twice | float64 | float32 | 16 bits |
| --- | --- | --- | --- |
| sums of a loss over a few samples, and over parts of them (`LIMITS_OF_SUMS`) | 1e-9 | 1e-5 | none |
| operations and forwards, on all samples and on parts of them (`limit_of_values`) | 1e-9 | 1e-4 | 3e-2 |
| outputs of a sample in a batch and alone, weights of two layouts (`allowance`) | measured | measured | measured |

Two orders of the same sums differ by about 1e-16 in float64, and a wrong sum by 1e-3 and more. Two numbers are compared relative to the
largest finite value expected, and sums of a loss at least to a hundredth of its count. Kernels add up the elements of another shape in another order, so the allowance of a sample that is run
alone is measured: 8 times the largest deviation of 8 forwards, in each of which the output of every module with weights is off by one rounding (`nudge_outputs`),
and what linear layers read too: where the terms of a product cancel, the sum is far smaller than the rounding of its terms.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from samestep.tracing.pending_logits import PendingLogits
from samestep.trees import tensors_in, tree_map_only

EXACT = 1e-9
"""The largest relative difference of two orders of the same sums in float64."""
LIMITS_OF_SUMS = {torch.float64: EXACT, torch.float32: 1e-5}
"""The largest relative difference of a few samples' sums; there is none for dtypes in which a wrong sum may differ by less than roundings."""
LEAST_MEAN = 1e-2
"""The least mean of a loss, its sum over its count, relative to which its sums are compared: terms of both signs may cancel, as in the
first step of GRPO, where sums are roundings of their terms."""
_VALUES = {torch.float64: EXACT, torch.float32: 1e-4}
NUM_PERTURBED = 8
"""The number of forwards, or of runs of `verify`, that measure what one rounding does."""

_ALLOWANCE_FACTOR = 8
"""The allowed deviation, over the largest one that is measured."""

_BEYOND = 1e30
"""The deviation of outputs that are not finite in one of two forwards."""


def limit_of_values(dtype: torch.dtype) -> float:
    """Return the largest relative difference of what an operation or a forward gives on parts, in a dtype."""
    return _VALUES.get(dtype, 3e-2)


def allowance(rounding: float, measured: float = 0.0) -> float:
    """Return the allowed deviation where one rounding of this size has changed numbers by `measured`."""
    return _ALLOWANCE_FACTOR * max(measured, rounding)


def floating_tensors(outputs: Any) -> Iterator[Tensor]:
    """Yield the floating tensors of outputs; for chunked logits, the hidden states from which they follow."""
    made = (leaf.made.hidden if isinstance(leaf, PendingLogits) else leaf for leaf in tensors_in(outputs))
    return (leaf for leaf in made if leaf.is_floating_point())


def rows_of(tensor: Tensor, dim: int, row: int, count: int) -> Tensor:
    """Return a copy of the rows of one of `count` samples."""
    each = tensor.shape[dim] // count
    return tensor.narrow(dim, row * each, each).detach().clone()


def samples_dim(whole: torch.Size, alone: torch.Size, count: int) -> int | None:
    """Return the one dimension in which a sample alone has a part of the micro-batch; None if there is none."""
    if len(whole) != len(alone):
        return None
    odd = [dim for dim, (all_rows, rows) in enumerate(zip(whole, alone, strict=True)) if all_rows != rows]
    return odd[0] if len(odd) == 1 and alone[odd[0]] * count == whole[odd[0]] else None


def relative_deviation(expected: Tensor, found: Tensor) -> float:
    """Return the ratio of max|difference| to the largest finite value expected; what is not finite must be the same."""
    a, b = expected.double(), found.double()
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return 0.0
    difference = (a - b).abs().masked_fill(same, 0.0)
    largest = a.abs().masked_fill(~a.isfinite(), 0.0).max().clamp_min(1e-300)
    return min(float((difference / largest).nan_to_num(_BEYOND, posinf=_BEYOND).max()), _BEYOND)


def largest_deviation(ours: list[Tensor] | None, theirs: list[Tensor] | None) -> float:
    """Return the largest relative difference of two forwards of the same samples."""
    pairs = zip(ours or [], theirs or [], strict=False)
    return max((relative_deviation(b, a) for a, b in pairs if a.shape == b.shape), default=0.0)


@contextmanager
def nudge_outputs(model: nn.Module, rounding: float, seed: int) -> Iterator[None]:
    """Let the output of every module with weights, and the input of linear layers, be off by one rounding inside, up or down."""

    def signs(leaf: Tensor) -> Tensor:
        # By arithmetic: a forward may draw no random numbers.
        index = torch.arange(leaf.numel(), device=leaf.device) + 7919 * (seed + 1)
        return (1 - 2 * ((index * 2654435761 >> 16) & 1)).to(leaf.dtype).view(leaf.shape)

    def off(leaf: Tensor) -> Tensor:
        return leaf * (1 + rounding / 2 * signs(leaf)) if leaf.is_floating_point() else leaf

    def nudge(_: nn.Module, args: Any, output: Any) -> Any:
        return tree_map_only(Tensor, off, output)

    def nudge_input(_: nn.Module, args: Any) -> Any:
        return tree_map_only(Tensor, off, args)

    parts = [module for module in model.modules() if module._parameters]
    handles = [module.register_forward_hook(nudge) for module in parts]
    handles += [module.register_forward_pre_hook(nudge_input) for module in parts if isinstance(module, nn.Linear)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
