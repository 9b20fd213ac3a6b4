"""Hooks of the axes, folded into the forwards of their modules.

A hook costs the host several microseconds a call, and hooks have numbers that differ from block to block, so a compiler would
compile each block anew. A forward that calls the same functions costs less, and equal ones share a graph.

What is folded must be code that a compiler can trace: a crossing between ranks stands in a graph as one operation
(`rank_crossings.py`), and neither path nor process group is a constant of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.program.program import Program

_MARK, _UNLESS_IN = "is_foldable", "unless_in"

Hook = Callable[..., Any]


def before_forward(
    module: nn.Module, hook: Hook, *, prepend: bool = False, unless_in: torch.dtype | None = None
) -> None:
    """Install a foldable hook before a module's forward, with keyword arguments as `hook(module, args, kwargs)`.

    It changes nothing where the forward is given one tensor of the dtype `unless_in` and nothing else.
    """
    setattr(hook, _MARK, True)
    setattr(hook, _UNLESS_IN, unless_in)
    module.register_forward_pre_hook(hook, with_kwargs=True, prepend=prepend)


def after_forward(module: nn.Module, hook: Hook, *, always_call: bool = False, prepend: bool = False) -> None:
    """Install a foldable hook that runs after a module's forward, as `hook(module, args, output)`.

    One that is always called also is behind a forward that ends with an exception, with None as output.
    """
    setattr(hook, _MARK, True)
    module.register_forward_hook(hook, always_call=always_call, prepend=prepend)


def fold(model: nn.Module, program: Program) -> None:
    """Fold the hooks of each module into its forward, unless other hooks run around it too.

    Call it when the axes have put their hooks on the modules. A head whose logits are computed in
    chunks keeps its hooks: its forward is replaced in each step.
    """
    head = program.step.model.layers[-1].head if program.step.layout.loss_chunk is not None else None
    for path, module in model.named_modules():
        if head is not None and path == head.owner:
            continue
        before = [*module._forward_pre_hooks.values()]
        after = [(hook, key in module._forward_hooks_always_called) for key, hook in module._forward_hooks.items()]
        if not (before or after) or not all(hasattr(hook, _MARK) for hook in (*before, *(hook for hook, _ in after))):
            continue
        for hooks in (
            module._forward_pre_hooks,
            module._forward_pre_hooks_with_kwargs,
            module._forward_hooks,
            module._forward_hooks_always_called,
        ):
            hooks.clear()
        module.forward = MethodType(_folded(module, before, after), module)


def _folded(module: nn.Module, hooks: Sequence[Hook], after: Sequence[tuple[Hook, bool]]) -> Callable[..., Any]:
    """Return a module's forward with its hooks, as a function of the module, so that a copy of it runs with the weights of the copy."""
    forward = forward_of(module)
    dtype = getattr(hooks[0], _UNLESS_IN) if len(hooks) == 1 and not after else None
    folded = _after_cast(forward, hooks[0], dtype) if dtype is not None else _around(forward, hooks, after)
    vars(folded).update(vars(forward))  # the marks of what is inside
    return folded


def forward_of(module: nn.Module) -> Hook:
    """Return the forward of a module as a function of the module: the instance's if it has one, else that of its class."""
    forward_here = vars(module).get("forward")
    if forward_here is None:
        return type(module).forward
    if isinstance(forward_here, MethodType) and forward_here.__self__ is module:
        return forward_here.__func__

    def forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward_here(*args, **kwargs)

    vars(forward).update(vars(forward_here))
    return forward


def _after_cast(forward: Hook, cast: Hook, dtype: torch.dtype) -> Hook:
    """Return a forward after a cast that most calls do not need, at the price of one function, or of none of a linear layer."""

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or args[0].dtype != dtype:
            args, kwargs = cast(module, args, kwargs)
        return forward(module, *args, **kwargs)

    def call_linear(module: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and args[0].dtype == dtype:
            return F.linear(args[0], module.weight, module.bias)
        args, kwargs = cast(module, args, kwargs)
        return forward(module, *args, **kwargs)

    return call_linear if forward is nn.Linear.forward else call


def _around(forward: Hook, hooks: Sequence[Hook], after: Sequence[tuple[Hook, bool]]) -> Hook:
    """Return a forward with hooks before and after it."""

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for hook in hooks:
            changed = hook(module, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        return forward(module, *args, **kwargs)

    def call_both(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output, has_ended = None, False
        try:
            for hook in hooks:
                changed = hook(module, args, kwargs)
                if changed is not None:
                    args, kwargs = changed
            output = forward(module, *args, **kwargs)
            has_ended = True
        finally:
            for hook, is_always_called in after:
                changed = hook(module, args, output) if has_ended or is_always_called else None
                if changed is not None:
                    output = changed
        return output

    return call_both if after else call


def with_hooks(forward: Hook, before: Hook, after: Hook) -> Hook:
    """Return the forward of a class with a hook before it, and one after it that is always called."""
    return _around(forward, [before], [(after, True)])
