"""Forwards without a backward: held-out loss, outputs, and samples that are run once more.

They run without gradients, unless the model takes gradients within its own forward (a gradient penalty, an energy), which
then needs the graph of its operations. So whoever keeps something for a backward asks `has_backward`, and whoever must act
alike in every part of a forward, of which a model may run some without gradients, `is_forward_only`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from samestep.building.over_samples import Ignored, keeping

_NESTED = [0]
"""How many such forwards this process is in; autograd's threads run none."""


@contextmanager
def forward_only(*, takes_gradients: bool) -> Iterator[None]:
    """Run the forwards inside without a backward, and without gradients unless the model itself takes some."""
    _NESTED[0] += 1
    try:
        with torch.set_grad_enabled(takes_gradients), keeping(Ignored()):
            yield
    finally:
        _NESTED[0] -= 1


def is_forward_only() -> bool:
    """Return whether no backward follows the forward that runs."""
    return bool(_NESTED[0])


def has_backward() -> bool:
    """Return whether a backward follows the operations that run; none follows those under the model's
    `torch.no_grad()`."""
    return torch.is_grad_enabled() and not is_forward_only()
