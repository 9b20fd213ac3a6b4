"""Context parallelism: every rank of `cp` has a slice of each sequence, and for attention some heads of the whole one.

DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509). All that works token by token works on a slice as it is. An
attention needs all tokens, but of one head at a time: four all_to_alls, with N ranks, T tokens, A heads of size D,

```
              tokens T/N, all heads                    all tokens, heads A/N
    rank 0    [ q k v of slice 0 ]  ── all_to_all ──►  [ q k v of heads 0 1 ]  attention
    rank 1    [ q k v of slice 1 ]  ◄── all_to_all ──  [ q k v of heads 2 3 ]  attention
```
each of T A D / N elements a rank, of which it sends N-1 parts in N; backward the same four, the other way. Every rank
has all rows of a causal mask for its heads, so the work is even without cutting the sequence in stripes. Keys and values
of fewer heads than ranks are repeated before they are sent. Embeddings, positions and masks are made of the whole
sequence on every rank, by the model's own code; slicing starts at the first block and ends in the loss, a sum over
tokens. Ranks of `cp` hold equal weights and see other tokens: to gradients they are one more data axis (`Layout`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from samestep.models.spec import Exchange, LayerSpec, ModelSpec, remembered
from samestep.program.bodies import BodyKey, is_backward
from samestep.program.ops import Kind, Op, Ops
from samestep.program.program import Program
from samestep.program.step import StepSpec

AXIS = "cp"
LEAST_TOKENS = 2
"""Of a slice: code that is given one token may take it for a step of a generation."""


def refusal(step: StepSpec) -> str | None:
    """Refuse models that do not work on slices, and degrees that divide neither tokens nor heads."""
    degree, model = step.layout.cp, step.model
    if degree == 1:
        return None
    if step.layout.sequence_parallel:
        return f"cp={degree} and sequence_parallel both cut the sequence: cp={degree} alone works, and so does cp=1"
    if model.varies_at:
        return f"cp={degree}: shapes or branches at {model.varies_at} depend on values: cp=1 works"
    if model.slice_refusal:
        return f"cp={degree} slices sequences: {model.slice_refusal}; cp=1 works"
    if not step.cuts_loss:
        return (
            f"cp={degree} slices sequences, and only of the cross entropy is it known that slices add up: "
            "train.loss = 'cross_entropy' works, and so does cp=1"
        )
    heads = _query_heads(model, step.layout.tp)
    most = math.gcd(model.length, *heads)
    if most % degree == 0 and model.length // degree >= LEAST_TOKENS:
        return None
    works = [n for n in range(2, most + 1) if most % n == 0 and model.length // n >= LEAST_TOKENS]
    said = " and ".join([f"{model.length} tokens", *(f"{count} heads" for count in sorted(heads))])
    cut = f" that tp={step.layout.tp} leaves a rank" if step.layout.tp > 1 else ""
    near = f"cp={' or '.join(map(str, works))} does" if works else "only cp=1 does"
    return f"cp={degree} does not divide the {said}{cut} into slices of {LEAST_TOKENS} tokens or more; {near}"


def apply(program: Program) -> Program:
    """Leave a rank its slice of what blocks and head do, and write the exchanges of each attention."""
    step = program.step
    if step.layout.cp == 1:
        return program
    local = replace(step, model=slice_model(step.model, step.layout.cp))
    axes = {**program.axes, AXIS: step.layout.cp}
    return replace(program, step=local).with_bodies(lambda key, ops: tuple(_sliced(key, ops, local)), axes=axes)


@remembered
def slice_model(model: ModelSpec, degree: int) -> ModelSpec:
    """Return the model that works on one rank's slice."""
    first = next(index for index, layer in enumerate(model.layers) if layer.is_block)
    layers = tuple(layer.sliced_by(degree) if index >= first else layer for index, layer in enumerate(model.layers))
    return replace(model, layers=layers, logit_rows=model.logit_rows // degree)


def sent_heads(heads: int, query_heads: int, degree: int) -> int:
    """Return how many heads are sent: repeated, each as often, until every rank has one that its queries need."""
    least = math.lcm(heads, degree)
    return least if query_heads % least == 0 else query_heads


def _sliced(key: BodyKey, ops: Ops, step: StepSpec) -> Iterator[Op]:
    for op in ops:
        if op.layer is None:
            yield op
            continue
        layer = step.model.layers[op.layer]
        flops = layer.forward_flops if op.kind is Kind.FORWARD else layer.backward_flops
        yield op.but(flops=flops * step.microbatch_samples)
        yield from _sends(layer, step, op, backward=is_backward(key))


def _sends(layer: LayerSpec, step: StepSpec, after: Op, *, backward: bool) -> Iterator[Op]:
    """Backward undoes the exchanges of the forward, the last one first."""
    exchanges: Iterable[Exchange] = layer.exchanges
    if backward:
        exchanges = (exchange for exchange in reversed(layer.exchanges) if exchange.takes_gradient)
    for exchange in exchanges:
        heads, queries = (
            max(1, count // (step.layout.tp if exchange.is_cut else 1))  # of keys and values ranks may share one
            for count in (exchange.heads, exchange.query_heads)
        )
        tokens_times_size = exchange.elements // exchange.heads // step.layout.cp
        numel = tokens_times_size * sent_heads(heads, queries, step.layout.cp) * step.microbatch_samples
        owner = f"{layer.name}.{exchange.role}"
        op = Op(kind=Kind.ALL_TO_ALL, owner=owner, axis=AXIS, dtype=step.compute_dtype, after=(after.name,))
        yield op.but(is_exposed=True).sized(numel)


@remembered
def _query_heads(model: ModelSpec, tp: int) -> set[int]:
    """Heads that a rank of a tensor cut has of each attention."""
    exchanges = (exchange for layer in model.layers for exchange in layer.exchanges if exchange.role == "query")
    return {one.query_heads // tp if one.is_cut else one.query_heads for one in exchanges}
