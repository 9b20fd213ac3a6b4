"""A model that was given as an instance: a run trains copies of its parameters, and a loss must not read the instance.

A loss that closes over the instance, as a penalty on its weights does, would read their first values in every step, and
its gradient would be lost. The first call of the loss is watched for that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from samestep.building.first_read import FirstRead
from samestep.errors import ModelError

Loss = Callable[[Any, Any], Any]


def watching(loss: Loss, model: object, module: nn.Module) -> Loss:
    """Return the loss; where the model was given as an instance, its first call must not read the instance's parameters.

    Nor may it read attributes of the instance that a forward of `module`, which the run trains, has set.

    Raises:
        ModelError: the returned function: it reads one.
    """
    if not isinstance(model, nn.Module):
        return loss
    stale = [(name, param) for name, param in model.named_parameters() if not param.is_meta]
    watched = False

    @functools.wraps(loss)
    def first_watched(outputs: Any, batch: Any) -> Any:
        nonlocal watched
        if watched:
            return loss(outputs, batch)
        watched = True
        with FirstRead(stale) as reading, _read_attributes(model) as read:
            found = loss(outputs, batch)
        if name := _set_by_forward(read, model, module):
            raise ModelError(
                f"the loss reads {name} of the model instance that was given, and a run's forward sets it in a module of its own: "
                "the loss would see the first value in every step; a forward that returns what the loss needs works"
            )
        if reading.name:
            raise ModelError(
                f"the loss reads {reading.name} of the model instance that was given, and a run trains parameters of its own: "
                "the loss would see the first values in every step; a forward that returns what the loss needs of the weights "
                "works, and so does weight_decay"
            )
        return found

    return first_watched


@contextmanager
def _read_attributes(model: nn.Module) -> Iterator[set[tuple[str, str]]]:
    """Yield the attributes of a model's modules that are read inside: a module's path and the attribute's name."""
    read: set[tuple[str, str]] = set()
    classes = {part: type(part) for part in model.modules()}
    for path, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            continue
        part.__class__ = _noting(type(part), path, read)
    try:
        yield read
    finally:
        for part, kind in classes.items():
            part.__class__ = kind


def _noting(kind: type[nn.Module], path: str, read: set[tuple[str, str]]) -> type[nn.Module]:
    def noted(self: nn.Module, name: str) -> Any:
        read.add((path, name))
        return kind.__getattribute__(self, name)

    try:
        return type(kind.__name__, (kind,), {"__getattribute__": noted, "__module__": kind.__module__})
    except Exception:  # a class may forbid what inherits from it
        return kind


def _set_by_forward(read: set[tuple[str, str]], model: nn.Module, module: nn.Module) -> str:
    """Return the first of the attributes read that the run's module holds with another value; empty if none."""
    theirs, ours = dict(model.named_modules()), dict(module.named_modules())
    for path, name in sorted(read):
        if path not in ours or name == "training":
            continue
        values = [{**vars(part), **part._buffers} for part in (theirs[path], ours[path])]
        if any(name in one for one in values) and not _is_same(*(one.get(name) for one in values)):
            return f"{path}.{name}".lstrip(".")
    return ""


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool((one.to(other) == other).all())
    plain = (bool, int, float, str, Tensor, type(None))
    return not (isinstance(one, plain) or isinstance(other, plain)) or (type(one) is type(other) and one == other)
