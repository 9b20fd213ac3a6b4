"""The shape of a model whose attentions run by torch's math (`run.attention = "math"`): every score exists, in float32 at least.

Of a head with s queries and as many keys of d elements the forward keeps the weights [s, s] and factors of both products [s, d],
three of them, with as many heads of keys as of queries. A backward has the gradients of weights and of scores besides:

    kept       heads x (keys x s + 3 s d)        in float32, under bf16 and fp16 twice as many elements of theirs
    working    heads x 2 keys x s

So it was read from what torch's `scaled_dot_product_attention` saves (`tests/unit/test_kept_scores.py` does it again).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from samestep.models.layer_parts import Product
from samestep.models.layer_spec import LayerSpec
from samestep.models.spec import ModelSpec

KERNELS = 15
"""Operations that torch's math starts in place of one kernel: casts, factors, masks, two products and a softmax."""


def with_kept_scores(model: ModelSpec, is_narrow: bool) -> ModelSpec:
    """Return the model with attentions that keep their scores; `is_narrow` if its activations have two bytes."""
    layers = tuple(_with_kept_scores(layer, 2 if is_narrow else 1) for layer in model.layers)
    return replace(model, layers=layers)


def _with_kept_scores(layer: LayerSpec, width: int) -> LayerSpec:
    """Return a layer of which a score takes as many bytes as `width` elements."""
    attentions = [one for one in layer.products if one.is_attention]
    if not attentions:
        return layer
    kept, kept_cut = _summed(attentions, lambda one: kept_elements(one) * width)
    working, working_cut = _summed(attentions[:1], lambda one: 2 * width * one.rows * one.columns * one.count)
    products = tuple(replace(one, keeps_scores=True) if one.is_attention else one for one in layer.products)
    is_larger = working > layer.working_elements
    return replace(
        layer,
        products=products,
        saved_elements=layer.saved_elements + kept,
        saved_cut_elements=layer.saved_cut_elements + kept_cut,
        working_elements=max(working, layer.working_elements),
        working_cut_elements=working_cut if is_larger else layer.working_cut_elements,
        working_weights=0 if is_larger else layer.working_weights,
        kernels=layer.kernels + KERNELS * len(attentions),
    )


def kept_elements(attention: Product) -> int:
    """Return the elements that the forward of a sample keeps: of weights, queries, keys and values."""
    rows, keys, sizes = attention.rows, attention.columns, attention.inner
    own = rows * sizes // 2 + keys * sizes  # queries, and keys and values together
    return attention.count * (rows * keys + own)


def _summed(attentions: Sequence[Product], elements: Callable[[Product], int]) -> tuple[int, int]:
    """Return the elements of some attentions, and the part of them that a tensor cut divides."""
    return sum(map(elements, attentions)), sum(elements(one) for one in attentions if one.cut)
