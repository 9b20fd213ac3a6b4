"""How far roundings may go, wherever two computations of the same numbers are compared.

| what is computed twice | float64 | float32 | 16 bits |
| --- | --- | --- | --- |
| sums of a loss over a few samples, and over parts of them (`LIMITS_OF_SUMS`) | 1e-9 | 1e-5 | none |
| operations and forwards, on all samples and on parts of them (`limit_of_values`) | 1e-9 | 1e-4 | 3e-2 |
| outputs of a sample in a batch and alone, weights of two layouts (`allowance`) | measured | measured | measured |

Two orders of the same sums differ by about 1e-16 in float64, and a wrong sum by 1e-3 and more. Two numbers are compared relative to the
largest finite value expected, and sums of a loss at least to a hundredth of its count. Kernels add up the elements of another shape in another order, so the allowance of a sample that is run
alone is measured: 8 times the largest deviation of 8 forwards, in each of which the output of every module with weights, and of every product and
sum, is off by one rounding (`nudge_outputs`), and the operands of products too: if the terms of a product cancel, the sum is far smaller than the
rounding of its terms.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from samestep.building.torch_seams import DispatchMode
from samestep.independence.dimension_maps import PRODUCTS
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

_BLOCK = 2**18
"""Elements that are compared at once, so that no copy of whole logits is made."""


def limit_of_values(dtype: torch.dtype) -> float:
    """Return the largest relative difference of what an operation or a forward gives on parts, in a dtype."""
    return _VALUES.get(dtype, 3e-2)


def allowance(rounding: float, measured: float = 0.0) -> float:
    """Return the allowed deviation where one rounding of this size has changed numbers by `measured`."""
    return _ALLOWANCE_FACTOR * max(measured, rounding)


def floating_tensors(outputs: Any) -> Iterator[Tensor]:
    """Yield the floating tensors of outputs; for chunked logits, the hidden states from which they follow."""
    tensors = (leaf.made.hidden if isinstance(leaf, PendingLogits) else leaf for leaf in tensors_in(outputs))
    return (leaf for leaf in tensors if leaf.is_floating_point())


def is_let_go(tensor: Tensor) -> bool:
    """Return whether a tensor has no elements any more, as a weight in outputs that zero=3 gathers for forwards alone."""
    return tensor.layout is torch.strided and tensor.numel() > 0 and not tensor.untyped_storage().nbytes()


def relative_deviation(expected: Tensor, actual: Tensor) -> float:
    """Return the ratio of max|difference| to the largest finite value expected; what is not finite must be the same."""
    if is_let_go(expected) or is_let_go(actual):
        return 0.0
    most, largest = 0.0, 0.0
    blocks = (tensor.detach().reshape(-1).split(_BLOCK) for tensor in (expected, actual))
    for a, b in zip(*blocks, strict=True):
        a, b = a.double(), b.double()
        same = (a == b) | (a.isnan() & b.isnan())
        largest = max(largest, float(a.abs().masked_fill(~a.isfinite(), 0.0).max()))
        if not bool(same.all()):
            difference = (a - b).abs().masked_fill(same, 0.0)
            most = max(most, float(difference.nan_to_num(math.inf, posinf=math.inf).max()))
    return min(most / max(largest, 1e-300), _BEYOND)


def largest_deviation(outputs: Any, expected: Any) -> float:
    """Return the largest relative difference of the outputs of two forwards of the same samples."""
    pairs = zip(floating_tensors(outputs), floating_tensors(expected), strict=False)
    return max((relative_deviation(b, a) for a, b in pairs if a.shape == b.shape), default=0.0)


@contextmanager
def nudge_outputs(model: nn.Module, rounding: float, seed: int) -> Iterator[None]:
    """Let the outputs of modules with weights, the operands and results of products, and sums be off by one rounding inside, up or down.

    Each call has signs of its own, so that roundings do not cancel in the difference of two equal models, as of a policy and its reference.
    """
    calls = itertools.count()

    def off(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf
        # By arithmetic: a forward may draw no random numbers.
        index = torch.arange(leaf.numel(), device=leaf.device) + 7919 * (seed + 1) + 104729 * next(calls)
        signs = (1 - 2 * ((index * 2654435761 >> 16) & 1)).to(leaf.dtype).view(leaf.shape)
        return leaf * (1 + rounding / 2 * signs)

    def nudge(_: nn.Module, args: Any, output: Any) -> Any:
        return tree_map_only(Tensor, off, output)

    def carry_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        is_product = func.overloadpacket in PRODUCTS or any(word in name for word in ("convolution", "linalg", "solve"))
        if func._schema.is_mutable or not (is_product or name in ("sum", "mean")):
            return func(*args, **kwargs)
        return tree_map_only(Tensor, off, func(*(tree_map_only(Tensor, off, args) if is_product else args), **kwargs))

    with ExitStack() as hooks:
        for module in model.modules():
            if module._parameters:
                hooks.enter_context(module.register_forward_hook(nudge))
        hooks.enter_context(DispatchMode(carry_out))
        yield
