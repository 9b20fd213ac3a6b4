"""Dropouts that stand for their replacements by their names, in place of a function mode that sees every operation.

A function mode costs the host a call of Python for each operation of torch and a dozen for each of its functions in Python, and a
model may call two functions that draw. So where a model's forwards draw by `F.dropout` and `F.scaled_dot_product_attention` alone,
these names are their replacements while a forward runs, and there is no mode:

    first forward    under the mode, which notes the functions that reach it
    second           under both: what reaches the mode was called by another name, such as an attribute, and so needs it
    later            by names alone

A draw by any other function moves a generator of the process, which is seen behind the forward (`guards/randomness.py`): the step is
then taken once more, and all later ones under the mode.
"""

from __future__ import annotations

import enum
import functools
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import nn

from samestep.building.torch_seams import Replaced, is_transformed
from samestep.randomness.mask_source import MaskSource
from samestep.randomness.replacements import HANDLERS

_NAMED = ("dropout", "scaled_dot_product_attention")
_FUNCTIONS: frozenset[Callable[..., Any]] = frozenset(getattr(F, name) for name in _NAMED)
_PLACES = frozenset(map(id, _FUNCTIONS))
_ACTIVE: list[tuple[int, MaskSource, DrawsByName]] = []
"""The sources that draw by name, innermost last, each with the thread of its forward."""
WITHIN_TRANSFORM = (
    "random numbers inside of a transform of torch.func, where it is not seen which sample is whose; dropout "
    "before or behind torch.vmap works"
)


class Watch(enum.Enum):
    """A way to see the draws of a model's training forwards.

    BY_MODE ─► BY_BOTH ─► BY_NAMES
       └─────────┴───────────┴────► ALWAYS_BY_MODE    a function that has no name here draws, or was called by another one
    """

    BY_MODE = "the mode notes the functions that reach it"
    BY_BOTH = "names stand for replacements, and the mode notes what reaches it still"
    BY_NAMES = "names alone"
    ALWAYS_BY_MODE = "the mode alone"


@dataclass(slots=True, eq=False)
class DrawsByName:
    """The state of one model that says how its draws are seen; its training forwards change it."""

    watch: Watch = Watch.BY_MODE
    reached: set[Callable[..., Any]] = field(default_factory=set)
    """The functions that have reached the mode since the forward began."""
    depth: int = 0
    """The number of replacements that run, whose own calls of torch's functions are no draws."""
    _names: Replaced = field(default_factory=Replaced)

    def end_forward(self, model: nn.Module) -> None:
        """Decide how the next forward is watched by what has reached the mode in this one, which drew something."""
        reached, self.reached = self.reached, set()
        if self.watch is Watch.BY_MODE and reached:
            self.watch = Watch.BY_BOTH if reached <= _FUNCTIONS else Watch.ALWAYS_BY_MODE
            self._names = _names_in(model)
        elif self.watch is Watch.BY_BOTH:
            self.watch = Watch.ALWAYS_BY_MODE if reached else Watch.BY_NAMES

    def note(self, function: Callable[..., Any]) -> None:
        """Note a function that has reached the mode although its name is bound to a replacement: torch's function passes on what has its name."""
        if not self.depth and getattr(function, "__wrapped__", None) in _FUNCTIONS:
            self.reached.add(function)

    def give_up(self) -> bool:
        """See all later forwards by the mode; return whether this one was not."""
        was_by_names = self.watch is Watch.BY_NAMES
        self.watch = Watch.ALWAYS_BY_MODE
        return was_by_names

    def enter(self, source: MaskSource) -> None:
        """Let the names be replacements that draw from a source, on this thread."""
        _ACTIVE.append((threading.get_ident(), source, self))
        self._names.__enter__()

    def leave(self) -> None:
        """Let the names be what they were."""
        self._names.__exit__()
        _ACTIVE.pop()


def _names_in(model: nn.Module) -> Replaced:
    """Return a context inside which the functions are replacements, in torch and where the code of a model has imported them."""
    homes = {F.__name__: F} | {
        name: sys.modules[name]
        for name in {kind.__module__ for kind in map(type, model.modules())}
        if name in sys.modules
    }
    return Replaced(
        *(
            (home, name, functools.partial(_replacing, value))
            for home in homes.values()
            for name, value in vars(home).items()
            if id(value) in _PLACES
        )
    )


@functools.cache
def _replacement(function: Callable[..., Any]) -> Callable[..., Any]:
    handler = HANDLERS[function]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _ACTIVE:
            return function(*args, **kwargs)
        thread, source, names = _ACTIVE[-1]
        if thread != threading.get_ident():
            return function(*args, **kwargs)
        if is_transformed():
            raise source.refuse(WITHIN_TRANSFORM)
        names.depth += 1
        try:
            return handler(source, function, *args, **kwargs)
        finally:
            names.depth -= 1

    return call


def _replacing(function: Callable[..., Any], _: Any) -> Callable[..., Any]:
    return _replacement(function)
