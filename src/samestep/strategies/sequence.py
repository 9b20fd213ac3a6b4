"""Sequence parallelism: between the tensor-parallel parts of a block, each rank of `tp` works on a part of the tokens.

Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2. Norms, dropouts and residual sums work on single tokens; under
tp alone every rank of `tp` computes them for all tokens and keeps their activations. With sequence parallelism a rank
has 1/tp of the sequence there, and the two boundaries of a tensor-cut part become

```
             tp alone                         with sequence parallelism        forward ◄ backward
   entry     nothing     ◄ all_reduce         all_gather      ◄ reduce_scatter
   exit      all_reduce  ◄ nothing            reduce_scatter  ◄ all_gather
```
which moves the same bytes. A part with more than cut weights, or whose code gathers features within it, computes the whole
sequence as under tp alone, sums included: it is gathered before (the backward keeps a rank's tokens of the gradient, which
every rank has whole), and a rank keeps its tokens of what the part returns (the backward gathers). A weight between the parts (of a norm, or the bias of a row-cut product) sees a rank's
tokens only, so its gradient is summed over `tp` once a step, with its bucket or unit. The first block takes a rank's
tokens out of the whole sequence, and the whole sequence is gathered after the last block, so that code before and after
the blocks is unchanged. With `cp` all of this is done with a slice of the sequence, of which a rank of `tp` has 1/tp.

Experts and their routers that no such part holds are between them too: under tp alone every rank computes all rows, here
only its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from samestep.errors import LayoutError
from samestep.models.layer_spec import LayerSpec
from samestep.models.param_spec import ParamSpec
from samestep.models.spec import ModelSpec, cache_by_model, is_below
from samestep.program.holding import Holding
from samestep.program.ops import BodyKey, Op, OpKind, Ops, is_backward, is_forward
from samestep.program.program import Program
from samestep.program.step import StepSpec

AXIS = "tp"


def refusal(step: StepSpec) -> LayoutError | None:
    """Return why the layout, the model or the length of its samples does not allow sequence parallelism."""
    if step.layout.tp == 1:
        return LayoutError(
            "sequence-parallel-needs-tp",
            "sequence_parallel cuts the sequence between tensor-cut parts, and tp=1 cuts none. Use tp=2, or leave it out",
        )
    if step.layout.recompute != "none" and (unclear := _block_that_keeps(step.model)):
        return LayoutError(
            "sequence-parallel-unsupported",
            f"sequence_parallel: {unclear} keeps something for its backward after its last sum, in a part that computes on whole sequences. There, recompute={step.layout.recompute} is not supported. Use recompute=none, or "
            f"tp={step.layout.tp} alone",
        )
    return refuse_model(step.model, step.layout.tp) or _refuse_slices(step)


def _refuse_slices(step: StepSpec) -> LayoutError | None:
    """Return why the slices of `cp` cannot be cut once more."""
    model, cp, tp = step.model, step.layout.cp, step.layout.tp
    if cp > 1 and (part := next((part.owner for layer in model.layers for part in layer.gathered_parts), "")):
        return LayoutError(
            "sequence-parallel-unsupported",
            f"sequence_parallel: {part} computes all tokens on every rank of cp={cp}. Use tp={tp} alone, or cp=1",
        )
    if cp == 1 or model.length % cp or model.length // cp % tp == 0:
        return None
    return LayoutError(
        "sequence-parallel-indivisible",
        f"sequence_parallel: tp={tp} does not divide the {model.length // cp} tokens of a slice that cp={cp} leaves a rank. Use "
        f"{model.length // (cp * tp) * cp * tp} tokens, or tp={tp} alone",
    )


@cache_by_model
def _block_that_keeps(model: ModelSpec) -> str:
    """Return the name of the first layer that may keep something after its last sum; empty if there is none."""
    return next((layer.name for layer in model.layers if _keeps_behind(layer)), "")


def _keeps_behind(layer: LayerSpec) -> bool:
    """Return whether a block may keep something after the last sum of a part that is split at its end, or has no sum there."""
    ends = [
        sequence_boundary.owner
        for sequence_boundary in layer.sequence_boundaries[-1:]
        if sequence_boundary.kind == "split"
    ]
    has_sum = any(is_below(part.owner, end) for part in layer.forward_sums for end in ends)
    return bool(ends) and (layer.repeats_last_sum or not has_sum)


def refuse_model(model: ModelSpec, degree: int) -> LayoutError | None:
    """Return why no layout may divide the model's sequence among `degree` ranks."""
    if model.sequence_refusal:
        return LayoutError(
            "sequence-parallel-unsupported", f"sequence_parallel: {model.sequence_refusal}. Use tp={degree} alone"
        )
    if model.balanced_experts:
        return LayoutError(
            "sequence-parallel-unsupported",
            f"sequence_parallel: the loss that balances experts is counted from whole samples, and a rank would route a part of one. Use tp={degree} alone, or a job without it (output_router_logits = false)",
        )
    if model.expert_refusal and any(layer.dispatches for layer in model.layers):
        return LayoutError(
            "sequence-parallel-unsupported",
            f"sequence_parallel: the experts of {model.name} would be given a part of the tokens, and "
            f"{model.expert_refusal}. Use tp={degree} alone",
        )
    if model.sequence % degree:
        return LayoutError(
            "sequence-parallel-indivisible",
            f"sequence_parallel: tp={degree} does not divide the {model.sequence} tokens of a sample. Use "
            f"{model.sequence // degree * degree} tokens, or tp={degree} alone",
        )
    return None


