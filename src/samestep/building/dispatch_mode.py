"""A mode that sees every operation of torch, without the compiler: the base of the modes that record or replace operations."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A `TorchDispatchMode` whose `__torch_dispatch__` torch calls directly."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare the import of the compiler, which takes seconds, and a wrapper around each operation."""
        return False
