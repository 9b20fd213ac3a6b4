"""Recording the flow of one forward on the meta device: the events, the values that they make, and who reads them.

A call of a top-most module with weights is an event, and so is a torch function outside of these modules that is given a value
(`tracing/flow.py`). The tracer reports the storages that each operation reads and writes, which shows a tensor that reaches
an event past its arguments.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from samestep.building.autograd_graph import nodes_from
from samestep.building.torch_seams import backward_hooks_pass_on, disable_current_modes, is_transformed
from samestep.models.spec import is_below
from samestep.tracing.batch_norms import FUNCTIONS as BATCH_NORMS
from samestep.tracing.batch_norms import run_of_any_size
from samestep.tracing.custom_functions import seen_by
from samestep.tracing.flow import (
    Container,
    Contents,
    Event,
    Flow,
    Value,
    changes_of,
    containers_in,
    contents_of,
    given_to,
    makes_event,
    name_of,
    reads_shape_alone,
    tensors_made_by,
)
from samestep.tracing.meta_tensors import call_with_numbers
from samestep.tracing.module_inputs import first_input_of
from samestep.trees import map_tensors, tensors_in

_UNSEEN = "code that torch does not show"


@dataclass(slots=True)
class _Running:
    """The event, or another function outside of modules, that runs now, with what it is given."""

    number: int
    name: str
    tensors: list[Tensor]
    storages: set[int]
    """Storages of these."""
    containers: list[Container] = field(default_factory=list)
    is_call: bool = False
    versions: list[int] = field(init=False)
    contents: Contents = field(init=False)

    def __post_init__(self) -> None:
        self.versions, self.contents = self.versions_now(), contents_of(self.containers)

    def versions_now(self) -> list[int]:
        """Return how often each tensor has been written."""
        return [tensor._version for tensor in self.tensors]


@dataclass(slots=True)
class _Weight:
    """A weight of the module, with its names and the events that read it."""

    param: nn.Parameter
    names: list[str] = field(default_factory=list)
    uses: dict[int, str] = field(default_factory=dict)
    """For each event that reads it, the reader if it reads past its arguments; empty otherwise."""


@dataclass(slots=True)
class _Traced:
    """One value of the forward, with the last event that reads it."""

    value: Value
    node: Node | None
    """The node of autograd that made it."""
    storage: int | None
    """Its storage, if it is on the meta device."""
    last_read: int = -1


class _Values:
    """The values of one forward, by the tensors that they are and by the storages that hold them."""

    def __init__(self, key: Callable[[Tensor], int]) -> None:
        self._key = key
        self._numbers = WeakIdKeyDictionary()
        self.traced: list[_Traced] = []
        """The values by their numbers."""
        self.makers: dict[int, int] = {}
        """For each storage that an event has written, the first such event."""

    def of(self, tensor: Tensor) -> int | None:
        """Return the number of the value that a tensor is."""
        number: int | None = self._numbers.get(tensor)
        return number

    def add(self, tensor: Tensor, event: int, maker: str) -> int:
        """Number a new value."""
        number = self._numbers[tensor] = len(self.traced)
        value = Value(event, maker, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        self.traced.append(_Traced(value, tensor.grad_fn, self._key(tensor) if tensor.is_meta else None))
        return number

    def maker_of(self, tensor: Tensor) -> int | None:
        """Return the event that has first written the storage of a tensor."""
        return self.makers.get(self._key(tensor)) if tensor.is_meta else None

    def viewed_with(self, tensor: Tensor, event: int) -> Iterator[Value]:
        """Return the values of earlier events than this one that view the same memory as a tensor."""
        key = self._key(tensor)
        for other, number in list(self._numbers.items()):
            value = self.traced[number].value
            if other is not tensor and self._key(other) == key and value.event < event:
                yield value


@dataclass(slots=True)
class _Place:
    """The place in a forward at which code runs."""

    is_recorded: bool = False
    """Whether the forward that is recorded runs."""
    depth: int = 0
    """Number of calls that run within each other."""
    running: _Running | None = None
    last_call: str = ""
    """Path of the module whose call has ended last."""
    in_batch_norm: bool = False
    """Whether a function of batch norm runs."""

    @property
    def is_between(self) -> bool:
        """Whether code of the model runs outside of its modules on values that no weight has changed: every stage repeats it."""
        return self.is_recorded and self.running is None and self.depth == 0


class FlowRecorder(TorchFunctionMode):
    """Runs the functions of one forward on the meta device with the numbers that are known, and records its events; `ran` reports its
    operations."""

    def __init__(self, key: Callable[[Tensor], int], read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._key, self._read = key, read
        self.norms_any_size = False
        """Whether batch norm takes one value per channel."""
        self._values = _Values(key)
        self._events: list[Event] = []
        self._hidden: dict[tuple[int, int], str] = {}
        self.flow: Flow | None = None
        """What passes between modules; None before the forward has ended."""
        self._weights: dict[int, _Weight] = {}
        """The weights of the module, by their storage."""
        self.at = _Place()
        self.differentiates_at = ""
        """Path of the module whose code takes gradients by `torch.autograd.grad`; empty if none does."""
        self._picks_from: int | None = None
        self.is_random = False
        """Whether the event that runs has drawn random numbers."""

    def picks(self) -> bool:
        """Return whether an event works on the rows that are at hand, and not every stage for itself."""
        running = self.at.running
        return self.at.is_recorded and running is not None and running.number >= 0

    def pick(self) -> None:
        """Note that the event at hand passes rows on which values pick."""
        if self.picks() and self._picks_from is None and self.at.running is not None:
            self._picks_from = self.at.running.number

    @contextmanager
    def over(self, module: nn.Module, is_outside: Callable[[str], bool]) -> Iterator[None]:
        """Record a forward of `module` inside; modules that are outside (they hold the blocks) make no calls."""
        for name, param in module.named_parameters(remove_duplicate=False):
            self._weights.setdefault(self._key(param), _Weight(param)).names.append(name)
        with ExitStack() as hooks:
            for path, part in module.named_modules():
                if not is_outside(path) and makes_event(part):
                    enter, leave = functools.partial(self._enter, path), functools.partial(self._leave, path)
                    hooks.enter_context(part.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
                    hooks.enter_context(part.register_forward_hook(leave, with_kwargs=True))
            hooks.enter_context(backward_hooks_pass_on())
            hooks.enter_context(self)
            hooks.enter_context(seen_by(self))
            self.at.is_recorded = True
            yield
            self.at.is_recorded = False

    def finish(self, outputs: Any) -> None:
        """Set the flow of a forward with these outputs."""
        for tensor in tensors_in(outputs):
            number, maker = self._values.of(tensor), self._values.maker_of(tensor)
            if self._is_weight(tensor):
                self._weights[self._key(tensor)].uses.setdefault(len(self._events), "")
            if number is not None:
                self._values.traced[number].last_read = len(self._events)
            elif maker is not None:
                self._note_hidden(maker, len(self._events), "the model's outputs")
        used = [weight for weight in self._weights.values() if weight.uses]
        for weight in used:
            self._end_weight(weight)
        numbers = [(weight.names[0], self._values.of(weight.param)) for weight in used]
        self.flow = Flow(
            events=tuple(self._events),
            values=tuple(traced.value for traced in self._values.traced),
            hidden=tuple((*ends, text) for ends, text in self._hidden.items()),
            last_reads=tuple(traced.last_read for traced in self._values.traced),
            weights=tuple((name, number) for name, number in numbers if number is not None),
            uses=tuple((weight.names[0], tuple(sorted(weight.uses))) for weight in used),
            picks_from=self._picks_from,
            behind=tuple(weight.names[0] for weight in used if any(weight.uses.values())),
        )

    def take_idle(self, roots: Iterable[Tensor]) -> None:
        """Let values take no gradient on which the loss, given as the tensors at which its backward begins, does not depend."""
        assert self.flow is not None, "the forward has ended"
        nodes = set(nodes_from(root.grad_fn for root in roots))
        made_by = (traced.node for traced in self._values.traced)
        if nodes:
            values = (
                replace(value, takes_gradient=value.takes_gradient and (node is None or node in nodes))
                for value, node in zip(self.flow.values, made_by, strict=True)
            )
            self.flow = replace(self.flow, values=tuple(values))

    def values_in(self, storages: Collection[int]) -> frozenset[int]:
        """Return the values that are in some storages."""
        return frozenset(number for number, traced in enumerate(self._values.traced) if traced.storage in storages)

    def _end_weight(self, weight: _Weight) -> None:
        """Set the first use of a weight that is a value as its event; note uses that no stage is seen to make."""
        first, last = min(weight.uses), max(weight.uses)
        if (number := self._values.of(weight.param)) is not None:
            traced = self._values.traced[number]
            traced.value, traced.last_read = replace(traced.value, event=first), last
        for use, reader in weight.uses.items():
            if use > first and _UNSEEN in (reader, weight.uses[first]):
                text = f"{_UNSEEN} reads {weight.names[0]}, and a layer uses it"
                self._hidden.setdefault((first, use), text)

    def ran(self, read: Collection[int], written: Collection[int]) -> None:
        """Record the storages that one operation reads, and those that it makes or writes into."""
        if not self.at.is_recorded:
            return
        running, makers = self.at.running, self._values.makers
        if running is None and any(key in makers or key in self._weights for key in read):
            for key in written:  # no event passes it on, so it stays on the stage of the event before
                if key not in self._weights:
                    makers.setdefault(key, len(self._events) - 1)
        now = running.number if running else len(self._events)
        allowed = running.storages if running else ()
        for key in read:
            if key in self._weights:
                self._use(self._weights[key], key, running)
            maker = makers.get(key)
            if maker is not None and maker != now and key not in allowed:
                self._note_hidden(maker, now, running.name if running else _UNSEEN)
        if running is None or running.number < 0:
            return
        for key in written:
            if key not in allowed and key not in self._weights:
                makers.setdefault(key, now)

    def _use(self, weight: _Weight, key: int, running: _Running | None) -> None:
        """Note that an event reads a weight: one that it is given, one of the module called, or another."""
        if running is None:
            weight.uses.setdefault(len(self._events), _UNSEEN)
            # Every stage runs it, and one alone has the weight.
            text = (
                f"a transform of torch.func, or code that torch does not show, reads {weight.names[0]} between blocks"
            )
            self._hidden.setdefault((-1, sys.maxsize), text)
        elif running.number >= 0:
            is_own = running.is_call and any(is_below(name, running.name) for name in weight.names)
            is_known = is_own or key in running.storages
            weight.uses.setdefault(running.number, "" if is_known else running.name)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in BATCH_NORMS:
            return call_with_numbers(func, args, kwargs or {}, functools.partial(self._call, func), self._read)
        self.at.in_batch_norm = True
        try:
            return self._call(func, *args, **(kwargs or {}))
        finally:
            self.at.in_batch_norm = False

    def _call(self, func: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run a function, and record it if it is an event."""
        if not self.at.is_recorded:
            return self._run(func, args, kwargs)
        if func in (torch.autograd.grad, Tensor.backward):
            self._note_gradient(*args, **kwargs)
        if not self.at.is_between or is_transformed():
            return self._run(func, args, kwargs)
        tensors = given_to(func, args, kwargs)
        self._note_untracked(tensors, name_of(func))
        if not any(self._values.of(tensor) is not None or self._is_weight(tensor) for tensor in tensors):
            return self._run(func, args, kwargs)
        number = -1 if reads_shape_alone(func) else len(self._events)
        running = self._begin(number, name_of(func), tensors)
        try:
            outcome = self._run(func, args, kwargs)
            if number >= 0 and (tensors_in(outcome) or running.versions_now() != running.versions):
                self._append(running, outcome)
        finally:
            self.at.running = None
        return outcome

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.norms_any_size and func in BATCH_NORMS:
            return run_of_any_size(func, args, kwargs)
        return func(*args, **kwargs)

    def _note_gradient(self, outputs: Any, inputs: Any = None, *_: Any, **__: Any) -> None:
        """Note that the forward takes gradients; in the model's code these reach back to the events of their inputs, or to its begin."""
        running = self.at.running
        self.differentiates_at = self.differentiates_at or (running.name if running else "the model itself")
        if self.at.is_between:
            numbers = map(self._values.of, tensors_in(inputs))
            events = (-1 if number is None else self._values.traced[number].value.event for number in numbers)
            maker = min(events, default=-1)
            end = (
                len(self._events) if inputs is not None else sys.maxsize
            )  # what backward() leaves in x.grad, no event passes on
            self._hidden.setdefault((maker, end), "the model's own code takes gradients across blocks")

    def note_several(self, tensors: Sequence[Tensor]) -> None:
        """Note that one hook is given the gradients of several tensors, which one stage must compute."""
        numbers = map(self._values.of, tensors)
        events = [self._values.traced[number].value.event for number in numbers if number is not None]
        if events and min(events) < max(events):
            self._hidden.setdefault((min(events), max(events)), "one hook is given gradients of both sides")

    def _begin(
        self, number: int, name: str, tensors: list[Tensor], containers: list[Container] | None = None
    ) -> _Running:
        """Note the event that runs now; a call is given its containers."""
        storages = {self._key(tensor) for tensor in tensors}
        running = _Running(number, name, tensors, storages, containers or [], containers is not None)
        self.at.running, self.is_random = running, False
        return running

    def _is_weight(self, tensor: Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) and tensor.is_meta and self._key(tensor) in self._weights

    def _note_untracked(self, tensors: Sequence[Tensor], name: str) -> None:
        """Note a tensor given past the values: one that a module keeps, or a view of what was written."""
        for tensor in tensors:
            maker = None if self._values.of(tensor) is not None else self._values.maker_of(tensor)
            if maker is not None and not name.endswith("__get__"):
                self._note_hidden(maker, len(self._events), name)

    def _note_hidden(self, maker: int, reader: int, name: str) -> None:
        maker_name = self._events[maker].name if 0 <= maker < len(self._events) else name
        text = f"{name} reads a tensor of {maker_name} that is not passed on by arguments and results"
        self._hidden.setdefault((maker, reader), text)

    def _enter(self, path: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        if self.at.is_between:
            tensors = tensors_in((args, kwargs))
            self._note_untracked(tensors, path)
            self._begin(len(self._events), path, tensors, containers_in((args, kwargs)))
        self.at.depth += 1

    def _leave(self, path: str, _: nn.Module, args: Any, kwargs: Any, outcome: Any) -> None:
        self.at.depth -= 1
        if self.at.depth == 0 and (running := self.at.running) is not None and running.is_call:
            self._append(running, outcome, first_input_of(args, kwargs))
            self.at.running, self.at.last_call = None, path

    def _append(self, running: _Running, outcome: Any, first: Tensor | None = None) -> None:
        """Add the event that has just run."""
        number, name, tensors, is_call = len(self._events), running.name, running.tensors, running.is_call
        changes = changes_of(running.containers, running.contents)
        for tensor in tensors:
            if self._values.of(tensor) is None and self._is_weight(tensor):
                name_of_weight = self._weights[self._key(tensor)].names[0]
                self._new_value(tensor, number, f"the weight {name_of_weight}")
        numbers_given = [self._values.of(tensor) for tensor in tensors]
        reads = tuple(value for value in numbers_given if value is not None)
        for value in reads:
            self._values.traced[value].last_read = number
        maker = name if is_call else f"the code after {self.at.last_call or 'the start'}"
        begins_with = None if first is None else self._values.of(first)
        places = {id(tensor): place for place, tensor in reversed(list(enumerate(tensors)))}
        pairs = zip(tensors, numbers_given, strict=True)
        views = {self._key(tensor) for tensor, value in pairs if tensor.is_meta and value is None}
        writes = []
        for place, (tensor, version) in enumerate(zip(tensors, running.versions, strict=True)):
            if tensor._version != version and places[id(tensor)] == place:
                self._note_views(tensor, number)
                writes.append((place, self._new_value(tensor, number, maker)))
        makes: list[int | None] = []
        aliases: list[int] = []
        numbers: dict[int, int] = {}
        for tensor in tensors_made_by(outcome, changes):
            aliases.append(places.get(id(tensor), -1))
            if aliases[-1] < 0 and id(tensor) not in numbers:
                numbers[id(tensor)] = self._new_value(tensor, number, maker, views)
            makes.append(None if aliases[-1] >= 0 else numbers[id(tensor)])
        self._events.append(
            Event(
                name=name, is_call=is_call, reads=reads, outcome=_without_data(outcome), makes=tuple(makes),
                changes=tuple(replace(change, items=_without_data(change.items)) for change in changes), given=tuple(aliases), writes=tuple(writes), is_random=self.is_random, first=begins_with,
            )
        )  # fmt: skip

    def _new_value(self, tensor: Tensor, event: int, maker: str, views: Collection[int] = ()) -> int:
        """Number a new value; one in a storage of `views` views a tensor that depends on no weight."""
        number = self._values.add(tensor, event, maker)
        if tensor.is_meta and self._key(tensor) not in views and self._key(tensor) not in self._weights:
            self._values.makers.setdefault(self._key(tensor), event)
        return number

    def _note_views(self, tensor: Tensor, event: int) -> None:
        """Note that other tensors which view the same memory see what an event writes into one of them."""
        name = self.at.running.name if self.at.running else ""
        for value in self._values.viewed_with(tensor, event):
            self._hidden.setdefault((value.event, event), f"{name} writes into a view of a tensor of {value.maker}")


def _without_data(outcome: Any) -> Any:
    """Return an outcome whose tensors keep no autograd graph alive; it is created outside of the modes of a trace of
    costs."""

    def empty(tensor: Tensor) -> Tensor:
        is_on_host = not tensor.is_meta and not tensor.is_floating_point()  # as the sizes of packed sequences must be
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device if is_on_host else "meta")

    with disable_current_modes():
        return map_tensors(outcome, empty)
