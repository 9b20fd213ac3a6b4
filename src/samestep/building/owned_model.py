"""The model instance that a run owns, as DDP and `fully_shard` own theirs: no other run takes a part of it until the run gives it back.

    parallelize(model, ...)  ─►  take  ─►  steps  ─►  run.release()          the instance is whole, with trained values
                                             └─────►  the run is dropped     the same if ranks hold whole weights, otherwise it is lost

A build function that returns weights with values, such as those of a backbone, gives copies of them. Two runs must not train copies of one
weight either.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping

from torch import Tensor, nn

from samestep.building.plain_form import PlainForm
from samestep.building.torch_seams import DisableTorchFunction, disable_current_modes
from samestep.errors import ModelError

_LIVE: weakref.WeakSet[OwnedModel] = weakref.WeakSet()
"""The owners of the runs of this process."""
_LOST: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules with parts of weights that a run has left."""


class OwnedModel:
    """The modules and weights of one run of a loop."""

    def __init__(self, model: object) -> None:
        """Own an instance; a build function has nothing to own yet.

        Raises:
            ModelError: another run owns a part of it.
        """
        self._has_ended = False
        self.form: PlainForm | None = None
        """The form of the instance while the run has taken it."""
        module = model if isinstance(model, nn.Module) else nn.Module()
        self._weights: dict[str, weakref.ref[Tensor]] = {
            name: weakref.ref(param) for name, param in module.named_parameters()
        }
        self._trained = frozenset(self._weights)
        self._parts = {id(part._parameters): path for path, part in module.named_modules()} if module is model else {}
        if lost := next((path or "the model" for path, part in module.named_modules() if part in _LOST), ""):
            raise ModelError(
                "two-runs-one-model",
                f"{lost} has parts of weights, which a run has left that is gone. Build the model again, and call run.release() before a "
                "run is dropped.",
            )
        self._refuse_others()
        _LIVE.add(self)

    def copies(self, weights: Mapping[str, weakref.ref[Tensor]], trained: frozenset[str]) -> None:
        """Note weights of which a build function gives copies, and names of the `trained` ones.

        Raises:
            ModelError: another run trains one of them too, or a copy.
        """
        if self.form is None:
            self._weights, self._trained = dict(weights), trained
            self._refuse_others()

    def take(self, module: nn.Module) -> PlainForm:
        """Return the form of the instance, or of a module around its parts, which then may lose its values."""
        self.give_back()
        self.form = PlainForm(module)
        return self.form

    def give_back(self, values: Mapping[str, Tensor] | None = None) -> None:
        """Give the instance back, with trained `values` by name; without them as it was taken."""
        if self.form is not None:
            self.form.give_back(values)
            self.form = None

    def end(self) -> None:
        """Let other runs take what this one has given back."""
        self._has_ended = True

    def abandon(self) -> None:
        """Give the instance back if this rank has whole weights, because the run is gone."""
        if self.form is not None and not self.form.has_its_parameters:
            _LOST.update(self.form.module.modules())
        elif self.form is not None:
            with (
                disable_current_modes(),
                DisableTorchFunction(),
            ):  # a collection may run within the forward of another run
                self.give_back({})
        self.end()

    def _refuse_others(self) -> None:
        if self._shared_with_another():
            gc.collect()  # a run that nobody holds may be in a cycle
            if name := self._shared_with_another():
                raise ModelError(
                    "two-runs-one-model",
                    f"{name} belongs to a run that is still there. Use run.release(), which gives the trained model back; or "
                    "copy.deepcopy(model); or one run over a module that holds all parts.",
                )

    def _shared_with_another(self) -> str:
        """Return the name of a weight or a module that another run has too; empty if none has."""
        weights = {id(weight): name for name, ref in self._weights.items() if (weight := ref()) is not None}
        for other in [one for one in _LIVE if one is not self and not one._has_ended]:
            for name, ref in other._weights.items():
                here = weights.get(id(ref()))
                if here is not None and (here in self._trained or name in other._trained):
                    return here
            if shared := self._parts.keys() & other._parts.keys():
                return self._parts[min(shared)] or "the model"
        return ""
