"""Pipeline parallelism: consecutive layers on consecutive ranks, micro-batches following each other through them.

A stage receives the activation of the layer before its first, runs its layers, and sends what comes out; backward goes
the other way with gradients. The order in which a rank takes forwards and backwards is the schedule's (`schedules.py`).
With `virtual_stages=v` a rank has v runs of layers, p apart: layer l on rank l mod p where each run is one layer.

```
pp=2, 4 layers           rank 0   layers 0 1  ──act──►  rank 1   layers 2 3
pp=2 virtual_stages=2    rank 0   layers 0 . 2 .        rank 1   layers . 1 . 3
```
Runs are cut so that the slowest one is as fast as can be, embedding and head included; each has a block, because only
between blocks a single tensor passes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from samestep import schedules
from samestep.model import ModelSpec, ParamSpec
from samestep.program import Kind, Op, Ops, Program, Step, Task, TaskKind, is_backward, position

AXIS = "pp"

_TASKS = {schedules.ActionKind.FORWARD: TaskKind.FORWARD, schedules.ActionKind.BACKWARD: TaskKind.BACKWARD}


def refusal(step: Step) -> str | None:
    """Refuse more stages than blocks, and weights that two stages would share."""
    layout = step.layout
    if layout.pp == 1:
        return "virtual_stages needs pp > 1" if layout.virtual_stages > 1 else None
    if layout.virtual_stages > 1 and layout.schedule != "interleaved":
        return f"virtual_stages={layout.virtual_stages} needs schedule=interleaved, not {layout.schedule}"
    blocks = sum(layer.is_block for layer in step.model.layers)
    runs = layout.pp * layout.virtual_stages
    if runs > blocks:
        works = f"pp={blocks} works" if blocks > 1 else "pp=1 works"
        return f"pp={layout.pp} makes {runs} runs of layers of the {blocks} blocks of {step.model.name}: {works}"
    cuts = runs_of(step.model, runs)
    owned = tuple(root for layer in step.model.layers for root in layer.modules)
    for param in step.model.params:
        if not any(_is_below(param.name.rpartition(".")[0], root) for root in owned):
            return f"{param.name} belongs to no layer, so no stage is known to use it: pp=1 works"
    for param in step.model.params:
        if param.read_outside:
            return f"{param.name} is also read outside the layer that owns it, perhaps on another stage: pp=1 works"
        if not _stays_on_stages(step.model, cuts, param):
            return f"{param.name} is shared by layers of several pipeline stages, not by first and last: pp=1 works"
    return None


def _stays_on_stages(model: ModelSpec, cuts: tuple[range, ...], param: ParamSpec) -> bool:
    """Whether one run alone uses a weight, or the first and the last, by a module each."""
    owners = {_run_of(model, cuts, name) for name in (param.name, *param.aliases)}
    used = owners | {next(run for run, layers in enumerate(cuts) if param.last_layer in layers)} if param.last_layer else owners
    return len(used) == 1 or (used == owners == {0, len(cuts) - 1} and param.calls == 1)


def apply(program: Program) -> Program:
    """Leave this stage its layers, its weights and its schedule, and write what it sends and receives."""
    step = program.step
    layout = step.layout
    if layout.pp == 1:
        return program
    cuts = runs_of(step.model, layout.pp * layout.virtual_stages)
    chunks = tuple(cuts[step.stage :: layout.pp])
    mine = tuple(_params_of(step.model, cuts, step.stage, layout.pp))
    local = replace(step, model=replace(step.model, params=mine))
    bodies: dict[str, Ops] = {str(TaskKind.UPDATE): program.bodies[str(TaskKind.UPDATE)]}
    for key, ops in program.bodies.items():
        if key != TaskKind.UPDATE:
            for index, chunk in enumerate(chunks):
                kind, where = key.split(".")
                bodies[f"{kind}.{index}.{where}"] = tuple(_run(ops, local, cuts, chunk, is_backward(key)))
    return replace(
        program,
        step=local,
        bodies=bodies,
        stages=(tuple(_tasks(step)),),
        chunks=chunks,
        axes={**program.axes, AXIS: layout.pp, **({"tie": 2} if _ties(step.model, cuts) else {})},
    )


def _ties(model: ModelSpec, cuts: tuple[range, ...]) -> set[str]:
    """Names of the weights that the first and the last run share."""
    runs = {p.name: {_run_of(model, cuts, name) for name in (p.name, *p.aliases)} for p in model.params if p.aliases}
    return {name for name, owners in runs.items() if len(owners) > 1}


def _params_of(model: ModelSpec, cuts: tuple[range, ...], stage: int, num_stages: int) -> Iterator[ParamSpec]:
    """The weights of one stage; a tied one stands on the first stage and, in the last layer, on the last."""
    tied = _ties(model, cuts)
    for param in model.params:
        run = next(index for index, layers in enumerate(cuts) if param.layer in layers)
        if run % num_stages == stage:
            yield replace(param, tied_stages=param.name in tied)
        elif param.name in tied and stage == num_stages - 1:
            yield replace(param, tied_stages=True, layer=len(model.layers) - 1)


def runs_of(model: ModelSpec, count: int) -> tuple[range, ...]:
    """Cut the layers into runs of which the costliest costs least; what is not a block goes with a neighbour.

    Dynamic programming over (runs left, first layer); costs are forward FLOPs, one more for each layer so that layers
    without FLOPs spread too.
    """
    layers = model.layers
    first = next(index for index, layer in enumerate(layers) if layer.is_block)
    last = max(index for index, layer in enumerate(layers) if layer.is_block)
    costs = [layer.forward_flops + 1 for layer in layers]
    ends = [index for index in range(first + 1, last + 1) if layers[index].is_block]
    best: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}

    def cut(start: int, left: int) -> tuple[int, tuple[int, ...]]:
        if left == 1:
            return sum(costs[start:]), ()
        if (start, left) not in best:
            options = []
            for end in ends:
                after = sum(1 for other in ends if other >= end)
                if end > max(start, first) and after >= left - 1:
                    rest, chosen = cut(end, left - 1)
                    options.append((max(sum(costs[start:end]), rest), (end, *chosen)))
            best[start, left] = min(options)
        return best[start, left]

    borders = (0, *cut(0, count)[1], len(layers))
    return tuple(range(a, b) for a, b in itertools.pairwise(borders))


def _run_of(model: ModelSpec, cuts: tuple[range, ...], name: str) -> int:
    """Index of the run that has the module of a weight's name."""
    path = name.rpartition(".")[0]
    for index, layer in enumerate(model.layers):
        if any(_is_below(path, root) for root in layer.modules):
            return next(run for run, layers in enumerate(cuts) if index in layers)
    return 0


