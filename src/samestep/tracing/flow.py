"""What passes between runs of layers: the data flow between the modules with weights of one forward.

Pipeline stages are runs of layers. Outside of their modules runs the model's own code, which a stage can repeat where it
reads the batch alone (masks, positions, rotary angles), but not where it reads what other stages compute. So the forward
is recorded as a series of *events*, each of which reads and makes *values*, tensors that depend on weights:

    call      a call of a top-most module with weights; all tensors that it returns, or puts into lists and dictionaries
              that it is given, are values
    function  a torch function outside of these modules that is given a value; its results are values

A weight that such a function or call is given by the model's own code (a class token, a gain for each skip, the
embedding that a head multiplies by) is a value too, made by the first event that uses it.

```
x0 = embed(ids)        call 0    makes 0
x = blocks[0](x0)      call 1    reads 0    makes 1
x = x + x0             function  reads 1 0  makes 2    ─── boundary before blocks.1: values 2 and 0 cross it
x = blocks[1](x, x0)   call 3    reads 2 0  makes 3
```
The boundary before a layer is the event that calls its first module. A value crosses it if it was made before and is
read there or later, unless it is a weight: every stage that uses one holds it. A tensor that reaches a module past its arguments (through an attribute, a cache, a closure) cannot
be passed on; the boundaries that it crosses are refused.

A module may also change lists and dictionaries that it is given: it appends an auxiliary loss, or keeps keys and values. Such a change is written down as plain data, so that it can be made again where the module does not run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from samestep.trees import tensors_in

Container = dict[Any, Any] | list[Any]


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one container among a module's arguments."""

    place: int
    """Number of the container, in the order of `containers_in`."""
    keys: tuple[Any, ...]
    """The keys that a dictionary has then, or the indices of a list."""
    items: dict[Any, Any]
    """The values that are new."""

    def make(self, containers: Sequence[Container], items: dict[Any, Any]) -> None:
        """Change the container alike, with these values in place of those that are new."""
        container = containers[self.place]
        for key in list(container) if isinstance(container, dict) else range(len(container) - 1, -1, -1):
            if key not in self.keys:
                del container[key]
        for key, value in items.items():
            if isinstance(container, list) and key >= len(container):
                container.append(value)
            else:
                container[key] = value


def containers_in(value: Any) -> list[Container]:
    """Return the lists and dictionaries in nested ones and in tuples, each once."""
    containers: dict[int, Container] = {}
    for container in _walk(value, containers):
        containers[id(container)] = container
    return list(containers.values())


def _walk(value: Any, containers: dict[int, Container]) -> Iterator[Container]:
    if isinstance(value, dict | list):
        if id(value) in containers:
            return
        yield value
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _walk(item, containers)


Contents = list[dict[Any, Any]]


def contents_of(containers: Sequence[Container]) -> Contents:
    """Return what containers hold now, to be compared later."""
    return [_items(container) for container in containers]


def changes_of(containers: Sequence[Container], contents: Contents) -> tuple[Change, ...]:
    """Return how containers have changed."""
    changes = []
    for place, (container, old) in enumerate(zip(containers, contents, strict=True)):
        now = _items(container)
        items = {key: value for key, value in now.items() if key not in old or old[key] is not value}
        if items or now.keys() != old.keys():
            changes.append(Change(place, tuple(now), items))
    return tuple(changes)


def _items(container: Container) -> dict[Any, Any]:
    return dict(container) if isinstance(container, dict) else dict(enumerate(container))


_SHAPE_ALONE = (
    {f"{name}_like" for name in ("zeros", "ones", "empty", "full", "rand", "randn", "randint")}
    | {f"new_{name}" for name in ("zeros", "ones", "empty", "full", "tensor", "empty_strided")}
    | {"_base.__get__", "requires_grad_"}
)
"""Functions that read the shape, dtype and device of their tensor, or what it views, or set whether it takes a gradient, and no value."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of one forward that depends on weights."""

    event: int
    """Number of the event that made it."""
    maker: str
    """Path of the module that made it, or the module after which the function ran that made it."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    takes_gradient: bool
    """Whether a gradient flows back to it: not if the loss is known not to depend on it."""


@dataclass(frozen=True, slots=True)
class Event:
    """One call of a module with weights, or one torch function outside of them that is given values."""

    name: str
    """Path of the module, or name of the function."""
    is_call: bool
    reads: tuple[int, ...]
    """Values among its arguments, in their order."""
    outcome: Any
    """What it returned, with tensors on the meta device."""
    changes: tuple[Change, ...]
    """How a call has changed lists and dictionaries that it was given."""
    makes: tuple[int | None, ...]
    """For each tensor of the outcome and of the changes the value that it is, or None if it is an argument."""
    given: tuple[int, ...]
    """For each of them that is an argument, its place among the tensors given; -1 for the others."""
    writes: tuple[tuple[int, int], ...]
    """Arguments that it writes into: the place among the tensors given, and the value that the tensor is afterwards."""
    is_random: bool = False
    """Whether it draws random numbers."""
    first: int | None = None
    """The value of a call's first argument, if it is one."""


