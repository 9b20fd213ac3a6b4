"""Bytes that torch's allocator takes from the device for a program: its steps, played allocation by allocation.

What a rank holds at rest, and what comes and goes within a step, is that of `memory_use.py` and `live_bytes.py`, to the byte; here it is
divided into tensors, which `caching_allocator.py` places:

    at rest       a tensor for each weight, master and state, or for each bucket; states come with the first update, when the blocks
                  of the first step's activations are free, and stay among them
    a layer       the results of its products; what else it keeps, or works on, in tensors as large as its input
    a unit        of zero=2 and 3: gathered into one buffer on the stream of gathers, from which its weights are copied on the stream
                  of compute; its gradients become one buffer again, and a rank's part of their sum is on the stream of reductions
    all else      one tensor each

Steps are played until one takes nothing more from the device. Of a long step the middle is left out: micro-batch after micro-batch the
same sizes come and go in the same order, so that after some rounds each finds the blocks that the one before has left.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from samestep.memory.live_bytes import LiveBytes, OpSizes, Saved, found_by, gradient_bytes
from samestep.memory.memory_use import arriving_bytes, at_rest, on_the_way_bytes, widened_bytes
from samestep.models.layer_spec import LayerSpec
from samestep.program.ops import BYTES_OF, Buffer, Op, OpKind, Ops, Task
from samestep.program.program import Program
from samestep.schedules import TaskKind
from samestep.wings.plan.simulation.caching_allocator import CachingAllocator, MemoryBlock
from samestep.wings.plan.simulation.partition import COMPUTE

MOST_STEPS = 4
"""Steps after which no more are played, whether or not the last one has taken something from the device."""
ROUNDS = 3
"""Equal rounds of micro-batches that are played of a longer run of them."""
MOST_ALIKE = 64
"""Largest number of equal tensors into which what is left of a layer is divided."""


class ReservedBytes(NamedTuple):
    """The bytes that steps of a program take of a device, without its overhead."""

    allocated: int
    """The most bytes of blocks that tensors have at once."""
    reserved: int
    """Bytes that the allocator has taken from the device."""
    by_stream: dict[str, int]
    """These bytes by the stream whose blocks they hold."""


def reserved_bytes(
    program: Program, states_per_param: int = 2, rank: int = 0, *, expandable: bool = True, all_rounds: bool = False
) -> ReservedBytes:
    """Return the bytes that the allocator of `rank` takes from its device over some steps.

    `expandable` is whether segments grow, as samestep lets them; torch's default are segments of fixed sizes. Under `all_rounds` all rounds
    of equal micro-batches are played.
    """
    played = _PlayedSteps(CachingAllocator(expandable=expandable))
    tensors = _Tensors(program)
    played.do(-1, _held_at_rest(program, states_per_param, rank))
    shortened = program if all_rounds else replace(program, tasks=without_equal_rounds(program.tasks))
    followers = found_by(shortened, arriving_bytes(program), functools.partial(_Changes, tensors))
    tasks = [(task.microbatch, changes) for task, changes in followers]
    states, widened = _states(program, states_per_param, rank), widened_bytes(program, states_per_param, rank)
    for number in range(MOST_STEPS):
        reserved_bytes = played.allocator.reserved_bytes
        for microbatch, changes in tasks:
            played.do(microbatch, changes)
        played.do(-1, [*states[: 1 - number], *_for_a_moment((widened,))])
        played.forget_step()
        if number and played.allocator.reserved_bytes == reserved_bytes:
            break
    allocator = played.allocator
    return ReservedBytes(allocator.most_allocated_bytes, allocator.reserved_bytes, allocator.reserved_by_stream())


def without_equal_rounds(tasks: Sequence[Task]) -> tuple[Task, ...]:
    """Return the tasks of a step without the middle of each long run of equal rounds; later micro-batches get their numbers.

    A round is one forward and one backward of each virtual stage, in the order of the schedule, as 1F1B repeats it.
    """
    chunks = len({task.body.chunk for task in tasks if task.kind is TaskKind.FORWARD})
    kinds = len({task.kind for task in tasks if task.kind not in (TaskKind.UPDATE, TaskKind.OUTPUTS)})
    size = max(1, chunks * kinds)
    shorter, index, gone = list[Task](), 0, 0
    while index < len(tasks):
        rounds = 1
        while _is_round(tasks, index, index + rounds * size, size, rounds):
            rounds += 1
        if rounds <= ROUNDS:
            shorter.append(tasks[index]._replace(microbatch=tasks[index].microbatch - gone))
            index += 1
            continue
        last = index + ROUNDS * size
        shorter += [task._replace(microbatch=task.microbatch - gone) for task in tasks[index:last]]
        gone += rounds - ROUNDS
        index += rounds * size
    return tuple(shorter)


def _is_round(tasks: Sequence[Task], first: int, begin: int, size: int, number: int) -> bool:
    """Return whether `size` tasks from `begin` on are those from `first` on, so many micro-batches later."""
    return begin + size <= len(tasks) and all(
        later.body == task.body and later.microbatch == task.microbatch + number
        for task, later in zip(tasks[first : first + size], tasks[begin : begin + size], strict=True)
    )


# -- changes -----------------------------------------------------------------------------------------------------------


class MemoryChange(NamedTuple):
    """Tensors that are allocated for an owner, or the end of all that it has."""

    owner: tuple[str, Hashable]
    """What they are for, and whose they are: a layer's index, or a name, or one of these and which part of it."""
    sizes: tuple[int, ...] = ()
    """Bytes of the tensors that are allocated; empty: all that the owner has is freed."""
    stream: str = COMPUTE
    is_copied: bool = False
    """Whether what the owner had is freed behind it."""


