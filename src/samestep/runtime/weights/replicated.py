"""Replicated weights: gradients reduced in buckets while backward still runs (twin of `strategies/data.py`).

Each bucket of the program is a flat buffer in master precision. A hook on every parameter's gradient adds it to its
place; when the last micro-batch's backward has filled a bucket, its first collective is issued, always in the program's
order, so that every rank issues the same; but in a pipeline not before the gradient for which the stage before waits. Under
zero=1 the weights are windows of flat buffers too: a rank updates its chunk of each, and `publish` gathers the others', which
the next forward may wait for ([Note: late weights]).

```
bucket 0  [ head.weight | norm.weight | pad ]    gradients of the last layers, finished first
           rank 0's chunk  rank 1's chunk        zero=1: what each rank updates
```

[Note: late weights]

After an update under zero=1 each rank gathers the chunks that the others have updated, while the next forward runs. The forward needs those of
its first layers first, so buckets are gathered in the order of their first layers, and each is waited for where its weights are needed:

    a layer begins             a hook in front of its modules waits for the buckets of their weights
    other code reads a weight  through its module, where a stand-in waits as soon as anything is asked of it
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.building.model_changes import format_of
from samestep.building.parameter_marks import filled_parameter
from samestep.models.param_spec import ParamSpec
from samestep.models.spec import is_below
from samestep.program.buckets import Bucket, Member
from samestep.program.ops import BodyKey, Op, OpKind, Ops, Task, ends_step, is_forward
from samestep.program.program import Program
from samestep.program.step import StepSpec
from samestep.runtime.axes.precision import DTYPES
from samestep.runtime.axes.weight_gradients import is_postponed
from samestep.runtime.contexts import AtEnd
from samestep.runtime.host_copies import master_on_host
from samestep.runtime.ledger import owned
from samestep.runtime.processes.mesh import Mesh
from samestep.runtime.weights.flat_buffers import (
    FlatBuffer,
    GradientSlot,
    num_alike,
    own_part,
    squared_norm,
    start_collective,
    sum_of_shares,
)
from samestep.runtime.weights.gradient_codes import GradientCodes
from samestep.runtime.weights.parameter_hooks import GradientHooks
from samestep.runtime.weights.pieces import Piece
from samestep.runtime.weights.weight_store import Materialize, WeightStore
from samestep.schedules import TaskKind
from samestep.trees import tree_map_only


class StandIn(nn.Parameter):
    """A placeholder of a weight that is still being gathered: an operation on it waits, and is applied to the weight."""

    arrive: Callable[[], Tensor]
    """Waits for the weight, and returns it."""

    def __new__(cls, param: nn.Parameter, arrive: Callable[[], Tensor]) -> StandIn:
        """Return a stand-in for a weight, which takes no memory."""
        stand_in: StandIn = super().__new__(cls, torch.empty_like(param, device="meta"), param.requires_grad)
        stand_in.arrive = arrive
        return stand_in

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(StandIn, lambda stand_in: stand_in.arrive(), (args, kwargs or {}))
        return func(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class _WeightAttribute:
    """A module's attribute that holds a weight."""

    module: nn.Module
    leaf: str
    param: nn.Parameter
    stand_in: StandIn


