"""Pipeline parallelism: consecutive layers on consecutive ranks, micro-batches following each other through them.

A stage receives the activation of the layer before its first, runs its layers, and sends what comes out; backward goes
the other way with gradients. The order in which a rank takes forwards and backwards is the schedule's (`schedules.py`).
With `virtual_stages=v` a rank has v runs of layers, p apart: layer l on rank l mod p where each run is one layer.

```
pp=2, 4 layers           rank 0   layers 0 1  ──act──►  rank 1   layers 2 3
pp=2 virtual_stages=2    rank 0   layers 0 . 2 .        rank 1   layers . 1 . 3
```
With `schedule=zero-bubble` a backward computes the gradients of what layers were given, which the stage before waits for;
those of the weights of linear layers are tasks of their own, and fill the time that stages would wait.

Runs are cut so that the slowest one is as fast as can be, embedding and head included; each has a block, because only
between blocks a single tensor passes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

from samestep import schedules
from samestep.models.spec import ModelSpec, ParamSpec, remembered
from samestep.program.bodies import UPDATE_BODY, BodyKey, Task, is_backward, position
from samestep.program.holding import TIE, Holding
from samestep.program.ops import Kind, Op, Ops
from samestep.program.program import Program
from samestep.program.step import StepSpec
from samestep.schedules import SCHEDULES, TaskKind

AXIS = "pp"


def refusal(step: StepSpec) -> str | None:
    """Refuse more stages than blocks, and weights that two stages would share."""
    layout = step.layout
    if layout.pp == 1:
        return "virtual_stages needs pp > 1" if layout.virtual_stages > 1 else None
    if layout.virtual_stages > 1 and not SCHEDULES[layout.schedule].takes_chunks:
        return f"virtual_stages={layout.virtual_stages} needs {schedules.taking_chunks()}, not {layout.schedule}"
    if step.model.varies_at:
        varies = f"what stages send has one shape, and those at {step.model.varies_at} depend on values"
        return f"pp={layout.pp}: {varies}: pp=1 works"
    blocks = _num_blocks(step.model)
    runs = layout.pp * layout.virtual_stages
    if runs > blocks:
        fewer = blocks // layout.pp
        works = f"pp={blocks} works" if blocks > 1 else "pp=1 works"
        if layout.virtual_stages > 1 and fewer:
            works = f"virtual_stages={fewer} works" if fewer > 1 else "schedule=1f1b works"
        return f"pp={layout.pp} makes {runs} runs of layers of the {blocks} blocks of {step.model.name}: {works}"
    return _refuse_weights(step.model, runs)


@remembered
def _num_blocks(model: ModelSpec) -> int:
    return sum(layer.is_block for layer in model.layers)


@remembered
def _refuse_weights(model: ModelSpec, runs: int) -> str | None:
    """Refuse weights of no stage, and those that stages other than the first and the last share."""
    cuts = chunks_of(model, runs)
    roots = _roots(model)
    for param in model.params:
        if _layer_at(roots, param.name) is None:
            return f"{param.name} belongs to no layer, so no stage is known to use it: pp=1 works"
    for param in model.params:
        if param.read_outside:
            return f"{param.name} is also read outside the layer that owns it, perhaps on another stage: pp=1 works"
        if not _stays_on_stages(roots, cuts, param):
            return f"{param.name} is shared by layers of several pipeline stages, not by first and last: pp=1 works"
    return None


def _stays_on_stages(roots: Mapping[str, int], cuts: tuple[range, ...], param: ParamSpec) -> bool:
    """Whether one run alone uses a weight, or the first and the last, by a module each."""
    if not param.aliases and param.last_layer is None:
        return True
    owners = {_run_of(roots, cuts, name) for name in (param.name, *param.aliases)}
    last = {run for run, layers in enumerate(cuts) if param.last_layer in layers}
    used = owners | last
    return len(used) == 1 or (used == owners == {0, len(cuts) - 1} and param.calls == 1)


def apply(program: Program) -> Program:
    """Leave this stage its layers, its weights and its schedule, and write what it sends and receives."""
    step = program.step
    layout = step.layout
    if layout.pp == 1:
        return program
    cuts = chunks_of(step.model, layout.pp * layout.virtual_stages)
    chunks = tuple(cuts[step.stage :: layout.pp])
    mine = tuple(_params_of(step.model, cuts, step.stage, layout.pp))
    local = replace(step, model=replace(step.model, params=mine)).hold(_hold)
    bodies: dict[BodyKey, Ops] = {UPDATE_BODY: program.bodies[UPDATE_BODY]}
    # Positions in the step share ops, and so they share what is made of them: a run, and its gradients of weights.
    known: dict[tuple[int, int], tuple[Ops, Ops]] = {}
    for key, ops in program.bodies.items():
        if key != UPDATE_BODY:
            for index, chunk in enumerate(chunks):
                splits = step.splits_backward and is_backward(key)
                if (id(ops), index) not in known:
                    run = tuple(_run(ops, local, cuts, chunk, is_backward(key)))
                    apart = tuple(weights_apart(run, local)) if splits else ()
                    known[id(ops), index] = (tuple(_without_weights(op, local) for op in run) if splits else run, apart)
                run, apart = known[id(ops), index]
                if splits:
                    bodies[key._replace(kind=TaskKind.WEIGHT, chunk=index)] = apart
                bodies[key._replace(chunk=index)] = run
    return replace(
        program,
        step=local,
        bodies=bodies,
        tasks=tuple(_tasks(step)),
        chunks=chunks,
        axes={**program.axes, AXIS: layout.pp, **({TIE: 2} if _ties(step.model, cuts) else {})},
    )


def _hold(param: ParamSpec, holding: Holding) -> Holding:
    """The first stage and the last both hold a weight that they share."""
    return holding.tied() if param.tied_stages else holding


def _ties(model: ModelSpec, cuts: tuple[range, ...]) -> set[str]:
    """Names of the weights that the first and the last run share."""
    shared = [param for param in model.params if param.aliases]
    roots = _roots(model) if shared else {}
    runs = {p.name: {_run_of(roots, cuts, name) for name in (p.name, *p.aliases)} for p in shared}
    return {name for name, owners in runs.items() if len(owners) > 1}


def _params_of(model: ModelSpec, cuts: tuple[range, ...], stage: int, num_stages: int) -> Iterator[ParamSpec]:
    """The weights of one stage; a tied one stands on the first stage and, in the last layer, on the last."""
    tied = _ties(model, cuts)
    run_of = [index for index, layers in enumerate(cuts) for _ in layers]
    for param in model.params:
        here = run_of[param.layer] % num_stages == stage
        first, last = param.called
        if here and param.name not in tied:
            yield param
        elif here:
            yield replace(param, tied_stages=True, last_layer=None, called=(first, first))
        elif param.name in tied and stage == num_stages - 1:
            here_last = len(model.layers) - 1
            yield replace(param, tied_stages=True, last_layer=None, layer=here_last, called=(last, last))


def chunks_of(model: ModelSpec, count: int) -> tuple[range, ...]:
    """Cut the layers into runs of which the costliest costs least; what is not a block goes with a neighbour.

    Costs are forward FLOPs, one more for each layer so that layers without FLOPs spread too.
    """
    costs = tuple(layer.forward_flops + 1 for layer in model.layers)
    return balanced(costs, tuple(layer.is_block for layer in model.layers), count)


@functools.lru_cache(maxsize=256)
def balanced(costs: tuple[int, ...], is_block: tuple[bool, ...], count: int) -> tuple[range, ...]:
    """Cut layers of these costs into runs: search the least cost of the costliest, halving what it may be each time, and
    then, from the end, give each run an equal share of what is left, or a block more: first stages keep most in flight."""
    before = (0, *itertools.accumulate(costs))
    blocks = [index for index, is_one in enumerate(is_block) if is_one]

    def fewest(limit: int) -> list[int]:
        """Return for each block the fewest runs within the limit that hold what is before it; count + 1: too many."""
        needed, start = [0], 0  # where a run can begin that ends before the next block
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
    """Layer of each module that a layer consists of."""
    return {root: index for index, layer in enumerate(model.layers) for root in layer.modules if root}


def _layer_at(roots: Mapping[str, int], name: str) -> int | None:
    """Layer that has the module of a weight's name."""
    path = name.rpartition(".")[0]
    while path and path not in roots:
        path = path.rpartition(".")[0]
    return roots.get(path)


