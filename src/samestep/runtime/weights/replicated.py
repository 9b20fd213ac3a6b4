"""Replicated weights: gradients reduced in buckets while backward still runs (twin of `strategies/data.py`).

Each bucket of the program is a flat buffer in master precision. A hook on every parameter's gradient adds it to its
place; when the last micro-batch's backward has filled a bucket, its first collective is issued, always in the program's
order, so that every rank issues the same; but in a pipeline not before the gradient for which the stage before waits. Under
zero=1 the weights are windows of flat buffers too: a rank updates its chunk of each, and `publish` gathers the others', which
the next forward may wait for (`late_weights.py`).

```
bucket 0  [ head.weight | norm.weight | pad ]    gradients of the last layers, finished first
           rank 0's chunk  rank 1's chunk        zero=1: what each rank updates
```
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.building import nf4
from samestep.program.bodies import UPDATE_BODY, Task, ends_step, is_forward
from samestep.program.buckets import Bucket, Member
from samestep.program.ops import Op, OpKind
from samestep.program.program import Program
from samestep.runtime.axes.precision import DTYPES
from samestep.runtime.axes.weight_gradients import is_postponed
from samestep.runtime.host_copies import master_on_host
from samestep.runtime.ledger import owned
from samestep.runtime.processes.mesh import Mesh, all_gather, reduce_scatter
from samestep.runtime.weights.flat_buffers import FlatBuffer, GradientSlot
from samestep.runtime.weights.gradient_codes import BucketCodes
from samestep.runtime.weights.late_weights import LateWeights
from samestep.runtime.weights.parameter_hooks import GradientHooks
from samestep.runtime.weights.pieces import Piece, norm_of_pieces, squared_norm
from samestep.runtime.weights.replica_exchange import BucketExchange
from samestep.runtime.weights.weight_store import Materialize
from samestep.schedules import TaskKind


class _WholeWatch:
    """The `WeightWatch` of whole weights, in which all that code writes is kept."""

    def __init__(self, params: Mapping[str, nn.Parameter], places: Mapping[str, Tensor]) -> None:
        self._params, self._places = params, places
        self._held = [*params.values()]
        self._addresses = [places[name].data_ptr() for name in params]

    def compare_values(self, compares: bool) -> None:
        """Do nothing, since no write is lost."""

    def written(self) -> list[str]:
        """Return nothing, since no write is lost."""
        return []

    def take_back(self) -> None:
        """Copy weights that a user has given another storage, by `param.data = ...`, back to the one in use."""
        if [*map(Tensor.data_ptr, self._held)] == self._addresses:
            return
        for name, param in self._params.items():
            if param.data_ptr() != self._places[name].data_ptr():
                param.data = self._places[name].copy_(param.data)


class Replicated:
    """A `WeightStore` of whole weights, in the working dtype; gradients and optimizer follow the program's buckets."""

    gave_up = ""

    def __init__(self, model: nn.Module, program: Program, mesh: Mesh, materialize: Materialize) -> None:
        self.program, self.mesh = program, mesh
        self.params: dict[str, nn.Parameter] = {}
        self._places: dict[str, Tensor] = {}
        """The tensor with each weight's values, to which buckets and pieces refer."""
        self._last = self._starts = self._is_weight_task = self._waits = False
        self._counts = True
        self._left_out: Set[int] = frozenset()
        self._unused: set[str] = set()
        """Weights to which no micro-batch of the step has given a gradient so far, unless it does not count."""
        self._sending = {key for key, ops in program.bodies.items() if any(op.kind is OpKind.SEND for op in ops)}
        """The bodies that end with a message to another stage, which goes out before anything is reduced."""
        self._next = 0
        self._postponed = {param.name for param in program.step.model.params if is_postponed(model, param.name)}
        self._flats = [self._flat(bucket) for bucket in program.buckets]
        self.codes = BucketCodes(program, mesh)
        self.exchange = BucketExchange(program, self.codes, [self._chunk_of(flat) for flat in self._flats])
        self._separate = program.step.layout.offload
        self.pieces: list[Piece] = []
        self.frozen: list[Piece] = []
        self._fill(model, materialize)
        gathered = [flat.bucket for flat in self._flats if flat.gathers]
        self._late = LateWeights.of(model, program, gathered, self.params)
        self.watch = _WholeWatch(self.params, self._places)

    # -- setting up --------------------------------------------------------------------------------

    def _flat(self, bucket: Bucket) -> FlatBuffer:
        step = self.program.step
        device = self.mesh.device
        bodies = self.program.bodies
        last = [op for key, ops in bodies.items() if step.ends_gradients(key) for op in ops]
        final = [op for op in bodies[UPDATE_BODY] if op.owner == bucket.name]
        weights = None
        if step.zero == 1:
            weights = torch.zeros(bucket.padded_numel, dtype=DTYPES[bucket.dtype], device=device)
        gradients = torch.zeros(bucket.padded_numel, dtype=DTYPES[step.master_dtype], device=device)
        return FlatBuffer(
            bucket=bucket,
            gradients=gradients,
            starts=[op for op in last if op.owner == bucket.name],
            finishes=[op for op in final if not op.after[0].startswith(OpKind.UPDATE)],
            gathers=[op for op in final if op.after[0].startswith(OpKind.UPDATE)],
            names=frozenset(member.name for member in bucket.members),
            weights=weights,
        )

    @torch.no_grad()
    def _fill(self, model: nn.Module, materialize: Materialize) -> None:
        """Give every parameter its initial value, and list the pieces that this rank updates."""
        slot_of = {member.name: (flat, member) for flat in self._flats for member in flat.bucket.members}
        master = DTYPES[self.program.step.master_dtype]
        for spec in self.program.step.model.params:
            value = materialize(spec.name, master)
            flat, member = slot_of.get(spec.name, (None, None))
            live = nf4.pack_values(value) if spec.held_as else value.to(DTYPES[self.program.step.working_dtype(spec)])
            if flat is not None and flat.weights is not None and member is not None:
                window = flat.weights[member.offset : member.offset + member.numel].view(spec.shape)
                # `.data` has a separate version: a forward may write into one weight of a bucket.
                live = window.copy_(live).data
            param = nn.Parameter(live, requires_grad=spec.trainable)
            for name in (spec.name, *spec.aliases):
                path, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(path), leaf, param)  # not by _parameters: LSTM keeps lists of its weights
            if not spec.trainable:
                self.frozen.append(
                    Piece(spec.name, 0, spec.numel, param, lambda: torch.zeros(0), is_packed=bool(spec.held_as))
                )
            else:
                self.params[spec.name] = param
                self._places[spec.name] = live
                self.pieces += self._pieces_of(spec.name, flat, member, param, value)

    def _pieces_of(
        self, name: str, flat: FlatBuffer | None, member: Member | None, param: nn.Parameter, value: Tensor
    ) -> Iterator[Piece]:
        """Yield a parameter's pieces that this rank updates, and let its gradient be added to the bucket."""
        if flat is None or member is None:
            piece = self._piece(name, 0, param.numel(), param, value, functools.partial(_gradient_or_zero, param))
            piece.holder = param
            yield piece
            return
        gradient = flat.gradients[member.offset : member.offset + member.numel].view(param.shape)
        slot = GradientSlot(flat, name, gradient, name in self._postponed)
        param.register_post_accumulate_grad_hook(functools.partial(_gradient_hook, weakref.ref(self), slot))
        if flat.weights is None:
            yield self._piece(name, 0, member.numel, param, value, gradient)
            return
        size = flat.bucket.padded_numel // flat.bucket.holding.num_shards
        first = self.mesh.index(flat.bucket.holding.data_axis) * size
        start = min(max(first - member.offset, 0), member.numel)
        stop = min(max(first + size - member.offset, 0), member.numel)
        if start < stop:
            mine = slice(member.offset + start, member.offset + stop)
            shape = param.shape if stop - start == param.numel() else (-1,)  # a weight that is whole has its shape
            part = flat.gradients[mine].view(shape)
            live = param.detach().view(-1)[start:stop].view(shape)
            yield self._piece(name, start, stop, live, value.flatten()[start:stop].view(shape), part)

    def _piece(
        self, name: str, start: int, stop: int, live: Tensor, value: Tensor, found: Tensor | Callable[[], Tensor]
    ) -> Piece:
        """Return a piece whose value is the weight's memory, or a master copy in another dtype or on the host; `found` is
        the window of a buffer with its gradient, or returns the gradient."""
        window, gradient = (found, lambda: found) if isinstance(found, Tensor) else (None, found)
        if live.dtype == value.dtype and not self._separate:
            return Piece(
                name, start, stop, live if isinstance(live, nn.Parameter) else live.detach(), gradient, window=window
            )
        held = master_on_host(value) if self._separate else value.detach().to(live.device, copy=True)
        return Piece(name, start, stop, held, gradient, window=window, target=live.detach())

    def hook_gradients(self, hooks: GradientHooks) -> None:
        """Let the user's hooks change gradients before they are added to a bucket."""
        for name, hook in hooks.items():
            self.params[name].register_hook(hook)

    # -- a step ------------------------------------------------------------------------------------

    @property
    def can_wait(self) -> bool:
        """Whether something may be sent for gradients, which are whole on each rank until then; the same on all stages of a pipeline,
        of which some have weights that others hold too."""
        return self.program.step.layout.pp > 1 or any(flat.starts or flat.finishes for flat in self._flats)

    def begin_step(self, *, waits: bool = False) -> None:
        """Discard the gradients of the previous step; with `waits` nothing is reduced before `finish_gradients` is called."""
        self._waits = waits
        self.watch.take_back()
        for param in self.params.values():
            param.grad = None
        self._unused = set(self.params)
        for flat in self._flats:
            flat.forget_arrived()
            flat.missing, flat.untouched = set(flat.names), set(flat.names)
            flat.work = flat.chunk = None
        self.codes.begin_step()
        self._next = 0

    def without_gradient(self) -> Mapping[str, bool]:
        """Return the trained weights to which this rank gave no gradient in the step, and whether the loop has frozen them."""
        return {name: not self.params[name].requires_grad for name in self._unused}

    @contextmanager
    def running(self, task: Task, *, counts: bool = True, left_out: Set[int] = frozenset()) -> Iterator[None]:
        """Record, while a task runs, whether its gradients are the step's last and whether they complete buckets.

        Collective over the axes of the program's buckets, see [Note: collective calls].
        """
        if not is_forward(task.body):
            self.settle()
        self._is_weight_task = task.kind is TaskKind.WEIGHT
        self._last = task.kind in (TaskKind.BACKWARD, TaskKind.WEIGHT) and ends_step(task.body)
        completes = self.program.step.ends_gradients(task.body) and not self._waits
        self._starts = completes and task.body not in self._sending
        self._counts, self._left_out = counts, left_out
        yield
        for flat in self._flats:
            flat.take_in()
        if not self._flats and not is_forward(task.body):
            self._note_gradients()
        if completes:
            self._start_ready()
        if self.codes.ends_contribution(task):
            self._begin_contribution()

    def _note_gradients(self) -> None:
        """Note which weights have a gradient, where there are no buckets; a micro-batch that does not count adds only zeros."""
        unused = {name for name in self._unused if self.params[name].grad is None}
        if self._counts:
            self._unused = unused
            return
        for name in self._unused - unused:
            self.params[name].grad = None

    def _begin_contribution(self) -> None:
        """Hand over the gradients of a part of the step that is summed by itself, and begin those of the next one."""
        for flat in self._flats:
            flat.zero_untouched()
            self.codes.add(flat.bucket.name, flat.gradients)
            flat.untouched = set(flat.names)
        for param in self.params.values():
            param.grad = None

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
                _wait(flat)
                flat.work = self._send(flat, op, flat.gradients)
        for flat in flats:
            _wait(flat)
            self.codes.finish(flat.bucket.name, flat.remaining)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradient of each weight; under zero=1 the ranks gather it.

        Collective over `dp_shard` with zero=1, see [Note: collective calls].
        """
        for flat in self._flats:
            for op in flat.gathers:
                flat.work = self._send(flat, op, flat.gradients)
                _wait(flat)
        return self._whole_gradients()

    def unreduced(self) -> dict[str, Tensor]:
        """Return this rank's own gradient of each weight, zeros where the backward gave none."""
        for flat in self._flats:
            flat.zero_untouched()
        return self._whole_gradients()

    def _whole_gradients(self) -> dict[str, Tensor]:
        if not self._flats:
            return {name: _gradient_or_zero(param) for name, param in self.params.items()}
        return {
            member.name: flat.gradients[member.offset : member.offset + member.numel].view(
                self.params[member.name].shape
            )
            for flat in self._flats
            for member in flat.bucket.members
        }

    def deliver(self) -> None:
        """Do nothing: the ranks that have the gradients update the weights."""

    @property
    def reduced(self) -> list[Piece]:
        """The pieces that this rank updates."""
        return self.pieces

    def _chunk_of(self, flat: FlatBuffer) -> Tensor:
        """Return the gradients of a bucket that this rank updates: all, or its chunk of them under zero=1."""
        holding = flat.bucket.holding
        chunk = self.mesh.index(holding.data_axis) if holding.num_shards > 1 else 0
        return flat.gradients.chunk(holding.num_shards)[chunk]

    def _send(self, flat: FlatBuffer, op: Op, whole: Tensor) -> dist.Work:
        """Issue one collective on the bucket's buffer, or on this rank's part of it."""
        assert op.axis is not None
        if self.codes.sends(op):
            return self.codes.send(op, flat.remaining)
        group = self.mesh.groups[op.axis]
        with owned(op.owner) as issue:
            sent = flat.remaining if op.kind is OpKind.ALL_REDUCE else whole
            work: dist.Work = issue.sent(_start_collective(op.kind, sent, group))
        if op.kind is OpKind.REDUCE_SCATTER:
            flat.chunk = _own_part(whole, group)
        elif op.kind is OpKind.ALL_GATHER:
            flat.chunk = None
        return work

    def norm_squared(self, names: Set[str] | None = None) -> Tensor:
        """Return this rank's share of the squared norm of all gradients, or of some: the shares of all ranks add up to the whole."""
        if not self._flats:
            return norm_of_pieces(self.pieces, self.program.step, self.mesh.device, names)
        if self._waits:
            own = [one for name, one in self.unreduced().items() if names is None or name in names]
            return squared_norm(own, self.mesh.device)
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for copies in sorted({flat.bucket.holding.num_copies for flat in self._flats}):
            alike = [flat for flat in self._flats if flat.bucket.holding.num_copies == copies]
            _, repeated_over = self.program.step.norm_axes(alike[0].bucket.holding)
            mine = [part for flat in alike for part in self._norm_share(flat, names)]
            total += squared_norm(mine, self.mesh.device) / (math.prod(map(self.mesh.size, repeated_over)) * copies)
        return total

    def _norm_share(self, flat: FlatBuffer, names: Set[str] | None) -> Iterator[Tensor]:
        """Yield the runs of a bucket's gradients, or of those of some weights, whose squares this rank adds up."""
        divided_over, _ = self.program.step.norm_axes(flat.bucket.holding)
        number, index = (self.mesh.size(divided_over), self.mesh.index(divided_over)) if divided_over else (1, 0)
        share = flat.gradients.view(number, -1)[index]
        if names is None:
            yield share
            return
        first = index * share.numel()
        for member in flat.bucket.members:
            start, stop = max(member.offset - first, 0), min(member.offset + member.numel - first, share.numel())
            if member.name in names and start < stop:
                yield share[start:stop]

    def publish(self, *, waits: bool = True, part: int | None = None) -> None:
        """Gather every rank's chunk of the updated weights under zero=1, first those that the next forward needs first.

        Collective over `dp_shard`, see [Note: collective calls].
        """
        self.settle()
        for flat in reversed(self._flats):
            for op in flat.gathers if part in (None, flat.bucket.part) else ():
                assert flat.weights is not None
                self._late.hold(flat.bucket.name, self._send(flat, op, flat.weights).wait)
        if waits:
            self.settle()

    def settle(self) -> None:
        """Wait for the weights that are still gathered."""
        self._late.settle_all()

    def before_exchange(self, path: str) -> None:
        """Do nothing: buckets are reduced while exchanges go on."""

    def give_up_forward(self) -> None:
        """Do nothing: no forward waits for others."""

    def end_forward_only(self) -> None:
        """Do nothing: a forward gathers no weights here."""