_WORKING = ("working", None)
_REST = "rest"


def _for_a_moment(sizes: tuple[int, ...]) -> list[MemoryChange]:
    """Return that tensors are allocated, and freed at once."""
    return [MemoryChange(_WORKING, sizes), MemoryChange(_WORKING)] if any(sizes) else []


@dataclass(slots=True)
class _PlayedSteps:
    """The blocks that owners have, by micro-batch, while steps are played."""

    allocator: CachingAllocator
    blocks: dict[tuple[tuple[str, Hashable], int], list[MemoryBlock]] = field(default_factory=dict)

    def do(self, microbatch: int, changes: Iterable[MemoryChange]) -> None:
        """Carry out changes, one after the other; each micro-batch has separate activations."""
        take, give, blocks = self.allocator.take, self.allocator.give, self.blocks
        for owner, sizes, stream, is_copied in changes:
            key = owner, microbatch if owner[0] == "activations" else -1
            had = [] if sizes and not is_copied else blocks.pop(key, [])
            if sizes:
                blocks.setdefault(key, []).extend([take(size, stream) for size in sizes if size])
            for block in had:
                give(block)

    def forget_step(self) -> None:
        """Free what a step leaves beyond what is held at rest: gradients that it has allocated, and gathered weights."""
        for key in [key for key in self.blocks if key[0][0] != _REST]:
            for block in self.blocks.pop(key):
                self.allocator.give(block)


