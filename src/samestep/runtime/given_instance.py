"""The parameters of a model instance that a user gave, which a run does not train: its own are others.

A loss that closes over the instance, as a penalty on its weights does, would read their first values in every step, and
its gradient would go nowhere. The first loss is watched for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from samestep.building.dispatch_mode import DispatchMode
from samestep.errors import ModelError

Loss = Callable[[Any, Any], tuple[Tensor, Tensor | int]]


def watching(loss: Loss, model: object) -> Loss:
    """Return the loss; where the model was given as an instance, its first call must not read the instance's parameters.

    Raises:
        ModelError: the returned function: it reads one.
    """
    if not isinstance(model, nn.Module):
        return loss
    stale = {param.untyped_storage()._cdata: name for name, param in model.named_parameters() if not param.is_meta}
    watched = False

    def first_watched(outputs: Any, batch: Any) -> tuple[Tensor, Tensor | int]:
        nonlocal watched
        if watched:
            return loss(outputs, batch)
        watched = True
        with _Reading(stale) as reading:
            found = loss(outputs, batch)
        if reading.name:
            raise ModelError(
                f"the loss reads {reading.name} of the model instance that was given, and a run trains parameters of its own: "
                "the loss would see the first values in every step; a forward that returns what the loss needs of the weights "
                "works, and so does weight_decay"
            )
        return found

    return first_watched


class _Reading(DispatchMode):
    """Notes the first of some memories that an operation reads."""

    def __init__(self, stale: dict[int, str]) -> None:
        super().__init__()
        self._stale = stale
        self.name = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            for leaf in value if isinstance(value, list | tuple) else (value,):
                if isinstance(leaf, Tensor) and not self.name:
                    self.name = self._stale.get(leaf.untyped_storage()._cdata, "")
        return func(*args, **(kwargs or {}))
