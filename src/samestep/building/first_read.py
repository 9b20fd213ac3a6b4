"""The first of some weights that code reads: those of which a run trains copies, and which code outside of them still holds.

Calls of torch are watched, not its operations: a traced forward runs these on other tensors. A weight is known by its storage, so
that a view of it which was made before is found too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from samestep.building.named_tensors import address
from samestep.building.torch_seams import is_traceable_wrapper_subclass
from samestep.trees import operands


class FirstRead(TorchFunctionMode):
    """Notes the first of some weights that a call is given."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__()
        named = [*weights]
        self._alive = [weight for _, weight in named]
        """Until the end no other tensor has one of their storages."""
        self._names = {_key_of(weight): name for name, weight in named}
        self._running = 1
        self.name = ""
        """The name of the weight; empty if there is none."""

    @contextmanager
    def within(self, module: nn.Module) -> Iterator[None]:
        """Watch the calls of a module's forwards alone."""
        self._running = 0
        hooks = [
            module.register_forward_pre_hook(self._enter, prepend=True),
            module.register_forward_hook(self._leave, always_call=True),
        ]
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, *_: Any) -> None:
        self._running += 1

    def _leave(self, *_: Any) -> None:
        self._running -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._running and not self.name:
            given = operands(*args, *(kwargs or {}).values())
            self.name = next((name for one in given if (name := self._names.get(_key_of(one)))), "")
        return func(*args, **(kwargs or {}))


def _key_of(tensor: Tensor) -> tuple[str, int]:
    """Return what identifies the memory of a tensor; of one that wraps others, the tensor itself."""
    return ("tensor", id(tensor)) if is_traceable_wrapper_subclass(tensor) else ("storage", address(tensor))