def _is_below(path: str, root: str) -> bool:
    return bool(root) and (path == root or path.startswith(f"{root}."))


def _tasks(step: Step) -> Iterator[Task]:
    layout, count = step.layout, step.num_microbatches
    for action in schedules.order(layout.schedule, step.stage, layout.pp, count, layout.virtual_stages):
        kind = _TASKS[action.kind]
        yield Task(kind, action.microbatch, f"{kind}.{action.chunk}.{position(action.microbatch, count)}", action.chunk)
    yield Task(TaskKind.UPDATE, count - 1, str(TaskKind.UPDATE))


def _run(ops: Ops, step: Step, cuts: tuple[range, ...], chunk: range, backward: bool) -> Iterator[Op]:
    """Keep the ops of one run of layers between what it receives and what it sends."""
    comes_in, goes_out = (chunk.stop, chunk.start) if backward else (chunk.start, chunk.stop)
    ends = (0, len(step.model.layers))
    if comes_in not in ends:
        yield _passed(Kind.RECV, step, comes_in, ())
    layer: int | None = None
    before: tuple[str, ...] = (f"{Kind.RECV}:{_border(step, comes_in)}",) if comes_in not in ends else ()
    name = ""
    for op in ops:
        layer = layer if op.layer is None else op.layer
        if layer in chunk:
            yield replace(op, after=(*op.after, *before))
            before, name = (), op.name
    if goes_out not in ends:
        yield _passed(Kind.SEND, step, goes_out, (name,))


def _passed(kind: Kind, step: Step, border: int, after: tuple[str, ...]) -> Op:
    numel = step.model.layers[border - 1].output_elements * step.microbatch_samples
    return Op(kind=kind, owner=_border(step, border), axis=AXIS, dtype=step.compute_dtype, after=after).sized(numel)


def _border(step: Step, border: int) -> str:
    """Name what passes between two runs by the layer that made it."""
    return step.model.layers[border - 1].name
