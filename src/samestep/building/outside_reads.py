"""Weights that code reads elsewhere than in their modules.

A run puts parameters of its own into a module, which move, are cut and are gathered. A tensor that is kept elsewhere, such as in
`dict(self.named_parameters())`, stays as it was built, without values (`StaleWeight`): if code reads it, the error names it. `FirstRead`
finds the first of some weights that code reads. It watches calls of torch, not operations: a traced forward runs these on other
tensors. A weight is known by its storage, so that a view of it that was made before is found too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from samestep.building.named_tensors import address
from samestep.building.torch_seams import FunctionMode, is_traceable_wrapper_subclass
from samestep.errors import ModelError
from samestep.trees import operands, tree_map_only


class StaleWeight(Tensor):
    """A parameter without values that stays in an attribute, and whatever is computed from it."""

    plain: Tensor
    """The same tensor, as torch has it."""
    attribute: str
    parameter: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = operands(*args, *(kwargs or {}).values())
        weight = next(tensor for tensor in tensors if isinstance(tensor, StaleWeight))
        # Torch multiplies a matrix with values by one without, and gives one without.
        if not all(isinstance(tensor, StaleWeight) or tensor.is_meta for tensor in tensors):
            raise weight.refusal()
        plain_args, plain_kwargs = tree_map_only(StaleWeight, lambda tensor: tensor.plain, (args, kwargs or {}))
        try:
            result = func(*plain_args, **plain_kwargs)
        except (RuntimeError, NotImplementedError) as error:
            raise weight.refusal() from error
        return tree_map_only(Tensor, lambda t: stale(weight.attribute, weight.parameter, t) if t.is_meta else t, result)

    def refusal(self) -> ModelError:
        """Return the error of code that needs its values."""
        return ModelError(
            "instance-read-elsewhere",
            f"the model's code reads the parameter {self.parameter} from the attribute {self.attribute}, which keeps it from the time "
            "when the model was built, and a run puts parameters of its own into the module. Use a parameter that is read from its module "
            "(self.…), or by self.named_parameters() within the forward",
        )


def stale(attribute: str, parameter: str, tensor: Tensor) -> StaleWeight:
    """Return what stands in an attribute in place of a parameter of the module, of which `tensor` is the one without values."""
    plain = tensor.detach()
    weight = plain.as_subclass(StaleWeight)
    weight.plain, weight.attribute, weight.parameter = plain, attribute, parameter
    return weight


class FirstRead:
    """Notes the first of some weights that a function of torch is given inside of its mode."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.mode = FunctionMode(self._carry_out)
        named = [*weights]
        self._alive = [weight for _, weight in named]
        """Until the end no other tensor has one of their storages."""
        self._names = {_key_of(weight): name for name, weight in named}
        self._running = 1
        self.name = ""
        """The name of the weight; empty if there is none."""

    @contextmanager
    def within(self, module: nn.Module) -> Iterator[None]:
        """Watch the calls of a module's forwards alone."""
        self._running = 0
        hooks = [
            module.register_forward_pre_hook(self._enter, prepend=True),
            module.register_forward_hook(self._leave, always_call=True),
        ]
        try:
            with self.mode:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, *_: Any) -> None:
        self._running += 1

    def _leave(self, *_: Any) -> None:
        self._running -= 1

    def _carry_out(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._running and not self.name:
            tensors = operands(*args, *kwargs.values())
            self.name = next((name for tensor in tensors if (name := self._names.get(_key_of(tensor)))), "")
        return func(*args, **kwargs)


def _key_of(tensor: Tensor) -> tuple[str, int]:
    """Return what identifies the memory of a tensor; of one that wraps others, the tensor itself."""
    return ("tensor", id(tensor)) if is_traceable_wrapper_subclass(tensor) else ("storage", address(tensor))