@dataclass(frozen=True, eq=False)
class Flow:
    """The events of one forward in order, their values, and the values that the model's outputs hold."""

    events: tuple[Event, ...]
    values: tuple[Value, ...]
    hidden: tuple[tuple[int, int, str], ...]
    """Reads past the arguments: the event that made the tensor, the event that read it, and both as text."""
    last_reads: tuple[int, ...]
    """For each value the last event that reads it; the number of events if the outputs hold it, -1 if nothing does."""
    weights: tuple[tuple[str, int], ...] = ()
    """Weights that are values: the name and the value."""
    uses: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """The events that use each weight, in a module of its own or not."""
    behind: tuple[str, ...] = ()
    """Weights that a module reads past its arguments, though they are not its own."""
    picks_from: int | None = None
    """The first event that works on rows which the values of the samples pick; None if none does."""

    @cached_property
    def calls(self) -> tuple[int, ...]:
        """Numbers of the events that are calls."""
        return tuple(number for number, event in enumerate(self.events) if event.is_call)

    @cached_property
    def passed(self) -> dict[int, Value]:
        """The values that are no weights, by number."""
        weights = {number for _, number in self.weights}
        return {number: value for number, value in enumerate(self.values) if number not in weights}

    def uses_within(self, name: str, events: Collection[int]) -> bool:
        """Return whether one of some events uses a weight."""
        return any(use in events for use in self._uses[name])

    @cached_property
    def _uses(self) -> dict[str, tuple[int, ...]]:
        return dict(self.uses)

    def check_passed(self, is_before: Callable[[int], bool]) -> None:
        """Check that what passes to other events from those before a boundary is passed by the arguments and results of modules.

        Raises:
            CannotPassError: a tensor is not.
        """
        text = next((text for maker, reader, text in self.hidden if is_before(maker) and not is_before(reader)), None)
        if text is not None:
            raise CannotPassError(text)
        if self.picks_from is not None and is_before(self.picks_from):
            picks = self.events[self.picks_from].name
            raise CannotPassError(f"{picks} works on rows that values pick, and other samples may have more of them")


class CannotPassError(Exception):
    """The reason why no stage can begin at a layer."""


def makes_event(module: nn.Module) -> bool:
    """Return whether the call of a module is an event: it has weights, or takes statistics of samples."""
    return any(True for _ in module.parameters()) or any(map(takes_statistics, module.modules()))


def takes_statistics(module: nn.Module) -> bool:
    """Return whether samples of a batch influence each other through a module while it trains, or through its statistics."""
    return isinstance(module, _BatchNorm) or (isinstance(module, _InstanceNorm) and module.running_mean is not None)


def tensors_made_by(outcome: Any, changes: Sequence[Change]) -> list[Tensor]:
    """Return the tensors that a call returns, and those that it puts into its arguments."""
    return [*tensors_in(outcome), *(tensor for change in changes for tensor in tensors_in(change.items))]


def name_of(function: Any) -> str:
    """Return the name of a torch function; that of a property is the name of the attribute."""
    if getattr(function, "__name__", "") == "__get__":
        return f"{function.__self__.__name__}.__get__"
    return str(getattr(function, "__name__", function))


_FORMED_LIKE = frozenset({"to", "type_as", "view_as", "expand_as", "reshape_as"})
"""Functions that take the form of a second tensor alone: its shape, or its dtype and device."""


def given_to(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that a torch function is given, without one of which it takes the form alone, as `table.to(x)` does."""
    return tensors_in(args[0] if args and name_of(function) in _FORMED_LIKE else (args, kwargs))


def reads_shape_alone(function: Any) -> bool:
    """Return whether a torch function reads no value of the tensor that it is given."""
    return name_of(function) in _SHAPE_ALONE
