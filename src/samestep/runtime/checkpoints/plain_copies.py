"""Copies of a run's model that a loop keeps and calls itself, such as an `AveragedModel` or a snapshot for a league.

    with run.gathered() as model:
        average = AveragedModel(model)          copy.deepcopy(model), or of a part of it
        torch.save(model, "model.pt")           pickle.dumps(model), or of a part of it

What a layout has put around the modules belongs to the run, and would send messages in each call of a copy. So a copy is built anew, as
the model was first, and takes the whole weights, the buffers and the plain attributes that stand in the run's model: it is a module
of torch alone, on every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, SupportsIndex

import torch
from torch import nn

from samestep.building.initial_values import fill_rest
from samestep.building.several_models import as_given
from samestep.examination.examine import build_blueprint
from samestep.runtime.held_assembly import HeldAssembly

_PLAIN = (bool, int, float, str, type(None))
"""Types of the attributes that a copy takes."""


@contextmanager
def allowed(model: nn.Module, own: HeldAssembly) -> Iterator[None]:
    """Let `copy.deepcopy` and pickle of a model that has whole weights, or of its parts, give plain modules inside."""
    parts = dict(model.named_modules())
    for path, part in parts.items():
        part.__dict__["__deepcopy__"] = functools.partial(_copy, model, path, own)
        part.__dict__["__reduce_ex__"] = functools.partial(_reduce, model, path, own)
    try:
        yield
    finally:
        for part in parts.values():
            part.__dict__.pop("__deepcopy__", None)
            part.__dict__.pop("__reduce_ex__", None)


def _copy(model: nn.Module, path: str, own: HeldAssembly, memo: dict[int, Any]) -> nn.Module:
    """Return a plain copy of the part of a model at a path, and note in `memo` the copies of all parts."""
    whole = _plain(model, own)
    for name, part in model.named_modules():
        memo[id(part)] = whole.get_submodule(name)
    memo[id(model)] = as_given(whole)
    found: nn.Module = memo[id(model.get_submodule(path))]
    return found


def _reduce(model: nn.Module, path: str, own: HeldAssembly, protocol: SupportsIndex) -> str | tuple[Any, ...]:
    """Return what pickle writes of a plain copy of the part of a model at a path.

    From protocol 2 on, pickle refuses an instance of another class than the object's, which FSDP2 derives from the module's.
    """
    return _copy(model, path, own, {}).__reduce_ex__(min(1, protocol.__index__()))


@torch.no_grad()
def _plain(model: nn.Module, own: HeldAssembly) -> nn.Module:
    """Return the model as it was built, with the values that stand in the run's."""
    plan = build_blueprint(own.source, own.job)
    held, made = dict(model.named_parameters(remove_duplicate=False)), dict[str, nn.Parameter]()
    for name, _ in list(plan.module.named_parameters(remove_duplicate=False)):
        first, value = plan.canonical.get(name, name), held[name]
        if first not in made:
            made[first] = nn.Parameter(value.detach().clone(), value.requires_grad)
        path, _, leaf = name.rpartition(".")
        setattr(plan.module.get_submodule(path), leaf, made[first])
    fill_rest(plan, own.place.device, torch.float64 if own.job.numerics.precision == "float64" else None)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name, buffer in plan.module.named_buffers(remove_duplicate=False):
        if (now := buffers.get(name)) is not None and not now.is_meta and now.shape == buffer.shape:
            buffer.copy_(now)
    for path, part in plan.module.named_modules():
        _take_attributes(part, model.get_submodule(path))
    return plan.module


def _take_attributes(part: nn.Module, other: nn.Module) -> None:
    """Give a module the plain attributes of another one that it has too, such as counters and its mode."""
    for name, value in vars(other).items():
        if name in vars(part) and isinstance(value, _PLAIN) and isinstance(vars(part)[name], _PLAIN):
            vars(part)[name] = value
