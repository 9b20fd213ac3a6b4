"""Elements that a loss over all samples of a step keeps for each pair of samples, such as a matrix of their products.

The loss runs on the meta device with n, 2 n and 4 n samples. What autograd saves of it is a polynomial in the number of samples,
s(n) = a + b n + c n^2, of which c is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from samestep.building.over_samples import within
from samestep.state.snapshot import preserve_function
from samestep.trees import map_tensors


def pair_elements(
    loss: Callable[[Any, Any], Any],
    outputs: Any,
    batch: Any,
    rows_of: Callable[[Tensor], tuple[int, int] | None],
    number: int,
) -> int:
    """Return the elements that a loss keeps for each pair of samples; 0 where it does not run on the meta device."""

    def saved(times: int) -> int:
        def larger(tensor: Tensor) -> Tensor:
            shape, rows = list(tensor.shape), rows_of(tensor)
            if rows is not None and rows[0] >= 0:
                shape[rows[0]] *= times
            found = torch.empty(shape, dtype=tensor.dtype, device="meta")
            return found.requires_grad_(found.is_floating_point() or found.is_complex())

        sizes: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage()._cdata] = tensor.numel()
            kept.append(tensor)  # else another one may have its address
            return tensor

        kept: list[Tensor] = []
        with within(None), torch.enable_grad(), preserve_function(loss), saved_tensors_hooks(note, lambda one: one):
            result = loss(map_tensors(outputs, larger), map_tensors(batch, larger))
        del result
        return sum(sizes.values())

    try:
        few, twice, most = (saved(times) for times in (1, 2, 4))
    except Exception:  # the user's own code, which may look at values
        return 0
    return max(0, round(((most - twice) / 2 - (twice - few)) / (3 * number * number)))
