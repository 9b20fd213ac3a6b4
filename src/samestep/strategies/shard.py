"""ZeRO: a rank keeps 1/N of the optimizer's state (1), of the gradients too (2), of the weights too (3).

Rajbhandari et al. 2020, arXiv:1910.02054; stage 3 is PyTorch's FSDP (Zhao et al. 2023, arXiv:2304.11277). With N
ranks on `dp_shard`, bytes a parameter in mixed precision (2 weights, 2 gradients, 12 for Adam and the master):

    classic accounting      zero=0: 16     zero=1: 4 + 12/N     zero=2: 2 + 14/N     zero=3: 16/N
    held by this runtime    zero=0: 18     zero=1: 6 + 12/N     zero=2: 2 + 16/N     zero=3: 16/N

(gradients are kept in float32; the weights of zero=2 are gathered for the step and freed after it).

zero=1 reduce_scatters the gradient buckets, updates the rank's chunk of each, and all_gathers the weights: the bytes
of one all_reduce. zero=2 and 3 are carried out by FSDP2: a *unit* (a layer, or one shared weight) is gathered before
its forward, under zero=3 freed and gathered again before its backward, and its gradient is reduce_scattered after it.

```
zero=3   forward    AG 0 | F 0, AG 1 | F 1, AG 2 | F 2
         backward   AG 1 | B 2, RS 2, AG 0 | B 1, RS 1 | B 0, RS 0       (the next gather is issued ahead)
```
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from samestep.models.spec import ModelSpec, ParamSpec, is_below, remembered
from samestep.program.bodies import UPDATE_BODY, BodyKey, ends_step, is_backward, is_forward, starts_step
from samestep.program.buckets import Bucket, Unit, make_buckets, padded, start_reductions
from samestep.program.codecs import CODECS
from samestep.program.holding import REPLICAS, Holding
from samestep.program.ops import Kind, Op, Ops
from samestep.program.program import Program
from samestep.program.ranks import Ranks
from samestep.program.step import StepSpec

AXIS = "dp_shard"


def refusal(step: StepSpec) -> str | None:
    """Refuse settings that mean nothing at this ZeRO stage."""
    layout = step.layout
    if layout.accumulate == "full" and step.zero < 2:
        return f"accumulate=full is about sharded gradients: use zero=2 or zero=3 with it, not zero={layout.zero}"
    if step.zero < 2:
        return None
    if step.splits_backward:
        return (
            f"zero={step.zero} reduces gradients behind each backward, and schedule={step.layout.schedule} computes those of "
            "weights later: zero=1 works, and so does schedule=1f1b"
        )
    return _refuse_weights(step.model)


@remembered
def _refuse_weights(model: ModelSpec) -> str | None:
    """Refuse weights that FSDP2 cannot cut, or gather apart from others."""
    for param in model.params:
        if not param.shape:
            return f"{param.name} has no dimension to cut: give it shape (1,), or use zero=1"
        if param.sparse_gradient and param.trainable:
            return (
                f"{param.name} has sparse gradients, which cannot be cut: sparse=False gives the same step, or zero=0"
            )
        if param.read_outside and param.shared:
            return f"{param.name} is shared by modules, and also read outside them: zero=1 works"
    if mixed := _mixed_owner(model):
        return f"{mixed} shares a weight and holds modules with others, which cannot be gathered apart: zero=1 works"
    return None


def apply(program: Program) -> Program:
    """Write the gathers and scatters of the layout's ZeRO stage."""
    step = program.step
    if step.zero == 0:
        return program
    step = step.hold(functools.partial(_hold, step.ranks, {}))
    program = replace(program, step=step)
    axes = {**program.axes, AXIS: step.layout.num_shards}
    if step.zero == 1:
        buckets = make_buckets(step, program.chunks)
        return program.with_bodies(lambda key, ops: _stage_1(key, ops, step, buckets), buckets=buckets, axes=axes)
    units = _units(step, program.chunks)
    known: dict[tuple[int, bool], Ops] = {}
    return program.with_bodies(lambda key, ops: _stage_2_or_3(key, ops, step, units, known), units=units, axes=axes)


def _hold(ranks: Ranks, known: dict[Holding, Holding], _: ParamSpec, holding: Holding) -> Holding:
    """A weight is divided among the ranks of the innermost data axis that hold it; of hundreds few are held in other ways."""
    if holding not in known:
        axis = AXIS if holding.data_axis == REPLICAS else holding.data_axis
        known[holding] = holding.zero_sharded(axis, ranks.size(axis))
    return known[holding]


