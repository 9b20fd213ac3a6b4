"""The operations of one traced forward as a list of plain data, which checks read after the trace.

A view is told by its storage, offset, shape and strides, so operations that only make views are left out: whatever code
does to a shape shows in the operands of the next operation that computes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from samestep.building.attention import AttentionCall
from samestep.building.named_tensors import address, inner_tensor
from samestep.building.predictions import prediction_of
from samestep.building.torch_seams import disable_current_modes
from samestep.errors import InputError
from samestep.models.layer_parts import BatchNormCall, BatchValueCall, Exchange, Product
from samestep.tracing.checkpointed import Point, TracedPlaces
from samestep.tracing.custom_functions import Function, Hook, follow_hook
from samestep.tracing.looks import tensors_seen_by
from samestep.tracing.meta_tensors import mutated_operands, storage_elements
from samestep.tracing.module_inputs import ForwardCalls
from samestep.trees import fold, operands, tensors_in

FEW_ELEMENTS = 64
"""Constants of at most so many elements are recorded with their values."""

LOOKED = "looked"
"""Name of the event that code looks at values of tensors, or that a module is given or returns tensors whose code does."""


@dataclass(frozen=True, slots=True)
class View:
    """A tensor of the forward: the part of a storage that it shows."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    takes_gradient: bool = False
    dtype: torch.dtype = torch.float32
    values: tuple[Any, ...] | None = None
    """Elements of a small constant that is not on the meta device."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation that computes, or the end of a module's forward."""

    func: Any
    """An operator of torch, `"attention"`, `"function"` for a custom Function of autograd, `"left"` for the end of a
    module's forward, `LOOKED` for a look at values, `"outputs"` for the model's, and of hooks `"hook"` for the gradients of what is given,
    whose operations follow, and `"hooked"` for what is made of them."""
    where: str
    """Path of the module whose code runs."""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    results: tuple[View, ...] = ()
    given: list[View] = field(init=False, repr=False, compare=False)
    """The tensors among the arguments."""

    def __post_init__(self) -> None:
        """List the tensors once: every check reads them."""
        object.__setattr__(self, "given", list(views_in((self.args, *self.kwargs.values()))))

    @property
    def name(self) -> str:
        """Name of the operation in messages."""
        return self.func if isinstance(self.func, str) else self.func.overloadpacket.__name__

    @property
    def writes(self) -> bool:
        """Whether it writes into a tensor that it is given."""
        return not isinstance(self.func, str) and self.func._schema.is_mutable


class Storages:
    """The storages of a forward by their addresses: each stays alive, so that no other one has the same address."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        """Number of elements of each storage."""
        self._alive: dict[int, torch.UntypedStorage] = {}

    def key(self, tensor: Tensor) -> int:
        """Return the address of a tensor's storage, its index in the tables of a trace."""
        number = address(tensor)
        if number not in self._alive:
            self._alive[number] = inner_tensor(tensor).untyped_storage()
            self.sizes[number] = storage_elements(tensor)
        return number


Elements = tuple[tuple[int, int], ...]
"""Storages, each with the elements of it that an operation reads or writes."""
WorkKind = Literal["product", "fusible", "other"]
"""A matrix product or attention, an operation that a compiler may join with others, or one that stands alone."""


class Work(NamedTuple):
    """The cost of an operation."""

    region: str
    """The call of a top-most module with weights that is the newest then."""
    reads: Elements
    writes: Elements
    kind: WorkKind
    flops: int | None
    """None unless recompute=selective keeps its results."""
    product: Product | None
    is_cut: bool
    """Whether a tensor cut leaves a rank its part of the results."""
    is_view: bool
    """Whether its results are views of what it reads, that nothing has been written into."""
    channels: int = 0
    """Channels of a batch norm over a tensor that has them first."""


class SavedTensor(NamedTuple):
    """A tensor that autograd keeps for the backward."""

    region: str
    owner: str
    """Path of the module whose code runs."""
    storage: int | None
    """None of a weight, and of a tensor that is not on the meta device."""
    is_inside: bool
    """Whether a top-most module runs, which recomputation repeats, and not the model's own code behind it."""


PlacedExchange = tuple[str, int, Exchange, Point]
"""The region of an attention, the storage of one of its tensors, its exchange, and the point at which ranks send it."""


