"""The `ModelSpec` of a decoder: the counts of its parts (`decoder.py`) as layers and weights, with names, sums and boundaries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from samestep.models.decoder import Counts, Decoder, block_counts, embedding_counts, head_counts
from samestep.models.layer_parts import (
    Boundary,
    BoundaryKind,
    Exchange,
    HeadSpec,
    OtherWork,
    PartialSum,
    Product,
    WorkingSet,
)
from samestep.models.layer_spec import LayerSpec
from samestep.models.param_spec import ParamSpec, Use
from samestep.models.spec import ModelSpec


def _tie_to_head(embedding: ParamSpec, head: int) -> ParamSpec:
    """Return the weight of an embedding that the layer `head` uses too."""
    uses = (Use(layer=0, owner=embedding.name.rpartition(".")[0]), Use(layer=head, owner="lm_head"))
    return replace(embedding, shared=True, aliases=("lm_head.weight",), uses=uses)


def spec(decoder: Decoder, name: str) -> ModelSpec:
    """Return the shape of a decoder: layers, weights, work and activations of one sample."""
    embedding, head = embedding_counts(decoder), head_counts(decoder)
    dense, sparse = block_counts(decoder, False), block_counts(decoder, True) if decoder.experts else None
    roots = dict.fromkeys(f"model.{name.rpartition('.')[0]}" for name, *_ in embedding.params)
    layers = [_layer(decoder, embedding, "embed_tokens", tuple(roots), False)]
    params = list(_params(embedding, 0, "model"))
    work = {False: _layer(decoder, dense, "", (), True)}
    if sparse:
        work[True] = _layer(decoder, sparse, "", (), True)
    for index in range(decoder.layers):
        is_sparse = decoder.is_sparse(index)
        path = f"model.layers.{index}"
        layers.append(_prefix_names(work[is_sparse], path))
        params += _params(sparse if is_sparse and sparse else dense, index + 1, path, is_block=True)
    layers.append(_layer(decoder, head, "norm+lm_head", ("model.norm", "lm_head"), False))
    params += _params(head, decoder.layers + 1, "")
    if decoder.tied:
        params = [_tie_to_head(p, decoder.layers + 1) if p.name.endswith("tokens.weight") else p for p in params]
    if decoder.adapter_rank:
        params = [p if ".lora_" in p.name else replace(p, trainable=False) for p in params]
        layers = [
            replace(
                layer,
                products=tuple(map(_freeze_product, layer.products)),
                # The gradient of the first block's input is not asked for.
                saved_elements=layer.saved_elements - layer.input_elements * (index == 1),
                has_backward=index > 0,
            )
            for index, layer in enumerate(layers)
        ]
    return ModelSpec(
        name=name,
        layers=tuple(layers),
        params=tuple(params),
        cut_refusal="",
        logit_rows=decoder.sequence,
        chunk_refusal="",
        sequence=decoder.sequence,
        sequence_refusal="",
        length=decoder.sequence,
        expert_refusal="",
        slice_refusal="its attention is made of plain products" if decoder.attention == "plain" else "",
    )


def _freeze_product(product: Product) -> Product:
    return replace(product, factors="frozen") if product.factors == "weight" and product.owner != "lora" else product


def _prefix_names(layer: LayerSpec, path: str) -> LayerSpec:
    """Return the layer of a block with the block's path in the names of its modules, sums and dispatches."""

    def placed(parts: tuple[PartialSum, ...]) -> tuple[PartialSum, ...]:
        return tuple(
            replace(part, owner=f"{path}.{part.owner}", beside=tuple(f"{path}.{name}" for name in part.beside))
            for part in parts
        )

    return replace(
        layer,
        name=path,
        modules=(path,),
        forward_sums=placed(layer.forward_sums),
        backward_sums=placed(layer.backward_sums),
        sequence_boundaries=tuple(replace(b, owner=f"{path}.{b.owner}") for b in layer.sequence_boundaries),
        dispatches=tuple(replace(part, owner=f"{path}.{part.owner}") for part in layer.dispatches),
        token_parts=tuple(replace(part, owner=f"{path}.{part.owner}") for part in layer.token_parts),
    )


def _params(block: Counts, layer: int, path: str, is_block: bool = False) -> Iterator[ParamSpec]:
    """Yield the parameters of a layer, by its index and path."""
    for name, shape, cut, partial, experts in block.params:
        full = f"{path}.{name}" if path else name
        if is_block and cut is None:
            partial = partial or "sequence"
        embeds = _TABLES.get(name, "")
        yield ParamSpec(name=full, shape=shape, layer=layer, cut=cut, partial=partial, experts=experts, embeds=embeds)


_TABLES: dict[str, Literal["", "tokens", "positions"]] = {
    "embed_tokens.weight": "tokens",
    "embed_positions.weight": "positions",
}
"""Weights that are tables of embeddings."""


