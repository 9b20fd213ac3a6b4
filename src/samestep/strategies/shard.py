"""ZeRO: a rank keeps 1/N of the optimizer's state (1), of the gradients too (2), of the weights too (3).

Rajbhandari et al. 2020, arXiv:1910.02054; stage 3 is PyTorch's FSDP (Zhao et al. 2023, arXiv:2304.11277). With N
ranks on `dp_shard`, bytes a parameter in mixed precision (2 weights, 2 gradients, 12 for Adam and the master):

    classic accounting      zero=0: 16     zero=1: 4 + 12/N     zero=2: 2 + 14/N     zero=3: 16/N
    held by this runtime    zero=0: 18     zero=1: 6 + 12/N     zero=2: 2 + 16/N     zero=3: 16/N

(gradients are kept in float32; the weights of zero=2 are gathered for the step and freed after it).

Here stands what a rank holds under each stage, and what zero=2 and zero=3 send; zero=1 cuts the buckets of
`strategies/data.py`, which writes their collectives. FSDP2 carries out zero=2 and zero=3: a *unit* (a layer, or one
shared weight; `program/units.py`) is gathered before its forward, under zero=3 freed and gathered again before its
backward, and its gradient is reduce_scattered after it; or sent as codes by an all_to_all, where all data ranks shard it and
the job compresses contributions (`strategies/compress.py`).

```
zero=3   forward    AG 0 | F 0, AG 1 | F 1, AG 2 | F 2
         backward   AG 1 | B 2, RS 2, AG 0 | B 1, RS 1 | B 0, RS 0       (the next gather is issued ahead)
```
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from samestep.errors import LayoutError
from samestep.models.param_spec import ParamSpec
from samestep.models.spec import ModelSpec, cache_by_model, is_below, read_by_own_code
from samestep.program.codecs import PLAIN, exchange
from samestep.program.holding import REPLICAS, SHARDS, Holding
from samestep.program.ops import (
    BYTES_OF,
    UPDATE_BODY,
    BodyKey,
    Buffer,
    Op,
    OpKind,
    Ops,
    ends_step,
    is_forward,
    starts_step,
)
from samestep.program.program import Program
from samestep.program.ranks import Ranks
from samestep.program.step import StepSpec
from samestep.program.units import Unit, by_layer, coded_parts, last_use, make_units

AXIS = SHARDS


def refusal(step: StepSpec) -> LayoutError | None:
    """Refuse settings that mean nothing at this ZeRO stage."""
    layout = step.layout
    if layout.accumulate == "full" and step.zero < 2 <= layout.zero:
        return LayoutError(
            "accumulate-full-needs-zero",
            f"accumulate=full needs sharded gradients, and on one rank zero={layout.zero} shards nothing. Use accumulate=sharded",
        )
    if layout.accumulate == "full" and step.zero < 2:
        return LayoutError(
            "accumulate-full-needs-zero",
            f"accumulate=full needs sharded gradients, and zero={layout.zero} shards none. Use zero=2, zero=3 or accumulate=sharded",
        )
    if step.zero < 2:
        return None
    if step.splits_backward:
        return LayoutError(
            "schedule-unsupported",
            f"zero={step.zero} reduces gradients after each backward, and schedule={step.layout.schedule} computes the gradients of weights later. Use zero=1, or schedule=1f1b",
        )
    if step.layout.pp > 1 and (refusal := _refuse_own_code(step)):
        return refusal
    if step.layout.virtual_stages > 1 and (refusal := _refuse_again(step)):
        return refusal
    return None


def _refuse_own_code(step: StepSpec) -> LayoutError | None:
    """Refuse weights that the root's code reads where a stage of a pipeline does not gather them once a forward."""
    for param, is_in_block in _read_by_root(step.model):
        if step.layout.virtual_stages > 1:
            return LayoutError(
                "zero-shared-weight",
                f"zero={step.zero} gathers {param.name}, which the model's own code reads, with every virtual stage. Use "
                "zero=1, or virtual_stages=1",
            )
        if param.shared:
            return LayoutError(
                "zero-shared-weight",
                f"{param.name} is shared by modules, and read by the model's own code. Use zero=1, or pp=1",
            )
        if step.zero == 3 and step.layout.recompute != "none" and is_in_block:
            return LayoutError(
                "zero-shared-weight",
                f"{param.name} is also read outside its block, and zero={step.zero} does not gather it again for "
                f"recompute={step.layout.recompute}. Use zero=1, or recompute=none",
            )
    return None


@cache_by_model
def _read_by_root(model: ModelSpec) -> tuple[tuple[ParamSpec, bool], ...]:
    """Return the weights that the root's code reads, each with whether a block holds it."""
    read = read_by_own_code(model)
    blocks = [path for layer in model.layers if layer.is_block for path in layer.modules]
    return tuple(
        (param, any(is_below(param.name, path) for path in blocks)) for param in model.params if param.name in read
    )


