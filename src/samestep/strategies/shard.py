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

from collections.abc import Iterator
from dataclasses import replace

from samestep.model import ParamSpec
from samestep.program import (
    Bucket,
    Kind,
    Op,
    Ops,
    Program,
    Step,
    Unit,
    bucket_ops,
    ends_step,
    is_backward,
    is_forward,
    make_buckets,
    padded,
    starts_step,
)

AXIS = "dp_shard"


def refusal(step: Step) -> str | None:
    """Refuse settings that mean nothing at this ZeRO stage."""
    layout = step.layout
    if layout.accumulate == "full" and step.zero < 2:
        return f"accumulate=full is about sharded gradients: use zero=2 or zero=3 with it, not zero={layout.zero}"
    scalars = [param.name for param in step.model.params if not param.shape]
    if scalars and step.zero >= 2:
        return f"{scalars[0]} has no dimension to cut: give it shape (1,), or use zero=1"
    return None


def apply(program: Program) -> Program:
    """Write the gathers and scatters of the layout's ZeRO stage."""
    step = program.step
    if step.zero == 0:
        return program
    axes = {**program.axes, AXIS: step.layout.dp_shard}
    if step.zero == 1:
        buckets = make_buckets(step)
        return program.with_bodies(lambda key, ops: _stage_1(key, ops, step, buckets), buckets=buckets, axes=axes)
    units = _units(step)
    return program.with_bodies(lambda key, ops: _stage_2_or_3(key, ops, step, units), units=units, axes=axes)


def _stage_1(key: str, ops: Ops, step: Step, buckets: tuple[Bucket, ...]) -> Ops:
    if is_backward(key) and ends_step(key):
        return bucket_ops(
            ops, step, buckets, lambda b, size: (_op(Kind.REDUCE_SCATTER, b.name, step.master_dtype, size),)
        )
    if is_backward(key) or is_forward(key):
        return ops
    gathers = tuple(
        replace(_op(Kind.ALL_GATHER, b.name, b.dtype, b.padded_numel), after=(f"{Kind.UPDATE}:optimizer",))
        for b in buckets
    )
    return (*ops, *gathers)


def _stage_2_or_3(key: str, ops: Ops, step: Step, units: tuple[Unit, ...]) -> Ops:
    if is_forward(key):
        return tuple(_gathered_forward(key, ops, step, units))
    if is_backward(key):
        return tuple(_scattered_backward(key, ops, step, units))
    return ops


def _gathered_forward(key: str, ops: Ops, step: Step, units: tuple[Unit, ...]) -> Iterator[Op]:
    # zero=2 keeps the weights until the step's last backward, so only the first micro-batch gathers them.
    gathers = step.zero == 3 or starts_step(key)
    for op in ops:
        waits = [_gather(unit) for unit in units if gathers and unit.first_layer == op.layer]
        yield from waits
        yield replace(op, after=(*op.after, *(wait.name for wait in waits)))


def _scattered_backward(key: str, ops: Ops, step: Step, units: tuple[Unit, ...]) -> Iterator[Op]:
    """Follow FSDP2: a unit's backward starts with the gather of the unit before it, and ends with its scatter.

    Units whose forward starts at the model's inputs, which need no gradient, are scattered at the very end.
    """
    reduces = step.layout.accumulate == "sharded" or ends_step(key)
    issued: set[str] = set()
    order = sorted(units, key=lambda unit: (unit.last_layer, unit.first_layer != unit.last_layer))

    def gather(unit: Unit) -> Iterator[Op]:
        if unit.gather_in_backward and not unit.keep_after_forward and unit.name not in issued:
            issued.add(unit.name)
            yield _gather(unit)

    for op in ops:
        if op.kind is not Kind.BACKWARD:
            yield op
            continue
        mine = [unit for unit in order if unit.last_layer == op.layer]
        waits: tuple[str, ...] = ()
        for unit in reversed(mine):
            before = order.index(unit) - 1
            yield from gather(unit)
            waits = (*waits, f"{Kind.ALL_GATHER}:{unit.name}")
            if before >= 0:
                yield from gather(order[before])
        yield replace(op, after=(*op.after, *(name for name in waits if name.partition(":")[2] in issued)))
        for unit in units:
            if reduces and unit.first_layer == op.layer and unit.first_layer > 0:
                yield _scatter(unit, step, op)
    for unit in units:
        if reduces and unit.first_layer == 0:
            yield _scatter(unit, step, ops[-1])


