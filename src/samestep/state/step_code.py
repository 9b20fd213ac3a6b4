"""What an optimizer's step reaches outside of its states: numbers that decide how it updates, counters, other optimizers.

```
class Warm(Optimizer):
    def step(self): ... rate(self.k) ...      options, attributes, objects in them, the class's functions
def rate(k): return k > LATE                  functions that they name, in any module but those of libraries; constants
LATE = 100                                    variables that they name, closures, default values
```
A trial of the optimizer reads thresholds and counters here, and puts back what its steps have changed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.state.reachable import CodeWalk, Home, Kind, Variable
from samestep.state.snapshot import copied_items, put_items

_INNER = "inner."
_OWN = ("state", "param_groups")


class StepCode(CodeWalk):
    """The numbers that an optimizer's step reaches, and the places outside of its state that it may change."""

    homes = frozenset([Home.USER, Home.PACKAGE])
    most_items = 4096

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.numbers: set[float] = set()
        self.optimizers: list[Any] = []
        """The optimizer, and those that it reaches: a wrapper's own ones, which hold groups and states of theirs."""
        self.tensors: set[int] = set()
        """Ids of the tensors that its code reaches, in a closure as in an attribute."""
        self.places: list[Variable] = []
        """Where numbers stand that the step may read: closures, variables, attributes."""
        self._containers: list[Any] = []
        self.follow([Variable("", None, "", optimizer)])
        self._containers.append(vars(optimizer))

    def note(self, found: Variable) -> None:
        """Note a number or a tensor, and where it can be set."""
        value = found.value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and math.isfinite(value):
            self.numbers.add(value)
        if isinstance(value, Tensor):
            self.tensors.add(id(value))
            is_number = value.numel() == 1
        if is_number and found.holder is not None and isinstance(found.key, str):
            self.places.append(found)

    def enter(self, name: str, value: Any) -> None:
        """Note an optimizer, or a container whose items may change."""
        if isinstance(value, Optimizer):
            self.optimizers.append(value)
        elif isinstance(value, dict | list | set | deque):
            self._containers.append(value)

    def _within(self, name: str, value: Any) -> Iterator[Variable]:
        if isinstance(value, Optimizer):
            yield from (one for one in self._of_object(name, value) if one.key not in _OWN)
            for group in value.param_groups:
                options = ((key, one) for key, one in group.items() if key not in ("params", "param_names"))
                yield from (Variable(name, group, key, one, Kind.ITEM) for key, one in options)
        elif isinstance(value, nn.Module):
            yield from self._of_object(name, value) if self._follows(type(value).__module__) else ()
        else:
            yield from super()._within(name, value)

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Put back, in the end, the numbers and the containers that the code can reach outside of the optimizer."""
        numbers = [(place, _value_of(place.present)) for place in self.places]
        containers = [(held, copied_items(held)) for held in self._containers]
        try:
            yield
        finally:
            for held, items in containers:
                put_items(held, items)
            for place, before in numbers:
                write(place, before)


def _value_of(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta else value


def write(place: Variable, value: Any) -> None:
    """Set the value of a variable, or fill the tensor of one element that it holds."""
    now = place.present
    if isinstance(now, Tensor) and isinstance(value, int | float) and now.numel() == 1 and not now.is_meta:
        now.detach().fill_(float(value))
    else:
        place.put(value)


def optimizers_in(optimizer: Optimizer) -> list[Any]:
    """Return an optimizer and those that its step reaches."""
    return StepCode(optimizer).optimizers


def optimizers_with_states(optimizer: Optimizer) -> list[Any]:
    """Return an optimizer, and those of the optimizers inside it, as in a wrapper, that keep other states."""
    return list({id(one.state): one for one in reversed(optimizers_in(optimizer))}.values())[::-1]


def states_by_key(optimizers: Sequence[Any], weight: Tensor) -> dict[str, Any]:
    """Return the states of a weight in an optimizer, and in its inner ones under keys that `state_at` reads."""
    if not optimizers:
        return {}
    found = dict(optimizers[0].state.get(weight, {}))
    for index, inner in enumerate(optimizers[1:], 1):
        found |= {f"{_INNER}{index}.{key}": value for key, value in inner.state.get(weight, {}).items()}
    return found


def state_at(optimizers: Sequence[Any], weight: Tensor, key: str) -> tuple[dict[str, Any], str]:
    """Return the dict that holds a state which `states_by_key` lists under a key, created if it is missing, and its key in it."""
    index = "0"
    if key.startswith(_INNER):
        index, _, key = key.removeprefix(_INNER).partition(".")
    states = optimizers[int(index)].state
    if weight not in states:
        states[weight] = {}
    return states[weight], key
