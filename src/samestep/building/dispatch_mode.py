"""Seeing every operation of torch, without the compiler: the base of the modes that record or replace operations."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

import torch
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
