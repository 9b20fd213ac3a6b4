"""Weights of other pipeline stages in a rank's module: they have shapes and no values.

torch computes with a tensor without values and one with values, in place, as if nothing were to be done. A loop that moves one
weight towards another one, of another stage, would so leave it silently as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from samestep.errors import LayoutError
from samestep.runtime.axes.loop_calls import Asker, asker, name_of
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
        is_gradient = func.__name__ in ("__get__", "__set__") and name_of(func) == "grad"
        if is_gradient and isinstance(written, Tensor) and written.requires_grad and asker({})[0] is Asker.LOOP:
            if func.__name__ == "__get__":
                return _gradient_of(written)
            if vars(written)["waiting"].replace(vars(written)["weight_name"], args[1]):
                return None
        try:
            # Of a Parameter torch makes plain tensors, which would forget it.
            result = Tensor.__torch_function__.__func__(cls, func, types, args, kwargs or {})  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise _refusal(args) from error
        if isinstance(result, OtherStageWeight) and not result.weight_name:
            result.weight_name = _name_among(args)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be written into a file, as by `torch.save`.

        Raises:
            LayoutError: always.
        """
        raise _refusal([self])

    weight_name = ""


def _gradient_of(weight: Any) -> Tensor:
    """Return what a loop is given as the gradient of a weight of another stage: while gradients wait, the one that this stage was sent. Else
    it has no values either, and is not None, as of a weight without a gradient, which a sum over all weights would leave out.
    """
    attributes = vars(weight)
    sent: Tensor | None = attributes["waiting"].of(weight.weight_name)
    if sent is not None:
        return sent
    if "gradient" not in attributes:
        attributes["gradient"] = weightless = torch.empty_like(weight.detach()).as_subclass(OtherStageWeight)
        weightless.weight_name = f"{weight.weight_name}.grad"
    gradient: Tensor = attributes["gradient"]
    return gradient


def _name_among(values: Iterable[Any]) -> str:
    """Return the name of the first weight of another stage from which one of some operands was computed."""
    return next((operand.weight_name for operand in operands(*values) if isinstance(operand, OtherStageWeight)), "")


def _refusal(values: Iterable[Any]) -> LayoutError:
    """Return the error of an operation that needs the values of a weight among what it was given."""
    if (name := _name_among(values)).endswith(".grad"):
        return LayoutError(
            "another-stage",
            f"{name} is in another stage of the pipeline. For the norm of all gradients, use report.grad_norm. To clip, use optimizer.clip_norm of the "
            "job. For gradients of all stages, use run.gradients() between run.backward and run.update",
        )
    if _is_in_forward():
        return LayoutError(
            "another-stage",
            f"the forward of a stage uses {name or 'a weight'}, which is in another stage of the pipeline, or which the traced sample did not "
            "use (such as an image tower, without an image). Use pp=1, or add 0 * weight.sum() to the output, so that "
            "each sample uses the weight.",
        )
    return LayoutError(
        "another-stage",
        f"{name or 'a weight'} is in another stage of the pipeline, and on this rank it has no values. For all weights, use `with run.gathered() as "
        "model:`, run.state_dict() or a layout without pp. For outputs of the whole model, use run.outputs(samples)",
    )


def _is_in_forward() -> bool:
    """Return whether the caller runs within a forward of the run, and not in the code of its loop."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") not in _FORWARDS:
        frame = frame.f_back
    return frame is not None


_FORWARDS = ("samestep.runtime.interpreter", "samestep.runtime.evaluation")


def mark(model: nn.Module) -> None:
    """Let the weights of a filled module that have no values refuse to be written into those of this rank."""
    for name, param in model.named_parameters():
        if param.is_meta and type(param) is nn.Parameter:
            param.__class__ = OtherStageWeight
            vars(param)["weight_name"] = name
