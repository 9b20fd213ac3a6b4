"""Exchanges in the backward that one rank's loss does not need, which the others wait for.

Experts send gradients of rows back (`expert.py`), and batch norm sums two numbers a channel (`batch_norm.py`) in the backward of a
module that every rank has called. Where the loss of one rank depends on no output of such a module, autograd does not run its
backward there. So a rank joins what its loss L does not reach to it, with no effect on its value:

```
rank 0    L ─► head ─► experts ─► first          the rows of rank 1 that rank 0's experts have computed get their gradients,
rank 1    L ─► head ──────────────► first        and those of rank 0 that rank 1's have computed
          └ 0 ─► experts
```
The outputs get gradients of zeros, so the exchange runs where it ran in the forward, as on the other ranks, and so do the gathers of
weights and the repeated forwards around it. Weights that are reached in this way alone count as unused by this rank, so that no
step moves a weight that the loss of no rank needs (`runtime/optimizers/used_weights.py`).

A graph is searched only where ranks may differ: where code looks at values, or the loss is the user's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from samestep.building.autograd_graph import is_end, nodes_from, tensor_of
from samestep.building.torch_seams import current_backward_id
from samestep.errors import LayoutError
from samestep.models.spec import is_below
from samestep.program.ops import UPDATE_BODY, is_forward
from samestep.program.program import Program
from samestep.runtime.axes.forward_only import is_forward_only
from samestep.trees import tensors_in

Reasons = Mapping[tuple[str, str], tuple[str, str]]
"""By owner and axis of a collective the module that every rank must call for it, and the reason with what works."""
NOTHING_LEFT_OUT: frozenset[int] = frozenset()


class BackwardExchanges(Protocol):
    """The part of a rank in exchanges of the backward that its loss may not need."""

    def joined(self, loss_sum: Tensor) -> tuple[Tensor, frozenset[int]]:
        """Return a micro-batch's loss with a graph that runs all exchanges, and the ids of the weights that only this reaches."""
        ...


class NothingToJoin:
    """The `BackwardExchanges` of a program without such exchanges, or of ranks that cannot differ."""

    def joined(self, loss_sum: Tensor) -> tuple[Tensor, frozenset[int]]:
        """Return the loss as it is."""
        return loss_sum, NOTHING_LEFT_OUT


class JoinedExchanges:
    """The outputs of the modules that exchange something in the backward, in the forward of one micro-batch."""

    def __init__(
        self, model: nn.Module, owners: Mapping[str, str], tops: Iterable[str], before: Callable[[str], None]
    ) -> None:
        """Watch the modules that exchange something, each with the reason why all ranks must, and the layers that hold them.

        `before` is called with the path of such a module when its backward starts.
        """
        self._before = before
        self._marks: list[Tensor] = []
        for path, reason in owners.items():
            model.get_submodule(path).register_forward_hook(functools.partial(self._note, path, reason))
        for path in tops:
            model.get_submodule(path).register_forward_hook(functools.partial(self._note, path, ""))
        model.register_forward_pre_hook(self._begin, prepend=True)

    def _begin(self, *_: object) -> None:
        self._marks.clear()

    def _note(self, path: str, reason: str, _: nn.Module, args: Any, outputs: Any) -> None:
        """Note the outputs of a call that a backward follows.

        Raises:
            LayoutError: the module exchanges something in the backward, and this rank has called it without gradients.
        """
        if is_forward_only() or current_backward_id() != -1:
            return
        found = [one for one in tensors_in(outputs) if one.requires_grad and one.is_floating_point()]
        if reason and not found:
            raise LayoutError(f"{path} ran without gradients in the forward of a micro-batch, and {reason}")
        # No elements of the output, and zeros for its gradient: torch's operation takes half as long as a function of ours.
        self._marks += [torch.slice_copy(one, 0, 0, 0) if one.dim() else _Mark.apply(one) for one in found]
        for one in found if reason else ():
            one.register_hook(lambda _: self._before(path))

    def joined(self, loss_sum: Tensor) -> tuple[Tensor, frozenset[int]]:
        """Return a micro-batch's loss with a graph that runs all exchanges, and the ids of the weights that only this reaches."""
        marks, self._marks = self._marks, []
        reached = nodes_from([loss_sum.grad_fn])
        unreached = [mark for mark in marks if mark.grad_fn.next_functions[0][0] not in reached]  # type: ignore[union-attr,operator]
        if not unreached:
            return loss_sum, NOTHING_LEFT_OUT
        behind = nodes_from([mark.grad_fn for mark in unreached], known=reached)
        leaves = frozenset(id(tensor_of(node)) for node in behind if is_end(node))
        return loss_sum + sum(mark.sum().to(loss_sum.dtype) for mark in unreached), leaves


def joined_exchanges(
    model: nn.Module, program: Program, reasons: Reasons, before: Callable[[str], None], *, may_differ: bool
) -> BackwardExchanges:
    """Return what joins the exchanges of a program's backwards, where the losses of ranks `may_differ` in what they reach.

    `before` is called with the path of a module when the backward that exchanges something starts.
    """
    listed = {
        (op.owner, op.axis)
        for key, ops in program.bodies.items()
        if key != UPDATE_BODY and not is_forward(key)
        for op in ops
        if (op.owner, op.axis) in reasons
    }
    if not (listed and may_differ):
        return NothingToJoin()
    owners = dict(reasons[key] for key in reasons if key in listed)
    layers = [path for layer in program.step.model.layers for path in layer.modules if path]
    tops = [path for path in layers if path not in owners and any(is_below(owner, path) for owner in owners)]
    return JoinedExchanges(model, owners, dict.fromkeys(tops), before)


class _Mark(torch.autograd.Function):
    """An empty tensor that depends on another one, whose gradient through it is zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.like = x.shape, x.dtype, x.device
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        shape, dtype, device = ctx.like
        return torch.zeros(shape, dtype=dtype, device=device)
