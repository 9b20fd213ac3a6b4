"""Weights of other pipeline stages in a rank's module: they have shapes and no values.

torch computes with a tensor without values and one with values, in place, as if nothing were to be done. A loop that moves one
weight towards another one, of another stage, would so leave it silently as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from samestep.errors import LayoutError
from samestep.trees import operands


class OtherStageWeight(nn.Parameter):
    """A weight of another stage, which nothing with values is written from, and whose values nobody is given."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Carry out an operation that asks for no values.

        Raises:
            LayoutError: it writes into a tensor with values, or asks for values.
        """
        written = args[0] if args else None
        is_write = func.__name__.endswith("_") and not func.__name__.endswith("__")
        if is_write and isinstance(written, Tensor) and not written.is_meta:
            raise _refusal(args[1:])
        try:
            # Of a Parameter torch makes plain tensors, which would forget it.
            return Tensor.__torch_function__.__func__(cls, func, types, args, kwargs or {})  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise _refusal(args) from error

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be written into a file, as by `torch.save`.

        Raises:
            LayoutError: always.
        """
        raise _refusal([self])

    weight_name = ""


def _refusal(given: Iterable[Any]) -> LayoutError:
    """Return the error of an operation that needs the values of a weight among what it was given."""
    name = next((one.weight_name for one in operands(*given) if isinstance(one, OtherStageWeight)), "")
    return LayoutError(
        f"{name or 'a weight'} is in another stage of the pipeline, and on this rank it has no values: within "
        "`with run.gathered() as model:` all weights are there, and so they are in a layout without pp; "
        "run.state_dict() returns them too"
    )


def mark(model: nn.Module) -> None:
    """Let the weights of a filled module that have no values refuse to be written into those of this rank."""
    for name, param in model.named_parameters():
        if param.is_meta and type(param) is nn.Parameter:
            param.__class__ = OtherStageWeight
            vars(param)["weight_name"] = name
