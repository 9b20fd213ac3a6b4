"""Replaced parameters: a weight takes the values of a new parameter that code assigns in its stead, or it is refused by name.

A codebook that follows moving averages is often written as `self.codebook.weight = nn.Parameter(value)`, within the forward
or in the loop between two steps. The module then holds another tensor than the one that the run saves, gathers and cuts.
So the attributes of modules are compared with the weights that belong there: after every forward, when the weight is put back,
and after the backward and between two steps, when it takes over the values.

    x.weight = nn.Parameter(value)        x.register_parameter("weight", ...)        x._parameters["weight"] = ...

torch's optimizer goes on with the old tensor, so nothing trains the new one. A gradient for either is refused.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from samestep.program.program import Program
from samestep.runtime.axes import forward_state
from samestep.runtime.axes.pipeline.stand_ins import LayerStandIn
from samestep.runtime.weights.replicated import StandIn


@dataclass(frozen=True, slots=True)
class _ModulePlace:
    """An attribute of a module that holds a weight, a submodule, or nothing."""

    items: dict[str, Any]
    """The module's `_parameters` or `_modules`, which every way of assigning the attribute changes."""
    key: str
    held: Any
    owner: nn.Module
    name: str
    """The full name of the weight or the module."""


class _Places:
    """The attributes of all modules that hold weights, or submodules. As long as all hold what they held, one comparison shows it."""

    def __init__(self, places: list[_ModulePlace], items: list[dict[str, Any]]) -> None:
        self.places, self._items = places, items
        self._where = [one for one in items for _ in one]
        self._keys = [key for one in items for key in one]
        self._seen = [one[key] for one, key in zip(self._where, self._keys, strict=True)]

    def are_as_seen(self) -> bool:
        """Return whether every attribute holds what it held, and none is new."""
        if sum(map(len, self._items)) != len(self._seen):
            return False
        return all(map(operator.is_, map(dict.get, self._where, self._keys), self._seen))

    def changed(self) -> list[_ModulePlace]:
        """Return the places that hold something else."""
        if self.are_as_seen():
            return []
        changed = [place for place in self.places if place.items.get(place.key) is not place.held]
        # Stand-ins are of weights that are being gathered, and of modules of other stages.
        return [place for place in changed if not isinstance(place.items.get(place.key), StandIn | LayerStandIn)]


