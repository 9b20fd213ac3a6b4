"""Parts of blocks that act on each token by itself, in chunks of tokens: what an MLP makes inside never exists whole.

An MLP keeps some 3.5 to 4 times as many features as its input has, twice over where it is gated, and of long sequences that is
about half of what a block saves. With `mlp_chunk=C` its forward computes C tokens at a time and keeps its input alone; its backward makes
each chunk once more, then its gradients, which are added up in master precision:

```
mlp_chunk=C     forward    the output of C tokens | of the next C | ...
                backward   C tokens again, the gradient of their input, that of the weights | the next C | ...
```
So each of its products is computed once more; a block that is recomputed computes them twice more. Nothing that ranks send changes
(the tokens of a chunk: Dao et al. 2022, arXiv:2205.14135, do the same for attention; Liu et al. 2023, arXiv:2305.19370, for the MLP).

That a part acts on each token by itself is what the proof of `cp` shows: blocks work on slices of the sequence, attention aside
(`independence/token_slices.py`), and the part has no attention in it.
"""

from __future__ import annotations

from dataclasses import replace

from samestep.errors import LayoutError
from samestep.models.layer_parts import Product, TokenPart
from samestep.models.layer_spec import LayerSpec
from samestep.models.spec import ModelSpec, cache_by_model, gradients_within, is_below
from samestep.program.ops import OpKind
from samestep.program.program import Program
from samestep.program.step import StepSpec, one_graph


def refusal(step: StepSpec) -> LayoutError | None:
    """Return why no part of a block can be computed in chunks of tokens."""
    chunk, model, layout = step.layout.mlp_chunk, step.model, step.layout
    if chunk is None:
        return None
    works = "Use a layout without mlp_chunk"
    if layout.tp > 1:
        return LayoutError(
            "mlp-chunk-unsupported",
            f"mlp_chunk={chunk}: tp={layout.tp} cuts the inner part of an MLP already, and would send each chunk by itself. {works}",
        )
    if one_graph(step):
        return LayoutError(
            "mlp-chunk-unsupported",
            f"mlp_chunk={chunk} computes a part of a block in a loop, and run.compile makes one graph of it. Set run.compile = 'none'",
        )
    if model.differentiates_at:
        return LayoutError(
            "mlp-chunk-unsupported",
            f"mlp_chunk={chunk} makes one backward of each chunk, and {gradients_within(model)}. {works}",
        )
    if model.slice_refusal:
        return LayoutError(
            "mlp-chunk-unsupported",
            f"mlp_chunk={chunk} needs blocks that work token by token: {model.slice_refusal}. {works}",
        )
    if not any(chunked_parts(model, layer) for layer in model.layers):
        return LayoutError(
            "mlp-chunk-unsupported",
            f"mlp_chunk={chunk}: {model.name} has no part of a block that keeps more than its input and draws no random numbers. {works}",
        )
    return None


def chunked_parts(model: ModelSpec, layer: LayerSpec) -> tuple[TokenPart, ...]:
    """Return the parts of a layer that can be computed in chunks: no mask is drawn in them, and no token is computed of others."""
    unlike = {mask.owner for mask in model.masks} | {move.owner for move in layer.token_moves}
    return tuple(
        part
        for part in layer.token_parts
        if layer.is_block
        and not layer.is_gathered(part.owner)
        and not any(is_below(path, part.owner) for path in unlike)
    )


def chunked_owners(model: ModelSpec) -> frozenset[str]:
    """Return the paths of the modules that a model as `chunked_model` returns it computes in chunks."""
    return frozenset(part.owner for layer in model.layers if layer.chunk_tokens for part in layer.token_parts)


def apply(program: Program) -> Program:
    """Return the program of a step that computes parts of blocks in chunks."""
    step, chunk = program.step, program.step.layout.mlp_chunk
    if chunk is None:
        return program
    local = step.but(model=chunked_model(step.model, chunk))
    flops = {
        index: layer.backward_flops * local.microbatch_samples
        for index, layer in enumerate(local.model.layers)
        if layer.chunk_tokens
    }
    return replace(program, step=local).with_bodies(
        lambda _, ops: tuple(
            op.but(flops=flops[op.layer]) if op.kind is OpKind.BACKWARD and op.layer in flops else op for op in ops
        )
    )


@cache_by_model
def chunked_model(model: ModelSpec, chunk: int) -> ModelSpec:
    """Return the model whose blocks keep the inputs of such parts alone."""
    return replace(model, layers=tuple(_chunked(layer, chunked_parts(model, layer), chunk) for layer in model.layers))


def _chunked(layer: LayerSpec, parts: tuple[TokenPart, ...], chunk: int) -> LayerSpec:
    if not parts:
        return replace(layer, token_parts=())

    def product(p: Product) -> Product:
        return replace(p, chunk_rows=chunk) if any(_is_of(p, part) for part in parts) else p

    return replace(
        layer,
        products=tuple(map(product, layer.products)),
        saved_elements=layer.saved_elements - sum(part.saved_elements for part in parts),
        saved_norm_elements=layer.saved_norm_elements - sum(part.saved_norm_elements for part in parts),
        saved_selective_elements=max(
            layer.input_elements, layer.saved_selective_elements - sum(part.results for part in parts)
        ),
        working=replace(layer.working, elements=max(part.other_working_elements for part in parts)),
        norm_working=layer.norm_working.plus(
            sum(part.saved_elements for part in parts), wide_elements=sum(part.saved_norm_elements for part in parts)
        ),
        token_parts=parts,
        chunk_tokens=chunk,
    )


def _is_of(product: Product, part: TokenPart) -> bool:
    """Return whether a product is computed in a part; one of a preset is named from its block on."""
    holder = product.owner.rpartition(".")[0]
    return is_below(product.owner, part.owner) or (bool(holder) and part.owner.endswith(f".{holder}"))