def _refuse_again(step: StepSpec) -> LayoutError | None:
    """Refuse weights that a rank may use in several virtual stages, each of which gathers them separately."""
    name = _used_by_several(step.model)
    if name is None:
        return None
    return LayoutError(
        "zero-shared-weight",
        f"zero={step.zero} gathers and reduces {name}, which several layers use, with one virtual stage. Use zero=1"
        ", or virtual_stages=1",
    )


@cache_by_model
def _used_by_several(model: ModelSpec) -> str | None:
    """Return the name of a weight that several layers use, one of them between the first and the last block; None if there is none.

    The first and the last virtual stage are on different ranks.
    """
    blocks = [index for index, layer in enumerate(model.layers) if layer.is_block]
    shared = (p.name for p in model.params if any(blocks[0] < use.layer < blocks[-1] for use in p.uses))
    return next(shared, None)


def apply(program: Program) -> Program:
    """Shard what the layout's ZeRO stage shards, and write what zero=2 and zero=3 send for it."""
    step = program.step
    if step.zero == 0:
        return program
    step = step.hold(functools.partial(_hold, step.ranks, {}))
    program = replace(program, step=step, axes={**program.axes, AXIS: step.layout.num_shards})
    if step.zero == 1:
        return program
    units = make_units(step, program.chunks)
    lasts = {chunk[-1] for chunk in program.chunks} or {len(step.model.layers) - 1}
    left = {
        unit.name
        for unit in units
        if unit.is_freed_after_forward and (unit.is_called_again or unit.last_layer in lasts)
    }
    known: dict[tuple[int, bool], Ops] = {}
    return program.with_bodies(lambda key, ops: _with_units(key, ops, step, units, left, known), units=units)


def _hold(ranks: Ranks, known: dict[Holding, Holding], _: ParamSpec, holding: Holding) -> Holding:
    """Divide a weight among the ranks of the innermost data axis that hold it; `known` spares hundreds of equal ones."""
    if holding not in known:
        axis = AXIS if holding.data_axis == REPLICAS else holding.data_axis
        known[holding] = holding.zero_sharded(axis, ranks.size(axis))
    return known[holding]


def _with_units(
    key: BodyKey, ops: Ops, step: StepSpec, units: tuple[Unit, ...], left: set[str], known: dict[tuple[int, bool], Ops]
) -> Ops:
    """Rewrite ops that several positions in the step share once, where they stay equal."""
    if key == UPDATE_BODY:
        return tuple(op.but(frees_before=(_PENDING,)) if op.kind is OpKind.UPDATE else op for op in ops)
    # zero=2 keeps the weights until the step's last backward, so only the first micro-batch gathers them.
    gathers = step.zero == 3 or starts_step(key)
    reduces = step.layout.accumulate == "sharded" or ends_step(key)
    same = (id(ops), gathers if is_forward(key) else reduces)
    if same not in known:
        rewritten = (
            _gather_in_forward(ops, units if gathers else ())
            if is_forward(key)
            else _scatter_in_backward(ops, step, units, reduces=reduces)
        )
        known[same] = tuple(_with_buffers(rewritten, step, units, left))
    return known[same]


def _gather_in_forward(ops: Ops, units: tuple[Unit, ...]) -> Iterator[Op]:
    """Gather each unit before the first layer that uses it."""
    starting = by_layer((unit for unit in units if unit.num_shards > 1), lambda unit: unit.first_layer)
    done: list[str] = []
    for op in ops:
        needed = sorted(starting.get(op.layer, ()), key=lambda unit: unit.called[0])
        # FSDP2 runs one gather ahead: the next may not start before the forward before the current one has ended.
        waits = [_gather(unit).but(after=tuple(done[-2:-1])) for unit in needed]
        yield from waits
        yield op.but(after=(*op.after, *(wait.name for wait in waits))) if waits else op
        if op.axis is None:  # what layers send among themselves is part of their forward
            done.append(op.name)


def _scatter_in_backward(ops: Ops, step: StepSpec, units: tuple[Unit, ...], *, reduces: bool) -> Iterator[Op]:
    """Gather each unit before its backward, with the unit that this prefetches, and reduce_scatter its gradient after it.

    A unit whose input takes no gradient is scattered at the very end.
    """
    reached = {op.layer for op in ops if op.layer is not None}  # of several virtual stages a body has one's layers
    by_name = {unit.name: unit for unit in units if unit.first_layer in reached}
    scattered = [unit for unit in by_name.values() if reduces and unit.padded_grad_numel]
    starting = by_layer(sorted(by_name.values(), key=last_use, reverse=True), lambda unit: unit.last_layer)
    ending = by_layer((unit for unit in scattered if unit.input_takes_gradient), lambda unit: unit.first_layer)
    issued: set[str] = set()
    waits: dict[int | None, tuple[str, ...]] = {None: ()}
    behind: list[Op] = []  # a layer's backward, which what it exchanges is a part of
    for op in ops:
        if op.axis is None or op.layer not in waits:
            yield from behind
            behind = []
        here, over = starting.get(op.layer, []), ending.get(op.layer, [])
        late = [unit for unit in here if any(_follows(other, unit) for other in over)]
        if op.layer not in waits:  # reached by its backward, or by the forward that is repeated for it
            for unit in here:
                if unit not in late:
                    yield from _gathers(unit, by_name, issued)
            waits[op.layer] = tuple(f"{OpKind.ALL_GATHER}:{unit.name}" for unit in here if unit.name in issued)
        yield op.but(after=(*op.after, *waits[op.layer])) if waits[op.layer] else op
        if op.kind is OpKind.BACKWARD:
            rest = sorted(over, key=lambda unit: unit.called[0])
            for unit in late:
                while rest and _follows(rest[-1], unit):
                    behind.append(_scatter(rest.pop(), op, step))
                behind.extend(_gathers(unit, by_name, issued))
            behind.extend(_scatter(unit, op, step) for unit in reversed(rest))
    yield from behind
    last = next(op for op in reversed(ops) if op.kind is OpKind.BACKWARD)
    yield from (_scatter(unit, last, step) for unit in scattered if not unit.input_takes_gradient)