@dataclass(slots=True)
class LateWeights:
    """The weights of gathered buckets, and how to wait for those whose gather is under way."""

    places: dict[str, list[_WeightAttribute]]
    """The attributes of modules that hold each bucket's weights."""
    under_way: dict[str, Callable[[], object]] = field(default_factory=dict)
    """Waits for the gather of a bucket that was begun and not waited for."""

    @classmethod
    def of(
        cls, model: nn.Module, program: Program, buckets: Sequence[Bucket], params: Mapping[str, nn.Parameter]
    ) -> LateWeights:
        """Put hooks in front of the layers whose weights are in these buckets, which are gathered after each update."""
        specs = {spec.name: spec for spec in program.step.model.params}
        late = cls({})
        for bucket in buckets:
            late.places[bucket.name] = [
                place
                for member in bucket.members
                for place in late._places_of(model, bucket.name, specs[member.name], params)
            ]
        for layer in program.step.model.layers:
            for path in layer.modules:
                needed = [
                    bucket.name
                    for bucket in reversed(buckets)  # in the order of their gathers
                    if any(is_below(n, path) for member in bucket.members for n in _names(specs[member.name]))
                ]
                if needed:
                    module = model.get_submodule(path)
                    module.register_forward_pre_hook(functools.partial(late._before, needed), prepend=True)
        return late

    def _places_of(
        self, model: nn.Module, bucket: str, spec: ParamSpec, params: Mapping[str, nn.Parameter]
    ) -> list[_WeightAttribute]:
        param = params[spec.name]

        def arrive() -> Tensor:
            self.settle(bucket)
            return param

        stand_in = StandIn(param, arrive)
        split = (name.rpartition(".") for name in _names(spec))
        return [_WeightAttribute(model.get_submodule(path), leaf, param, stand_in) for path, _, leaf in split]

    def hold(self, bucket: str, wait: Callable[[], object]) -> None:
        """Put stand-ins into the attributes of a bucket's weights until `wait` was called."""
        self.under_way[bucket] = wait
        for place in self.places[bucket]:
            place.module._parameters[place.leaf] = place.stand_in

    def settle(self, bucket: str) -> None:
        """Wait for the weights of a bucket, if they are being gathered, and put them back into their attributes."""
        wait = self.under_way.pop(bucket, None)
        if wait is None:
            return
        wait()
        for place in self.places[bucket]:
            if place.module._parameters.get(place.leaf) is place.stand_in:  # nobody has put another one there
                place.module._parameters[place.leaf] = place.param

    def _before(self, buckets: Sequence[str], _: nn.Module, args: Any) -> None:
        for bucket in buckets if self.under_way else ():
            self.settle(bucket)


def _names(spec: ParamSpec) -> tuple[str, ...]:
    return (spec.name, *spec.aliases)


Place = tuple[FlatBuffer, Member]
"""A weight's bucket, and its place there."""


@dataclass(frozen=True, slots=True)
class BodyGradients:
    """The kind of gradients that the tasks of one body leave; a forward, which leaves none, has one too."""

    finishes: bool = False
    """Whether they are the last of the step, of weights whose gradients a backward computes."""
    finishes_postponed: bool = False
    """Whether they are, of weights whose gradients are postponed to a W task."""
    completes: bool = False
    """Whether each bucket is complete after such a task."""
    starts_at_once: bool = False
    """Whether complete buckets are reduced within such a task: unless a message to another stage goes out first, at its end."""

    @classmethod
    def of(cls, key: BodyKey, ops: Ops, step: StepSpec) -> BodyGradients:
        """Return what the gradients of a body of a program are."""
        finishes, completes = ends_step(key) and not is_forward(key), step.ends_gradients(key)
        sends = any(op.kind is OpKind.SEND for op in ops)
        return cls(finishes, finishes and key.kind is TaskKind.WEIGHT, completes, completes and not sends)


