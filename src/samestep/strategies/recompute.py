"""Recompute (activation checkpointing): a block drops its activations, and repeats its forward before its backward.

`full` keeps only a block's input and repeats its whole forward (Chen et al. 2016, arXiv:1604.06174), and so does `offload`, with the
input in the host's memory (`host_inputs.py`); `selective` also keeps the results of its matrix products and repeats only
cheap operations (Korthikanti et al. 2022, arXiv:2205.05198), and `alternate` those of every second product
(`program/repeated_products.py`).
A block is recomputed while its unit is gathered for the backward, so recompute adds no gather.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence

from samestep.models.layer_spec import LayerSpec
from samestep.models.spec import is_below
from samestep.program.graphs import repeats_in_graphs
from samestep.program.ops import BodyKey, Op, OpKind, Ops, is_backward
from samestep.program.program import Program
from samestep.program.repeated_forwards import with_repeats
from samestep.program.repeated_products import KEEPS_PRODUCTS, is_one_graph, repeated_flops
from samestep.program.step import StepSpec
from samestep.schedules import TaskKind

_EXCHANGES = (OpKind.ALL_TO_ALL, OpKind.SHIFT)
_OF_TOKENS = "cp"
"""The axis of which a repeated forward repeats all collectives, the gathers of whole sequences too."""


def refusal(step: StepSpec) -> str | None:
    """Return why blocks cannot be recomputed: there are none, they are graphs, or the model goes back through them twice."""
    if step.layout.recompute != "none" and not any(layer.is_block for layer in step.model.layers):
        return (
            f"recompute={step.layout.recompute} drops what blocks saved, and {step.model.name} has none "
            "(a ModuleList or Sequential of blocks): recompute=none works"
        )
    if step.layout.recompute in KEEPS_PRODUCTS and step.model.differentiates_at:
        return (
            f"recompute={step.layout.recompute} keeps results for one backward, and the forward at {step.model.differentiates_at} takes "
            "gradients itself: recompute=full works, and so does none"
        )
    return None


def apply(program: Program) -> Program:
    """Return the program with a block's repeated forward, collectives included, before its backward."""
    recompute, layers = program.step.layout.recompute, program.step.model.layers
    repeated_layers = {
        index for index, layer in enumerate(layers) if layer.is_block and layer.has_backward and recompute != "none"
    }
    if repeats_own_code(program.step):
        program = program.with_bodies(
            lambda key, ops: tuple(_with_own(program, key, ops, repeated_layers)) if is_backward(key) else ops
        )
        repeated_layers -= {index for index in repeated_layers if layers[index].makes_checkpoints}
    if not repeated_layers:
        return program

    def rewrite(key: BodyKey, ops: Ops) -> Ops:
        return tuple(_with_forwards(key, ops)) if is_backward(key) else ops

    def _with_forwards(key: BodyKey, ops: Ops) -> Iterator[Op]:
        sums_of = _sums_of(program.bodies[key._replace(kind=TaskKind.FORWARD)], layers)
        early: list[Op] = []
        for number, op in enumerate(ops):
            if op.kind is OpKind.BACKWARD and op.layer is not None and op.layer in repeated_layers:
                flops = repeated_flops(program.step, layers[op.layer]) * program.step.microbatch_samples
                repeated = op.but(kind=OpKind.RECOMPUTE, flops=flops)
                # torch repeats the forward only as far as backward needs it, usually without the block's last sum, and
                # only when backward asks for a saved tensor, which is after the backward of that sum.
                # A graph that contains both passes keeps what other ranks have sent.
                sums = [] if repeats_in_graphs(program.step) else sums_of.get(op.layer, [])
                joins, split = _whole_parts(program.step, layers[op.layer])
                tensor_sums = [part for part in sums if not _is_exchange(part) and part.owner not in joins]
                repeats_all = layers[op.layer].repeats_last_sum or is_one_graph(program.step, layers[op.layer])
                last = None if repeats_all or not tensor_sums else tensor_sums[-1]
                # The backward of a gathered output sends nothing: what it asks for next, its module has saved.
                sends = last is not None and last.kind is not OpKind.ALL_GATHER
                owners = {last.owner} if sends and last else set()
                owners |= {split} if last and split and is_below(last.owner, split) else set()
                early = [part for part in _following(ops, number) if part.owner in owners]
                yield from (part.but(layer=op.layer, after=op.after) for part in early)
                yield repeated
                yield from (part.but(after=(repeated.name,)) for part in sums if part is not last)
            if op not in early:
                yield op

    return program.with_bodies(rewrite)


