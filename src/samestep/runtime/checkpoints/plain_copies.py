"""Plain modules of torch that hold the weights of a run, which a loop copies, writes into files, or calls itself.

    with run.gathered() as model:
        average = AveragedModel(model)          copy.deepcopy(model), or of a part of it
        torch.save(model, "model.pt")           pickle.dumps(model), or of a part of it
        answers = model.generate(prompts)       a forward of the model, or of a part of it

What a layout has put around the modules belongs to the run, and would send messages in each forward, or compute a part of it. So
the model is built anew, as it was first, and takes the whole weights, the buffers and the plain attributes that stand in the run's
model: it is a module of torch alone, on every rank. A copy has tensors of its own; a forward is that of a module which shares those
of the run's model, so that it sees what the loop has written into them, and the loop what the forward writes into buffers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn

from samestep.building.initial_values import fill
from samestep.building.several_models import as_given
from samestep.examination.examine import build_blueprint
from samestep.runtime.held_assembly import HeldAssembly
from samestep.state.fingerprints import attributes_of, digest

_PLAIN = (bool, int, float, str, type(None))
"""Types of the attributes that a copy takes."""


def first_model(own: HeldAssembly, device: torch.device) -> nn.Module:
    """Return the model with the values that a run begins with, of the class that `parallelize` was given."""
    plan = build_blueprint(own.source, own.job)
    fill(plan, lambda name: plan.materialize(name, device, _dtype(own) or torch.float32), device, _dtype(own))
    return as_given(plan.module)


@contextmanager
def allowed(model: nn.Module, own: HeldAssembly) -> Iterator[None]:
    """Let copies of a model that has whole weights, its pickles and its forwards, and those of its parts, be of plain modules inside."""
    parts, called, before = dict(model.named_modules()), _Called(model, own), dict[str, dict[str, Any]]()
    for path, part in parts.items():
        within = {
            "__deepcopy__": functools.partial(_copy, model, path, own),
            "__reduce_ex__": functools.partial(_reduce, model, path, own),
            "_compiled_call_impl": functools.partial(
                called.call, path
            ),  # what torch calls in place of hooks and forward
        }
        before[path] = {name: part.__dict__[name] for name in within if name in part.__dict__}
        part.__dict__.update(within)
    try:
        yield
    finally:
        for path, part in parts.items():
            for name in ("__deepcopy__", "__reduce_ex__", "_compiled_call_impl"):
                part.__dict__.pop(name, None)
            part.__dict__.update(before[path])


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
    """Return the model as it was built, with copies of the values that stand in the run's."""
    plan = build_blueprint(own.source, own.job)
    held = dict(model.named_parameters(remove_duplicate=False))
    fill(plan, lambda name: held[name].detach().clone(), own.place.device, _dtype(own))
    for name, param in plan.module.named_parameters(remove_duplicate=False):
        param.requires_grad_(held[name].requires_grad)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name, buffer in plan.module.named_buffers(remove_duplicate=False):
        if (now := _whole_of(buffers.get(name), buffer)) is not None:
            buffer.copy_(now)
    first = own.current.model.first_state.attributes
    for path, name, value in attributes_of(model):
        if digest(value) != first.get((path, name)):  # by the loop or a forward; a layout may change some before
            _set_plain(plan.module.get_submodule(path), name, value)
    for path, part in plan.module.named_modules():
        part.training = model.get_submodule(path).training
    return plan.module


def _dtype(own: HeldAssembly) -> torch.dtype | None:
    """Return the dtype of all floating tensors of a run that computes in float64; None for another, whose buffers stay in the dtypes that they have."""
    return torch.float64 if own.job.numerics.precision == "float64" else None


def _whole_of(now: Tensor | None, buffer: Tensor | None) -> Tensor | None:
    """Return a buffer of the run's model; None where it has no values on this rank, or is a part of `buffer`, as it was built."""
    if now is None or buffer is None or now.is_meta or now.shape != buffer.shape:
        return None
    return now


def _set_plain(part: nn.Module, name: str, value: Any) -> None:
    """Give a module a value of an attribute that it has, such as a counter or its mode, if both are plain values."""
    if name in part.__dict__ and isinstance(value, _PLAIN) and isinstance(part.__dict__[name], _PLAIN):
        part.__dict__[name] = value


class _Pair:
    """A module of the run's model, and the one that computes in its place."""

    def __init__(self, held: nn.Module, plain: nn.Module) -> None:
        self.held, self.plain = held, plain
        self._seen = dict(vars(held)), dict(vars(plain))

    def hand_over(self) -> None:
        """Put the tensors of the run's module, and what has changed of its plain attributes, into the other one."""
        for leaf, param in self.held._parameters.items():
            if self.plain._parameters.get(leaf) is not param:
                setattr(self.plain, leaf, param)  # an LSTM keeps a second list
        for leaf, buffer in self.plain._buffers.items():
            if (now := _whole_of(self.held._buffers.get(leaf), buffer)) is not None:
                self.plain._buffers[leaf] = now
        self._pass_on(self.held, self.plain)

    def take_back(self) -> None:
        """Keep in the run's module what a forward has put in the place of buffers, and what it has changed of plain attributes."""
        for leaf, buffer in self.plain._buffers.items():
            if _whole_of(self.held._buffers.get(leaf), buffer) is not None:
                self.held._buffers[leaf] = buffer
        self._pass_on(self.plain, self.held)

    def _pass_on(self, one: nn.Module, other: nn.Module) -> None:
        """Set the attributes of `other` that have changed in `one` since they were passed on last."""
        seen = self._seen[one is self.plain]
        for name, value in vars(one).items():
            if isinstance(value, _PLAIN) and seen.get(name, value) != value:
                _set_plain(other, name, value)
        self._seen = dict(vars(self.held)), dict(vars(self.plain))


class _Called:
    """The module whose forwards are those of a run's model while it has whole weights; it is built when one is called first."""

    def __init__(self, model: nn.Module, own: HeldAssembly) -> None:
        self._model, self._own = model, own

    def call(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Compute what the part at a path returns."""
        for pair in self._pairs:
            pair.hand_over()
        try:
            return self._whole.get_submodule(path)(*args, **kwargs)
        finally:
            for pair in self._pairs:
                pair.take_back()

    @functools.cached_property
    def _whole(self) -> nn.Module:
        return as_given(_plain(self._model, self._own))

    @functools.cached_property
    def _pairs(self) -> list[_Pair]:
        return [_Pair(self._model.get_submodule(path), part) for path, part in self._whole.named_modules()]
