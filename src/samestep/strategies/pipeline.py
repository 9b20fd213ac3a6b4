"""Pipeline parallelism: consecutive layers on consecutive ranks, and micro-batches that follow each other through them.

A stage receives the activation of the layer before its first, runs its layers, and sends its output; backward sends
gradients in the other direction. The schedule (`schedules.py`) determines the order of forwards and backwards on each
stage. With `virtual_stages=v` a rank has v virtual stages (chunks), p apart: if each chunk is one layer, layer l is on
rank l mod p.

```
pp=2, 4 layers           rank 0   layers 0 1  ──act──►  rank 1   layers 2 3
pp=2 virtual_stages=2    rank 0   layers 0 . 2 .        rank 1   layers . 1 . 3
```
With `schedule=zero-bubble` a backward computes the gradients of inputs, for which the stage before waits; the gradients
of linear layers' weights are tasks of their own, which fill the bubble.

Layers are divided into chunks so that the slowest chunk is as fast as possible, embedding and head included. Each chunk
begins with a block, the first one excepted.

Most models pass one tensor from block to block. Where later layers read others as well (the embeddings, skips, an
encoder's output), all tensors that are made before a boundary and read behind it cross it (`tracing/stages.py`): a stage
passes on what it was given for later ones, and sums the gradients that come back.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

from samestep import schedules
from samestep.models.spec import Crossing, ModelSpec, ParamSpec, read_by_own_code, remembered
from samestep.program.bodies import UPDATE_BODY, BodyKey, Task, is_backward, position
from samestep.program.holding import TIE, Holding
from samestep.program.ops import Op, OpKind, Ops
from samestep.program.program import Program
from samestep.program.step import StepSpec
from samestep.schedules import SCHEDULES, TaskKind

AXIS = "pp"


def refusal(step: StepSpec) -> str | None:
    """Return why the schedule, the number of blocks or a weight does not allow the layout's stages."""
    layout = step.layout
    if layout.pp == 1:
        return "virtual_stages needs pp > 1" if layout.virtual_stages > 1 else None
    if layout.virtual_stages > 1 and not SCHEDULES[layout.schedule].takes_chunks:
        return f"virtual_stages={layout.virtual_stages} needs {schedules.taking_chunks()}, not {layout.schedule}"
    if step.model.varies_at:
        varies = f"stages send tensors of one shape, and shapes at {step.model.varies_at} depend on values"
        return f"pp={layout.pp}: {varies}: pp=1 works"
    blocks = _num_starts(step.model)
    chunks = layout.pp * layout.virtual_stages
    if chunks > blocks:
        fewer = blocks // layout.pp
        works = f"pp={blocks} works" if blocks > 1 else "pp=1 works"
        if layout.virtual_stages > 1 and fewer:
            works = f"virtual_stages={fewer} works" if fewer > 1 else "schedule=1f1b works"
        stages = "virtual stages" if layout.virtual_stages > 1 else "stages"
        closed = next(
            (f"{layer.name}: {layer.crossing_refusal}" for layer in step.model.layers if layer.crossing_refusal), ""
        )
        what = (
            f"{blocks} blocks of {step.model.name}"
            if not closed
            else f"{blocks} runs of blocks of {step.model.name} that can be stages"
        )
        return f"pp={layout.pp} cuts the {what} into {chunks} {stages}: {works}" + (
            f" (no stage can begin with {closed})" if closed else ""
        )
    if step.splits_backward and step.model.differentiates_at:
        return (
            f"schedule={layout.schedule} postpones gradients of weights, and the forward at {step.model.differentiates_at} "
            "takes gradients itself: schedule=1f1b works"
        )
    moved = _refuse_moved(step.model, chunks, layout.recompute) if layout.recompute != "none" else None
    return _refuse_weights(step.model, chunks) or moved or _refuse_crossings(step)