class Replicated(WeightStore):
    """A `WeightStore` of whole weights, in the working dtype; gradients and optimizer follow the program's buckets."""

    def __init__(self, model: nn.Module, program: Program, mesh: Mesh, materialize: Materialize) -> None:
        self.program, self.mesh = program, mesh
        self.params: dict[str, nn.Parameter] = {}
        self._places: dict[str, Tensor] = {}
        """The tensor with each weight's values, to which buckets and pieces refer."""
        self._bodies = {key: BodyGradients.of(key, ops, program.step) for key, ops in program.bodies.items()}
        self._now = BodyGradients()
        """What the gradients are that the running task leaves."""
        self._counts = True
        self._left_out: Set[int] = frozenset()
        """Whether the running task's gradients are uses of their weights, and the ids of the weights of which they are none."""
        self._unused: set[str] = set()
        """Weights to which no micro-batch of the step has given a gradient so far, unless it does not count."""
        self._waits = False
        """Whether nothing is reduced before `finish_gradients` is called."""
        self._next = 0
        """The index of the next bucket to reduce."""
        self._postponed = {param.name for param in program.step.model.params if is_postponed(model, param.name)}
        self._flats = [FlatBuffer.of(bucket, program, mesh) for bucket in program.buckets]
        self._alike = [(num_alike(flat, program.step, mesh), flat) for flat in self._flats]
        """The buckets, each with the number of ranks that add up the same gradients."""
        self.codes = GradientCodes()
        self._separate = program.step.layout.offload
        self.pieces: list[Piece] = []
        self.frozen: list[Piece] = []
        self._fill(model, materialize)
        gathered = [flat.bucket for flat in self._flats if flat.gathers]
        self._late = LateWeights.of(model, program, gathered, self.params)
        self._held = [*self.params.values()]
        self._addresses = [place.data_ptr() for place in self._places.values()]

    # -- setting up --------------------------------------------------------------------------------

    @torch.no_grad()
    def _fill(self, model: nn.Module, materialize: Materialize) -> None:
        """Give every parameter its initial value, and list the pieces that this rank updates."""
        places = {member.name: (flat, member) for flat in self._flats for member in flat.bucket.members}
        master = DTYPES[self.program.step.master_dtype]
        for spec in self.program.step.model.params:
            value = materialize(spec.name, master)
            place = places.get(spec.name)
            live = (
                format_of(spec.held_as).pack_values(value)
                if spec.held_as
                else value.to(DTYPES[self.program.step.working_dtype(spec)])
            )
            if place is not None and (weights := place[0].weights) is not None:
                window = weights[place[1].span].view(spec.shape)
                # `.data` has a separate version: a forward may write into one weight of a bucket.
                live = window.copy_(live).data
            param = filled_parameter(model.get_parameter(spec.name), live, trains=spec.trainable)
            for name in (spec.name, *spec.aliases):
                path, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(path), leaf, param)  # not by _parameters: LSTM keeps lists of its weights
            if not spec.trainable:
                self.frozen.append(Piece(spec.name, 0, spec.numel, param, lambda: torch.zeros(0), held_as=spec.held_as))
            else:
                self.params[spec.name] = param
                self._places[spec.name] = live
                self.pieces += self._pieces_of(spec.name, place, param, value)

    def _pieces_of(self, name: str, place: Place | None, param: nn.Parameter, value: Tensor) -> Iterator[Piece]:
        """Yield a parameter's pieces that this rank updates, and let its gradient be added to the bucket."""
        assert place is not None, "a weight in no bucket"
        flat, member = place
        gradient = flat.gradients[member.span].view(param.shape)
        is_cast = param.dtype != gradient.dtype
        slot = GradientSlot(flat, name, gradient, name in self._postponed, is_cast)
        param.register_post_accumulate_grad_hook(functools.partial(_gradient_hook, weakref.ref(self), slot))
        if flat.weights is None:
            yield self._piece(name, 0, member.numel, param, value, gradient)
            return
        start = min(max(flat.mine.start - member.offset, 0), member.numel)
        stop = min(max(flat.mine.stop - member.offset, 0), member.numel)
        if start < stop:
            shape = param.shape if stop - start == param.numel() else (-1,)  # a weight that is whole has its shape
            part = flat.gradients[member.offset + start : member.offset + stop].view(shape)
            live = param.detach().view(-1)[start:stop].view(shape)
            yield self._piece(name, start, stop, live, value.flatten()[start:stop].view(shape), part)

    def _piece(
        self, name: str, start: int, stop: int, live: Tensor, value: Tensor, source: Tensor | Callable[[], Tensor]
    ) -> Piece:
        """Return a piece whose value is the weight's memory, or a master copy in another dtype or on the host; its gradient is
        the window of a bucket's, or what a function returns."""
        window, gradient = (source, lambda: source) if isinstance(source, Tensor) else (None, source)
        if live.dtype == value.dtype and not self._separate:
            master = live if isinstance(live, nn.Parameter) else live.detach()
            return Piece(name, start, stop, master, gradient, window=window)
        master = master_on_host(value) if self._separate else value.detach().to(live.device, copy=True)
        return Piece(name, start, stop, master, gradient, window=window, target=live.detach())

    def hook_gradients(self, hooks: GradientHooks) -> None:
        """Let the user's hooks change gradients before they are added to a bucket."""
        for name, hook in hooks.items():
            self.params[name].register_hook(hook)

    # -- a step ------------------------------------------------------------------------------------

    def begin_step(self, *, waits: bool = False) -> None:
        """Discard the gradients of the previous step; with `waits` nothing is reduced before `finish_gradients` is called."""
        self._waits = waits
        self.take_back()
        for param in self.params.values():
            param.grad = None
        self._unused = set(self.params)
        for flat in self._flats:
            flat.begin_step()
        self._next = 0

    def without_gradient(self) -> Mapping[str, bool]:
        """Return the trained weights to which this rank gave no gradient in the step, and whether the loop has frozen them."""
        return {name: not self.params[name].requires_grad for name in self._unused}

    def running(
        self, task: Task, *, counts: bool = True, left_out: Set[int] = frozenset()
    ) -> AbstractContextManager[None]:
        """Record, while a task runs, whether its gradients are the step's last and whether they complete buckets.

        Collective over the axes of the program's buckets, see [Note: collective calls].
        """
        self._now, self._counts, self._left_out = self._bodies[task.body], counts, left_out
        if task.body.kind in (TaskKind.BACKWARD, TaskKind.WEIGHT):
            self.settle()
        completes = self._now.completes and not self._waits
        return AtEnd(functools.partial(self.end_task, task, completes=completes), always=False)

    def end_task(self, task: Task, *, completes: bool) -> None:
        """Take in the gradients of a task, and start the buckets that it completes.

        Collective over the axes of the program's buckets, see [Note: collective calls].
        """
        for flat in self._flats:
            flat.take_in()
        if completes:
            self._start_ready()

    def _start_ready(self) -> None:
        while self._next < len(self._flats) and not self._flats[self._next].missing:
            self._start(self._flats[self._next])
            self._next += 1

    def _start(self, flat: FlatBuffer) -> None:
        flat.zero_untouched()
        for op in flat.starts:
            flat.work = self._send(flat, op, flat.gradients)

    def finish_gradients(self, *, delivers: bool = True, names: Set[str] | None = None) -> None:
        """Start the buckets that no backward completed, issue the collectives that follow, and wait for all.

        Collective over the axes of the program's buckets, see [Note: collective calls].
        """
        flats = [flat for flat in self._flats if names is None or flat.holds(names)]
        for flat in flats[self._next :]:
            self._start(flat)
        self._next, self._waits = len(self._flats), False
        for flat in flats:
            for op in flat.finishes:
                flat.wait()
                flat.work = self._send(flat, op, flat.gradients)
        for flat in flats:
            flat.wait()

    def _send(self, flat: FlatBuffer, op: Op, tensor: Tensor) -> dist.Work:
        """Issue one collective of a bucket, on all of a buffer or on what this rank still has to reduce.

        Collective over `op.axis`, see [Note: collective calls].
        """
        assert op.axis is not None
        group = self.mesh.groups[op.axis]
        with owned(op.owner) as issue:
            sent = flat.remaining if op.kind is OpKind.ALL_REDUCE else tensor
            work: dist.Work = issue.sent(start_collective(op.kind, sent, group))
        if op.kind is OpKind.REDUCE_SCATTER:
            flat.chunk = own_part(tensor, group)
        elif op.kind is OpKind.ALL_GATHER:
            flat.chunk = None
        return work

    def norm_squared(self, names: Set[str] | None = None) -> Tensor:
        """Return this rank's share of the squared norm of all gradients, or of some: the shares of all ranks add up to the whole."""
        if self._waits:
            gradients = [gradient for name, gradient in self.unreduced().items() if names is None or name in names]
            return squared_norm(gradients, self.mesh.device)
        alike: dict[int, list[Tensor]] = {}
        for number, flat in self._alike:
            alike.setdefault(number, []).extend(flat.windows(names))
        return sum_of_shares(alike.items(), self.mesh.device)

    def publish(self, *, waits: bool = True) -> None:
        """Gather every rank's chunk of the updated weights under zero=1, first those that the next forward needs first.

        Collective over `dp_shard`, see [Note: collective calls].
        """
        self.settle()
        for flat in reversed(self._flats):
            for op in flat.gathers:
                assert flat.weights is not None
                self._late.hold(flat.bucket.name, self._send(flat, op, flat.weights).wait)
        if waits:
            self.settle()

    def settle(self) -> None:
        """Wait for the weights that are still gathered."""
        for bucket in list(self._late.under_way):
            self._late.settle(bucket)

    def take_back(self) -> None:
        """Copy weights that a user has given another storage, by `param.data = ...`, back to the one in use."""
        if [*map(Tensor.data_ptr, self._held)] == self._addresses:
            return
        for param, place in zip(self._held, self._places.values(), strict=True):
            if param.data_ptr() != place.data_ptr():
                param.data = place.copy_(param.data)

    # -- gradients between a backward and an update ------------------------------------------------

    @property
    def can_wait(self) -> bool:
        """Whether something may be sent for gradients, which are whole on each rank until then; the same on all stages of a pipeline,
        of which some have weights that others hold too."""
        return self.program.step.layout.pp > 1 or any(flat.starts or flat.finishes for flat in self._flats)

    def unreduced(self) -> dict[str, Tensor]:
        """Return the gradient of each weight before ranks are summed, zeros where the backward gave none."""
        for flat in self._flats:
            flat.zero_untouched()
        return self._whole_gradients()

    def finished(self) -> dict[str, Tensor]:
        """Return the gradient of each weight; under zero=1 the ranks gather it.

        Collective over `dp_shard` with zero=1, see [Note: collective calls].
        """
        for flat in self._flats:
            for op in flat.gathers:
                self._send(flat, op, flat.gradients).wait()
        return self._whole_gradients()

    def _whole_gradients(self) -> dict[str, Tensor]:
        return {
            member.name: flat.gradients[member.span].view(self.params[member.name].shape)
            for flat in self._flats
            for member in flat.bucket.members
        }


def _gradient_hook(store: weakref.ref[Replicated], slot: GradientSlot, param: Tensor) -> None:
    """Let a gradient arrive in its bucket, and start the reduction of buckets that are complete.

    A strong reference from a tensor's hook to the store would never be collected.
    """
    replicated = store()
    if replicated is None:
        return
    flat, gradient = slot.flat, param.grad
    if gradient is not slot.gradient:  # to which autograd adds in its place
        assert gradient is not None
        if slot.found is not None or gradient.is_sparse:
            gradient = flat.added_up(slot, gradient)
        if slot.found is None:
            flat.arrived.append((slot, param))
        slot.found = gradient
        if slot.is_cast:
            param.grad = None
        if len(flat.arrived) == len(flat.names):
            flat.take_in()
    if replicated._counts and (not replicated._left_out or id(param) not in replicated._left_out):
        replicated._unused.discard(slot.name)
    if replicated._now.finishes_postponed if slot.is_postponed else replicated._now.finishes:
        flat.missing.discard(slot.name)
    if not flat.missing and replicated._now.starts_at_once and not replicated._waits:
        replicated._start_ready()
