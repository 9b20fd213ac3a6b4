"""Transforms of `torch.func` (grad, vjp, jacrev and their like) while hooks of saved tensors are active.

Such hooks measure what a traced forward keeps, and repeat a forward that is recomputed; the transforms refuse to run beside
them. So the hooks are set aside inside of a transform: what it saves is kept as it is, and recomputed by nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import graph

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
