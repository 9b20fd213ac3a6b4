"""The matrix products of a block that recompute repeats before its backward, and those whose results it has kept.

A repeated forward ends with the last tensor that the backward asks for, which is usually before the last product, whose result is
only added to the stream: that one is neither kept nor repeated. Of those before it, in the order of the forward,

                      q     k     v     attention     o     gate     up     down
    selective         kept  kept  kept  kept          kept  kept     kept   not asked for
    alternate               kept        kept          kept           kept   not asked for
    full, offload                                                           not asked for

`selective` keeps all, and repeats only cheap operations; `alternate` keeps every second one, counted back from the last, and what
fused attentions return. It repeats scores of attentions without a fused kernel: they are large and cheap. A layer counts by its
operations in every forward anew, so that all ranks and micro-batches keep the same ones.

A function with a backward of its own (a ring, an MLP in chunks) saves what its backward needs after its forward, all of which a
repeated forward repeats.
"""

from __future__ import annotations

from typing import NamedTuple

from samestep.models.layer_parts import Product
from samestep.models.layer_spec import LayerSpec
from samestep.program.step import StepSpec, repeats_in_graphs

KEEPS_PRODUCTS = ("selective", "alternate")
"""The values of `recompute` that keep results of products."""


class KeptProducts(NamedTuple):
    """The rule by which results of a block's counted products are kept: those that are neither attentions nor batched, by their number."""

    every: int
    """1 if all are kept, 2 if every second one is."""
    repeated: int
    """Number of them that a repeated forward does not end before."""
    total: int
    keeps_last: bool = False
    """Whether the others are kept: a graph of both passes might repeat them where what follows the block asks for its output."""

    def keeps(self, number: int) -> bool:
        """Return whether the result of a product is kept, by its number in the forward, from 0.

        A block may run more of them than the traced one, as where values decide which experts run: the count goes on.
        """
        if self.repeated <= number < self.total:
            return self.keeps_last
        return (self.repeated - 1 - number) % self.every == 0


def kept_products(step: StepSpec, layer: LayerSpec, products: tuple[Product, ...] | None = None) -> KeptProducts:
    """Return which results are kept of a layer's products, or of those of them that one of its modules runs."""
    products = layer.products if products is None else products
    counted = [product for product in products if _is_counted(product)]
    repeats_all = _repeats_all(step, layer)
    repeated = sum(repeats_all or product.is_repeated for product in counted)
    every = 2 if step.layout.recompute == "alternate" else 1
    return KeptProducts(every, repeated, len(counted), keeps_last=repeats_in_graphs(step))


def repeated_products(step: StepSpec, layer: LayerSpec) -> tuple[Product, ...]:
    """Return the products that a layer's repeated forward computes again."""
    repeats_all = _repeats_all(step, layer)
    dropped = _dropped(step, layer)
    return tuple(
        product
        for product, is_dropped in zip(layer.products, dropped, strict=True)
        if is_dropped and (repeats_all or product.is_repeated)
    )


def repeated_flops(step: StepSpec, layer: LayerSpec) -> int:
    """Return the FLOPs of a sample's repeated forward, an estimate where the products are not known."""
    first, again = (sum(product.flops for product in part) for part in (layer.products, repeated_products(step, layer)))
    if not first:
        return {"selective": 0, "alternate": layer.forward_flops // 2}.get(step.layout.recompute, layer.forward_flops)
    return layer.forward_flops * again // first


def dropped_elements(step: StepSpec, layer: LayerSpec) -> int:
    """Return the elements of the results of products that are not kept, under a policy that keeps some."""
    return sum(
        product.result_elements
        for product, is_dropped in zip(layer.products, _dropped(step, layer), strict=True)
        if is_dropped and not product.chunk_rows  # those of chunks are not among what a layer keeps
    )


def is_one_graph(step: StepSpec, layer: LayerSpec) -> bool:
    """Return whether a block runs as one graph, of which a repeated forward repeats all, before its backward begins."""
    return step.compile != "none" and not layer.dispatches


def _repeats_all(step: StepSpec, layer: LayerSpec) -> bool:
    """Return whether the forward is repeated to its end: by a graph, or by autograd functions that save what they need after their forward."""
    in_graph = is_one_graph(step, layer) and not repeats_in_graphs(step)
    return in_graph or step.splits_backward or bool(layer.chunk_tokens)


def _is_counted(product: Product) -> bool:
    return not (product.is_attention or product.is_batched or product.is_hidden or product.chunk_rows)


def _dropped(step: StepSpec, layer: LayerSpec) -> list[bool]:
    """Return of each product of a layer whether its result is not kept."""
    recompute = step.layout.recompute
    if recompute not in KEEPS_PRODUCTS:
        return [True] * len(layer.products)
    products, number, flags = kept_products(step, layer), 0, list[bool]()
    for product in layer.products:
        if _is_counted(product):
            flags.append(not products.keeps(number))
            number += 1
        else:
            hidden = product.is_hidden or bool(product.chunk_rows)
            flags.append(hidden or (product.is_batched and recompute == "alternate"))
    return flags
