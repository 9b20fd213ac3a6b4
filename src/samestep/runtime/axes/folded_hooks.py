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

from torch import nn

from samestep.program.program import Program

_MARK = "is_foldable"

Hook = Callable[..., Any]


def before_forward(module: nn.Module, hook: Hook, *, prepend: bool = False) -> None:
    """Install a foldable hook before a module's forward, with keyword arguments as `hook(module, args, kwargs)`."""
    setattr(hook, _MARK, True)
    module.register_forward_pre_hook(hook, with_kwargs=True, prepend=prepend)


def after_forward(module: nn.Module, hook: Hook, *, always_call: bool = False, prepend: bool = False) -> None:
    """Install a foldable hook behind a module's forward, as `hook(module, args, output)`.

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
        for held in (
            module._forward_pre_hooks,
            module._forward_pre_hooks_with_kwargs,
            module._forward_hooks,
            module._forward_hooks_always_called,
        ):
            held.clear()
        module.forward = MethodType(_folded(module, before, after), module)


def _folded(module: nn.Module, before: Sequence[Hook], after: Sequence[tuple[Hook, bool]]) -> Callable[..., Any]:
    """Return a module's forward with its hooks, as a function of the module, so that a copy of it runs with its own weights."""
    forward, given = type(module).forward, vars(module).get("forward")
    if isinstance(given, MethodType) and given.__self__ is module:
        forward, given = given.__func__, None

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for hook in before:
            changed = hook(module, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        return forward(module, *args, **kwargs) if given is None else given(*args, **kwargs)

    def call_both(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output, has_ended = None, False
        try:
            output = call(module, *args, **kwargs)
            has_ended = True
        finally:
            for hook, is_always_called in after:
                changed = hook(module, args, output) if has_ended or is_always_called else None
                if changed is not None:
                    output = changed
        return output

    folded = call_both if after else call
    vars(folded).update(vars(given or forward))  # the marks of what is inside
    return folded