@dataclass(slots=True)
class Events:
    """The events of one forward in their order."""

    modules: ForwardCalls | None = None
    """The calls of its modules; None before it begins."""
    places: TracedPlaces = field(default_factory=TracedPlaces)
    """Its points among the checkpoints of the model's code, and what autograd keeps after each."""
    costs: list[Work | SavedTensor] | None = None
    """What it computes and keeps; None if nobody asks for costs."""
    readers: dict[int, set[frozenset[str]]] = field(default_factory=dict)
    """For each weight, the sets of modules that were running when it was read; without costs it is empty."""
    exchanges: list[PlacedExchange] = field(default_factory=list)
    """Inputs and outputs of attentions, with region, storage, and the point at which ranks send them."""
    batch_norms: list[tuple[str, BatchNormCall]] = field(default_factory=list)
    """Calls of batch norm that take the statistics of samples, with their regions."""
    batch_values: list[tuple[str, BatchValueCall]] = field(default_factory=list)
    """Calls that take values of all samples by name, with their regions."""
    kept_after: dict[int, str] = field(default_factory=dict)
    """The buffers with a value after the step, each with the region whose code gives it last."""
    pairs: set[int] = field(default_factory=set)
    """Storages of masks of pairs of tokens."""
    returned: set[int] = field(default_factory=set)
    """Storages of the outputs."""
    written: set[int] = field(default_factory=set)
    """Storages that an operation has written into."""
    sparse: set[int] = field(default_factory=set)
    """Storages of tables whose gradients are sparse tensors."""
    counting: list[str] = field(default_factory=list)
    """Module of each lookup whose gradient is divided by how often the micro-batch has a token."""

    def restart(self) -> None:
        """Forget all, since another forward begins."""
        self.modules = None
        for event in fields(self):
            if (noted := getattr(self, event.name)) is not None:
                noted.clear()


_UNINITIALISED = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.new_empty,
    torch.ops.aten.empty_strided,
}
"""Operations whose results have no values that mean anything."""


class Executed(NamedTuple):
    """An operation that has run in a traced forward."""

    func: Any
    args: tuple[Any, ...]
    """As the code gave them; `meta_args` have its constants on the meta device."""
    kwargs: dict[str, Any]
    meta_args: tuple[Any, ...]
    meta_kwargs: dict[str, Any]
    outcome: Any

    @property
    def given(self) -> list[Tensor]:
        """The operands on the meta device."""
        return [tensor for tensor in operands(*self.meta_args, *self.meta_kwargs.values()) if tensor.is_meta]

    @property
    def results(self) -> list[Tensor]:
        """The tensors of the meta device that it returns, or else writes into."""
        results = operands(self.outcome) or mutated_operands(self.func, self.args, self.kwargs)
        return [tensor for tensor in results if tensor.is_meta]


