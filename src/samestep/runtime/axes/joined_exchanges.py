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

A graph is searched only where ranks may differ: where code looks at values, or the loss is the user's own. If only the loss may
differ, the first micro-batch shows whether the model's outputs depend on all such modules; from then on it is enough to know
whether the loss reaches the outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from samestep.building.autograd_graph import is_end, nodes_from, reaches_all, tensor_of
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
        self,
        model: nn.Module,
        owners: Mapping[str, str],
        tops: Iterable[str],
        before: Callable[[str], None] | None,
        *,
        outputs_tell: bool,
    ) -> None:
        """Watch the modules that exchange something, each with the reason why all ranks must, and the layers that hold them.

        `before`, if there is one, is called with the path of such a module when its backward starts. Where `outputs_tell`, every forward
        makes the same graph: if the outputs depend on all modules in the first, they do in all.
        """
        self._before, self._outputs_tell = before, outputs_tell
        self._marks: list[Tensor] = []
        self._of_outputs: list[Tensor] = []
        self._handles: list[RemovableHandle] = []
        """The hooks of single modules, which are removed when the outputs are known to depend on all of them."""
        for path, reason in owners.items():
            self._watch(model.get_submodule(path), functools.partial(self._note, path, reason))
        for path in tops:
            self._watch(model.get_submodule(path), functools.partial(self._note, path, ""))
        model.register_forward_pre_hook(self._begin, prepend=True)
        if outputs_tell:
            model.register_forward_hook(self._end)

    def _watch(self, module: nn.Module, hook: Callable[..., None]) -> None:
        self._handles.append(module.register_forward_hook(hook))

    def _begin(self, *_: object) -> None:
        self._marks.clear()
        self._of_outputs.clear()

    def _note(self, path: str, reason: str, _: nn.Module, args: Any, outputs: Any) -> None:
        """Note the outputs of a call that a backward follows.

        Raises:
            LayoutError: the module exchanges something in the backward, and this rank has called it without gradients.
        """
        if is_forward_only() or current_backward_id() != -1:
            return
        found = _with_gradients(outputs)
        if reason and not found:
            raise LayoutError(
                "zero-call-order",
                f"{path} ran without gradients in the forward of a micro-batch, and {reason}",
            )
        self._marks += map(_mark, found)
        for one in found if reason and self._before is not None else ():
            one.register_hook(functools.partial(self._begin_backward, path))

    def _begin_backward(self, path: str, _: Tensor) -> None:
        assert self._before is not None
        self._before(path)

    def _end(self, _: nn.Module, args: Any, outputs: Any) -> None:
        if not is_forward_only() and current_backward_id() == -1:
            self._of_outputs += map(_mark, _with_gradients(outputs))

    def joined(self, loss_sum: Tensor) -> tuple[Tensor, frozenset[int]]:
        """Return a micro-batch's loss with a graph that runs all exchanges, and the ids of the weights that only this reaches."""
        marks = self._marks if self._handles else self._of_outputs
        self._marks, self._of_outputs, of_outputs = [], [], self._of_outputs
        if not self._handles and reaches_all(loss_sum.grad_fn, map(_marked, marks)):
            return loss_sum, NOTHING_LEFT_OUT
        reached = nodes_from([loss_sum.grad_fn])
        unreached = [mark for mark in marks if _marked(mark) not in reached]
        if self._outputs_tell and self._handles:
            self._leave_to_outputs(marks, of_outputs)
        if not unreached:
            return loss_sum, NOTHING_LEFT_OUT
        behind = nodes_from([mark.grad_fn for mark in unreached], known=reached)
        leaves = frozenset(id(tensor_of(node)) for node in behind if is_end(node))
        return loss_sum + sum(mark.sum().to(loss_sum.dtype) for mark in unreached), leaves

    def _leave_to_outputs(self, marks: list[Tensor], of_outputs: list[Tensor]) -> None:
        """Watch the model's outputs alone from now on, if they depend on all modules."""
        behind = nodes_from([_marked(mark) for mark in of_outputs])
        if marks and all(_marked(mark) in behind for mark in marks):
            while self._handles:
                self._handles.pop().remove()


def _with_gradients(outputs: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(outputs) if tensor.requires_grad and tensor.is_floating_point()]


def _mark(output: Tensor) -> Tensor:
    """Return an empty tensor that depends on an output, whose gradient through it is zeros."""
    # No elements of the output, and zeros for its gradient: torch's operation takes half as long as a function of ours.
    if output.dim():
        return torch.slice_copy(output, 0, 0, 0)
    scalar: Tensor = _Mark.apply(output)
    return scalar


def _marked(mark: Tensor) -> Any:
    """Return the node whose output a mark depends on."""
    assert mark.grad_fn is not None
    return mark.grad_fn.next_functions[0][0]


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
    gathers = program.step.layout.gathers_weights
    outputs_tell = not (program.step.model.looks or gathers)
    return JoinedExchanges(model, owners, dict.fromkeys(tops), before if gathers else None, outputs_tell=outputs_tell)


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
