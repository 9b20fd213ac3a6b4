"""Values that modules hold in buffers and attributes, noted so that they can be put back as often as asked: tensors, numbers, and plain containers of them.

Tensors and containers are put back in place, whoever else holds them. `KeptValues` (`snapshot.py`) is the counterpart for a whole model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

_DEPTH = 4
_NUMBERS = (str, bool, int, float, complex, type(None))
_ABSENT = object()


def can_be_kept(value: Any, depth: int = _DEPTH) -> bool:
    """Return whether a value is a tensor, a number, or a plain container of such values."""
    if isinstance(value, nn.Parameter):
        return False
    if type(value) in (list, tuple, deque, dict):
        items = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(can_be_kept(item, depth - 1) for item in items)
    return isinstance(value, Tensor) or type(value) in _NUMBERS


class KeptSlots:
    """The values of some buffers and attributes of modules at one moment."""

    def __init__(self, slots: Iterable[tuple[nn.Module, str]]) -> None:
        self._noted: list[tuple[dict[str, Any], str, Callable[[], Any]]] = []
        for module, name in slots:
            held: dict[str, Any] = module._buffers if name in module._buffers else vars(module)
            self._noted.append((held, name, _noted(held.get(name, _ABSENT))))

    @torch.no_grad()
    def restore(self) -> None:
        """Put the values back."""
        for held, name, put_back in self._noted:
            value = put_back()
            if value is _ABSENT:
                held.pop(name, None)
            else:
                held[name] = value


def _noted(value: Any) -> Callable[[], Any]:
    """Return a function that gives a value the numbers and items it has now, and returns it."""
    if isinstance(value, Tensor):
        return _noted_tensor(value)
    if type(value) is dict:
        items = {key: _noted(item) for key, item in value.items()}
        return lambda: _refilled(value, value.update, {key: put() for key, put in items.items()})
    if isinstance(value, list | deque):
        rows = [_noted(item) for item in value]
        return lambda: _refilled(value, value.extend, [put() for put in rows])
    if type(value) is tuple:
        parts = [_noted(item) for item in value]
        return lambda: tuple(put() for put in parts)
    return lambda: value


def _noted_tensor(value: Tensor) -> Callable[[], Tensor]:
    before = value.detach().clone()

    def put_back() -> Tensor:
        if value.shape == before.shape:
            value.data.copy_(
                before
            )  # a backward that has saved the tensor finds the same numbers once the forward has run again
        else:
            value.data = before.clone()
        return value

    return put_back


def _refilled(held: Any, fill: Callable[[Any], Any], items: Any) -> Any:
    held.clear()
    fill(items)
    return held
