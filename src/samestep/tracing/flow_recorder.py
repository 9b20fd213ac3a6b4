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
from samestep.building.families import FamilyFacts, facts_of
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


class FlowRecorder(TorchFunctionMode):
    """Runs the functions of one forward on the meta device with the numbers that are known, and records its events; `ran` reports its
    operations."""

    def __init__(self, key: Callable[[Tensor], int], read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._key, self._read = key, read
        self.in_batch_norm = False
        """Whether a function of batch norm runs."""
        self.norms_any_size = False
        """Whether batch norm takes one value per channel."""
        self._numbers = WeakIdKeyDictionary()
        """The value that each tensor is."""
        self._events: list[Event] = []
        self._values: list[Value] = []
        self._last_reads: list[int] = []
        self._hidden: dict[tuple[int, int], str] = {}
        self._makers: dict[int, int] = {}
        """For each storage that an event has written, the first such event."""
        self._nodes: dict[int, Node | None] = {}
        """The node of autograd that made each value."""
        self._storages: dict[int, int] = {}
        """The storage of each value."""
        self.flow: Flow | None = None
        """What passes between modules; None before the forward has ended."""
        self._weights: dict[int, _Weight] = {}
        """The weights of the module, by their storage."""
        self._running: _Running | None = None
        self._last_call = ""
        self._depth = 0
        self._is_active = False
        self.differentiates_at = ""
        """Path of the module whose code takes gradients by `torch.autograd.grad`; empty if none does."""
        self._picks_from: int | None = None
        self.is_random = False
        """Whether the event that runs has drawn random numbers."""

    def picks(self) -> bool:
        """Return whether an event works on the rows that are at hand, and not every stage for itself."""
        return self._is_active and self._running is not None and self._running.number >= 0

    @property
    def is_between(self) -> bool:
        """Whether code of the model runs outside of its modules on values that no weight has changed: every stage repeats it."""
        return self._is_active and self._running is None and self._depth == 0

    def pick(self) -> None:
        """Note that the event at hand passes rows on which values pick."""
        if self.picks() and self._picks_from is None:
            assert self._running is not None
            self._picks_from = self._running.number

    @contextmanager
    def over(self, module: nn.Module, is_outside: Callable[[str], bool]) -> Iterator[None]:
        """Record a forward of `module` inside; modules that are outside (they hold the blocks) make no calls."""
        facts = facts_of(module)
        for name, param in module.named_parameters(remove_duplicate=False):
            self._weights.setdefault(self._key(param), _Weight(param)).names.append(name)
        with ExitStack() as hooks:
            for path, part in module.named_modules():
                if not is_outside(path) and makes_event(part):
                    enter, leave = self._enter(path), self._leave(path, facts)
                    hooks.enter_context(part.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
                    hooks.enter_context(part.register_forward_hook(leave, with_kwargs=True))
            hooks.enter_context(backward_hooks_pass_on())
            hooks.enter_context(self)
            hooks.enter_context(seen_by(self))
            self._is_active = True
            yield
            self._is_active = False

    def finish(self, outputs: Any) -> None:
        """Set the flow of a forward with these outputs."""
        for tensor in tensors_in(outputs):
            number = self._numbers.get(tensor)
            if self._is_weight(tensor):
                self._weights[self._key(tensor)].uses.setdefault(len(self._events), "")
            if number is not None:
                self._last_reads[number] = len(self._events)
            elif self._maker(tensor) is not None:
                self._note_hidden(self._maker(tensor), len(self._events), "the model's outputs")
        used = [weight for weight in self._weights.values() if weight.uses]
        for weight in used:
            self._end_weight(weight)
        self.flow = Flow(
            events=tuple(self._events),
            values=tuple(self._values),
            hidden=tuple((*ends, text) for ends, text in self._hidden.items()),
            last_reads=tuple(self._last_reads),
            weights=tuple(
                (weight.names[0], self._numbers[weight.param]) for weight in used if weight.param in self._numbers
            ),
            uses=tuple((weight.names[0], tuple(sorted(weight.uses))) for weight in used),
            picks_from=self._picks_from,
            behind=tuple(weight.names[0] for weight in used if any(weight.uses.values())),
        )

    def take_idle(self, roots: Iterable[Tensor]) -> None:
        """Let values take no gradient on which the loss, given as the tensors at which its backward begins, does not depend."""
        assert self.flow is not None, "the forward has ended"
        nodes = set(nodes_from(root.grad_fn for root in roots))
        idle = {number for number, node in self._nodes.items() if node is not None and node not in nodes}
        if nodes:
            values = (
                replace(value, takes_gradient=value.takes_gradient and number not in idle)
                for number, value in enumerate(self.flow.values)
            )
            self.flow = replace(self.flow, values=tuple(values))

    def values_in(self, storages: Collection[int]) -> frozenset[int]:
        """Return the values that are in some storages."""
        return frozenset(number for number, storage in self._storages.items() if storage in storages)

    def _end_weight(self, weight: _Weight) -> None:
        """Set the first use of a weight that is a value as its event; note uses that no stage is seen to make."""
        first, last = min(weight.uses), max(weight.uses)
        number = self._numbers.get(weight.param)
        if number is not None:
            self._values[number] = replace(self._values[number], event=first)
            self._last_reads[number] = last
        for use, reader in weight.uses.items():
            if use > first and _UNSEEN in (reader, weight.uses[first]):
                text = f"{_UNSEEN} reads {weight.names[0]}, and a layer uses it"
                self._hidden.setdefault((first, use), text)

    def ran(self, read: Collection[int], written: Collection[int]) -> None:
        """Record the storages that one operation reads, and those that it makes or writes into."""
        if not self._is_active:
            return
        running = self._running
        if running is None and any(key in self._makers or key in self._weights for key in read):
            for key in written:  # no event passes it on, so it stays on the stage of the event before
                if key not in self._weights:
                    self._makers.setdefault(key, len(self._events) - 1)
        now = running.number if running else len(self._events)
        allowed = running.storages if running else ()
        for key in read:
            if key in self._weights:
                self._use(self._weights[key], key, running)
            maker = self._makers.get(key)
            if maker is not None and maker != now and key not in allowed:
                self._note_hidden(maker, now, running.name if running else _UNSEEN)
        if running is None or running.number < 0:
            return
        for key in written:
            if key not in allowed and key not in self._weights:
                self._makers.setdefault(key, now)

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
        self.in_batch_norm = True
        try:
            return self._call(func, *args, **(kwargs or {}))
        finally:
            self.in_batch_norm = False

    def _call(self, func: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run a function, and record it if it is an event."""
        if not self._is_active:
            return self._run(func, args, kwargs)
        if func in (torch.autograd.grad, Tensor.backward):
            self._note_gradient(*args, **kwargs)
        if self._depth or self._running is not None or is_transformed():
            return self._run(func, args, kwargs)
        tensors = given_to(func, args, kwargs)
        self._note_untracked(tensors, name_of(func))
        if not any(tensor in self._numbers or self._is_weight(tensor) for tensor in tensors):
            return self._run(func, args, kwargs)
        number = -1 if reads_shape_alone(func) else len(self._events)
        running = self._begin(number, name_of(func), tensors)
        try:
            outcome = self._run(func, args, kwargs)
            if number >= 0 and (tensors_in(outcome) or running.versions_now() != running.versions):
                self._append(running, outcome)
        finally:
            self._running = None
        return outcome

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.norms_any_size and func in BATCH_NORMS:
            return run_of_any_size(func, args, kwargs)
        return func(*args, **kwargs)

    def _note_gradient(self, outputs: Any, inputs: Any = None, *_: Any, **__: Any) -> None:
        """Note that the forward takes gradients; in the model's code these reach back to the events of their inputs, or to its begin."""
        self.differentiates_at = self.differentiates_at or (self._running.name if self._running else "the model itself")
        if self._depth == 0 and self._running is None:
            numbers = [self._numbers.get(tensor) for tensor in tensors_in(inputs)]
            maker = min((-1 if number is None else self._values[number].event for number in numbers), default=-1)
            end = (
                len(self._events) if inputs is not None else sys.maxsize
            )  # what backward() leaves in x.grad, no event passes on
            self._hidden.setdefault((maker, end), "the model's own code takes gradients across blocks")

    def note_several(self, tensors: Sequence[Tensor]) -> None:
        """Note that one hook is given the gradients of several tensors, which one stage must compute."""
        events = [self._values[self._numbers[tensor]].event for tensor in tensors if tensor in self._numbers]
        if events and min(events) < max(events):
            self._hidden.setdefault((min(events), max(events)), "one hook is given gradients of both sides")

    def _begin(
        self, number: int, name: str, tensors: list[Tensor], containers: list[Container] | None = None
    ) -> _Running:
        """Note the event that runs now; a call is given its containers."""
        storages = {self._key(tensor) for tensor in tensors}
        self._running = _Running(number, name, tensors, storages, containers or [], containers is not None)
        self.is_random = False
        return self._running

    def _is_weight(self, tensor: Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) and tensor.is_meta and self._key(tensor) in self._weights

    def _note_untracked(self, tensors: Sequence[Tensor], name: str) -> None:
        """Note a tensor given past the values: one that a module keeps, or a view of what was written."""
        for tensor in tensors:
            maker = None if tensor in self._numbers else self._maker(tensor)
            if maker is not None and not name.endswith("__get__"):
                self._note_hidden(maker, len(self._events), name)

    def _maker(self, tensor: Tensor) -> int | None:
        return self._makers.get(self._key(tensor)) if tensor.is_meta else None

    def _note_hidden(self, maker: int | None, reader: int, name: str) -> None:
        assert maker is not None
        maker_name = self._events[maker].name if 0 <= maker < len(self._events) else name
        text = f"{name} reads a tensor of {maker_name} that is not passed on by arguments and results"
        self._hidden.setdefault((maker, reader), text)

    def _enter(self, path: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._depth += 1
            if self._depth == 1 and self._running is None:
                tensors = tensors_in((args, kwargs))
                self._note_untracked(tensors, path)
                self._begin(len(self._events), path, tensors, containers_in((args, kwargs)))

        return hook

    def _leave(self, path: str, facts: FamilyFacts) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any, outcome: Any) -> None:
            self._depth -= 1
            if self._depth == 0 and self._running is not None and self._running.is_call:
                self._append(self._running, outcome, first_input_of(args, kwargs, facts))
                self._running, self._last_call = None, path

        return hook

    def _append(self, running: _Running, outcome: Any, first: Tensor | None = None) -> None:
        """Add the event that has just run."""
        number, name, tensors, is_call = len(self._events), running.name, running.tensors, running.is_call
        changes = changes_of(running.containers, running.contents)
        for tensor in tensors:
            if tensor not in self._numbers and self._is_weight(tensor):
                name_of_weight = self._weights[self._key(tensor)].names[0]
                self._new_value(tensor, number, f"the weight {name_of_weight}")
        reads = tuple(self._numbers[tensor] for tensor in tensors if tensor in self._numbers)
        for value in reads:
            self._last_reads[value] = number
        maker = name if is_call else f"the code after {self._last_call or 'the start'}"
        begins_with = None if first is None else self._numbers.get(first)
        places = {id(tensor): place for place, tensor in reversed(list(enumerate(tensors)))}
        views = {self._key(tensor) for tensor in tensors if tensor.is_meta and tensor not in self._numbers}
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
        number = len(self._values)
        self._values.append(Value(event, maker, tuple(tensor.shape), tensor.dtype, tensor.requires_grad))
        self._last_reads.append(-1)
        self._nodes[number] = tensor.grad_fn
        self._numbers[tensor] = number
        if tensor.is_meta:
            self._storages[number] = self._key(tensor)
        if tensor.is_meta and self._key(tensor) not in views and self._key(tensor) not in self._weights:
            self._makers.setdefault(self._key(tensor), event)
        return number

    def _note_views(self, tensor: Tensor, event: int) -> None:
        """Note that other tensors which view the same memory see what an event writes into one of them."""
        key = self._key(tensor)
        for other, number in list(self._numbers.items()):
            if other is not tensor and self._key(other) == key and self._values[number].event < event:
                maker = self._values[number].event
                text = f"{self._running.name if self._running else ''} writes into a view of a tensor of {self._values[number].maker}"
                self._hidden.setdefault((maker, event), text)


def _without_data(outcome: Any) -> Any:
    """Return an outcome whose tensors keep no autograd graph alive; it is created outside of the modes of a trace of
    costs."""

    def empty(tensor: Tensor) -> Tensor:
        is_on_host = not tensor.is_meta and not tensor.is_floating_point()  # as the sizes of packed sequences must be
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device if is_on_host else "meta")

    with disable_current_modes():
        return map_tensors(outcome, empty)