def _refuse_crossings(step: StepSpec) -> str | None:
    """Return why what crosses the boundaries cannot be sent in a layout."""
    layout = step.layout
    crossed = next((layer for layer in step.model.layers if layer.crossings), None)
    if crossed is None or not layout.sequence_parallel:
        return None
    names = ", ".join(crossing.owner for crossing in crossed.crossings)
    return (
        f"pp={layout.pp} with sequence_parallel: a stage that begins with {crossed.name} is sent {names}, whose tokens "
        f"nobody cuts: pp={layout.pp} without sequence_parallel works, and so does pp=1"
    )


@remembered
def _num_starts(model: ModelSpec) -> int:
    return sum(starts(model))


@remembered
def starts(model: ModelSpec) -> tuple[bool, ...]:
    """Return for each layer whether a chunk can begin with it; the first block may always be the first."""
    first = next((index for index, layer in enumerate(model.layers) if layer.is_block), None)
    return tuple(layer.may_begin_stage or index == first for index, layer in enumerate(model.layers))


@remembered
def _refuse_weights(model: ModelSpec, num_chunks: int) -> str | None:
    """Return which weight is shared by layers on stages other than the first and the last."""
    replaced = next((param.name for param in model.params if param.is_replaced), None)
    if replaced is not None:
        return f"the forward puts another tensor in the place of {replaced}, which no stage would see: pp=1 works"
    chunks = chunks_of(model, num_chunks)
    roots, passed = _roots(model), read_by_own_code(model)
    for param in model.params:
        if param.name not in passed and not _stays_on_stages(roots, chunks, param):
            return f"{param.name} is shared by layers of several pipeline stages, not by first and last: pp=1 works"
    return None


@remembered
def _refuse_moved(model: ModelSpec, num_chunks: int, recompute: str) -> str | None:
    """Return which weight of a block is used first on an earlier stage: it is received, and not known when recomputed."""
    chunks, roots = chunks_of(model, num_chunks), _roots(model)
    for param in model.params:
        own = _layer_at(roots, param.name)
        if own is None or own == param.layer or not model.layers[own].is_block:
            continue
        if not any(own in chunk and param.layer in chunk for chunk in chunks):
            return (
                f"{param.name} is read before its block, on an earlier stage, and recompute={recompute} repeats that "
                "block: recompute=none works, and so does pp=1"
            )
    return None


def _stays_on_stages(roots: Mapping[str, int], chunks: tuple[range, ...], param: ParamSpec) -> bool:
    """Return whether one chunk alone uses a weight, or the first and the last with one module each."""
    if not param.aliases and param.last_layer is None:
        return True
    owners = {_chunk_of(roots, chunks, name) for name in (param.name, *param.aliases)}
    last = {chunk for chunk, layers in enumerate(chunks) if param.last_layer in layers}
    used = owners | last
    if len(used) == 1:
        return True
    # Both stages put their tied weights into buckets in the order of layers, so these are the outermost ones.
    ends = {_layer_at(roots, name) for name in (param.name, *param.aliases)} == {0, chunks[-1].stop - 1}
    return used == owners == {0, len(chunks) - 1} and ends and param.calls == 1


def apply(program: Program) -> Program:
    """Return the program of one stage: its layers, its weights, its schedule, and its sends and receives."""
    step = program.step
    layout = step.layout
    if layout.pp == 1:
        return program
    everywhere = chunks_of(step.model, layout.pp * layout.virtual_stages)
    chunks = tuple(everywhere[step.stage :: layout.pp])
    mine = tuple(_params_of(step.model, everywhere, step.stage, layout.pp))
    local = replace(step, model=replace(step.model, params=mine)).hold(_hold)
    bodies: dict[BodyKey, Ops] = {UPDATE_BODY: program.bodies[UPDATE_BODY]}
    # Bodies at several positions in the step share their ops, so they also share the ops of a chunk made of them.
    known: dict[tuple[int, int], tuple[Ops, Ops]] = {}
    for key, ops in program.bodies.items():
        if key != UPDATE_BODY:
            for index, chunk in enumerate(chunks):
                splits = step.splits_backward and is_backward(key)
                if (id(ops), index) not in known:
                    whole = tuple(_chunk_ops(ops, local, chunk, is_backward(key)))
                    deferred = tuple(deferred_gradients(whole, local)) if splits else ()
                    rest = tuple(_without_weights(op, local) for op in whole) if splits else whole
                    known[id(ops), index] = (rest, deferred)
                rest, deferred = known[id(ops), index]
                if splits:
                    bodies[key._replace(kind=TaskKind.WEIGHT, chunk=index)] = deferred
                bodies[key._replace(chunk=index)] = rest
    return replace(
        program,
        step=local,
        bodies=bodies,
        tasks=tuple(_tasks(step)),
        chunks=chunks,
        axes={**program.axes, AXIS: layout.pp, **({TIE: 2} if _ties(step.model, everywhere) else {})},
    )


