"""Sequence parallelism: between the parts that tensor parallelism cuts, each rank keeps its tokens alone.

Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2. Norms, dropouts and residual sums work on each token by itself;
under tp alone every rank of `tp` repeats them on all tokens, and keeps their activations. Here a rank has 1/tp of the
sequence there, and the two boundaries of a cut part become

```
             tp alone                         with the sequence cut
   into it   nothing     ◄ all_reduce         all_gather      ◄ reduce_scatter
   out       all_reduce  ◄ nothing            reduce_scatter  ◄ all_gather
```
which moves the same bytes. A weight between the parts (of a norm, the bias of a row cut) sees a rank's tokens only: its
gradient is summed over `tp` once a step, with the bucket or unit that it lies in. The first block takes its tokens out
of the whole sequence, and behind the last one the whole is put together again, so that the code before and after the
blocks never knows.

Experts and their routers stand between the cut parts too: under tp alone every rank computes all rows, here each its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from samestep.models.spec import LayerSpec, ModelSpec, ParamSpec, remembered
from samestep.program.bodies import BodyKey, is_backward, is_forward
from samestep.program.holding import Holding
from samestep.program.ops import Kind, Op, Ops
from samestep.program.program import Program
from samestep.program.step import StepSpec

AXIS = "tp"


def refusal(step: StepSpec) -> str | None:
    """Refuse where no tensor cut stands beside it, models it would break, and lengths that the degree does not divide."""
    if not step.layout.sequence_parallel:
        return None
    if step.layout.tp == 1:
        return "sequence_parallel cuts the sequence between tensor-cut parts, and tp=1 cuts none: tp=2 works, or leave it out"
    return refuse_model(step.model, step.layout.tp)


def refuse_model(model: ModelSpec, degree: int) -> str | None:
    """Refuse a model whose sequence no layout may cut into so many parts."""
    if model.sequence_refusal:
        return f"sequence_parallel: {model.sequence_refusal}; tp={degree} alone works"
    if model.balanced_experts:
        return (
            "sequence_parallel: the loss that balances experts is counted from whole samples, of which a rank would route "
            f"a part; tp={degree} alone works, and so does a job without it (output_router_logits = false)"
        )
    if model.expert_refusal and any(layer.dispatches for layer in model.layers):
        return (
            f"sequence_parallel: the experts of {model.name} would be given a part of the tokens, and "
            f"{model.expert_refusal}; tp={degree} alone works"
        )
    if model.sequence % degree:
        return (
            f"sequence_parallel: tp={degree} does not divide the {model.sequence} tokens of a sample; "
            f"{model.sequence // degree * degree} tokens work, and so does tp={degree} alone"
        )
    return None


def apply(program: Program) -> Program:
    """Put gathers and scatters in the place of the blocks' sums."""
    step = program.step
    if not step.layout.sequence_parallel:
        return program
    model = _cut(step.model, step.layout.tp)
    local = replace(step, model=model).hold(_hold)
    return replace(program, step=local).with_bodies(lambda key, ops: tuple(_with_boundaries(key, ops, local)))


def _hold(param: ParamSpec, holding: Holding) -> Holding:
    """A weight that sees the tokens of one rank has the gradient of a part."""
    return holding.partial(AXIS) if param.partial == "sequence" else holding


@remembered
def _cut(model: ModelSpec, degree: int) -> ModelSpec:
    """Divide what blocks keep and hand on, but for the sequences that were gathered for their cut parts."""
    last = max(index for index, layer in enumerate(model.layers) if layer.is_block)
    layers = tuple(
        _cut_block(layer, degree, index == last) if layer.is_block else layer
        for index, layer in enumerate(model.layers)
    )
    return replace(model, layers=layers)


def _cut_block(layer: LayerSpec, degree: int, is_last: bool) -> LayerSpec:
    gathered = sum(boundary.elements for boundary in layer.sequence_boundaries if boundary.kind == "gather")
    kept = layer.saved_cut_elements + min(gathered, layer.saved_elements - layer.saved_cut_elements)
    selective = layer.saved_selective_cut_elements
    handed = layer.output_elements  # as much as it is given of a sequence; positions and masks stay whole
    products = tuple(p.sliced_by(degree) if p.is_between else p for p in layer.products)
    whole, mine = (sum(product.flops for product in parts) for parts in (layer.products, products))
    return replace(
        layer,
        forward_flops=layer.forward_flops * mine // whole if whole else layer.forward_flops,
        products=products,
        dispatches=tuple(replace(dealing, rows=-(-dealing.rows // degree)) for dealing in layer.dispatches),
        input_elements=layer.input_elements - handed + handed // degree,
        output_elements=handed if is_last else handed // degree,
        saved_elements=kept + (layer.saved_elements - kept) // degree,
        saved_norm_elements=layer.saved_norm_elements // degree,
        working_elements=layer.working_cut_elements + (layer.working_elements - layer.working_cut_elements) // degree,
        saved_selective_elements=selective + (layer.saved_selective_elements - selective) // degree,
        moved_elements=layer.moved_cut_elements + (layer.moved_elements - layer.moved_cut_elements) // degree,
    )


def _with_boundaries(key: BodyKey, ops: Ops, step: StepSpec) -> Iterator[Op]:
    if not (is_forward(key) or is_backward(key)):
        yield from ops
        return
    layers = step.model.layers
    blocks = [index for index, layer in enumerate(layers) if layer.is_block]
    boundaries = _forward if is_forward(key) else _backward
    here = 0
    for op in ops:
        here = here if op.layer is None else op.layer
        if op.axis == AXIS and layers[here].is_block:
            continue
        yield op
        if op.layer in blocks:
            yield from boundaries(step, layers[here], op, first=here == blocks[0], last=here == blocks[-1])


def _forward(step: StepSpec, layer: LayerSpec, after: Op, *, first: bool, last: bool) -> Iterator[Op]:
    for boundary in layer.sequence_boundaries:
        kind = Kind.ALL_GATHER if boundary.kind == "gather" else Kind.REDUCE_SCATTER
        yield _exchange(kind, boundary.owner, boundary.elements, step, after)
    if last:
        yield _exchange(Kind.ALL_GATHER, layer.modules[0], layer.output_elements, step, after)


def _backward(step: StepSpec, layer: LayerSpec, after: Op, *, first: bool, last: bool) -> Iterator[Op]:
    for boundary in reversed(layer.sequence_boundaries):
        if boundary.has_gradient:
            kind = Kind.REDUCE_SCATTER if boundary.kind == "gather" else Kind.ALL_GATHER
            yield _exchange(kind, boundary.owner, boundary.elements, step, after)
    if first and any(param.trainable for param in _before_blocks(step)):
        whole = layer.output_elements * (1 if last else step.layout.tp)
        yield _exchange(Kind.ALL_GATHER, layer.modules[0], whole, step, after)


def _before_blocks(step: StepSpec) -> Iterator[ParamSpec]:
    first = next(index for index, layer in enumerate(step.model.layers) if layer.is_block)
    return (param for param in step.model.params if param.layer < first)


def _exchange(kind: Kind, owner: str, elements: int, step: StepSpec, after: Op) -> Op:
    op = Op(kind=kind, owner=owner, axis=AXIS, dtype=step.compute_dtype, after=(after.name,), is_exposed=True)
    return op.sized(elements * step.microbatch_samples)
