"""Modules of blocks that may be given some of the tokens at a time, and what each keeps: found in a traced forward and its backward.

A candidate is called once in its block, is given one tensor [samples, tokens, features] and returns one; the second factors of its
products are weights, so that no attention is in it. Whether it acts on each token by itself is the affair of the proof of slices
(`independence/token_slices.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from samestep.models.layer_parts import Product, TokenPart, WorkingSet
from samestep.models.spec import is_below
from samestep.tracing.arranged_layers import Layer
from samestep.tracing.backward import Backward, working_sets
from samestep.tracing.costs import Costs
from samestep.tracing.forward import ForwardTracer
from samestep.tracing.module_inputs import ModuleCall

_SHAPE = 3
"""Dimensions of what such a module is given: samples, tokens, features."""


def token_parts_of(
    module: nn.Module, layer: Layer, layer_of: Mapping[str, int], watch: ForwardTracer, costs: Costs, backward: Backward
) -> tuple[TokenPart, ...]:
    """Return the parts of a block, with the counts of all samples that were traced; `of_one_sample` divides them."""
    if not layer.is_block or watch.looks.varies:
        return ()
    found = [(path, call) for root in layer.modules for path, call in _candidates(module, root, layer, watch, costs)]
    if not found:
        return ()
    index = layer_of[layer.regions[0]]
    inputs = {call.given[0][0] for _, call in found}
    saved = {key for key, region in costs.saved.items() if layer_of[region] == index}
    inside = {key for key in saved - inputs if any(is_below(costs.owners[key], path) for path, _ in found)}
    ranges = [range(call.first, call.last) for _, call in found]

    def peak(*, within: bool) -> int:
        """Return the most elements alive in the backward of the parts, or of the rest of the block."""
        ignored = frozenset[int]() if within else frozenset(inside)
        sets = working_sets(
            backward,
            layer_of,
            watch,
            costs,
            ignored=ignored,
            counts=lambda node: any(node in one for one in ranges) == within,
        )
        return sets.get(index, WorkingSet()).elements

    mine, others = peak(within=True), peak(within=False)
    parts = (_part(module, path, call, layer, watch, costs, inside) for path, call in found)
    return tuple(
        TokenPart(**sizes, working_elements=mine, other_working_elements=others)  # type: ignore[arg-type]
        for sizes in parts
        if sizes["saved_elements"]
    )


def _candidates(
    module: nn.Module, root: str, layer: Layer, watch: ForwardTracer, costs: Costs
) -> Iterator[tuple[str, ModuleCall]]:
    """Yield the top-most modules below a block that may be such parts, with their calls."""
    chosen: list[str] = []
    coupled = {one.owner for _, one in watch.events.batch_norms} | {one.owner for _, one in watch.events.batch_values}
    for path, _ in module.get_submodule(root).named_modules(prefix=root):
        calls = watch.modules.of.get(path, ())
        if path == root or len(calls) != 1 or any(is_below(path, one) for one in chosen):
            continue
        call, products = calls[0], _products_of(path, layer, costs)
        shapes = [shape for _, shape in (*call.given, *call.returned)]
        is_by_rows = len(call.given) == len(call.returned) == 1 and {*map(len, shapes)} == {_SHAPE}
        if not is_by_rows or shapes[0][:2] != shapes[1][:2] or not products:
            continue
        is_plain = all(
            one.factors in ("weight", "frozen") and one.groups * one.taps * one.count == 1 for one in products
        )
        if is_plain and not any(is_below(one, path) for one in coupled):
            chosen.append(path)
            yield path, call


def _products_of(path: str, layer: Layer, costs: Costs) -> list[Product]:
    return [one for region in layer.regions for one in costs.regions[region].products if is_below(one.owner, path)]


def _part(
    module: nn.Module, path: str, call: ModuleCall, layer: Layer, watch: ForwardTracer, costs: Costs, inside: set[int]
) -> dict[str, int | str]:
    """Return the fields of a part but its working memory, in elements of all samples that were traced."""
    (given, shape), (returned, _) = call.given[0], call.returned[0]
    kept = {key for key in inside if is_below(costs.owners[key], path)}
    norms = kept & costs.norm_savers.keys()

    def elements(keys: set[int]) -> int:
        return sum(watch.storages.sizes[key] for key in keys)

    return {
        "owner": path,
        "tokens": shape[0] * shape[1],
        "boundary_elements": elements({given}) + elements({returned}),
        "saved_elements": elements(kept),
        "saved_norm_elements": elements(norms) + elements(norms & costs.savers.keys()),
        "results": sum(one.rows * one.columns for one in _products_of(path, layer, costs)),
        "weights": sum(param.numel() for param in module.get_submodule(path).parameters() if param.requires_grad),
    }


def of_one_sample(part: TokenPart, num_samples: int) -> TokenPart:
    """Return a part with the counts of one of so many samples."""
    return part.sliced_by(num_samples) if num_samples > 1 else part
