"""What the toy axis `rows` says: its ranks divide the outputs of every linear layer named `up`, and hold all else alike.

```
            ┌ U_1 ┐
   x ──g────┤     ├──h── [ x U_1 | x U_2 ]      g: backward all_reduce of the gradient of x
            └ U_2 ┘                             h: forward all_reduce of the outputs, zero where another rank has them
```
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from samestep.errors import LayoutError
from samestep.models.param_spec import ParamSpec
from samestep.program.holding import Holding
from samestep.program.ops import Op, OpKind, Ops
from samestep.program.program import Program
from samestep.program.step import StepSpec

AXIS = "rows"


def is_divided(param: ParamSpec) -> bool:
    return param.name.rpartition(".")[0].endswith("up")


def refusal(step: StepSpec) -> LayoutError | None:
    degree = getattr(step.layout, AXIS, 1)
    odd = next((param for param in step.model.params if is_divided(param) and param.shape[0] % degree), None)
    if odd is None:
        return None
    return LayoutError(
        "rows-indivisible", f"rows={degree} does not divide the {odd.shape[0]} rows of {odd.name}. Use rows=1"
    )


def apply(program: Program) -> Program:
    step, degree = program.step, getattr(program.step.layout, AXIS, 1)
    if degree == 1:
        return program

    def hold(param: ParamSpec, holding: Holding) -> Holding:
        return holding.sharded(AXIS, degree) if is_divided(param) else holding.replicated(AXIS, degree)

    params = tuple(
        replace(param, shape=(param.shape[0] // degree, *param.shape[1:])) if is_divided(param) else param
        for param in step.model.params
    )
    layers = tuple(replace(layer, repeats_last_sum=True) for layer in step.model.layers)  # `down` follows and reads it
    local = replace(step, model=replace(step.model, params=params, layers=layers)).hold(hold)
    axes = {**program.axes, AXIS: degree}
    return replace(program, step=local).with_bodies(lambda _, ops: tuple(_summed(ops, step)), axes=axes)


def _summed(ops: Ops, step: StepSpec) -> Iterator[Op]:
    for op in ops:
        yield op
        if op.kind not in (OpKind.FORWARD, OpKind.BACKWARD):
            continue
        for param in step.model.params_of(op.layer):
            if is_divided(param) and len(param.shape) == 2:
                outputs, inputs = param.shape
                owner = param.name.rpartition(".")[0]
                sent = Op(kind=OpKind.ALL_REDUCE, owner=owner, axis=AXIS, dtype=step.compute_dtype, after=(op.name,))
                tokens = step.model.layers[op.layer].output_elements // inputs * step.microbatch_samples
                yield sent.but(is_exposed=True).sized(tokens * (outputs if op.kind is OpKind.FORWARD else inputs))