@dataclass(slots=True)
class ReplacedWeights:
    """The attributes that hold a rank's weights, and the tensors that code has assigned to them."""

    model: nn.Module
    weights: _Places
    modules: _Places
    owners: list[tuple[str, nn.Module]]
    first_names: dict[str, str]
    """The first name of each weight, by all of its names."""
    known: frozenset[str]
    """Weights that a forward writes, as the trace has shown, and that it may write in this layout."""
    program: Program
    _new: dict[str, Tensor] = field(default_factory=dict)
    """The new tensor for each weight until the weight takes over its values, by first names."""
    _gradients: dict[str, list[None]] = field(default_factory=dict)
    """An item for each gradient of a weight since it was replaced."""

    @classmethod
    def of(cls, model: nn.Module, known: Sequence[str], program: Program) -> ReplacedWeights:
        """Record the weights and submodules of a filled model."""
        owners = [(f"{path}." if path else "", owner) for path, owner in model.named_modules()]
        weights = [
            _ModulePlace(owner._parameters, key, param, owner, f"{path}{key}")
            for path, owner in owners
            for key, param in owner._parameters.items()
        ]
        modules = [
            _ModulePlace(owner._modules, key, child, owner, f"{path}{key}")
            for path, owner in owners
            for key, child in owner._modules.items()
            if child is not None
        ]
        first: dict[int, str] = {}
        names = {
            place.name: first.setdefault(id(place.held), place.name) for place in weights if place.held is not None
        }
        return cls(
            model,
            _Places(weights, [owner._parameters for _, owner in owners]),
            _Places(modules, [owner._modules for _, owner in owners if owner._modules]),
            owners,
            names,
            frozenset(known),
            program,
        )

    def note(self) -> None:
        """Put weights back that a forward has replaced; they take over the values after the backward, which may read the old ones."""
        if not self.program.step.layout.gathers_weights:  # then the store compares them (`fsdp_units.py`)
            for place in self.weights.changed():
                self._put_back(place)

    def take_over(self, *, inside: bool) -> Iterator[str]:
        """Give weights the values of the tensors that code has assigned in their stead; yield why some are refused.

        `inside` says that a forward and its backward have run since the last call; otherwise the loop's code has.
        """
        if not (inside and self.program.step.layout.gathers_weights):
            for place in self.modules.changed():
                yield from self._other_module(place)
            if not self.weights.are_as_seen():
                for place in self.weights.changed():
                    yield from self._other_tensor(place)
                yield from self._added_weights()
        elif not self.weights.are_as_seen():
            yield from self._added_weights()
        for name, new in self._new.items():
            held = self._weight(name)
            if reason := self._refusal(name, held, new, inside=inside):
                yield reason
            if new.shape == held.shape and not self._lost:
                _copy(held, new)
        self._new.clear()
        for name, found in self._gradients.items():
            if found:
                found.clear()
                yield _explain_untrained(f"a new nn.Parameter was put in the place of {name}", name)

    # -- what was changed --------------------------------------------------------------------------

    def _other_tensor(self, place: _ModulePlace) -> Iterator[str]:
        """Put a weight back; yield why what was assigned, or deleted, cannot be a weight."""
        if place.held is None:
            self.weights.places.remove(place)
            yield _new_weight(place.name)
        elif isinstance(place.items.get(place.key), Tensor):
            self._put_back(place)
        else:
            self.weights.places.remove(place)
            if not any(param is place.held for param in self.model.parameters()):  # a parametrization has it elsewhere
                yield f"{place.name} was taken out of the model, and the run trains it on: to set it to zeros works"

    def _other_module(self, place: _ModulePlace) -> Iterator[str]:
        """Yield why a module that replaces another one is refused, unless it has the same weights."""
        now = place.items.get(place.key)
        theirs = {id(param) for param in now.parameters()} if isinstance(now, nn.Module) else set()
        self.modules.places.remove(place)
        if not all(id(param) in theirs for param in place.held.parameters()):
            yield (
                f"another module was put in the place of {place.name}, whose weights the run trains on: to write into these "
                "works, by copy_(...) within torch.no_grad()"
            )

    def _added_weights(self) -> Iterator[str]:
        """Yield which weights are new."""
        if sum(len(owner._parameters) for _, owner in self.owners) <= len(self.weights.places):
            return
        known = {place.name for place in self.weights.places}
        for path, owner in self.owners:
            for key in owner._parameters:
                if f"{path}{key}" not in known:
                    self.weights.places.append(
                        _ModulePlace(owner._parameters, key, owner._parameters[key], owner, f"{path}{key}")
                    )
                    yield _new_weight(f"{path}{key}")

    def _put_back(self, place: _ModulePlace) -> None:
        """Put a weight back, and note the tensor that replaced it, and gradients of the weight from now on."""
        name = self.first_names[place.name]
        self._new[name] = place.items[place.key]
        place.items[place.key] = place.held
        if isinstance(place.owner, nn.RNNBase):  # has lists of its weights, which an assignment brings up to date
            setattr(place.owner, place.key, place.held)
        if name not in self._gradients and place.held.requires_grad:
            self._gradients[name] = []
            place.held.register_hook(functools.partial(_note_gradient, self._gradients[name]))

    # -- what is refused ---------------------------------------------------------------------------

    def _refusal(self, name: str, held: Tensor, new: Tensor, *, inside: bool) -> str:
        """Return why a weight cannot take over the values of the tensor that replaced it; empty if it can."""
        what = f"{'the forward' if inside else 'the loop'} puts a new nn.Parameter in the place of {name}"
        if word := self._lost:
            return f"{what}, of which ranks hold parts under {word}: {word.partition('=')[0]}=1 works"
        if new.shape != held.shape:
            return f"{what}, of shape {list(new.shape)} and not {list(held.shape)}: one of the same shape works"
        tied = next((other for other, first in self.first_names.items() if first == name != other), "")
        if tied:
            return f"{what}, which is {tied} too: {name}.copy_(...) within torch.no_grad() writes into both"
        if inside and self._divides and name not in self.known:
            return (
                f"{what}, and {self._divides} divides the batch or repeats the forward: the whole batch in one forward works "
                "(dp=1 without microbatch)"
            )
        return _explain_untrained(what, name) if inside and new.grad is not None else ""

    @property
    def _lost(self) -> str:
        """The word of the layout under which this rank holds parts of weights; empty if they are whole."""
        layout = self.program.step.layout
        return f"zero={layout.zero}" if layout.gathers_weights else f"tp={layout.tp}" * (layout.tp > 1)

    @property
    def _divides(self) -> str:
        """The word of the layout by which no single forward of a step takes the whole batch; empty if one does."""
        layout = self.program.step.layout
        word = forward_state.splits(layout, self.program.step.num_microbatches)
        return word or (f"recompute={layout.recompute}" if layout.recompute != "none" else "")

    def _weight(self, name: str) -> Tensor:
        held: Tensor = next(place.held for place in self.weights.places if place.name == name)
        return held


def _new_weight(name: str) -> str:
    return f"{name} is a new weight, which the run neither trains nor saves: a model that is built with it works"


def _explain_untrained(what: str, name: str) -> str:
    return (
        f"{what}, and a gradient reaches it: an optimizer of torch goes on with the old one, so nothing trains it; "
        f"{name}.copy_(...) within torch.no_grad() works"
    )


@torch.no_grad()
def _copy(weight: Tensor, new: Tensor) -> None:
    weight.copy_(new.detach())


def _note_gradient(found: list[None], _: Tensor) -> None:
    found.append(None)