class Analysis:
    """Receives the events of a forward in their order, from the mode that watches it. An event without a method of its own changes nothing."""

    tracer: Any
    """The mode, a `ForwardTracer`, which sets this attribute."""

    def given(self, batch: Any) -> None:
        """Receive the batch of the forward, on the meta device."""

    def enter(self, path: str, part: nn.Module, given: Any) -> None:
        """Receive that a module's forward starts."""

    def leave(self, path: str, part: nn.Module, inputs: Any, output: Any) -> None:
        """Receive that a module's forward ends."""

    def begin(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Receive an operation that is about to run."""

    def ran(self, op: Executed) -> Any:
        """Receive an operation that has run; return what the code gets."""
        return op.outcome

    def made_on_meta(self, made: Tensor, real: Tensor) -> None:
        """Receive a tensor of the meta device that stands for a real one."""

    def moved(self, made: Tensor, constant: Tensor) -> None:
        """Receive a constant of the host that an operation has moved to the meta device."""

    def looks(self, seen: Sequence[Tensor]) -> None:
        """Receive that code looks at values of tensors."""

    def branches(self) -> None:
        """Receive that code looks at whole numbers of the sample, by which it may branch."""

    def read(self, tensor: Tensor, value: Tensor) -> Tensor:
        """Receive that code reads a tensor past the dispatcher; return the values that it gets."""
        return value

    def check_attention(self, call: AttentionCall) -> None:
        """Raise a RuntimeError where the shapes of an attention's arguments do not fit."""
        call.check()

    def attended(self, call: AttentionCall, output: Tensor) -> None:
        """Receive an attention that has run."""

    def applied(self, function: Function, args: tuple[Any, ...], named: dict[str, Any], outcome: Any) -> None:
        """Receive the call of a custom Function of autograd, whose operations have been received before."""

    def hooked(self, name: str, hook: Hook, given: list[Tensor], results: list[Tensor]) -> None:
        """Receive a hook on gradients, a function of those of `given` tensors that returns those of `results`."""

    def take_values(self, kind: Literal["sum", "cat"], x: Tensor, result: Tensor) -> None:
        """Receive a call that takes values of all samples, with its result."""

    def keep(self, buffer: Tensor, value: Tensor) -> None:
        """Receive the value that a buffer gets after the step."""


class Recorder(Analysis):
    """Records the operations of a forward, in order, and where modules are entered and left that tp cuts or whose code looks at values."""

    def __init__(self, styles: Mapping[str, str] = MappingProxyType({}), looking: Collection[str] = ()) -> None:
        self.styles, self.looking = styles, looking
        """The cut style of each module, by its path, and the paths of those whose code looks at values."""
        self.operations: list[Operation] = []
        self.seen = 0
        """Number of operations seen, those that only make views included."""
        self.branching: set[str] = set()
        """Paths of modules whose code looks at whole numbers of the sample, by which it may branch."""
        self.paused = False
        """Whether operations belong to a stand-in, and are not recorded."""

    def record(self, func: Any, where: str, args: Any, kwargs: Any, outcome: Any) -> None:
        """Add an operation, unless it only makes views."""
        if self.paused:
            return
        self.seen += 1
        if not isinstance(func, str) and func._schema.is_mutable and not func._schema.returns:
            outcome = mutated_operands(func, args, kwargs)
        args, named = with_views(args), {name: with_views(value) for name, value in kwargs.items()}
        results = tuple(views_in((with_views(outcome),)))
        if not isinstance(func, str) and func.overloadpacket in _UNINITIALISED:
            results = tuple(view if view.values is None else replace(view, values=()) for view in results)
        operation = Operation(func, where, args, named, results)
        storages = {view.storage for view in operation.given}
        if isinstance(func, str) or operation.writes or any(view.storage not in storages for view in operation.results):
            self.operations.append(operation)

    def ran(self, op: Executed) -> Any:
        """Record an operation."""
        self.record(op.func, self.tracer.modules.where, op.args, op.kwargs, op.outcome)
        return op.outcome

    def enter(self, path: str, part: nn.Module, given: Any) -> None:
        """Record all that a module is given if its code looks at values."""
        if path in self.looking:
            self.record(LOOKED, path, tensors_seen_by(part, given), {}, ())

    def leave(self, path: str, part: nn.Module, inputs: Any, output: Any) -> None:
        """Record the output of a cut module, of one whose code looks at values, and of the model: its prediction first, if there is one."""
        if self.styles.get(path, "sum") != "sum":
            self.record("left", path, (), {}, tuple(tensors_in(output)))
        if path in self.looking:
            self.record(LOOKED, path, tensors_seen_by(part, (inputs, output)), {}, ())
        if not path:
            prediction = None
            with suppress(InputError):
                prediction = prediction_of(output)
            self.record("outputs", path, (prediction, tuple(tensors_in(output))), {}, ())

    def looks(self, seen: Sequence[Tensor]) -> None:
        """Record a look at values."""
        self.record(LOOKED, self.tracer.modules.where, tuple(seen), {}, ())

    def branches(self) -> None:
        """Note the module whose code may branch."""
        self.branching.add(self.tracer.modules.where)

    def attended(self, call: AttentionCall, output: Tensor) -> None:
        """Record an attention."""
        self.record("attention", self.tracer.modules.where, tuple(call), {}, output)

    def applied(self, function: Function, args: tuple[Any, ...], named: dict[str, Any], outcome: Any) -> None:
        """Record the call of a custom Function."""
        self.record("function", self.tracer.modules.where, (function, *args), named, outcome)

    def hooked(self, name: str, hook: Hook, given: list[Tensor], results: list[Tensor]) -> None:
        """Record a hook on gradients, and its operations."""
        with disable_current_modes():
            where, key = self.tracer.modules.where, self.tracer.key
            gradients = [torch.empty_like(tensor, requires_grad=False) for tensor in given]
            for gradient in gradients:
                key(gradient)  # alive, so that no other storage has the same number
            self.record("hook", where, tuple(given), {}, tuple(gradients))

            def ran(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outcome: Any) -> None:
                for tensor in operands(outcome):
                    key(tensor)
                self.record(func, where, args, kwargs, outcome)

            returned = follow_hook(hook, gradients, ran)
            if returned is None or len(returned) != len(results):
                self.record(LOOKED, where, tuple(gradients), {}, ())
            else:
                self.record("hooked", where, (tuple(results), tuple(returned)), {}, ())


def with_views(value: Any) -> Any:
    """Return an argument with views in the place of its tensors."""
    return fold(value, lambda leaf: view_of(leaf) if isinstance(leaf, Tensor) else leaf)


def view_of(tensor: Tensor) -> View:
    """Return the description of a tensor."""
    tensor = inner_tensor(tensor)
    if not tensor.is_meta:
        few = tensor.numel() <= FEW_ELEMENTS and tensor.layout is torch.strided
        values = tuple(tensor.detach().flatten().tolist()) if few else None
        return View(0, 0, tuple(tensor.shape), (1,) * tensor.dim(), dtype=tensor.dtype, values=values)
    numbers = 2 if tensor.is_complex() else 1  # so that strides are those of the real tensor of the same storage
    strides = tuple(numbers * stride for stride in tensor.stride())
    offset = numbers * int(tensor.storage_offset())
    return View(
        tensor.untyped_storage()._cdata, offset, tuple(tensor.shape), strides, tensor.requires_grad, tensor.dtype
    )


def views_in(value: Any) -> Iterator[View]:
    """Yield the views in nested tuples."""
    if isinstance(value, View):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from views_in(item)
