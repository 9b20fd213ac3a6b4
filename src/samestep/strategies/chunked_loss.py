"""Logits and cross entropy in chunks of tokens, so that the logits of a micro-batch never exist whole.

A head with V classes makes V elements of each token's few thousand features, and a cross entropy has them three times over,
once in float32 at least: at 128k classes more than all blocks of a small model keep. With `loss_chunk=C` the forward makes
the logits of C tokens at a time, and keeps one number of each token; the backward makes them once more:

```
loss_chunk=C    forward    logits of C tokens, their log-sum-exp | the next C | ...
                backward   logits of C tokens again, their gradient, that of the head's input and weight | the next C | ...
```
So the head's product is computed three times in a backward instead of twice, and its weight's gradient is added up over the
chunks. Nothing else changes: a rank sends what it sends without chunks (Wijmans et al. 2024, arXiv:2411.09009).
"""

from __future__ import annotations

from dataclasses import replace

from samestep.errors import LayoutError
from samestep.models.layer_spec import LayerSpec
from samestep.models.spec import ModelSpec, cache_by_model
from samestep.program.ops import OpKind
from samestep.program.program import Program
from samestep.program.step import StepSpec


def refusal(step: StepSpec) -> LayoutError | None:
    """Return why the logits and their loss cannot be computed in chunks."""
    chunk, model = step.layout.loss_chunk, step.model
    if chunk is None:
        return None
    if model.chunk_refusal:
        return LayoutError(
            "loss-chunk-unsupported", f"loss_chunk={chunk}: {model.chunk_refusal}. Use a layout without loss_chunk"
        )
    if step.layout.tp > 1 and not step.cuts_loss and _is_gathered(model, step.layout.tp):
        return LayoutError(
            "loss-chunk-unsupported",
            f"loss_chunk={chunk}: tp={step.layout.tp} cuts the head by vocabulary, and a loss of one's own is given whole "
            "logits. Set train.loss = 'cross_entropy', or tp=1 or a layout without loss_chunk",
        )
    return None


def _is_gathered(model: ModelSpec, degree: int) -> bool:
    """Return whether the head is cut, so that its logits are gathered for a loss that needs them whole."""
    head = model.layers[-1].head
    owned = (
        param
        for param in model.params
        for name in (param.name, *param.aliases)
        if head and name.startswith(f"{head.owner}.")
    )
    return any(param.cut is not None and param.cut.groups % degree == 0 for param in owned)


def apply(program: Program) -> Program:
    """Return the program of a step that makes its logits in chunks."""
    step = program.step
    chunk = step.layout.loss_chunk
    if chunk is None:
        return program
    local = step.but(model=chunked_model(step.model, chunk))
    last = len(local.model.layers) - 1
    flops = local.model.layers[last].backward_flops * local.microbatch_samples
    return replace(program, step=local).with_bodies(
        lambda _, ops: tuple(
            op.but(flops=flops) if op.layer == last and op.kind is OpKind.BACKWARD else op for op in ops
        )
    )


@cache_by_model
def chunked_model(model: ModelSpec, chunk: int) -> ModelSpec:
    """Return the model whose last layer keeps no logits."""
    return replace(model, layers=(*model.layers[:-1], _without_logits(model.layers[-1], chunk)))


def _without_logits(last: LayerSpec, chunk: int) -> LayerSpec:
    head = last.head
    assert head is not None, "a model without a head is rejected"
    products = tuple(
        replace(product, chunk_rows=chunk) if product.owner == head.owner else product for product in last.products
    )
    return replace(
        last,
        products=products,
        output_elements=head.rows * head.inner,
        saved_elements=head.saved_elements,
        saved_cut_elements=0,
        working=replace(last.working, elements=head.working_elements, cut_elements=0),
        loss_elements=0,
        loss_working_elements=0,
    )