def apply(program: Program) -> Program:
    """Return the program with all_gathers and reduce_scatters in the place of the blocks' all_reduces."""
    step = program.step
    model = _cut(step.model, step.layout.tp)
    local = step.but(model=model).hold(_hold)
    return replace(program, step=local).with_bodies(lambda key, ops: tuple(_with_boundaries(key, ops, local)))


def _hold(param: ParamSpec, holding: Holding) -> Holding:
    """Return the holding of a weight whose gradient is partial if it sees the tokens of one rank only."""
    return holding.partial(AXIS) if param.partial == "sequence" else holding


@cache_by_model
def _cut(model: ModelSpec, degree: int) -> ModelSpec:
    """Return the model whose blocks keep and pass on 1/tp of the sequence, except for gathered inputs of cut parts."""
    last = max(index for index, layer in enumerate(model.layers) if layer.is_block)
    layers = tuple(
        _cut_block(layer, degree, index == last) if layer.is_block else layer
        for index, layer in enumerate(model.layers)
    )
    return replace(model, layers=layers)


def _cut_block(layer: LayerSpec, degree: int, is_last: bool) -> LayerSpec:
    """Return one rank's part of a block; the output of the last block is gathered."""
    gathered = sum(boundary.elements for boundary in layer.sequence_boundaries if boundary.kind == "gather")
    saved = layer.saved_cut_elements + min(gathered, layer.saved_elements - layer.saved_cut_elements)
    whole_parts = layer.whole_parts
    # A product that is cut along its inner size is a summand of the whole sequence.
    summands = sum(p.result_elements for p in layer.products if p.cut == "inner" and not p.is_between)
    selective = min(layer.saved_selective_elements, layer.saved_selective_cut_elements + summands)
    passed = layer.output_elements  # as large as the sequence in its input; positions and masks stay whole
    products = tuple(p.sliced_by(degree) if p.is_between else p for p in layer.products)
    flops, flops_cut = (sum(product.flops for product in parts) for parts in (layer.products, products))
    dispatches = tuple(
        part if _is_within(part.owner, whole_parts) else replace(part, rows=-(-part.rows // degree))
        for part in layer.dispatches
    )
    passing = replace(
        layer,
        forward_flops=layer.forward_flops * flops_cut // flops if flops else layer.forward_flops,
        products=products,
        dispatches=dispatches,
        input_elements=layer.input_elements - passed + passed // degree,
        output_elements=passed if is_last else passed // degree,
    )
    if whole_parts:  # at most what tp alone keeps and moves: how much of it these parts do is not known
        return passing
    return replace(
        passing,
        saved_elements=saved + (layer.saved_elements - saved) // degree,
        saved_norm_elements=layer.saved_norm_elements // degree,
        input_norm_elements=layer.input_norm_elements // degree,
        working=layer.working.divided_by(degree),
        norm_working=layer.norm_working.divided_by(degree),
        saved_selective_elements=selective + (layer.saved_selective_elements - selective) // degree,
        moved=layer.moved.divided_by(degree),
        fusible=layer.fusible.divided_by(degree),
    )


def _with_boundaries(key: BodyKey, ops: Ops, step: StepSpec) -> Iterator[Op]:
    """Yield the ops of a body with the collectives of the boundaries instead of those of the blocks."""
    if not (is_forward(key) or is_backward(key)):
        yield from ops
        return
    layers = step.model.layers
    blocks = [index for index, layer in enumerate(layers) if layer.is_block]
    boundaries = _forward if is_forward(key) else _backward
    sums = _sums_of(ops)
    here = 0
    for op in ops:
        here = here if op.layer is None else op.layer
        if op.axis == AXIS and layers[here].is_block:
            continue
        yield op
        if op.layer in blocks:
            ends = (here == blocks[0], here == blocks[-1])
            yield from boundaries(step, layers[here], op, sums.get(here, []), first=ends[0], last=ends[1])


def _sums_of(ops: Ops) -> dict[int, list[Op]]:
    """Return the collectives over `tp` that follow each layer's compute op."""
    sums: dict[int, list[Op]] = {}
    here = 0
    for op in ops:
        here = here if op.layer is None else op.layer
        if op.axis == AXIS:
            sums.setdefault(here, []).append(op)
    return sums


def _is_within(path: str, parts: Collection[str]) -> bool:
    return any(is_below(path, part) for part in parts)


def _forward(step: StepSpec, layer: LayerSpec, after: Op, sums: list[Op], *, first: bool, last: bool) -> Iterator[Op]:
    """Yield the collectives of a block's boundaries in its forward, and of its parts that compute as under tp alone."""
    for boundary in layer.sequence_boundaries:
        if boundary.kind == "split":
            yield from (op for op in sums if is_below(op.owner, boundary.owner))
            continue
        kind = OpKind.REDUCE_SCATTER if boundary.kind == "scatter" else OpKind.ALL_GATHER
        yield _exchange(kind, boundary.owner, boundary.elements, step, after).but(place=boundary.place)
    if last:
        yield _exchange(OpKind.ALL_GATHER, layer.modules[0], layer.output_elements, step, after)


def _backward(step: StepSpec, layer: LayerSpec, after: Op, sums: list[Op], *, first: bool, last: bool) -> Iterator[Op]:
    """Yield the collectives of a block's boundaries in its backward, and of its parts that compute as under tp alone."""
    for boundary in reversed(layer.sequence_boundaries):
        if boundary.has_gradient and boundary.kind != "join":
            if boundary.kind == "gather":
                sent = _exchange(OpKind.REDUCE_SCATTER, boundary.owner, boundary.elements, step, after)
                within = (part for part in layer.backward_sums if is_below(part.owner, boundary.owner))
                beside = layer.separable_products([path for part in within for path in part.beside])
                yield sent.but(beside=beside, place=boundary.place)
            else:
                gathered = _exchange(OpKind.ALL_GATHER, boundary.owner, boundary.elements, step, after)
                yield gathered.but(place=boundary.place)
        if boundary.kind == "split":
            yield from (op for op in sums if is_below(op.owner, boundary.owner))
    if first and any(param.trainable for param in _before_blocks(step)):
        elements = layer.output_elements * (1 if last else step.layout.tp)
        yield _exchange(OpKind.ALL_GATHER, layer.modules[0], elements, step, after)


def _before_blocks(step: StepSpec) -> Iterator[ParamSpec]:
    """Yield the weights of the layers before the first block."""
    first = next(index for index, layer in enumerate(step.model.layers) if layer.is_block)
    return (param for param in step.model.params if param.layer < first)


def _exchange(kind: OpKind, owner: str, elements: int, step: StepSpec, after: Op) -> Op:
    op = Op(kind=kind, owner=owner, axis=AXIS, dtype=step.compute_dtype, after=(after.name,), is_exposed=True)
    return op.sized(elements * step.microbatch_samples)
