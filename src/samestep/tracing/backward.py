"""What the backward of a traced forward needs: working memory of each layer, in addition to the tensors that its forward kept, and parts by tokens.

The forward must have run under `forward.ForwardTracer`. A storage of the backward is alive from the operation that
makes it to the last one that reads it; one that the forward kept is freed after the last operation of the backward
that reads it. The most is alive in the backward of a block with one hidden layer h = a(W x), y = V h:

    dy                       given                                  + y
    dh = V' dy               x needs dy too, by the residual sum    + h
    dg = dh a'(g), with g    h was freed after V's gradient         + h - h

Gradients of weights are left out: their size is that of the weights, however many samples there are. The graph shows
which storages are such gradients: those that flow along an edge that leads to a weight and nowhere else. An operation
belongs to the region of the forward that made its node: nodes are numbered in the order in which they are made.

A *part by tokens* is a module of a block that may be given some of the tokens at a time. It is called once in its block, is given one
tensor [samples, tokens, features] and returns one; the second factors of its products are weights, so that no attention is in it. The
proof of slices (`independence/token_slices.py`) shows whether it acts on each token by itself.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from samestep.building.autograd_graph import is_end, nodes_from, tensor_of
from samestep.building.loss_result import Loss, loss_result
from samestep.building.torch_seams import current_autograd_node
from samestep.errors import first_line
from samestep.models.layer_parts import Product, TokenPart, WorkingSet
from samestep.models.spec import LossNames, is_below
from samestep.state.snapshot import preserve_function
from samestep.tracing.arranged_layers import Layer
from samestep.tracing.costs import Costs
from samestep.tracing.custom_functions import Ran, follow_calls
from samestep.tracing.forward import ForwardTracer
from samestep.tracing.module_inputs import ModuleCall
from samestep.trees import map_tensors, operands, tensors_in


class _BackwardOperation(NamedTuple):
    node: int
    """Sequence number of the autograd node that runs the operation."""
    region: str
    read: frozenset[int]
    written: frozenset[int]


@dataclass(slots=True)
class Backward:
    """The operations of one backward in order, and the storages of weight gradients."""

    operations: list[_BackwardOperation] = field(default_factory=list)
    of_weights: set[int] = field(default_factory=set)
    made: set[int] = field(default_factory=set)
    """Storages that did not exist before."""


def watch_backward(module: nn.Module, outputs: Iterable[Tensor], watch: ForwardTracer) -> Backward:
    """Run the backward of a traced forward; return its operations, up to one that cannot run on meta."""
    backward = Backward()
    roots = [tensor for tensor in outputs if tensor.requires_grad and tensor.is_meta]
    weights = [param for param in module.parameters() if param.requires_grad]
    if not roots or not weights:
        return backward
    hooks = [
        node.register_hook(functools.partial(_record_weights, backward, watch, indices))
        for node, indices in _edges_to_weights(roots)
    ]
    earlier_storages = set(watch.storages.sizes)
    try:
        with follow_calls(_operation_recorder(backward, watch)):
            gradients = [torch.empty_like(root) for root in roots]
            torch.autograd.grad(roots, weights, gradients, allow_unused=True)
    except Exception:  # an operator without a meta kernel: nothing is known of the operations after it
        return backward
    finally:
        backward.made = watch.storages.sizes.keys() - earlier_storages
        for hook in hooks:
            hook.remove()
    return backward


def _operation_recorder(backward: Backward, watch: ForwardTracer) -> Ran:
    """Return a function that adds each operation of a backward to those found, in the region whose node runs it."""
    begins = [number for number, _ in watch.modules.begins]
    regions = ["", *(region for _, region in watch.modules.begins)]
    last = -1, regions[-1]

    def keys(values: Iterable[Any]) -> frozenset[int]:
        return frozenset(watch.key(tensor) for tensor in operands(*values) if tensor.is_meta)

    def ran(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outcome: Any) -> None:
        nonlocal last
        if (node := current_autograd_node()) is not None:
            number = node._sequence_nr()
            last = number, last[1] if is_end(node) else regions[bisect.bisect_right(begins, number)]
        backward.operations.append(_BackwardOperation(*last, keys((*args, *kwargs.values())), keys((outcome,))))

    return ran


def roots_of_loss(outputs: Any, sample: Any, loss: Loss | None, num_samples: int = 1) -> tuple[list[Tensor], LossNames]:
    """Return the loss, or if it cannot run on meta all outputs that take a gradient, and the names of what it returns.

    The outputs are those of `num_samples` copies of the sample.
    """
    roots = [leaf for leaf in tensors_in(outputs) if leaf.requires_grad]
    if loss is None or not roots:
        return roots, LossNames()
    try:
        with torch.enable_grad(), preserve_function(loss):
            batch = map_tensors(sample, lambda tensor: tensor.to("meta"))
            result = loss_result(loss(outputs, batch))
    except Exception:  # a loss that looks at values, or has no meta kernel
        return roots, _names_by_values(outputs, sample, loss, num_samples)
    return ([result.sums] if result.sums.requires_grad else roots), result.names


def _names_by_values(outputs: Any, sample: Any, loss: Loss, num_samples: int) -> LossNames:
    """Return the names of what a loss returns that cannot run on meta, from a run on drawn outputs of `num_samples` copies of the sample;
    none where it fails.
    """
    drawn = torch.Generator().manual_seed(0)

    def value(leaf: Tensor) -> Tensor:
        if leaf.is_floating_point():
            return torch.rand(leaf.shape, generator=drawn, dtype=leaf.dtype)
        return torch.zeros(leaf.shape, dtype=leaf.dtype)

    try:
        with torch.no_grad(), preserve_function(loss):
            copies = map_tensors(sample, lambda tensor: torch.cat([tensor] * num_samples) if tensor.dim() else tensor)
            return loss_result(loss(map_tensors(outputs, value), copies)).names
    except Exception as error:  # of the user's own code, which may raise anything
        return LossNames(failure=f"{type(error).__name__}: {first_line(error)}")


def idle_weights(module: nn.Module, outputs: Any, roots: Iterable[Tensor]) -> frozenset[int]:
    """Return the ids of the weights that none of the tensors from which a backward may begin depends on."""
    reached = _weights_of(roots) | {id(leaf) for leaf in tensors_in(outputs)}
    weights = {id(param) for param in module.parameters() if param.requires_grad}
    return frozenset(weights - reached) if reached & weights else frozenset()


def unlike_weights(roots: Sequence[Tensor]) -> frozenset[int]:
    """Return the ids of the weights that some of the tensors depend on, but not all: a loss of one leaves them out."""
    reached = [_weights_of([root]) for root in roots]
    return frozenset(set[int]().union(*reached) - reached[0].intersection(*reached)) if reached else frozenset()


def _weights_of(roots: Iterable[Tensor]) -> set[int]:
    return {id(tensor_of(node)) for node in nodes_from(root.grad_fn for root in roots) if is_end(node)}


def _edges_to_weights(roots: Iterable[Tensor]) -> Iterator[tuple[Node, list[int]]]:
    """Yield nodes with the indices of their results that are gradients of weights, or of other views of them."""
    seen = set(nodes_from(root.grad_fn for root in roots))
    views: dict[Node, int] = {}
    for node in sorted(seen, key=lambda node: (not is_end(node), node._sequence_nr())):  # later nodes come first
        followers = [after for after, _ in node.next_functions if after is not None]
        sizes = [math.prod(part.shape) for part in node._input_metadata]
        if is_end(node) or (len(followers) == 1 and sizes == [views.get(followers[0])]):
            views[node] = sum(sizes)
    for node in seen:
        indices = [index for index, (after, _) in enumerate(node.next_functions) if after in views]
        if indices and node not in views:
            yield node, indices


def _record_weights(
    backward: Backward, watch: ForwardTracer, indices: list[int], results: tuple[Tensor | None, ...], gradients: Any
) -> None:
    for index in indices:
        result = results[index]
        if result is not None:
            backward.of_weights.add(watch.key(result))


def working_sets(
    backward: Backward,
    layer_of: Mapping[str, int],
    watch: ForwardTracer,
    costs: Costs,
    without: int = 0,
    ignored: frozenset[int] = frozenset(),
    counts: Callable[[int], bool] | None = None,
    in_norms: bool = False,
) -> dict[int, WorkingSet]:
    """Return by layer the peak of its backward, without tensors that its forward kept and tensors of `without`
    elements.

    Args:
        backward: its operations.
        layer_of: the layer of each region.
        watch: the forward.
        costs: its costs.
        without: number of elements of tensors that are left out.
        ignored: kept tensors that are left out too: nothing is free when they are.
        counts: whether a node of autograd, by its sequence number, counts; without it all do.
        in_norms: whether the operations of norms alone count, where more may have been freed than is made.
    """
    is_of_norm = _nodes_of_norms(watch)
    sizes, divided = watch.storages.sizes, watch.cut.storages
    layer_of_kept = {key: layer_of[region] for key, region in costs.saved.items()}
    # A gradient is as large as the tensor it belongs to; where a whole tensor has that size too, it counts as whole.
    cut_sizes = {sizes[key] for key in divided} - {sizes[key] for key in layer_of_kept.keys() - divided}
    ending = _ending(backward)
    counted = backward.made - backward.of_weights
    alive: set[int] = set()
    most: dict[int, WorkingSet] = {}
    totals, freed = [0, 0, 0], {layer: [0, 0, 0] for layer in layer_of.values()}
    wide: set[int] = set()
    weights: dict[int, set[int]] = {layer: set() for layer in layer_of.values()}

    def add(to: list[int], key: int, sign: int, is_cut: bool, times_wide: int) -> None:
        size = sign * sizes[key] * (sizes[key] != without)
        to[:] = to[0] + size, to[1] + size * is_cut, to[2] + size * times_wide

    for at, operation in enumerate(backward.operations):
        layer = layer_of[operation.region]
        of_norm = is_of_norm(operation.node)
        weights[layer] |= operation.written & backward.of_weights
        for key in (operation.written & counted) - alive:
            alive.add(key)
            wide |= {key} if of_norm else set()
            add(totals, key, 1, sizes[key] in cut_sizes, of_norm)
        gone = freed[layer]
        elements, cut, more = totals[0] - gone[0], totals[1] - gone[1], totals[2] - gone[2]
        cut = cut if in_norms else min(max(cut, 0), elements)
        now = WorkingSet(elements, cut, more, sum(sizes[key] for key in weights[layer]))
        if (of_norm or not in_norms) and (counts is None or counts(operation.node)):
            most[layer] = max(most.get(layer, now), now)
        for key in ending.get(at, ()):
            if key in alive:
                add(totals, key, -1, sizes[key] in cut_sizes, key in wide)
            elif key in layer_of_kept and key not in ignored:
                copies = (key in costs.norm_savers) * (1 + (key in costs.savers))
                add(freed[layer_of_kept[key]], key, 1, key in divided, copies)
    return most


def _nodes_of_norms(watch: ForwardTracer) -> Callable[[int], bool]:
    """Return whether a node of autograd, by its sequence number, was created in a norm."""
    calls = sorted((call.first, call.last) for path in watch.facts.norms for call in watch.modules.of.get(path, ()))
    firsts = [first for first, _ in calls]

    def is_of_norm(node: int) -> bool:
        index = bisect.bisect_right(firsts, node) - 1
        return index >= 0 and node < calls[index][1]

    return is_of_norm


def _ending(backward: Backward) -> dict[int, list[int]]:
    """Return by operation the storages freed after it: a node holds its inputs and what it kept until it ends."""
    first, last, node_ends = (dict[int, int]() for _ in range(3))
    for at, operation in enumerate(backward.operations):
        node_ends[operation.node] = at
        for key in operation.read | operation.written:
            first.setdefault(key, at)
            last[key] = at
    ending: dict[int, list[int]] = {}
    for key, at in last.items():
        node = backward.operations[at].node
        is_passing = key in backward.made and backward.operations[first[key]].node == node
        ending.setdefault(at if is_passing else node_ends[node], []).append(key)
    return ending


_SHAPE = 3
"""Dimensions of what such a module is given: samples, tokens, features."""


def token_parts_of(
    module: nn.Module, layer: Layer, layer_of: Mapping[str, int], watch: ForwardTracer, costs: Costs, backward: Backward
) -> tuple[TokenPart, ...]:
    """Return the parts of a block, with the counts of all samples that were traced."""
    if not layer.is_block or watch.looks.varies:
        return ()
    candidates = [
        (path, call) for root in layer.modules for path, call in _candidates(module, root, layer, watch, costs)
    ]
    if not candidates:
        return ()
    index = layer_of[layer.regions[0]]
    inputs = {call.given[0][0] for _, call in candidates}
    saved = {key for key, region in costs.saved.items() if layer_of[region] == index}
    inside = {key for key in saved - inputs if any(is_below(costs.owners[key], path) for path, _ in candidates)}
    ranges = [range(call.first, call.last) for _, call in candidates]

    def peak(*, within: bool) -> int:
        """Return the most elements alive in the backward of the parts, or of the rest of the block."""
        ignored = frozenset[int]() if within else frozenset(inside)
        sets = working_sets(
            backward,
            layer_of,
            watch,
            costs,
            ignored=ignored,
            counts=lambda node: any(node in nodes for nodes in ranges) == within,
        )
        return sets.get(index, WorkingSet()).elements

    working, others = peak(within=True), peak(within=False)
    parts = (_part(module, path, call, layer, watch, costs, inside) for path, call in candidates)
    return tuple(
        replace(part, working_elements=working, other_working_elements=others) for part in parts if part.saved_elements
    )


def _candidates(
    module: nn.Module, root: str, layer: Layer, watch: ForwardTracer, costs: Costs
) -> Iterator[tuple[str, ModuleCall]]:
    """Yield the top-most modules below a block that may be such parts, with their calls."""
    chosen: list[str] = []
    coupled = {call.owner for _, call in watch.events.batch_norms} | {
        call.owner for _, call in watch.events.batch_values
    }
    for path, _ in module.get_submodule(root).named_modules(prefix=root):
        calls = watch.modules.of.get(path, ())
        if path == root or len(calls) != 1 or any(is_below(path, parent) for parent in chosen):
            continue
        call, products = calls[0], _products_of(path, layer, costs)
        shapes = [shape for _, shape in (*call.given, *call.returned)]
        is_by_rows = len(call.given) == len(call.returned) == 1 and {*map(len, shapes)} == {_SHAPE}
        if not is_by_rows or shapes[0][:2] != shapes[1][:2] or not products:
            continue
        is_plain = all(
            product.factors in ("weight", "frozen") and product.groups * product.taps * product.count == 1
            for product in products
        )
        if is_plain and not any(is_below(owner, path) for owner in coupled):
            chosen.append(path)
            yield path, call


def _products_of(path: str, layer: Layer, costs: Costs) -> list[Product]:
    return [
        product
        for region in layer.regions
        for product in costs.regions[region].products
        if is_below(product.owner, path)
    ]


def _part(
    module: nn.Module, path: str, call: ModuleCall, layer: Layer, watch: ForwardTracer, costs: Costs, inside: set[int]
) -> TokenPart:
    """Return a part without its working memory, in elements of all samples that were traced."""
    (input_key, shape), (returned, _) = call.given[0], call.returned[0]
    saved = {key for key in inside if is_below(costs.owners[key], path)}
    norms = saved & costs.norm_savers.keys()

    def elements(keys: set[int]) -> int:
        return sum(watch.storages.sizes[key] for key in keys)

    return TokenPart(
        owner=path,
        tokens=shape[0] * shape[1],
        boundary_elements=elements({input_key}) + elements({returned}),
        saved_elements=elements(saved),
        saved_norm_elements=elements(norms) + elements(norms & costs.savers.keys()),
        results=sum(product.rows * product.columns for product in _products_of(path, layer, costs)),
        weights=sum(param.numel() for param in module.get_submodule(path).parameters() if param.requires_grad),
    )
