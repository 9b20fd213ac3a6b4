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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from samestep.state.named_variables import Home, Variable
from samestep.state.snapshot import DEPTH, Snapshot

_INNER, _GROUP = "inner.", "group."
_OWN = ("state", "param_groups")


class StepCode(Snapshot):
    """A snapshot of what an optimizer's step reaches, without its weights and their states."""

    homes = frozenset([Home.USER, Home.PACKAGE])

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.optimizers: list[Any] = []
        """The optimizer, and those that it reaches: a wrapper's own ones, which hold groups and states of theirs."""
        super().__init__(optimizer, weights=False)  # type: ignore[arg-type]
        self.tensors = {id(tensor) for content in self.values.values() for tensor in content.tensors}
        """Ids of the tensors that its code reaches, in a closure as in an attribute."""

    def _is_state(self, value: Any) -> bool:
        return isinstance(value, Optimizer) or super()._is_state(value)

    def _items(self, name: str, value: Any, tensors: list[Tensor], depth: int) -> Any:
        """Return the skeleton of a container or an object; of an optimizer that of its attributes and of the options of its groups."""
        if not isinstance(value, Optimizer):
            return super()._items(name, value, tensors, depth)
        self.optimizers.append(value)
        self._meet(type(value).__name__, type(value))
        attributes = {key: item for key, item in vars(value).items() if key not in _OWN}
        groups = [
            {key: option for key, option in group.items() if key not in ("params", "param_names")}
            for group in value.param_groups
        ]
        self.containers += [(items, dict(items)) for items in (vars(value), *value.param_groups)]
        return [
            self._skeleton(f"{name}.{key}", item, tensors, DEPTH)
            for items in (attributes, *groups)
            for key, item in items.items()
        ]

    @property
    def places(self) -> list[Variable]:
        """The numbers that the step may read, with their places: closures, variables, attributes, items of dicts."""
        entries = (
            Variable("", container, key, item)
            for container, items in self.containers
            if isinstance(container, dict)
            for key, item in items.items()
            if isinstance(key, str)
        )
        variables = (variable for variable in self.variables.values() if variable.holder is not None)
        return [variable for variable in (*entries, *variables) if _is_number(variable.value)]

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Put back, in the end, the numbers and the containers that the code can reach outside of the optimizer."""
        snapshot = StepCode(self.optimizer)
        numbers = [(place, _value_of(place.value)) for place in snapshot.places]
        try:
            yield
        finally:
            snapshot.restore(generators=False)
            for place, number in numbers:
                write(place, number)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


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
