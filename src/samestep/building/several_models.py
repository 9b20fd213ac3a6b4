"""Several models as one module, and a user's forward around one or several.

```python
run = samestep.parallelize({"policy": f, "reference": g}, loss, optimizer, forward=lambda models, batch: ...)
```
The module is an `nn.ModuleDict`, so that a weight of a model has its name behind that of the model: `policy.head.weight`. There is one
program, one trace and one checkpoint, and a rule about one of the models is one about a prefix of names. A model none of whose weights
takes a gradient is frozen: it has no gradient, no optimizer state, and stays in the mode in which it was given.

A forward of one model keeps the names of its weights. The module is then of a class of its own, whose forward gives the user's
function the same weights and submodules as a model of the given class.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from samestep.building.named_tensors import copy_module
from samestep.errors import ModelError, short_repr

Forward = Callable[..., Any]
"""A function of the model, or of a mapping of models by name, and of a batch, which returns the outputs; with lanes also of the state."""
Built = Callable[[], nn.Module] | nn.Module


class Models(nn.ModuleDict):
    """Models by name, whose forward is a function of the user's."""

    takes_batch: ClassVar[bool] = True
    """Whether the forward is given the batch as it is, its labels too."""

    def __init__(
        self, models: Mapping[str, nn.Module], forward: Forward, follows: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(models)
        self._forward_of_models = forward
        self._follows = dict(follows or {})

    def forward(self, batch: Any, *carried: Any) -> Any:
        """Return what the user's function makes of the models and a batch, and of the state of lanes where it is given one."""
        return self._forward_of_models(self, batch, *carried)

    def trained(self) -> list[nn.Module]:
        """Return the models that have a weight which takes a gradient."""
        return [model for model in self.values() if any(param.requires_grad for param in model.parameters())]


def followed_weight(model: nn.Module, name: str) -> str:
    """Return the name of the weight of which a weight is the moving average; empty if it is none."""
    prefix, _, rest = name.partition(".")
    source = model._follows.get(prefix, "") if isinstance(model, Models) else ""
    return f"{source}.{rest}" if source else ""


def as_one(
    model: Built | Mapping[str, Built], forward: Forward | None, follows: Mapping[str, str] | None = None
) -> Built:
    """Return one model, or a function that builds it: of several models those that `model` names, with the forward around them.

    An instance is the result where all models are instances, with their own parameters. `follows` names for a model another one that
    it follows: it is frozen, and a copy of that one unless it is given.

    Raises:
        ModelError: several models are given without a forward, or what is given for one is no model.
    """
    follows = follows or {}
    if not isinstance(model, Mapping):
        if follows:
            raise ModelError(
                "ema-follows", "ema makes a model follow another one, and one is given. Use a dict of models by name"
            )
        return model if forward is None else _around_one(model, forward)
    if forward is None:
        raise ModelError(
            "several-models",
            f"model = {{{', '.join(map(repr, model))}}} has several models, and no forward passes a batch through them. "
            "Use forward=lambda models, batch: ..., with models[name] for each",
        )
    for name, member in model.items():
        if not isinstance(name, str) or not name or "." in name or not callable(member):
            raise ModelError(
                "several-models",
                f"model[{name!r}] = {short_repr(member)}. Use a name without dots, with a module or a function that builds one",
            )
    for name, source in follows.items():
        if source not in model or source == name or source in follows:
            raise ModelError(
                "ema-follows",
                f"ema: {name!r} follows {source!r}, which is not one of the trained models {', '.join(map(repr, model))}",
            )
    if all(isinstance(member, nn.Module) for member in model.values()):
        modules = {name: member for name, member in model.items() if isinstance(member, nn.Module)}
        return Models(_with_followers(modules, follows), forward, follows)
    return functools.partial(_build, dict(model), forward, follows)


def _with_followers(models: dict[str, nn.Module], follows: Mapping[str, str]) -> dict[str, nn.Module]:
    """Return the models with those that follow others, frozen."""
    copies = {name: copy_module(models.get(name, models[source])) for name, source in follows.items()}
    return {**models, **{name: copied.requires_grad_(False) for name, copied in copies.items()}}


def _build(models: Mapping[str, Built], forward: Forward, follows: Mapping[str, str]) -> Models:
    """Build the models of a run: a function is called, and an instance copied, so that two runs share no parameter."""
    built = {
        name: copy_module(part) if isinstance(part, nn.Module) else _called(name, part) for name, part in models.items()
    }
    return Models(_with_followers(built, follows), forward, follows)


def _called(name: str, build: Callable[[], nn.Module]) -> nn.Module:
    model = build()
    if not isinstance(model, nn.Module):
        raise ModelError(
            "build-function", f"model[{name!r}] returned a {type(model).__name__}; it must return an nn.Module"
        )
    return model


def _around_one(model: Built, forward: Forward) -> Built:
    if isinstance(model, nn.Module):
        return _with_forward(model, forward)
    build = model

    def built() -> nn.Module:
        return _with_forward(build(), forward)

    built.__name__ = built.__qualname__ = getattr(model, "__name__", "model")
    return built


def _with_forward(model: nn.Module, forward: Forward) -> nn.Module:
    """Return a module with the parameters and submodules of a model, whose forward is the user's function of the model and a batch.

    A loop may call the model too, with a batch or as the model was written: on a tensor, where the batches have been something else. The
    user's function calls the model's own forward, without the hooks of the module, which are those of the outer forward. A forward
    that the instance holds, as one that was replaced and one of `torch.compile`, would hide the outer one: it is put aside.
    """
    kind = type(model)
    kinds: set[type] = set()

    class Inner(kind):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            holder = vars(self).get(_HELD)
            return kind.forward(self, *args, **kwargs) if holder is None else holder(*args, **kwargs)

    class Outer(kind):  # type: ignore[misc, valid-type]
        takes_batch = True

        def forward(self, batch: Any, *carried: Any, **more: Any) -> Any:
            inner = object.__new__(Inner)
            object.__setattr__(inner, "__dict__", self.__dict__)
            if not isinstance(batch, Tensor):
                kinds.add(type(batch))
            elif kinds or more:
                return inner(batch, *carried, **more)
            return forward(inner, batch, *carried)

        def __init__(self, *args: Any) -> None:  # a copy of one of torch.compile is made anew
            super().__init__(*args)
            put_aside(self)

    for cls in (Inner, Outer):
        cls.__name__, cls.__qualname__, cls.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    outer = copy.copy(model)
    outer.__class__ = Outer
    if "forward" in vars(outer):
        put_aside(outer)
    else:  # what a loop sets on the model, the run reads
        object.__setattr__(outer, "__dict__", vars(model))
    return outer


_HELD = "_forward_of_instance"


def put_aside(module: nn.Module) -> None:
    """Rename the forward that an instance holds in its attributes, if it holds one and a user's forward is around it."""
    attributes = vars(module)
    if "forward" in attributes and _is_around(module):
        attributes[_HELD] = attributes.pop("forward")


def as_given(module: nn.Module) -> nn.Module:
    """Return a model without the user's forward around it: of the class that `parallelize` was given."""
    if _is_around(module):
        module.__class__ = type(module).__bases__[0]
        if _HELD in vars(module):
            vars(module)["forward"] = vars(module).pop(_HELD)
    return module


def _is_around(module: nn.Module) -> bool:
    return getattr(type(module), "takes_batch", False) and not isinstance(module, Models)