def _stage_1(key: BodyKey, ops: Ops, step: StepSpec, buckets: tuple[Bucket, ...]) -> Ops:
    if step.ends_gradients(key):
        # What a rank holds alone is cut no further.
        return start_reductions(ops, step, buckets, lambda b: (_scattered(b, step),) * (b.holding.num_shards > 1))
    if key != UPDATE_BODY:
        return ops
    gathers = tuple(
        replace(
            _op(Kind.ALL_GATHER, b.name, b.dtype, b.padded_numel, b.holding.data_axis),
            after=(f"{Kind.UPDATE}:optimizer",),
        )
        for b in buckets
        if b.holding.num_shards > 1
    )
    return (*ops, *gathers)


def _scattered(bucket: Bucket, step: StepSpec) -> Op:
    axis = bucket.holding.data_axis
    return CODECS[bucket.codec].op(Kind.REDUCE_SCATTER, bucket.name, axis, bucket.padded_numel, step.master_dtype)


def _stage_2_or_3(
    key: BodyKey, ops: Ops, step: StepSpec, units: tuple[Unit, ...], known: dict[tuple[int, bool], Ops]
) -> Ops:
    """Rewrite ops that several positions in the step share once, where they stay equal."""
    if not (is_forward(key) or is_backward(key)):
        return ops
    # zero=2 keeps the weights until the step's last backward, so only the first micro-batch gathers them.
    gathers = step.zero == 3 or starts_step(key)
    reduces = step.layout.accumulate == "sharded" or ends_step(key)
    same = (id(ops), gathers if is_forward(key) else reduces)
    if same not in known:
        rewritten = (
            _gathered_forward(ops, step, units, gathers=gathers)
            if is_forward(key)
            else _scattered_backward(ops, step, units, reduces=reduces)
        )
        known[same] = tuple(rewritten)
    return known[same]


def _gathered_forward(ops: Ops, step: StepSpec, units: tuple[Unit, ...], *, gathers: bool) -> Iterator[Op]:
    shared = [unit for unit in units if gathers and unit.num_shards > 1]
    starting = _by_layer(shared, "first_layer")
    done: list[str] = []
    for op in ops:
        needed = starting.get(op.layer, ())
        waits = [_gather(unit) for unit in sorted(needed, key=lambda unit: unit.called[0])]
        # FSDP2 runs one gather ahead: the next may not start before the forward before the current one has ended.
        yield from (replace(wait, after=tuple(done[-2:-1])) for wait in waits)
        yield replace(op, after=(*op.after, *(wait.name for wait in waits))) if waits else op
        if op.axis is None:  # what layers send among themselves is part of their forward
            done.append(op.name)


def _scattered_backward(ops: Ops, step: StepSpec, units: tuple[Unit, ...], *, reduces: bool) -> Iterator[Op]:
    """Start a unit's backward with the gather of the unit ahead, and end it with its scatter.

    Where the gradient of a unit's input does not show that its backward is over, it is scattered at the very end.
    """
    reached = {op.layer for op in ops if op.layer is not None}  # of several virtual stages a body has one's layers
    mine = [unit for unit in units if unit.first_layer in reached]
    scattered = [unit for unit in mine if reduces and unit.padded_grad_numel]
    named = {unit.name: unit for unit in mine}
    issued: set[str] = set()
    waits: dict[int | None, tuple[str, ...]] = {None: ()}
    starting, ending = _by_layer(scattered, "first_layer"), _by_layer(mine, "last_layer")

    def gather(unit: Unit | None) -> Iterator[Op]:
        is_cut = unit is not None and unit.num_shards > 1
        if unit and is_cut and unit.gather_in_backward and not unit.keep_after_forward and unit.name not in issued:
            issued.add(unit.name)
            yield _gather(unit)

    def reach(unit: Unit) -> Iterator[Op]:
        yield from gather(unit)
        yield from gather(named.get(unit.ahead or "?"))

    last = next(op for op in reversed(ops) if op.kind is Kind.BACKWARD)
    behind: list[Op] = []  # a layer's backward, which what it exchanges is a part of
    for op in ops:
        if op.axis is None or op.layer not in waits:
            yield from behind
            behind.clear()
        over = [unit for unit in starting.get(op.layer, ()) if unit.ends_early]
        over.sort(key=lambda unit: unit.called[0])
        here = sorted(ending.get(op.layer, ()), key=_use, reverse=True)
        late = [unit for unit in here if any(_follows(other, unit) for other in over)]
        if op.layer not in waits:  # reached by its backward, or by the forward that is repeated for it
            for unit in here:
                if unit not in late:
                    yield from reach(unit)
            waits[op.layer] = tuple(f"{Kind.ALL_GATHER}:{unit.name}" for unit in here if unit.name in issued)
        yield replace(op, after=(*op.after, *waits[op.layer])) if waits[op.layer] else op
        if op.kind is Kind.BACKWARD:
            for unit in late:
                while over and _follows(over[-1], unit):
                    behind.append(_scatter(over.pop(), op, step))
                behind.extend(reach(unit))
            behind.extend(_scatter(unit, op, step) for unit in reversed(over))
    yield from behind
    yield from (_scatter(unit, last, step) for unit in scattered if not unit.ends_early)


