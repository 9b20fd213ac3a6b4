"""What code adds to a backward, which a traced forward cannot follow: custom Functions of autograd, and hooks of gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from samestep.trees import operands

Applied = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
"""Receives the `apply` of a Function, the arguments of a call, and its outcome."""

Hooked = Callable[[str, Callable[..., Any], list[Tensor], list[Tensor]], None]
"""Receives a hook of gradients: its name, a function of the gradients of some tensors, these, and those whose it returns."""

_KNOWN = ("samestep.", "torch.")


@contextmanager
def report_functions(applied: Applied, hooked: Hooked) -> Iterator[None]:
    """Report every custom Function that this thread calls inside, and every hook that it puts on a tensor.

    Those of torch and samestep are known.
    """
    with _functions(applied), _tensor_hooks(hooked):
        yield


@contextmanager
def _tensor_hooks(hooked: Hooked) -> Iterator[None]:
    original, thread = Tensor.register_hook, threading.get_ident()

    def register(tensor: Tensor, hook: Callable[[Tensor], Any]) -> Any:
        handle = original(tensor, hook)
        if threading.get_ident() == thread and not (getattr(hook, "__module__", "") or "").startswith(_KNOWN):
            hooked("a hook on a gradient", lambda gradient: _or_given(hook(gradient), gradient), [tensor], [tensor])
        return handle

    Tensor.register_hook = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.register_hook = original  # type: ignore[method-assign]


def report_module_hooks(part: nn.Module, given: tuple[Any, ...], output: Any, hooked: Hooked) -> None:
    """Report the hooks that a module has on the gradients of its inputs and outputs."""
    inputs = [one for one in given if isinstance(one, Tensor) and one.requires_grad]
    outputs = operands(output)
    for hook in part._backward_pre_hooks.values():
        hooked("a backward hook", lambda *above, hook=hook: _or_given(hook(part, above), above), outputs, outputs)
    for hook in part._backward_hooks.values():

        def run(*gradients: Tensor, hook: Callable[..., Any] = hook) -> Any:
            own, above = gradients[: len(inputs)], gradients[len(inputs) :]
            return _or_given(hook(part, own, above), own)

        hooked("a backward hook", run, [*inputs, *outputs], inputs)


def _or_given(returned: Any, given: Any) -> Any:
    """Return what a hook returns, or else the gradients that it was given, which then stay as they are."""
    return given if returned is None else returned


@contextmanager
def _functions(applied: Applied) -> Iterator[None]:
    original, thread = torch.autograd.Function.__dict__["apply"], threading.get_ident()

    def apply(function: type, *args: Any, **named: Any) -> Any:
        plain = original.__get__(None, function)
        outcome = plain(*args, **named)
        if threading.get_ident() == thread and not function.__module__.startswith(_KNOWN):
            applied(plain, args, named, outcome)
        return outcome

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


@contextmanager
def seen_by(mode: TorchFunctionMode) -> Iterator[None]:
    """Let a function mode see the call of a custom Function in this thread as one function, as it sees a function of torch.

    It would see the operations within alone, which know nothing of the Function's backward.
    """
    original, thread = torch.autograd.Function.__dict__["apply"], threading.get_ident()

    def apply(function: type, *args: Any, **named: Any) -> Any:
        plain = original.__get__(None, function)
        if threading.get_ident() != thread or function.__module__.startswith(_KNOWN):
            return plain(*args, **named)

        def call(*args: Any, **named: Any) -> Any:
            return plain(*args, **named)

        call.__name__ = function.__name__
        return mode.__torch_function__(call, (), args, named)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]