def _run_of(roots: Mapping[str, int], cuts: tuple[range, ...], name: str) -> int:
    """Index of the run that has the module of a weight's name."""
    layer = _layer_at(roots, name)
    return next((run for run, layers in enumerate(cuts) if layer in layers), 0)


def _tasks(step: StepSpec) -> Iterator[Task]:
    layout, count = step.layout, step.num_microbatches
    for action in schedules.order(layout.schedule, step.stage, layout.pp, count, layout.virtual_stages):
        key = BodyKey(action.kind, action.chunk, position=position(action.microbatch, count))
        yield Task(key, action.microbatch)
    yield Task(UPDATE_BODY, count - 1)


def weights_apart(ops: Ops, step: StepSpec) -> Iterator[Op]:
    """The gradients of weights that a backward leaves for later, in its order."""
    for op in ops:
        if op.kind is Kind.BACKWARD and op.layer is not None:
            flops = step.model.layers[op.layer].deferred_flops * step.microbatch_samples
            yield op.but(kind=Kind.WEIGHT, flops=flops, after=(op.name,))


def _without_weights(op: Op, step: StepSpec) -> Op:
    if op.kind is not Kind.BACKWARD or op.layer is None:
        return op
    return op.but(flops=op.flops - step.model.layers[op.layer].deferred_flops * step.microbatch_samples)


def _run(ops: Ops, step: StepSpec, cuts: tuple[range, ...], chunk: range, backward: bool) -> Iterator[Op]:
    """Keep the ops of one run of layers between what it receives and what it sends."""
    comes_in, goes_out = (chunk.stop, chunk.start) if backward else (chunk.start, chunk.stop)
    ends = (0, len(step.model.layers))
    if comes_in not in ends:
        yield _passed(Kind.RECV, step, comes_in, ())
    layer: int | None = None
    before: tuple[str, ...] = (f"{Kind.RECV}:{_boundary(step, comes_in)}",) if comes_in not in ends else ()
    name = ""
    for op in ops:
        layer = layer if op.layer is None else op.layer
        if layer in chunk:
            yield op.but(after=(*op.after, *before)) if before else op
            before, name = (), op.name
    if goes_out not in ends:
        yield _passed(Kind.SEND, step, goes_out, (name,))


def _passed(kind: Kind, step: StepSpec, boundary: int, after: tuple[str, ...]) -> Op:
    numel = step.model.layers[boundary - 1].output_elements * step.microbatch_samples
    return Op(kind=kind, owner=_boundary(step, boundary), axis=AXIS, dtype=step.compute_dtype, after=after).sized(numel)


def _boundary(step: StepSpec, boundary: int) -> str:
    """Name what passes between two runs by the layer that made it."""
    return step.model.layers[boundary - 1].name
