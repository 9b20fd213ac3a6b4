"""Values that modules hold in buffers and attributes, noted so that they can be put back as often as asked: tensors, numbers, and plain containers of them.

Tensors and containers are put back in place, whoever else holds them. `KeptValues` (`snapshot.py`) is the counterpart for a whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from samestep.trees import noted

_ABSENT = object()


class KeptSlots:
    """The values of some buffers and attributes of modules at one moment."""

    def __init__(self, slots: Iterable[tuple[nn.Module, str]]) -> None:
        self._noted: list[tuple[dict[str, Any], str, Callable[[], Any]]] = []
        for module, name in slots:
            held: dict[str, Any] = module._buffers if name in module._buffers else vars(module)
            self._noted.append((held, name, noted(held.get(name, _ABSENT))))

    @torch.no_grad()
    def restore(self) -> None:
        """Put the values back."""
        for held, name, put_back in self._noted:
            value = put_back()
            if value is _ABSENT:
                held.pop(name, None)
            else:
                held[name] = value
