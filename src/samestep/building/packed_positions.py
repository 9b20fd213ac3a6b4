"""Whether positions that a model makes belong to packed documents, decided without waiting for a GPU where possible.

Transformers looks into the position numbers of every forward whether documents are packed, and the host waits for the answer.
Where transformers' own code makes one row of positions for several samples, it counts from 0 and looks at no sample, so the
answer of the first forward holds for all of that shape.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_MODULE, _FUNCTION = "transformers.masking_utils", "find_packed_sequence_indices"
_UNPACKED: weakref.WeakKeyDictionary[nn.Module, set[torch.Size]] = weakref.WeakKeyDictionary()
"""The shapes of one row of positions for several samples in which no documents are packed, by model."""


@contextmanager
def asked_once(model: nn.Module) -> Iterator[None]:
    """Ask once for each shape of positions that `model` makes itself, while the body of the `with` statement runs."""
    module: Any = sys.modules.get(_MODULE)
    asked = getattr(module, _FUNCTION, None)
    if asked is None or not type(model).__module__.startswith("transformers.models."):
        yield
        return
    setattr(module, _FUNCTION, functools.partial(_packed, asked, _UNPACKED.setdefault(model, set())))
    try:
        yield
    finally:
        setattr(module, _FUNCTION, asked)


def _packed(asked: Callable[[Tensor], Tensor | None], unpacked: set[torch.Size], positions: Tensor) -> Tensor | None:
    """Return what transformers' own function returns: None where no documents are packed."""
    is_one_row = positions.dim() == 2 and len(positions) > 1 and positions.stride(0) == 0
    if is_one_row and positions.shape in unpacked:
        return None
    found = asked(positions)
    if is_one_row and found is None:
        unpacked.add(positions.shape)
    return found