class _Changes(LiveBytes):
    """Keeps every allocation of a body, divided into tensors, and every end of one."""

    def __init__(self, tensors: _Tensors, sizes: OpSizes, buffers: frozenset[Buffer], *, keeps: bool = True) -> None:
        """Begin with some buffers."""
        super().__init__(sizes, buffers, keeps=keeps)
        self._tensors = tensors
        self._repeats = False
        self._left = self._first_layer = 0
        self._copied = set[str]()

    def follow(self, ops: Ops) -> None:
        """Do all ops of the body."""
        self._first_layer = min((op.layer for op in ops if op.layer is not None), default=0)
        super().follow(ops)

    def _compute(self, op: Op, saved: Saved) -> None:
        """The first op that waits for a gathered unit copies its weights out of the buffer."""
        for name in op.after:
            unit = name.removeprefix(f"{OpKind.ALL_GATHER}:")
            if unit != name and unit in self.buffers and unit not in self._copied:
                self._copied.add(unit)
                sizes = self._tensors.of_unit(unit, self.buffers[unit].size_bytes)
                self.found.append(MemoryChange(("buffer", unit), sizes, is_copied=True))
        self._repeats = op.kind is OpKind.RECOMPUTE
        super()._compute(op, saved)

    def _look(self, op: Op, *, activations: int = 0, logits: int = 0, gradients: int = 0) -> None:
        super()._look(op, activations=activations, logits=logits, gradients=gradients)
        worked_on = (
            *self._tensors.of_layer(op.layer, max(activations + self._left, 0)),
            *self._tensors.of_loss(op.layer, logits),
            *self._tensors.of_layer(None, gradients),
        )
        self.found += _for_a_moment(worked_on)

    def _keep(self, owner: int | str | None, size_bytes: int) -> None:
        super()._keep(owner, size_bytes)
        if not isinstance(owner, int):
            self._take("activations", (owner, self._first_layer), self._tensors.of_layer(None, size_bytes))
            return
        saved = self.sizes.saved[owner]
        most, size = min(saved.boundaries, saved.in_backward), min(saved.boundaries, saved.after_forward)
        edge = min(size_bytes, most - size if self._repeats else most)
        self._take("activations", ("within", owner), self._tensors.of_layer(owner, size_bytes - edge))
        self._take("activations", owner, self._tensors.of_layer(owner, edge))

    def _drop(self, owner: int | str | None, size_bytes: int) -> None:
        super()._drop(owner, size_bytes)
        self._left = 0
        if not isinstance(owner, int):
            self.found.append(MemoryChange(("activations", (owner, self._first_layer))))
            return
        self.found += [MemoryChange(("activations", ("within", owner))), MemoryChange(("activations", owner))]

    def _leave(self, layer: int | None) -> None:
        assert layer is not None
        saved = self.sizes.saved[layer]
        self._left = max(0, saved.in_backward - saved.boundaries)
        self.found.append(MemoryChange(("activations", ("within", layer))))

    def _keep_logits(self, layer: int | None, size_bytes: int) -> None:
        super()._keep_logits(layer, size_bytes)
        if size_bytes < 0:
            self.found.append(MemoryChange(("activations", ("loss", layer))))
        else:
            self._take("activations", ("loss", layer), self._tensors.of_loss(layer, size_bytes))

    def _allocate(self, buffers: tuple[Buffer, ...], op: Op) -> None:
        for buffer in buffers:
            is_arriving = buffer.name == op.name
            if self.buffers.get(buffer.name) == buffer and (is_arriving or op.kind is OpKind.ALL_GATHER):
                continue  # it is there already
            super()._allocate((buffer,), op)
            is_unlisted = op.implied and (is_arriving or op.kind is OpKind.ALL_GATHER)
            sizes: tuple[int, ...] = (buffer.size_bytes,)
            if is_arriving and op.kind is OpKind.BACKWARD and op.layer is not None:
                sizes = self._tensors.gradients_of(op.layer)
            elif buffer.name.startswith("gradient:"):
                sizes = self._tensors.of_unit(buffer.name.removeprefix("gradient:"), buffer.size_bytes)
            self._copied.discard(buffer.name)
            self._take("buffer", buffer.name, sizes, f"{op.kind} {op.axis}" if is_unlisted else COMPUTE)

    def _free(self, names: tuple[str, ...]) -> None:
        super()._free(names)
        self.found += [MemoryChange(("buffer", name)) for name in names]

    def _take(self, what: str, owner: Hashable, sizes: tuple[int, ...], stream: str = COMPUTE) -> None:
        if any(sizes):
            self.found.append(MemoryChange((what, owner), sizes, stream))


# -- tensors -----------------------------------------------------------------------------------------------------------