def _by_layer(units: Iterable[Unit], field: str) -> dict[int | None, list[Unit]]:
    found: dict[int | None, list[Unit]] = {}
    for unit in units:
        found.setdefault(getattr(unit, field), []).append(unit)
    return found


def _follows(later: Unit, unit: Unit) -> bool:
    """Whether a unit's backward is over before another's is reached."""
    inside = any(is_below(module, root) for module in later.modules for root in unit.modules)
    return later.called[0] > unit.called[1] and not inside


def _gather(unit: Unit) -> Op:
    return replace(_op(Kind.ALL_GATHER, unit.name, unit.dtype, unit.padded_numel, unit.shard_axis), implied=True)


def _scatter(unit: Unit, after: Op, step: StepSpec) -> Op:
    size = unit.padded_grad_numel
    op = CODECS[unit.codec].op(Kind.REDUCE_SCATTER, unit.name, unit.shard_axis, size, step.master_dtype)
    return replace(op, implied=True, after=(after.name,))


def _op(kind: Kind, owner: str, dtype: str, numel: int, axis: str) -> Op:
    return Op(kind=kind, owner=owner, axis=axis, dtype=dtype).sized(numel)


def _units(step: StepSpec, chunks: tuple[range, ...]) -> tuple[Unit, ...]:
    """Group the weights into units: each layer's own, and each set of modules that share a weight.

    In the order of the module tree, in which what is left over at the end of a backward is reduced. What no layer owns,
    or code outside its layer reads, is gathered with the root; a weight without elements is in no unit.
    """
    groups: dict[tuple[str, ...], list[ParamSpec]] = {}
    members: dict[int, dict[str, None]] = {}
    own: dict[int, list[ParamSpec]] = {}
    order: dict[str, int] = {}
    for param in step.model.params:
        owners = _owners(step, param)
        for owner in owners:
            order.setdefault(owner, len(order))
        roots = _roots(step, param)
        if not param.numel:
            continue
        if step.holding(param).data_axis != AXIS:  # sharded over other ranks than the rest of its layer
            groups.setdefault(owners, []).append(param)
            continue
        if param.shared and not _moves_with_layer(step, param.layer):
            met = [known for known in groups if known != ("",) and set(known) & set(owners)]
            together = [other for known in met for other in groups.pop(known)]
            groups[tuple(dict.fromkeys([*(m for known in met for m in known), *owners]))] = [*together, param]
        elif not roots or param.read_outside:
            groups.setdefault(("",), []).append(param)
        else:
            members.setdefault(param.layer, {})[roots[0]] = None
            own.setdefault(param.layer, []).append(param)
            order.setdefault(roots[0], order[owners[0]])
    for layer, params in own.items():
        groups[tuple(members[layer])] = params
    units = [
        _unit(step, tuple(sorted(modules, key=lambda m: order.get(m, -1))), ps, chunks)
        for modules, ps in groups.items()
    ]
    units.sort(key=lambda unit: order.get(unit.modules[0], -1) if unit.modules != ("",) else -1)
    return _with_ahead(units, chunks)


def _moves_with_layer(step: StepSpec, layer: int) -> bool:
    """Whether a layer is called again as a whole, so that its weights can stay together."""
    return all(param.shared and not param.aliases for param in step.model.params_of(layer))


def _owners(step: StepSpec, param: ParamSpec) -> tuple[str, ...]:
    """Modules that own a weight; of one tied across stages, the one on this stage."""
    owners = tuple(dict.fromkeys(name.rpartition(".")[0] for name in (param.name, *param.aliases)))
    if not step.holding(param).tied_over:
        return owners
    return tuple(o for o in owners if any(is_below(o, root) for root in step.model.layers[param.layer].modules))


def _roots(step: StepSpec, param: ParamSpec) -> list[str]:
    """The module of its layer that a weight is below."""
    owner = _owners(step, param)[0]
    return [module for module in step.model.layers[param.layer].modules if module and is_below(owner, module)]


