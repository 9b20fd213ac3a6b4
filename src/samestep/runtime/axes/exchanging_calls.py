"""Calls of modules that exchange something with the ranks of other samples, which each of these ranks must make.

Experts exchange rows over `ep`, and batch norm its statistics over data ranks. A rank whose samples skip such a module,
at a branch on the data, would leave the others waiting, or answer them with values of the next module. So before each
later communication a rank checks that it has run every call that the program lists up to there: before the next
exchange, before the next gather of weights (`weights/unit_order.py`), and at the end of its forward. The error ends the
whole run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from samestep.building.loss_result import Loss
from samestep.building.torch_seams import current_backward_id
from samestep.errors import LayoutError
from samestep.models.spec import ModelSpec
from samestep.program.ops import OpKind, is_forward, starts_step
from samestep.program.program import Program
from samestep.runtime.axes.forward_only import is_forward_only
from samestep.runtime.axes.joined_exchanges import BackwardExchanges, NothingToJoin, joined_exchanges
from samestep.strategies import batch_norm, expert


def watch(model: nn.Module, program: Program, before: Callable[[str], None], loss: Loss) -> BackwardExchanges:
    """Let every forward check that it calls the modules that exchange values; the model is cut, and its weights are
    held. Return what their exchanges in a backward need, where the losses of ranks may differ in what they reach, as those of a
    model that looks at values do, and those of a user's own `loss`; `before` is called with the path of a module when such a
    backward starts.

    A pipeline refuses forwards that take another way than the traced one.
    """
    reasons = _reasons(program.step.model)
    if program.chunks or not reasons:
        return NothingToJoin()
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
                model.get_submodule(path).register_forward_pre_hook(hook, prepend=True)
    if awaited:
        model.register_forward_pre_hook(calls.begin, prepend=True)
        model.register_forward_hook(calls.end, prepend=True)
    is_own_loss = not str(getattr(loss, "__module__", "")).startswith("samestep.")
    may_differ = program.step.model.looks or is_own_loss
    return joined_exchanges(model, program, reasons, before, may_differ=may_differ)


def _before_call(module: nn.Module, hook: Callable[..., None], axis: str) -> None:
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
    found: dict[tuple[str, str], tuple[str, str]] = {}
    for layer in model.layers:
        for dispatch in layer.dispatches:
            reason = "its experts exchange rows with ranks whose samples use them: ep=1 works"
            found[dispatch.owner, expert.AXIS] = dispatch.owner, reason
        for call in layer.batch_norms:
            reason = "it takes statistics over the ranks (batch norm): one data rank works"
            found[call.owner, batch_norm.AXIS] = call.owner, reason
    return found


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
