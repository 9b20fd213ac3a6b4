"""Recompute (activation checkpointing): a block drops its activations, and repeats its forward before its backward.

`full` keeps only a block's input and repeats its whole forward (Chen et al. 2016, arXiv:1604.06174), and so does `offload`, with the
input in the host's memory (`host_inputs.py`); `selective` also keeps the results of its matrix products and repeats only
cheap operations (Korthikanti et al. 2022, arXiv:2205.05198), and `alternate` those of every second product
(`program/repeated_products.py`).
A block is recomputed while its unit is gathered for the backward, so recompute adds no gather.

The collectives that checkpoints in the model's own code repeat are placed where a backward asks for them:

    forward    checkpoint 1 [ a  b (kept)  c ]  d            c is sent behind all that is kept, so nobody repeats it
    backward   d'  c'  a b  b'  a'                           what stands behind the last kept tensor, the repeated part, the rest

A checkpoint is repeated before the first backward of something in front of its last kept tensor, at the latest before that of what
stands in front of the checkpoint; and after the repeat of the one around it, which has its input.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from samestep.errors import LayoutError
from samestep.models.layer_parts import NOWHERE
from samestep.models.layer_spec import LayerSpec
from samestep.models.spec import is_below
from samestep.program.ops import BodyKey, Op, OpKind, Ops, is_backward
from samestep.program.program import Program
from samestep.program.repeated_products import KEEPS_PRODUCTS, is_one_graph, repeated_flops
from samestep.program.step import StepSpec, repeats_in_graphs
from samestep.schedules import TaskKind

_EXCHANGES = (OpKind.ALL_TO_ALL, OpKind.SHIFT)
_OF_TOKENS = "cp"
"""The axis of which a repeated forward repeats all collectives, the gathers of whole sequences too."""
_LAYER = 0
"""What stands for a layer, whose whole forward the layout repeats, among the numbers of its checkpoints."""


def refusal(step: StepSpec) -> LayoutError | None:
    """Return why blocks cannot be recomputed: there are none, they are graphs, or the model goes back through them twice."""
    if step.layout.recompute != "none" and not any(layer.is_block for layer in step.model.layers):
        return LayoutError(
            "recompute-unsupported",
            f"recompute={step.layout.recompute} drops the saved tensors of blocks, and {step.model.name} has none "
            "(a ModuleList or Sequential of blocks). Use recompute=none",
        )
    if step.layout.recompute in KEEPS_PRODUCTS and step.model.differentiates_at:
        return LayoutError(
            "forward-takes-gradients",
            f"recompute={step.layout.recompute} keeps results for one backward, and the forward at {step.model.differentiates_at} takes "
            "gradients itself. Use recompute=full, or none",
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
    """Return whether checkpoints in the model's code repeat what ranks send; in a compiled block they do not."""
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
        again = [forward.but(after=(op.name,)) for forward in forwards.get(op.layer, ()) if not _is_kept(forward)]
        sent_backward = _with_repeats(again, sent, repeats_layer=op.layer in repeated)
        if op.layer in repeated:  # before it computes
            flops = repeated_flops(step, layers[op.layer]) * step.microbatch_samples
            whole = op.but(kind=OpKind.RECOMPUTE, flops=flops)
            yield from (forward.but(layer=op.layer, after=op.after) for forward in sent_backward.ahead)
            yield from (whole, *(forward.but(after=(whole.name,)) for forward in sent_backward.repeated))
        yield from (op, *sent_backward.rest)


def _by_layer(forward: Ops) -> dict[int, list[Op]]:
    """Return what each layer's forward sends."""
    ops: dict[int, list[Op]] = {}
    layer: int | None = None
    for op in forward:
        layer = op.layer if op.kind is OpKind.FORWARD else layer
        if layer is not None and op.axis is not None:
            ops.setdefault(layer, []).append(op)
    return ops


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
    ops: dict[int, list[Op]] = {}
    layer: int | None = None
    for op in forward:
        if op.kind is OpKind.FORWARD:
            layer = op.layer
            continue
        if layer is None or op.axis is None or _is_kept(op):
            continue
        if op.kind is OpKind.SHIFT or op.owner not in layers[layer].modules:  # a block may shift tokens itself
            ops.setdefault(layer, []).append(op)
    return ops


class SentBackward(NamedTuple):
    """The collectives of a layer's backward, in three parts."""

    ahead: list[Op]
    """In front of the repeat of the whole layer's forward, if that is repeated."""
    repeated: list[Op]
    """In that repeat."""
    rest: list[Op]


def _with_repeats(forward: Sequence[Op], backward: Sequence[Op], *, repeats_layer: bool) -> SentBackward:
    """Return what a layer sends in its backward, with what its checkpoints repeat of its forward.

    What is sent over one axis is in order; how messages of several axes alternate is not known.
    """
    sent_backward = SentBackward([], [], [])
    for axis in dict.fromkeys(op.axis for op in (*forward, *backward)):
        repeats = _Repeats([op for op in forward if op.axis == axis], sent_backward if repeats_layer else None)
        for op in backward:
            if op.axis == axis:
                sent_backward.rest.extend(repeats.before(op))
                (sent_backward.rest if repeats.has_layer else sent_backward.ahead).append(op.but(place=NOWHERE))
        sent_backward.rest.extend(repeats.rest())
    return sent_backward


class _Repeats:
    """The repeats of one layer's checkpoints in its backward, of what it sends over one axis."""

    def __init__(self, forward: Sequence[Op], layer: SentBackward | None) -> None:
        self._forward, self._layer = forward, layer
        self._made: set[int] = set() if layer is not None else {_LAYER}
        self._around = {
            checkpoint: op.place.inside[:index] for op in forward for index, checkpoint in enumerate(op.place.inside)
        }
        """The checkpoints around each one."""

    @property
    def has_layer(self) -> bool:
        """Whether the repeat of the whole layer is over, or there is none."""
        return _LAYER in self._made

    def before(self, op: Op) -> Iterator[Op]:
        """Yield what is repeated before an op of the backward."""
        behind = sorted((checkpoint for checkpoint in self._around if checkpoint > op.place.at), reverse=True)
        return self._repeated((*behind, *op.place.again))

    def rest(self) -> Iterator[Op]:
        """Yield what is repeated after the last op of the backward."""
        return self._repeated((*sorted(self._around, reverse=True), _LAYER))

    def _repeated(self, checkpoints: Iterable[int]) -> Iterator[Op]:
        for checkpoint in checkpoints:
            if checkpoint in self._made:
                continue
            self._made.add(checkpoint)
            if checkpoint != _LAYER:
                yield from self._repeated((_LAYER, *self._around.get(checkpoint, ())))
            again = [op.but(place=NOWHERE) for op in self._forward if checkpoint in op.place.again]
            if checkpoint == _LAYER and self._layer is not None:
                self._layer.repeated.extend(again)
            else:
                yield from again
