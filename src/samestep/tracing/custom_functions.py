"""What code adds to a backward, which a traced forward cannot follow: custom Functions of autograd, and hooks of gradients."""

from __future__ import annotations

import functools
import inspect
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from samestep.building.torch_seams import DispatchMode, Replaced, disable_current_modes
from samestep.state.snapshot import preserve_function
from samestep.tracing.meta_tensors import NeedsValuesError, run_on_meta
from samestep.trees import have_same_values, operands, tree_map_only

Function = Any
"""The `apply` of a custom Function of autograd."""
Hook = Callable[..., Any]
"""A hook as a function of gradients."""
Applied = Callable[[Function, tuple[Any, ...], dict[str, Any], Any], None]
"""Receives the `apply` of a Function, the arguments of a call, and its outcome."""

Hooked = Callable[[str, Hook, list[Tensor], list[Tensor]], None]
"""Receives a hook of gradients: its name, a function of the gradients of some tensors, these, and those whose it returns."""

Ran = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
"""Receives an operation: its function, its arguments as they are given, and its outcome."""

_KNOWN = ("samestep.", "torch.")


SEVERAL = "a hook on several gradients"
"""How a hook of `register_multi_grad_hook` is named."""


def report_hooks(hooked: Hooked) -> Replaced:
    """Report every hook that this thread puts on a tensor inside. Those of torch and samestep are known."""
    original, thread = Tensor.register_hook, threading.get_ident()
    of_nodes: Any = torch.autograd.Function._register_hook
    grad_fn: Any = Tensor.grad_fn
    several: list[Tensor] = []
    """Tensors on whose gradients a hook of several waits that is being registered."""
    firsts: dict[Any, list[Tensor]] = {}
    """Tensors of each hook that is given the gradient which comes first."""
    shown: list[Tensor] = []
    """The tensor whose node was asked for last."""

    def is_of_user(hook: Any) -> bool:
        return threading.get_ident() == thread and not (getattr(hook, "__module__", "") or "").startswith(_KNOWN)

    def register(tensor: Tensor, hook: Callable[[Tensor], Any]) -> Any:
        handle = original(tensor, hook)
        if (
            getattr(hook, "__code__", _NO_CODE).co_filename == torch.autograd.graph.__file__
        ):  # of register_multi_grad_hook
            seen = inspect.getclosurevars(hook).nonlocals
            function, is_last = seen["fn"], seen.get("idx", 0) + 1 == seen.get("len_tensors", 1)
            several.append(tensor)
            if is_last and is_of_user(function):
                takes_list = "idx" in seen
                firsts.setdefault(hook, []).append(tensor)
                tensors = [*several] if takes_list else [*firsts[hook]]
                hooked(
                    SEVERAL,
                    lambda *gradients: (function([*gradients] if takes_list else gradients[0]), gradients)[1],
                    tensors,
                    tensors,
                )
            if is_last:
                several.clear()
        elif is_of_user(hook):
            hooked("a hook on a gradient", lambda gradient: _or_given(hook(gradient), gradient), [tensor], [tensor])
        return handle

    class Shown:
        """The attribute of tensors that is their node."""

        __name__ = "grad_fn"

        def __get__(self, tensor: Tensor | None, owner: Any = None) -> Any:
            shown[:] = [] if tensor is None else [tensor]
            return self if tensor is None else grad_fn.__get__(tensor)

    def register_on_node(hooks: Any, hook: Callable[..., Any]) -> Any:
        if shown and is_of_user(hook):
            hooked("a hook on a node (grad_fn.register_hook)", _refuse_to_run, [*shown], [*shown])
        return of_nodes(hooks, hook)

    return Replaced(
        (Tensor, "register_hook", lambda _: register),
        (Tensor, "grad_fn", lambda _: Shown()),
        (torch.autograd.Function, "_register_hook", lambda _: staticmethod(register_on_node)),
    )


_NO_CODE = (lambda: None).__code__


def _refuse_to_run(*_: Any) -> Any:
    """Stand for a hook whose gradients are those of a node's inputs and outputs, of which a forward shows nothing."""
    raise NeedsValuesError


def report_module_hooks(part: nn.Module, args: tuple[Any, ...], output: Any, hooked: Hooked) -> None:
    """Report the hooks that a module has on the gradients of its inputs and outputs."""
    inputs = [value for value in args if isinstance(value, Tensor) and value.requires_grad]
    outputs = operands(output)
    for hook in part._backward_pre_hooks.values():
        hooked("a backward hook", functools.partial(_above, hook, part), outputs, outputs)
    for hook in part._backward_hooks.values():
        run = functools.partial(_both, hook, part, len(inputs))
        hooked("a backward hook", run, [*inputs, *outputs], inputs)


def _above(hook: Callable[..., Any], part: nn.Module, *above: Tensor) -> Any:
    return _or_given(hook(part, above), above)


