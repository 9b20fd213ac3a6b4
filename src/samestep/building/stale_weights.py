"""A parameter that a module also keeps in a plain attribute, such as `dict(self.named_parameters())`.

A run puts parameters of its own into the module, which move, are cut and are gathered; one that is kept elsewhere stays as it was
built, without values. Code may keep such a tensor and never read it. Where it does, the error says which one.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

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
        given = operands(*args, *(kwargs or {}).values())
        held = next(one for one in given if isinstance(one, StaleWeight))
        # Torch multiplies a matrix with values by one without, and gives one without.
        if not all(isinstance(one, StaleWeight) or one.is_meta for one in given):
            raise held.refusal()
        plain_args, plain_kwargs = tree_map_only(StaleWeight, lambda one: one.plain, (args, kwargs or {}))
        try:
            found = func(*plain_args, **plain_kwargs)
        except (RuntimeError, NotImplementedError) as error:
            raise held.refusal() from error
        return tree_map_only(
            Tensor, lambda one: stale(held.attribute, held.parameter, one) if one.is_meta else one, found
        )

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
    found = plain.as_subclass(StaleWeight)
    found.plain, found.attribute, found.parameter = plain, attribute, parameter
    return found
