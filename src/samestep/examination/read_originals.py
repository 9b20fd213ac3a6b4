"""Whether a forward reads weights that its run does not train: those of the instance that was given, or of another call of the build function.

A run trains parameters of its own. Functions and weak references that the model holds refer to them (`building/module_copies.py`); a
global variable, or an object of the code around, still holds the module that was copied, and code that calls it would compute with
its first values in every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.overrides import TorchFunctionMode

from samestep.building.initial_values import Blueprint
from samestep.errors import ModelError
from samestep.trees import operands


@contextmanager
def refused_reads(plan: Blueprint) -> Iterator[None]:
    """Return the context of traced forwards, which must not read weights of which the run trains a copy.

    Raises:
        ModelError: one has.
    """
    alive = [(name, weight) for name, held in (*plan.given.items(), *plan.others) if (weight := held()) is not None]
    originals = {id(weight): name for name, weight in alive if weight.requires_grad}
    for param in plan.module.parameters():
        originals.pop(id(param), None)
    if not originals:
        yield
        return
    reads = _Reads(originals)
    hooks = [
        plan.module.register_forward_pre_hook(reads.enter, prepend=True),
        plan.module.register_forward_hook(reads.leave, always_call=True),
    ]
    try:
        with reads:
            yield
    finally:
        for hook in hooks:
            hook.remove()
    del alive  # until here no other tensor has one of these identities
    if reads.found:
        where = "another call of the build function has made" if reads.found in dict(plan.others) else "was given"
        raise ModelError(
            f"the forward reads {reads.found} of the model instance that {where}, from a global variable or an object outside of the "
            "model, and a run trains parameters of its own: the forward would see the first values in every step; a module that is "
            "read from self works"
        )


class _Reads(TorchFunctionMode):
    """Notes the first of some weights that a call within a forward is given."""

    def __init__(self, originals: dict[int, str]) -> None:
        super().__init__()
        self._originals, self._running = originals, 0
        self.found = ""
        """Its name; empty if there is none."""

    def enter(self, *_: Any) -> None:
        """Receive the start of a forward of the whole model."""
        self._running += 1

    def leave(self, *_: Any) -> None:
        """Receive its end."""
        self._running -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._running and not self.found:
            given = operands(*args, *(kwargs or {}).values())
            self.found = next((self._originals[id(one)] for one in given if id(one) in self._originals), "")
        return func(*args, **(kwargs or {}))
