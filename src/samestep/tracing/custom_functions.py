"""Custom Functions of autograd, whose forward a trace can follow and whose backward it cannot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Applied = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
"""Receives the `apply` of a Function, the arguments of a call, and its outcome."""


@contextmanager
def reported(applied: Applied) -> Iterator[None]:
    """Report every call of a custom Function that this thread makes inside; those of torch and samestep are known."""
    original, thread = torch.autograd.Function.__dict__["apply"], threading.get_ident()

    def apply(function: type, *args: Any, **named: Any) -> Any:
        plain = original.__get__(None, function)
        outcome = plain(*args, **named)
        if threading.get_ident() == thread and not function.__module__.startswith(("samestep.", "torch.")):
            applied(plain, args, named, outcome)
        return outcome

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]
