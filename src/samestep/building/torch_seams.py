"""Seeing every operation of torch, without the compiler: the base of the modes that record or replace operations.

Transforms of `torch.func` (grad, vjp, jacrev and their like) while hooks of saved tensors are active.

Such hooks measure what a traced forward keeps, and repeat a forward that is recomputed; the transforms refuse to run beside
them. So the hooks are set aside inside of a transform: what it saves is kept as it is, and recomputed by nobody.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd import graph
from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A `TorchDispatchMode` whose `__torch_dispatch__` torch calls directly."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare the import of the compiler, which takes seconds, and a wrapper around each operation."""
        return False


def uncompiled() -> AbstractContextManager[object]:
    """Return a context in which what a model or an optimizer has compiled runs as the code that it is.

    The compiler would make graphs of the modes that watch the code, too. Nothing is compiled where it is not yet imported.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def is_transformed() -> bool:
    """Return whether code runs inside of a transform of `torch.func`."""
    return torch._C._functorch.maybe_current_level() is not None


_autograd = torch._C._autograd


@contextmanager
def transforms_beside_hooks() -> Iterator[None]:
    """Let transforms of `torch.func` run inside while hooks of saved tensors are active."""
    original = graph.disable_saved_tensors_hooks

    @contextmanager
    def disabled(error_message: str) -> Iterator[None]:
        aside: list[Any] = []
        while (hooks := _autograd._top_saved_tensors_default_hooks(True)) is not None:
            _autograd._pop_saved_tensors_default_hooks()
            aside.append(hooks)
        try:
            with original(error_message):
                yield
        finally:
            for hooks in reversed(aside):
                _autograd._push_saved_tensors_default_hooks(*hooks)

    graph.disable_saved_tensors_hooks = disabled
    try:
        yield
    finally:
        graph.disable_saved_tensors_hooks = original
