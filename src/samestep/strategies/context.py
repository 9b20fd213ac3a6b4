"""Context parallelism: every rank of `cp` has a slice of each sequence, and within attention some heads of all tokens.

DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509). Operations on single tokens work on a slice unchanged.
Attention needs all tokens, but one head at a time, so four all_to_alls (of queries, keys, values and the output)
exchange tokens for heads. With N ranks, T tokens and A heads of size D:

```
              tokens T/N, all heads                    all tokens, heads A/N
    rank 0    [ q k v of slice 0 ]  ── all_to_all ──►  [ q k v of heads 0 1 ]  attention
    rank 1    [ q k v of slice 1 ]  ◄── all_to_all ──  [ q k v of heads 2 3 ]  attention
```
Each moves T A D / N elements a rank, of which N-1 of N parts leave it; backward has the same four in the other
direction. Every rank has all rows of a causal mask for its heads, so the work is balanced without cutting the sequence
into stripes. Keys and values with fewer heads than ranks are repeated before they are sent. The model's own code
computes embeddings, positions and masks of the whole sequence on every rank; slicing starts at the first block and ends
in the loss, a sum over tokens. Ranks of `cp` hold equal weights and see different tokens, so for gradients `cp` is one
more data axis (`Layout`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from samestep.models.layer_spec import Exchange, LayerSpec
from samestep.models.spec import ModelSpec, cache_by_model, gradients_within, is_below
from samestep.program.bodies import BodyKey, is_backward
from samestep.program.ops import Op, OpKind, Ops
from samestep.program.program import Program
from samestep.program.step import StepSpec

AXIS = "cp"
LEAST_TOKENS = 2
"""Smallest number of tokens in a slice: a model may take a single token for a step of generation."""


def refusal(step: StepSpec) -> str | None:
    """Return why the model does not work on slices, or why the degree does not divide its tokens or heads."""
    degree, model = step.layout.cp, step.model
    if degree == 1:
        return None
    if step.layout.sequence_parallel:
        return f"cp={degree} and sequence_parallel both cut the sequence: cp={degree} alone works, and so does cp=1"
    if step.compiles_blocks:
        return (
            f"cp={degree} exchanges heads for tokens in the middle of a block, and run.compile = 'blocks' makes one graph "
            "of a block: cp=1 works, and so does run.compile = 'none'"
        )
    if at := model.picks_at:
        return f"cp={degree}: shapes or branches at {at} depend on values: cp=1 works"
    if at := _looks_on_slices(model):
        return (
            f"cp={degree}: shapes or branches at {at} depend on values, and its code works on slices: the branch in a module of its "
            "own that is given no tokens works, and so does cp=1"
        )
    if model.differentiates_at and any(layer.exchanges for layer in model.layers):
        return f"cp={degree}: {gradients_within(model)}; cp=1 works"
    if model.slice_refusal:
        return f"cp={degree} slices sequences: {model.slice_refusal}; cp=1 works"
    if not step.cuts_loss:
        return (
            f"cp={degree} slices sequences, and only the cross entropy is known to be a sum over slices: "
            "train.loss = 'cross_entropy' works, and so does cp=1"
        )
    heads = _query_heads(model, step.layout.tp)
    most = math.gcd(model.length, *heads)
    if most % degree == 0 and model.length // degree >= LEAST_TOKENS:
        return None
    works = [n for n in range(2, most + 1) if most % n == 0 and model.length // n >= LEAST_TOKENS]
    sizes = " and ".join([f"{model.length} tokens", *(f"{count} heads" for count in sorted(heads))])
    cut = f" that tp={step.layout.tp} leaves a rank" if step.layout.tp > 1 else ""
    near = f"cp={' or '.join(map(str, works))} does" if works else "only cp=1 does"
    return f"cp={degree} does not divide the {sizes}{cut} into slices of {LEAST_TOKENS} tokens or more; {near}"


def _looks_on_slices(model: ModelSpec) -> str:
    """Return a module whose code looks at values and runs blocks, or is one; empty if none is."""
    blocks = [path for layer in model.layers if layer.is_block for path in layer.modules]
    found = next((path for path in model.looks_in if any(is_below(block, path) for block in blocks)), None)
    return "" if found is None else found or "the model itself"


def apply(program: Program) -> Program:
    """Return the program of a rank's slice of the blocks and the head, with the all_to_alls of each attention."""
    step = program.step
    if step.layout.cp == 1:
        return program
    local = step.but(model=slice_model(step.model, step.layout.cp))
    axes = {**program.axes, AXIS: step.layout.cp}
    return replace(program, step=local).with_bodies(lambda key, ops: tuple(_slice_ops(key, ops, local)), axes=axes)


@cache_by_model
def slice_model(model: ModelSpec, degree: int) -> ModelSpec:
    """Return the local model of a rank that works on a slice of the sequence."""
    first = next(index for index, layer in enumerate(model.layers) if layer.is_block)
    layers = tuple(layer.sliced_by(degree) if index >= first else layer for index, layer in enumerate(model.layers))
    return replace(model, layers=layers, logit_rows=model.logit_rows // degree)


def num_sent_heads(heads: int, query_heads: int, degree: int) -> int:
    """Return the number of heads that are sent: repeated equally until every rank has those that its queries need."""
    least = math.lcm(heads, degree)
    return least if query_heads % least == 0 else query_heads


def _slice_ops(key: BodyKey, ops: Ops, step: StepSpec) -> Iterator[Op]:
    """Yield the ops of a body with a slice's FLOPs, and the all_to_alls of each layer after its compute."""
    for op in ops:
        if op.layer is None:
            yield op
            continue
        layer = step.model.layers[op.layer]
        flops = layer.forward_flops if op.kind is OpKind.FORWARD else layer.backward_flops
        yield op.but(flops=flops * step.microbatch_samples)
        yield from _exchanges(layer, step, op, backward=is_backward(key))


def _exchanges(layer: LayerSpec, step: StepSpec, after: Op, *, backward: bool) -> Iterator[Op]:
    """Yield the all_to_alls of a layer; backward has those that take a gradient, in reverse order."""
    exchanges: Iterable[Exchange] = layer.exchanges
    if backward:
        exchanges = (exchange for exchange in reversed(layer.exchanges) if exchange.takes_gradient)
    for exchange in exchanges:
        heads, queries = (
            max(1, count // (step.layout.tp if exchange.is_cut else 1))  # ranks may share a head of keys and values
            for count in (exchange.heads, exchange.query_heads)
        )
        slice_numel_per_head = exchange.elements // exchange.heads // step.layout.cp
        numel = slice_numel_per_head * num_sent_heads(heads, queries, step.layout.cp) * step.microbatch_samples
        owner = f"{layer.repeats or layer.name}.{exchange.role}"
        op = Op(kind=OpKind.ALL_TO_ALL, owner=owner, axis=AXIS, dtype=step.compute_dtype, after=(after.name,))
        yield op.but(is_exposed=True).sized(numel)


@cache_by_model
def _query_heads(model: ModelSpec, tp: int) -> set[int]:
    """Return the numbers of query heads of the model's attentions on one rank of `tp`."""
    exchanges = (exchange for layer in model.layers for exchange in layer.exchanges if exchange.role == "query")
    return {one.query_heads // tp if one.is_cut else one.query_heads for one in exchanges}
