"""Modules that exchange something with the ranks of other samples: each of these ranks must call them, and run their backward.

Experts send rows over `ep` (`expert.py`), and batch norm sums statistics over data ranks (`batch_norm.py`). A rank whose samples skip such
a module, at a branch on the data, would leave the others waiting, or answer them with values of the next module. So before each
later communication a rank checks that it has run every call that the program lists up to there: before the next exchange, before the next
gather of weights (`weights/unit_order.py`), and at the end of its forward. The error ends the whole run.

Where the loss of one rank depends on no output of such a module, autograd does not run its backward there. So a rank joins what its
loss L does not reach to it, with no effect on its value:

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
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from samestep.building.autograd_graph import is_end, nodes_from, reaches_all, tensor_of
from samestep.building.loss_result import Loss
from samestep.building.torch_seams import current_backward_id
from samestep.errors import LayoutError
from samestep.models.spec import ModelSpec, is_below
from samestep.program.ops import UPDATE_BODY, OpKind, is_forward, starts_step
from samestep.program.program import Program
from samestep.runtime.axes.forward_only import is_forward_only
from samestep.strategies import batch_norm, expert
from samestep.trees import tensors_in

Reasons = Mapping[tuple[str, str], tuple[str, str]]
"""By owner and axis of a collective the module that every rank must call for it, and the reason with what works."""
NOTHING_LEFT_OUT: frozenset[int] = frozenset()


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
        tensors = _with_gradients(outputs)
        if reason and not tensors:
            raise LayoutError(
                "zero-call-order", f"{path} ran without gradients in the forward of a micro-batch, and {reason}"
            )
        self._marks += map(_mark, tensors)
        for tensor in tensors if reason and self._before is not None else ():
            tensor.register_hook(functools.partial(self._begin_backward, path))

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
    # No elements of the output, and zeros for its gradient.
    return torch.slice_copy(output, 0, 0, 0) if output.dim() else torch.expand_copy(output, (0,))


def _marked(mark: Tensor) -> Any:
    """Return the node whose output a mark depends on."""
    assert mark.grad_fn is not None
    return mark.grad_fn.next_functions[0][0]


def joined_exchanges(
    model: nn.Module, program: Program, reasons: Reasons, before: Callable[[str], None], *, may_differ: bool
) -> JoinedExchanges | None:
    """Return what joins the exchanges of a program's backwards; None where there are none, or the losses of ranks may not differ in what they
    reach (`may_differ`).

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
        return None
    owners = dict(reasons[key] for key in reasons if key in listed)
    layers = [path for layer in program.step.model.layers for path in layer.modules if path]
    tops = [path for path in layers if path not in owners and any(is_below(owner, path) for owner in owners)]
    gathers = program.step.layout.gathers_weights
    outputs_tell = not (program.step.model.looks or gathers)
    return JoinedExchanges(model, owners, dict.fromkeys(tops), before if gathers else None, outputs_tell=outputs_tell)


def watch(model: nn.Module, program: Program, before: Callable[[str], None], loss: Loss) -> JoinedExchanges | None:
    """Let every forward check that it calls the modules that exchange values; the model is cut, and its weights are
    held. Return what their exchanges in a backward need, where the losses of ranks may differ in what they reach, as those of a
    model that looks at values do, and those of a user's own `loss`; `before` is called with the path of a module when such a
    backward starts.

    A pipeline refuses forwards that take another way than the traced one.
    """
    reasons = _reasons(program.step.model)
    if program.chunks or not reasons:
        return None
    ops = next(ops for key, ops in program.bodies.items() if is_forward(key) and starts_step(key))
    units = {unit.name: unit for unit in program.units}
    awaited: dict[str, tuple[str, str]] = {}
    calls = _ListedCalls(awaited)
    for op in ops:
        if op.axis is not None and (op.owner, op.axis) in reasons:
            path, reason = reasons[op.owner, op.axis]
            if path not in awaited:
                hook = functools.partial(calls.enter, path, len(awaited))
                _before_call(model.get_submodule(path), hook, op.axis)
                awaited[path] = op.axis, reason
        elif awaited and op.implied and op.kind is OpKind.ALL_GATHER:
            for path in units[op.owner].modules:
                hook = functools.partial(calls.enter, None, len(awaited))
                _before_call(model.get_submodule(path), hook, op.axis)
    if awaited:
        model.register_forward_pre_hook(calls.begin, prepend=True)
        model.register_forward_hook(calls.end, prepend=True)
    is_own_loss = not str(getattr(loss, "__module__", "")).startswith("samestep.")
    may_differ = program.step.model.looks or is_own_loss
    return joined_exchanges(model, program, reasons, before, may_differ=may_differ)


def _before_call(module: nn.Module, hook: Callable[..., None], axis: str | None) -> None:
    """Call a hook before the forward of a module: where a batch norm's is replaced anyway, as a part of it, which takes half as long."""
    if axis != batch_norm.AXIS:
        module.register_forward_pre_hook(hook, prepend=True)
        return
    module.forward = functools.partial(_after, hook, module.forward)


def _after(hook: Callable[..., None], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    hook()
    return forward(*args, **kwargs)


def _reasons(model: ModelSpec) -> Mapping[tuple[str, str], tuple[str, str]]:
    """Return, by owner and axis of a collective, the module that every rank must call for it, and the reason with
    what works."""
    reasons: dict[tuple[str, str], tuple[str, str]] = {}
    for layer in model.layers:
        for dispatch in layer.dispatches:
            reason = "its experts exchange rows with the ranks of other samples. Use ep=1"
            reasons[dispatch.owner, expert.AXIS] = dispatch.owner, reason
        for call in layer.batch_norms:
            reason = "it takes statistics over the ranks (batch norm). Use one data rank"
            reasons[call.owner, batch_norm.AXIS] = call.owner, reason
    return reasons


class _ListedCalls:
    """Which modules a forward has called, of those that the program lists in order."""

    def __init__(self, awaited: Mapping[str, tuple[str, str]]) -> None:
        self._awaited = awaited
        """The axis over which each module exchanges something, and why every rank must call it."""
        self._made: set[str] = set()

    def begin(self, *_: object) -> None:
        """Begin a forward."""
        self._made.clear()

    def enter(self, path: str | None, before: int, *_: object) -> None:
        """Note the call of a module, and check that those of the modules `before` it have run."""
        if current_backward_id() != -1:
            return  # repeated inside a backward
        self._check(before)
        if path is not None:
            self._made.add(path)

    def end(self, *_: object) -> None:
        """Check that all calls have run, once a forward has ended."""
        self._check(len(self._awaited))

    def _check(self, before: int) -> None:
        if len(self._made) >= before:
            return
        for path, (axis, reason) in [*self._awaited.items()][:before]:
            is_still = axis == batch_norm.AXIS and is_forward_only()  # it takes its running statistics
            if path not in self._made and not is_still:
                raise LayoutError(
                    "zero-call-order", f"{path} did not run in the forward of a micro-batch, and {reason}"
                )
