"""Split backward, for zero-bubble schedules (twin of the W tasks of `strategies/pipeline.py`).

Qi et al. 2023, arXiv:2401.10241. For y = x A, with G the gradient of y:

    B   gradient of x = G A^T     at once: the previous stage waits for it
    W   gradient of A = x^T G     later, from x and G, which are kept until then

A linear layer's own forward computes y, inside a function whose backward computes B and postpones W. W is then given to
the weight by autograd, so hooks on the weight run, and the backward of casts in front of it. Everything that is not a
linear layer (norms, biases, embeddings), and weights that several modules share, gets its whole gradient in B. Where
other code reads a linear layer's weight too, that part comes in B, and the gradient is whole after W.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.building.families import is_transposed
from samestep.building.torch_seams import run_backward
from samestep.examination.traced_model import TracedModel
from samestep.independence.tensor_plan import is_linear
from samestep.models.spec import is_below
from samestep.program.program import Program
from samestep.program.step import StepSpec
from samestep.runtime.axes.folded_hooks import forward_of
from samestep.strategies.chunked_mlp import chunked_owners

_AT_ONCE = 4
"""Weights whose gradients exist besides those that are added up: each call of autograd takes the host as long as a product."""


class _PostponedGradient(NamedTuple):
    """The tensors from which a postponed weight gradient is computed."""

    weight: Tensor
    given: Tensor
    gradient: Tensor
    is_transposed: bool


@dataclass(slots=True)
class LayerInput:
    """The input of layers whose weight gradients are postponed."""

    moved: Tensor | None = None
    """After its last move between ranks, until a backward adds up the gradients."""


class Postponed:
    """Weight gradients that a backward has left to be computed later."""

    def __init__(self, input_: LayerInput | None = None) -> None:
        self._gradients: list[_PostponedGradient] = []
        self._input = input_ or LayerInput()

    def postpone(self, weight: Tensor, inputs: Tensor, gradient: Tensor, is_transposed: bool) -> None:
        """Postpone the gradient of a weight, `inputs` being the input of its layer and `gradient` that of its output."""
        self._gradients.append(_PostponedGradient(weight, inputs, gradient, is_transposed))

    def add_up(self) -> None:
        """Add the postponed gradients to those of the weights, in the order of the backward."""
        self._input.moved = None
        weights: list[Tensor] = []
        products: list[Tensor] = []
        while self._gradients:
            item = self._gradients.pop(0)
            if len(weights) == _AT_ONCE or id(item.weight) in map(
                id, weights
            ):  # one that is used twice is added to twice
                run_backward((*weights,), (*products,))
                weights, products = [], []
            inputs, gradient = item.given.flatten(0, -2).to(item.gradient.dtype), item.gradient.flatten(0, -2)
            product = inputs.T @ gradient if item.is_transposed else gradient.T @ inputs
            weights.append(item.weight)
            products.append(product.to(item.weight.dtype))
        if weights:
            run_backward((*weights,), (*products,))


class Deferred:
    """The weight gradients that the backward of each micro-batch has postponed, until its W task."""

    def __init__(self, traced: TracedModel, program: Program) -> None:
        self.microbatch = 0
        """Micro-batch whose backward runs."""
        self._postponed: dict[int, Postponed] = {}
        if not program.step.splits_backward:
            return
        shared = {name for p in program.step.model.params if p.shared for name in (p.name, *p.aliases)}
        head = program.step.model.layers[-1].head
        if (
            program.step.layout.loss_chunk is not None and head is not None
        ):  # whose gradient comes with that of the loss
            shared.add(f"{head.owner}.weight")
        apart = chunked_owners(program.step.model)  # whose backward makes all gradients of a chunk at once
        for path, module in traced.module.named_modules():
            is_apart = any(is_below(path, path_apart) for path_apart in apart)
            if is_linear(module) and f"{path}.weight" not in shared and not is_apart:
                postpone_weights(module, lambda _: self)
                vars(module.forward)[_MARK] = True

    def add_up(self, microbatch: int) -> None:
        """Add the postponed gradients of a micro-batch to those of the weights, in the order of its backward."""
        self._postponed.pop(microbatch, Postponed()).add_up()

    def postpone(self, weight: Tensor, inputs: Tensor, gradient: Tensor, is_transposed: bool) -> None:
        """Postpone the gradient of a weight, `inputs` being the input of its layer and `gradient` that of its output."""
        self._postponed.setdefault(self.microbatch, Postponed()).postpone(weight, inputs, gradient, is_transposed)


def postpone_weights(module: nn.Module, until: Callable[[Tensor], Postponed | Deferred | None]) -> None:
    """Make a linear module's backward compute the gradient of its input alone, and postpone that of its weight to
    the list that `until` returns for the input; where that is None, the backward is autograd's."""
    forward, is_turned = forward_of(module), is_transposed(module)
    is_plain = type(module).forward is nn.Linear.forward and "forward" not in vars(module)

    def call(module: nn.Module, *args: Tensor, **named: Tensor) -> Tensor:
        if torch.compiler.is_dynamo_compiling():  # one backward of a graph makes all gradients
            compiled: Tensor = forward(module, *args, **named)
            return compiled
        weight: Any
        bias: Any
        try:
            weight, bias = module._parameters["weight"], module._parameters["bias"]
        except KeyError:  # computed in each forward, from others
            weight, bias = module.weight, module.bias
        (x,) = (*args, *named.values())
        assert isinstance(weight, Tensor)
        is_trained = torch.is_grad_enabled() and x.requires_grad and weight.requires_grad
        postponed = until(x) if is_trained else None
        if postponed is None:
            result: Tensor = forward(module, x)
            return result
        computes = F.linear if is_plain else lambda x, *_: forward(module, x)
        # Inside a tuple autograd does not see the weight, and so computes no gradient for it.
        return _SplitBackward.apply(x, bias, (weight, computes, postponed, is_turned))

    module.forward = MethodType(call, module)


_MARK = "postpones_weight_gradient"


def is_postponed(model: nn.Module, name: str) -> bool:
    """Return whether a W task adds to the gradient of a weight, so that it is not whole before."""
    path, _, leaf = name.rpartition(".")
    return leaf == "weight" and hasattr(model.get_submodule(path).forward, _MARK)


class _SplitBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        boxed: tuple[Tensor, Callable[[Tensor, Tensor, Any], Tensor], Postponed | Deferred, bool],
    ) -> Tensor:
        weight, computes, ctx.deferred, ctx.is_transposed = boxed
        ctx.save_for_backward(x, weight if weight.is_leaf else weight.detach())
        ctx.weight = weight
        ctx.bias_dtype = None if bias is None else bias.dtype
        return computes(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = gradients[0]
        x, weight = ctx.saved_tensors
        ctx.deferred.postpone(ctx.weight, x, gradient, ctx.is_transposed)
        weight = weight.to(gradient.dtype)  # under the model's autocast the output has another dtype
        of_input = (gradient @ (weight.T if ctx.is_transposed else weight)).to(x.dtype)
        bias = gradient.flatten(0, -2).sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[1] else None
        return of_input, bias, None


def separable(step: StepSpec) -> tuple[str, ...]:
    """Return the linear modules whose weights' gradients are computed while the gradient of their input is summed."""
    if step.splits_backward:
        return ()
    sums = (part for layer in step.model.layers for part in layer.backward_sums)
    return tuple(dict.fromkeys(path for part in sums for path in part.beside))
