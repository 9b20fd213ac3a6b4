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
encoder's output), all tensors that are made before a boundary and read behind it cross it (`tracing/flow.py`): a stage
passes on what it was given for later ones, and sums the gradients that come back.

A weight that layers of several stages use (a tied embedding, a block that is called again and again, a norm or an
adapter that blocks share) is *tied*: each of these stages holds a copy of it. The copies start equal; behind the step's
last backward their gradients are summed over the stages, so that they are updated equally. The norm of the gradients
counts them once, and the first of the stages saves them.

A model that follows another one (a teacher, a target network) may be on other stages than that one. Behind the update the stages
that have the trained weights send them to those that average them (`program/program.py`).
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from samestep import schedules
from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.models.layer_parts import Crossing
from samestep.models.param_spec import ParamSpec, Use
from samestep.models.spec import ModelSpec, cache_by_model
from samestep.program.holding import Holding
from samestep.program.ops import UPDATE_BODY, BodyKey, Op, OpKind, Ops, Task, is_backward, position
from samestep.program.program import Program, send_followed, weights_sent
from samestep.program.ranks import tie_of
from samestep.program.step import StepSpec, one_graph
from samestep.schedules import SCHEDULES, TaskKind

AXIS = "pp"


def refusal(step: StepSpec) -> LayoutError | None:
    """Return why the schedule, the number of blocks or a weight does not allow the layout's stages."""
    layout = step.layout
    if layout.pp == 1:
        is_alone = layout.virtual_stages > 1
        return LayoutError("virtual-stages", "virtual_stages needs pp > 1") if is_alone else None
    if layout.virtual_stages > 1 and not SCHEDULES[layout.schedule].takes_chunks:
        return LayoutError(
            "virtual-stages",
            f"virtual_stages={layout.virtual_stages} needs {schedules.taking_chunks()}, not {layout.schedule}",
        )
    if step.splits_backward and one_graph(step):
        return LayoutError(
            "schedule-unsupported",
            f"schedule={layout.schedule} takes the backward of linear layers apart, and {one_graph(step)}. Use "
            "schedule=1f1b, or run.compile = 'none'",
        )
    if step.model.varies_at and not step.model.varies_within:
        varies = f"stages send tensors of one shape, and shapes at {step.model.varies_at} depend on values"
        return LayoutError("pp-shapes-vary", f"pp={layout.pp}: {varies}. Use pp=1")
    if layout.pp * layout.virtual_stages > num_starts(step.model, layout.tp > 1):
        return _refuse_number(step.model, layout)
    if step.splits_backward and step.model.differentiates_at:
        return LayoutError(
            "forward-takes-gradients",
            f"schedule={layout.schedule} postpones gradients of weights, and the forward at {step.model.differentiates_at} "
            "takes gradients itself. Use schedule=1f1b",
        )
    if replaced := _replaced(step.model):
        return LayoutError(
            "pp-forward-differs",
            f"the forward puts another tensor in the place of {replaced}, which no stage would see. Use pp=1",
        )
    return _refuse_crossings(step)


@cache_by_model
def _replaced(model: ModelSpec) -> str:
    """Return the name of the first weight in whose place the forward puts another tensor; empty if there is none."""
    return next((param.name for param in model.params if param.is_replaced), "")