def _both(hook: Callable[..., Any], part: nn.Module, num_inputs: int, *gradients: Tensor) -> Any:
    of_inputs, above = gradients[:num_inputs], gradients[num_inputs:]
    return _or_given(hook(part, of_inputs, above), of_inputs)


def follow_calls(ran: Ran) -> DispatchMode:
    """Run operations on the meta device inside, and report each that is given or returns a tensor of it: of a hook, a loss, a backward."""

    def carry_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = operands(*args, *kwargs.values())
        moved = args, kwargs
        if any(tensor.is_meta for tensor in tensors):
            if func is torch.ops.aten._to_copy.default and kwargs.get("device") not in (None, torch.device("meta")):
                raise NeedsValuesError
            if not all(tensor.is_meta for tensor in tensors):
                moved = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        outcome = run_on_meta(func, *moved)
        if any(tensor.is_meta for tensor in (*tensors, *operands(outcome))):
            ran(func, args, kwargs, outcome)
        return outcome

    return DispatchMode(carry_out)


def follow_hook(hook: Callable[..., Any], gradients: Sequence[Tensor], ran: Ran) -> list[Tensor] | None:
    """Run a hook on gradients of the meta device, report its operations, and return what it makes of them; None if it looks at values and
    does not leave the gradients as they are.
    """
    try:
        with disable_current_modes(), torch.no_grad(), preserve_function(hook), follow_calls(ran):
            return operands(hook(*gradients))
    except Exception:  # of the user's own code, which reads what the meta device does not have
        return _left_alone(hook, gradients)


_SIZES = (0.0, 1e-8, 1e-4, 1.0, 1e4, 1e8, math.inf, math.nan)
"""Factors of the gradients on which a hook is tried that looks at their values."""
_MOST_NUMBERS = 8
"""Gradients of so many sizes are tried too that are near the numbers in the code of a hook."""


def _left_alone(hook: Callable[..., Any], gradients: Sequence[Tensor]) -> list[Tensor] | None:
    """Return the gradients that a hook leaves as they are, of whatever size, as one that logs them does; None if it changes some."""
    drawn = [
        torch.randn(tensor.shape, dtype=tensor.dtype, generator=torch.Generator().manual_seed(0))
        for tensor in gradients
    ]
    largest = max((float(tensor.norm()) for tensor in drawn), default=0.0) or 1.0
    results: list[Tensor] = []
    with disable_current_modes(), torch.no_grad(), preserve_function(hook) as state:
        near = [number * by / largest for number in sorted(state.before.numbers)[-_MOST_NUMBERS:] for by in (0.9, 1.1)]
        for size in (*_SIZES, *near):
            scaled = [tensor * size for tensor in drawn]
            seen = [tensor.clone() for tensor in scaled]
            try:
                results = operands(hook(*seen))
            except Exception:  # of the user's own code, which may be a check of finite gradients
                if math.isfinite(size):
                    return None
                continue
            if not all(map(have_same_values, (*results, *seen), (*scaled[: len(results)], *scaled))):
                return None
    return [*gradients[: len(results)]]


def _or_given(returned: Any, gradients: Any) -> Any:
    """Return what a hook returns, or else the gradients that it was given, which then stay as they are."""
    return gradients if returned is None else returned


def _calls_carried_out(carry_out: Callable[[type, Function, tuple[Any, ...], dict[str, Any]], Any]) -> Replaced:
    """Let a function carry out the calls of custom Functions in this thread inside; those of torch and samestep run as they are."""
    thread = threading.get_ident()

    def replacing(_: Function) -> Any:
        # A class method of Python, or from torch 2.14 on a method in C.
        original = vars(torch.autograd.Function)["apply"]

        def apply(function: type, *args: Any, **named: Any) -> Any:
            plain = original.__get__(None, function)
            if threading.get_ident() != thread or function.__module__.startswith(_KNOWN):
                return plain(*args, **named)
            return carry_out(function, plain, args, named)

        return classmethod(apply)

    return Replaced((torch.autograd.Function, "apply", replacing))


def report_functions(applied: Applied) -> Replaced:
    """Report every custom Function that this thread calls inside. Those of torch and samestep are known."""

    def report(_: type, plain: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        outcome = plain(*args, **named)
        applied(plain, args, named, outcome)
        return outcome

    return _calls_carried_out(report)


def seen_by(mode: TorchFunctionMode) -> Replaced:
    """Let a function mode see the call of a custom Function in this thread as one function, as it sees a function of torch.

    It would see the operations within alone, which know nothing of the Function's backward.
    """

    def show(function: type, plain: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            return plain(*args, **named)

        call.__name__ = function.__name__
        return mode.__torch_function__(call, (), args, named)

    return _calls_carried_out(show)
