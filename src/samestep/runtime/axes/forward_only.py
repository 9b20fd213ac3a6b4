"""Forwards without a backward: validation loss, outputs, and samples that are run once more.

They run without gradients, unless the model takes gradients within its own forward (a gradient penalty, an energy), which
then needs the graph of its operations. So whoever keeps something for a backward asks `has_backward`, and whoever must act
alike in every part of a forward, of which a model may run some without gradients, `is_forward_only`. A hook that the model's
code puts on the gradient of a tensor is one that is never called.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from samestep.building.over_samples import IGNORING

_NESTED = [0]
"""How many such forwards this process is in; autograd's threads run none."""


@contextmanager
def forward_only(*, takes_gradients: bool) -> Iterator[None]:
    """Run the forwards inside without a backward, and without gradients unless the model itself takes some. Code may put hooks on the
    gradients of tensors that have none here, and keep these gradients: torch refuses both.
    """
    register, retain = Tensor.register_hook, Tensor.retain_grad

    def register_hook(tensor: Tensor, hook: Any) -> Any:
        return register(tensor, hook) if tensor.requires_grad else RemovableHandle(OrderedDict())

    def retain_grad(tensor: Tensor) -> None:
        if tensor.requires_grad:
            retain(tensor)

    Tensor.register_hook, Tensor.retain_grad = register_hook, retain_grad  # type: ignore[method-assign, assignment]
    _NESTED[0] += 1
    try:
        with torch.set_grad_enabled(takes_gradients), IGNORING:
            yield
    finally:
        _NESTED[0] -= 1
        Tensor.register_hook, Tensor.retain_grad = register, retain  # type: ignore[method-assign]


def is_forward_only() -> bool:
    """Return whether no backward follows the forward that runs."""
    return bool(_NESTED[0])


def has_backward() -> bool:
    """Return whether a backward follows the operations that run; none follows those under the model's
    `torch.no_grad()`."""
    return torch.is_grad_enabled() and not is_forward_only()
