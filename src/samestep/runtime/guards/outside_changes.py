"""What a loop changes between two steps where the run does not see it: the given instance, and what is trained.

A run trains a model of its own, which a model instance has only lent its values. A loop that freezes a layer of the instance,
sets a number in it or writes into a weight changes nothing of the run, where a plain loop would train otherwise. And what was
frozen when the layout was planned has no gradient in it; what the loop freezes of the run's own module afterwards, it may thaw
again (`used_weights.py`). Values that the instance takes from the run itself, to evaluate
it, are no change.

Modules that the loop puts into evaluation mode stay in it, on all ranks alike. One that was in evaluation mode from the start, such
as a frozen batch norm, was planned so.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samestep.runtime.assembly import Assembly

_SINGLE = (bool, int, float, str)


class _Number(NamedTuple):
    name: str
    holder: dict[str, Any]
    key: str
    value: Any


class OutsideChanges:
    """The state of a run's own module and of the instance that was given, as both were before the first step."""

    def __init__(self, given: object, held: Assembly) -> None:
        frozen = {param.name for param in held.model.spec.params if not param.trainable}
        self._frozen = [(name, param) for name, param in held.model.module.named_parameters() if name in frozen]
        modes = held.model.training_modes
        self._trained = [(path, part) for path, part in held.model.module.named_modules() if modes.get(part)]
        self._evaluated = [
            (path, part)
            for path, part in held.model.module.named_modules()
            if modes.get(part) is False and _reads_mode(part)
        ]
        module = given if isinstance(given, nn.Module) else nn.Module()
        self._flags = [(name, param, param.requires_grad) for name, param in module.named_parameters()]
        self._tensors = dict([*module.named_parameters(), *module.named_buffers()])
        self._versions = self._present_versions()
        self._numbers = [
            _Number(f"{path}.{key}".lstrip("."), vars(part), key, value)
            for path, part in module.named_modules()
            for key, value in vars(part).items()
            if type(value) in _SINGLE and key != "training"
        ]

    def refusal(self, held: Assembly) -> str:
        """Return why the next step would not be that of a plain loop; empty if nothing shows it."""
        written = self._written(held)
        for name, param in self._frozen:
            if param.requires_grad:
                return (
                    f"{name} was frozen when the run was made, and asks for a gradient now, which no part of the layout "
                    "computes: to build it trainable, and to freeze it in run.model until then, works"
                )
        for path, part in self._evaluated:
            if part.training:
                return (
                    f"{path} was in evaluation mode when the run was made, and so is planned in the layout, and it is in training "
                    f"mode now: to build it in training mode, and to put it into evaluation mode in run.model until then, works"
                )
        for name, param, flag in self._flags:
            if param.requires_grad is not flag:
                return _unseen(name, "trained" if param.requires_grad else "frozen")
        for number in self._numbers:
            if number.holder.get(number.key) != number.value:
                return _unseen(number.name, f"set to {number.holder.get(number.key)!r}")
        return _unseen(written, "written") if written else ""

    def evaluated(self) -> frozenset[str]:
        """Return the paths of the modules that the loop has put into evaluation mode."""
        return frozenset(path for path, part in self._trained if not part.training)

    def _written(self, held: Assembly) -> str:
        """Return which tensor of the instance was written since the last call, and not with the run's own values or averages."""
        now = self._present_versions()
        names = [name for name, version in now.items() if version != self._versions[name]]
        self._versions = now
        if not names or held.weights.updater.averages is not None:
            return ""
        return _other_value({name: self._tensors[name] for name in names}, held)

    def _present_versions(self) -> dict[str, int]:
        return {name: 0 if tensor.is_inference() else tensor._version for name, tensor in self._tensors.items()}


def _reads_mode(module: nn.Module) -> bool:
    """Return whether the forward of a module's class acts by its mode, as that of a batch norm or a dropout does."""
    code = getattr(type(module).forward, "__code__", None)
    return code is None or "training" in code.co_names


def _unseen(name: str, what: str) -> str:
    return (
        f"{name} of the model instance that was given was {what} after the run was made, and the run trains a model of its own: "
        "the same change in run.model works"
    )


def _other_value(tensors: dict[str, Tensor], held: Assembly) -> str:
    """Return which of the tensors has other values than the run's, as far as this rank holds them; empty if none has."""
    step = held.parallel.program.step
    uncut = {spec.name for spec in step.model.params if step.holding(spec).num_parts == 1}
    for piece in [*held.weights.updater.pieces, *held.weights.store.frozen]:
        theirs = tensors.get(piece.name)
        if theirs is None or piece.name not in uncut or piece.is_packed:
            continue
        part = theirs.detach().flatten()[piece.start : piece.stop]
        if not torch.equal(piece.master().flatten().to(part), part):
            return piece.name
    for name, buffer in held.model.module.named_buffers():
        if (
            name in tensors
            and tensors[name].shape == buffer.shape
            and not torch.equal(buffer.to(tensors[name]), tensors[name])
        ):
            return name
    return ""