def _layer(decoder: Decoder, counts: Counts, name: str, modules: tuple[str, ...], is_block: bool) -> LayerSpec:
    """Return the layer of the given counts, with its sums and boundaries."""
    stream = decoder.sequence * decoder.hidden
    is_head = name.startswith("norm")
    is_embedding = name.startswith("embed")
    forward, backward, boundaries = _block_exchanges(decoder, counts) if is_block else ((), (), ())
    if is_embedding:
        forward = (PartialSum(owner="model.embed_tokens", elements=stream),)
    elif is_head:
        backward = (PartialSum(owner="lm_head", elements=stream),)
    inputs = 0 if is_embedding else stream
    # A fused loss keeps 2-byte logits and writes their gradient in float32; else three float32 copies are alive.
    loss = decoder.sequence * decoder.vocab // (2 if decoder.fused else 1) if is_head else 0
    return LayerSpec(
        name=name,
        modules=modules,
        is_block=is_block,
        forward_flops=sum(product.flops for product in counts.products),
        output_elements=decoder.sequence * decoder.vocab if is_head else stream,
        saved_elements=round(counts.saved),
        saved_cut_elements=round(counts.saved_cut),
        working=WorkingSet(round(counts.working), round(counts.working_cut)),
        loss_elements=loss,
        loss_working_elements=2 * loss,
        head=_head_spec(decoder, counts) if is_head else None,
        saved_selective_elements=round(min(inputs + counts.results, counts.saved)),
        saved_selective_cut_elements=round(min(counts.results_cut, counts.saved_cut)),
        input_elements=inputs,
        backward_reads_weights=not is_embedding,
        forward_sums=forward,
        backward_sums=backward,
        sequence_boundaries=boundaries,
        products=tuple(counts.products),
        moved=OtherWork(round(counts.moved), round(counts.moved_cut), counts.kernels + len(counts.products)),
        # A compiler leaves experts out of its graphs, and what is fused of the rest is not counted.
        fusible=OtherWork()
        if counts.dispatches
        else OtherWork(round(counts.fusible), round(counts.fusible_cut), counts.fusible_kernels),
        exchanges=tuple(_exchanges(decoder)) if is_block else (),
        dispatches=counts.dispatches,
        token_parts=counts.token_parts,
    )


def _block_exchanges(
    decoder: Decoder, counts: Counts
) -> tuple[tuple[PartialSum, ...], tuple[PartialSum, ...], tuple[Boundary, ...]]:
    """Return the sums of a block under a tensor cut, of its forward and of its backward, and its boundaries under sequence parallelism."""
    stream = decoder.sequence * decoder.hidden
    parts = [("self_attn", "q_proj", "o_proj")]
    if not counts.dispatches:
        parts.append(("mlp", "up_proj", "down_proj"))
    elif decoder.shared_experts:
        parts.append(("mlp.shared_experts", "up_proj", "down_proj"))
    forward = tuple(PartialSum(owner=f"{part}.{last}", elements=stream) for part, _, last in parts)
    backward = tuple(
        PartialSum(owner=f"{part}.{first}", elements=stream, beside=_separable(counts, part, decoder.hidden))
        for part, first, _ in reversed(parts)
    )
    kinds: tuple[BoundaryKind, ...] = ("gather", "scatter")
    owners = [(part, f"{part}.{last}") for part, _, last in parts]
    boundaries = tuple(
        Boundary(owner=owner, elements=stream, kind=kind)
        for pair in owners
        for owner, kind in zip(pair, kinds, strict=True)
    )
    return forward, backward, boundaries


def _separable(counts: Counts, part: str, inner: int) -> tuple[str, ...]:
    """Return the products of a part that are cut by columns and given what the part is given."""
    products = (product for product in counts.products if product.owner.rpartition(".")[0] == part)
    return tuple(
        product.owner
        for product in products
        if product.cut == "columns" and product.inner == inner and product.is_deferrable
    )


def _head_spec(decoder: Decoder, counts: Counts) -> HeadSpec:
    return HeadSpec(
        owner="lm_head",
        rows=decoder.sequence,
        inner=decoder.hidden,
        columns=decoder.vocab,
        saved_elements=round(counts.saved),
        working_elements=decoder.sequence * decoder.hidden,
        is_frozen=decoder.adapter_rank > 0,
    )


def _exchanges(decoder: Decoder) -> Iterator[Exchange]:
    """Yield the all_to_alls of an attention under context parallelism: queries, keys, values and output."""
    keys = decoder.heads if decoder.latent_rank else decoder.kv
    wide = decoder.dim + decoder.rotary_dim if decoder.latent_rank else decoder.dim
    parts: tuple[tuple[Literal["query", "key", "value", "output"], int, int], ...] = (
        ("query", decoder.heads, wide),
        ("key", keys, wide),
        ("value", keys, decoder.dim),
        ("output", decoder.heads, decoder.dim),
    )
    for role, heads, size in parts:
        elements = decoder.sequence * heads * size
        yield Exchange(
            role=role, elements=elements, heads=heads, query_heads=decoder.heads, is_cut=True, is_kept=role == "output"
        )