def _refuse_number(model: ModelSpec, layout: Layout) -> LayoutError:
    """Return the refusal of more chunks than a model has layers with which one can begin."""
    chunks, starts, is_cut = layout.pp * layout.virtual_stages, num_starts(model, layout.tp > 1), layout.tp > 1
    fewer = starts // layout.pp
    works = f"Use pp={max(starts, 1)}"
    if layout.virtual_stages > 1 and fewer:
        works = f"Use virtual_stages={fewer}" if fewer > 1 else "Use schedule=1f1b"
    stages = "virtual stages" if layout.virtual_stages > 1 else "stages"
    degrees = (
        f"pp={layout.pp} virtual_stages={layout.virtual_stages}" if layout.virtual_stages > 1 else f"pp={layout.pp}"
    )
    single, several = "block", "blocks"
    if any(layer.begins_stage for layer in model.layers) or len(model.layers) == 1:
        single, several = "call of a module", "calls of modules"
    if any(layer.begins_stage in ("named", "no") for layer in model.layers):
        single, several = "part", "parts that model.stages names"
    what = f"{several if starts > 1 else single} of {model.name}"
    beginning = (index for index, layer in enumerate(model.layers) if index and layer.is_beginning)
    closed = next((index for index in beginning if _why_no_stage(model, index, is_cut)), None)
    if closed is None:
        return LayoutError(
            "pp-too-many-stages", f"{degrees} cuts the {max(starts, 1)} {what} into {chunks} {stages}. {works}"
        )
    return LayoutError(
        "pp-stage-begin",
        f"{degrees} needs {chunks} {stages}, and the {several} of {model.name} can only make {starts}. {works} "
        f"(no stage can begin with {model.layers[closed].name}: {_why_no_stage(model, closed, is_cut)})",
    )


@cache_by_model
@cache_by_model
def _kept_over(model: ModelSpec) -> dict[int, str]:
    """Return the layers with which no stage can begin, each with the module that keeps statistics of calls before and after it."""
    by_layer: dict[int, str] = {}
    for path in model.coupled_modules:
        calls = [index for index, layer in enumerate(model.layers) if path in dict(layer.entered)]
        by_layer |= dict.fromkeys(range(calls[0] + 1, calls[-1] + 1), path) if calls else {}
    return by_layer


def _why_no_stage(model: ModelSpec, index: int, is_cut: bool) -> str:
    """Return why no stage can begin with a layer, under a tensor cut or without; empty if one can."""
    path = _kept_over(model).get(index, "")
    if path:
        return f"{path} keeps statistics (batch norm) of its calls before and after it"
    return model.layers[index].why_no_stage(is_cut)


def _refuse_crossings(step: StepSpec) -> LayoutError | None:
    """Return why what crosses the boundaries cannot be sent in a layout."""
    layout = step.layout
    if not layout.sequence_parallel:
        return None
    crossed = next((layer for layer in step.model.layers if layer.crossings), None)
    if crossed is None:
        return None
    names = ", ".join(crossing.owner for crossing in crossed.crossings)
    return LayoutError(
        "pp-stage-begin",
        f"pp={layout.pp} with sequence_parallel: a stage that begins with {crossed.name} is sent {names}, and no rank cuts its tokens. Use pp={layout.pp} without sequence_parallel, or pp=1",
    )


@cache_by_model
def num_starts(model: ModelSpec, is_cut: bool = False) -> int:
    """Return the largest number of chunks into which the layers of a model can be divided, with a tensor cut or without."""
    return sum(starts(model, len(model.layers), is_cut))


@cache_by_model
def starts(model: ModelSpec, count: int, is_cut: bool = False) -> tuple[bool, ...]:
    """Return for each layer whether one of `count` chunks can begin with it, under a tensor cut or without.

    The first beginning may always be the first.
    """
    first = next((index for index, layer in enumerate(model.layers) if layer.is_beginning), None)
    may_begin = [
        index == first or (layer.is_beginning and not _why_no_stage(model, index, is_cut))
        for index, layer in enumerate(model.layers)
    ]
    preferred = [may and layer.begins_stage != "if needed" for may, layer in zip(may_begin, model.layers, strict=True)]
    return tuple(preferred if sum(preferred) >= count else may_begin)


