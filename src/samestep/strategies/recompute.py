"""Activation checkpointing: drop what a block saved, run its forward again before its backward.

`full` keeps a block's input alone and pays its whole forward again (Chen et al. 2016, arXiv:1604.06174);
`selective` also keeps the results of its matrix products and repeats only what is cheap (Korthikanti et al. 2022,
arXiv:2205.05198). Blocks are recomputed inside their unit, so no weight is gathered twice for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from samestep.models.spec import LayerSpec
from samestep.program.bodies import BodyKey, is_backward
from samestep.program.ops import Kind, Op, Ops
from samestep.program.program import Program
from samestep.program.step import StepSpec
from samestep.schedules import TaskKind


def refusal(step: StepSpec) -> str | None:
    """Refuse where there is nothing to recompute."""
    if step.layout.recompute != "none" and not any(layer.is_block for layer in step.model.layers):
        return (
            f"recompute={step.layout.recompute} drops what blocks saved, and {step.model.name} has none "
            "(a ModuleList or Sequential of blocks): recompute=none works"
        )
    return None


def apply(program: Program) -> Program:
    """Insert a block's second forward before its backward."""
    recompute = program.step.layout.recompute
    if recompute == "none":
        return program
    layers = program.step.model.layers

    def rewrite(key: BodyKey, ops: Ops) -> Ops:
        return tuple(_with_forwards(key, ops)) if is_backward(key) else ops

    def _with_forwards(key: BodyKey, ops: Ops) -> Iterator[Op]:
        sums_of = _sums_of(program.bodies[key._replace(kind=TaskKind.FORWARD)], layers)
        early: list[Op] = []
        for number, op in enumerate(ops):
            if op.kind is Kind.BACKWARD and op.layer is not None and layers[op.layer].is_block:
                flops = layers[op.layer].forward_flops * program.step.microbatch_samples
                again = op.but(kind=Kind.RECOMPUTE, flops=flops if recompute == "full" else 0)
                # The repetition ends once backward has what it needs: most often without the block's last sum,
                # and backward asks for the first of that only when it has gone back through that sum.
                sums = sums_of.get(op.layer, [])
                tensor_sums = [part for part in sums if part.kind is not Kind.ALL_TO_ALL]
                last = None if layers[op.layer].repeats_last_sum or not tensor_sums else tensor_sums[-1]
                early = [part for part in _following(ops, number) if last and part.owner == last.owner]
                yield from (part.but(layer=op.layer, after=op.after) for part in early)
                yield again
                yield from (part.but(after=(again.name,)) for part in sums if part is not last)
            if op not in early:
                yield op

    return program.with_bodies(rewrite)


def _following(ops: Ops, number: int) -> Iterator[Op]:
    """Collectives that stand behind a compute op, up to the next one."""
    return itertools.takewhile(lambda op: op.axis is not None, ops[number + 1 :])


def _sums_of(forward: Ops, layers: Sequence[LayerSpec]) -> dict[int, list[Op]]:
    """Collectives within each layer's forward; those that the layer's own module owns stand around it."""
    found: dict[int, list[Op]] = {}
    layer: int | None = None
    for op in forward:
        if op.kind is Kind.FORWARD:
            layer = op.layer
        elif layer is not None and op.axis is not None and op.owner not in layers[layer].modules:
            found.setdefault(layer, []).append(op)
    return found