def _gather(unit: Unit) -> Op:
    return replace(_op(Kind.ALL_GATHER, unit.name, unit.dtype, unit.padded_numel), implied=True)


def _scatter(unit: Unit, step: Step, after: Op) -> Op:
    op = _op(Kind.REDUCE_SCATTER, unit.name, step.master_dtype, unit.padded_grad_numel)
    return replace(op, implied=True, after=(after.name,))


def _op(kind: Kind, owner: str, dtype: str, numel: int) -> Op:
    return Op(kind=kind, owner=owner, axis=AXIS, dtype=dtype).sized(numel)


def _units(step: Step) -> tuple[Unit, ...]:
    """Group the weights into units: each layer's own, and each set of modules that share a weight.

    In the order of the module tree, which is the order in which FSDP2 finishes what autograd left over.
    """
    model = step.model
    groups: dict[tuple[str, ...], list[ParamSpec]] = {}
    for param in model.params:
        owners = tuple(dict.fromkeys(_module(name) for name in (param.name, *param.aliases)))
        if not param.shared:
            modules = model.layers[param.layer].modules
            covered = any(owners[0] == m or owners[0].startswith(f"{m}.") for m in modules)
            owners = tuple(m for m in modules if not _only_shared(step, m)) if covered else ("",)
        groups.setdefault(owners, []).append(param)
    return tuple(
        _unit(step, modules, params) for modules, params in sorted(groups.items(), key=lambda g: g[0] != ("",))
    )


def _unit(step: Step, modules: tuple[str, ...], params: list[ParamSpec]) -> Unit:
    layers = step.model.layers
    last = len(layers) - 1
    is_root = modules == ("",)
    used_in = [i for i, layer in enumerate(layers) for m in modules if _within(m, layer.modules)]
    first_layer, last_layer = (0, last) if is_root else (min(used_in), max(used_in))
    trainable = [param for param in params if param.trainable]
    order = [_module(name) for param in step.model.params for name in (param.name, *param.aliases)]
    modules = tuple(sorted(modules, key=lambda m: next(i for i, owner in enumerate(order) if _within(owner, (m,)))))
    return Unit(
        name=", ".join(modules),  # FSDP2's own label of it; empty for what the root module owns itself
        modules=modules,
        params=tuple(param.name for param in params),
        first_layer=first_layer,
        last_layer=last_layer,
        dtype=step.working_dtype(params[0]),
        padded_numel=sum(_padded_rows(param, step.layout.dp_shard) for param in params),
        padded_grad_numel=sum(_padded_rows(param, step.layout.dp_shard) for param in trainable),
        # The last layer's backward follows at once, and a weight that first and last layer share is in use throughout.
        keep_after_forward=step.zero == 2 or last_layer == last,
        gather_in_backward=layers[last_layer].backward_reads_weights,
    )


def _module(param_name: str) -> str:
    return param_name.rpartition(".")[0]


def _within(module: str, roots: tuple[str, ...]) -> bool:
    return any(not root or module == root or module.startswith(f"{root}.") for root in roots)


def _only_shared(step: Step, module: str) -> bool:
    """Whether every weight below `module` is shared, so that another unit holds it."""
    below = [p for p in step.model.params if any(_within(name, (module,)) for name in (p.name, *p.aliases))]
    return all(param.shared for param in below)


def _padded_rows(param: ParamSpec, multiple: int) -> int:
    """Elements of `param` with its first dimension padded to a multiple, as FSDP2 cuts it."""
    if not param.shape:
        return multiple
    return padded(param.shape[0], multiple) * (param.numel // param.shape[0] if param.shape[0] else 0)