def _hold(param: ParamSpec, holding: Holding) -> Holding:
    """Return the holding of a weight, tied if the first and the last stage share it."""
    return holding.tied() if param.tied_stages else holding


def _ties(model: ModelSpec, chunks: tuple[range, ...]) -> set[str]:
    """Return the names of the weights that the first and the last chunk share."""
    shared = [param for param in model.params if param.aliases and param.name not in read_by_own_code(model)]
    roots = _roots(model) if shared else {}
    users = {p.name: {_chunk_of(roots, chunks, name) for name in (p.name, *p.aliases)} for p in shared}
    return {name for name, owners in users.items() if len(owners) > 1}


def _params_of(model: ModelSpec, chunks: tuple[range, ...], stage: int, num_stages: int) -> Iterator[ParamSpec]:
    """Yield the weights of one stage; a tied one is on the first stage and, as one of the last layer, on the last."""
    tied = _ties(model, chunks)
    chunk_of = [index for index, layers in enumerate(chunks) for _ in layers]
    for param in model.params:
        here = chunk_of[param.layer] % num_stages == stage
        first, last = param.called
        if here and param.name not in tied:
            yield param
        elif here:
            yield replace(param, tied_stages=True, last_layer=None, called=(first, first))
        elif param.name in tied and stage == num_stages - 1:
            last_layer = len(model.layers) - 1
            yield replace(param, tied_stages=True, last_layer=None, layer=last_layer, called=(last, last))


def chunks_of(model: ModelSpec, count: int) -> tuple[range, ...]:
    """Return the layers in `count` chunks, of which the costliest costs as little as possible.

    Layers that are no blocks stay with a neighbour. The cost of a layer is its forward FLOPs plus one, so that layers
    without FLOPs are spread too.
    """
    costs = tuple(layer.forward_flops + 1 for layer in model.layers)
    return balanced(costs, starts(model), count)