def _gathers(unit: Unit, units: Mapping[str, Unit], issued: set[str]) -> Iterator[Op]:
    """Gather a unit whose backward starts, and the one that it prefetches, unless that is done already."""
    for name in (unit.name, unit.prefetch):
        if name is not None and name in units and name not in issued and units[name].is_gathered_again:
            issued.add(name)
            yield _gather(units[name])


def _follows(later: Unit, unit: Unit) -> bool:
    """Return whether the backward of `later` is over before that of `unit` starts."""
    inside = any(is_below(module, root) for module in later.modules for root in unit.modules)
    return later.called[0] > unit.called[1] and not inside


def _gather(unit: Unit) -> Op:
    # Tensors of several dtypes are gathered as bytes.
    size_bytes = unit.padded_numel * BYTES_OF[unit.dtype] + unit.padded_packed_bytes
    dtype = "uint8" if unit.padded_packed_bytes else unit.dtype
    op = Op(kind=OpKind.ALL_GATHER, owner=unit.name, axis=unit.shard_axis, dtype=dtype, implied=True)
    op = op.sized(size_bytes // BYTES_OF[dtype])
    return op.but(allocates=(Buffer(unit.name, "buffers", op.size_bytes),))


def _scatter(unit: Unit, after: Op, step: StepSpec) -> Op:
    size = unit.padded_grad_numel
    if (contributions := step.contributions) is not None and step.scatters_codes:
        parts = [*coded_parts(step, contributions, unit)]
        (sent,) = exchange(unit.name, unit.codec, unit.shard_axis, parts, step.master_dtype, gathers=False)
        return sent.but(implied=True, after=(after.name,))
    dtype, axis = step.master_dtype, unit.shard_axis
    op = Op(kind=OpKind.REDUCE_SCATTER, owner=unit.name, axis=axis, dtype=dtype, codec=PLAIN, after=(after.name,))
    return op.sized(size).but(implied=True)


_PENDING = "pending reduction"
"""Buffer of the gradients that were scattered last: FSDP2 frees it after the next scatter, or after the last of the step."""


def _with_buffers(ops: Iterable[Op], step: StepSpec, units: tuple[Unit, ...], left: set[str]) -> Iterator[Op]:
    """Write on each op what FSDP2 allocates and frees at it.

    A unit leaves once the gather issued ahead of the next one has come, so those in `left`, which end a forward, may still
    be there when another task starts; under zero=3 it also leaves with its backward, which brings its whole gradient.
    """
    cut = [unit for unit in units if unit.num_shards > 1]
    starting, ending = by_layer(cut, lambda unit: unit.first_layer), by_layer(cut, lambda unit: unit.last_layer)
    unsharded = {
        unit.name: Buffer(f"gradient:{unit.name}", "gradients", unit.padded_grad_numel * BYTES_OF[step.master_dtype])
        for unit in cut
    }
    leaving = left
    for op in ops:
        changes: dict[str, tuple[object, ...]] = {}
        if op.axis is None and leaving:
            changes["frees_before"], leaving = tuple(leaving), set()
        if op.kind is OpKind.FORWARD:
            here = ending.get(op.layer, ())
            leaving = {unit.name for unit in here if unit.is_freed_after_forward and not unit.is_called_again}
        elif op.kind is OpKind.BACKWARD and op.layer in starting:
            names = [unit.name for unit in starting[op.layer]]
            changes["allocates"] = tuple(unsharded[name] for name in names if unsharded[name].size_bytes)
            changes["frees"] = tuple(names) if step.zero == 3 else ()
        elif op.kind is OpKind.ALL_GATHER and op.implied:
            leaving = leaving - {op.owner}
        elif op.implied and op.owner in unsharded:
            changes["allocates"] = (unsharded[op.owner]._replace(name=_PENDING),)
            changes["frees"] = (unsharded[op.owner].name,)
        yield op.but(**changes) if changes else op