class _Tensors:
    """Sizes in bytes of the tensors of which a program's layers, units and losses consist."""

    def __init__(self, program: Program) -> None:
        self._step = program.step
        self._units = {unit.name: unit for unit in program.units}
        self._numels = {param.name: param.numel for param in program.step.model.params}
        self._of_layer: dict[tuple[int, int], tuple[int, ...]] = {}

    def of_layer(self, layer: int | None, size_bytes: int) -> tuple[int, ...]:
        """Divide bytes of a layer: the results of its products as far as they go, then tensors as large as its input."""
        if layer is None or not size_bytes:
            return (size_bytes,) if size_bytes else ()
        key = layer, size_bytes
        if key not in self._of_layer:
            self._of_layer[key] = tuple(self._divided(self._step.model.layers[layer], size_bytes))
        return self._of_layer[key]

    def of_loss(self, layer: int | None, size_bytes: int) -> tuple[int, ...]:
        """Divide bytes of the loss after a layer: tensors as large as the layer's output in master precision."""
        if layer is None or not size_bytes:
            return ()
        step = self._step
        size = step.model.layers[layer].output_elements * step.microbatch_samples * BYTES_OF[step.master_dtype]
        return tuple(_pieces(size_bytes, size))

    def of_unit(self, name: str, size_bytes: int) -> tuple[int, ...]:
        """Divide bytes of a unit by its weights."""
        unit = self._units.get(name)
        return tuple(shares(size_bytes, [self._numels[param] for param in unit.params])) if unit else (size_bytes,)

    def gradients_of(self, layer: int) -> tuple[int, ...]:
        """Return the bytes of the gradients of a layer's weights."""
        return tuple(gradient_bytes(self._step, layer))

    def _divided(self, layer: LayerSpec, left: int) -> Iterator[int]:
        element_bytes = self._step.microbatch_samples * BYTES_OF[self._step.compute_dtype]
        for product in layer.products:
            size = product.result_elements * element_bytes
            if 0 < size <= left:
                yield size
                left -= size
        yield from _pieces(left, layer.input_elements * element_bytes)


def _pieces(size_bytes: int, each: int) -> Iterator[int]:
    """Divide bytes into pieces of a size, and what is left."""
    each = max(each, -(-size_bytes // MOST_ALIKE))
    if each:
        yield from [each] * (size_bytes // each)
    if each and size_bytes % each:
        yield size_bytes % each


def shares(size_bytes: int, weights: Sequence[int]) -> list[int]:
    """Divide bytes in proportion to numbers, to the byte."""
    total, parts, reached = sum(weights), list[int](), 0
    if not total:
        return [size_bytes] * bool(size_bytes)
    for weight in weights:
        parts.append(size_bytes * (reached + weight) // total - size_bytes * reached // total)
        reached += weight
    return [part for part in parts if part]


def _held_at_rest(program: Program, states_per_param: int, rank: int) -> Iterator[MemoryChange]:
    """Yield what a rank holds before the first step: weights, gradients in buckets, buffers."""
    rest = at_rest(program, states_per_param, rank)
    numels = [param.numel for param in program.step.model.params]
    buckets = [bucket.padded_numel for bucket in program.buckets]
    gradients = rest.gradients - sum(arriving_bytes(program).values())
    yield MemoryChange((_REST, "weights"), tuple(shares(rest.weights, numels)))
    yield MemoryChange((_REST, "gradients"), tuple(shares(gradients, buckets)))
    yield MemoryChange((_REST, "buffers"), (rest.buffers, on_the_way_bytes(program)))


def _states(program: Program, states_per_param: int, rank: int) -> list[MemoryChange]:
    """Return that the states of the optimizer, and masters, are allocated with the first update, one by one for each weight."""
    optimizer = at_rest(program, states_per_param, rank).optimizer
    numels = [param.numel for param in program.step.model.params if param.trainable]
    sizes = [part for share in shares(optimizer, numels) for part in shares(share, [1] * (states_per_param + 1))]
    return [MemoryChange((_REST, "states"), tuple(sizes))] if sizes else []