@functools.lru_cache(maxsize=256)
def balanced(costs: tuple[int, ...], begins: tuple[bool, ...], count: int) -> tuple[range, ...]:
    """Return layers of these costs in `count` chunks, of which the costliest costs as little as possible.

    `begins` says for each layer whether a chunk may begin with it; what stands before the first such layer is in chunk 0.

    A binary search finds that cost. Then, from the end, each chunk gets an equal share of the cost that remains,
    rounded up to whole blocks as far as the limit allows, because the first stages hold the most activations.
    """
    before = (0, *itertools.accumulate(costs))
    blocks = [index for index, may_begin in enumerate(begins) if may_begin]

    def fewest(limit: int) -> list[int]:
        """Return, for each block, the fewest chunks within `limit` for all layers before it; count + 1: too many."""
        needed, start = [0], 0  # first block of the longest chunk that ends before the next block
        for number in range(1, len(blocks) + 1):
            end = blocks[number] if number < len(blocks) else len(costs)
            while start < number and before[end] - before[blocks[start] if start else 0] > limit:
                start += 1
            needed.append(needed[start] + 1 if start < number else count + 1)
        return needed

    low, high = max(costs), before[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fewest(middle)[-1] <= count else (middle + 1, high)
    needed = fewest(high)
    boundaries, end, last = [len(costs)], len(costs), len(blocks)
    for left in range(count - 1, 0, -1):
        may = (
            n for n in range(last - 1, left - 1, -1) if needed[n] <= left and before[end] - before[blocks[n]] <= high
        )
        rest = before[end] * left / (left + 1)
        last = min(may, key=lambda n: (before[blocks[n]] > rest, abs(before[blocks[n]] - rest)))
        end = blocks[last]
        boundaries.append(end)
    return tuple(range(a, b) for a, b in itertools.pairwise((0, *reversed(boundaries))))


def _roots(model: ModelSpec) -> dict[str, int]:
    """Return the index of the layer of each module that a layer consists of."""
    return {root: index for index, layer in enumerate(model.layers) for root in layer.modules if root}


def _layer_at(roots: Mapping[str, int], name: str) -> int | None:
    """Return the index of the layer with the module of a weight's name."""
    path = name.rpartition(".")[0]
    while path and path not in roots:
        path = path.rpartition(".")[0]
    return roots.get(path)


def _chunk_of(roots: Mapping[str, int], chunks: tuple[range, ...], name: str) -> int:
    """Return the index of the chunk with the module of a weight's name."""
    layer = _layer_at(roots, name)
    return next((chunk for chunk, layers in enumerate(chunks) if layer in layers), 0)


def _tasks(step: StepSpec) -> Iterator[Task]:
    """Yield the tasks of the stage in the order of the schedule, then the update."""
    layout, count = step.layout, step.num_microbatches
    for action in schedules.order(layout.schedule, step.stage, layout.pp, count, layout.virtual_stages):
        key = BodyKey(action.kind, action.chunk, position=position(action.microbatch, count))
        yield Task(key, action.microbatch)
    yield Task(UPDATE_BODY, count - 1)


def deferred_gradients(ops: Ops, step: StepSpec) -> Iterator[Op]:
    """Yield the ops of the weight gradients that a backward defers, in its order."""
    for op in ops:
        if op.kind is OpKind.BACKWARD and op.layer is not None:
            flops = step.model.layers[op.layer].deferred_flops * step.microbatch_samples
            yield op.but(kind=OpKind.WEIGHT, flops=flops, after=(op.name,))


def _without_weights(op: Op, step: StepSpec) -> Op:
    """Return a backward op without the FLOPs of the weight gradients that it defers."""
    if op.kind is not OpKind.BACKWARD or op.layer is None:
        return op
    return op.but(flops=op.flops - step.model.layers[op.layer].deferred_flops * step.microbatch_samples)


def _chunk_ops(ops: Ops, step: StepSpec, chunk: range, backward: bool) -> Iterator[Op]:
    """Yield the receives of a chunk, the ops of its layers, and its sends."""
    comes_in, goes_out = (chunk.stop, chunk.start) if backward else (chunk.start, chunk.stop)
    received = tuple(_passed(OpKind.RECV, step, comes_in, (), backward))
    yield from received
    layer: int | None = None
    before = tuple(op.name for op in received)
    name = ""
    for op in ops:
        layer = layer if op.layer is None else op.layer
        if layer in chunk:
            yield op.but(after=(*op.after, *before)) if before else op
            before, name = (), op.name
    yield from _passed(OpKind.SEND, step, goes_out, (name,), backward)


def _passed(kind: OpKind, step: StepSpec, boundary: int, after: tuple[str, ...], backward: bool) -> Iterator[Op]:
    """Yield the sends or the receives of the tensors, or their gradients, that cross the boundary before a layer."""
    if boundary in (0, len(step.model.layers)):
        return
    for crossing in crossings_at(step.model, boundary):
        if crossing.takes_gradient or not backward:
            numel = crossing.elements * step.microbatch_samples + crossing.fixed_elements
            dtype = crossing.dtype or step.compute_dtype
            yield Op(kind=kind, owner=crossing.owner, axis=AXIS, dtype=dtype, after=after).sized(numel)


def crossings_at(model: ModelSpec, boundary: int) -> tuple[Crossing, ...]:
    """Return the tensors that cross the boundary before a layer: most often the output of the layer before."""
    before = model.layers[boundary - 1]
    return model.layers[boundary].crossings or (Crossing(owner=before.name, elements=before.output_elements),)