def _own_part(flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of a flat buffer that the ranks of a group divide evenly: a view."""
    return flat.chunk(dist.get_world_size(group))[dist.get_rank(group)]


def _start_collective(kind: OpKind, flat: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start one collective on a flat buffer, in place.

    An all_gather sends this rank's part of it; reduce and broadcast have the group's first rank as their root. Collective
    over `group`, see [Note: collective calls].
    """
    if kind is OpKind.ALL_REDUCE:
        work = dist.all_reduce(flat, group=group, async_op=True)
    elif kind is OpKind.REDUCE:
        work = dist.reduce(flat, group_dst=0, group=group, async_op=True)
    elif kind is OpKind.BROADCAST:
        work = dist.broadcast(flat, group_src=0, group=group, async_op=True)
    elif kind is OpKind.REDUCE_SCATTER:
        work = reduce_scatter(_own_part(flat, group), flat, group=group, async_op=True)
    else:
        assert kind is OpKind.ALL_GATHER, f"a flat buffer has no use for {kind}"
        work = all_gather(flat, _own_part(flat, group), group=group, async_op=True)
    assert work is not None
    return work


def _wait(flat: FlatBuffer) -> None:
    if flat.work is not None:
        flat.work.wait()
        flat.work = None


def _gradient_or_zero(param: nn.Parameter) -> Tensor:
    found = param.grad
    if found is None:
        param.grad = found = torch.zeros_like(param)
    elif found.is_sparse:  # the norm, and most optimizers, take dense ones, which give the same step
        param.grad = found = found.to_dense()
    return found


def _gradient_hook(store: weakref.ref[Replicated], slot: GradientSlot, param: Tensor) -> None:
    """Note a finished gradient, let its bucket take in those that have arrived once they are all, and start the reduction of
    buckets that are complete.

    A strong reference from a tensor's hook to the store would never be collected.
    """
    held = store()
    if held is None:
        return
    flat, name, found = slot.flat, slot.name, param.grad
    assert found is not None
    if found.is_sparse:
        found = found.to_dense()
    if found is not slot.gradient:
        is_master = param.dtype == slot.gradient.dtype
        if slot.found is not None and not is_master:  # it is used in two parts of one backward
            flat.take_in()
        if slot.found is None:
            flat.arrived.append((slot, param))
        slot.found = found  # in master precision the sum of all that has arrived
        if not is_master:
            param.grad = None
        if len(flat.arrived) == len(flat.names):
            flat.take_in()
    if held._counts and id(param) not in held._left_out:
        held._unused.discard(name)
    if held._last and (held._is_weight_task or not slot.is_postponed):
        flat.missing.discard(name)
    if held._starts and not flat.missing:
        held._start_ready()