def repeats_own_code(step: StepSpec) -> bool:
    """Return whether checkpoints in the model's code repeat what ranks send: a compiler's graph keeps it."""
    return step.compile == "none" and step.model.repeats_own_code(on_stages=step.layout.pp > 1)


def _with_own(program: Program, key: BodyKey, ops: Ops, repeated: Collection[int]) -> Iterator[Op]:
    """Yield the ops of a backward with what the checkpoints in layers' code repeat, and of `repeated` ones the whole forward."""
    layers, step = program.step.model.layers, program.step
    forwards = _by_layer(program.bodies[key._replace(kind=TaskKind.FORWARD)])
    number = 0
    while number < len(ops):
        op = ops[number]
        number += 1
        if op.kind is not OpKind.BACKWARD or op.layer is None or not layers[op.layer].makes_checkpoints:
            yield op
            continue
        sent = [*_following(ops, number - 1)]
        number += len(sent)
        again = [one.but(after=(op.name,)) for one in forwards.get(op.layer, ()) if not _is_kept(one)]
        found = with_repeats(again, sent, repeats_layer=op.layer in repeated)
        if op.layer in repeated:  # before it computes
            flops = repeated_flops(step, layers[op.layer]) * step.microbatch_samples
            whole = op.but(kind=OpKind.RECOMPUTE, flops=flops)
            yield from (one.but(layer=op.layer, after=op.after) for one in found.ahead)
            yield from (whole, *(one.but(after=(whole.name,)) for one in found.repeated))
        yield from (op, *found.rest)


def _by_layer(forward: Ops) -> dict[int, list[Op]]:
    """Return what each layer's forward sends."""
    found: dict[int, list[Op]] = {}
    layer: int | None = None
    for op in forward:
        layer = op.layer if op.kind is OpKind.FORWARD else layer
        if layer is not None and op.axis is not None:
            found.setdefault(layer, []).append(op)
    return found


def _is_exchange(op: Op) -> bool:
    """Return whether a repeated forward repeats a collective wherever it is."""
    return op.kind in _EXCHANGES or op.axis == _OF_TOKENS


def _is_kept(op: Op) -> bool:
    """Return whether a repeated forward has kept what a collective brings: how many rows go to which expert."""
    return op.kind is OpKind.ALL_TO_ALL and op.dtype == "int64"


def _whole_parts(step: StepSpec, layer: LayerSpec) -> tuple[tuple[str, ...], str]:
    """Return a block's parts that compute whole sequences under sequence parallelism, and the one that ends it, if any.

    What gathers their sequence is repeated; what gathers their output's gradient comes before, as they keep nothing of it.
    """
    if not step.layout.sequence_parallel or not layer.sequence_boundaries:
        return (), ""
    end = layer.sequence_boundaries[-1]
    return layer.whole_parts, end.owner if end.kind == "split" else ""


def _following(ops: Ops, number: int) -> Iterator[Op]:
    """Return the collectives between compute op `number` and the next compute op."""
    return itertools.takewhile(lambda op: op.axis is not None, ops[number + 1 :])


def _sums_of(forward: Ops, layers: Sequence[LayerSpec]) -> dict[int, list[Op]]:
    """Return the collectives inside each layer's forward, without those at its boundary, which belong to the layer's module."""
    found: dict[int, list[Op]] = {}
    layer: int | None = None
    for op in forward:
        if op.kind is OpKind.FORWARD:
            layer = op.layer
            continue
        if layer is None or op.axis is None or _is_kept(op):
            continue
        if op.kind is OpKind.SHIFT or op.owner not in layers[layer].modules:  # a block may shift tokens itself
            found.setdefault(layer, []).append(op)
    return found
