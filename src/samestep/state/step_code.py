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

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from samestep.state.named_variables import SEARCHED, Home, Variable, home_of, variables_of
from samestep.state.snapshot import HOLDERS, copied_items, items_of, put_items, slots_of

_INNER, _GROUP = "inner.", "group."
_OWN = ("state", "param_groups")
_MOST = 20_000
"""Objects that are looked into at most."""
_MOST_ITEMS = 4096
_LEAVES = (bool, int, float, complex, str, bytes, type(None), Tensor)
"""Values that hold no others."""
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_HOMES = frozenset([Home.USER, Home.PACKAGE])


class StepCode:
    """The optimizers and tensors that an optimizer's step reaches, and the places outside of its state that it may change."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.optimizers: list[Any] = []
        """The optimizer, and those that it reaches: a wrapper's own ones, which hold groups and states of theirs."""
        self.tensors: set[int] = set()
        """Ids of the tensors that its code reaches, in a closure as in an attribute."""
        self.places: list[Variable] = []
        """Where numbers stand that the step may read: closures, variables, attributes."""
        self._containers: list[Any] = []
        self._follow(Variable("", None, "", optimizer))
        self._containers.append(vars(optimizer))

    def _follow(self, first: Variable) -> None:
        """Look into a value and what it holds, each once, in the order in which code holds them."""
        seen: dict[int, Any] = {}  # so that no id is given to another object
        rest = [iter([first])]
        while rest:
            variable = next(rest[-1], None)
            if variable is None:
                rest.pop()
                continue
            self._note(variable)
            value = variable.value
            if id(value) not in seen and len(seen) <= _MOST and not isinstance(value, _LEAVES):
                seen[id(value)] = value
                rest.append(self._within(variable.name, value))

    def _note(self, variable: Variable) -> None:
        """Note a number or a tensor, and where it can be set."""
        value = variable.value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if isinstance(value, Tensor):
            self.tensors.add(id(value))
            is_number = value.numel() == 1
        if is_number and variable.holder is not None and isinstance(variable.key, str):
            self.places.append(variable)

    def _within(self, name: str, value: Any) -> Iterator[Variable]:
        """Yield what a value holds."""
        if isinstance(value, Optimizer):
            self.optimizers.append(value)
            yield from (variable for variable in _of_object(name, value) if variable.key not in _OWN)
            for group in value.param_groups:
                options = ((key, option) for key, option in group.items() if key not in ("params", "param_names"))
                yield from (Variable(name, group, key, option) for key, option in options)
        elif isinstance(value, SEARCHED):
            yield from variables_of(name, value, _HOMES)
        elif isinstance(value, _CONTAINERS):
            if not isinstance(value, tuple | frozenset):
                self._containers.append(value)
            if isinstance(value, dict):
                yield from (Variable(name, value, *item) for item in list(items_of(value).items())[:_MOST_ITEMS])
            else:
                yield from (Variable(name, None, "", item) for item in list(islice(value, _MOST_ITEMS)))
        elif isinstance(value, HOLDERS) or home_of(type(value).__module__) in _HOMES:
            yield from _of_object(name, value)

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Put back, in the end, the numbers and the containers that the code can reach outside of the optimizer."""
        numbers = [(place, _value_of(place.present)) for place in self.places]
        containers = [(container, copied_items(container)) for container in self._containers]
        try:
            yield
        finally:
            for container, items in containers:
                put_items(container, items)
            for place, before in numbers:
                write(place, before)


def _of_object(name: str, value: Any) -> Iterator[Variable]:
    """Yield the class of an object, and its attributes."""
    yield Variable(type(value).__name__, None, "", type(value))
    yield from (Variable(f"{name}.{key}", None, "", item) for key, item in slots_of(value))
    attributes = getattr(value, "__dict__", {})
    yield from (
        Variable(f"{name}.{key}", attributes, key, item) for key, item in list(attributes.items())[:_MOST_ITEMS]
    )


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
    return list({id(inner.state): inner for inner in reversed(optimizers_in(optimizer))}.values())[::-1]


def states_by_key(optimizers: Sequence[Any], weight: Tensor) -> dict[str, Any]:
    """Return the states of a weight in an optimizer, and in its inner ones under keys that `set_state` reads.

    Of states that the first weight of a group has for all of them, stacked, each weight has its row.
    """
    by_key: dict[str, Any] = {}
    for index, optimizer in enumerate(optimizers):
        inner = f"{_INNER}{index}." if index else ""
        rows = rows_in_group(optimizer, weight)
        states = {f"{_GROUP}{key}": value for key, value in rows.items()} or optimizer.state.get(weight, {})
        by_key |= {f"{inner}{key}": value for key, value in states.items()}
    return by_key


def set_state(optimizers: Sequence[Any], weight: Tensor, key: str, value: Any) -> None:
    """Set a state of a weight that `states_by_key` lists under a key, or its row in a state of its group."""
    index = "0"
    if key.startswith(_INNER):
        index, _, key = key.removeprefix(_INNER).partition(".")
    states = optimizers[int(index)].state
    if not key.startswith(_GROUP):
        states.setdefault(weight, {})[key] = value
        return
    members, key = _members_with(optimizers[int(index)], weight), key.removeprefix(_GROUP)
    of_first = states.setdefault(members[0], {})
    if isinstance(value, Tensor) and value.dim() == weight.dim():
        stack = of_first.setdefault(key, value.new_empty(len(members), *value.shape))
        stack[next(i for i, member in enumerate(members) if member is weight)] = value
    else:
        of_first[key] = value


def rows_in_group(optimizer: Any, weight: Tensor) -> dict[str, Any]:
    """Return the states of a weight that the first weight of its group has for all of them: its rows of stacked tensors [members, ...],
    and what is no such tensor; nothing if no tensor is stacked.
    """
    members = _members_with(optimizer, weight)
    states = optimizer.state.get(members[0], {}) if members else {}
    index = next((i for i, member in enumerate(members) if member is weight), 0)
    rows = {
        key: value[index]
        for key, value in states.items()
        if isinstance(value, Tensor) and value.dim() == weight.dim() + 1 and len(value) == len(members)
    }
    is_shared = rows and weight.numel() > 1 and not any(optimizer.state.get(other) for other in members[1:])
    return {**states, **rows} if is_shared else {}


def _members_with(optimizer: Any, weight: Tensor) -> list[Tensor]:
    """Return the weights of the group of a weight."""
    groups = (group["params"] for group in optimizer.param_groups)
    return next((params for params in groups if any(param is weight for param in params)), [])
