"""What a model keeps from one forward to the next, besides its weights, and a context in which it is as it was before.

    buffers              running statistics, queues, counters
    attributes           numbers, containers and tensors that a forward sets: `self.calls += 1`
    variables            what its code keeps outside of the modules (`tracing/reachable.py`)
    generators           the process-wide ones of torch, numpy and Python, and those that a module or a variable holds

Inside `ModelState.restored()` the model has the values that it had when the state was taken; afterwards it has again those
that it has now. So a forward inside leaves no trace but in the generators, which `unmoved_generators` puts back.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from samestep.tracing.snapshot import GENERATORS, KeptValues, state_of_generator


class ModelState:
    """The values of a model's buffers, attributes and variables."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kept = KeptValues(model, weights=False)

    @property
    def generators(self) -> list[Any]:
        """The generators that a module or a variable holds."""
        return [generator for generator, _ in self._kept.before.generators]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Give the model the values it had, inside; afterwards give it back what it holds now."""
        now = KeptValues(self._model, weights=False)
        try:
            self._kept.restore(generators=False)
            yield
        finally:
            now.restore(generators=False)


def weight_versions(model: nn.Module) -> list[Any]:
    """Return the versions and the norms of the weights that this rank holds: writing through `.data` leaves no version."""
    params = [param for param in model.parameters() if not param.is_meta]  # those of other stages are
    values = [getattr(param, "_local_tensor", param).detach() for param in params]
    values = [value for value in values if value.numel() and value.is_floating_point()]  # bytes are ours alone
    norms = torch.stack(torch._foreach_norm(values, 2.0, torch.float64)).nan_to_num(math.inf).tolist() if values else []
    return [*(param._version for param in params), *norms]


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
    put_back += [state_of_generator(value)[1] for value in held if isinstance(value, GENERATORS)]
    try:
        yield
    finally:
        for act in put_back:
            act()


def _set_numpy(state: Any) -> None:
    np.random.set_state(state)


def _kept(function: Callable[..., Any], *values: Any) -> Callable[[], Any]:
    return lambda: function(*values)