def apply(program: Program) -> Program:
    """Return the program of one stage: its layers, its weights, its schedule, and its sends and receives."""
    step = program.step
    layout = step.layout
    if layout.pp == 1:
        return program
    everywhere = chunks_of(step.model, layout.pp * layout.virtual_stages, layout.tp > 1)
    chunks = tuple(everywhere[step.stage :: layout.pp])
    params = tuple(_params_of(step.model, everywhere, step.stage, layout.pp))
    local = step.but(model=replace(step.model, params=params)).hold(_hold)
    followed = weights_sent(step.model.params, _stages_of(step.model, everywhere, layout.pp), layout)
    bodies: dict[BodyKey, Ops] = {
        UPDATE_BODY: (*program.bodies[UPDATE_BODY], *send_followed(followed, step.stage, step.master_dtype))
    }
    # Bodies at several positions in the step share their ops, so they also share the ops of a chunk made of them.
    known: dict[tuple[int, int], tuple[Ops, Ops]] = {}
    for key, ops in program.bodies.items():
        if key != UPDATE_BODY:
            for index, chunk in enumerate(chunks):
                splits = step.splits_backward and is_backward(key)
                if (id(ops), index) not in known:
                    chunk_ops = tuple(_chunk_ops(ops, local, chunk, is_backward(key)))
                    deferred = tuple(deferred_gradients(chunk_ops, local)) if splits else ()
                    rest = tuple(_without_weights(op, local) for op in chunk_ops) if splits else chunk_ops
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
        followed=followed,
        axes={
            **program.axes,
            AXIS: layout.pp,
            **_ties(step.model, everywhere, layout.pp),
            **{sent.axis: 2 for sent in followed},
        },
    )


def _hold(param: ParamSpec, holding: Holding) -> Holding:
    """Return the holding of a weight, tied if several stages share it."""
    return holding.tied(tie_of(param.stages), len(param.stages)) if param.stages else holding


def _ties(model: ModelSpec, chunks: tuple[range, ...], num_stages: int) -> dict[str, int]:
    """Return the axes of the stages that share weights, with their sizes; on every stage the same."""
    return {tie_of(stages): len(stages) for stages in _stages_of(model, chunks, num_stages).values() if len(stages) > 1}


@cache_by_model
def _stages_of(model: ModelSpec, chunks: tuple[range, ...], num_stages: int) -> dict[str, tuple[int, ...]]:
    """Return the stages that use each weight."""
    stage_of = [index % num_stages for index, layers in enumerate(chunks) for _ in layers]
    return {
        param.name: tuple(sorted({stage_of[layer] for layer in (param.layer, *(use.layer for use in param.uses))}))
        for param in model.params
    }


def _params_of(model: ModelSpec, chunks: tuple[range, ...], stage: int, num_stages: int) -> Iterator[ParamSpec]:
    """Yield the weights of one stage, with their uses there."""
    stages_of = _stages_of(model, chunks, num_stages)
    stage_of = [index % num_stages for index, layers in enumerate(chunks) for _ in layers]
    for param in model.params:
        stages = stages_of[param.name]
        if stages == (stage,):
            yield param
        elif stage in stages:
            yield _weight_on_stage(param, tuple(use for use in param.uses if stage_of[use.layer] == stage), stages)


def _weight_on_stage(param: ParamSpec, uses: tuple[Use, ...], stages: tuple[int, ...]) -> ParamSpec:
    """Return a weight as a stage has it that holds one of several copies."""
    owners = Counter({use.owner: 0 for use in uses})
    for use in uses:
        owners[use.owner] += use.calls
    return replace(
        param,
        stages=stages,
        uses=uses,
        layer=uses[0].layer,
        calls=max(owners.values()),
        called=(min(use.called[0] for use in uses), max(use.called[1] for use in uses)),
    )


def chunks_of(model: ModelSpec, count: int, is_cut: bool = False) -> tuple[range, ...]:
    """Return the layers in `count` chunks, of which the costliest costs as little as possible, and few elements are sent.

    Layers that are no blocks stay with a neighbour. The cost of a layer is its forward FLOPs plus one, so that layers
    without FLOPs are spread too.
    """
    costs = tuple(layer.forward_flops + 1 for layer in model.layers)
    return balance_chunks(costs, starts(model, count, is_cut), count, elements_sent_before(model, count, is_cut))


