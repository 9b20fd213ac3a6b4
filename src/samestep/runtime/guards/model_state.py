"""What a model keeps from one forward to the next, besides its weights, and a context in which it is as it was before.

    buffers              running statistics, queues, counters
    plain attributes     numbers, texts, containers and tensors that a forward sets: `self.calls += 1`
    generators           the process-wide ones of torch, numpy and Python, and those that a module holds

Inside `ModelState.restored()` the modules hold copies of the buffers and attributes that they had when the state was
taken; afterwards they hold again what they held, and no generator has moved. So a forward inside leaves no trace.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), tuple, torch.Size, torch.dtype)
_CONTAINERS = (list, dict, set, deque)
_OWN = frozenset(vars(nn.Module()))
"""What torch itself keeps in every module: weights, buffers, children, hooks."""


class ModelState:
    """Copies of the buffers and attributes of a model's modules."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        same: dict[int, Tensor] = {}
        self._buffers = [_copied(module._buffers, same) for module in self._modules]
        self._attributes = [_copied(_attributes_of(module), same) for module in self._modules]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Give the modules the values they had, inside; afterwards give them back what they hold now."""
        buffers = [dict(module._buffers) for module in self._modules]
        attributes = [_attributes_of(module) for module in self._modules]
        same: dict[int, Tensor] = {}  # what two modules share they share inside too
        with unmoved_generators(value for module in self._modules for value in vars(module).values()):
            try:
                self._set(
                    [_copied(held, same) for held in self._buffers], [_copied(held, same) for held in self._attributes]
                )
                yield
            finally:
                self._set(buffers, attributes)

    def _set(self, buffers: list[dict[str, Any]], attributes: list[dict[str, Any]]) -> None:
        for module, held, values in zip(self._modules, buffers, attributes, strict=True):
            module._buffers.clear()
            module._buffers.update(held)
            for name in _attributes_of(module).keys() - values.keys():
                del vars(module)[name]
            vars(module).update(values)


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes of kinds that can be copied: no modules, weights, functions or other objects."""
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _OWN
        and (
            isinstance(value, (*_PLAIN, *_CONTAINERS))
            or (isinstance(value, Tensor) and not isinstance(value, nn.Parameter))
        )
    }


def _copied(values: dict[str, Any], same: dict[int, Tensor]) -> dict[str, Any]:
    """Return copies of tensors and containers; `same` holds the copy of each tensor that several modules share."""

    def one(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in same:
                same[id(value)] = value.detach().clone()
            return same[id(value)]
        return copy.copy(value) if isinstance(value, _CONTAINERS) else value

    return {name: one(value) for name, value in values.items()}


@contextmanager
def unmoved_generators(held: Iterable[Any] = ()) -> Iterator[None]:
    """Put every random number generator back, afterwards: those of the process, and those among the objects `held`."""
    put_back: list[Callable[[], Any]] = [
        _kept(random.setstate, random.getstate()),
        _kept(_set_numpy, np.random.get_state()),
    ]
    put_back.append(_kept(torch.set_rng_state, torch.get_rng_state()))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        put_back.append(_kept(torch.cuda.set_rng_state, torch.cuda.get_rng_state()))
    for value in held:
        if isinstance(value, torch.Generator):
            put_back.append(_kept(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            put_back.append(_kept(value.setstate, value.getstate()))
        elif isinstance(value, np.random.RandomState):
            put_back.append(_kept(value.set_state, value.get_state()))
        elif isinstance(value, np.random.Generator):
            put_back.append(_kept(value.bit_generator.__setattr__, "state", value.bit_generator.state))
    try:
        yield
    finally:
        for act in put_back:
            act()


def _set_numpy(state: Any) -> None:
    np.random.set_state(state)


def _kept(function: Callable[..., Any], *values: Any) -> Callable[[], Any]:
    return lambda: function(*values)