def _with_ahead(units: list[Unit], chunks: tuple[range, ...]) -> tuple[Unit, ...]:
    """Tell each unit which one is gathered ahead of need in its backward: the one used before it in the same run.

    One that is called several times gathers nothing ahead: at its second backward that would have been used already.
    """
    ahead: dict[str, str] = {}
    for axis in dict.fromkeys(unit.shard_axis for unit in units):
        by_use = sorted((unit for unit in units if unit.shard_axis == axis), key=_use)
        for before, unit in itertools.pairwise(by_use):
            together = not chunks or any({before.first_layer, unit.first_layer} <= {*chunk} for chunk in chunks)
            if together and not unit.spans_calls:
                ahead[unit.name] = before.name
    return tuple(replace(unit, ahead=ahead.get(unit.name)) for unit in units)


def _use(unit: Unit) -> tuple[int, int, bool]:
    """Sort by last use; within a layer, what was used before it too comes last."""
    return unit.last_layer, unit.called[1], unit.first_layer != unit.last_layer


def _unit(step: StepSpec, modules: tuple[str, ...], params: list[ParamSpec], chunks: tuple[range, ...]) -> Unit:
    layers = step.model.layers
    last = len(layers) - 1
    is_root = modules == ("",)
    first_layer, last_layer = (0, last) if is_root else _span(step, modules, params)
    receives = any(first_layer in chunk and chunk.start > 0 for chunk in chunks)  # what takes a gradient, in a pipeline
    # A frozen start of the model has no backward that would read its weights.
    has_backward = receives or any(param.trainable and param.layer <= last_layer for param in step.model.params)
    first_root = _first_root(step, params)
    entered = params if params[0].aliases else [p for p in params if _roots(step, p) == first_root]
    holding = step.holding(params[0])
    return Unit(
        name=", ".join(modules),  # FSDP2's own label of it; empty for what the root module owns itself
        modules=modules,
        params=tuple(param.name for param in params),
        first_layer=first_layer,
        last_layer=last_layer,
        dtype=step.working_dtype(params[0]),
        codec=step.codec,
        padded_numel=sum(padded_rows(param, holding.num_shards) for param in params),
        padded_grad_numel=sum(padded_rows(param, holding.num_shards) for param in params if param.trainable),
        # The last layer's backward follows at once, and a weight that first and last layer share is in use throughout.
        # A pipeline's other micro-batches may come between the two.
        keep_after_forward=step.zero == 2 or (last_layer == last and step.layout.pp == 1),
        gather_in_backward=layers[last_layer].backward_reads_weights and has_backward,
        called=(min(param.called[0] for param in params), max(param.called[1] for param in params)),
        spans_calls=any(param.calls > 1 for param in params),
        ends_early=receives or (not is_root and all(param.takes_gradient for param in entered)),
        shard_axis=holding.data_axis,
        num_shards=holding.num_shards,
    )


def _first_root(step: StepSpec, params: list[ParamSpec]) -> list[str]:
    """The module of a layer that is entered first, of those with these weights."""

    def entered(param: ParamSpec) -> tuple[int, int]:
        roots = _roots(step, param)
        return param.layer, step.model.layers[param.layer].modules.index(roots[0]) if roots else -1

    return _roots(step, min(params, key=entered))


def _span(step: StepSpec, modules: tuple[str, ...], params: list[ParamSpec]) -> tuple[int, int]:
    """First and last layer that use the weights of a unit."""
    if not params[0].shared:
        return params[0].layer, params[0].layer
    roots = [(root, index) for index, layer in enumerate(step.model.layers) for root in layer.modules]
    used = [index for root, index in roots for module in modules if is_below(module, root)]
    used += [param.last_layer for param in params if param.last_layer is not None]
    return min(used), max(used)


def _mixed_owner(model: ModelSpec) -> str | None:
    """Name a module that owns a shared weight, and below it modules whose weights are not shared."""
    sharing = {name.rpartition(".")[0] for p in model.params if p.shared for name in (p.name, *p.aliases)}
    others = {param.name.rpartition(".")[0] for param in model.params if not param.shared}
    return next((s for s in sorted(sharing) if any(o == s or (s and is_below(o, s)) for o in others)), None)


def padded_rows(param: ParamSpec, multiple: int) -> int:
    """Elements of `param` with its first dimension padded to a multiple, as FSDP2 cuts it."""
    if not param.shape:
        return multiple
    return padded(param.shape[0], multiple) * (param.numel // param.shape[0] if param.shape[0] else 0)
