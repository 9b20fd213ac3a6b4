"""Backwards within a model's forward, as an adversarial example or a virtual one does: `loss.backward()`, then `x.grad`.

A plain loop clears the gradients that such a backward leaves in weights before its own, so only the tensors count that the forward has
made. Within a forward here, no gradient reaches a weight:

    x = x.detach().requires_grad_()
    criterion(model(x), y).backward()       gradients of x alone; none in weights, whose reduction has not begun
    model.zero_grad()                       what the micro-batches before have left in weights is put aside, and stays
    model(x + epsilon * x.grad.sign())

A forward that does not clear the weights would add its own gradients to those of the loss in a plain loop. A mark in the first weight shows
that, and the forward is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from samestep.building.autograd_graph import is_end, nodes_from, tensor_of
from samestep.errors import ModelError


def around(
    model: nn.Module, running: Callable[[], AbstractContextManager[object]]
) -> Callable[[], AbstractContextManager[object]]:
    """Return the context of forwards of a model that takes gradients itself, around another context."""

    @contextmanager
    def both() -> Iterator[None]:
        with running(), _of_own_tensors(model):
            yield

    return both


@contextmanager
def _of_own_tensors(model: nn.Module) -> Iterator[None]:
    """Let backwards that run inside reach the tensors that the forward makes, and none of the weights.

    Raises:
        ModelError: the forward ends with gradients of its own in weights.
    """
    gradients = [(param, param.grad) for param in model.parameters() if param.grad is not None]
    for param, _ in gradients:
        param.grad = None
    torchs, mark = torch.autograd.backward, _Mark(model)
    torch.autograd.backward = functools.partial(_backward, torchs, mark)
    try:
        yield
        mark.refuse_left()
    finally:
        torch.autograd.backward = torchs
        mark.remove()
        for param, gradient in gradients:
            param.grad = gradient


class _Mark:
    """A gradient of ones in one weight, which shows whether the forward clears those that its backward would leave."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._at: nn.Parameter | None = None
        self._weights = {id(param): param for param in model.parameters()}

    def is_weight(self, leaf: Tensor) -> bool:
        """Return whether a leaf is a weight of the model, and no parameter that the forward has created; gathered ones may be freed."""
        if not isinstance(leaf, nn.Parameter):
            return False
        is_held = id(leaf) in self._weights or any(leaf is param for param in self._model.parameters())
        return is_held or not leaf.untyped_storage().size()

    def set(self) -> None:
        """Mark the first weight, as the forward that runs has it."""
        if self._at is None:
            self._at = next((param for param in self._model.parameters() if param.requires_grad), None)
        if self._at is not None:
            self._at.grad = torch.ones_like(self._at)

    def refuse_left(self) -> None:
        """Refuse a forward that has left the mark.

        Raises:
            ModelError: it has.
        """
        left = None if self._at is None else self._at.grad
        if left is not None and bool(getattr(left, "_local_tensor", left).any()):
            raise ModelError(
                "own-backward",
                "the forward runs a backward of its own and leaves gradients in weights, which a plain loop would add to the gradients of the loss. Use model.zero_grad() after it, or torch.autograd.grad(loss, x)",
            )

    def remove(self) -> None:
        """Leave the weight without a gradient."""
        if self._at is not None:
            self._at.grad = None


def _backward(
    torchs: Callable[..., None], mark: _Mark, tensors: Tensor | Sequence[Tensor], *args: Any, **options: Any
) -> None:
    """Run a backward to the leaves that are no weights, and mark a weight where these would have gradients."""
    inputs = options.pop("inputs", None)
    roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    asked = _leaves(roots) if inputs is None else [inputs] if isinstance(inputs, Tensor) else list(inputs)
    leaves = [leaf for leaf in asked if not mark.is_weight(leaf)]
    if len(leaves) < len(asked):
        mark.set()
    if leaves:
        torchs(tensors, *args, **options, inputs=leaves)


def _leaves(roots: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors to which a backward of these roots adds gradients."""
    ends = [tensor_of(node) for node in nodes_from(root.grad_fn for root in roots) if is_end(node)]
    leaf_roots = [root for root in roots if root.grad_fn is None and root.requires_grad]
    return [*{id(leaf): leaf for leaf in (*leaf_roots, *ends)}.values()]