def elements_sent_before(model: ModelSpec, count: int, is_cut: bool = False) -> tuple[int, ...]:
    """Return the elements of a sample that cross the boundary before each layer, 0 where none of `count` chunks can begin."""
    return tuple(
        sum(crossing.elements + crossing.fixed_elements for crossing in crossings_at(model, index))
        if index and may_begin
        else 0
        for index, may_begin in enumerate(starts(model, count, is_cut))
    )


@functools.lru_cache(maxsize=256)
def balance_chunks(
    costs: tuple[int, ...], begins: tuple[bool, ...], count: int, sent: tuple[int, ...] = ()
) -> tuple[range, ...]:
    """Return layers of these costs in `count` chunks, of which the costliest costs as little as possible.

    `begins` says for each layer whether a chunk may begin with it, and `sent` how many elements cross the boundary before it;
    what stands before the first such layer is in chunk 0.

    A binary search finds that cost. Then, from the end, each chunk begins where the fewest elements are sent, as far as the limit
    allows; of boundaries that are alike in that, where it gets an equal share of the cost that remains, rounded up to whole blocks,
    because the first stages hold the most activations.
    """
    sent = sent or (0,) * len(costs)
    sums = (0, *itertools.accumulate(costs))
    blocks = [index for index, may_begin in enumerate(begins) if may_begin]

    begun = [0, *(sums[block] for block in blocks[1:])]
    ended = [*begun[1:], sums[-1]]

    def fewest(limit: int) -> tuple[list[int], int, int]:
        """Return, for each block, the fewest chunks within `limit` for all layers before it; count + 1: too many. Then the cost of the
        costliest of the longest chunks within the limit, and that of the cheapest chunk beyond it."""
        needed, start = [0], 0  # first block of the longest chunk that ends before the next block
        within, beyond = 0, sums[-1]
        for number, end in enumerate(ended, 1):
            least = end - limit
            while start < number and begun[start] < least:
                start += 1
            needed.append(needed[start] + 1 if start < number else count + 1)
            if start < number and end - begun[start] > within:
                within = end - begun[start]
            if start and end - begun[start - 1] < beyond:
                beyond = end - begun[start - 1]
        return needed, within, beyond

    low, high = max(max(costs), -(-sums[-1] // count)), sums[-1]
    while low < high:
        needed, within, beyond = fewest((low + high) // 2)
        low, high = (low, max(low, within)) if needed[-1] <= count else (beyond, high)
    needed, _, _ = fewest(high)
    boundaries, end, last = [len(costs)], len(costs), len(blocks)
    for left in range(count - 1, 0, -1):
        may = (n for n in range(last - 1, left - 1, -1) if needed[n] <= left and sums[end] - sums[blocks[n]] <= high)
        rest = sums[end] * left / (left + 1)
        last = min(may, key=lambda n: (sent[blocks[n]], sums[blocks[n]] > rest, abs(sums[blocks[n]] - rest)))
        end = blocks[last]
        boundaries.append(end)
    return tuple(range(a, b) for a, b in itertools.pairwise((0, *reversed(boundaries))))


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
    received = tuple(_pass_tensors(OpKind.RECV, step, comes_in, (), backward))
    yield from received
    layer: int | None = None
    names = tuple(op.name for op in received)
    name = ""
    for op in ops:
        layer = layer if op.layer is None else op.layer
        if layer in chunk:
            yield op.but(after=(*op.after, *names)) if names else op
            names, name = (), op.name
    yield from _pass_tensors(OpKind.SEND, step, goes_out, (name,), backward)


def _pass_tensors(kind: OpKind, step: StepSpec, boundary: int, after: tuple[str, ...], backward: bool) -> Iterator[Op]:
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
    layer = model.layers[boundary - 1]
    return model.layers[boundary].crossings or (Crossing(owner=layer.name, elements=layer.output_elements),)
