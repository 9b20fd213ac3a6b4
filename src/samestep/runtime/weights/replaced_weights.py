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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samestep.program.program import Program
from samestep.runtime.axes import forward_state
from samestep.runtime.weights.replicated import StandIn


@dataclass(frozen=True, slots=True)
class _ModulePlace:
    """An attribute of a module that holds a weight, a submodule, or nothing."""

    items: dict[str, Any]
    """The module's `_parameters` or `_modules`, which every way of assigning the attribute changes."""
    key: str
    content: Any
    owner: nn.Module
    name: str
    """The full name of the weight or the module."""


class ReplacedWeights:
    """The attributes of modules that hold a rank's weights or submodules, and the tensors that code has assigned to them."""

    def __init__(self, model: nn.Module, known: Sequence[str], program: Program) -> None:
        """Record the weights and submodules of a filled model.

        `known` are the weights that a forward writes, as the trace has shown, and that it may write in this layout.
        """
        self._model, self._known, self._program = model, frozenset(known), program
        self._gathers = program.step.layout.gathers_weights
        """Whether the store compares the weights that a forward gathers (`fsdp_units.py`)."""
        self._owners = [(f"{path}." if path else "", owner) for path, owner in model.named_modules()]
        self._tables = [table for _, owner in self._owners for table in (owner._parameters, owner._modules)]
        self._places = [
            _ModulePlace(table, key, content, owner, f"{path}{key}")
            for path, owner in self._owners
            for table in (owner._parameters, owner._modules)
            for key, content in table.items()
            if content is not None or table is owner._parameters
        ]
        self._weights = {place.name: place for place in self._places if place.items is place.owner._parameters}
        # As long as all attributes hold what they held, one comparison shows it.
        self._holders = [table for table in self._tables for _ in table]
        self._keys = [key for table in self._tables for key in table]
        self._contents = list(map(dict.get, self._holders, self._keys))
        first = dict[int, str]()
        self._first_names = {
            name: first.setdefault(id(place.content), name)
            for name, place in self._weights.items()
            if place.content is not None
        }
        """The first name of each weight, by all of its names."""
        self._new: dict[str, Tensor] = {}
        """The new tensor for each weight until the weight takes over its values, by first names."""
        self._gradients: dict[str, list[None]] = {}
        """An item for each gradient of a weight since it was replaced."""

    def note(self) -> None:
        """Put weights back that a forward has replaced; they take over the values after the backward, which may read the old ones."""
        if not (self._gathers or self._are_as_seen()):
            for place in self._changed():
                if place.name in self._weights:
                    self._put_back(place)

    def take_over(self, *, inside: bool) -> Iterator[str]:
        """Give weights the values of the tensors that code has assigned in their stead; yield why some are refused.

        `inside` says that a forward and its backward have run since the last call; otherwise the loop's code has.
        """
        if not self._are_as_seen():
            for place in () if inside and self._gathers else self._changed():
                yield from self._other_tensor(place) if place.name in self._weights else self._other_module(place)
            yield from self._added_weights()
        for name, new in self._new.items():
            weight = self._weights[name].content
            if reason := self._refusal(name, weight, new, inside=inside):
                yield reason
            if new.shape == weight.shape and not self._lost:
                _copy(weight, new)
        self._new.clear()
        for name, gradients in self._gradients.items():
            if gradients:
                gradients.clear()
                yield _explain_untrained(f"a new nn.Parameter was put in the place of {name}", name)

    # -- what was changed --------------------------------------------------------------------------

    def _are_as_seen(self) -> bool:
        """Return whether every attribute holds what it held, and no weight is new."""
        if sum(map(len, self._tables)) != len(self._keys):
            return False
        return all(map(operator.is_, map(dict.get, self._holders, self._keys), self._contents))

    def _changed(self) -> list[_ModulePlace]:
        """Return the places that hold something else."""
        changed = [place for place in self._places if place.items.get(place.key) is not place.content]
        # Stand-ins are of weights that are being gathered.
        return [place for place in changed if not isinstance(place.items.get(place.key), StandIn)]

    def _other_tensor(self, place: _ModulePlace) -> Iterator[str]:
        """Put a weight back; yield why what was assigned, or deleted, cannot be a weight."""
        if place.content is None:
            self._places.remove(place)
            yield _new_weight(place.name)
        elif isinstance(place.items.get(place.key), Tensor):
            self._put_back(place)
        else:
            self._places.remove(place)
            if not any(param is place.content for param in self._model.parameters()):
                yield f"{place.name} was taken out of the model, and the run still trains it. Set it to zeros instead"
            elif (layout := self._program.step.layout).gathers_weights or layout.pp > 1:  # a parametrization has it
                yield f"{place.name} was moved to another module, and {layout} looks for it by its name. Use a model that is built so"

    def _other_module(self, place: _ModulePlace) -> Iterator[str]:
        """Yield why a module that replaces another one is refused, unless it has the same weights."""
        module = place.items.get(place.key)
        weights = {id(param) for param in module.parameters()} if isinstance(module, nn.Module) else set()
        self._places.remove(place)
        if not all(id(param) in weights for param in place.content.parameters()):
            yield (
                f"{place.name} was replaced by another module, and the run still trains the old weights. Write into these "
                "by copy_(...) within torch.no_grad()"
            )

    def _added_weights(self) -> Iterator[str]:
        """Yield which weights are new."""
        for path, owner in self._owners:
            for key, weight in owner._parameters.items():
                if (name := f"{path}{key}") not in self._weights:
                    self._weights[name] = _ModulePlace(owner._parameters, key, weight, owner, name)
                    yield _new_weight(name)

    def _put_back(self, place: _ModulePlace) -> None:
        """Put a weight back, and note the tensor that replaced it, and gradients of the weight from now on."""
        name = self._first_names[place.name]
        self._new[name] = place.items[place.key]
        place.items[place.key] = place.content
        if isinstance(place.owner, nn.RNNBase):  # has lists of its weights, which an assignment brings up to date
            setattr(place.owner, place.key, place.content)
        if name not in self._gradients and place.content.requires_grad:
            self._gradients[name] = []
            place.content.register_hook(functools.partial(_note_gradient, self._gradients[name]))

    # -- what is refused ---------------------------------------------------------------------------

    def _refusal(self, name: str, weight: Tensor, new: Tensor, *, inside: bool) -> str:
        """Return why a weight cannot take over the values of the tensor that replaced it; empty if it can."""
        what = f"{'the forward' if inside else 'the loop'} puts a new nn.Parameter in the place of {name}"
        if word := self._lost:
            return f"{what}, and under {word} each rank holds a part. Use {word.partition('=')[0]}=1"
        if new.shape != weight.shape:
            return f"{what}, of shape {list(new.shape)} and not {list(weight.shape)}. Use one of the same shape"
        tied = next((other for other, first in self._first_names.items() if first == name != other), "")
        if tied:
            return f"{what}, which is {tied} too: {name}.copy_(...) within torch.no_grad() writes into both"
        if inside and self._divides and name not in self._known:
            return (
                f"{what}, and {self._divides} divides the batch or repeats the forward. Use the whole batch in one forward "
                "(dp=1 without microbatch)"
            )
        return _explain_untrained(what, name) if inside and new.grad is not None else ""

    @property
    def _lost(self) -> str:
        """The word of the layout under which this rank holds parts of weights; empty if they are whole."""
        layout = self._program.step.layout
        return f"zero={layout.zero}" if layout.gathers_weights else f"tp={layout.tp}" * (layout.tp > 1)

    @property
    def _divides(self) -> str:
        """The word of the layout by which no single forward of a step takes the whole batch; empty if one does."""
        layout = self._program.step.layout
        word = forward_state.splits(layout, self._program.step.num_microbatches)
        return word or (f"recompute={layout.recompute}" if layout.recompute != "none" else "")


def _new_weight(name: str) -> str:
    return f"{name} is a new weight, which the run neither trains nor saves. Use a model that is built with it"


def _explain_untrained(what: str, name: str) -> str:
    return (
        f"{what}, and a gradient reaches it: an optimizer of torch continues with the old one, so nothing trains it. Use "
        f"{name}.copy_(...) within torch.no_grad()"
    )


@torch.no_grad()
def _copy(weight: Tensor, new: Tensor) -> None:
    weight.copy_(new.detach())


def _note_gradient(gradients: list[None], _: Tensor) -> None:
    gradients.append(None)
